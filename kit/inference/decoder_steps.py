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
    """Keys and values of every layer, (2, B, H, N, d), written in place."""

    layers: list[Tensor]
    memory: list[Tensor]  # the flat tensor of each layer, to be reused
    mask: Tensor | None  # (B, 1, 1, N), -inf at padding; None: no padding
    length: int = 0  # positions written
    state: Tensor | None = None  # (B, D) that predicts the next code

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but those of this mask (B,), in place."""
        kept = rows.nonzero()[:, 0].tolist()
        for kv in self.layers:
            written = kv[:, :, :, : self.length]
            for to, row in enumerate(kept):
                if to < row:
                    written[:, to].copy_(written[:, row])
        self.layers = [kv[:, : len(kept)] for kv in self.layers]
        if self.mask is not None:
            self.mask = self.mask[rows]

    def share(self, prompts: list[int]) -> None:
        """Copy the prompts in the first rows to all rows; `prompts` has the one of each row."""
        index = torch.tensor(prompts, device=self.layers[0].device)
        for kv in self.layers:
            written = kv[:, :, :, : self.length]
            written.copy_(written.index_select(1, index))


def write(kv: Tensor, new: Tensor, input_pos: int | Tensor) -> Tensor:
    """Write `new` (2, B, H, Q, d) to the cache at `input_pos`; return the positions to attend to.

    If `input_pos` is a tensor (1,), that is the full cache: CUDA graphs need fixed shapes.
    """
    if isinstance(input_pos, Tensor):
        return kv.index_copy_(3, input_pos, new.to(kv.dtype))
    kv.narrow(3, input_pos, new.shape[3]).copy_(new)
    return kv.narrow(3, 0, input_pos + new.shape[3])


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
        layers = [flat[:size].view(shape) for flat in memory]
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
MAX_HELD = 8  # numbers of rows and settings of sampling that graphs are kept for
Output = tuple[Tensor, Tensor]  # logits and states


class PreparedSteps:
    """Steps of `decoder`, prepared by `warm_up` once for each case."""

    def __init__(self, decoder):
        self.decoder = decoder
        self.ready: dict[tuple, object] = {}

    def prepared(self, case: tuple, *args):
        """Return what `warm_up` made for `case`. Hold COMPILE_LOCK until its work is done."""
        if case not in self.ready:
            started = time.perf_counter()
            self.ready[case] = self.warm_up(case, *args)
            self.decoder.warm_up_s[case[:2]] += time.perf_counter() - started
        return self.ready[case]


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
        args = codes, code_index, input_pos, layers, mask
        with COMPILE_LOCK:
            return self.prepared((len(codes), torch.get_num_threads()), *args)(*args)

    def warm_up(
        self, case: tuple, codes: Tensor, code_index: int, input_pos: int, layers, mask
    ) -> Callable[..., Output]:
        """Return the fastest step for this case."""
        torch._dynamo.mark_static(codes, 0)
        for kv in layers:
            for dim in (0, 1, 2, 4):
                torch._dynamo.mark_static(kv, dim)  # only the length may change
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
        except Exception as error:
            self.decoder.fall_back_to_eager(compiler.not_compiled_note(first_line(error)))
            return self.decoder.step


class GivenCodes:
    """The batch of one `decode_one`: the caller gives the codes and samples the next ones."""

    sampling = None

    def __init__(self, codes: Tensor):
        self.last = codes.clone()

    def take(self, logits: Tensor, states: Tensor, index: Tensor) -> None: ...


class CudaGraphSteps(PreparedSteps):
    """Steps as CUDA graphs that also sample: one launch a code.

    Graphs have fixed shapes and memory: there is one for each number of rows and positions and each
    setting of sampling. A graph works on the first rows of the one cache that `memory` has for
    graphs, on the tensors of a batch (`hold` moves them to the graph's memory), and on counters
    that it increments. If `compiles`, a layer's two parts round its attention are compiled, as
    functions of the layer: all layers share them. Not the compiler's own graphs (mode
    "reduce-overhead"): those replay only in one thread and need Triton.
    """

    def __init__(self, decoder, compiles: bool):
        super().__init__(decoder)
        self.compiles = compiles
        self.memory = GraphMemory(self)
        self.parts = []
        if compiles:
            layer = type(decoder.layers[0])
            parts = layer.project, layer.add_heads
            self.parts = [torch.compile(part, fullgraph=True) for part in parts]
        self.counters = torch.zeros(2, dtype=torch.long, device=decoder.device)  # code, position
        self.batch = None  # being decoded
        self.held: dict[tuple, dict[str, Tensor]] = {}  # tensors of batches, where graphs have them

    def __call__(self, codes: Tensor, code_index: int, input_pos: int, layers, mask) -> Output:
        with COMPILE_LOCK:
            output = self.advance(GivenCodes(codes), code_index, input_pos, layers, mask)
            if output is None:
                return self.decoder.step(codes, code_index, input_pos, layers, mask)
            logits, states = output
            return logits.clone(), states.clone()  # the next step overwrites them

    def advance(self, batch, code_index: int, input_pos: int, layers, mask) -> Output | None:
        """Run a step of `batch` and return its logits and states; None if there is no graph."""
        with COMPILE_LOCK:
            if not self.memory.owns(layers):  # a second thread is decoding
                return None
            if batch is not self.batch:
                self.hold(batch)
                self.counters.copy_(torch.tensor((code_index, input_pos)))
            case = len(batch.last), self.bucket(input_pos + 1), batch.sampling
            captured = self.prepared(case, batch, layers, mask)
            if captured is None:
                return None
            graph, output = captured
            graph.replay()
            return output

    def hold(self, batch) -> None:
        """Move the tensors of `batch` to where the graphs for its rows and sampling have them."""
        key = len(batch.last), batch.sampling
        if key not in self.held and len(self.held) == MAX_HELD:
            self.clear()
        held = self.held.setdefault(key, tensors(batch))
        for name, tensor in tensors(batch).items():
            held[name].copy_(tensor)
        vars(batch).update(held)
        self.batch = batch

    def clear(self) -> None:
        """Drop all graphs and what only they use."""
        if self.decoder.device.type == "cuda":
            torch.cuda.synchronize(self.decoder.device)  # no graph is running
        self.ready.clear()
        self.held.clear()
        self.batch = None

    def bucket(self, positions: int) -> int:
        """Return how many positions a step attends to, of which `positions` are written.

        All of them if a separate graph would save less than half a bucket.
        """
        longest = self.decoder.max_positions
        rounded = -(-positions // BUCKET) * BUCKET
        return longest if rounded + BUCKET // 2 > longest else rounded

    def warm_up(self, case: tuple, batch, layers, mask) -> tuple | None:
        """Return the step as a CUDA graph and its output; None if it cannot be captured.

        It is compiled if possible. Failures are added to `ran`.
        """
        decoder = self.decoder
        args = case[1], batch, layers, mask
        if self.compiles:
            try:
                # A row times a matrix, int8 too, is one kernel only with this tuning.
                with compiler.quiet_inductor(coordinate_descent_tuning=True):
                    return self.capture(*args, self.parts)
            except Exception as error:
                raise_if_oom(error)
                self.compiles = False
                decoder.ran += compiler.not_compiled_note(first_line(error))
        try:
            return self.capture(*args, ())
        except RuntimeError as error:
            raise_if_oom(error)
            decoder.fall_back_to_eager(f"; no CUDA graph: {first_line(error)}")
            return None

    def capture(self, positions: int, batch, layers, mask, parts) -> tuple:
        attended = [kv[:, :, :, :positions] for kv in layers]
        mask = None if mask is None else mask[..., :positions]
        code_index, input_pos = self.counters.split(1)
        changed = [self.counters, *tensors(batch).values()]
        before = [tensor.clone() for tensor in changed]

        def work() -> Output:
            output = self.decoder.step(batch.last, code_index, input_pos, attended, mask, parts)
            batch.take(*output, code_index)
            self.counters.add_(1)
            return output

        def undo() -> None:
            for tensor, value in zip(changed, before):
                tensor.copy_(value)

        pools = (graph.pool() for graph, _ in self.ready.values())
        return compiler.capture_graph(work, undo, next(pools, None))


def tensors(batch) -> dict[str, Tensor]:
    return {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}


class GraphMemory(CacheMemory):
    """One cache that CUDA graphs write to, for the largest batch so far; smaller ones use its rows.

    A graph writes to the addresses at capture, so graphs live as long as this cache. While a batch
    uses it, batches of other threads get other memory, without graphs.
    """

    def __init__(self, steps: CudaGraphSteps):
        super().__init__(steps.decoder)
        self.steps = steps
        self.graphs_memory: list[Tensor] = []  # a flat tensor for each layer
        self.mask: Tensor | None = None  # (rows, 1, 1, N)
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
                shape = (rows, 1, 1, self.max_positions)
                self.mask = torch.zeros(shape, dtype=self.dtype, device=self.device)
                self.rows = rows
            shape = (2, self.rows, self.heads, -1, self.head_width)
            layers = [flat.view(shape)[:, :rows] for flat in self.graphs_memory]
            # A graph attends to positions not yet written: masked values must not be NaN.
            torch._foreach_zero_(layers)
            mask = None if mask is None else self.mask[:rows].copy_(mask)
            cache = KVCache(layers=layers, memory=self.graphs_memory, mask=mask)
            self.user = weakref.ref(cache)
            return cache

    def owns(self, layers: Sequence[Tensor]) -> bool:
        memory = self.graphs_memory
        return bool(memory) and layers[0].data_ptr() == memory[0].data_ptr()

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
        self.steps.clear()
        self.graphs_memory = []
        self.mask = None
        self.rows = 0

    def idle_bytes(self) -> int:
        idle = [] if self.in_use else self.graphs_memory
        return super().idle_bytes() + sum(flat.nbytes for flat in idle)

    def rows_that_fit(self) -> int | None:
        limit = super().rows_that_fit()
        return limit if limit is None or self.in_use else max(limit, self.rows)


def raise_if_oom(error: BaseException) -> None:
    """Raise `error` or its cause again if memory ran out: a smaller batch may fit."""
    for cause in (error, error.__context__):  # a failed capture raises an error of its own
        if cause and is_oom(cause):
            raise cause


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
