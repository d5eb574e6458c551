"""Archives unpacked so that neither a damaged nor a hostile one does harm.

tarfile (with its `data` filter) and zipfile write the files. Here is what they do not do: a name
that leads elsewhere and a link are refused rather than bent or followed, a bomb is refused before
the disk is full, an archive that breaks off is noticed, and the result appears whole, by one
rename, or not at all. Knows nothing of what is inside.
"""

import bz2
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
from kit.base.files import digest, disk_errors, require_disk, write_atomic
from kit.base.lock import Lock, held

SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar", ".zip")
MARK = ".unpacked-from"  # in a folder that stands whole: which archive it came from
CHUNK_BYTES = 2**20
DISK_STEP_BYTES = 2**28  # how often the free disk is looked at
HEADER_BYTES = 2**22  # no honest name or attribute list is longer
_OPENERS = {".gz": gzip.open, ".tgz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
# Others hand zipfile all that a few bytes unpack to, at once.
_ZIP_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ZIP_SPECIAL = (1, 2, 6, 10, 12)  # kinds in the Unix mode: pipe, devices, link, socket
_CLASHES = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL)
_DAMAGE = (tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError)


class ArchiveError(ValueError):
    """An archive that is damaged, hostile or holds no dataset; the message says what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArchiveConfig:
    most_gib: float = 200.0  # unpacked
    most_members: int = 5_000_000  # files and folders
    most_ratio: float = 100.0  # bytes unpacked per byte of archive; recordings stay below 20
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
    name = folder.with_name(f".{folder.name}.lock")
    with held(name, f"unpacking {archive}", math.inf, say) as lock:
        if not _stands(folder, key):
            _unpack_whole(archive, folder, key, config, progress, lock)
    return folder


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


def _unpack_whole(
    archive: Path, folder: Path, key: str, config: ArchiveConfig, progress: Callable, lock: Lock
) -> None:
    """`archive` as the folder `folder`, which appears by one rename."""
    for left_by_a_kill in folder.parent.glob(f".{glob.escape(folder.name)}.unpacking*"):
        shutil.rmtree(left_by_a_kill, ignore_errors=True)
    begun = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.unpacking"))
    try:
        begun.chmod(0o755)  # mkdtemp lets only its owner in
        _unpack_into(Limits(archive, begun, config), progress)
        lock.confirm()  # while this machine slept, another may have cleared `begun` away
        write_atomic(begun / MARK, key)
        with disk_errors(folder):
            begun.rename(folder)
    finally:
        shutil.rmtree(begun, ignore_errors=True)


class Limits:
    """Counts what comes out of an archive, and refuses what is unsafe or too much."""

    def __init__(self, archive: Path, folder: Path, config: ArchiveConfig):
        self.archive = archive
        self.folder = folder
        self.config = config
        self.archive_bytes = archive.stat().st_size
        self.unpacked_bytes = 0
        self.looked_bytes = 0
        self.members = 0
        self.name = ""  # of the member in hand
        require_disk(folder, self.archive_bytes)

    def refuse(self, what: str, limit: str = "") -> None:
        cure = "do not use it"
        if limit:
            cure = (
                f"if you trust it, raise that limit (--set archive.{limit}=..., in a notebook "
                f'start(RUN, settings={{"archive": {{"{limit}": ...}}}}))'
            )
        raise ArchiveError(f"{self.archive} holds {what}: {cure}. Nothing was unpacked.")

    def admit(self, name: str) -> None:
        """Take a member in hand. Raises ArchiveError for one too many, or a name that leads out."""
        self.name = name
        self.members += 1
        if self.members > self.config.most_members:
            self.refuse(f"more than {self.config.most_members:,} members", "most_members")
        path = PurePosixPath(name)
        leads_out = path.is_absolute() or PureWindowsPath(name).drive or ".." in path.parts
        if leads_out or "\\" in name or "\0" in name:
            self.refuse(f"a member named {name!r}, which leads out of the folder")

    def count(self, size_bytes: int) -> None:
        """Note that `size_bytes` more are unpacked. Raises ArchiveError, or DiskError, in time."""
        self.unpacked_bytes += size_bytes
        if self.unpacked_bytes > self.config.most_gib * 2**30:
            self.refuse(f"more than {self.config.most_gib} GiB", "most_gib")
        ratio = self.unpacked_bytes / max(1, self.archive_bytes)
        big = self.unpacked_bytes > self.config.ratio_from_mib * 2**20
        if big and ratio > self.config.most_ratio:
            self.refuse(f"over {self.config.most_ratio:.0f} times its own size", "most_ratio")
        if self.unpacked_bytes - self.looked_bytes > DISK_STEP_BYTES:
            self.looked_bytes = self.unpacked_bytes
            require_disk(self.folder, DISK_STEP_BYTES)


def _unpack_into(limits: Limits, progress: Callable) -> None:
    """Every member into the folder of `limits`, with whatever goes wrong told by its name."""
    archive = limits.archive
    members = _unzip(limits) if archive_suffix(archive) == ".zip" else _untar(limits)
    try:
        for read_bytes in members:
            progress(min(read_bytes, limits.archive_bytes), limits.archive_bytes)
    except (*_DAMAGE, OSError) as error:
        if getattr(error, "errno", None) is None:  # as OSErrors from gzip and bz2, too
            raise _damaged(archive, error) from error
        if error.errno in _CLASHES:
            limits.refuse(f"{limits.name[:200]!r}, which the disk does not take ({error.strerror})")
        with disk_errors(limits.folder / limits.name[:200]):
            raise
    except (RuntimeError, NotImplementedError) as error:  # zipfile: a password, a rare method
        raise ArchiveError(f"{archive} cannot be unpacked here: {error}. Unpack it by hand.") from (
            error
        )
    progress(limits.archive_bytes, limits.archive_bytes)


def _damaged(archive: Path, error: object) -> ArchiveError:
    return ArchiveError(
        f"{archive} is damaged or was not downloaded to its end ({error}): compare its size, "
        f"{archive.stat().st_size:,} bytes, with the source and download it again."
    )


def _unzip(limits: Limits) -> Iterator[int]:
    """Unpack a zip's members, yielding the bytes of the archive dealt with so far.

    zipfile writes no more of a member than its entry promises, so the promises are what counts.
    """
    with zipfile.ZipFile(limits.archive) as packed:
        for member in packed.infolist():
            limits.admit(member.filename)
            limits.count(member.file_size)
            if member.external_attr >> 28 in _ZIP_SPECIAL:
                limits.refuse(f"{member.filename!r}, which is a link or a device")
            if member.compress_type not in _ZIP_METHODS:
                raise NotImplementedError(f"{member.filename!r} is packed in a rare way")
        require_disk(limits.folder, limits.unpacked_bytes)
        read_bytes = 0
        for member in packed.infolist():
            limits.name = member.filename
            packed.extract(member, limits.folder)
            read_bytes += member.compress_size
            yield read_bytes


class _Counted:
    """A decompressed stream that counts what tarfile reads of it, names and attributes, too.

    tarfile reads those whole: a packed header of gigabytes would fill the memory.
    """

    def __init__(self, stream: BinaryIO, limits: Limits):
        self.stream = stream
        self.limits = limits
        self.seek = stream.seek
        self.tell = stream.tell

    def read(self, size: int) -> bytes:
        if size > HEADER_BYTES:
            self.limits.refuse(f"a header of {size:,} bytes")
        data = self.stream.read(size)
        self.limits.count(len(data))
        return data


def _untar(limits: Limits) -> Iterator[int]:
    """Unpack a tar's members, yielding the bytes of the archive read so far."""
    opener = _OPENERS.get(limits.archive.suffix.lower(), lambda raw: raw)
    with open(limits.archive, "rb") as raw, opener(raw) as stream:
        counted = _Counted(stream, limits)
        with tarfile.open(fileobj=counted, mode="r:", copybufsize=CHUNK_BYTES) as packed:
            # Python 3.11.4 and later; on Debian 12's 3.11.2 what is refused here has to do.
            packed.extraction_filter = getattr(tarfile, "data_filter", None)
            while member := packed.next():
                packed.members.clear()  # tarfile would keep a million of them
                limits.admit(member.name)
                # A sparse file of a few bytes may be petabytes.
                if not (member.isdir() or member.isreg()) or member.issparse():
                    limits.refuse(f"{member.name!r}, which is a link, a device or a sparse file")
                packed.extract(member, limits.folder, set_attrs=False)
                yield raw.tell()
        # tarfile takes a broken header for the end; the end is a block of zeros.
        stream.seek(packed.offset)
        if stream.read(512) != bytes(512):
            raise _damaged(limits.archive, "it has no end mark, or a broken header before it")
        while counted.read(CHUNK_BYTES):
            """On to the checksum, which gzip and xz compare only there."""
