"""Measure every clip of a dataset, in parallel, with a cache: a line a clip."""

import contextlib
import json
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from kit.audio.clip import ClipMeasure, measure_clip
from kit.base.errors import DatasetError, Note
from kit.base.files import append_lines, disk_errors, make_folder, write_atomic
from kit.base.formatting import join_names

FORMAT = 4  # of a cache line; lines of another format are measured again
MEASURES = "measures.jsonl"  # in a run's folder
CHUNK = 64  # clips measured and written to the cache at a time
PROCESSES_FROM_CLIPS = 1000  # fewer are measured while processes start


def measure_clips(
    paths: list[str],
    cache: Path,
    decode_s: float = 60.0,
    processes: int | None = None,
    progress: Callable = lambda *_: None,
    part: Path | None = None,
) -> dict[str, ClipMeasure | str]:
    """Return the measure of every path, or the reason why there is none.

    It uses so many `processes`; 0: this one (default: one per core where there are many clips).
    `progress(done, total)` counts clips. With `part`, a file beside NAME.jsonl like
    NAME.3-of-16.jsonl, what is measured is written there; a call without it merges all parts into
    `cache`. Raises DatasetError when the folder of a clip is gone, DiskError when a file cannot be
    written; results so far are kept.
    """
    cache = Path(cache)
    absolute = {path: os.path.abspath(path) for path in paths}
    order = list(dict.fromkeys(absolute.values()))
    if part is None and _parts(cache):
        _merge_parts(cache, order)
    results = read_measures(cache, set(order), decode_s)
    if part:
        results |= read_measures(part, set(order), decode_s)
    todo = [path for path in order if path not in results]
    if results:
        progress(len(results), len(order))
    if todo:
        if processes is None:
            processes = _cores() if len(todo) >= PROCESSES_FROM_CLIPS else 0
        for rows in _measure_into(part or cache, todo, min(processes, len(todo)), decode_s):
            results |= {row["path"]: _value(row) for row in rows}
            progress(len(results), len(order))
        if part is None:
            _merge_parts(cache, order)
    return {path: results[full_path] for path, full_path in absolute.items()}


def _measure_into(
    cache: Path, paths: list[str], processes: int, decode_s: float
) -> Iterator[list[dict]]:
    """Measure `paths` and append their lines to `cache`, a chunk at a time; yield each chunk's."""
    make_folder(cache.parent)
    pool = contextlib.nullcontext()
    if processes:
        pool = ProcessPoolExecutor(
            processes,
            mp_context=multiprocessing.get_context("spawn"),  # this one may run threads: no fork
            initializer=signal.signal,
            initargs=(signal.SIGINT, signal.SIG_IGN),  # Ctrl-C reaches them, too
        )
    # disk_errors is outermost: closing the file writes again what a full disk did not take.
    with disk_errors(cache), pool as workers, append_lines(cache) as file:
        for start in range(0, len(paths), CHUNK):
            chunk = paths[start : start + CHUNK]
            if workers:
                rows = _by_processes(workers, chunk, processes, decode_s)
            else:
                rows = [measure_row(path, decode_s) for path in chunk]
            unread = (row["path"] for row in rows if "problem" in row)
            gone = next(filter(_folder_is_gone, unread), None)
            for row in rows:  # what may be read next time is left out
                if row["size"] >= 0 and not (gone and "problem" in row):
                    file.write(f"{json.dumps(row)}\n".encode())
            file.flush()
            if gone:
                raise DatasetError(
                    f"{Path(gone).parent} is gone, or empty: was a drive unplugged or unmounted? "
                    "The clips measured before are kept. Connect it again and run again: the check "
                    "resumes there."
                )
            yield rows


def _by_processes(
    pool: ProcessPoolExecutor, paths: list[str], processes: int, decode_s: float
) -> list[dict]:
    """Raises DatasetError with the clips that were being read if one of the processes dies."""
    started = []
    try:
        for path in paths:
            started.append((path, pool.submit(measure_row, path, decode_s)))
        return [future.result() for _, future in started]
    except BrokenProcessPool as error:
        unread = [path for path, future in started if future.exception()][: processes + 1]
        raise DatasetError(
            "A process that measures recordings ended while one of these was read: "
            f"{join_names(unread, len(unread))}. Either a damaged file crashes the audio decoder, "
            "or memory ran out. Move them elsewhere, or free memory, and run again: what was "
            "measured before is kept."
        ) from error


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _folder_is_gone(path: str) -> bool:
    """Tell whether a clip's folder is missing, unreachable or empty (an unmounted mount point)."""
    try:
        with os.scandir(os.path.dirname(path)) as entries:
            return not any(entries)
    except OSError:
        return True


def _parts(cache: Path) -> list[Path]:
    """Return what shards of the corpus measured, until a call merges it."""
    return sorted(cache.parent.glob(f"{cache.stem}.[0-9]*{cache.suffix}"))


def _merge_parts(cache: Path, order: list[str]) -> None:
    """Merge the parts into `cache`, a line a recording, in this `order`, then other recordings."""
    parts = _parts(cache)
    rows = {}
    for file in (cache, *parts):
        rows |= _rows_of(file)
    # So the file does not depend on which process measured what, nor on interruptions.
    paths = dict.fromkeys([*order, *rows])
    content = "".join(f"{json.dumps(rows[path])}\n" for path in paths if path in rows).encode()
    if not cache.is_file() or cache.read_bytes() != content:
        write_atomic(cache, content)
    for part in parts:
        part.unlink()


def read_measures(cache: Path, paths: set[str], decode_s: float) -> dict[str, ClipMeasure | str]:
    """Return the cached results of `paths` that have not changed since."""
    results = {}
    for path, row in _rows_of(cache).items():
        if path in paths and _entry(path).items() <= row.items():
            value = _value(row)
            # Leave out those that were too long to decode then and are not any more.
            undecoded = isinstance(value, ClipMeasure) and value.gap_s is None
            if not (undecoded and value.seconds <= decode_s):
                results[path] = value
    return results


def _rows_of(cache: Path) -> dict[str, dict]:
    """Return the last line of each recording, of this format; warn of damaged lines."""
    rows = {}
    damaged = 0
    if not cache.is_file():
        return rows
    with open(cache, "rb") as lines:
        for line in lines:
            try:
                row = json.loads(line)
                if row["format"] == FORMAT:
                    _value(row)
                    rows[row["path"]] = row
            except (ValueError, TypeError, KeyError, RecursionError):
                damaged += bool(line.strip())
    if damaged:
        message = f"{cache}: {damaged} damaged lines are left out; their clips are measured again."
        warnings.warn(message, category=Note, stacklevel=3)
    return rows


def _value(row: dict) -> ClipMeasure | str:
    return ClipMeasure(**row["measure"]) if "measure" in row else row["problem"]


def _entry(path: str) -> dict:
    """Return a line's values without a measure; `size` is -1 for an unreachable file."""
    row = {"format": FORMAT, "path": path, "size": -1, "mtime_ns": 0}
    with contextlib.suppress(OSError):
        stat = os.stat(path)
        row |= {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    return row


def measure_row(path: str, decode_s: float) -> dict:
    """Measure a clip; return its cache line, with `size` -1 for what may be readable next time."""
    row = _entry(path)  # before reading, so that a file still growing is measured again
    try:
        row["measure"] = vars(measure_clip(path, decode_s))
    except DatasetError as error:
        row["problem"] = str(error).removeprefix(path).lstrip(": ")
        if isinstance(error.__cause__, OSError):
            row["size"] = -1
    return row
