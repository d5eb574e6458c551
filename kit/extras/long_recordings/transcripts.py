"""The tables of transcribed recordings: what Whisper wrote, and what a person made of it.

metadata.csv is the person's. A row stays as it is once its text was changed, or its id is in
proofread.txt; a row that was taken out stays out. All others follow transcripts.csv.
"""

import csv
import io
from pathlib import Path

from kit.base.errors import DatasetError
from kit.base.files import append_lines, write_atomic
from kit.base.lock import held
from kit.dataset.tables import iter_lines, read_texts

COLUMNS = ("id", "text", "confidence", "start_s", "end_s", "source")
LOCK_WAIT_S = 20.0


def read_transcripts(out: Path) -> dict[str, dict]:
    """Return {id: row} of transcripts.csv. Raises DatasetError if its columns are others."""
    path = Path(out) / "transcripts.csv"
    if not path.is_file():
        return {}
    table = csv.DictReader(iter_lines(path))
    if tuple(table.fieldnames or ()) != COLUMNS:
        raise DatasetError(
            f"{path} was changed: expected the columns {', '.join(COLUMNS)}. Undo this, or delete "
            "the file; then every row of metadata.csv counts as edited, and stays."
        )
    return {row["id"]: row for row in table}


def read_proofread(out: Path) -> set[str]:
    path = Path(out) / "proofread.txt"
    return set(path.read_text(encoding="utf-8").split()) if path.is_file() else set()


def update_tables(out: Path, clips: dict[str, list[dict]]) -> None:
    """Write transcripts.csv, and metadata.csv but for the person's rows.

    `clips` are the rows by source; those of other sources stay.
    """
    with held(out / ".tables.lock", "writing metadata.csv", LOCK_WAIT_S):
        texts = read_texts(out)
        before = read_transcripts(out) if (out / "metadata.csv").is_file() else {}
        proofread = read_proofread(out)
        now = {name: row for name, row in before.items() if row["source"] not in clips}
        now |= {row["id"]: row for rows in clips.values() for row in rows}
        table = {}
        for name, text in texts.items():
            by_whisper = name in before and text == before[name]["text"] and name not in proofread
            if not by_whisper:
                table[name] = text
            elif name in now:
                table[name] = now[name]["text"]
        known = texts.keys() | before.keys() | proofread
        table |= {name: row["text"] for name, row in now.items() if name not in known}
        # In this order: a new row that is in transcripts.csv alone would count as taken out.
        _write_texts(out, table)
        lines = io.StringIO()
        writer = csv.DictWriter(lines, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(now.values())
        write_atomic(out / "transcripts.csv", lines.getvalue())


def save_text(out: Path, clip_id: str, text: str | None) -> None:
    """Write a clip's proofread text to metadata.csv at once; None takes the clip out.

    Raises DatasetError for an empty text.
    """
    out = Path(out)
    cleaned = " ".join((text or "").replace("|", " ").split())
    if text is not None and not cleaned:
        raise DatasetError("The text is empty: write what is said, or press Leave out.")
    with held(out / ".tables.lock", "proofreading", LOCK_WAIT_S):
        texts = read_texts(out)
        if text is None:
            texts.pop(clip_id, None)
        else:
            texts[clip_id] = cleaned
        _write_texts(out, texts)
        with append_lines(out / "proofread.txt") as file:
            file.write(f"{clip_id}\n".encode())


def _write_texts(out: Path, texts: dict[str, str]) -> None:
    write_atomic(out / "metadata.csv", "".join(f"{name}|{text}\n" for name, text in texts.items()))
