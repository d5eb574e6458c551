"""Attention that follows the text: the loss that teaches it, and the head that does it best.

A voice reads well once some head moves along the text as the codes advance. A small GPT may learn
that late or never, depending on its seed. Guided attention penalises what a head attends to far
from the diagonal (Tachibana et al. 2018) early in training; it fades and ends. Heads that follow
the text are called alignment heads, as in Whisper (Radford et al. 2022).

Shapes: B batch, K latents, S tokens, D width, d width of a head, N codes with START, T text tokens
with START and STOP.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kit.model.sequence import IGNORE_INDEX, Batch
from kit.settings import GPTConfig

WIDTH = 0.15  # standard deviation of the diagonal, as a share of text and codes
MIN_DIAGONALITY = 0.9  # of 1: below it a head does not follow the text well enough to rank by


def max_text_tokens(config: GPTConfig, batch: Batch) -> int:
    """Return the length of the longest text of `batch`; no GPU sync for a batch on the CPU."""
    return int(text_lengths(config, batch).max())


def text_lengths(config: GPTConfig, batch: Batch) -> Tensor:
    """Return the number of tokens (B,) before each example's code START."""
    return (batch.tokens >= config.text_vocab).int().argmax(1)


def guided_attention_loss(
    config: GPTConfig, layer: nn.Module, x: Tensor, batch: Batch, text_width: int
) -> Tensor:
    """Return the loss of the first head of `layer` in nats, summed over all code targets.

    For each code: the negative log of its attention to the text, each text token weighted by its
    distance from where the code would be if all tokens lasted equally long. `x` (B, K + S, D) is
    the layer's input, `text_width` the batch's `max_text_tokens`.
    """
    q, k, _ = layer.attn.qkv(layer.ln_1(x))
    q = q[:, 0, config.latents :] * q.shape[-1] ** -0.5  # (B, S, d), scaled here for fp16's range
    k = k[:, 0]  # (B, K + S, d)
    scores = (q @ k.mT).float()
    later = torch.ones(scores.shape[1:], dtype=torch.bool, device=x.device)
    scores = scores.masked_fill(later.triu(config.latents + 1), float("-inf"))
    log_weights = diagonal_log_weights(config, batch, text_width)
    text_scores = scores[:, :, config.latents : config.latents + text_width] + log_weights
    loss = scores.logsumexp(-1) - text_scores.logsumexp(-1)
    losses = loss.flatten().index_select(0, batch.code_indices)
    return losses.where(batch.code_targets != IGNORE_INDEX, 0.0).sum()


def diagonal_log_weights(config: GPTConfig, batch: Batch, text_width: int) -> Tensor:
    """Return log-weights (B, S, text_width) of text tokens for each code; -inf past the text."""
    text = text_lengths(config, batch)
    codes = batch.lengths - text
    text_index = torch.arange(text_width, device=text.device)
    code_index = torch.arange(batch.tokens.shape[1], device=text.device) - text[:, None]
    in_text = text_index / text[:, None]
    in_codes = code_index / codes[:, None]
    distance = in_codes[:, :, None] - in_text[:, None, :]
    past = text_index >= text[:, None]
    return (distance**2 / (-2 * WIDTH**2)).masked_fill(past[:, None, :], float("-inf"))


class AlignmentHead(NamedTuple):
    """Where a model's alignment head is; both count from 0."""

    layer: int
    head: int


def find_alignment_head(model: nn.Module, examples: Iterable[Batch]) -> AlignmentHead | None:
    """Return the head that follows the text best in `examples`, batches of one.

    None if no head reaches `MIN_DIAGONALITY`.
    """
    mean = torch.stack([head_diagonality(model, example) for example in examples]).mean(0)
    if not mean.max() >= MIN_DIAGONALITY:
        return None
    layer, head = divmod(int(mean.argmax()), mean.shape[1])
    return AlignmentHead(layer, head)


def head_diagonality(model: nn.Module, example: Batch) -> Tensor:
    """Return how well every head follows the text of `example`: (layers, heads), 0 to 1."""
    maps = text_attention_maps(model, example).cpu()
    scores = torch.stack([diagonality(attention) for attention in maps.flatten(0, 1)])
    return scores.view(maps.shape[:2])


def text_attention_maps(model: nn.Module, example: Batch) -> Tensor:
    """Return the attention of each code to each text token: (layers, heads, N, T)."""
    example = example.to(next(model.parameters()).device)
    latents = model.config.latents
    first_code = latents + int((example.tokens < model.config.text_vocab).sum())
    return torch.cat(model.attention(example))[:, :, first_code:, latents:first_code]


def diagonality(attention: Tensor) -> Tensor:
    """Return how well a map (N, T) follows the text: 0 not at all, 1 in a straight line.

    The correlation between a code's index and the text position it attends to, times the share of
    attention that goes to the text.
    """
    share = attention.sum(-1)
    text_position = (attention * torch.arange(attention.shape[1])).sum(-1) / share
    code_index = torch.arange(len(attention), dtype=text_position.dtype)
    correlation = torch.corrcoef(torch.stack((text_position, code_index)))[0, 1].nan_to_num()
    return correlation * share.mean()
