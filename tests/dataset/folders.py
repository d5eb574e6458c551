"""Folders as other tools write them: recordings that are only looked for, and their texts."""

from pathlib import Path

from kit.dataset.data_report import ManifestConfig
from kit.dataset.layouts import read_dataset

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


def folder_of(root: Path, recordings: list[str], **tables: str | bytes) -> Path:
    """A folder with empty `recordings`, which are only looked for, and `tables` by name."""
    for name in recordings:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"?")
    for name, data in tables.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    return root


def wavs(count: int = 10, pattern: str = "wavs/c{}.wav") -> list[str]:
    return [pattern.format(i) for i in range(count)]


def lines(pattern: str, **values: list) -> str:
    """Ten rows: {i} is the number, {t} the text, {s} one of two speakers."""
    rows = [pattern.format(i=i, t=text, s=f"s{i % 2}", n=i % 2) for i, text in enumerate(TEXTS)]
    return "".join(f"{row}\n" for row in rows)


def read(folder: Path, **over):
    return read_dataset(folder, ManifestConfig(**{**RULES, **over}))


ALL_ONE, TWO = ["speaker"] * 10, [f"s{i % 2}" for i in range(10)]


CSV = lines("c{i}|{t}").splitlines(True)


def require_rows(root: Path, recordings: list[str], files: dict, speakers: list[str]) -> None:
    """A folder of these `files` has the ten texts of its ten recordings, spoken by `speakers`."""
    dataset = read(folder_of(root, recordings, **files))
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


SPLIT_OF = {text: "held_out" if i > 7 else "train" for i, text in enumerate(TEXTS)}


def half(pattern: str, n: int) -> str:
    """The rows of one of two speakers."""
    return "".join(lines(pattern).splitlines(True)[n::2])


def texts(pattern: str, content: str = "{t}\n") -> dict[str, str]:
    """A file for each text, by its name."""
    names = [pattern.format(i=i, n=i % 2).replace("/", "__") for i in range(10)]
    return {name: content.format(t=text) for name, text in zip(names, TEXTS)}


def clips(pattern: str) -> list[str]:
    return [pattern.format(i=i, n=i % 2) for i in range(10)]
