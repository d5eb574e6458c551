"""The kit's ears: waveform -> log-mel and log-magnitude spectrogram, by torch alone.

One front end for all that listens: the recogniser, the references a voice is conditioned on, the
pictures. A codec may begin with the same, or with anything else. A voice is spoken from these long
after it was trained, where torchaudio may not be: its last release pairs with one release of torch.
Knows nothing of codecs.

Shapes: B batch, L samples, T frames, F frequency bins, M mels.
"""

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.audio.waveform import load_wave, resampled
from kit.base.config import require_within

# Slaney's scale: 15 mels to 1000 Hz in equal steps, from there 27 to each factor of 6.4.
LINEAR_HZ = 1000.0
LINEAR_MELS = 15.0
LOG_STEP = math.log(6.4) / 27


@dataclasses.dataclass(frozen=True, kw_only=True)
class MelConfig:
    sample_rate: int = 22050  # Hz
    n_fft: int = 1024  # samples
    hop_length: int = 256  # samples
    n_mels: int = 80

    @property
    def frames_per_s(self) -> float:
        """Mel frames per second."""
        return self.sample_rate / self.hop_length

    def __post_init__(self):
        require_within(self, 4000, 384_000, "sample_rate")
        require_within(self, 64, 65_536, "n_fft")
        require_within(self, 1, self.n_fft, "hop_length")
        require_within(self, 1, self.n_fft // 2 + 1, "n_mels")


DEFAULT_MEL = MelConfig()


class Mel(nn.Module):
    """Waveform (B, L) -> log-mel (B, M, T) and log-magnitude (B, F, T), natural logarithm.

    Frames are centred, `hop_length` samples apart, under a Hann window of `n_fft`. Waveforms may be
    on any device; what is made of them is where the module is.
    """

    in_pieces = False  # whether a long reference is heard piece by piece (`reference_mels`)

    def __init__(self, config: MelConfig = DEFAULT_MEL):
        super().__init__()
        self.config = config
        self.n_fft = config.n_fft
        self.hop = config.hop_length
        self.spectrogram = nn.Module()
        self.scale = nn.Module()  # named as in files of codecs
        self.spectrogram.window = nn.Buffer(torch.hann_window(config.n_fft))
        self.scale.fb = nn.Buffer(filters(config.sample_rate, config.n_fft, config.n_mels))

    def forward(self, wave: Tensor) -> tuple[Tensor, Tensor]:
        magnitude = self.magnitude(self.long_enough(wave))
        return self.log_scale(magnitude), magnitude.clamp(min=1e-2).log()

    def log_mel(self, wave: Tensor) -> Tensor:
        """Waveform (B, L) -> log-mel (B, M, T) alone, a row at a time: one stays in the caches."""
        rows = self.long_enough(wave.to(self.spectrogram.window.device)).split(1)
        return torch.cat([self.log_scale(self.magnitude(row)) for row in rows])

    @torch.no_grad()
    def clip_mel(self, wave: Tensor, sample_rate: int) -> Tensor:
        """Log-mel (M, T) of one clip (L,) of `sample_rate` Hz; no samples are a short silence."""
        return self.log_mel(resampled(wave, sample_rate, self.config.sample_rate)[None])[0]

    @torch.no_grad()
    def log_mels(self, waves: list[Tensor], sample_rate: int) -> list[Tensor]:
        """Log-mels (M, T) of clips (L,) of several lengths, of `sample_rate` Hz, in one go."""
        mel, frames = self.padded(
            [resampled(w, sample_rate, self.config.sample_rate) for w in waves]
        )
        return unpadded(mel, frames)

    def padded(self, waves: list[Tensor]) -> tuple[Tensor, list[int]]:
        """Log-mels of clips (L,), padded with silence to (B, M, T), and the frames of each."""
        longest = max(len(w) for w in waves)
        mel = self.log_mel(torch.stack([F.pad(w, (0, longest - len(w))) for w in waves]))
        return mel, [len(w) // self.hop + 1 for w in waves]

    def long_enough(self, wave: Tensor) -> Tensor:
        least = max(4 * self.hop, self.n_fft // 2 + 1)  # what reflect padding needs
        return F.pad(wave, (0, max(0, least - wave.shape[-1])))

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
    """Of complex numbers of any shape. By abs() a CPU takes a complex copy, four times as long."""
    return torch.addcmul(spectrum.real.square(), spectrum.imag, spectrum.imag)


def unpadded(mel: Tensor, frames: list[int]) -> list[Tensor]:
    """The rows (M, T) of a padded batch (B, M, T), without what was padded."""
    return [row[:, :count] for row, count in zip(mel, frames)]


def load_mel(path: str, front_end: Mel) -> Tensor:
    """Log-mel (M, T) of the recording at `path`."""
    rate = front_end.config.sample_rate
    return front_end.clip_mel(load_wave(path, rate), rate)


def filters(sample_rate: int, n_fft: int, n_mels: int) -> Tensor:
    """Triangles (F, M), equally spaced on Slaney's scale and of equal area (Slaney 1998)."""
    top = LINEAR_MELS + math.log(sample_rate / 2 / LINEAR_HZ) / LOG_STEP
    mels = torch.linspace(0, top, n_mels + 2)
    logarithmic = LINEAR_HZ * torch.exp(LOG_STEP * (mels - LINEAR_MELS))
    hz = torch.where(mels < LINEAR_MELS, mels * (LINEAR_HZ / LINEAR_MELS), logarithmic)
    return triangles(hz, sample_rate, n_fft)


def triangles(hz: Tensor, sample_rate: int, n_fft: int) -> Tensor:
    """Filters (F, M) of equal area, each over three neighbours among the frequencies `hz` (M + 2,).

    It rises from the first to the second and falls to the third.
    """
    left = hz[:-2]
    middle = hz[1:-1]
    right = hz[2:]
    bins = torch.linspace(0, sample_rate / 2, n_fft // 2 + 1)[:, None]
    up = (bins - left) / (middle - left)
    down = (right - bins) / (right - middle)
    return torch.minimum(up, down).clamp(min=0) * 2 / (right - left)
