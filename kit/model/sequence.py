"""The input sequence: sizes, ids and targets of an example, and batches of examples.

An example is `START text STOP | START codes STOP...` without gaps; several make a `Batch`, and the
batches of one optimiser step an `EffectiveBatch`. Names follow XTTS-v2 (Casanova et al. 2024).

Shapes: B batch, S packed sequence, M mels, T mel frames.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kit.base.config import require, require_least, require_within

# A model gets as many positions as the corpus needs, up to those of XTTS-v2: more would cost memory
# and time that no preset plans for.
MAX_TEXT_POSITIONS = 404
MAX_CODE_POSITIONS = 608
TEXT_EXTRA = 2  # positions of START and STOP
IGNORE_INDEX = -100  # a target that does not count
GELU = {"gelu_new": "tanh", "gelu": "none"}  # names as in GPT-2's config: how torch computes it


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig:
    layers: int = 6
    width: int = 256
    heads: int = 4
    text_vocab: int = 514  # tokens, START and STOP included
    code_vocab: int = 1602  # codes, START and STOP included
    # Codes of the kit's codec are tuples of digits. With `share_digits`, a training from random
    # weights lets codes with an equal digit share what they learn of it; `code_levels` is then how
    # many values each digit has. Saved models have plain tables: ().
    share_digits: bool = False
    code_levels: tuple[int, ...] = ()
    # A training from random weights takes layers and positions from a voice that reads already
    # (weights.py); only for models of its size.
    pretrained_layers: bool = False
    max_text: int = 160  # text positions
    max_code: int = 608  # code positions
    latents: int = 8  # conditioning latents before every example
    cond_blocks: int = 1  # attention blocks of the conditioning encoder
    perceiver_layers: int = 1
    perceiver_heads: int = 4
    perceiver_head_width: int = 64
    n_mels: int = 80
    # IndexTTS2's conditioning in place of the kit's: width, hidden width, heads, blocks and the
    # perceiver's factor, of its speaker encoder and then of its emotion encoder. (): the kit's.
    conformers: tuple[int, ...] = ()
    activation_function: str = "gelu_new"  # or "gelu", which is faster on a CPU
    dropout: float = 0.0
    # Share of training examples without text, so that classifier-free guidance works
    # (`generate.guidance_scale`).
    text_dropout: float = 0.0
    stop_targets: int = 4  # STOP targets after the last code
    text_weight: float = 0.01  # of the text loss; the code loss has weight 1
    # Ids of START and STOP; None: the last but one, and the last.
    start_text_id: int | None = None
    stop_text_id: int | None = None
    start_code_id: int | None = None
    stop_code_id: int | None = None
    # Whether training examples contain text STOP. XTTS-v2 was trained with it masked, which equals
    # leaving it out; in inference it is always there.
    text_stop_input: bool = True

    def __post_init__(self):
        sizes = "layers", "width", "heads", "text_vocab", "code_vocab", "max_text", "max_code"
        for name in sizes:
            require(getattr(self, name) >= 1, self, name, "must be 1 or more.")
        require(self.width % self.heads == 0, self, "width", f"must divide by {self.heads} heads.")
        require(self.width % 32 == 0, self, "width", "must divide by 32 (group norm).")
        require(0 <= self.dropout < 1, self, "dropout", "must lie in [0, 1).")
        known = self.activation_function in GELU
        require(known, self, "activation_function", f"choose one of {', '.join(GELU)}.")
        require_within(self, 0, 0.9, "text_dropout")
        require_within(self, 1, 128, "layers")
        require_within(self, 0, 64, "cond_blocks", "perceiver_layers")
        require_within(self, 1, 8192, "width")
        require_within(self, 1, 1024, "heads", "perceiver_heads", "perceiver_head_width", "latents")
        require_within(self, 1, 1024, "n_mels")
        require_within(self, 1, 8192, "conformers")
        require(len(self.conformers) in (0, 10), self, "conformers", "give ten numbers, or none.")
        require_within(self, 3, 2**20, "text_vocab", "code_vocab")  # START, STOP and one more
        require_within(self, 2, 2**20, "code_levels")
        fits = not self.code_levels or math.prod(self.code_levels) + 2 == self.code_vocab
        require(fits, self, "code_levels", f"must make {self.code_vocab} codes less 2.")
        require_within(self, 1, 2**16, "max_text", "max_code")
        require_within(self, 1, self.max_code, "stop_targets")
        require_least(self, 0, "text_weight")
        require_within(self, 0, self.text_vocab - 1, "start_text_id", "stop_text_id")
        require_within(self, 0, self.code_vocab - 1, "start_code_id", "stop_code_id")
        for kind in ("text", "code"):
            apart = getattr(self, f"start_{kind}") != getattr(self, f"stop_{kind}")
            require(apart, self, f"start_{kind}_id", "must differ from the id of STOP.")

    def max_code_s(self, frame_rate: float) -> float:
        """Return the seconds of audio that fit at `frame_rate` codes a second."""
        return (self.max_code - self.stop_targets - 1) / frame_rate

    def with_positions(self, text_ids: int, codes: int) -> "GPTConfig":
        """Return this with positions for examples of up to `text_ids` ids and `codes` codes.

        A tenth more than that, in steps of 16; at least what it has, and at most
        `MAX_TEXT_POSITIONS` and `MAX_CODE_POSITIONS` unless it has more already.
        """
        text = text_ids + TEXT_EXTRA
        code = codes + self.stop_targets
        return dataclasses.replace(
            self,
            max_text=max(self.max_text, min(MAX_TEXT_POSITIONS, _roomy(text))),
            max_code=max(self.max_code, min(MAX_CODE_POSITIONS, _roomy(code))),
        )

    @property
    def start_text(self) -> int:
        return self.text_vocab - 2 if self.start_text_id is None else self.start_text_id

    @property
    def stop_text(self) -> int:
        return self.text_vocab - 1 if self.stop_text_id is None else self.stop_text_id

    @property
    def start_code(self) -> int:
        return self.code_vocab - 2 if self.start_code_id is None else self.start_code_id

    @property
    def stop_code(self) -> int:
        return self.code_vocab - 1 if self.stop_code_id is None else self.stop_code_id


def _roomy(positions: int) -> int:
    return 16 * math.ceil(1.1 * positions / 16)


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
        moved = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return Batch(**{k: v.to(device, non_blocking=True) for k, v in moved.items()})


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
