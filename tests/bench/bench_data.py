"""Streaming measured beside its peers, in one run on one machine: `make bench-data`.

Contestants of a row take turns, so that a busy moment hits all; the best of the repeats counts, the
median is printed too. Memory is measured in a process of its own for each. Prints a table and
writes the rows (rows.py) into runs/bench/data.json.
"""

import argparse
import functools
import itertools
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import orjson
import psutil
from rows import apart, result, run_parts, take_turns

from kit.streams.formats import JsonLines, TextLines
from kit.streams.stream import StreamConfig

SHUFFLED = StreamConfig(shuffle=True)
ETHIOPIC = [chr(code) for code in range(0x1200, 0x1357)]


def sentences(count: int) -> Iterable[str]:
    """Lines of about 60 Ethiopic letters, the same each time."""
    rng = random.Random(0)
    words = ["".join(rng.choices(ETHIOPIC, k=rng.randint(2, 7))) for _ in range(5000)]
    pool = [" ".join(rng.choices(words, k=11)) for _ in range(20_000)]
    return itertools.islice(itertools.cycle(pool), count)


def made(path: Path, write: Callable) -> Path:
    """`path`, written by `write(file)` unless an earlier run left it."""
    if not path.exists():
        print(f"writing {path}", flush=True)
        part = path.with_suffix(".part")
        with open(part, "w", encoding="utf-8", newline="") as file:
            write(file)
        part.rename(path)
    return path


def text_file(folder: Path, lines: int) -> Path:
    write = lambda file: file.writelines(f"{line}\n" for line in sentences(lines))  # noqa: E731
    return made(folder / f"{lines}.txt", write)


def json_file(folder: Path, rows: int) -> Path:
    def write(file):
        for i, line in enumerate(sentences(rows)):
            each = {"id": f"clip_{i:07d}", "text": line, "speaker": f"voice{i % 7}"}
            file.write(json.dumps(each, ensure_ascii=False) + "\n")

    return made(folder / f"{rows}.jsonl", write)


# --- contestants: each returns how many records it went through ------------------------------


def count(items: Iterable) -> int:
    return sum(1 for _ in items)


def plain_lines(path: Path) -> int:
    with open(path, encoding="utf-8") as file:
        return count(file)


def orjson_lines(path: Path) -> int:
    with open(path, "rb") as file:
        return count(map(orjson.loads, file))


def hf_stream(path: Path, shuffle: bool = True):
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(path.parent / "hf")}
    import datasets

    datasets.disable_progress_bars()
    rows = datasets.load_dataset("text", data_files=str(path), split="train", streaming=True)
    return rows.shuffle(seed=0, buffer_size=10_000) if shuffle else rows


def rates(contestants: dict[str, Callable[[], int]], repeats: int) -> dict[str, float]:
    """Records a second of each, best of `repeats`; they take turns."""

    def rate(run: Callable[[], int]) -> float:
        started_s = time.perf_counter()
        return run() / (time.perf_counter() - started_s)

    turns = {name: functools.partial(rate, run) for name, run in contestants.items()}
    results = take_turns(turns, repeats, warm_up=False)
    for name, values in results.items():
        print(f"  {name}: best {max(values):,.0f}, median {statistics.median(values):,.0f} /s")
    return {name: max(values) for name, values in results.items()}


def growth_mb(kind: str, path: str, most: int) -> float:
    """How far memory grows between the 10,000th line and the last."""
    stream = TextLines(path, SHUFFLED) if kind == "kit" else hf_stream(Path(path))
    process, first, peak = psutil.Process(), 0, 0
    for seen, _ in enumerate(itertools.islice(stream, most), 1):
        if seen == 10_000:
            first = process.memory_info().rss
        if seen % 50_000 == 0:
            peak = max(peak, process.memory_info().rss)
    return max(0, peak - first) / 1e6


def resume_ms(kind: str, path: str, at: int) -> dict:
    """Milliseconds from the state alone to the first record; bytes of the state."""
    make = lambda: TextLines(path, SHUFFLED) if kind == "kit" else hf_stream(Path(path), False)  # noqa: E731
    stream = make()
    rows = iter(stream)
    for _ in range(at):
        next(rows)
    state, expected = stream.state_dict(), next(rows)
    started_s = time.perf_counter()
    stream = make()
    stream.load_state_dict(state)
    assert next(iter(stream)) == expected
    return {"ms": 1000 * (time.perf_counter() - started_s), "bytes": len(json.dumps(state))}


def against(name: str, kit: Callable, peer: str, read: Callable, repeats: int, unit="records/s"):
    own, other = rates({"kit": kit, peer: read}, repeats).values()
    return result(name, own, unit, peer, other, own / other)


def line_rows(folder: Path, options) -> list[dict]:
    path, name = text_file(folder, options.lines), f"{options.lines:,} lines, shuffled"
    kit, floor = lambda: count(TextLines(path, SHUFFLED)), functools.partial(plain_lines, path)
    return [against(name, kit, "for line in open(...)", floor, options.repeats)]


def datasets_rows(folder: Path, options) -> list[dict]:
    path, few = text_file(folder, options.lines), min(options.lines, options.peer_lines)
    rows = []
    for order, shuffle in (("shuffled", True), ("in the file's order", False)):
        config = StreamConfig(shuffle=shuffle)
        kit = lambda c=config: count(itertools.islice(TextLines(path, c), few))  # noqa: E731
        hf = lambda s=shuffle: count(itertools.islice(hf_stream(path, s), few))  # noqa: E731
        name = f"{few:,} lines, {order}"
        rows.append(against(name, kit, "datasets streaming", hf, options.repeats))
    return rows


def memory_rows(folder: Path, options) -> list[dict]:
    path, few = text_file(folder, options.lines), min(options.lines, options.peer_lines)
    kit = apart("bench_data.growth_mb", "kit", path, options.lines)
    hf = apart("bench_data.growth_mb", "hf", path, few)
    name = f"memory growth over {options.lines:,} lines"
    return [result(name, kit, "MB", f"datasets, {few:,} lines", hf, hf / max(kit, 0.1))]


def resume_rows(folder: Path, options) -> list[dict]:
    path, at = text_file(folder, options.lines), options.lines * 9 // 10
    few = min(at, options.peer_lines)
    kit = apart("bench_data.resume_ms", "kit", path, at)
    hf = apart("bench_data.resume_ms", "hf", path, few)
    first, peer = f"first record after resuming at line {at:,}", f"datasets, at line {few:,}"
    names = {"ms": (first, peer), "bytes": ("saved position", "datasets")}
    return [
        result(name, kit[unit], unit, peer, hf[unit], hf[unit] / kit[unit])
        for unit, (name, peer) in names.items()
    ]


def json_rows(folder: Path, options) -> list[dict]:
    path = json_file(folder, options.rows)
    rows = []
    for order, config in (("", StreamConfig()), (", shuffled", SHUFFLED)):
        kit = lambda config=config: count(JsonLines(path, config))  # noqa: E731
        read = functools.partial(orjson_lines, path)
        name = f"{options.rows:,} rows of JSONL{order}"
        rows.append(against(name, kit, "orjson.loads a line", read, options.repeats))
    return rows


PARTS = {"lines": line_rows, "datasets": datasets_rows, "memory": memory_rows}
PARTS |= {"resume": resume_rows, "json": json_rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=10_000_000, help="of the text file")
    parser.add_argument("--peer-lines", type=int, default=300_000, help="that slow peers read")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the JSON file")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=PARTS, nargs="*", default=list(PARTS))
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"))
    options = parser.parse_args()
    files = options.folder.resolve() / "files"
    files.mkdir(parents=True, exist_ok=True)
    parts = {name: functools.partial(PARTS[name], files, options) for name in options.only}
    run_parts(parts, options.folder / "data.json", "requirements.txt")


if __name__ == "__main__":
    main()
