"""Texts in files of their own: one for each recording, or lists of `id text`.

`c0.wav` with `c0.txt`, `c0.lab` or Whisper's `c0.json`, beside it or elsewhere (VCTK, LibriTTS);
LibriSpeech's `*.trans.txt`, Kaldi's `text` (and `wav.scp`), JSUT's `id:text`, Festival's list.
"""

import functools
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from kit.base.errors import DatasetError
from kit.dataset.data_report import Finding
from kit.dataset.recordings import (
    Record,
    Recordings,
    bad_row,
    choose_base,
    label_of,
    split_of,
    split_of_folders,
    walk,
)
from kit.dataset.tables import encoding_problem, iter_lines
from kit.settings import ManifestConfig

# Of a recording's own text; where it has several, the first of these is taken.
SUBTITLES = (".srt", ".vtt", ".tsv")
ENDINGS = (".normalized.txt", ".txt", ".lab", ".json", *SUBTITLES, ".original.txt")
LIST_SUFFIXES = (".txt", ".data", ".list", "")
MICROPHONES = ("", "_mic1")  # VCTK records with two; its texts name neither
SAMPLE = 50  # files or lines that are looked at to recognise the layout
LINE = re.compile(r'(?:\(\s*)?([^\s:]+)(?::|\s)\s*(?:(?:=>?|->|:)\s)?"?(.*?)"?(?:\s*\))?')
# Of labels: Audacity's, HTK's, Festival's.
TIMES = re.compile(r"(separator ;.*?)?(# )?(0|\d+[.,]\d+)\s+\d+([.,]\d+)?\s")
CUES = re.compile(r"\d[\d:.,]*\s*(-->|\t)\s*\d[\d:.,]*[^\n\t]*[\n\t]")  # times of a subtitle


def folders_of_texts(folder: Path) -> list[Path]:
    """Return [folder] if some text below it belongs to a recording there, else []."""
    at = functools.cache(Recordings)
    recordings = at(folder)
    if not recordings.folders():
        return []
    paths = list(_text_paths(folder))
    some = paths[:: max(1, len(paths) // SAMPLE)]
    own = any(_own_recording(path, folder, recordings) for path in some)
    return [folder] if own or any(_is_list(path, folder, at) for path in some) else []


def has_own_texts(files: list[Path], folder: Path) -> bool:
    """Tell whether most of some files in a folder are each the text of a recording beside it."""
    recordings = Recordings(folder)
    names = [(path.name.lower(), _ending(path)) for path in files]
    own = [n for n, end in names if n.endswith(end) and recordings.find(n.removesuffix(end))]
    return len(own) > 1 or len(own) == len(files) > 0


def read_text_files(folders: list[Path], config: ManifestConfig) -> Iterator[Record | Finding]:
    """Read the texts below `folders`; a recording without one becomes a finding."""
    at = functools.cache(Recordings)
    for folder in folders:
        recordings = at(folder)
        paths = list(_text_paths(folder))
        texts = {}  # {recording: its own text file}
        own = set()
        for path in sorted(paths, key=lambda path: ENDINGS.index(_ending(path))):
            audio = _own_recording(path, folder, recordings)
            if audio:
                texts.setdefault(audio, path)
                own.add(path)
        lists = [path for path in paths if path not in own and _is_list(path, folder, at)]
        labels = [folder / "_", *texts.values(), *lists]  # names start from `folder`
        named = set()
        for path in lists:
            for record in _list_records(path, folder, at, labels):
                if isinstance(record, Record):
                    named.add(recordings.find_below(record.audio))
                yield record
        for audio in sorted(texts.keys() - named):
            yield _own_record(texts[audio], audio, folder, labels)
        named.update(texts)
        for audio in recordings.paths():
            first = re.sub(r"_mic\d+(?=\.\w+$)", "_mic1", audio)
            if audio not in named and first not in named:
                reason = f"no text: neither {Path(audio).stem}.txt nor a list names it"
                fix = "write it, or let `python -m kit transcribe` do it"
                yield bad_row(folder.name, 1, recordings.id_of(audio), reason, fix)


def _text_paths(folder: Path) -> Iterator[Path]:
    for parent, files in walk(folder):
        for path in (Path(parent, name) for name in files):
            if _ending(path) != ENDINGS[-1] or "original" in path.name:
                yield path


def _ending(path: Path) -> str:
    """Return the ending of a text's name; ENDINGS[1] for those of lists without one."""
    other = ENDINGS[1] if path.suffix.lower() in LIST_SUFFIXES else ENDINGS[-1]
    endings = (ending for ending in ENDINGS if path.name.lower().endswith(ending))
    return max(endings, key=len, default=other)


def _own_recording(path: Path, folder: Path, recordings: Recordings) -> str:
    """Return the recording of the same name: beside the text, else the nearest in other folders."""
    if not path.name.lower().endswith(_ending(path)):
        return ""
    parts = path.relative_to(folder).as_posix()[: -len(_ending(path))].split("/")
    tails = ["/".join(parts[first:]) for first in range(len(parts))]
    paths = (recordings.find_below(tail + end) for tail in tails for end in MICROPHONES)
    return next(filter(None, paths), "")


def _own_record(path: Path, audio: str, folder: Path, labels: list[Path]) -> Record | Finding:
    label = label_of(path, labels)
    speaker = ""
    try:
        text = "".join(iter_lines(path))
        reason, fix = encoding_problem(text)
        if reason:
            return bad_row(label, 1, "", reason, fix)
        if path.suffix.lower() in SUBTITLES:
            # The number of the next cue, or its name, is behind an empty line.
            cues = CUES.split(text)[2::2]
            text = " ".join(re.split(r"\n\s*\n", cue.strip("\n"))[0] for cue in cues)
        elif path.suffix.lower() == ".json":
            values = json.loads(text)
            segments = [segment["text"] for segment in values.get("segments") or []]
            text = values.get("text") or " ".join(segments)
            speaker = str(values.get("speaker") or "")
        text = " ".join(text.split())
    except DatasetError as error:
        text, reason, fix = "", str(error), ""
    except (ValueError, TypeError, KeyError, AttributeError):
        text, reason, fix = "", 'an object with a "text" expected, as Whisper writes', ""
    if "|" in text or text.lower().startswith(f"{Path(audio).stem.lower()}:"):
        reason = "a line of a table in a text file of its own"
        fix = "write what is said, and nothing else"
    elif TIMES.match(text):
        reason, fix = "labels with times, not a text", "write what is said"
    if reason:
        return bad_row(label, 1, "", reason, fix)
    return _record(label, 1, "", os.path.relpath(audio, folder), folder, text, speaker)


def _record(
    label: str, line: int, name: str, audio: str, folder: Path, text: str, speaker: str = ""
) -> Record:
    place = {"file": label, "line": line, "base": folder, "in_subfolders": True}
    split = split_of_folders(label)
    return Record(**place, id=name, audio=audio, text=text, speaker=speaker, split=split)


def _find(name: str, path: Path, folder: Path, at: Callable[[Path], Recordings]) -> str:
    """Return the recording that the list `path` means: the one below its own folder, if any."""
    return at(path.parent).find_below(name) or at(folder).find_below(name)


def _is_list(path: Path, folder: Path, at: Callable[[Path], Recordings]) -> bool:
    """Tell whether most lines of a file begin with a recording's name."""
    if path.suffix.lower() not in LIST_SUFFIXES:
        return False
    try:
        lines = _list_lines(path)[:SAMPLE]
    except (DatasetError, OSError):
        return False
    hits = sum(bool(_find(name, path, folder, at)) for _, name, text in lines if text)
    return bool(lines) and 2 * hits > len(lines)


def _list_lines(path: Path) -> list[tuple[int, str, str]]:
    """Return (line, id, text) of the lines that are not empty."""
    lines = []
    for number, line in enumerate(map(str.strip, iter_lines(path)), 1):
        match = LINE.fullmatch(line)
        if line:
            lines.append((number, match[1], match[2]) if match else (number, line, ""))
    return lines


def _list_records(
    path: Path, folder: Path, at: Callable[[Path], Recordings], labels: list[Path]
) -> Iterator[Record | Finding]:
    label = label_of(path, labels)
    for number, name, text in _list_lines(path):
        audio = _find(name, path, folder, at)
        reason, fix = encoding_problem(f"{name} {text}")
        if reason:
            yield bad_row(label, number, name, reason, fix)
            continue
        own_id = at(folder).id_of(audio) if audio else ""
        audio = os.path.relpath(audio, folder) if audio else name
        yield _record(label, number, own_id, audio, folder, text)


# --- Kaldi ------------------------------------------------------------------------------------


def _id_lines(path: Path) -> list[tuple[int, str, str]]:
    """Return (line, id, what follows it) of each line; [] where there is no such file."""
    lines = []
    for number, line in enumerate(iter_lines(path) if path.is_file() else [], 1):
        if line.strip():
            name, *rest = line.split(maxsplit=1)
            lines.append((number, name, "".join(rest).strip()))
    return lines


def kaldi_tables(folder: Path) -> list[Path]:
    table = folder / "wav.scp"
    return [table] if table.is_file() and (folder / "text").is_file() else []


def read_kaldi(tables: list[Path], config: ManifestConfig) -> Iterator[Record | Finding]:
    """Read `id path` in wav.scp, `id words` in text and `id speaker` in utt2spk beside it."""
    for table in tables:
        label = label_of(table, tables)
        if (table.parent / "segments").is_file():
            raise DatasetError(
                f"{table.parent} has a file `segments`: its recordings hold several utterances "
                "each. Split them into one file an utterance first (Kaldi's extract-segments)."
            )
        texts = {}
        doubled = set()
        for _, name, text in _id_lines(table.parent / "text"):
            if texts.setdefault(name, text) != text:
                doubled.add(name)
        speakers = {}
        for _, speaker, names in _id_lines(table.parent / "spk2utt"):
            speakers |= dict.fromkeys(names.split(), speaker)
        speakers |= {name: speaker for _, name, speaker in _id_lines(table.parent / "utt2spk")}
        lines = _id_lines(table)
        folder = Path(config.audio_root or table.parent)
        base, in_subfolders = choose_base(folder, folder, [audio for *_, audio in lines])
        for number, name, audio in lines:
            text = texts.get(name, "")
            speaker = speakers.get(name, "")
            reason, fix = encoding_problem(f"{name} {audio} {text} {speaker}")
            if name in doubled:
                reason, fix = "`text` has two lines with this id", "keep the right one"
            if audio.endswith("|"):
                reason, fix = "a command, not a recording", "run it and name the file it makes"
            if reason:
                yield bad_row(label, number, name, reason, fix)
                continue
            yield Record(
                file=label,
                line=number,
                id=name,
                audio=audio,
                base=base,
                text=text,
                speaker=speaker,
                split=split_of(table, tables),
                in_subfolders=in_subfolders,
            )
