"""Sample the next code from logits, with the filters of transformers in its order.

Every row has its own random stream, seeded by `seed` and its text, so a result does not depend on
the other rows of its batch.

Shapes: B rows, V code vocabulary, K codes left after top-k.
"""

import dataclasses

import torch
from torch import Tensor

from kit.base.config import require, require_least, require_types, require_within
from kit.base.files import digest

MIN_TEMPERATURE = 1e-6  # below it the best code wins anyway, and the division would overflow
MAX_CANDIDATES = 64
MAX_RETRIES = 20  # each halves the temperature


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    temperature: float = 0.3  # 0 is greedy
    top_k: int = 20  # 0 keeps all
    top_p: float = 0.95
    repetition_penalty: float = 1.0
    # Classifier-free guidance scale; 1 is off. Needs a model trained with `model.text_dropout`, and
    # runs every row twice.
    guidance_scale: float = 1.0
    # Candidates for each text; the best by log-probability, `follow` and `reread` is kept.
    best_of: int = 1
    # Weight of the alignment score, in nats a code, beside the log-probability, if the model has an
    # alignment head; 0: off.
    follow: float = 3.0
    # Weight of the text mismatch, in nats a letter, if the voice has a code reader
    # (candidates.py); 0: off.
    reread: float = 1.0
    retries: int = 2  # of a truncated text, each at half the temperature
    max_codes_per_text_id: float = 12.0  # length limit: this many codes a text id, plus 40
    seed: int = 0
    exact_codes: int = 0  # generate exactly this many codes (for timing); 0: off
    kv_cache: bool = True  # off: recompute the full row for every code; same codes, for comparison

    def __post_init__(self):
        require_types(GenerateConfig, vars(self))
        in_range = 0 <= self.temperature <= 100
        require(in_range, self, "temperature", "must lie in 0 (greedy) to 100 (almost random).")
        require(0 < self.top_p <= 1, self, "top_p", "must lie in (0, 1].")
        require(self.top_k >= 0, self, "top_k", "must be 0 (all) or more.")
        positive = self.repetition_penalty > 0
        require(positive, self, "repetition_penalty", "must be more than 0; 1 is off.")
        require_within(self, 1, 100, "guidance_scale")
        require_within(self, 1, MAX_CANDIDATES, "best_of")
        require_within(self, 0, MAX_RETRIES, "retries")
        require_least(self, 0, "follow", "reread", "repetition_penalty", "exact_codes")
        require_within(self, 0, 1000, "max_codes_per_text_id")

    @property
    def uses_cfg(self) -> bool:
        """Whether each row also goes through the model without its text."""
        return self.guidance_scale != 1

    @property
    def rows_per_text(self) -> int:
        return self.best_of * (1 + self.uses_cfg)

    def choices(self, vocabulary: int) -> int:
        """Return the number of codes left after top-k."""
        return min(self.top_k or vocabulary, vocabulary)


def apply_cfg(cond_logits: Tensor, uncond_logits: Tensor, guidance: float) -> Tensor:
    """Move logits (B, V) towards those with the text (Ho & Salimans 2022)."""
    return torch.lerp(uncond_logits, cond_logits, guidance)


def penalize(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Lower the logits (B, V) of codes already `seen` (B, V) (Keskar et al. 2019)."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def filter_logits(logits: Tensor, config: GenerateConfig) -> tuple[Tensor, Tensor]:
    """Return the K best of logits (B, V), best first, and their codes; -inf beyond top-p
    (Holtzman et al. 2020).
    """
    temperature = max(config.temperature, MIN_TEMPERATURE)
    best, codes = (logits / temperature).topk(config.choices(logits.shape[-1]))
    if config.top_p < 1:
        probs = best.softmax(-1)
        best = best.masked_fill(probs.cumsum(-1) - probs > config.top_p, float("-inf"))
    return best, codes


def sample(logits: Tensor, config: GenerateConfig, noise: Tensor | None) -> Tensor:
    """Return one code for each row of (B, V): the best if `noise` (B, K) is None, else a sample.

    The largest of p / e, with exponential noise e, is a sample from p, without a GPU sync.
    """
    if noise is None:
        return logits.argmax(-1)
    best, codes = filter_logits(logits, config)
    return codes.gather(1, (best.softmax(-1) / noise).argmax(-1, keepdim=True))[:, 0]


def candidate_seed(config: GenerateConfig, text: list[int], candidate: int) -> int:
    """Return the seed of one candidate of `text` (ids), whatever else is in its batch."""
    return int(digest(config.seed, text, candidate), 16)


class Noise:
    """Exponential noise, a stream for each row, drawn on the CPU: the same on every device."""

    def __init__(self, seeds: list[int], width: int, device: torch.device, steps: int = 32):
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.width = width
        self.device = device
        self.steps = steps
        self.block = torch.empty(0)
        self.used = 0  # of the block's steps

    def next(self) -> Tensor:
        """Noise (B, K) of one step."""
        if self.used == len(self.block):
            shape = (self.steps, self.width)
            rows = [torch.empty(shape).exponential_(generator=g) for g in self.generators]
            self.block = torch.stack(rows, dim=1).to(self.device, non_blocking=True)
            self.used = 0
        self.used += 1
        return self.block[self.used - 1]

    def keep(self, rows: Tensor) -> None:
        """Continue with only the rows of this mask (B,)."""
        self.generators = [g for g, kept in zip(self.generators, rows.tolist()) if kept]
        self.block = self.block[:, rows] if len(self.block) else self.block
