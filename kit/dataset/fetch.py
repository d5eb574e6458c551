"""Find a dataset in a folder, an archive, Parquet files, on the hub, or in a Festival voice."""

import os
import re
from collections.abc import Callable
from pathlib import Path

from kit.base.errors import DatasetError
from kit.base.files import disk_errors, make_folder, write_atomic
from kit.base.formatting import join_names
from kit.dataset.archive import ArchiveConfig, archive_suffix, unpack
from kit.dataset.huggingface import HubConfig, from_huggingface, open_huggingface
from kit.dataset.layouts import recognise
from kit.dataset.parquet import SUFFIX, parquet_files, unpack_parquet

HUB = "hf://"
FESTIVAL_TRANSCRIPTS = "etc/txt.done.data"
TABLE = "metadata.csv"
_FESTIVAL_LINE = re.compile(r'\(\s*(\S+)\s+"((?:[^"\\]|\\.)*)"\s*\)')
_STRESS = re.compile(r"\+(?=[^\W\d_])")


def fetch_dataset(
    source: Path | str,
    into: Path,
    archive: ArchiveConfig | None = None,
    hub: HubConfig | None = None,
    progress: Callable = lambda *_: None,
) -> Path:
    """Return the dataset folder in `source`: a folder, or an archive, Parquet files or hf://.

    The latter are unpacked under `into`.

    `hf://NAME/CONFIG/SPLIT` streams a dataset of the Hugging Face hub into a folder under `into`:
    hf://google/fleurs/am_et/train, or hf://google/fleurs@REVISION/am_et/train. `archive` limits
    what is unpacked; `hub` says how much is streamed, and from which columns.

    Searches three folders deep, without hidden folders and the Mac's `__MACOSX`. Raises
    DatasetError when there is nothing, no dataset, or several, or when `unpack` fails.
    """
    if str(source).startswith(HUB):
        return _fetch_hub(str(source).removeprefix(HUB), into, hub or HubConfig(), progress)
    source = Path(source)
    if not source.exists():
        raise DatasetError(f"There is no {source}: is the name right, and the disk mounted?")
    if source.is_file() and source.suffix.lower() == SUFFIX:
        return unpack_parquet(source, [source], into, hub or HubConfig(), progress)
    if source.is_file() and not archive_suffix(source):
        return source  # a table, which read_dataset checks
    if not source.is_dir():
        source = unpack(source, into, archive or ArchiveConfig(), progress)
    level = [source]
    for _ in range(4):
        datasets = [folder for folder in level if _is_dataset(folder)]
        if len(datasets) == 1:
            return datasets[0]
        if datasets:
            names = ", ".join(str(folder.relative_to(source)) for folder in datasets[:8])
            raise DatasetError(f"{source} holds several datasets ({names}): name one of them.")
        below = (child for folder in level for child in sorted(folder.iterdir()))
        level = [c for c in below if c.is_dir() and not c.name.startswith((".", "__MACOSX"))]
    files = parquet_files(source)
    if files:
        return unpack_parquet(source, files, into, hub or HubConfig(), progress)
    try:
        recognise(source)
    except DatasetError as error:  # its message lists the known layouts, and what is there
        raise DatasetError(f"{error} Its subfolders hold none either.") from error
    raise AssertionError(source)


def _fetch_hub(name: str, into: Path, hub: HubConfig, progress: Callable) -> Path:
    parts = name.split("/")
    if len(parts) < 3 or not all(parts):
        raise DatasetError(
            f"{HUB}{name} does not name a dataset of the hub: expected {HUB}NAME/CONFIG/SPLIT, "
            f"e.g. {HUB}google/fleurs/am_et/train (CONFIG is `default` where there is just one)."
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


def find_festival_voice(folder: Path) -> Path:
    """Return the folder below `folder` with a Festival voice's recordings.

    FestVox (Black and Lenzo) keeps what a voice was built from: `etc/txt.done.data`, a line
    `( id "text" )` for each recording, and `wav/id.wav`. Raises DatasetError unless there is one.
    """
    tables = sorted(Path(folder).rglob(FESTIVAL_TRANSCRIPTS))
    if len(tables) != 1:
        raise DatasetError(
            f"{folder} holds {len(tables) or 'no'} Festival voices with {FESTIVAL_TRANSCRIPTS}: "
            "expected one."
        )
    return tables[0].parent.parent


def read_festival_transcripts(path: Path) -> dict[str, str]:
    """Return the text of each recording by id, in the table's order. Raises DatasetError.

    The `+` before a stressed vowel is removed: only some words have it.
    """
    texts = {}
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        match = _FESTIVAL_LINE.fullmatch(line.strip())
        if not match:
            raise DatasetError(f'{path}, line {number}: expected ( id "text" ), got {line[:80]!r}.')
        text = re.sub(r"\\(.)", r"\1", match[2])
        texts[match[1]] = _STRESS.sub("", text).replace("|", " ").strip()
    return texts


def move_to_ljspeech(voice: Path, into: Path) -> int:
    """Move a Festival voice's recordings to `into`/wavs and write metadata.csv; return the count.

    The table is written last, so it is there only if all recordings are. An interrupted call is
    resumed. Raises DatasetError when recordings are missing.
    """
    texts = read_festival_transcripts(voice / FESTIVAL_TRANSCRIPTS)
    wavs = make_folder(Path(into) / "wavs")
    missing = []
    for name in texts:
        source = voice / "wav" / f"{name}.wav"
        target = wavs / f"{name}.wav"
        if source.is_file():
            with disk_errors(target):
                os.replace(source, target)
        elif not target.is_file():
            missing.append(name)
    if missing:
        raise DatasetError(
            f"{voice} lacks {len(missing)} of its {len(texts)} recordings ({join_names(missing)}): "
            "unpack it again."
        )
    lines = [f"{name}|{text}\n" for name, text in texts.items()]
    write_atomic(Path(into) / TABLE, "".join(lines))
    return len(texts)
