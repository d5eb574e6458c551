"""Unpack dataset archives (tar, zip) safely.

tarfile (with its `data` filter) and zipfile write the files. In addition, names that lead out of
the folder, links and decompression bombs are refused, truncated archives are detected, and the
folder appears by one rename once everything is unpacked.
"""

import bz2
import dataclasses
import errno
import glob
import gzip
import lzma
import math
import shutil
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import BinaryIO

from kit.base.config import require, require_least
from kit.base.errors import DatasetError
from kit.base.files import (
    digest,
    disk_errors,
    require_disk,
    write_atomic,
)
from kit.base.lock import held

SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar", ".zip")
MARK = ".unpacked-from"  # a file in every finished folder: which archive it came from
CHUNK_BYTES = 2**20
DISK_STEP_BYTES = 2**28  # how often free disk space is checked
MAX_HEADER_BYTES = 2**22  # of a member: no legitimate name or attribute list is longer
_OPENERS = {".gz": gzip.open, ".tgz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
# With other methods zipfile decompresses without a limit on memory.
_ZIP_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ZIP_SPECIAL = (1, 2, 6, 10, 12)  # kinds in the Unix mode: pipe, devices, link, socket
_BAD_NAME = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL)
_DAMAGE = (
    tarfile.TarError,
    zipfile.BadZipFile,
    lzma.LZMAError,
    zlib.error,
    EOFError,
    # Of a header whose numbers or names cannot be:
    ValueError,
    OverflowError,
    struct.error,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArchiveConfig:
    most_gib: float = 200.0  # unpacked
    most_members: int = 5_000_000  # files and folders
    most_ratio: float = 100.0  # bytes unpacked per byte of archive; recordings stay below 20
    ratio_from_mib: float = 64.0  # small archives of repetitive tables may exceed the ratio

    def __post_init__(self):
        require(self.most_gib > 0, self, "most_gib", "must be positive.")
        require_least(self, 1, "most_members", "most_ratio")
        require_least(self, 0, "most_gib", "ratio_from_mib")


def archive_suffix(path: Path) -> str:
    """Return the archive suffix of `path`, "" if it has none."""
    return next((s for s in SUFFIXES if Path(path).name.lower().endswith(s)), "")


def unpack(
    archive: Path,
    into: Path,
    config: ArchiveConfig,
    progress: Callable = lambda *_: None,
    say: Callable[[str], None] = print,
) -> Path:
    """Unpack `archive` to a folder of its name under `into`; do nothing if that was done before.

    `progress(done, total)` counts bytes of the archive. If another process is unpacking the same
    archive, report it with `say` and wait. Raises DatasetError for a damaged archive, an unsafe
    member or a bomb, and DiskError when the disk is too small; nothing is left behind then.
    """
    archive = Path(archive)
    suffix = archive_suffix(archive)
    if not archive.is_file() or not suffix:
        kinds = ", ".join(SUFFIXES)
        raise DatasetError(f"{archive} is not an archive that can be unpacked ({kinds}).")
    folder = Path(into) / archive.name[: -len(suffix)]
    key = digest(archive.name, archive.stat().st_size, archive.stat().st_mtime_ns)
    if _is_unpacked(folder, key):
        return folder
    lock_file = folder.with_name(f".{folder.name}.lock")
    with held(lock_file, f"unpacking {archive}", math.inf, say) as lock:
        if _is_unpacked(folder, key):  # another process did it meanwhile
            return folder
        for leftover in folder.parent.glob(f".{glob.escape(folder.name)}.unpacking*"):
            shutil.rmtree(leftover, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.unpacking"))
        try:
            temporary.chmod(0o755)  # mkdtemp lets only its owner in
            _unpack_into(Limits(archive, temporary, config), progress)
            lock.confirm()  # while this machine slept, another may have removed `temporary`
            write_atomic(temporary / MARK, key)
            with disk_errors(folder):
                temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _is_unpacked(folder: Path, key: str) -> bool:
    mark = folder / MARK
    if mark.is_file() and mark.read_text(encoding="utf-8") == key:
        return True
    if folder.exists():
        raise DatasetError(
            f"{folder} is in the way: it was not unpacked from this archive. Move or delete it, "
            "or unpack into another folder."
        )
    return False


class Limits:
    """Counts what comes out of an archive; raises DatasetError for what is unsafe or too much."""

    def __init__(self, archive: Path, folder: Path, config: ArchiveConfig):
        self.archive = archive
        self.folder = folder
        self.config = config
        self.archive_bytes = archive.stat().st_size
        self.unpacked_bytes = 0
        self.checked_bytes = 0  # unpacked when free disk space was last checked
        self.members = 0
        self.name = ""  # of the current member
        require_disk(folder, self.archive_bytes)

    def refuse(self, what: str, limit: str = "") -> None:
        fix = "do not use it"
        if limit:
            fix = (
                f"if you trust it, raise that limit (--set archive.{limit}=..., in a notebook "
                f'start(RUN, settings={{"archive": {{"{limit}": ...}}}}))'
            )
        raise DatasetError(f"{self.archive} holds {what}: {fix}. Nothing was unpacked.")

    def check_name(self, name: str) -> None:
        """Begin a member: check its name and the number of members."""
        self.name = name
        self.members += 1
        if self.members > self.config.most_members:
            self.refuse(f"more than {self.config.most_members:,} members", "most_members")
        if not name:
            self.refuse("a member without a name")
        path = PurePosixPath(name)
        leads_out = path.is_absolute() or PureWindowsPath(name).drive or ".." in path.parts
        if leads_out or "\\" in name or "\0" in name:
            self.refuse(f"a member named {name!r}, which leads out of the folder")

    def count(self, size_bytes: int) -> None:
        """Add `size_bytes` of unpacked data. Raises DiskError before the disk is full."""
        self.unpacked_bytes += size_bytes
        if self.unpacked_bytes > self.config.most_gib * 2**30:
            self.refuse(f"more than {self.config.most_gib} GiB", "most_gib")
        ratio = self.unpacked_bytes / max(1, self.archive_bytes)
        big = self.unpacked_bytes > self.config.ratio_from_mib * 2**20
        if big and ratio > self.config.most_ratio:
            self.refuse(f"over {self.config.most_ratio:.0f} times its own size", "most_ratio")
        if self.unpacked_bytes - self.checked_bytes > DISK_STEP_BYTES:
            self.checked_bytes = self.unpacked_bytes
            require_disk(self.folder, DISK_STEP_BYTES)


def _unpack_into(limits: Limits, progress: Callable) -> None:
    archive = limits.archive
    members = _unzip(limits) if archive_suffix(archive) == ".zip" else _untar(limits)
    try:
        for read_bytes in members:
            progress(min(read_bytes, limits.archive_bytes), limits.archive_bytes)
    except DatasetError:
        raise
    except (*_DAMAGE, OSError) as error:
        if getattr(error, "errno", None) is None:  # gzip and bz2 raise OSErrors without one
            raise _damaged(archive, error) from error
        if error.errno in _BAD_NAME:
            limits.refuse(f"{limits.name[:200]!r}, which cannot be written here ({error.strerror})")
        with disk_errors(limits.folder / limits.name[:200]):
            raise
    except (RuntimeError, NotImplementedError) as error:  # zipfile: a password, a rare method
        raise DatasetError(
            f"{archive} cannot be unpacked here: {error}. Unpack it by hand."
        ) from error
    progress(limits.archive_bytes, limits.archive_bytes)


def _damaged(archive: Path, reason: object) -> DatasetError:
    return DatasetError(
        f"{archive} is damaged or incompletely downloaded ({reason}): compare its size, "
        f"{archive.stat().st_size:,} bytes, with the source and download it again."
    )


def _unzip(limits: Limits) -> Iterator[int]:
    """Unpack a zip's members, yielding the bytes of the archive read so far.

    zipfile never writes more of a member than its entry declares, so the declared sizes count.
    """
    with zipfile.ZipFile(limits.archive) as packed:
        for member in packed.infolist():
            limits.check_name(member.filename)
            limits.count(member.file_size)
            if member.external_attr >> 28 in _ZIP_SPECIAL:
                limits.refuse(f"{member.filename!r}, which is a link or a device")
            if member.compress_type not in _ZIP_METHODS:
                raise NotImplementedError(f"{member.filename!r} uses a rare compression method")
        require_disk(limits.folder, limits.unpacked_bytes)
        read_bytes = 0
        for member in packed.infolist():
            limits.name = member.filename
            packed.extract(member, limits.folder)
            read_bytes += member.compress_size
            yield read_bytes


class _Counted:
    """A decompressed stream that counts all tarfile reads, names and attributes too.

    tarfile keeps what it reads of a header: gigabytes, packed well, would fill the memory.
    """

    def __init__(self, stream: BinaryIO, limits: Limits):
        self.stream = stream
        self.limits = limits
        self.seek = stream.seek
        self.tell = stream.tell
        self.header_bytes: int | None = 0  # read of the current header; None: outside of headers

    def read(self, size: int) -> bytes:
        if self.header_bytes is not None:
            self.header_bytes += size
            if self.header_bytes > MAX_HEADER_BYTES:
                self.limits.refuse(f"a header of {self.header_bytes:,} bytes or more")
        data = self.stream.read(size)
        self.limits.count(len(data))
        return data


def _untar(limits: Limits) -> Iterator[int]:
    """Unpack a tar's members, yielding the bytes of the archive read so far."""
    opener = _OPENERS.get(limits.archive.suffix.lower(), lambda raw: raw)
    with open(limits.archive, "rb") as raw, opener(raw) as stream:
        counted = _Counted(stream, limits)
        with tarfile.open(fileobj=counted, mode="r:", copybufsize=CHUNK_BYTES) as packed:
            # Since Python 3.11.4; before (Debian 12 has 3.11.2), the checks below must do.
            packed.extraction_filter = getattr(tarfile, "data_filter", None)
            while member := packed.next():
                packed.members.clear()  # tarfile would keep a million of them
                # tar names the packed folder itself "./", or nothing.
                limits.check_name(member.name or ("." if member.isdir() else ""))
                # A sparse file of a few bytes may be petabytes.
                if not (member.isdir() or member.isreg()) or member.issparse():
                    limits.refuse(f"{member.name!r}, which is a link, a device or a sparse file")
                counted.header_bytes = None
                packed.extract(member, limits.folder, set_attrs=False)
                counted.header_bytes = 0
                yield raw.tell()
        counted.header_bytes = None
        # tarfile takes a broken header for the end; the true end is a block of zeros.
        stream.seek(packed.offset)
        if stream.read(512) != bytes(512):
            raise _damaged(limits.archive, "it has no end mark, or a broken header before it")
        while counted.read(CHUNK_BYTES):
            """Read to the end, where gzip and xz compare the checksum."""
