"""Sound that is not blurred: a network trained until critics cannot tell what it makes from speech.

The mean absolute error of a spectrogram is least for the middle of all that could be there, which
fills the gaps between harmonics and sounds hoarse. Critics look at patches of spectrograms (Isola
et al. 2017), recorded and made, with a hinge loss (Lim and Ye 2017); the maker learns from what
they say, from what they see on the way (feature matching, Kumar et al. 2019), and still from the
error. Knows spectrograms; nothing of codes or files.

Shapes: B batch, F frequencies (bins or mels), T frames, C channels.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from kit.audio.fitting import CourseError

# Of the error and of the critics' features, beside what the critics say themselves. With a third of
# the error and two and a half times the rate DNSMOS rises by a third less; critics that also see
# what the maker was before take 2.6 points of CER and give nothing.
ERROR_WEIGHT = 10.0
FEATURE_WEIGHT = 2.0
RATE = 4e-4  # of the maker and of the critics
ERROR_RATE = 1e-3  # of the maker without critics
BETAS = (0.8, 0.99)
WARMUP_STEPS = 50
FINAL_RATE = 0.1  # of the maker's, at the end
CLIP_NORM = 10.0
# Of a layer: channels in and out, as multiples of the critic's width (the first takes one), kernel,
# stride; in frequency and time.
LAYERS = (
    (0, 1, (7, 3), (2, 1)),
    (1, 2, (5, 3), (2, 1)),
    (2, 2, (5, 3), (2, 2)),
    (2, 2, (5, 3), (2, 1)),
)

# What is compared: spectrograms of recordings, the same as made, and the error between them.
Views = tuple[list[Tensor], list[Tensor], Tensor]


class Critic(nn.Module):
    """Log-spectrogram (B, F, T) -> a score for each of its patches, and what it saw on the way."""

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
        h = (spectrogram[:, None] + 3) / 3  # roughly zero mean, unit spread
        seen = []
        for layer in self.layers:
            h = F.leaky_relu(layer(h), 0.2)
            seen.append(h)
        return self.score(h), seen


def sharpen(
    parameters: list[nn.Parameter],
    views: Callable[[], Views],
    steps: int,
    device: str,
    seed: int,
    in_turns: bool = False,
) -> Iterator[tuple[int, float]]:
    """Train `parameters` on what `views` makes of them, for `steps`, yielding (step, error).

    There is a critic for each spectrogram of a view; they are made here, and thrown away. They look
    at every step, or `in_turns`, one at each. Raises ValueError where the error is not finite.
    """
    critics = None
    maker = torch.optim.AdamW(parameters, RATE, BETAS)
    for step in range(1, steps + 1):
        real, made, error = views()
        require_finite_error(error, step)
        if critics is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                critics = nn.ModuleList(Critic() for _ in real).to(device)
            judges = torch.optim.AdamW(critics.parameters(), RATE, BETAS)
        warm = min(1.0, step / WARMUP_STEPS)
        judges.param_groups[0]["lr"] = RATE * warm
        maker.param_groups[0]["lr"] = RATE * warm * (1 - (1 - FINAL_RATE) * step / steps)
        looks = list(zip(critics, real, made, strict=True))
        if in_turns:
            looks = [looks[step % len(looks)]]
        take_step(judges, sum(critic_loss(*look) for look in looks))
        told = sum(maker_loss(*look) for look in looks) * len(critics) / len(looks)
        take_step(maker, ERROR_WEIGHT * error + told)
        yield step, error.item()


def train_maker(
    parameters: list[nn.Parameter], views: Callable[[], Views], steps: int, device: str, seed: int
) -> Iterator[tuple[int, float]]:
    """As `sharpen`, on the error alone: where synthetic speech is learnt, which blurs little."""
    maker = torch.optim.AdamW(parameters, ERROR_RATE, BETAS)
    for step in range(1, steps + 1):
        error = views()[2]
        require_finite_error(error, step)
        warm = min(1.0, step / WARMUP_STEPS)
        maker.param_groups[0]["lr"] = ERROR_RATE * warm * (1 - (1 - FINAL_RATE) * step / steps)
        take_step(maker, error)
        yield step, error.item()


def require_finite_error(error: Tensor, step: int) -> None:
    if not torch.isfinite(error):
        raise CourseError(
            f"The error was {error.item()} at step {step} of training the sound. Do without, with "
            "`--set codec.sharpen_steps=0 sound.steps=0`, or look for a damaged recording."
        )


def critic_loss(critic: Critic, real: Tensor, made: Tensor) -> Tensor:
    """Hinge: scores above 1 for what was recorded, below -1 for what was made."""
    return F.relu(1 - critic(real)[0]).mean() + F.relu(1 + critic(made.detach())[0]).mean()


def maker_loss(critic: Critic, real: Tensor, made: Tensor) -> Tensor:
    """Less where the critic takes what was made for a recording, and sees the same in both."""
    with torch.no_grad():
        wanted = critic(real)[1]
    score, seen = critic(made)
    alike = sum(F.l1_loss(a, b) for a, b in zip(seen, wanted)) / len(wanted)
    return FEATURE_WEIGHT * alike - score.mean()


def take_step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], CLIP_NORM)
    optimizer.step()
