"""Every clip of a dataset measured, in parallel, once: what was measured is never measured again.

Results are appended to a cache file, a line a clip, keyed by path, size and date of change; a
check that was killed goes on from there, and a second one reads no audio. Large datasets are
measured by processes, which also keeps a decoder that crashes on a damaged file from taking the
notebook with it. Knows nothing of rules and texts.
"""

import collections
import contextlib
import dataclasses
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from kit.audio.clip import ClipMeasure, DatasetError, measure_clip
from kit.base.config import CONFIGS
from kit.base.files import make_folder, writing

FORMAT = 2  # of a cache line; lines of another format are measured again
STAMP = ("size", "mtime_ns")
NEEDED = {"rate_hz", "channels", "subtype", "seconds"}
FIGURES = {field.name for field in dataclasses.fields(ClipMeasure)}
WORDS = {"subtype", "digest"}
KINDS = (int, float, type(None))
CHUNK = 64  # clips between two appended pieces of the cache
# A clip takes a quarter millisecond, nearly half of it under Python's lock: two threads still gain,
# more do not. A process costs 0.2 s to start and a fifth more work in all (12,380 clips: 4.6 s of
# processor time against 3.6), which pays from three cores and about this many clips on.
PROCESSES_FROM_CORES = 3
PROCESSES_FROM_CLIPS = 4000


def measure_clips(
    paths: list[str],
    cache: Path,
    decode_s: float = 60.0,
    workers: int | None = None,
    processes: bool | None = None,
    progress: Callable = lambda *_: None,
) -> dict[str, ClipMeasure | str]:
    """The measure of every path, or in words why there is none.

    `workers` at a time (default: as many as this process has cores), as threads or `processes`
    (default: whichever is faster). `progress(done, total)` is called as they are finished.
    Raises DatasetError when the folder of a clip is gone, DiskError when `cache` cannot be written;
    what was measured is in `cache`.
    """
    absolute = {path: os.path.abspath(path) for path in paths}
    found = _known(cache, set(absolute.values()), decode_s)
    todo = [path for path in dict.fromkeys(absolute.values()) if path not in found]
    total = len(found) + len(todo)
    if found:
        progress(len(found), total)
    workers = workers or _cores()
    if processes is None:
        processes = workers >= PROCESSES_FROM_CORES and len(todo) >= PROCESSES_FROM_CLIPS
    if todo:
        # Around all of it: what a full disk did not take is written again when the file is closed.
        with (
            writing(cache),
            _appendable(cache) as file,
            _Pool(workers, decode_s, processes) as pool,
        ):
            for lines in pool.chunks(todo):
                found |= _take(lines, file, len(found), total)
                progress(len(found), total)
    return {path: found[place] for path, place in absolute.items()}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _take(lines: list[str], file, done: int, total: int) -> dict[str, ClipMeasure | str]:
    """Results of one chunk, added to the cache; DatasetError when their folder has gone."""
    rows = [json.loads(line) for line in lines]
    gone = next((r["path"] for r in rows if "problem" in r and _folder_is_gone(r["path"])), None)
    lasting = [
        line
        for line, row in zip(lines, rows)
        if row["size"] >= 0 and not (gone and "problem" in row)
    ]
    file.write("".join(f"{line}\n" for line in lasting).encode())
    file.flush()
    if gone:
        raise DatasetError(
            f"{Path(gone).parent} is gone, or nothing is in it any more: a drive unplugged, a "
            f"mount that ended? {done:,} of {total:,} clips had been measured and are kept. "
            "Connect it again and run again: the check goes on from there."
        )
    return {row["path"]: _value(row) for row in rows}


def _folder_is_gone(path: str) -> bool:
    """Whether a clip's folder is missing, unreachable or empty, as a mount point without mount."""
    try:
        with os.scandir(os.path.dirname(path) or ".") as entries:
            return next(entries, None) is None
    except OSError:
        return True


def _value(row: dict) -> ClipMeasure | str:
    return ClipMeasure(**row["measure"]) if "measure" in row else row["problem"]


def _known(cache: Path, paths: set[str], decode_s: float) -> dict[str, ClipMeasure | str]:
    """What the cache holds of `paths`, of files that have not changed since."""
    found = {}
    for row in _lines(cache):
        path = row["path"]
        if path in paths and _stamp(path) == (row["size"], row["mtime_ns"]):
            found[path] = _value(row)
    return {path: value for path, value in found.items() if not _to_decode(value, decode_s)}


def _to_decode(value: ClipMeasure | str, decode_s: float) -> bool:
    """Whether a clip was left undecoded under a lower limit than today's."""
    return isinstance(value, ClipMeasure) and value.peak is None and value.seconds <= decode_s


def _lines(cache: Path) -> Iterator[dict]:
    """The cache's lines that can be read; a kill may have torn one, and that is said."""
    if not Path(cache).is_file():
        return
    lost = 0
    with open(cache, "rb") as file:
        for line in file:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if _is_entry(row):
                yield row
            elif not isinstance(row, dict) or row.get("format") == FORMAT:
                lost += bool(line.strip())
    if lost:
        warnings.warn(
            f"{cache}: {lost} damaged lines are left out, their recordings are measured again.",
            stacklevel=4,
        )


def _is_entry(row) -> bool:
    """Whether `row` is a line as `measure_line` writes it."""
    if not isinstance(row, dict) or row.get("format") != FORMAT:
        return False
    file = isinstance(row.get("path"), str) and {type(row.get(n)) for n in STAMP} == {int}
    if "measure" not in row:
        return file and isinstance(row.get("problem"), str)
    figures = row["measure"]
    if not isinstance(figures, dict) or not NEEDED <= figures.keys() <= NEEDED | FIGURES:
        return False
    words = all(isinstance(figures.get(name, ""), str | None) for name in WORDS)
    numbers = [value for name, value in figures.items() if name not in WORDS]
    there = all(figures[name] is not None for name in NEEDED)
    return file and words and there and all(type(value) in KINDS for value in numbers)


def _appendable(cache: Path):
    """The cache opened for appending, on a line of its own behind a torn one."""
    make_folder(Path(cache).parent)
    file = open(cache, "ab+")  # noqa: SIM115  closed by the caller's `with`
    if file.tell():
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return file


def _stamp(path: str) -> tuple[int, int]:
    """(size in bytes, date of change in ns), or (-1, 0) where nothing is."""
    try:
        found = os.stat(path)
    except OSError:
        return -1, 0
    return found.st_size, found.st_mtime_ns


def measure_line(path: str, decode_s: float) -> str:
    """One line of the cache; `size` is -1 when the file could not be reached, and may be later."""
    row = _entry(path)  # before reading: what grows meanwhile is measured again
    try:
        row["measure"] = vars(measure_clip(path, decode_s))
    except DatasetError as error:
        row["problem"] = str(error).removeprefix(f"{path} ")
        if isinstance(error.__cause__, OSError):
            row["size"] = -1
    return json.dumps(row)


def _crashed(path: str) -> str:
    return json.dumps(_entry(path) | {"problem": "crashes the audio decoder"})


def _entry(path: str) -> dict:
    size, mtime_ns = _stamp(path)
    return {"format": FORMAT, "path": path, "size": size, "mtime_ns": mtime_ns}


class _Pool:
    """Chunks of paths to chunks of cache lines, by threads that measure or drive a process each."""

    def __init__(self, workers: int, decode_s: float, processes: bool):
        self.decode_s = decode_s
        self.workers = workers
        self.threads = ThreadPoolExecutor(workers)
        self.idle: queue.SimpleQueue = queue.SimpleQueue()
        for _ in range(workers if processes else 0):
            self.idle.put(_start_worker())
        self.processes = processes

    def __enter__(self) -> "_Pool":
        return self

    def __exit__(self, *_error) -> None:
        self.threads.shutdown(cancel_futures=True)
        while not self.idle.empty():
            _end(self.idle.get())

    def chunks(self, paths: list[str]) -> Iterator[list[str]]:
        """Measured chunks in their order; few wait at a time, however long the list."""
        parts = (paths[i : i + CHUNK] for i in range(0, len(paths), CHUNK))
        work = self._apart if self.processes else self._here
        running: collections.deque[Future] = collections.deque()
        for part in parts:
            running.append(self.threads.submit(work, part))
            if len(running) >= 4 * self.workers:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()

    def _here(self, paths: list[str]) -> list[str]:
        return [measure_line(path, self.decode_s) for path in paths]

    def _apart(self, paths: list[str]) -> list[str]:
        lines = self._by_process(paths)
        if lines is None:  # it died: find the clip that kills
            lines = [(self._by_process([path]) or [_crashed(path)])[0] for path in paths]
        return lines

    def _by_process(self, paths: list[str]) -> list[str] | None:
        """Cache lines of `paths` from an idle process; None when it died over them."""
        worker = self.idle.get()
        lines = _ask(worker, paths, self.decode_s)
        if lines is None:
            _end(worker)
            worker = _start_worker()
        self.idle.put(worker)
        return lines


def _start_worker() -> subprocess.Popen:
    """A process of our own making, not multiprocessing's: that one imports the caller's script."""
    return subprocess.Popen(
        [sys.executable, "-m", "kit.dataset.clip_stats"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        cwd=CONFIGS.parent,
    )


def _ask(worker: subprocess.Popen, paths: list[str], decode_s: float) -> list[str] | None:
    """Cache lines of `paths`, or None when the process died over them."""
    with contextlib.suppress(BrokenPipeError):  # then there will be no answer either
        worker.stdin.write(json.dumps({"paths": paths, "decode_s": decode_s}) + "\n")
        worker.stdin.flush()
    lines = list(itertools.islice(worker.stdout, len(paths)))
    return [line.rstrip("\n") for line in lines] if len(lines) == len(paths) else None


def _end(worker: subprocess.Popen) -> None:
    with contextlib.suppress(BrokenPipeError):  # it died with a job unread
        worker.stdin.close()
    worker.stdout.close()
    worker.wait()


def _serve() -> None:
    """Jobs on standard input, cache lines on standard output, until the caller is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the notebook decides when to stop
    if hasattr(signal, "SIGPIPE"):  # a caller that was killed is no error of ours
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for line in sys.stdin:
        job = json.loads(line)
        for path in job["paths"]:
            sys.stdout.write(measure_line(path, job["decode_s"]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
