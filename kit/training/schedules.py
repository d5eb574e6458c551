"""Learning-rate schedules: how the rate falls after the warm-up, a function each.

A new one is a function and its line in `SCHEDULES`; settings, notebooks and the command line know
it by that. A schedule sees only how much of the run is done, so resuming needs no state for it.
"""

import math


def constant(done: float) -> float:
    """The peak rate to the end."""
    return 1.0


def linear(done: float) -> float:
    """A straight line: as transformers' `get_linear_schedule_with_warmup`."""
    return 1 - done


def cosine(done: float) -> float:
    """Half a cosine (Loshchilov and Hutter 2017)."""
    return (1 + math.cos(math.pi * done)) / 2


# Given the share of the steps after the warm-up that are done (0 to 1), each returns how much is
# left of the way from `final_lr` up to the peak rate: 1 at the peak, 0 at `final_lr`.
SCHEDULES = {"constant": constant, "linear": linear, "cosine": cosine}
