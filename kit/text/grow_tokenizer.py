"""A tokenizer that learns the pieces of another text, and keeps every id that it has.

A model's embeddings go by ids, so new pieces come after the old ones, and START and STOP stay.
`tokenizer.base_spellings` gives the old ids that spelt each new piece, so that its embedding need
not start at random.
"""

import dataclasses
import importlib
import struct
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import sentencepiece as spm

from kit.base.errors import SpeechError
from kit.base.files import write_atomic
from kit.text.tokenizer import START, STOP, BaseTokenizer, Tokenizer, load_tokenizer
from kit.text.train_tokenizer import (
    OFTEN,
    TokenizerConfig,
    substrings,
    train_fitted_tokenizer,
    vocabulary_advice,
)

CONTROL = 3  # ModelProto.SentencePiece.Type; a piece without one is a normal one


def grow_tokenizer(
    base: BaseTokenizer,
    lines: list[str],
    path: Path,
    config: TokenizerConfig,
    text: Path | None = None,
    language: str | None = None,
) -> BaseTokenizer:
    """The tokenizer at `path`: the ids of `base`, then the pieces that `lines` can teach.

    Pieces longer than a character are kept if they spell `lines` 100 times, or are part of one that
    does. A released tokenizer uses neither `config` nor `text`. Raises SpeechError where `base` and
    `config` differ in `phonemes`, and as `train_fitted_tokenizer` does.
    """
    if not isinstance(base, Tokenizer):
        return importlib.import_module(base.growth_module).grow_xtts(base, lines, path)
    if base.phonemes != config.phonemes:
        raise SpeechError(
            f"The base voice spells in {base.phonemes or 'letters'}, but the setting is "
            f"{config.phonemes or 'letters'}: leave PHONEMES empty to follow the base voice."
        )
    old = base.model.serialized_model_proto()
    if base.start == len(base.model):  # never grown: START and STOP become pieces at their ids
        old += b"".join(Piece(mark, control=True).entry() for mark in (START, STOP))
    known = {base.model.id_to_piece(i) for i in range(len(base.model))}
    scores = [base.model.get_score(i) for i in range(len(base.model))]
    is_bpe = all(score.is_integer() for score in scores)  # a unigram's are logarithms
    spelt = [base.spell(line) for line in lines]
    learning = dataclasses.replace(
        config,
        kind="bpe" if is_bpe else "unigram",
        fitted=True,
        exact=False,
        phonemes="",  # `spelt` is in phonemes already
    )
    pieces = _learn_pieces(spelt, learning, text, language)
    learned = [piece for piece in pieces if piece.text not in known]
    if is_bpe:  # a merge that was learned earlier is applied earlier
        lowest = min(scores)
        learned = [Piece(piece.text, lowest - rank) for rank, piece in enumerate(learned, 1)]
    kept = _used(old, learned, spelt)
    size = _bytes(2, _key(4, 0) + _varint(base.vocab_size + len(kept)))  # TrainerSpec.vocab_size
    write_atomic(path, b"".join([old, *(piece.entry() for piece in kept), size]))
    return load_tokenizer(path, base.language)


def grown_vocabulary_advice(
    tokenizer: BaseTokenizer, counts: dict[int, int], base: BaseTokenizer | None = None
) -> tuple[int, str]:
    """`vocabulary_advice`; for a grown released tokenizer, what is new in it."""
    if base is None or isinstance(base, Tokenizer):
        return vocabulary_advice(tokenizer, counts)
    growth = importlib.import_module(base.growth_module)
    return tokenizer.vocab_size, growth.describe_growth(base, tokenizer)


def _learn_pieces(
    spelt: list[str], config: TokenizerConfig, text: Path | None, language: str | None
) -> list["Piece"]:
    """The pieces of a new tokenizer for this text alone, in its order."""
    with TemporaryDirectory(prefix="pieces-") as folder:
        path = Path(folder) / "tokenizer.model"
        train_fitted_tokenizer(spelt, path, config, text, language)
        learned = Tokenizer(path)
    normal = [i for i in range(learned.piece_count) if not learned.kind(i)]
    return [Piece(learned.piece(i), learned.model.get_score(i)) for i in normal]


def _used(old: bytes, learned: list["Piece"], spelt: list[str]) -> list["Piece"]:
    """Those of `learned` that spell `spelt` often enough, single characters, and parts of either.

    A piece is merged from its parts, so they stay even where nothing else is spelt in them.
    """
    proto = b"".join([old, *(piece.entry() for piece in learned)])
    model = spm.SentencePieceProcessor(model_proto=proto)
    counts = Counter(piece for line in spelt for piece in model.encode(line, out_type=str))
    needed = substrings([piece.text for piece in learned if counts[piece.text] >= OFTEN])
    return [piece for piece in learned if len(piece.text) == 1 or piece.text in needed]


# --- a SentencePiece model's file -----------------------------------------------------------
# It is one Protocol Buffers message, of sentencepiece_model.proto. Appended pieces are further
# pieces, and an appended setting replaces the one before ("Last One Wins"), so nothing has to be
# parsed. sentencepiece's own class for it needs a newer protobuf than Colab has.


class Piece(NamedTuple):
    text: str
    score: float = 0.0  # of two possible merges, the one with the higher score is made
    control: bool = False  # text never becomes it

    def entry(self) -> bytes:
        """The piece as one more entry of a model's list."""
        fields = _bytes(1, self.text.encode()) + _key(2, 5) + struct.pack("<f", self.score)
        if self.control:
            fields += _key(3, 0) + _varint(CONTROL)
        return _bytes(1, fields)


def _key(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _bytes(field: int, payload: bytes) -> bytes:
    return _key(field, 2) + _varint(len(payload)) + payload


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; all but the last have the eighth set."""
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])
