"""Folders as other tools write them: recordings that are only looked for, and their texts."""

from pathlib import Path

from kit.dataset.layouts import read_dataset
from kit.settings import ManifestConfig

TEXTS = [
    "printing in the only sense.",
    "in being comparatively modern.",
    "the dog ran home today.",
    "a quick brown fox jumps.",
    "we are going to the sea.",
    "nobody knows the trouble.",
    "it was the best of times.",
    "she sells sea shells here.",
    "all that glitters is not gold.",
    "they went away again.",
]
RULES = {"language": "en", "held_out_percent": 0}
ALL_ONE, TWO = ["speaker"] * 10, ["s0", "s1"] * 5
SPLIT_OF = {text: "held_out" if i > 7 else "train" for i, text in enumerate(TEXTS)}


def folder_of(root: Path, recordings: list[str], **tables: str | bytes) -> Path:
    """A folder with empty `recordings`, which are only looked for, and `tables` by name."""
    for name, data in (dict.fromkeys(recordings, b"?") | tables).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return root


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of each file that is not hidden, by its path in `folder`."""
    files = (p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}


def wavs(count: int = 10, pattern: str = "wavs/c{}.wav") -> list[str]:
    return [pattern.format(i) for i in range(count)]


def rows_of(pattern: str) -> list[str]:
    """`pattern` for each text {t}, its number {i}, of two speakers {n} or {s}, {h} of each."""
    values = [{"i": i, "h": i // 2, "n": i % 2, "s": f"s{i % 2}"} for i in range(10)]
    return [pattern.format(t=text, **each) for text, each in zip(TEXTS, values)]


def lines(pattern: str) -> str:
    return "".join(f"{row}\n" for row in rows_of(pattern))


def read(folder: Path, **over):
    return read_dataset(folder, ManifestConfig(**{**RULES, **over}))


CSV = lines("c{i}|{t}").splitlines(True)


def require_rows(
    root: Path, recordings: list[str], files: dict, speakers: list[str], **over
) -> None:
    """A folder of these `files` has the ten texts of its ten recordings, spoken by `speakers`."""
    dataset = read(folder_of(root, recordings, **files), **over)
    assert not dataset.refused
    rows = sorted(dataset.rows, key=lambda row: TEXTS.index(row.text))
    assert [row.text for row in rows] == TEXTS and len({row.id for row in rows}) == 10
    assert [row.speaker for row in rows] == speakers
    assert [Path(row.audio) for row in rows] == [root / name for name in recordings[:10]]
    assert {row.split for row in rows} == {"train"}


def parts(pattern: str) -> tuple[str, str]:
    """Eight rows to train on, and two that are held out."""
    rows = lines(pattern).splitlines(True)
    return "".join(rows[:8]), "".join(rows[8:])


def texts(pattern: str, content: str = "{t}\n") -> dict[str, str]:
    """A file for each text, by its name."""
    return dict(zip(rows_of(pattern), rows_of(content)))
