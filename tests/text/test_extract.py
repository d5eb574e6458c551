"""Extraction: the text of any table as a passing file, resumed after a kill, never left behind."""

import json
import multiprocessing
import os
import random
import signal
from pathlib import Path

import pytest

from kit.base.errors import DatasetError
from kit.text import extract
from kit.text.extract import Progress, extract_text, plain_lines


def table(path: Path, count: int = 60) -> Path:
    rows = "".join(f'{i},"ሠላም, ቁጥር\n{i}"\n' for i in range(count))
    path.write_bytes(b"\xef\xbb\xbfid,text\n" + rows.encode())
    return path


def text_of(source: Path, folder: Path, **arguments) -> tuple[str, extract.ExtractedText]:
    with extract_text(source, folder, **arguments) as made:
        return made.path.read_text(encoding="utf-8"), made


def test_a_quoted_break_is_a_space_and_text_is_normalised(tmp_path):
    source = table(tmp_path / "t.csv", 3)
    assert text_of(source, tmp_path / "w")[0] == "ሠላም, ቁጥር 0\nሠላም, ቁጥር 1\nሠላም, ቁጥር 2\n"
    text, made = text_of(source, tmp_path / "w", language="am")
    assert text == "ሰላም, ቁጥር ዜሮ\nሰላም, ቁጥር አንድ\nሰላም, ቁጥር ሁለት\n" and made.lines == 3


@pytest.mark.parametrize(
    ("name", "data", "layout"),
    [
        ("t.tsv", "id\ttext\n1\tአንድ\n2\tሁለት\n", {}),
        ("t.jsonl", '{"text": "አንድ"}\n{"text": "ሁለት", "x": 1}\n', {}),
        ("t.json", '[{"text": "አንድ"}, {"text": "ሁለት"}]', {}),
        ("t.txt", "አንድ\r\n\nሁለት", {}),
        (
            "t.csv",
            "1|አንድ\n2|ሁለት\n",
            {"columns": ["id", "text"], "delimiter": "|", "quoting": False},
        ),
    ],
)
def test_every_kind_of_file(tmp_path, name, data, layout):
    (tmp_path / name).write_text(data, encoding="utf-8", newline="")
    assert text_of(tmp_path / name, tmp_path, **layout)[0] == "አንድ\nሁለት\n"


def test_rows_without_text_are_counted_and_named(tmp_path):
    source = tmp_path / "t.jsonl"
    source.write_text(
        '{"text": "ሀ"}\n{"text": null}\n{"text": "። !"}\nnonsense\n', encoding="utf-8"
    )
    _, made = text_of(source, tmp_path, language="am")
    assert (made.lines, made.empty, made.unreadable) == (2, 1, 1)
    assert "line 4" in made.faults[0]


def test_a_missing_column_names_the_nearest(tmp_path):
    with pytest.raises(DatasetError, match=r"no column `txt`\. Did you mean `text`"):
        text_of(table(tmp_path / "t.csv"), tmp_path, column="txt")
    assert left(tmp_path) == ["t.csv"]


@pytest.mark.parametrize(("name", "message"), [("t.parquet", "parquet"), ("none.csv", "none")])
def test_what_cannot_be_read_is_reported(tmp_path, name, message):
    (tmp_path / "t.parquet").write_bytes(b"ABCD")
    with pytest.raises(DatasetError, match=message):
        text_of(tmp_path / name, tmp_path / "work")
    with pytest.raises(DatasetError, match=message):
        list(plain_lines(tmp_path / name))


def test_plain_lines_end_at_newlines_alone(tmp_path):
    path = tmp_path / "t.txt"
    path.write_bytes("\ufeffሀ\u2028ለ\r\n \nመ\x85ሠ".encode())
    assert list(plain_lines(path)) == ["ሀ\u2028ለ", "መ\x85ሠ"]


def left(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_after_a_failure(tmp_path, error):
    source = table(tmp_path / "t.csv")
    with pytest.raises(error), extract_text(source, tmp_path) as made:
        assert made.path.exists()
        raise error
    assert left(tmp_path) == ["t.csv"]


def killed_at(item: int, how: str, source: Path, folder: Path) -> None:
    """Extract in a process that is killed by the system at row `item`, or writing a mark."""

    def body() -> None:
        extract.EVERY, done = 7, 0
        take, write = extract._take, extract.write_atomic

        def dying(work):
            def worker(*arguments):
                nonlocal done
                done += 1
                if done == item:
                    os.kill(os.getpid(), signal.SIGKILL)
                return work(*arguments)

            return worker

        if how == "row":
            extract._take = dying(take)
        else:
            extract.write_atomic = dying(write)
        text_of(source, folder, language="am")

    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_any_row_it_ends_with_the_same_text(tmp_path, monkeypatch, seed):
    source, folder, rng = table(tmp_path / "t.csv"), tmp_path / "work", random.Random(seed)
    whole, made = text_of(source, tmp_path / "other", language="am")
    killed_at(rng.randint(15, 25), "row", source, folder)
    mark = json.loads((folder / ".extracted.json").read_text())
    assert mark["items"] in (14, 21)
    killed_at(2, "mark", source, folder)
    killed_at(rng.randint(1, 20), "row", source, folder)
    monkeypatch.setattr(extract, "EVERY", 7)
    read = []
    monkeypatch.setattr(extract, "_take", lambda *a, take=extract._take: (read.append(a), take(*a)))
    with extract_text(source, folder, language="am") as again:
        assert again.path.read_text(encoding="utf-8") == whole
        assert (again.lines, again.empty) == (made.lines, made.empty)
    assert len(read) <= 60 - mark["items"] and left(folder) == []


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("change", ["source", "arguments", "text gone", "text cut"])
def test_what_changed_meanwhile_starts_again(tmp_path, change):
    source, folder = table(tmp_path / "t.csv"), tmp_path / "work"
    killed_at(30, "row", source, folder)
    if change == "source":
        table(source, 61)
    elif change == "text gone":
        (folder / ".extracted.txt").unlink()
    elif change == "text cut":
        (folder / ".extracted.txt").write_bytes(b"x")
    language = None if change == "arguments" else "am"
    assert (
        text_of(source, folder, language=language)[0]
        == text_of(source, tmp_path / "o", language=language)[0]
    )
    assert left(folder) == []


def test_a_pass_saves_its_figures_and_forgets_them(tmp_path):
    seen, mark = [], tmp_path / "mark.json"
    for item in Progress(mark, "key", every=10).follow(range(25), lambda: {"sum": sum(seen)}):
        seen.append(item)
    again = Progress(mark, "key", every=10)
    assert again.state["items"] == 20 and again.state["sum"] == sum(range(20))
    assert list(again.follow(range(25), dict)) == [20, 21, 22, 23, 24]
    assert Progress(mark, "other").state == {"items": 0}
    (tmp_path / ".mark.json.abc").write_text("left by a kill")
    again.remove()
    assert left(tmp_path) == []


@pytest.mark.parametrize("data", ["", "{", "[]"])
def test_a_broken_mark_is_no_mark(tmp_path, data):
    (tmp_path / "mark.json").write_text(data)
    assert Progress(tmp_path / "mark.json", "key").state == {"items": 0}
