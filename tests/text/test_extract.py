"""Extraction: the text of any table as a passing file, resumed after a kill, never left behind."""

import json
import multiprocessing
import os
import random
import signal
from pathlib import Path

import pytest

from kit.base.errors import DatasetError, Note
from kit.text import train_tokenizer as extract
from kit.text.normalize import normalize
from kit.text.train_tokenizer import extract_text


def table(path: Path, count: int = 60) -> Path:
    rows = "".join(f'{i},"ሠላም, ቁጥር\n{i}"\n' for i in range(count))
    path.write_bytes(b"\xef\xbb\xbfid,text\n" + rows.encode())
    return path


def text_of(source: Path, folder: Path, language: str = "am") -> str:
    with extract_text(source, folder, language) as path:
        return path.read_text(encoding="utf-8")


def test_a_quoted_break_is_a_space_and_text_is_normalised(tmp_path):
    source = table(tmp_path / "t.csv", 3)
    text = text_of(source, tmp_path / "w")
    assert text == "ሰላም, ቁጥር ዜሮ\nሰላም, ቁጥር አንድ\nሰላም, ቁጥር ሁለት\n"


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("t.tsv", "id\ttext\n1\tአንድ\n2\tሁለት\n"),
        ("t.jsonl", '{"text": "አንድ"}\n{"text": "ሁለት", "x": 1}\n'),
        ("t.json", '[{"text": "አንድ"}, {"text": "ሁለት"}]'),
        ("t.txt", "አንድ\r\n\nሁለት"),
    ],
)
def test_every_kind_of_file(tmp_path, name, data):
    (tmp_path / name).write_text(data, encoding="utf-8", newline="")
    assert text_of(tmp_path / name, tmp_path) == "አንድ\nሁለት\n"


def test_rows_without_text_are_left_out_and_bad_ones_named(tmp_path):
    source = tmp_path / "t.jsonl"
    source.write_text(
        '{"text": "ሀ"}\n{"text": null}\n{"text": "። !"}\nnonsense\n', encoding="utf-8"
    )
    with pytest.warns(Note, match=r"t\.jsonl: 1 rows .*line 4"):
        assert text_of(source, tmp_path) == "ሀ\n.!\n"


def test_a_missing_column_names_the_nearest(tmp_path):
    (tmp_path / "t.csv").write_text("id,txt\n1,a\n")
    with pytest.raises(DatasetError, match=r"no column `text`\. Did you mean `txt`"):
        text_of(tmp_path / "t.csv", tmp_path)
    assert left(tmp_path) == ["t.csv"]


@pytest.mark.parametrize(("name", "message"), [("t.parquet", "parquet"), ("none.csv", "none")])
def test_what_cannot_be_read_is_reported(tmp_path, name, message):
    (tmp_path / "t.parquet").write_bytes(b"ABCD")
    with pytest.raises(DatasetError, match=message):
        text_of(tmp_path / name, tmp_path / "work")


def left(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_after_a_failure(tmp_path, error):
    source = table(tmp_path / "t.csv")
    with pytest.raises(error), extract_text(source, tmp_path, "am") as path:
        assert path.exists()
        raise error
    assert left(tmp_path) == ["t.csv"]


def killed_at(item: int, how: str, source: Path, folder: Path) -> None:
    """Extract in a process that is killed by the system at row `item`, or writing a mark."""

    def body() -> None:
        extract.EVERY, done = 7, 0
        normalize, write = extract.normalize, extract.write_atomic

        def dying(work):
            def worker(*arguments):
                nonlocal done
                done += 1
                if done == item:
                    os.kill(os.getpid(), signal.SIGKILL)
                return work(*arguments)

            return worker

        if how == "row":
            extract.normalize = dying(normalize)
        else:
            extract.write_atomic = dying(write)
        text_of(source, folder)

    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_any_row_it_ends_with_the_same_text(tmp_path, monkeypatch, seed):
    source, folder, rng = table(tmp_path / "t.csv"), tmp_path / "work", random.Random(seed)
    whole = text_of(source, tmp_path / "other")
    killed_at(rng.randint(15, 25), "row", source, folder)
    mark = json.loads((folder / ".extracted.json").read_text())
    assert mark["rows"] in (14, 21)
    killed_at(2, "mark", source, folder)
    killed_at(rng.randint(1, 20), "row", source, folder)
    monkeypatch.setattr(extract, "EVERY", 7)
    read = []
    monkeypatch.setattr(extract, "normalize", lambda *a: (read.append(a), normalize(*a))[1])
    assert text_of(source, folder) == whole
    assert len(read) <= 60 - mark["rows"] and left(folder) == []


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("change", ["source", "language", "text gone", "text cut", "mark"])
def test_what_changed_meanwhile_starts_again(tmp_path, change):
    source, folder = table(tmp_path / "t.csv"), tmp_path / "work"
    killed_at(30, "row", source, folder)
    if change == "source":
        table(source, 61)
    elif change == "text gone":
        (folder / ".extracted.txt").unlink()
    elif change == "text cut":
        (folder / ".extracted.txt").write_bytes(b"x")
    elif change == "mark":
        (folder / ".extracted.json").write_text("{")
    language = "en" if change == "language" else "am"
    assert text_of(source, folder, language) == text_of(source, tmp_path / "o", language)
    assert left(folder) == []
