"""Keys and values of all that was read and said, and the memory they lie in.

A cache is allocated once for a text and written in place: no step makes it grow. Its memory is
taken again by the next text. Knows shapes alone; nothing of layers.

Shapes: B batch, Q new positions, N positions of the cache, H heads, d width of a head.
"""

import dataclasses

import torch
from torch import Tensor

MAX_IDLE_BYTES = 2**26  # of memory between two texts
CACHE_SHARE = 0.8  # of a GPU's free memory; the rest is for activations and what is fragmented


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
            compact_rows(keys[:, :, : self.length], kept)
            compact_rows(values[:, :, : self.length], kept)
        count = len(kept)
        self.layers = [(keys[:count], values[:count]) for keys, values in self.layers]
        if self.mask is not None:
            self.mask = self.mask[rows]


def compact_rows(written: Tensor, kept: list[int]) -> None:
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
    """The memory of caches that are no longer in use, for the next ones.

    Memory that is new to the process is slow to write to.
    """

    def __init__(
        self, layers: int, heads: int, head_width: int, dtype: torch.dtype, device: torch.device
    ):
        self.layers = layers
        self.heads = heads
        self.head_width = head_width
        self.dtype = dtype
        self.device = device
        # One entry at most. A dict, because its pop is atomic: no two threads get the same memory.
        self.spare: dict[str, list[Tensor]] = {}

    def new_cache(self, rows: int, positions: int, mask: Tensor | None) -> KVCache:
        """An empty cache; what is in its memory is undefined."""
        size = self.size(rows, positions)
        memory = self.spare.pop("memory", None)
        if memory is None or memory[0].numel() < size:
            memory = self.allocate(size)
        shape = (2, rows, self.heads, positions, self.head_width)
        layers = []
        for flat in memory:
            keys, values = flat[:size].view(shape)
            layers.append((keys, values))
        return KVCache(layers=layers, memory=memory, mask=mask)

    def size(self, rows: int, positions: int) -> int:
        """Numbers that a layer of such a cache has."""
        return 2 * rows * self.heads * positions * self.head_width

    def allocate(self, size: int) -> list[Tensor]:
        """A flat tensor for each layer. Only what is written to takes time and memory on a CPU."""
        return [torch.empty(size, dtype=self.dtype, device=self.device) for _ in range(self.layers)]

    def release(self, cache: KVCache) -> None:
        """Take back the memory of `cache`, for the next one."""
        self.spare["memory"] = cache.memory

    def tidy(self) -> None:
        """Free what a large batch took; what a single text takes is kept for the next one."""
        if self.idle_bytes() > MAX_IDLE_BYTES:
            self.spare.clear()

    def clear(self) -> None:
        """Free all memory that no cache is using."""
        self.spare.clear()

    def idle_bytes(self) -> int:
        """Bytes that the next cache can have without new memory."""
        return sum(flat.nbytes for memory in self.spare.values() for flat in memory)

    def rows_that_fit(self, positions: int) -> int | None:
        """Rows of a cache of so many positions that fit in free memory; None: no limit is known.

        On a CPU none is: it can swap.
        """
        if self.device.type != "cuda":
            return None
        row_bytes = self.layers * self.size(1, positions) * self.dtype.itemsize
        available = free_bytes(self.device) + self.idle_bytes()
        return int(CACHE_SHARE * available) // row_bytes


def free_bytes(device: torch.device) -> int:
    """Bytes that this process can still allocate on a GPU."""
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total) - reserved
    unused = reserved - torch.cuda.memory_allocated(device)  # that PyTorch's allocator keeps
    return min(free, max(0, allowed)) + unused
