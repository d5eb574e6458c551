"""Any file of records as a stream, and its rows with line numbers.

`open_source` takes the format from the file's name, by the table `FORMATS`; `rows` reads a whole
file in its own order, as a manifest is read. Knows nothing of what records hold.
"""

from collections.abc import Iterator
from pathlib import Path

from kit.streams.csv import Table
from kit.streams.file import Fault, StreamError
from kit.streams.json_array import JsonArray
from kit.streams.lines import JsonLines, TextLines
from kit.streams.position import StreamConfig
from kit.streams.source import Source

# The class that reads a file whose name ends so; one more format is one more line.
FORMATS: dict[str, type[Source]] = {
    ".txt": TextLines,
    ".csv": Table,
    ".tsv": Table,
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
    ".json": JsonArray,
}


def open_source(
    path: Path,
    config: StreamConfig | None = None,
    *,
    columns: list[str] | None = None,
    delimiter: str | None = None,
    quoting: bool = True,
    **hooks,
) -> Source:
    """The stream for `path`, chosen by its suffix; one with a `delimiter` is a table, whatever its
    name. `columns`, `delimiter` and `quoting` are Table's, `hooks` are `keep` and `bad`.

    Raises StreamError for an unknown suffix and for what the format refuses.
    """
    if not delimiter:
        require_known(path)
    kind = Table if delimiter else FORMATS[Path(path).suffix.lower()]
    if kind is Table:
        hooks.update(columns=columns, delimiter=delimiter, quoting=quoting)
    return kind(path, config, **hooks)


def require_known(path: Path) -> None:
    """Raise StreamError for a file that no format is known for by its name."""
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise StreamError(
            f"{path}: what format is `{suffix}`? Known: {' '.join(FORMATS)}. Save it as one of "
            "them; a table of another name takes a `delimiter`, and docs/extending.md shows how a "
            "format is added."
        )


def rows(
    path: Path,
    columns: list[str] | None = None,
    delimiter: str | None = None,
    quoting: bool = True,
) -> Iterator[tuple[int, dict | str | Fault]]:
    """(line number, record or Fault) in the order of the file, in constant memory.

    A table's record is `{column: value}`, all strings; too many or too few columns are a Fault, and
    so is all else that is wrong with a row. Raises StreamError when the file cannot be read at all.
    """

    def go_on(fault: Fault) -> None:
        """Faults are rows like others here, so none is told of by itself."""

    source = open_source(path, columns=columns, delimiter=delimiter, quoting=quoting, bad=go_on)
    return source.rows()
