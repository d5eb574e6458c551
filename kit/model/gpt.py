"""The model: an autoregressive GPT over audio codes, with the layout of XTTS-v2's GPT.

An example is `conditioning latents | START text STOP | START codes STOP...`, packed without gaps,
so attention is plain causal without a mask and SDPA's fast backends apply. Sizes and names follow
XTTS-v2 (Casanova et al. 2024) and GPT-2 (Radford et al. 2019); the perceiver resampler is
Flamingo's (Alayrac et al. 2022).

Shapes: B batch, S packed sequence, D width, H heads, K latents, M mels, T mel frames, V vocabulary.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

from kit.base import extras
from kit.base.hardware import prefers_explicit_attention
from kit.model.sequence import IGNORE_INDEX, Batch
from kit.model.text_attention import guided_attention_loss
from kit.settings import GELU, GPTConfig

HEAD_ROWS = 64  # the number of targets is padded to a multiple of this


class Attention(nn.Module):
    """Causal self-attention with GPT-2's names. `fused` picks SDPA over the explicit softmax."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.fused = True
        self.kernel = None  # the only one that SDPA may use; None: any
        self.c_attn = nn.Linear(config.width, 3 * config.width)
        self.c_proj = nn.Linear(config.width, config.width)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of every head, (B, H, S, D / H) each, from x (B, S, D)."""
        # Taken apart in this order, their gradients come together in that of c_attn's result.
        q, k, v = self.c_attn(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:  # (B, S, D)
        q, k, v = self.qkv(x)
        dropout = self.dropout if self.training else 0.0
        if self.kernel:
            with sdpa_kernel(self.kernel):
                y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        else:
            y = (attend if self.fused else explicit_attention)(q, k, v, dropout, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


def attend(q: Tensor, k: Tensor, v: Tensor, dropout_p=0.0, is_causal=False) -> Tensor:
    """PyTorch's fused attention, or explicit attention where that is faster."""
    if prefers_explicit_attention(q.device.type, q.dtype, q.shape[-2], dropout_p):
        return explicit_attention(q, k, v, dropout_p, is_causal)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=is_causal)


def explicit_attention(q, k, v, dropout_p=0.0, is_causal=False) -> Tensor:
    """Softmax attention written out: the baseline fused attention is measured against."""
    return F.dropout(attention_weights(q, k, is_causal).to(v.dtype), dropout_p) @ v


def attention_weights(q: Tensor, k: Tensor, is_causal: bool = False) -> Tensor:
    """Return attention weights (B, H, queries, keys) in fp32; each row sums to 1."""
    scale = q.shape[-1] ** -0.5  # within the matmul, or before it: q @ k may overflow fp16
    if is_causal:
        mask = causal_mask(q.shape[-2], q.dtype, q.device)
        scores = torch.baddbmm(mask, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=scale)
        scores = scores.unflatten(0, q.shape[:2])
    else:
        scores = (q * scale) @ k.mT
    return scores.softmax(-1, dtype=torch.float32)


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)  # an inference tensor could not be used in training
def causal_mask(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return (size, size): -inf where a key comes after its query, else 0."""
    return torch.full((size, size), float("-inf"), dtype=dtype, device=device).triu(1)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.width, 4 * config.width)
        self.c_proj = nn.Linear(4 * config.width, config.width)
        self.approximate = GELU[config.activation_function]

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate=self.approximate))


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + self.drop(self.mlp(self.ln_2(x)))


class Trunk(nn.Module):
    """GPT-2's stack of layers, with a final norm. Layers in `recompute` keep only their input.

    In training every layer goes through `run_layer`, which may be compiled: all layers share one
    graph. Validation calls the layers directly, so it never recompiles.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width)
        self.recompute: frozenset[int] = frozenset()
        self.run_layer = run_layer

    def forward(self, x: Tensor, look: Callable | None = None) -> Tensor:
        """Return states (B, S, D) from x (B, S, D); `look` gets the middle layer and its input."""
        x = self.drop(x)
        for i, layer in enumerate(self.h):
            if look and i == len(self.h) // 2:
                look(layer, x)
            run = self.run_layer if self.training else run_layer
            # Around the compiled layer, not in it: Inductor fails on that in mixed precision.
            recompute = self.training and i in self.recompute
            x = checkpoint(run, layer, x, use_reentrant=False) if recompute else run(layer, x)
        return self.ln_f(x)


def run_layer(layer: Layer, x: Tensor) -> Tensor:
    return layer(x)


class CondBlock(nn.Module):
    """Attention over a reference's frames; the residual is the *normed* input, as XTTS has it."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(32, width)
        self.qkv = nn.Conv1d(width, 3 * width, 1)
        self.proj_out = nn.Conv1d(width, width, 1)
        nn.init.zeros_(self.proj_out.weight)
        nn.init.zeros_(self.proj_out.bias)

    def forward(self, x: Tensor) -> Tensor:  # (B, D, T)
        x = self.norm(x)
        # Head-major: q, k, v of a head are together. A linear layer over (B, T, D) keeps a head's
        # values contiguous, as fused attention needs; a 1 x 1 convolution does not.
        qkv = F.linear(x.mT, self.qkv.weight[..., 0], self.qkv.bias)
        q, k, v = qkv.unflatten(-1, (self.heads, 3, -1)).permute(3, 0, 2, 1, 4)
        h = attend(q, k, v).transpose(1, 2).flatten(2)  # (B, T, D)
        return x + F.linear(h, self.proj_out.weight[..., 0], self.proj_out.bias).mT


class PerceiverLayer(nn.Module):
    """K latents attend to the reference and themselves, then a GEGLU feed-forward."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        inner = config.perceiver_heads * config.perceiver_head_width
        hidden = int(config.width * 8 / 3)
        self.heads = config.perceiver_heads
        self.to_q = nn.Linear(config.width, inner, bias=False)
        self.to_kv = nn.Linear(config.width, 2 * inner, bias=False)
        self.to_out = nn.Linear(inner, config.width, bias=False)
        self.ff_in = nn.Linear(config.width, 2 * hidden)
        self.ff_out = nn.Linear(hidden, config.width)

    def forward(self, latents: Tensor, context: Tensor) -> Tensor:  # (B, K, D), (B, T, D)
        q = self.to_q(latents).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        kv = self.to_kv(torch.cat((latents, context), dim=1))
        k, v = kv.unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        h = attend(q, k, v).transpose(1, 2).flatten(2)
        latents = latents + self.to_out(h)
        value, gate = self.ff_in(latents).chunk(2, dim=-1)
        return latents + self.ff_out(value * F.gelu(gate))


class Conditioner(nn.Module):
    """Reference log-mel (B, M, T) -> K speaker conditioning latents (B, K, D)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.init = nn.Conv1d(config.n_mels, config.width, 1)
        blocks = (CondBlock(config.width, config.heads) for _ in range(config.cond_blocks))
        self.blocks = nn.Sequential(*blocks)
        self.latents = nn.Parameter(torch.randn(config.latents, config.width) * 0.02)
        self.layers = nn.ModuleList(PerceiverLayer(config) for _ in range(config.perceiver_layers))
        self.gamma = nn.Parameter(torch.ones(config.width))

    def forward(self, mel: Tensor) -> Tensor:
        context = self.blocks(self.init(mel)).mT
        latents = self.latents.expand(len(mel), -1, -1)
        for layer in self.layers:
            latents = layer(latents, context)
        return F.rms_norm(latents, latents.shape[-1:]) * self.gamma


class SharedDigits(nn.Module):
    """Adds to a table of codes (V, D) what codes with an equal FSQ digit share.

    A code of the kit's codec is a tuple of small numbers, its digits, and codes that differ in one
    of them sound alike. So a rare code learns from frequent ones.
    """

    def __init__(self, levels: tuple[int, ...], width: int):
        super().__init__()
        self.digits = nn.ParameterList(torch.empty(count, width) for count in levels)
        for digit in self.digits:
            nn.init.normal_(digit, std=0.02)

    def forward(self, own: Tensor) -> Tensor:
        shared, *others = self.digits
        for digit in others:  # the first digit changes fastest from code to code
            shared = (digit[:, None] + shared).flatten(0, 1)
        return own + F.pad(shared, (0, 0, 0, len(own) - len(shared)))  # START and STOP have none


class SpeechGPT(nn.Module):
    """Text and a reference in, losses or hidden states over packed rows out."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        d = config.width
        conditioner = Conditioner
        if config.conformers:  # IndexTTS2's, imported when it is chosen
            conditioner = extras.load("CONDITIONERS", "indextts2")
        self.conditioner = conditioner(config)
        self.text_embedding = nn.Embedding(config.text_vocab, d)
        self.code_embedding = nn.Embedding(config.code_vocab, d)
        self.text_position = nn.Embedding(config.max_text, d)
        self.code_position = nn.Embedding(config.max_code, d)
        self.gpt = Trunk(config)
        self.final_norm = nn.LayerNorm(d)
        self.text_head = nn.Linear(d, config.text_vocab)
        self.code_head = nn.Linear(d, config.code_vocab)
        self.init_weights()
        if config.code_levels:
            for table in (self.code_embedding, self.code_head):
                register_parametrization(table, "weight", SharedDigits(config.code_levels, d))

    def init_weights(self) -> None:
        """Initialise as GPT-2: normal 0.02, residual projections over the root of their number."""
        trunk = [m for m in self.gpt.modules() if isinstance(m, nn.Linear)]
        for module in (*trunk, self.text_head, self.code_head):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        for table in (m for m in self.modules() if isinstance(m, nn.Embedding)):
            nn.init.normal_(table.weight, std=0.02)
        for layer in self.gpt.h:
            for projection in (layer.attn.c_proj, layer.mlp.c_proj):
                nn.init.normal_(projection.weight, std=0.02 / (2 * self.config.layers) ** 0.5)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Joint ids and joint positions (B, S) -> (B, S, D)."""
        table = torch.cat((self.text_embedding.weight, self.code_embedding.weight))
        position_table = torch.cat((self.text_position.weight, self.code_position.weight))
        return F.embedding(tokens, table) + F.embedding(positions, position_table)

    def inputs(self, batch: Batch) -> Tensor:
        """Return the trunk's input (B, K + S, D): the reference's latents, then the tokens."""
        latents = self.conditioner(batch.cond)
        return torch.cat((latents, self.embed(batch.tokens, batch.positions)), dim=1)

    def hidden(self, batch: Batch, look: Callable | None = None) -> Tensor:
        """Return states (B, S, D) after both norms, one for every token, without the latents."""
        x = self.inputs(batch)
        x = self.gpt(x, look) if look else self.gpt(x)
        return self.final_norm(x)[:, self.config.latents :]

    @torch.no_grad()
    def attention(self, batch: Batch) -> list[Tensor]:
        """Return each layer's attention weights (B, H, K + S, K + S), queries by keys.

        For inspection: fused attention never materialises them.
        """
        self.eval()
        x = self.inputs(batch)
        weights = []
        for layer in self.gpt.h:
            q, k, _ = layer.attn.qkv(layer.ln_1(x))
            weights.append(attention_weights(q, k, is_causal=True))
            x = layer(x)
        return weights

    def forward(self, batch: Batch, text_width: int = 0) -> tuple[Tensor, ...]:
        """Return the summed cross-entropy over text targets and over code targets, nats in fp32.

        With `text_width`, the batch's `max_text_tokens`, also the guided attention loss. Sums, not
        means: the caller divides by the counts of the effective batch, so that gradients do not
        depend on how it was split.
        """
        guide = []

        def look(layer: Layer, x: Tensor) -> None:
            guide.append(guided_attention_loss(self.config, layer, x, batch, text_width))

        h = self.hidden(batch, look if text_width else None).flatten(0, 1)
        text_loss = summed_loss(self.text_head, h, batch.text_indices, batch.text_targets)
        code_loss = summed_loss(self.code_head, h, batch.code_indices, batch.code_targets)
        return text_loss, code_loss, *guide


def summed_loss(head: nn.Linear, states: Tensor, indices: Tensor, targets: Tensor) -> Tensor:
    """Return the summed cross-entropy in nats of `targets` (N,) given `states[indices]`."""
    # N differs in every batch; padding it to a multiple keeps the number of shapes small.
    added = -len(indices) % HEAD_ROWS
    logits = head(states.index_select(0, F.pad(indices, (0, added)))).float()
    return F.cross_entropy(
        logits,
        F.pad(targets, (0, added), value=IGNORE_INDEX),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
    )


def weighted_loss(
    config: GPTConfig, sums: tuple[Tensor, ...], text: float | Tensor, code: float | Tensor
) -> Tensor:
    """Return `text_weight` * mean text loss + mean code loss over `text` and `code` targets."""
    return config.text_weight * sums[0] / text + sums[1] / code
