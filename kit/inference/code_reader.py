"""What a reading's codes say, read back: a small network from audio codes to characters.

A voice reads a text several times, and whoever heard it would know which reading to keep. This
network is trained on the codes of the recordings and their texts, and never sees the model: it says
how badly a reading's codes fit its text, without making sound of them. So CLVP ranks the readings
of TorToiSe (Betker 2023); here by connectionist temporal classification (Graves et al. 2006), which
some hours of speech can teach. Knows codes and characters; nothing of sound or the GPT.

Shapes: B batch, N codes, A alphabet + blank.
"""

import dataclasses
import math
from pathlib import Path

import safetensors
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from kit.audio.fitting import FitConfig
from kit.audio.layers import ConvNeXtBlock
from kit.audio.recognizer import character_ids, transcripts
from kit.base.config import build, require_within
from kit.base.errors import KitError
from kit.base.tensor_file import load_module, save_module, saved_header

READER = "reader.safetensors"  # in a run's folder, and in an exported voice's
FOREIGN = 0.05  # share of codes that are another in training: a voice says some wrong ones
MASKED_CODE_RATE = 0.08  # share that is not told
WORST = 20.0  # nats a letter: of codes that are fewer than the letters, too


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodeReaderConfig(FitConfig):
    width: int = 192  # channels
    blocks: int = 6  # residual blocks
    steps: int = 1600  # training steps of the first cycle ...
    least_steps: int = 400  # ... or so many at least, where it would take longer than the minutes
    minutes: float = 10.0  # no further cycle of them begins that would end after these
    good: float = 0.05  # character error rate on held-out rows that is good enough
    batch: int = 24  # rows per training step, at most ...
    batch_frames: int = 12_000  # ... and codes
    lr: float = 2e-3
    rows: int = 0  # recordings it learns from, at most; 0: there is none
    # Of a speaker with few rows, each counts as so many, at most: as far as the most have.
    most_repeats: int = 4

    def __post_init__(self):
        super().__post_init__()
        require_within(self, 1, 65_536, "width")
        require_within(self, 1, 1000, "blocks", "most_repeats")
        require_within(self, 1, 1e9, "batch", "batch_frames")
        require_within(self, 1e-12, 10, "lr")
        require_within(self, 0, 1e9, "rows")


class CodeReader(nn.Module):
    """Codes -> characters of one `alphabet`; index 0 is the CTC blank.

    A code stands for numbers of so many `levels`, of which each has an embedding: what codes share
    is learnt once. Of a codec whose codes are not made of numbers, `levels` is its vocabulary.
    """

    def __init__(self, config: CodeReaderConfig, alphabet: str, levels: tuple):
        super().__init__()
        self.config = config
        self.alphabet = alphabet
        self.levels = tuple(levels)
        # One more of each: of a code that is not told.
        self.embeddings = nn.ModuleList(nn.Embedding(n + 1, config.width) for n in self.levels)
        self.blocks = nn.Sequential(*(ConvNeXtBlock(config.width) for _ in range(config.blocks)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, len(alphabet) + 1)

    def forward(self, codes: Tensor) -> Tensor:  # (B, N) -> (B, N, A) log-probabilities
        """`codes` below 0 are not told."""
        told = codes >= 0
        rest = codes.clamp(min=0)
        h = 0
        for levels, embedding in zip(self.levels, self.embeddings):
            h = h + embedding(torch.where(told, rest % levels, levels))
            rest = rest // levels
        h = self.blocks(h.mT).mT
        return self.head(self.norm(h)).float().log_softmax(-1)

    @torch.inference_mode()
    def transcribe(self, codes: list[Tensor]) -> list[str]:
        """What each row of codes (N,) says, as far as it can be told."""
        rows = self(pad_codes(codes).to(self.head.weight.device)).cpu()
        return transcripts(self.alphabet, [row[: len(c)] for row, c in zip(rows, codes)])

    @torch.inference_mode()
    def text_mismatch(self, texts: list[str], codes: list[Tensor]) -> list[float]:
        """How badly each row of codes (N,) fits its text: nats a letter, 0 the best."""
        return self._nats(pad_codes(codes), codes, texts).clamp(max=WORST).tolist()

    def loss(self, codes: list[Tensor], texts: list[str]) -> Tensor:
        """CTC of a batch in training, in nats a letter; some codes are hidden, some are others."""
        row = pad_codes(codes)
        chance = torch.rand(row.shape)
        others = torch.randint(math.prod(self.levels), row.shape)
        row = torch.where(chance < FOREIGN, others, row)
        row = torch.where(chance > 1 - MASKED_CODE_RATE, -1, row)
        # Fewer codes than letters: such a row has no way through, and teaches nothing.
        return self._nats(row, codes, texts, zero_infinity=True).mean()

    def _nats(
        self, row: Tensor, codes: list[Tensor], texts: list[str], zero_infinity: bool = False
    ) -> Tensor:
        """CTC (B,) of each row of `row` (B, N), in nats a letter; infinite where none fits."""
        targets = [character_ids(self.alphabet, text) for text in texts]
        counts = torch.tensor([len(target) for target in targets])
        lengths = torch.tensor([len(c) for c in codes])
        # (N, B, A); CTC is computed on the CPU, as its gradient on a GPU differs from run to run.
        log_probs = self(row.to(self.head.weight.device)).transpose(0, 1).cpu()
        nats = F.ctc_loss(
            log_probs,
            torch.cat(targets),
            lengths,
            counts,
            reduction="none",
            zero_infinity=zero_infinity,
        )
        return nats / counts.clamp(min=1)


def pad_codes(codes: list[Tensor]) -> Tensor:
    """Rows of codes (N,) as one (B, N), a column at least; what is added is not told."""
    rows = pad_sequence([c.long() for c in codes], batch_first=True, padding_value=-1)
    return rows if rows.shape[1] else F.pad(rows, (0, 1), value=-1)


def save_reader(reader: CodeReader, path: Path, parts: dict[str, str] | None = None) -> None:
    """Weights and what makes them in one file; `parts` are the SHA-256 of what made its ids."""
    save_module(
        path,
        reader,
        config=dataclasses.asdict(reader.config),
        alphabet=reader.alphabet,
        levels=reader.levels,
        parts=parts or {},
    )


def load_reader(path: Path) -> CodeReader:
    """The reader saved at `path`. Raises KitError where it is missing or damaged."""
    cure = "delete it, or run `reader()` of 02_train again."
    return load_module(path, _from_header, KitError, cure)


def _from_header(header: dict) -> CodeReader:
    config = build(CodeReaderConfig, header["config"])
    return CodeReader(config, header["alphabet"], tuple(header["levels"]))


def load_matching_reader(folder: Path, parts: dict[str, str]) -> CodeReader | None:
    """The reader in a run's `folder` that knows the ids of `parts`; None where there is none.

    Of a codec or tokenizer of before it would read other codes. Raises KitError where it is
    damaged.
    """
    path = Path(folder) / READER
    try:
        known = saved_header(path)["parts"]
    except FileNotFoundError:
        return None
    except (OSError, KeyError, ValueError, TypeError, safetensors.SafetensorError):
        return load_reader(path)  # which says what is wrong with it
    return load_reader(path) if known == parts else None
