"""The sound of an XTTS-v2: the states of its GPT and a speaker -> a waveform.

HiFi-GAN (Kong et al. 2020): the hidden states that predicted the codes, 21.5 a second, are
interpolated to frames and upsampled by transposed convolutions, with the speaker added at every
stage. Layers are named as in the files of a release, except for weight normalisation.

Shapes: B batch, N codes, D width of the states, S speaker width, C channels, T frames, L samples,
M mels.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.audio.spectrogram import squared_magnitude

CODE_RATE = 22_050  # Hz, of the samples a code stands for
CODE_SAMPLES = 1024
VOCODER_RATE = 24_000  # Hz, of what comes out
FRAME_SAMPLES = 256  # of VOCODER_RATE
QUARTERS = CODE_SAMPLES // FRAME_SAMPLES  # of a code

UPSAMPLE = (8, 8, 2, 2)  # together FRAME_SAMPLES
BLOCK_KERNELS = (3, 7, 11)
DILATIONS = (1, 3, 5)
SLOPE = 0.1  # of the leaky ReLUs but the last


class DilatedBlock(nn.Module):
    """Residual convolutions, each dilated further, and one that is not after each."""

    def __init__(self, width: int, kernel: int):
        super().__init__()
        conv = partial(nn.Conv1d, width, width, kernel, padding="same")
        self.convs1 = nn.ModuleList(conv(dilation=dilation) for dilation in DILATIONS)
        self.convs2 = nn.ModuleList(conv() for _ in DILATIONS)

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
        for stride in UPSAMPLE:
            half = width // 2
            self.ups.append(nn.ConvTranspose1d(width, half, 2 * stride, stride, stride // 2))
            self.conds.append(nn.Conv1d(speaker_width, half, 1))
            self.resblocks.extend(DilatedBlock(half, size) for size in BLOCK_KERNELS)
            width = half
        self.conv_post = nn.Conv1d(width, 1, 7, padding=3, bias=False)

    def forward(self, states: Tensor, speaker: Tensor, first: int = 0) -> Tensor:
        g = speaker[..., None]  # (B, S, 1)
        quarters = F.interpolate(states.mT, scale_factor=QUARTERS, mode="linear")  # (B, D, 4 N)
        x = self.conv_pre(to_frames(quarters, first)) + self.cond_layer(g)
        for i, (up, cond) in enumerate(zip(self.ups, self.conds)):
            x = up(F.leaky_relu(x, SLOPE)) + cond(g)
            blocks = self.resblocks[i * len(BLOCK_KERNELS) :][: len(BLOCK_KERNELS)]
            x = sum(block(x) for block in blocks) / len(blocks)
        return torch.tanh(self.conv_post(F.leaky_relu(x)))[:, 0]


def frames_of(codes: int) -> int:
    return codes * CODE_SAMPLES * VOCODER_RATE // (CODE_RATE * FRAME_SAMPLES)


def to_frames(quarters: Tensor, first: int = 0) -> Tensor:
    """Four numbers a code (B, D, 4 N) -> one a frame (B, D, T), linear in between.

    The part has the frames that it has in the whole utterance, which began `first` codes before.
    """
    last = quarters.shape[-1] - 1
    end = first + quarters.shape[-1] // QUARTERS
    numbers = torch.arange(frames_of(first), frames_of(end), device=quarters.device)
    middles = (numbers + 0.5) * (CODE_RATE / VOCODER_RATE) - 0.5  # fp32, as torch interpolates
    places = (middles - QUARTERS * first).clamp(0, last)
    left = places.long()
    right = (left + 1).clamp(max=last)
    return torch.lerp(quarters[..., left], quarters[..., right], (places - left).to(quarters.dtype))


# --- the speaker ----------------------------------------------------------------------------------
#
# A vector from a reference by H/ASP (Heo et al. 2020): a ResNet with squeeze-and-excitation (Hu et
# al. 2018) over log-mels, its frames pooled by attention to mean and spread (Okabe et al. 2018).

SPEAKER_RATE = 16_000  # Hz
N_FFT = 512  # samples, as are the next two
WIN_LENGTH = 400
HOP_LENGTH = 160
N_MELS = 64


class PreEmphasis(nn.Module):
    """Waveform (B, L) less 0.97 of itself a sample before: high frequencies as loud as low ones."""

    def __init__(self):
        super().__init__()
        self.filter = nn.Buffer(torch.tensor([[[-0.97, 1.0]]]))

    def forward(self, wave: Tensor) -> Tensor:
        before = F.pad(wave[:, None], (1, 0), mode="reflect")
        return F.conv1d(before, self.filter)[:, 0]


class PowerMel(nn.Module):
    """Waveform (B, L) -> mels of power (B, M, T), not their logarithm."""

    def __init__(self):
        super().__init__()
        self.spectrogram = nn.Module()
        self.mel_scale = nn.Module()
        self.spectrogram.window = nn.Buffer(torch.hamming_window(WIN_LENGTH))
        self.mel_scale.fb = nn.Buffer(torch.zeros(N_FFT // 2 + 1, N_MELS))  # comes with the weights

    def forward(self, wave: Tensor) -> Tensor:
        window = self.spectrogram.window
        spectrum = torch.stft(
            wave, N_FFT, HOP_LENGTH, WIN_LENGTH, window=window, return_complex=True
        )
        return (squared_magnitude(spectrum).mT @ self.mel_scale.fb).mT


class SqueezeExcitation(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        squeeze = nn.Linear(width, width // 8)
        excite = nn.Linear(width // 8, width)
        self.fc = nn.Sequential(squeeze, nn.ReLU(), excite, nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:  # (B, C, M, T)
        return x * self.fc(x.mean((2, 3)))[..., None, None]


class ResNetBlock(nn.Module):
    """Two convolutions; the first normalises after its ReLU, as H/ASP does and ResNet does not."""

    def __init__(self, width: int, out: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.se = SqueezeExcitation(out)
        self.downsample = nn.Sequential()
        if stride > 1 or width != out:
            self.downsample.append(nn.Conv2d(width, out, 1, stride, bias=False))
            self.downsample.append(nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:  # (B, C, M, T)
        h = self.bn1(F.relu(self.conv1(x)))
        h = self.se(self.bn2(self.conv2(h)))
        return F.relu(h + self.downsample(x))


class SpeakerEncoder(nn.Module):
    """Waveform (B, L) of 16 kHz -> speaker (B, S) of length 1; the defaults are the release's."""

    def __init__(
        self,
        filters: tuple[int, ...] = (32, 64, 128, 256),
        attention_width: int = 128,
        speaker_width: int = 512,
    ):
        super().__init__()
        self.torch_spec = nn.Sequential(PreEmphasis(), PowerMel())
        self.conv1 = nn.Conv2d(1, filters[0], 3, padding=1)
        self.bn1 = nn.BatchNorm2d(filters[0])
        self.layer1 = residual_layer(filters[0], filters[0], blocks=3, stride=1)
        self.layer2 = residual_layer(filters[0], filters[1], blocks=4, stride=2)
        self.layer3 = residual_layer(filters[1], filters[2], blocks=6, stride=2)
        self.layer4 = residual_layer(filters[2], filters[3], blocks=3, stride=2)
        pooled = filters[3] * N_MELS // 8  # three layers halve the mels
        self.attention = nn.Sequential(
            nn.Conv1d(pooled, attention_width, 1),
            nn.ReLU(),
            nn.BatchNorm1d(attention_width),
            nn.Conv1d(attention_width, pooled, 1),
            nn.Softmax(dim=2),
        )
        self.fc = nn.Linear(2 * pooled, speaker_width)

    def forward(self, wave: Tensor) -> Tensor:
        mel = (self.torch_spec(wave) + 1e-6).log()
        x = F.instance_norm(mel)[:, None]  # (B, 1, M, T)
        x = self.bn1(F.relu(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        x = x.flatten(1, 2)  # (B, C M / 8, T / 8)
        weight = self.attention(x)
        mean = (x * weight).sum(2)
        spread = ((x.square() * weight).sum(2) - mean.square()).clamp(min=1e-5).sqrt()
        return F.normalize(self.fc(torch.cat((mean, spread), dim=1)))


def residual_layer(width: int, out: int, blocks: int, stride: int) -> nn.Sequential:
    rest = [ResNetBlock(out, out, 1) for _ in range(blocks - 1)]
    return nn.Sequential(ResNetBlock(width, out, stride), *rest)
