"""An index of as many rows as wanted, made as columns: no recording and no codec is behind it."""

import os
from pathlib import Path

import numpy as np

from kit.base.tensor_file import pack_tensors
from kit.batches.code_cache import as_bytes
from kit.batches.encoding import add_names, narrow, save_columns, shard_clips

CLIPS = 2000  # a shard
HELD_OUT = 100  # every so many-th row
SPEAKER_ROWS = 1000  # of one speaker
REFERENCE = (80, 86)  # mels, frames
ID_DIGITS = 10


def made_shards(folder: Path, count: int) -> list[Path]:
    """`count` shards of CLIPS clips: one file under many names, so that it takes the disk once."""
    rng = np.random.default_rng(0)
    code_counts = rng.integers(60, 460, CLIPS)  # 3 to 21 s; 12 s on average
    shard = {
        "codes": (rng.integers(-2, 3, code_counts.sum()).cumsum() % 1024).astype(np.int32),
        "code_counts": code_counts,
        "references": rng.standard_normal((CLIPS, *REFERENCE)).astype(np.float16),
        "clips": as_bytes([f"{number:032x}" for number in range(CLIPS)]),
    }
    paths = [folder / f"codes-made-{number:012d}.safetensors" for number in range(count)]
    paths[0].write_bytes(pack_tensors(shard))
    for path in paths[1:]:
        os.link(paths[0], path)
    return paths


def made_index(folder: Path, rows: int, text_vocab: int = 6000) -> Path:
    rng = np.random.default_rng(1)
    shards = made_shards(folder, -(-rows // CLIPS))
    clips = list(shard_clips(shards[0]).values())
    number = np.arange(rows)
    places = narrow(number % CLIPS)
    text_counts = rng.integers(16, 49, rows, dtype=np.uint8)
    text_offsets = np.concatenate([[0], text_counts.cumsum(dtype=np.int64)])
    columns = {
        "ids": digits(number),
        "id_offsets": narrow(np.arange(rows + 1) * ID_DIGITS),
        "texts": rng.integers(0, text_vocab - 2, text_offsets[-1], dtype=np.uint16),
        "text_offsets": narrow(text_offsets),
        "codes": np.array([clip.codes for clip in clips], np.uint16)[places],
        "shards": narrow(number // CLIPS),
        "places": places,
        "code_checks": np.array([clip.code_check for clip in clips], np.uint32)[places],
        "reference_checks": np.array([clip.reference_check for clip in clips], np.uint32)[places],
        "speakers": narrow(number // SPEAKER_ROWS),
        "splits": (number % HELD_OUT > 0).astype(np.uint8),
    }
    speakers = [f"speaker{i:06d}" for i in range(-(-rows // SPEAKER_ROWS))]
    names = [path.name for path in shards]
    index = folder / f"index-{rows}.safetensors"
    save_columns(add_names(columns, names, speakers, ["held_out", "train"]), index)
    return index


def digits(number: np.ndarray) -> np.ndarray:
    """Each of `number` in ID_DIGITS ASCII digits, one after the other."""
    found = np.empty((len(number), ID_DIGITS), dtype=np.uint8)
    for place in range(ID_DIGITS):
        found[:, place] = number // 10 ** (ID_DIGITS - 1 - place) % 10 + ord("0")
    return found.reshape(-1)
