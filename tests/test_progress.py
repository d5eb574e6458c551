"""A run in numbers and words: pace, times, plain lines."""

import pytest

from kit.progress import Lines, Pace, clock


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
