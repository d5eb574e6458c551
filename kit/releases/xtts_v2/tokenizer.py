"""Text to the ids of a released XTTS: its vocab.json, read by Hugging Face's tokenizers.

A text is a language's tag, such as `[en]`, and its words with [SPACE] between. Texts come here as
`kit.text.normalize` leaves them. That is less than the release's own cleaning lets through: the
kit has no brackets, quotes and hyphens, which a voice does not say. On such a text the release's
cleaning changes nothing more, unless there are figures, signs or short forms in it that the kit's
file of the language left (or that it left because there is no such file): those the release reads
out, so they should be written in words.

A language that the release never had, Amharic for one, gets a tag of its own when the vocabulary
grows (grow_xtts.py), or is spoken under the tag of another. coqui-tts has no cleaning for a tag of
one's own, and refuses it: `teach_language` gives it the kit's.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from kit.base.errors import KitError, SpeechError
from kit.base.formatting import shorten
from kit.releases.xtts_v2.vocabulary import START, STOP, Vocabulary, load_vocabulary
from kit.text.normalize import normalize
from kit.text.tokenizer import BaseTokenizer

SPACE = "[SPACE]"
TAG = re.compile(r"\[([a-z]{2,3}(?:-[a-z]{2,4})?)\]")  # no other special piece is in lower case
# What the release spells in Latin letters, how, and the letters it does so for.
_HAN = "\u3400-\u9fff\uf900-\ufaff"
_LATINISED = {
    "zh-cn": ("pinyin with figures for the tones", re.compile(f"[{_HAN}]")),
    "ja": ("Hepburn's rōmaji", re.compile(f"[{_HAN}\u3040-\u30ff]")),
    "ko": ("romanised Hangul", re.compile("[\u1100-\u11ff\u3130-\u318f\uac00-\ud7af]")),
}
CHARACTER_LIMIT = 250  # of a text, as coqui-tts has it for languages that it does not know
# What would make other pieces of a text than those that the release has.
_PLAIN = {
    "type": "BPE",
    "dropout": None,
    "continuing_subword_prefix": "",
    "end_of_word_suffix": "",
    "byte_fallback": False,
    "ignore_merges": False,
}


class XTTSTokenizer(BaseTokenizer):
    """The vocabulary of an XTTS, and the language that texts are in.

    `tag` is the language whose tag texts begin with, where it is not `language` itself; `pt-br`
    and `pt` have one tag. The tag need not be there to cut a text, or to grow; `encode` needs it.
    Raises KitError for a file that is missing, damaged or of another kind, SpeechError where
    the package tokenizers is missing.
    """

    growth_module = "kit.releases.xtts_v2.grow"

    def __init__(self, path: Path, language: str, tag: str = ""):
        self.path = Path(path)
        self.language = language
        self.tag = tag_of(tag or language)
        self.vocabulary = load_vocabulary(self.path)
        self.model = _read(self.vocabulary, self.path)
        self.start = self.vocabulary.start
        self.stop = self.vocabulary.stop
        self.vocab_size = self.vocabulary.size
        self.piece_count = self.vocabulary.size
        self._require_spaces()
        self._unknown = self.vocabulary.ids[self.model.model.unk_token]
        self._pieces = {number: piece for piece, number in self.vocabulary.ids.items()}
        added = self.model.get_added_tokens_decoder()
        self._control = set(added) - {self._unknown}

    @property
    def prefix_ids(self) -> list[int]:
        """The id of the tag. Raises SpeechError where the vocabulary has none for the language."""
        tag = f"[{self.tag}]"
        if tag not in self.vocabulary.ids:
            others = ", ".join(self.tags()) or "none at all"
            raise SpeechError(
                f"{self.path} has no tag {tag}; it has {others}. Grow it with texts of your "
                "language, or name the tag of another language to speak under."
            )
        return self.model.encode(tag).ids

    def tags(self) -> list[str]:
        """The languages that the vocabulary has tags for."""
        return sorted(match[1] for match in map(TAG.fullmatch, self.vocabulary.ids) if match)

    def spell(self, text: str) -> str:
        """Normalised `text` as it is cut. Raises SpeechError for letters that it must not have.

        Chinese, Japanese and Korean are spelt in Latin letters by the release; the kit has no
        reading for them.
        """
        how, letters = _LATINISED.get(self.tag, ("", None))
        found = letters and letters.search(text)
        if found:
            raise SpeechError(
                f"XTTS reads `{self.tag}` in {how}, and {found[0]} is none of it: turn the texts "
                "into that first (coqui-tts does it with pypinyin, cutlet or ko-speech-tools)."
            )
        return text

    def tokenize(self, text: str) -> list[int]:
        return self.model.encode(text.replace(" ", SPACE)).ids

    def decode(self, ids: Sequence[int]) -> str:
        pieces = (self.piece(int(number)) for number in ids if int(number) != self._unknown)
        text = "".join(pieces).replace(SPACE, " ")
        return TAG.sub("", text).replace(START, "").replace(STOP, "")

    def _require_spaces(self) -> None:
        if len(self.model.encode(SPACE).ids) != 1:
            raise KitError(
                f"{self.path} has no piece {SPACE} among its `added_tokens`, so words would run "
                "into each other: take the vocab.json of the release."
            )

    def piece(self, number: int) -> str:
        return self._pieces.get(number, "")

    def is_byte(self, number: int) -> bool:
        return False

    def is_unknown(self, number: int) -> bool:
        return number == self._unknown

    def is_control(self, number: int) -> bool:
        return number in self._control or number not in self._pieces

    def file_bytes(self) -> bytes:
        return self.vocabulary.data


def tag_of(language: str) -> str:
    """The release's tag of a language: no region, except for Chinese. Raises SpeechError."""
    code = language.lower().replace("_", "-").partition("-")[0]
    if not re.fullmatch("[a-z]{2,3}", code):
        raise SpeechError(f"{language[:80]!r} is no language code: use one like `am` or `pt-br`.")
    return "zh-cn" if code == "zh" else code


def teach_language(
    coqui,
    language: str,
    clean: Callable[[str, str], str] = normalize,
    character_limit: int = CHARACTER_LIMIT,
) -> None:
    """Let coqui-tts's tokenizer `coqui` (an Xtts's `tokenizer`) take texts in `language`.

    For a tag that its cleaning does not know: `encode` would raise NotImplementedError, and
    splitting long texts a KeyError; `clean(text, language)` takes the place of its cleaning.
    Longer texts than `character_limit` it warns of and, asked to, splits. For `synthesize` the tag
    has to be among the `languages` of the model's configuration as well.
    """
    tag = tag_of(language)
    clean_known = coqui.preprocess_text

    def preprocess_text(txt: str, lang: str) -> str:
        if lang == tag:
            return clean(txt, language)
        return clean_known(txt, lang)

    coqui.preprocess_text = preprocess_text
    coqui.char_limits[tag] = character_limit


def require_plain_bpe(described: dict, path: Path) -> None:
    """Raise KitError where the tokenizer would not cut a text as a release's does."""
    model = described["model"]
    strange = [name for name, usual in _PLAIN.items() if (model.get(name) or usual) != usual]
    if strange:
        told = ", ".join(f"{name} {shorten(repr(model[name]), 40)}" for name in strange)
        raise KitError(
            f"{path} is of another kind than XTTS's ({told}): take the vocab.json of the release, "
            "or one that grew from it."
        )
    if model.get("unk_token") not in model["vocab"]:
        raise KitError(
            f"{path} has no piece for what it does not know (`unk_token` is "
            f"{shorten(repr(model.get('unk_token')), 40)}): take the vocab.json of the release."
        )
    if not isinstance(model.get("merges"), list):
        raise KitError(
            f"{path} has no `merges`: it was cut short, or written by something else. Copy "
            "vocab.json again from where the model was published."
        )
    for number, merge in enumerate(model["merges"]):
        left, right = merge_parts(merge, path)
        lacking = [piece for piece in (left, right, left + right) if piece not in model["vocab"]]
        if lacking:
            raise KitError(
                f"{path} is damaged: merge {number}, {shorten(left, 40)} and {shorten(right, 40)}, "
                f"needs {shorten(lacking[0], 40)}, which is no piece of it. Take vocabulary and "
                "merges from one file."
            )


def merge_parts(merge: object, path: Path) -> tuple[str, str]:
    """The two pieces of a merge: "a b" in older files, ["a", "b"] in newer ones."""
    parts = merge.split(" ") if isinstance(merge, str) else merge
    if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(p, str) for p in parts):
        raise KitError(
            f"{path} is damaged: {shorten(repr(merge), 60)} is no merge of two pieces. Copy "
            "vocab.json again from where the model was published."
        )
    return parts[0], parts[1]


def _read(vocabulary: Vocabulary, path: Path):
    """The file as a `tokenizers.Tokenizer`."""
    try:
        import tokenizers
    except ImportError as error:
        raise SpeechError(
            "The vocabulary of an XTTS needs a package: pip install tokenizers."
        ) from error
    described = json.loads(vocabulary.data)
    try:
        require_plain_bpe(described, path)
        return tokenizers.Tokenizer.from_str(vocabulary.data.decode("utf-8"))
    except KitError:
        raise
    except Exception as why:  # tokenizers has no class of its own for what it cannot read
        raise KitError(
            f"{path} is damaged ({shorten(why)}): copy vocab.json again from where the model was "
            "published."
        ) from why
