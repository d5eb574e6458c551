"""Build the code cache: clips encoded once to codes and references, in safetensors shards.

The name of a shard is a digest of its clips' bytes and of the codec. So new rows cost only their
own encoding, a changed text costs none, and runs share the folder without a lock: at worst two of
them make the same shard, with the same content. The folder stays below `max_cache_gib`.
Codes made on a GPU may differ from the CPU's by rounding, and are not encoded again elsewhere.

"""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
from kit.batches.code_cache import index_columns
from kit.batches.code_shards import (
    Clip,
    MappedFile,
    as_bytes,
    make_room,
    save_columns,
    shard_clips,
    sweep,
    touch,
)
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
    of `group`, which have a codec and a front end, share the shards. Raises DatasetError for a
    recording that cannot be read, DiskError, DamagedFileError when `rows` alone need more than
    `max_cache_gib`, KitError if another process failed.
    """
    folder = Path(folder)
    make_folder(folder)
    sweep(folder)
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
        jobs.append(partial(encode_shards, own, config, keep | set(shards)))
    if missing:
        group.do(jobs, (codec, front_end), lambda done: progress(before + int(done), total))
    for path in shards:
        found.update(shard_clips(path))
    texts = [np.array(tokenizer.encode(row.text), dtype=np.int32) for row in rows]
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


def encode_shards(
    shards: dict[Path, dict[str, Utterance]],
    config: DataConfig,
    used: set[Path],
    tools: tuple[Codec, Mel],
    advance: Callable[[float], None],
) -> None:
    """Make `shards`, {file: its clips by their digests}; no room is made of the files `used`."""
    for path, clips in shards.items():
        if not path.is_file():  # another run may have made it meanwhile
            shard = encode(list(clips.values()), *tools, config)
            shard["clips"] = as_bytes(list(clips))
            data = pack_tensors(shard)
            make_room(path.parent, OWN, config.max_cache_gib, len(data), used)
            write_atomic(path, data)
        advance(len(clips))


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


def write_index(
    rows: list[Utterance],
    clips: list[Clip],
    texts: list[np.ndarray],
    folder: Path,
    config: DataConfig,
) -> Path:
    """The text ids of `rows` and where their codes lie, as a file named by its content."""
    ids, speakers, splits = zip(*((row.id, row.speaker, row.split) for row in rows))
    columns = index_columns(ids, speakers, splits, texts, clips)
    shards = {clip.shard for clip in clips}
    index = folder / f"index-{arrays_digest(columns)[:12]}.safetensors"
    try:
        MappedFile(index, verify=True)
    except DamagedFileError:  # or missing
        size_bytes = sum(column.nbytes for column in columns.values())
        make_room(folder, OWN, config.max_cache_gib, size_bytes, {index, *shards})
        save_columns(columns, index)
    touch({index, *shards})
    return index
