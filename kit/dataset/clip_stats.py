"""Every clip of a dataset measured, in parallel, once: what was measured is never measured again.

Results are appended to a cache file, a line a clip, keyed by path, size and date of change; a
check that was killed goes on from there, and a second one reads no audio. Large datasets are
measured by processes, which also keeps a decoder that crashes on a damaged file from taking the
notebook with it. They are plain subprocesses: a ProcessPoolExecutor imports the caller's script
anew in each, and a single one that dies breaks it for all. Where torchrun has started several
ranks, each measures a share of the clips in this way. Knows nothing of rules and texts.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kit.audio.clip import ClipMeasure, measure_clip
from kit.base.config import CONFIGS
from kit.base.errors import DatasetError
from kit.base.files import append_lines, disk_errors, make_folder, write_atomic
from kit.base.notes import Note
from kit.base.work_group import SINGLE_PROCESS, WorkGroup

FORMAT = 2  # of a cache line; lines of another format are measured again
FIELDS = dataclasses.fields(ClipMeasure)
CHUNK = 64  # clips between two appended pieces of the cache
READY = "ready\n"  # the first line of a process that measures
# A clip takes a quarter millisecond, nearly half of it under Python's lock: where two cores are two
# threads of one, two threads take twice as long as one does (4,000 clips: 2.3 s for 1.2). Two
# processes take 1.05 s, of which 0.25 s to start: they pay from about this many clips on.
# For fewer there are threads, which gain where a drive keeps one waiting.
PROCESSES_FROM_CORES = 2
PROCESSES_FROM_CLIPS = 1000


def measure_clips(
    paths: list[str],
    cache: Path,
    decode_s: float = 60.0,
    workers: int | None = None,
    processes: bool | None = None,
    progress: Callable = lambda *_: None,
    group: WorkGroup = SINGLE_PROCESS,
) -> dict[str, ClipMeasure | str]:
    """The measure of every path, or in words why there is none.

    `workers` at a time (default: as many as this process has cores), as threads or `processes`
    (default: whichever is faster), in each process of `group`. `progress(done, total)` is called as
    they are finished. Raises DatasetError when the folder of a clip is gone, DiskError when `cache`
    cannot be written, KitError where another process of the group failed; what was measured is in
    `cache`, or in parts beside it.
    """
    cache = Path(cache)
    absolute = {path: os.path.abspath(path) for path in paths}
    order = list(dict.fromkeys(absolute.values()))
    if _parts(cache):  # of a check that several processes did, and that was killed
        _tidy(cache, order)
    found = _known(cache, set(order), decode_s)
    todo = [path for path in order if path not in found]
    total = len(order)
    before = len(found)
    if found:
        progress(before, total)
    if todo:
        make_folder(cache.parent)
        jobs = []
        for number, share in enumerate(group.split_by_key(todo, str)):
            job = MeasureJob(
                paths=share,
                cache=_part(cache, number) if number else cache,
                decode_s=decode_s,
                workers=workers,
                processes=processes,
                here=group.here,
                before=before,
                total=total,
            )
            jobs.append(job)
        found.update(group.do(jobs, None, lambda done: progress(before + int(done), total)))
        _tidy(cache, order)
    if len(found) < total:
        left = set(order) - found.keys()
        found.update(_known(cache, left, decode_s))
        for path in left - found.keys():  # could not be reached, which is not noted: why, in words
            found[path] = _value(json.loads(measure_line(path, decode_s)))
    return {path: found[place] for path, place in absolute.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasureJob:
    """The clips that one process measures. A clip is measured by itself: any share will do."""

    paths: list[str]
    cache: Path  # lines are appended to it
    decode_s: float
    workers: int | None
    processes: bool | None
    here: int  # processes like this one that share the machine's cores
    before: int  # of `total` clips, measured already when the work was given out
    total: int

    def run(self, _tools, tell: Callable[[float], None]) -> dict[str, ClipMeasure | str]:
        workers = self.workers or max(1, _cores() // self.here)
        apart = self.processes
        if apart is None:
            apart = workers >= PROCESSES_FROM_CORES and len(self.paths) >= PROCESSES_FROM_CLIPS
        measured = by_processes if apart else by_threads
        found = {}
        # Around all of it: what a full disk did not take is written again when the file is closed.
        with (
            disk_errors(self.cache),
            append_lines(self.cache) as file,
            contextlib.closing(measured(self.paths, workers, self.decode_s)) as chunks,
        ):
            for lines in chunks:
                found.update(_take(lines, file, self.before + len(found), self.total))
                tell(len(lines))
        return found


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _take(lines: list[str], file, done: int, total: int) -> dict[str, ClipMeasure | str]:
    """Results of one chunk, added to the cache; DatasetError when their folder has gone."""
    rows = [json.loads(line) for line in lines]
    unread = [row["path"] for row in rows if "problem" in row]
    gone = next(filter(_folder_is_gone, unread), None)
    for line, row in zip(lines, rows):
        for_now = row["size"] < 0 or (gone and "problem" in row)
        if not for_now:
            file.write(f"{line}\n".encode())
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


# --- the cache --------------------------------------------------------------------------------


def _part(cache: Path, number: int) -> Path:
    """Where process `number` of a group notes what it has measured, until all have."""
    return cache.with_name(f"{cache.stem}.{number}{cache.suffix}")


def _parts(cache: Path) -> list[Path]:
    """Those that are there."""
    return sorted(cache.parent.glob(f"{cache.stem}.[0-9]*{cache.suffix}"))


def _tidy(cache: Path, order: list[str]) -> None:
    """Leave one line a recording in `cache`, in this `order`, those of others behind; no parts.

    So it is the same file whoever measured what, and whatever was killed meanwhile.
    """
    parts = _parts(cache)
    lines = {}
    for file in (cache, *parts):
        for line, row in _lines(file):
            if row and isinstance(row["path"], str):
                lines[row["path"]] = line.rstrip(b"\n") + b"\n"  # the last one counts
    places = dict.fromkeys([*order, *lines])
    whole = b"".join(lines[path] for path in places if path in lines)
    if not cache.is_file() or cache.read_bytes() != whole:
        write_atomic(cache, whole)
    for part in parts:
        part.unlink()


def _known(cache: Path, paths: set[str], decode_s: float) -> dict[str, ClipMeasure | str]:
    """What the cache holds of `paths`, of files that have not changed since."""
    found = {}
    for path, stamp, value in _entries(cache):
        if path in paths and _stamp(path) == stamp:
            found[path] = value
    return {path: value for path, value in found.items() if not _to_decode(value, decode_s)}


def _to_decode(value: ClipMeasure | str, decode_s: float) -> bool:
    """Whether a clip was left undecoded under a lower limit than today's."""
    return isinstance(value, ClipMeasure) and value.peak is None and value.seconds <= decode_s


def _entries(cache: Path) -> Iterator[tuple[str, tuple[int, int], ClipMeasure | str]]:
    """(path, stamp, measure) of each line that can be read; a torn one is told of."""
    lost = 0
    for _, row in _lines(cache):
        try:
            yield _checked(row)
        except (TypeError, KeyError):
            lost += 1
    if lost:
        warnings.warn(
            f"{cache}: {lost} damaged lines are left out, their recordings are measured again.",
            category=Note,
            stacklevel=4,
        )


def _lines(cache: Path) -> Iterator[tuple[bytes, dict]]:
    """Each line that is not of another format, with what it says; {} for a damaged one."""
    if not Path(cache).is_file():
        return
    with open(cache, "rb") as file:
        for line in file:
            try:
                row = json.loads(line)
                if row["format"] == FORMAT:
                    yield line, row if "path" in row else {}
            except (ValueError, TypeError, KeyError, RecursionError):
                if line.strip():
                    yield line, {}


def _checked(row: dict) -> tuple[str, tuple[int, int], ClipMeasure | str]:
    """What `measure_line` wrote. Raises TypeError or KeyError for anything else."""
    value = _value(row)
    told = [(row["path"], str), (row["size"], int), (row["mtime_ns"], int)]
    told.append((value, ClipMeasure | str))
    if isinstance(value, ClipMeasure):
        told += [(getattr(value, field.name), field.type) for field in FIELDS]
    for found, kind in told:
        if not isinstance(found, kind):
            raise TypeError(f"{found!r} is no {kind}")
    return row["path"], (row["size"], row["mtime_ns"]), value


def _value(row: dict) -> ClipMeasure | str:
    return ClipMeasure(**row["measure"]) if "measure" in row else row["problem"]


def _stamp(path: str) -> tuple[int, int]:
    """(size in bytes, date of change in ns), or (-1, 0) where nothing is."""
    try:
        found = os.stat(path)
    except OSError:
        return -1, 0
    return found.st_size, found.st_mtime_ns


def _entry(path: str) -> dict:
    size, mtime_ns = _stamp(path)
    return {"format": FORMAT, "path": path, "size": size, "mtime_ns": mtime_ns}


# --- measuring --------------------------------------------------------------------------------


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


def by_threads(paths: list[str], workers: int, decode_s: float) -> Iterator[list[str]]:
    """Cache lines of `paths`, chunk by chunk."""

    def measured(chunk: list[str]) -> list[str]:
        return [measure_line(path, decode_s) for path in chunk]

    with ThreadPoolExecutor(workers) as threads:
        yield from threads.map(
            measured, [paths[i : i + CHUNK] for i in range(0, len(paths), CHUNK)]
        )


def by_processes(paths: list[str], workers: int, decode_s: float) -> Iterator[list[str]]:
    """Cache lines of `paths`, chunk by chunk; a clip that ends its process costs itself alone."""
    with contextlib.ExitStack() as stack:
        shares = []
        for number in range(min(workers, len(paths))):
            share = _Share(paths[number::workers], decode_s)
            stack.callback(share.end)
            shares.append(share.lines())
        # A line of each in turn; meanwhile the others go on, as far as their pipes take it.
        lines = filter(None, itertools.chain.from_iterable(itertools.zip_longest(*shares)))
        while chunk := list(itertools.islice(lines, CHUNK)):
            yield chunk


class _Share:
    """A process that measures `paths` in their order."""

    def __init__(self, paths: list[str], decode_s: float):
        self.paths = paths
        self.decode_s = decode_s
        self.process = self._started(paths)

    def _started(self, paths: list[str]) -> subprocess.Popen:
        with tempfile.TemporaryFile("w+", encoding="utf-8") as job:  # a full pipe would wait
            json.dump({"paths": paths, "decode_s": self.decode_s}, job)
            job.seek(0)
            return subprocess.Popen(
                [sys.executable, "-m", "kit.dataset.clip_stats"],
                stdin=job,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                cwd=CONFIGS.parent,
            )

    def lines(self) -> Iterator[str]:
        """A cache line for each path. Where the process dies over one, another takes the rest."""
        self._require_ready()
        for number, path in enumerate(self.paths, 1):
            line = self.process.stdout.readline()
            if line.endswith("\n"):
                yield line.rstrip("\n")
                continue
            row = _entry(path)
            row["problem"] = "crashes the audio decoder"
            yield json.dumps(row)
            self.end()
            self.process = self._started(self.paths[number:])
            self._require_ready()

    def _require_ready(self) -> None:
        if self.process.stdout.readline() != READY:
            raise RuntimeError(
                "A process that measures recordings could not begin (its exit code is "
                f"{self.process.wait()}): see its error above, close what else takes memory, and "
                "run again."
            )

    def end(self) -> None:
        self.process.kill()
        self.process.stdout.close()
        self.process.wait()


def _serve() -> None:
    """The paths on standard input to cache lines on standard output, until the caller is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the notebook decides when to stop
    if hasattr(signal, "SIGPIPE"):  # a caller that was killed is no error of ours
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    job = json.load(sys.stdin)
    print(READY, end="", flush=True)
    for path in job["paths"]:
        print(measure_line(path, job["decode_s"]), flush=True)  # known before the next may crash


if __name__ == "__main__":
    _serve()
