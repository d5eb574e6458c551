"""Does a reading go along its text? What the alignment head says of it, once it was read.

A voice that is about to leave a word out, or to say it twice, first looks elsewhere in the text.
So the best way through the head's attention that goes from the first piece to the last, without a
step back (monotonic alignment search, Kim et al. 2020), says how sure the reading was of its place.
Knows the decoder; nothing of sampling.

Shapes: B rows, P prompt, Q codes with START, T text pieces with START and STOP, D width.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kit.inference.decoder import Conditioning, Decoder

FLOOR = 0.01  # of a piece's share of the attention: below that it is not looked at
# Numbers of the widest layer that are made at once: what stays near a CPU's core, twice as fast
# there as 64 readings together; on a GPU 128 MB.
AT_ONCE = {"cpu": 2**20, "cuda": 2**25}


@torch.inference_mode()
def alignment_scores(
    decoder: Decoder, texts: list[list[int]], cond: Conditioning, codes: list[Tensor]
) -> list[float]:
    """How surely each reading, `codes` (N,) of a text, follows it: nats a code, 0 is the best.

    Of the decoder's alignment head. A reading of fewer codes than pieces is the worst there is.
    """
    longest = decoder.config.latents + max(map(len, texts)) + max(map(len, codes))
    rows = max(1, AT_ONCE[decoder.device.type] // (longest * 4 * decoder.config.width))
    found = []
    for first in range(0, len(texts), rows):
        part = slice(first, first + rows)
        looks, pieces = text_attention(decoder, texts[part], cond[part], codes[part])
        lengths = torch.tensor([len(each) + 1 for each in codes[part]])
        found += best_path_scores(looks.cpu(), pieces, lengths).tolist()
    return found


def text_attention(
    decoder: Decoder, texts: list[list[int]], cond: Conditioning, codes: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """How the alignment head shares its looks at the text among the pieces, (B, Q, T) in fp32.

    Rows end with their last piece, shorter ones have zeros before their first; and how many
    pieces (B,) each has.
    """
    c = decoder.config
    layer, head = decoder.alignment_head
    x, padding = decoder.prompt(texts, cond)
    prompt = x.shape[1]
    said = pad_sequence(list(codes), batch_first=True, padding_value=c.stop_code)
    said = said.to(decoder.device)
    at = torch.arange(1, said.shape[1] + 1, device=decoder.device)
    x = torch.cat((x, decoder.embed(said, at).float()), dim=1)
    b, count, d = x.shape
    mask = decoder.causal_mask(decoder.padding_mask(padding) if any(padding) else None, count)
    shape = (2, b, c.heads, count, d // c.heads)
    keys, values = torch.empty(shape, dtype=decoder.cache_dtype, device=x.device)
    x = x.reshape(b * count, d).to(decoder.dtype)
    for each in decoder.layers[:layer]:
        x = each(x, keys, values, 0, mask)
    q, k, _ = decoder.layers[layer].qkv(x, b)
    pieces = torch.tensor([len(text) + 2 for text in texts])
    most = int(pieces.max())
    start = prompt - 1  # where the codes' START is
    q = q[:, head, start:].float() * q.shape[-1] ** -0.5
    scores = q @ k[:, head, start - most : start].float().mT
    before = torch.arange(most) < (most - pieces)[:, None]
    before = before[:, None].to(scores.device)
    return scores.masked_fill(before, float("-inf")).softmax(-1), pieces


def best_path_scores(looks: Tensor, pieces: Tensor, lengths: Tensor) -> Tensor:
    """Mean log-share (B,) along the best way from each row's first piece to its last.

    `looks` (B, Q, T) as `text_attention` has it, of which the first `lengths` (B,) codes count.
    Each code stays with a piece or goes on to the next.
    """
    gains = (looks + FLOOR).log()
    most = looks.shape[2]
    first = F.one_hot(most - pieces, most).bool()
    best = gains[:, 0].masked_fill(~first, -math.inf)
    for n in range(1, looks.shape[1]):
        onward = F.pad(best[:, :-1], (1, 0), value=-math.inf)
        longer = gains[:, n] + torch.maximum(best, onward)
        best = torch.where((n < lengths)[:, None], longer, best)
    return (best[:, -1] / lengths).clamp(min=math.log(FLOOR))
