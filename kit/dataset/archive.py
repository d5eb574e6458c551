"""Unpack dataset archives: zipfile, and tarfile's `data` filter, keep every path in the folder.

Links, decompression bombs and truncated archives are refused; the folder appears by one rename
once everything is unpacked.
"""

import math
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from kit.base.errors import DatasetError, DiskError
from kit.base.files import (
    digest,
    disk_errors,
    make_folder,
    placeholder_problem,
    require_disk,
    write_atomic,
)
from kit.base.formatting import describe_error
from kit.base.lock import held
from kit.settings import ArchiveConfig

SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar", ".zip")
MARK = ".unpacked-from"  # a file in every finished folder: which archive it came from
CHUNK_BYTES = 2**20
BLOCK_BYTES = 512  # of a tar
UNSAFE = "do not use it. Nothing was unpacked."
RATIO_FROM_BYTES = 2**26  # small archives of repetitive tables may exceed the ratio


def archive_suffix(path: Path) -> str:
    return next((s for s in SUFFIXES if Path(path).name.lower().endswith(s)), "")


def unpack(
    archive: Path, into: Path, config: ArchiveConfig, progress: Callable = lambda *_: None
) -> Path:
    """Unpack `archive` to a folder of its name under `into`; do nothing if that was done before.

    `progress(done, total)` counts bytes of the archive. Waits while another process unpacks it.
    Raises DatasetError for a damaged archive, an unsafe member or a bomb, and DiskError when the
    disk is too small; nothing is left behind then.
    """
    archive = Path(archive)
    suffix = archive_suffix(archive)
    if not archive.is_file() or not suffix:
        raise DatasetError(f"{archive} is not an archive to unpack ({', '.join(SUFFIXES)}).")
    folder = Path(into) / archive.name[: -len(suffix)]
    temporary = folder.with_name(f".{folder.name}.unpacking")
    key = digest(archive.name, archive.stat().st_size, archive.stat().st_mtime_ns)
    with held(folder.with_name(f".{folder.name}.lock"), f"unpacking {archive}", math.inf, print):
        mark = folder / MARK
        if mark.is_file() and mark.read_text(encoding="utf-8") == key:
            return folder
        if folder.exists():
            raise DatasetError(
                f"{folder} is in the way: it was not unpacked from this archive. Move or delete "
                "it, or unpack into another folder."
            )
        shutil.rmtree(temporary, ignore_errors=True)  # of a killed process
        try:
            _unpack_into(make_folder(temporary), archive, config, progress)
            write_atomic(temporary / MARK, key)
            with disk_errors(folder):
                temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _unpack_into(folder: Path, archive: Path, config: ArchiveConfig, progress: Callable) -> None:
    size_bytes = archive.stat().st_size
    require_disk(folder, size_bytes)
    unpack_members = _unzip if archive_suffix(archive) == ".zip" else _untar
    try:
        unpack_members(archive, folder, config, lambda done: progress(done, size_bytes))
    except (DatasetError, DiskError):
        raise
    except Exception as error:  # dozens of classes: damage, a password, a rare compression
        if getattr(error, "errno", None) is not None:
            with disk_errors(folder):
                raise
        reason = placeholder_problem(archive) or describe_error(error)
        raise DatasetError(
            f"{archive} cannot be unpacked ({reason}): it may be damaged. Compare its size, "
            f"{size_bytes:,} bytes, with the source and download it again, or unpack it by hand."
        ) from error
    progress(size_bytes, size_bytes)


def _require_limits(archive: Path, unpacked_bytes: int, config: ArchiveConfig) -> None:
    """Raise DatasetError if the members of `archive` have too many bytes: a decompression bomb."""
    ratio_bytes = max(RATIO_FROM_BYTES, config.most_ratio * archive.stat().st_size)
    limits = {"most_gib": config.most_gib * 2**30, "most_ratio": ratio_bytes}
    for name, most_bytes in limits.items():
        if unpacked_bytes > most_bytes:
            raise DatasetError(
                f"{archive} holds more than archive.{name} = {getattr(config, name):g} allows: if "
                f"you trust it, raise that limit (--set archive.{name}=..., in a notebook "
                f'start(RUN, settings={{"archive": {{"{name}": ...}}}})). Nothing was unpacked.'
            )


def _unzip(archive: Path, folder: Path, config: ArchiveConfig, progress: Callable) -> None:
    # zipfile never writes more of a member than its entry declares, so the declared sizes count.
    with zipfile.ZipFile(archive) as packed:
        unpacked_bytes = sum(entry.file_size for entry in packed.infolist())
        _require_limits(archive, unpacked_bytes, config)
        require_disk(folder, unpacked_bytes)
        read_bytes = 0
        for entry in packed.infolist():
            entry.filename = entry.filename.replace("\\", "/")  # as some tools of Windows write it
            packed.extract(entry, folder)
            read_bytes += entry.compress_size
            progress(read_bytes)


def _untar(archive: Path, folder: Path, config: ArchiveConfig, progress: Callable) -> None:
    if not hasattr(tarfile, "data_filter"):
        raise DatasetError(
            f"{archive} cannot be unpacked safely by this Python: use 3.11.4 or later, or unpack "
            f"it by hand (tar -xf {archive.name}) and name the folder."
        )
    unpacked_bytes = 0
    with open(archive, "rb") as raw, tarfile.open(fileobj=raw) as packed:
        for member in packed:
            unpacked_bytes += member.size
            _require_limits(archive, unpacked_bytes, config)
            if not (member.isreg() or member.isdir()):  # some Pythons' filter lets links lead out
                raise DatasetError(f"{archive} holds a link or a device, {member.name!r}: {UNSAFE}")
            try:
                packed.extract(member, folder, set_attrs=False, filter="data")
            except tarfile.FilterError as error:
                raise DatasetError(
                    f"{archive} leads out of its folder ({error}): {UNSAFE}"
                ) from error
            progress(raw.tell())
        # tarfile takes a broken header for the end; the true end is two blocks of zeros.
        stream = packed.fileobj
        stream.seek(max(0, stream.tell() - BLOCK_BYTES))
        if stream.read(2 * BLOCK_BYTES) != bytes(2 * BLOCK_BYTES):
            raise EOFError("it has no end mark, or a broken header before it")
        while stream.read(CHUNK_BYTES):
            """Read to the end, where gzip and xz compare the checksum."""
