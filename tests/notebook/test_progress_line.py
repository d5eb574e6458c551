"""Progress in one line: share, time left, and neither silence nor a flood."""

import pytest

from kit.notebook.progress import Ticker


@pytest.fixture
def clock(monkeypatch):
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


def test_a_program_gets_a_line_every_five_seconds_and_the_last(clock, capsys):
    tick = Ticker("spoken")
    tick.plain = True
    for done in range(1, 101):
        clock.now_s += 0.2  # twenty seconds in all
        tick(done, 100)
    lines = capsys.readouterr().out.splitlines()
    assert 3 <= len(lines) <= 6 and "100 of 100" in lines[-1] and "done in 0:20" in lines[-1]


def test_a_person_gets_one_line_rewritten_in_place(clock, monkeypatch):
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
        clock.now_s += 1
        tick(done, 10)
    assert len(shown) == 10 and shown[-1].startswith("spoken: 10 of 10")
