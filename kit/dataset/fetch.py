"""Find a dataset in a folder, an archive, Parquet files or on the Hugging Face hub.

Rows of Parquet files and of the hub become a folder with a table: manifest.jsonl, and wavs/ with
each recording as the row holds it, whose content is checked with those of any other folder. Their
names and paths are never used, no code of a dataset is run, and `datasets` decodes nothing, for
which it would need FFmpeg.
"""

import collections
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from kit.audio.container import SUFFIXES, duration_s
from kit.base.errors import DatasetError
from kit.base.files import digest, disk_errors, make_folder, placeholder_problem, write_atomic
from kit.base.formatting import describe_error
from kit.dataset.archive import archive_suffix, unpack
from kit.dataset.columns import Columns, roles_of, text_conflict
from kit.dataset.layouts import find_dataset
from kit.dataset.recordings import canonical_split, known_split, walk
from kit.settings import ArchiveConfig, HubConfig, ManifestConfig

HUB = "hf://"
PARQUET = ".parquet"
# train-00001-of-00003.parquet; older files of the hub end in a hash of their own.
NUMBERED = re.compile(r"(.*?)\d+-of-(\d{1,6})(?:-[0-9a-f]{8,})?\.parquet")
FILE_SPLIT = "(split)"  # of a row: what its Parquet file's name says
TABLE = "manifest.jsonl"  # gets its name last
PART = "rows.part"  # the lines of TABLE so far
POSITION = "position.json"  # saved every so many rows: how far PART and the stream are
SAVE_ROWS = 100
NEEDS_DATASETS = "needs the package datasets: pip install datasets."


def fetch_dataset(
    source: Path | str,
    into: Path,
    archive: ArchiveConfig | None = None,
    hub: HubConfig | None = None,
    progress: Callable = lambda *_: None,
    rules: ManifestConfig | None = None,
) -> Path:
    """Return the dataset folder in `source`, or the table `source`.

    An archive, Parquet files or hf://NAME/CONFIG/SPLIT (also NAME@REVISION), a dataset of the
    Hugging Face hub, become a folder under `into`. `archive` limits what is unpacked; `hub` says
    how much is streamed, and from which columns, `rules` what the columns of a table hold. Raises
    DatasetError when there is no dataset, or several, or when `unpack` fails.
    """
    hub = hub or HubConfig()
    if str(source).startswith(HUB):
        parts = str(source).removeprefix(HUB).split("/")
        if len(parts) < 3 or not all(parts):
            raise DatasetError(
                f"{source} does not name a dataset of the hub: expected {HUB}NAME/CONFIG/SPLIT, "
                f"such as {HUB}google/fleurs/am_et/train (CONFIG is `default` where it is alone)."
            )
        folder = Path(into) / f"{'-'.join(parts)}-{digest(hub)[:8]}"
        if (folder / TABLE).is_file():  # no need for a network
            return folder
        rows = open_huggingface("/".join(parts[:-2]), *parts[-2:])
        return write_rows(rows, folder, hub, progress)
    source = Path(source).expanduser()
    if not os.path.exists(source):  # nor can this user see it, nor does the system take its name
        raise DatasetError(f"There is no {source}: is the name right, and the disk mounted?")
    if source.is_file() and source.suffix.lower() == PARQUET:
        return _unpack_parquet(source, [source], into, hub, progress)
    if source.is_file() and not archive_suffix(source):
        return source  # a table, which read_dataset checks
    if not source.is_dir():
        source = unpack(source, into, archive or ArchiveConfig(), progress)
    try:
        return find_dataset(source, rules or ManifestConfig()).folder
    except OSError as error:
        raise DatasetError(f"Allow reading {error.filename}: {error.strerror}.") from error
    except DatasetError:  # its message lists what is expected, and what is there
        files = sorted(path for path in walk(source) if path.suffix == PARQUET)
        if not files:
            raise
        require_all_parts(files)
        return _unpack_parquet(source, files, into, hub, progress)


def require_all_parts(files: list[Path]) -> None:
    """Raise DatasetError where some of `files` are numbered 1 of 3 and 3 of 3, and 2 is missing."""
    counts = collections.Counter()
    for file in files:
        match = NUMBERED.fullmatch(file.name)
        if match:
            counts[file.parent / match[1], int(match[2])] += 1
    for (name, total), count in counts.items():
        if count < total:
            raise DatasetError(
                f"Of {name}*-of-{total:05}.parquet, {total - count} of {total} files are missing. "
                "Copy or download them (of the hub: hf download NAME --repo-type dataset). To "
                "train on a part, name one of the files as DATA, or rename them without `-of-`."
            )


def _unpack_parquet(
    source: Path, files: list[Path], into: Path, hub: HubConfig, progress: Callable
) -> Path:
    """Write the rows of Parquet files to a folder under `into`; return it."""
    stamp = digest(hub, *[(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files])
    base = source if source.is_dir() else source.parent
    rows = itertools.chain.from_iterable(_parquet_rows(file, base) for file in files)
    return write_rows(rows, Path(into) / f"{source.stem}-{stamp[:8]}", hub, progress)


def _parquet_rows(file: Path, base: Path) -> Iterator[dict]:
    try:
        import pyarrow.parquet  # optional
    except ImportError as error:
        raise DatasetError(f"{file} is a Parquet file, which {NEEDS_DATASETS}") from error
    # Such as train-00000-of-00002.parquet, or one in train/
    named = (part for part in reversed(file.relative_to(base).parts) if known_split(part))
    split = canonical_split(Path(next(named, "train")).stem.split(".")[0]).split("-")[0]
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=32):  # rows
                for row in batch.to_pylist():
                    yield row | {FILE_SPLIT: split}
    except (pyarrow.ArrowException, OSError) as error:
        fix = placeholder_problem(file) or "download it again"
        raise DatasetError(f"{file} cannot be read ({error}): {fix}.") from error


# --- rows -----------------------------------------------------------------------------------------


def write_rows(
    rows: Iterable[dict], folder: Path, config: HubConfig, progress: Callable = lambda *_: None
) -> Path:
    """Write `rows` as a dataset `folder`: wavs/ and manifest.jsonl; return it.

    A row is a dict with text and audio, {"bytes": ...} as `datasets.Audio(decode=False)` gives it.
    One that cannot be used is in the table with the reason. An interrupted call is resumed, a
    finished one does nothing. Raises DatasetError when the stream fails or no row can be used.
    """
    if (folder / TABLE).is_file():
        return folder
    make_folder(folder / "wavs")
    part = folder / PART
    position_path = folder / POSITION
    position = {"rows": 0, "seconds": 0.0, "bytes": 0, "stream": None}
    if position_path.is_file() and part.is_file():
        position = json.loads(position_path.read_bytes())
    limit_s = float("inf") if config.most_hours is None else config.most_hours * 3600
    with disk_errors(part), open(part, "ab") as lines:
        lines.truncate(position["bytes"])  # what came after the last save is written again
        for row in _rows_from(rows, position):
            if position["seconds"] >= limit_s:
                break
            line, seconds = _write_recording(row, position["rows"], folder, config)
            lines.write(json.dumps(line).encode() + b"\n")
            position["rows"] += 1
            position["seconds"] += seconds
            if position["rows"] % SAVE_ROWS == 0:
                lines.flush()
                os.fsync(lines.fileno())
                position["bytes"] = lines.tell()
                position["stream"] = rows.state_dict() if hasattr(rows, "state_dict") else None
                write_atomic(position_path, json.dumps(position))
            progress(position["rows"], position["rows"] + 1)  # how many there are is unknown
        lines.flush()
        os.fsync(lines.fileno())
    progress(position["rows"], position["rows"])
    if not position["seconds"]:
        with open(part, "rb") as lines:
            first = json.loads(next(lines, b'{"rejected": "there is none"}'))
        raise DatasetError(f"None of {position['rows']} rows could be used: {first['rejected']}")
    with disk_errors(folder):
        os.replace(part, folder / TABLE)
        position_path.unlink(missing_ok=True)
    return folder


def _rows_from(rows: Iterable[dict], position: dict) -> Iterator[dict]:
    """Yield `rows` from `position` on. Raises DatasetError for whatever fails in the source."""
    try:
        if position["stream"]:
            rows.load_state_dict(position["stream"])  # `skip` would download all rows before
            yield from rows
        else:
            yield from itertools.islice(rows, position["rows"], None)
    except DatasetError:
        raise
    except Exception as error:  # the network, or a decoder: whatever the source may raise
        raise DatasetError(
            f"The stream of rows failed: {describe_error(error)}. What was written is kept: run "
            f"again to resume. If that fails in the same way, the dataset may have changed: delete "
            f"{POSITION} there to start over."
        ) from error


def _write_recording(row: dict, number: int, folder: Path, config: HubConfig) -> tuple[dict, float]:
    """Write the recording of a row; return its line of the table, and its seconds."""
    name = f"{number:08d}"
    try:
        columns = Columns(names=tuple(row), by_role=roles_of(list(row)))
        text = _text_of(row, columns, config)
        path, seconds = _write_audio(row.get(config.audio_column), folder / "wavs" / name, config)
    except DatasetError as error:
        return {"audio": "", "text": "", "rejected": str(error)}, 0.0
    if config.speaker_column:
        speaker = row.get(config.speaker_column)
    else:
        speaker = columns.value(row, "speaker")
    line = {
        "id": name,
        "audio": f"wavs/{path.name}",
        "text": text,
        "speaker": "" if speaker is None else str(speaker),
        "language": str(columns.value(row, "language")),
    }
    if FILE_SPLIT in row:
        line["split"] = row[FILE_SPLIT]
    return line, seconds


def _text_of(row: dict, columns: Columns, config: HubConfig) -> str:
    conflict = "" if config.text_column else text_conflict(columns)
    text = row.get(config.text_column) if config.text_column else columns.value(row, "text")
    if conflict or not isinstance(text, str) or not text.strip():
        known = config.text_column or "a column with a usual name (text, sentence ...)"
        raise DatasetError(
            f"{conflict or f'no text in {known}'}; the columns are {', '.join(row)}: name the one "
            'with the text (--set hub.text_column=..., or start(RUN, settings={"hub": {...}}))'
        )
    return " ".join(text.split())


def _write_audio(audio: object, path: Path, config: HubConfig) -> tuple[Path, float]:
    """Write the audio of a row to `path` with a suffix; return that path, and its seconds."""
    if not (isinstance(audio, dict) and audio.get("bytes")):
        got = sorted(audio) if isinstance(audio, dict) else type(audio).__name__
        raise DatasetError(
            f"no audio bytes in column {config.audio_column!r}, but {got}: paths are not followed"
        )
    suffix = Path(str(audio.get("path"))).suffix.lower()
    path = path.with_suffix(suffix if suffix in SUFFIXES else ".wav")  # the content decides
    with disk_errors(path):
        path.write_bytes(audio["bytes"])
    try:
        return path, duration_s(str(path))
    except DatasetError as error:
        path.unlink()
        size = f"its {len(audio['bytes']):,} bytes"
        raise DatasetError(str(error).replace(str(path), size)) from error


def open_huggingface(name: str, config: str | None, split: str):
    """Stream a dataset of the Hugging Face hub, or of a local folder, without decoding audio.

    `name` may end in @ and a revision (a tag or a commit). Raises DatasetError when the `datasets`
    package is missing, the name is unknown, or there is no network.
    """
    try:
        import datasets  # optional
    except ImportError as error:
        raise DatasetError(f"Streaming from the Hugging Face hub {NEEDS_DATASETS}") from error
    name, _, revision = name.partition("@")
    try:
        rows = datasets.load_dataset(
            name, config, split=split, revision=revision or None, streaming=True
        )
    except Exception as error:  # dozens of classes: network, hub, format
        raise DatasetError(
            f"{name!r} ({config or 'default'}, {split}) cannot be opened: {error}. Check the name "
            "and the network; a dataset with a loading script needs its parquet version."
        ) from error
    audio = [c for c, kind in (rows.features or {}).items() if isinstance(kind, datasets.Audio)]
    for column in audio:  # decoding needs FFmpeg and resamples
        rows = rows.cast_column(column, datasets.Audio(decode=False))
    return rows
