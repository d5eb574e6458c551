"""A run in numbers and words: pace, times, plain lines."""

import contextlib
import signal
import threading
import time

import pytest

from kit.base.words import clock
from kit.notebook.progress import (
    Lines,
    Pace,
    Worker,
    outlook,
    progress_texts,
    session_age_s,
    verdict,
)


def test_times_are_written_as_a_clock():
    assert [clock(s) for s in (5, 125, 3725)] == ["0:05", "2:05", "1:02:05"]


def test_pace_counts_arrivals():
    pace = Pace()
    assert pace.speed() is None
    for second in range(11):
        pace.see(second * 0.5, 100)
    assert pace.speed() == pytest.approx((2.0, 200.0))
    assert pace.left_s({"step": 10, "steps": 30}) == pytest.approx(10.0)


def test_plain_lines_are_few(capsys):
    lines, row = Lines(), {"step": 1, "steps": 1000}
    for step in range(1, 1001):
        lines.show(row | {"step": step}, {"step": str(step)}, [])
    assert capsys.readouterr().out.count("\n") == 1  # all within 2 s


def test_a_row_without_a_finite_loss_has_its_other_figures():
    row = {"step": 1, "steps": 9, "loss": None, "memory_bytes": 2**30}
    assert progress_texts(row, Pace()) == {"step": "1 / 9", "memory": "1.00 GiB"}


def test_the_time_to_go_is_held_against_the_session():
    assert outlook(None, 12) == ("", True) and outlook(60.0, None) == ("", True)
    said, enough = outlook(60.0, 12)
    assert (
        enough and said.startswith("1:00 to go, 11:") and said.endswith("left of a 12 h session.")
    )
    said, enough = outlook(11.99 * 3600 + session_age_s(), 12)
    assert not enough and "run the notebook again" in said


def test_a_worker_works_inside_what_it_is_given_and_leaves_it_after_an_error():
    seen = []

    @contextlib.contextmanager
    def around():
        seen.append(threading.current_thread().name)
        yield
        seen.append("never reached after an error")

    def make_run(values, stop):
        yield "first"
        raise ValueError("broken")

    @contextlib.contextmanager
    def closing():
        try:
            yield
        finally:
            seen.append("closed")

    worker = Worker(make_run, {}, (around(), closing()), (seen.append,))
    worker.thread.join()
    assert seen == ["trainer", "first", "closed"] and str(worker.error) == "broken"
    assert verdict(worker, None)[0] == "Stopped at the first step by an error. broken"


def test_ctrl_c_while_waiting_does_not_take_a_run_for_ended():
    """The run is stopped by its event and may take its time: its last checkpoint is at stake."""
    saved = []

    def make_run(values, stop):
        yield "first"
        stop.wait()
        time.sleep(0.3)  # the checkpoint
        saved.append("whole")

    def interrupt(*_):
        raise KeyboardInterrupt

    worker, before = Worker(make_run, {}), signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            worker.wait(5.0)
    finally:
        signal.signal(signal.SIGALRM, before)
    worker.stop.set()
    assert worker.alive and not saved
    worker.wait()
    assert not worker.alive and saved == ["whole"]
