"""The decoder of a released NeuCodec: codes -> sound.

Eight digits of four levels a code (finite scalar quantisation, Mentzer et al. 2023), convolutions
and a transformer over all codes given, and a spectrum for each, which overlap-add makes sound of
(Vocos: Siuzdak 2023; Llasa's X-Codec 2: Ye et al. 2025; NeuCodec: Julian et al. 2025). Layers are
named as in the release's `model.safetensors`. The release turns queries and keys by the number of
their *head* where rotary embeddings mean the time; both of a head turn alike, so nothing follows
from it, it is left out here, and no layer knows where in an utterance it is.

Shapes: B batch, N codes (each a frame), C channels, D width of a head, F frequency bins, n samples
of a window, L samples.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.audio.vocoder import overlap_add

LEVELS = (4,) * 8  # of each digit of a code; their product is the vocabulary
LOUDEST = 100.0  # a spectrum's magnitude at most, as in training
GROUPS = 32
HOP = 480  # samples a code, at 24 kHz
WINDOW = 4 * HOP  # samples


def code_digits(codes: Tensor) -> Tensor:
    """Codes (...) -> their digits as the values that they stand for, in [-1, 1), (..., 8)."""
    basis = torch.tensor([4**place for place in range(len(LEVELS))], device=codes.device)
    return (codes[..., None] // basis % 4 - 2) / 2


class DigitsToLatents(nn.Module):
    """Codes (B, N) -> latents (B, N, C); the encoder does the opposite."""

    def __init__(self, width: int):
        super().__init__()
        self.project_out = nn.Linear(len(LEVELS), width)

    def forward(self, codes: Tensor) -> Tensor:
        return self.project_out(code_digits(codes).to(self.project_out.weight.dtype))


class ResidualConvolutions(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, width, eps=1e-6)
        self.conv1 = nn.Conv1d(width, width, 3, padding=1)
        self.norm2 = nn.GroupNorm(GROUPS, width, eps=1e-6)
        self.conv2 = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, N)
        h = self.conv1(F.silu(self.norm1(x)))
        return x + self.conv2(F.silu(self.norm2(h)))


class UnplacedAttention(nn.Module):
    """Every code attends to all others, without positions."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, N, C)
        q, k, v = (self._split(layer(x)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        """(B, N, C) -> (B, heads, N, D)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class TwoLayerMLP(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width, bias=False)
        self.fc2 = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.silu(self.fc1(x)))


class UnplacedLayer(nn.Module):
    """A layer of the transformer."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(width, eps=1e-6)
        self.self_attn = UnplacedAttention(width, heads)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=1e-6)
        self.mlp = TwoLayerMLP(width)

    def forward(self, x: Tensor) -> Tensor:  # (B, N, C)
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class SpectrumHead(nn.Module):
    """States (B, N, C) -> the window of sound that each code adds (B, N, n)."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, WINDOW + 2)  # magnitude and phase of F = n / 2 + 1
        self.register_buffer("window", torch.hann_window(WINDOW), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        magnitude, phase = self.linear(x).float().chunk(2, dim=-1)
        spectrum = torch.polar(magnitude.exp().clamp(max=LOUDEST), phase)
        return torch.fft.irfft(spectrum, WINDOW) * self.window

    def sound(self, windows: Tensor) -> Tensor:
        """Windows (B, N, n), a code after the other -> waveform (B, L), `HOP` samples a code."""
        square = self.window.square().expand(1, windows.shape[1], -1)
        weight = overlap_add(square, HOP).clamp(min=1e-11)
        beside = (WINDOW - HOP) // 2  # a code's own samples are in the middle of its window
        return (overlap_add(windows, HOP) / weight)[:, beside:-beside]


class NeuCodecDecoder(nn.Module):
    """Latents (B, N, C') -> the windows of sound that the codes add (B, N, n)."""

    def __init__(self, latent_width: int, width: int, layers: int, heads: int):
        super().__init__()
        self.fc = nn.Linear(latent_width, width)
        self.embed = nn.Conv1d(width, width, 7, padding=3)
        self.prior_net = nn.Sequential(*(ResidualConvolutions(width) for _ in range(2)))
        self.layers = nn.Sequential(*(UnplacedLayer(width, heads) for _ in range(layers)))
        self.post_net = nn.Sequential(*(ResidualConvolutions(width) for _ in range(2)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = SpectrumHead(width)

    def forward(self, latents: Tensor) -> Tensor:
        h = self.prior_net(self.embed(self.fc(latents).mT))
        h = self.post_net(self.layers(h.mT).mT)
        return self.head(self.norm(h.mT))
