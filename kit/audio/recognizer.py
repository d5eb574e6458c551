"""Speech recognition: the interface, the built-in CTC network (Graves et al. 2006), error rates.

The built-in one is trained within minutes on the corpus's own recordings; its error on recordings
is the noise floor that synthesised speech is compared with.

Shapes: B batch, L samples, T mel frames, S output frames (T / 2), M mels, C channels, A alphabet +
blank, N characters.
"""

import dataclasses
from abc import abstractmethod
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.audio.fitting import ConvNeXtBlock, FitSchedule, Losses, fit_model
from kit.audio.spectrogram import DEFAULT_MEL, Mel
from kit.base import extras
from kit.base.config import CONFIGS, build
from kit.base.errors import KitError
from kit.base.files import digest
from kit.base.tensor_file import checksum, load_module, save_module
from kit.settings import MelConfig, RecognizerConfig
from kit.text.normalize import letters

MEL_FRAMES = 2  # mel frames per output frame
# Of `make demo`'s recogniser, in fp16 (tests/tools/pretrained_layers.py).
PRETRAINED = CONFIGS / "pretrained-recognizer.safetensors"


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
    if "whisper" in header:
        return extras.load("RECOGNIZERS", "whisper")(header)
    front_end = build(MelConfig, header["front_end"])
    return Recognizer(build(RecognizerConfig, header["config"]), header["alphabet"], front_end)


def character_ids(alphabet: str, text: str) -> Tensor:
    """Return the ids (N,) of the characters of `text`, from 1; others are dropped."""
    ids = [alphabet.find(char) + 1 for char in letters(text)]
    return torch.tensor([i for i in ids if i], dtype=torch.long)


def transcripts(alphabet: str, log_probs: list[Tensor]) -> list[str]:
    """Decode each row (S, A) greedily, by the rules of CTC."""
    best = [row.argmax(-1).unique_consecutive().tolist() for row in log_probs]
    return ["".join(alphabet[i - 1] for i in row if i) for row in best]


def alphabet_of(texts: list[str]) -> str:
    return "".join(sorted(set("".join(map(letters, texts)))))


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


class Recognizer(nn.Module, SpeechRecognizer):
    """Log-mel of its own front end -> characters of `alphabet`; index 0 is the CTC blank."""

    def __init__(self, config: RecognizerConfig, alphabet: str, front_end: MelConfig = DEFAULT_MEL):
        super().__init__()
        self.config = config
        self.alphabet = alphabet
        self.front_end = Mel(front_end)
        self.input_sample_rate = front_end.sample_rate
        self.frame_s = MEL_FRAMES / front_end.frames_per_s
        self.stem = nn.Conv1d(front_end.n_mels, config.width, 7, stride=MEL_FRAMES, padding=3)
        self.blocks = nn.Sequential(*(ConvNeXtBlock(config.width) for _ in range(config.blocks)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, len(alphabet) + 1)

    def forward(self, mel: Tensor) -> Tensor:  # (B, M, T) -> (B, S, A) log-probabilities
        h = self.blocks(self.stem((mel + 5) / 3)).mT
        return self.head(self.norm(h)).float().log_softmax(-1)

    def fingerprint(self) -> str:
        return digest(checksum(self.state_dict()), self.alphabet, self.front_end.config)

    def recognize(self, waves: list[Tensor], sample_rate: int) -> list[RecognizerOutput]:
        if not waves:
            return []
        mels = self.front_end.log_mels(waves, sample_rate)
        outputs = []
        for mel, row in zip(mels, self.log_probs(mels)):
            loudness = mel.float().mean(0)[::MEL_FRAMES].cpu()
            outputs.append(RecognizerOutput(log_probs=row, loudness=loudness))
        return outputs

    def transcribe_waves(self, waves: list[Tensor], sample_rate: int) -> list[str]:
        return self.transcribe([self.front_end.clip_mel(wave, sample_rate) for wave in waves])

    @torch.inference_mode()
    def log_probs(self, mels: list[Tensor]) -> list[Tensor]:
        """Return the log-probabilities (S, A) of each log-mel (M, T), on the CPU."""
        rows = self(pad_mels(mels).to(self.head.weight.device)).cpu()
        return [row[: output_frames(mel)] for row, mel in zip(rows, mels)]

    def transcribe(self, mels: list[Tensor]) -> list[str]:
        return transcripts(self.alphabet, self.log_probs(mels))

    def loss(self, mels: list[Tensor], texts: list[str]) -> Tensor:
        targets = [self.encode(t) for t in texts]
        frames = torch.tensor([output_frames(m) for m in mels])
        counts = torch.tensor([len(t) for t in targets])
        mel = spec_augment(pad_mels(mels)).to(self.head.weight.device)
        log_probs = self(mel).transpose(0, 1).cpu()  # CTC wants (S, B, A)
        return F.ctc_loss(log_probs, torch.cat(targets), frames, counts, zero_infinity=True)


def output_frames(mel: Tensor) -> int:
    return -(-mel.shape[-1] // MEL_FRAMES)


def save_recognizer(model: Recognizer, path: Path) -> None:
    save_module(
        path,
        model,
        config=dataclasses.asdict(model.config),
        alphabet=model.alphabet,
        front_end=dataclasses.asdict(model.front_end.config),
    )


def pad_mels(mels: list[Tensor]) -> Tensor:
    """Pad log-mels (M, T) of several lengths with silence to (B, M, T)."""
    longest = max(m.shape[-1] for m in mels)
    return torch.stack([F.pad(m.float(), (0, longest - m.shape[-1]), value=-10.0) for m in mels])


def spec_augment(mel: Tensor) -> Tensor:
    """Blur each row (M, T), add noise and mask a band and a time span (Park et al. 2019)."""
    # Else the recogniser takes a codec's smoothing for another word, which no listener does.
    batch = len(mel)
    blur = torch.rand(batch, 1, 1)
    mel = torch.lerp(mel, F.avg_pool1d(mel, 3, stride=1, padding=1, count_include_pad=False), blur)
    across = F.avg_pool1d(mel.mT, 5, stride=1, padding=2, count_include_pad=False).mT
    mel = torch.lerp(mel, across, torch.rand(batch, 1, 1))
    mel = mel + torch.randn_like(mel) * torch.rand(batch, 1, 1) * 0.7
    for row in mel:
        for axis in (0, 1):
            width = int(torch.randint(1, 13, ()))
            start = int(torch.randint(max(1, row.shape[axis] - width), ()))
            row.narrow(axis, start, min(width, row.shape[axis] - start)).fill_(-5.0)
    return mel


def train_recognizer(
    model: Recognizer,
    mels: list[Tensor],
    texts: list[str],
    device: str,
    precision: str,
    schedule: FitSchedule | None = None,
) -> Losses:
    """Fit a model with the recogniser's `loss`, `transcribe` and `config` to log-mels and texts."""
    c = model.config
    generator = torch.Generator().manual_seed(0)
    lengths = [mel.shape[-1] for mel in mels]
    order = sorted(range(len(mels)), key=lengths.__getitem__)

    def batch_loss() -> Tensor:
        rows = draw_batch(order, lengths, c, generator)
        return model.loss([mels[i] for i in rows], [texts[i] for i in rows])

    schedule = schedule or FitSchedule(c)
    adamw = {"lr": c.lr, "betas": (0.9, 0.999), "warmup_share": 0.15}
    yield from fit_model(schedule, model, batch_loss, device, precision, **adamw)


def draw_batch(
    order: list[int], lengths: list[int], config: RecognizerConfig, generator: torch.Generator
) -> list[int]:
    """Draw a run of rows from `order`, which is sorted by length (`lengths` in frames)."""
    start = int(torch.randint(max(1, len(order) - config.batch), (), generator=generator))
    rows = order[start : start + config.batch]
    max_rows = max(1, config.batch_frames // lengths[rows[-1]])
    if max_rows < len(rows):
        first = int(torch.randint(len(rows) - max_rows + 1, (), generator=generator))
        rows = rows[first : first + max_rows]
    return rows


def recognizer_schedule(model: Recognizer, held_out: list[tuple[Tensor, str]]) -> FitSchedule:
    """Return a schedule evaluated by the error rate on (log-mel (M, T), text) pairs."""
    if not held_out:
        return FitSchedule(model.config)
    mels, texts = (list(column) for column in zip(*held_out))
    return FitSchedule(model.config, lambda: cer(model.transcribe(mels), texts))
