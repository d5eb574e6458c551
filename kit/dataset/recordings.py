"""Lines of a dataset's tables, and the recordings that they name, however a path is spelled.

Tables come from other machines: `wavs\\c0.wav`, `/home/me/corpus/wavs/c0.wav`, `c0.WAV`, c0.mp3
where there is c0.wav, `café` in composed letters where the disk has decomposed ones.
"""

import collections
import dataclasses
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from kit.audio.container import SUFFIXES
from kit.base.formatting import as_utf8, join_names, non_utf8_problem
from kit.dataset.data_report import Finding, Spool
from kit.dataset.manifest import Utterance
from kit.settings import ManifestConfig
from kit.text.normalize import letters, normalize

# Of recordings, in the order of preference. The last ones are rare, but readable by their content.
KNOWN_SUFFIXES = (*SUFFIXES, ".oga", ".aiff", ".aif", ".w64", ".mp4", ".webm", ".amr")
UNREADABLE_SUFFIXES = (".sph", ".pt", ".npy", ".caf", ".au", ".wv", ".ape", ".3gp")
MAX_PATH_CHARACTERS = 1000  # longer values of a table are texts, not paths
SHOWN = 3  # recordings in a message
RESERVED = "__metadata__"  # by the files that hold a reference for each speaker
# What pandas and Excel write where a cell is empty, or its formula wrong.
NO_VALUE = frozenset({"nan", "null", "none", "n/a", "#n/a", "<na>", "#name?", "#ref!", "#value!"})
# What no text is spoken with: {reason: sign of it}.
NOT_SPOKEN = {
    "markup": re.compile(r"</?[a-zA-Z][^<>]*>|&(#\d+|amp|lt|gt|quot|nbsp);|\{\\rtf"),
    "JSON": re.compile(r'^\s*[{\[]+\s*"'),
    "times": re.compile(r"-->|\d\d:\d\d[.,]\d{3}|[\[(]\d{1,2}:\d\d(:\d\d)?[\])]"),
    "the name of a file": re.compile(r"^\S+\.(txt|lab|json|wav|mp3|flac|ogg|opus|m4a)\b", re.I),
    "the label of a speaker": re.compile(r"^\W*speaker[ _]\d+", re.I),
    "an address of the web": re.compile(r"https?://\S+"),
}
# Signs of IPA that hardly any spelling has; syllables and sounds with a figure for tone or stress.
IPA = re.compile("[ɹɾʁʃʒɪʌɑɒɐɚɝɜɡˈˌː]")
PINYIN = re.compile(r"\{?[a-zA-ZüÜ]{1,6}[0-5]\}?[.,?!]?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One line of a table, parsed but not yet checked."""

    file: str
    line: int
    id: str  # "": that of its recording's path
    audio: str  # path below `base`, possibly without its suffix
    base: Path  # folder that the recording must be in
    text: str
    speaker: str = ""
    split: str = ""
    in_subfolders: bool = False  # whether the recording may be in any folder below `base`


def bad_row(file: str, line: int, name: str, reason: str, fix: str = "") -> Finding:
    """Return the finding about a line of the table `file` that cannot be read."""
    return Finding(file=file, line=line, id=as_utf8(name), kind="row", reason=reason, cure=fix)


def label_of(table: Path, tables: list[Path]) -> str:
    """Return the table's name as UTF-8, with its folders where tables in others are read, too."""
    common = os.path.commonpath([other.parent for other in tables])
    return as_utf8(Path(os.path.relpath(table, common)).as_posix())


class Recordings:
    """The recordings below the folder `base`; they are listed once, when a plain look-up fails."""

    def __init__(self, base: Path):
        self.base = Path(base)

    def find(self, name: str) -> str:
        """Return the path of the recording `name`, or "" where there is none, or several.

        It must be in the folder that `name` gives, as far as that is below `base`.
        """
        if not name or len(name) > MAX_PATH_CHARACTERS or "\0" in name:
            return ""
        if stays_inside(name):
            stem = os.path.join(self.base, name)
            for suffix in ("", *KNOWN_SUFFIXES):
                if os.path.isfile(stem + suffix):
                    return stem + suffix
        return _only(self._matches(name), name)

    def find_below(self, name: str) -> str:
        """Return `find(name)`, or else the only recording in a subfolder that has this name."""
        path = self.find(name)
        if path or not stays_inside(name):
            return path
        parts = tuple(_parts(name))
        same = self._same_name(parts)
        return _only([path for tail, path in same if tail[-len(parts) :] == parts], name)

    def lists(self, name: str) -> bool:
        """Tell whether a recording anywhere below `base` could be meant; no file is looked up."""
        if not name or len(name) > MAX_PATH_CHARACTERS:
            return False
        parts = _parts(name)
        for tail, _ in self._same_name(parts):
            if is_absolute(name) or all(a == b for a, b in zip(parts[::-1], tail[::-1])):
                return True
        return False

    def paths(self) -> list[str]:
        """Return the paths of all recordings, one of those that differ in their suffix alone."""
        paths = {}
        for relative in self._paths:
            paths.setdefault(_spelling(relative), os.path.join(self.base, relative))
        return sorted(paths.values())

    def id_of(self, path: str) -> str:
        """Return the path below `base` without its suffix."""
        return Path(os.path.splitext(os.path.relpath(path, self.base))[0]).as_posix()

    def problem(self, name: str) -> str:
        """Say why `find(name)` failed, and what is there instead."""
        folder = self.base.name or str(self.base)
        if os.path.isdir(os.path.join(self.base, name)):
            return f"a folder, not a recording: {folder}/{name}"
        shown = name if os.path.splitext(name)[1] else f"{name}.wav"
        reason = f"no recording {folder}/{shown}"
        parts = _parts(name)
        below = [os.path.relpath(path, self.base) for _, path in self._same_name(parts)]
        if len(below) > 1:
            names = ", ".join(below[:SHOWN])
            return f"{reason}; {len(below)} have this name, in other folders or letters: {names}"
        if below:
            return f"{reason}; there is {below[0]}"
        other = self._unreadable.get(parts[-1]) if parts else None
        if other:
            return f"{reason}, but {other}, which cannot be read: convert it to WAV or FLAC"
        names = [os.path.relpath(path, self.base) for path in self.paths()]
        return f"{reason}; {folder}/ holds {join_names(names, SHOWN) or 'no recordings'}"

    def folders(self) -> list[Path]:
        """Return the folders that hold recordings, those with most of them first."""
        counts = collections.Counter(map(os.path.dirname, self.paths()))
        return [Path(folder) for folder in sorted(counts, key=lambda f: (-counts[f], f))]

    def _matches(self, name: str) -> list[str]:
        parts = _parts(name)
        if ".." in parts:
            return []
        matches = []
        for tail, path in self._same_name(parts):
            before = parts[: -len(tail)]
            # A path of another machine may begin with anything, another one with `base` itself.
            known = not before or is_absolute(name) or before[-1:] == _parts(self.base.name)
            if known and tuple(parts[-len(tail) :]) == tail:
                matches.append((len(tail), path))
        longest = max(matches, default=(0, ""))[0]
        return [path for length, path in matches if length == longest]

    def _same_name(self, parts: Sequence[str]) -> list[tuple[tuple[str, ...], str]]:
        """Return (parts below `base`, path) of the recordings whose name is the last of `parts`."""
        if not parts:
            return []
        hashes, order = self._by_name
        name = hash(parts[-1])
        first, end = (np.searchsorted(hashes, name, side) for side in ("left", "right"))
        same = {}
        for relative in (self._paths[int(i)] for i in order[first:end]):
            tail = tuple(_parts(relative))
            if tail[-1] == parts[-1]:
                same.setdefault(_spelling(relative), (tail, os.path.join(self.base, relative)))
        return list(same.values())

    @cached_property
    def _paths(self) -> Spool:
        """The paths of all recordings below `base`; may be millions."""
        return Spool(_walk(self.base, KNOWN_SUFFIXES))

    @cached_property
    def _by_name(self) -> tuple[np.ndarray, np.ndarray]:
        """The hashes of their names, ascending, and the number of each one's path."""
        names = (hash(_parts(path)[-1]) for path in self._paths)
        hashes = np.fromiter(names, np.int64, len(self._paths))
        order = np.argsort(hashes, kind="stable").astype(np.uint32)
        return hashes[order], order

    @cached_property
    def _unreadable(self) -> dict[str, str]:
        """{stem: path below `base`} of audio in formats that the kit does not read."""
        return {_parts(path)[-1]: path for path in _walk(self.base, UNREADABLE_SUFFIXES)}


def _walk(base: Path, suffixes: tuple[str, ...]) -> Iterator[str]:
    """Yield the files with `suffixes` below `base`, as relative paths, without hidden ones.

    In each folder they are in the order of `suffixes`, then by name.
    """
    for folder, files in walk(base):
        suffix_of = {file: os.path.splitext(file)[1].lower() for file in files}
        own = [file for file in files if suffix_of[file] in suffixes]
        for file in sorted(own, key=lambda file: suffixes.index(suffix_of[file])):
            yield os.path.relpath(os.path.join(folder, file), base)


def walk(base: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder below `base`, also through links, and its files; no hidden ones."""
    seen = set()
    for folder, subfolders, files in os.walk(base, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:  # links may lead in a circle
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = sorted(s for s in subfolders if not s.startswith((".", "__MACOSX")))
        yield folder, sorted(file for file in files if not file.startswith("."))


def _parts(name: str) -> list[str]:
    """Return the parts of a path in one spelling: composed, lower case, without audio suffix."""
    name = unicodedata.normalize("NFC", name).casefold().replace("\\", "/")
    name = re.sub(r"^[a-z]:|^dummy\d*/", "", name).strip()  # VITS's lists have DUMMY1/
    if has_suffix(name):
        name = os.path.splitext(name)[0]
    return [part for part in name.split("/") if part not in ("", ".")]


def _spelling(name: str) -> str:
    """Return a path without its suffix, as it is written: names may differ in capitals alone."""
    name = unicodedata.normalize("NFC", name).replace("\\", "/")
    return os.path.splitext(name)[0] if has_suffix(name) else name


def _only(paths: list[str], name: str) -> str:
    """Return the one of `paths`, or the one of them that is spelled as `name` is, or ""."""
    if len(paths) > 1:
        wanted = Path(_spelling(name)).name
        paths = [path for path in paths if Path(_spelling(path)).name == wanted]
    return paths[0] if len(paths) == 1 else ""


def has_suffix(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in (*KNOWN_SUFFIXES, *UNREADABLE_SUFFIXES)


def is_absolute(name: str) -> bool:
    """Tell whether a path is absolute, here or on Windows, a URL, or has a variable: `$root/`."""
    return bool(re.match(r"[A-Za-z]:[\\/]|[\\/]|[${]|\w+://", name))


def stays_inside(name: str) -> bool:
    """Tell whether a relative path stays below its start; links are the user's own choice."""
    parts = name.replace("\\", "/").split("/")
    return bool(name) and "\0" not in name and ".." not in parts and not is_absolute(name)


def choose_base(usual: Path, folder: Path, names: list[str]) -> tuple[Path, bool]:
    """Return the folder that the paths `names` start from, and whether to search its subfolders.

    It is `usual` if most names are there, or nowhere; else `folder`, one below it, or `folder` with
    its subfolders, whichever has most. Of two with as many, a name that is in both is in neither.
    """

    def count(base: Path, below: bool = False) -> int:
        recordings = Recordings(base)
        find = recordings.find_below if below else recordings.find
        return sum(bool(find(name)) for name in names)

    if not names or 2 * count(usual) >= len(names):
        return usual, False
    counts = {base: count(base) for base in (folder, *Recordings(folder).folders()[:5])}
    best = max(counts, key=counts.get)
    if count(folder, below=True) > counts[best]:
        return folder, True
    if 2 * counts[best] < len(names):
        return usual, False
    is_clear = best == folder or list(counts.values()).count(counts[best]) == 1
    return (best, False) if is_clear else (folder, True)


def is_phonemes(text: str) -> bool:
    """Tell whether a text is written as it sounds: IPA, ARPABET (HH AH0 L OW1), pinyin (ni3)."""
    words = text.split()
    with_figures = sum(bool(PINYIN.fullmatch(word)) for word in words)
    return len(set(IPA.findall(text))) > 1 or (len(words) > 1 and 3 * with_figures >= len(words))


def _text_problem(text: str) -> tuple[str, str]:
    """Return (reason, fix) for a text that cannot be what is said, else empty strings."""
    if text.strip().lower() in NO_VALUE:
        return f"the text is empty: {text!r}", "write what is said, or remove the line"
    for kind, sign in NOT_SPOKEN.items():
        match = sign.search(text)
        if match:
            return f"the text has {kind}, which nobody says: {match[0]!r}", "write what is said"
    return "", ""


def check_record(
    record: Record, recordings: Recordings, config: ManifestConfig
) -> Utterance | Finding:
    """Return the row of `record` if its text, names and path to a recording are valid."""
    find = recordings.find_below if record.in_subfolders else recordings.find
    audio = find(record.audio)
    name = record.id or (recordings.id_of(audio) if audio else record.audio)
    text = normalize(record.text, config.language)
    kind = "row"
    reason, fix = _text_problem(record.text)
    if reason:
        pass
    elif not audio and not stays_inside(record.audio):
        inside = record.base.name or str(record.base)
        reason = f"the path must lead to a file inside {inside}/, got {record.audio!r}"
        root = f"--set manifest.audio_root={os.path.dirname(record.audio) or '...'}"
        fix = f"give a path below it; paths start from `audio_root` ({root})"
    elif not stays_inside(name):
        reason = f"the id must be a name, not a path out of a folder: {name!r}"
    elif record.speaker == RESERVED or any(letter < " " for letter in record.speaker):
        reason = f"no speaker can be called {record.speaker!r}"
        fix = "name the speaker in plain letters"
    elif not letters(text):
        reason = "the text is empty"
        fix = "write what is said, or remove the line"
    elif not audio:
        kind = "missing"
        reason = recordings.problem(record.audio)
        if "have this name" in reason:
            fix = "name the right folder in the table, or with --set manifest.audio_root="
    elif non_utf8_problem(audio):
        reason, _, fix = non_utf8_problem(audio).rpartition(": ")
    if reason:
        name = as_utf8(record.id or record.audio)
        place = {"file": record.file, "line": record.line, "id": name}
        return Finding(**place, kind=kind, reason=reason, cure=fix)
    speaker = "speaker" if record.speaker.lower() in ("", "nan") else record.speaker
    return Utterance(
        id=name,
        audio=audio,
        text=text,
        speaker=speaker,
        split=record.split or "train",
        line=record.line,
        file=record.file,
    )


# --- splits and speakers, by the names of tables and folders --------------------------------------

TRAIN = frozenset({"train", "training", "traindata", "trainset", "nodev"})
HELD_OUT = frozenset(
    "heldout dev devel development valid validation validate val eval evaluation devset valset "
    "evalset".split()
)
TEST = frozenset({"test", "testing", "testset"})
# Folders that divide the recordings of one person.
PARTS = re.compile(
    r"(?i)(book|chapter|ch|part|dis[ck]|cd|take|session|batch|vol(ume)?|day|lesson|unit)[ _-]*\d+"
)
GENDERS = frozenset({"male", "female", "m", "f"})  # folders of several speakers each


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z]+", name.lower()))


def canonical_split(name: str) -> str:
    """Return "train" or "held_out" for the usual names of these, any other name as it is.

    In any case, with - or _, and with other words around: `train_manifest`, `Validation`,
    `dev-clean`. What names both (ESPnet's train_dev) is not trained on.
    """
    words = _words(name)
    if words & HELD_OUT or {"held", "out"} <= words:
        return "held_out"
    return "train" if words & TRAIN else name


def known_split(name: str) -> bool:
    """Tell whether a value is nothing but a split's usual name."""
    return re.sub(r"[-_ ]", "", name.strip().lower()) in TRAIN | HELD_OUT | TEST


def split_of_table(stem: str) -> str:
    """Return the split that a table's name says it holds: test-clean for `metadata_test-clean`.

    "" for `metadata` alone, which is all of a dataset.
    """
    return canonical_split(re.sub(r"^metadata", "", stem, flags=re.I).strip("_- ."))


def has_known_split(name: str) -> bool:
    """Tell whether a table's or folder's name has a word for train, held-out or test rows."""
    return canonical_split(name) in ("train", "held_out") or bool(_words(name) & TEST)


def split_of(table: Path, tables: list[Path]) -> str:
    """Return the split that a table's name says it holds, or its folder's; "" for none."""
    label = label_of(table, tables)
    is_all = ("/" in label or len(tables) == 1) and not has_known_split(table.stem)
    return split_of_folders(label) or ("" if is_all else split_of_table(table.stem))


def split_of_folders(label: str) -> str:
    """Return the split that the innermost folder with the name of one says; "" for none."""
    names = [part for part in Path(label).parts[:-1] if has_known_split(part)]
    return canonical_split(names[-1]) if names else ""


def speakers_of_folders(labels: Iterable[str]) -> dict[str, str]:
    """Return {label of a table or text: its folder}, where the folders can be speakers.

    That is the first folder in which the paths differ, without those of splits and of chapters.
    """
    folders = {}
    without_gender = {}
    for label in set(labels):
        parts = Path(label).parts[:-1]
        folders[label] = [p for p in parts if not has_known_split(p) and not PARTS.fullmatch(p)]
        without_gender[label] = [p for p in folders[label] if p.lower() not in GENDERS]
    return _first_difference(without_gender) or _first_difference(folders)


def speakers_in_names(paths: Iterable[str]) -> dict[str, str]:
    """Return {recording: speaker}, where it is in a folder whose name is in its own name, too.

    AISHELL has S0002/BAC009S0002W0122.wav, MLS 10/20/10_20_000001.flac. {} where there is just one.
    """
    names = {}
    for path in paths:
        *folders, name = Path(path).parts
        known = [f for f in folders if len(f) > 1 and re.search(r"\d", f) and f in name]
        names[path] = [folder for folder in known if not PARTS.fullmatch(folder)][:1]
        if not names[path]:
            return {}
    return _first_difference(names)


def _first_difference(folders: dict[str, list[str]]) -> dict[str, str]:
    for names in zip(*folders.values()):  # at each depth that all have
        if len(set(names)) > 1:
            return dict(zip(folders, names))
    return {}
