"""Texts in files of their own: one for each recording, or lists of `id text`.

`c0.wav` with `c0.txt`, `c0.lab` or Whisper's `c0.json`, beside it or in other folders (VCTK,
LibriTTS); LibriSpeech's `*.trans.txt`, Kaldi's `text` alone, JSUT's `id:text`, Festival's
`( id "text" )`.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from kit.base.errors import DatasetError
from kit.dataset.data_report import Finding, ManifestConfig
from kit.dataset.recordings import Record, Recordings, bad_row, label_of
from kit.dataset.splits import split_of_folders
from kit.dataset.tables import encoding_problem, read_lines

# Of a recording's own text; where it has several, the first of these is taken.
ENDINGS = (".normalized.txt", ".txt", ".lab", ".json", ".original.txt")
LIST_SUFFIXES = (".txt", ".data", ".list", "")
MICROPHONES = ("", "_mic1")  # VCTK records with two; its texts name neither
SAMPLE = 50  # files or lines that are looked at to recognise the layout
LINE = re.compile(r'(?:\(\s*)?([^\s:]+)(?::|\s)\s*"?(.*?)"?(?:\s*\))?')
TIMES = re.compile(r"(0|\d+\.\d+)\s+\d+(\.\d+)?\s")  # of HTK's labels and Audacity's


def folders_of_texts(folder: Path) -> list[Path]:
    """Return [folder] if some text below it belongs to a recording there, else []."""
    recordings = Recordings(folder)
    if not recordings.folders():
        return []
    paths = list(_text_paths(folder))
    step = max(1, len(paths) // SAMPLE)
    own = any(_own_recording(path, folder, recordings) for path in paths[::step])
    return [folder] if own or any(_is_list(path, recordings) for path in paths[::step]) else []


def read_text_files(
    folders: list[Path], config: ManifestConfig
) -> Iterator[Record | Finding | str]:
    """Read the texts below `folders`; a recording without one becomes a finding."""
    for folder in folders:
        recordings = Recordings(folder)
        paths = list(_text_paths(folder))
        texts = {}  # {recording: its own text file}
        for path in sorted(paths, key=lambda path: ENDINGS.index(_ending(path))):
            audio = _own_recording(path, folder, recordings)
            if audio:
                texts.setdefault(audio, path)
        lists = [path for path in paths if _is_list(path, recordings)]
        labels = [folder / "_", *texts.values(), *lists]  # names start from `folder`
        named = set()
        for audio, path in sorted(texts.items()):
            named.add(audio)
            yield _own_record(path, audio, folder, labels)
        for path in lists:
            for record in _list_records(path, folder, recordings, labels):
                if isinstance(record, Record):
                    named.add(recordings.find_below(record.audio))
                yield record
        for audio in recordings.paths():
            second = re.sub(r"_mic\d+(?=\.\w+$)", "_mic1", audio)
            if audio not in named and second not in named:
                name = recordings.id_of(audio)
                reason = f"no text: neither {Path(name).name}.txt nor a list names it"
                cure = "write it, or let `python -m kit transcribe` do it"
                yield bad_row(folder.name, 1, name, reason, cure=cure)


def _text_paths(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith((".", "__MACOSX")))
        for name in sorted(files):
            path = Path(parent, name)
            if not name.startswith(".") and (_ending(path) != ENDINGS[-1] or "original" in name):
                yield path


def _ending(path: Path) -> str:
    """Return the ending of a text's name; ENDINGS[1] for those of lists without one."""
    name = path.name.lower()
    endings = [ending for ending in ENDINGS if name.endswith(ending)]
    if endings:
        return max(endings, key=len)
    return ENDINGS[1] if path.suffix.lower() in LIST_SUFFIXES else ENDINGS[-1]


def _own_recording(path: Path, folder: Path, recordings: Recordings) -> str:
    """Return the recording of the same name: beside the text, else the nearest in other folders."""
    if not path.name.lower().endswith(_ending(path)):
        return ""
    stem = path.relative_to(folder).as_posix()[: -len(_ending(path))]
    parts = stem.split("/")
    for first in range(len(parts)):
        for microphone in MICROPHONES:
            audio = recordings.find_below("/".join(parts[first:]) + microphone)
            if audio:
                return audio
    return ""


def _own_record(path: Path, audio: str, folder: Path, labels: list[Path]) -> Record | Finding:
    label = label_of(path, labels)
    try:
        text = " ".join(" ".join(read_lines(path)).split())
        reason, cure = encoding_problem(text)
        if reason:
            return bad_row(label, 1, "", reason, cure=cure)
        if path.suffix.lower() == ".json":
            text = json.loads(text)["text"]
    except DatasetError as error:
        return bad_row(label, 1, "", str(error))
    except (ValueError, TypeError, KeyError):
        reason = 'an object with a "text" expected, as Whisper writes'
        return bad_row(label, 1, "", reason)
    if not isinstance(text, str) or TIMES.match(text):
        return bad_row(label, 1, "", "labels with times, not a text", cure="write what is said")
    return Record(
        file=label,
        line=1,
        id="",
        audio=os.path.relpath(audio, folder),
        base=folder,
        text=text,
        split=split_of_folders(label),
        in_subfolders=True,
    )


def _is_list(path: Path, recordings: Recordings) -> bool:
    """Tell whether most lines of a file begin with a recording's name."""
    if path.suffix.lower() not in LIST_SUFFIXES:
        return False
    try:
        lines = _list_lines(path)[:SAMPLE]
    except (DatasetError, OSError):
        return False
    hits = sum(bool(recordings.find_below(name)) for _, name, text in lines if text)
    return bool(lines) and 2 * hits > len(lines)


def _list_lines(path: Path) -> list[tuple[int, str, str]]:
    """Return (line, id, text) of the lines that are not empty."""
    lines = []
    for number, line in enumerate(read_lines(path), 1):
        match = LINE.fullmatch(line.strip())
        if line.strip():
            lines.append((number, match[1], match[2]) if match else (number, line.strip(), ""))
    return lines


def _list_records(
    path: Path, folder: Path, recordings: Recordings, labels: list[Path]
) -> Iterator[Record | Finding]:
    label = label_of(path, labels)
    for number, name, text in _list_lines(path):
        audio = recordings.find_below(name)
        reason, cure = encoding_problem(f"{name} {text}")
        if reason:
            yield bad_row(label, number, name, reason, cure=cure)
            continue
        yield Record(
            file=label,
            line=number,
            id=recordings.id_of(audio) if audio else "",
            audio=os.path.relpath(audio, folder) if audio else name,
            base=folder,
            text=text,
            split=split_of_folders(label),
            in_subfolders=True,
        )
