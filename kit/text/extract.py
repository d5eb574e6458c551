"""Long passes over text that go on where a killed process stopped: extraction, counting.

`Progress` is the mark such a pass leaves every 10 000 items: a small JSON file, written atomically,
that says how many items are behind it and what came of them. `extracted` is such a pass: from a
table of any size to a plain text file that exists only as long as it is needed. Knows nothing of
tokenizers; what a row is, `kit.streams.open` knows.
"""

import contextlib
import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from kit.base.files import digest, write_atomic
from kit.base.words import nearest
from kit.streams.file import ByteFile, Fault
from kit.streams.open import open_source, rows
from kit.streams.position import StreamConfig
from kit.text.normalize import TextError, normalize

EVERY = 10_000  # items between two marks
_FAULTS_TOLD = 20  # by name; the rest are counted


class Progress:
    """How far a pass has come, in the file `path`; forgotten when `key` is another.

    `state` holds what the pass itself saved last: `items` done, and its own figures.
    """

    def __init__(self, path: Path, key: str, every: int | None = None):
        self.path = Path(path)
        self.key = key
        self.every = every or EVERY
        self.state = self._saved()

    def _saved(self) -> dict:
        try:
            saved = json.loads(self.path.read_bytes())
        except (FileNotFoundError, ValueError):  # none, or none of ours
            saved = None
        same = isinstance(saved, dict) and saved.get("key") == self.key
        return saved if same else {"items": 0}

    def restart(self) -> None:
        self.state = {"items": 0}

    def follow(self, items: Iterable, figures: Callable[[], dict]) -> Iterator:
        """The `items` not yet done. When one is asked for, those before it count as done.

        `figures()` gives what to save, and must first make safe what it speaks of.
        """
        start = self.state["items"]
        for number, item in enumerate(itertools.islice(items, start, None), start + 1):
            yield item
            if number % self.every == 0:
                self.state = {"key": self.key, "items": number, **figures()}
                write_atomic(self.path, json.dumps(self.state, ensure_ascii=False))

    def remove(self) -> None:
        """Forget it all; also what a process killed while it wrote the mark left beside it."""
        for path in (self.path, *self.path.parent.glob(f".{self.path.name}.*")):
            path.unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extract:
    path: Path  # plain text, one line a sentence; gone when the `with` block ends
    lines: int
    empty: int  # rows without a letter of text, passed over
    unreadable: int  # rows that are no rows, passed over
    faults: tuple[str, ...]  # the first of these: where and why


def is_plain(path: Path, delimiter: str | None = None, **_) -> bool:
    """Whether `path` is text of one sentence a line; with a `delimiter` it is a table."""
    return path.suffix.lower() == ".txt" and not delimiter


def plain_lines(path: Path) -> Iterator[str]:
    """The lines of a plain text file that are not blank, streamed, without their ends.

    Raises StreamError, naming file, line and cure, for what cannot be read as UTF-8.
    """
    stream = open_source(path, StreamConfig(shuffle=False))
    stream.take_role(0, 1)  # all of it, in whatever process this runs
    return (line for line in stream if line.strip())


def _texts(path: Path, column: str, layout: dict) -> Iterator[str | Fault]:
    """The text of every row, in order. Raises TextError when there is no such column."""
    for _, row in rows(path, **layout):
        if isinstance(row, str | Fault):
            yield row
        elif column in row:
            yield str(row[column] or "")
        else:
            raise TextError(
                f"{path} has no column `{column}`.{nearest(column, row)} Rename the one with "
                "the text, or give its name as `column`."
            )


@contextlib.contextmanager
def extracted(
    source: Path, folder: Path, *, column: str = "text", language: str | None = None, **layout
) -> Iterator[Extract]:
    """The text of `source` as a plain file in `folder`, removed at the end whatever happens.

    Written line by line, with a mark every 10 000 rows: after a killed process the next call goes
    on from there and ends with the same file, or starts anew when the source or the arguments
    changed. One process at a time in a `folder`. `layout` goes to `rows` (`columns`,
    `delimiter`, `quoting`). `language` normalises the text; without it, text is taken as it is.
    Raises TextError when there is no such column, and StreamError when the source is
    missing or of another kind.
    """
    source = Path(source)
    folder = Path(folder)
    identity = [str(source.resolve()), ByteFile(source).fingerprint, source.stat().st_mtime_ns]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".extracted.txt"
    mark = folder / ".extracted.json"
    progress = Progress(mark, digest(identity, column, language, layout))
    try:
        yield _extract(_texts(source, column, layout), language, path, progress)
    finally:
        path.unlink(missing_ok=True)
        progress.remove()


def _extract(texts: Iterator, language: str | None, path: Path, progress: Progress) -> Extract:
    count = {"bytes": 0, "lines": 0, "empty": 0, "unreadable": 0, "faults": []}
    with open(path, "ab") as file:
        if file.tell() < progress.state.get("bytes", 0):
            progress.restart()  # somebody took the text and left the mark
        count.update({k: v for k, v in progress.state.items() if k in count})
        file.truncate(count["bytes"])  # what was written after the last mark is written again

        def safe() -> dict:
            file.flush()
            os.fsync(file.fileno())
            return dict(count, bytes=file.tell())

        for text in progress.follow(texts, safe):
            _take(text, language, count, file)
    return Extract(
        path=path,
        lines=count["lines"],
        empty=count["empty"],
        unreadable=count["unreadable"],
        faults=tuple(count["faults"]),
    )


def _take(text: str | Fault, language: str | None, count: dict, file) -> None:
    """One row into `file`, or into the count of those that have no text."""
    if isinstance(text, Fault):
        count["unreadable"] += 1
        if len(count["faults"]) < _FAULTS_TOLD:
            count["faults"].append(str(text))
        return
    # A line of the file is a line of text: a break inside a quoted field becomes a space.
    line = normalize(text, language) if language else " ".join(text.split())
    count["lines" if line else "empty"] += 1
    if line:
        file.write(f"{line}\n".encode())
