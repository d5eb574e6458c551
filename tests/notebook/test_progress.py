"""Progress of long work and of a training: share, pace, time left, not too many lines."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from kit.notebook.progress import Lines, Pace, Ticker, progress_texts, verdict


@pytest.fixture
def now(monkeypatch):
    """A clock that stands until it is moved."""
    clock = SimpleNamespace(s=100.0)
    monkeypatch.setattr("kit.notebook.progress.time.monotonic", lambda: clock.s)
    return clock


@pytest.mark.parametrize(
    "done, took_s, detail, line",
    [
        (250, 30, "", "spoken: 250 of 1,000   25 %   1:30 left"),
        (1000, 125, "loss 0.5", "spoken: 1,000 of 1,000   100 %   done in 2:05   loss 0.5"),
        (1000, 3725, "", "spoken: 1,000 of 1,000   100 %   done in 1:02:05"),
        (0, 60.0, "", "spoken: 0 of 1,000   0 %"),  # without progress nothing is estimated
        (100, 1.0, "", "spoken: 100 of 1,000   10 %"),
    ],
)
def test_a_line_has_share_and_time(done, took_s, detail, line):
    assert Ticker("spoken").line(done, 1000, took_s, detail) == line
    assert "0 of 0" in Ticker("rows").line(0, 0, took_s), "an empty data set"


def test_a_program_gets_a_line_every_five_seconds_and_the_last(now, capsys):
    tick = Ticker("spoken")
    for done in range(1, 101):
        now.s += 0.2  # twenty seconds in all
        tick(done, 100)
    lines = capsys.readouterr().out.splitlines()
    assert 3 <= len(lines) <= 6 and "100 of 100" in lines[-1] and "done in 0:20" in lines[-1]


def test_a_person_gets_one_line_rewritten_in_place(now, monkeypatch):
    display = Mock()
    monkeypatch.setattr("kit.notebook.progress.display", display)
    tick = Ticker("spoken")
    tick.plain = False
    for done in range(1, 11):
        now.s += 1
        tick(done, 10)
    update = display.return_value.update
    assert (display.call_count, update.call_count) == (1, 9)
    assert update.call_args.args[0]["text/plain"].startswith("spoken: 10 of 10")


def test_pace_counts_arrivals():
    pace = Pace()
    assert pace.speed() is None
    for second in range(11):
        pace.see(second * 0.5, 100)
    assert pace.speed() == pytest.approx((2.0, 200.0))
    assert pace.left_s({"step": 10, "steps": 30}) == pytest.approx(10.0)
    row = {"step": 1, "steps": 9, "loss": None, "lr": 2e-4, "memory_bytes": 2**30}
    texts = {"step": "1 / 9", "learning rate": "0.0002", "RAM of training, peak": "1.00 GiB"}
    assert progress_texts(row, Pace()) == texts


def test_progress_of_hours_is_a_few_short_lines(now, capsys):
    """The executed notebook keeps them, and 80 columns must be enough."""
    lines = Lines()
    figures = {"step": 0, "steps": 20_000, "loss": 1.234, "lr": 2e-4, "val_loss": 1.3}
    figures |= {"memory_bytes": 2**30, "load": 0.9, "ema_val_loss": 1.2}
    pace = Pace()
    lines.show({}, {}, [])
    assert not capsys.readouterr().out, "nothing before the first step"
    for step in range(1, 20_001):
        now.s += 0.5
        pace.see(now.s, 1000)
        row = figures | {"step": step}
        lines.show(row, progress_texts(row, pace), [])
    printed = capsys.readouterr().out.splitlines()
    assert 10 <= len(printed) <= 40 and max(map(len, printed)) <= 80


@pytest.mark.parametrize(
    "error, row, stopping, facts",
    [
        (ValueError("broken"), None, False, ("by an error", "broken")),
        (None, {"step": 9}, False, ("Finished", "step 9 of 9", "1:05")),
        (None, {}, True, ("checkpoint",)),
        (None, {"note": "no better"}, False, ("(no better)",)),
    ],
)
def test_the_verdict_says_how_a_training_ended(error, row, stopping, facts):
    row = row if row is None else {"step": 3, "steps": 9, "loss": 1.5} | row
    text = verdict(error, row, stopping, 65.0)[0]
    assert all(fact in text for fact in facts)
