"""The GPT for inference: prefill a text, then decode one code a step over a preallocated KV cache.

A step allocates nothing that grows, copies no cache and never waits for the device. Call it under
`torch.inference_mode()`.

Shapes: B batch, Q new positions (P prompt, 1 code), N positions of the cache, D width, H heads,
d = D / H, V code vocabulary, K latents.
"""

import gc
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.base.compiler import keep_device_guard, will_compile
from kit.base.errors import SpeechError
from kit.base.formatting import nearest
from kit.base.hardware import set_cuda_defaults
from kit.base.tensor_file import is_finite
from kit.inference.decoder_steps import (
    COMPILE_LOCK,
    CompiledSteps,
    CudaGraphSteps,
    KVCache,
    Output,
    attend,
    new_layers,
    write,
)
from kit.inference.linear_formats import choose_layer
from kit.model.gpt import Conditioner, Layer, SpeechGPT
from kit.model.text_attention import AlignmentHead
from kit.settings import FORMATS

# Log-mels (B, M, T), one reference a row; or the segments (M, T) of each row's reference, of any
# length, whose latents are averaged.
Conditioning = Tensor | list[list[Tensor]]


class DecoderLayer(nn.Module):
    """One transformer layer over rows (B * Q, D) and the cache."""

    def __init__(self, layer: Layer, linear: type[nn.Module], dtype: torch.dtype):
        super().__init__()
        self.heads = layer.attn.heads
        self.approximate = layer.mlp.approximate
        self.c_attn = linear(layer.attn.c_attn, dtype)
        self.c_proj = linear(layer.attn.c_proj, dtype)
        self.c_fc = linear(layer.mlp.c_fc, dtype)
        self.mlp_proj = linear(layer.mlp.c_proj, dtype)
        self.ln_1, self.ln_1_bias = norm(layer.ln_1, dtype)
        self.ln_2, self.ln_2_bias = norm(layer.ln_2, dtype)

    def project(self, x: Tensor) -> Tensor:
        """Return queries, keys and values (B * Q, 3D) from the layer's input (B * Q, D)."""
        return self.c_attn(torch.layer_norm(x, x.shape[1:], self.ln_1, self.ln_1_bias))

    def add_heads(self, x: Tensor, h: Tensor) -> Tensor:
        """Return the layer's output from its input and the attention's output h, (B * Q, D) all."""
        x = x + self.c_proj(h.to(x.dtype))
        h = torch.layer_norm(x, x.shape[1:], self.ln_2, self.ln_2_bias)
        return x + self.mlp_proj(F.gelu(self.c_fc(h), approximate=self.approximate))

    def qkv(self, x: Tensor, rows: int) -> Tensor:
        """Return queries, keys and values of every head, (3, B, H, Q, d), from x (B * Q, D)."""
        return split_heads(self.project(x), rows, self.heads)

    def forward(
        self,
        x: Tensor,
        kv: Tensor,
        input_pos: int | Tensor,
        mask: Tensor | None,
        project: Callable = project,
        attend: Callable = attend,
        add_heads: Callable = add_heads,
    ) -> Tensor:
        """Return the output (B * Q, D); `project`, `attend` and `add_heads` may be compiled."""
        qkv = split_heads(project(self, x), kv.shape[1], self.heads)
        k, v = write(kv, qkv[1:], input_pos)
        h = attend(qkv[0].to(kv.dtype), k, v, mask)
        return add_heads(self, x, h.transpose(1, 2).reshape(x.shape))


def split_heads(h: Tensor, rows: int, heads: int) -> Tensor:  # (B * Q, 3D) -> (3, B, H, Q, d)
    return h.view(rows, -1, 3, heads, h.shape[1] // (3 * heads)).permute(2, 0, 3, 1, 4)


def norm(layer: nn.LayerNorm, dtype: torch.dtype) -> tuple[nn.Buffer, nn.Buffer]:
    return nn.Buffer(layer.weight.detach().to(dtype)), nn.Buffer(layer.bias.detach().to(dtype))


def require_finite(model: nn.Module) -> None:
    """Raise SpeechError for weights of which some are NaN or infinite."""
    for name, values in model.named_parameters():
        if not is_finite(name, values):
            raise SpeechError(
                f"The model's weights are damaged: {name} is not finite. Load an earlier "
                "checkpoint, or train again with a lower learning rate."
            )


class Decoder(nn.Module):
    """`model` prepared for decoding on its device in one of FORMATS; `ran` says what runs, and why.

    `compile` is torch.compile: on a CPU of a step, seconds to minutes of warm-up for each batch
    size; on a GPU of a layer, once for all, in CUDA graphs (used even if nothing can be compiled).
    `graphs`: on a GPU, CUDA graphs of eager steps, captured in under a second. `states`: also keep
    the hidden state that predicted each code, which some codecs decode from. `alignment_head`
    follows the text, if known. `traceable` takes layers that `torch.export` can trace.
    """

    def __init__(
        self,
        model: SpeechGPT,
        weights: str = "fp32",
        *,
        compile: bool = False,
        graphs: bool = False,
        states: bool = False,
        alignment_head: AlignmentHead | None = None,
        traceable: bool = False,
    ):
        super().__init__()
        if weights not in FORMATS:
            raise SpeechError(f"There is no number format {weights!r}.{nearest(weights, FORMATS)}")
        set_cuda_defaults()
        self.config = model.config
        self.device = model.final_norm.weight.device
        require_finite(model)  # rounded to int8, NaN is a number
        compiles, not_compiled = will_compile(compile, self.device)
        if compiles:
            keep_device_guard()
        linear, self.dtype, ran = choose_layer(weights, self.device, compiles or traceable)
        self.ran = ran + not_compiled
        self.conditioner = model.conditioner
        self.text_embedding = model.text_embedding
        self.text_position = model.text_position
        self.code_embedding = nn.Buffer(model.code_embedding.weight.detach().to(self.dtype))
        positions = model.code_position.weight.detach()
        if model.config.conformers:  # IndexTTS2's cached generation gives its first code position 2
            positions = torch.cat((positions[:1], positions[2:], positions[-1:]))
        self.code_position = nn.Buffer(positions.to(self.dtype))
        self.layers = nn.ModuleList(DecoderLayer(each, linear, self.dtype) for each in model.gpt.h)
        self.ln_f, self.ln_f_bias = norm(model.gpt.ln_f, self.dtype)
        self.final_norm, self.final_norm_bias = norm(model.final_norm, self.dtype)
        self.code_head = linear(model.code_head, self.dtype)
        # On a CPU, uncompiled 16-bit attention is many times slower than 32-bit.
        eager_cpu = self.device.type == "cpu" and not compiles
        self.cache_dtype = torch.float32 if eager_cpu else self.dtype
        graphs = (graphs or compile) and self.device.type == "cuda"
        self.max_positions = model.config.latents + model.config.max_text + model.config.max_code
        if graphs:  # fused attention needs a mask aligned to 16, or copies it
            self.max_positions = -(-self.max_positions // 16) * 16
        positions = torch.arange(self.max_positions, device=self.device)
        self.counter = nn.Buffer(positions, persistent=False)
        self.max_rows: int | None = None  # of a batch, once memory has run out
        self.keeps_states = states
        self.alignment_head = alignment_head
        self.compiled = None  # None: eager steps
        self.warm_up_s = 0.0  # spent so far on compiling and capturing
        # Steps between checks for finished rows: each is a GPU sync.
        self.check_every = 1 if self.device.type == "cpu" else 16
        if graphs:
            self.compiled = CudaGraphSteps(self, compiles)
        elif compiles:
            self.compiled = CompiledSteps(self)
        if not (compiles or traceable):
            # Plain attributes skip nn.Module.__getattr__: a tenth of a small model's step.
            for module in (self, *self.layers.modules(), self.code_head):
                vars(module).update(module._buffers)
                vars(module).update(module._modules)

    @property
    def can_drop_rows(self) -> bool:
        """Whether rows may leave the batch; a graph has a fixed batch size."""
        return self.compiled is None

    @property
    def compiles(self) -> bool:
        """Whether steps are compiled, for each batch size."""
        return self.compiled is not None and self.compiled.compiles

    def fall_back_to_eager(self, reason: str) -> None:
        """Run eager steps from now on, and add `reason` to `ran`."""
        self.ran += reason
        self.compiled = None

    def prompt(
        self, texts: list[list[int]], cond: Conditioning, with_uncond: bool = False
    ) -> tuple[Tensor, list[int]]:
        """Return `latents | START text STOP | START` of every row, padded left, and the padding.

        Embeddings (B, P, D) in fp32. With `with_uncond` the same rows follow without their text,
        (2B, P, D). Raises SpeechError for an empty or too long text.
        """
        c = self.config
        for text in texts:
            if not 0 < len(text) <= c.max_text - 2:
                raise SpeechError(
                    f"A text has {len(text)} ids, but the model takes 1 to {c.max_text - 2}: split "
                    "it into sentences."
                )
        rows = []
        start = self.embed(torch.tensor([c.start_code], device=self.device), 0).float()
        latents = self.latents(cond)
        if with_uncond:
            texts = [*texts, *[[]] * len(texts)]
            latents = latents.repeat(2, 1, 1)
        for text, row_latents in zip(texts, latents, strict=True):
            ids = torch.tensor([c.start_text, *text, c.stop_text], device=self.device)
            embedded = self.text_embedding(ids) + self.text_position.weight[: len(ids)]
            rows.append(torch.cat((row_latents, embedded, start)))
        padding = [max(map(len, rows)) - len(row) for row in rows]
        return torch.stack([F.pad(r, (0, 0, n, 0)) for r, n in zip(rows, padding)]), padding

    def latents(self, cond: Conditioning) -> Tensor:
        """Return the latents (B, K, D) of references."""
        if isinstance(cond, Tensor):
            unique, index = cond.unique_consecutive(dim=0, return_inverse=True)
            return self.conditioner(unique)[index]
        by_id = {id(segments): segments for segments in cond}  # rows of one speaker share the list
        means = {key: mean_latents(self.conditioner, each) for key, each in by_id.items()}
        return torch.stack([means[id(segments)] for segments in cond])

    def prefill(
        self, x: Tensor, padding: list[int], longest: int, prompts: list[int] | None = None
    ) -> tuple[Output, KVCache]:
        """Run prompts (B, P, D); return logits (B, V), the states (B, D) that they are computed
        from, and a cache with room for `longest` codes.

        With `prompts`, the prompt of each row, several rows may share one: each is run once.
        """
        b, count, d = x.shape
        rows = b if prompts is None else len(prompts)
        # Several rows: the same graph with or without padding.
        masked = any(padding) or (rows > 1 and not self.can_drop_rows)
        mask = self.padding_mask(padding) if masked else None
        # Never full: that would be one more case to compile.
        row_masks = mask[prompts] if masked and prompts else mask
        cache = self.new_cache(rows, count + longest + 1, row_masks)
        try:
            mask = self.causal_mask(mask, count)
            x = x.reshape(b * count, d).to(self.dtype)
            for layer, kv in zip(self.layers, cache.layers):
                x = layer(x, kv[:, :b], 0, mask)
            cache.length = count
            state = self.final_state(x.view(b, count, d)[:, -1])
            logits = self.code_head(state).float()
            if rows > b:
                cache.share(prompts)
                state = state[prompts]
                logits = logits[prompts]
            return (logits, state), cache
        except BaseException:  # the caller has no cache to release
            cache.release()
            raise

    def new_cache(self, rows: int, positions: int, mask: Tensor | None) -> KVCache:
        """Return an empty cache, that of the CUDA graphs where they have one to spare."""
        cache = None
        if isinstance(self.compiled, CudaGraphSteps):
            cache = self.compiled.new_cache(rows, mask)
        return cache or KVCache(layers=new_layers(self, rows, positions), mask=mask)

    def padding_mask(self, padding: list[int]) -> Tensor:
        """Return a mask (B, 1, 1, N), -inf at padding."""
        padded = self.counter < torch.tensor(padding, device=self.device)[:, None, None, None]
        return torch.where(padded, float("-inf"), 0.0).to(self.cache_dtype)

    def causal_mask(self, mask: Tensor | None, count: int) -> Tensor | None:
        """Return `mask` for the first `count` positions as queries, causal; None stays None."""
        if mask is None:
            return None
        later = torch.full((count, count), float("-inf"), device=mask.device).triu(1)
        mask = mask[..., :count] + later
        # A padding query attends to itself, or its softmax would be NaN and spread.
        mask.diagonal(dim1=-2, dim2=-1).zero_()
        return mask.to(self.cache_dtype)

    def free_memory(self) -> None:
        """Free all memory that no text is using, after memory ran out."""
        gc.collect()
        with COMPILE_LOCK:
            if isinstance(self.compiled, CudaGraphSteps):
                self.compiled.free_memory()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def advance(self, batch, code_index: int, cache: KVCache) -> None:
        """Run the step whose logits give the `code_index`-th codes of `batch`, which takes them.

        `batch` is as in `decoder_steps.PreparedSteps`. On a GPU with graphs, that is one launch.
        """
        if not (self.compiled and self.compiled.advance(batch, code_index, cache)):
            output = self.step(batch.last, code_index, cache.length, cache.layers, cache.mask)
            batch.take(*output, code_index)
        cache.length += 1

    def step(
        self,
        codes: Tensor,
        code_index: int | Tensor,
        input_pos: int | Tensor,
        layers: list[Tensor],
        mask: Tensor | None,
        parts: tuple[Callable, ...] = (),
    ) -> Output:
        """Return logits (B, V) of the code after `codes` (B,), and the states (B, D) behind them.

        `codes` are the `code_index`-th of their rows and go to `input_pos` of the cache. `parts`
        replace those of a layer (`DecoderLayer.forward`).
        """
        x = self.embed(codes, code_index)
        if isinstance(input_pos, Tensor):  # attention covers the full cache
            positions = layers[0].shape[3]
            mask = layers[0].new_zeros(1, 1, 1, positions) if mask is None else mask
            unwritten = self.counter[:positions] > input_pos
            mask = mask[..., :positions].masked_fill(unwritten, float("-inf"))
        elif mask is not None:
            mask = mask[..., : input_pos + 1]
        for layer, kv in zip(self.layers, layers):
            x = layer(x, kv, input_pos, mask, *parts)
        state = self.final_state(x)
        return self.code_head(state).float(), state

    def embed(self, codes: Tensor, code_index: int | Tensor) -> Tensor:
        """Return embeddings (B, D) of codes (B,), the `code_index`-th of their rows."""
        return F.embedding(codes, self.code_embedding) + self.code_position[code_index]

    def final_state(self, x: Tensor) -> Tensor:
        """Return the last layer's output (B, D) after both norms, which predicts the next code."""
        x = torch.layer_norm(x, x.shape[1:], self.ln_f, self.ln_f_bias)
        return torch.layer_norm(x, x.shape[1:], self.final_norm, self.final_norm_bias)


def mean_latents(conditioner: Conditioner, segments: list[Tensor]) -> Tensor:
    """Return the mean latents (K, D) of a reference's segments (M, T), as XTTS-v2 does."""
    return torch.stack([conditioner(mel[None])[0] for mel in segments]).mean(0)
