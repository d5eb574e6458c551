"""A run in numbers and words: pace, times, plain lines."""

import pytest

from kit.base.formatting import clock
from kit.notebook.progress import (
    Lines,
    Pace,
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
