"""The KV cache: allocated once for a text, written in place, its memory reused by the next text.

Shapes: B batch, Q new positions, N positions of the cache, H heads, d width of a head.
"""

import dataclasses

import torch
from torch import Tensor

MAX_IDLE_BYTES = 2**26  # kept between two texts
CACHE_SHARE = 0.8  # of a GPU's free memory; the rest is for activations and fragmentation


@dataclasses.dataclass(kw_only=True)
class KVCache:
    """Keys and values of every layer, (B, H, N, d) each, written in place."""

    layers: list[tuple[Tensor, Tensor]]
    memory: list[Tensor]  # the flat tensor of each layer, to be reused
    mask: Tensor | None  # (B, 1, 1, N), -inf at padding; None: no padding
    length: int = 0  # positions written
    state: Tensor | None = None  # (B, D) of the last position, if the decoder keeps states

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but those of this mask (B,), in place."""
        kept = rows.nonzero()[:, 0].tolist()
        for keys, values in self.layers:
            compact_rows(keys[:, :, : self.length], kept)
            compact_rows(values[:, :, : self.length], kept)
        count = len(kept)
        self.layers = [(keys[:count], values[:count]) for keys, values in self.layers]
        if self.mask is not None:
            self.mask = self.mask[rows]


def compact_rows(written: Tensor, kept: list[int]) -> None:
    """Move the rows `kept` of `written` (B, H, N, d) to the front, in place."""
    for to, row in enumerate(kept):
        if to < row:
            written[to].copy_(written[row])


def write(cache: Tensor, new: Tensor, input_pos: int | Tensor) -> Tensor:
    """Write `new` (B, H, Q, d) to the cache at `input_pos`; return the positions to attend to.

    If `input_pos` is a tensor (1,), that is the full cache: CUDA graphs need fixed shapes.
    """
    if isinstance(input_pos, Tensor):
        return cache.index_copy_(2, input_pos, new.to(cache.dtype))
    cache.narrow(2, input_pos, new.shape[2]).copy_(new)
    return cache.narrow(2, 0, input_pos + new.shape[2])


class CacheMemory:
    """Keeps the memory of released caches for the next one: fresh memory is slow to write to."""

    def __init__(self, decoder):
        self.layers = decoder.config.layers
        self.heads = decoder.config.heads
        self.head_width = decoder.config.width // decoder.config.heads
        self.dtype = decoder.cache_dtype
        self.device = decoder.device
        # At most one entry. A dict because its pop is atomic: no two threads get the same memory.
        self.spare: dict[str, list[Tensor]] = {}

    def new_cache(self, rows: int, positions: int, mask: Tensor | None) -> KVCache:
        """Return an empty cache; its memory is not initialised."""
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
        """Return the number of elements of one layer."""
        return 2 * rows * self.heads * positions * self.head_width

    def allocate(self, size: int) -> list[Tensor]:
        return [torch.empty(size, dtype=self.dtype, device=self.device) for _ in range(self.layers)]

    def release(self, cache: KVCache) -> None:
        self.spare["memory"] = cache.memory

    def tidy(self) -> None:
        """Free the memory of a large batch; keep that of a single text."""
        if self.idle_bytes() > MAX_IDLE_BYTES:
            self.spare.clear()

    def clear(self) -> None:
        """Free all memory that no cache is using."""
        self.spare.clear()

    def idle_bytes(self) -> int:
        return sum(flat.nbytes for memory in self.spare.values() for flat in memory)

    def rows_that_fit(self, positions: int) -> int | None:
        """Return how many rows of `positions` fit in free memory; None on a CPU, which can swap."""
        if self.device.type != "cuda":
            return None
        row_bytes = self.layers * self.size(1, positions) * self.dtype.itemsize
        available = free_bytes(self.device) + self.idle_bytes()
        return int(CACHE_SHARE * available) // row_bytes


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on a GPU."""
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total) - reserved
    unused = reserved - torch.cuda.memory_allocated(device)  # cached by PyTorch's allocator
    return min(free, max(0, allowed)) + unused
