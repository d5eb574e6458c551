"""Report how long the rows of a corpus are, and choose limits and positions.

Nothing is truncated: rows beyond a limit are refused in the data report.
"""

import dataclasses
import math
import random
from array import array
from collections.abc import Sequence

import numpy as np

from kit.batches.batching import EXTRA_TOKENS, DataConfig, chunks, padded, passes
from kit.batches.code_cache import CodeCache
from kit.dataset.data_report import Finding, Utterance, refuse
from kit.model.sequence import MAX_CODE_POSITIONS, MAX_TEXT_POSITIONS, TEXT_EXTRA, GPTConfig
from kit.text.tokenizer import Tokenizer

PERCENTILES = (50, 90, 95, 99, 99.5, 100)
KEPT_PERCENT = 99.5
MAX_TOKEN_CHARACTERS = 16  # SentencePiece's own limit


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthReport:
    """Percentiles by quantity, and limits that keep KEPT_PERCENT of the rows."""

    percentiles: dict[str, str]  # {"codes": "50 %: 61, 90 %: ...", "seconds": ...}
    limit_codes: int  # a multiple of 64
    limit_tokens: int  # of a row, text and codes, a multiple of 64
    beyond: int  # rows over a limit
    beyond_share: float  # of all rows


def longest(model: GPTConfig) -> GPTConfig:
    """Return `model` with the most positions that `fit_positions` may give it."""
    return model.with_positions(MAX_TEXT_POSITIONS, MAX_CODE_POSITIONS)


def manifest_limits(model: GPTConfig, frame_rate: float, max_clip_s: float = 0.0) -> dict:
    """Return limits for a ManifestConfig that refuse only what `model` can have no positions for.

    Letters are counted as if they made the longest tokens. `max_clip_s` above 0 is a limit, too.
    """
    largest = longest(model)
    max_s = largest.max_code_s(frame_rate)
    return {
        "max_clip_s": min(max_clip_s or max_s, max_s),
        "most_characters": MAX_TOKEN_CHARACTERS * (largest.max_text - TEXT_EXTRA),
    }


def fit_positions(
    model: GPTConfig, rows: Sequence[Utterance], tokenizer: Tokenizer, frame_rate: float
) -> tuple[GPTConfig, list[Finding]]:
    """Return `model` with positions for the longest of `rows`, and findings for rows too long.

    `frame_rate` in codes a second.
    """
    max_ids = longest(model).max_text - TEXT_EXTRA
    max_s = longest(model).max_code_s(frame_rate)
    ids = array("L", (len(tokenizer.encode(row.text)) for row in rows))
    codes = (math.ceil(row.speech_s * frame_rate) + 1 for row in rows)
    refused = []
    for row, count in zip(rows, ids):
        if count > max_ids:
            reason = f"text of {count} tokens, the model has positions for {max_ids}"
            refused.append(refuse(row, "long text", reason, row.seconds))
        elif row.speech_s > max_s:
            reason = f"{row.speech_s:.1f} s, the model has positions for {max_s:.1f} s"
            refused.append(refuse(row, "too long", reason, row.seconds))
    fitting = (count for count in ids if count <= max_ids)
    return model.with_positions(max(fitting, default=0), max(codes, default=0)), refused


def length_report(cache: CodeCache, codes_per_s: float, split: str = "train") -> LengthReport:
    """Return the lengths of `split`, and suggested limits for fixed shapes.

    The limit of codes is the KEPT_PERCENT-th percentile rounded up to 64; the token limit holds
    that many codes beside the same percentile of text.
    """
    cache.require_rows(split)
    members = cache.rows_in_split(split)
    texts = cache.lengths(members, "texts")
    codes = cache.lengths(members, "codes")
    tokens = texts + codes + EXTRA_TOKENS
    limit_codes = round_up(int(percentile(codes, KEPT_PERCENT)), 64)
    longest_row = int(percentile(texts, KEPT_PERCENT)) + limit_codes + EXTRA_TOKENS
    limit_tokens = round_up(longest_row, 64)
    beyond = int(((codes > limit_codes) | (tokens > limit_tokens)).sum())
    lines = {}
    columns = {"text ids": texts, "codes": codes, "tokens": tokens, "seconds": codes / codes_per_s}
    for name, column in columns.items():
        lines[name] = ", ".join(f"{p:g} %: {percentile(column, p):.4g}" for p in PERCENTILES)
    return LengthReport(
        percentiles=lines,
        limit_codes=limit_codes,
        limit_tokens=limit_tokens,
        beyond=beyond,
        beyond_share=beyond / len(members),
    )


def percentile(column: np.ndarray, percent: float):
    return np.percentile(column, percent, method="higher")


def round_up(value: float, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple


def wasted(parts: list[list[int]], lengths: Sequence[int], config: DataConfig) -> float:
    """Return the share of padding when each of `parts` is a padded batch."""
    cells = sum(len(part) * padded(max(lengths[i] for i in part), config) for part in parts)
    return 1 - sum(lengths[i] for part in parts for i in part) / cells


def padding_waste(lengths: Sequence[int], config: DataConfig) -> dict[str, float]:
    """Return the share of padding for every way to form batches."""
    average = -(-config.effective_batch * sum(lengths) // len(lengths))
    budget = dataclasses.replace(config, effective_tokens=config.effective_tokens or average)
    order = random.Random(config.seed).sample(range(len(lengths)), len(lengths))
    return {
        "any order": wasted(list(chunks(order, config.micro_batch)), lengths, config),
        "neighbours in length": neighbours_waste(lengths, config),
        "token budget": wasted(passes(lengths, budget), lengths, config),
    }


def neighbours_waste(lengths: Sequence[int], config: DataConfig) -> float:
    """Return the share of padding where a pass has `micro_batch` rows of like length."""
    counted = dataclasses.replace(config, effective_tokens=0)
    return wasted(passes(lengths, counted), lengths, config)
