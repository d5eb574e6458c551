"""Text to token ids and back: what all tokenizers share, and the SentencePiece one."""

import abc
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import sentencepiece as spm

from kit.base import extras
from kit.base.errors import SpeechError
from kit.base.files import file_kind

# Control pieces of a grown vocabulary, where START and STOP have ids between the others.
START = "<text>"
STOP = "</text>"
INDEXTTS2 = "<indextts2>"  # a control piece that marks the vocabulary of an IndexTTS2
# Appended to a model's file, a NormalizerSpec (field 3 of sentencepiece_model.proto): add no mark
# before the first word (its field 3), and remove no spaces (4).
WITHIN_WORDS = b"\x1a\x04\x18\x00\x20\x00"
PHONEMES = re.compile(r"<phonemes:(.+)>")  # a control piece that names the language


class BaseTokenizer(abc.ABC):
    """A vocabulary of pieces, and the START and STOP ids that frame every text."""

    start: int
    stop: int
    vocab_size: int  # ids, including START, STOP and unused ones
    piece_count: int  # ids in its file; START and STOP may come after them
    language: str = ""  # of the texts, where ids depend on it
    phonemes: str = ""  # the espeak-ng language in whose phonemes it spells; "" for letters
    replaceable: bool = False  # whether `replaced_by` puts another vocabulary in its place

    @property
    def prefix_ids(self) -> Sequence[int]:
        """Ids that every text begins with, after START, such as the tag of a language."""
        return ()

    @abc.abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Piece ids of spelt `text`, without `prefix_ids`."""

    @abc.abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without language tags, START and STOP."""

    @abc.abstractmethod
    def piece(self, number: int) -> str:
        """The piece with id `number`; "" for an unused id."""

    @abc.abstractmethod
    def kind(self, number: int) -> str:
        """Return "byte", "unknown", "control" (a tag, or an unused id) or ""."""

    @abc.abstractmethod
    def file_bytes(self) -> bytes:
        """The file that it was read from."""

    # One that is no SentencePiece model also has `grow(lines, path)`, the tokenizer with the pieces
    # that `lines` can teach, `describe_growth(grown)` and `spellings(grown)` (`base_spellings`).

    def encode(self, text: str) -> list[int]:
        """Ids of normalised `text`, without START and STOP."""
        return [*self.prefix_ids, *self.tokenize(self.spell(text))]

    def spell(self, text: str) -> str:
        """Normalised `text` as it is tokenized: as it is, or in phonemes."""
        return text

    def pieces(self, text: str) -> list[str]:
        """The pieces of normalised `text`."""
        return [self.piece(number) for number in self.tokenize(self.spell(text))]

    def uncovered(self, text: str) -> list[str]:
        """The characters of `text` without a piece of their own."""
        chars = sorted(set(text) - {" "})
        raw = ("byte", "unknown")
        return [c for c in chars if any(self.kind(i) in raw for i in self.tokenize(c))]

    def encode_checked(self, text: str) -> list[int]:
        """`encode` without unknown punctuation; SpeechError for unknown letters or no word."""
        if not any(c.isalnum() for c in text):
            raise SpeechError(f"There is nothing to say in {text[:80]!r}: type at least one word.")
        text = self.spell(text)
        uncovered = self.uncovered(text)
        unknown = [c for c in uncovered if is_spoken(c)]
        if unknown:
            index = min(map(text.index, unknown))
            context = text[max(0, index - 40) : index + 40]
            raise SpeechError(
                f"The training text had no {' '.join(unknown)} (in {context!r}). Use letters of "
                "the training text, or train the tokenizer on text that has them."
            )
        known = "".join(c for c in text if c not in uncovered)
        return [*self.prefix_ids, *self.tokenize(" ".join(known.split()))]


def is_spoken(char: str) -> bool:
    """Whether a word without `char` is another word: of a letter, a figure or a vowel sign.

    It is not of accents, or of the vowel points of Arabic and Hebrew, which many texts leave out.
    """
    # Signs of Indic scripts have combining classes below 10, and so have selectors of an emoji.
    is_sign = unicodedata.category(char) in ("Mc", "Mn") and unicodedata.combining(char) < 10
    is_selector = "VARIATION SELECTOR" in unicodedata.name(char, "")
    return char.isalnum() or (is_sign and not is_selector)


class Tokenizer(BaseTokenizer):
    """A SentencePiece model. Raises SpeechError when the file is missing or not such a model.

    START and STOP come after its pieces, unless it was grown: then they are control pieces.
    """

    def __init__(self, path: Path):
        path = Path(path)
        if not path.is_file():
            raise SpeechError(f"There is no tokenizer at {path}: run notebook 01_data_prep first.")
        try:
            self.model = spm.SentencePieceProcessor(model_file=str(path))
            size = self.model.vocab_size()
            pieces = [self.model.id_to_piece(i) for i in range(size)]
        except (RuntimeError, OSError, UnicodeDecodeError) as error:
            raise SpeechError(
                f"{path} is damaged, or not a SentencePiece model "
                f"({file_kind(path) or 'of an unknown kind'}): delete it and run 01_data_prep "
                "again, or choose another file."
            ) from error
        control = {piece: i for i, piece in enumerate(pieces) if self.model.is_control(i)}
        is_grown = START in control and STOP in control
        self.start = control[START] if is_grown else size
        self.stop = control[STOP] if is_grown else size + 1
        self.vocab_size = size if is_grown else size + 2
        self.piece_count = size
        self.is_indextts2 = INDEXTTS2 in control
        matches = [PHONEMES.fullmatch(piece) for piece in control]
        self.phonemes = next((match[1] for match in matches if match), "")

    def respell(self, piece: str) -> str:
        """The piece of a grown tokenizer in letters that this one may have."""
        return piece

    def tokenize(self, text: str) -> list[int]:
        return self.model.encode(text)

    def spell(self, text: str) -> str:
        if not self.phonemes:
            return text
        from kit.text.espeak import phonemize  # only voices of phonemes need espeak-ng

        return phonemize([text], self.phonemes)[0]

    def decode(self, ids: Sequence[int]) -> str:
        return self.model.decode([int(i) for i in ids])

    def piece(self, number: int) -> str:
        return self.model.id_to_piece(number)

    def kind(self, number: int) -> str:
        model = self.model
        kinds = {"byte": model.is_byte, "unknown": model.is_unknown, "control": model.is_control}
        return next((kind for kind, is_it in kinds.items() if is_it(number)), "")

    def file_bytes(self) -> bytes:
        return self.model.serialized_model_proto()


def load_tokenizer(path: Path, language: str) -> BaseTokenizer:
    """The tokenizer at `path`: SentencePiece (IndexTTS2's is marked), or (JSON) that of an XTTS."""
    path = Path(path)
    if path.is_file() and file_kind(path) == "json":
        return extras.load("TOKENIZERS", "json")(path, language)
    tokenizer = Tokenizer(path)
    if tokenizer.is_indextts2:
        return extras.load("TOKENIZERS", "indextts2")(path, language)
    return tokenizer


def spell_unknown(base: BaseTokenizer, char: str) -> str:
    """Spell a letter that `base` lacks without its accent, or by its name; else return it."""
    plain = unicodedata.normalize("NFD", char)[0]
    name = unicodedata.name(char, "").partition(" WITH ")[0]
    named = name.split()[-1].lower() if "LETTER" in name or "SYLLABLE" in name else ""
    for spelling in (plain, named, named.upper()):
        if spelling and not base.uncovered(spelling):
            return spelling
    return char


def base_spellings(base: BaseTokenizer, grown: BaseTokenizer) -> dict[int, list[int]]:
    """For each id whose piece `base` does not have there: the ids in which it spells that piece."""
    if not isinstance(base, Tokenizer):
        return base.spellings(grown)
    proto = base.model.serialized_model_proto() + WITHIN_WORDS
    speller = spm.SentencePieceProcessor(model_proto=proto)
    known = {base.piece(number): number for number in range(base.piece_count)}
    spellings = {}
    for number in range(grown.vocab_size):
        piece = grown.model.id_to_piece(number)
        if known.get(piece) == number or (
            number < base.vocab_size and grown.model.is_control(number)
        ):
            continue
        ids = [known[piece]] if piece in known else speller.encode(base.respell(piece))
        spellings[number] = ids
    return spellings
