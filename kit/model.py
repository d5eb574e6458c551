"""The one model: an autoregressive GPT over audio codes, laid out as XTTS-v2's GPT is.

A row of the sequence is `conditioning latents | START text STOP | START codes STOP...`, packed
without a gap, so attention is plain causal with no mask and SDPA's fast backends apply. Five
million parameters or 441 million: the same code, another `GPTConfig`. Sizes and names follow the
published XTTS-v2 (Casanova et al. 2024) and GPT-2 (Radford et al. 2019); the perceiver resampler
is Flamingo's (Alayrac et al. 2022). Knows nothing of audio files, optimisers or devices.

Shapes: B batch, S packed sequence, D width, H heads, K latents, M mels, T mel frames, V vocabulary.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kit.config import require


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig:
    layers: int = 6
    width: int = 256
    heads: int = 4
    text_vocab: int = 514  # pieces, START and STOP included
    code_vocab: int = 1602  # codes, START and STOP included
    max_text: int = 160  # text positions
    max_code: int = 608  # code positions
    latents: int = 8  # conditioning latents in front of every row
    cond_blocks: int = 1  # attention blocks of the conditioning encoder
    perceiver_layers: int = 1
    perceiver_heads: int = 4
    perceiver_head_width: int = 64
    n_mels: int = 80
    dropout: float = 0.0
    stop_targets: int = 4  # STOP targets after the last code
    text_weight: float = 0.01  # of the text loss; the code loss has weight 1

    def __post_init__(self):
        require(self.width % self.heads == 0, self, "width", f"must divide by {self.heads} heads.")
        require(self.width % 32 == 0, self, "width", "must divide by 32 (group norm).")
        require(0 <= self.dropout < 1, self, "dropout", "must lie in [0, 1).")

    def max_code_s(self, frame_rate: float) -> float:
        """Seconds of audio the code positions hold at `frame_rate` codes a second."""
        return (self.max_code - self.stop_targets - 1) / frame_rate

    @property
    def start_code(self) -> int:
        return self.code_vocab - 2

    @property
    def stop_code(self) -> int:
        return self.code_vocab - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Packed rows and where their targets are. `pack` makes it; `positions` count per segment.

    Text ids come first in the joint table, code ids after them; so do positions.
    """

    tokens: Tensor  # (B, S) ids in the joint text + code table; padding only at the end
    positions: Tensor  # (B, S) rows of the joint text + code position table
    text_at: Tensor  # (text targets,) flat indices into B * S
    text_targets: Tensor
    code_at: Tensor  # (code targets,)
    code_targets: Tensor
    cond: Tensor  # (B, M, T) log-mel of a reference clip of the same voice

    def to(self, device) -> "Batch":
        moved = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return Batch(**{k: v.to(device, non_blocking=True) for k, v in moved.items()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class EffectiveBatch:
    """What one optimiser step sees: micro-batches, and where the data stream stands after it."""

    micro: list[Batch]
    position: dict

    @property
    def text_targets(self) -> int:
        return sum(len(m.text_targets) for m in self.micro)

    @property
    def code_targets(self) -> int:
        return sum(len(m.code_targets) for m in self.micro)

    @property
    def tokens(self) -> int:
        """Real tokens, padding left out."""
        # Every token but a row's text STOP has a target.
        return sum(len(m.text_targets) + len(m.code_targets) + len(m.tokens) for m in self.micro)


class Attention(nn.Module):
    """Causal self-attention with GPT-2's names. `fused` picks SDPA over the explicit softmax."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.heads, self.dropout, self.fused = config.heads, config.dropout, True
        self.c_attn = nn.Linear(config.width, 3 * config.width)
        self.c_proj = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, cache=None) -> Tensor:  # (B, S, D)
        q, k, v = self.c_attn(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mask = None
        if cache is not None:
            k, v, mask = cache.append(k, v)  # (B, H, all positions so far, D / H)
        dropout = self.dropout if self.training else 0.0
        attend = F.scaled_dot_product_attention if self.fused else explicit_attention
        y = attend(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=cache is None)
        return self.c_proj(y.transpose(1, 2).flatten(2))


def explicit_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False) -> Tensor:
    """Softmax attention written out: the baseline fused attention is measured against."""
    scores = q @ k.mT * q.shape[-1] ** -0.5  # (B, H, queries, keys)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    weights = scores.softmax(-1, dtype=torch.float32).to(v.dtype)
    return F.dropout(weights, dropout_p) @ v


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.width, 4 * config.width)
        self.c_proj = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(config.width), Attention(config)
        self.ln_2, self.mlp = nn.LayerNorm(config.width), MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cache=None) -> Tensor:
        x = x + self.drop(self.attn(self.ln_1(x), cache))
        return x + self.drop(self.mlp(self.ln_2(x)))


class Trunk(nn.Module):
    """GPT-2's stack of layers, with a final norm. `recompute` lists the checkpointed layers.

    In training every layer goes through `run_layer`, which may be a compiled one: the layers share
    its one graph. Validation and generation do without, so they never cost a recompilation.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width)
        self.recompute: frozenset[int] = frozenset()
        self.run_layer = run_layer

    def forward(self, x: Tensor, caches=None) -> Tensor:  # (B, S, D)
        x = self.drop(x)
        for i, layer in enumerate(self.h):
            if self.training and caches is None:
                x = self.run_layer(layer, x, i in self.recompute)
            else:
                x = layer(x, caches[i] if caches else None)
        return self.ln_f(x)


def run_layer(layer: Layer, x: Tensor, recompute: bool) -> Tensor:
    """One layer of a training pass; `recompute` keeps its input alone for the backward pass."""
    return checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)


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
        # Head-major: each head's q, k, v lie together. A linear layer over (B, T, D) leaves a
        # head's numbers side by side, as fused attention asks for; a 1 x 1 convolution does not.
        qkv = F.linear(x.mT, self.qkv.weight[..., 0], self.qkv.bias)
        q, k, v = qkv.unflatten(-1, (self.heads, 3, -1)).permute(3, 0, 2, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)  # (B, T, D)
        return x + F.linear(h, self.proj_out.weight[..., 0], self.proj_out.bias).mT


class PerceiverLayer(nn.Module):
    """K latents look at the reference and at themselves, then a GEGLU feed-forward."""

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
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        latents = latents + self.to_out(h)
        value, gate = self.ff_in(latents).chunk(2, dim=-1)
        return latents + self.ff_out(value * F.gelu(gate))


class Conditioner(nn.Module):
    """Reference log-mel (B, M, T) -> K latents (B, K, D) that say whose voice it is."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.init = nn.Conv1d(config.n_mels, config.width, 1)
        heads = config.heads
        self.blocks = nn.Sequential(
            *(CondBlock(config.width, heads) for _ in range(config.cond_blocks))
        )
        self.latents = nn.Parameter(torch.randn(config.latents, config.width) * 0.02)
        self.layers = nn.ModuleList(PerceiverLayer(config) for _ in range(config.perceiver_layers))
        self.gamma = nn.Parameter(torch.ones(config.width))

    def forward(self, mel: Tensor) -> Tensor:
        context = self.blocks(self.init(mel)).mT
        latents = self.latents.expand(len(mel), -1, -1)
        for layer in self.layers:
            latents = layer(latents, context)
        return F.rms_norm(latents, latents.shape[-1:]) * self.gamma


class SpeechGPT(nn.Module):
    """Text and a reference in, losses or hidden states over packed rows out."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        d = config.width
        self.conditioner = Conditioner(config)
        self.text_embedding = nn.Embedding(config.text_vocab, d)
        self.code_embedding = nn.Embedding(config.code_vocab, d)
        self.text_position = nn.Embedding(config.max_text, d)
        self.code_position = nn.Embedding(config.max_code, d)
        self.gpt = Trunk(config)
        self.final_norm = nn.LayerNorm(d)
        self.text_head = nn.Linear(d, config.text_vocab)
        self.code_head = nn.Linear(d, config.code_vocab)
        self.init_weights()

    def init_weights(self) -> None:
        """GPT-2's: normal 0.02, residual projections smaller by the root of their number."""
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
        where = torch.cat((self.text_position.weight, self.code_position.weight))
        return F.embedding(tokens, table) + F.embedding(positions, where)

    def hidden(self, batch: Batch) -> Tensor:
        """States (B, S, D) after both norms, one for every token (the latents' are dropped)."""
        latents = self.conditioner(batch.cond)
        x = torch.cat((latents, self.embed(batch.tokens, batch.positions)), dim=1)
        return self.final_norm(self.gpt(x))[:, latents.shape[1] :]

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Summed cross-entropy in nats over text targets and over code targets, in fp32.

        Sums, not means: the caller divides by the counts of the whole effective batch, so that
        gradients do not depend on how it was split.
        """
        h = self.hidden(batch).flatten(0, 1)
        text = self.text_head(h.index_select(0, batch.text_at)).float()
        code = self.code_head(h.index_select(0, batch.code_at)).float()
        text_loss = F.cross_entropy(text, batch.text_targets, reduction="sum")
        return text_loss, F.cross_entropy(code, batch.code_targets, reduction="sum")


def weighted_loss(config: GPTConfig, sums: tuple[Tensor, Tensor], text: int, code: int) -> Tensor:
    """`text_weight` * mean text loss + mean code loss over `text` and `code` targets."""
    return config.text_weight * sums[0] / text + sums[1] / code


def pack(config: GPTConfig, texts: list, codes: list, cond: Tensor, to_length: int = 0) -> Batch:
    """Rows of text ids and code ids (without START and STOP) -> a Batch of packed rows.

    `to_length` pads every row to that many tokens (fixed shapes for compile). Raises ValueError
    for a row longer than the positions: rows are refused by the ledger, never cut here.
    """
    rows = [_pack_row(config, list(t), list(c)) for t, c in zip(texts, codes, strict=True)]
    longest = max(to_length, *(len(r["tokens"]) for r in rows))
    grid = {
        name: torch.tensor([r[name] + [0] * (longest - len(r[name])) for r in rows])
        for name in ("tokens", "positions")
    }
    flat = {
        name: torch.tensor([i * longest + at for i, r in enumerate(rows) for at in r[name]])
        for name in ("text_at", "code_at")
    }
    targets = {
        name: torch.tensor([x for r in rows for x in r[name]])
        for name in ("text_targets", "code_targets")
    }
    return Batch(**grid, **flat, **targets, cond=cond)


def collate(config: GPTConfig, parts: list[tuple], position: dict) -> EffectiveBatch:
    """Micro-batches of (texts, codes, references) -> what one optimiser step sees."""
    return EffectiveBatch(micro=[pack(config, *part) for part in parts], position=position)


def _pack_row(config: GPTConfig, text: list[int], codes: list[int]) -> dict[str, list[int]]:
    start, stop = config.text_vocab - 2, config.text_vocab - 1
    text_in = [start, *text, stop]
    code_in = [config.start_code, *codes, *[config.stop_code] * (config.stop_targets - 1)]
    if len(text_in) > config.max_text or len(code_in) > config.max_code:
        raise ValueError(
            f"A row of {len(text)} text ids and {len(codes)} codes is longer than the model's "
            f"{config.max_text} text and {config.max_code} code positions. Raise `max_text` or "
            "`max_code`, or leave the row out."
        )
    positions = [*range(len(text_in)), *(config.max_text + i for i in range(len(code_in)))]
    return {
        "tokens": text_in + [config.text_vocab + c for c in code_in],
        "positions": positions,
        "text_at": list(range(len(text_in) - 1)),
        "text_targets": text_in[1:],
        "code_at": list(range(len(text_in), len(text_in) + len(code_in))),
        "code_targets": [*codes, *[config.stop_code] * config.stop_targets],
    }
