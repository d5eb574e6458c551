"""How soon an epoch begins and what memory it takes, by the number of rows.

`python tests/bench/bench_index.py --folder FOLDER` makes an index of each size, starts on it in a
process of its own, and prints a table. The folder is removed afterwards. Thirty million rows take
some 4 GB of disk, and 9 GB of memory while they are made. For Linux: memory is read from /proc.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from made_index import made_index

from kit.batches.batching import DataConfig
from kit.batches.code_cache import CodeCache
from kit.batches.code_stream import CodeStream

SIZES = (10_000, 1_000_000, 30_000_000)
BATCHES = 300  # read after the first: memory must stay
KINDS = ("Anonymous", "Pss", "Rss")  # of /proc/self/smaps_rollup
MB = 1e6


def memory_mb() -> dict[str, float]:
    """Memory of this process: its own, its share of files that others map, too, and with all."""
    results = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, size_kib, _ = line.split()
        if name.rstrip(":") in KINDS:
            results[name.rstrip(":")] = int(size_kib) * 1024 / MB
    return results


def above(idle: dict[str, float]) -> dict[str, float]:
    return {name: size - idle[name] for name, size in memory_mb().items()}


def peak_mb() -> float:
    """The most that was ever resident since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / MB
    raise ValueError("/proc/self/status names no VmHWM: is this Linux?")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def parts_only(parts: list, position: dict) -> tuple:
    return parts, position


def first_batch(index: Path, position: dict | None = None) -> tuple:
    """A stream over `index` from `position`, its batches after the first, and the seconds to it."""
    began_s = time.perf_counter()
    stream = CodeStream(CodeCache(index), "train", DataConfig(), parts_only, position)
    batches = iter(stream)
    next(batches)
    return stream, batches, time.perf_counter() - began_s


def start(index: Path) -> dict:
    """Seconds and megabytes of an epoch's start on `index`; this process did nothing before."""
    idle = memory_mb()
    forget_peak()
    stream, batches, seconds = first_batch(index)
    results = {"seconds": seconds, "first": above(idle), "peak": peak_mb() - idle["Rss"]}
    for _ in itertools.islice(batches, BATCHES):
        pass
    results["later"] = above(idle)
    group = stream.groups // 2
    deep = dict(stream.identity, epoch=3, group=group, batch=len(stream.plan(3, group)) - 9)
    results["resumed_s"] = first_batch(index, deep)[-1]
    return results


def forget_files(folder: Path) -> None:
    """Have the system drop what it keeps of the files' bytes, as after a restart."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_its_own_process(*arguments: str) -> str:
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def measured(folder: Path, rows: int) -> dict:
    """What `start` finds for an index of `rows` rows, with its files read before and not."""
    folder.mkdir(parents=True, exist_ok=False)
    try:
        index = in_its_own_process("--make", str(rows), "--folder", str(folder)).strip()
        size_mb = Path(index).stat().st_size / MB
        in_its_own_process("--start", index)
        results = json.loads(in_its_own_process("--start", index))
        forget_files(folder)
        cold = json.loads(in_its_own_process("--start", index))
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    return dict(results, cold_s=cold["seconds"], index_mb=size_mb)


def table_row(rows: int, results: dict) -> str:
    first, later = results["first"], results["later"]
    cells = [
        f"{rows:,}",
        f"{results['index_mb']:,.0f} MB",
        f"{results['seconds']:.2f} s",
        f"{results['cold_s']:.2f} s",
        f"{results['resumed_s']:.2f} s",
        f"{first['Anonymous']:.0f} MB",
        f"{later['Anonymous']:.0f} MB",
        f"{results['peak']:.0f} MB",
        f"{later['Rss']:.0f} MB",
    ]
    return f"| {' | '.join(cells)} |"


HEAD = (
    "| rows | index | first batch | files not in memory yet | resumed deep in an epoch "
    "| own memory | own after 300 batches | resident, at most | resident after 300 batches |"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="for the index and its shards; is removed")
    parser.add_argument("--rows", type=int, nargs="*", default=SIZES)
    parser.add_argument("--make", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        print(made_index(options.folder, options.make))
    elif options.start:
        print(json.dumps(start(options.start)))
    else:
        print(HEAD, "|---:" * 9 + "|", sep="\n")
        for rows in options.rows:
            print(table_row(rows, measured(options.folder, rows)), flush=True)


if __name__ == "__main__":
    main()
