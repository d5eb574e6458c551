"""The small networks (codec, recogniser): their layers, and training as long as a corpus needs.

A cycle of `steps` steps with warm-up and decay (Smith and Topin 2018) is followed by another of
twice the length (warm restarts: Loshchilov and Hutter 2017) while the held-out metric still
improves, is not good enough, and the time limit allows. The weights of the best cycle are kept.

Shapes: B batch, C channels, T frames, N codes, Q quantised values per code.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.base.errors import KitError
from kit.base.hardware import autocast
from kit.settings import FitConfig

MAX_OVERFLOWS = 20  # steps in a row that fp16 may overflow while its loss scale settles
TIMED_STEPS = 20  # after which the duration of the first cycle is predicted
CLIP_NORM = 1.0  # not clipped, a codec's second cycle once diverged on a GPU (docs/measurements.md)

Losses = Iterator[tuple[int, float]]  # (step, loss) of a training


class FitSchedule:
    """Decides how many steps a training takes, and records why it ended.

    `evaluate()` returns the held-out metric of the model in eval mode, lower is better; without it
    there is one cycle.
    """

    def __init__(self, config: FitConfig, evaluate: Callable[[], float] | None = None):
        self.config = config
        self.evaluate = evaluate
        self.step = 0
        self.cycle_steps = config.steps  # of the current cycle
        self.steps = config.steps  # up to the end of the current cycle
        self.metrics: list[tuple[int, float]] = []  # (step, held-out metric)
        self.cycle_metrics: list[float] = []  # at the end of each cycle
        self.is_best = False  # whether the last step ended the best cycle so far
        self.losses: list[float] = []
        self.skipped = 0  # steps that overflowed fp16
        self.reason = ""  # why training ended; "" while it has not
        self.start_s = time.monotonic()
        self.time_limit = f"the limit of {config.minutes:g} minutes, while still improving"

    @property
    def figure(self) -> float:
        """The latest held-out metric, or the best cycle's once done; NaN before the first."""
        if self.reason:
            return min(self.cycle_metrics)
        return self.metrics[-1][1] if self.metrics else math.nan

    @property
    def ending(self) -> str:
        """Where and why training ended, as a phrase."""
        skipped = f" ({self.skipped} skipped after fp16 overflows)" if self.skipped else ""
        return f"after {self.step:,} steps{skipped}: {self.reason}"

    def advance(self, loss: float, taken: bool) -> bool:
        """Count a step, `taken` or skipped; return whether a new cycle starts after it."""
        self.step += 1
        self.losses.append(loss)
        self.skipped += not taken
        at_end = self.step == self.steps
        self.is_best = False
        if self.evaluate and (at_end or self.step % self.config.look_every == 0):
            self.metrics.append((self.step, self.evaluate()))
        if not at_end:
            return self.step == TIMED_STEPS and self._shorten()
        self.cycle_metrics.append(self.figure)
        self.is_best = self.figure == min(self.cycle_metrics)
        # The next cycle has twice as many steps, or what time is left for.
        next_steps = min(2 * self.cycle_steps, self._steps_left(2 * self.cycle_steps))
        self.reason = self._reason_to_end(next_steps)
        if self.reason:
            return False
        self.cycle_steps = next_steps
        self.steps += next_steps
        return True

    def _shorten(self) -> bool:
        """Restart the first cycle with fewer steps if it would not end in time, and say whether."""
        config = self.config
        shorter = max(config.least_steps, self._steps_left(config.steps))
        if not config.least_steps or not config.minutes or shorter >= config.steps - self.step:
            return False
        self.cycle_steps = shorter
        self.steps = self.step + shorter
        return True

    def _steps_left(self, unknown: int) -> int:
        """Steps that the remaining minutes allow; `unknown` when no time has passed yet."""
        elapsed_s = time.monotonic() - self.start_s
        left_s = 60 * self.config.minutes - elapsed_s
        return int(left_s * self.step / elapsed_s) if elapsed_s else unknown

    def _reason_to_end(self, next_steps: int) -> str:
        if self.evaluate is None:
            return "no held-out clips to evaluate, so only the minimum number of steps"
        if self.figure <= self.config.good:
            return "good enough"
        best_before = min(self.cycle_metrics[:-1], default=math.inf)
        if self.figure > (1 - self.config.least_gain) * best_before:
            return "no further improvement"
        if next_steps < self.cycle_steps:  # a shorter cycle would undo this one
            return self.time_limit if self.config.minutes else "only one cycle was requested"
        return ""

    def follow(self, steps: Losses, progress: Callable[[int, int, str], None]) -> dict:
        """Train to the end, calling `progress(step, steps, detail)`; return entries of a report."""
        for step, _ in steps:
            metric = f"   held-out {self.figure:.3f}" if self.metrics else ""
            progress(step, max(self.steps, step), f"loss {self.recent_loss:.3f}{metric}")
        return self.record()

    @property
    def recent_loss(self) -> float:
        return sum(self.losses[-20:]) / max(1, len(self.losses[-20:]))

    def record(self) -> dict:
        return {
            "loss": self.recent_loss,
            "held_out": self.figure,
            "steps": self.step,
            "seconds": round(time.monotonic() - self.start_s, 1),
            "ended": self.reason,
            "cut_short": self.reason == self.time_limit,
            "minutes": self.config.minutes,  # the limit
            "overflows": self.skipped,
            "held_out_by_step": [list(pair) for pair in self.metrics],
        }


def fit_model(
    fit_schedule: FitSchedule,
    model: nn.Module,
    batch_loss: Callable[[], Tensor],
    device: str,
    precision: str,
    lr: float,
    betas: tuple[float, float],
    warmup_share: float,
) -> Losses:
    """Train with AdamW on `batch_loss()` until the schedule ends; the model ends on the CPU."""
    model.to(device)
    scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")
    not_finite = 0  # steps in a row
    best_weights = None
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas, weight_decay=0.01, fused=True)
    lr_schedule = one_cycle(optimizer, lr, fit_schedule.cycle_steps, warmup_share)
    while not fit_schedule.reason:
        model.train()
        with autocast(device, precision):
            loss = batch_loss()
        not_finite = 0 if math.isfinite(loss.item()) else not_finite + 1
        if not_finite > (MAX_OVERFLOWS if scaler.is_enabled() else 0):
            raise KitError(
                f"The loss was {loss.item()} at step {fit_schedule.step + 1}. Lower `lr` (now "
                f"{lr:g}), turn mixed precision off, or look for a recording with absurd samples; "
                "then run again. This training saved nothing."
            )
        taken = backward_and_step(loss, optimizer, scaler)
        if taken:
            lr_schedule.step()
        model.eval()  # to be evaluated
        new_cycle = fit_schedule.advance(loss.item(), taken)
        if fit_schedule.is_best:
            best_weights = copy.deepcopy(model.state_dict())
        yield fit_schedule.step, loss.item()
        if new_cycle:
            lr_schedule = one_cycle(optimizer, lr, fit_schedule.cycle_steps, warmup_share)
    if best_weights is not None:
        model.load_state_dict(best_weights)
    model.cpu().eval()


def one_cycle(
    optimizer: torch.optim.Optimizer, lr: float, steps: int, warmup_share: float
) -> torch.optim.lr_scheduler.OneCycleLR:
    # PyTorch divides by the number of warm-up steps less one, which must not be 0.
    share = warmup_share if warmup_share * steps != 1 else 1.5 / steps
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps, pct_start=share)


def backward_and_step(
    loss: Tensor, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler
) -> bool:
    """Take one clipped step, with loss scaling for fp16; return whether it was taken."""
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], CLIP_NORM)
    taken = not scaler.is_enabled() or math.isfinite(norm.item())
    if taken:
        optimizer.step()
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return taken


class ConvNeXtBlock(nn.Module):
    """Residual block: depthwise convolution over time, then a two-layer MLP (Liu et al. 2022)."""

    reach = 3  # frames of context on either side

    def __init__(self, width: int):
        super().__init__()
        self.mix = nn.Conv1d(width, width, 2 * self.reach + 1, padding=self.reach, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, T)
        h = self.norm(self.mix(x).mT)
        return x + self.down(F.gelu(self.up(h))).mT


class FSQ(nn.Module):
    """Finite scalar quantisation (Mentzer et al. 2023): real values (B, N, Q) <-> codes (B, N).

    Each value is rounded to one of a few levels; a code is a combination, so none can collapse.
    """

    def __init__(self, levels: tuple):
        super().__init__()
        self.register_buffer("levels", torch.tensor(levels), persistent=False)
        basis = torch.cumprod(torch.tensor((1, *levels[:-1])), 0)
        self.register_buffer("basis", basis, persistent=False)

    def quantize(self, z: Tensor, noise_share: float = 0.0) -> tuple[Tensor, Tensor]:
        """Return values in [-1, 1] with a straight-through gradient, and their codes.

        A `noise_share` of the rows get uniform noise one level wide instead of rounding, whose
        gradient is exact (Balle et al. 2017; half of the rows: Parker et al. 2024).
        """
        top = (self.levels - 1) / 2
        bounded = (torch.tanh(z) + 1) * top  # 0 .. levels - 1
        rounded = bounded.round()
        value = bounded + (rounded - bounded).detach()
        if noise_share:
            noisy = torch.rand(len(z), 1, 1, device=z.device) < noise_share
            value = torch.where(noisy, bounded + torch.rand_like(bounded) - 0.5, value)
        return value / top - 1, (rounded.long() * self.basis).sum(-1)

    def dequantize(self, codes: Tensor) -> Tensor:
        """Return the quantised values (B, N, Q) of codes (B, N)."""
        digits = codes[..., None] // self.basis % self.levels
        return digits / ((self.levels - 1) / 2) - 1
