"""The decoder: text in, then one new code a step, over a key-value cache allocated once.

The model's own layers laid out for speaking: `prompt` and `prefill` read the text, `decode_one` is
one step, in which nothing grows, nothing is copied, nothing waits for the device. Weights come in
several number formats (`quantize`); `compile` makes one graph of a step. What was asked for and
cannot run here is replaced, and `ran` says so. To be called under `torch.inference_mode()`. Knows
the model; nothing of sampling, codecs or files.

Shapes: B batch, Q new positions (P prompt, 1 code), N positions of the cache, D width, H heads,
d = D / H, V code vocabulary, K latents.
"""

import dataclasses
import math
import threading
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.base.compiler import StepGraph, not_compiled, quickest, quiet_inductor, will_compile
from kit.base.config import require
from kit.base.weights_file import checksum, is_sound
from kit.base.words import nearest
from kit.inference.linear_formats import FORMATS, choose
from kit.model.gpt import Layer, SpeechGPT

ONE_AT_A_TIME = threading.Lock()  # while one thread compiles, no other may run what is compiled
KEPT_BYTES = 2**26  # of a cache between two texts


class DecodeError(ValueError):
    """A text the model cannot read, or a damaged model; the message says what to change."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    weights: str = "fp32"  # fp32, bf16, fp16, int8, int8-weight-only or int4
    # One graph a batch size: some seconds of warm-up, then faster steps. On a GPU they are replayed
    # as CUDA graphs, where nothing can be compiled, too.
    compile: bool = False

    def __post_init__(self):
        unknown = f"there is no such format.{nearest(self.weights, FORMATS)}"
        require(self.weights in FORMATS, self, "weights", unknown)


@dataclasses.dataclass(kw_only=True)
class Cache:
    """Keys and values of every layer, (B, H, N, d) each, written in place."""

    layers: list[tuple[Tensor, Tensor]]
    memory: list[Tensor]  # what they lie in, of each layer: taken again when they are done with
    mask: Tensor | None  # (B, 1, 1, N), -inf where a row has padding; None: no row has any
    length: int = 0  # positions written

    def keep(self, rows: Tensor) -> None:
        """Go on with the rows of this mask (B,) alone, moved up where they lie."""
        live = rows.nonzero()[:, 0].tolist()
        for kept in (t[:, :, : self.length] for pair in self.layers for t in pair):
            for to, row in enumerate(live):
                if to < row:
                    kept[to].copy_(kept[row])
        self.layers = [(k[: len(live)], v[: len(live)]) for k, v in self.layers]
        self.mask = None if self.mask is None else self.mask[rows]


class Block(nn.Module):
    """One transformer layer over rows (B * Q, D) and the cache."""

    def __init__(self, layer: Layer, linear, dtype: torch.dtype):
        super().__init__()
        self.heads = layer.attn.heads
        self.c_attn, self.c_proj = (
            linear(m, dtype) for m in (layer.attn.c_attn, layer.attn.c_proj)
        )
        self.c_fc, self.mlp_proj = (linear(m, dtype) for m in (layer.mlp.c_fc, layer.mlp.c_proj))
        self.ln_1, self.ln_1_bias = norm(layer.ln_1, dtype)
        self.ln_2, self.ln_2_bias = norm(layer.ln_2, dtype)

    def forward(
        self, x: Tensor, k: Tensor, v: Tensor, at: int | Tensor, mask: Tensor | None
    ) -> Tensor:
        h = torch.layer_norm(x, x.shape[1:], self.ln_1, self.ln_1_bias)
        h = self.c_attn(h).view(len(k), -1, 3, self.heads, k.shape[-1])
        q, new_k, new_v = h.permute(2, 0, 3, 1, 4)  # (B, H, Q, d) each
        k, v = write(k, new_k, at), write(v, new_v, at)
        h = attend(q.to(k.dtype), k, v, mask)
        x = x + self.c_proj(h.transpose(1, 2).reshape(x.shape).to(x.dtype))
        h = torch.layer_norm(x, x.shape[1:], self.ln_2, self.ln_2_bias)
        return x + self.mlp_proj(F.gelu(self.c_fc(h), approximate="tanh"))


def norm(layer: nn.LayerNorm, dtype: torch.dtype) -> tuple[nn.Buffer, nn.Buffer]:
    return nn.Buffer(layer.weight.detach().to(dtype)), nn.Buffer(layer.bias.detach().to(dtype))


def write(cache: Tensor, new: Tensor, at: int | Tensor) -> Tensor:
    """Put `new` (B, H, Q, d) into the cache at position `at`; what there is to look at so far.

    With `at` a tensor (1,), shapes are the same at every step: CUDA graphs ask for that.
    """
    if isinstance(at, Tensor):
        return cache.index_copy_(2, at, new.to(cache.dtype))
    cache.narrow(2, at, new.shape[2]).copy_(new)
    return cache.narrow(2, 0, at + new.shape[2])


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of new positions to all so far; causal among themselves where there is no mask."""
    if q.shape[2] == 1 and q.device.type == "cpu" and torch.compiler.is_compiling():
        # One query is no matrix: plain loops over the cache, which the compiler makes one of.
        scores = (q * k).sum(-1) * q.shape[-1] ** -0.5  # (B, H, N)
        scores = scores if mask is None else scores + mask[:, 0]
        return (scores.softmax(-1)[..., None] * v).sum(2, keepdim=True)
    causal = mask is None and q.shape[2] > 1
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


class Decoder(nn.Module):
    """`model` made ready to speak, on the model's device. `ran` says in which format, and why.

    `traceable` takes the layers a compiler can follow, for those who bring their own.
    """

    def __init__(
        self, model: SpeechGPT, config: DecoderConfig = DecoderConfig(), traceable: bool = False
    ):
        super().__init__()
        self.config, self.asked = model.config, config
        self.device = model.final_norm.weight.device
        check_finite(model)
        compiles, instead = will_compile(config.compile, self.device)
        linear, self.dtype, self.ran = choose(config.weights, self.device, compiles or traceable)
        self.ran += instead
        self.conditioner = model.conditioner
        self.text_embedding, self.text_position = model.text_embedding, model.text_position
        self.code_embedding, self.code_position = (
            nn.Buffer(table.weight.detach().to(self.dtype))
            for table in (model.code_embedding, model.code_position)
        )
        self.layers = nn.ModuleList(Block(layer, linear, self.dtype) for layer in model.gpt.h)
        self.ln_f, self.ln_f_bias = norm(model.gpt.ln_f, self.dtype)
        self.final_norm, self.final_norm_bias = norm(model.final_norm, self.dtype)
        self.code_head = linear(model.code_head, self.dtype)
        # On a CPU, uncompiled 16-bit attention is many times slower than 32-bit.
        eager_cpu = self.device.type == "cpu" and not compiles
        self.cache_dtype = torch.float32 if eager_cpu else self.dtype
        self.graphs = self.device.type == "cuda" and config.compile  # replayed as CUDA graphs
        # Whether rows may leave: a graph has its batch size.
        self.shrinks = not (compiles or self.graphs)
        self.most = model.config.latents + model.config.max_text + model.config.max_code
        if self.graphs:  # fused attention takes a mask by sixteens, others are copied for it
            self.most = -(-self.most // 16) * 16
        self.counter = nn.Buffer(torch.arange(self.most, device=self.device), persistent=False)
        self.spare: dict[int, list[Tensor]] = {}  # memory of caches; of graphs, by their rows
        # A step made fast, its seconds; by rows and threads (0 on a GPU).
        self.runs, self.warm_up_s = {}, {}
        if compiles:
            self.tuned = torch.compile(self.step, fullgraph=True, dynamic=not self.graphs)
            options = {"dynamic": True, "options": {"max_autotune": False}}
            self.untuned = torch.compile(self.step, fullgraph=True, **options)
            self.frozen = "" if self.graphs else checksum(self.state_dict())
        self.compiles = compiles
        if not (compiles or traceable):
            # At hand, not by nn.Module's search: a tenth of a small model's step.
            for module in (self, *self.layers.modules(), self.code_head):
                vars(module).update(module._buffers | module._modules)

    def prompt(self, texts: list[list[int]], cond: Tensor) -> tuple[Tensor, list[int]]:
        """`latents | START text STOP | START` of every row, padded on the left, and the padding.

        Embeddings (B, P, D) in fp32. `cond` (B, M, T) are log-mels of the speakers. Raises
        DecodeError for an empty text, one longer than the model's positions, or damaged mels.
        """
        c, rows = self.config, []
        if not torch.isfinite(cond).all():
            raise DecodeError("A reference is not finite: make it again from a sound recording.")
        start = self.embed(torch.tensor([c.start_code], device=cond.device), 0).float()
        different, which = cond.unique_consecutive(dim=0, return_inverse=True)
        for text, latents in zip(texts, self.conditioner(different)[which], strict=True):
            if not 0 < len(text) <= c.max_text - 2:
                raise DecodeError(
                    f"A text of {len(text)} ids cannot be spoken: 1 to {c.max_text - 2} fit. "
                    "Split it into sentences."
                )
            ids = torch.tensor([c.text_vocab - 2, *text, c.text_vocab - 1], device=cond.device)
            said = self.text_embedding(ids) + self.text_position.weight[: len(ids)]
            rows.append(torch.cat((latents, said, start)))
        padding = [max(map(len, rows)) - len(row) for row in rows]
        return torch.stack([F.pad(r, (0, 0, n, 0)) for r, n in zip(rows, padding)]), padding

    def prefill(self, x: Tensor, padding: list[int], longest: int) -> tuple[Tensor, Cache]:
        """Read prompts (B, P, D): logits (B, V) of the first code, a cache for `longest` more."""
        b, count, d = x.shape
        cache = self.cache(padding, count + longest + 1)  # never full: one more case to compile
        mask = cache.mask
        if mask is not None:
            late = torch.full((count, count), float("-inf"), device=x.device).triu(1)
            mask = mask[..., :count] + late
            # A padding query sees itself, or its softmax would be NaN and spread.
            mask.diagonal(dim1=-2, dim2=-1).zero_()
            mask = mask.to(self.cache_dtype)
        x = x.reshape(b * count, d).to(self.dtype)
        for layer, (k, v) in zip(self.layers, cache.layers):
            x = layer(x, k, v, 0, mask)
        cache.length = count
        return self.logits(x.view(b, count, d)[:, -1]), cache

    def cache(self, padding: list[int], positions: int) -> Cache:
        """Room for `positions` of each row; `padding` says how many on its left are none."""
        rows, mask, c = len(padding), None, self.config
        if any(padding) or (rows > 1 and not self.shrinks):  # one graph, padded or not
            padded = self.counter < torch.tensor(padding, device=self.device)[:, None]
            mask = torch.zeros(padded.shape, device=self.device).masked_fill(padded, float("-inf"))
            mask = mask[:, None, None].to(self.cache_dtype)
        positions = self.most if self.graphs else positions
        shape = (2, rows, c.heads, positions, c.width // c.heads)
        size, memory = math.prod(shape), self.spare.pop(rows if self.graphs else 0, None)
        if memory is None or memory[0].numel() < size:
            # Empty: of it only what is written to takes time and room.
            options = {"dtype": self.cache_dtype, "device": self.device}
            memory = [torch.empty(size, **options) for _ in self.layers]
        if self.graphs:  # they look at all of it: what is masked must not be NaN
            torch._foreach_zero_(memory)
        layers = [(kv[0], kv[1]) for kv in (flat[:size].view(shape) for flat in memory)]
        return Cache(layers=layers, memory=memory, mask=mask)

    def release(self, cache: Cache) -> None:
        """Say that `cache` is done with: the next batch takes its memory again.

        CUDA graphs must, and memory that is new to the process is slow to write to.
        """
        rows = len(cache.layers[0][0]) if self.graphs else 0
        if not self.graphs or rows not in self.spare or self.has_graph(cache):
            self.spare[rows] = cache.memory

    def has_graph(self, cache: Cache) -> bool:
        """Whether there is a CUDA graph that writes to `cache`."""
        graphs = (run for run in self.runs.values() if isinstance(run, StepGraph))
        return any(graph.owns(cache.layers) for graph in graphs)

    def tidy(self) -> None:
        """Give back what large batches took; what a text alone takes is kept for the next one."""
        size = sum(flat.nbytes for memory in self.spare.values() for flat in memory)
        if size > KEPT_BYTES and not self.graphs:
            self.spare.clear()

    def decode_one(self, codes: Tensor, number: int, cache: Cache) -> Tensor:
        """Logits (B, V) of the code after `codes` (B,), which are the `number`-th of their rows."""
        at, mask = cache.length, cache.mask
        cache.length += 1
        if self.graphs:
            at, number = (self.counter[n : n + 1] for n in (at, number))
        if not self.shrinks:
            case = len(codes), 0 if self.graphs else torch.get_num_threads()
            with ONE_AT_A_TIME:
                if case not in self.runs:
                    started = time.perf_counter()
                    self.runs[case] = self.warm_up(codes, number, at, cache.layers, mask)
                    self.warm_up_s[case] = time.perf_counter() - started
                return self.runs[case](codes, number, at, cache.layers, mask)
        return self.step(codes, number, at, cache.layers, mask)

    def warm_up(
        self, codes: Tensor, number, at, layers: list, mask: Tensor | None
    ) -> Callable[..., Tensor]:
        """`step` made fast for this batch size and number of threads.

        Where the compiler fails, steps run uncompiled from here on, and `ran` says why.
        """
        if self.graphs:
            return self.graph((codes, number, at, layers, mask))
        torch._dynamo.mark_static(codes, 0)
        for tensor in (t for pair in layers for t in pair):
            for dim in (0, 1, 3):
                torch._dynamo.mark_static(tensor, dim)  # the length alone may change
        number, at = 2, max(2, at)  # 0 and 1 would be taken for constants
        args = (codes, number, at, layers, mask)
        try:
            with quiet_inductor(self.frozen, freezing=True, max_autotune=True):
                tuned_s = quickest(lambda: self.tuned(*args))
            if tuned_s <= quickest(lambda: self.step(*args)):
                return self.tuned
            # Tuning times kernels; beside other work it may pick the worst of them.
            with quiet_inductor(self.frozen, freezing=True):
                self.untuned(*args)
            return self.untuned
        except RuntimeError as error:  # Dynamo's and Inductor's own are of this kind
            self.shrinks = True
            self.ran += not_compiled(first_line(error))
            return self.step

    def graph(self, args: tuple) -> Callable[..., Tensor]:
        """`step` as a CUDA graph, compiled where it can be; `ran` says what could not."""
        if self.compiles:
            try:
                # Tuned by coordinates, a row times a matrix is one kernel that expands int8 as it
                # reads; a library's product would want the matrix expanded first.
                with quiet_inductor(max_autotune=True, coordinate_descent_tuning=True):
                    return StepGraph(self.tuned, args)
            except RuntimeError as error:  # Dynamo's and Inductor's own are of this kind
                self.compiles = False
                self.ran += not_compiled(first_line(error))
        try:
            return StepGraph(self.step, args)
        except RuntimeError as error:
            self.graphs, self.shrinks = False, True
            self.ran += f"; no CUDA graph: {first_line(error)}"
            return self.step

    def step(
        self,
        codes: Tensor,
        number: int | Tensor,
        at: int | Tensor,
        layers: list[tuple[Tensor, Tensor]],
        mask: Tensor | None,
    ) -> Tensor:
        """`decode_one` as one graph: nothing but tensors and two positions go in."""
        x = self.embed(codes, number)
        if isinstance(at, Tensor):  # the whole cache is looked at: hide what is not written yet
            positions = layers[0][0].shape[2]
            none = layers[0][0].new_zeros(1, 1, 1, positions)
            mask = none if mask is None else mask[..., :positions]
            mask = mask.masked_fill(self.counter[:positions] > at, float("-inf"))
        elif mask is not None:
            mask = mask[..., : at + 1]
        for layer, (k, v) in zip(self.layers, layers):
            x = layer(x, k, v, at, mask)
        return self.logits(x)

    def embed(self, codes: Tensor, number: int | Tensor) -> Tensor:
        """Codes (B,), the `number`-th of their rows, as the trunk takes them (B, D)."""
        return F.embedding(codes, self.code_embedding) + self.code_position[number]

    def logits(self, x: Tensor) -> Tensor:
        """States (B, D) -> logits (B, V) in fp32."""
        x = torch.layer_norm(x, x.shape[1:], self.ln_f, self.ln_f_bias)
        x = torch.layer_norm(x, x.shape[1:], self.final_norm, self.final_norm_bias)
        return self.code_head(x).float()


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def check_finite(model: SpeechGPT) -> None:
    """Raises DecodeError for damaged weights: rounded, NaN would pass for a number."""
    for name, values in model.named_parameters():
        if not is_sound(name, values):
            raise DecodeError(
                f"The model's weights are damaged: {name} is not finite. Load an earlier "
                "checkpoint, or train again with a lower learning rate."
            )
