"""Guided attention: early in training one head is shown that speech follows its text.

A voice reads well once some head goes along the text as the codes go on. A small GPT may find that
late, or never, by chance of its seed. A loss on what a head looks at far from the diagonal teaches
it (Tachibana et al. 2018); it fades and ends, so what a trained model looks at is its own.

Shapes: B batch, K latents, S tokens, D width, d width of a head.
"""

import torch
from torch import Tensor, nn

from kit.model.sequence import Batch, GPTConfig

WIDTH = 0.15  # of the diagonal, as a share of text and codes: standard deviation of a normal curve


def max_text_tokens(config: GPTConfig, batch: Batch) -> int:
    """Tokens of the longest text of `batch`; asked of a batch on the CPU, it waits for no GPU."""
    return int(text_lengths(config, batch).max())


def text_lengths(config: GPTConfig, batch: Batch) -> Tensor:
    """Tokens of each row before the codes' START, (B,)."""
    return (batch.tokens >= config.text_vocab).int().argmax(1)


def guided_attention_loss(
    config: GPTConfig, layer: nn.Module, x: Tensor, batch: Batch, text_width: int
) -> Tensor:
    """Nats by which the first head of `layer` misses the diagonal, summed over all code targets.

    For each code the negative logarithm of its attention to the text, each piece weighed by how
    near it lies to where the code would be if all pieces took equally long. `x` (B, K + S, D) is
    what enters the layer, `text_width` the `max_text_tokens`.
    """
    q, k, _ = layer.attn.qkv(layer.ln_1(x))
    q = q[:, 0, config.latents :] * q.shape[-1] ** -0.5  # (B, S, d), scaled here for fp16's range
    k = k[:, 0]  # (B, K + S, d)
    scores = (q @ k.mT).float()
    later = torch.ones(scores.shape[1:], dtype=torch.bool, device=x.device)
    scores = scores.masked_fill(later.triu(config.latents + 1), float("-inf"))
    near = diagonal_log_weights(config, batch, text_width)
    on_text = scores[:, :, config.latents : config.latents + near.shape[2]] + near
    missed = scores.logsumexp(-1) - on_text.logsumexp(-1)
    return missed.flatten().index_select(0, batch.code_indices).sum()


def diagonal_log_weights(config: GPTConfig, batch: Batch, text_width: int) -> Tensor:
    """Log-weight of every text piece for every token, (B, S, text_width); -inf past the text.

    Of use for the tokens that are codes.
    """
    text = text_lengths(config, batch)
    codes = batch.lengths - text
    pieces = torch.arange(text_width, device=text.device)
    spoken = torch.arange(batch.tokens.shape[1], device=text.device) - text[:, None]
    in_text = pieces / text[:, None]
    in_codes = spoken / codes[:, None]
    apart = in_codes[:, :, None] - in_text[:, None, :]
    past = pieces >= text[:, None]
    return (apart**2 / (-2 * WIDTH**2)).masked_fill(past[:, None, :], float("-inf"))
