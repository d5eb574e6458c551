"""Download files of a Hugging Face repository, at one revision, into a folder.

`huggingface_hub` lists and downloads them. A file gets its name once its size and SHA-256 are as
expected; what a killed download has fetched stays beside it and is resumed. HF_ENDPOINT names
another hub, as for the library.
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

from kit.base.errors import KitError
from kit.base.files import disk_errors, file_digest, make_folder, require_disk, write_atomic
from kit.base.formatting import join_names, shorten

CARD = "download.json"  # what was fetched, and from where: written last
MAX_CARD_BYTES = 2**24
REFUSED = (401, 403)  # of HTTP


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteFile:
    name: str
    size_bytes: int
    sha256: str  # "" where the source does not give it


@dataclasses.dataclass(frozen=True, kw_only=True)
class DownloadSource:
    name: str  # of a server, such as "The hub (huggingface.co)"
    otherwise: str  # what to do without a network, the end of a sentence

    def unreachable(self, reason: object) -> str:
        first_line = (str(reason).splitlines() or [type(reason).__name__])[0]
        return (
            f"{self.name} could not be reached ({shorten(first_line)}). Is this machine online? "
            f"Run this again: it resumes where it stopped. Without a network, {self.otherwise}."
        )


def bytes_on_disk(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def fetch_file(
    address: str, file: RemoteFile, folder: Path, source: DownloadSource, with_token: bool = False
) -> None:
    """Fetch `file` into `folder`, resuming where it stopped; a progress bar shows it.

    `with_token` sends the hub's token, to the host of `address` alone. Raises KitError with the
    fix, DiskError if it cannot be written.
    """
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    path = folder / file.name
    part = folder / f"{file.name}.part"
    if bytes_on_disk(path) == file.size_bytes:
        return
    make_folder(path.parent)
    with disk_errors(path):
        path.unlink(missing_ok=True)
        if bytes_on_disk(part) > file.size_bytes:  # of another file
            part.unlink()
    try:
        with open(part, "ab") as target:
            http_get(
                address,
                target,
                resume_size=bytes_on_disk(part),
                headers=build_hf_headers(token=None if with_token else False),
                expected_size=file.size_bytes,
            )
    except Exception as error:  # of the library below, which differs from version to version
        if isinstance(error, OSError) and error.errno:  # not from the network
            with disk_errors(part):
                raise
        answer = getattr(error, "response", None)
        if getattr(answer, "status_code", 0) in REFUSED:
            raise KitError(
                f"{source.name} refuses {file.name} ({shorten(error)}): a gated repository needs "
                "HF_TOKEN of somebody to whom its page has given access."
            ) from error
        raise KitError(
            f"{file.name} is incomplete: {bytes_on_disk(part):,} of {file.size_bytes:,} bytes "
            f"have arrived. {source.unreachable(error)}"
        ) from error
    sha256 = file_digest(part) if file.sha256 else ""
    if sha256 != file.sha256:
        part.unlink()
        raise KitError(
            f"{file.name} came damaged: its SHA-256 is {sha256}, expected {file.sha256}. The "
            "download was deleted: run this again."
        )
    with disk_errors(path):
        os.replace(part, path)


def fetch_model(
    repository: str,
    revision: str,
    names: Sequence[str],
    folder: Path,
    optional: Sequence[str] = (),
    listing: tuple[str, dict[str, RemoteFile]] | None = None,
) -> dict:
    """Fetch `names` of `repository` at `revision` into `folder`; return the card written there.

    Those in `optional` are fetched where they exist. The hub is not asked when all files are there;
    `listing` is an earlier answer of `list_files`. Raises KitError with the fix, and DiskError
    before the first byte where there is no room.
    """
    from huggingface_hub import hf_hub_url

    folder = Path(folder)
    card = fetched(folder, names)
    if card:
        return card
    commit, files = listing or list_files(repository, revision)
    missing = [name for name in names if name not in files]
    if missing:
        raise KitError(
            f"{repository} at revision {revision} has no {join_names(missing)}; it has "
            f"{join_names(sorted(files), 8)}. Name a repository and a revision that have them."
        )
    requested = [files[name] for name in (*names, *optional) if name in files]
    make_folder(folder)
    total_bytes = sum(file.size_bytes for file in requested)
    paths = [folder / f"{file.name}{end}" for file in requested for end in ("", ".part")]
    require_disk(folder, max(0, total_bytes - sum(map(bytes_on_disk, paths))))
    for file in requested:
        address = hf_hub_url(repository, file.name, revision=commit, endpoint=endpoint())
        fetch_file(address, file, folder, hub_source(), with_token=True)
    card = {"repository": repository, "revision": revision, "commit": commit}
    card["files"] = {
        file.name: {"bytes": file.size_bytes, "sha256": file_digest(folder / file.name)}
        for file in requested
    }
    write_atomic(folder / CARD, json.dumps(card, indent=1))
    return card


def fetched(folder: Path, names: Sequence[str]) -> dict:
    """The card in `folder` if all of `names` have been fetched there, else {}."""
    if not 0 < bytes_on_disk(folder / CARD) <= MAX_CARD_BYTES:
        return {}
    try:
        card = json.loads((folder / CARD).read_bytes())
        complete = all(
            bytes_on_disk(folder / name) == card["files"][name]["bytes"] for name in names
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return card if complete else {}


def list_files(repository: str, revision: str) -> tuple[str, dict[str, RemoteFile]]:
    """Return the commit of `revision`, and its files by name. Raises KitError."""
    from huggingface_hub import HfApi, utils

    hub = HfApi(endpoint=endpoint())
    refused = (utils.HFValidationError, utils.RepositoryNotFoundError, utils.RevisionNotFoundError)
    try:
        info = hub.model_info(repository, revision=revision, files_metadata=True)
    except refused as error:
        raise KitError(
            f"The hub does not give {shorten(repr(repository))} at revision {revision} "
            f"({type(error).__name__}). Is it OWNER/NAME, with a revision that its page lists "
            "under Files, Commits? A private one needs HF_TOKEN of somebody who may read it; for "
            "a gated one ask for access on its page."
        ) from error
    except Exception as error:  # of the library below, which differs from version to version
        raise KitError(hub_source().unreachable(error)) from error
    files = {}
    for file in info.siblings or ():
        name = file.rfilename
        sha256 = file.lfs["sha256"] if file.lfs else ""
        files[name] = RemoteFile(name=name, size_bytes=file.size or 0, sha256=sha256)
    return info.sha, files


def endpoint() -> str | None:
    """The hub's address; None: the library's own."""
    return os.environ.get("HF_ENDPOINT") or None


def hub_source() -> DownloadSource:
    return DownloadSource(
        name=f"The hub ({endpoint() or 'huggingface.co'})",
        otherwise="copy the files here and name their folder",
    )
