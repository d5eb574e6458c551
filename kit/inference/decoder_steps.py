"""The KV cache, and decoder steps that write into it: compiled on a CPU, CUDA graphs on a GPU.

The cache is allocated once for a text and written in place. Each batch size is prepared on first
use; if that fails, eager steps run, and `ran` says why.

Shapes: B batch, Q new positions, N positions of the cache, H heads, d width of a head.
"""

import dataclasses
import threading
import time
import weakref
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kit.base import compiler
from kit.base.hardware import is_oom
from kit.base.tensor_file import checksum


@dataclasses.dataclass(kw_only=True)
class KVCache:
    """Keys and values of every layer, (2, B, H, N, d), written in place."""

    layers: list[Tensor]
    mask: Tensor | None  # (B, 1, 1, N), -inf at padding; None: no padding
    length: int = 0  # positions written

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

    def release(self) -> None:
        """Free its memory, even while a traceback still refers to this cache."""
        self.layers = []


def new_layers(decoder, rows: int, positions: int) -> list[Tensor]:
    """Return keys and values (2, rows, H, positions, d) of each layer, not initialised."""
    c = decoder.config
    shape = (2, rows, c.heads, positions, c.width // c.heads)
    how = {"dtype": decoder.cache_dtype, "device": decoder.device}
    return [torch.empty(shape, **how) for _ in range(c.layers)]


def write(kv: Tensor, new: Tensor, input_pos: int | Tensor) -> Tensor:
    """Write `new` (2, B, H, Q, d) to the cache at `input_pos`; return the positions to attend to.

    If `input_pos` is a tensor (1,), that is the full cache: CUDA graphs need fixed shapes.
    """
    if isinstance(input_pos, Tensor):
        return kv.index_copy_(3, input_pos, new.to(kv.dtype))
    kv.narrow(3, input_pos, new.shape[3]).copy_(new)
    return kv.narrow(3, 0, input_pos + new.shape[3])


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attend from the new positions to all so far; causal if there is no mask."""
    if q.shape[2] == 1 and torch.compiler.is_compiling():
        # With one query, plain elementwise code, which the compiler fuses into few loops: on an
        # H200 PyTorch's kernel takes 17 us a layer, ten times what reading keys and values does.
        scores = (q.float() * k).sum(-1) * q.shape[-1] ** -0.5  # (B, H, N)
        scores = scores if mask is None else scores + mask[:, 0]
        return (scores.softmax(-1)[..., None] * v).sum(2, keepdim=True)
    causal = mask is None and q.shape[2] > 1
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


# While one thread compiles, no other may run compiled code.
COMPILE_LOCK = threading.RLock()
# A CUDA graph has fixed shapes, so there is one for each multiple of BUCKET positions. At XTTS-v2's
# size, batch 1 in half precision, up to 255 unused positions are 31 MB of keys and values beside
# 900 MB of weights; a long text needs four graphs. The mask must be aligned to 16.
BUCKET = 256
MAX_HELD = 8  # numbers of rows and settings of sampling that graphs are kept for
Output = tuple[Tensor, Tensor]  # logits and states


class PreparedSteps:
    """Steps of `decoder`, prepared by `warm_up` once for each case.

    `advance` runs one for a batch with `last` codes, which takes its output: a
    `generate.DecodedBatch` or a `compare_formats.GivenCodes`.
    """

    def __init__(self, decoder):
        self.decoder = decoder
        self.ready: dict[tuple, object] = {}

    def prepared(self, case: tuple, *args):
        """Return what `warm_up` made for `case`. Hold COMPILE_LOCK until its work is done."""
        if case not in self.ready:
            started = time.perf_counter()
            self.ready[case] = self.warm_up(*args)
            self.decoder.warm_up_s += time.perf_counter() - started
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

    def advance(self, batch, code_index: int, cache: KVCache) -> bool:
        args = batch.last, code_index, cache.length, cache.layers, cache.mask
        with COMPILE_LOCK:
            output = self.prepared((len(batch.last), torch.get_num_threads()), *args)(*args)
        batch.take(*output, code_index)
        return True

    def warm_up(
        self, codes: Tensor, code_index: int, input_pos: int, layers: list[Tensor], mask
    ) -> Callable[..., Output]:
        """Return the fastest step for this batch size."""
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


class CudaGraphSteps(PreparedSteps):
    """Steps as CUDA graphs that also sample: one launch a code.

    Graphs have fixed shapes and memory: there is one for each number of rows and positions and each
    setting of sampling. A graph works on the first rows of one cache, on the tensors of a batch
    (`hold` moves them to the graph's memory), and on counters that it increments. The cache is for
    the largest batch so far. While a batch uses it, those of other threads get caches of their own,
    without graphs.

    If `compiles`, the three parts of a layer are compiled, as functions of the layer: all layers
    share them. Not the compiler's own graphs (mode "reduce-overhead"): those replay only in one
    thread and need Triton.
    """

    def __init__(self, decoder, compiles: bool):
        super().__init__(decoder)
        self.compiles = compiles
        self.parts = []
        if compiles:
            layer = type(decoder.layers[0])
            parts = layer.project, attend, layer.add_heads
            self.parts = [torch.compile(part, fullgraph=True) for part in parts]
        self.counters = torch.zeros(2, dtype=torch.long, device=decoder.device)  # code, position
        self.batch = None  # being decoded
        self.held: dict[tuple, dict[str, Tensor]] = {}  # tensors of batches, where graphs have them
        self.layers: list[Tensor] = []  # of the cache that graphs write to
        self.mask: Tensor | None = None  # (rows, 1, 1, N)
        # The cache in use; weak, because it may be dropped without a release.
        self.user: weakref.ref[KVCache] | None = None

    def new_cache(self, rows: int, mask: Tensor | None) -> KVCache | None:
        """Return the cache of the graphs; None while another batch uses it."""
        with COMPILE_LOCK:
            user = self.user and self.user()
            if user and user.layers:
                return None
            if not self.layers or rows > self.layers[0].shape[1]:
                self.free_memory()
                positions = self.decoder.max_positions
                self.layers = new_layers(self.decoder, rows, positions)
                self.mask = self.layers[0].new_zeros(rows, 1, 1, positions)
            layers = [kv[:, :rows] for kv in self.layers]
            # A graph attends to positions not yet written: masked values must not be NaN.
            torch._foreach_zero_(layers)
            mask = None if mask is None else self.mask[:rows].copy_(mask)
            cache = KVCache(layers=layers, mask=mask)
            self.user = weakref.ref(cache)
            return cache

    def owns(self, cache: KVCache) -> bool:
        return bool(self.layers) and cache.layers[0].data_ptr() == self.layers[0].data_ptr()

    def advance(self, batch, code_index: int, cache: KVCache) -> bool:
        """Run a step of `batch`, which takes its output; False if there is no graph for it."""
        with COMPILE_LOCK:
            if not self.owns(cache):
                return False
            if batch is not self.batch:
                self.hold(batch)
                self.counters.copy_(torch.tensor((code_index, cache.length)))
            positions = self.bucket(cache.length + 1)
            case = len(batch.last), positions, batch.sampling
            captured = self.prepared(case, positions, batch, cache)
            if captured is None:
                return False
            captured[0].replay()
            return True

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

    def free_memory(self) -> None:
        """Drop the graphs and their cache; a batch that still uses it continues without graphs."""
        self.clear()
        self.layers = []
        self.mask = None
        self.user = None

    def bucket(self, positions: int) -> int:
        """Return how many positions a step attends to, of which `positions` are written.

        All of them if a separate graph would save less than half a bucket.
        """
        longest = self.decoder.max_positions
        rounded = -(-positions // BUCKET) * BUCKET
        return longest if rounded + BUCKET // 2 > longest else rounded

    def warm_up(self, positions: int, batch, cache: KVCache) -> tuple | None:
        """Return the step as a CUDA graph and its output; None if it cannot be captured.

        It is compiled if possible. Failures are added to `ran`.
        """
        decoder = self.decoder
        if self.compiles:
            try:
                # A row times a matrix, int8 too, is one kernel only with this tuning.
                with compiler.quiet_inductor(coordinate_descent_tuning=True):
                    return self.capture(positions, batch, cache, self.parts)
            except Exception as error:
                raise_if_oom(error)
                self.compiles = False
                decoder.ran += compiler.not_compiled_note(first_line(error))
        try:
            return self.capture(positions, batch, cache, ())
        except RuntimeError as error:
            raise_if_oom(error)
            decoder.fall_back_to_eager(f"; no CUDA graph: {first_line(error)}")
            return None

    def capture(self, positions: int, batch, cache: KVCache, parts) -> tuple:
        attended = [kv[:, :, :, :positions] for kv in cache.layers]
        mask = None if cache.mask is None else cache.mask[..., :positions]
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


def raise_if_oom(error: BaseException) -> None:
    """Raise `error` or its cause again if memory ran out: a smaller batch may fit."""
    for cause in (error, error.__context__):  # a failed capture raises an error of its own
        if cause and is_oom(cause):
            raise cause


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
