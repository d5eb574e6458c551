"""Training of the networks that make sound: random crops of recordings, and spectrogram critics.

L1 loss on spectrograms alone fills the gaps between harmonics and sounds hoarse, so patch critics
(Isola et al. 2017) with a hinge loss (Lim and Ye 2017) and feature matching (Kumar et al. 2019) are
added.

Shapes: B batch, F frequencies (bins or mels), T frames, L samples, N codes, D width of a model's
hidden states.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from kit.audio.codec import ClipWithStates
from kit.audio.fitting import Losses
from kit.base.errors import KitError

# Weights of the L1 loss and of feature matching, relative to the critics' scores. With a third of
# the L1 weight and 2.5 times the rate, DNSMOS rises a third less; critics that also see the
# generator's input cost 2.6 points of CER and gain nothing.
L1_WEIGHT = 10.0
FEATURE_WEIGHT = 2.0
RATE = 4e-4  # of the generator and of the critics
L1_RATE = 1e-3  # of the generator without critics
BETAS = (0.8, 0.99)
WARMUP_STEPS = 50
FINAL_RATE = 0.1  # learning rate of the generator at the end, as a share of its peak
CLIP_NORM = 10.0
# Of each layer: channels in and out as multiples of the critic's width (0: one channel), kernel and
# stride in frequency and time.
LAYERS = (
    (0, 1, (7, 3), (2, 1)),
    (1, 2, (5, 3), (2, 1)),
    (2, 2, (5, 3), (2, 2)),
    (2, 2, (5, 3), (2, 1)),
)

# Spectrograms of recordings, the same spectrograms as generated, and the L1 loss between them.
Comparison = tuple[list[Tensor], list[Tensor], Tensor]


class Critic(nn.Module):
    """Log-spectrogram (B, F, T) -> a score for each patch, and the features of every layer."""

    def __init__(self, width: int = 16):
        super().__init__()
        layers = []
        for before, after, kernel, stride in LAYERS:
            padding = tuple(size // 2 for size in kernel)
            size = (before * width or 1, after * width)
            layers.append(weight_norm(nn.Conv2d(*size, kernel, stride, padding)))
        self.layers = nn.ModuleList(layers)
        self.score = weight_norm(nn.Conv2d(LAYERS[-1][1] * width, 1, 3, padding=1))

    def forward(self, spectrogram: Tensor) -> tuple[Tensor, list[Tensor]]:
        h = (spectrogram[:, None] + 3) / 3  # roughly zero mean, unit variance
        features = []
        for layer in self.layers:
            h = F.leaky_relu(layer(h), 0.2)
            features.append(h)
        return self.score(h), features


def train_generator(
    parameters: list[nn.Parameter],
    compare: Callable[[], Comparison],
    steps: int,
    adversarial: bool,
    alternate: bool = False,
) -> Losses:
    """Train `parameters` for `steps`, yielding (step, L1 loss).

    `compare()` runs the generator on a new batch. With `adversarial` there is one critic per
    spectrogram of it, of which each step uses all, or with `alternate` only one in turn. Raises
    KitError when the loss is not finite.
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


# --- crops -----------------------------------------------------------------------------------


class CropShape(NamedTuple):
    codes: int
    code_samples: int  # per code
    samples: int  # from the centre of the first frame to that of the last
    margin: int  # further samples on either side that a spectrogram of them needs


class StateCrops(NamedTuple):
    """Crops of recordings with their codes and a model's states."""

    wave: Tensor  # (B, L), margins included
    codes: Tensor  # (B, N)
    states: Tensor  # (B, N, D), each the one that predicted its code
    dropped: Tensor  # (B, 1, 1): rows to be decoded without states


def state_crops(
    clips: list[ClipWithStates],
    shape: CropShape,
    count: int,
    generator: torch.Generator,
    dropped_share: float,
) -> StateCrops:
    """Draw `count` crops; those of a clip that is too short repeat its last code, in silence."""
    drawn = []
    length = shape.samples + 2 * shape.margin
    for _ in range(count):
        clip = clips[int(torch.randint(len(clips), (), generator=generator))]
        starts = max(1, len(clip.codes) - shape.codes + 1)
        start = int(torch.randint(starts, (), generator=generator))
        index = torch.arange(start, start + shape.codes).clamp(max=len(clip.codes) - 1)
        first = start * shape.code_samples - shape.margin
        wave = F.pad(clip.wave, (max(0, -first), max(0, first + length - len(clip.wave))))
        wave = wave[max(0, first) :][:length]
        drawn.append((wave, clip.codes[index], clip.states[index].float()))
    dropped = torch.rand(count, 1, 1, generator=generator) < dropped_share
    return StateCrops(*map(torch.stack, zip(*drawn)), dropped)


def crops(waves: list[Tensor], samples: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw `count` crops of clips (L,), as (B, samples); shorter clips are padded with silence."""
    drawn = []
    for _ in range(count):
        wave = waves[int(torch.randint(len(waves), (), generator=generator))]
        wave = F.pad(wave, (0, max(0, samples - len(wave))))
        start = int(torch.randint(len(wave) - samples + 1, (), generator=generator))
        drawn.append(wave[start : start + samples])
    return torch.stack(drawn)
