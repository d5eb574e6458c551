"""Spectrogram -> waveform: fast Griffin-Lim and a neural vocoder.

`GriffinLim` (Perraudin et al. 2013) is local: a slice of an utterance with `context` frames around
it gets the same samples as in the full one, so streaming is exact. `Vocoder` (Vocos: Siuzdak 2023)
predicts each bin's phase and a correction of its magnitude, then takes one inverse transform.

Networks that make sound learn from random crops by the L1 loss of spectrograms. That alone sounds
hoarse, so patch critics (Isola et al. 2017) with a hinge loss (Lim and Ye 2017) and feature
matching (Kumar et al. 2019) join after some steps.

Shapes: B batch, F frequencies (bins or mels), T frames, C channels, L samples.
"""

import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from kit.audio.fitting import ConvNeXtBlock, Losses
from kit.audio.spectrogram import Mel, squared_magnitude
from kit.base.errors import KitError

NOISE_FRAMES = 128  # the random initial phase repeats after this many frames, inaudibly
MOMENTUM = 0.99
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

# Weights of the L1 loss and of feature matching, relative to the critics' scores. With a third of
# the L1 weight and 2.5 times the rate, DNSMOS rises a third less.
L1_WEIGHT = 10.0
FEATURE_WEIGHT = 2.0
RATE = 4e-4  # of the generator and of the critics
L1_RATE = 1e-3  # of the generator without critics
BETAS = (0.8, 0.99)
WARMUP_STEPS = 50
FINAL_RATE = 0.1  # learning rate of the generator at the end, as a share of its peak
CLIP_NORM = 10.0
# Of each layer of a critic: channels in and out, kernel and stride in frequency and time.
LAYERS = (
    (1, 16, (7, 3), (2, 1)),
    (16, 32, (5, 3), (2, 1)),
    (32, 32, (5, 3), (2, 2)),
    (32, 32, (5, 3), (2, 1)),
)

# Spectrograms of recordings, the same spectrograms as generated, and the L1 loss between them.
Comparison = tuple[list[Tensor], list[Tensor], Tensor]


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


def to_wave(spectrum: Tensor, window: Tensor, hop: int) -> Tensor:
    """Spectrum (B, T, F) of centred frames -> waveform (B, T * hop)."""
    frames = spectrum.shape[1]
    wave = windowed_sum(spectrum, window, hop) / window_envelope(window, frames, hop)
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
        return to_wave(spectrum, self.window, self.hop)


class Critic(nn.Module):
    """Log-spectrogram (B, F, T) -> a score for each patch, and the features of every layer."""

    def __init__(self):
        super().__init__()
        layers = []
        for before, after, kernel, stride in LAYERS:
            padding = tuple(size // 2 for size in kernel)
            layers.append(weight_norm(nn.Conv2d(before, after, kernel, stride, padding)))
        self.layers = nn.ModuleList(layers)
        self.score = weight_norm(nn.Conv2d(LAYERS[-1][1], 1, 3, padding=1))

    def forward(self, spectrogram: Tensor) -> tuple[Tensor, list[Tensor]]:
        h = (spectrogram[:, None] + 3) / 3  # roughly zero mean, unit variance
        features = []
        for layer in self.layers:
            h = F.leaky_relu(layer(h), 0.2)
            features.append(h)
        return self.score(h), features


def train_generator(
    parameters: Iterable[nn.Parameter],
    compare: Callable[[], Comparison],
    steps: int,
    adversarial: bool,
    alternate: bool = False,
) -> Losses:
    """Train `parameters` for `steps`, yielding (step, L1 loss).

    `compare()` runs the generator on a new batch. With `adversarial` there is one critic per
    spectrogram of it, of which each step uses all, or with `alternate` only one in turn.
    """
    critics = None
    peak = RATE if adversarial else L1_RATE
    optimizer = torch.optim.AdamW(parameters, peak, BETAS)
    for step in range(1, steps + 1):
        real, generated, error = compare()
        if not torch.isfinite(error):
            raise KitError(
                f"The loss was {error.item()} at step {step} of training the codec's decoder. Skip "
                "it with `--set codec.sharpen_steps=0 decoder_finetune.steps=0`, or look for a "
                "damaged recording."
            )
        loss = error
        warmup = min(1.0, step / WARMUP_STEPS)
        if adversarial:
            if critics is None:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(0)
                    critics = nn.ModuleList(Critic() for _ in real).to(error.device)
                critic_optimizer = torch.optim.AdamW(critics.parameters(), RATE, BETAS)
            critic_optimizer.param_groups[0]["lr"] = RATE * warmup
            pairs = list(zip(critics, real, generated, strict=True))
            if alternate:
                pairs = [pairs[step % len(pairs)]]
            take_step(critic_optimizer, sum(critic_loss(*pair) for pair in pairs))
            scores = sum(generator_loss(*pair) for pair in pairs) * len(critics) / len(pairs)
            loss = L1_WEIGHT * error + scores
        decay = 1 - (1 - FINAL_RATE) * step / steps
        optimizer.param_groups[0]["lr"] = peak * warmup * decay
        take_step(optimizer, loss)
        yield step, error.item()


def critic_loss(critic: Critic, real: Tensor, generated: Tensor) -> Tensor:
    """Hinge loss: scores above 1 for recordings, below -1 for generated spectrograms."""
    return F.relu(1 - critic(real)[0]).mean() + F.relu(1 + critic(generated.detach())[0]).mean()


def generator_loss(critic: Critic, real: Tensor, generated: Tensor) -> Tensor:
    """Negative score plus the distance between the critic's features of both."""
    with torch.no_grad():
        wanted = critic(real)[1]
    score, features = critic(generated)
    distance = sum(F.l1_loss(a, b) for a, b in zip(features, wanted)) / len(wanted)
    return FEATURE_WEIGHT * distance - score.mean()


def take_step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], CLIP_NORM)
    optimizer.step()


def crops(waves: list[Tensor], samples: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw `count` crops of clips (L,), as (B, samples); shorter clips are padded with silence."""
    drawn = []
    for _ in range(count):
        wave = waves[int(torch.randint(len(waves), (), generator=generator))]
        wave = F.pad(wave, (0, max(0, samples - len(wave))))
        start = int(torch.randint(len(wave) - samples + 1, (), generator=generator))
        drawn.append(wave[start : start + samples])
    return torch.stack(drawn)


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
        return to_wave(torch.polar(*self.polar(log_magnitude)), self.window, self.hop)


def train_vocoder(
    vocoder: Vocoder, mel: Mel, pairs: Callable[[], Pair], steps: int, l1_share: float = L1_SHARE
) -> Losses:
    """Train on what `pairs()` draws, against critics after `l1_share`; yields (step, L1 loss)."""

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
