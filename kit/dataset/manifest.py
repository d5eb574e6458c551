"""From a folder of recordings to a checked manifest, and a ledger of all that was refused.

The whole way: read the tables (layouts.py), measure every clip (clip_stats.py), judge (rules.py),
write what came of it. `check_dataset` does it for a notebook; `write_fixed` leaves a cleaned table
for other tools. Originals are only read. Knows nothing of tokens or codes.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from kit.audio.clip import ClipMeasure
from kit.base.errors import DatasetError
from kit.base.files import write_atomic
from kit.base.formatting import shorten
from kit.base.work_group import SINGLE_PROCESS, WorkGroup
from kit.dataset.checks import judge_rows
from kit.dataset.clip_stats import measure_clips
from kit.dataset.data_report import DataReport, ManifestConfig, Utterance
from kit.dataset.layouts import read_dataset

# What a field of a row is, where it is no text.
KINDS = {"line": int, "seconds": int | float, "silence_s": int | float}


def check_dataset(
    source: Path,
    config: ManifestConfig,
    into: Path,
    workers: int | None = None,
    progress: Callable = lambda *_: None,
    group: WorkGroup = SINGLE_PROCESS,
) -> DataReport:
    """Read and check a folder or table; write manifest, ledger and warnings as JSONL under `into`.

    Clips measured before, and unchanged since, are not read again (`measures.jsonl`), so a check
    that was killed goes on; the processes of `group` share them. `progress(done, total)` is called
    along the way. Raises DatasetError when `source` is no dataset or vanishes; what was refused is
    for `DataReport.require_usable`.
    """
    into = Path(into)
    found = read_dataset(source, config)
    paths = [row.audio for row in found.rows]
    cache = into / "measures.jsonl"
    measures = measure_clips(
        paths, cache, config.longest_s, workers, progress=progress, group=group
    )
    kept, refused, warned = judge_rows(found.rows, measures, config)
    figures = {path: m for path, m in measures.items() if isinstance(m, ClipMeasure)}
    ledger = DataReport(
        layout=found.layout,
        kept=kept,
        refused=found.refused + refused,
        warned=warned,
        measures=figures,
    )
    write_data_report(ledger, into)
    return ledger


def write_data_report(ledger: DataReport, into: Path) -> None:
    """Write manifest.jsonl, ledger.jsonl and warnings.jsonl into the folder `into`."""
    write_manifest(ledger.kept, into)
    for name, table in {"ledger": ledger.refused, "warnings": ledger.warned}.items():
        _write_lines(Path(into) / f"{name}.jsonl", map(vars, table))


def write_manifest(rows: list[Utterance], folder: Path) -> None:
    """Write what `read_manifest` reads; a recording below `folder` moves with it."""
    folder = Path(os.path.abspath(folder))
    lines = [dict(vars(row), audio=_movable(row.audio, folder)) for row in rows]
    _write_lines(folder / "manifest.jsonl", lines)


def _movable(audio: str, folder: Path) -> str:
    """The path `audio` from `folder` on, where it lies below that; else in full."""
    path = Path(os.path.abspath(audio))
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)


def read_manifest(folder: Path) -> list[Utterance]:
    """The checked manifest that 01_data_prep left in `folder`."""
    path = Path(folder) / "manifest.jsonl"
    if not path.is_file():
        raise DatasetError(f"There is no {path}: run notebook 01_data_prep first.")
    rows = []
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = _utterance(json.loads(line))
                rows.append(dataclasses.replace(row, audio=str(path.parent.absolute() / row.audio)))
            except (ValueError, TypeError, RecursionError) as error:
                raise DatasetError(
                    f"{path}, line {number} is damaged ({shorten(error)}): run 01_data_prep "
                    "again, it writes the manifest anew."
                ) from error
    if not rows:
        raise DatasetError(f"{path} holds no row: run notebook 01_data_prep again.")
    return rows


def _utterance(values: dict) -> Utterance:
    """A row of the manifest. Raises TypeError for what is none."""
    row = Utterance(**values)
    for name, value in vars(row).items():
        kind = KINDS.get(name, str)
        if not isinstance(value, kind):
            raise TypeError(f"`{name}` is {value!r}")
    return row


def write_fixed(kept: list[Utterance], path: Path, root: Path) -> Path:
    """A JSONL manifest of the rows that were kept, with their normalised texts and splits.

    Paths are relative to `root`, the dataset's folder (or a table in it), and `read_dataset(path,
    config)` reads it back with `audio_root=root`. Raises DatasetError when `path` lies inside
    `root`: originals stay as they are.
    """
    path = Path(path).absolute()
    root = Path(root).absolute()
    root = root.parent if root.is_file() else root
    if path.resolve().is_relative_to(root.resolve()):
        raise DatasetError(f"{path} lies among the originals in {root}; choose another folder.")
    keys = ("id", "text", "speaker", "split", "seconds")
    lines = []
    for row in kept:
        line = {"audio": os.path.relpath(os.path.abspath(row.audio), root)}
        line.update((key, getattr(row, key)) for key in keys)
        lines.append(line)
    _write_lines(path, lines)
    return path


def _write_lines(path: Path, values: Iterable[dict]) -> None:
    write_atomic(path, "".join(json.dumps(v, ensure_ascii=False) + "\n" for v in values))
