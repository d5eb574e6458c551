"""Parquet files with the audio inside, as the Hugging Face hub keeps datasets.

They are read a few rows at a time; the clips are written beside the run, as those of an archive.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from kit.base.errors import DatasetError
from kit.base.files import digest, write_atomic
from kit.dataset.huggingface import HubConfig, from_huggingface
from kit.dataset.splits import canonical_split, has_known_split

SUFFIX = ".parquet"
ROWS_AT_ONCE = 32


def parquet_files(folder: Path) -> list[Path]:
    """Return the Parquet files in a folder and the folders below it; none in hidden ones."""
    files = sorted(Path(folder).rglob(f"*{SUFFIX}"))
    return [f for f in files if not any(p.startswith(".") for p in f.relative_to(folder).parts)]


def unpack_parquet(
    source: Path, files: list[Path], into: Path, hub: HubConfig, progress: Callable
) -> Path:
    """Write the clips of Parquet files to a folder under `into`, with a manifest; return it.

    The splits are those in the files' names and folders: train-00000-of-00002.parquet. An
    interrupted call is resumed, a finished one does nothing. Raises DatasetError without pyarrow,
    and for files that are damaged or hold no audio.
    """
    require_pyarrow(files[0])
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
        clips = from_huggingface(_rows(parts), folder / split, hub, progress)
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


def require_pyarrow(file: Path) -> None:
    """Raise DatasetError, with the command to install it, where pyarrow is missing."""
    try:
        import pyarrow.parquet  # noqa: F401 (optional)
    except ImportError as error:
        raise DatasetError(
            f"{file} is a Parquet file, which needs the package datasets: pip install datasets."
        ) from error


def _rows(files: list[Path]) -> Iterator[dict]:
    import pyarrow.parquet

    for file in files:
        try:
            with pyarrow.parquet.ParquetFile(file) as table:
                for batch in table.iter_batches(batch_size=ROWS_AT_ONCE):
                    yield from batch.to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            raise DatasetError(f"{file} cannot be read: {error}: download it again") from error
