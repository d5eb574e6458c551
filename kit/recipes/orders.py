"""Processes that torchrun has started for one run: the main rank leads, the others do as it orders.

The main rank takes a recipe's steps as a process alone does: it plans, asks, prints and writes.
Where others can help it gives them an order, which each of them follows; then they wait for the
next, until none is left. An order travels, so it holds plain values.
"""

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Protocol

from kit.base.hardware import set_cuda_defaults
from kit.training.ranks import RankLost, Ranks


class Order(Protocol):
    """Something that the main rank has the others do along with it."""

    def follow(self, ranks: Ranks) -> None:
        """Do it, on a rank other than the main one."""


def follow_main(ranks: Ranks) -> None:
    """What a rank other than the main one does: follow each order, until there is none.

    Also where the main rank has ended, or all are told to: it says why, or torchrun does.
    """
    set_cuda_defaults()
    with contextlib.suppress(RankLost, KeyboardInterrupt):
        order = next_order(ranks)
        while order is not None:
            order.follow(ranks)
            order = next_order(ranks)
    ranks.leave()


def next_order(ranks: Ranks, give: Callable[[], Order | None] = lambda: None) -> Order | None:
    """What the main rank gives with `give()`, to every rank; None where there is nothing to do."""
    if ranks.is_main:
        ranks.call()
    else:
        with ending_when_told():  # it waits, perhaps for hours, and has nothing to finish
            ranks.await_call()
    return ranks.from_main(give)


@contextlib.contextmanager
def ending_when_told() -> Iterator[None]:
    """Let Ctrl-C, or torchrun, end what the block does, with a KeyboardInterrupt.

    For ranks that otherwise leave it to the main one to hear them.
    """

    def end(number: int, frame) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, end) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)
