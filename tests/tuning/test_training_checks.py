"""Each fault of a training or a voice is named alone, with its fix; a sound one has none."""

import dataclasses
import itertools
import math
import time

import pytest
from helpers import CPU, TRAIN, random_batches, tiny_model

from kit.settings import SpeedConfig
from kit.training.config import PHASES
from kit.training.loop import train
from kit.training.trainer import StepClock, Trainer
from kit.tuning import checks

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
    "waiting for data": ({"data_s": 0.3}, {"data_s": 0.09}, "workers"),
    "work queued for the GPU": ({"sync_s": 0.001}, {"sync_s": 0.04}, "CUDA graphs"),
    "copying batches": ({"copy_s": 0.1}, {"copy_s": 0.04}, "Pinned memory"),
    "summing gradients": ({"reduce_s": 0.4}, {"reduce_s": 0.19}, "effective_batch"),
    "checkpoints and logs": ({"wall_s": 1.5}, {"wall_s": 1.15}, "save_steps"),
    "RAM": ({"ram_bytes": 0.95 * GPU.ram_bytes}, {"ram_bytes": 0.85 * GPU.ram_bytes}, "workers"),
    "evaluation": ({"wall_s": 2.0, "eval_s": 0.95}, {"wall_s": 1.1}, "gate_every"),
}


@pytest.mark.parametrize("cause", CASES)
def test_each_cause_is_named_with_its_setting_and_no_other(cause):
    provoking, harmless, setting = CASES[cause]
    (check,) = checks.diagnose(log(400, **provoking), GPU)
    assert check.what == cause and setting in check.note
    assert checks.diagnose(log(400, **harmless), GPU) == []


def test_a_healthy_training_has_no_diagnosis():
    assert checks.diagnose(log(), GPU) == []
    assert checks.diagnose(log(12, data_s=0.9), GPU) == [], "too few steps to judge"
    older = [{k: v for k, v in row.items() if k not in ("forward_s", "data_s")} for row in log()]
    assert checks.diagnose(older, GPU) == [] and checks.step_shares(older) == {}


def test_advice_follows_what_is_on_already():
    assert "micro_batch" in checks.diagnose(log(400, sync_s=0.0), GPU, on=["cuda_graphs"])[0].note
    assert "to 3 (now 2)" in checks.diagnose(log(400, data_s=0.3), GPU, workers=2)[0].note


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
    rows = trained(delay_s=0.03)
    assert "workers" in checks.diagnose(rows, CPU)[0].note
    assert all(row["data_s"] > 0.029 for row in rows[1:])


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


def healthy(steps: int = 200) -> list[dict]:
    rows = []
    for step in range(1, steps + 1):
        row = {"step": step, "steps": steps, "loss": 5 - step / 100, "grad_norm": 1.0}
        row |= {"step_s": 0.1, "forward_s": 0.1, "data_s": 0.0, "tokens": 100, "load": 0.9}
        row |= {"val_loss": None if step % 40 else 5.1 - step / 100, "ema_val_loss": None}
        row["gate"] = None if step % 50 else {"cer": 0.5 - step / 1000}
        rows.append(row)
    return rows


LIMITS = {"guess_loss": 5.0, "clear_cer": 0.12}


def failing(rows: list[dict]) -> list[str]:
    return [check.what for check in checks.training_checks(rows, **LIMITS) if check.passed is False]


def change(first: int, **values):
    """A fault: these values in the rows from `first` on."""
    return lambda rows: [row.update(values) for row in rows[first:]]


def losses(first: float, last: float):
    def fault(rows: list[dict]) -> None:
        for index, row in enumerate(rows):
            row.update(loss=first + index / len(rows) * (last - first), val_loss=None)

    return fault


def held_out(*values: float):
    return lambda rows: [row.update(val_loss=loss) for row, loss in zip(rows[39::40], values)]


def spoken(*cers: float):
    return lambda rows: [row.update(gate={"cer": cer}) for row, cer in zip(rows[49::50], cers)]


FAULTS = [
    ("steps without a finite loss", change(190, loss=None)),
    ("training loss", losses(3.0, 3.1)),
    ("loss against guessing", losses(9.0, 5.1)),
    ("first steps", lambda rows: [row.update(loss=7.0) for row in rows[10:15]]),
    ("gradient norm", change(170, grad_norm=90.0)),
    ("idle device", change(100, load=0.69)),
    ("memorising", held_out(5.2, 5.15, 5.1, 5.05, 5.0)),
    ("errors in what it speaks", spoken(0.9, 0.9, 0.9, 0.95)),
    ("errors in what it speaks", spoken(1.0, 1.0, 1.0, 1.0)),
]


def test_a_sound_training_passes_every_line():
    passing = checks.training_checks(healthy(), **LIMITS)
    assert len(passing) == 8 and all(check.passed for check in passing)
    (line,) = checks.short_lines(passing)
    assert line.count("✓") == 8
    assert not failing(log_of(spoken(0.02, 0.02, 0.02, 0.03))), "it was clear from the start"
    assert {row[0] for row in checks.table(passing)[1:]} == {"✓"}


def log_of(fault) -> list[dict]:
    rows = healthy()
    fault(rows)
    return rows


@pytest.mark.parametrize(("what", "fault"), FAULTS)
def test_each_line_has_a_case_that_fails_it_alone(what, fault):
    rows = log_of(fault)
    assert failing(rows) == [what]
    (sentence,) = checks.problems(checks.training_checks(rows, **LIMITS))
    assert sentence.startswith(f"{what}: ") and "(bound: " in sentence
    assert f"✗ {sentence}" in checks.short_lines(checks.training_checks(rows, **LIMITS))


def test_too_few_steps_neither_pass_nor_fail():
    rows = [row | {"load": None, "loss": 9.0} for row in healthy(60)]
    found = {check.what: check for check in checks.training_checks(rows, **LIMITS)}
    assert found.pop("steps without a finite loss").passed
    assert {check.figure for check in found.values()} == {checks.TOO_FEW}
    assert len(found) == 3 and not checks.problems(found.values())
    assert all(f"– {what}: {checks.TOO_FEW}" == str(check) for what, check in found.items())
    assert not checks.problems(checks.training_checks([], **LIMITS))


GOOD = {"cer": 0.05, "eos_rate": 1.0, "duration_ratio": 1.0, "runaway_rate": 0.0}
BAD = [({"cer": 0.2}, "CER of the voice: 20.0%"), ({"eos_rate": 0.98}, "98.0% of them")]
BAD += [({"runaway_rate": 0.1}, "10.0% over twice as long")]
BAD += [({"duration_ratio": r}, "times the recordings") for r in (0.5, 1.3, math.nan)]


@pytest.mark.parametrize(("over", "fact"), BAD)
def test_each_fault_of_a_voice_is_named(over, fact):
    (problem,) = checks.problems(checks.gate_checks(GOOD | over, 0.01, 0.12))
    assert fact in problem and checks.problems(checks.gate_checks(GOOD, 0.01, 0.12)) == []


def test_a_memorising_voice_is_not_advised_to_train_longer():
    fix = checks.suggest_fix(2.24, 6.93)  # an hour and a half of speech, 640 steps from scratch
    assert "BASE_MODEL" in fix and "2.24" in fix and "6.93" in fix
    for pair in ((7.1, 7.0), (1.2, 1.33), (None, None), (2.0, None)):
        assert checks.suggest_fix(*pair) == "train longer"


def test_the_gate_says_that_a_recogniser_with_a_bad_floor_cannot_judge():
    (problem,) = checks.problems(checks.gate_checks(GOOD, 0.4, 0.12))
    assert "the recogniser itself mistakes 40.0%" in problem and "12.0%" in problem
    assert checks.recognizer_warning(0.02, 0.12) == checks.recognizer_warning(None, 0.12) == ""
