"""An index of as many rows as wanted, made as columns: no recording and no codec is behind it."""

import os
from pathlib import Path

import numpy as np

from kit.base.tensor_file import pack_tensors
from kit.batches.code_cache import as_bytes
from kit.batches.encoding import index_columns, shard_clips

CLIPS = 2000  # a shard
HELD_OUT = 100  # every so many-th row
SPEAKER_ROWS = 1000  # of one speaker
REFERENCE = (80, 86)  # mels, frames


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
    names = [
        (f"{n:010d}", f"speaker{n // SPEAKER_ROWS:06d}", "train" if n % HELD_OUT else "held_out")
        for n in range(rows)
    ]
    counts = rng.integers(16, 49, rows)
    texts = [rng.integers(0, text_vocab - 2, count, dtype=np.int32) for count in counts]
    placed = [clips[n % CLIPS]._replace(shard=shards[n // CLIPS]) for n in range(rows)]
    index = folder / f"index-{rows}.safetensors"
    index.write_bytes(pack_tensors(index_columns(names, texts, placed)))
    return index
