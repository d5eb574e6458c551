"""Waveform -> log-mel and log-magnitude spectrograms, without torchaudio, which voices outlive.

Shapes: B batch, L samples, T frames, F frequency bins, M mels.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.audio.clip import load_wave, resampled
from kit.base import extras
from kit.base.config import build
from kit.base.errors import SpeechError
from kit.settings import MelConfig

# Slaney's mel scale: 15 mels to 1000 Hz in equal steps, from there 27 per factor of 6.4.
LINEAR_HZ = 1000.0
LINEAR_MELS = 15.0
LOG_STEP = math.log(6.4) / 27

# `kind` in section `front_end` of the settings -> its class. Extras bring others.
FRONT_ENDS = {"mel": "kit.audio.spectrogram:Mel"}
DEFAULT_MEL = MelConfig()


class Mel(nn.Module):
    """Waveform (B, L) on any device -> log-mel (B, M, T) and log-magnitude (B, F, T), in nats.

    Frames are centred, `hop_length` samples apart, under a Hann window of `n_fft`.
    """

    config_class = MelConfig
    in_pieces = False  # whether a long reference is processed piece by piece (`reference_mels`)

    def __init__(self, config: MelConfig = DEFAULT_MEL):
        super().__init__()
        self.config = config
        self.n_fft = config.n_fft
        self.hop = config.hop_length
        self.spectrogram = nn.Module()
        self.scale = nn.Module()  # named as in codec files
        self.spectrogram.window = nn.Buffer(torch.hann_window(config.n_fft))
        self.scale.fb = nn.Buffer(filters(config.sample_rate, config.n_fft, config.n_mels))

    def forward(self, wave: Tensor) -> tuple[Tensor, Tensor]:
        magnitude = self.magnitude(self.pad_short(wave))
        return self.log_scale(magnitude), magnitude.clamp(min=1e-2).log()

    def log_mel(self, wave: Tensor) -> Tensor:
        """Waveform (B, L) -> log-mel (B, M, T) alone, row by row: one row fits in the caches."""
        rows = self.pad_short(wave.to(self.spectrogram.window.device)).split(1)
        return torch.cat([self.log_scale(self.magnitude(row)) for row in rows])

    @torch.no_grad()
    def clip_mel(self, wave: Tensor, sample_rate: int) -> Tensor:
        """Return the log-mel (M, T) of a clip (L,); an empty one becomes a short silence."""
        return self.log_mel(resampled(wave, sample_rate, self.config.sample_rate)[None])[0]

    @torch.no_grad()
    def log_mels(self, waves: list[Tensor], sample_rate: int) -> list[Tensor]:
        """Return the log-mels (M, T) of clips (L,) of several lengths, as one batch."""
        rate = self.config.sample_rate
        mel, frames = self.padded([resampled(wave, sample_rate, rate) for wave in waves])
        return [row[:, :count] for row, count in zip(mel, frames)]

    def padded(self, waves: list[Tensor]) -> tuple[Tensor, list[int]]:
        """Return log-mels of clips (L,), padded with silence to (B, M, T), and frames per clip."""
        longest = max(len(w) for w in waves)
        mel = self.log_mel(torch.stack([F.pad(w, (0, longest - len(w))) for w in waves]))
        return mel, [len(w) // self.hop + 1 for w in waves]

    def pad_short(self, wave: Tensor) -> Tensor:
        min_samples = max(4 * self.hop, self.n_fft // 2 + 1)  # what reflect padding needs
        return F.pad(wave, (0, max(0, min_samples - wave.shape[-1])))

    def log_scale(self, magnitude: Tensor) -> Tensor:
        """Magnitudes (B, F, T) -> log-mel (B, M, T)."""
        return (magnitude.mT @ self.scale.fb).mT.clamp(min=5e-4).log()

    def magnitude(self, wave: Tensor) -> Tensor:
        """Waveform (B, L) -> magnitudes (B, F, T)."""
        window = self.spectrogram.window
        size = len(window)
        spectrum = torch.stft(wave, self.n_fft, self.hop, size, window, return_complex=True)
        return squared_magnitude(spectrum).sqrt()


def squared_magnitude(spectrum: Tensor) -> Tensor:
    """Square complex numbers; on a CPU four times as fast as with abs(), which copies them."""
    return torch.addcmul(spectrum.real.square(), spectrum.imag, spectrum.imag)


def load_mel(path: str, front_end: Mel) -> Tensor:
    rate = front_end.config.sample_rate
    return front_end.clip_mel(load_wave(path, rate), rate)


def front_end_config(values: dict) -> MelConfig:
    """Return the settings in plain `values`. Raises KitError for an unknown kind or value."""
    values = dict(values)
    kind = str(values.pop("kind", "mel"))
    return build(extras.load("FRONT_ENDS", kind, FRONT_ENDS).config_class, values)


def make_front_end(config: MelConfig) -> Mel:
    kind = getattr(config, "kind", "mel")
    return extras.load("FRONT_ENDS", kind, FRONT_ENDS)(config)


def recognizer_mel(config: MelConfig) -> MelConfig:
    """Return the recogniser's log-mels: those of the references, unless they are XTTS's."""
    return config if getattr(config, "kind", "mel") == "mel" else DEFAULT_MEL


def filters(sample_rate: int, n_fft: int, n_mels: int) -> Tensor:
    """Return triangular filters (F, M) of equal area on Slaney's mel scale (Slaney 1998)."""
    top = LINEAR_MELS + math.log(sample_rate / 2 / LINEAR_HZ) / LOG_STEP
    mels = torch.linspace(0, top, n_mels + 2)
    logarithmic = LINEAR_HZ * torch.exp(LOG_STEP * (mels - LINEAR_MELS))
    hz = torch.where(mels < LINEAR_MELS, mels * (LINEAR_HZ / LINEAR_MELS), logarithmic)
    return triangles(hz, sample_rate, n_fft)


def triangles(hz: Tensor, sample_rate: int, n_fft: int) -> Tensor:
    """Return filters (F, M) of equal area, each over three neighbours of `hz` (M + 2,)."""
    left = hz[:-2]
    middle = hz[1:-1]
    right = hz[2:]
    bins = torch.linspace(0, sample_rate / 2, n_fft // 2 + 1)[:, None]
    up = (bins - left) / (middle - left)
    down = (right - bins) / (right - middle)
    return torch.minimum(up, down).clamp(min=0) * 2 / (right - left)


# Of references, as XTTS-v2 takes them: its `gpt_cond_len` and `gpt_cond_chunk_len`.
LONGEST_S = 30.0
PIECE_S = 4.0
MIN_PIECE_S = 0.33  # shorter remainders are dropped
MIN_PEAK = 0.005  # of full scale


def load_reference(path: str, sample_rate: int) -> Tensor:
    """Return the first `LONGEST_S` seconds (L,) of a recording, mono, at `sample_rate`."""
    wave = load_wave(path, sample_rate)[: round(LONGEST_S * sample_rate)]
    require_reference(wave, sample_rate, str(path))
    return wave


def require_reference(wave: Tensor, sample_rate: int, name: str = "The reference") -> None:
    """Raise SpeechError for a waveform that is too short, silent, not mono or not finite."""
    if wave.ndim != 1 or not bool(torch.isfinite(wave).all()):
        raise SpeechError(
            f"{name} has the shape {tuple(wave.shape)}, or samples that are not finite: give one "
            "waveform (samples,) of finite numbers."
        )
    seconds = len(wave) / sample_rate
    if seconds < MIN_PIECE_S:
        raise SpeechError(
            f"{name} lasts {seconds:.2f} s: at least {MIN_PIECE_S} s are needed, and 6 s or more "
            "of one person speaking are better."
        )
    peak = float(wave.abs().max())
    if peak < MIN_PEAK:
        raise SpeechError(
            f"{name} is silent (peak {peak:.4f} of full scale): choose a recording with speech in "
            "it, or record it louder."
        )


def reference_mels(wave: Tensor, sample_rate: int, front_end: Mel) -> list[Tensor]:
    """Return log-mels (M, T) of pieces of a reference (L,); see `require_reference`."""
    rate = front_end.config.sample_rate
    wave = resampled(wave, sample_rate, rate)[: round(LONGEST_S * rate)]
    pieces = wave.split(round(PIECE_S * rate))
    return [front_end.clip_mel(piece, rate) for piece in pieces if len(piece) >= MIN_PIECE_S * rate]


def reference_mel(mel: Tensor, frames: int) -> Tensor:
    """Return the loudest `frames` in a row of a log-mel (M, T), which is repeated if shorter."""
    while mel.shape[-1] < frames:
        mel = torch.cat((mel, mel), dim=-1)
    loudness = mel.mean(dim=0).unfold(0, frames, 1).mean(dim=1)
    start = int(loudness.argmax())
    return mel[:, start : start + frames]
