"""What a recogniser of speech is: whoever aligns, cuts, judges or gates knows one by this alone.

The kit's own is trained on the recordings (recognizer.py); another one is a file of its own, as
whisper.py, and an entry in recognizer_kinds.py.

Shapes: L samples, S output frames, A alphabet + blank, N characters.
"""

from abc import abstractmethod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kit.text.normalize import letters


class RecognizerError(ValueError):
    """A recogniser that is missing, damaged or cannot be used here; the message says what to do."""


class Heard(NamedTuple):
    """What was heard in one clip, frame by frame."""

    log_probs: Tensor  # (S, A), of each character; column 0 is the blank of CTC
    loudness: Tensor  # (S,) in nats, whatever zero is: lowest in pauses


class SpeechRecognizer(Protocol):
    """Sound -> characters of one `alphabet`, and when they were said."""

    alphabet: str  # of letters and the space, each once
    heard_rate: int  # Hz at which it hears: waveforms of another rate are resampled for it
    frame_s: float  # seconds of sound in one output frame

    @abstractmethod
    def fingerprint(self) -> str:
        """Changes when anything does that it hears by."""

    @abstractmethod
    def hear(self, waves: list[Tensor], sample_rate: int) -> list[Heard]:
        """Each clip (L,) of `sample_rate` Hz, frame by frame, on the CPU."""

    @abstractmethod
    def write_down(self, waves: list[Tensor], sample_rate: int) -> list[str]:
        """What is said in each clip (L,), in characters of the alphabet; empty is silence."""

    def encode(self, text: str) -> Tensor:
        """Character ids (N,) of `text`, from 1, those outside the alphabet left out."""
        return character_ids(self.alphabet, text)


def character_ids(alphabet: str, text: str) -> Tensor:
    """Ids (N,) of the characters of `text`, from 1, those outside the alphabet left out."""
    ids = [alphabet.find(char) + 1 for char in letters(text)]
    return torch.tensor([i for i in ids if i], dtype=torch.long)


def transcripts(alphabet: str, log_probs: list[Tensor]) -> list[str]:
    """The likeliest characters of each row (S, A), as CTC reads them."""
    best = [row.argmax(-1).unique_consecutive().tolist() for row in log_probs]
    return ["".join(alphabet[i - 1] for i in row if i) for row in best]


def alphabet_of(texts: list[str]) -> str:
    """Every character of `texts`, once, in order."""
    return "".join(sorted(set("".join(letters(t) for t in texts))))
