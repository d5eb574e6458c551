"""Archives unpacked so that neither a damaged nor a hostile one does harm.

`unpack` writes plain files and folders only, each under its own checked name, and counts what it
writes: no path leaves the folder, no link or device is made, and a bomb is refused long before
the disk is full. The result appears whole, by one rename, or not at all. Knows nothing of what is
inside.
"""

import bz2
import contextlib
import dataclasses
import errno
import glob
import gzip
import lzma
import math
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import BinaryIO

from kit.base.config import require, require_within
from kit.base.files import digest, require_disk, write_atomic, writing
from kit.base.lock import Lock, held

SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar", ".zip")
MARK = ".unpacked-from"  # in a folder that stands whole: which archive it came from
CHUNK_BYTES = 2**20
DISK_STEP_BYTES = 2**28  # how often the free disk is looked at
HEADER_BYTES = 2**22  # no honest name or attribute list is longer
_CLASHES = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL)
_DAMAGE = (
    tarfile.TarError,
    zipfile.BadZipFile,
    lzma.LZMAError,
    zlib.error,
    gzip.BadGzipFile,
    EOFError,
)


class ArchiveError(ValueError):
    """An archive that is damaged, hostile or holds no dataset; the message says what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArchiveConfig:
    most_gib: float = 200.0  # unpacked
    most_members: int = 5_000_000  # files and folders
    most_ratio: float = 100.0  # bytes written per byte of archive; recordings stay below 20
    ratio_from_mib: float = 64.0  # small archives of repetitive tables may exceed the ratio

    def __post_init__(self):
        require(self.most_gib > 0, self, "most_gib", "must be positive.")
        require(self.most_members >= 1, self, "most_members", "must be at least 1.")
        require(self.most_ratio >= 1, self, "most_ratio", "must be at least 1.")
        require_within(self, 0, 1e9, "most_gib", "most_members", "most_ratio", "ratio_from_mib")


def archive_suffix(path: Path) -> str:
    """The suffix that says how `path` is packed, or "" for what is no archive."""
    return next((s for s in SUFFIXES if Path(path).name.lower().endswith(s)), "")


def unpack(
    archive: Path,
    into: Path,
    config: ArchiveConfig,
    progress: Callable = lambda *_: None,
    say: Callable[[str], None] = print,
) -> Path:
    """Unpack `archive` to a folder of its name under `into`, or do nothing where that stands whole.

    `progress(done, total)` counts bytes of the archive. Interrupted, it begins again; where another
    process is unpacking the same, `say` hears of it and this one waits for the result. Raises
    ArchiveError for a damaged archive, an unsafe member or a bomb, and DiskError when the disk is
    too small; nothing of it is then left behind.
    """
    archive, suffix = Path(archive), archive_suffix(archive)
    if not archive.is_file() or not suffix:
        kinds = ", ".join(SUFFIXES)
        raise ArchiveError(f"{archive} is not an archive that can be unpacked ({kinds}).")
    folder = Path(into) / archive.name[: -len(suffix)]
    key = digest(archive.name, archive.stat().st_size, archive.stat().st_mtime_ns)
    if _stands(folder, key):
        return folder
    # Another process may be at it: what it unpacks is then there when it ends.
    with held(
        folder.with_name(f".{folder.name}.lock"), f"unpacking {archive}", math.inf, say
    ) as lock:
        if not _stands(folder, key):
            _unpack_whole(archive, suffix, folder, key, config, progress, lock)
    return folder


def _unpack_whole(
    archive: Path,
    suffix: str,
    folder: Path,
    key: str,
    config: ArchiveConfig,
    progress: Callable,
    lock: Lock,
) -> None:
    """`archive` as the folder `folder`, which appears by one rename."""
    for left_by_a_kill in folder.parent.glob(f".{glob.escape(folder.name)}.unpacking*"):
        shutil.rmtree(left_by_a_kill, ignore_errors=True)
    begun = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.unpacking"))
    try:
        begun.chmod(0o755)  # mkdtemp lets only its owner in
        _unpack_into(archive, suffix, begun, config, progress)
        lock.confirm()  # while this machine slept, another may have cleared `begun` away
        write_atomic(begun / MARK, key)
        with writing(folder):
            begun.rename(folder)
    finally:
        shutil.rmtree(begun, ignore_errors=True)


def _stands(folder: Path, key: str) -> bool:
    mark = folder / MARK
    if mark.is_file() and mark.read_text(encoding="utf-8") == key:
        return True
    if folder.exists():
        raise ArchiveError(
            f"{folder} is in the way: it does not come from this archive. Move or delete it, or "
            "unpack into another folder."
        )
    return False


def _unpack_into(
    archive: Path, suffix: str, begun: Path, config: ArchiveConfig, progress: Callable
) -> None:
    """Every member of `archive` into `begun`, with whatever goes wrong told by the file's name."""
    writer = Writer(archive, begun, config)
    members = _zip_members if suffix == ".zip" else _tar_members
    try:
        for read_bytes in members(archive, writer):
            progress(min(read_bytes, writer.archive_bytes), writer.archive_bytes)
    except _DAMAGE as error:
        raise _damaged(archive, error) from error
    except OSError as error:
        if error.errno is not None:  # of the disk; bz2 says without a number that data are damaged
            raise
        raise _damaged(archive, error) from error
    except (RuntimeError, NotImplementedError) as error:  # zipfile: a password, a rare method
        raise ArchiveError(f"{archive} cannot be unpacked here: {error}. Unpack it by hand.") from (
            error
        )
    progress(writer.archive_bytes, writer.archive_bytes)


def _damaged(archive: Path, error: object) -> ArchiveError:
    return ArchiveError(
        f"{archive} is damaged or was not downloaded to its end ({error}): compare its size, "
        f"{archive.stat().st_size:,} bytes, with the source and download it again."
    )


class Writer:
    """Writes members under one folder, and refuses what is unsafe or too much."""

    def __init__(self, archive: Path, folder: Path, config: ArchiveConfig):
        self.archive = archive
        self.folder = folder
        self.config = config
        self.archive_bytes = archive.stat().st_size
        self.written_bytes = self.looked_bytes = self.members = 0
        require_disk(folder, self.archive_bytes)

    def place(self, name: str) -> Path:
        """Where the member `name` goes. Raises ArchiveError for a name that leads elsewhere."""
        self.members += 1
        if self.members > self.config.most_members:
            self.refuse(f"more than {self.config.most_members:,} members", "`most_members`")
        path = PurePosixPath(name)
        unsafe = path.is_absolute() or PureWindowsPath(name).drive or ".." in path.parts
        if unsafe or "\\" in name or "\0" in name:
            self.refuse(f"a member named {name!r}, which leads out of the folder")
        return self.folder / path

    def refuse(self, what: str, limit: str = "") -> None:
        cure = f"raise {limit} if you trust it" if limit else "do not use it"
        raise ArchiveError(f"{self.archive} holds {what}: {cure}. Nothing was unpacked.")

    @contextlib.contextmanager
    def placing(self, name: str) -> Iterator[Path]:
        """`place`, and the disk's own objections to a name told as a refusal."""
        try:
            yield self.place(name)
        except OSError as error:
            if error.errno in _CLASHES:
                self.refuse(f"{name[:200]!r}, which the disk does not take ({error.strerror})")
            if error.errno is None:  # bz2's word for damaged data
                raise
            with writing(self.folder / name[:200]):
                raise

    def make_folder(self, name: str) -> None:
        with self.placing(name) as path:
            path.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, source: BinaryIO) -> None:
        """Copy `source` to the member's place, counting."""
        with self.placing(name) as path:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as file:
                while chunk := source.read(CHUNK_BYTES):
                    self.count(len(chunk))
                    file.write(chunk)

    def count(self, size_bytes: int) -> None:
        """Note that `size_bytes` more are unpacked. Raises ArchiveError, or DiskError, in time."""
        self.written_bytes += size_bytes
        if self.written_bytes > self.config.most_gib * 2**30:
            self.refuse(f"more than {self.config.most_gib} GiB", "`most_gib`")
        ratio = self.written_bytes / max(1, self.archive_bytes)
        big = self.written_bytes > self.config.ratio_from_mib * 2**20
        if big and ratio > self.config.most_ratio:
            self.refuse(f"over {self.config.most_ratio:.0f} times its own size", "`most_ratio`")
        if self.written_bytes - self.looked_bytes > DISK_STEP_BYTES:
            self.looked_bytes = self.written_bytes
            require_disk(self.folder, DISK_STEP_BYTES)


def _zip_members(archive: Path, writer: Writer) -> Iterator[int]:
    """Unpack a zip's members, yielding the bytes of the archive dealt with so far."""
    with zipfile.ZipFile(archive) as packed:
        members = packed.infolist()
        promised_bytes = sum(member.file_size for member in members)
        if promised_bytes <= writer.config.most_gib * 2**30:  # else `count` says so, of this file
            require_disk(writer.folder, promised_bytes)
        read_bytes = 0
        for member in members:
            kind = member.external_attr >> 28  # of its Unix mode: 10 is a link, 1 2 6 12 devices
            if kind in (1, 2, 6, 10, 12):
                writer.refuse(f"{member.filename!r}, which is a link or a device")
            if member.is_dir():
                writer.make_folder(member.filename)
            else:
                with packed.open(member) as source:
                    writer.write(member.filename, source)
            read_bytes += member.compress_size
            yield read_bytes


class _Careful:
    """A decompressed stream that hands out no more at a time than a header may hold.

    tarfile reads names and attributes whole: a packed header of gigabytes would fill the memory.
    """

    def __init__(self, stream: BinaryIO, writer: Writer):
        self.stream = stream
        self.writer = writer
        self.seek = stream.seek
        self.tell = stream.tell

    def read(self, size: int) -> bytes:
        if size > HEADER_BYTES:
            self.writer.refuse(f"a header of {size:,} bytes")
        return self.stream.read(size)


_OPENERS = {".gz": gzip.open, ".tgz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def _tar_members(archive: Path, writer: Writer) -> Iterator[int]:
    """Unpack a tar's members, yielding the bytes of the archive read so far."""
    opener = _OPENERS.get(archive.suffix.lower(), lambda raw: raw)
    with open(archive, "rb") as raw, opener(raw) as stream:
        careful = _Careful(stream, writer)
        with tarfile.open(fileobj=careful, mode="r:") as packed:
            while member := packed.next():
                packed.members.clear()  # tarfile would keep a million of them
                _write_tar_member(packed, member, writer)
                yield raw.tell()
            _require_end(archive, stream, packed.offset, writer)


def _write_tar_member(packed: tarfile.TarFile, member: tarfile.TarInfo, writer: Writer) -> None:
    if member.isdir():
        writer.make_folder(member.name)
    elif member.isreg() and not member.issparse():  # a sparse file of a few bytes may be petabytes
        writer.write(member.name, packed.extractfile(member))
    else:
        writer.refuse(f"{member.name!r}, which is a link, a device or a sparse file")


def _require_end(archive: Path, stream: BinaryIO, at_bytes: int, writer: Writer) -> None:
    """tarfile takes a broken header for the end; the end is a block of zeros, then the checksum."""
    stream.seek(at_bytes)
    if stream.read(512) != bytes(512):
        raise _damaged(archive, "it has no end mark, or a broken header before it")
    while chunk := stream.read(CHUNK_BYTES):  # to the end, where gzip and xz compare checksums
        writer.count(len(chunk))
