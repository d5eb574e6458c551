"""Text ids and a reference in, audio codes out: prefill, then one code at a time.

A page of plain PyTorch: a preallocated key-value cache, prompts of unequal length padded on the
left, finished rows leaving the batch, and the filters everybody uses (temperature, top-k, top-p:
Holtzman et al. 2020; repetition penalty: Keskar et al. 2019). Whether a row ended by STOP or by the
length limit is always told. Knows the model; nothing of text, codecs or files.

Shapes: B batch, P prompt, D width, H heads, V code vocabulary, K latents.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from kit.config import require
from kit.model import GPTConfig, SpeechGPT


class GenerationError(ValueError):
    """A request the model cannot serve; the message says which limit and what to change."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    temperature: float = 0.3  # 0 is greedy
    top_k: int = 20  # 0 keeps all
    top_p: float = 0.95
    repetition_penalty: float = 1.0
    candidates: int = 1  # readings drawn of each text; the one the model finds likeliest is kept
    max_codes_per_text_id: float = 12.0  # length limit: this many codes a text id, plus 40
    seed: int = 0
    exact_codes: int = 0  # speak just this many codes and never STOP before (for timing)
    kv_cache: bool = True  # off recomputes the whole row for every code: same codes, for the lesson

    def __post_init__(self):
        require(self.temperature >= 0, self, "temperature", "must be 0 (greedy) or more.")
        require(0 < self.top_p <= 1, self, "top_p", "must lie in (0, 1].")
        require(self.top_k >= 0, self, "top_k", "must be 0 (all) or more.")
        require(self.repetition_penalty > 0, self, "repetition_penalty", "1 is none.")
        require(self.candidates > 0, self, "candidates", "must be 1 or more.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spoken:
    codes: Tensor  # (N,) without STOP
    stopped: bool  # False: cut at the length limit, the model did not find its end
    log_prob: float  # mean over its codes and STOP, nats, before temperature and filters


class LayerCache:
    """Keys and values (B, H, longest, D / H) of one layer, written in place."""

    def __init__(self, whole: "KVCache", shape: tuple, like: Tensor):
        self.whole = whole
        self.k, self.v = (torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in "kv")

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        start, end = self.whole.length, self.whole.length + k.shape[2]
        self.k[:, :, start:end] = k
        self.v[:, :, start:end] = v
        return self.k[:, :, :end], self.v[:, :, :end], self.whole.mask

    def keep(self, rows: Tensor) -> None:
        self.k, self.v = self.k[rows], self.v[rows]


class KVCache:
    """One `LayerCache` a layer, and what they share: positions written, keys that are padding."""

    def __init__(self, config: GPTConfig, padding: Tensor, longest: int, like: Tensor):
        shape = (len(padding), config.heads, longest, config.width // config.heads)
        self.layers = [LayerCache(self, shape, like) for _ in range(config.layers)]
        self.length, self.padding = 0, padding  # padding (B,): cells on the left of each row
        self.mask: Tensor | None = None

    def mask_for(self, count: int) -> Tensor:
        """Which keys the next `count` queries may see: (B, 1, count, keys), True is visible."""
        end = self.length + count
        keys = torch.arange(end, device=self.padding.device)
        queries = keys[self.length :, None]
        real = keys >= self.padding[:, None, None]
        # A padding query sees itself, or its softmax would be NaN and spread.
        return ((real & (keys <= queries)) | (keys == queries))[:, None]

    def keep(self, rows: Tensor) -> None:
        self.padding = self.padding[rows]
        for layer in self.layers:
            layer.keep(rows)


def prompt(model: SpeechGPT, texts: list[list[int]], cond: Tensor) -> tuple[Tensor, Tensor]:
    """`latents | START text STOP | START` of every row, padded on the left.

    Returns embeddings (B, P, D) and the padding of each row (B,). Raises GenerationError for an
    empty text or one longer than the model's positions.
    """
    c, device = model.config, cond.device
    latents, rows = model.conditioner(cond), []
    for text, latent in zip(texts, latents, strict=True):
        if not 0 < len(text) <= c.max_text - 2:
            raise GenerationError(
                f"A text of {len(text)} ids cannot be spoken: 1 to {c.max_text - 2} fit. "
                "Split it into sentences."
            )
        ids = [c.text_vocab - 2, *text, c.text_vocab - 1, c.text_vocab + c.start_code]
        places = [*range(len(text) + 2), c.max_text]
        grid = torch.tensor([ids, places], device=device)
        rows.append(torch.cat((latent, model.embed(grid[0], grid[1]))))
    longest = max(map(len, rows))
    padding = torch.tensor([longest - len(row) for row in rows], device=device)
    return torch.stack([F.pad(row, (0, 0, longest - len(row), 0)) for row in rows]), padding


def forward(model: SpeechGPT, x: Tensor, cache: KVCache) -> Tensor:
    """Run new embeddings (B, n, D) after what `cache` holds; fp32 logits of the last (B, V)."""
    cache.mask = cache.mask_for(x.shape[1])
    h = model.gpt(x, cache.layers)[:, -1]
    cache.length += x.shape[1]
    return model.code_head(model.final_norm(h)).float()


def embed_code(model: SpeechGPT, codes: Tensor, position: int) -> Tensor:
    """Codes (B,) at code position `position` -> (B, 1, D)."""
    return (model.code_embedding(codes) + model.code_position.weight[position])[:, None]


def penalize(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide positive and multiply negative logits (B, V) of codes already `seen` (B, V)."""
    if penalty == 1:
        return logits
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def filter_logits(logits: Tensor, config: GenerateConfig) -> Tensor:
    """Temperature, then top-k, then top-p over (B, V); what is cut becomes -inf."""
    logits = logits / config.temperature
    if config.top_k:
        least = logits.topk(min(config.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if config.top_p < 1:
        ordered, order = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        cut = (before > config.top_p).scatter(-1, order, before > config.top_p)
        logits = logits.masked_fill(cut, float("-inf"))
    return logits


def sample(logits: Tensor, config: GenerateConfig, generator: torch.Generator) -> Tensor:
    """One code per row of (B, V): the best at temperature 0, else drawn."""
    if config.temperature == 0:
        return logits.argmax(-1)
    weights = filter_logits(logits, config).softmax(-1)
    return torch.multinomial(weights, 1, generator=generator)[:, 0]


def generate(
    model: SpeechGPT, texts: list[list[int]], cond: Tensor, config: GenerateConfig
) -> list[Spoken]:
    """Codes for every row of `texts` (piece ids) in the voice of `cond` (B, M, T).

    With several `candidates` each text is read that often, and the reading with the highest mean
    log-probability is kept: a slip (a word left out, said twice) is less likely than what was
    meant, also to the model that made it. One that ended by itself goes before one that was cut.
    Raises GenerationError for texts that do not fit, or logits that are not finite.
    """
    many = config.candidates if config.temperature > 0 else 1  # greedy readings are all alike
    readings = decode(
        model, [t for t in texts for _ in range(many)], cond.repeat_interleave(many, 0), config
    )
    groups = (readings[i : i + many] for i in range(0, len(readings), many))
    return [max(group, key=lambda r: (r.stopped, r.log_prob)) for group in groups]


@torch.inference_mode()
def decode(
    model: SpeechGPT, texts: list[list[int]], cond: Tensor, config: GenerateConfig
) -> list[Spoken]:
    """One reading of every row, as `generate` has them."""
    model.eval()
    c, device = model.config, cond.device
    generator = torch.Generator(device=device).manual_seed(config.seed)
    x, padding = prompt(model, texts, cond)
    limits = [length_limit(c, config, len(text)) for text in texts]
    cache = KVCache(c, padding, x.shape[1] + max(limits), x)
    rows = torch.arange(len(texts), device=device)  # which request each live row serves
    said = torch.full((len(texts), max(limits) + 1), c.stop_code, device=device)
    log_probs = torch.zeros(said.shape, device=device)
    limits = torch.tensor(limits, device=device)
    logits, seen = (
        forward(model, x, cache),
        torch.zeros(len(texts), c.code_vocab, dtype=bool, device=device),
    )
    for n in range(int(limits.max()) + 1):
        if not torch.isfinite(logits).all():
            raise GenerationError("The model's logits are not finite: its weights are damaged.")
        logits[:, c.start_code] = float("-inf")
        expected = logits.log_softmax(-1)
        if n < config.exact_codes:
            logits[:, c.stop_code] = float("-inf")
        codes = sample(penalize(logits, seen, config.repetition_penalty), config, generator)
        said[rows, n] = codes
        log_probs[rows, n] = expected.gather(1, codes[:, None])[:, 0]
        live = (codes != c.stop_code) & (n < limits[rows])
        if not live.any():
            break
        if live.sum() <= len(live) // 2:  # finished rows leave once they are half of the batch
            x, codes, rows, seen = x[live], codes[live], rows[live], seen[live]
            cache.keep(live)
        seen[torch.arange(len(codes), device=device), codes.clamp(max=c.code_vocab - 1)] = True
        step = embed_code(model, codes, n + 1)
        if not config.kv_cache:
            x = torch.cat((x, step), dim=1)
            step, cache = x, KVCache(c, cache.padding, x.shape[1], x)
        logits = forward(model, step, cache)
    ends = zip(said.cpu(), log_probs.cpu(), limits.tolist())
    return [_spoken(codes, scores, c.stop_code, limit) for codes, scores, limit in ends]


def length_limit(model: GPTConfig, config: GenerateConfig, text_ids: int) -> int:
    """How many codes a text of `text_ids` pieces may take before it is cut, and told to be."""
    if config.exact_codes >= model.max_code:
        raise GenerationError(
            f"exact_codes = {config.exact_codes}: the model has {model.max_code - 1} positions."
        )
    wanted = config.exact_codes or int(config.max_codes_per_text_id * text_ids) + 40
    return min(model.max_code - 1, wanted)


def _spoken(row: Tensor, scores: Tensor, stop: int, limit: int) -> Spoken:
    ends = (row[: limit + 1] == stop).nonzero()
    end = int(ends[0]) if len(ends) else limit
    mean = float(scores[: end + 1].mean())
    return Spoken(codes=row[:end], stopped=bool(len(ends)), log_prob=mean)
