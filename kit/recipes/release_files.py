"""The files of a voice to begin with that lies on the Hugging Face hub: `hf://OWNER/NAME`.

They are fetched once, at a revision that does not move, into a folder beside the runs, which all of
them share.
"""

import math
import re
from pathlib import Path

from kit.base.errors import KitError
from kit.base.files import make_folder
from kit.base.hub import fetch_model, fetched
from kit.base.lock import held
from kit.base.run import RELEASES_FOLDER
from kit.notebook.progress_line import Ticker
from kit.releases.indextts2 import INDEXTTS2_REPOSITORIES, told_indextts2
from kit.releases.xtts_v2.model import (
    CONFIG_FILE,
    DVAE_FILE,
    MEL_STATS_FILE,
    VOCABULARY_FILE,
    WEIGHTS_FILES,
)

HUB = "hf://"
RELEASE = "hf://coqui/XTTS-v2"
# Revisions that were read and tried: what a repository holds may be changed any day.
PINNED = {"coqui/XTTS-v2": "6c2b0d75eae4b7047358e3b6bd9325f857d43f77"}
NEEDED = (WEIGHTS_FILES[0], CONFIG_FILE, VOCABULARY_FILE, DVAE_FILE, MEL_STATS_FILE)
WITH_THEM = ("LICENSE.txt",)  # whoever is given the model, or speech of it, must be given this


def is_on_hub(name: str) -> bool:
    return name.startswith(HUB)


def repository_of(name: str) -> tuple[str, str]:
    """The repository and the revision that `hf://OWNER/NAME@REVISION` means.

    Without a revision it is the one in PINNED. Raises KitError where there is none, and for a
    repository of another model's.
    """
    repository, _, revision = name.removeprefix(HUB).rstrip("/").partition("@")
    if repository.startswith(INDEXTTS2_REPOSITORIES):
        raise KitError(f"START_FROM = {name}: {told_indextts2(repository)}")
    revision = revision or PINNED.get(repository, "")
    if repository.count("/") != 1 or not re.fullmatch(r"[\w./-]+", repository):
        raise KitError(
            f"START_FROM = {name} names no repository of the hub: write {HUB}OWNER/NAME@REVISION, "
            f"or {RELEASE}."
        )
    if not re.fullmatch(r"[\w.-]+", revision):
        raise KitError(
            f"START_FROM = {name} says no revision, and what a repository holds may change: write "
            f"{HUB}{repository}@REVISION, a commit that its page lists under Files, Commits."
        )
    return repository, revision


def hub_name(name: str) -> str:
    """`name` with its revision."""
    repository, revision = repository_of(name)
    return f"{HUB}{repository}@{revision}"


def fetched_release(runs: Path, name: str) -> tuple[Path, dict]:
    """The folder below `runs` with the files of `name`, fetched where they lack; the hub's word.

    Whose licence has to be accepted must have been asked before. Raises KitError for a name that
    is none, DownloadError and DiskError for what hinders the download. Another process that fetches
    it is waited for: what it has fetched is there then.
    """
    repository, revision = repository_of(name)
    owner, model = repository.split("/")
    folder = runs / RELEASES_FOLDER / f"{owner}--{model}@{revision}"
    there = fetched(folder, NEEDED)
    if there:
        return folder, there
    lock = make_folder(folder.parent) / f".{folder.name}.lock"
    with held(lock, f"fetching {name}", math.inf, print):
        progress = Ticker("bytes downloaded")
        return folder, fetch_model(repository, revision, NEEDED, folder, progress, WITH_THEM)
