"""Write and read the manifest of a run: its recordings, with texts, speakers and splits."""

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path

from kit.base.errors import DatasetError
from kit.base.files import atomic_path
from kit.base.formatting import shorten


@dataclasses.dataclass(frozen=True, kw_only=True)
class Utterance:
    id: str
    audio: str  # path of the recording
    text: str  # normalised
    speaker: str
    split: str  # "train", "held_out", or another name that the dataset brings
    line: int  # in its table, from 1
    seconds: float = 0.0  # measured; 0 before that
    silence_s: float = 0.0  # of them, at both ends, that training leaves out
    file: str = ""  # its table
    written: str = ""  # its text there, where normalising changed more than capitals and spaces

    @property
    def speech_s(self) -> float:
        return self.seconds - self.silence_s


def write_manifest(rows: Iterable[Utterance], folder: Path) -> None:
    """Write manifest.jsonl; recordings below `folder` get relative paths, so it can be moved."""
    folder = Path(os.path.abspath(folder))

    def line(row: Utterance) -> dict:
        path = Path(os.path.abspath(row.audio))
        inside = path.is_relative_to(folder)
        return vars(row) | {"audio": str(path.relative_to(folder).as_posix() if inside else path)}

    write_lines(folder / "manifest.jsonl", map(line, rows))


def read_manifest(folder: Path) -> list[Utterance]:
    """Read the manifest that 01_data_prep wrote to `folder`. Raises DatasetError."""
    path = Path(folder) / "manifest.jsonl"
    if not path.is_file():
        raise DatasetError(f"There is no {path}: run notebook 01_data_prep first.")
    rows = []
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = Utterance(**json.loads(line))
                rows.append(dataclasses.replace(row, audio=str(path.parent.absolute() / row.audio)))
            except (ValueError, TypeError, RecursionError) as error:
                raise DatasetError(
                    f"{path}, line {number} is damaged ({shorten(error)}): run 01_data_prep "
                    "again, which rewrites the manifest."
                ) from error
    if not rows:
        raise DatasetError(f"{path} has no rows: run notebook 01_data_prep again.")
    return rows


def write_lines(path: Path, values: Iterable[dict]) -> None:
    with atomic_path(path) as part, open(part, "wb") as file:
        for value in values:
            file.write(json.dumps(value, ensure_ascii=False).encode() + b"\n")
