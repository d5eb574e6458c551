"""The decoder's step made fast: compiled for a CPU, replayed as a CUDA graph on a GPU.

Each batch size is made ready once, when it is first met; where that fails, the decoder goes on with
eager steps and says why. Knows a decoder's `step`; nothing of its layers.
"""

import threading
import time
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kit.base.compiler import (
    best_seconds,
    capture_graph,
    compiler_errors,
    gpu_tuning,
    not_compiled_note,
    quiet_inductor,
)
from kit.base.hardware import is_oom
from kit.base.tensor_file import checksum
from kit.inference.kv_cache import CacheMemory, KVCache

# While one thread compiles, no other may run what is compiled. Reentrant: Python may collect a
# stream that was dropped, and so release its cache, at any moment.
COMPILE_LOCK = threading.RLock()
# A step that is a CUDA graph attends to a multiple of so many positions: shapes are fixed, so each
# multiple is a graph of its own. At XTTS-v2's size, batch 1 in half precision, 255 positions too
# many are 31 MB of keys and values, beside 900 MB of weights; a long text passes through four
# graphs. Attention's mask must be aligned to 16.
BUCKET = 256
Case = tuple[int, int]
Made = Tensor | tuple[Tensor, Tensor]  # logits; with the states they are made of, if those are kept
Step = Callable[..., Made]  # (codes, code_index, input_pos, layers, mask) -> what is made


class PreparedSteps:
    """Steps of `decoder`, made ready once for each case that they are called in."""

    def __init__(self, decoder):
        self.decoder = decoder
        self.ready: dict[Case, Step] = {}

    def warm_up(self, case: Case, *args) -> Step:
        """`step` made ready for `case`, of which `args` are an example."""
        raise NotImplementedError

    def run(self, case: Case, *args) -> Made:
        """The step of `case`, called with `args` (codes, code_index, input_pos, layers, mask).

        Returns what the decoder's `one_step` does: logits (B, V), and states where they are kept.
        """
        with COMPILE_LOCK:
            if case not in self.ready:
                started = time.perf_counter()
                self.ready[case] = self.warm_up(case, *args)
                self.decoder.warm_up_s[case] = time.perf_counter() - started
            return self.ready[case](*args)


class CompiledSteps(PreparedSteps):
    """Steps by torch.compile, on a CPU: for each batch size and number of threads."""

    compiles = True

    def __init__(self, decoder):
        super().__init__(decoder)
        self.tuned = torch.compile(decoder.one_step, fullgraph=True, dynamic=True)
        untuned = {"max_autotune": False}
        self.untuned = torch.compile(
            decoder.one_step, fullgraph=True, dynamic=True, options=untuned
        )
        self.frozen = checksum(decoder.state_dict())

    def __call__(self, codes: Tensor, code_index: int, input_pos: int, layers, mask) -> Made:
        case = len(codes), torch.get_num_threads()
        return self.run(case, codes, code_index, input_pos, layers, mask)

    def warm_up(
        self, case: Case, codes: Tensor, code_index: int, input_pos: int, layers, mask
    ) -> Step:
        """The quickest way to run `step` for this case."""
        torch._dynamo.mark_static(codes, 0)
        for keys_and_values in layers:
            for tensor in keys_and_values:
                for dim in (0, 1, 3):
                    torch._dynamo.mark_static(tensor, dim)  # the length alone may change
        # 0 and 1 would be taken for constants.
        args = (codes, 2, max(2, input_pos), layers, mask)
        try:
            with quiet_inductor(self.frozen, freezing=True, max_autotune=True):
                tuned_s = best_seconds(lambda: self.tuned(*args))
            if tuned_s <= best_seconds(lambda: self.decoder.one_step(*args)):
                return self.tuned
            # Tuning times kernels; beside other work it may pick the worst of them.
            with quiet_inductor(self.frozen, freezing=True):
                self.untuned(*args)
            return self.untuned
        except compiler_errors() as error:
            self.decoder.fall_back_to_eager(not_compiled_note(first_line(error)))
            return self.decoder.one_step


class CudaGraphSteps(PreparedSteps):
    """Steps as CUDA graphs, compiled where `compiles`: by number of rows and positions attended to.

    Graphs have fixed shapes and fixed memory: positions are tensors, and keys and values are in the
    first rows of the one cache that `memory` has for graphs.
    """

    def __init__(self, decoder, compiles: bool):
        super().__init__(decoder)
        self.compiles = compiles
        self.memory = GraphMemory(self)
        if compiles:
            self.tuned = torch.compile(decoder.one_step, fullgraph=True, dynamic=False)

    def __call__(self, codes: Tensor, code_index: int, input_pos: int, layers, mask) -> Made:
        if not self.memory.owns(layers):  # a second thread is speaking
            with COMPILE_LOCK:
                return self.decoder.one_step(codes, code_index, input_pos, layers, mask)
        counter = self.decoder.counter
        index = counter[code_index : code_index + 1]
        position = counter[input_pos : input_pos + 1]
        case = len(codes), self.bucket(input_pos + 1)
        return self.run(case, codes, index, position, layers, mask)

    def bucket(self, positions: int) -> int:
        """How many positions a step attends to, of which `positions` are written.

        All there are where a graph of its own would save less than half a bucket. So does every
        compiled step: each length would be compiled, and tuned, anew.
        """
        longest = self.decoder.max_positions
        rounded = -(-positions // BUCKET) * BUCKET
        return longest if self.compiles or rounded + BUCKET // 2 > longest else rounded

    def warm_up(self, case: Case, *args) -> Step:
        """`step` as a CUDA graph, compiled where it can be; `ran` says what could not.

        Raises what PyTorch raises where memory is too small for so many rows.
        """
        decoder = self.decoder
        if self.compiles:
            try:
                tuning = gpu_tuning(torch.cuda.get_device_capability(decoder.device))
                with quiet_inductor(**tuning):
                    return self.graph(self.tuned, case, args)
            except compiler_errors() as error:
                raise_if_oom(error)
                self.compiles = False
                decoder.ran += not_compiled_note(first_line(error))
        try:
            return self.graph(decoder.one_step, case, args)
        except RuntimeError as error:
            raise_if_oom(error)
            decoder.fall_back_to_eager(f"; no CUDA graph: {first_line(error)}")
            return decoder.one_step

    def graph(self, step: Step, case: Case, args: tuple) -> "StepGraph":
        """`step` as a graph, in the memory that the other graphs work in."""
        others = (made for made in self.ready.values() if isinstance(made, StepGraph))
        first = next(others, None)
        return StepGraph(step, case[1], args, first.graph.pool() if first else None)

    def clear_graphs(self) -> None:
        """Forget all graphs, so that the memory they work in is freed."""
        if self.decoder.device.type == "cuda":
            torch.cuda.synchronize(self.decoder.device)  # none is running
        self.ready.clear()


class GraphMemory(CacheMemory):
    """One cache that CUDA graphs write to, for the largest batch so far; smaller ones use its rows.

    A graph reads and writes where the cache was when it was captured, so graphs live as long as
    this cache. While a batch is using it, others (of a second thread) get memory without graphs.
    """

    def __init__(self, steps: CudaGraphSteps):
        decoder = steps.decoder
        heads = decoder.config.heads
        width = decoder.config.width // heads
        super().__init__(len(decoder.layers), heads, width, decoder.cache_dtype, decoder.device)
        self.steps = steps
        self.graphs_memory: list[Tensor] = []  # a flat tensor for each layer
        self.rows = 0  # that it has room for
        # The cache that is using it; weak, for one that was dropped and never released.
        self.user: weakref.ref[KVCache] | None = None

    @property
    def in_use(self) -> bool:
        user = self.user
        return user is not None and user() is not None

    def new_cache(self, rows: int, positions: int, mask: Tensor | None) -> KVCache:
        with COMPILE_LOCK:
            if self.in_use:
                return super().new_cache(rows, positions, mask)
            if rows > self.rows:
                self.drop()
                longest = self.steps.decoder.max_positions
                self.graphs_memory = self.allocate(self.size(rows, longest))
                self.rows = rows
            layers = []
            for flat in self.graphs_memory:
                keys, values = flat.view(2, self.rows, self.heads, -1, self.head_width)
                layers.append((keys[:rows], values[:rows]))
            # A graph attends to more than is written: what is masked must not be NaN.
            torch._foreach_zero_([tensor for pair in layers for tensor in pair])
            cache = KVCache(layers=layers, memory=self.graphs_memory, mask=mask)
            self.user = weakref.ref(cache)
            return cache

    def owns(self, layers: Sequence[tuple[Tensor, Tensor]]) -> bool:
        """Whether `layers` of a cache are in the memory that graphs write to."""
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
        """Free the cache and the graphs that write to it."""
        self.steps.clear_graphs()
        self.graphs_memory = []
        self.rows = 0

    def idle_bytes(self) -> int:
        idle = [] if self.in_use else self.graphs_memory
        return super().idle_bytes() + sum(flat.nbytes for flat in idle)

    def rows_that_fit(self, positions: int) -> int | None:
        limit = super().rows_that_fit(positions)
        return limit if limit is None or self.in_use else max(limit, self.rows)


class StepGraph:
    """A step as a CUDA graph: hundreds of kernels, started by one call.

    Not the compiler's own graphs (mode "reduce-overhead"): those can be replayed in one thread
    alone, and need Triton. Attends to the first `positions` of the caches, which are written where
    they lay when it was made. To be called by one thread at a time, always with those caches.
    """

    def __init__(self, step: Step, positions: int, args: tuple, pool):
        codes, code_index, input_pos, layers, mask = args
        self.seen = mask
        self.inputs = [t.clone() for t in (codes, code_index, input_pos)]
        self.mask = None if mask is None else mask[..., :positions].clone()
        attended = [(k[:, :, :positions], v[:, :, :positions]) for k, v in layers]
        self.graph, self.made = capture_graph(lambda: step(*self.inputs, attended, self.mask), pool)

    def __call__(self, codes: Tensor, code_index: Tensor, input_pos: Tensor, _layers, mask) -> Made:
        for inside, now in zip(self.inputs, (codes, code_index, input_pos)):
            inside.copy_(now)
        if mask is not self.seen:  # one mask serves all the steps of a text
            self.mask.copy_(mask[..., : self.mask.shape[-1]])
            self.seen = mask
        self.graph.replay()
        if isinstance(self.made, Tensor):
            return self.made.clone()  # the next step writes over it
        logits, states = self.made
        return logits.clone(), states.clone()


def raise_if_oom(error: BaseException) -> None:
    """Raise `error` again, or what it hides, where memory ran out: a smaller batch may fit."""
    for each in (error, error.__context__):  # a capture that fails ends with an error of its own
        if each and is_oom(each):
            raise each


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
