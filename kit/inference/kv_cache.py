"""Keys and values of all that was read and said, and the memory they lie in.

A cache is allocated once for a text and written in place: no step makes it grow. Its memory is
taken again by the next text. Knows shapes alone; nothing of layers.

Shapes: B batch, Q new positions, N positions of the cache, H heads, d width of a head.
"""

import dataclasses

import torch
from torch import Tensor

KEPT_BYTES = 2**26  # of memory between two texts


@dataclasses.dataclass(kw_only=True)
class KVCache:
    """Keys and values of every layer, (B, H, N, d) each, written in place."""

    layers: list[tuple[Tensor, Tensor]]
    memory: list[Tensor]  # what they lie in, of each layer: taken again when they are done with
    mask: Tensor | None  # (B, 1, 1, N), -inf where a row has padding; None: no row has any
    length: int = 0  # positions written
    state: Tensor | None = None  # (B, D) of the last position, where a decoder keeps states

    def keep(self, rows: Tensor) -> None:
        """Go on with the rows of this mask (B,) alone, moved up where they lie."""
        kept = rows.nonzero()[:, 0].tolist()
        for keys, values in self.layers:
            move_up(keys[:, :, : self.length], kept)
            move_up(values[:, :, : self.length], kept)
        count = len(kept)
        self.layers = [(keys[:count], values[:count]) for keys, values in self.layers]
        if self.mask is not None:
            self.mask = self.mask[rows]


def move_up(written: Tensor, kept: list[int]) -> None:
    """Copy the rows `kept` of `written` (B, H, N, d) to its first ones; in place."""
    for to, row in enumerate(kept):
        if to < row:
            written[to].copy_(written[row])


def write(cache: Tensor, new: Tensor, input_pos: int | Tensor) -> Tensor:
    """Put `new` (B, H, Q, d) into the cache at `input_pos`; what there is to look at so far.

    With `input_pos` a tensor (1,), shapes are the same at every step: CUDA graphs ask for that.
    """
    if isinstance(input_pos, Tensor):
        return cache.index_copy_(2, input_pos, new.to(cache.dtype))
    cache.narrow(2, input_pos, new.shape[2]).copy_(new)
    return cache.narrow(2, 0, input_pos + new.shape[2])


class CacheMemory:
    """The memory of caches that are done with, for the next ones.

    Memory that is new to the process is slow to write to.
    """

    def __init__(self, layers: int, dtype: torch.dtype, device: torch.device):
        self.layers = layers
        self.dtype = dtype
        self.device = device
        self.spare: dict[int, list[Tensor]] = {}  # a flat tensor for each layer; see `slot`

    def slot(self, rows: int) -> int:
        """Which spare memory a batch of `rows` takes: there is one, for all."""
        return 0

    def positions(self, wanted: int) -> int:
        """How many positions a cache has that is to hold `wanted`."""
        return wanted

    def take(self, rows: int, size: int) -> list[Tensor]:
        """Memory for `size` numbers of each layer, whatever they are now."""
        memory = self.spare.pop(self.slot(rows), None)
        if memory is None or memory[0].numel() < size:
            # Empty: of it only what is written to takes time and room.
            memory = [
                torch.empty(size, dtype=self.dtype, device=self.device) for _ in range(self.layers)
            ]
        return memory

    def release(self, cache: KVCache) -> None:
        """Say that `cache` is done with: the next batch takes its memory again."""
        rows = len(cache.layers[0][0])
        self.spare[self.slot(rows)] = cache.memory

    def tidy(self) -> None:
        """Give back what large batches took; what a text alone takes is kept for the next one."""
        size = sum(flat.nbytes for memory in self.spare.values() for flat in memory)
        if size > KEPT_BYTES:
            self.spare.clear()
