"""Atomic writes, kept results, digests, names of folders, and disk errors as sentences."""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import stat
import tempfile
import time
import warnings
import wave
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from kit.base.errors import DiskError, KitError, Note
from kit.base.formatting import shorten

SPECIAL_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
SPECIAL_KINDS |= dict.fromkeys((stat.S_IFCHR, stat.S_IFBLK), "a device")

UNFIT = '/\\:*?"<>|'  # in names of folders
LFS_POINTER = "a Git LFS pointer, not the file: run git lfs pull in its folder"
TEMPORARY = ".tmp"  # suffix of the files that `atomic_path` makes
MAX_NAME_BYTES = 100  # file names derived from it stay below the 255 that file systems allow


def require_folder_name(name: str, setting: str, taken: tuple[str, ...] = ()) -> str:
    """Return `name`, or raise KitError if no folder can have it, or `taken` (lower case) has it."""
    is_fit = (
        0 < len(name.encode(errors="replace")) <= MAX_NAME_BYTES
        and name.isprintable()
        and not set(UNFIT) & set(name)
        and name == name.strip() == name.strip(".")
    )
    if not is_fit or name.lower() in taken:
        raise KitError(
            f"{setting} = {shorten(repr(name), 60)} cannot name a folder, or the kit needs that "
            "name. Choose letters, digits, `-` and `_`, such as `my-voice_2`."
        )
    return name


def digest(*parts) -> str:
    """12 hex digits that change when any part (dataclass, dict, str, number) changes."""
    plain = [dataclasses.asdict(p) if dataclasses.is_dataclass(p) else p for p in parts]
    text = json.dumps(plain, sort_keys=True, default=str, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def file_digest(path: Path) -> str:
    """Return the SHA-256 of the file at `path`."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_digests(paths: Iterable[Path]) -> list[str]:
    """Return the SHA-256 of each of `paths` that is a file: some may be optional."""
    return [file_digest(path) for path in paths if path.is_file()]


def shorten_name(name: str, max_bytes: int) -> str:
    """Return what of `name` fits in `max_bytes` of UTF-8: a letter takes up to four."""
    return name.encode()[:max_bytes].decode(errors="ignore")


def file_kind(path: Path) -> str:
    """Return the kind of the file at `path` by its first bytes; "" for a kind not listed here."""
    with path.open("rb") as file:
        head = file.read(64)
    kinds = {
        "empty": not head,
        "zip": head.startswith(b"PK\x03\x04"),
        "git-lfs": head.startswith(b"version https://git-lfs"),
        "html": head.lstrip().startswith(b"<"),
        "safetensors": head[8:9] == b"{",
        "json": head.lstrip().startswith(b"{"),
    }
    return next((kind for kind, is_it in kinds.items() if is_it), "")


def placeholder_problem(path: Path) -> str:
    """Say what was saved in place of the file at `path`, and the fix; "" where it is another."""
    problems = {
        "git-lfs": f"it is {LFS_POINTER}",
        "html": "it is a web page, not the file: open its address in a browser, and sign in there",
    }
    return problems.get(file_kind(path), "")


def require_disk(folder: Path, needed_bytes: int) -> None:
    """Raise DiskError with a fix if the disk of `folder` has less than `needed_bytes` free."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        problem = (
            f"{folder} needs about {needed_bytes / 1e6:.0f} MB, its disk has "
            f"{free_bytes / 1e6:.0f} MB left"
        )
        fix = "Free some space, or set KIT_RUNS to a folder on another disk"
        raise DiskError(errno.ENOSPC, f"{problem}. {fix}")


DISK_FIXES = {
    (errno.EEXIST, errno.ENOTDIR): "A file has the name of a folder that is needed: rename it, or "
    "set KIT_RUNS to another folder, and run again.",
    (errno.ENOSPC, errno.EDQUOT, errno.EFBIG): "Free some disk space and run again; finished work "
    "is kept.",
    (errno.EROFS, errno.EACCES, errno.EPERM): "This user may not write there, or the disk is "
    "read-only: set KIT_RUNS to a writable folder and run again.",
}
OTHER_DISK_FIX = "Free some disk space, see whether the disk is sound, and run again."


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raise an OSError of the block as a DiskError with `path` and a fix."""
    try:
        yield
    except DiskError:
        raise
    except OSError as error:
        reason = error.strerror or error
        fixes = (fix for numbers, fix in DISK_FIXES.items() if error.errno in numbers)
        message = f"could not write {path}: {reason}. {next(fixes, OTHER_DISK_FIX)}"
        raise DiskError(error.errno, message) from error


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path; what the block writes there replaces `path` when the block ends.

    It is synced and renamed, so a killed process leaves the complete old or new file, and at most
    a temporary one that `remove_litter` recognises.
    """
    path = Path(path)
    temporary = None
    try:
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(TEMPORARY, f".{path.name}.", path.parent)
            temporary = Path(name)
            with contextlib.suppress(OSError):  # a disk without file locks
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield temporary
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)  # mkstemp lets only its owner read
            os.replace(temporary, path)
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):  # the whole folder was deleted
                os.close(handle)
                temporary.unlink(missing_ok=True)


def remove_litter(folder: Path, min_age_s: float = 1.0) -> None:
    """Remove the temporary files of `atomic_path` under `folder` that no living process writes.

    Those that were written to less than `min_age_s` ago stay: one may not be locked yet, and where
    other machines write, their locks do not show here.
    """
    for path in folder.rglob(f".*{TEMPORARY}"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if time.time() - path.stat().st_mtime >= min_age_s:
                path.unlink()


def make_folder(path: Path) -> Path:
    """Create the folder `path` and its parents; return it. Raises DiskError with a fix."""
    with disk_errors(path):
        Path(path).mkdir(parents=True, exist_ok=True)
    return Path(path)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write `data` to `path` as `atomic_path` does."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def atomic_folder(folder: Path, marks: tuple[str, ...]) -> Iterator[Path]:
    """Yield a folder for several files, which move to `folder` together when the block ends.

    Files named in `marks` say that the others are complete: they are removed first and moved last,
    in this order, so none exists beside a mixture of old and new files. Raises DiskError.
    """
    folder = Path(folder)
    new = folder / ".new"
    shutil.rmtree(new, ignore_errors=True)  # left by a killed process
    make_folder(new)
    try:
        with disk_errors(folder):
            yield new
            for mark in reversed(marks):
                (folder / mark).unlink(missing_ok=True)
            written = sorted(path.name for path in new.iterdir())
            first = [name for name in written if name not in marks]
            last = [name for name in marks if name in written]
            for name in (*first, *last):
                os.replace(new / name, folder / name)
    finally:
        shutil.rmtree(new, ignore_errors=True)


@contextlib.contextmanager
def append_lines(path: Path) -> Iterator[BinaryIO]:
    """Yield `path` open for appending lines; a line that a kill cut short is ended first."""
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        yield file


def cached_result(
    path: Path,
    key: str,
    make: Callable[[], object],
    is_usable: Callable[[object], bool] = lambda _: True,
):
    """Return the JSON value at `path` if it was saved under `key`, else save and return `make()`.

    `key` is a `digest` of all it depends on; `is_usable(value)` is False if its files are gone.
    """
    value = None
    try:
        saved = json.loads(Path(path).read_bytes())
        if saved["key"] == key:
            value = saved["value"]
    except FileNotFoundError:
        pass
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        problem = f"{path} is damaged ({shorten(error)}): its value is made again."
        warnings.warn(problem, Note, stacklevel=2)
    if value is None or not is_usable(value):
        value = make()
        write_atomic(path, json.dumps({"key": key, "value": value}, ensure_ascii=False))
    return value


def encode_wav(samples: np.ndarray, sample_rate_hz: int) -> bytes:
    """`samples` (L,) in -1 to 1 as a mono 16-bit WAV file; values outside are clipped."""
    pcm = (np.clip(samples, -1, 1) * 32767).round().astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as out:  # an exported voice speaks without soundfile
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(sample_rate_hz)
        out.writeframes(pcm.tobytes())
    return file.getvalue()


def special_file_kind(path: Path) -> str:
    """The kind of a file that could block or never end when read, else ""; OSError without it."""
    return SPECIAL_KINDS.get(stat.S_IFMT(os.stat(path).st_mode), "")
