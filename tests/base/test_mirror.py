"""A run survives its machine: what is kept is complete, and never mixed with another run."""

import dataclasses
import errno
import fcntl
import multiprocessing
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from kit.base import lock, mirror
from kit.base.errors import KitError
from kit.base.files import remove_litter
from kit.base.mirror import Mirror, stamps


def write(folder: Path, **files: str) -> None:
    """Files by name (`__` stands for a slash), each older than the next."""
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        time.sleep(0.002)  # modification times that differ


def texts(folder: Path) -> dict[str, str]:
    return {name: (folder / name).read_text(encoding="utf-8") for name in sorted(stamps(folder))}


@pytest.fixture
def lines():
    return []


@pytest.fixture
def machine(tmp_path, lines):
    """Makes a machine: a Mirror of a folder of its own, all kept in one place."""
    kept = tmp_path / "drive" / "run"
    kept.parent.mkdir()
    return lambda name, **how: Mirror(tmp_path / name / "run", kept, say=lines.append, **how)


@pytest.fixture
def a(machine) -> Mirror:
    return machine("a")


@pytest.fixture
def b(machine) -> Mirror:
    return machine("b")


@pytest.fixture
def drive(monkeypatch):
    """The files that were copied, and the faults (or None) that the next copies meet halfway."""
    copyfile = shutil.copyfile
    drive = SimpleNamespace(faults=[], copied=[])

    def faulty(source, target):
        drive.copied.append(Path(source).name)
        fault = drive.faults.pop(0) if drive.faults else None
        if fault:
            Path(target).write_bytes(Path(source).read_bytes()[: Path(source).stat().st_size // 2])
            raise fault
        copyfile(source, target)

    monkeypatch.setattr(mirror.shutil, "copyfile", faulty)
    return drive


def fault(number: int, *more) -> OSError:
    return OSError(number, os.strerror(number), *more)


def test_a_fresh_machine_finds_everything(a, b):
    write(a.folder, preset="tiny", checkpoints__step="weights", samples__one="sound")
    a.copy()
    assert b.fetch() == len("tinyweightssound")
    assert texts(b.folder) == texts(a.folder)
    write(b.folder, preset="other")
    b.copy()
    assert a.fetch() and texts(a.folder) == texts(b.folder)


def test_nothing_is_copied_twice(a, b, drive):
    write(a.folder, one="1", two="2")
    a.copy()
    a.copy()
    assert drive.copied == ["one", "two"]
    assert b.fetch() and not b.fetch()
    b.copy()
    Mirror(a.folder, a.kept).copy()  # another process of that machine
    assert drive.copied == ["one", "two"] * 2, "there and back"
    write(a.folder, two="2 and more")
    a.copy()
    assert drive.copied == [*["one", "two"] * 2, "two"]


def test_what_serves_work_or_stands_apart_is_not_kept_and_only_what_is_wanted_comes(machine):
    a, b = machine("a", apart=("corpus",)), machine("b")
    write(a.folder, corpus__clip="", report="", checkpoints__step="")
    write(a.folder, **{".step.tmp": "", "train.lock": "", "export__.new__weights": ""})
    a.copy()
    assert set(stamps(a.kept)) == {"report", "checkpoints/step"}
    b.fetch(lambda name: not name.startswith("checkpoints/"))
    assert list(stamps(b.folder)) == ["report"]
    write(b.folder, more="")
    b.copy()  # what never was here was not removed here
    assert set(stamps(b.kept)) == {"report", "checkpoints/step", "more"}
    b.fetch()
    assert set(stamps(b.folder)) == {"report", "checkpoints/step", "more"}


def test_a_failing_drive_is_reported_once_and_tried_again(a, drive, lines):
    write(a.folder, weights="long enough", mark="done")
    drive.faults = [fault(errno.EIO), fault(errno.EIO)]
    assert not a.keep() and not a.keep()
    assert stamps(a.kept) == {}, "neither a half file nor a mark before what it marks"
    (line,) = lines
    assert "Input/output error" in line and "lost with it" in line
    assert a.keep()
    assert texts(a.kept) == texts(a.folder) == {"mark": "done", "weights": "long enough"}
    assert len(lines) == 2 and str(a.kept) in lines[1]
    assert not list(a.kept.glob(".weights*"))


@pytest.mark.parametrize("older", [1, 2])
def test_a_full_drive_keeps_the_last_checkpoint_and_says_what_helps(a, drive, lines, older):
    """One that is replaced makes room before the next is copied, if another is kept."""
    write(a.folder, **{f"checkpoints__{n}.safetensors": str(n) for n in range(1, older + 1)})
    a.copy()
    write(a.folder, **{"checkpoints__new.safetensors": "new"})
    (a.folder / "checkpoints/1.safetensors").unlink()
    drive.faults = [fault(errno.ENOSPC)]
    assert not a.keep()
    assert "No space left on device" in lines[0] and "empty its bin" in lines[0]
    assert texts(a.kept) == {f"checkpoints/{older}.safetensors": str(older)}
    assert a.keep() and texts(a.kept) == texts(a.folder)


def test_a_deleted_folder_takes_nothing_with_it(a):
    write(a.folder, preset="tiny")
    a.copy()
    shutil.rmtree(a.folder)
    assert a.keep()
    assert texts(a.kept) == {"preset": "tiny"}
    assert a.fetch() and texts(a.folder) == {"preset": "tiny"}
    shutil.rmtree(a.kept)  # ... on either side
    assert a.keep()
    assert texts(a.kept) == {"preset": "tiny"}


def test_an_unreadable_drive_is_not_an_empty_one(a, b, drive, monkeypatch):
    write(a.folder, preset="tiny")
    a.copy()

    def broken(path):
        raise fault(errno.EIO, str(path))

    with monkeypatch.context() as patch:
        patch.setattr(mirror.os, "scandir", broken)
        with pytest.raises(OSError, match="Input/output error"):
            b.fetch()
    drive.faults = [fault(errno.EIO)] * mirror.FETCH_TRIES
    monkeypatch.setattr(mirror.time, "sleep", lambda _: None)
    with pytest.raises(OSError, match="Input/output error"):
        b.fetch()
    assert stamps(b.folder) == {}


def test_fetching_tries_again_and_resumes_where_it_stopped(a, b, drive, monkeypatch):
    write(a.folder, one="1", two="2", three="3", four="4")
    a.copy()
    drive.copied.clear()
    drive.faults = [None, fault(errno.EIO), None, None, KeyboardInterrupt()]
    monkeypatch.setattr(mirror.time, "sleep", lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        b.fetch()
    assert drive.copied == ["one", "two", "two", "three", "four"]
    assert b.fetch() == 1 and texts(b.folder) == texts(a.folder)


def copy_slowly(machine: Mirror, started) -> None:
    def slow(source, target):
        with open(source, "rb") as read, open(target, "wb") as written:
            written.write(read.read(1000))
            written.flush()
            started.set()
            time.sleep(60)

    mirror.shutil.copyfile = slow
    machine.copy()


def test_a_machine_killed_in_the_middle_of_a_copy(a, b):
    write(a.folder, weights="old")
    a.copy()
    write(a.folder, weights="new" * 2000)
    fork = multiprocessing.get_context("fork")
    started = fork.Event()
    process = fork.Process(target=copy_slowly, args=(a, started))
    process.start()
    assert started.wait(60)
    process.kill()
    process.join()
    b.fetch()
    assert texts(a.kept) == texts(b.folder) == {"weights": "old"}
    assert list(a.kept.glob(".weights.*"))
    remove_litter(a.kept, 0.0)
    a.copy()  # the same machine again
    assert texts(a.kept) == texts(a.folder) and not list(a.kept.glob(".weights.*"))


def test_of_a_file_that_two_machines_wrote_the_later_copy_stays(a, b):
    write(a.folder, report="1", mark="1")
    a.copy()
    b.fetch()
    write(a.folder, report="of a")
    a.copy()
    write(b.folder, report="of b, later")
    b.copy()
    assert a.fetch() and texts(a.folder) == texts(b.folder) == texts(a.kept)
    write(b.folder, report="of b, even later")
    b.copy()
    write(a.folder, report="of a, not copied yet")
    assert not a.fetch() and texts(a.folder)["report"] == "of a, not copied yet"


def test_two_runs_of_one_name_are_never_mixed(a, b, lines):
    write(a.folder, preset="tiny", codec="one")
    a.copy()
    write(b.folder, preset="t4")
    with pytest.raises(KitError, match=r"two different runs of one name.*another RUN"):
        b.fetch()
    assert not b.keep() and "two different runs" in lines[0]
    assert texts(a.kept) == {"preset": "tiny", "codec": "one"}
    assert texts(b.folder) == {"preset": "t4"}


def test_a_copy_without_its_hidden_files_is_a_run_like_any_other(a, b):
    write(a.kept, preset="tiny")
    a.fetch()
    write(a.folder, codec="one")
    a.copy()
    assert b.fetch() and texts(b.folder) == texts(a.kept) == {"codec": "one", "preset": "tiny"}


def test_what_is_removed_while_it_is_copied_is_removed_there_too(a, monkeypatch):
    write(a.folder, older="1", newer="2")

    def copy_and_remove(source, target, copyfile=shutil.copyfile):
        copyfile(source, target)
        (a.folder / "older").unlink(missing_ok=True)

    monkeypatch.setattr(mirror.shutil, "copyfile", copy_and_remove)
    assert a.keep() and a.keep()
    assert texts(a.kept) == {"newer": "2"}


def test_a_folder_of_several_runs_is_filled_by_all(machine):
    for name in "ab":
        several = machine(name, one_run=False)
        write(several.folder, **{name: ""})
        several.copy()
    assert set(stamps(several.kept)) == {"a", "b"}
    assert several.fetch(lambda name: False) == 0 and list(stamps(several.folder)) == ["b"]


def test_one_machine_at_a_time_trains(a, b, monkeypatch, lines):
    a.kept.mkdir()
    monkeypatch.setattr(mirror, "SHARED_WAIT_S", 0.5)
    monkeypatch.setattr(lock, "SHARED_PAUSE_S", 0.02)
    with a.hold_shared_lock("training"):
        monkeypatch.setattr(lock, "machine", lambda: "another one")
        with pytest.raises(KitError, match="has been at training"), b.hold_shared_lock("training"):
            pass
        assert "Waiting" in lines[0]
    with b.hold_shared_lock("training"):
        pass


def test_who_was_taken_over_keeps_nothing_any_more(a, lines):
    write(a.folder, weights="")
    a.copy()
    with a.hold_shared_lock("training"):
        write(a.folder, weights="of the machine that slept")
        mine = lock.read_holder(a.kept / "training.lock")
        taken_over = dataclasses.replace(mine, token="another")
        (a.kept / "training.lock").write_bytes(taken_over.to_json())
        assert not a.keep()
    assert "has been at training" in lines[0]
    assert texts(a.kept) == {"weights": ""}
    assert (a.kept / "training.lock").exists(), "it is the other one's"


def test_who_finds_another_process_copying_leaves_it_to_that(a, lines):
    write(a.folder, weights="")
    with open(a.folder / ".mirror.lock", "w") as others:
        fcntl.flock(others, fcntl.LOCK_EX)
        assert not a.keep() and lines == [] and stamps(a.kept) == {}
    assert a.keep() and texts(a.kept) == {"weights": ""}


def test_a_drive_that_takes_no_lock_stops_nobody(a, lines):
    a.kept.write_text("a file in the way")
    with a.hold_shared_lock("training"):
        assert "cannot be seen" in lines[0]
