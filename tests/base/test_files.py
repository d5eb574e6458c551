"""Files that belong together are replaced together; a result is made once for all it depends on."""

import math
import os

import pytest

from kit.base.errors import DiskError
from kit.base.files import atomic_folder, cached_result

NAMES = ("a.json", "b.json", "card", "weights")
MARKS = ("card", "weights")


def write(folder, text: str) -> None:
    with atomic_folder(folder, MARKS) as new:
        for name in NAMES:
            (new / name).write_text(text)


def held(folder) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def test_all_of_it_moves_and_what_else_is_there_stays(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    write(tmp_path, "old")
    write(tmp_path, "new")
    assert held(tmp_path) == dict.fromkeys(NAMES, "new") | {"mine.txt": "mine"}
    assert not (tmp_path / ".new").exists()


def test_a_mark_that_is_not_written_again_goes(tmp_path):
    write(tmp_path, "old")
    with atomic_folder(tmp_path, MARKS) as new:
        (new / "weights").write_text("new")
    assert held(tmp_path) == {"a.json": "old", "b.json": "old", "weights": "new"}


def test_a_block_that_fails_leaves_what_was_there(tmp_path):
    write(tmp_path, "old")
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path, MARKS) as new:
        (new / "a.json").write_text("new")
        raise KeyboardInterrupt
    with pytest.raises(DiskError, match="could not write"), atomic_folder(tmp_path, MARKS):
        raise OSError("torn out")
    assert held(tmp_path) == dict.fromkeys(NAMES, "old")


@pytest.mark.parametrize("moved", range(len(NAMES)))
def test_no_mark_is_ever_beside_a_mixture(moved, tmp_path, monkeypatch):
    write(tmp_path, "old")
    left = [moved]
    replace = os.replace

    def stops(source, target):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        replace(source, target)

    monkeypatch.setattr(os, "replace", stops)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, "new")
    found = held(tmp_path)
    marks = {found.pop(name) for name in MARKS if name in found}
    assert not marks or set(found.values()) == marks == {"new"}


class Work:
    """Counts how often it was done."""

    def __init__(self):
        self.times = 0

    def __call__(self) -> dict:
        self.times += 1
        return {"text": "ሰላም", "times": self.times, "score": -math.inf}


def test_a_result_is_made_once_for_each_key(tmp_path):
    work = Work()
    path = tmp_path / "deep" / "result.json"
    first = cached_result(path, "a", work)
    assert first == cached_result(path, "a", work) and work.times == 1
    assert cached_result(path, "b", work)["times"] == 2
    assert cached_result(path, "b", work)["times"] == 2
    assert "ሰላም" in path.read_text(encoding="utf-8")


def test_a_result_whose_files_are_gone_is_made_again(tmp_path):
    work = Work()
    path = tmp_path / "result.json"
    cached_result(path, "a", work)
    assert cached_result(path, "a", work, lambda value: value["times"] == 1)["times"] == 1
    assert cached_result(path, "a", work, lambda value: value["times"] > 1)["times"] == 2


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"key": "a"}', b"\xff", b"[" * 99_999])
def test_a_damaged_file_is_reported_and_costs_the_work_alone(tmp_path, data):
    path = tmp_path / "result.json"
    path.write_bytes(data)
    with pytest.warns(UserWarning, match=r"result\.json is damaged .* made again"):
        assert cached_result(path, "a", Work())["times"] == 1
    assert cached_result(path, "a", Work())["times"] == 1
