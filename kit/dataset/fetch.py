"""Find a dataset in a folder, an archive, Parquet files or on the Hugging Face hub."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from kit.base.errors import DatasetError
from kit.base.files import digest, write_atomic
from kit.base.formatting import join_names
from kit.dataset.archive import ArchiveConfig, archive_suffix, unpack
from kit.dataset.huggingface import HubConfig, from_huggingface, open_huggingface
from kit.dataset.layouts import recognise
from kit.dataset.recordings import Recordings
from kit.dataset.splits import canonical_split, has_known_split

HUB = "hf://"
PARQUET = ".parquet"
ROWS_AT_ONCE = 32  # of a Parquet file


def fetch_dataset(
    source: Path | str,
    into: Path,
    archive: ArchiveConfig | None = None,
    hub: HubConfig | None = None,
    progress: Callable = lambda *_: None,
) -> Path:
    """Return the dataset folder in `source`, or the table `source`.

    An archive, Parquet files or hf://NAME/CONFIG/SPLIT (also NAME@REVISION), a dataset of the
    Hugging Face hub, become a folder under `into`. `archive` limits what is unpacked; `hub` says
    how much is streamed, and from which columns. Raises DatasetError when there is nothing, no
    dataset, or several, or when `unpack` fails.
    """
    hub = hub or HubConfig()
    if str(source).startswith(HUB):
        return _fetch_hub(str(source).removeprefix(HUB), into, hub, progress)
    source = Path(source)
    if not source.exists():
        raise DatasetError(f"There is no {source}: is the name right, and the disk mounted?")
    if source.is_file() and source.suffix.lower() == PARQUET:
        return _unpack_parquet(source, [source], into, hub, progress)
    if source.is_file() and not archive_suffix(source):
        return source  # a table, which read_dataset checks
    if not source.is_dir():
        source = unpack(source, into, archive or ArchiveConfig(), progress)
    try:
        _, tables = recognise(source)
    except DatasetError as error:  # its message lists the known layouts, and what is there
        files = [
            file
            for file in sorted(source.rglob(f"*{PARQUET}"))
            if not any(part.startswith(".") for part in file.relative_to(source).parts)
        ]
        if files:
            return _unpack_parquet(source, files, into, hub, progress)
        visible = [path for path in sorted(source.iterdir()) if not path.name.startswith(".")]
        archives = [path for path in visible if path.is_file() and archive_suffix(path)]
        if len(visible) == len(archives) == 1:
            return fetch_dataset(archives[0], Path(into) / "inner", archive, hub, progress)
        if archives:
            names = join_names([path.name for path in archives], 8)
            raise DatasetError(
                f"{source} holds archives ({names}) and no dataset beside them: unpack them there, "
                "or name one of them as DATA."
            ) from error
        raise
    folders = [table if table.is_dir() else table.parent for table in tables]
    common = Path(os.path.commonpath(folders))
    return common if Recordings(common).folders() else source


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


def _unpack_parquet(
    source: Path, files: list[Path], into: Path, hub: HubConfig, progress: Callable
) -> Path:
    """Write the clips of Parquet files to a folder under `into`, with a manifest; return it.

    The splits are those in the files' names and folders: train-00000-of-00002.parquet. An
    interrupted call is resumed, a finished one does nothing. Raises DatasetError without pyarrow,
    and for files that are damaged or hold no audio.
    """
    try:
        import pyarrow.parquet  # noqa: F401 (optional)
    except ImportError as error:
        raise DatasetError(
            f"{files[0]} is a Parquet file, which needs the package datasets: pip install datasets."
        ) from error
    splits: dict[str, list[Path]] = {}
    base = source if source.is_dir() else source.parent
    for file in files:
        named = [p for p in reversed(file.relative_to(base).parts) if has_known_split(p)]
        split = canonical_split(Path(named[0]).stem.split(".")[0]) if named else "train"
        splits.setdefault(split.split("-")[0], []).append(file)
    stamp = digest(*[(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files])
    folder = Path(into) / f"{source.stem}-{stamp[:8]}"
    lines = []
    for split, parts in splits.items():
        clips = from_huggingface(_parquet_rows(parts), folder / split, hub, progress)
        for line in (clips / "metadata.csv").read_text(encoding="utf-8").split("\n")[:-1]:
            name, text, _, speaker = line.split("|")
            row = {"audio": f"{split}/wavs/{name}.wav", "text": text, "speaker": speaker}
            lines.append({**row, "split": split})
        for line in (clips / "skipped.jsonl").read_text(encoding="utf-8").splitlines():
            skipped = json.loads(line)
            lines.append({"id": f"{split} row {skipped['row']}", "rejected": skipped["reason"]})
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    write_atomic(folder / "manifest.jsonl", text)
    return folder


def _parquet_rows(files: list[Path]) -> Iterator[dict]:
    import pyarrow.parquet

    for file in files:
        try:
            with pyarrow.parquet.ParquetFile(file) as table:
                for batch in table.iter_batches(batch_size=ROWS_AT_ONCE):
                    yield from batch.to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            raise DatasetError(f"{file} cannot be read: {error}: download it again") from error
