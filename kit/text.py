"""Text on its way to the tokenizer: Unicode, Amharic spelling, numbers as words.

Amharic writes one sound with several letters (ሀ ሐ ኀ; ሰ ሠ; አ ዐ; ጸ ፀ), has punctuation of its
own, and its numerals and figures must be read as words. A voice learns faster when one sound has
one spelling. Rules after the Amharic orthography notes of the Ethiopian Languages Academy as
summarised by Yacob (2003) and the W3C Ethiopic layout requirements. Knows nothing of audio.
"""

import io
import random
import re
import unicodedata
from pathlib import Path

import sentencepiece as spm

from kit.config import write_atomic

# Each row of seven or more vowel orders starts at these letters: variant -> the one kept.
_HOMOPHONE_ROWS = {"ሐ": "ሀ", "ኀ": "ሀ", "ሠ": "ሰ", "ዐ": "አ", "ፀ": "ጸ"}
_HOMOPHONES = {ord(v) + i: ord(k) + i for v, k in _HOMOPHONE_ROWS.items() for i in range(7)}
# First and fourth order of the throat letters are said alike: ሃ = ሀ, ኣ = አ (and ኻ = ሀ).
_HOMOPHONES |= {ord("ሃ"): ord("ሀ"), ord("ሓ"): ord("ሀ"), ord("ኃ"): ord("ሀ"), ord("ኻ"): ord("ሀ")}
_HOMOPHONES |= {ord("ኣ"): ord("አ"), ord("ዓ"): ord("አ")}
_PUNCTUATION = str.maketrans(
    {"፡": " ", "።": ".", "፣": ",", "፥": ",", "፤": ";", "፦": ":", "፧": "?", "፨": "."}
    | dict.fromkeys("‘’“”«»\"'()[]{}…—–-_/\\", " ")
)
_ONES = "ዜሮ አንድ ሁለት ሶስት አራት አምስት ስድስት ሰባት ስምንት ዘጠኝ".split()
_TENS = "_ አስር ሀያ ሰላሳ አርባ ሀምሳ ስልሳ ሰባ ሰማንያ ዘጠና".split()
_SCALES = ((10**9, "ቢሊዮን"), (10**6, "ሚሊዮን"), (1000, "ሺህ"), (100, "መቶ"))
_ETHIOPIC_DIGITS = {chr(0x1369 + i): v for i, v in enumerate([*range(1, 10), *range(10, 91, 10)])}


class TextError(ValueError):
    """Text that cannot be spoken by this tokenizer; the message says which characters and why."""


def number_to_words(value: int) -> str:
    """A whole number below a trillion in Amharic words: 1234 -> አንድ ሺህ ሁለት መቶ ሰላሳ አራት."""
    if value < 10:
        return _ONES[value]
    if value < 100:
        tens, ones = divmod(value, 10)
        name = "አስራ" if tens == 1 and ones else _TENS[tens]
        return f"{name} {_ONES[ones]}" if ones else name
    for size, name in _SCALES:
        if value >= size:
            count, rest = divmod(value, size)
            words = f"{number_to_words(count)} {name}"
            return f"{words} {number_to_words(rest)}" if rest else words
    raise AssertionError(value)


def ethiopic_numeral(text: str) -> int:
    """The value of an Ethiopic numeral: ፳፻፲፯ -> 2017. ፻ multiplies by 100, ፼ by 10 000."""
    total = hundreds = group = 0
    for char in text:
        if char == "፻":
            hundreds, group = hundreds + (group or 1) * 100, 0
        elif char == "፼":
            total, hundreds, group = (total + hundreds + group or 1) * 10_000, 0, 0
        else:
            group += _ETHIOPIC_DIGITS[char]
    return total + hundreds + group


def _say_number(match: re.Match) -> str:
    digits = match.group().replace(",", "")
    if len(digits) > 12 or (len(digits) > 1 and digits[0] == "0"):  # a phone number, digit by digit
        return f" {' '.join(_ONES[int(d)] for d in digits)} "
    return f" {number_to_words(int(digits))} "


def normalize(text: str, language: str = "am") -> str:
    """`text` as the tokenizer sees it: NFC, one spelling per sound, words for figures, one space.

    Other languages than "am" keep their letters and figures, lower-cased.
    """
    text = unicodedata.normalize("NFC", text)
    if language != "am":
        return " ".join(text.translate(_PUNCTUATION).lower().split())
    text = re.sub("[፩-፼]+", lambda m: f" {number_to_words(ethiopic_numeral(m.group()))} ", text)
    text = re.sub(r"\d{1,3}(?:,\d{3})+|\d+", _say_number, text)
    return " ".join(text.translate(_PUNCTUATION).translate(_HOMOPHONES).split())


def letters(text: str) -> str:
    """`text` without punctuation, single spaces: what a character error rate compares."""
    kept = "".join(c if c.isalnum() or unicodedata.category(c)[0] == "M" else " " for c in text)
    return " ".join(kept.split())


def train_tokenizer(lines, path: Path, vocab_size: int, seed: int = 0) -> Path:
    """Train a SentencePiece BPE on an iterable of normalised lines and save it at `path`.

    Byte fallback covers what was never seen; `vocab_size` is an upper bound, reached only when
    the text has that many pieces. Raises TextError when there is no text, or `vocab_size` has no
    room for its letters.
    """
    lines = [line for line in lines if line]
    if not lines:
        raise TextError("There is no text to train a tokenizer on: every line was empty.")
    characters = len(set("".join(lines)) - {" "})
    needed = characters + 260  # 256 bytes, three control pieces, and the mark of a word's start
    if vocab_size < needed:
        raise TextError(
            f"vocab_size = {vocab_size} is too small: this text has {characters} different "
            f"characters, which with bytes and marks makes at least {needed}."
        )
    random.Random(seed).shuffle(lines)
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",  # `normalize` has the last word on spelling
        train_extremely_large_corpus=len(lines) > 1_000_000,
        num_threads=1,
        minloglevel=2,
    )
    write_atomic(path, model.getvalue())
    return path


class Tokenizer:
    """A trained SentencePiece model plus the START and STOP ids that frame every text.

    `vocab_size` counts both. Raises TextError when the file is missing or damaged.
    """

    def __init__(self, path: Path):
        if not Path(path).is_file():
            raise TextError(f"There is no tokenizer at {path}: run notebook 01_data_prep first.")
        try:
            self.model = spm.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise TextError(f"{path} is damaged: delete it and run 01_data_prep again.") from error
        self.start, self.stop = self.model.vocab_size(), self.model.vocab_size() + 1
        self.vocab_size = self.model.vocab_size() + 2

    def encode(self, text: str) -> list[int]:
        """Piece ids of already normalised `text`, without START and STOP."""
        return self.model.encode(text)

    def decode(self, ids) -> str:
        return self.model.decode([int(i) for i in ids])

    def uncovered(self, text: str) -> list[str]:
        """The characters of `text` that exist only as raw bytes: the voice never heard them."""
        is_byte = self.model.is_byte
        chars = sorted(set(text) - {" "})
        return [c for c in chars if any(is_byte(i) for i in self.model.encode(c))]

    def encode_checked(self, text: str) -> list[int]:
        """`encode`, or TextError naming what cannot be spoken: nothing, or unknown letters."""
        if not any(c.isalnum() for c in text):
            raise TextError(f"There is nothing to say in {text!r}: type at least one word.")
        uncovered = self.uncovered(text)
        strange = [c for c in uncovered if c.isalnum()]
        if strange:
            raise TextError(
                f"The voice never heard {' '.join(strange)} (in {text!r}). Spell it with letters "
                "of the training text, or train the tokenizer on text that has them."
            )
        kept = "".join(c for c in text if c not in uncovered)
        return self.encode(" ".join(kept.split()))


def tokenizer_report(tokenizer: Tokenizer, texts: list[str]) -> dict:
    """Fitness on held-out `texts`: pieces per word, characters per piece, bytes, round trip."""
    ids = [tokenizer.encode(t) for t in texts]
    pieces = sum(map(len, ids))
    return {
        "vocab_size": tokenizer.vocab_size,
        "characters_per_token": sum(map(len, texts)) / pieces,
        "tokens_per_word": pieces / sum(len(t.split()) for t in texts),
        "byte_rate": sum(tokenizer.model.is_byte(i) for row in ids for i in row) / pieces,
        "round_trip": sum(tokenizer.decode(i) == t for i, t in zip(ids, texts)) / len(texts),
    }
