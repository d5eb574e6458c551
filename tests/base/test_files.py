"""Files that belong together are replaced together; a result is made once for all it depends on."""

import errno
import itertools
import math
import os
from collections.abc import Callable

import pytest

from kit.base.errors import DiskError
from kit.base.files import (
    atomic_folder,
    atomic_path,
    cached_result,
    digest,
    remove_litter,
    write_atomic,
)


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_write_atomic_leaves_old_or_new_and_no_litter(tmp_path, monkeypatch, step):
    path = tmp_path / "deep" / "file"
    write_atomic(path, "ሰላም")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(OSError, match="Free some disk space") as caught:
        write_atomic(path, b"new")
    assert caught.value.errno == errno.ENOSPC and str(path) in str(caught.value)
    assert path.read_text(encoding="utf-8") == "ሰላም" and len(list(path.parent.iterdir())) == 1


def test_only_temporary_files_that_nobody_writes_are_litter(tmp_path):
    for name in ("deep/.a.ab12cd34.tmp", "c.tmp", ".mirrored.json"):
        write_atomic(tmp_path / name, "")
    with atomic_path(tmp_path / "b"):
        remove_litter(tmp_path, 3600.0)
        assert len(list(tmp_path.rglob(".*.tmp"))) == 2, "another machine may write it"
        remove_litter(tmp_path, 0.0)
    assert {path.name for path in tmp_path.rglob("*")} == {"deep", "b", "c.tmp", ".mirrored.json"}


NAMES = ("a.json", "b.json", "card", "weights")
MARKS = ("card", "weights")


def write(folder, text: str) -> None:
    with atomic_folder(folder, MARKS) as new:
        for name in NAMES:
            (new / name).write_text(text)


def held(folder) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def test_all_of_it_moves_what_else_is_there_stays_and_a_mark_not_written_again_goes(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    write(tmp_path, "old")
    write(tmp_path, "new")
    assert held(tmp_path) == dict.fromkeys(NAMES, "new") | {"mine.txt": "mine"}
    assert not (tmp_path / ".new").exists()
    with atomic_folder(tmp_path, MARKS) as new:
        (new / "weights").write_text("newer")
    kept = {"mine.txt": "mine", "a.json": "new", "b.json": "new"}
    assert held(tmp_path) == kept | {"weights": "newer"}


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
    steps = iter([os.replace] * moved)

    def stops(source, target):
        replace = next(steps, None)
        if replace is None:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", stops)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, "new")
    texts = held(tmp_path)
    marks = {texts.pop(name) for name in MARKS if name in texts}
    assert not marks or set(texts.values()) == marks == {"new"}


@pytest.fixture
def work() -> Callable[[], dict]:
    """A work that counts how often it was done."""
    times = itertools.count(1)
    return lambda: {"text": "ሰላም", "times": next(times), "score": -math.inf}


def test_a_result_is_made_once_for_each_key_and_again_when_its_files_are_gone(tmp_path, work):
    path = tmp_path / "deep" / "result.json"
    assert [cached_result(path, key, work)["times"] for key in "aabb"] == [1, 1, 2, 2]
    assert "ሰላም" in path.read_text(encoding="utf-8")
    assert cached_result(path, "b", work, lambda value: value["times"] == 2)["times"] == 2
    assert cached_result(path, "b", work, lambda value: value["times"] > 2)["times"] == 3


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"key": "a"}', b"\xff", b"[" * 99_999])
def test_a_damaged_file_is_reported_and_costs_the_work_alone(tmp_path, work, data):
    path = tmp_path / "result.json"
    path.write_bytes(data)
    with pytest.warns(UserWarning, match=r"result\.json is damaged .* made again"):
        cached_result(path, "a", work)
    assert cached_result(path, "a", None)["times"] == 1


def test_a_digest_changes_with_any_part_only():
    one = digest({"a": 1, "b": 2}, "ሰላም", 3)
    assert one == digest({"b": 2, "a": 1}, "ሰላም", 3) and len(one) == 12
    for others in (({"a": 1, "b": 3}, "ሰላም", 3), ({"a": 1, "b": 2}, "ሰላ", 3)):
        assert one != digest(*others)
