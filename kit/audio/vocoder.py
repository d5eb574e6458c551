"""Spectrogram -> waveform: fast Griffin-Lim, a neural vocoder, and both in real numbers for ONNX.

`GriffinLim` (Perraudin et al. 2013) is local: a slice of an utterance with `context` frames around
it gets the same samples as in the full utterance, which is what makes streaming exact. `Vocoder`
(Vocos: Siuzdak 2023) predicts each bin's phase and a correction of its magnitude, then takes one
inverse transform: no upsampling layers, and a third of Griffin-Lim's context. It learns from
multi-resolution spectrograms, first by L1 loss, then against critics.

Shapes: B batch, F frequency bins, T frames, C channels, L samples.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.audio.codec_training import Comparison, train_generator
from kit.audio.fitting import Losses
from kit.audio.layers import ConvNeXtBlock
from kit.audio.spectrogram import Mel, squared_magnitude

NOISE_FRAMES = 128  # the random initial phase repeats after this many frames, inaudibly
MOMENTUM = 0.99
SMALLEST = 1e-30  # a squared magnitude to divide by the root of
KERNEL = 7  # frames
MAX_LOG_MAGNITUDE = 8.0  # so that no spectrum overflows
# Window and hop of the spectrograms it learns from, in samples: short enough for the pulses of a
# voice, long enough for its harmonics. Critics look at the first three.
RESOLUTIONS = ((256, 64), (512, 128), (1024, 256), (2048, 512))
CRITICS = 3
FLOOR = 1e-4  # of squared magnitudes: below it everything is silence
# Share of the steps trained by L1 loss alone: critics help only once phases fit.
L1_SHARE = 1 / 3

# Log-magnitudes (B, F, T) and the recordings (B, L) they belong to, of T frames or slightly less.
Pair = tuple[Tensor, Tensor]


def overlap_add(frames: Tensor, hop: int) -> Tensor:
    """Sum frames (B, T, n), each `hop` samples after the last, to (B, (T - 1) * hop + n)."""
    parts = frames.unflatten(-1, (-1, hop)).unbind(2)  # n / hop times (B, T, hop)
    total = frames.new_zeros(len(frames), frames.shape[1] + len(parts) - 1, hop)
    for shift, part in enumerate(parts):
        total[:, shift : shift + frames.shape[1]] += part
    return total.flatten(1)


def windowed_sum(spectrum: Tensor, window: Tensor, hop: int) -> Tensor:
    """Inverse-transform a spectrum (B, T, F), window and overlap-add its frames."""
    return overlap_add(torch.fft.irfft(spectrum, len(window)).mul_(window), hop)


def window_envelope(window: Tensor, frames: int, hop: int) -> Tensor:
    """Return the sum of squared windows (1, L) that a `windowed_sum` must be divided by."""
    square = window.square().expand(1, frames, -1)
    return overlap_add(square, hop).clamp(min=1e-8)  # a Hann window starts at 0


def trim_centering(wave: Tensor, window: Tensor, frames: int, hop: int) -> Tensor:
    """Cut the padding of centred frames from a `windowed_sum`: (B, frames * hop)."""
    return wave[:, len(window) // 2 :][:, : frames * hop]


class GriffinLim(nn.Module):
    """Magnitude (B, F, T) -> waveform (B, T * hop); `n_fft` must be a multiple of `hop`."""

    def __init__(self, n_fft: int, hop: int, iters: int):
        super().__init__()
        self.n_fft = n_fft
        self.hop = hop
        self.iters = iters
        generator = torch.Generator().manual_seed(0)
        turn = torch.rand(NOISE_FRAMES, n_fft // 2 + 1, generator=generator) * 2 * math.pi
        phase = torch.polar(torch.ones_like(turn), turn)
        self.register_buffer("start", phase, persistent=False)  # (NOISE_FRAMES, F)
        self.register_buffer("window", torch.hann_window(n_fft), persistent=False)

    @property
    def context(self) -> int:
        """Frames on either side that can influence a frame's samples."""
        overlap = self.n_fft // self.hop
        return (overlap - 1) * self.iters + math.ceil(overlap / 2)

    def forward(self, magnitude: Tensor, first: int = 0) -> Tensor:
        """Reconstruct the waveform; `first` is the index of the first frame in its utterance."""
        magnitude, frames = magnitude.mT, magnitude.shape[-1]
        envelope = window_envelope(self.window, frames, self.hop)
        index = torch.arange(first, first + frames, device=self.window.device)
        spectrum = magnitude * self.start[index % NOISE_FRAMES]
        previous = torch.zeros_like(spectrum)
        magnitude = magnitude.to(spectrum.dtype)
        for _ in range(self.iters):  # in place: a fifth less time
            wave = windowed_sum(spectrum, self.window, self.hop).div_(envelope)
            rebuilt = torch.fft.rfft(wave.unfold(-1, self.n_fft, self.hop) * self.window)
            # rebuilt + MOMENTUM * (rebuilt - previous), up to a factor that does not change phases.
            angles = torch.sub(rebuilt, previous, alpha=MOMENTUM / (1 + MOMENTUM))
            spectrum = angles.sgn_().mul_(magnitude)
            previous = rebuilt
        wave = windowed_sum(spectrum, self.window, self.hop).div_(envelope)
        return trim_centering(wave, self.window, frames, self.hop)


class Vocoder(nn.Module):
    """Log-magnitude (B, F, T) -> waveform (B, T * hop); `n_fft` must be a multiple of `hop`."""

    def __init__(self, width: int, blocks: int, n_fft: int, hop: int):
        super().__init__()
        bins = n_fft // 2 + 1
        self.n_fft = n_fft
        self.hop = hop
        self.from_magnitude = nn.Conv1d(bins, width, KERNEL, padding=KERNEL // 2)
        self.blocks = nn.Sequential(*(ConvNeXtBlock(width) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.to_more = nn.Linear(width, bins)  # correction of the log-magnitude
        self.to_phase = nn.Linear(width, bins)
        self.register_buffer("window", torch.hann_window(n_fft), persistent=False)
        nn.init.zeros_(self.to_more.weight)  # magnitudes start out unchanged
        nn.init.zeros_(self.to_more.bias)

    @property
    def context(self) -> int:
        """Frames on either side that can influence a frame's samples."""
        frames = KERNEL // 2 + ConvNeXtBlock.reach * len(self.blocks)
        return frames + math.ceil(self.n_fft / self.hop / 2)

    def polar(self, log_magnitude: Tensor) -> tuple[Tensor, Tensor]:
        """Log-magnitude (B, F, T) -> the spectrum's magnitude and phase, (B, T, F) each."""
        h = self.from_magnitude((log_magnitude + 3) / 3)  # roughly zero mean, unit variance
        h = self.norm(self.blocks(h).mT)
        log_magnitude = log_magnitude.mT + self.to_more(h).float()
        return log_magnitude.clamp(max=MAX_LOG_MAGNITUDE).exp(), self.to_phase(h).float()

    def forward(self, log_magnitude: Tensor) -> Tensor:
        spectrum = torch.polar(*self.polar(log_magnitude))  # (B, T, F)
        frames = spectrum.shape[1]
        envelope = window_envelope(self.window, frames, self.hop)
        wave = windowed_sum(spectrum, self.window, self.hop) / envelope
        return trim_centering(wave, self.window, frames, self.hop)


def train_vocoder(
    vocoder: Vocoder,
    mel: Mel,
    pairs: Callable[[], Pair],
    steps: int,
    l1_share: float = L1_SHARE,
) -> Losses:
    """Train for `steps`, yielding (step, L1 loss), against critics after the first `l1_share`.

    `pairs()` draws a batch. Raises KitError when the loss is not finite.
    """

    def compare() -> Comparison:
        log_magnitude, wave = pairs()
        return compare_waves(wave, vocoder(log_magnitude)[:, : wave.shape[1]], mel)

    parameters = list(vocoder.parameters())
    l1_steps = math.ceil(l1_share * steps)
    yield from train_generator(parameters, compare, l1_steps, adversarial=False)
    critic_steps = steps - l1_steps
    for step, error in train_generator(parameters, compare, critic_steps, True, alternate=True):
        yield l1_steps + step, error


def compare_waves(real: Tensor, generated: Tensor, mel: Mel) -> Comparison:
    """Return log-spectrograms of waveforms (B, L) for the critics, and the L1 loss with mels."""
    wanted, made = [
        [log_spectrogram(wave, *size) for size in RESOLUTIONS] for wave in (real, generated)
    ]
    error = sum(F.l1_loss(a, b) for a, b in zip(made, wanted)) / len(RESOLUTIONS)
    wanted_mel, made_mel = [
        mel.log_scale(log_spectrogram(wave, mel.n_fft, mel.hop).exp()) for wave in (real, generated)
    ]
    return wanted[:CRITICS], made[:CRITICS], error + F.l1_loss(made_mel, wanted_mel)


def log_spectrogram(wave: Tensor, size: int, hop: int) -> Tensor:
    """Waveform (B, L) -> log-magnitude (B, F, T) with windows of `size` samples."""
    window = torch.hann_window(size, device=wave.device)
    spectrum = torch.stft(wave, size, hop, size, window, return_complex=True)
    return squared_magnitude(spectrum).clamp(min=FLOOR).log() / 2


# --- in real numbers: ONNX graphs have no complex ones -----------------------------------------


class RealFourier(nn.Module):
    """Windowed Fourier transforms of frames, with real and imaginary parts as channels (1, 2F, T).

    `inverse` gives the waveform before `trim_centering`, `forward` its transform.
    """

    def __init__(self, window: Tensor, hop: int):
        super().__init__()
        n_fft = len(window)
        bins = torch.eye(n_fft // 2 + 1, dtype=torch.float64)
        window = window.double()
        spectra = torch.fft.rfft(torch.eye(n_fft, dtype=torch.float64) * window).T  # (F, n_fft)
        waves = torch.fft.irfft(torch.cat((bins, 1j * bins)), n_fft) * window
        self.analysis = nn.Buffer(torch.cat((spectra.real, spectra.imag)).float()[:, None])
        self.synthesis = nn.Buffer(waves.float()[:, None])
        self.square = nn.Buffer(window.square().float()[None, None])
        self.hop = hop

    def forward(self, wave: Tensor) -> Tensor:  # (1, 1, L) -> (1, 2F, T)
        return F.conv1d(wave, self.analysis, stride=self.hop)

    def inverse(self, spectrum: Tensor) -> Tensor:  # (1, 2F, T) -> (1, 1, L)
        ones = torch.ones_like(spectrum[:, :1])
        envelope = F.conv_transpose1d(ones, self.square, stride=self.hop).clamp(min=1e-8)
        return F.conv_transpose1d(spectrum, self.synthesis, stride=self.hop) / envelope

    def trimmed(self, spectrum: Tensor) -> Tensor:
        """Spectrum (1, 2F, T) -> waveform (1, T * hop), as `trim_centering` does."""
        wave = self.inverse(spectrum)[:, 0]
        return wave[:, self.square.shape[-1] // 2 :][:, : spectrum.shape[-1] * self.hop]


class RealVocoder(nn.Module):
    """`Vocoder` in real numbers."""

    def __init__(self, vocoder: Vocoder):
        super().__init__()
        self.vocoder = vocoder
        self.fourier = RealFourier(vocoder.window, vocoder.hop)

    def forward(self, log_magnitude: Tensor) -> Tensor:
        magnitude, phase = self.vocoder.polar(log_magnitude)
        parts = torch.cat((magnitude * phase.cos(), magnitude * phase.sin()), dim=-1)
        return self.fourier.trimmed(parts.mT)


class RealGriffinLim(nn.Module):
    """`GriffinLim` in real numbers, of whole utterances."""

    def __init__(self, griffin_lim: GriffinLim):
        super().__init__()
        start = griffin_lim.start
        self.start = nn.Buffer(torch.cat((start.real, start.imag), dim=-1).T)  # (2F, NOISE_FRAMES)
        self.fourier = RealFourier(griffin_lim.window, griffin_lim.hop)
        self.iters = griffin_lim.iters

    def forward(self, magnitude: Tensor, first: int = 0) -> Tensor:
        index = torch.arange(magnitude.shape[-1], device=magnitude.device) % NOISE_FRAMES
        magnitude = magnitude.repeat(1, 2, 1)
        spectrum = magnitude * self.start[:, index]
        previous = torch.zeros_like(spectrum)
        for _ in range(self.iters):
            rebuilt = self.fourier(self.fourier.inverse(spectrum))
            angles = rebuilt - MOMENTUM / (1 + MOMENTUM) * previous
            real, imaginary = angles.chunk(2, dim=1)
            size = (real.square() + imaginary.square()).clamp(min=SMALLEST).sqrt().repeat(1, 2, 1)
            spectrum = angles / size * magnitude
            previous = rebuilt
        return self.fourier.trimmed(spectrum)
