"""The input sequence: sizes, ids and targets of an example, and batches of examples.

An example is `START text STOP | START codes STOP...` without gaps; several make a `Batch`, and the
batches of one optimiser step an `EffectiveBatch`. Names follow XTTS-v2 (Casanova et al. 2024).

Shapes: B batch, S packed sequence, M mels, T mel frames.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kit.settings import TEXT_EXTRA, GPTConfig

IGNORE_INDEX = -100  # a target that does not count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Packed examples and the indices of their targets, made by `pack`.

    In the joint tables text ids come first, then code ids; so do positions, counted per segment.
    """

    tokens: Tensor  # (B, S) ids in the joint text + code table; padding only at the end
    positions: Tensor  # (B, S) rows of the joint text + code position table
    text_indices: Tensor  # (text targets,) flat indices into B * S
    text_targets: Tensor
    code_indices: Tensor  # (code targets,)
    code_targets: Tensor
    cond: Tensor  # (B, M, T) log-mel of a reference clip of the same voice

    @property
    def lengths(self) -> Tensor:
        """Tokens of each row without padding, (B,): the last is a code, each code has a target."""
        rows, width = self.tokens.shape
        ends = self.code_indices.new_zeros(rows)
        return ends.scatter_reduce_(
            0, self.code_indices // width, self.code_indices % width + 1, "amax"
        )

    def to(self, device) -> "Batch":
        return Batch(**{k: v.to(device, non_blocking=True) for k, v in vars(self).items()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class EffectiveBatch:
    """Micro-batches of one optimiser step, and the position of the data stream after it."""

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
        """Number of tokens without padding."""
        return sum(int(m.lengths.sum()) for m in self.micro)


def pack(
    config: GPTConfig, texts: Sequence, codes: Sequence, cond: Tensor, pad_to: int = 0
) -> Batch:
    """Pack text ids and code ids (without START and STOP) into a Batch.

    `pad_to` pads every row to that many tokens (fixed shapes for compile). Raises ValueError for a
    row longer than the positions: the data report rejects such rows, they are never truncated.
    """
    stops = config.stop_targets
    for ids, row_codes in zip(texts, codes, strict=True):
        if len(ids) + TEXT_EXTRA > config.max_text or len(row_codes) + stops > config.max_code:
            raise ValueError(
                f"A row of {len(ids)} text ids and {len(row_codes)} codes is longer than the "
                f"model's {config.max_text} text and {config.max_code} code positions. Raise "
                "`max_text` or `max_code`, or leave the row out."
            )
    text, text_targets = _with_start_and_stops(texts, config.start_text, config.stop_text, 1)
    code, code_targets = _with_start_and_stops(codes, config.start_code, config.stop_code, stops)
    # In the input, the codes begin after the text's STOP, or in its place.
    text_lengths = text_targets + config.text_stop_input
    lengths = text_lengths + code_targets
    column = np.arange(max(pad_to, int(lengths.max())))  # (S,)
    in_text = column < text_lengths  # (B, S)
    in_codes = ~in_text & (column < lengths)
    tokens = np.zeros(in_text.shape, dtype=np.int64)
    tokens[in_text] = _first(text, text_lengths)
    tokens[in_codes] = _first(code, code_targets) + config.text_vocab
    positions = np.where(in_text, column, config.max_text + column - text_lengths)
    positions[column >= lengths] = 0
    return Batch(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        text_indices=torch.from_numpy(np.flatnonzero(column < text_targets)),
        text_targets=torch.from_numpy(_first(text[:, 1:], text_targets)),
        code_indices=torch.from_numpy(np.flatnonzero(in_codes)),
        code_targets=torch.from_numpy(_first(code[:, 1:], code_targets)),
        cond=cond,
    )


def _with_start_and_stops(
    rows: Sequence, start: int, stop: int, stops: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return START, ids and STOP to the end, a row each, and how many targets each row has (B, 1).

    The targets are the ids and `stops` times STOP.
    """
    counts = np.array([len(ids) for ids in rows])[:, None]
    column = np.arange(1 + counts.max() + stops)
    grid = np.full((len(rows), len(column)), stop)
    grid[:, 0] = start
    grid[(column > 0) & (column <= counts)] = np.concatenate(rows)
    return grid, counts + stops


def _first(grid: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the first `lengths` (B, 1) numbers of each row, one row after the other."""
    return grid[np.arange(grid.shape[1]) < lengths]


def collate(config: GPTConfig, parts: list[tuple], position: dict) -> EffectiveBatch:
    """Pack micro-batches of (texts, codes, references) for one optimiser step."""
    return EffectiveBatch(micro=[pack(config, *part) for part in parts], position=position)
