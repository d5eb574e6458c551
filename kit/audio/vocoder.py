"""Log-magnitudes -> sound by a network: an inverse Fourier head, after Vocos (Siuzdak 2023).

Griffin-Lim goes back and forth until a phase fits the magnitudes. This says in one go which phase
each bin has and what its magnitude lacks, and one inverse transform makes samples of that: no
upsampling layers, a third of the context. It learns from spectrograms of what it made, through
windows short enough for the pulses of a voice and long enough for its harmonics, first by their
error, then against critics (sharpening.py). Knows frames and samples; nothing of codes or mels.

Shapes: B batch, F frequency bins, T frames, C channels, L samples.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.audio.convnext import Block
from kit.audio.griffin_lim import uncentred, window_weight, windowed_sum
from kit.audio.sharpening import Views, sharpen, train_maker
from kit.audio.spectrogram import Mel, squared_magnitude
from kit.base.config import require_within

KERNEL = 7  # frames that the first layer sees together
LOUDEST = 8.0  # log-magnitude that no bin exceeds, so that nothing it says overflows
# Window and hop of the spectrograms it learns from, in samples; critics look at the first three.
RESOLUTIONS = ((256, 64), (512, 128), (1024, 256), (2048, 512))
CRITICS = 3
FLOOR = 1e-4  # of squared magnitudes: below it two silences are alike
# The share of the steps that is led by the error alone: a phase that fits has to be found before
# critics have anything to say.
ERROR_SHARE = 1 / 3

# Log-magnitudes (B, F, T) as a vocoder will be asked to sound, and the recordings (B, L) they stand
# for, of T frames or a little less.
Pair = tuple[Tensor, Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class VocoderConfig:
    vocoder_steps: int = 0  # of training it; 0: Griffin-Lim finds the phase
    vocoder_width: int = 256  # channels
    vocoder_blocks: int = 6

    def __post_init__(self):
        require_within(self, 0, 1e9, "vocoder_steps")
        require_within(self, 1, 65_536, "vocoder_width")
        require_within(self, 1, 1000, "vocoder_blocks")


class Vocoder(nn.Module):
    """Log-magnitude (B, F, T) -> waveform (B, T * hop); `n_fft` must be a multiple of `hop`.

    Frames are centred, under a Hann window of `n_fft`.
    """

    def __init__(self, config: VocoderConfig, n_fft: int, hop: int):
        super().__init__()
        bins = n_fft // 2 + 1
        width = config.vocoder_width
        self.config = config
        self.n_fft = n_fft
        self.hop = hop
        self.from_magnitude = nn.Conv1d(bins, width, KERNEL, padding=KERNEL // 2)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(config.vocoder_blocks)))
        self.norm = nn.LayerNorm(width)
        self.to_more = nn.Linear(width, bins)  # what is added to the log-magnitude
        self.to_phase = nn.Linear(width, bins)
        self.register_buffer("window", torch.hann_window(n_fft), persistent=False)
        nn.init.zeros_(self.to_more.weight)  # at first the magnitudes are what they were
        nn.init.zeros_(self.to_more.bias)

    @property
    def context(self) -> int:
        """Frames to either side that a frame's samples can depend on, and none further."""
        frames = KERNEL // 2 + Block.reach * self.config.vocoder_blocks
        return frames + math.ceil(self.n_fft / self.hop / 2)

    def forward(self, log_magnitude: Tensor) -> Tensor:
        h = self.from_magnitude((log_magnitude + 3) / 3)  # about zero mean, unit spread
        h = self.norm(self.blocks(h).mT)
        log_magnitude = log_magnitude.mT + self.to_more(h).float()
        magnitude = log_magnitude.clamp(max=LOUDEST).exp()
        spectrum = torch.polar(magnitude, self.to_phase(h).float())  # (B, T, F)
        frames = spectrum.shape[1]
        weight = window_weight(self.window, frames, self.hop)
        wave = windowed_sum(spectrum, self.window, self.hop) / weight
        return uncentred(wave, self.window, frames, self.hop)


def train_vocoder(
    vocoder: Vocoder,
    ear: Mel,
    pairs: Callable[[], Pair],
    device: str,
    seed: int,
) -> Iterator[tuple[int, float]]:
    """Train it for `config.vocoder_steps`, yielding (step, error); `ear` hears where it errs most.

    Raises CourseError where the error is not finite.
    """
    alone = math.ceil(ERROR_SHARE * vocoder.config.vocoder_steps)
    views = views_through(vocoder, ear, pairs)
    yield from train_maker(list(vocoder.parameters()), views, alone, device, seed)
    against = vocoder.config.vocoder_steps - alone
    for step, error in tune_vocoder(vocoder, ear, pairs, against, device, seed):
        yield alone + step, error


def tune_vocoder(
    vocoder: Vocoder,
    ear: Mel,
    pairs: Callable[[], Pair],
    steps: int,
    device: str,
    seed: int,
) -> Iterator[tuple[int, float]]:
    """As `train_vocoder`, one that has found a phase: against critics from its first step."""
    views = views_through(vocoder, ear, pairs)
    yield from sharpen(list(vocoder.parameters()), views, steps, device, seed, in_turns=True)


def views_through(vocoder: Vocoder, ear: Mel, pairs: Callable[[], Pair]) -> Callable[[], Views]:
    def views() -> Views:
        log_magnitude, wave = pairs()
        return views_of(wave, vocoder(log_magnitude)[:, : wave.shape[1]], ear)

    return views


def views_of(real: Tensor, made: Tensor, ear: Mel) -> Views:
    """Log-spectrograms of recordings and of what was made (B, L), for critics, and the error.

    The error is that of spectrograms, each bin alike, and of log-mels, as they are heard.
    """
    seen, seen_again = [
        [log_spectrogram(wave, *size) for size in RESOLUTIONS] for wave in (real, made)
    ]
    mel, mel_again = [log_spectrogram(wave, ear.n_fft, ear.hop).exp() for wave in (real, made)]
    error = sum(F.l1_loss(a, b) for a, b in zip(seen_again, seen)) / len(RESOLUTIONS)
    error = error + F.l1_loss(ear.log_scale(mel_again), ear.log_scale(mel))
    return seen[:CRITICS], seen_again[:CRITICS], error


def log_spectrogram(wave: Tensor, size: int, hop: int) -> Tensor:
    """Waveform (B, L) -> log-magnitude (B, F, T) through windows of `size` samples."""
    window = torch.hann_window(size, device=wave.device)
    spectrum = torch.stft(wave, size, hop, size, window, return_complex=True)
    return squared_magnitude(spectrum).clamp(min=FLOOR).log() / 2
