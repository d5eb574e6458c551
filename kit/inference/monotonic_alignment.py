"""Score how well generated codes follow their text, by the attention of the alignment head.

A voice that skips or repeats a word first attends elsewhere in the text. The score is that of the
best monotonic path through the attention from the first text token to the last (monotonic alignment
search, Kim et al. 2020).

Shapes: B rows, P prompt, Q codes with START, T text tokens with START and STOP, D width.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kit.inference.decoder import Conditioning, Decoder

FLOOR = 0.01  # of a token's share of the attention
# Elements of the widest activation in a batch: what stays in a CPU's cache, twice as fast there as
# 64 rows together; 128 MB on a GPU.
BATCH_ELEMENTS = {"cpu": 2**20, "cuda": 2**25}


@torch.inference_mode()
def alignment_scores(
    decoder: Decoder, texts: list[list[int]], cond: Conditioning, codes: list[Tensor]
) -> list[float]:
    """Return how well each row of `codes` (N,) follows its text: nats a code, 0 is the best.

    Rows with fewer codes than text tokens get the worst score.
    """
    longest = decoder.config.latents + max(map(len, texts)) + max(map(len, codes))
    rows = max(1, BATCH_ELEMENTS[decoder.device.type] // (longest * 4 * decoder.config.width))
    scores = []
    for first in range(0, len(texts), rows):
        part = slice(first, first + rows)
        attention, tokens = text_attention(decoder, texts[part], cond[part], codes[part])
        lengths = torch.tensor([len(row) + 1 for row in codes[part]])
        scores += best_path_scores(attention.cpu(), tokens, lengths).tolist()
    return scores


def text_attention(
    decoder: Decoder, texts: list[list[int]], cond: Conditioning, codes: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the alignment head's attention to the text, (B, Q, T) in fp32, and text tokens (B,).

    Shorter texts are padded with zeros on the left.
    """
    c = decoder.config
    layer, head = decoder.alignment_head
    x, padding = decoder.prompt(texts, cond)
    prompt = x.shape[1]
    padded = pad_sequence(list(codes), batch_first=True, padding_value=c.stop_code)
    padded = padded.to(decoder.device)
    code_index = torch.arange(1, padded.shape[1] + 1, device=decoder.device)
    x = torch.cat((x, decoder.embed(padded, code_index).float()), dim=1)
    b, count, d = x.shape
    mask = decoder.causal_mask(decoder.padding_mask(padding) if any(padding) else None, count)
    shape = (2, b, c.heads, count, d // c.heads)
    keys, values = torch.empty(shape, dtype=decoder.cache_dtype, device=x.device)
    x = x.reshape(b * count, d).to(decoder.dtype)
    for lower in decoder.layers[:layer]:
        x = lower(x, keys, values, 0, mask)
    q, k, _ = decoder.layers[layer].qkv(x, b)
    tokens = torch.tensor([len(text) + 2 for text in texts])
    longest = int(tokens.max())
    start = prompt - 1  # index of the codes' START
    q = q[:, head, start:].float() * q.shape[-1] ** -0.5
    scores = q @ k[:, head, start - longest : start].float().mT
    padding = torch.arange(longest) < (longest - tokens)[:, None]
    padding = padding[:, None].to(scores.device)
    return scores.masked_fill(padding, float("-inf")).softmax(-1), tokens


def best_path_scores(attention: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
    """Return the mean log-attention (B,) along the best path from the first token to the last.

    `attention` (B, Q, T) and `tokens` (B,) as from `text_attention`; only the first `lengths` (B,)
    codes count. Each code stays at a token or moves to the next.
    """
    log_attention = (attention + FLOOR).log()
    longest = attention.shape[2]
    first = F.one_hot(longest - tokens, longest).bool()
    best = log_attention[:, 0].masked_fill(~first, -math.inf)
    for n in range(1, attention.shape[1]):
        advanced = F.pad(best[:, :-1], (1, 0), value=-math.inf)
        extended = log_attention[:, n] + torch.maximum(best, advanced)
        best = torch.where((n < lengths)[:, None], extended, best)
    return (best[:, -1] / lengths).clamp(min=math.log(FLOOR))
