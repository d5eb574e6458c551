"""Which column of a table holds what: by its name, or as the setting `columns` says.

No column is recognised by its content. A table that does not name its recordings and its texts is
refused with three of its rows and the setting to write.
"""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from kit.base.errors import DatasetError, KitError
from kit.base.formatting import nearest, shorten

ROLES = ("audio", "text", "speaker", "language", "split", "id", "start", "end", "duration", "-")

# Names of text columns: of the normalised text, which is preferred, of a plain and of a raw one.
TEXT_NAMES = (
    "normalized_text normalised_text text_normalized text_normalised normalized_transcription "
    "normalized normalised clean_text",
    "text sentence transcription transcript utterance",
    "raw_text original_text text_raw text_original raw_transcription",
)
# Usual names of columns and of JSON keys; where a table has several of a role, the first counts.
NAMES = {
    "audio": "audio audio_file audio_path audio_filepath audio_filename file_name filename file "
    "file_path filepath path wav wav_file wav_path wav_filename clip recording",
    "text": " ".join(TEXT_NAMES),
    "speaker": "speaker speaker_name speaker_id spk spk_id client_id reader reader_id narrator",
    "language": "language lang locale language_code lang_code",
    "split": "split subset partition",
    "id": "id utt_id utterance_id key name",
}
# Words in the names of times: start_time, segment_end, audio_offset. A row with them may be a part.
TIME_WORDS = {
    "start": {"start", "begin", "offset", "onset"},
    "end": {"end", "stop"},
    "duration": {"duration", "dur"},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns:
    names: tuple[str, ...]  # of all columns, in their order
    by_role: dict[str, tuple[str, ...]]  # role -> names; the first that is not empty counts

    def value(self, row: dict, role: str):
        """Return what a row, {name: value}, has in this role; "" for nothing."""
        values = (row.get(name) for name in self.by_role.get(role, ()))
        return next((value for value in values if value not in (None, "")), "")

    def __str__(self) -> str:
        roles = {name: role for role, names in self.by_role.items() for name in names}
        return "|".join(roles.get(name, "-") for name in self.names)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """How the tables of a tool are written, or what the user says of a table."""

    roles: tuple[str, ...] = ()  # of its columns, in their order; (): they have names
    separator: str = ""  # "": the one that gives as many columns
    quoted: bool = False  # whether fields may be in double quotes, as , and ; tables always may
    json: bool = False  # an object a line, also in files called .json


FORMS = {
    "coqui": Form(roles=("audio", "text", "speaker"), separator="|"),
    "piper": Form(roles=("audio", "speaker", "text"), separator="|", quoted=True),
    "gpt-sovits": Form(roles=("audio", "speaker", "language", "text"), separator="|"),
    "nemo": Form(json=True),
}


def parse_setting(setting: str) -> Form:
    """Return the form that the setting `columns` names or spells out. Raises KitError."""
    text = setting.strip().lower()
    if text in FORMS:
        return FORMS[text]
    roles = tuple(filter(None, re.split(r"[|,;\s]+", text)))
    for role in roles:
        if role not in ROLES:
            raise KitError(
                f"columns: `{role}` in {setting!r} is nothing that a column can hold."
                f"{nearest(role, [*ROLES, *FORMS])} Write - for a column to leave out."
            )
    if roles and ("text" not in roles or not {"audio", "id"} & set(roles)):
        raise KitError(
            f"columns: {setting!r} must name `audio` and `text`, as in audio|text|speaker, or one "
            f"of {', '.join(FORMS)}."
        )
    return Form(roles=roles)


def named_columns(names: Sequence[str]) -> tuple[Columns | None, str]:
    """Return the columns that have these names; None and the reason where that is not clear."""
    columns = Columns(names=tuple(names), by_role=roles_of(names))
    missing = [] if columns.by_role["text"] else ["a text (text, sentence ...)"]
    if not (columns.by_role["audio"] or columns.by_role["id"]):
        missing.append("a recording (audio, path, file_name ...)")
    if missing:
        return None, f"no column has a name of {' or '.join(missing)}"
    twice = [name for name in names if names.count(name) > 1 and name]
    reason = f"two columns are called `{twice[0]}`" if twice else text_conflict(columns)
    return (None, reason) if reason else (columns, "")


def text_conflict(columns: Columns) -> str:
    """Say which columns could both be what is spoken, by their names; "" for one alone."""
    for known in TEXT_NAMES:
        own = [name for name in columns.by_role["text"] if _plain(name) in known.split()]
        if own:
            several = " and ".join(f"`{name}`" for name in own)
            return f"{several} could both be what is spoken" if len(own) > 1 else ""
    return ""


def roles_of(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the names that have each role, those of a role in the order of preference."""
    plain = {name: _plain(name) for name in names}
    by_role = {}
    for role, words in NAMES.items():
        known = words.split()
        own = [name for name in plain if plain[name] in known]
        by_role[role] = tuple(sorted(own, key=lambda name: known.index(plain[name])))
    for role, words in TIME_WORDS.items():
        by_role[role] = tuple(name for name in plain if words & set(plain[name].split("_")))
    return by_role


def columns_in_order(roles: Sequence[str], names: Sequence[str]) -> Columns:
    """Return columns with the roles that were given; of several texts the last is preferred."""
    by_role = {}
    for role in set(roles) - {"-"}:
        own = [name for name, other in zip(names, roles, strict=True) if other == role]
        by_role[role] = tuple(own[::-1] if role == "text" else own)
    return Columns(names=tuple(names), by_role=by_role)


def unclear_table(path: Path, rows: list[list[str]], why: str) -> DatasetError:
    """Return the question about a table: three rows, and how to answer."""
    shown = "\n  ".join(map(shown_row, rows[:3]))
    return DatasetError(
        f"{path}: it is not clear what its columns hold: {why}. Its first rows:\n  {shown}\n"
        f"Say it in their order ({', '.join(ROLES[:-1])}, or - for one to leave out): "
        'COLUMNS = "audio|text" in "More settings" of the notebook, --columns "audio|text" or '
        f'--set manifest.columns="audio|text"; or name its form: {", ".join(FORMS)}. A first line '
        "with these names does as well."
    )


def shown_row(row: Sequence[str]) -> str:
    return " | ".join(shorten(" ".join(str(cell).split()), 40) for cell in row)


def _plain(name) -> str:
    """Return a column's name as NAMES spells it: `audioFile` and `Audio file` are audio_file."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(name).strip()).lower()
    return re.sub(r"[^a-z0-9]+", "_", words).strip("_")
