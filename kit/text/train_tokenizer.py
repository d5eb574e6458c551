"""Train a SentencePiece model on text of any size, measure how well it fits a text, and grow one.

A grown tokenizer learns the pieces of another text and keeps every id that it has: a model's
embeddings go by ids, so new pieces come after the old ones, and START and STOP stay.
`tokenizer.base_spellings` gives the old ids that spelt each new piece, so that its embedding need
not start at random.
"""

import collections
import contextlib
import dataclasses
import io
import itertools
import json
import os
import random
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import sentencepiece as spm

from kit.base.errors import DatasetError, KitError, Note, SpeechError
from kit.base.files import digest, write_atomic
from kit.base.formatting import nearest, shorten
from kit.settings import TokenizerConfig
from kit.streams.formats import open_source
from kit.streams.stream import BadRecord, ByteFile
from kit.text.espeak import phonemize
from kit.text.normalize import normalize, unicode_script
from kit.text.tokenizer import START, STOP, BaseTokenizer, Tokenizer, load_tokenizer

_LONGEST_LINE_BYTES = 2**30  # SentencePiece silently drops lines that are too long
_MAX_FITTINGS = 3  # reductions of a vocabulary: with fewer merges the counts change
OFTEN = 100  # examples a piece should have (Gowda and May 2020, Findings of EMNLP)
_OFTEN_SHARE = 0.95  # of the learned pieces that should have them (same paper)
CONTROL = 3  # ModelProto.SentencePiece.Type; a piece without one is a normal one
MAX_UNKNOWN_RATE = 0.001  # of the pieces of a text, beyond which a tokenizer cannot spell it
SAVE_ROWS = 10_000  # rows of an extracted text between two saves


def train_tokenizer(source: Path | list[str], path: Path, config: TokenizerConfig) -> Path:
    """Train a SentencePiece model and save it at `path`; the same text, the same file.

    `source` is a list of normalised lines, or a plain text file of them, which is streamed. Raises
    KitError without text, for too small a `vocab_size` and, if `exact`, too large a one.
    """
    if config.phonemes:
        source = phonemize([line for line in source if line.strip()], config.phonemes)
    lines = _sample(source, config)
    first = next(lines, None)
    if first is None:
        raise KitError("There is no text to train a tokenizer on: every line was empty.")
    model = io.BytesIO()
    try:
        spm.SentencePieceTrainer.train(
            # As fast as naming the file, which the model would remember.
            sentence_iterator=itertools.chain([first], lines),
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
        raise KitError(
            f"No tokenizer with vocab_size = {config.vocab_size} can be trained on this text: "
            f"{shorten(error, 500)} (character_coverage is {config.character_coverage}; "
            "`exact: false` accepts fewer pieces than vocab_size.)"
        ) from error
    write_atomic(path, model.getvalue())
    return path


def train_fitted_tokenizer(
    lines: list[str],
    path: Path,
    config: TokenizerConfig,
    text: Path | None = None,
    language: str | None = None,
) -> Path:
    """Train a tokenizer at `path` for `lines` on them or the file `text`, normalised as `language`.

    With `config.fitted`, it gets as many pieces as `lines` can teach by `vocabulary_advice`.
    """
    if text and config.phonemes:
        raise KitError(
            f"Phonemes are learned only from the texts of recordings, not from {text}: leave the "
            "file out, or `phonemes` empty."
        )
    lines_or_file = contextlib.nullcontext(lines)
    if text:
        lines_or_file = extract_text(text, Path(path).parent, language, config.respell)
    with lines_or_file as source:
        train_tokenizer(source, path, config)
        for _ in range(_MAX_FITTINGS if config.fitted else 0):
            tokenizer = Tokenizer(path)
            size = vocabulary_advice(tokenizer, count_tokens(tokenizer, lines))[0]
            if size >= tokenizer.piece_count:
                break
            train_tokenizer(source, path, dataclasses.replace(config, vocab_size=size))
    return path


def _sample(source: Path | list[str], config: TokenizerConfig) -> Iterator[str]:
    """Every line, or `input_sentence_size` of them drawn without holding the others.

    SentencePiece's own draw differs from one process to the next, whatever its seed. This is
    selection sampling (Knuth, The Art of Computer Programming 2, 3.4.2, algorithm S).
    """

    def lines() -> Iterator[str]:
        return filter(str.strip, source if isinstance(source, list) else open_source(source))

    size = config.input_sentence_size
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


def tokenizer_report(tokenizer: BaseTokenizer, texts: list[str]) -> dict:
    """Measure the fit on held-out `texts`, normalised as the training text was.

    `byte_rate` and `unknown_rate` are shares of pieces, `round_trip` of texts that decode
    unchanged, `scripts` of letters, `covered` of characters with a piece of their own. Raises
    SpeechError when `texts` has no word.
    """
    texts = [tokenizer.spell(t) for t in texts]
    ids = [tokenizer.tokenize(t) for t in texts]
    pieces = sum(map(len, ids))
    characters = collections.Counter("".join(texts))
    words = sum(len(t.split()) for t in texts)
    if not words:
        raise SpeechError("There is no text to report on: give some held-out sentences.")
    kinds = collections.Counter(tokenizer.kind(i) for row in ids for i in row)
    uncovered = tokenizer.uncovered("".join(characters))
    seen = characters.total() - characters[" "]
    return {
        "vocab_size": tokenizer.vocab_size,
        "tokens_per_character": pieces / characters.total(),
        "tokens_per_word": pieces / words,
        "byte_rate": kinds["byte"] / pieces,
        "unknown_rate": kinds["unknown"] / pieces,
        "round_trip": sum(tokenizer.decode(i) == t for i, t in zip(ids, texts)) / len(texts),
        "scripts": script_shares(characters),
        "uncovered": uncovered,
        "covered": 1 - sum(characters[c] for c in uncovered) / seen,
    }


def script_shares(characters: collections.Counter) -> dict[str, float]:
    """Share of letters by script, largest first."""
    scripts = collections.Counter()
    for char, count in characters.items():
        if char.isalpha():
            scripts[(unicode_script(char) or "unnamed").capitalize()] += count
    return {script: count / scripts.total() for script, count in scripts.most_common()}


def count_tokens(tokenizer: BaseTokenizer, lines: list[str]) -> collections.Counter:
    """How often each piece id occurs in `lines` (normalised)."""
    return collections.Counter(i for line in lines for i in tokenizer.encode(line))


def vocabulary_advice(
    tokenizer: BaseTokenizer, counts: dict[int, int], base: BaseTokenizer | None = None
) -> tuple[int, str]:
    """A `vocab_size` to try next for a text with these `counts` of each id, and the reason.

    The rule of Gowda and May (2020): as many pieces as possible while 95 % have 100 examples. Bytes
    and single characters do not count, nor do parts of frequent pieces, which a BPE merges. A
    released tokenizer `base` grows only by what the text can teach: the reason says what is new.
    """
    if base is not None and not isinstance(base, Tokenizer):
        return tokenizer.vocab_size, base.describe_growth(tokenizer)
    size = tokenizer.piece_count
    pieces = {i: tokenizer.piece(i) for i in range(size) if not tokenizer.kind(i)}
    learned = {i: text for i, text in pieces.items() if len(text) > 1}
    frequent = [text for i, text in learned.items() if counts.get(i, 0) >= OFTEN]
    often = len(frequent)
    parts = substrings(frequent)
    rare = sum(counts.get(i, 0) < OFTEN and text not in parts for i, text in learned.items())
    if rare > (1 - _OFTEN_SHARE) * len(learned):
        return size - len(learned) + often, (
            f"Too large for this text: {rare} of {len(learned)} tokens longer than a character "
            f"occur fewer than {OFTEN} times, too few to learn how they sound."
        )
    return size, f"Fits: {often} of {len(learned)} longer tokens occur {OFTEN} times or more."


def substrings(texts: list[str]) -> set[str]:
    """Every stretch of characters of each text."""
    return {
        text[start:end]
        for text in texts
        for start in range(len(text))
        for end in range(start + 1, len(text) + 1)
    }


@contextlib.contextmanager
def extract_text(source: Path, folder: Path, language: str, respell: bool = True) -> Iterator[Path]:
    """Yield the text of `source` as a plain file in `folder`, deleted at the end whatever happens.

    After a killed process the next call resumes, or starts again if anything changed.
    """
    source = Path(source)
    identity = [str(source.resolve()), ByteFile(source).fingerprint, source.stat().st_mtime_ns]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".extracted.txt"
    mark = folder / ".extracted.json"
    try:
        _extract(source, language, respell, path, mark, digest(identity, language, respell))
        yield path
    finally:
        for left in (path, mark, *folder.glob(f".{mark.name}.*")):
            left.unlink(missing_ok=True)


def _extract(source: Path, language: str, respell: bool, path: Path, mark: Path, key: str) -> None:
    state = {"key": key, "rows": 0, "bytes": 0, "unreadable": 0, "first_unreadable": ""}
    try:
        saved = json.loads(mark.read_bytes())
    except (FileNotFoundError, ValueError):  # missing or damaged
        saved = None
    with open(path, "ab") as file:
        if isinstance(saved, dict) and saved.get("key") == key and saved["bytes"] <= file.tell():
            state = saved
        file.truncate(state["bytes"])  # what came after the last save is written again
        for row in itertools.islice(_texts(source), state["rows"], None):
            if isinstance(row, BadRecord):
                state["unreadable"] += 1
                state["first_unreadable"] = state["first_unreadable"] or str(row)
            elif line := normalize(row, language, respell):
                file.write(f"{line}\n".encode())
            state["rows"] += 1
            if state["rows"] % SAVE_ROWS == 0:
                file.flush()
                os.fsync(file.fileno())
                state["bytes"] = file.tell()
                write_atomic(mark, json.dumps(state, ensure_ascii=False))
    if state["unreadable"]:
        warnings.warn(
            f"{source}: {state['unreadable']:,} rows cannot be read and are left out. The first: "
            f"{state['first_unreadable']}",
            category=Note,
            stacklevel=4,
        )


def _texts(path: Path) -> Iterator[str | BadRecord]:
    """The text of every row, in order. Raises DatasetError when there is no column `text`."""
    for _, row in open_source(path).rows():
        if isinstance(row, str | BadRecord):
            yield row
        elif "text" in row:
            yield str(row["text"] or "")
        else:
            raise DatasetError(
                f"{path} has no column `text`.{nearest('text', row)} Rename the column with the "
                "text to `text`."
            )


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
    does. A released tokenizer uses neither `config` nor `text`.
    """
    if not isinstance(base, Tokenizer):
        return base.grow(lines, path)
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
    kind = "bpe" if is_bpe else "unigram"
    # `spelt` is in phonemes already.
    learning = dataclasses.replace(config, kind=kind, fitted=True, exact=False, phonemes="")
    with TemporaryDirectory(prefix="pieces-") as folder:  # a new tokenizer, for this text alone
        new_path = Path(folder) / "tokenizer.model"
        train_fitted_tokenizer(spelt, new_path, learning, text, language)
        new = Tokenizer(new_path)
    normal = [i for i in range(new.piece_count) if not new.kind(i)]
    pieces = [Piece(new.piece(i), new.model.get_score(i)) for i in normal]
    learned = [piece for piece in pieces if piece.text not in known]
    if is_bpe:  # a merge that was learned earlier is applied earlier
        lowest = min(scores)
        learned = [Piece(piece.text, lowest - rank) for rank, piece in enumerate(learned, 1)]
    kept = _used(old, learned, spelt)
    size = _bytes(2, _key(4, 0) + _varint(base.vocab_size + len(kept)))  # TrainerSpec.vocab_size
    write_atomic(path, b"".join([old, *(piece.entry() for piece in kept), size]))
    return load_tokenizer(path, base.language)


def _used(old: bytes, learned: list["Piece"], spelt: list[str]) -> list["Piece"]:
    """Those of `learned` that spell `spelt` often, their parts (it merges them), and characters."""
    proto = b"".join([old, *(piece.entry() for piece in learned)])
    model = spm.SentencePieceProcessor(model_proto=proto)
    counts = collections.Counter(p for line in spelt for p in model.encode(line, out_type=str))
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
