"""The built-in codec's decoder in real numbers: ONNX graphs have no complex ones.

Shapes: F frequency bins, T frames, L samples, N codes, D width of the states.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.audio.mel_codec import MelCodec
from kit.audio.vocoder import MOMENTUM, NOISE_FRAMES, GriffinLim, Vocoder

SMALLEST = 1e-30  # a squared magnitude to divide by the root of


class Sound(nn.Module):
    """`MelCodec.decode` of one utterance in real numbers.

    Codes (1, N), states (1, N, D) -> waveform (1, L); transforms are convolutions with sines.
    """

    def __init__(self, codec: MelCodec):
        super().__init__()
        self.codec = copy.deepcopy(codec).cpu()
        self.codec.griffin_lim = RealGriffinLim(self.codec.griffin_lim)
        if self.codec.vocoder:
            self.codec.vocoder = RealVocoder(self.codec.vocoder)

    def forward(self, codes: Tensor, states: Tensor | None = None) -> Tensor:
        log_magnitude = self.codec.log_magnitude_of(codes, states)
        return (self.codec.vocoder or self.codec.by_griffin_lim)(log_magnitude)


class RealFourier(nn.Module):
    """Windowed Fourier transforms of frames, with real and imaginary parts as channels (1, 2F, T).

    `inverse` gives the waveform with the padding of centred frames, `forward` its transform.
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
        """Spectrum (1, 2F, T) -> waveform (1, T * hop)."""
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
