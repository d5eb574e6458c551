"""What every tokenizer does, whatever file its pieces lie in: texts in, checked, and ids out.

A tokenizer says how a text is cut into pieces and what each piece is (`cut`, `piece`, ...); what
follows from that stands here once. Knows no file format.
"""

import abc
from collections.abc import Sequence

from kit.text.normalize import TextError


class PieceTokenizer(abc.ABC):
    """A vocabulary of pieces, and the START and STOP ids that frame every text."""

    start: int
    stop: int
    vocab_size: int  # ids, START, STOP and holes among them
    piece_count: int  # ids that its file has; START and STOP may lie behind them
    language: str = ""  # of the texts, where ids say which it is
    phonemes: str = ""  # the language, by espeak-ng's name, in whose phonemes it spells

    @property
    def opening(self) -> Sequence[int]:
        """Ids that every text begins with, after START: the mark of a language, say."""
        return ()

    @abc.abstractmethod
    def cut(self, text: str) -> list[int]:
        """Piece ids of `text` as it stands, without `opening`."""

    @abc.abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text that `ids` spell; marks of a language, START and STOP are no text."""

    @abc.abstractmethod
    def piece(self, number: int) -> str:
        """The piece with id `number`; "" for a hole."""

    @abc.abstractmethod
    def is_byte(self, number: int) -> bool:
        """Whether the piece is a bare byte of a character that has no piece."""

    @abc.abstractmethod
    def is_unknown(self, number: int) -> bool:
        """Whether the piece stands for whatever has no piece."""

    @abc.abstractmethod
    def is_control(self, number: int) -> bool:
        """Whether no letter of a text becomes the piece: a mark, or a hole."""

    @abc.abstractmethod
    def file_bytes(self) -> bytes:
        """The file that it was read from."""

    def encode(self, text: str) -> list[int]:
        """Ids of already normalised `text`, without START and STOP."""
        return self._opened(self.spelt(text))

    def spelt(self, text: str) -> str:
        """Normalised `text` as it is cut into pieces."""
        return text

    def pieces(self, text: str) -> list[str]:
        """The pieces that already normalised `text` is cut into."""
        return [self.piece(number) for number in self.cut(self.spelt(text))]

    def is_raw(self, number: int) -> bool:
        """Whether piece id `number` is a bare byte or the unknown piece: no letter it learned."""
        return self.is_byte(number) or self.is_unknown(number)

    def is_fixed(self, number: int) -> bool:
        """Whether the piece is there whatever the text: raw or a mark."""
        return self.is_raw(number) or self.is_control(number)

    def uncovered(self, text: str) -> list[str]:
        """The characters of `text` without a piece of their own: the voice never heard them."""
        chars = sorted(set(text) - {" "})
        return [c for c in chars if any(map(self.is_raw, self.cut(c)))]

    def encode_checked(self, text: str) -> list[int]:
        """`encode`, or TextError naming what cannot be spoken: nothing, or unknown letters."""
        if not any(c.isalnum() for c in text):
            raise TextError(f"There is nothing to say in {text[:80]!r}: type at least one word.")
        text = self.spelt(text)
        uncovered = self.uncovered(text)
        strange = [c for c in uncovered if c.isalnum()]
        if strange:
            at = min(map(text.index, strange))
            around = text[max(0, at - 40) : at + 40]
            raise TextError(
                f"The voice never heard {' '.join(strange)} (in {around!r}). Spell it with letters "
                "of the training text, or train the tokenizer on text that has them."
            )
        kept = "".join(c for c in text if c not in uncovered)
        return self._opened(" ".join(kept.split()))

    def _opened(self, spelt: str) -> list[int]:
        return [*self.opening, *self.cut(spelt)]
