"""How each kind of tokenizer learns another text: SentencePiece's, and a released XTTS's.

Apart from `tokenizer_kinds`, as a voice that only speaks needs none of it.
"""

from pathlib import Path

from kit.text.grow_tokenizer import grow_tokenizer, spellings
from kit.text.grow_xtts import grow_xtts, told_growth, xtts_spellings
from kit.text.piece_tokenizer import PieceTokenizer
from kit.text.tokenizer_report import vocabulary_advice
from kit.text.train_tokenizer import TokenizerConfig
from kit.text.xtts_tokenizer import XTTSTokenizer


def grown_tokenizer(
    base: PieceTokenizer,
    lines: list[str],
    path: Path,
    config: TokenizerConfig,
    text: Path | None = None,
    language: str | None = None,
) -> PieceTokenizer:
    """The tokenizer at `path`: `base`, and behind its ids the pieces that `lines` can teach.

    An XTTS's pieces are merged from those that it has, in `lines` alone: neither `config` nor a
    larger `text` takes part. Raises TextError as growing the one or the other does.
    """
    if isinstance(base, XTTSTokenizer):
        return grow_xtts(base, lines, path)
    return grow_tokenizer(base, lines, path, config, text, language)


def old_spellings(base: PieceTokenizer, grown: PieceTokenizer) -> dict[int, list[int]]:
    """For each id of `grown` that `base` has not: the ids in which `base` spells its piece."""
    if isinstance(base, XTTSTokenizer):
        return xtts_spellings(base, grown)
    return spellings(base, grown)


def advice_of(
    tokenizer: PieceTokenizer, counts: dict[int, int], base: PieceTokenizer | None = None
) -> tuple[int, str]:
    """How many ids suit the text that gave `counts`, and why, as `vocabulary_advice` says.

    A grown XTTS has as many new pieces as the text teaches; the old ones are other languages'.
    """
    if isinstance(base, XTTSTokenizer):
        return tokenizer.vocab_size, told_growth(base, tokenizer)
    return vocabulary_advice(tokenizer, counts)
