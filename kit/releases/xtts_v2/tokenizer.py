"""Vocabulary and tokenizer of a released XTTS-v2: vocab.json, read by Hugging Face's tokenizers.

The release's own text cleaning does not change what the kit's normalisation returns, except for
numbers, signs and abbreviations, which must be spelled out before. A language that the release does
not have gets its own tag when the vocabulary is extended (grow.py), or uses that of another.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from kit.base.errors import KitError, SpeechError
from kit.base.files import write_atomic
from kit.base.formatting import shorten
from kit.text.normalize import normalize
from kit.text.tokenizer import BaseTokenizer

START = "[START]"
STOP = "[STOP]"
SPACE = "[SPACE]"
TAG = re.compile(r"\[([a-z]{2,3}(?:-[a-z]{2,4})?)\]")  # other special tokens are in upper case
MAX_IDS = 2**24
CHARACTER_LIMIT = 250  # of a text, as coqui-tts sets it for unknown languages
# Languages that the release romanises: how, and which letters.
_HAN = "\u3400-\u9fff\uf900-\ufaff"
_ROMANISED = {
    "zh-cn": ("pinyin with tone numbers", re.compile(f"[{_HAN}]")),
    "ja": ("Hepburn rōmaji", re.compile(f"[{_HAN}\u3040-\u30ff]")),
    "ko": ("romanised Hangul", re.compile("[\u1100-\u11ff\u3130-\u318f\uac00-\ud7af]")),
}
# Other values would split a text into other tokens than the release does.
_PLAIN_BPE = {
    "type": "BPE",
    "dropout": None,
    "continuing_subword_prefix": "",
    "end_of_word_suffix": "",
    "byte_fallback": False,
    "ignore_merges": False,
}


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The bytes of a vocab.json, and the ids of its tokens.

    START is not always the last id, and some vocabularies have holes: ids without a token, whose
    rows of the embedding stay unused.
    """

    data: bytes
    ids: dict[str, int]  # of every token, special ones included

    @cached_property
    def size(self) -> int:
        return max(self.ids.values()) + 1

    @property
    def start(self) -> int:
        return self.ids[START]

    @property
    def stop(self) -> int:
        return self.ids[STOP]

    def save(self, path: Path) -> None:
        write_atomic(path, self.data)


def load_vocabulary(path: Path) -> Vocabulary:
    path = Path(path)
    if not path.is_file():
        raise KitError(
            f"There is no {path}: copy vocab.json there from where the model was published, or "
            "name the file it was trained with (`vocabulary`)."
        )
    data = path.read_bytes()
    try:
        return Vocabulary(data, read_ids(json.loads(data.decode("utf-8"))))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = f"it has no `{error.args[0]}`" if isinstance(error, KeyError) else shorten(error)
        raise KitError(
            f"{path} is not an XTTS vocabulary ({reason}): copy vocab.json again from where the "
            "model was published."
        ) from error


def read_ids(tokenizer: dict) -> dict[str, int]:
    """Return the id of every token of a tokenizers file. Raises ValueError, KeyError, TypeError.

    tokenizers gives the next free id to an added token that the model lacks, whatever id the file
    claims. Where the two differ, text would not match the embedding: such a file is an error.
    """
    ids = dict(tokenizer["model"]["vocab"])
    count = len(ids)
    highest_added = -1
    for entry in tokenizer.get("added_tokens") or []:
        token = entry["content"]
        claimed = entry["id"]
        assigned = ids.get(token, max(count, highest_added + 1))
        if claimed != assigned:
            raise ValueError(f"{token} claims id {claimed}, tokenizers would give it {assigned}")
        highest_added = max(highest_added, assigned)
        ids[token] = assigned
    owners = {}
    for token, number in ids.items():
        if type(number) is not int or not 0 <= number < MAX_IDS:
            raise ValueError(f"{shorten(token, 40)} has id {shorten(repr(number), 40)}")
        if number in owners:
            raise ValueError(f"{owners[number]} and {token} both have id {number}")
        owners[number] = token
    missing = [token for token in (START, STOP) if token not in ids]
    if missing:
        raise ValueError(f"it has no {' and no '.join(missing)}")
    return ids


class XTTSTokenizer(BaseTokenizer):
    """Text to ids: the tag of a language, such as `[en]`, and words with [SPACE] between.

    `tag` is the language whose tag is used, where it is not `language`; `pt-br` and `pt` share one.
    `tokenize` and growing do without the tag; `encode` needs it. Raises KitError for a file that is
    missing, damaged or of another kind, SpeechError if the package tokenizers is missing.
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
        if len(self.model.encode(SPACE).ids) != 1:
            raise KitError(
                f"{self.path} has no {SPACE} among its `added_tokens`, so words would run "
                "together: take the vocab.json of the release."
            )
        self._unknown = self.vocabulary.ids[self.model.model.unk_token]
        self._pieces = {number: piece for piece, number in self.vocabulary.ids.items()}
        self._control = set(self.model.get_added_tokens_decoder()) - {self._unknown}

    @property
    def prefix_ids(self) -> list[int]:
        """The id of the tag. Raises SpeechError if the vocabulary lacks it."""
        tag = f"[{self.tag}]"
        if tag not in self.vocabulary.ids:
            others = ", ".join(self.tags()) or "none"
            raise SpeechError(
                f"{self.path} has no tag {tag}; it has {others}. Grow the vocabulary with texts of "
                "your language, or choose the tag of another language."
            )
        return self.model.encode(tag).ids

    def tags(self) -> list[str]:
        return sorted(match[1] for match in map(TAG.fullmatch, self.vocabulary.ids) if match)

    def spell(self, text: str) -> str:
        """Return normalised `text`. Raises SpeechError for Chinese, Japanese and Korean letters.

        The release was trained on romanised text of these; the kit cannot romanise it.
        """
        if self.tag in _ROMANISED:
            system, letters = _ROMANISED[self.tag]
            letter = letters.search(text)
            if letter:
                raise SpeechError(
                    f"XTTS expects `{self.tag}` in {system}, got {letter[0]}: romanise the texts "
                    "first (coqui-tts uses pypinyin, cutlet or ko-speech-tools)."
                )
        return text

    def tokenize(self, text: str) -> list[int]:
        return self.model.encode(text.replace(" ", SPACE)).ids

    def decode(self, ids: Sequence[int]) -> str:
        pieces = (self.piece(int(number)) for number in ids if int(number) != self._unknown)
        text = "".join(pieces).replace(SPACE, " ")
        return TAG.sub("", text).replace(START, "").replace(STOP, "")

    def piece(self, number: int) -> str:
        return self._pieces.get(number, "")

    def kind(self, number: int) -> str:
        if number == self._unknown:
            return "unknown"
        return "control" if number in self._control or number not in self._pieces else ""

    def file_bytes(self) -> bytes:
        return self.vocabulary.data


def tag_of(language: str) -> str:
    """Return the release's tag of a language: no region, except for Chinese."""
    code = language.lower().replace("_", "-").partition("-")[0]
    if not re.fullmatch("[a-z]{2,3}", code):
        raise SpeechError(f"{language[:80]!r} is not a language code: use `am` or `pt-br`.")
    return "zh-cn" if code == "zh" else code


def teach_language(coqui, language: str) -> None:
    """Make coqui-tts's tokenizer `coqui` (an Xtts's `tokenizer`) accept texts in `language`.

    Without it, `encode` raises NotImplementedError for an unknown tag. `synthesize` also needs the
    tag in the `languages` of the model's configuration.
    """
    tag = tag_of(language)
    clean_known = coqui.preprocess_text

    def preprocess_text(txt: str, lang: str) -> str:
        return normalize(txt, language) if lang == tag else clean_known(txt, lang)

    coqui.preprocess_text = preprocess_text
    coqui.char_limits[tag] = CHARACTER_LIMIT


def require_plain_bpe(described: dict, path: Path) -> None:
    model = described["model"]
    others = [name for name, value in _PLAIN_BPE.items() if (model.get(name) or value) != value]
    if others:
        values = ", ".join(f"{name} {shorten(repr(model[name]), 40)}" for name in others)
        raise KitError(
            f"{path} is not a tokenizer of XTTS's kind ({values}): take the vocab.json of the "
            "release, or one that grew from it."
        )
    if model.get("unk_token") not in model["vocab"]:
        raise KitError(
            f"{path} has no token for unknown characters (`unk_token` is "
            f"{shorten(repr(model.get('unk_token')), 40)}): take the vocab.json of the release."
        )


def _read(vocabulary: Vocabulary, path: Path):
    try:
        import tokenizers
    except ImportError as error:
        raise SpeechError(
            "XTTS vocabularies need the package tokenizers: pip install tokenizers."
        ) from error
    described = json.loads(vocabulary.data)
    try:
        require_plain_bpe(described, path)
        return tokenizers.Tokenizer.from_str(vocabulary.data.decode("utf-8"))
    except KitError:
        raise
    except Exception as error:  # tokenizers has no exception class for files it cannot read
        raise KitError(
            f"{path} is damaged ({shorten(error)}): copy vocab.json again from where the model was "
            "published."
        ) from error
