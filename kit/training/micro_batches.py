"""A batch on its way to the model: made ahead, pinned, split where memory is short."""

import contextlib
import dataclasses
import itertools
import queue
import threading
from collections.abc import Iterable, Iterator

from kit.model.sequence import Batch, EffectiveBatch
from kit.training import checkpoint
from kit.training.switches import Applied

POLL_S = 0.2  # how often a thread with a full queue checks whether its batches are still needed


def prefetch_if_on(batches: Iterable[EffectiveBatch], applied: Applied) -> Iterable[EffectiveBatch]:
    """Return `batches` prefetched and pinned where the switch `pinned_memory` is on."""
    if applied.on("pinned_memory"):
        return prefetched(map(pin, batches))
    return batches


def pin(batch: EffectiveBatch) -> EffectiveBatch:
    """Return `batch` in page-locked memory, from which copies to a GPU do not wait. Needs CUDA."""
    micro = []
    for part in batch.micro:
        pinned = {name: tensor.pin_memory() for name, tensor in vars(part).items()}
        micro.append(dataclasses.replace(part, **pinned))
    return dataclasses.replace(batch, micro=micro)


def prefetched(batches: Iterable, count: int = 2) -> Iterator:
    """Yield what `batches` yields, up to `count` of them made ahead in a thread.

    An exception is raised where its batch would have come. The thread ends with the iterator.
    """
    ready = queue.Queue(maxsize=count)
    closed = threading.Event()
    work = (batches, ready, closed)
    threading.Thread(target=_make_batches, args=work, name="batches", daemon=True).start()
    try:
        item = ready.get()
        while item is not None:
            batch, error = item
            if error is not None:
                raise error
            yield batch
            item = ready.get()
    finally:
        closed.set()


def _make_batches(batches: Iterable, ready: queue.Queue, closed: threading.Event) -> None:
    try:
        for batch in batches:
            if not _put(ready, (batch, None), closed):
                return
        _put(ready, None, closed)  # the end
    except BaseException as error:
        _put(ready, (None, error), closed)


def _put(ready: queue.Queue, item: tuple | None, closed: threading.Event) -> bool:
    """Put `item` when there is room; False when nobody will ever take it."""
    while not closed.is_set():
        with contextlib.suppress(queue.Full):
            ready.put(item, timeout=POLL_S)
            return True
    return False


def start_stream(batches: Iterable[EffectiveBatch]) -> Iterator[EffectiveBatch]:
    """Iterate over `batches` without changing the random numbers at the start.

    A DataLoader draws a seed when it starts; a resumed run starts one more.
    """
    before = checkpoint.random_state()
    stream = iter(batches)
    first = next(stream, None)
    checkpoint.restore_random_state(before)
    return itertools.chain([first] if first else [], stream)


def cut(batch: EffectiveBatch, rows: int) -> list[Batch]:
    """The micro-batches of `batch` in passes of at most `rows` rows; 0 leaves them as they are."""
    if not rows:
        return batch.micro
    return [part for micro in batch.micro for part in split_batch(micro, rows)]


def split_batch(batch: Batch, rows: int) -> list[Batch]:
    """Split `batch` into parts of at most `rows` rows, as if it had been packed that way.

    A part is as wide as its longest row; a batch that was padded beyond its longest row, to a fixed
    shape for the compiler, keeps its width.
    """
    count, width = batch.tokens.shape
    if count <= rows:
        return [batch]
    fixed = bool(batch.lengths.max() < width)
    parts = []
    for first in range(0, count, rows):
        last = min(first + rows, count)
        part_width = width if fixed else int(batch.lengths[first:last].max())
        parts.append(_select_rows(batch, first, last, part_width))
    return parts


def _select_rows(batch: Batch, first: int, last: int, width: int) -> Batch:
    """Rows `first` to `last` of `batch`, `width` tokens wide."""
    old_width = batch.tokens.shape[1]
    columns = {
        "cond": batch.cond[first:last],
        "tokens": batch.tokens[first:last, :width],
        "positions": batch.positions[first:last, :width],
    }
    for kind in ("text", "code"):
        indices = getattr(batch, f"{kind}_indices")  # of the targets, in the flattened batch
        targets = getattr(batch, f"{kind}_targets")
        selected = (indices >= first * old_width) & (indices < last * old_width)
        row = indices[selected] // old_width - first
        column = indices[selected] % old_width
        columns[f"{kind}_indices"] = row * width + column
        columns[f"{kind}_targets"] = targets[selected]
    return Batch(**columns)
