"""Files of a model on the Hugging Face hub, at one revision, in a folder of this machine.

`huggingface_hub` says what there is, how large, and where. The bytes are read by download.py: what
a killed download had fetched stays, and the next one goes on from there, which the library has
given up (each of its downloads begins a file anew). HF_ENDPOINT names another hub, as the library
has it. Knows no model by name.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from kit.base.download import (
    DownloadError,
    DownloadSource,
    RemoteFile,
    bytes_at,
    fetch_file,
    paths_of,
)
from kit.base.files import file_digest, make_folder, require_disk, write_atomic
from kit.base.words import brief, listed

CARD = "download.json"  # what was fetched, and from where: written last


class HubError(DownloadError):
    """Files that the hub does not have, or does not give to everyone."""


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
    of it lies there already. `progress(bytes, of bytes)` is called now and then. Raises HubError
    or DownloadError, which say what to do, and DiskError before the first byte where there is no
    room.
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
            f"{listed(sorted(files), 8)}. Name a repository and a revision that have them."
        )
    wanted = [files[name] for name in (*names, *optional) if name in files]
    make_folder(folder)
    total_bytes = sum(file.size_bytes for file in wanted)
    there_bytes = sum(bytes_at(path) for file in wanted for path in paths_of(folder, file))
    require_disk(folder, max(0, total_bytes - there_bytes))
    done_bytes = 0
    for file in wanted:
        address = address_of(repository, commit, file.name)
        for size_bytes in fetch_file(address, file, folder, hub_source()):
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


def described(repository: str, revision: str) -> tuple[str, dict[str, RemoteFile]]:
    """The commit that `revision` is, and every file there by its name. Raises HubError."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        told = HfApi(endpoint=endpoint()).model_info(
            repository, revision=revision, files_metadata=True
        )
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
        raise HubError(hub_source().unreachable(why)) from why
    files = {}
    for file in told.siblings or ():
        sha256 = file.lfs["sha256"] if file.lfs else ""
        files[file.rfilename] = RemoteFile(
            name=file.rfilename, size_bytes=file.size or 0, sha256=sha256
        )
    return told.sha, files


def endpoint() -> str | None:
    """The address of the hub that is asked for; None: the library's."""
    return os.environ.get("HF_ENDPOINT") or None


def address_of(repository: str, commit: str, name: str) -> str:
    from huggingface_hub import hf_hub_url

    return hf_hub_url(repository, name, revision=commit, endpoint=endpoint())


def hub_source() -> DownloadSource:
    """The hub in words."""
    return DownloadSource(
        name=f"The hub ({endpoint() or 'huggingface.co'})",
        otherwise="copy the files here and name their folder",
    )
