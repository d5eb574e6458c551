"""Decide which column of a table names the recording, and which holds text, speaker and split.

By the names in the header, else by what many rows hold: files that exist, sentences, few short
values. Where that is not clear, the user has to say it: training would not notice a wrong column.
"""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

from kit.base.errors import DatasetError, KitError
from kit.base.formatting import nearest, shorten
from kit.dataset.recordings import has_suffix, known_split
from kit.text.normalize import codes_by_name, letters, unicode_script

ROLES = ("audio", "text", "speaker", "language", "split", "id", "-")

# Words in the names of columns. The first list that has one of a name's words decides.
WORDS = {
    "-": "duration length len seconds sec rate frames size samples gender sex age accent start end "
    "offset phonemes phoneme phonemized phones pinyin ipa arpabet g2p pred predicted prediction "
    "hypothesis hyp asr translation translated domain prompt notes ref reference description "
    "instruct instruction context style emotion",
    "language": "language lang locale",
    "split": "split subset partition",
    "speaker": "speaker speakers spk spkr client narrator reader voice talker singer",
    "text": "text texts sentence sentences transcription transcriptions transcript transcripts "
    "utterance utterances words wrd caption subtitle",
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
# How a sentence is said, or whether it is something, not who says it.
STYLES = frozenset(
    "neutral normal happy sad angry calm fear fearful disgust disgusted surprise surprised amused "
    "sleepy excited whisper whispering bored anger happiness sadness reading true false".split()
)
FEW_ROWS = 4  # fewer say nothing about how often a value occurs

IsRecording = Callable[[str], bool]  # tells whether a value of a table names a recording


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
    table: Path, rows: list[list[str]], first: list[str], setting: str, is_recording: IsRecording
) -> Columns:
    """Return what the columns of a table hold.

    `rows` are a sample, `first` is the table's first row, `setting` the user's own answer, "" for
    none. Raises DatasetError, with three rows and how to set it, where it is not clear.
    """
    header = is_header(first) and not any(map(is_recording, first))
    body = [row for row in rows if row != first] or rows
    if header and not setting:
        return _columns_of_header(table, first, body, is_recording)
    if setting:
        roles = parse_roles(setting)
        if len(roles) != len(first):
            raise DatasetError(
                f"{table} has {len(first)} columns, but columns is {setting!r}, which names "
                f"{len(roles)}. Its first row: {_shown(first)}. Name each column; - leaves one out."
            )
        by_role = _by_role(roles)
        columns = Columns(
            audio=_first(by_role["audio"] or by_role["id"]),
            texts=tuple(by_role["text"][::-1]),
            speaker=_first(by_role["speaker"]),
            split=_first(by_role["split"]),
            id=_first(by_role["id"]),
            width=len(roles),
        )
    else:
        traits = _traits(body, is_recording)
        columns = _columns_by_content(traits)
        if isinstance(columns, str):
            raise _unclear(table, [first, *body], columns, traits)
    header = header or _looks_like_header(first, columns, body, is_recording)
    return dataclasses.replace(columns, header=tuple(first) if header else ())


def is_header(cells: list[str]) -> bool:
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
            return "id" if role == "text" and "id" in words else role
    return ""


def parse_roles(text: str) -> list[str]:
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


def _by_role(roles: list[str]) -> dict[str, list[int]]:
    return {role: [i for i, other in enumerate(roles) if other == role] for role in ROLES}


def _first(columns: list[int]) -> int | None:
    return columns[0] if columns else None


def _columns_of_header(
    table: Path, names: list[str], body: list[list[str]], is_recording: IsRecording
) -> Columns:
    by_role = _by_role([role_of(name) for name in names])
    distinct = [len({row[i] for row in body}) for i in range(len(names))]
    paths = by_role["audio"] + by_role["id"]
    audio = max(paths, key=lambda i: sum(is_recording(row[i]) for row in body))
    ranks = {i: _text_rank(names[i]) for i in by_role["text"]}
    texts = sorted(ranks, key=ranks.get)
    best = [i for i in texts if ranks[i] == ranks[texts[0]]]
    if any(row[i] != row[best[0]] for row in body for i in best):
        several = " and ".join(f"`{names[i]}`" for i in best)
        why = f"{several} differ, and both could be spoken"
        raise _unclear(table, [names, *body], why, _traits(body, is_recording))
    speakers = [i for i in by_role["speaker"] if distinct[i] > 1] or by_role["speaker"]
    ids = [i for i in by_role["id"] if i != audio and distinct[i] == len(body)]
    return Columns(
        audio=audio,
        texts=(best[0], *texts[len(best) :]),
        speaker=_first(speakers),
        split=_first(by_role["split"]),
        id=_first(ids),
        header=tuple(names),
        width=len(names),
    )


def _text_rank(name: str) -> int:
    """0 for the name of a normalised text, which is preferred, 1 for a plain, 2 for a raw one."""
    words = set(re.split(r"[^a-z]+", name.lower()))
    return 0 if words & NORMALISED else 1 + bool(words & RAW)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trait:
    values: list[str]  # those that are not empty
    recordings: float  # share of them that name a recording
    # "empty", "split", "language", "style", "number", "sentences", "few" short values or "?"
    kind: str


def _traits(body: list[list[str]], is_recording: IsRecording) -> list[Trait]:
    traits = []
    for column in zip(*body, strict=True):
        values = [value for value in column if value]
        share = sum(map(is_recording, values)) / max(1, len(values))
        traits.append(Trait(values=values, recordings=share, kind=_kind(values)))
    return traits


def _audio_column(traits: list[Trait]) -> int:
    return max(range(len(traits)), key=lambda i: traits[i].recordings)


def _kind(values: list[str]) -> str:
    if not values:
        return "empty"
    distinct = set(values)
    few = len(values) < FEW_ROWS or len(distinct) <= len(values) / 2
    if all(known_split(value) for value in distinct):
        return "split"
    if all(re.split("[-_]", value.lower())[0] in LANGUAGES for value in distinct):
        return "language"
    if all(value.lower() in STYLES for value in distinct):
        return "style"
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
    value = value.replace("፡", " ")  # the Ethiopic space
    if len(letters(value).split()) > 1 and " " in value.strip():
        return True
    unspaced = [c for c in value if unicode_script(c).split("-")[0] in UNSPACED]
    return len(unspaced) >= 4 and 2 * len(unspaced) > len(value)


def _columns_by_content(traits: list[Trait]) -> Columns | str:
    """Return the columns, or the reason why they are not clear."""
    width = len(traits)
    audio = _audio_column(traits)
    all_recordings = [i for i, trait in enumerate(traits) if trait.recordings == 1]
    names = [i for i in all_recordings if len(set(traits[i].values)) == len(traits[i].values) > 1]
    if width > 2 and any(traits[i].values != traits[names[0]].values for i in names):
        return f"columns {names[0] + 1} and {names[1] + 1} both name recordings"
    others = [i for i in range(width) if i != audio and (width == 2 or traits[i].kind != "empty")]
    if audio == 0 and width <= 4 and _is_pair(traits):
        # LJSpeech: id|text|normalised, and the kit's own fourth column with the speaker.
        last = traits[3].kind if width == 4 else "number"
        if last == "sentences" and len(traits[3].values) >= FEW_ROWS:
            return "several columns hold sentences"
        speaker = None if last == "number" else 3
        return Columns(audio=0, texts=(2, 1), speaker=speaker, width=width)
    if len(others) == 1:
        labels = traits[others[0]]
        is_label = labels.kind in ("few", "language", "split", "style")
        if is_label and len(labels.values) >= FEW_ROWS and not all(map(is_sentence, labels.values)):
            return "no column looks like sentences"
        return Columns(audio=audio, texts=(others[0],), width=width)
    texts = [i for i in others if traits[i].kind == "sentences"]
    rest = [i for i in others if i not in texts and traits[i].kind not in ("number", "style")]
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
    several = any(len(set(traits[i].values)) > 1 for i in languages)
    if not several and len(languages) > 1:  # GPT-SoVITS's speaker, with the name of a language
        speakers = speakers or languages[:1]
    if not speakers and several:
        return "a column could be the speaker or the language"
    return Columns(
        audio=audio,
        texts=tuple(texts[::-1]),
        speaker=_first(speakers),
        split=_first([i for i in rest if traits[i].kind == "split"]),
        width=width,
    )


def _is_pair(traits: list[Trait]) -> bool:
    """Tell whether column 2 is the text of column 1 normalised, or is empty."""
    if len(traits) < 3 or traits[1].kind == "empty":
        return False
    one, other = traits[1:3]
    last = one.kind == "sentences" or "sentences" not in [t.kind for t in traits[3:]]
    if other.kind == "empty":
        return last and len(traits) > 3
    same = sum(a == b for a, b in zip(one.values, other.values))
    if len(one.values) == len(other.values) < 2 * same:
        return last
    if one.kind != "sentences" or other.kind not in ("sentences", "?"):
        return False
    return _similar(one, other) or len(one.values) < FEW_ROWS


def _similar(one: Trait, other: Trait) -> bool:
    """Tell whether two columns hold the same sentences, one of them perhaps in another spelling."""
    sizes = [sum(map(len, trait.values)) / max(1, len(trait.values)) for trait in (one, other)]
    if 2 * min(sizes) < max(sizes):  # one holds keywords, say
        return False
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
    first: list[str], columns: Columns, body: list[list[str]], is_recording: IsRecording
) -> bool:
    """Tell whether the first row names columns, with names that the kit does not know."""
    paths = [row[columns.audio] for row in body if row != first]
    if any(map(is_recording, first)) or 2 * sum(map(is_recording, paths)) < max(1, len(paths)):
        return False
    named = role_of(first[columns.audio]) or any(role_of(first[i]) == "text" for i in columns.texts)
    named = named or (all(map(has_suffix, paths)) and not has_suffix(first[columns.audio]))
    texts = [first[i] for i in columns.texts]
    return bool(named) and not any(map(is_sentence, texts)) and all(len(c) <= 40 for c in first)


def _unclear(table: Path, rows: list[list[str]], why: str, traits: list[Trait]) -> DatasetError:
    """Return the question: three rows, what the columns look like, and how to answer."""
    names = {"sentences": "text", "few": "speaker", "language": "language", "split": "split"}
    guesses = [names.get(trait.kind, "-") for trait in traits]
    guesses[_audio_column(traits)] = "audio"
    shown = "\n  ".join(_shown(row) for row in rows[:3])
    columns = "|".join(guesses)
    message = (
        f"{table}: it is not clear what its {len(traits)} columns hold: {why}. Its first rows:\n"
        f"  {shown}\nThey look like {columns}. Say what they are, in this order "
        f"({', '.join(ROLES[:-1])}, or - for a column to leave out; of several `text` the last is "
        f'spoken): COLUMNS = "{columns}" in the second cell of 01_data_prep, --columns "{columns}",'
        f' or --set manifest.columns="{columns}".'
    )
    if guesses.count("text") > 1:
        message += " If they are one text with separators in it, quote the texts, or separate by |."
    return DatasetError(message)


def _shown(row: list[str]) -> str:
    return " | ".join(shorten(" ".join(cell.split()), 40) for cell in row)
