"""Decide which column of a table names the recording, and which holds text, speaker and split.

By the names in the header, else by what many rows hold: files that exist, sentences, few short
values. Where that is not clear, the user is asked: a wrong column would be trained on in silence.
"""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

from kit.base.errors import DatasetError, KitError
from kit.base.formatting import nearest, shorten
from kit.dataset.recordings import has_suffix
from kit.dataset.splits import known_split
from kit.text.language_names import codes_by_name
from kit.text.normalize import letters, unicode_script

ROLES = ("audio", "text", "speaker", "language", "split", "id", "-")
SETTING = (
    'COLUMNS = "{columns}" in the second cell of 01_data_prep, --columns "{columns}", or '
    '--set manifest.columns="{columns}"'
)

# Words in the names of columns. The first list that has one of a name's words decides.
WORDS = {
    "-": "duration length len seconds sec rate frames size samples gender sex age accent start end "
    "offset phonemes phoneme phones pinyin ipa",
    "language": "language lang locale",
    "split": "split subset partition",
    "speaker": "speaker speakers spk spkr client narrator reader voice talker singer",
    "text": "text texts sentence sentences transcription transcriptions transcript transcripts "
    "utterance utterances words caption subtitle",
    "audio": "audio file filename filepath path wav wavs wave clip clips recording recordings "
    "mp3 flac sound",
    "id": "id utt uttid key name stem basename",
}
NORMALISED = {"normalized", "normalised", "norm", "normal", "clean", "cleaned"}
RAW = {"raw", "original", "orig", "punctuated"}
# Codes of languages, and two that Japanese and Chinese datasets use instead.
LANGUAGES = frozenset(code for code in codes_by_name() if len(code) <= 3) | {"jp", "cn"}
# Scripts that put no spaces between words, as Unicode names their letters.
UNSPACED = {"CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN"}
FEW_ROWS = 4  # fewer say nothing about how often a value occurs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns:
    """Indices of a table's columns; None for a role that no column has."""

    audio: int
    texts: tuple[int, ...]  # the first of them that is not empty is spoken
    speaker: int | None = None
    split: int | None = None
    id: int | None = None
    header: tuple[str, ...] = ()  # the first row, where it holds names
    width: int

    def __str__(self) -> str:
        names = ["-"] * self.width
        for index in self.texts:
            names[index] = "text"
        for role in ("id", "split", "speaker", "audio"):
            if getattr(self, role) is not None:
                names[getattr(self, role)] = role
        return "|".join(names)


def find_columns(
    table: Path, rows: list[list[str]], first: list[str], asked: str, found: Callable[[str], bool]
) -> Columns:
    """Return what the columns of a table hold.

    `rows` are a sample, `first` is the table's first row, `asked` the user's own answer, and
    `found` tells whether a value names a recording. Raises DatasetError, with three rows and the
    setting to say it by, where it is not clear.
    """
    roles = [role_of(name) for name in first]
    header = names_columns(first) and not any(map(found, first))
    body = [row for row in rows if row != first] or rows
    if asked:
        columns = _columns_asked(table, first, asked)
        header = header or _looks_like_header(first, columns, body, found)
        return dataclasses.replace(columns, header=tuple(first) if header else ())
    if header:
        return _columns_of_header(table, first, roles, body, found)
    traits = [Trait.of([row[i] for row in body], found) for i in range(len(first))]
    guess = _columns_by_content(traits)
    if isinstance(guess, str):
        raise unclear(table, [first, *body], guess, traits)
    named = _looks_like_header(first, guess, body, found)
    return dataclasses.replace(guess, header=tuple(first) if named else ())


def names_columns(cells: list[str]) -> bool:
    """Tell whether cells are a header's: one is the usual name of a text, one of a recording."""
    roles = {role_of(cell) for cell in cells}
    return "text" in roles and bool(roles & {"audio", "id"})


def role_of(name: str) -> str:
    """Return the role that a column's name says it has, "" for none."""
    words = re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.strip()).lower())
    if len(name) > 40 or len(words) > 4 or name.strip().count(" ") > 1:
        return ""  # a text, or a path
    for role, known in WORDS.items():
        if set(words) & set(known.split()):
            return role
    return ""


def parse_columns(text: str) -> list[str]:
    """Return the roles in the setting `columns`, such as "audio|text|speaker". Raises KitError."""
    roles = [role for role in re.split(r"[|,;\s]+", text.strip().lower()) if role]
    for role in roles:
        if role not in ROLES:
            raise KitError(
                f"columns: `{role}` in {text!r} is nothing that a column can hold."
                f"{nearest(role, ROLES)} Write - for a column to leave out."
            )
    if roles and ("text" not in roles or not {"audio", "id"} & set(roles)):
        raise KitError(f"columns: {text!r} must name `audio` and `text`, as in audio|text|speaker.")
    return roles


def _columns_asked(table: Path, first: list[str], asked: str) -> Columns:
    roles = parse_columns(asked)
    if len(roles) != len(first):
        raise DatasetError(
            f"{table} has {len(first)} columns, but columns is {asked!r}, which names "
            f"{len(roles)}. Its first row: {_shown(first)}. Name every column; - leaves one out."
        )

    def index(role: str) -> int | None:
        return roles.index(role) if role in roles else None

    audio = index("id") if index("audio") is None else index("audio")
    return Columns(
        audio=audio,
        texts=tuple(i for i, role in enumerate(roles) if role == "text")[::-1],
        speaker=index("speaker"),
        split=index("split"),
        id=index("id"),
        width=len(roles),
    )


def _columns_of_header(
    table: Path,
    names: list[str],
    roles: list[str],
    body: list[list[str]],
    found: Callable[[str], bool],
) -> Columns:
    def having(role: str) -> list[int]:
        return [i for i, other in enumerate(roles) if other == role]

    paths = having("audio") + having("id")
    counts = [sum(found(row[i]) for row in body) for i in paths]
    audio = paths[counts.index(max(counts))]
    texts = sorted(having("text"), key=lambda i: _text_rank(names[i]))
    best = [i for i in texts if _text_rank(names[i]) == _text_rank(names[texts[0]])]
    if any(row[i] != row[best[0]] for row in body for i in best):
        traits = [Trait.of([row[i] for row in body], found) for i in range(len(names))]
        several = " and ".join(f"`{names[i]}`" for i in best)
        raise unclear(table, [names, *body], f"{several} differ, and both could be spoken", traits)
    speakers = having("speaker")
    if any(len({row[i] for row in body}) > 1 for i in speakers):
        speakers = [i for i in speakers if len({row[i] for row in body}) > 1]
    ids = [i for i in having("id") if i != audio]
    ids = [i for i in ids if len({row[i] for row in body}) == len(body)]
    return Columns(
        audio=audio,
        texts=tuple(i for i in texts if i in best[:1] or i not in best),
        speaker=next(iter(speakers), None),
        split=next(iter(having("split")), None),
        id=next(iter(ids), None),
        header=tuple(names),
        width=len(names),
    )


def _text_rank(name: str) -> int:
    """0 for the name of a normalised text, which is preferred, 1 for a plain, 2 for a raw one."""
    words = set(re.split(r"[^a-z]+", name.lower()))
    if words & NORMALISED:
        return 0
    return 2 if words & RAW else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trait:
    """What the values of a column look like."""

    values: list[str]  # those that are not empty
    found: float  # share of them that name a recording
    kind: str  # "empty", "split", "language", "number", "sentences", "few" short values or "?"

    @classmethod
    def of(cls, values: list[str], found: Callable[[str], bool]) -> "Trait":
        values = [value for value in values if value]
        share = sum(map(found, values)) / len(values) if values else 0.0
        return cls(values=values, found=share, kind=_kind(values))


def _kind(values: list[str]) -> str:
    if not values:
        return "empty"
    distinct = set(values)
    few = len(values) < FEW_ROWS or len(distinct) <= len(values) / 2
    if all(known_split(value) for value in distinct):
        return "split"
    if all(re.split("[-_]", value.lower())[0] in LANGUAGES for value in distinct):
        return "language"
    if all(re.fullmatch(r"-?\d+([.,]\d+)?", value) for value in distinct):
        return "few" if few and all(value.isdigit() for value in distinct) else "number"
    many = len(values) < FEW_ROWS or len(distinct) > len(values) / 3
    if many and sum(map(is_sentence, values)) >= len(values) / 2:
        return "sentences"
    if few and all(len(value) <= 64 for value in distinct):
        return "few"
    return "?"


def is_sentence(value: str) -> bool:
    """Tell whether a value has several words, or is long in a script without spaces."""
    words = letters(value).split()
    if len(words) > 1 and " " in value.strip():
        return True
    unspaced = [c for c in value if unicode_script(c).split("-")[0] in UNSPACED]
    return len(unspaced) >= 4 and 2 * len(unspaced) > len(value)


def _columns_by_content(traits: list[Trait]) -> Columns | str:
    """Return the columns, or the reason why they are not clear."""
    width = len(traits)
    shares = [trait.found for trait in traits]
    audio = shares.index(max(shares))
    others = [i for i in range(width) if i != audio and (width == 2 or traits[i].kind != "empty")]
    if audio == 0 and width <= 4 and _is_pair(traits, 1, 2):
        # LJSpeech: id|text|normalised, and the kit's own fourth column with the speaker.
        last = traits[3].kind if width == 4 else "number"
        if last == "sentences" and len(traits[3].values) >= FEW_ROWS:
            return "several columns hold sentences"
        speaker = None if last == "number" else 3
        return Columns(audio=0, texts=(2, 1), speaker=speaker, width=width)
    if len(others) == 1:
        return Columns(audio=audio, texts=(others[0],), width=width)
    texts = [i for i in others if traits[i].kind == "sentences"]
    rest = [i for i in others if i not in texts and traits[i].kind != "number"]
    if not texts and len(rest) == 1:
        texts, rest = rest, []
    if len(texts) > 1 and not all(_similar(traits[texts[0]], traits[i]) for i in texts[1:]):
        return "several columns hold sentences"
    if not texts:
        return "no column looks like sentences"
    unknown = [i for i in rest if traits[i].kind == "?"]
    if unknown:
        return f"column {unknown[0] + 1} could be a speaker, or another text"
    speakers = [i for i in rest if traits[i].kind == "few"]
    languages = [i for i in rest if traits[i].kind == "language"]
    if len(speakers) > 1:
        return "several columns could be the speaker"
    if not speakers and (
        len(languages) > 1 or any(len(set(traits[i].values)) > 1 for i in languages)
    ):
        return "a column could be the speaker or the language"
    return Columns(
        audio=audio,
        texts=tuple(texts[::-1]),
        speaker=next(iter(speakers), None),
        split=next((i for i in rest if traits[i].kind == "split"), None),
        width=width,
    )


def _is_pair(traits: list[Trait], first: int, second: int) -> bool:
    """Tell whether the columns are a text and the same text normalised, or the latter is empty."""
    if len(traits) <= second or traits[first].kind == "empty":
        return False
    one, other = traits[first], traits[second]
    last = one.kind == "sentences" or "sentences" not in [t.kind for t in traits[second + 1 :]]
    if other.kind == "empty":
        return last and len(traits) > second + 1
    if len(one.values) == len(other.values) and _equal(one, other) > 0.5:
        return last
    if one.kind != "sentences" or other.kind not in ("sentences", "?"):
        return False
    return _similar(one, other) or len(one.values) < FEW_ROWS


def _equal(one: Trait, other: Trait) -> float:
    pairs = list(zip(one.values, other.values))
    return sum(a == b for a, b in pairs) / len(pairs)


def _similar(one: Trait, other: Trait) -> bool:
    """Tell whether two columns hold the same sentences, one of them perhaps in another spelling."""
    if len(one.values) == len(other.values):
        pairs = list(zip(one.values, other.values))
    else:  # the normalised text is missing in some rows: compare all words
        pairs = [(" ".join(one.values), " ".join(other.values))]
    shared = 0
    for a, b in pairs:
        words = [set(letters(text.lower()).split()) for text in (a, b)]
        fewest = min(map(len, words))
        shared += bool(fewest) and len(words[0] & words[1]) >= fewest / 3
    return shared >= len(pairs) / 2


def _looks_like_header(
    first: list[str], columns: Columns, body: list[list[str]], found: Callable[[str], bool]
) -> bool:
    """Tell whether the first row names columns, with names that the kit does not know."""
    paths = [row[columns.audio] for row in body if row != first]
    if any(map(found, first)) or 2 * sum(map(found, paths)) < max(1, len(paths)):
        return False
    named = role_of(first[columns.audio]) or any(role_of(first[i]) == "text" for i in columns.texts)
    named = named or (all(map(has_suffix, paths)) and not has_suffix(first[columns.audio]))
    texts = [first[i] for i in columns.texts]
    return bool(named) and not any(map(is_sentence, texts)) and all(len(c) <= 40 for c in first)


def unclear(table: Path, rows: list[list[str]], why: str, traits: list[Trait]) -> DatasetError:
    """Return the question: three rows, what the columns look like, and how to answer."""
    guesses = []
    names = {"sentences": "text", "few": "speaker", "number": "-", "empty": "-", "?": "-"}
    shares = [trait.found for trait in traits]
    for i, trait in enumerate(traits):
        is_audio = i == shares.index(max(shares))
        guesses.append("audio" if is_audio else names.get(trait.kind, trait.kind))
    shown = "\n  ".join(_shown(row) for row in rows[:3])
    several = "; of several `text` the last is spoken" if guesses.count("text") > 1 else ""
    return DatasetError(
        f"{table}: it is not clear what its {len(traits)} columns hold: {why}. Its first rows:\n"
        f"  {shown}\nThey look like {'|'.join(guesses)}. Say what they are, in this order "
        f"({', '.join(ROLES[:-1])}, or - for a column to leave out{several}): "
        f"{SETTING.format(columns='|'.join(guesses))}."
    )


def _shown(row: list[str]) -> str:
    return " | ".join(shorten(" ".join(cell.split()), 40) for cell in row)
