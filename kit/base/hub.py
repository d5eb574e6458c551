"""Files of a model on the Hugging Face hub, at one revision, in a folder of this machine.

`huggingface_hub` says what there is, how large, and where. The bytes are read here: what a killed
download had fetched stays, and the next one goes on from there, which the library has given up
(each of its downloads begins a file anew). A file gets its name once its size and its SHA-256 are
the hub's. HF_ENDPOINT names another hub, as the library has it. Knows no model by name.
"""

import contextlib
import dataclasses
import http.client
import json
import os
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kit.base.files import (
    DiskError,
    file_digest,
    make_folder,
    require_disk,
    write_atomic,
    writing,
)
from kit.base.words import brief, listed

CARD = "download.json"  # what was fetched, and from where: written last
PIECE_BYTES = 2**20
TRIES = 3  # in a row that brought nothing
PAUSE_S = 2.0  # between them
TIMEOUT_S = 60.0  # for which a hub may be silent


class HubError(RuntimeError):
    """Files that the hub does not give; the message says why and what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HubFile:
    """A file as the hub describes it."""

    name: str
    size_bytes: int
    sha256: str  # "" where it tells none, which it does of large files alone


def fetch_model(
    repository: str,
    revision: str,
    names: Sequence[str],
    folder: Path,
    progress: Callable = lambda *_: None,
    optional: Sequence[str] = (),
) -> dict:
    """The files `names` of `repository` at `revision` in `folder`; what the hub said of them.

    Those named in `optional` are taken where there are any. Nothing is asked of the hub where all
    of it lies there already. `progress(bytes, of bytes)` is called now and then. Raises HubError,
    which says what to do, and DiskError before the first byte where there is no room.
    """
    folder = Path(folder)
    found = fetched(folder, names)
    if found:
        return found
    commit, files = described(repository, revision)
    missing = [name for name in names if name not in files]
    if missing:
        raise HubError(
            f"{repository} at revision {revision} has no {listed(missing)}; it has "
            f"{listed(sorted(files), 8)}. Name the repository and revision of an XTTS-v2."
        )
    wanted = [files[name] for name in (*names, *optional) if name in files]
    make_folder(folder)
    total_bytes = sum(file.size_bytes for file in wanted)
    there_bytes = sum(bytes_at(path) for file in wanted for path in paths_of(folder, file))
    require_disk(folder, max(0, total_bytes - there_bytes))
    done_bytes = 0
    for file in wanted:
        address = address_of(repository, commit, file.name)
        for size_bytes in fetch_file(address, file, folder):
            progress(done_bytes + size_bytes, total_bytes)
        done_bytes += file.size_bytes
    card = {"repository": repository, "revision": revision, "commit": commit}
    card["files"] = {
        file.name: {"bytes": file.size_bytes, "sha256": file_digest(folder / file.name)}
        for file in wanted
    }
    write_atomic(folder / CARD, json.dumps(card, indent=1))
    return card


def fetched(folder: Path, names: Sequence[str]) -> dict:
    """What was noted in `folder` when all of `names` had come; {} where not all is there."""
    try:
        card = json.loads((folder / CARD).read_bytes())
        whole = [bytes_at(folder / name) == card["files"][name]["bytes"] for name in names]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return card if all(whole) else {}


def described(repository: str, revision: str) -> tuple[str, dict[str, HubFile]]:
    """The commit that `revision` is, and every file there by its name. Raises HubError."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub = endpoint()
    try:
        told = HfApi(endpoint=hub).model_info(repository, revision=revision, files_metadata=True)
    except HFValidationError as why:
        raise HubError(
            f"{brief(repr(repository))} names no repository of the hub, which is OWNER/NAME: "
            f"{brief(why)}."
        ) from why
    except GatedRepoError as why:  # before RepositoryNotFoundError, of which it is one
        raise HubError(
            f"{repository} is given to those alone whom its owner lets in. Ask on its page, set "
            "HF_TOKEN and download its files yourself; then name their folder."
        ) from why
    except RepositoryNotFoundError as why:
        raise HubError(
            f"The hub has no {repository}, or it is private. Is the name right?"
        ) from why
    except RevisionNotFoundError as why:
        raise HubError(
            f"{repository} has no revision {revision}. Take one that its page lists under Files, "
            "Commits."
        ) from why
    except Exception as why:  # of the library below, which differs from version to version
        raise HubError(unreachable(hub, why)) from why
    files = {}
    for file in told.siblings or ():
        sha256 = file.lfs["sha256"] if file.lfs else ""
        files[file.rfilename] = HubFile(
            name=file.rfilename, size_bytes=file.size or 0, sha256=sha256
        )
    return told.sha, files


def endpoint() -> str | None:
    """The address of the hub that is asked for; None: the library's."""
    return os.environ.get("HF_ENDPOINT") or None


def address_of(repository: str, commit: str, name: str) -> str:
    from huggingface_hub import hf_hub_url

    return hf_hub_url(repository, name, revision=commit, endpoint=endpoint())


def unreachable(hub: str | None, why: object) -> str:
    where = f"The hub ({hub or 'huggingface.co'})"
    return (
        f"{where} could not be reached ({brief(why)}). Is this machine online? Run this again: "
        "what has come stays. Without a network, copy the files here and name their folder."
    )


def paths_of(folder: Path, file: HubFile) -> tuple[Path, Path]:
    """Where `file` lies, and where it lies as long as it is not whole."""
    return folder / file.name, folder / f"{file.name}.part"


def bytes_at(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def fetch_file(address: str, file: HubFile, folder: Path) -> Iterator[int]:
    """Fetch `file` into `folder`, going on where it was left; yields how many bytes there are.

    Raises HubError where the hub gives no more, or other bytes than it told.
    """
    path, part = paths_of(folder, file)
    if bytes_at(path) == file.size_bytes:
        yield file.size_bytes
        return
    path.unlink(missing_ok=True)
    yield from fetch_bytes(address, file, part)
    require_told(part, file)
    with writing(path):
        os.replace(part, path)


def fetch_bytes(address: str, file: HubFile, part: Path) -> Iterator[int]:
    """Append to `part` until it has the bytes of `file`, or three tries have brought none."""
    tries = 0
    while bytes_at(part) != file.size_bytes or not part.exists():
        before_bytes = bytes_at(part)
        why = "it ended early"
        try:
            yield from append(address, part, file.size_bytes)
        except HubError as error:
            why = error
        tries = 0 if bytes_at(part) > before_bytes else tries + 1
        if tries == TRIES:
            raise HubError(
                f"{file.name} is not whole: {bytes_at(part):,} of {file.size_bytes:,} bytes have "
                f"come. {unreachable(endpoint(), why)}"
            )
        if tries:
            time.sleep(PAUSE_S)


def append(address: str, part: Path, size_bytes: int) -> Iterator[int]:
    """Append to `part` what it lacks of `size_bytes`. Raises HubError where the line breaks."""
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
    """Tell as a HubError what ends a download; a disk's objections stay what they are."""
    try:
        yield
    except DiskError:
        raise
    except (OSError, http.client.HTTPException) as why:  # URLError and its kind are OSErrors
        raise HubError(brief(why)) from why


def require_told(part: Path, file: HubFile) -> None:
    """Raise HubError, and drop what came, where it is not what the hub told."""
    if not file.sha256:
        return
    sha256 = file_digest(part)
    if sha256 != file.sha256:
        part.unlink()
        raise HubError(
            f"{file.name} came damaged: its SHA-256 is {sha256}, the hub tells {file.sha256}. What "
            "came was dropped: run this again."
        )
