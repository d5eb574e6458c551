"""States of an XTTS-v2's GPT and a speaker -> sound: HiFi-GAN (Kong et al. 2020).

The hidden states that predicted the codes, 21.5 a second, are interpolated to frames of 256 samples
at 24 kHz and upsampled by transposed convolutions, with the speaker added at every stage. Layers
are named as in the files of a release, except for weight normalisation.

Shapes: B batch, N codes, D width of the states, S speaker width, C channels, T frames, L samples.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CODE_RATE = 22_050  # Hz, of the samples a code stands for
CODE_SAMPLES = 1024
VOCODER_RATE = 24_000  # Hz, of what comes out
FRAME_SAMPLES = 256  # of VOCODER_RATE
QUARTERS = CODE_SAMPLES // FRAME_SAMPLES  # of a code

UPSAMPLE = (8, 8, 2, 2)  # together FRAME_SAMPLES
UPSAMPLE_KERNELS = (16, 16, 4, 4)
BLOCK_KERNELS = (3, 7, 11)
DILATIONS = (1, 3, 5)
SLOPE = 0.1  # of the leaky ReLUs but the last


class DilatedBlock(nn.Module):
    """Residual convolutions, each dilated further, and one that is not after each."""

    def __init__(self, width: int, kernel: int):
        super().__init__()
        self.convs1 = nn.ModuleList(
            nn.Conv1d(width, width, kernel, padding="same", dilation=d) for d in DILATIONS
        )
        self.convs2 = nn.ModuleList(
            nn.Conv1d(width, width, kernel, padding="same") for _ in DILATIONS
        )

    def forward(self, x: Tensor) -> Tensor:  # (B, C, T)
        for dilated, plain in zip(self.convs1, self.convs2):
            h = dilated(F.leaky_relu(x, SLOPE))
            x = x + plain(F.leaky_relu(h, SLOPE))
        return x


class HiFiGAN(nn.Module):
    """States (B, N, D) and speakers (B, S) -> waveforms (B, L); the release's sizes by default.

    `first` is the number of states[:, 0] in its utterance, for a part cut out of one.
    """

    context = 6  # codes to either side that the samples of a code can depend on, none further

    def __init__(self, latent_width: int = 1024, speaker_width: int = 512, channels: int = 512):
        super().__init__()
        self.conv_pre = nn.Conv1d(latent_width, channels, 7, padding=3)
        self.cond_layer = nn.Conv1d(speaker_width, channels, 1)
        self.ups = nn.ModuleList()
        self.conds = nn.ModuleList()
        self.resblocks = nn.ModuleList()
        width = channels
        for stride, kernel in zip(UPSAMPLE, UPSAMPLE_KERNELS):
            half = width // 2
            padding = (kernel - stride) // 2
            self.ups.append(nn.ConvTranspose1d(width, half, kernel, stride, padding))
            self.conds.append(nn.Conv1d(speaker_width, half, 1))
            self.resblocks.extend(DilatedBlock(half, size) for size in BLOCK_KERNELS)
            width = half
        self.conv_post = nn.Conv1d(width, 1, 7, padding=3, bias=False)

    def forward(self, states: Tensor, speaker: Tensor, first: int = 0) -> Tensor:
        g = speaker[..., None]  # (B, S, 1)
        x = self.conv_pre(stretched(states.mT, first)) + self.cond_layer(g)
        for i, (up, cond) in enumerate(zip(self.ups, self.conds)):
            x = up(F.leaky_relu(x, SLOPE)) + cond(g)
            blocks = self.resblocks[i * len(BLOCK_KERNELS) :][: len(BLOCK_KERNELS)]
            x = sum(block(x) for block in blocks) / len(blocks)
        return torch.tanh(self.conv_post(F.leaky_relu(x)))[:, 0]


def frames_of(codes: int) -> int:
    """How many whole frames so many codes last."""
    return codes * CODE_SAMPLES * VOCODER_RATE // (CODE_RATE * FRAME_SAMPLES)


def stretched(x: Tensor, first: int = 0) -> Tensor:
    """A number a code (B, D, N) -> one a frame (B, D, T), linear in between, in two steps."""
    quarters = F.interpolate(x, scale_factor=QUARTERS, mode="linear")
    return to_frames(quarters, first)


def to_frames(quarters: Tensor, first: int = 0) -> Tensor:
    """Four numbers a code (B, D, 4 N) -> one a frame (B, D, T), linear in between.

    Where frames lie counts from the beginning of the utterance, `first` codes before: a part has
    the frames that it has in the whole.
    """
    last = quarters.shape[-1] - 1
    end = first + quarters.shape[-1] // QUARTERS
    numbers = torch.arange(frames_of(first), frames_of(end), device=quarters.device)
    middles = (numbers + 0.5) * (CODE_RATE / VOCODER_RATE) - 0.5  # fp32, as torch interpolates
    places = (middles - QUARTERS * first).clamp(0, last)
    left = places.long()
    right = (left + 1).clamp(max=last)
    return torch.lerp(quarters[..., left], quarters[..., right], (places - left).to(quarters.dtype))
