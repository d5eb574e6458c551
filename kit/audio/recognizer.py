"""A small CTC recogniser: what was said, heard by a machine that never saw the synthesiser.

Trained in a minute on the same corpus's recordings, it turns intelligibility into a number with no
download. Its own error on recordings is the noise floor every other figure is read against.
Connectionist temporal classification: Graves et al. 2006; SpecAugment masks: Park et al. 2019.
Keeps the contract of hearing.py. Knows log-mels and characters; nothing of codes or the GPT.

Shapes: B batch, T mel frames, S output frames (T / 2), M mels, C channels, A alphabet + blank.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.audio.convnext import Block
from kit.audio.fitting import Course, CourseConfig, train_course
from kit.audio.hearing import Heard, SpeechRecognizer, transcripts
from kit.audio.spectrogram import DEFAULT_MEL, Mel, MelConfig
from kit.base.config import build, require_within
from kit.base.files import digest
from kit.base.weights_file import ForeignError, checksum, save_module
from kit.text.normalize import letters

MEL_FRAMES = 2  # mel frames in one output frame


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecognizerConfig(CourseConfig):
    width: int = 256  # channels
    blocks: int = 5  # residual blocks
    steps: int = 500  # training steps, at least
    good: float = 0.1  # character error rate on held-out clips that is good enough
    batch: int = 24  # utterances per training step, at most ...
    batch_frames: int = 8000  # ... and mel frames: long clips, fewer at a time
    lr: float = 2e-3
    utterances: int = 3000  # recordings it learns from
    # Another one in its place: Whisper, a size such as `base` or a folder. "": this one is trained.
    whisper: str = ""

    def __post_init__(self):
        super().__post_init__()
        require_within(self, 1, 65_536, "width")
        require_within(self, 1, 1000, "blocks")
        require_within(self, 1, 1e9, "batch", "batch_frames", "utterances")
        require_within(self, 1e-12, 10, "lr")


class Recognizer(nn.Module, SpeechRecognizer):
    """Log-mel of its own front end -> characters.

    `alphabet` is fixed when it is made; index 0 is the CTC blank.
    """

    def __init__(self, config: RecognizerConfig, alphabet: str, front_end: MelConfig = DEFAULT_MEL):
        super().__init__()
        self.config = config
        self.alphabet = alphabet
        self.front_end = Mel(front_end)
        self.stem = nn.Conv1d(front_end.n_mels, config.width, 7, stride=MEL_FRAMES, padding=3)
        self.blocks = nn.Sequential(*(Block(config.width) for _ in range(config.blocks)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, len(alphabet) + 1)

    def forward(self, mel: Tensor) -> Tensor:  # (B, M, T) -> (B, S, A) log-probabilities
        h = self.blocks(self.stem((mel + 5) / 3)).mT
        return self.head(self.norm(h)).float().log_softmax(-1)

    @property
    def frame_s(self) -> float:
        """Seconds of sound in one output frame."""
        return MEL_FRAMES / self.front_end.config.frames_per_s

    def fingerprint(self) -> str:
        """Changes when the weights, the alphabet or the front end do."""
        return digest(checksum(self.state_dict()), self.alphabet, self.front_end.config)

    @property
    def heard_rate(self) -> int:
        return self.front_end.config.sample_rate

    def hear(self, waves: list[Tensor], sample_rate: int) -> list[Heard]:
        mels = self.front_end.log_mels(waves, sample_rate) if waves else []
        pairs = zip(mels, self.log_probs(mels) if mels else [])
        return [Heard(log_probs=row, loudness=loudness(mel).cpu()) for mel, row in pairs]

    def write_down(self, waves: list[Tensor], sample_rate: int) -> list[str]:
        mels = [self.front_end.clip_mel(wave, sample_rate) for wave in waves]
        return self.transcribe(mels)

    @torch.inference_mode()
    def log_probs(self, mels: list[Tensor]) -> list[Tensor]:
        """Log-probabilities (S, A) of each log-mel (M, T), on the CPU."""
        rows = self(pad_mels(mels).to(self.head.weight.device)).cpu()
        return [row[: output_frames(mel)] for row, mel in zip(rows, mels)]

    @torch.inference_mode()
    def transcribe(self, mels: list[Tensor]) -> list[str]:
        """Greedy transcript of each log-mel (M, T)."""
        return transcripts(self.alphabet, self.log_probs(mels))

    def loss(self, mels: list[Tensor], texts: list[str]) -> Tensor:
        targets = [self.encode(t) for t in texts]
        frames = torch.tensor([output_frames(m) for m in mels])
        counts = torch.tensor([len(t) for t in targets])
        mel = spec_augment(pad_mels(mels)).to(self.head.weight.device)
        log_probs = self(mel).transpose(0, 1).cpu()  # CTC wants (S, B, A)
        return F.ctc_loss(log_probs, torch.cat(targets), frames, counts, zero_infinity=True)


def output_frames(mel: Tensor) -> int:
    """Output frames S of the recogniser for a log-mel (M, T)."""
    return -(-mel.shape[-1] // MEL_FRAMES)


def loudness(mel: Tensor) -> Tensor:
    """How loud each output frame (S,) of a log-mel (M, T) is, in nats: lowest in pauses."""
    return mel.float().mean(0)[::MEL_FRAMES]


def save_recognizer(model: Recognizer, path: Path) -> None:
    """Weights, configuration, alphabet and front end in one file, written atomically."""
    save_module(
        path,
        model,
        config=dataclasses.asdict(model.config),
        alphabet=model.alphabet,
        front_end=dataclasses.asdict(model.front_end.config),
    )


def recognizer_of(header: dict) -> Recognizer:
    """An untrained recogniser as the header of a file describes it."""
    if "front_end" not in header:
        raise ForeignError("of a version of the kit that did not note what it hears")
    front_end = build(MelConfig, header["front_end"])
    return Recognizer(build(RecognizerConfig, header["config"]), header["alphabet"], front_end)


def pad_mels(mels: list[Tensor]) -> Tensor:
    """Log-mels (M, T) of several lengths -> (B, M, T), padded with silence."""
    longest = max(m.shape[-1] for m in mels)
    return torch.stack([F.pad(m.float(), (0, longest - m.shape[-1]), value=-10.0) for m in mels])


def spec_augment(mel: Tensor) -> Tensor:
    """Each row (M, T) blurred and roughened by its own amount, one band and one stretch blanked.

    Recordings here are spotless; without this the recogniser would mistake any codec's smoothing
    for another word, which no listener does.
    """
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
    seed: int = 0,
    course: Course | None = None,
) -> Iterator[tuple[int, float]]:
    """Fit `model` to (log-mel (M, T), text) pairs, yielding (step, loss).

    Likewise another one that learns to write down what goes on in frames, with `loss`, `transcribe`
    and a `config` as the recogniser has: a reader of codes, to (codes (N,), text) pairs. Batches
    hold neighbours in length, so that little is padding. Leaves it on the CPU, to be used.
    `course` says how long; without one, `model.config.steps`.
    """
    c = model.config
    generator = torch.Generator().manual_seed(seed)
    lengths = [mel.shape[-1] for mel in mels]
    order = sorted(range(len(mels)), key=lengths.__getitem__)

    def batch_loss() -> Tensor:
        rows = neighbours(order, lengths, c, generator)
        return model.loss([mels[i] for i in rows], [texts[i] for i in rows])

    yield from train_course(
        course or Course(c),
        model,
        batch_loss,
        device,
        precision,
        lr=c.lr,
        betas=(0.9, 0.999),
        warmup_share=0.15,
        clip_norm=1.0,
    )


def neighbours(
    order: list[int], lengths: list[int], config: RecognizerConfig, generator: torch.Generator
) -> list[int]:
    """A batch drawn by chance from `order`, which goes from short to long (`lengths` in frames)."""
    start = int(torch.randint(max(1, len(order) - config.batch), (), generator=generator))
    rows = order[start : start + config.batch]
    room = max(1, config.batch_frames // lengths[rows[-1]])
    if room < len(rows):
        first = int(torch.randint(len(rows) - room + 1, (), generator=generator))
        rows = rows[first : first + room]
    return rows


def recognizer_course(model: Recognizer, held: list[tuple[Tensor, str]]) -> Course:
    """A course that ends when the error rate on `held` is low or falls no more.

    `held` are (log-mel (M, T), text) pairs that training never sees.
    """
    if not held:
        return Course(model.config)
    mels, texts = (list(column) for column in zip(*held))

    def look() -> float:
        model.eval()
        heard = model.transcribe(mels)
        model.train()
        return cer(heard, texts)

    return Course(model.config, look)


def edit_distance(a: str, b: str) -> int:
    """Levenshtein distance, one row at a time."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        left, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            left, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, left + (x != y))
    return row[-1]


def cer(heard: list[str], wanted: list[str]) -> float:
    """Character error rate over all pairs: edits divided by wanted characters."""
    wanted = [letters(t) for t in wanted]
    return sum(edit_distance(h, w) for h, w in zip(heard, wanted)) / sum(map(len, wanted))
