"""Find the recording that a table names, however the table spells its path.

Tables come from other machines: `wavs\\c0.wav`, `/home/me/corpus/wavs/c0.wav`, `c0.WAV`, c0.mp3
where there is c0.wav, `café` in composed letters where the disk has decomposed ones.
"""

import os
import re
import unicodedata
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

AUDIO_SUFFIXES = ("", ".wav", ".flac", ".ogg", ".mp3")
# Suffixes that are no part of an id, and those of them that cannot be read.
KNOWN_SUFFIXES = (*AUDIO_SUFFIXES[1:], ".opus", ".aiff", ".aif", ".w64", ".oga")
UNREADABLE_SUFFIXES = (".m4a", ".aac", ".wma", ".mp4", ".webm", ".amr", ".sph", ".pt", ".npy")
MAX_PATH_CHARACTERS = 1000  # longer values of a table are texts, not paths
SHOWN = 3  # recordings in a message


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
            for suffix in AUDIO_SUFFIXES:
                if os.path.isfile(stem + suffix):
                    return stem + suffix
        matches = self._matches(name)
        return matches[0] if len(matches) == 1 else ""

    def find_below(self, name: str) -> str:
        """Return `find(name)`, or else the only recording in a subfolder that has this name."""
        found = self.find(name)
        if found or not stays_inside(name):
            return found
        parts = _parts(name)
        same_name = self._index.get(parts[-1], {}) if parts else {}
        ending = [path for tail, path in same_name.items() if tail[-len(parts) :] == tuple(parts)]
        return ending[0] if len(ending) == 1 else ""

    def lists(self, name: str) -> bool:
        """Tell whether a recording anywhere below `base` could be meant; no file is looked up."""
        if not name or len(name) > MAX_PATH_CHARACTERS:
            return False
        parts = _parts(name)
        tails = self._index.get(parts[-1], {}) if parts else {}
        return any(_common_end(parts, tail) == min(len(parts), len(tail)) for tail in tails) or (
            bool(tails) and is_absolute(name)
        )

    def id_of(self, path: str) -> str:
        """Return the path below `base` without its suffix."""
        return Path(os.path.splitext(os.path.relpath(path, self.base))[0]).as_posix()

    def problem(self, name: str) -> str:
        """Say why `find(name)` found nothing, and what is there instead."""
        folder = self.base.name or str(self.base)
        if os.path.isdir(os.path.join(self.base, name)):
            return f"a folder, not a recording: {folder}/{name}"
        shown = name if os.path.splitext(name)[1] else f"{name}.wav"
        reason = f"no recording {folder}/{shown}"
        parts = _parts(name)
        below = self._index.get(parts[-1], {}) if parts else {}
        if len(below) > 1:
            names = ", ".join("/".join(tail) for tail in list(below)[:SHOWN])
            return f"{reason}; {len(below)} have this name in other folders: {names}"
        path = next(iter(below.values()), "")
        if path:
            return f"{reason}; there is {os.path.relpath(path, self.base)}"
        other = self._unreadable.get(parts[-1]) if parts else None
        if other:
            return f"{reason}, but {other}, which cannot be read: convert it to WAV or FLAC"
        return f"{reason}; {folder}/ holds {self.examples()}"

    def examples(self) -> str:
        """Name a few of the recordings, and count them."""
        names = [
            os.path.relpath(p, self.base) for same in self._index.values() for p in same.values()
        ]
        if not names:
            return "no recordings"
        more = len(names) - SHOWN
        return ", ".join(sorted(names)[:SHOWN]) + (f" and {more:,} more" if more > 0 else "")

    def folders(self) -> list[Path]:
        """Return the folders that hold recordings, those with most of them first."""
        counts: dict[str, int] = {}
        for same in self._index.values():
            for path in same.values():
                folder = os.path.dirname(path)
                counts[folder] = counts.get(folder, 0) + 1
        return [Path(folder) for folder in sorted(counts, key=lambda f: (-counts[f], f))]

    def _matches(self, name: str) -> list[str]:
        parts = _parts(name)
        if not parts or ".." in parts:
            return []
        found = {}
        for tail, path in self._index.get(parts[-1], {}).items():
            before = parts[: -len(tail)]
            # A path of another machine may begin with anything, another one with `base` itself.
            known = not before or is_absolute(name) or before == _parts(self.base.name)
            if known and tuple(parts[-len(tail) :]) == tail:
                found[tail] = path
        longest = max(map(len, found), default=0)
        return [path for tail, path in found.items() if len(tail) == longest]

    @cached_property
    def _index(self) -> dict[str, dict[tuple[str, ...], str]]:
        """{stem: {parts below `base`: path}}, stem and parts as `_parts` spells them."""
        index: dict[str, dict[tuple[str, ...], str]] = {}
        for relative in _walk(self.base):
            if os.path.splitext(relative)[1].lower() in KNOWN_SUFFIXES:
                parts = _parts(relative)
                index.setdefault(parts[-1], {}).setdefault(
                    tuple(parts), os.path.join(self.base, relative)
                )
        return index

    @cached_property
    def _unreadable(self) -> dict[str, str]:
        """{stem: path below `base`} of audio in formats that the kit does not read."""
        found = {}
        for relative in _walk(self.base):
            stem, suffix = os.path.splitext(relative)
            if suffix.lower() in UNREADABLE_SUFFIXES:
                found[_parts(stem)[-1]] = relative
        return found


def _walk(base: Path) -> Iterator[str]:
    """Yield the files below `base` as relative paths, in order, without hidden ones."""
    for folder, subfolders, files in os.walk(base):
        subfolders[:] = sorted(s for s in subfolders if not s.startswith((".", "__MACOSX")))
        order = {suffix: i for i, suffix in enumerate(KNOWN_SUFFIXES)}
        for file in sorted(files, key=lambda f: (order.get(os.path.splitext(f)[1].lower(), 99), f)):
            if not file.startswith("."):
                yield os.path.relpath(os.path.join(folder, file), base)


def _parts(name: str) -> list[str]:
    """Return the parts of a path in one spelling: composed, lower case, without audio suffix."""
    name = unicodedata.normalize("NFC", name).casefold().replace("\\", "/")
    name = re.sub(r"^[a-z]:", "", name).strip()
    stem, suffix = os.path.splitext(name)
    if suffix in KNOWN_SUFFIXES or suffix in UNREADABLE_SUFFIXES:
        name = stem
    return [part for part in name.split("/") if part not in ("", ".")]


def _common_end(one: list[str], other: tuple[str, ...]) -> int:
    """Count the equal parts at the end of two paths."""
    count = 0
    for a, b in zip(reversed(one), reversed(other)):
        if a != b:
            break
        count += 1
    return count


def has_suffix(name: str) -> bool:
    """Tell whether a path ends like a recording's."""
    return os.path.splitext(name)[1].lower() in (*KNOWN_SUFFIXES, *UNREADABLE_SUFFIXES)


def is_absolute(name: str) -> bool:
    """Tell whether a path is absolute, here or on Windows."""
    return bool(re.match(r"[A-Za-z]:[\\/]|[\\/]", name))


def stays_inside(name: str) -> bool:
    """Tell whether a relative path stays below its start; links are the user's own choice."""
    parts = name.replace("\\", "/").split("/")
    return bool(name) and "\0" not in name and ".." not in parts and not is_absolute(name)


def choose_base(usual: Path, folder: Path, names: Iterable[str]) -> tuple[Path, bool]:
    """Return the folder that the paths `names` start from, and whether to search its subfolders.

    It is `usual` if most names are found there; else `folder`, a folder below it with recordings,
    or `folder` with its subfolders; and `usual` again where most are found nowhere.
    """
    names = list(names)

    def finds(base: Path, below: bool = False) -> bool:
        recordings = Recordings(base)
        find = recordings.find_below if below else recordings.find
        return 2 * sum(bool(find(name)) for name in names) >= max(1, len(names))

    if not names or finds(usual):
        return usual, False
    others = [folder, *Recordings(folder).folders()[:5]]
    for base in others:
        if base != usual and finds(base):
            return base, False
    if finds(folder, below=True):
        return folder, True
    return usual, False
