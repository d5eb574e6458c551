"""Any file of records as a stream, and its rows with line numbers.

`open_source` takes the format from the file's name; `rows` reads a whole file in its own order, as
a manifest is read. Knows nothing of what records hold.
"""

from collections.abc import Iterator
from pathlib import Path

from kit.streams.csv import DELIMITERS, Table
from kit.streams.file import Fault, StreamError
from kit.streams.json_array import JsonArray
from kit.streams.lines import JsonLines, TextLines
from kit.streams.position import StreamConfig
from kit.streams.source import Source

SUFFIXES = ".txt .csv .tsv .jsonl .ndjson .json"


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
    suffix = Path(path).suffix.lower()
    if delimiter or suffix in DELIMITERS:
        table = {"columns": columns, "delimiter": delimiter, "quoting": quoting}
        return Table(path, config, **table, **hooks)
    kinds = {".txt": TextLines, ".jsonl": JsonLines, ".ndjson": JsonLines, ".json": JsonArray}
    if suffix not in kinds:
        raise StreamError(f"{path}: what format is `{suffix}`? Known: {SUFFIXES}; or a delimiter.")
    return kinds[suffix](path, config, **hooks)


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
