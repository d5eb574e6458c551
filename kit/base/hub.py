"""Download files of a Hugging Face repository, at one revision, into a folder.

`huggingface_hub` lists the files; download.py reads the bytes, because the library restarts a
killed download from byte 0. HF_ENDPOINT names another hub, as for the library.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from kit.base.download import (
    DownloadSource,
    RemoteFile,
    bytes_on_disk,
    fetch_file,
    target_and_part,
)
from kit.base.errors import DownloadError
from kit.base.files import file_digest, make_folder, require_disk, write_atomic
from kit.base.formatting import join_names, shorten

CARD = "download.json"  # what was fetched, and from where: written last


def fetch_model(
    repository: str,
    revision: str,
    names: Sequence[str],
    folder: Path,
    progress: Callable = lambda *_: None,
    optional: Sequence[str] = (),
) -> dict:
    """Fetch `names` of `repository` at `revision` into `folder`; return the card written there.

    Those in `optional` are fetched where they exist. The hub is not asked when all files are
    there. HF_TOKEN, or `hf auth login`, opens private repositories. `progress(bytes, total_bytes)`
    is called now and then. Raises DownloadError with the fix, and DiskError before the first byte
    where there is no room.
    """
    from huggingface_hub import get_token

    folder = Path(folder)
    card = fetched(folder, names)
    if card:
        return card
    commit, files = list_files(repository, revision)
    missing = [name for name in names if name not in files]
    if missing:
        raise DownloadError(
            f"{repository} at revision {revision} has no {join_names(missing)}; it has "
            f"{join_names(sorted(files), 8)}. Name a repository and a revision that have them."
        )
    token = get_token() or ""
    requested = [files[name] for name in (*names, *optional) if name in files]
    make_folder(folder)
    total_bytes = sum(file.size_bytes for file in requested)
    paths = [path for file in requested for path in target_and_part(folder, file)]
    require_disk(folder, max(0, total_bytes - sum(map(bytes_on_disk, paths))))
    done_bytes = 0
    for file in requested:
        address = file_url(repository, commit, file.name)
        for size_bytes in fetch_file(address, file, folder, hub_source(), token):
            progress(done_bytes + size_bytes, total_bytes)
        done_bytes += file.size_bytes
    card = {"repository": repository, "revision": revision, "commit": commit}
    card["files"] = {
        file.name: {"bytes": file.size_bytes, "sha256": file_digest(folder / file.name)}
        for file in requested
    }
    write_atomic(folder / CARD, json.dumps(card, indent=1))
    return card


def fetched(folder: Path, names: Sequence[str]) -> dict:
    """The card in `folder` if all of `names` have been fetched there, else {}."""
    try:
        card = json.loads((folder / CARD).read_bytes())
        complete = all(
            bytes_on_disk(folder / name) == card["files"][name]["bytes"] for name in names
        )
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return card if complete else {}


def list_files(repository: str, revision: str) -> tuple[str, dict[str, RemoteFile]]:
    """Return the commit of `revision`, and its files by name. Raises DownloadError."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        info = HfApi(endpoint=endpoint()).model_info(
            repository, revision=revision, files_metadata=True
        )
    except HFValidationError as error:
        raise DownloadError(
            f"{shorten(repr(repository))} names no repository of the hub, which is OWNER/NAME: "
            f"{shorten(error)}."
        ) from error
    except GatedRepoError as error:  # before RepositoryNotFoundError, its base class
        raise DownloadError(
            f"Access to {repository} must be granted by its owner. Ask on its page, set "
            "HF_TOKEN and download its files yourself; then name their folder."
        ) from error
    except RepositoryNotFoundError as error:
        raise DownloadError(
            f"The hub has no {repository}, or it is private. Is the name right, and HF_TOKEN that "
            "of somebody who may read it?"
        ) from error
    except RevisionNotFoundError as error:
        raise DownloadError(
            f"{repository} has no revision {revision}. Take one that its page lists under Files, "
            "Commits."
        ) from error
    except Exception as error:  # of the library below, which differs from version to version
        raise DownloadError(hub_source().unreachable(error)) from error
    files = {}
    for file in info.siblings or ():
        sha256 = file.lfs["sha256"] if file.lfs else ""
        files[file.rfilename] = RemoteFile(
            name=file.rfilename, size_bytes=file.size or 0, sha256=sha256
        )
    return info.sha, files


def endpoint() -> str | None:
    """The hub's address; None: the library's own."""
    return os.environ.get("HF_ENDPOINT") or None


def file_url(repository: str, commit: str, name: str) -> str:
    from huggingface_hub import hf_hub_url

    return hf_hub_url(repository, name, revision=commit, endpoint=endpoint())


def hub_source() -> DownloadSource:
    return DownloadSource(
        name=f"The hub ({endpoint() or 'huggingface.co'})",
        otherwise="copy the files here and name their folder",
    )
