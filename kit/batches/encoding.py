"""Build the code cache: clips encoded once to codes and references, in safetensors files.

The name of a file is a digest of its clips' bytes and of the codec. So new rows cost only their
own encoding, a changed text costs none, and runs share the folder without a lock: at worst two of
them make the same file, with the same content. The folder stays below `max_cache_gib`.
Codes made on a GPU may differ from the CPU's by rounding, and are not encoded again elsewhere.
"""

import contextlib
import hashlib
import math
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np

from kit.audio.clip import KEPT_SILENCE_S, load_speech, resampled
from kit.audio.codec import Codec, mels_and_codes
from kit.audio.spectrogram import Mel, reference_mel
from kit.base.errors import DamagedFileError, DatasetError
from kit.base.files import (
    digest,
    file_digest,
    make_folder,
    remove_litter,
    require_disk,
    write_atomic,
)
from kit.base.formatting import format_gib
from kit.base.tensor_file import arrays_digest, pack_tensors
from kit.batches.batching import chunks
from kit.batches.code_cache import INDEX, SHARD, as_bytes, from_bytes, open_arrays, touch
from kit.dataset.data_report import Finding, refuse
from kit.dataset.manifest import Utterance
from kit.settings import (
    MAX_CODE_POSITIONS,
    MAX_TEXT_POSITIONS,
    TEXT_EXTRA,
    DataConfig,
    GPTConfig,
    MelConfig,
)
from kit.text.tokenizer import Tokenizer

CLIPS_AT_ONCE = 32  # encoded together


class Clip(NamedTuple):
    """The place of a clip, and what the index stores of it."""

    shard: Path
    place: int  # its row in the shard
    codes: int  # how many
    code_check: int  # CRC-32 of its codes
    reference_check: int  # CRC-32 of its reference features


def cache_key(codec_path: Path, front_end: MelConfig, config: DataConfig) -> str:
    """Return a digest that changes with the codec's weights and the kind of references."""
    reference = ("loudest", config.reference_frames)
    return digest(file_digest(codec_path), front_end, reference, KEPT_SILENCE_S)


def clip_digest(path: str) -> str:
    """Return 32 hex digits that change when any byte of the recording does."""
    try:
        return file_digest(Path(path))[:32]
    except OSError as error:
        raise DatasetError(
            f"{path} cannot be read ({error.strerror}): put it back, or run "
            "notebook 01_data_prep from its top to check the recordings again."
        ) from error


def clip_names(
    rows: list[Utterance], digests: Sequence[str | None] | None = None, speed: int = 100
) -> list[str]:
    """Return the name of each recording in the cache: its digest, and its speed if not 100 percent.

    `digests` are those that are known, one a row. They must change when a recording does, and be of
    one kind from run to run; the others are `clip_digest`'s.
    """
    known = digests or [None] * len(rows)
    with ThreadPoolExecutor(2) as pool:  # hashing lets go of Python's lock
        names = list(pool.map(lambda row, name: name or clip_digest(row.audio), rows, known))
    return names if speed == 100 else [f"{name} {speed}" for name in names]


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
    speed: int = 100,
) -> Path:
    """Encode the `rows` missing in `folder`; return the index of `rows`.

    `key` is `cache_key`'s, `digests` are as `clip_names` takes them.
    """
    folder = Path(folder)
    names = clip_names(rows, digests, speed)
    clips = dict(zip(names, rows))
    encoded = encode_missing(clips, codec, front_end, folder, key, config, progress, speed)
    return write_index(rows, [encoded[name] for name in names], tokenizer, folder, config)


def encode_missing(
    clips: dict[str, Utterance],
    codec: Codec,
    front_end: Mel,
    folder: Path,
    key: str,
    config: DataConfig,
    progress: Callable = lambda *_: None,
    speed: int = 100,
    part: slice | None = None,
) -> dict[str, Clip]:
    """Encode what is missing in `folder` of `clips`, rows by their names, one file at a time.

    Returns the clips of `clips` that are there. At a `speed` of 110 percent a recording is faster
    and higher, as a tape would play it. `part` says which of the files are made, where several
    processes share them: slice(2, None, 16) is every 16th, from the third on. `progress(done,
    total)` counts recordings. Raises DatasetError for one that cannot be read, DiskError,
    DamagedFileError when `clips` alone need more than `max_cache_gib`.
    """
    folder = make_folder(folder)
    remove_litter(folder)
    encoded = find_clips(folder, key, clips)
    missing = [name for name in clips if name not in encoded]
    # Those who share the work agree on the files, however far each has come. Codes depend, in the
    # last bits of the input, on which clips are encoded together.
    groups = list(chunks(list(clips) if part else missing, config.shard))
    groups = [[name for name in group if name not in encoded] for group in groups]
    paths = [folder / f"codes-{key}-{digest(names)}.safetensors" for names in groups]
    used = {clip.shard for clip in encoded.values()} | set(paths)
    own = part or slice(None)
    left = sum(map(len, groups[own]))
    total = len(encoded) + left
    progress(total - left, total)
    # Of a clip: a reference in half floats, and 4 bytes a code of some 10 s.
    reference_bytes = 2 * front_end.config.n_mels * config.reference_frames
    require_disk(folder, left * (reference_bytes + round(40 * codec.frame_rate)))
    for path, names in zip(paths[own], groups[own]):
        if not names:
            continue
        if not path.is_file():  # another run may have made it meanwhile
            shard = encode([clips[name] for name in names], codec, front_end, config, speed)
            shard["clips"] = as_bytes(names)
            data = pack_tensors(shard)
            make_room(folder, config.max_cache_gib, len(data), used)
            write_atomic(path, data)
        encoded.update(shard_clips(path))
        left -= len(names)
        progress(total - left, total)
    return encoded


def find_clips(folder: Path, key: str, wanted: Container[str]) -> dict[str, Clip]:
    """Return the clips of `wanted` that are encoded; a damaged file is reported and removed."""
    encoded: dict[str, Clip] = {}
    for path in sorted(folder.glob(f"codes-{key}-*.safetensors")):
        clips = None
        try:
            clips = shard_clips(path)
        except DamagedFileError as error:
            print(f"{error} Its clips are encoded again.")
        if clips is None:  # here the error no longer maps the file
            path.unlink(missing_ok=True)
            continue
        encoded.update((name, clip) for name, clip in clips.items() if name in wanted)
    return encoded


def shard_clips(path: Path) -> dict[str, Clip]:
    """Return a file's clips by name. Raises DamagedFileError for a missing or damaged file."""
    table = open_arrays(path, SHARD)
    codes = np.split(table["codes"], table["code_counts"].cumsum()[:-1])
    rows = zip(from_bytes(table["clips"]), codes, table["references"])
    return {
        name: Clip(path, place, len(codes), crc32(codes.tobytes()), crc32(reference.tobytes()))
        for place, (name, codes, reference) in enumerate(rows)
    }


def encode(
    rows: list[Utterance], codec: Codec, front_end: Mel, config: DataConfig, speed: int = 100
) -> dict[str, np.ndarray]:
    """Return codes and references of `rows` as a shard's tensors, a few waveforms at a time."""
    codes: list = [None] * len(rows)
    references: list = [None] * len(rows)
    order = sorted(range(len(rows)), key=lambda i: rows[i].seconds)  # like lengths together
    for batch in chunks(order, CLIPS_AT_ONCE):
        waves = [load_speech(rows[i].audio, codec.input_sample_rate) for i in batch]
        waves = [resampled(wave, speed, 100) for wave in waves]
        for i, mel, clip_codes in zip(batch, *mels_and_codes(codec, front_end, waves)):
            codes[i] = clip_codes.cpu().numpy().astype(np.int32)
            references[i] = reference_mel(mel.cpu(), config.reference_frames).half().numpy()
    return {
        "codes": np.concatenate(codes),
        "code_counts": np.array([len(c) for c in codes]),
        "references": np.stack(references),
    }


def write_index(
    rows: list[Utterance], clips: list[Clip], tokenizer: Tokenizer, folder: Path, config: DataConfig
) -> Path:
    """Write an index of `rows`, with their text ids and clips, to a file named by its content."""
    texts = [np.array(tokenizer.encode(row.text), dtype=np.int32) for row in rows]
    names = [(row.id, row.speaker, row.split) for row in rows]
    columns = index_columns(names, texts, clips)
    index = folder / f"index-{arrays_digest(columns)[:12]}.safetensors"
    used = {index, *(clip.shard for clip in clips)}
    try:
        open_arrays(index, INDEX)
    except DamagedFileError:  # or missing
        data = pack_tensors(columns)
        make_room(folder, config.max_cache_gib, len(data), used)
        write_atomic(index, data)
    touch(used)
    return index


def index_columns(
    rows: list[tuple[str, str, str]], texts: list[np.ndarray], clips: list[Clip]
) -> dict[str, np.ndarray]:
    """Return the columns of an index of `rows` (id, speaker, split).

    `texts` are the ids of their texts, `clips` their clips, in the same order.
    """
    ids, speakers, splits = zip(*rows)
    encoded = [name.encode() for name in ids]
    columns = {
        "ids": np.frombuffer(b"".join(encoded), dtype=np.uint8),
        "id_offsets": offsets_of(encoded),
        "texts": narrow(np.concatenate(texts)),
        "text_offsets": offsets_of(texts),
        "codes": narrow(np.array([clip.codes for clip in clips])),
        "places": narrow(np.array([clip.place for clip in clips])),
        "code_checks": np.array([clip.code_check for clip in clips], np.uint32),
        "reference_checks": np.array([clip.reference_check for clip in clips], np.uint32),
    }
    shards = [clip.shard.name for clip in clips]
    for name, values in (("shard", shards), ("speaker", speakers), ("split", splits)):
        distinct, numbers = np.unique(np.array(values, dtype=object), return_inverse=True)
        columns[f"{name}_names"] = as_bytes(distinct.tolist())
        columns[f"{name}s"] = narrow(numbers)
    columns["tokens"] = narrow(np.array([len(text) for text in texts]) + columns["codes"])
    sha = hashlib.sha256()  # changes with any id, split or length, and with their order
    for name in ("ids", "id_offsets", "splits", "split_names", "tokens"):
        sha.update(columns[name].tobytes())
    columns["corpus"] = as_bytes(sha.hexdigest()[:8])
    return columns


def narrow(values: np.ndarray) -> np.ndarray:
    """Return `values`, none below 0, in the smallest unsigned type that holds them."""
    return values.astype(np.min_scalar_type(int(values.max(initial=0))), copy=False)


def offsets_of(parts: Sequence) -> np.ndarray:
    """Return where each of `parts` begins when they are concatenated, and where the last ends."""
    return narrow(np.cumsum([0, *map(len, parts)]))


def make_room(folder: Path, cap_gib: float, needed_bytes: int, used: set[Path]) -> None:
    """Remove the least recently used files, none of `used`, until `needed_bytes` more fit the cap.

    Only files of the cache count. Raises DamagedFileError when those in use alone exceed the cap.
    """
    files = []
    for path in [*folder.glob("codes-*.safetensors"), *folder.glob("index-*.safetensors")]:
        with contextlib.suppress(FileNotFoundError):  # another process made room
            stat = path.stat()
            files.append((stat.st_mtime, stat.st_size, path))
    cap_bytes = cap_gib * 2**30
    total_bytes = needed_bytes + sum(size_bytes for _, size_bytes, _ in files)
    for _, size_bytes, path in sorted(files):
        if total_bytes > cap_bytes and path not in used:
            path.unlink(missing_ok=True)
            total_bytes -= size_bytes
    if total_bytes > cap_bytes:
        raise DamagedFileError(
            f"The code cache in {folder} needs {format_gib(total_bytes)} and more for this "
            f"corpus alone, and may take {cap_gib} GiB: raise `max_cache_gib`, or lower "
            "`reference_frames`."
        )


def longest(model: GPTConfig) -> GPTConfig:
    """Return `model` with the most positions that `fit_positions` may give it."""
    return model.with_positions(MAX_TEXT_POSITIONS, MAX_CODE_POSITIONS)


def manifest_limits(model: GPTConfig, frame_rate: float, max_clip_s: float = 0.0) -> dict:
    """Return limits for a ManifestConfig that refuse only what `model` can have no positions for.

    Letters are counted as if they made the longest tokens. `max_clip_s` above 0 is a limit, too.
    """
    largest = longest(model)
    max_s = largest.max_code_s(frame_rate)
    most_characters = 16 * (largest.max_text - TEXT_EXTRA)  # 16: SentencePiece's limit
    return {"max_clip_s": min(max_clip_s or max_s, max_s), "most_characters": most_characters}


def fit_positions(
    model: GPTConfig, rows: Sequence[Utterance], tokenizer: Tokenizer, frame_rate: float
) -> tuple[GPTConfig, list[Finding]]:
    """Return `model` with positions for the longest of `rows`, and findings for rows too long.

    `frame_rate` in codes a second.
    """
    max_ids = longest(model).max_text - TEXT_EXTRA
    max_s = longest(model).max_code_s(frame_rate)
    ids = [len(tokenizer.encode(row.text)) for row in rows]
    codes = (math.ceil(row.speech_s * frame_rate) + 1 for row in rows)
    refused = []
    for row, count in zip(rows, ids):
        if count > max_ids:
            reason = f"text of {count} tokens, the model has positions for {max_ids}"
            refused.append(refuse(row, "long text", reason, row.seconds))
        elif row.speech_s > max_s:
            reason = f"{row.speech_s:.1f} s, the model has positions for {max_s:.1f} s"
            refused.append(refuse(row, "too long", reason, row.seconds))
    fitting = (count for count in ids if count <= max_ids)
    return model.with_positions(max(fitting, default=0), max(codes, default=0)), refused
