"""From logits to the next code: the filters everybody uses, in the order transformers has them.

Guidance by the text (Ho & Salimans 2022), repetition penalty (Keskar et al. 2019), temperature,
top-k, top-p (Holtzman et al. 2020), then one draw. Every row draws from a stream of its own, set by
the seed and by its text: with the same logits it says the same, whichever others share its batch.
Knows logits alone.

Shapes: B rows, V code vocabulary, K codes that are left to choose from.
"""

import dataclasses
import math

import torch
from torch import Tensor

from kit.base.config import require, require_types, require_within
from kit.base.files import digest

MIN_TEMPERATURE = 1e-6  # below this the best code is drawn anyway, and the division would overflow
MANY = 64  # candidates, at most
MAX_RETRIES = 20  # each at half the temperature: after so many nothing is left to halve


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    temperature: float = 0.3  # 0 is greedy
    top_k: int = 20  # 0 keeps all
    top_p: float = 0.95
    repetition_penalty: float = 1.0
    # How far from what it would say without a text, where a voice has learnt that, too
    # (`model.text_dropout`): 1 as far as it is, 2 twice as far. Each row is then read twice.
    guidance: float = 1.0
    # Readings drawn of each text; the best by likelihood, `follow` and `reread` is kept.
    candidates: int = 1
    # What a nat of following the text weighs beside a nat of likelihood, where the model has a head
    # that does; 0: likelihood alone.
    follow: float = 3.0
    # What a nat a letter weighs by which a reading does not say its text, where the voice has what
    # reads codes back (code_reader.py); 0: it is not asked.
    reread: float = 1.0
    retries: int = 2  # of a reading that was cut at its limit, each at half the temperature before
    max_codes_per_text_id: float = 12.0  # length limit: so many codes a text id, plus 40, at most
    seed: int = 0
    exact_codes: int = 0  # speak just this many codes and never STOP before (for timing)
    kv_cache: bool = True  # off recomputes the whole row for every code: same codes, for the lesson

    def __post_init__(self):
        require_types(GenerateConfig, vars(self))
        warm = 0 <= self.temperature <= 100
        require(warm, self, "temperature", "must lie in 0 (greedy) to 100 (almost anything).")
        require(0 < self.top_p <= 1, self, "top_p", "must lie in (0, 1].")
        require(self.top_k >= 0, self, "top_k", "must be 0 (all) or more.")
        penalty = 0 < self.repetition_penalty < math.inf
        require(penalty, self, "repetition_penalty", "must be more than 0; 1 is none.")
        guided = 1 <= self.guidance <= 100
        require(guided, self, "guidance", "must lie in 1 (none) to 100.")
        some = 0 < self.candidates <= MANY
        require(some, self, "candidates", f"must lie in 1 to {MANY}: all are read at once.")
        patient = 0 <= self.retries <= MAX_RETRIES
        require(patient, self, "retries", f"must lie in 0 (none) to {MAX_RETRIES}.")
        for field in ("follow", "reread"):
            weight = 0 <= getattr(self, field) <= 1e6
            require(weight, self, field, "must lie in 0 (off) to a million.")
        require(self.exact_codes >= 0, self, "exact_codes", "must be 0 (off) or more.")
        require_within(self, 0, 1e6, "repetition_penalty", "exact_codes")
        longest = 0 <= self.max_codes_per_text_id <= 1e6
        require(longest, self, "max_codes_per_text_id", "must lie in 0 to a million.")

    @property
    def uses_cfg(self) -> bool:
        """Whether each row is also read without its text."""
        return self.guidance != 1

    @property
    def rows_per_text(self) -> int:
        """How many rows go through the model together for each text."""
        return self.candidates * (1 + self.uses_cfg)

    def choices(self, vocabulary: int) -> int:
        """How many codes are left to choose from after top-k."""
        return min(self.top_k or vocabulary, vocabulary)


def guided(told: Tensor, untold: Tensor, guidance: float) -> Tensor:
    """Logits (B, V) that lean to the text: those read with it, away from those read without it."""
    return torch.lerp(untold, told, guidance)


def penalize(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide positive and multiply negative logits (B, V) of codes already `seen` (B, V)."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def filter_logits(logits: Tensor, config: GenerateConfig) -> tuple[Tensor, Tensor]:
    """Logits (B, V) -> the K best, best first, and their codes; what top-p cuts is -inf."""
    warmth = max(config.temperature, MIN_TEMPERATURE)
    best, codes = (logits / warmth).topk(config.choices(logits.shape[-1]))
    if config.top_p < 1:
        shares = best.softmax(-1)
        best = best.masked_fill(shares.cumsum(-1) - shares > config.top_p, float("-inf"))
    return best, codes


def sample(logits: Tensor, config: GenerateConfig, noise: Tensor | None) -> Tensor:
    """One code for each row of (B, V): the best at temperature 0, else drawn with `noise` (B, K).

    The largest of p / e, with exponential noise e, is a draw from p: nothing waits for the device.
    """
    if noise is None:
        return logits.argmax(-1)
    best, codes = filter_logits(logits, config)
    return codes.gather(1, (best.softmax(-1) / noise).argmax(-1, keepdim=True))[:, 0]


def candidate_seed(config: GenerateConfig, text: list[int], candidate: int) -> int:
    """The seed of one reading of `text` (ids): the same whatever else is read beside it."""
    return int(digest(config.seed, text, candidate), 16)


class Noise:
    """Exponential noise, a stream for each row, drawn on the CPU: the same on every device."""

    def __init__(self, seeds: list[int], width: int, device: torch.device, steps: int = 32):
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.width = width
        self.device = device
        self.steps = steps
        self.block = torch.empty(0)
        self.at = 0

    def next(self) -> Tensor:
        """Noise (B, K) of one step."""
        if self.at == len(self.block):
            shape = (self.steps, self.width)
            rows = [torch.empty(shape).exponential_(generator=g) for g in self.generators]
            self.block = torch.stack(rows, dim=1).to(self.device, non_blocking=True)
            self.at = 0
        self.at += 1
        return self.block[self.at - 1]

    def keep(self, rows: Tensor) -> None:
        """Go on with the rows of this mask (B,) alone."""
        self.generators = [g for g, kept in zip(self.generators, rows.tolist()) if kept]
        self.block = self.block[:, rows] if len(self.block) else self.block
