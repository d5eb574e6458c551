"""A tokenizer that learns the pieces of another text, and keeps every id that it has.

A model's rows go by ids: a vocabulary that is learned anew would give each row another meaning. New
pieces come behind the old ones, START and STOP stay where they are, and `spellings` says how the
old tokenizer would have spelt what is new, so that its rows need not begin at random.
"""

import dataclasses
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import sentencepiece as spm

from kit.base.files import write_atomic
from kit.text.normalize import TextError
from kit.text.piece_file import Piece, as_it_stands, vocabulary_size
from kit.text.tokenizer import START, STOP, Tokenizer
from kit.text.tokenizer_report import OFTEN, fitted_tokenizer, parts_of
from kit.text.train_tokenizer import TokenizerConfig


def grow_tokenizer(
    base: Tokenizer,
    lines: list[str],
    path: Path,
    config: TokenizerConfig,
    text: Path | None = None,
    language: str | None = None,
) -> Tokenizer:
    """The tokenizer at `path`: `base`, and behind its ids the pieces that `lines` can teach.

    They are learned as `fitted_tokenizer` learns them; those longer than a character stay where
    they spell `lines` 100 times, or are part of one that does. Raises TextError where `base` spells
    phonemes and `config` letters, or others, and as `fitted_tokenizer` does.
    """
    if base.phonemes != config.phonemes:
        raise TextError(
            f"The voice to start from spells {base.phonemes or 'letters'}, asked for are "
            f"{config.phonemes or 'letters'}: leave PHONEMES empty, it goes by that voice."
        )
    old = base.model.serialized_model_proto()
    if base.start == len(base.model):  # not grown before: the two become pieces, at their ids
        old += b"".join(Piece(mark, control=True).entry() for mark in (START, STOP))
    known = {base.model.id_to_piece(i) for i in range(len(base.model))}
    scores = [base.model.get_score(i) for i in range(len(base.model))]
    is_bpe = all(score.is_integer() for score in scores)  # a unigram's are logarithms
    spelt = [base.spelt(line) for line in lines]
    learning = dataclasses.replace(
        config,
        kind="bpe" if is_bpe else "unigram",
        fitted=True,
        exact=False,
        phonemes="",  # `spelt` is in phonemes already
    )
    found = _learned(spelt, learning, text, language)
    learned = [piece for piece in found if piece.text not in known]
    if is_bpe:  # a merge that was learned before is made before
        lowest = min(scores)
        learned = [Piece(piece.text, lowest - rank) for rank, piece in enumerate(learned, 1)]
    kept = _used(old, learned, spelt)
    size = vocabulary_size(base.vocab_size + len(kept))
    write_atomic(path, b"".join([old, *(piece.entry() for piece in kept), size]))
    return Tokenizer(path)


def spellings(base: Tokenizer, grown: Tokenizer) -> dict[int, list[int]]:
    """For each id of `grown` that `base` has not: the ids in which `base` spells its piece."""
    within_words = base.model.serialized_model_proto() + as_it_stands()
    speller = spm.SentencePieceProcessor(model_proto=within_words)
    new = range(base.vocab_size, grown.vocab_size)
    return {number: speller.encode(grown.model.id_to_piece(number)) for number in new}


def _learned(
    spelt: list[str], config: TokenizerConfig, text: Path | None, language: str | None
) -> list[Piece]:
    """The pieces of a tokenizer that knows no other text, in the order in which it has them."""
    with TemporaryDirectory(prefix="pieces-") as folder:
        path = Path(folder) / "tokenizer.model"
        fitted_tokenizer(spelt, path, config, text, language)
        learned = Tokenizer(path)
    normal = [i for i in range(learned.piece_count) if not learned.is_fixed(i)]
    return [Piece(learned.piece(i), learned.model.get_score(i)) for i in normal]


def _used(old: bytes, learned: list[Piece], spelt: list[str]) -> list[Piece]:
    """Those of `learned` that spell `spelt` often enough, single characters, and parts of either.

    A piece is put together from its parts, so they stay although nothing else may be spelt in them.
    """
    whole = b"".join([old, *(piece.entry() for piece in learned)])
    model = spm.SentencePieceProcessor(model_proto=whole)
    counts = Counter(piece for line in spelt for piece in model.encode(line, out_type=str))
    needed = parts_of([piece.text for piece in learned if counts[piece.text] >= OFTEN])
    return [piece for piece in learned if len(piece.text) == 1 or piece.text in needed]
