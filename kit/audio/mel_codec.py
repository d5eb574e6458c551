"""Audio <-> discrete codes: the small mel codec behind the embedded default.

A log-mel spectrogram goes through a convolutional encoder to a few numbers per code, each rounded
to a handful of levels (finite scalar quantisation, Mentzer et al. 2023: no codebook to collapse).
The decoder predicts log magnitudes, and Griffin-Lim finds a phase. The contract every codec keeps:
`encode(wave) -> codes`, `decode(codes) -> wave`, `sample_rate`, `frame_rate`, `vocab_size`, and
`context`: how far around a code its sound is decided. Knows nothing of text or the GPT.

Shapes: B batch, L samples, T mel frames, N codes, M mels, F frequency bins, C channels.
"""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.audio.fitting import Course, CourseConfig, train_course
from kit.audio.griffin_lim import GriffinLim
from kit.audio.spectrogram import Mel
from kit.base.config import build, require, require_within
from kit.base.gradients import loss_scaler
from kit.base.hardware import autocast
from kit.base.weights_file import load_module, save_module

MOST_CODES = 2**20  # in a vocabulary: 32 times any codec of today
HELD_CROPS = 64  # stretches of held-out clips that the codec is judged by


class CodecError(ValueError):
    """A codec that is missing, damaged or of another shape than its configuration."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodecConfig(CourseConfig):
    sample_rate: int = 22050  # Hz
    n_fft: int = 1024  # samples
    hop_length: int = 256  # samples
    n_mels: int = 80
    levels: tuple = (8, 8, 5, 5)  # of each quantised number; their product is the vocabulary
    frames_per_code: int = 2  # mel frames one code stands for
    width: int = 192  # channels
    blocks: int = 3  # residual blocks on each side of the bottleneck
    griffin_lim_iters: int = 24
    magnitude_weight: float = 0.25  # of the log-magnitude loss beside the log-mel loss
    steps: int = 1200  # training steps, at least
    good: float = 0.45  # loss on held-out clips, in nats, that is good enough
    batch: int = 8  # clips per training step
    crop_frames: int = 48  # mel frames per training clip
    lr: float = 4e-3

    @property
    def frame_rate(self) -> float:
        """Codes per second."""
        return self.sample_rate / (self.hop_length * self.frames_per_code)

    def __post_init__(self):
        super().__post_init__()
        require_within(self, 4000, 384_000, "sample_rate")
        require_within(self, 64, 65_536, "n_fft")
        require_within(self, 1, self.n_fft, "hop_length")
        require_within(self, 1, self.n_fft // 2 + 1, "n_mels")
        require_within(self, 2, 1000, "levels")
        vocabulary = math.prod(self.levels)
        few = 2 <= vocabulary <= MOST_CODES
        require(few, self, "levels", f"make a vocabulary of {vocabulary}, not 2 to {MOST_CODES}.")
        require_within(self, 1, 1000, "frames_per_code", "blocks")
        require_within(self, 1, 65_536, "width")
        require_within(self, 0, 1000, "griffin_lim_iters")
        require_within(self, 0, 1e6, "magnitude_weight")
        require_within(self, 1, 1e6, "batch", "crop_frames")
        require_within(self, 1e-12, 10, "lr")
        ok = self.crop_frames % self.frames_per_code == 0
        require(ok, self, "crop_frames", "must be a multiple of frames_per_code.")
        require(self.n_fft % self.hop_length == 0, self, "hop_length", "must divide n_fft.")


class Block(nn.Module):
    """Residual block after ConvNeXt: depthwise convolution over time, then a two-layer MLP."""

    reach = 3  # steps of time to either side

    def __init__(self, width: int):
        super().__init__()
        self.mix = nn.Conv1d(width, width, 2 * self.reach + 1, padding=self.reach, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, T)
        h = self.norm(self.mix(x).mT)
        return x + self.down(F.gelu(self.up(h))).mT


class FSQ(nn.Module):
    """Finite scalar quantisation: (B, N, len(levels)) real numbers <-> integer codes (B, N)."""

    def __init__(self, levels: tuple):
        super().__init__()
        self.register_buffer("levels", torch.tensor(levels), persistent=False)
        basis = torch.cumprod(torch.tensor((1, *levels[:-1])), 0)
        self.register_buffer("basis", basis, persistent=False)

    def quantize(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Values in [-1, 1] with a straight-through gradient, and the codes they stand for."""
        top = (self.levels - 1) / 2
        bounded = (torch.tanh(z) + 1) * top  # 0 .. levels - 1
        rounded = bounded.round()
        value = (bounded + (rounded - bounded).detach()) / top - 1
        return value, (rounded.long() * self.basis).sum(-1)

    def dequantize(self, codes: Tensor) -> Tensor:
        digits = codes[..., None] // self.basis % self.levels
        return digits / ((self.levels - 1) / 2) - 1


class MelCodec(nn.Module):
    """Convolutional autoencoder over log-mels with an FSQ bottleneck and a Griffin-Lim vocoder."""

    def __init__(self, config: CodecConfig):
        super().__init__()
        c = config
        f = config.frames_per_code
        self.config = config
        self.fsq = FSQ(config.levels)
        self.mel = Mel(c.sample_rate, c.n_fft, c.hop_length, c.n_mels)
        self.encoder = nn.Sequential(
            nn.Conv1d(c.n_mels, c.width, 5, padding=2),
            Block(c.width),
            nn.Conv1d(c.width, c.width, f, stride=f),
            *(Block(c.width) for _ in range(c.blocks - 1)),
        )
        self.to_code = nn.Linear(c.width, len(c.levels))
        self.from_code = nn.Linear(len(c.levels), c.width)
        self.decoder = nn.Sequential(
            *(Block(c.width) for _ in range(c.blocks - 1)),
            nn.ConvTranspose1d(c.width, c.width, f, stride=f),
            *(Block(c.width) for _ in range(c.blocks)),
        )
        self.mel_head = nn.Linear(c.width, c.n_mels)
        self.magnitude_head = nn.Linear(c.width, c.n_fft // 2 + 1)
        self.griffin_lim = GriffinLim(c.n_fft, c.hop_length, c.griffin_lim_iters)

    @property
    def sample_rate(self) -> int:
        return self.config.sample_rate

    @property
    def frame_rate(self) -> float:
        """Codes per second."""
        return self.config.frame_rate

    @property
    def vocab_size(self) -> int:
        return math.prod(self.config.levels)

    @property
    def context(self) -> int:
        """Codes to either side that the samples of a code can depend on, and none further."""
        c = self.config
        frames = Block.reach * c.blocks + self.griffin_lim.context
        return Block.reach * (c.blocks - 1) + math.ceil(frames / c.frames_per_code)

    def encode_mel(self, mel: Tensor) -> tuple[Tensor, Tensor]:
        """Log-mel (B, M, T), T a multiple of frames_per_code -> values (B, N, Q), codes (B, N)."""
        h = self.encoder((mel + 5) / 3)  # roughly zero mean, unit spread
        return self.fsq.quantize(self.to_code(h.mT).float())

    def decode_values(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Quantised values (B, N, Q) -> log-mel (B, M, T), log-magnitude (B, F, T)."""
        h = self.decoder(self.from_code(values).mT).mT
        return self.mel_head(h).mT.float() * 3 - 5, self.magnitude_head(h).mT.float() * 3 - 3

    @torch.inference_mode()
    def encode(self, wave: Tensor) -> Tensor:
        """Mono waveform (B, L) in [-1, 1] at `sample_rate` -> codes (B, N)."""
        return self.encode_mel(self._whole(self.mel.log_mel(wave)))[1]

    @torch.inference_mode()
    def encode_clips(self, waves: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Clips (L,) of several lengths -> their log-mels (M, T) and codes (N,)."""
        mel, frames = self._padded_mel(waves)
        codes = self.encode_mel(self._whole(mel))[1]
        counts = [-(-t // self.config.frames_per_code) for t in frames]
        return [m[:, :t] for m, t in zip(mel, frames)], [c[:n] for c, n in zip(codes, counts)]

    @torch.inference_mode()
    def log_mels(self, waves: list[Tensor]) -> list[Tensor]:
        """Log-mels (M, T) of clips (L,) of several lengths, made in one go."""
        mel, frames = self._padded_mel(waves)
        return [m[:, :t] for m, t in zip(mel, frames)]

    def _padded_mel(self, waves: list[Tensor]) -> tuple[Tensor, list[int]]:
        """Log-mels of clips (L,), padded with silence to (B, M, T), and the frames of each."""
        longest = max(len(w) for w in waves)
        mel = self.mel.log_mel(torch.stack([F.pad(w, (0, longest - len(w))) for w in waves]))
        return mel, [len(w) // self.config.hop_length + 1 for w in waves]

    def _whole(self, mel: Tensor) -> Tensor:
        return F.pad(mel, (0, -mel.shape[-1] % self.config.frames_per_code), mode="replicate")

    @torch.inference_mode()
    def decode(self, codes: Tensor, first: int = 0) -> Tensor:
        """Codes (B, N) -> waveform (B, L), where the codec is; it lasts N / frame_rate seconds.

        `first` is the number of codes[:, 0] in its utterance, for a part cut out of one.
        Raises CodecError for a code outside the vocabulary.
        """
        codes = codes.to(self.fsq.levels.device)
        if not codes.numel():
            return codes.new_zeros(len(codes), 0, dtype=torch.float32)
        if not 0 <= int(codes.min()) <= int(codes.max()) < self.vocab_size:
            raise CodecError(f"Codes must lie in 0..{self.vocab_size - 1}, got {codes.unique()}.")
        magnitude = self.decode_values(self.fsq.dequantize(codes).float())[1].exp()
        return self.griffin_lim(magnitude, first * self.config.frames_per_code)

    def loss(self, wave: Tensor) -> Tensor:
        """Mean absolute error of log-mel and log-magnitude after the round trip of (B, L)."""
        mel, magnitude = self.mel(wave)
        mel, magnitude = (x[..., : self.config.crop_frames] for x in (mel, magnitude))
        values, _ = self.encode_mel(mel)
        mel_again, magnitude_again = self.decode_values(values)
        rough = F.l1_loss(magnitude_again, magnitude)
        return F.l1_loss(mel_again, mel) + self.config.magnitude_weight * rough


def train_codec(
    codec: MelCodec,
    waves: list[Tensor],
    device: str,
    precision: str,
    seed: int = 0,
    course: Course | None = None,
) -> Iterator[tuple[int, float]]:
    """Fit `codec` to mono clips (L,), yielding (step, loss); leaves it on the CPU in eval mode.

    `course` says how long; without one, `codec.config.steps`.
    """
    c = codec.to(device).config
    generator = torch.Generator().manual_seed(seed)

    def batch_loss() -> Tensor:
        batch = _crops(waves, c, c.batch, generator)
        with autocast(device, precision):
            return codec.loss(batch.to(device))

    codec.train()
    yield from train_course(
        course or Course(c),
        codec.parameters(),
        batch_loss,
        lr=c.lr,
        betas=(0.8, 0.99),
        warmup_share=0.1,
        scaler=loss_scaler(device, precision),
    )
    codec.cpu().eval()


def codec_course(codec: MelCodec, held: list[Tensor]) -> Course:
    """A course that ends when the loss on `held` clips (L,), never trained on, is low or
    falls no more.
    """
    if not held:
        return Course(codec.config)
    crops = _crops(held, codec.config, HELD_CROPS, torch.Generator().manual_seed(0))

    @torch.no_grad()
    def look() -> float:
        codec.eval()
        loss = codec.loss(crops.to(codec.mel_head.weight.device)).item()
        codec.train()
        return loss

    return Course(codec.config, look)


def _crops(
    waves: list[Tensor], config: CodecConfig, count: int, generator: torch.Generator
) -> Tensor:
    """`count` stretches of clips chosen by chance (count, L), each of `crop_frames` frames."""
    length = (config.crop_frames - 1) * config.hop_length
    return torch.stack([_crop(waves, length, generator) for _ in range(count)])


def _crop(waves: list[Tensor], length: int, generator: torch.Generator) -> Tensor:
    wave = waves[int(torch.randint(len(waves), (), generator=generator))]
    wave = F.pad(wave, (0, max(0, length - len(wave))))
    start = int(torch.randint(len(wave) - length + 1, (), generator=generator))
    return wave[start : start + length]


def load_wave(path: str, sample_rate: int) -> Tensor:
    """Mono waveform (L,) at `sample_rate`. Raises DatasetError as `read_clip` does."""
    from kit.audio.clip import read_clip

    wave, rate = read_clip(path)
    return resampled(torch.from_numpy(wave), rate, sample_rate)


def resampled(wave: Tensor, rate: int, wanted: int) -> Tensor:
    """`wave` (L,) of `rate` Hz at `wanted` Hz."""
    from torchaudio.functional import resample  # a voice speaks without what recordings need

    from kit.audio.clip import resampling

    return wave if rate == wanted else resample(wave, *resampling(rate, wanted))


def load_mel(path: str, codec: MelCodec) -> Tensor:
    """Log-mel (M, T) of the recording at `path`, as `codec` reads it."""
    return codec.mel(load_wave(path, codec.sample_rate)[None])[0][0]


def save_codec(codec: MelCodec, path: Path) -> None:
    """Weights and configuration in one file, written atomically."""
    save_module(path, codec, config=dataclasses.asdict(codec.config))


def load_codec(path: Path) -> MelCodec:
    """The codec saved at `path`, in eval mode. Raises CodecError when missing or damaged."""

    def make(header: dict) -> MelCodec:
        return MelCodec(build(CodecConfig, header["config"]))

    return load_module(path, make, CodecError, "run notebook 01_data_prep.")
