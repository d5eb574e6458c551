"""The planner's figures by hand, and that its advice, once followed, is gone."""

import dataclasses
import math
import shutil
from types import SimpleNamespace

import pytest

from kit.base.errors import KitError
from kit.settings import TimeBudget, TrainConfig
from kit.tuning import session_plan as planner
from kit.tuning.session_plan import SessionLimits, on_disk, resolve_steps, shortened

GB = 10**9
SIZES = planner.DiskSizes(full_bytes=GB // 10, weights_bytes=GB // 40, models_bytes=GB // 20)
CONFIG = TrainConfig(max_steps=10_000, eval_steps=50, save_steps=100, save_total_limit=2)


def log(steps: int, step_s=1.0, validation_s=0.0, save_s=0.0, config=CONFIG, first=1) -> list[dict]:
    """Rows as jsonl_log writes them: saving falls into the step after."""
    rows = []
    for step in range(first, first + steps):
        judged = step % config.eval_steps == 0
        wall_s = step_s + judged * validation_s + save_s * ((step - 1) % config.save_steps == 0)
        wall_s = None if step == first else wall_s
        rows.append({"step": step, "val_loss": 2.0 if judged else None, "wall_s": wall_s})
    return rows


@pytest.fixture
def disk(monkeypatch):
    """What the disk has left, in one place to change."""
    left = SimpleNamespace(free=100 * GB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: left)
    return left


def make(folder, rows=None, config=CONFIG, limits=None):
    rows = rows or log(400)
    limits = limits or SessionLimits()
    return planner.plan_session(rows, config, SIZES, folder, limits, rows[-1]["step"])


def fits(plan) -> bool:
    return {"yes": True, "no": False}[plan.table["fits"]]


# Steps from the data.

EPOCHS = TrainConfig(max_steps=20_000, num_train_epochs=16, min_steps=4000)
EPOCHS = dataclasses.replace(EPOCHS, warmup_steps=500, eval_steps=250, gate_every=1000)


@pytest.mark.parametrize(("epoch_steps", "steps"), [(10, 4000), (500, 8000), (5000, 20_000)])
def test_steps_follow_from_the_data_between_least_and_most(epoch_steps, steps):
    assert resolve_steps(EPOCHS, epoch_steps).max_steps == steps
    assert resolve_steps(CONFIG, epoch_steps) is CONFIG, "without epochs they are the preset's"


def test_explicit_settings_win_and_a_started_run_keeps_its_own():
    assert resolve_steps(EPOCHS, 500, asked=300, previous=8000).max_steps == 300
    assert resolve_steps(EPOCHS, 700, previous=8000).max_steps == 8000  # the corpus has grown since
    with pytest.raises(KitError, match=r"TrainConfig\.max_steps = -5"):
        resolve_steps(EPOCHS, 500, asked=-5)
    with pytest.raises(KitError, match=r"TrainConfig\.max_steps must be int, got '300'"):
        resolve_steps(EPOCHS, 500, asked="300")
    with pytest.raises(KitError, match=r"TrainConfig\.min_steps = 4000"):
        TrainConfig(max_steps=1000, num_train_epochs=16, min_steps=4000)


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


def test_a_small_corpus_is_validated_every_two_passes_or_fifty_steps():
    given = [(60, 0), (3, 0), (3, 300)]  # of 300 steps ten times
    assert [resolve_steps(EPOCHS, *each).eval_steps for each in given] == [120, 50, 30]


def test_steps_are_reported_in_epochs_and_hours():
    patient = dataclasses.replace(EPOCHS, gate_patience=5, early_stopping_patience=10)
    said = planner.describe_epochs(resolve_steps(patient, 500), 500, 8.7)
    assert said.startswith("8,000 steps = 16 epochs over 8.7 hours; 5 gate evaluations")
    assert "10 validations" in planner.describe_epochs(patient.without_gate(), 500, 8.7)
    few = planner.describe_epochs(TrainConfig(max_steps=340), 100, 1.654)
    assert few == "340 steps = 3.4 epochs over 1.65 hours"


def test_time_to_the_target_is_counted_with_validation_and_checkpoints(tmp_path, disk):
    rows = log(401, step_s=1.0, validation_s=10.0, save_s=5.0)
    found = make(tmp_path, rows)
    assert found.per_step_s == pytest.approx(1 + 10 / 50 + 5 / 100)
    assert found.table["sessions of 12 h"] == "1" and fits(found) and not found.advice
    assert found.table["time to the target"] == "3:19:59"
    for row in rows:
        row["gate"] = {"cer": 0.1} if row["step"] == 200 else None
        row["wall_s"] = row["wall_s"] and row["wall_s"] + 400.0 * bool(row["gate"])
    assert make(tmp_path, rows).per_step_s == pytest.approx(1 + 10 / 50 + 5 / 100 + 1)


def test_a_pause_between_sessions_and_a_closed_lid_do_not_count(tmp_path, disk):
    rows = log(150) + log(150, first=151)
    rows[60]["wall_s"] = 8 * 3600.0
    rows[70]["wall_s"] = -3600.0  # the clock was set back
    assert make(tmp_path, rows).per_step_s == pytest.approx(1.0)
    rows = log(planner.RECENT, step_s=1.0) + log(planner.RECENT + 1, step_s=3.0, first=1001)
    assert planner.seconds_per_step(rows, CONFIG) == pytest.approx(3.0), "the newest rows count"
    with pytest.raises(KitError, match="run a few steps first"):
        make(tmp_path, log(1))


# The time budget.

BUDGET = TimeBudget(minutes=12, other_steps=2000)
SLOW = "2 cores, 1.0 of them busy; bf16 is emulated here"
LONG = dataclasses.replace(CONFIG, max_steps=3400, schedule="linear")


@pytest.mark.parametrize(
    ("step_s", "budget", "fixed"),
    [(0.2, BUDGET, False), (60.0, TimeBudget(), False), (5.8, BUDGET, True)],
)
def test_all_steps_are_trained_in_time_without_a_budget_or_if_set(step_s, budget, fixed):
    config, said = shortened(LONG, step_s, budget, SLOW, fixed)
    assert config == LONG and said.startswith(f"Training: 3,400 steps of {step_s:.2g} s, about")


def test_a_slower_machine_trains_what_fits_into_the_budget_and_says_why():
    config, said = shortened(LONG, 0.72, BUDGET, SLOW)
    assert config.max_steps == 1000 and config.schedule == LONG.schedule
    assert "3,400 steps would take 40:48 here, over the budget of 12 minutes" in said
    assert "Training 1,000 instead (12:00)" in said and "Set MAX_STEPS = 3400" in said
    assert said.endswith(f"What is slow here: {SLOW}.")


def test_too_few_steps_for_a_clear_voice_take_up_to_twice_the_minutes():
    budget = dataclasses.replace(BUDGET, min_steps=1500)
    config, said = shortened(LONG, 0.72, budget, SLOW)
    assert config.max_steps == 1500
    assert "12 minutes, but 1,000 steps would teach it too little" in said
    assert "Training 1,500 instead (18:00)" in said
    assert shortened(LONG, 0.4, budget, SLOW)[0].max_steps == 1800  # enough fit, no more are taken
    assert shortened(LONG, 1.44, budget, SLOW)[0].max_steps == 1000  # in twice the minutes


def test_where_hardly_any_steps_fit_the_smallest_preset_is_offered():
    config, said = shortened(LONG, 5.8, BUDGET, SLOW)
    assert config.max_steps == 124 and config.warmup_steps == 12
    assert shortened(LONG, 60.0, BUDGET, SLOW)[0].max_steps == 2 * LONG.warmup_steps
    assert said.endswith("make demo PRESET=tiny RUN=look.") and 'PRESET = "tiny"' in said


def test_the_time_of_the_whole_demo_is_announced():
    said = planner.forecast(LONG, 0.2, BUDGET, SLOW)
    assert said.endswith("The other notebooks: about 6:40. In all about 18:00.")
    assert "In all about 36:00." in planner.forecast(LONG, 0.72, BUDGET, SLOW)
    assert "In all" not in planner.forecast(LONG, 0.2, TimeBudget(), SLOW)


def test_more_sessions_each_losing_what_came_after_its_last_checkpoint(tmp_path, disk):
    config = dataclasses.replace(CONFIG, max_steps=36_400)  # 10 hours of one-second steps are left
    found = make(tmp_path, config=config, limits=SessionLimits(session_hours=4))
    # 4 h less 100 s, twice; the last has 2 h and 200 s to go
    assert found.table["sessions of 4 h"] == "3" and fits(found)
    (advice,) = found.advice
    assert "about step 14,800" in advice and "resumes automatically" in advice
    fewer = dataclasses.replace(config, max_steps=14_800)
    assert make(tmp_path, config=fewer, limits=SessionLimits(session_hours=4)).advice == ()


def test_a_checkpoint_that_no_session_reaches_or_that_comes_too_seldom(tmp_path, disk):
    config = dataclasses.replace(CONFIG, save_steps=5000)
    limits = SessionLimits(session_hours=1)
    found = make(tmp_path, config=config, limits=limits)
    assert not fits(found) and found.table["sessions of 1 h"] == "never done"
    assert "set `save_steps` to 1,800 or less" in found.advice[0]
    config = dataclasses.replace(CONFIG, save_steps=1800)
    assert fits(make(tmp_path, config=config, limits=limits))
    (advice,) = make(tmp_path, config=dataclasses.replace(CONFIG, save_steps=5000)).advice
    assert "may cost 1:23:20 of work: set `save_steps` to 2,160" in advice


def test_disk_is_for_the_kept_the_best_and_the_one_being_written(tmp_path, disk):
    (tmp_path / "step-0000100.safetensors").write_bytes(bytes(1000))
    room = "450.0 MB (0.0 MB there now, room for 100.0 GB more)"
    assert make(tmp_path).table["disk at most"] == room
    assert fits(make(tmp_path / "run" / "checkpoints")), "a folder that is not there yet"


def test_a_checkpoint_is_as_large_as_what_it_holds():
    figures = lambda *given, **more: [*vars(on_disk(*given, **more)).values()]  # noqa: E731
    assert figures(1000, 8000, ema=True) == [16_000, 4000, 8000]
    assert figures(1000, 2100, ema=False) == [6100, 2000, 4000]
    assert figures(1000, 80, ema=True, saved=10) == [160, 40, 8000]


def test_a_drive_too_small_for_the_released_model_takes_its_weights_alone(tmp_path, disk):
    sizes = on_disk(441_018_563, 8 * 441_018_563, ema=True)  # fp32 AdamW
    limits = SessionLimits(quota_bytes=15 * GB)
    make_plan = lambda config: planner.plan_session(log(400), config, sizes, tmp_path, limits, 400)  # noqa: E731
    found = make_plan(CONFIG)
    assert found.table["a checkpoint"].startswith("7.1 GB: weights, average and the optimizer's")
    (advice,) = found.advice
    assert not fits(found) and "`save_total_limit: 1` fits with checkpoints of 7.1 GB" in advice
    assert "set `checkpoint` to weights. Each then takes 1.8 GB" in advice
    assert "starts again" in advice
    small = make_plan(dataclasses.replace(CONFIG, checkpoint="weights"))
    assert fits(small) and not small.advice
    assert small.table["a checkpoint"].startswith("1.8 GB: weights and average alone, in half")
    many = make_plan(dataclasses.replace(CONFIG, checkpoint="weights", save_total_limit=9))
    assert many.advice == ("Keep fewer checkpoints: set `save_total_limit` to 4 (now 9).",)
    both = make_plan(dataclasses.replace(CONFIG, save_total_limit=9))
    assert "set `checkpoint` to weights and `save_total_limit` to 4." in both.advice[0]


def test_fewer_checkpoints_are_advised_and_then_fit(tmp_path, disk):
    disk.free = GB
    many = dataclasses.replace(CONFIG, save_total_limit=20)
    found = make(tmp_path, config=many)
    assert not fits(found)
    assert found.advice == ("Keep fewer checkpoints: set `save_total_limit` to 7 (now 20).",)
    assert fits(make(tmp_path, config=dataclasses.replace(CONFIG, save_total_limit=7)))
    assert not fits(make(tmp_path, config=dataclasses.replace(CONFIG, save_total_limit=8)))


def test_a_quota_is_a_limit_besides_the_disk(tmp_path, disk):
    limits = SessionLimits(quota_bytes=GB // 10)
    found = make(tmp_path, config=dataclasses.replace(CONFIG, save_total_limit=1), limits=limits)
    said = "Even `checkpoint: weights` and `save_total_limit: 1` need 25.0 MB more"
    assert not fits(found) and said in found.advice[0]


def test_limits_that_allow_nothing_and_negative_budgets_are_refused():
    wrong = [(SessionLimits, "session_hours", hours) for hours in (0.0, math.inf)]
    wrong += [(SessionLimits, "quota_bytes", size) for size in (0, math.nan)]
    wrong += [(TimeBudget, name, -1) for name in ("minutes", "min_steps", "other_steps")]
    for kind, field, value in wrong:
        with pytest.raises(KitError, match=f"{kind.__name__}.{field}"):
            kind(**{field: value})
