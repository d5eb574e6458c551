"""The recordings that a table's rows name, and what a row needs before its recording is opened.

Tables come from other machines: `wavs\\c0.wav`, `/home/me/corpus/wavs/c0.wav`, `c0.WAV`, c0.mp3
where there is c0.wav, `café` in composed letters where the disk has decomposed ones.
"""

import dataclasses
import math
import os
import re
import shlex
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import soundfile

from kit.audio.container import SUFFIXES
from kit.base.errors import DatasetError, KitError
from kit.base.formatting import as_utf8, join_names, non_utf8_problem
from kit.dataset.columns import ROLES, Columns
from kit.dataset.data_report import FIXES, Finding
from kit.dataset.manifest import Utterance
from kit.dataset.tables import Row
from kit.settings import ManifestConfig
from kit.text.normalize import language_code, letters, normalize, text_changes

SHOWN = 3  # recordings in a message
WHOLE_WITHIN_S = 0.1  # a row with times that differ by less from its recording's is no part
# What pandas and Excel write where a cell is empty, or its formula wrong.
NO_VALUE = frozenset({"nan", "null", "none", "n/a", "#n/a", "<na>", "#name?", "#ref!", "#value!"})
# What nobody says: {what it is: sign of it}.
NOT_SPOKEN = {
    "a letter that was lost when it was saved in another encoding": re.compile(
        r"\ufffd|(?<=[^\W\d_])\?(?=[a-zß-öø-ÿа-я])|[ÃÂÐÑ][\x80-\xbf]|â€"
        r"|ã[\xa1-\xa9\xac-\xaf\xb1-\xb3\xb5\xb6\xb8\xb9\xbc-\xbf]"
    ),
    "markup": re.compile(
        r"</?[a-zA-Z][^<>]*>|<\|[^|<>]*\|>|&(#\d+|amp|lt|gt|quot|nbsp);|\{\\[a-z]|\*\*\S|__\S"
    ),
    "JSON": re.compile(r'^\s*[{\[]+\s*"'),
    "times": re.compile(
        r"-->|\d\d:\d\d[.,]\d{3}|[\[(]\d{1,2}:\d\d(:\d\d)?[\])]|^(0|\d+[.,]\d+)\s+\d+[.,]\d+\s"
    ),
    "the name of a file": re.compile(r"^\S+\.(txt|lab|json|wav|mp3|flac|ogg|opus|m4a)\b", re.I),
    "the label of a speaker": re.compile(
        r"^\W*(?i:speaker)[ _]\d+|^\W*[A-ZÀ-ÖØ-ÞА-ЯЁ]{3,}( [A-ZÀ-ÖØ-ÞА-ЯЁ]+)?:\s"
    ),
    "a number sign": re.compile(r"#\d"),
    "a picture": re.compile("[\u2600-\u27bf\U0001f000-\U0001faff]"),
    "an address of the web": re.compile(r"https?://\S+"),
}
# Signs of IPA that hardly any spelling has; syllables and sounds with a figure for tone or stress.
IPA = re.compile("[ɹɾʁʃʒɪʌɑɒɐɚɝɜɡˈˌː]")
PINYIN = re.compile(r"\{?[a-zA-ZüÜ]{1,6}[0-5]\}?[.,?!]?")


class Recordings:
    """The recordings in the folders `roots`, which paths start from."""

    def __init__(self, roots: Sequence[Path]):
        self.roots = list(roots)
        self._names = cache(_names_in)

    def find(self, name: str) -> tuple[str, str]:
        """Return the path of the recording `name` and its id, the path in its root; "" for none.

        A full path of another machine counts by its end. Raises DatasetError where two roots have
        a recording of this name.
        """
        parts = _parts(name)
        if not parts or ".." in parts:
            return "", ""
        for length in range(len(parts), 0, -1) if is_absolute(name) else [len(parts)]:
            paths = {root: self._find_in(root, parts[-length:]) for root in self.roots}
            paths = {root: path for root, path in paths.items() if path}
            if not paths:
                continue
            root, path = next(iter(paths.items()))
            for other, twin in paths.items():
                # A suffix says which of two formats is meant.
                is_other = has_suffix(name) and _suffix(name) != _suffix(twin)
                if twin != path and not is_other and not os.path.samefile(path, twin):
                    raise DatasetError(
                        f"Two recordings fit {name!r} of the table: {path} and {twin}. Name the "
                        f"folder that is meant, {root} or {other}: --set "
                        f"manifest.audio_root={shlex.quote(str(root))}, in a notebook "
                        f'start(RUN, settings={{"manifest": {{"audio_root": {str(root)!r}}}}}).'
                    )
            return path, _nfc(Path(os.path.splitext(os.path.relpath(path, root))[0]).as_posix())
        return "", ""

    def _find_in(self, root: Path, parts: list[str]) -> str:
        path = str(root)
        for part in parts[:-1]:
            same = self._same_name(path, part)
            if len(same) != 1 and part not in same:
                return ""
            path = os.path.join(path, part if part in same else same[0])
        same = self._same_name(path, parts[-1])
        if has_suffix(parts[-1]) and parts[-1] in same:
            same = [parts[-1]]
        path = os.path.join(path, same[0]) if same else ""
        stems = {_nfc(_stem(name)) for name in same}
        return path if len(stems) == 1 and os.path.isfile(path) else ""

    def _same_name(self, folder: str, name: str) -> list[str]:
        """Return what `name` may mean in a folder, whose names are listed once: recordings first.

        Capitals count only where names differ in nothing else.
        """
        same = self._names(folder).get(_key(name), [])
        return [each for each in same if _nfc(_stem(each)) == _nfc(_stem(name))] or same

    def problem(self, name: str) -> tuple[str, str]:
        """Return (reason, fix) for a name that `find` does not find."""
        root = self.roots[0]
        inside = root.resolve().name or str(root)
        parts = _parts(name)
        if not (parts and stays_inside(name)):
            reason = f"the path must lead to a file inside {inside}/, got {name!r}"
            setting = f"--set manifest.audio_root={os.path.dirname(name) or '...'}"
            return reason, f"give a path below it; paths start from `audio_root` ({setting})"
        reason = f"no recording {inside}/{name if has_suffix(name) else f'{name}.wav'}"
        same = self._same_name(os.path.join(root, *parts[:-1]), parts[-1])
        if same:
            return f"{reason}; it may be any of {', '.join(same)}", "name one of them"
        names = sorted(name for own in self._names(str(root)).values() for name in own)
        audio = list(filter(has_suffix, names)) or names
        return f"{reason}; {inside}/ holds {join_names(audio, SHOWN) or 'nothing'}", ""


def _names_in(folder: str) -> dict[str, list[str]]:
    """Return the names in a folder by their key, recordings in the order of SUFFIXES."""
    order = {suffix: number for number, suffix in enumerate(SUFFIXES)}
    names = os.listdir(folder) if os.path.isdir(folder) else []
    by_key = {}
    for name in sorted(names, key=lambda name: (order.get(_suffix(name), len(order)), name)):
        by_key.setdefault(_key(name), []).append(name)
    return by_key


def _nfc(name: str) -> str:
    return unicodedata.normalize("NFC", name)


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def has_suffix(name: str) -> bool:
    """Tell whether a name is one of a recording."""
    return _suffix(name) in SUFFIXES


def _stem(name: str) -> str:
    return os.path.splitext(name)[0] if has_suffix(name) else name


def _key(name: str) -> str:
    """Return a name without its audio suffix, in composed small letters."""
    return _nfc(_stem(name)).casefold()


def _parts(name: str) -> list[str]:
    name = re.sub(r"^[A-Za-z]:", "", name.strip().replace("\\", "/"))
    return [part for part in name.split("/") if part not in ("", ".")]


def is_absolute(name: str) -> bool:
    """Tell whether a path is absolute, here or on Windows, a URL, or has a variable: `$root/`."""
    return bool(re.match(r"[A-Za-z]:[\\/]|[\\/]|[${]|\w+://", name))


def stays_inside(name: str) -> bool:
    """Tell whether a relative path stays below its start; links are the user's own choice."""
    parts = name.replace("\\", "/").split("/")
    return bool(name) and "\0" not in name and ".." not in parts and not is_absolute(name)


def walk(base: Path) -> Iterator[Path]:
    """Yield each file below `base`, also through links; no hidden ones."""
    seen = set()
    for folder, subfolders, files in os.walk(base, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:  # links may lead in a circle
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = sorted(s for s in subfolders if not s.startswith((".", "__MACOSX")))
        yield from (Path(folder, file) for file in sorted(files) if not file.startswith("."))


# --- rows -----------------------------------------------------------------------------------------


class BadRow(Exception):
    """What is wrong with a row, and the fix."""

    def __init__(self, reason: str, fix: str = "", kind: str = "row"):
        self.reason = reason
        self.fix = fix
        self.kind = kind


def bad_row(file: str, line: int, name: str, bad: BadRow) -> Finding:
    """Return the finding about a line of the table `file` that cannot be used."""
    place = {"file": file, "line": line, "id": as_utf8(name)}
    return Finding(**place, kind=bad.kind, reason=bad.reason, cure=bad.fix or FIXES[bad.kind])


def is_phonemes(text: str) -> bool:
    """Tell whether a text is written as it sounds: IPA, ARPABET (HH AH0 L OW1), pinyin (ni3)."""
    words = text.split()
    with_figures = sum(bool(PINYIN.fullmatch(word)) for word in words)
    return len(set(IPA.findall(text))) > 1 or 3 * with_figures >= max(len(words), 9)


def require_spoken(text: str, normalised: str, phonemes: bool) -> None:
    """Raise BadRow for a text that cannot be what is said; `phonemes` may be asked for."""
    if text.lower() in NO_VALUE or not letters(normalised):
        raise BadRow(f"the text is empty: {text!r}", "write what is said, or remove the line")
    for kind, sign in NOT_SPOKEN.items():
        match = sign.search(text)
        if match:
            around = text[max(0, match.start() - 8) : match.end() + 8]
            raise BadRow(f"the text has {kind}: {around!r}", "write what is said, in UTF-8")
    if not phonemes and is_phonemes(text):
        raise BadRow(
            "the text is phonemes or pinyin, not words",
            "write words: the kit makes phonemes itself (PHONEMES, --phonemes); to train on these "
            "signs, set COLUMNS",
        )


def require_language(value: str, config: ManifestConfig) -> None:
    """Raise BadRow for a row in another language than the run's."""
    if not value or config.other_languages:
        return
    try:
        code = language_code(value)
    except KitError:
        code = value
    if code.split("-")[0] != config.language.split("-")[0]:
        raise BadRow(
            f"its language is {value!r}, and the run's is `{config.language}`",
            "prepare it in a run of its own (LANGUAGE, --language), or train on it: --set "
            "manifest.other_languages=true",
        )


def require_whole(start: str, end: str, duration: str, audio: str) -> None:
    """Raise BadRow for a row that is a part of its recording.

    With a start of 0 it is one unless it ends where the recording does. Without a start, a
    duration is that of the recording.
    """
    if start == end == "":
        return
    try:
        begins_s = float(start or 0)
        ends_s = float(end or duration or math.inf)
        if begins_s == 0 and math.isinf(ends_s):
            return
        if begins_s == 0 and ends_s >= soundfile.info(audio).duration - WHOLE_WITHIN_S:
            return
    except (ValueError, RuntimeError):  # no number, or a recording that soundfile cannot open
        pass
    until = f"end {end}" if end else f"duration {duration or 'not given'}"
    raise BadRow(
        f"a part of a recording (start {start or 0}, {until}), which is not cut here",
        "write each part to a file of its own (ffmpeg -ss START -to END -i RECORDING PART.wav); if "
        "the times are of another file, leave them out: - in COLUMNS",
    )


def clean_name(name: str) -> str:
    """Return a name in one spelling: composed letters, single spaces, none at its ends."""
    name = " ".join(_nfc(name).split())
    # Common Voice's speakers are 128 hex digits: 12 are enough to tell them apart.
    return name[:12] if re.fullmatch("[0-9a-f]{64,}", name) else name


def speaker_folder(audio: str, folder: Path) -> str:
    """Return the first folder on the way to a recording but for wavs/, clips/ and splits, or ""."""
    parts = Path(os.path.relpath(audio, folder)).parts[:-1] if audio else ()
    names = (p for p in parts if p not in ("wavs", "clips", "..") and not known_split(p))
    return next(names, "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """What the rows of a table share."""

    file: str  # the label of the table
    folder: Path  # of the dataset
    columns: Columns
    recordings: Recordings
    split: str  # that the table's name says, or ""
    prefix: str = ""  # of ids, so that those of several folders differ


def check_row(row: Row, place: Place, config: ManifestConfig) -> Utterance | Finding:
    """Return the utterance of a row if its text, names, language and recording are valid."""
    cells = {role: str(place.columns.value(row.values, role)).strip() for role in ROLES}
    path = cells["audio"] or cells["id"]
    audio, own_id = ("", "") if row.problem else place.recordings.find(path)
    name = cells["id"] if cells["audio"] and cells["id"] else own_id or path
    name = _nfc(place.prefix + name)
    text = normalize(cells["text"], config.language, config.respell)
    speaker = speaker_folder(audio, place.folder) if config.speakers else cells["speaker"]
    speaker = clean_name("" if speaker.lower() in NO_VALUE else speaker)
    try:
        if row.problem:
            raise BadRow(row.problem, row.fix)
        require_spoken(cells["text"], text, phonemes=bool(config.columns))
        require_language(cells["language"], config)
        if not audio:
            kind = "missing" if stays_inside(path) else "row"
            raise BadRow(*place.recordings.problem(path), kind)
        require_whole(cells["start"], cells["end"], cells["duration"], audio)
        if not stays_inside(name):
            raise BadRow(f"the id must be a name, not a path out of a folder: {name!r}")
        if config.speakers and not speaker:
            raise BadRow(
                f"folders are speakers, and this recording is in none: {path}",
                "put it in a folder with the speaker's name, or leave SPEAKERS empty",
            )
        if non_utf8_problem(audio):
            raise BadRow(non_utf8_problem(audio))
    except BadRow as bad:
        return bad_row(place.file, row.line, name, bad)
    is_changed = text_changes(cells["text"], text, config.language)
    return Utterance(
        id=as_utf8(name),
        audio=audio,
        text=text,
        speaker=speaker or "speaker",
        split=canonical_split(cells["split"]) or place.split or "train",
        line=row.line,
        file=place.file,
        written=cells["text"] if is_changed else "",
    )


# --- splits, by the names of tables and folders ---------------------------------------------------

TRAIN = {"train", "training"}
HELD_OUT = {"heldout", "dev", "development", "valid", "validation", "val", "eval", "evaluation"}
TEST = {"test", "testing"}


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


def split_of_table(stem: str) -> str:
    """Return the split that a table's name says it holds: test-clean for `metadata_test-clean`.

    "" for `metadata` alone, which is all of a dataset, and other names without such a word.
    """
    if stem.lower().startswith("metadata"):
        return canonical_split(stem[len("metadata") :].strip("_- ."))
    return known_split(stem)


def known_split(name: str) -> str:
    """Return the split if a table's or folder's name has a word for train, held-out or test rows.

    "" for other names.
    """
    split = canonical_split(name)
    return split if split in ("train", "held_out") or _words(name) & TEST else ""
