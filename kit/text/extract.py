"""The text of a table or a plain file as normalised lines; resumed after a killed process."""

import contextlib
import itertools
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from kit.base.errors import DatasetError, Note
from kit.base.files import digest, write_atomic
from kit.base.formatting import nearest
from kit.streams.file import BadRecord, ByteFile
from kit.streams.open import rows
from kit.text.normalize import normalize

EVERY = 10_000  # rows between two saves


@contextlib.contextmanager
def extract_text(source: Path, folder: Path, language: str) -> Iterator[Path]:
    """Yield the text of `source` as a plain file in `folder`, deleted at the end whatever happens.

    `source` is plain text, or a table or JSON file with a column `text`. After a killed process the
    next call resumes, or starts again if anything changed. One process at a time may use `folder`.
    Warns of rows that cannot be read. Raises DatasetError where that is so of the source.
    """
    source = Path(source)
    identity = [str(source.resolve()), ByteFile(source).fingerprint, source.stat().st_mtime_ns]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".extracted.txt"
    mark = folder / ".extracted.json"
    try:
        _extract(source, language, path, mark, digest(identity, language))
        yield path
    finally:
        for left in (path, mark, *folder.glob(f".{mark.name}.*")):
            left.unlink(missing_ok=True)


def _extract(source: Path, language: str, path: Path, mark: Path, key: str) -> None:
    state = {"key": key, "rows": 0, "bytes": 0, "unreadable": 0, "first_unreadable": ""}
    try:
        saved = json.loads(mark.read_bytes())
    except (FileNotFoundError, ValueError):  # missing or damaged
        saved = None
    with open(path, "ab") as file:
        if isinstance(saved, dict) and saved.get("key") == key and saved["bytes"] <= file.tell():
            state = saved
        file.truncate(state["bytes"])  # what came after the last save is written again
        for row in itertools.islice(_texts(source), state["rows"], None):
            if isinstance(row, BadRecord):
                state["unreadable"] += 1
                state["first_unreadable"] = state["first_unreadable"] or str(row)
            elif line := normalize(row, language):
                file.write(f"{line}\n".encode())
            state["rows"] += 1
            if state["rows"] % EVERY == 0:
                file.flush()
                os.fsync(file.fileno())
                state["bytes"] = file.tell()
                write_atomic(mark, json.dumps(state, ensure_ascii=False))
    if state["unreadable"]:
        warnings.warn(
            f"{source}: {state['unreadable']:,} rows cannot be read and are left out. The first: "
            f"{state['first_unreadable']}",
            category=Note,
            stacklevel=4,
        )


def _texts(path: Path) -> Iterator[str | BadRecord]:
    """The text of every row, in order. Raises DatasetError when there is no column `text`."""
    for _, row in rows(path):
        if isinstance(row, str | BadRecord):
            yield row
        elif "text" in row:
            yield str(row["text"] or "")
        else:
            raise DatasetError(
                f"{path} has no column `text`.{nearest('text', row)} Rename the column with the "
                "text to `text`."
            )
