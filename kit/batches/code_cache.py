"""The code cache: what training reads of each clip, computed once and kept in safetensors shards.

A shard holds codes and reference features of some clips, filed under the digests of the clips'
bytes and under the codec that made them. So new rows cost only their own encoding, a changed text
costs none, and any run that points at the folder shares it. An index, one file, says where each row
of a manifest lies, with its text ids. Both stay on disk and are read a row at a time, so a corpus
may be larger than memory. Every file carries its own checksums and is written whole or not at all;
a damaged one is made again. Processes need no lock: names follow from content,
and a claim only tells another builder which shard to begin with. Ranks of one preparation share the
shards out among them. The folder stays below
`max_cache_gib`; what lay unused longest goes first. Knows no batch and no model.

Shapes: L samples, M mels, T reference frames.
"""

import dataclasses
import hashlib
import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kit.audio.clip import KEPT_SILENCE_S, DatasetError, without_edges
from kit.audio.codec import Codec, mels_and_codes
from kit.audio.reference import reference_mel
from kit.audio.spectrogram import Mel, MelConfig
from kit.audio.waveform import load_wave
from kit.base.files import digest, file_digest, make_folder, require_disk, write_atomic
from kit.base.weights_file import arrays_digest
from kit.base.work_group import LONE, WorkGroup
from kit.batches.batching import DataConfig, chunks
from kit.batches.code_shards import Clip, Codes, References, Shards, shard_clips
from kit.batches.columns import Column, seal_columns
from kit.batches.index import LENGTHS, Index, IndexRow, index_columns, open_index
from kit.batches.shards import (
    CacheError,
    as_bytes,
    claimed,
    make_room,
    seal,
    split_by,
    sweep,
    touch,
    unseal,
)
from kit.dataset.ledger import Utterance
from kit.text.tokenizer import Tokenizer

# What may be removed to make room: nothing else that lies in the folder is the cache's.
OWN = ("codes-*.safetensors", "index-*.safetensors")
REHEARSAL = "rehearsal"  # the split of rows that no recording is of: a voice has spoken them
CLIPS_AT_ONCE = 32  # encoded together
SAMPLE_ROWS = 2**17  # of a larger split, figures that need each row's own numbers take so many


def cache_key(codec_path: Path, front_end: MelConfig, config: DataConfig) -> str:
    """Names what a shard is made with: changes with the codec's weights and the references."""
    return digest(file_digest(codec_path), front_end, config.reference_frames, KEPT_SILENCE_S)


def clip_digest(path: str) -> str:
    """32 hex digits that change when any byte of the recording does."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:32]
    except OSError as error:
        raise DatasetError(
            f"{path} cannot be read ({error.strerror}): put it back, or run "
            "notebook 01_data_prep from its top to check the recordings again."
        ) from error


def clip_digests(rows: list[Utterance], known: Sequence[str | None] | None = None) -> list[str]:
    """A digest of every recording: the one in `known`, in the order of `rows`, or `clip_digest`."""
    pairs = list(zip(rows, known or [None] * len(rows), strict=True))
    with ThreadPoolExecutor(2) as pool:  # hashing lets go of Python's lock
        return list(pool.map(lambda pair: pair[1] or clip_digest(pair[0].audio), pairs))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodingTools:
    """What a code cache is made with."""

    codec: Codec
    front_end: Mel  # of the references
    tokenizer: Tokenizer


def build_cache(
    rows: list[Utterance],
    codec: Codec,
    front_end: Mel,
    tokenizer: Tokenizer,
    folder: Path,
    key: str,
    config: DataConfig,
    progress: Callable = lambda *_: None,
    digests: Sequence[str | None] | None = None,
    say: Callable[[str], None] = print,
    group: WorkGroup = LONE,
) -> Path:
    """Encode what `folder` lacks of `rows`, one shard at a time; return the index of `rows`.

    `key` is `cache_key`'s. `digests` are those of the recordings, one a row, where they are known
    already: they must change when a recording does, and be of one kind from run to run.
    `progress(done, total)` counts recordings; `say` hears of each damaged shard. The processes of
    `group`, which have EncodingTools, share the shards. An interrupted build goes on with what is
    missing. Raises DatasetError for a recording that cannot be read, DiskError for a full disk,
    CacheError when `rows` alone need more than `max_cache_gib`, WorkError where another process
    failed.
    """
    folder = Path(folder)
    make_folder(folder)
    sweep(folder)
    tools = EncodingTools(codec=codec, front_end=front_end, tokenizer=tokenizer)
    clips = clip_digests(rows, digests)
    found = find_clips(folder, key, set(clips), say)
    missing = {clip: row for clip, row in zip(clips, rows) if clip not in found}
    before = len(found)
    total = before + len(missing)
    keep = shards_of(found.values())
    progress(before, total)
    require_disk(folder, len(missing) * bytes_per_clip(codec, front_end, config))
    shards = missing_shards(missing, folder, key, config.shard)
    jobs = []
    # Whole shards are shared out. The clips of one are encoded in batches of their own, and what is
    # encoded depends, in its last bits, on the batch; which clips a shard has does not depend on
    # which other shards are there already, nor on who made them.
    for share in group.in_turn(list(shards)):
        own = {path: shards[path] for path in share}
        jobs.append(EncodeJob(shards=own, config=config, used=keep | set(shards)))
    if missing:
        group.do(jobs, tools, lambda done: progress(before + int(done), total))
    for path in shards:
        found.update(shard_clips(path))
    texts = text_ids(rows, tools, folder, group)
    return write_index(rows, [found[clip] for clip in clips], texts, folder, config)


def bytes_per_clip(codec: Codec, front_end: Mel, config: DataConfig) -> int:
    """About what one clip takes in a shard: half floats, and 4 bytes a code of some 10 s."""
    n_mels = front_end.config.n_mels
    return 2 * n_mels * config.reference_frames + round(40 * codec.frame_rate)


def find_clips(
    folder: Path, key: str, wanted: set[str], say: Callable[[str], None]
) -> dict[str, Clip]:
    """Where those of `wanted` lie that are encoded.

    Every shard of `key` is checked; a damaged one is told and removed.
    """
    found: dict[str, Clip] = {}
    for path in sorted(folder.glob(f"codes-{key}-*.safetensors")):
        try:
            clips = shard_clips(path)
        except CacheError as error:
            say(f"{error} Its clips are encoded again.")
            path.unlink(missing_ok=True)
            continue
        found.update((name, clip) for name, clip in clips.items() if name in wanted)
    return found


def shards_of(clips: Iterable[Clip]) -> set[Path]:
    return {clip.shard for clip in clips}


def missing_shards(
    missing: dict[str, Utterance], folder: Path, key: str, size: int
) -> dict[Path, dict[str, Utterance]]:
    """The shards that the clips in `missing` make, `size` in each: a file and its clips."""
    found = {}
    for clips in chunks(list(missing), size):
        path = folder / f"codes-{key}-{digest(clips)}.safetensors"
        found[path] = {clip: missing[clip] for clip in clips}
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodeJob:
    """The shards that one process makes: for each file its clips, by their digests."""

    shards: dict[Path, dict[str, Utterance]]
    config: DataConfig
    used: set[Path]  # files that no room may be made of

    def run(self, tools: EncodingTools, tell: Callable[[float], None]) -> None:
        def make(path: Path) -> None:
            clips = self.shards[path]
            shard = encode(list(clips.values()), tools.codec, tools.front_end, self.config)
            shard["clips"] = as_bytes(list(clips))
            data = seal(shard)
            make_room(path.parent, OWN, self.config.max_cache_gib, len(data), self.used)
            write_atomic(path, data)

        for path in claimed(list(self.shards), make):
            tell(len(self.shards[path]))


def encode(
    rows: list[Utterance], codec: Codec, front_end: Mel, config: DataConfig
) -> dict[str, np.ndarray]:
    """Codes and references of `rows` as a shard's tensors; a few waveforms in memory at a time."""
    codes: list = [None] * len(rows)
    references: list = [None] * len(rows)
    order = sorted(range(len(rows)), key=lambda i: rows[i].seconds)  # like lengths together
    for at in chunks(order, CLIPS_AT_ONCE):
        waves = [load_speech(rows[i].audio, codec.heard_rate) for i in at]
        for i, mel, found in zip(at, *mels_and_codes(codec, front_end, waves)):
            codes[i] = found.numpy().astype(np.int32)
            references[i] = reference_mel(mel, config.reference_frames).half().numpy()
    return {
        "codes": np.concatenate(codes),
        "code_counts": np.array([len(c) for c in codes]),
        "references": np.stack(references),
    }


def load_speech(path: str, rate_hz: int) -> Tensor:
    """The recording (L,) at `path`, at `rate_hz`, without the silence around its speech.

    Half a second of it before every sentence, and a voice that is not sure yet begins with the code
    of silence and stays with it.
    """
    return torch.from_numpy(without_edges(load_wave(path, rate_hz).numpy(), rate_hz))


def text_ids(
    rows: list[Utterance], tools: EncodingTools, folder: Path, group: WorkGroup
) -> list[np.ndarray]:
    """The ids (N,) of each row's text."""
    name = secrets.token_hex(6)  # another run may make an index here at this moment
    parts = []
    jobs = []
    numbers = group.in_turn(range(len(rows)))
    for number, own in enumerate(numbers):
        # Named as what a kill leaves half-written, and swept up with that.
        part = folder / f".texts-{name}.safetensors.{number}" if number else None
        parts.append(part)
        jobs.append(TokenizeJob(texts=[rows[i].text for i in own], part=part))
    shares = [group.do(jobs, tools, lambda _: None)]
    for part in parts[1:]:
        table = unseal(part)
        shares.append(split_by(table["ids"], table["counts"]))
        part.unlink()
    found: list = [None] * len(rows)
    for own, ids in zip(numbers, shares, strict=True):
        for i, row in zip(own, ids):
            found[i] = row
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizeJob:
    """The texts that one process makes ids of, to be left in the file `part`; None: returned."""

    texts: list[str]
    part: Path | None

    def run(self, tools: EncodingTools, _tell) -> list[np.ndarray]:
        found = [np.array(tools.tokenizer.encode(text), dtype=np.int32) for text in self.texts]
        if self.part is not None:
            counts = np.array([len(ids) for ids in found], dtype=np.int64)
            ids = np.concatenate([np.zeros(0, dtype=np.int32), *found])
            write_atomic(self.part, seal({"ids": ids, "counts": counts}))
        return found


def write_index(
    rows: list[Utterance],
    clips: list[Clip],
    texts: list[np.ndarray],
    folder: Path,
    config: DataConfig,
) -> Path:
    """The text ids of `rows` and where their codes lie, as a file named by its content."""
    found = []
    for row, clip, text in zip(rows, clips, texts, strict=True):
        found.append(
            IndexRow(id=row.id, speaker=row.speaker, split=row.split, text=text, clip=clip)
        )
    columns = index_columns(found)
    shards = shards_of(clips)
    index = folder / f"index-{arrays_digest(columns)[:12]}.safetensors"
    if not is_whole(index):
        size_bytes = sum(column.nbytes for column in columns.values())
        make_room(folder, OWN, config.max_cache_gib, size_bytes, {index, *shards})
        seal_columns(columns, index)
    touch({index, *shards})
    return index


def is_whole(path: Path) -> bool:
    try:
        unseal(path)
    except CacheError:
        return False
    return True


class CodeCache:
    """The cached corpus: `rows[i]`, `texts[i]`, `codes[i]` and `references[i]`, read from disk.

    Nothing is held but what was read last, so a million rows take no more memory than a thousand.
    Raises CacheError for a missing or damaged file: of a large corpus, when the damage is read.
    """

    def __init__(self, index: Path):
        self.take(open_index(index))
        shards = self.index.shards
        opened = Shards(shards)
        self.codes = Codes(self.index.columns, opened)
        self.references = References(self.index.columns, opened)
        touch({Path(index), *shards})

    def take(self, index: Index) -> None:
        """Read rows and texts from `index`; `codes` and `references` are set beside them."""
        self.index = index
        self.rows = index.rows
        self.texts = index.texts
        self.spoken = {name: np.zeros(0, np.int64) for name in (*LENGTHS, "speakers")}

    def add_rehearsal(
        self, speakers: list[str], texts: list[np.ndarray], codes: list[np.ndarray]
    ) -> None:
        """Rows of the split "rehearsal", here in memory alone.

        They have no reference of their own: a recording of their speaker is one for them. Raises
        CacheError where there is none.
        """
        unknown = sorted(set(speakers) - set(self.index.speaker_names))
        if unknown:
            raise CacheError(
                f"Rows to rehearse are spoken as {', '.join(unknown)}, of whom the code cache "
                "holds no recording: run notebook 01_data_prep again to have them spoken anew."
            )
        number = {name: i for i, name in enumerate(self.index.speaker_names)}
        text_counts = np.array([len(text) for text in texts], dtype=np.int64)
        code_counts = np.array([len(row) for row in codes], dtype=np.int64)
        self.spoken = {
            "texts": text_counts,
            "codes": code_counts,
            "tokens": text_counts + code_counts,
            "speakers": np.array([number[name] for name in speakers], dtype=np.int64),
        }
        rows = []
        for i, speaker in enumerate(speakers):
            rows.append({"id": f"{REHEARSAL}-{i}", "speaker": speaker, "split": REHEARSAL})
        self.rows = Joined(self.rows, rows)
        self.texts = Joined(self.texts, texts)
        self.codes = Joined(self.codes, codes)

    def of_split(self, split: str) -> Column | range:
        """The rows of `split`, in their order; unread until they are asked for."""
        if split == REHEARSAL:
            return range(len(self.index), len(self.rows))
        return self.index.of_split(split)

    def some_of(self, split: str, most: int = SAMPLE_ROWS) -> np.ndarray:
        """All rows of `split`, or `most` of them at even distances."""
        members = self.of_split(split)
        count = min(len(members), most)
        return members[np.arange(count) * len(members) // max(count, 1)].astype(np.int64)

    def encoded_ids(self, rows: Sequence[int]) -> list[bytes]:
        """The ids of `rows` as UTF-8."""
        rows = np.asarray(rows, dtype=np.int64)
        found = self.index.ids.encoded(rows[rows < len(self.index)])
        spoken = rows[rows >= len(self.index)].tolist()
        return [*found, *(self.rows[i]["id"].encode() for i in spoken)]

    def let_go(self) -> None:
        """Count what was read of the index no longer as this process's memory."""
        self.index.columns.let_go()

    def of_speaker(self, speaker: int, split: str) -> Column:
        """The recordings of speaker number `speaker` in `split`."""
        return self.index.of_speaker(speaker, split)

    def speakers(self, rows: Sequence[int]) -> np.ndarray:
        """The number of the speaker of each of `rows`."""
        return self._numbers(rows, "speakers")

    def lengths(self, rows: Sequence[int], what: str = "tokens") -> np.ndarray:
        """How many text ids, codes, or both as tokens (one of LENGTHS) each of `rows` has."""
        return self._numbers(rows, what)

    def _numbers(self, rows: Sequence[int], what: str) -> np.ndarray:
        rows = np.asarray(rows, dtype=np.int64)
        spoken = rows >= len(self.index)
        found = np.empty(len(rows), dtype=np.int64)
        found[~spoken] = self.index.numbers(rows[~spoken], what)
        found[spoken] = self.spoken[what][rows[spoken] - len(self.index)]
        return found

    def length(self, i: int) -> int:
        return int(self.lengths([i])[0])

    def histogram(self, what: str, split: str | None = None) -> np.ndarray:
        """How many rows of `split` (None: of all) have 0, 1, 2... of `what`, one of LENGTHS."""
        found = self.index.histogram(what, split)
        if split not in (None, REHEARSAL):
            return found
        spoken = np.bincount(self.spoken[what], minlength=len(found))
        spoken[: len(found)] += found
        return spoken

    def total(self, what: str, split: str | None = None) -> int:
        """The sum of `what` over the rows of `split` (None: of all)."""
        found = self.histogram(what, split)
        return int(found @ np.arange(len(found)))

    def longest(self, what: str) -> int:
        """The most of `what` that a row has."""
        return int(np.flatnonzero(self.histogram(what))[-1])


class Joined(Sequence):
    """The items of `first`, and then those of `more`."""

    def __init__(self, first: Sequence, more: list):
        self.first = first
        self.more = more

    def __len__(self) -> int:
        return len(self.first) + len(self.more)

    def __getitem__(self, i: int):
        i = range(len(self))[i]
        if i < len(self.first):
            return self.first[i]
        return self.more[i - len(self.first)]


def reference_rows(cache: CodeCache, split: str = "train") -> dict[str, int]:
    """The row of each speaker that is to be the reference: an utterance of middling length."""
    return cache.index.reference_rows(split)


def speaker_references(cache: CodeCache, split: str = "train") -> dict[str, Tensor]:
    """One reference log-mel (M, T) per speaker, that of `reference_rows`."""
    found = {}
    for speaker, i in reference_rows(cache, split).items():
        found[speaker] = torch.from_numpy(cache.references[i]).float()
    return found


def longest_text(cache: CodeCache, split: str = "train") -> int:
    """How many text ids a voice learns to say in one go: all but the longest 5 % are shorter."""
    rows = cache.histogram("texts", split).cumsum()
    return int(np.searchsorted(rows, math.ceil(0.95 * (rows[-1] - 1)), side="right"))


def slowest_pace(cache: CodeCache, split: str = "train") -> float:
    """Codes a text id takes where a voice speaks slowly: in all but 1 % of its recordings fewer.

    Of a split of more than SAMPLE_ROWS, so many are asked.
    """
    rows = cache.some_of(split)
    return float(np.quantile(cache.lengths(rows, "codes") / cache.lengths(rows, "texts"), 0.99))
