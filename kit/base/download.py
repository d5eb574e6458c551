"""A file fetched from an address: it gets its name once its size and SHA-256 are those told.

What a killed download had fetched stays beside it, and the next one goes on from there. Knows no
source by name.
"""

import contextlib
import dataclasses
import http.client
import os
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from kit.base.files import DiskError, file_digest, make_folder, writing
from kit.base.words import brief

PIECE_BYTES = 2**20
TRIES = 3  # in a row that brought nothing
PAUSE_S = 2.0  # between them
TIMEOUT_S = 60.0  # for which a source may be silent


class DownloadError(RuntimeError):
    """Files that their source does not give; the message says why and what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """A file as its source describes it."""

    name: str
    size_bytes: int
    sha256: str  # "" where it is not told


@dataclasses.dataclass(frozen=True, kw_only=True)
class DownloadSource:
    """Where files come from, in words."""

    name: str  # such as "The hub (huggingface.co)"
    otherwise: str  # what to do without a network, a sentence's end

    def unreachable(self, why: object) -> str:
        return (
            f"{self.name} could not be reached ({brief(why)}). Is this machine online? Run this "
            f"again: what has come stays. Without a network, {self.otherwise}."
        )


def paths_of(folder: Path, file: RemoteFile) -> tuple[Path, Path]:
    """Where `file` lies, and where it lies as long as it is not whole."""
    return folder / file.name, folder / f"{file.name}.part"


def bytes_at(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def fetch_file(
    address: str, file: RemoteFile, folder: Path, source: DownloadSource
) -> Iterator[int]:
    """Fetch `file` into `folder`, going on where it was left; yields how many bytes there are.

    Raises DownloadError where the source gives no more, or other bytes than were told.
    """
    path, part = paths_of(folder, file)
    if bytes_at(path) == file.size_bytes:
        yield file.size_bytes
        return
    path.unlink(missing_ok=True)
    make_folder(path.parent)
    yield from fetch_bytes(address, file, part, source)
    require_told(part, file)
    with writing(path):
        os.replace(part, path)


def fetch_bytes(
    address: str, file: RemoteFile, part: Path, source: DownloadSource
) -> Iterator[int]:
    """Append to `part` until it has the bytes of `file`, or three tries have brought none."""
    tries = 0
    while bytes_at(part) != file.size_bytes or not part.exists():
        before_bytes = bytes_at(part)
        why = "it ended early"
        try:
            yield from append(address, part, file.size_bytes)
        except DownloadError as error:
            why = error
        tries = 0 if bytes_at(part) > before_bytes else tries + 1
        if tries == TRIES:
            raise DownloadError(
                f"{file.name} is not whole: {bytes_at(part):,} of {file.size_bytes:,} bytes have "
                f"come. {source.unreachable(why)}"
            )
        if tries:
            time.sleep(PAUSE_S)


def append(address: str, part: Path, size_bytes: int) -> Iterator[int]:
    """Append to `part` what it lacks of `size_bytes`. Raises DownloadError for a broken line."""
    have_bytes = bytes_at(part)
    if have_bytes > size_bytes:  # of another file
        part.unlink()
        have_bytes = 0
    request = urllib.request.Request(address)
    if have_bytes:
        request.add_header("Range", f"bytes={have_bytes}-")
    with broken_line(), urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        goes_on = have_bytes and answer.status == http.client.PARTIAL_CONTENT
        if not goes_on:  # it sends all of it again
            have_bytes = 0
        with writing(part):
            part.touch()
        with open(part, "ab" if goes_on else "wb") as file:
            while have_bytes < size_bytes:
                piece = answer.read(min(PIECE_BYTES, size_bytes - have_bytes))
                if not piece:
                    return
                with writing(part):
                    file.write(piece)
                have_bytes += len(piece)
                yield have_bytes


@contextlib.contextmanager
def broken_line() -> Iterator[None]:
    """Tell as a DownloadError what ends a download; a disk's objections stay what they are."""
    try:
        yield
    except DiskError:
        raise
    except (OSError, http.client.HTTPException) as why:  # URLError and its kind are OSErrors
        raise DownloadError(brief(why)) from why


def require_told(part: Path, file: RemoteFile) -> None:
    """Raise DownloadError, and drop what came, where it is not what was told."""
    if not file.sha256:
        return
    sha256 = file_digest(part)
    if sha256 != file.sha256:
        part.unlink()
        raise DownloadError(
            f"{file.name} came damaged: its SHA-256 is {sha256}, expected {file.sha256}. What "
            "came was dropped: run this again."
        )
