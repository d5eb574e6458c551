"""How long the codec and the recogniser are trained: as long as a corpus asks.

A `Course` is a cycle of `steps` steps with warm-up and decay (one cycle: Smith and Topin 2018),
then a look at held-out clips; while the figure is not good enough and still falls, another cycle of
twice the length (warm restarts: Loshchilov and Hutter 2017), until the minutes are up. What is kept
are the weights of the cycle that ended best. Knows a loss and a figure; nothing of sound or text.
"""

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from kit.base.config import require_within
from kit.base.gradients import descend, loss_scaler
from kit.base.hardware import autocast

PATIENCE = 20  # steps in a row that fp16 may overflow while its scale is sought
TRIED_STEPS = 20  # after which a first cycle's length is foretold


class CourseError(ValueError):
    """A training that went astray; the message says where, and what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CourseConfig:
    """How long a small network is trained."""

    steps: int = 400  # optimiser steps of the first cycle
    least_steps: int = 0  # a first cycle is shortened down to these, to end in time; 0: it is not
    minutes: float = 20.0  # no further cycle begins that would end after these
    good: float = 0.0  # held-out figure that is good enough
    least_gain: float = 0.02  # share by which a cycle must lower the figure, or it falls no more
    look_every: int = 100  # steps between two looks at the held-out clips

    def __post_init__(self):
        require_within(self, 2, 1e9, "steps")
        require_within(self, 0, 1e9, "least_steps")
        require_within(self, 0, 1e6, "minutes", "good")
        require_within(self, 0, 0.99, "least_gain")
        require_within(self, 1, 1e9, "look_every")


class Course:
    """Where one training stands: how many steps it takes, and why it ends.

    `look()` returns the held-out figure, lower is better; without it there is one cycle. The end
    follows from figures and steps alone unless the minutes run out, so it is repeatable.
    """

    def __init__(
        self,
        config: CourseConfig,
        look: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.config = config
        self.look = look
        self.clock = clock
        self.step = 0
        self.cycle_steps = config.steps  # of the cycle it is in
        self.steps = config.steps  # in all, up to the end of that cycle
        self.looks: list[tuple[int, float]] = []  # (step, figure)
        self.ends: list[float] = []  # the figure at the end of each cycle
        self.ended_best = False  # whether the last step ended a cycle, and none ended better
        self.losses: list[float] = []
        self.skipped = 0  # steps that overflowed fp16
        self.reason = ""  # why it has ended
        self.began_s = clock()

    @property
    def done(self) -> bool:
        return bool(self.reason)

    @property
    def cut_short(self) -> bool:
        """Whether only the minutes ended it."""
        return self.reason == self._out_of_time

    @property
    def _out_of_time(self) -> str:
        return f"the limit of {self.config.minutes:g} minutes, while it still got better"

    @property
    def figure(self) -> float:
        """The held-out figure: of the last look, and once done of what is kept; NaN before any."""
        if self.done:
            return min(self.ends)
        return self.looks[-1][1] if self.looks else math.nan

    @property
    def ending(self) -> str:
        """Where and why it ended, in words."""
        skipped = f", {self.skipped} of them left out (fp16 overflows)" if self.skipped else ""
        return f"after {self.step:,} steps{skipped}: {self.reason}"

    def advance(self, loss: float, taken: bool) -> bool:
        """Count a step, `taken` or left out; whether a cycle begins after it."""
        self.step += 1
        self.losses.append(loss)
        self.skipped += not taken
        at_end = self.step == self.steps
        self.ended_best = False
        if self.look and (at_end or self.step % self.config.look_every == 0):
            self.looks.append((self.step, self.look()))
        if not at_end:
            return self.step == TRIED_STEPS and self._shortened()
        self.ends.append(self.figure)
        self.ended_best = self.figure == min(self.ends)
        further_steps = self._further_steps()
        self.reason = self._reason(further_steps)
        if self.done:
            return False
        self.cycle_steps = further_steps
        self.steps += further_steps
        return True

    def _shortened(self) -> bool:
        """Whether the first cycle begins anew, shorter: as long, it would not end in time here."""
        config = self.config
        if not config.least_steps or not config.minutes:
            return False
        fitting = max(config.least_steps, self._room(config.steps))
        if fitting >= config.steps - self.step:
            return False
        self.cycle_steps = fitting
        self.steps = self.step + fitting
        return True

    def _further_steps(self) -> int:
        """Steps of another cycle: twice as many, or what the minutes leave room for."""
        return min(2 * self.cycle_steps, self._room(2 * self.cycle_steps))

    def _room(self, wanted: int) -> int:
        """Steps that fit into the minutes left; `wanted` where no time has passed yet."""
        elapsed_s = self.clock() - self.began_s
        left_s = 60 * self.config.minutes - elapsed_s
        return int(left_s * self.step / elapsed_s) if elapsed_s else wanted

    def _reason(self, further_steps: int) -> str:
        """Why to end here; "" to go on."""
        if self.look is None:
            return "no held-out clips to look at: the least number of steps"
        if self.figure <= self.config.good:
            return "good enough"
        if len(self.ends) > 1 and self.figure > (1 - self.config.least_gain) * min(self.ends[:-1]):
            return "falls no more"
        if further_steps < self.cycle_steps:  # a shorter cycle would undo what this one has learnt
            return self._out_of_time if self.config.minutes else "the steps asked for"
        return ""

    def follow(
        self, steps: Iterable[tuple[int, float]], progress: Callable[[int, int, str], None]
    ) -> dict:
        """Train to the end, `progress(step, steps, detail)` along the way; returns `record()`."""
        for step, _ in steps:
            progress(step, max(self.steps, step), self.line())
        return self.record()

    def line(self) -> str:
        """The latest loss and held-out figure, for a line of progress."""
        held = f"   held-out {self.figure:.3f}" if self.looks else ""
        return f"loss {self.recent_loss:.3f}{held}"

    @property
    def recent_loss(self) -> float:
        recent = self.losses[-20:]
        return sum(recent) / max(1, len(recent))

    def record(self) -> dict:
        """The figures for a run's record."""
        return {
            "loss": self.recent_loss,
            "held_out": self.figure,
            "steps": self.step,
            "seconds": round(self.clock() - self.began_s, 1),
            "ended": self.reason,
            "cut_short": self.cut_short,
            "minutes": self.config.minutes,  # it had, at most
            "overflows": self.skipped,
            "held_out_by_step": [list(pair) for pair in self.looks],
        }


def train_course(
    course: Course,
    model: nn.Module,
    batch_loss: Callable[[], Tensor],
    device: str,
    precision: str,
    lr: float,
    betas: tuple[float, float],
    warmup_share: float,
    clip_norm: float | None = None,
) -> Iterator[tuple[int, float]]:
    """AdamW on `batch_loss()` for as long as `course` says, yielding (step, loss).

    `model` goes to `device`, and is left on the CPU in eval mode. Raises CourseError where the loss
    is not finite, in fp16 where it stays so.
    """
    model.to(device).train()
    scaler = loss_scaler(device, precision)
    astray = 0  # steps in a row
    best = None  # the weights that ended a cycle best
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, betas=betas, weight_decay=0.01, fused=True
    )
    schedule = one_cycle(optimizer, lr, course.cycle_steps, warmup_share)
    while not course.done:
        with autocast(device, precision):
            loss = batch_loss()
        astray = 0 if math.isfinite(loss.item()) else astray + 1
        if astray > (PATIENCE if scaler.is_enabled() else 0):
            raise CourseError(
                f"The loss was {loss.item()} at step {course.step + 1}. Lower `lr` (now {lr:g}) or "
                "turn mixed precision off, and look among the recordings for one with absurd "
                "samples; then run again. Nothing of this training was kept."
            )
        taken = descend(loss, optimizer, scaler, clip_norm)
        if taken:
            schedule.step()
        anew = course.advance(loss.item(), taken)
        if course.ended_best:
            best = copy.deepcopy(model.state_dict())
        yield course.step, loss.item()
        if anew:
            schedule = one_cycle(optimizer, lr, course.cycle_steps, warmup_share)
    if best is not None:
        model.load_state_dict(best)
    model.cpu().eval()


def one_cycle(
    optimizer: torch.optim.Optimizer, lr: float, steps: int, warmup_share: float
) -> torch.optim.lr_scheduler.OneCycleLR:
    # PyTorch divides by the steps of warm-up less one, which must not be 0.
    share = warmup_share if warmup_share * steps != 1 else 1.5 / steps
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps, pct_start=share)
