"""Vocabulary and tokenizer of a released XTTS-v2: vocab.json, read by Hugging Face's tokenizers.

The release's own text cleaning does not change what the kit's normalisation returns, except for
numbers, signs and abbreviations, which must be spelled out before. A language that the release does
not have gets its own tag when the vocabulary is extended, or uses that of another.
"""

import copy
import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory

import tokenizers

from kit.base.errors import KitError, SpeechError
from kit.base.files import write_atomic
from kit.base.formatting import shorten
from kit.text.normalize import normalize
from kit.text.tokenizer import BaseTokenizer, spell_unknown
from kit.text.train_tokenizer import OFTEN

START = "[START]"
STOP = "[STOP]"
SPACE = "[SPACE]"
TAG = re.compile(r"\[([a-z]{2,3}(?:-[a-z]{2,4})?)\]")  # other special tokens are in upper case
# Languages that the release romanises: how, and which letters.
_HAN = "\u3400-\u9fff\uf900-\ufaff"
_ROMANISED = {
    "zh-cn": ("pinyin with tone numbers", re.compile(f"[{_HAN}]")),
    "ja": ("Hepburn rōmaji", re.compile(f"[{_HAN}\u3040-\u30ff]")),
    "ko": ("romanised Hangul", re.compile("[\u1100-\u11ff\u3130-\u318f\uac00-\ud7af]")),
}
PIECES = 2000  # users found about this number best, 5,000 worse
Pair = tuple[str, str]


class XTTSTokenizer(BaseTokenizer):
    """Text to ids: the tag of a language, such as `[en]`, and words with [SPACE] between.

    `pt-br` and `pt` share a tag. `tokenize` and growing do without the tag; `encode` needs it. The
    ids are those that tokenizers, and so coqui-tts, gives to the pieces of the file. START is not
    always the last one, and some vocabularies have holes: ids without a piece, whose rows of the
    embedding stay unused. Raises KitError for a file that is damaged or of another kind.
    """

    def __init__(self, path: Path, language: str):
        self.path = path
        self.language = language
        self.tag = tag_of(language)
        self.data = path.read_bytes()  # of vocab.json
        try:
            self.model = tokenizers.Tokenizer.from_str(self.data.decode("utf-8"))
        except Exception as error:  # tokenizers has no exception class for files it cannot read
            raise KitError(
                f"{path} is not an XTTS vocabulary ({shorten(error)}): copy vocab.json again from "
                "where the model was published."
            ) from error
        self.ids = self.model.get_vocab()  # of every piece, special ones included
        self._pieces = {number: piece for piece, number in self.ids.items()}
        unknown = getattr(self.model.model, "unk_token", None)
        faults = [f"no {piece}" for piece in (START, STOP) if piece not in self.ids]
        if self.model.encode(SPACE).tokens != [SPACE]:  # words would run together
            faults.append(f"no {SPACE} among its `added_tokens`")
        if unknown not in self.ids:  # letters that it lacks would be left out
            faults.append("no `unk_token` for unknown characters")
        if len(self._pieces) < len(self.ids):
            faults.append("two pieces with one id")
        if faults:
            raise KitError(
                f"{path} is not an XTTS vocabulary: it has {' and '.join(faults)}. Take the "
                "vocab.json of the release, or one that grew from it."
            )
        self.start = self.ids[START]
        self.stop = self.ids[STOP]
        self.vocab_size = max(self._pieces) + 1
        self.piece_count = self.vocab_size
        self._unknown = self.ids[unknown]
        self._control = set(self.model.get_added_tokens_decoder()) - {self._unknown}

    @property
    def prefix_ids(self) -> list[int]:
        """The id of the tag. Raises SpeechError if the vocabulary lacks it."""
        tag = f"[{self.tag}]"
        if tag not in self.ids:
            others = ", ".join(self.tags()) or "none"
            raise SpeechError(
                f"{self.path} has no tag {tag}; it has {others}. Grow the vocabulary with texts of "
                "your language, or choose the tag of another language."
            )
        return self.model.encode(tag).ids

    def tags(self) -> list[str]:
        return sorted(match[1] for match in map(TAG.fullmatch, self.ids) if match)

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
        text = "".join(self.piece(int(number)) for number in ids if int(number) != self._unknown)
        return TAG.sub("", text.replace(SPACE, " ")).replace(START, "").replace(STOP, "")

    def piece(self, number: int) -> str:
        return self._pieces.get(number, "")

    def kind(self, number: int) -> str:
        if number == self._unknown:
            return "unknown"
        return "control" if number in self._control or number not in self._pieces else ""

    def file_bytes(self) -> bytes:
        return self.data

    def grow(self, lines: list[str], path: Path) -> "XTTSTokenizer":
        """Write the vocabulary, extended by the tokens of `lines` (normalised), to `path`.

        New are the language tag, all characters that it lacks, and up to PIECES longer tokens, seen
        100 times. Raises SpeechError without text, or for letters that the release romanises.
        """
        lines = [self.spell(line) for line in lines if line.strip()]
        if not lines:
            raise SpeechError("There is no text to learn pieces from: every line was empty.")
        described = json.loads(self.data)
        # The id of a piece that is only among these depends on the vocabulary's size, which grows.
        for entry in described["added_tokens"]:
            entry["id"] = self.ids[entry["content"]]
            described["model"]["vocab"][entry["content"]] = entry["id"]
        tag = f"[{self.tag}]"
        if tag not in self.ids:
            _add_pieces(described, [tag])
            entry = copy.deepcopy(described["added_tokens"][0])  # how this file has its other marks
            entry["content"] = tag
            entry["id"] = described["model"]["vocab"][tag]
            described["added_tokens"].append(entry)
        _add_pieces(described, self.uncovered("".join(lines)))
        with TemporaryDirectory(prefix="pieces-") as folder:
            spelling_all = _saved(described, Path(folder) / "vocab.json", self.language)
            words = _words(spelling_all, lines)
        merges = learned_merges(words, PIECES, set(described["model"]["vocab"]))
        _add_pieces(described, ["".join(pair) for pair in merges])
        old_merges = described["model"]["merges"]
        as_lists = bool(old_merges) and isinstance(old_merges[0], list)
        old_merges += map(list, merges) if as_lists else map(" ".join, merges)
        grown = _saved(described, path, self.language)
        assert self.ids.items() <= grown.ids.items()
        return grown

    def describe_growth(self, grown: "XTTSTokenizer") -> str:
        new = [grown.piece(number) for number in range(self.vocab_size, grown.vocab_size)]
        tags = [piece for piece in new if TAG.fullmatch(piece)]
        letters = [piece for piece in new if len(piece) == 1]
        longer = len(new) - len(tags) - len(letters)
        line = f"{self.vocab_size} ids stay; new are {len(letters)} characters, {longer} longer "
        line += f"pieces and the tag {tags[0]}." if tags else "pieces."
        if longer < PIECES:
            line += (
                f" There is room for {PIECES} longer ones, but further ones would occur fewer than "
                f"{OFTEN} times in this text, too few to learn how they sound."
            )
        return line

    def spellings(self, grown: "XTTSTokenizer") -> dict[int, list[int]]:
        """For each new id of `grown`: the ids in which this tokenizer spells its piece.

        A letter that it lacks is spelt by its name in Unicode (ETHIOPIC SYLLABLE BA), a tag by all
        tags that it has.
        """
        new = range(self.vocab_size, grown.vocab_size)
        return {number: _spelling(self, grown.piece(number)) for number in new}


def tag_of(language: str) -> str:
    """Return the release's tag of a language: no region, except for Chinese."""
    code = language.lower().replace("_", "-").partition("-")[0]
    if not re.fullmatch("[a-z]{2,3}", code):
        raise SpeechError(f"{language[:80]!r} is not a language code: use `am` or `pt-br`.")
    return "zh-cn" if code == "zh" else code


def teach_language(coqui, language: str, respell: bool = True) -> None:
    """Make coqui-tts's tokenizer `coqui` (an Xtts's `tokenizer`) accept texts in `language`.

    Without it, `encode` raises NotImplementedError for an unknown tag. `synthesize` also needs the
    tag in the `languages` of the model's configuration.
    """
    tag = tag_of(language)
    clean_known = coqui.preprocess_text

    def preprocess_text(txt: str, lang: str) -> str:
        return normalize(txt, language, respell) if lang == tag else clean_known(txt, lang)

    coqui.preprocess_text = preprocess_text
    coqui.char_limits[tag] = 250  # of a text, as coqui-tts sets it for unknown languages


# --- growing a vocabulary -------------------------------------------------------------------------
#
# Byte-pair encoding is continued (Sennrich et al. 2016, arXiv:1508.07909): new text is tokenized
# with the old vocabulary, and the most frequent pair of neighbours is merged, repeatedly. New
# merges follow the old ones, so the old ones are still applied first; new ids follow the highest
# old one, so embedding rows, gaps, START and STOP keep their ids.


def _spelling(base: XTTSTokenizer, piece: str) -> list[int]:
    if TAG.fullmatch(piece):
        tags = [base.ids[f"[{tag}]"] for tag in base.tags()]
        return tags or [base.start]
    unknown = base.uncovered(piece)
    return base.tokenize("".join(spell_unknown(base, c) if c in unknown else c for c in piece))


def learned_merges(words: Counter, max_merges: int, known: set[str]) -> list[Pair]:
    """Return the next merges for `words` {pieces of a word: times}, each of a pair seen 100 times.

    No merge makes a piece that is in `known`. Ties are broken by the pieces.
    """
    known = set(known)
    spelt = [list(word) for word in words]
    times = list(words.values())
    pairs = Counter()
    words_with = defaultdict(set)  # of a pair: the numbers of the words that have it, or had it
    for number, word in enumerate(spelt):
        for pair in zip(word, word[1:]):
            pairs[pair] += times[number]
            words_with[pair].add(number)
    frequent = {pair: numbers for pair, numbers in words_with.items() if pairs[pair] >= OFTEN}
    merges = []
    while frequent and len(merges) < max_merges:
        best, count = max(((pair, pairs[pair]) for pair in frequent), key=itemgetter(1, 0))
        if count < OFTEN:
            break
        numbers = frequent.pop(best)
        new_piece = "".join(best)
        if new_piece in known:  # other merges make it already
            continue
        known.add(new_piece)
        merges.append(best)
        words_with = defaultdict(set)
        for number in numbers:
            before = spelt[number]
            spelt[number] = _merged(before, best)
            for pair in zip(before, before[1:]):
                pairs[pair] -= times[number]
            for pair in zip(spelt[number], spelt[number][1:]):
                pairs[pair] += times[number]
                if new_piece in pair:  # only such a pair can have become frequent
                    words_with[pair].add(number)
        frequent.update(
            {pair: numbers for pair, numbers in words_with.items() if pairs[pair] >= OFTEN}
        )
    return merges


def _merged(word: list[str], pair: Pair) -> list[str]:
    pieces = []
    for piece in word:
        if pieces and (pieces[-1], piece) == pair:
            pieces[-1] += piece
        else:
            pieces.append(piece)
    return pieces


def _words(tokenizer: XTTSTokenizer, lines: list[str]) -> Counter:
    """How often each word occurs, by its pieces; no merge reaches across words."""
    split = tokenizer.model.pre_tokenizer
    texts = Counter(word for line in lines for word in line.split())
    words = Counter()
    for text, count in texts.items():
        parts = [part for part, _ in split.pre_tokenize_str(text)] if split else [text]
        for part in parts:
            words[tuple(map(tokenizer.piece, tokenizer.tokenize(part)))] += count
    return words


def _add_pieces(described: dict, pieces: list[str]) -> None:
    vocabulary = described["model"]["vocab"]
    for number, piece in enumerate(pieces, max(vocabulary.values()) + 1):
        vocabulary[piece] = number


def _saved(described: dict, path: Path, language: str) -> XTTSTokenizer:
    write_atomic(path, json.dumps(described, ensure_ascii=False, indent=2))
    return XTTSTokenizer(path, language)
