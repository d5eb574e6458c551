"""Download files of a Hugging Face repository, at one commit, into a folder.

A killed download resumes (since version 1, `hf_hub_download` starts again). A file gets its name
once its size and SHA-256 are as expected. HF_ENDPOINT names another hub.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from kit.base.errors import KitError
from kit.base.files import disk_errors, file_digest, make_folder, require_disk, write_atomic
from kit.base.formatting import describe_error, join_names, shorten

CARD = "download.json"  # what was fetched, and from where: written last


def bytes_on_disk(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def fetch_file(
    url: str, path: Path, size_bytes: int, sha256: str = "", headers: dict[str, str] | None = None
) -> str:
    """Download `url` to `path` unless it is there, resuming where it stopped; return its SHA-256.

    A progress bar shows it. Raises KitError with the fix, also for another SHA-256 than `sha256`
    ("" accepts any), and DiskError if it cannot be written.
    """
    written = path
    make_folder(path.parent)
    with disk_errors(path):
        if bytes_on_disk(path) != size_bytes:
            written = path.with_name(f"{path.name}.part")
            if bytes_on_disk(written) > size_bytes:  # of a server that ignores ranges
                written.unlink()
            _download(url, written, size_bytes, headers)
        actual = file_digest(written)
        if sha256 not in ("", actual):
            written.unlink()
            raise KitError(
                f"{path.name} came damaged: its SHA-256 is {actual}, expected {sha256}. The "
                "download was deleted: run this again."
            )
        os.replace(written, path)
    return actual


def _download(url: str, part: Path, size_bytes: int, headers: dict[str, str] | None) -> None:
    """Append to `part` what it lacks of the file at `url`."""
    from huggingface_hub.file_download import http_get

    headers = {**(headers or {}), "Accept-Encoding": "identity"}  # compressed, none could resume
    try:
        with open(part, "ab") as file:
            done = file.tell()
            http_get(url, file, resume_size=done, headers=headers, expected_size=size_bytes)
    except Exception as error:  # of the library below, which differs from version to version
        if isinstance(error, OSError) and error.errno is not None:  # of the disk
            raise
        raise _explained(url, url.rpartition("/")[2], error) from error


def _explained(url: str, what: str, error: Exception) -> KitError:
    """Return an error that says why the server of `url` does not give `what`, and the fix."""
    host = urlsplit(url).netloc
    return KitError(
        f"{host} does not give {what} ({describe_error(error)}). Is this machine online, and is it "
        "of a repository OWNER/NAME, at a revision that its page lists under Files, Commits? For a "
        "private or gated one, ask for access on its page and set HF_TOKEN. Run this again: it "
        "resumes. Without a network, copy the files here and name their folder."
    )


def fetch_model(
    repository: str,
    revision: str,
    names: Sequence[str],
    folder: Path,
    optional: Sequence[str] = (),
    listing: tuple[str, dict] | None = None,
) -> dict:
    """Fetch `names` of `repository` at `revision` into `folder`; return the card written there.

    Those in `optional` are fetched where they exist. The hub is not asked when all files are there;
    `listing` is an earlier answer of `list_files`. Raises KitError with the fix, and DiskError
    before the first byte where there is no room.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers

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
    present = [folder / f"{file.rfilename}{end}" for file in requested for end in ("", ".part")]
    require_disk(folder, sum(file.size for file in requested) - sum(map(bytes_on_disk, present)))
    card = {"repository": repository, "revision": revision, "commit": commit, "files": {}}
    for file in requested:
        name = file.rfilename
        url = hf_hub_url(repository, name, revision=commit, endpoint=endpoint())
        sha256 = file.lfs["sha256"] if file.lfs else ""
        sha256 = fetch_file(url, folder / name, file.size, sha256, build_hf_headers())
        card["files"][name] = {"bytes": file.size, "sha256": sha256}
    write_atomic(folder / CARD, json.dumps(card, indent=1))
    return card


def fetched(folder: Path, names: Sequence[str]) -> dict:
    """The card in `folder` if all of `names` have been fetched there, else {}."""
    try:
        card = json.loads((folder / CARD).read_bytes())
        sizes = {name: card["files"][name]["bytes"] for name in names}
    except (OSError, ValueError, KeyError):
        return {}
    return card if all(bytes_on_disk(folder / name) == sizes[name] for name in names) else {}


def list_files(repository: str, revision: str) -> tuple[str, dict]:
    """Return the commit of `revision`, and {name: RepoSibling} of its files. Raises KitError."""
    from huggingface_hub import HfApi

    hub = HfApi(endpoint=endpoint())
    try:
        info = hub.model_info(repository, revision=revision, files_metadata=True)
    except Exception as error:  # of the library below, which differs from version to version
        what = f"{shorten(repr(repository))} at revision {revision}"
        raise _explained(hub.endpoint, what, error) from error
    return info.sha, {file.rfilename: file for file in info.siblings or ()}


def endpoint() -> str | None:
    """The hub's address; None: the library's own."""
    return os.environ.get("HF_ENDPOINT") or None
