"""Unpack dataset archives (tar, zip) with tarfile and zipfile, safely.

Names that lead out of the folder, links, decompression bombs and truncated archives are refused;
the folder appears by one rename once everything is unpacked.
"""

import bz2
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

from kit.base.errors import DatasetError, DiskError
from kit.base.files import digest, disk_errors, require_disk, write_atomic
from kit.base.lock import held
from kit.settings import ArchiveConfig

SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar", ".zip")
MARK = ".unpacked-from"  # a file in every finished folder: which archive it came from
CHUNK_BYTES = 2**20
BLOCK_BYTES = 512  # of a tar
DISK_STEP_BYTES = 2**28  # how often free disk space is checked
RATIO_FROM_BYTES = 2**26  # small archives of repetitive tables may exceed the ratio
OPENERS = {".gz": gzip.open, ".tgz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
# What the libraries raise for a damaged archive, also for numbers that cannot be.
DAMAGE = (tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError)
DAMAGE += (ValueError, OverflowError, struct.error)


def archive_suffix(path: Path) -> str:
    return next((s for s in SUFFIXES if Path(path).name.lower().endswith(s)), "")


def unpack(
    archive: Path, into: Path, config: ArchiveConfig, progress: Callable = lambda *_: None
) -> Path:
    """Unpack `archive` to a folder of its name under `into`; do nothing if that was done before.

    `progress(done, total)` counts bytes of the archive. If another process is unpacking it, prints
    a line and waits. Raises DatasetError for a damaged archive, an unsafe member or a bomb, and
    DiskError when the disk is too small; nothing is left behind then.
    """
    archive = Path(archive)
    suffix = archive_suffix(archive)
    if not archive.is_file() or not suffix:
        raise DatasetError(f"{archive} is not an archive to unpack ({', '.join(SUFFIXES)}).")
    folder = Path(into) / archive.name[: -len(suffix)]
    key = digest(archive.name, archive.stat().st_size, archive.stat().st_mtime_ns)
    if _is_unpacked(folder, key):
        return folder
    lock_file = folder.with_name(f".{folder.name}.lock")
    with held(lock_file, f"unpacking {archive}", math.inf, print):
        if _is_unpacked(folder, key):  # another process did it meanwhile
            return folder
        for leftover in folder.parent.glob(f".{glob.escape(folder.name)}.unpacking*"):
            shutil.rmtree(leftover, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.unpacking"))
        try:
            temporary.chmod(0o755)  # mkdtemp lets only its owner in
            _unpack_into(Limits(archive, temporary, config), progress)
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
    """What may be unpacked from an archive: nothing outside its folder, and no bomb."""

    def __init__(self, archive: Path, folder: Path, config: ArchiveConfig):
        self.archive = archive
        self.folder = folder
        self.config = config
        self.archive_bytes = archive.stat().st_size
        self.unpacked_bytes = 0
        self.checked_bytes = 0  # unpacked when free disk space was last checked
        require_disk(folder, self.archive_bytes)

    def refuse(self, what: str, limit: str = "") -> None:
        fix = "do not use it"
        if limit:
            fix = (
                f"if you trust it, raise that limit (--set archive.{limit}=..., in a notebook "
                f'start(RUN, settings={{"archive": {{"{limit}": ...}}}}))'
            )
        raise DatasetError(f"{self.archive} holds {what}: {fix}. Nothing was unpacked.")

    def check(self, name: str, size_bytes: int) -> None:
        """Check the next member's name, and the bytes of all so far."""
        path = PurePosixPath(name)
        leads_out = path.is_absolute() or PureWindowsPath(name).drive or ".." in path.parts
        if leads_out or "\\" in name or "\0" in name:
            self.refuse(f"a member named {name!r}, which leads out of the folder")
        self.unpacked_bytes += size_bytes
        if self.unpacked_bytes > self.config.most_gib * 2**30:
            self.refuse(f"more than {self.config.most_gib} GiB", "most_gib")
        most_bytes = self.config.most_ratio * max(1, self.archive_bytes)
        if self.unpacked_bytes > max(RATIO_FROM_BYTES, most_bytes):
            self.refuse(f"over {self.config.most_ratio:.0f} times its own size", "most_ratio")
        if self.unpacked_bytes - self.checked_bytes > DISK_STEP_BYTES:
            self.checked_bytes = self.unpacked_bytes
            require_disk(self.folder, max(size_bytes, DISK_STEP_BYTES))


def _unpack_into(limits: Limits, progress: Callable) -> None:
    archive = limits.archive
    try:
        for read_bytes in _unzip(limits) if archive_suffix(archive) == ".zip" else _untar(limits):
            progress(min(read_bytes, limits.archive_bytes), limits.archive_bytes)
    except (DatasetError, DiskError):
        raise
    except (*DAMAGE, OSError) as error:
        if getattr(error, "errno", None) is None:  # gzip and bz2 raise OSErrors without one
            raise _damaged(archive, error) from error
        with disk_errors(limits.folder):
            raise
    except RuntimeError as error:  # zipfile: a password, a rare method
        raise DatasetError(f"{archive} cannot be unpacked: {error}. Unpack it by hand.") from error
    progress(limits.archive_bytes, limits.archive_bytes)


def _damaged(archive: Path, reason: object) -> DatasetError:
    return DatasetError(
        f"{archive} is damaged or incompletely downloaded ({reason}): compare its size, "
        f"{archive.stat().st_size:,} bytes, with the source and download it again."
    )


def _unzip(limits: Limits) -> Iterator[int]:
    """Unpack a zip's members, yielding the bytes of the archive read so far."""
    # zipfile never writes more of a member than its entry declares, so the declared sizes count.
    with zipfile.ZipFile(limits.archive) as packed:
        for entry in packed.infolist():
            entry.filename = entry.filename.replace("\\", "/")  # as some tools of Windows write it
            limits.check(entry.filename, entry.file_size)
        require_disk(limits.folder, limits.unpacked_bytes)
        read_bytes = 0
        for entry in packed.infolist():
            packed.extract(entry, limits.folder)
            read_bytes += entry.compress_size
            yield read_bytes


def _untar(limits: Limits) -> Iterator[int]:
    """Unpack a tar's members, yielding the bytes of the archive read so far."""
    opener = OPENERS.get(limits.archive.suffix.lower(), lambda raw: raw)
    # Since Python 3.11.4; before (Debian 12 has 3.11.2), the checks here must do.
    safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with open(limits.archive, "rb") as raw, opener(raw) as stream:
        with tarfile.open(fileobj=stream, mode="r:") as packed:
            for entry in packed:
                limits.check(entry.name, entry.size)
                # A sparse file of a few bytes may be petabytes.
                if not (entry.isdir() or entry.isreg()) or entry.issparse():
                    limits.refuse(f"{entry.name!r}, which is a link, a device or a sparse file")
                packed.extract(entry, limits.folder, set_attrs=False, **safely)
                yield raw.tell()
        # tarfile takes a broken header for the end; the true end is two blocks of zeros.
        stream.seek(max(0, stream.tell() - BLOCK_BYTES))
        if stream.read(2 * BLOCK_BYTES) != bytes(2 * BLOCK_BYTES):
            raise _damaged(limits.archive, "it has no end mark, or a broken header before it")
        while stream.read(CHUNK_BYTES):
            """Read to the end, where gzip and xz compare the checksum."""
