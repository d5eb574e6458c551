"""Out of memory in the middle of a run: cut the batch so that it fits.

An optimiser step that ran out of memory has changed nothing yet, so the very same batch can be
tried again in smaller passes: nothing lost, nothing repeated, the same gradients. Knows packed
batches; nothing of the loop.
"""

import gc

import torch

from kit.base.hardware import Hardware, is_here
from kit.model.sequence import Batch, EffectiveBatch


def release_memory(device: str) -> None:
    """Collect garbage, and on CUDA give cached memory back to the device."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def usable_bytes(hw: Hardware) -> int:
    """Memory of the device, or the share of it that this process may use."""
    if hw.device == "cpu" or not is_here(hw):
        return hw.memory_bytes
    return int(torch.cuda.get_per_process_memory_fraction() * hw.memory_bytes)


def cut(batch: EffectiveBatch, rows: int) -> list[Batch]:
    """The micro-batches of `batch` in passes of at most `rows` rows; 0 leaves them whole."""
    if not rows:
        return batch.micro
    return [part for micro in batch.micro for part in split_batch(micro, rows)]


def split_batch(batch: Batch, rows: int) -> list[Batch]:
    """`batch` in pieces of at most `rows` rows, as if it had been packed that way.

    A piece is as wide as its longest row, unless the whole was padded beyond its own longest row:
    that width was chosen (fixed shapes for compile) and is kept.
    """
    count, width = batch.tokens.shape
    if count <= rows:
        return [batch]
    ends = batch.lengths
    chosen = bool(ends.max() < width)
    starts = range(0, count, rows)
    return [_piece(batch, i, min(i + rows, count), width if chosen else ends) for i in starts]


def _piece(batch: Batch, first: int, last: int, width) -> Batch:
    """Rows `first` to `last` of `batch`; `width` in tokens, or each row's own end."""
    whole = batch.tokens.shape[1]
    width = width if isinstance(width, int) else int(width[first:last].max())
    columns = {"cond": batch.cond[first:last]}
    for name in ("tokens", "positions"):
        columns[name] = getattr(batch, name)[first:last, :width]
    for kind in ("text", "code"):
        at = getattr(batch, f"{kind}_indices")
        targets = getattr(batch, f"{kind}_targets")
        mine = (at >= first * whole) & (at < last * whole)
        row = at[mine] // whole - first
        column = at[mine] % whole
        columns[f"{kind}_indices"] = row * width + column
        columns[f"{kind}_targets"] = targets[mine]
    return Batch(**columns)
