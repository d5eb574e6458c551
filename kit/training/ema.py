"""Exponential moving average of the weights, in fp32, with a decay that warms up.

The average of the last steps is a quieter model than any one of them (Polyak and Juditsky 1992).
Early on, a decay of 0.999 would remember the random start for a thousand steps, so the decay at
update n is min(decay, (1 + n) / (10 + n)). Knows a module's parameters; nothing of training.

In the CPU's memory the average costs a copy of all weights each time it moves, so there it moves
every few steps, by as much as in all of them together.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# Steps between two moves of an average that is kept away from the model. What it averages is 3.5
# steps newer then: of its distance from the weights 3 % at step 1,000, as the decay still warms up,
# and in the end 0.35 % with a decay of 0.999.
AWAY_STEPS = 8


class EMA:
    """`shadow` holds the averaged parameters by name, fp32, on `device` (or beside the model).

    Those are `averaged` where it is given, else all of the model's: what is frozen needs none.
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float = 0.999,
        device: str | None = None,
        averaged: dict[str, nn.Parameter] | None = None,
    ):
        if not 0 < decay < 1:
            raise ValueError(
                f"ema_decay = {decay}: choose a number between 0 and 1, such as 0.999."
            )
        self.averaged = dict(model.named_parameters()) if averaged is None else averaged
        self.decay = decay
        self.every = AWAY_STEPS if device else 1
        self.updates = 0
        self.kept = 1.0  # share of the average that the steps since its last move leave of it
        self.shadow = {
            name: p.detach().to(device or p.device, torch.float32, copy=True)
            for name, p in self.averaged.items()
        }

    def update(self) -> None:
        """Count a step of the model's weights; the average moves every `every` steps."""
        self.kept *= min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        if self.updates % self.every == 0:
            self._move()

    @torch.no_grad()
    def _move(self) -> None:
        """Move the average towards the weights at hand, for all steps since its last move."""
        if self.kept == 1.0:
            return
        shadow = list(self.shadow.values())
        now = [
            p.detach().to(s.device, torch.float32) for p, s in zip(self.averaged.values(), shadow)
        ]
        torch._foreach_lerp_(shadow, now, 1 - self.kept)
        self.kept = 1.0

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model holds the average inside the block; after it its own weights, bit for bit.

        They wait on the average's device. Between two steps the gradients are gone, so the copy
        takes no more memory than a step did.
        """
        self._move()
        own = {
            name: p.detach().to(self.shadow[name].device, copy=True)
            for name, p in self.averaged.items()
        }
        self._copy_in(self.shadow)
        try:
            yield
        finally:
            self._copy_in(own)

    @torch.no_grad()
    def _copy_in(self, weights: dict[str, Tensor]) -> None:
        for name, p in self.averaged.items():
            p.copy_(weights[name])

    def state_dict(self) -> dict[str, Tensor]:
        self._move()
        return dict(self.shadow, updates=torch.tensor(self.updates))

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.updates = int(state["updates"])
        self.kept = 1.0
        for name, shadow in self.shadow.items():
            shadow.copy_(state[name])
