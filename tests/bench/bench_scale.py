"""The parts of a large training that a machine without a GPU can measure: `make bench-scale`.

Encoding recordings, the hours behind each second of work; a row of the index, on disk and in the
memory of the process that writes it; rows that one process reads, packed; a checkpoint's checksum.
Each on one thread: what a process works counts, so that others on the machine do not; the best of
a few rounds. Leaves runs/bench/scale.json. What it found stands in kit/tuning/scale_parts.py, with
which `python -m kit scale` plans.
"""

import argparse
import hashlib
import itertools
import os
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rows import record, result, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import made_index

from kit.audio.codec_kinds import codec_config, make_codec
from kit.audio.front_ends import front_end_config, make_front_end
from kit.base.config import build, load_preset
from kit.base.files import file_digest
from kit.base.wav import encode_wav
from kit.batches.batching import DataConfig
from kit.batches.code_cache import CodeCache
from kit.batches.code_shards import Clip
from kit.batches.code_stream import CodeStream
from kit.batches.encoding import encode
from kit.batches.index import IndexRow, index_columns
from kit.dataset.ledger import Utterance
from kit.model.sequence import GPTConfig, collate

CLIP_S = 5.0
CLIPS = 64
INDEX_ROWS = 1_000_000
HELD_ROWS = 50_000  # of the process that writes an index
BATCHES = 20
HASHED_BYTES = 2**30
FRAMES = 516  # of a reference: 6 s


def worked_s(work: Callable[[], object], rounds: int) -> float:
    """Seconds this process works on `work()`, the fewest of `rounds`."""
    took = []
    for _ in range(rounds):
        began_s = time.process_time()
        work()
        took.append(time.process_time() - began_s)
    return min(took)


def encoded(preset: dict, folder: Path, rounds: int) -> float:
    """Seconds of speech encoded in a second: read, cut, log-mels, codes, reference."""
    codec = make_codec(codec_config(preset["codec"])).eval()
    front_end = make_front_end(front_end_config(preset["front_end"]))
    rng = np.random.default_rng(0)
    samples = round(CLIP_S * codec.heard_rate)
    rows = []
    for number in range(CLIPS):
        path = folder / f"{number}.wav"
        path.write_bytes(encode_wav(0.3 * rng.standard_normal(samples), codec.heard_rate))
        rows.append(utterance(number, str(path)))
    config = build(DataConfig, preset["data"])
    with torch.inference_mode():
        took_s = worked_s(lambda: encode(rows, codec, front_end, config), rounds)
    return CLIPS * CLIP_S / took_s


def utterance(number: int, path: str) -> Utterance:
    words = f"a sentence of some eighty letters, as five seconds of speech have, number {number:08}"
    speaker = f"speaker{number // 1000:06}"
    return Utterance(
        id=f"{number:010}",
        audio=path,
        text=words,
        speaker=speaker,
        split="train",
        line=number + 1,
        seconds=CLIP_S,
        file="metadata.csv",
    )


def held_bytes() -> float:
    """Memory that a row takes in the process that writes an index: manifest, clip, text ids."""
    tracemalloc.start()
    shard = Path("codes-0.safetensors")
    rows = [utterance(number, f"recordings/{number:010}.wav") for number in range(HELD_ROWS)]
    digests = [hashlib.sha256(row.id.encode()).hexdigest()[:32] for row in rows]
    clips = {}
    for number, name in enumerate(digests):
        clips[name] = Clip(
            shard=shard,
            place=number % 2000,
            codes=215,
            code_check=2**31 + number,
            reference_check=2**30 + number,
        )
    found = []
    for row, name in zip(rows, digests):
        text = np.arange(18, dtype=np.int32)
        found.append(
            IndexRow(id=row.id, speaker=row.speaker, split=row.split, text=text, clip=clips[name])
        )
    index_columns(found)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak_bytes / HELD_ROWS


def read(folder: Path, rounds: int) -> tuple[float, float]:
    """Bytes of the index a row, and rows a second that one process reads and packs."""
    made_index.REFERENCE = (80, FRAMES)
    path = made_index.made_index(folder, INDEX_ROWS)
    model = GPTConfig(text_vocab=6002, code_vocab=1602, max_text=404, max_code=608)
    config = DataConfig(effective_batch=32, micro_batch=32)
    batches = iter(CodeStream(CodeCache(path), "train", config, partial(collate, model)))
    next(batches)
    took_s = worked_s(lambda: list(itertools.islice(batches, BATCHES)), rounds)
    return path.stat().st_size / INDEX_ROWS, BATCHES * config.effective_batch / took_s


def hashed(folder: Path, rounds: int) -> float:
    """Bytes a second of the checksum of a file that the system still has in memory."""
    path = folder / "hashed"
    path.write_bytes(np.random.default_rng(0).bytes(HASHED_BYTES))
    return HASHED_BYTES / worked_s(lambda: file_digest(path), rounds)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--rounds", type=int, default=5)
    words.add_argument("--preset", default="80gb", help="whose codec encodes")
    options = words.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        speech_s = encoded(load_preset(options.preset), folder, options.rounds)
        hash_rate = hashed(folder, options.rounds)
        index_bytes, rows_a_s = read(folder, options.rounds)
    found = {
        f"speech encoded, codec of {options.preset}": (speech_s, "s a second"),
        "checksum of a checkpoint": (hash_rate / 1e9, "GB a second"),
        f"index of {INDEX_ROWS:,} rows": (index_bytes, "bytes a row"),
        "memory while an index is written": (held_bytes(), "bytes a row"),
        "rows read and packed, references of 6 s": (rows_a_s, "a second"),
    }
    rows = [result(name, value, unit, "", None, None) for name, (value, unit) in found.items()]
    runs = Path(os.environ.get("KIT_RUNS") or Path(__file__).parent.parent.parent / "runs")
    record(rows, "scale", runs / "bench" / "scale.json")
    table(rows)


if __name__ == "__main__":
    main()
