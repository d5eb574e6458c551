"""Read JSON manifests of recordings: one object a line, an array, or an object of rows."""

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

from kit.base.errors import KitError
from kit.base.files import special_file_kind
from kit.base.formatting import non_utf8_problem
from kit.dataset.columns import role_of
from kit.dataset.data_report import Finding, ManifestConfig
from kit.dataset.recordings import (
    Record,
    Recordings,
    bad_row,
    choose_base,
    label_of,
    stays_inside,
)
from kit.dataset.splits import canonical_split, split_of
from kit.dataset.spool import Spool
from kit.dataset.tables import SAMPLE_ROWS
from kit.streams.formats import JsonLines, rows
from kit.streams.stream import BadRecord

# The usual keys of JSON records, in the order in which they are preferred.
AUDIO_KEYS = (
    "audio audio_filepath path file_name filename audio_file audio_path file filepath wav wav_path"
).split()
TEXT_KEYS = "text sentence transcription transcript normalized_text".split()
SPEAKER_KEYS = "speaker speaker_id speaker_name spk client_id".split()
HEAD_BYTES = 4096
SPACE = b"\xef\xbb\xbf \r\n\t"  # before a JSON text
MAX_JSON_BYTES = 2**26  # of a file that is read at once


def json_tables(folder: Path) -> list[Path]:
    """Return the manifests; among files called .json, those of NeMo and not a configuration."""
    one = folder / "manifest.jsonl"
    if one.is_file():
        return [one]
    lines = sorted(folder.glob("*.jsonl"))
    if lines:
        return lines
    files = [path for path in sorted(folder.glob("*.json")) if path.is_file()]
    recordings = Recordings(folder)
    # Whisper and Emilia write one for each recording.
    files = [path for path in files if not recordings.find(path.stem)]
    return [path for path in files if _is_manifest(path, recordings)]


def read_head(path: Path) -> bytes:
    """Return the first bytes of a file, which tell its kind."""
    with open(path, "rb") as file:
        return file.read(HEAD_BYTES)


def _is_manifest(path: Path, recordings: Recordings) -> bool:
    """Tell whether a .json file lists recordings, and is no configuration or one's own text."""
    head = read_head(path)
    if b'"audio_filepath"' in head:  # as NeMo names them
        return True
    if not head.lstrip(SPACE).startswith((b"{", b"[")):
        return False
    lines = itertools.islice(_json_rows(path), SAMPLE_ROWS)
    try:
        names = [_audio(values) for _, values in lines if isinstance(values, dict)]
    except KitError:
        return False
    return 2 * sum(bool(n) and recordings.lists(str(n)) for n in names) > len(names)


def read_json(tables: list[Path], config: ManifestConfig) -> Iterator[Record | Finding]:
    """Read one object a line with audio and text; several tables are splits by their names."""
    for table in tables:
        label = label_of(table, tables)
        split = "" if len(tables) == 1 else split_of(table, tables)
        lines = Spool(_json_rows(table))
        records = [lines[i][1] for i in range(0, len(lines), max(1, len(lines) // SAMPLE_ROWS))]
        names = [_audio(values) for values in records if isinstance(values, dict)]
        parts = {
            str(_audio(values))
            for _, values in lines
            if isinstance(values, dict) and values.get("offset")
        }
        folder = Path(config.audio_root or table.parent)
        base, in_subfolders = choose_base(folder, folder, [n for n in names if isinstance(n, str)])
        for number, values in lines:
            name = ""
            reason, cure = "", ""
            if isinstance(values, BadRecord):
                reason = values.reason
            else:
                name = str(values.get("id", ""))
                reason, cure = _json_problem(values, parts)
            if reason:
                yield bad_row(label, number, name, reason, cure=cure)
                continue
            audio = _audio(values)
            speaker = _value(values, SPEAKER_KEYS, "speaker")
            if os.path.isabs(audio) and Path(audio).is_relative_to(base.absolute()):
                audio = str(Path(audio).relative_to(base.absolute()))
            usual_id = ""
            if stays_inside(audio) and "\\" not in audio:
                usual_id = label.removesuffix(table.name) + os.path.splitext(audio)[0]
            yield Record(
                file=label,
                line=number,
                id=str(values.get("id") or usual_id),
                audio=audio,
                base=base,
                text=_value(values, TEXT_KEYS, "text"),
                speaker="" if speaker is None else str(speaker),
                split=canonical_split(str(values.get("split") or "")) or split,
                in_subfolders=in_subfolders,
            )


def _json_rows(table: Path) -> Iterator[tuple[int, dict | BadRecord]]:
    """Read JSON lines, which NeMo keeps in files called .json, an array, or an object of rows."""
    if table.suffix.lower() == ".json" and not special_file_kind(table):  # a pipe would wait
        records = _records_of_object(table)
        if records:
            return enumerate(records, 1)
        if read_head(table).lstrip(SPACE).startswith(b"{"):
            return JsonLines(table, on_bad_record=lambda record: None).rows()
    return rows(table)


def _records_of_object(path: Path) -> list[dict]:
    """Return the rows of {id: text}, {id: {...}} or {"data": [{...}, ...]}; [] for another file."""
    if path.stat().st_size > MAX_JSON_BYTES:
        return []
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError):
        return []
    if not isinstance(values, dict):
        return []
    if all(isinstance(value, str) for value in values.values()):
        return [{"audio": name, "text": text} for name, text in values.items()]
    if all(isinstance(value, dict) for value in values.values()):
        return [{"audio": name} | value for name, value in values.items()]
    lists = [value for value in values.values() if isinstance(value, list) and value]
    return lists[0] if len(lists) == 1 and all(isinstance(v, dict) for v in lists[0]) else []


def _value(values: dict, keys: list[str], role: str) -> object:
    """Return the first value under one of `keys`, or under another name of this role."""
    keys = [*keys, *(key for key in values if role_of(str(key)) == role)]
    return next((values[key] for key in keys if values.get(key) not in (None, "")), None)


def _audio(values: dict) -> object:
    audio = _value(values, AUDIO_KEYS, "audio")
    return audio.get("path") if isinstance(audio, dict) else audio  # as `datasets` writes it


def _json_problem(values: dict, parts: set[str]) -> tuple[str, str]:
    """Return (reason, fix) for an object that is not a record, else empty strings."""
    audio = _audio(values)
    text = _value(values, TEXT_KEYS, "text")
    if "rejected" in values and audio is None:  # by what wrote the table from Parquet files
        return str(values["rejected"]), ""
    if not isinstance(audio, str) or not isinstance(text, str):
        types = ", ".join(f"{key}: {type(value).__name__}" for key, value in values.items())
        return f"`audio` and `text`, both strings, expected; got {types or 'nothing'}", ""
    others = [_value(values, SPEAKER_KEYS, "speaker"), values.get("id"), values.get("split")]
    if non_utf8_problem("".join([audio, text, *map(str, others)])):  # \u escapes can spell it
        return "half of a surrogate pair, which is not a character", "save the table as UTF-8"
    if "offset" in values and audio in parts:
        reason = f"a part of a recording (offset {values['offset']}), which is not supported"
        return reason, "split the recording into one file a sentence"
    return "", ""
