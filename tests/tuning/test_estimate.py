"""The estimate's figures by hand, and that its advice, once followed, is gone."""

import dataclasses
import shutil
from types import SimpleNamespace

import pytest

from kit.base.errors import KitError
from kit.base.formatting import clock
from kit.settings import TimeBudget, TrainConfig
from kit.tuning.estimate import (
    RECENT,
    describe_epochs,
    disk_warning,
    estimate_again,
    estimate_time,
    resolve_steps,
    seconds_per_step,
    stored_bytes,
)

GB = 10**9
CONFIG = TrainConfig(max_steps=10_000, eval_steps=50, save_steps=100, save_total_limit=2)


def log(steps: int, step_s=1.0, validation_s=0.0, save_s=0.0, first=1) -> list[dict]:
    """Rows as jsonl_log writes them: saving falls into the step after."""
    rows = []
    for step in range(first, first + steps):
        row = {"step": step, "steps": CONFIG.max_steps, "val_loss": None, "wall_s": None}
        if step > first:
            row["wall_s"] = step_s + save_s * ((step - 1) % CONFIG.save_steps == 0)
        if step % CONFIG.eval_steps == 0:
            row |= {"val_loss": 2.0, "wall_s": row["wall_s"] + validation_s}
        rows.append(row)
    return rows


EPOCHS = TrainConfig(max_steps=20_000, num_train_epochs=16, min_steps=4000)
EPOCHS = dataclasses.replace(EPOCHS, warmup_steps=500, eval_steps=250, gate_every=1000)


@pytest.mark.parametrize(("epoch_steps", "steps"), [(10, 4000), (500, 8000), (5000, 20_000)])
def test_steps_follow_from_the_data_between_least_and_most(epoch_steps, steps):
    assert resolve_steps(EPOCHS, epoch_steps).max_steps == steps
    assert resolve_steps(CONFIG, epoch_steps) is CONFIG, "without epochs they are the preset's"


def test_explicit_settings_win_and_a_started_run_keeps_its_own():
    assert resolve_steps(EPOCHS, 500, asked=300, previous=8000).max_steps == 300
    assert resolve_steps(EPOCHS, 700, previous=8000).max_steps == 8000  # the corpus has grown since
    for asked, fact in ((-5, "= -5"), ("300", "must be int, got '300'")):
        with pytest.raises(KitError, match=rf"TrainConfig\.max_steps {fact}"):
            resolve_steps(EPOCHS, 500, asked=asked)


def test_warm_up_and_judgements_fit_the_steps_there_are():
    short = resolve_steps(EPOCHS, 500, asked=300)
    assert (short.warmup_steps, short.eval_steps, short.gate_every) == (30, 30, 30)
    long = resolve_steps(EPOCHS, 1000)
    assert (long.warmup_steps, long.eval_steps, long.gate_every) == (500, 250, 1000)
    assert resolve_steps(EPOCHS, 500, asked=1).eval_steps == 1
    assert resolve_steps(dataclasses.replace(EPOCHS, gate_every=0), 500).gate_every == 0
    each = dataclasses.replace(EPOCHS, eval_epochs=0.5, save_epochs=2, gate_epochs=1)
    for asked in (0, 300):
        counted = resolve_steps(each, 500, asked)
        assert (counted.eval_steps, counted.save_steps, counted.gate_every) == (250, 1000, 500)
    assert TrainConfig(max_steps=2000, eval_steps=500).for_steps(4000).eval_steps == 500
    given = [(60, 0), (3, 0), (3, 300)]  # every two passes or fifty steps; of 300 steps ten times
    assert [resolve_steps(EPOCHS, *each).eval_steps for each in given] == [120, 50, 30]


def test_steps_are_reported_in_epochs_and_hours():
    patient = dataclasses.replace(EPOCHS, gate_patience=5, early_stopping_patience=10)
    said = describe_epochs(resolve_steps(patient, 500), 500, 8.7)
    assert said.startswith("8,000 steps = 16 epochs over 8.7 hours; 5 gate evaluations")
    assert "10 validations" in describe_epochs(patient.without_gate(), 500, 8.7)
    few = describe_epochs(TrainConfig(max_steps=340), 100, 1.654)
    assert few == "340 steps = 3.4 epochs over 1.65 hours"


def test_a_step_has_its_share_of_validation_checkpoints_and_gate():
    rows = log(401, step_s=1.0, validation_s=10.0, save_s=5.0)
    assert seconds_per_step(rows, CONFIG) == pytest.approx(1 + 10 / 50 + 5 / 100)
    for row in rows:
        row["gate"] = {"cer": 0.1} if row["step"] == 200 else None
        row["wall_s"] = row["wall_s"] and row["wall_s"] + 400.0 * bool(row["gate"])
    assert seconds_per_step(rows, CONFIG) == pytest.approx(1 + 10 / 50 + 5 / 100 + 1)


def test_a_new_estimate_is_said_where_steps_take_another_time():
    rows = log(100, step_s=1.0)
    assert estimate_again(rows, CONFIG, 1.1) == "" == estimate_again(rows, CONFIG, 0.9)
    left = rows[-1]["steps"] - 100
    said = estimate_again(rows, CONFIG, 0.5)
    assert "1 s" in said and "0.5 s" in said
    assert clock(left) in said and clock(left * 0.5) in said


def test_a_pause_between_sessions_and_a_closed_lid_do_not_count():
    rows = log(150) + log(150, first=151)
    rows[60]["wall_s"] = 8 * 3600.0
    rows[70]["wall_s"] = -3600.0  # the clock was set back
    assert seconds_per_step(rows, CONFIG) == pytest.approx(1.0)
    rows = log(RECENT, step_s=1.0) + log(RECENT + 1, step_s=3.0, first=1001)
    assert seconds_per_step(rows, CONFIG) == pytest.approx(3.0), "the newest rows count"
    with pytest.raises(KitError, match="run a few steps first"):
        seconds_per_step(log(1), CONFIG)


BUDGET = TimeBudget(minutes=12)
SLOW = "2 cores, 1.0 of them busy; bf16 is emulated here"
LONG = dataclasses.replace(CONFIG, max_steps=3400, schedule="linear")


@pytest.mark.parametrize(
    ("step_s", "budget", "fixed"),
    [(0.2, BUDGET, False), (60.0, TimeBudget(), False), (5.8, BUDGET, True)],
)
def test_all_steps_are_trained_in_time_without_a_budget_or_if_set(step_s, budget, fixed):
    config, said = estimate_time(LONG, step_s, budget, SLOW, fixed=fixed)
    assert config == LONG and f"3,400 steps of {step_s:.2g} s" in said


def test_a_slower_machine_trains_what_fits_into_the_budget_and_says_why():
    config, said = estimate_time(LONG, 0.72, BUDGET, SLOW)
    assert config == LONG.for_steps(1000) and config.schedule == LONG.schedule
    for fact in ("3,400 steps", "40:48", "12 minutes", "1,000", "12:08", "MAX_STEPS = 3400", SLOW):
        assert fact in said
    # Up to twice the minutes for a clear voice, and at least twice the warm-up.
    clear = dataclasses.replace(BUDGET, min_steps=1500)
    given = [(0.4, clear), (0.72, clear), (1.44, clear), (60.0, BUDGET)]
    taken = [estimate_time(LONG, *each, SLOW)[0].max_steps for each in given]
    assert taken == [1800, 1500, 1000, 2 * LONG.warmup_steps]


def test_of_a_resumed_run_the_steps_to_go_are_counted():
    config, said = estimate_time(LONG, 0.5, BUDGET, SLOW, done=400, fixed=True)
    assert config == LONG and "3,000 of them to go, about 25:08" in said


def test_a_training_longer_than_a_session_of_colab_is_a_warning():
    said = [estimate_time(LONG, s, TimeBudget(), SLOW)[1] for s in (12.0, 13.0)]  # 11.3; 12.3 hours
    assert ["Colab" in text for text in said] == [False, True]
    assert "Colab" not in estimate_time(LONG, 13.0, TimeBudget(), SLOW, done=400, fixed=True)[1]


def test_the_newest_checkpoints_the_best_the_one_being_written_and_the_models_are_stored():
    assert stored_bytes(CONFIG, 1000, 8000, ema=True) == 4 * 16_000 + 8000
    assert stored_bytes(CONFIG, 1000, 2100, ema=False) == 4 * 6100 + 4000
    assert stored_bytes(CONFIG, 1000, 80, ema=True, saved=10) == 4 * 160 + 8000


def test_a_disk_without_room_for_them_is_a_warning_with_what_to_change(tmp_path, monkeypatch):
    left = SimpleNamespace(free=2 * GB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: left)
    folder = tmp_path / "run" / "checkpoints"  # not there yet
    assert disk_warning(2 * GB, folder) == ""
    said = disk_warning(3 * GB, folder)
    for fact in ("3.0 GB", "2.0 GB", "save_total_limit", "finetune.method=lora", "KIT_RUNS"):
        assert fact in said
    folder.mkdir(parents=True)
    (folder / "step-0000100.safetensors").write_bytes(bytes(1000))
    assert disk_warning(2 * GB + 1000, folder) == "", "what is there is replaced"
