"""The KV cache, and decoder steps that write into it: compiled on a CPU, CUDA graphs on a GPU.

The cache is allocated once for a text, written in place, and its memory reused by the next text.
Each batch size is prepared on first use; if that fails, eager steps run, and `ran` says why.

Shapes: B batch, Q new positions, N positions of the cache, H heads, d width of a head.
"""

import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kit.base import compiler
from kit.base.hardware import is_oom
from kit.base.tensor_file import checksum

MAX_IDLE_BYTES = 2**26  # kept between two texts
CACHE_SHARE = 0.8  # of a GPU's free memory; the rest is for activations and fragmentation


@dataclasses.dataclass(kw_only=True)
class KVCache:
    """Keys and values of every layer, (B, H, N, d) each, written in place."""

    layers: list[tuple[Tensor, Tensor]]
    memory: list[Tensor]  # the flat tensor of each layer, to be reused
    mask: Tensor | None  # (B, 1, 1, N), -inf at padding; None: no padding
    length: int = 0  # positions written
    state: Tensor | None = None  # (B, D) that predicts the next code, if the decoder keeps states

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
        self.max_positions = decoder.max_positions
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
        layers = [tuple(flat[:size].view(shape)) for flat in memory]
        return KVCache(layers=layers, memory=memory, mask=mask)

    def size(self, rows: int, positions: int) -> int:  # elements of one layer
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

    def rows_that_fit(self) -> int | None:
        """Return how many rows fit in free memory; None on a CPU, which can swap."""
        if self.device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(self.device)
        reserved = torch.cuda.memory_reserved(self.device)
        allowed = int(torch.cuda.get_per_process_memory_fraction(self.device) * total) - reserved
        cached = reserved - torch.cuda.memory_allocated(self.device)  # by PyTorch's allocator
        available = min(free, max(0, allowed)) + cached + self.idle_bytes()
        row_bytes = self.layers * self.size(1, self.max_positions) * self.dtype.itemsize
        return int(CACHE_SHARE * available) // row_bytes


# While one thread compiles, no other may run compiled code. Reentrant: Python may collect a dropped
# stream, and so release its cache, at any moment.
COMPILE_LOCK = threading.RLock()
# A CUDA graph has fixed shapes, so there is one for each multiple of BUCKET positions. At XTTS-v2's
# size, batch 1 in half precision, up to 255 unused positions are 31 MB of keys and values beside
# 900 MB of weights; a long text needs four graphs. The mask must be aligned to 16.
BUCKET = 256
Case = tuple[int, int]
Output = Tensor | tuple[Tensor, Tensor]  # logits; with hidden states, if those are kept
Step = Callable[..., Output]  # (codes, code_index, input_pos, layers, mask)


class PreparedSteps:
    """Steps of `decoder`, prepared by `warm_up` once for each case."""

    def __init__(self, decoder):
        self.decoder = decoder
        self.ready: dict[Case, Step] = {}

    def run(self, case: Case, *args) -> Output:
        with COMPILE_LOCK:
            if case not in self.ready:
                started = time.perf_counter()
                self.ready[case] = self.warm_up(case, *args)
                self.decoder.warm_up_s[case] = time.perf_counter() - started
            return self.ready[case](*args)


class CompiledSteps(PreparedSteps):
    """Steps by torch.compile on a CPU, for each batch size and number of threads."""

    compiles = True

    def __init__(self, decoder):
        super().__init__(decoder)
        self.tuned = torch.compile(decoder.step, fullgraph=True, dynamic=True)
        untuned = {"max_autotune": False}
        self.untuned = torch.compile(decoder.step, fullgraph=True, dynamic=True, options=untuned)
        self.frozen = checksum(decoder.state_dict())

    def __call__(self, codes: Tensor, code_index: int, input_pos: int, layers, mask) -> Output:
        case = len(codes), torch.get_num_threads()
        return self.run(case, codes, code_index, input_pos, layers, mask)

    def warm_up(
        self, case: Case, codes: Tensor, code_index: int, input_pos: int, layers, mask
    ) -> Step:
        """Return the fastest step for this case."""
        torch._dynamo.mark_static(codes, 0)
        for keys_and_values in layers:
            for tensor in keys_and_values:
                for dim in (0, 1, 3):
                    torch._dynamo.mark_static(tensor, dim)  # only the length may change
        # 0 and 1 would be specialised as constants.
        args = (codes, 2, max(2, input_pos), layers, mask)
        try:
            with compiler.quiet_inductor(self.frozen, freezing=True, max_autotune=True):
                tuned_s = compiler.best_seconds(lambda: self.tuned(*args))
            if tuned_s <= compiler.best_seconds(lambda: self.decoder.step(*args)):
                return self.tuned
            # On a busy machine tuning may pick a slow kernel.
            with compiler.quiet_inductor(self.frozen, freezing=True):
                self.untuned(*args)
            return self.untuned
        except compiler.compiler_errors() as error:
            self.decoder.fall_back_to_eager(compiler.not_compiled_note(first_line(error)))
            return self.decoder.step


class CudaGraphSteps(PreparedSteps):
    """Steps as CUDA graphs, also compiled if `compiles`, by number of rows and positions.

    Graphs have fixed shapes and memory: positions are tensors, keys and values are in the first
    rows of the one cache that `memory` has for graphs.
    """

    def __init__(self, decoder, compiles: bool):
        super().__init__(decoder)
        self.compiles = compiles
        self.memory = GraphMemory(self)
        if compiles:
            self.tuned = torch.compile(decoder.step, fullgraph=True, dynamic=False)

    def __call__(self, codes: Tensor, code_index: int, input_pos: int, layers, mask) -> Output:
        if not self.memory.owns(layers):  # a second thread is decoding
            with COMPILE_LOCK:
                return self.decoder.step(codes, code_index, input_pos, layers, mask)
        counter = self.decoder.counter
        index = counter[code_index : code_index + 1]
        position = counter[input_pos : input_pos + 1]
        case = len(codes), self.bucket(input_pos + 1)
        return self.run(case, codes, index, position, layers, mask)

    def bucket(self, positions: int) -> int:
        """Return how many positions a step attends to, of which `positions` are written.

        All of them if a separate graph would save less than half a bucket, or if steps are
        compiled, which is slow for each length.
        """
        longest = self.decoder.max_positions
        rounded = -(-positions // BUCKET) * BUCKET
        return longest if self.compiles or rounded + BUCKET // 2 > longest else rounded

    def warm_up(self, case: Case, *args) -> Step:
        """Return the step as a CUDA graph, compiled if possible; failures are added to `ran`."""
        decoder = self.decoder
        if self.compiles:
            try:
                tuning = compiler.gpu_tuning(torch.cuda.get_device_capability(decoder.device))
                with compiler.quiet_inductor(**tuning):
                    return self.graph(self.tuned, case, args)
            except compiler.compiler_errors() as error:
                raise_if_oom(error)
                self.compiles = False
                decoder.ran += compiler.not_compiled_note(first_line(error))
        try:
            return self.graph(decoder.step, case, args)
        except RuntimeError as error:
            raise_if_oom(error)
            decoder.fall_back_to_eager(f"; no CUDA graph: {first_line(error)}")
            return decoder.step

    def graph(self, step: Step, case: Case, args: tuple) -> "StepGraph":
        pools = (each.graph.pool() for each in self.ready.values() if isinstance(each, StepGraph))
        return StepGraph(step, case[1], args, next(pools, None))


class GraphMemory(CacheMemory):
    """One cache that CUDA graphs write to, for the largest batch so far; smaller ones use its rows.

    A graph writes to the addresses at capture, so graphs live as long as this cache. While a batch
    uses it, batches of other threads get other memory, without graphs.
    """

    def __init__(self, steps: CudaGraphSteps):
        super().__init__(steps.decoder)
        self.steps = steps
        self.graphs_memory: list[Tensor] = []  # a flat tensor for each layer
        self.rows = 0  # allocated
        # The cache in use; weak, because it may be dropped without a release.
        self.user: weakref.ref[KVCache] | None = None

    @property
    def in_use(self) -> bool:
        user = self.user  # read once: another thread may release the cache meanwhile
        return user is not None and user() is not None

    def new_cache(self, rows: int, positions: int, mask: Tensor | None) -> KVCache:
        with COMPILE_LOCK:
            if self.in_use:
                return super().new_cache(rows, positions, mask)
            if rows > self.rows:
                self.drop()
                self.graphs_memory = self.allocate(self.size(rows, self.max_positions))
                self.rows = rows
            shape = (2, self.rows, self.heads, -1, self.head_width)
            layers = [tuple(flat.view(shape)[:, :rows]) for flat in self.graphs_memory]
            # A graph attends to positions not yet written: masked values must not be NaN.
            torch._foreach_zero_([tensor for pair in layers for tensor in pair])
            cache = KVCache(layers=layers, memory=self.graphs_memory, mask=mask)
            self.user = weakref.ref(cache)
            return cache

    def owns(self, layers: Sequence[tuple[Tensor, Tensor]]) -> bool:
        memory = self.graphs_memory
        return bool(memory) and layers[0][0].data_ptr() == memory[0].data_ptr()

    def release(self, cache: KVCache) -> None:
        with COMPILE_LOCK:
            if cache.memory is not self.graphs_memory:
                super().release(cache)
            elif self.in_use and self.user() is cache:
                self.user = None

    def clear(self) -> None:
        super().clear()
        with COMPILE_LOCK:
            if not self.in_use:
                self.drop()

    def drop(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # no graph is running
        self.steps.ready.clear()
        self.graphs_memory = []
        self.rows = 0

    def idle_bytes(self) -> int:
        idle = [] if self.in_use else self.graphs_memory
        return super().idle_bytes() + sum(flat.nbytes for flat in idle)

    def rows_that_fit(self) -> int | None:
        limit = super().rows_that_fit()
        return limit if limit is None or self.in_use else max(limit, self.rows)


class StepGraph:
    """A step as a CUDA graph: hundreds of kernels launched by one call.

    Not the compiler's graphs (mode "reduce-overhead"): those replay only in one thread and need
    Triton. Attends to the first `positions` of the caches. Call it from one thread at a time, and
    with the caches it was captured with.
    """

    def __init__(self, step: Step, positions: int, args: tuple, pool):
        codes, code_index, input_pos, layers, mask = args
        self.last_mask = mask
        self.inputs = [tensor.clone() for tensor in (codes, code_index, input_pos)]
        self.mask = None if mask is None else mask[..., :positions].clone()
        attended = [(k[:, :, :positions], v[:, :, :positions]) for k, v in layers]
        self.graph, self.output = compiler.capture_graph(
            lambda: step(*self.inputs, attended, self.mask), pool
        )

    def __call__(
        self, codes: Tensor, code_index: Tensor, input_pos: Tensor, _layers, mask
    ) -> Output:
        for static, value in zip(self.inputs, (codes, code_index, input_pos)):
            static.copy_(value)
        if mask is not self.last_mask:  # all steps of a text share one mask
            self.mask.copy_(mask[..., : self.mask.shape[-1]])
            self.last_mask = mask
        self.graph.replay()
        if isinstance(self.output, Tensor):
            return self.output.clone()  # the next step overwrites it
        logits, states = self.output
        return logits.clone(), states.clone()


def raise_if_oom(error: BaseException) -> None:
    """Raise `error` or its cause again if memory ran out: a smaller batch may fit."""
    for cause in (error, error.__context__):  # a failed capture raises an error of its own
        if cause and is_oom(cause):
            raise cause


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
