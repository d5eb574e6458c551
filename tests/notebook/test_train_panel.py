"""The training panel as a user meets it, over a fake trainer: clicks, errors, reloads."""

import dataclasses
import json
import threading
import time
from unittest.mock import Mock

import pytest
from helpers import CPU, PATIENCE_S, until

from kit.notebook.panel.train_panel import TrainPanel
from kit.notebook.progress import Worker
from kit.training.settings import StepEvent
from kit.training.switches import Switch
from kit.tuning.monitor import Monitor
from kit.tuning.profiling import StepProfiler

SWITCHES = [
    Switch(name="sdpa", label="Fused attention", on=True, available=True, reason="math"),
    Switch(name="compile", label="torch.compile", on=True, available=False, reason="no compiler"),
]


def event(step: int, steps: int, **more) -> StepEvent:
    fixed = {"loss": 5 / step, "lr": 1e-3, "grad_norm": 1.0, "tokens": 100, "step_s": 0.01}
    fixed |= {"unix_s": 1e9 + step}
    return StepEvent(step=step, steps=steps, memory_bytes=2**30, **(fixed | more))


class Trainer:
    """A run of `steps` that goes on where it was stopped, logs as the real one, may break."""

    def __init__(self, path, steps=20, pause_s=0.0, breaks_at=None):
        self.path, self.steps, self.pause_s, self.breaks_at = path, steps, pause_s, breaks_at
        self.done, self.seen = 0, []

    def __call__(self, values, stop):
        self.seen.append(values)
        for step in range(self.done + 1, self.steps + 1):
            time.sleep(self.pause_s)
            if step == self.breaks_at:
                raise ValueError("The loss was not finite. Lower the learning rate.")
            self.done = step
            made = event(step, self.steps, note="half way" if step == self.steps // 2 else "")
            with self.path.open("a", encoding="utf-8") as log:
                log.write(json.dumps(dataclasses.asdict(made)) + "\n")
            yield made
            if stop.is_set():
                return


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log.jsonl"


def click(button):
    button.click()  # what the kernel calls when the browser's message arrives


# Without a front end.


def test_plain_run_joins_prints_and_draws(log, capsys):
    trainer = Trainer(log)
    panel = TrainPanel(SWITCHES, trainer, log, numbers={"grad_accum": 4})
    panel.run()
    out = capsys.readouterr().out
    assert trainer.done == 20 and not panel.worker.alive
    assert "step 10: half way" in out
    assert "Finished: step 20 of 20" in out
    assert trainer.seen == [{"sdpa": True, "compile": False, "grad_accum": 4}]
    panel.wait()


def test_plain_run_raises_what_the_trainer_raised(log, capsys):
    with pytest.raises(ValueError, match="not finite"):
        TrainPanel(SWITCHES, Trainer(log, breaks_at=5), log).run()
    said = capsys.readouterr().out
    assert "Stopped at step 4 of 20 by an error. The loss was not finite. Lower" in said


def test_interrupt_stops_with_a_checkpoint_and_a_second_one_leaves(log):
    panel = TrainPanel(SWITCHES, Trainer(log, steps=10_000, pause_s=0.01), log)
    panel._launch()
    calls = []

    def work():
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        panel.worker.wait()

    panel._graceful(work)
    assert panel.worker.stop.is_set() and len(calls) == 2
    with pytest.raises(KeyboardInterrupt):
        panel._graceful(lambda: (_ for _ in ()).throw(KeyboardInterrupt))


# With one.


def test_start_stop_continue_and_the_end(log):
    trainer = Trainer(log, steps=150, pause_s=0.01)
    panel = TrainPanel(SWITCHES, trainer, log)
    view = panel.view
    panel.run("live")
    assert trainer.done == 0, "it must wait for Start"
    assert not view.start.disabled and view.stop.disabled
    picture = view.image.value
    click(view.start)
    until(lambda: trainer.done >= 3)
    until(lambda: view.boxes["sdpa"].disabled and view.start.disabled)
    click(view.stop)
    click(view.stop)
    assert panel.ended.wait(PATIENCE_S)
    assert trainer.done < 150
    assert f"Stopped at step {trainer.done} of 150" in view.status.value
    assert view.start.description == "Continue" and not view.start.disabled
    assert not view.boxes["sdpa"].disabled, "the switches unlock"
    assert view.boxes["compile"].disabled, "an unavailable one never does"
    assert view.image.value != picture
    click(view.start)
    until(lambda: trainer.done == 150)
    panel.wait(PATIENCE_S)
    assert "Finished" in view.status.value and view.bar.value == 1.0
    assert "half way" in view.notes.value
    panel.retired.set()


def test_switches_of_the_start_are_what_the_run_gets(log):
    trainer = Trainer(log)
    panel = TrainPanel(SWITCHES, trainer, log)
    panel.view.boxes["sdpa"].value = False
    panel.view.boxes["compile"].value = True  # a front end's stale state must not turn it on
    panel.run("live")
    click(panel.view.start)
    panel.wait(PATIENCE_S)
    assert trainer.seen == [{"sdpa": False, "compile": False}]
    panel.retired.set()


def test_each_choice_asks_for_a_plan_and_what_does_not_go_together_is_said(log):
    def plan(values):
        if values["grad_accum"] == 3:
            raise ValueError("3 does not divide the effective batch.")
        return f"planned with {values}", values["sdpa"]

    view = TrainPanel(SWITCHES, None, log, numbers={"grad_accum": 4}, plan=plan).view
    said = view.plan.value
    assert "&#x27;grad_accum&#x27;: 4" in said and "&#x27;sdpa&#x27;: True" in said
    view.boxes["sdpa"].value = False
    assert "&#x27;sdpa&#x27;: False" in view.plan.value
    view.numbers["grad_accum"].value = 3
    assert "3 does not divide" in view.plan.value


def test_an_error_becomes_a_sentence_and_wait_raises_it(log):
    panel = TrainPanel(SWITCHES, Trainer(log, breaks_at=3), log)
    panel.run("live")
    click(panel.view.start)
    assert panel.ended.wait(PATIENCE_S)
    assert "Lower the learning rate." in panel.view.status.value
    assert "Traceback" not in panel.view.status.value
    assert not panel.view.start.disabled
    with pytest.raises(ValueError, match="not finite"):
        panel.wait()
    panel.retired.set()


def test_wait_gives_up_in_time_and_asks_for_run_first(log):
    panel = TrainPanel(SWITCHES, Trainer(log), log)
    with pytest.raises(RuntimeError, match=r"Call run\(\) first"):
        panel.wait()
    panel.run("live")
    with pytest.raises(TimeoutError, match="Was Start pressed"):
        panel.wait(0.1)
    panel.retired.set()


def test_an_unfinished_run_goes_on_without_a_click(log):
    trainer = Trainer(log)
    panel = TrainPanel(SWITCHES, trainer, log, resumable=True)
    panel.run("live")
    panel.wait(PATIENCE_S)
    assert trainer.done == 20
    panel.retired.set()


def test_a_reload_draws_the_past(log):
    blank = TrainPanel(SWITCHES, None, log).view.image.value
    for _ in Trainer(log)({}, threading.Event()):
        pass
    panel = TrainPanel(SWITCHES, None, log, resumable=True)
    assert panel.view.image.value != blank
    assert "20 / 20" in panel.view.tiles.value
    assert "goes on from there" in panel.view.status.value
    assert panel.view.start.description == "Continue"
    done = TrainPanel(SWITCHES, None, log).view
    assert "Finished, at step 20: asked for more steps" in done.status.value


def test_a_cell_run_again_takes_the_running_trainer_over(log):
    trainer = Trainer(log, steps=300, pause_s=0.01)
    older = TrainPanel(SWITCHES, trainer, log)
    older.run("live")
    click(older.view.start)
    until(lambda: trainer.done >= 2)
    newer = TrainPanel(SWITCHES, trainer, log, resumable=True)
    newer.run("live")
    assert newer.worker is older.worker and len(trainer.seen) == 1
    until(lambda: "newer panel" in older.view.status.value)
    click(newer.view.stop)
    assert newer.ended.wait(PATIENCE_S)
    time.sleep(0.1)
    assert len(trainer.seen) == 1, "one trainer writes one checkpoint"
    newer.retired.set()


def test_unavailable_switches_are_off_disabled_and_say_why(log):
    view = TrainPanel(SWITCHES, None, log).view
    box = view.boxes["compile"]
    assert box.disabled and box.value is False
    tip = box.tooltip if box.has_trait("tooltip") else box.description_tooltip
    assert tip == "no compiler"
    said = [w.value for cell in view.box.children[0].children for w in cell.children[1:]]
    assert any("not available: no compiler" in t and "title=" in t for t in said)


def test_the_profile_button_profiles_the_steps_of_a_run_and_says_so(log, tmp_path):
    trainer, profiler = Trainer(log, steps=90_000, pause_s=0.02), StepProfiler(tmp_path / "profile")
    panel = TrainPanel(SWITCHES, trainer, log, profiler=profiler)
    button = panel.view.profile
    assert button in panel.view.box.children[1].children and button.disabled
    panel.run("live")
    click(panel.view.start)
    until(lambda: trainer.done >= 2 and not button.disabled)
    click(button)
    until(lambda: profiler.result)  # torch takes seconds to make its first profile ready
    click(panel.view.stop)
    panel.wait(PATIENCE_S)
    assert button.disabled and trainer.done > 10
    assert "opens in ui.perfetto.dev" in panel.view.notes.value
    assert profiler.result["complete"] and list((tmp_path / "profile").glob("*.gz"))
    panel.retired.set()


def test_a_stop_in_the_middle_of_a_profile_closes_it(log, tmp_path):
    trainer, profiler = Trainer(log, steps=9000, pause_s=0.02), StepProfiler(tmp_path / "profile")
    panel = TrainPanel(SWITCHES, trainer, log, profiler=profiler)
    panel.run("live")
    click(panel.view.start)
    until(lambda: trainer.done >= 2)
    click(panel.view.profile)
    until(lambda: profiler.profile is not None)
    click(panel.view.stop)
    panel.wait(PATIENCE_S)
    assert profiler.profile is None and "incomplete" in panel.view.notes.value
    assert "Stopped at step" in panel.view.status.value
    panel.retired.set()


def test_without_a_profiler_there_is_no_button(log):
    panel = TrainPanel(SWITCHES, None, log)
    assert panel.view.profile not in panel.view.box.children[1].children


def test_the_status_line_has_the_monitors_sample_and_the_session(log):
    trainer, monitor = Trainer(log, steps=9000, pause_s=0.02), Monitor(CPU, every_s=0.05)
    panel = TrainPanel(SWITCHES, trainer, log, monitor=monitor, session_hours=1e-6)
    panel.run("live")
    click(panel.view.start)
    until(lambda: "CPU: " in panel.view.status.value)
    until(lambda: "0:00 left of a 1e-06 h session" in panel.view.status.value)
    newer = TrainPanel(SWITCHES, trainer, log, monitor=Monitor(CPU))
    newer.run("live")
    assert newer.monitor is monitor, "the one that samples the run taken over"
    click(newer.view.stop)
    newer.wait(PATIENCE_S)
    samples = monitor.samples
    assert samples >= 2 and monitor.thread is not None and not monitor.thread.is_alive()
    newer.retired.set()


# What goes wrong.


def interrupted_once(monkeypatch, times=1):
    """The kernel is interrupted in the cell's first `times` pauses, as `time.sleep` would be."""
    left, wait = [times], Worker.wait

    def broken_wait(worker, timeout_s=None):
        if left[0] and threading.current_thread().name == "MainThread":
            left[0] -= 1
            raise KeyboardInterrupt
        return wait(worker, timeout_s)

    monkeypatch.setattr(Worker, "wait", broken_wait)


@pytest.mark.parametrize("mode", ["plain", "cell"])
def test_an_interrupted_cell_ends_with_a_checkpoint_and_without_an_error(log, monkeypatch, mode):
    trainer = Trainer(log, steps=9000, pause_s=0.01)
    panel = TrainPanel(SWITCHES, trainer, log, resumable=True)
    interrupted_once(monkeypatch)
    panel.run(mode)
    assert panel.worker.stop.is_set() and not panel.worker.alive and panel.worker.error is None
    assert trainer.done < 9000
    if mode == "cell":
        assert "Stopped at step" in panel.view.status.value and panel.view.start.disabled


def test_the_second_interrupt_leaves_the_cell_and_its_buttons_dead(log, monkeypatch):
    panel = TrainPanel(SWITCHES, Trainer(log, steps=9000, pause_s=0.01), log, resumable=True)
    interrupted_once(monkeypatch, times=2)
    with pytest.raises(KeyboardInterrupt):
        panel.run("cell")
    assert panel.worker.stop.is_set() and panel.view.stop.disabled and panel.view.start.disabled
    panel.worker.wait()
    assert panel.worker.error is None


def test_an_interrupt_before_start_leaves_a_dead_panel_and_no_run(log, monkeypatch):
    panel = TrainPanel(SWITCHES, None, log)
    monkeypatch.setattr(
        "kit.notebook.panel.train_panel.time.sleep", Mock(side_effect=KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        panel.run("cell")
    assert panel.worker is None and panel.view.start.disabled


def test_an_interrupted_wait_stops_with_a_checkpoint(log, monkeypatch):
    trainer = Trainer(log, steps=9000, pause_s=0.01)
    panel = TrainPanel(SWITCHES, trainer, log, resumable=True)
    panel.run("live")
    until(lambda: trainer.done >= 2)
    poll, calls = panel.ended.wait, []

    def wait(timeout_s=None):
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return poll(timeout_s)

    monkeypatch.setattr(panel.ended, "wait", wait)
    panel.wait(PATIENCE_S)
    assert panel.worker.stop.is_set() and "Stopped at step" in panel.view.status.value
    panel.retired.set()


def test_an_error_before_the_first_step_is_told_and_start_works_again(log):
    trainer = Trainer(log, breaks_at=1)
    panel = TrainPanel(SWITCHES, trainer, log)
    panel.run("live")
    click(panel.view.start)
    assert panel.ended.wait(PATIENCE_S)
    assert "Stopped at the first step by an error." in panel.view.status.value
    trainer.breaks_at = None
    click(panel.view.start)
    until(lambda: trainer.done == 20)
    panel.wait(PATIENCE_S)
    panel.retired.set()


def test_a_broken_presenter_does_not_end_training_or_stay_silent(log):
    trainer = Trainer(log, pause_s=0.01)
    panel = TrainPanel(SWITCHES, trainer, log)
    panel.picture.png = lambda rows: 1 / 0
    panel.run("live")
    click(panel.view.start)
    until(lambda: panel.error is not None)
    assert "training goes on" in panel.view.status.value
    until(lambda: trainer.done == 20)
    with pytest.raises(ZeroDivisionError):
        panel.wait(PATIENCE_S)
