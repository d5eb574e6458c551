"""Build the code cache: clips encoded once to codes and references, in safetensors shards.

The name of a shard is a digest of its clips' bytes and of the codec. So new rows cost only their
own encoding, a changed text costs none, all runs share the folder, and processes need no lock: a
claim only shows other builders which shard is in progress. The folder stays below `max_cache_gib`.
Codes made on a GPU may differ from the CPU's by rounding, and are not encoded again elsewhere.

Shapes: N text ids.
"""

import dataclasses
import hashlib
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from kit.audio.clip import KEPT_SILENCE_S, load_speech
from kit.audio.codec import Codec, mels_and_codes
from kit.audio.spectrogram import Mel, MelConfig, reference_mel
from kit.base.errors import DamagedFileError, DatasetError
from kit.base.files import digest, file_digest, make_folder, require_disk, write_atomic
from kit.base.processes import SINGLE_PROCESS, WorkGroup
from kit.base.tensor_file import arrays_digest, pack_tensors
from kit.batches.batching import DataConfig, chunks
from kit.batches.code_shards import Clip, claimed, make_room, shard_clips, sweep, touch
from kit.batches.columns import as_bytes, load_tensors, save_columns, split_by
from kit.batches.index import IndexRow, index_columns
from kit.dataset.manifest import Utterance
from kit.text.tokenizer import Tokenizer

# Files of the cache, which may be removed to free space; other files in the folder are not.
OWN = ("codes-*.safetensors", "index-*.safetensors")
CLIPS_AT_ONCE = 32  # encoded together


def cache_key(codec_path: Path, front_end: MelConfig, config: DataConfig) -> str:
    """Return a digest that changes with the codec's weights and the kind of references."""
    reference = ("loudest", config.reference_frames)
    return digest(file_digest(codec_path), front_end, reference, KEPT_SILENCE_S)


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
    front_end: Mel  # of the references, on the codec's device
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
    group: WorkGroup = SINGLE_PROCESS,
) -> Path:
    """Encode the `rows` missing in `folder`, one shard at a time; return the index of `rows`.

    `key` is `cache_key`'s. `digests` are those of the recordings, one a row, where they are known:
    they must change when a recording does, and be of one kind from run to run.
    `progress(done, total)` counts recordings; `say` is called for each damaged shard. The processes
    of `group`, which have EncodingTools, share the shards. Raises DatasetError for a recording that
    cannot be read, DiskError, DamagedFileError when `rows` alone need more than `max_cache_gib`,
    KitError if another process failed.
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
    keep = {clip.shard for clip in found.values()}
    progress(before, total)
    # Of a clip: a reference in half floats, and 4 bytes a code of some 10 s.
    reference_bytes = 2 * front_end.config.n_mels * config.reference_frames
    require_disk(folder, len(missing) * (reference_bytes + round(40 * codec.frame_rate)))
    shards = {}  # each file to make, and its clips
    for names in chunks(list(missing), config.shard):
        path = folder / f"codes-{key}-{digest(names)}.safetensors"
        shards[path] = {clip: missing[clip] for clip in names}
    jobs = []
    # Processes divide whole shards: codes depend, in the last bits of the input, on the batch, so a
    # shard's content depends neither on the other shards nor on the process that made it.
    for share in group.split_evenly(list(shards)):
        own = {path: shards[path] for path in share}
        jobs.append(EncodeJob(shards=own, config=config, used=keep | set(shards)))
    if missing:
        group.do(jobs, tools, lambda done: progress(before + int(done), total))
    for path in shards:
        found.update(shard_clips(path))
    texts = text_ids(rows, tools, folder, group)
    return write_index(rows, [found[clip] for clip in clips], texts, folder, config)


def find_clips(
    folder: Path, key: str, wanted: set[str], say: Callable[[str], None]
) -> dict[str, Clip]:
    """Return the clips of `wanted` that are encoded; a damaged shard is reported and removed."""
    found: dict[str, Clip] = {}
    for path in sorted(folder.glob(f"codes-{key}-*.safetensors")):
        try:
            clips = shard_clips(path)
        except DamagedFileError as error:
            say(f"{error} Its clips are encoded again.")
            path.unlink(missing_ok=True)
            continue
        found.update((name, clip) for name, clip in clips.items() if name in wanted)
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodeJob:
    """The shards that one process makes: for each file its clips, by their digests."""

    shards: dict[Path, dict[str, Utterance]]
    config: DataConfig
    used: set[Path]  # files that no room may be made of

    def run(self, tools: EncodingTools, advance: Callable[[float], None]) -> None:
        def make(path: Path) -> None:
            clips = self.shards[path]
            shard = encode(list(clips.values()), tools.codec, tools.front_end, self.config)
            shard["clips"] = as_bytes(list(clips))
            data = pack_tensors(shard)
            make_room(path.parent, OWN, self.config.max_cache_gib, len(data), self.used)
            write_atomic(path, data)

        for path in claimed(list(self.shards), make):
            advance(len(self.shards[path]))


def encode(
    rows: list[Utterance], codec: Codec, front_end: Mel, config: DataConfig
) -> dict[str, np.ndarray]:
    """Codes and references of `rows` as a shard's tensors; a few waveforms in memory at a time."""
    codes: list = [None] * len(rows)
    references: list = [None] * len(rows)
    order = sorted(range(len(rows)), key=lambda i: rows[i].seconds)  # like lengths together
    for at in chunks(order, CLIPS_AT_ONCE):
        waves = [load_speech(rows[i].audio, codec.input_sample_rate) for i in at]
        for i, mel, found in zip(at, *mels_and_codes(codec, front_end, waves)):
            codes[i] = found.cpu().numpy().astype(np.int32)
            references[i] = reference_mel(mel.cpu(), config.reference_frames).half().numpy()
    return {
        "codes": np.concatenate(codes),
        "code_counts": np.array([len(c) for c in codes]),
        "references": np.stack(references),
    }


def text_ids(
    rows: list[Utterance], tools: EncodingTools, folder: Path, group: WorkGroup
) -> list[np.ndarray]:
    """The ids (N,) of each row's text."""
    name = secrets.token_hex(6)  # another run may make an index here at this moment
    parts = []
    jobs = []
    numbers = group.split_evenly(range(len(rows)))
    for number, own in enumerate(numbers):
        # Named as what a kill leaves half-written, and swept up with that.
        part = folder / f".texts-{name}.safetensors.{number}" if number else None
        parts.append(part)
        jobs.append(TokenizeJob(texts=[rows[i].text for i in own], part=part))
    shares = [group.do(jobs, tools, lambda _: None)]
    for part in parts[1:]:
        table = load_tensors(part)
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
        encode = tools.tokenizer.encode
        ids_of_texts = [np.array(encode(text), dtype=np.int32) for text in self.texts]
        if self.part is not None:
            counts = np.array([len(ids) for ids in ids_of_texts], dtype=np.int64)
            ids = np.concatenate([np.zeros(0, dtype=np.int32), *ids_of_texts])
            write_atomic(self.part, pack_tensors({"ids": ids, "counts": counts}))
        return ids_of_texts


def write_index(
    rows: list[Utterance],
    clips: list[Clip],
    texts: list[np.ndarray],
    folder: Path,
    config: DataConfig,
) -> Path:
    """The text ids of `rows` and where their codes lie, as a file named by its content."""
    columns = index_columns(
        [
            IndexRow(id=row.id, speaker=row.speaker, split=row.split, text=text, clip=clip)
            for row, clip, text in zip(rows, clips, texts, strict=True)
        ]
    )
    shards = {clip.shard for clip in clips}
    index = folder / f"index-{arrays_digest(columns)[:12]}.safetensors"
    try:
        load_tensors(index)
    except DamagedFileError:  # or missing
        size_bytes = sum(column.nbytes for column in columns.values())
        make_room(folder, OWN, config.max_cache_gib, size_bytes, {index, *shards})
        save_columns(columns, index)
    touch({index, *shards})
    return index
