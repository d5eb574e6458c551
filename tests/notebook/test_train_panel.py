"""The training panel as a user meets it, over a pretended process: clicks, errors, reloads."""

import json
import threading
import time
from unittest.mock import Mock

import pytest
from helpers import PATIENCE_S, until

from kit.base.errors import DiskError, KitError
from kit.notebook.train_panel import TrainPanel
from kit.notebook.widgets import Field
from kit.training.process import PROFILE, STOP
from kit.training.switches import Switch

SWITCHES = [
    Switch(name="sdpa", label="Fused attention", on=True, available=True, reason="math"),
    Switch(name="compile", label="torch.compile", on=True, available=False, reason="no compiler"),
]
FIELDS = [
    Field(name="lr", label="Learning rate", value=0.01, comment="the peak"),
    Field(name="warmup_steps", label="Warm-up", value=4, comment="steps", more=True),
]


class Process:
    """A training process of `steps` that continues where it was stopped, and may fail."""

    def __init__(self, log, steps=20, pause_s=0.0, fails_at=None):
        self.log, self.steps, self.pause_s, self.fails_at = log, steps, pause_s, fails_at
        self.done, self.started_with, self.requests = 0, [], []
        self.rows, self.thread, self.failure = [], None, None
        self.request = self.requests.append

    def start(self, values):
        self.started_with.append(values)
        self.requests.clear()
        self.failure = None
        self.thread = threading.Thread(target=self.train, daemon=True)
        self.thread.start()

    def train(self):
        for step in range(self.done + 1, self.steps + 1):
            time.sleep(self.pause_s)
            if step == self.fails_at:
                self.failure = KitError("The loss was not finite. Lower the learning rate.")
                return
            self.done = step
            row = {"step": step, "steps": self.steps, "loss": 5 / step, "lr": 1e-3}
            row |= {"tokens": 100, "unix_s": 1e9 + step, "memory_bytes": 2**30, "val_loss": None}
            row["note"] = "half way" if step == self.steps // 2 else ""
            with self.log.open("a", encoding="utf-8") as log:
                log.write(json.dumps(row) + "\n")
            self.rows.append(row)
            if STOP in self.requests:
                return

    @property
    def running(self):
        return self.thread is not None and self.thread.is_alive()

    def new_rows(self):
        rows, self.rows = self.rows, []
        return rows

    def error(self):
        return self.failure


def panel_of(process, **options) -> TrainPanel:
    return TrainPanel(process, process.start, SWITCHES, **{"countdown_s": None, **options})


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log.jsonl"


@pytest.fixture
def show(monkeypatch, log):
    """Shows a panel to a person; it is closed afterwards."""
    monkeypatch.setattr("kit.notebook.train_panel.is_watched", lambda: True)
    panels = []

    def show(process=None, **options) -> TrainPanel:
        panels.append(panel_of(process or Process(log), **options))
        panels[-1].run()
        return panels[-1]

    yield show
    for panel in panels:
        panel.retired.set()


# Without a front end.


def test_a_plain_run_starts_waits_prints_and_draws(log, capsys):
    process = Process(log)
    panel = panel_of(process, fields=FIELDS)
    panel.run()
    out = capsys.readouterr().out
    assert process.done == 20 and not process.running
    assert "step 10: half way" in out and "Finished: step 20 of 20" in out
    assert process.started_with == [{"sdpa": True, "compile": False, "lr": 0.01, "warmup_steps": 4}]
    panel.wait()


def test_a_training_that_learnt_nothing_is_no_success(log, capsys):
    panel = panel_of(Process(log), failure=lambda rows: f"After {len(rows)} steps: nothing.")
    panel.run()
    assert "Finished: step 20 of 20" in capsys.readouterr().out
    assert "After 20 steps: nothing." in panel.view.status.value
    assert panel.view.bar.bar_style == "danger"


def test_a_plain_run_raises_why_the_training_failed_and_a_finished_one_is_not_started(log, capsys):
    with pytest.raises(KitError, match="not finite"):
        panel_of(Process(log, fails_at=5)).run()
    assert "Stopped at step 4 of 20 by an error." in capsys.readouterr().out
    done = Process(log)
    panel_of(done, finished=True).run()
    assert "Finished, at step 4." in capsys.readouterr().out and not done.started_with


# With one.


def test_stop_cannot_be_pressed_before_there_is_a_training_to_stop(show, log):
    """Starting takes seconds, and what was requested before it is forgotten."""
    process, checked = Process(log, steps=1000, pause_s=0.01), threading.Event()
    start = process.start
    process.start = lambda values: checked.wait(PATIENCE_S) and start(values)
    view = show(process).view
    view.start.click()
    until(lambda: "Starting" in view.status.value)
    assert view.stop.disabled and view.start.disabled
    checked.set()
    until(lambda: not view.stop.disabled)
    view.stop.click()
    until(lambda: not process.running)


def test_start_stop_continue_and_the_end(show, log):
    process = Process(log, steps=100, pause_s=0.01)
    panel = show(process)
    view = panel.view
    view.boxes["compile"].value = True  # a front end's stale state must not turn it on
    assert process.done == 0, "it must wait for Start"
    assert not view.start.disabled and view.stop.disabled
    view.start.click()
    until(lambda: process.done >= 3)
    until(lambda: view.boxes["sdpa"].disabled and view.start.disabled)
    view.stop.click()
    view.stop.click()
    assert panel.ended.wait(PATIENCE_S) and process.done < 100
    assert process.started_with == [{"sdpa": True, "compile": False}]
    assert f"Stopped at step {process.done} of 100" in view.status.value
    assert not view.start.disabled and not view.boxes["sdpa"].disabled, "settings unlock"
    assert view.boxes["compile"].disabled, "an unavailable one never does"
    view.start.click()
    until(lambda: process.done == 100 and "Finished" in view.status.value)
    panel.wait(PATIENCE_S)
    assert view.bar.value == 1.0 and "half way" in view.notes.value


@pytest.mark.parametrize("options", [{"countdown_s": 0.2}, {"resumable": True}])
def test_it_starts_after_a_countdown_and_an_unfinished_run_at_once(show, log, options):
    process = Process(log)
    show(process, **options).wait(PATIENCE_S)
    assert process.done == 20


def test_each_change_shows_the_plan_and_what_does_not_go_together(log):
    def plan(values):
        if values["warmup_steps"] > 10:
            raise KitError("It must be below 10.", field="warmup_steps")
        if values["lr"] > 1:
            raise KitError("Too fast.")
        return f"planned with {values}", values["sdpa"]

    view = panel_of(Process(log), fields=FIELDS, plan=plan).view
    assert "&#x27;lr&#x27;: 0.01" in view.plan.value
    view.boxes["sdpa"].value = False
    assert "&#x27;sdpa&#x27;: False" in view.plan.value
    lr, warmup = view.fields["lr"], view.fields["warmup_steps"]
    lr.text.value = "2"
    assert "Too fast." in view.plan.value and view.start.disabled
    lr.reset.click()
    assert lr.value == 0.01 and lr.reset.disabled and not view.start.disabled
    lr.text.value = "fast"
    assert "&#x27;fast&#x27;" in lr.problem.value and view.start.disabled
    lr.text.value = "1e-4"
    assert lr.value == 1e-4 and not lr.problem.value and not view.start.disabled
    warmup.text.value = "11"
    assert "below 10" in warmup.problem.value and view.start.disabled


def test_an_error_of_training_or_of_settings_becomes_a_sentence(show, log):
    process = Process(log, fails_at=1)
    panel = show(process)
    panel.view.start.click()
    assert panel.ended.wait(PATIENCE_S) and not panel.view.start.disabled
    assert "Stopped at the first step by an error." in panel.view.status.value
    with pytest.raises(KitError, match="not finite"):
        panel.wait()
    process.fails_at = None
    panel.view.start.click()
    until(lambda: "Finished" in panel.view.status.value)
    for error in (KitError("sdpa on. It does not fit."), DiskError("Free some disk space.")):
        panel.start = Mock(side_effect=error)
        panel.view.start.click()
        until(lambda error=error: str(error) in panel.view.status.value)
        assert panel.ended.wait(PATIENCE_S) and not panel.view.start.disabled


def test_a_reload_draws_the_past(log):
    blank = panel_of(Process(log)).view.image.value
    Process(log).train()
    panel = panel_of(Process(log), resumable=True)
    assert panel.view.image.value != blank and "20 / 20" in panel.view.tiles.value
    assert "resumes" in panel.view.status.value
    assert "Finished, at step 20" in panel_of(Process(log), finished=True).view.status.value


def test_a_cell_run_again_follows_the_running_training(show, log):
    process = Process(log, steps=300, pause_s=0.01)
    older = show(process)
    older.view.start.click()
    until(lambda: process.done >= 2)
    newer = show(resumable=True)
    assert newer.process is process
    until(lambda: "newer panel" in older.view.status.value)
    newer.view.stop.click()
    assert newer.ended.wait(PATIENCE_S) and len(process.started_with) == 1


def test_while_it_trains_a_profile_can_be_requested_and_the_time_left_is_shown(show, log):
    process, texts = Process(log, steps=9000, pause_s=0.02), []
    panel = show(process, profile=lambda: "".join(texts))
    button = panel.view.profile
    assert button.disabled
    panel.view.start.click()
    until(lambda: process.done >= 2 and not button.disabled)
    button.click()
    assert process.requests == [PROFILE]
    texts.append("Profile of steps 5 to 10")
    until(lambda: "Profile of steps" in panel.view.notes.value)
    until(lambda: " to go." in panel.view.status.value)
    panel.view.stop.click()
    panel.wait(PATIENCE_S)
    assert button.disabled


def test_a_broken_panel_does_not_end_training_or_stay_silent(show, log, monkeypatch):
    process = Process(log, pause_s=0.01)
    panel = show(process)
    monkeypatch.setattr("kit.notebook.train_panel.run_curves", lambda *_, **__: 1 / 0)
    panel.view.start.click()
    until(lambda: panel.error is not None)
    assert "training continues" in panel.view.status.value
    until(lambda: process.done == 20)
    with pytest.raises(ZeroDivisionError):
        panel.wait(PATIENCE_S)


def test_an_interrupt_requests_a_stop_and_a_second_one_leaves(log):
    process = Process(log, steps=10_000, pause_s=0.01)
    panel = panel_of(process)
    process.start({})
    work = Mock(side_effect=[KeyboardInterrupt, None])
    panel._interruptible(work)
    assert process.requests == [STOP] and work.call_count == 2
    with pytest.raises(KeyboardInterrupt):
        panel._interruptible(Mock(side_effect=KeyboardInterrupt))
    process.thread.join(PATIENCE_S)


TOUCHES = {
    "Stop": lambda view: view.stop.click(),
    "a switch": lambda view: setattr(view.boxes["sdpa"], "value", False),
    "a field": lambda view: setattr(view.fields["lr"].text, "value", "0.1"),
}


@pytest.mark.parametrize("touched", TOUCHES)
def test_any_click_stops_the_countdown(show, log, touched):
    held = Process(log)
    panel = show(held, fields=FIELDS, countdown_s=1.0)
    until(lambda: "Training starts in" in panel.view.status.value)
    assert (panel.view.start.description, panel.view.stop.description) == ("Start", "Stop")
    assert not panel.view.start.disabled and not panel.view.stop.disabled
    TOUCHES[touched](panel.view)
    with pytest.raises(TimeoutError):
        panel.wait(1.5)
    assert not held.started_with
