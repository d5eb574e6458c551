"""The decoder's step made fast: compiled for a CPU, replayed as a CUDA graph on a GPU.

Each batch size is made ready once, when it is first met; where that fails, the decoder goes on with
eager steps and says why. Knows a decoder's `step`; nothing of its layers.
"""

import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kit.base.compiler import captured, not_compiled, quickest, quiet_inductor
from kit.base.weights_file import checksum
from kit.inference.kv_cache import CacheMemory, KVCache

ONE_AT_A_TIME = threading.Lock()  # while one thread compiles, no other may run what is compiled
Made = Tensor | tuple[Tensor, Tensor]  # logits; with the states they are made of, if those are kept
Step = Callable[..., Made]  # (codes, code_index, input_pos, layers, mask) -> what is made


class PreparedSteps:
    """Steps of `decoder`, made ready once for each case that they are called in."""

    def __init__(self, decoder):
        self.decoder = decoder
        self.ready: dict[tuple[int, int], Step] = {}  # by case

    def case(self, codes: Tensor) -> tuple[int, int]:
        """What a step is made ready for: rows, and threads (0 where they do not matter)."""
        raise NotImplementedError

    def warm_up(self, *args) -> Step:
        """`step` made ready for the case of `args`."""
        raise NotImplementedError

    def __call__(self, codes: Tensor, code_index, input_pos, layers, mask) -> Made:
        """What the decoder's `one_step` makes: logits (B, V), and states where they are kept."""
        args = (codes, code_index, input_pos, layers, mask)
        case = self.case(codes)
        with ONE_AT_A_TIME:
            if case not in self.ready:
                started = time.perf_counter()
                self.ready[case] = self.warm_up(*args)
                self.decoder.warm_up_s[case] = time.perf_counter() - started
            return self.ready[case](*args)


class CompiledSteps(PreparedSteps):
    """Steps by torch.compile, on a CPU: for each batch size and number of threads."""

    def __init__(self, decoder):
        super().__init__(decoder)
        self.tuned = torch.compile(decoder.one_step, fullgraph=True, dynamic=True)
        untuned = {"max_autotune": False}
        self.untuned = torch.compile(
            decoder.one_step, fullgraph=True, dynamic=True, options=untuned
        )
        self.frozen = checksum(decoder.state_dict())

    def case(self, codes: Tensor) -> tuple[int, int]:
        return len(codes), torch.get_num_threads()

    def warm_up(self, codes: Tensor, code_index: int, input_pos: int, layers, mask) -> Step:
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
                tuned_s = quickest(lambda: self.tuned(*args))
            if tuned_s <= quickest(lambda: self.decoder.one_step(*args)):
                return self.tuned
            # Tuning times kernels; beside other work it may pick the worst of them.
            with quiet_inductor(self.frozen, freezing=True):
                self.untuned(*args)
            return self.untuned
        except RuntimeError as error:  # Dynamo's and Inductor's own are of this kind
            self.decoder.step_eagerly(not_compiled(first_line(error)))
            return self.decoder.one_step


class GraphedSteps(PreparedSteps):
    """Steps as CUDA graphs, compiled where they can be: for each batch size.

    All shapes are fixed: positions are tensors, and every cache is as long as the longest.
    """

    def __init__(self, decoder, compiles: bool):
        super().__init__(decoder)
        self.compiles = compiles
        if compiles:
            self.tuned = torch.compile(decoder.one_step, fullgraph=True, dynamic=False)

    def case(self, codes: Tensor) -> tuple[int, int]:
        return len(codes), 0

    def __call__(self, codes: Tensor, code_index: int, input_pos: int, layers, mask) -> Made:
        counter = self.decoder.counter
        index = counter[code_index : code_index + 1]
        position = counter[input_pos : input_pos + 1]
        return super().__call__(codes, index, position, layers, mask)

    def warm_up(self, codes: Tensor, code_index: Tensor, input_pos: Tensor, layers, mask) -> Step:
        """`step` as a CUDA graph, compiled where it can be; `ran` says what could not."""
        args = (codes, code_index, input_pos, layers, mask)
        if self.compiles:
            try:
                # Tuned by coordinates, a row times a matrix is one kernel that expands int8 as it
                # reads; a library's product would want the matrix expanded first.
                with quiet_inductor(max_autotune=True, coordinate_descent_tuning=True):
                    return StepGraph(self.tuned, args)
            except RuntimeError as error:  # Dynamo's and Inductor's own are of this kind
                self.compiles = False
                self.decoder.ran += not_compiled(first_line(error))
        try:
            return StepGraph(self.decoder.one_step, args)
        except RuntimeError as error:
            self.decoder.step_eagerly(f"; no CUDA graph: {first_line(error)}")
            return self.decoder.one_step

    def owns(self, cache: KVCache) -> bool:
        """Whether there is a CUDA graph that writes to `cache`."""
        ready = list(self.ready.values())  # another thread may be adding to them
        return any(step.owns(cache.layers) for step in ready if isinstance(step, StepGraph))


class GraphMemory(CacheMemory):
    """Memory for `steps`: a CUDA graph writes to where its cache lay when it was made."""

    def __init__(self, steps: GraphedSteps):
        decoder = steps.decoder
        super().__init__(len(decoder.layers), decoder.cache_dtype, decoder.device)
        self.steps = steps

    def slot(self, rows: int) -> int:
        """Each number of rows has memory of its own, as it has a graph of its own."""
        return rows

    def positions(self, wanted: int) -> int:
        """As many as there are, for all: shapes are fixed."""
        return self.steps.decoder.max_positions

    def take(self, rows: int, size: int) -> list[Tensor]:
        memory = super().take(rows, size)
        torch._foreach_zero_(memory)  # graphs look at all of it: what is masked must not be NaN
        return memory

    def release(self, cache: KVCache) -> None:
        rows = len(cache.layers[0][0])
        if rows not in self.spare or self.steps.owns(cache):
            super().release(cache)

    def tidy(self) -> None:
        """Nothing is given back: the graphs would write to it."""


class StepGraph:
    """A step as a CUDA graph: hundreds of kernels, started by one call.

    Not the compiler's own graphs (mode "reduce-overhead"): those can be replayed in one thread
    alone, and need Triton. The caches are written where they lay when it was made; steps over
    others, as of a second thread, run without the graph. To be called by one thread at a time.
    """

    def __init__(self, step: Step, args: tuple):
        codes, code_index, input_pos, layers, mask = args
        self.step = step
        self.layers = layers
        self.seen = mask
        self.inputs = [t.clone() for t in (codes, code_index, input_pos)]
        self.mask = None if mask is None else mask.clone()
        self.replay, self.made = captured(lambda: step(*self.inputs, layers, self.mask))

    def owns(self, layers: Sequence[tuple[Tensor, Tensor]]) -> bool:
        return layers[0][0].data_ptr() == self.layers[0][0].data_ptr()

    def __call__(
        self, codes: Tensor, code_index: Tensor, input_pos: Tensor, layers: list, mask
    ) -> Made:
        if not self.owns(layers):
            return self.step(codes, code_index, input_pos, layers, mask)
        for inside, now in zip(self.inputs, (codes, code_index, input_pos)):
            inside.copy_(now)
        if mask is not self.seen:  # one mask serves all the steps of a text
            self.mask.copy_(mask)
            self.seen = mask
        self.replay()
        if isinstance(self.made, Tensor):
            return self.made.clone()  # the next step writes over it
        logits, states = self.made
        return logits.clone(), states.clone()


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
