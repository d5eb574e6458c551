"""Each fault of a training is named alone, with its fix; a healthy training has none."""

import dataclasses
import inspect
import itertools
import re
import time

import pytest
from helpers import CPU, TRAIN, random_batches, tiny_model

from kit.settings import SpeedConfig
from kit.training.config import PHASES
from kit.training.loop import train
from kit.training.trainer import StepClock, Trainer
from kit.tuning.doctor import diagnose, health_line, step_shares, training_checks

GPU = dataclasses.replace(CPU, device="cuda", memory_bytes=10**10)
STEP = {"step_s": 1.0, "wall_s": 1.1, "eval_s": 0.0, "tokens": 1000, "sync_s": 0.5}
STEP |= {"data_s": 0.02, "copy_s": 0.01, "forward_s": 0.3, "backward_s": 0.6, "reduce_s": 0.0}
STEP |= {"update_s": 0.07, "memory_bytes": 6 * 10**9, "reserved_bytes": 7 * 10**9}


def log(steps: int = 150, **changes) -> list[dict]:
    """A log whose first step was slow; `changes` apply to its newer half."""
    rows = [STEP | {"wall_s": None, "step_s": 30.0}] + [dict(STEP) for _ in range(steps - 1)]
    for row in rows[steps // 2 :]:
        row.update(changes)
    return rows


# What provokes it, what must not yet, and the setting that the sentence names.
CASES = {
    "data": ({"data_s": 0.3}, {"data_s": 0.09}, "workers"),
    "launch": ({"sync_s": 0.001}, {"sync_s": 0.04}, "CUDA graphs"),
    "copy": ({"copy_s": 0.1}, {"copy_s": 0.04}, "Pinned memory"),
    "reduce": ({"reduce_s": 0.4}, {"reduce_s": 0.19}, "effective_batch"),
    "disk": ({"wall_s": 1.5}, {"wall_s": 1.15}, "save_steps"),
    "evaluation": ({"wall_s": 2.0, "eval_s": 0.95}, {"wall_s": 1.5, "eval_s": 0.5}, "gate_every"),
    "fragmentation": ({"reserved_bytes": 9e9}, {"reserved_bytes": 7.9e9}, "length_multiple"),
}


@pytest.mark.parametrize("cause", CASES)
def test_each_cause_is_named_with_its_setting_and_no_other(cause):
    provoking, harmless, setting = CASES[cause]
    found = diagnose(log(400, **provoking), GPU)
    assert list(found) == [cause] and setting in found[cause]
    assert diagnose(log(400, **harmless), GPU) == {}


def test_no_cause_is_without_a_case():
    source = inspect.getsource(diagnose)
    assert set(re.findall(r'causes\.append\(\(.+?, "(\w+)", ', source)) == CASES.keys()


def test_a_healthy_training_has_no_diagnosis():
    assert diagnose(log(), GPU) == {}
    assert diagnose(log(12, data_s=0.9), GPU) == {}, "too few steps to judge"
    older = [{k: v for k, v in row.items() if k not in ("forward_s", "data_s")} for row in log()]
    assert diagnose(older, GPU) == {} and step_shares(older) == {}


def test_advice_follows_what_is_on_already():
    assert "micro_batch" in diagnose(log(400, sync_s=0.0), GPU, on=["cuda_graphs"])["launch"]
    assert "to 3 (now 2)" in diagnose(log(400, data_s=0.3), GPU, workers=2)["data"]


def trained(delay_s: float) -> list[dict]:
    config = dataclasses.replace(TRAIN, max_steps=20)
    trainer = Trainer(tiny_model(), config, SpeedConfig(), CPU)
    batches = list(itertools.islice(random_batches(trainer.model.config), 20))

    def slow_batches():
        for batch in batches:
            time.sleep(delay_s)
            yield batch

    rows = []
    for event in train(trainer, slow_batches()):
        wall_s = event.unix_s - rows[-1]["unix_s"] if rows else None
        rows.append(dataclasses.asdict(event) | {"wall_s": wall_s})
    return rows


def test_a_slow_loader_is_found_in_a_real_training():
    rows = trained(delay_s=0.1)
    assert "workers" in diagnose(rows, CPU)["data"]
    assert all(row["data_s"] > 0.09 for row in rows[1:])


def test_phases_make_up_the_step():
    for row in trained(delay_s=0.0)[1:]:
        parts_s = sum(row[f"{phase}_s"] for phase in PHASES)
        assert 0.8 * row["step_s"] < parts_s <= 1.01 * row["step_s"]
        assert row["forward_s"] > 0 and row["backward_s"] > 0 and row["update_s"] > 0
        assert 0 < row["memory_now_bytes"] <= 1.1 * row["memory_bytes"]


class Event:
    """A CUDA event that happens when the clock says so."""

    now_ms = 0.0
    reached_ms = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at_ms = Event.now_ms

    def query(self):
        return self.at_ms <= Event.reached_ms

    def elapsed_time(self, other):
        return other.at_ms - self.at_ms


def test_a_gpu_is_never_waited_for(monkeypatch):
    monkeypatch.setattr("torch.cuda.Event", Event)
    clock = StepClock("cuda")
    seconds = []
    for _ in range(2):
        for phase, ms in (("data", 5), ("forward", 20), ("update", 10), ("", 0)):
            clock.mark(phase)
            Event.now_ms += ms
        Event.reached_ms = Event.now_ms - 5  # the update is not over
        seconds.append(clock.read())
    assert [s["forward_s"] for s in seconds] == [0.02, 0.02]
    assert [s["update_s"] for s in seconds] == [0.0, 0.01], "of the step before"


def healthy() -> list[dict]:
    rows = []
    for step in range(1, 201):
        row = {"step": step, "steps": 200, "loss": 5 - step / 100, "grad_norm": 1.0, "step_s": 0.1}
        row |= {"forward_s": 0.1, "data_s": 0.0, "tokens": 100, "load": 0.9, "ema_val_loss": None}
        row["val_loss"] = None if step % 40 else 5.1 - step / 100
        row["gate"] = None if step % 100 else {"cer": 0.5 - step / 1000}
        rows.append(row)
    return rows


def failing(rows: list[dict]) -> list[str]:
    return [what for what, _, _, problem in training_checks(rows) if problem]


def test_a_sound_training_passes_every_line():
    checks = training_checks(healthy())
    assert len(checks) == 8 and failing(healthy()) == []
    assert health_line(healthy()).count("✓") == 8


def change(first: int, **values):
    """A fault: these values in the rows from `first` on."""
    return lambda rows: [row.update(values) for row in rows[first:]]


def held_out(*losses: float):
    def fault(rows: list[dict]) -> None:
        for row, loss in zip(rows[39::40], losses):
            row["val_loss"] = loss

    return fault


FAULTS = {
    "losses are finite": change(190, loss=None),
    "the training loss falls": change(100, loss=5.5),
    "gradients stay as large as usual": change(170, grad_norm=90.0),
    "steps keep their pace": change(100, step_s=0.3),
    "the device is busy": change(100, load=0.2),
    "the held-out loss does not rise": held_out(4.0, 3.5, 3.7, 3.8, 3.9),
    "the recordings are not memorised": held_out(5.2, 5.15, 5.1, 5.05, 5.0),
    "what it speaks becomes clearer": change(150, gate={"cer": 0.9}),
}


@pytest.mark.parametrize("what", FAULTS)
def test_each_line_has_a_case_that_fails_it(what):
    rows = healthy()
    FAULTS[what](rows)
    assert what in failing(rows)
    if what not in ("the held-out loss does not rise", "the training loss falls"):
        assert failing(rows) == [what]
    assert f"✗ {what}" in health_line(rows)


def test_what_cannot_be_judged_yet_is_left_out():
    rows = [dict(row, load=None) for row in healthy()[:10]]
    assert [what for what, *_ in training_checks(rows)] == ["losses are finite"]
    assert training_checks([]) == [] and health_line([]) == ""
