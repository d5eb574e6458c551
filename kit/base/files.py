"""Files written whole or not at all, and a disk's objections as sentences.

A write goes to a temporary file, is synced and renamed, so a kill leaves all of the old or all of
the new. Knows nothing of what is in a file.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from kit.base.errors import DiskError, KitError
from kit.base.formatting import shorten

# What Windows keeps for devices, whatever suffix follows.
RESERVED = {"con", "prn", "aux", "nul", "conin$", "conout$"}
RESERVED.update(f"{port}{n}" for port in ("com", "lpt") for n in "0123456789¹²³")
MAX_NAME_BYTES = 100  # names of files made of it stay below the 255 that disks take


def require_folder_name(name: str, setting: str, taken: tuple[str, ...] = ()) -> str:
    """`name`, if it can be that of one folder, on any system. Raises KitError naming `setting`.

    `taken` are names that mean something else beside it, in lower case.
    """
    told = f"{setting} = {shorten(repr(name), 60)}"
    cure = "Choose letters, digits, `-` and `_`, such as `my-voice_2`."
    unfit = sorted({c for c in name if c in '/\\:*?"<>|' or not c.isprintable()})
    if not name.strip():
        raise KitError(f"{told} names no folder. {cure}")
    if unfit:
        raise KitError(
            f"{told} cannot name a folder: it holds {' '.join(map(repr, unfit))}. {cure}"
        )
    if name != name.strip() or name.startswith(".") or name.endswith("."):
        raise KitError(f"{told} cannot name a folder: no dot or space may stand at an end. {cure}")
    if len(os.fsencode(name)) > MAX_NAME_BYTES:
        raise KitError(f"{told} is too long: at most {MAX_NAME_BYTES} bytes. {cure}")
    if name.lower().split(".")[0].rstrip() in RESERVED:
        raise KitError(f"{told} is a device of Windows, so no folder there can have it. {cure}")
    if name.lower() in taken:
        raise KitError(f"{told} is a folder of the kit's own. {cure}")
    return name


def digest(*parts) -> str:
    """12 hex digits that change when any part (dataclass, dict, str, number) changes."""
    plain = [dataclasses.asdict(p) if dataclasses.is_dataclass(p) else p for p in parts]
    text = json.dumps(plain, sort_keys=True, default=str, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def file_digest(path: Path) -> str:
    """SHA-256 of the file at `path`, read a part at a time."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_kind(path: Path) -> str:
    """What the file at `path` is by its first bytes; "" for another kind than those asked here."""
    with path.open("rb") as file:
        head = file.read(64)
    begins = head.lstrip()[:1]
    asked = {
        "empty": not head,
        "zip": head.startswith(b"PK\x03\x04"),
        "git-lfs": head.startswith(b"version https://git-lfs"),
        "html": begins == b"<",
        "safetensors": head[8:9] == b"{",
        "json": begins == b"{",
    }
    return next((kind for kind, is_it in asked.items() if is_it), "")


def require_disk(folder: Path, needed_bytes: int) -> None:
    """Raise DiskError with the cure when `folder`'s disk has less than `needed_bytes` left."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise DiskError(
            errno.ENOSPC,
            f"{folder} needs about {needed_bytes / 1e6:.0f} MB, its disk has "
            f"{free_bytes / 1e6:.0f} MB left. Free some space, or set KIT_RUNS to a folder on "
            "another disk",
        )


_FULL = "Free some disk space and run again; finished work is kept."
_CLOSED = (
    "This user may not write there, or the disk is read-only: set KIT_RUNS to a folder that can be "
    "written to, and run again."
)
_GONE = "Was its folder deleted, or a drive unplugged? Bring it back and run again."
_IN_THE_WAY = (
    "A file stands where a folder is wanted: rename it, or set KIT_RUNS to another folder, and run "
    "again."
)
DISK_FIXES = {
    errno.EEXIST: _IN_THE_WAY,
    errno.ENOTDIR: _IN_THE_WAY,
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: _FULL,
    errno.EROFS: _CLOSED,
    errno.EACCES: _CLOSED,
    errno.EPERM: _CLOSED,
    errno.ENOENT: _GONE,
    errno.ESTALE: _GONE,
}
OTHER_DISK_FIX = "Free some disk space, see whether the disk is sound, and run again."


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Tell what the disk objects to inside the block as a DiskError with `path` and the cure."""
    try:
        yield
    except DiskError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        cure = DISK_FIXES.get(error.errno, "")
        raise DiskError(
            error.errno, f"could not write {path}: {reason}. {cure or OTHER_DISK_FIX}"
        ) from error


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path; what the block writes there becomes `path`, as a whole, at its end.

    Temporary file, fsync, rename: `path` holds all of the old or all of the new, whatever happens.
    Raises DiskError with the cure when the disk is full, closed to writing or gone.
    """
    path = Path(path)
    temporary = None
    try:
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            os.close(handle)
            temporary = Path(name)
            yield temporary
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)  # mkstemp lets only its owner read
            os.replace(temporary, path)
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):  # its folder is gone: so is it
                temporary.unlink(missing_ok=True)


def make_folder(path: Path) -> Path:
    """`path` as a folder, made with those above it. Raises DiskError with the cure."""
    with disk_errors(path):
        Path(path).mkdir(parents=True, exist_ok=True)
    return Path(path)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write `data` to `path` as `atomic_path` does."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def atomic_folder(folder: Path, marks: tuple[str, ...]) -> Iterator[Path]:
    """A folder to write several files to, which move to `folder` together at the block's end.

    What was there stays until then. Files named in `marks` say that the others are whole: they are
    removed first and moved last, in this order, so none of them ever lies beside a mixture of old
    and new. Raises DiskError with the cure.
    """
    folder = Path(folder)
    new = folder / ".new"
    shutil.rmtree(new, ignore_errors=True)  # of one that was killed
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
    """`path` open for appending lines; one that a kill cut short does not swallow the next."""
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        yield file
