"""Batches made ahead by a thread, while the GPU works on those before.

A step on a GPU is mostly waiting for the device, and whoever waits leaves Python to others. A
thread needs no process of its own and no copies between them; on a CPU it would only take a core
from the step. What was made ahead and never used is simply made again: each batch carries its
position.
"""

import contextlib
import queue
import threading
from collections.abc import Iterable, Iterator

from kit.model.sequence import EffectiveBatch
from kit.training.switches import Applied, pin

LOOK_S = 0.2  # how often a thread with a full queue looks whether it is still wanted


def prefetch_if_on(batches: Iterable[EffectiveBatch], applied: Applied) -> Iterable[EffectiveBatch]:
    """Return `batches` prefetched and pinned where the switch `pinned_memory` is on.

    Where it is off, each batch is made when the step asks for it. Training and the measurement of
    the switches both take their batches from here.
    """
    if applied.on("pinned_memory"):
        return prefetched(map(pin, batches))
    return batches


def prefetched(batches: Iterable, count: int = 2) -> Iterator:
    """Yield what `batches` yields, up to `count` of them made ahead in a thread.

    An exception in the making is raised where its batch would have come. The thread ends with the
    iterator, or when that is closed.
    """
    made = queue.Queue(maxsize=count)
    over = threading.Event()
    thread = threading.Thread(target=_make, args=(batches, made, over), name="batches", daemon=True)
    thread.start()
    try:
        item = made.get()
        while item is not None:
            batch, error = item
            if error is not None:
                raise error
            yield batch
            item = made.get()
    finally:
        over.set()


def _make(batches: Iterable, made: queue.Queue, over: threading.Event) -> None:
    try:
        for batch in batches:
            if not _put(made, (batch, None), over):
                return
        _put(made, None, over)  # the end
    except BaseException as error:
        _put(made, (None, error), over)


def _put(made: queue.Queue, item: tuple | None, over: threading.Event) -> bool:
    """Put `item` when there is room; False when nobody will ever take it."""
    while not over.is_set():
        with contextlib.suppress(queue.Full):
            made.put(item, timeout=LOOK_S)
            return True
    return False
