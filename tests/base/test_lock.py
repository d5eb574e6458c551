"""One process at a time, one machine at a time, and no dead one keeps the others out."""

import multiprocessing
import os
import threading
import time

import pytest
from helpers import until

from kit.base import lock as locks
from kit.base.errors import DiskError, InUse
from kit.base.lock import Holder, SharedLock, current_holder, held, read_holder


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "train.lock"


def take(path, wait_s: float = 0, say=print) -> None:
    with held(path, "training", wait_s, say):
        assert current_holder(path).pid == os.getpid()


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


def test_a_second_one_gets_the_name_of_the_holder(path):
    process = start(hold, path, 60)
    until(lambda: current_holder(path), 20)
    with pytest.raises(InUse, match=rf"process {process.pid} on \S+ .* training since 20.*Stop"):
        take(path, 0.1)
    process.terminate()
    process.join()


def test_it_is_free_after_an_error_and_damage_does_not_matter(path):
    with pytest.raises(RuntimeError), held(path, "training"):
        raise RuntimeError
    assert current_holder(path) is None
    path.write_text('{"pid": ')
    take(path)


@pytest.mark.parametrize("buried", [True, False])
def test_a_killed_holder_keeps_nobody_out(path, buried):
    process = start(hold, path, 60)
    until(lambda: current_holder(path), 20)
    process.kill()  # a zombie from here on, until its parent has waited for it
    if buried:
        process.join()
    take(path, 10)
    assert current_holder(path) is None
    process.join()


def test_a_waiting_one_gets_its_turn_and_says_that_it_waits(path):
    process, reported = start(hold, path, 0.5), []
    until(lambda: current_holder(path), 20)
    take(path, 30, reported.append)
    process.join()
    (line,) = reported
    assert line.startswith("Waiting: ") and str(process.pid) in line


def test_of_many_one_gets_it_at_a_time(path):
    path.parent.mkdir()
    path.with_name("number").write_text("0")
    with multiprocessing.get_context("fork").Pool(4, maxtasksperchild=1) as pool:
        pool.starmap(count_up, [(path, 10)] * 4)
    assert path.with_name("number").read_text() == "40"


def test_a_second_thread_is_refused_and_an_abandoned_loop_is_not(path):
    first = held(path, "training")
    first.__enter__()  # a generator that nobody will close
    take(path)
    thread = threading.Thread(target=hold, args=(path, 0.5))
    thread.start()
    until(lambda: current_holder(path), 20)
    with pytest.raises(InUse, match=f"process {os.getpid()} "):
        take(path)
    thread.join()


def test_where_nothing_can_be_written_the_fix_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match=r"could not write .*KIT_RUNS"):
        take(tmp_path / "file" / "train.lock")


@pytest.fixture
def shared(path, monkeypatch):
    monkeypatch.setattr(locks, "SHARED_PAUSE_S", 0.02)
    path.parent.mkdir()
    lock = SharedLock(path, "training")
    yield lock
    lock.release()


def stranger(age_s: float, **over) -> Holder:
    """The holder of a lock on another machine, last renewed `age_s` seconds ago."""
    now_s = time.time()
    reported = {"machine": "elsewhere 0123", "pid": os.getpid(), "token": "abcd"} | over
    return Holder(what="training", since_s=now_s - 7200, beat_s=now_s - age_s, **reported)


def is_taken(lock: SharedLock, wait_s: float = 0.0) -> bool:
    try:
        lock.acquire(wait_s, print)
    except InUse:
        return False
    return read_holder(lock.path).token == lock.mine.token


def test_another_machine_is_believed_until_its_renewals_stop(shared, path):
    path.write_bytes(stranger(locks.STALE_S - 60).to_json())
    with pytest.raises(InUse, match=rf"on elsewhere .*5 minutes.*Or delete .*{path.name}"):
        shared.acquire(0.0, print)
    path.write_bytes(stranger(locks.STALE_S + 1).to_json())
    assert is_taken(shared)


def test_a_clock_that_is_ahead_is_a_sign_of_neither_life_nor_death(shared, path, monkeypatch):
    monkeypatch.setattr(locks, "STALE_S", 0.5)
    over = threading.Event()

    def renew():
        while not over.wait(0.05):
            locks.write_atomic(path, stranger(-7200).to_json())

    locks.write_atomic(path, stranger(-7200).to_json())
    thread = threading.Thread(target=renew)
    thread.start()
    assert not is_taken(shared, 1.5)
    over.set()
    thread.join()
    assert is_taken(shared, 5.0)


HERE = {"machine": locks.machine()}
STRANGERS = [(HERE | {"pid": 2**22 + 5}, True)]  # was killed
STRANGERS += [(HERE | {"pid": 1}, False)]
STRANGERS += [(HERE, True)]  # a loop that was abandoned in this process
STRANGERS += [({}, False)]  # another machine's process with the number of this one


@pytest.mark.parametrize(("over", "taken"), STRANGERS)
def test_a_process_of_this_machine_is_believed_as_long_as_it_lives(shared, path, over, taken):
    path.write_bytes(stranger(0, **over).to_json())
    assert is_taken(shared) == taken


@pytest.mark.parametrize("text", ["", '{"pid": ', "[]", '{"pid": "x"}', "\0" * 50, "[" * 99_999])
def test_a_damaged_file_keeps_nobody_out(shared, path, text):
    path.write_text(text)
    assert is_taken(shared)


def test_of_two_that_take_it_at_once_one_gets_it(shared, path, monkeypatch):
    monkeypatch.setattr(locks.time, "sleep", lambda _: path.write_bytes(stranger(0).to_json()))
    assert not is_taken(shared)


def test_a_holder_renews_it(shared, path, monkeypatch):
    monkeypatch.setattr(locks, "BEAT_S", 0.02)
    shared.acquire(0.0, print)
    first_s = read_holder(path).beat_s
    until(lambda: read_holder(path).beat_s > first_s, 20)
    path.unlink()  # by hand
    until(path.exists, 20)
    shared.release()
    assert list(path.parent.iterdir()) == []
