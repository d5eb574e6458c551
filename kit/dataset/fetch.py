"""Find a dataset in a folder, an archive, Parquet files or on the Hugging Face hub.

Rows of Parquet files and of the hub are written as an LJSpeech folder. Their names and paths are
never used, no code of a dataset is run, and soundfile decodes: `datasets` would need FFmpeg.
"""

import dataclasses
import io
import itertools
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
import soundfile

from kit.audio.clip import read_clip, to_mono
from kit.base.errors import DatasetError, Note
from kit.base.files import digest, disk_errors, make_folder, require_disk, write_atomic
from kit.base.formatting import as_utf8, join_names
from kit.dataset.archive import archive_suffix, unpack
from kit.dataset.columns import Columns, roles_of, text_conflict
from kit.dataset.layouts import find_dataset
from kit.dataset.manifest import write_lines
from kit.dataset.recordings import canonical_split, has_known_split, walk
from kit.settings import ArchiveConfig, HubConfig, ManifestConfig

HUB = "hf://"
PARQUET = ".parquet"
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
        rows = open_huggingface("/".join(parts[:-2]), *parts[-2:])
        return from_huggingface(rows, Path(into) / "-".join(parts), hub, progress)
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
    except DatasetError as error:  # its message lists what is expected, and what is there
        below = (Path(folder, name) for folder, names in walk(source) for name in names)
        files = sorted(path for path in below if path.suffix == PARQUET)
        if files:
            return _unpack_parquet(source, files, into, hub, progress)
        visible = [path for path in sorted(source.iterdir()) if not path.name.startswith(".")]
        archives = [path for path in visible if path.is_file() and archive_suffix(path)]
        if len(visible) == len(archives) == 1:
            inner = Path(into) / "inner"
            return fetch_dataset(archives[0], inner, archive, hub, progress, rules)
        if archives:
            names = join_names([path.name for path in archives], 8)
            raise DatasetError(
                f"{source} holds archives ({names}) and no dataset beside them: unpack them there, "
                "or name one of them as DATA."
            ) from error
        raise


def _unpack_parquet(
    source: Path, files: list[Path], into: Path, hub: HubConfig, progress: Callable
) -> Path:
    """Write the clips of Parquet files to a folder under `into`, with a manifest; return it.

    An interrupted call is resumed, a finished one does nothing. Raises DatasetError without
    pyarrow, and for files that are damaged or hold no audio.
    """
    try:
        import pyarrow.parquet  # noqa: F401 (optional)
    except ImportError as error:
        raise DatasetError(f"{files[0]} is a Parquet file, which {NEEDS_DATASETS}") from error
    splits: dict[str, list[Path]] = {}
    base = source if source.is_dir() else source.parent
    for file in files:  # such as train-00000-of-00002.parquet, or one in train/
        named = [p for p in reversed(file.relative_to(base).parts) if has_known_split(p)]
        split = canonical_split(Path(named[0]).stem.split(".")[0]) if named else "train"
        splits.setdefault(split.split("-")[0], []).append(file)
    stamp = digest(*[(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files])
    folder = Path(into) / f"{source.stem}-{stamp[:8]}"
    lines = []
    for split, parts in splits.items():
        clips = from_huggingface(_parquet_rows(parts), folder / split, hub, progress)
        header, *table = (clips / "metadata.csv").read_text(encoding="utf-8").split("\n")[:-1]
        for line in table:
            row = dict(zip(header.split("|"), line.split("|"), strict=True))
            lines.append(row | {"audio": f"{split}/wavs/{row.pop('id')}.wav", "split": split})
        for line in (clips / "skipped.jsonl").read_text(encoding="utf-8").splitlines():
            skipped = json.loads(line)
            lines.append({"id": f"{split} row {skipped['row']}", "rejected": skipped["reason"]})
    write_lines(folder / "manifest.jsonl", lines)
    return folder


def _parquet_rows(files: list[Path]) -> Iterator[dict]:
    import pyarrow.parquet

    for file in files:
        try:
            with pyarrow.parquet.ParquetFile(file) as table:
                for batch in table.iter_batches(batch_size=32):  # rows
                    yield from batch.to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            raise DatasetError(f"{file} cannot be read: {error}: download it again") from error


# --- rows of the Hugging Face hub -----------------------------------------------------------------

COLUMNS = ("id", "text", "speaker", "language")  # of the table that is written
# A JSON line for each row so far: its clip, or why it is skipped; and saved positions.
PART = "rows.part"


@dataclasses.dataclass(kw_only=True)
class Position:
    """How much of a stream was read."""

    rows: int = 0
    seconds: float = 0.0
    stream: dict | None = None  # state_dict of a stream of `datasets`


def from_huggingface(
    rows: Iterable[dict], into: Path, config: HubConfig, progress: Callable = lambda *_: None
) -> Path:
    """Write `rows` as an LJSpeech folder `into`: wavs/, metadata.csv and skipped.jsonl.

    A row is a dict with audio, {"bytes": …} as `Audio(decode=False)` gives it or {"array": (L,) or
    (L, C), "sampling_rate": Hz}, and text. An interrupted call is resumed; a finished one does
    nothing. `progress(rows, total)` after each row, with `rows` + 1 for an unknown total. Raises
    DatasetError when the stream fails or no row can be used, DiskError when the disk is full.
    """
    into = Path(into)
    make_folder(into / "wavs")
    key = digest(COLUMNS, dataclasses.replace(config, save_every=1))
    mark = into / "complete"
    if mark.is_file() and mark.read_text(encoding="utf-8") == key:
        return into
    if (into / "metadata.csv").exists() and not (into / PART).exists():
        raise DatasetError(
            f"{into} holds a dataset made with other settings, or by something else: move or "
            "delete it, or write into another folder."
        )
    place, part_bytes = _position(into / PART, key)
    limit_s = np.inf if config.most_hours is None else config.most_hours * 3600
    total = _count(rows)
    with disk_errors(into / PART), open(into / PART, "ab") as lines:
        lines.truncate(part_bytes)
        lines.seek(0, io.SEEK_END)
        for row in _stream(rows, place):
            if place.seconds >= limit_s:
                break
            line = _write_clip(row, place.rows, into, config)
            lines.write(json.dumps(line, ensure_ascii=False).encode(errors="replace") + b"\n")
            place.rows += 1
            place.seconds += line.get("seconds", 0.0)
            if place.rows % config.save_every == 0:
                _save(place, rows, key, lines)
            progress(place.rows, max(place.rows, total or place.rows + 1))
        _save(place, rows, key, lines)
    progress(place.rows, place.rows)
    return _finish(into, key)


def _count(rows: Iterable[dict]) -> int | None:
    """Return the number of rows, None where it is unknown."""
    if hasattr(rows, "__len__"):
        return len(rows)
    splits = getattr(getattr(rows, "info", None), "splits", None) or {}
    return getattr(splits.get(str(getattr(rows, "split", ""))), "num_examples", None)


def _position(part: Path, key: str) -> tuple[Position, int]:
    """Return the last saved position of a call with the same settings, and where its line ends."""
    place = Position()
    part_bytes = 0
    if part.is_file():
        with part.open("rb") as lines:
            for line in lines:
                try:
                    row = json.loads(line)
                except ValueError:  # a kill cut it short
                    break
                if row.pop("key", "") == key:
                    place = Position(**row)
                    part_bytes = lines.tell()
    return place, part_bytes


def _stream(rows: Iterable[dict], place: Position) -> Iterator[dict]:
    """Yield `rows` from `place` on. Raises DatasetError for whatever fails in the source."""
    try:
        if place.stream and hasattr(rows, "load_state_dict"):
            rows.load_state_dict(place.stream)  # `skip` would download all rows before
            yield from rows
        else:
            yield from itertools.islice(rows, place.rows, None)
    except Exception as error:  # the network, or a decoder: whatever the source may raise
        raise DatasetError(
            f"The stream of rows failed: {type(error).__name__}: {error}. What was written is "
            "kept: run again to resume. If that fails in the same way, the dataset may have "
            f"changed: delete {PART} there to start over."
        ) from error


def _write_clip(row: dict, number: int, into: Path, config: HubConfig) -> dict:
    """Write the clip of a row; return its line of PART."""
    name = f"{number:08d}"
    require_disk(into, 2**28)  # of disk space, before each clip
    try:
        text, speaker, language = _read_text(row, config)
        wave, rate = _read_audio(row, config)
    except DatasetError as error:
        return {"row": number, "reason": str(error)}
    file = io.BytesIO()
    soundfile.write(file, np.clip(wave, -1, 1), rate, "PCM_16", format="WAV")
    part = into / "wavs" / f"{name}.part"
    with disk_errors(part):
        part.write_bytes(file.getvalue())
        part.replace(part.with_suffix(".wav"))  # whole or absent, whenever it is killed
    words = {"text": text, "speaker": speaker, "language": language}
    return {"id": name, **words, "seconds": len(wave) / rate}


def _read_text(row: dict, config: HubConfig) -> tuple[str, str, str]:
    """Return the text of a row, who says it and in which language; "" for what it does not say."""
    if not isinstance(row, Mapping):
        raise DatasetError(f"a row must be a dict of columns, got {type(row).__name__}")
    columns = Columns(names=tuple(row), by_role=roles_of(list(row)))
    text = row.get(config.text_column) if config.text_column else columns.value(row, "text")
    conflict = "" if config.text_column else text_conflict(columns)
    if conflict or not isinstance(text, str) or not text.strip():
        known = config.text_column or "a column with a usual name (text, sentence ...)"
        reason = conflict or f"no text in {known}"
        raise DatasetError(
            f"{reason}; the columns are {', '.join(map(str, row))}: name the one with the text "
            '(--set hub.text_column=..., or start(RUN, settings={"hub": {...}}))'
        )
    if config.speaker_column:
        speaker = row.get(config.speaker_column) or ""
    else:
        speaker = columns.value(row, "speaker")
    language = str(columns.value(row, "language"))
    return _one_line(text), _one_line(str(speaker))[:64], _one_line(language)[:64]


def _one_line(text: str) -> str:
    """Return `text` without what a table would need to quote."""
    return " ".join(as_utf8(text).replace("|", " ").replace("\0", " ").split())


def _read_audio(row: dict, config: HubConfig) -> tuple[np.ndarray, int]:
    """Return mono samples (L,) and their rate in Hz."""
    audio = row.get(config.audio_column)
    if isinstance(audio, dict) and audio.get("bytes"):
        wave, rate = _decoded(audio["bytes"])
    elif isinstance(audio, dict) and audio.get("array") is not None:
        wave = _samples(audio["array"])
        rate = audio.get("sampling_rate")
    else:
        got = sorted(audio) if isinstance(audio, dict) else type(audio).__name__
        raise DatasetError(
            f"no audio bytes or array in column {config.audio_column!r}, but {got}: paths are not "
            "followed; stream it with decode=False, or with the bytes embedded"
        )
    if wave.ndim == 2:
        wave = to_mono(wave if wave.shape[0] > wave.shape[1] else wave.T)
    if not isinstance(rate, int) or not 1000 <= rate <= 384_000:
        raise DatasetError(f"the sampling rate is {rate!r}")
    if wave.ndim != 1 or len(wave) == 0 or not np.isfinite(wave).all():
        raise DatasetError(f"audio of shape {wave.shape} is empty or holds no finite numbers")
    return wave, rate


def _samples(array) -> np.ndarray:
    """Return samples as float32; integers are scaled by their type's full scale."""
    try:
        wave = np.asarray(array)
        scale = np.iinfo(wave.dtype).max if np.issubdtype(wave.dtype, np.integer) else 1.0
        return wave.astype(np.float32) / np.float32(scale)
    except (TypeError, ValueError) as error:
        raise DatasetError(f"its array does not hold samples: {error}") from error


def _decoded(data: bytes) -> tuple[np.ndarray, int]:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "audio")
        with disk_errors(path):
            Path(path).write_bytes(data)
        try:
            return read_clip(path)
        except DatasetError as error:
            raise DatasetError(str(error).replace(path, f"its {len(data):,} bytes")) from error


def _save(place: Position, rows: Iterable[dict], key: str, lines: BinaryIO) -> None:
    """Save the position after everything before it is on disk."""
    place.stream = rows.state_dict() if hasattr(rows, "state_dict") else None
    lines.write(json.dumps({"key": key, **vars(place)}).encode() + b"\n")
    lines.flush()
    os.fsync(lines.fileno())


def _finish(into: Path, key: str) -> Path:
    rows = list(map(json.loads, (into / PART).read_text(encoding="utf-8").split("\n")[:-1]))
    skipped = [row for row in rows if "reason" in row]
    table = ["|".join(row[name] for name in COLUMNS) + "\n" for row in rows if "id" in row]
    if not table:
        first = skipped[0]["reason"] if skipped else "none"
        (into / PART).unlink()  # other columns may be named before the next call
        raise DatasetError(f"None of {len(skipped)} rows could be used. The first: {first}")
    write_lines(into / "skipped.jsonl", skipped)
    if skipped:
        message = f"{len(skipped):,} rows are left out: {into / 'skipped.jsonl'} has the reasons."
        warnings.warn(message, category=Note, stacklevel=4)
    write_atomic(into / "metadata.csv", "".join(["|".join(COLUMNS) + "\n", *table]))
    write_atomic(into / "complete", key)
    (into / PART).unlink()
    return into


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
    for column in audio:  # decoding needs FFmpeg and resamples; soundfile reads the bytes
        rows = rows.cast_column(column, datasets.Audio(decode=False))
    return rows
