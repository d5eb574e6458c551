"""What is asked of a voice: how it is judged, and in which sizes and formats it is timed.

The sections `evaluate` and `infer` of a preset. Knows numbers alone; no model.
"""

import dataclasses

from kit.base.config import require, require_within
from kit.inference.linear_formats import FORMATS

MOST = 100_000  # sentences, rows, codes: beyond, a slip of the finger


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    sentences: int = 250  # held-out ones that the voice speaks
    worst_cer: float = 0.12  # above the recordings' own, a voice does not pass

    def __post_init__(self):
        require_within(self, 1, MOST, "sentences")
        require_within(self, 0, 1, "worst_cer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class InferConfig:
    lengths: tuple = (50, 100, 200)  # codes, for the time with and without KV cache
    batches: tuple = (1, 4, 16)  # texts at once
    formats: tuple = ("fp32",)  # of the weights, beside each other
    compiled: tuple = ()  # formats that are timed compiled, too
    rows: int = 64  # recordings whose next codes are compared between formats
    sentences: int = 100  # spoken in each format

    def __post_init__(self):
        for field in ("lengths", "batches", "formats"):
            require(len(getattr(self, field)) > 0, self, field, "must name one at least.")
        for field in ("formats", "compiled"):
            known = all(name in FORMATS for name in getattr(self, field))
            require(known, self, field, f"must be of {', '.join(FORMATS)}.")
        require_within(self, 1, MOST, "lengths", "batches", "rows", "sentences")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoundConfig:
    """How long a codec's decoder learns from a model's states: a preset's section `sound`."""

    steps: int = 0  # 0: not at all
    clips: int = 1500  # recordings to learn from, at most

    def __post_init__(self):
        require_within(self, 0, 1e9, "steps")
        require_within(self, 1, 1e6, "clips")
