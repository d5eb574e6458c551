"""Download a file from a URL; it gets its final name once size and SHA-256 are as expected.

What a killed download has fetched stays beside it, and the next one resumes there.
"""

import contextlib
import dataclasses
import http.client
import os
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from kit.base.errors import DiskError, DownloadError
from kit.base.files import disk_errors, file_digest, make_folder
from kit.base.formatting import shorten

PIECE_BYTES = 2**20
TRIES = 3  # in a row that fetched nothing
PAUSE_S = 2.0  # between them
TIMEOUT_S = 60.0  # without a byte from the server


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """A file as its source describes it."""

    name: str
    size_bytes: int
    sha256: str  # "" where the source does not give it


@dataclasses.dataclass(frozen=True, kw_only=True)
class DownloadSource:
    """A server, for messages."""

    name: str  # such as "The hub (huggingface.co)"
    otherwise: str  # what to do without a network, the end of a sentence

    def unreachable(self, reason: object) -> str:
        return (
            f"{self.name} could not be reached ({shorten(reason)}). Is this machine online? Run "
            "this again: it resumes where it stopped. Without a network, "
            f"{self.otherwise}."
        )


def target_and_part(folder: Path, file: RemoteFile) -> tuple[Path, Path]:
    """Return the path of `file`, and that of an incomplete download of it."""
    return folder / file.name, folder / f"{file.name}.part"


def bytes_on_disk(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def fetch_file(
    address: str, file: RemoteFile, folder: Path, source: DownloadSource, token: str = ""
) -> Iterator[int]:
    """Fetch `file` into `folder`, resuming where it stopped; yield how many bytes there are.

    `token` is sent to the host of `address` only, never to another one it redirects to.
    Raises DownloadError where the source gives no more, or the SHA-256 differs.
    """
    path, part = target_and_part(folder, file)
    if bytes_on_disk(path) == file.size_bytes:
        yield file.size_bytes
        return
    path.unlink(missing_ok=True)
    make_folder(path.parent)
    yield from _fetch_bytes(address, file, part, source, token)
    if file.sha256:
        sha256 = file_digest(part)
        if sha256 != file.sha256:
            part.unlink()
            raise DownloadError(
                f"{file.name} came damaged: its SHA-256 is {sha256}, expected {file.sha256}. The "
                "download was deleted: run this again."
            )
    with disk_errors(path):
        os.replace(part, path)


def _fetch_bytes(
    address: str, file: RemoteFile, part: Path, source: DownloadSource, token: str
) -> Iterator[int]:
    """Append to `part` until it has all bytes of `file`, or `TRIES` in a row fetched none."""
    tries = 0
    while bytes_on_disk(part) != file.size_bytes or not part.exists():
        before_bytes = bytes_on_disk(part)
        reason = "it ended early"
        try:
            yield from _append(address, part, file.size_bytes, token)
        except DownloadError as error:
            reason = error
        tries = 0 if bytes_on_disk(part) > before_bytes else tries + 1
        if tries == TRIES:
            raise DownloadError(
                f"{file.name} is incomplete: {bytes_on_disk(part):,} of {file.size_bytes:,} bytes "
                f"have arrived. {source.unreachable(reason)}"
            )
        if tries:
            time.sleep(PAUSE_S)


def _append(address: str, part: Path, size_bytes: int, token: str) -> Iterator[int]:
    """Append to `part` what it lacks of `size_bytes`. Raises DownloadError if it breaks off."""
    done_bytes = bytes_on_disk(part)
    if done_bytes > size_bytes:  # of another file
        part.unlink()
        done_bytes = 0
    request = urllib.request.Request(address)
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    if done_bytes:
        request.add_header("Range", f"bytes={done_bytes}-")
    with _network_errors(), urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        resumes = done_bytes and answer.status == http.client.PARTIAL_CONTENT
        if not resumes:  # the server sends the whole file again
            done_bytes = 0
        with disk_errors(part):
            part.touch()
        with open(part, "ab" if resumes else "wb") as file:
            while done_bytes < size_bytes:
                piece = answer.read(min(PIECE_BYTES, size_bytes - done_bytes))
                if not piece:
                    return
                with disk_errors(part):
                    file.write(piece)
                done_bytes += len(piece)
                yield done_bytes


@contextlib.contextmanager
def _network_errors() -> Iterator[None]:
    """Raise what breaks a download off as a DownloadError; a DiskError stays one."""
    try:
        yield
    except DiskError:
        raise
    except (OSError, http.client.HTTPException) as error:  # URLError and its kind are OSErrors
        raise DownloadError(shorten(error)) from error
