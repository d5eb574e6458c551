"""The head that follows the text from piece to piece as the codes go on, if a model has one.

Whisper's paper calls such heads alignment heads (Radford et al. 2022). Guided attention makes one
(guided_attention.py); a model that has learnt to read mostly finds one by itself.

Shapes: N codes with START, T text pieces with START and STOP.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from kit.model.gpt import SpeechGPT
from kit.model.sequence import Batch

MIN_DIAGONALITY = 0.9  # of 1: how well a head follows the text that readings are compared by


class AlignmentHead(NamedTuple):
    """Where a model's alignment head is; both count from 0."""

    layer: int
    head: int


def find_alignment_head(model: SpeechGPT, rows: Iterable[Batch]) -> AlignmentHead | None:
    """The head that follows the text best in `rows`, batches of one; None where none does well."""
    each = [head_diagonality(model, row) for row in rows]
    mean = torch.stack(each).mean(0)
    if not mean.max() >= MIN_DIAGONALITY:
        return None
    layer, head = divmod(int(mean.argmax()), mean.shape[1])
    return AlignmentHead(layer, head)


def head_diagonality(model: SpeechGPT, row: Batch) -> Tensor:
    """How well every head follows the text of `row`: (layers, heads)."""
    maps = text_attention_maps(model, row).cpu()
    scores = torch.stack([diagonality(each) for each in maps.flatten(0, 1)])
    return scores.view(maps.shape[:2])


def text_attention_maps(model: SpeechGPT, row: Batch) -> Tensor:
    """How much each code of `row` looks at each text piece: (layers, heads, N, T)."""
    row = row.to(next(model.parameters()).device)
    latents = model.config.latents
    first_code = latents + int((row.tokens < model.config.text_vocab).sum())
    weights = torch.cat(model.attention(row))
    return weights[:, :, first_code:, latents:first_code]


def diagonality(attention: Tensor) -> Tensor:
    """How well a map (N, T) follows the text: 0 not at all, 1 in a straight line.

    The correlation of where in the text a code looks with when it comes, times the share of all
    its looking that goes to the text.
    """
    share = attention.sum(-1)
    where = (attention * torch.arange(attention.shape[1])).sum(-1) / share
    when = torch.arange(len(attention), dtype=where.dtype)
    correlation = torch.corrcoef(torch.stack((where, when)))[0, 1].nan_to_num()
    return correlation * share.mean()
