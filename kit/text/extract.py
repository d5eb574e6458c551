"""Long passes over text that resume after a killed process, and one: text out of a table."""

import contextlib
import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from kit.base.errors import DatasetError
from kit.base.files import digest, write_atomic
from kit.base.formatting import nearest
from kit.streams.file import BadRecord, ByteFile
from kit.streams.open import open_source, rows
from kit.text.normalize import normalize

EVERY = 10_000  # items between two saves
_MAX_NAMED = 20  # bad records kept by name; the others are counted


class Progress:
    """How far a pass has come, in the small JSON file `path`; ignored when `key` has changed.

    `state` is what was saved last: the number of `items` done, and the pass's own figures.
    """

    def __init__(self, path: Path, key: str, every: int | None = None):
        self.path = Path(path)
        self.key = key
        self.every = every or EVERY
        try:
            saved = json.loads(self.path.read_bytes())
        except (FileNotFoundError, ValueError):  # missing, or not written by this class
            saved = None
        is_same = isinstance(saved, dict) and saved.get("key") == key
        self.state = saved if is_same else {"items": 0}

    def restart(self) -> None:
        self.state = {"items": 0}

    def follow(self, items: Iterable, figures: Callable[[], dict]) -> Iterator:
        """Yield the `items` not yet done. When one is requested, those before it count as done.

        `figures()` returns what to save, after flushing any output it refers to.
        """
        start = self.state["items"]
        for number, item in enumerate(itertools.islice(items, start, None), start + 1):
            yield item
            if number % self.every == 0:
                self.state = {"key": self.key, "items": number, **figures()}
                write_atomic(self.path, json.dumps(self.state, ensure_ascii=False))

    def remove(self) -> None:
        """Delete the file, and temporary ones left by a process that was killed while writing."""
        for path in (self.path, *self.path.parent.glob(f".{self.path.name}.*")):
            path.unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtractedText:
    path: Path  # plain text, one sentence a line; deleted when the `with` block ends
    lines: int
    empty: int  # rows without text, skipped
    unreadable: int  # bad rows, skipped
    faults: tuple[str, ...]  # the first of these: place and reason


def plain_lines(path: Path) -> Iterator[str]:
    """The lines of a plain text file that are not blank, without their ends, streamed.

    Raises DatasetError with file, line and fix for a line that is not UTF-8.
    """
    return (line for line in open_source(path) if line.strip())


def _texts(path: Path, column: str, layout: dict) -> Iterator[str | BadRecord]:
    """The text of every row, in order. Raises DatasetError when there is no such column."""
    for _, row in rows(path, **layout):
        if isinstance(row, str | BadRecord):
            yield row
        elif column in row:
            yield str(row[column] or "")
        else:
            raise DatasetError(
                f"{path} has no column `{column}`.{nearest(column, row)} Rename the column with "
                "the text, or pass its name as `column`."
            )


@contextlib.contextmanager
def extract_text(
    source: Path, folder: Path, *, column: str = "text", language: str | None = None, **layout
) -> Iterator[ExtractedText]:
    """The text of `source` as a plain file in `folder`, deleted at the end whatever happens.

    Progress is saved every 10 000 rows: after a killed process the next call resumes and makes the
    same file, or starts again if source or arguments changed. One process at a time may use
    `folder`. `layout` goes to `rows` (`columns`, `delimiter`, `quoting`). `language` normalises the
    text. Raises DatasetError when there is no such column, or the source cannot be read.
    """
    source = Path(source)
    folder = Path(folder)
    identity = [str(source.resolve()), ByteFile(source).fingerprint, source.stat().st_mtime_ns]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".extracted.txt"
    progress = Progress(folder / ".extracted.json", digest(identity, column, language, layout))
    try:
        yield _extract(_texts(source, column, layout), language, path, progress)
    finally:
        path.unlink(missing_ok=True)
        progress.remove()


def _extract(
    texts: Iterator, language: str | None, path: Path, progress: Progress
) -> ExtractedText:
    count = {"bytes": 0, "lines": 0, "empty": 0, "unreadable": 0, "faults": []}
    with open(path, "ab") as file:
        if file.tell() < progress.state.get("bytes", 0):
            progress.restart()  # the text was deleted, but not its progress
        count.update({k: v for k, v in progress.state.items() if k in count})
        file.truncate(count["bytes"])  # what came after the last save is written again

        def flush() -> dict:
            file.flush()
            os.fsync(file.fileno())
            return dict(count, bytes=file.tell())

        for text in progress.follow(texts, flush):
            _take(text, language, count, file)
    del count["bytes"]
    return ExtractedText(path=path, **count | {"faults": tuple(count["faults"])})


def _take(text: str | BadRecord, language: str | None, count: dict, file) -> None:
    """Write one row into `file`, or count it among those without text."""
    if isinstance(text, BadRecord):
        count["unreadable"] += 1
        if len(count["faults"]) < _MAX_NAMED:
            count["faults"].append(str(text))
        return
    # One line a text: a line break inside a quoted field becomes a space.
    line = normalize(text, language) if language else " ".join(text.split())
    count["lines" if line else "empty"] += 1
    if line:
        file.write(f"{line}\n".encode())
