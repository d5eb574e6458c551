"""What a Debian package would install, taken out of it without installing anything.

A package is an `ar` archive (deb(5)) whose member `data.tar.*` holds the files. Here it becomes a
file of its own, which archive.py unpacks. Knows no package by name.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from kit.base.files import atomic_path, make_folder
from kit.dataset.archive import ArchiveError, archive_suffix

MAGIC = b"!<arch>\n"
HEADER_BYTES = 60
MEMBERS = 16  # a package has three or four


def data_archive(package: Path, into: Path) -> Path:
    """The member `data.tar.*` of `package` as a file in the folder `into`, named after it.

    Written whole, and only once. Raises ArchiveError for what is no Debian package, or broken.
    """
    package = Path(package)
    if not package.is_file():
        raise ArchiveError(f"There is no {package}: is the name right, and the disk mounted?")
    with package.open("rb") as file:
        for name, size_bytes in _members(file, package):
            if name.startswith("data.tar"):
                return _copied(file, name, size_bytes, package, make_folder(into))
    raise _broken(package, "it holds no data.tar")


def _members(file: BinaryIO, package: Path) -> Iterator[tuple[str, int]]:
    """Name and bytes of each member of an `ar` archive; `file` then stands at its first byte."""
    if file.read(len(MAGIC)) != MAGIC:
        raise ArchiveError(f"{package} is no Debian package: name a file that ends in .deb.")
    for _ in range(MEMBERS):
        header = file.read(HEADER_BYTES)
        if not header:
            return
        size = header[48:58].strip()
        if len(header) != HEADER_BYTES or not header.endswith(b"`\n") or not size.isdigit():
            raise _broken(package, "a member's header is damaged")
        begin = file.tell()
        yield header[:16].decode("ascii", "replace").strip().rstrip("/"), int(size)
        file.seek(begin + int(size) + int(size) % 2)  # members begin at even places


def _copied(file: BinaryIO, name: str, size_bytes: int, package: Path, into: Path) -> Path:
    path = into / f"{package.stem}.{name}"
    if not archive_suffix(path):
        raise ArchiveError(
            f"{package} is packed in a way not known here ({name}): unpack it with `dpkg-deb -x`."
        )
    there_bytes = package.stat().st_size - file.tell()
    if there_bytes < size_bytes:
        raise _broken(package, f"{there_bytes:,} of the {size_bytes:,} bytes of {name} are there")
    if path.is_file() and path.stat().st_size == size_bytes:
        return path
    with atomic_path(path) as part, part.open("wb") as target:
        shutil.copyfileobj(_First(file, size_bytes), target)
    return path


class _First:
    """The first `size_bytes` that are left of a file."""

    def __init__(self, file: BinaryIO, size_bytes: int):
        self.file = file
        self.left_bytes = size_bytes

    def read(self, size_bytes: int) -> bytes:
        data = self.file.read(min(size_bytes, self.left_bytes))
        self.left_bytes -= len(data)
        return data


def _broken(package: Path, why: str) -> ArchiveError:
    return ArchiveError(
        f"{package} is damaged or was not downloaded to its end ({why}): download it again."
    )
