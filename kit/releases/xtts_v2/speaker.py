"""Who speaks: a waveform -> one vector, as an XTTS-v2's vocoder asks for it.

H/ASP (Heo et al. 2020): a ResNet with squeeze-and-excitation (Hu et al. 2018) over log-mels, its
frames pooled by attention to their mean and spread (Okabe et al. 2018). Layers, window and filters
are named as in the files of a release.

Shapes: B batch, L samples, M mels, T frames, C channels, S speaker width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.audio.spectrogram import squared_magnitude

SPEAKER_RATE = 16_000  # Hz
N_FFT = 512  # samples, as are the next two
WIN_LENGTH = 400
HOP_LENGTH = 160
N_MELS = 64
PREEMPHASIS = 0.97
BLOCKS = (3, 4, 6, 3)  # of each width
SQUEEZE = 8


class PreEmphasis(nn.Module):
    """Waveform (B, L) less 0.97 of itself a sample before: high frequencies as loud as low ones."""

    def __init__(self):
        super().__init__()
        self.filter = nn.Buffer(torch.tensor([[[-PREEMPHASIS, 1.0]]]))

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
    """Each channel scaled by what the means of all channels say of it."""

    def __init__(self, width: int):
        super().__init__()
        self.fc = nn.Sequential(
            nn.Linear(width, width // SQUEEZE),
            nn.ReLU(),
            nn.Linear(width // SQUEEZE, width),
            nn.Sigmoid(),
        )

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
        self.layer1 = residual_layer(filters[0], filters[0], BLOCKS[0], stride=1)
        self.layer2 = residual_layer(filters[0], filters[1], BLOCKS[1], stride=2)
        self.layer3 = residual_layer(filters[1], filters[2], BLOCKS[2], stride=2)
        self.layer4 = residual_layer(filters[2], filters[3], BLOCKS[3], stride=2)
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
    """Blocks of one width, the first of which changes it."""
    rest = [ResNetBlock(out, out, 1) for _ in range(blocks - 1)]
    return nn.Sequential(ResNetBlock(width, out, stride), *rest)
