"""How soon an epoch begins and what memory it takes, by the number of rows.

`python tests/bench/bench_index.py --folder FOLDER` makes an index of each size, starts on it in a
process of its own, and prints a table. The folder is removed afterwards. For Linux: memory is read
from /proc.
"""

import argparse
import itertools
import os
import shutil
import time
from pathlib import Path

from rows import apart, resident_peak_mb

from kit.batches.code_cache import CodeCache
from kit.batches.code_stream import CodeStream
from kit.settings import DataConfig

SIZES = (10_000, 100_000, 1_000_000)
BATCHES = 300  # read after the first: memory must stay
MB = 1e6


def memory_mb() -> dict[str, float]:
    """Memory of this process by kind: Anonymous is its own; of Pss and Rss files are part, too."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    return {name.rstrip(":"): int(kib) * 1024 / MB for name, kib, _ in map(str.split, lines)}


def above(idle: dict[str, float]) -> dict[str, float]:
    return {name: size - idle[name] for name, size in memory_mb().items()}


def parts_only(parts: list, position: dict) -> tuple:
    return parts, position


def first_batch(index: Path, position: dict | None = None) -> tuple:
    """A stream over `index` from `position`, its batches after the first, and the seconds to it."""
    began_s = time.perf_counter()
    stream = CodeStream(CodeCache(index), "train", DataConfig(), parts_only, position)
    batches = iter(stream)
    next(batches)
    return stream, batches, time.perf_counter() - began_s


def make(folder: str, rows: int) -> Path:
    from made_index import made_index

    return made_index(Path(folder), rows)


def start(path: str) -> dict:
    """Seconds and megabytes of an epoch's start on an index; this process did nothing before."""
    index = Path(path)
    idle = memory_mb()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    stream, batches, seconds = first_batch(index)
    results = {"seconds": seconds, "first": above(idle), "peak": resident_peak_mb() - idle["Rss"]}
    for _ in itertools.islice(batches, BATCHES):
        pass
    results["later"] = above(idle)
    deep = dict(stream.identity, epoch=3, batch=stream.batches_an_epoch - 9)
    results["resumed_s"] = first_batch(index, deep)[-1]
    return results


def forget_files(folder: Path) -> None:
    """Have the system drop what it keeps of the files' bytes, as after a restart."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measured(folder: Path, rows: int) -> dict:
    """What `start` finds for an index of `rows` rows, with its files read before and not."""
    folder.mkdir(parents=True)
    try:
        index = Path(apart("bench_index.make", folder, rows))
        apart("bench_index.start", index)
        results = apart("bench_index.start", index)
        forget_files(folder)
        cold = apart("bench_index.start", index)
        return dict(results, cold_s=cold["seconds"], index_mb=index.stat().st_size / MB)
    finally:
        shutil.rmtree(folder)


def table_row(rows: int, results: dict) -> str:
    first, later = results["first"], results["later"]
    seconds = [f"{results[name]:.2f} s" for name in ("seconds", "cold_s", "resumed_s")]
    own = (first["Anonymous"], later["Anonymous"])
    memory = [f"{mb:.0f} MB" for mb in (*own, results["peak"], later["Rss"])]
    cells = [f"{rows:,}", f"{results['index_mb']:,.0f} MB", *seconds, *memory]
    return f"| {' | '.join(cells)} |"


HEAD = (
    "| rows | index | first batch | files not in memory yet | resumed deep in an epoch "
    "| own memory | own after 300 batches | resident, at most | resident after 300 batches |"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for the index; is removed")
    parser.add_argument("--rows", type=int, nargs="*", default=SIZES)
    options = parser.parse_args()
    print(HEAD, "|---:" * 9 + "|", sep="\n")
    for rows in options.rows:
        print(table_row(rows, measured(options.folder, rows)), flush=True)


if __name__ == "__main__":
    main()
