"""Any file of records as a stream, and its rows with line numbers."""

from collections.abc import Iterator
from pathlib import Path

from kit.base.errors import DatasetError
from kit.streams.csv import Table
from kit.streams.file import BadRecord
from kit.streams.json_array import JsonArray
from kit.streams.lines import JsonLines, TextLines
from kit.streams.stream import FileStream, StreamConfig

# The class that reads files with this suffix; one more format is one more line.
FORMATS: dict[str, type[FileStream]] = {
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
) -> FileStream:
    """The stream for `path`, chosen by its suffix; with a `delimiter`, any file is a table.

    `columns`, `delimiter` and `quoting` are Table's, `hooks` are `keep` and `on_bad_record`. Raises
    DatasetError for an unknown suffix and for files that the format refuses.
    """
    if not delimiter:
        require_known_format(path)
    kind = Table if delimiter else FORMATS[Path(path).suffix.lower()]
    if kind is Table:
        hooks.update(columns=columns, delimiter=delimiter, quoting=quoting)
    return kind(path, config, **hooks)


def require_known_format(path: Path) -> None:
    """Raise DatasetError for a file whose suffix has no format."""
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise DatasetError(
            f"{path}: unknown format `{suffix}`. Known: {' '.join(FORMATS)}. Save the file as one "
            "of these, pass a `delimiter` if it is a table, or add a format (docs/extending.md)."
        )


def rows(
    path: Path,
    columns: list[str] | None = None,
    delimiter: str | None = None,
    quoting: bool = True,
) -> Iterator[tuple[int, dict | str | BadRecord]]:
    """(line number, record or BadRecord) in the order of the file, in constant memory.

    A table's record is `{column: value}`, all strings; a row with too many or too few columns is a
    BadRecord. Raises DatasetError when the file cannot be read at all.
    """
    layout = {"columns": columns, "delimiter": delimiter, "quoting": quoting}
    return open_source(path, **layout, on_bad_record=lambda record: None).rows()
