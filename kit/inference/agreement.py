"""What a number format costs: the same rows through two decoders, the true codes given to both.

Step by step, one row at a time, as speech is made: the decode path itself is compared, not the
training pass. Knows decoders and rows of ids; nothing of files.

Shapes: N codes of a row and its STOP, V code vocabulary, M mels, T mel frames.
"""

import dataclasses

import torch
from torch import Tensor

from kit.inference.decoder import Decoder
from kit.inference.linear_formats import weight_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    text: list[int]  # ids without START and STOP
    codes: list[int]  # what was recorded
    cond: Tensor  # (M, T) log-mel of a reference


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """A decoder against another along real rows (teacher forcing)."""

    top1_agreement: float  # share of positions where both rank the same code first
    mean_logit_error: float
    max_logit_error: float
    size_ratio: float  # bytes of the whole decoder against the other's
    linear_size_ratio: float  # bytes of the trunk's and the code head's layers alone
    positions: int  # compared


def compare(
    full: Decoder, small: Decoder, rows: list[Row], wanted: list[Tensor] | None = None
) -> Cost:
    """What `small` costs beside `full` over `rows`.

    `wanted` are `full`'s logits of these rows, where `forced` has found them already. Raises
    ValueError where there are no rows.
    """
    if not rows:
        raise ValueError("There are no rows to compare on: hold some recordings out.")
    wanted = wanted or [forced(full, row) for row in rows]
    true = torch.cat(wanted)
    found = true if small is full else torch.cat([forced(small, row) for row in rows])
    # A code that is never said is -inf in both: no error.
    error = torch.where(true == found, 0.0, (true - found).abs())
    return Cost(
        top1_agreement=float((true.argmax(-1) == found.argmax(-1)).float().mean()),
        mean_logit_error=float(error.mean()),
        max_logit_error=float(error.max()),
        size_ratio=weight_bytes(small) / weight_bytes(full),
        linear_size_ratio=linear_bytes(small) / linear_bytes(full),
        positions=len(true),
    )


@torch.inference_mode()
def forced(decoder: Decoder, row: Row) -> Tensor:
    """Logits (N + 1, V) of every code of `row` and of its STOP, the codes before it given."""
    device = decoder.device
    x, padding = decoder.prompt([row.text], row.cond[None].float().to(device))
    logits, cache = decoder.prefill(x, padding, len(row.codes) + 1)
    found = [logits.clone()]
    for number, code in enumerate(torch.tensor(row.codes, device=device)):
        found.append(decoder.decode_one(code[None], number + 1, cache).clone())
    decoder.release(cache)
    return torch.cat(found)


def linear_bytes(decoder: Decoder) -> int:
    """Bytes of what a number format changes: the linear layers of trunk and code head."""
    return weight_bytes(decoder.layers) + weight_bytes(decoder.code_head)
