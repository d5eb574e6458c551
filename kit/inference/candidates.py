"""Rank candidates: by the attention of the alignment head, and by a CTC network that reads codes.

A voice that skips or repeats a word first attends elsewhere in the text. The first score is that of
the best monotonic path through the attention from the first text token to the last (monotonic
alignment search, Kim et al. 2020).

The CTC network (Graves et al. 2006) is trained on the recordings' codes and texts, and never sees
the GPT. TorToiSe ranks candidates by CLVP (Betker 2023); CTC can be trained on a few hours of
speech.

Shapes: B rows, P prompt, Q codes with START, T text tokens with START and STOP, D width, N codes, A
alphabet + blank.
"""

import dataclasses
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from kit.audio.fitting import ConvNeXtBlock
from kit.audio.recognizer import character_ids, transcripts
from kit.base.config import checked
from kit.base.errors import KitError
from kit.base.tensor_file import load_module, save_module, saved_header
from kit.inference.decoder import Conditioning, Decoder
from kit.settings import CodeReaderConfig

FLOOR = 0.01  # of a token's share of the attention
# Elements of the widest activation in a batch: what stays in a CPU's cache, twice as fast there as
# 64 rows together; 128 MB on a GPU.
BATCH_ELEMENTS = {"cpu": 2**20, "cuda": 2**25}


@torch.inference_mode()
def alignment_scores(
    decoder: Decoder, texts: list[list[int]], cond: Conditioning, codes: list[Tensor]
) -> list[float]:
    """Return how well each row of codes (N,) follows its text, in nats a code; 0 is the best.

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
    start = x.shape[1] - 1  # index of the codes' START
    padded = pad_sequence(codes, batch_first=True, padding_value=c.stop_code).to(decoder.device)
    code_index = torch.arange(1, padded.shape[1] + 1, device=decoder.device)
    x = torch.cat((x, decoder.embed(padded, code_index).float()), dim=1)
    b, count, d = x.shape
    mask = decoder.causal_mask(decoder.padding_mask(padding) if any(padding) else None, count)
    shape = (2, b, c.heads, count, d // c.heads)
    kv = torch.empty(shape, dtype=decoder.cache_dtype, device=x.device)
    x = x.reshape(b * count, d).to(decoder.dtype)
    for lower in decoder.layers[:layer]:
        x = lower(x, kv, 0, mask)
    q, k, _ = decoder.layers[layer].qkv(x, b)
    tokens = torch.tensor([len(text) + 2 for text in texts])
    longest = int(tokens.max())
    q = q[:, head, start:].float() * q.shape[-1] ** -0.5
    scores = q @ k[:, head, start - longest : start].float().mT
    unused = torch.arange(longest) < (longest - tokens)[:, None, None]  # (B, 1, T)
    return scores.masked_fill(unused.to(scores.device), float("-inf")).softmax(-1), tokens


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


READER = "reader.safetensors"  # in the folder of a run or an exported voice
RANDOM_CODE_RATE = 0.05  # share of codes replaced in training, as a voice makes errors
MASKED_CODE_RATE = 0.08  # share of codes masked in training
MAX_MISMATCH = 20.0  # nats a letter; also for fewer codes than letters


class CodeReader(nn.Module):
    """Codes -> characters of one `alphabet`; index 0 is the CTC blank.

    A code is a tuple of numbers, each with an embedding for its `levels` values (FSQ) and one for a
    masked code. For other codecs `levels` is (vocabulary size,).
    """

    def __init__(self, config: CodeReaderConfig, alphabet: str, levels: tuple):
        super().__init__()
        self.config = config
        self.alphabet = alphabet
        self.levels = tuple(levels)
        self.embeddings = nn.ModuleList(nn.Embedding(n + 1, config.width) for n in self.levels)
        self.blocks = nn.Sequential(*(ConvNeXtBlock(config.width) for _ in range(config.blocks)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, len(alphabet) + 1)

    def forward(self, codes: Tensor) -> Tensor:  # (B, N) -> (B, N, A) log-probabilities
        known = codes >= 0  # the others are masked
        rest = codes.clamp(min=0)
        h = 0
        for levels, embedding in zip(self.levels, self.embeddings):
            h = h + embedding(torch.where(known, rest % levels, levels))
            rest = rest // levels
        h = self.blocks(h.mT).mT
        return self.head(self.norm(h)).float().log_softmax(-1)

    @torch.inference_mode()
    def transcribe(self, codes: list[Tensor]) -> list[str]:
        rows = self(pad_codes(codes).to(self.head.weight.device)).cpu()
        return transcripts(self.alphabet, [row[: len(c)] for row, c in zip(rows, codes)])

    @torch.inference_mode()
    def text_mismatch(self, texts: list[str], codes: list[Tensor]) -> list[float]:
        """Return how badly each row of codes (N,) matches its text: nats a letter, 0 is best."""
        return self._nats(pad_codes(codes), codes, texts).clamp(max=MAX_MISMATCH).tolist()

    def loss(self, codes: list[Tensor], texts: list[str]) -> Tensor:
        """Return the CTC loss of a batch in nats a letter, some codes masked or random."""
        row = pad_codes(codes)
        draw = torch.rand(row.shape)
        random_codes = torch.randint(math.prod(self.levels), row.shape)
        row = torch.where(draw < RANDOM_CODE_RATE, random_codes, row)
        row = torch.where(draw > 1 - MASKED_CODE_RATE, -1, row)
        # A row with fewer codes than letters has infinite loss: it counts as 0.
        return self._nats(row, codes, texts, zero_infinity=True).mean()

    def _nats(
        self, row: Tensor, codes: list[Tensor], texts: list[str], zero_infinity: bool = False
    ) -> Tensor:
        """Return the CTC loss (B,) of `row` (B, N) in nats a letter; infinite if too short."""
        targets = [character_ids(self.alphabet, text) for text in texts]
        counts = torch.tensor([len(target) for target in targets])
        lengths = torch.tensor([len(row_codes) for row_codes in codes])
        # (N, B, A); on the CPU, because CTC's gradient on a GPU is not deterministic.
        log_probs = self(row.to(self.head.weight.device)).transpose(0, 1).cpu()
        how = {"reduction": "none", "zero_infinity": zero_infinity}
        nats = F.ctc_loss(log_probs, torch.cat(targets), lengths, counts, **how)
        return nats / counts.clamp(min=1)


def pad_codes(codes: list[Tensor]) -> Tensor:
    """Pad rows of codes (N,) to (B, N) with -1, at least one column."""
    rows = pad_sequence([c.long() for c in codes], batch_first=True, padding_value=-1)
    return rows if rows.shape[1] else F.pad(rows, (0, 1), value=-1)


def save_reader(reader: CodeReader, path: Path, parts: dict[str, str] | None = None) -> None:
    """Write the reader; `parts` maps tokenizer and codec files to their SHA-256."""
    save_module(
        path,
        reader,
        config=dataclasses.asdict(reader.config),
        alphabet=reader.alphabet,
        levels=reader.levels,
        parts=parts or {},
    )


def load_reader(path: Path) -> CodeReader:
    """Load the reader at `path`. Raises KitError if it is missing or damaged."""
    fix = "delete it, or run `reader()` of 02_train again."
    return load_module(path, _from_header, KitError, fix)


def _from_header(header: dict) -> CodeReader:
    config = checked(header.get("config"), CodeReaderConfig, "its config")
    alphabet = checked(header.get("alphabet"), (str, 1, 10_000), "its alphabet")
    levels = checked(header.get("levels"), (list, 1, 64, (int, 1, 2**20)), "its levels")
    return CodeReader(config, alphabet, tuple(levels))


def load_matching_reader(folder: Path, parts: dict[str, str]) -> CodeReader | None:
    """Load the reader in a run's `folder`; None if missing or trained with other `parts`.

    Raises KitError if it is damaged.
    """
    path = Path(folder) / READER
    if not path.is_file():
        return None
    reader = load_reader(path)
    return reader if saved_header(path).get("parts") == parts else None
