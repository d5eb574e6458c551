"""Recordings of a Festival voice as an LJSpeech folder.

FestVox (Black and Lenzo) keeps what a voice was built from: `etc/txt.done.data`, a line
`( id "text" )` for each recording, and `wav/id.wav`. Knows no voice by name.
"""

import os
import re
from pathlib import Path

from kit.base.errors import DatasetError
from kit.base.files import disk_errors, make_folder, write_atomic
from kit.base.formatting import join_names

TRANSCRIPTS = "etc/txt.done.data"
TABLE = "metadata.csv"
_LINE = re.compile(r'\(\s*(\S+)\s+"((?:[^"\\]|\\.)*)"\s*\)')
_STRESS = re.compile(r"\+(?=[^\W\d_])")


def find_voice(folder: Path) -> Path:
    """The folder below `folder` with a Festival voice's recordings. Raises DatasetError."""
    found = sorted(Path(folder).rglob(TRANSCRIPTS))
    if len(found) != 1:
        raise DatasetError(
            f"{folder} holds {len(found) or 'no'} Festival voices with {TRANSCRIPTS}: expected one."
        )
    return found[0].parent.parent


def read_transcripts(path: Path) -> dict[str, str]:
    """The text of every recording by its id, in the table's order. Raises DatasetError.

    `+` before a stressed vowel, which some words have and most have not, is left out.
    """
    texts = {}
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        found = _LINE.fullmatch(line.strip())
        if not found:
            raise DatasetError(f'{path}, line {number}: expected ( id "text" ), got {line[:80]!r}.')
        text = re.sub(r"\\(.)", r"\1", found[2])
        texts[found[1]] = _STRESS.sub("", text).replace("|", " ").strip()
    return texts


def move_to_ljspeech(voice: Path, into: Path) -> int:
    """Move the recordings of the Festival voice `voice` to `into`/wavs and write metadata.csv.

    The table is written last: where it stands, all of them do. Interrupted, it goes on from there.
    Raises DatasetError where recordings are missing; returns how many there are.
    """
    texts = read_transcripts(voice / TRANSCRIPTS)
    wavs = make_folder(Path(into) / "wavs")
    missing = []
    for name in texts:
        source = voice / "wav" / f"{name}.wav"
        target = wavs / f"{name}.wav"
        if source.is_file():
            with disk_errors(target):
                os.replace(source, target)
        elif not target.is_file():
            missing.append(name)
    if missing:
        raise DatasetError(
            f"{voice} lacks {len(missing)} of its {len(texts)} recordings ({join_names(missing)}): "
            "unpack it again."
        )
    lines = [f"{name}|{text}\n" for name, text in texts.items()]
    write_atomic(Path(into) / TABLE, "".join(lines))
    return len(texts)
