"""The speech recogniser interface: waveform -> characters and their times, and error rates.

Alignment, segmentation, evaluation and the training gate use a recogniser through
`SpeechRecognizer` alone: the built-in CTC model (ctc_recognizer.py) or Whisper.

Shapes: L samples, S output frames, A alphabet + blank, N characters.
"""

import pkgutil
from abc import abstractmethod
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from kit.base.errors import KitError
from kit.base.tensor_file import load_module
from kit.text.normalize import letters


class RecognizerOutput(NamedTuple):
    log_probs: Tensor  # (S, A) of each character; column 0 is the CTC blank
    loudness: Tensor  # (S,) in nats, up to a constant: lowest in pauses


class SpeechRecognizer(Protocol):
    alphabet: str  # letters and the space, each once
    input_sample_rate: int  # Hz; waveforms of another rate are resampled
    frame_s: float  # seconds per output frame

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a string that changes with anything its output depends on."""

    @abstractmethod
    def recognize(self, waves: list[Tensor], sample_rate: int) -> list[RecognizerOutput]:
        """Return the frame-by-frame output for each clip (L,), on the CPU."""

    @abstractmethod
    def transcribe_waves(self, waves: list[Tensor], sample_rate: int) -> list[str]:
        """Return what is said in each clip (L,), in characters of the alphabet; "" for silence."""

    def encode(self, text: str) -> Tensor:
        return character_ids(self.alphabet, text)


def load_recognizer(path: Path) -> SpeechRecognizer:
    """Load the recogniser saved at `path`. Raises KitError when it is missing or damaged."""
    return load_module(path, _from_header, KitError, "run notebook 01_data_prep.")


def _from_header(header: dict) -> nn.Module:
    make = "kit.audio.ctc_recognizer:recognizer_from_header"
    if "whisper" in header:
        make = "kit.releases.whisper:whisper_from_header"
    return pkgutil.resolve_name(make)(header)


def character_ids(alphabet: str, text: str) -> Tensor:
    """Return the ids (N,) of the characters of `text`, from 1; others are dropped."""
    ids = [alphabet.find(char) + 1 for char in letters(text)]
    return torch.tensor([i for i in ids if i], dtype=torch.long)


def transcripts(alphabet: str, log_probs: list[Tensor]) -> list[str]:
    """Decode each row (S, A) greedily, by the rules of CTC."""
    best = [row.argmax(-1).unique_consecutive().tolist() for row in log_probs]
    return ["".join(alphabet[i - 1] for i in row if i) for row in best]


def alphabet_of(texts: list[str]) -> str:
    """Return every character of `texts` once, sorted."""
    return "".join(sorted(set("".join(letters(t) for t in texts))))


def edit_distance(a: str, b: str) -> int:
    """Return the Levenshtein distance, computed row by row."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        left, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            left, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, left + (x != y))
    return row[-1]


def cer(transcripts: list[str], references: list[str]) -> float:
    """Return the character error rate over all pairs: edits per reference character."""
    references = [letters(text) for text in references]
    edits = sum(edit_distance(text, wanted) for text, wanted in zip(transcripts, references))
    return edits / sum(map(len, references))
