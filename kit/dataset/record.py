"""One line of a dataset's table, before it is checked; what every layout makes of its lines."""

import dataclasses
from pathlib import Path

from kit.dataset.data_report import Finding
from kit.dataset.splits import canonical_split, has_known_split, split_of_table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One line of a table, parsed but not yet checked."""

    file: str
    line: int
    id: str  # "": the path of the recording that is found
    audio: str  # path below `base`, possibly without its suffix
    base: Path  # folder that the recording must be in
    text: str
    speaker: str = ""
    split: str = ""
    in_subfolders: bool = False  # whether the recording may be in any folder below `base`


def bad_row(file: str, line: int, name: str, reason: str, cure: str = "") -> Finding:
    """Return the finding about a line of the table `file` that cannot be read."""
    return Finding(file=file, line=line, id=name, kind="row", reason=reason, cure=cure)


def label_of(table: Path, tables: list[Path]) -> str:
    """Return the table's name, with its folder where tables in other folders are read, too."""
    several = any(other.parent != table.parent for other in tables)
    return f"{table.parent.name}/{table.name}" if several else table.name


def split_of(table: Path, tables: list[Path]) -> str:
    """Return the split that a table's name says it holds, or its folder's; "" for none."""
    if any(other.parent != table.parent for other in tables):
        return canonical_split(table.parent.name)
    if len(tables) == 1 and not has_known_split(table.stem):
        return ""
    return split_of_table(table.stem)
