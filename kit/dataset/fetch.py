"""Datasets from elsewhere: a folder, an archive, or rows streamed from the Hugging Face hub.

`fetch_dataset` unpacks safely and finds the dataset inside (Common Voice hides it two folders
deep). Knows nothing of what makes a clip fit for training: that is judged afterwards.
"""

from collections.abc import Callable
from pathlib import Path

from kit.base.errors import DatasetError
from kit.dataset.archive import ArchiveConfig, archive_suffix, unpack
from kit.dataset.huggingface import HubConfig, IngestError, from_huggingface, open_huggingface
from kit.dataset.layouts import recognise

HUB = "hf://"


def fetch_dataset(
    source: Path | str,
    into: Path,
    archive: ArchiveConfig | None = None,
    hub: HubConfig | None = None,
    progress: Callable = lambda *_: None,
) -> Path:
    """The dataset folder in `source`: a folder, an archive unpacked under `into`, or of the hub.

    `hf://NAME/CONFIG/SPLIT` streams a dataset of the Hugging Face hub into a folder under `into`:
    hf://google/fleurs/am_et/train, or hf://google/fleurs@REVISION/am_et/train. `archive` limits
    what is unpacked; `hub` says how much is streamed, and from which columns.

    Searched three folders deep; hidden folders and the Mac's `__MACOSX` are passed over. Raises
    ArchiveError as `unpack` does, IngestError when there is nothing, no dataset or several.
    """
    if str(source).startswith(HUB):
        return fetch_hub(str(source).removeprefix(HUB), into, hub or HubConfig(), progress)
    source = Path(source)
    if not source.exists():
        raise IngestError(f"There is no {source}: is the name right, and the disk mounted?")
    if source.is_file() and not archive_suffix(source):
        return source  # a table: what it is, the reader of tables says
    if not source.is_dir():
        source = unpack(source, into, archive or ArchiveConfig(), progress)
    level = [source]
    for _ in range(4):
        found = [folder for folder in level if _is_dataset(folder)]
        if len(found) == 1:
            return found[0]
        if found:
            join_names = ", ".join(str(f.relative_to(source)) for f in found[:8])
            raise IngestError(f"{source} holds several datasets ({join_names}): name one of them.")
        below = (child for folder in level for child in sorted(folder.iterdir()))
        level = [c for c in below if c.is_dir() and not c.name.startswith((".", "__MACOSX"))]
    try:
        recognise(source)
    except DatasetError as error:  # its message lists the layouts known, and what is there
        raise IngestError(f"{error} Nor is there one in its folders.") from error
    raise AssertionError(source)


def fetch_hub(name: str, into: Path, hub: HubConfig, progress: Callable) -> Path:
    """A dataset of the hub, `NAME/CONFIG/SPLIT`, as a folder. Raises IngestError."""
    parts = name.split("/")
    if len(parts) < 3 or not all(parts):
        raise IngestError(
            f"{HUB}{name} names no dataset of the hub: expected {HUB}NAME/CONFIG/SPLIT, e.g. "
            f"{HUB}google/fleurs/am_et/train (CONFIG is `default` where there is just one)."
        )
    *owner, config, split = parts
    rows = open_huggingface("/".join(owner), config, split)
    return from_huggingface(rows, Path(into) / "-".join(parts), hub, progress)


def _is_dataset(folder: Path) -> bool:
    try:
        recognise(folder)
    except DatasetError:
        return False
    return True
