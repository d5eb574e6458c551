"""One process at a time, and no dead one keeps the others out: with real processes and kills."""

import dataclasses
import json
import multiprocessing
import os
import shutil
import threading
import time

import pytest
from helpers import until

from kit.base import lock as locks
from kit.base.errors import DiskError, KitError
from kit.base.lock import Holder, held, read_holder


def hold(path, seconds: float) -> None:
    with held(path, "training"):
        time.sleep(seconds)


def count_up(path, times: int) -> None:
    """Add one to the number in a file, `times` times: read, and written a moment later."""
    for _ in range(times):
        with held(path, "counting", wait_s=60):
            number = path.with_name("number")
            now = int(number.read_text())
            time.sleep(0.001)
            number.write_text(str(now + 1))


def start(target, *args):
    process = multiprocessing.get_context("fork").Process(target=target, args=args)
    process.start()
    return process


def wait_for(path) -> Holder:
    until(lambda: (read_holder(path) or Holder()).token, 20)
    return read_holder(path)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "train.lock"


def write(path, holder: Holder) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(dataclasses.asdict(holder)))


def take(path, wait_s: float = 0, say=print) -> None:
    with held(path, "training", wait_s, say):
        assert read_holder(path).pid == os.getpid()


def refused(path, message: str, wait_s: float = 0) -> None:
    with pytest.raises(KitError, match=message):
        take(path, wait_s)


def stranger(age_s: float, **over) -> Holder:
    """The holder of a lock on another machine, last renewed `age_s` seconds ago."""
    now = time.time()
    reported = {"machine": "elsewhere 0123", "pid": 7, "token": "abcd", "what": "training"}
    return Holder(**reported | over, since_s=now - 7200, beat_s=now - age_s)


def test_a_second_one_gets_the_name_of_the_holder(path):
    process = start(hold, path, 60)
    wait_for(path)
    refused(path, rf"process {process.pid} on \S+ has been at training since 20\d\d-.*Stop", 0.1)
    process.terminate()
    process.join()


def test_it_is_removed_after_an_error(path):
    with pytest.raises(RuntimeError), held(path, "training"):
        raise RuntimeError
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("buried", [True, False])
def test_a_killed_holder_keeps_nobody_out(path, buried):
    process = start(hold, path, 60)
    wait_for(path)
    process.kill()  # a zombie from here on, until its parent has waited for it
    if buried:
        process.join()
    assert path.is_file()
    take(path, 10)
    assert list(path.parent.iterdir()) == []
    process.join()


def test_a_waiting_one_gets_its_turn_and_says_that_it_waits(path):
    process, reported = start(hold, path, 0.5), []
    wait_for(path)
    take(path, 30, reported.append)
    process.join()
    (line,) = reported
    assert line.startswith("Waiting: ") and str(process.pid) in line


def test_of_many_that_want_a_dead_ones_lock_one_gets_it_at_a_time(path):
    write(path, stranger(0, machine=locks.machine(), pid=2**22 + 5))
    path.with_name("number").write_text("0")
    several = [start(count_up, path, 25) for _ in range(4)]
    for process in several:
        process.join()
    assert [process.exitcode for process in several] == [0] * 4
    assert path.with_name("number").read_text() == "100"
    assert [p.name for p in path.parent.iterdir()] == ["number"]


def test_another_machine_is_believed_until_its_signs_of_life_stop(path):
    write(path, stranger(locks.STALE_S - 60))
    refused(path, rf"process 7 on elsewhere .*run again in (59|60) s.*Or delete .*{path.name}")
    write(path, stranger(locks.STALE_S + 1))
    take(path)


def test_a_number_that_another_process_has_now_is_not_taken_for_the_holder(path):
    process = start(time.sleep, 60)  # began long after the lock was taken
    write(path, stranger(locks.STALE_S + 1, machine=locks.machine(), pid=process.pid))
    take(path)
    process.kill()
    process.join()


@pytest.mark.parametrize("text", ["", '{"pid": ', "[]", '{"pid": "x"}', "\0" * 50, "[" * 99_999])
def test_a_torn_file_keeps_nobody_out_for_long(path, text):
    path.parent.mkdir()
    path.write_text(text)
    refused(path, "just made")
    os.utime(path, (1, 1))
    take(path)


def test_a_claim_of_one_killed_while_taking_over_keeps_nobody_out(path):
    write(path, stranger(locks.STALE_S + 1))
    claim = path.with_name(f"{path.name}.abcd")
    claim.touch()
    refused(path, "")
    os.utime(claim, (1, 1))
    take(path, 5)
    assert list(path.parent.iterdir()) == []


def test_a_holder_shows_signs_of_life(path, monkeypatch):
    monkeypatch.setattr(locks, "BEAT_S", 0.02)
    with held(path, "training"):
        first = wait_for(path).beat_s
        until(lambda: read_holder(path).beat_s > first, 20)
    time.sleep(0.1)
    assert list(path.parent.iterdir()) == []


def test_one_that_slept_while_another_took_over_gets_an_error(path):
    with held(path, "training") as mine:
        mine.confirm()
        write(path, stranger(0))
        with pytest.raises(KitError, match="process 7 on elsewhere"):
            mine.confirm()
    assert read_holder(path).pid == 7  # what is another's is not removed


def test_a_lock_file_removed_by_hand_is_made_again_and_a_removed_folder_is_reported(path):
    with held(path, "training") as mine:
        path.unlink()
        mine.confirm()
        assert read_holder(path).token == mine.mine.token
        shutil.rmtree(path.parent)
        with pytest.raises(DiskError, match=r"run is gone, .* during training: put it back"):
            mine.confirm()
    assert not path.parent.exists()


def test_a_second_thread_is_refused_and_an_abandoned_loop_is_not(path):
    first = held(path, "training")
    first.__enter__()  # a generator that nobody will close
    take(path)
    thread = threading.Thread(target=hold, args=(path, 2))
    thread.start()
    wait_for(path)
    refused(path, "this very notebook")
    thread.join()


def test_where_nothing_can_be_written_the_fix_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match=r"could not write .*KIT_RUNS"):
        take(tmp_path / "file" / "train.lock")
