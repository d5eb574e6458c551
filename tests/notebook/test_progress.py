"""Progress in a line, and a run in numbers and words: neither silence nor a flood."""

import pytest

from kit.base.formatting import clock
from kit.notebook.progress import (
    Lines,
    Pace,
    Ticker,
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
    assert progress_texts(row, Pace()) == {"step": "1 / 9", "peak memory": "1.00 GiB"}


def test_the_time_to_go_is_held_against_the_session():
    assert outlook(None, 12) == ("", True) and outlook(60.0, None) == ("", True)
    said, enough = outlook(60.0, 12)
    assert (
        enough and said.startswith("1:00 to go, 11:") and said.endswith("left of a 12 h session.")
    )
    said, enough = outlook(11.99 * 3600 + session_age_s(), 12)
    assert not enough and "run the notebook again" in said


def test_how_a_training_ended_in_a_sentence():
    row = {"step": 3, "steps": 9, "loss": 1.5}
    assert verdict(ValueError("broken"), None, False, 1.0)[0].endswith("by an error. broken")
    assert verdict(None, row | {"step": 9}, False, 65.0)[0].startswith(
        "Finished: step 9 of 9 in 1:05"
    )
    assert "checkpoint" in verdict(None, row, True, 1.0)[0]
    assert verdict(None, row | {"note": "no better"}, False, 1.0)[0].endswith("(no better).")


@pytest.fixture
def moving_clock(monkeypatch):
    """A clock that stands until it is moved."""

    class Clock:
        now_s = 100.0

    monkeypatch.setattr("kit.notebook.progress.time.monotonic", lambda: Clock.now_s)
    return Clock


def test_a_line_has_share_and_time_left():
    line = Ticker("spoken").line(250, 1000, took_s=30)
    assert line == "spoken: 250 of 1,000   25 %   1:30 left"


def test_the_last_line_says_how_long_it_took():
    line = Ticker("spoken").line(1000, 1000, took_s=125, detail="loss 0.5")
    assert line == "spoken: 1,000 of 1,000   100 %   done in 2:05   loss 0.5"


def test_without_progress_no_remaining_time_is_estimated():
    for done, took_s in ((0, 60.0), (1, 1.0)):
        assert "left" not in Ticker("spoken").line(done, 10, took_s)


def test_a_program_gets_a_line_every_five_seconds_and_the_last(moving_clock, capsys):
    tick = Ticker("spoken")
    tick.plain = True
    for done in range(1, 101):
        moving_clock.now_s += 0.2  # twenty seconds in all
        tick(done, 100)
    lines = capsys.readouterr().out.splitlines()
    assert 3 <= len(lines) <= 6 and "100 of 100" in lines[-1] and "done in 0:20" in lines[-1]


def test_a_person_gets_one_line_rewritten_in_place(moving_clock, monkeypatch):
    shown = []

    class Handle:
        def update(self, data, raw):
            shown.append(data["text/plain"])

    def display(data, raw, display_id):
        shown.append(data["text/plain"])
        return Handle()

    monkeypatch.setattr("kit.notebook.progress.display", display)
    tick = Ticker("spoken")
    tick.plain = False
    for done in range(1, 11):
        moving_clock.now_s += 1
        tick(done, 10)
    assert len(shown) == 10 and shown[-1].startswith("spoken: 10 of 10")
