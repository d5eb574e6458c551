"""Train a SentencePiece model: reproducibly, on text of any size, with errors that name the fix."""

import collections
import contextlib
import dataclasses
import io
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import sentencepiece as spm

from kit.base.config import require, require_within
from kit.base.errors import KitError
from kit.base.files import write_atomic
from kit.text.espeak import phonemize
from kit.text.extract import extract_text, plain_lines
from kit.text.tokenizer import Tokenizer
from kit.text.tokenizer_report import vocabulary_advice

_LONGEST_LINE_BYTES = 1 << 20  # SentencePiece's default, 4192 bytes, silently drops lines
_MAX_FITTINGS = 3  # reductions of a vocabulary: with fewer merges the counts change


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    kind: str = "bpe"  # "bpe" or "unigram"
    vocab_size: int = 410  # pieces; an upper bound unless `exact`
    fitted: bool = False  # fewer where the text cannot teach as many (`kit.text.tokenizer_report`)
    exact: bool = False  # refuse, rather than make fewer, when the text has not that many pieces
    byte_fallback: bool = True  # 256 pieces for bytes, so that no character is ever unknown
    character_coverage: float = 1.0  # share of characters that get a piece of their own
    input_sentence_size: int = 10_000_000  # lines drawn at random from a longer text; 0 takes all
    train_extremely_large_corpus: bool = False  # 64-bit counts: a unigram of over 2**31 characters
    seed: int = 0  # of that draw
    threads: int = 1  # of the unigram trainer
    phonemes: str = ""  # learn from phonemes of espeak-ng's language "am", "en-us" ...; "": letters

    def __post_init__(self):
        require(self.kind in ("bpe", "unigram"), self, "kind", "choose `bpe` or `unigram`.")
        require(self.vocab_size > 0, self, "vocab_size", "a few hundred pieces at least.")
        either = not (self.fitted and self.exact)
        require(either, self, "fitted", "a vocabulary is fitted or exact, not both.")
        covered = 0.9 <= self.character_coverage <= 1
        require(covered, self, "character_coverage", "must lie in 0.9 to 1.")
        size = self.input_sentence_size
        require(size >= 0, self, "input_sentence_size", "0 takes every line; else how many.")
        require(self.threads >= 1, self, "threads", "at least one.")
        named = re.fullmatch(r"([a-z]{2,3}(-[a-z0-9]+)*)?", self.phonemes)
        require(named, self, "phonemes", "a language by espeak-ng's name, such as `en-us`, or ``.")
        require_within(self, 1, 2**24, "vocab_size")
        require_within(self, 0, 1e12, "input_sentence_size")
        require_within(self, 0, 2**32 - 1, "seed")
        require_within(self, 1, 1024, "threads")


def train_tokenizer(
    source: Path | Iterable[str],
    path: Path,
    config: TokenizerConfig,
    *,
    column: str = "text",
    language: str | None = None,
    **layout,
) -> Path:
    """Train a SentencePiece model on `source` and save it at `path`; the same text, the same file.

    `source` is an iterable of lines (held in memory), or the path of a file (streamed): plain text,
    one line a sentence, or a table or JSON file whose `column` holds the text; `layout` goes to
    `kit.streams.open.rows`. Text is taken as normalised already, unless `language` is given.

    Raises KitError when there is no text, when `vocab_size` is too small for its characters, and,
    if `exact`, too large; DatasetError for a file that is missing or of another kind.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(source, (str, Path)):
            source = Path(source)
            if config.phonemes:
                raise KitError(
                    f"Phonemes are learned only from the texts of recordings, not from {source}: "
                    "leave the file out, or `phonemes` empty."
                )
            is_plain = source.suffix.lower() == ".txt" and not layout.get("delimiter")
            if language or not is_plain:
                folder = Path(path).parent
                extraction = extract_text(
                    source, folder, column=column, language=language, **layout
                )
                source = stack.enter_context(extraction).path
        else:
            source = [line for line in source if line.strip()]
            if config.phonemes:
                source = phonemize(source, config.phonemes)
        _train(source, Path(path), config)
    return Path(path)


def train_fitted_tokenizer(
    lines: list[str],
    path: Path,
    config: TokenizerConfig,
    text: Path | None = None,
    language: str | None = None,
) -> Path:
    """Train a tokenizer at `path` for `lines` (normalised), as `train_tokenizer` does.

    With `config.fitted`, of as many pieces as `vocabulary_advice` says that `lines` can teach,
    `config.vocab_size` at most. The pieces are learned from `lines`, or from the file `text`, of
    any size, normalised as `language`. Raises as `train_tokenizer` does.
    """
    with contextlib.ExitStack() as stack:
        source = lines
        if text:
            extraction = extract_text(text, Path(path).parent, language=language)
            source = stack.enter_context(extraction).path
        train_tokenizer(source, path, config)
        for _ in range(_MAX_FITTINGS if config.fitted else 0):
            tokenizer = Tokenizer(path)
            counts = collections.Counter(i for line in lines for i in tokenizer.encode(line))
            size = vocabulary_advice(tokenizer, counts)[0]
            if size >= tokenizer.piece_count:
                break
            train_tokenizer(source, path, dataclasses.replace(config, vocab_size=size))
    return path


def _train(source: Path | list[str], path: Path, config: TokenizerConfig) -> None:
    lines = _sample(source, config)
    model = io.BytesIO()
    try:
        spm.SentencePieceTrainer.train(
            sentence_iterator=lines,  # as fast as naming the file, which the model would remember
            model_writer=model,
            model_type=config.kind,
            vocab_size=config.vocab_size,
            hard_vocab_limit=config.exact,
            byte_fallback=config.byte_fallback,
            character_coverage=config.character_coverage,
            train_extremely_large_corpus=config.train_extremely_large_corpus,
            max_sentence_length=_LONGEST_LINE_BYTES,
            normalization_rule_name="identity",  # `kit.text.normalize` has the last word
            num_threads=config.threads,
            control_symbols=[f"<phonemes:{config.phonemes}>"] if config.phonemes else [],
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _explained(error, config) from error
    write_atomic(path, model.getvalue())


def _sample(source: Path | list[str], config: TokenizerConfig) -> Iterator[str]:
    """Every line, or `input_sentence_size` of them drawn without holding the others.

    SentencePiece's own draw differs from one process to the next, whatever its seed. This is
    selection sampling (Knuth, The Art of Computer Programming 2, 3.4.2, algorithm S).
    """
    size = config.input_sentence_size

    def lines() -> Iterable[str]:
        return source if isinstance(source, list) else plain_lines(source)

    left = sum(1 for _ in lines()) if size else 0
    if left <= size:
        yield from lines()
        return
    rng = random.Random(config.seed)
    for line in lines():
        if rng.random() * left < size:
            size -= 1
            yield line
        left -= 1


def _explained(error: RuntimeError, config: TokenizerConfig) -> Exception:
    """SentencePiece's message in terms of `config`; `error` itself if unknown."""
    message = str(error)
    size = config.vocab_size
    if "sentences_.empty()" in message:
        return KitError("There is no text to train a tokenizer on: every line was empty.")
    if small := re.search(r"required_chars\. \d+ vs (\d+)", message):
        marks = "the 256 bytes and three marks" if config.byte_fallback else "three marks"
        return KitError(
            f"vocab_size = {size} is too small: the characters of this text and {marks} need "
            f"at least {small[1]}. Set vocab_size to {small[1]} or more, or, to drop rare "
            f"characters, character_coverage (now {config.character_coverage}) to 0.9995."
        )
    if large := re.search(r"value <= (\d+)", message):
        return KitError(
            f"vocab_size = {size} is too large: this text yields {large[1]} pieces. Set "
            f"vocab_size to {large[1]} or less, or exact to false to accept fewer."
        )
    return error
