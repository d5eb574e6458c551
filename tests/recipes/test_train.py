"""The recipe of training: from what 01_data_prep left to a voice's weights, watched or not."""

import dataclasses
import os
import shutil
import signal

import pytest
import torch
from helpers import CPU, manifest, run_shown, unchecked
from made_runs import active, leave_log, saved

from kit.base.config import CONFIGS, load_preset
from kit.base.errors import KitError
from kit.base.formatting import clock
from kit.base.hardware import Choice
from kit.inference.voice_files import load_references
from kit.model import text_attention
from kit.model.text_attention import AlignmentHead
from kit.model.weights import trained_with
from kit.notebook.result import Result
from kit.recipes.panel import PanelSettings
from kit.recipes.start import start
from kit.recipes.train import Training, profile
from kit.recipes.training_listeners import load_attention_maps
from kit.training import checkpoint
from kit.training.logs import read_log
from kit.tuning.estimate import START_S


def untried(training: Training) -> Training:
    """A training that takes for granted that a step fits into memory."""
    training.results[Training.fits] = Result(line="It fits.")
    return training


@pytest.mark.long
def test_a_run_counted_in_epochs_is_the_run_counted_in_steps(tmp_path):
    train = {"num_train_epochs": 3.0, "min_steps": 1, "max_steps": 10_000}
    training = Training(active(tmp_path, train=train))
    assert training.config.max_steps == 3 * training.data.epoch_steps
    epoch_steps = training.data.epoch_steps
    assert epoch_steps > 4
    steps = 2 * epoch_steps
    half = round(epoch_steps / 2)
    # Of a length that needs no adapting to so short a run.
    same = {"warmup_steps": 1, "guided_attention_steps": 4, "save_total_limit": 9}
    epochs = {"num_train_epochs": 2, "eval_epochs": 0.5, "save_epochs": 0.5}
    counted = {"max_steps": steps, "eval_steps": half, "save_steps": half}
    logs = []
    for name, train in (("steps", counted), ("epochs", epochs | {"max_steps": 10 * steps})):
        training = Training(active(tmp_path / name, train=same | train))
        assert training.config.max_steps == steps
        training.fit()
        columns = ("step", "steps", "loss", "lr", "val_loss", "ema_val_loss", "epoch")
        log = [[row[column] for column in columns] for row in training.rows()]
        files = (tmp_path / name / "checkpoints").glob("*.safetensors")
        logs.append([*log, sorted(path.stem for path in files)])
    assert logs[0] == logs[1] and len(logs[0][-1]) >= 4

    for wrong, fact in ({"max_steps": 5}, "give one"), ({"num_train_epochs": -1}, "epochs = -1"):
        with pytest.raises(KitError, match=fact):
            Training(active(tmp_path / "asked"), **{"num_train_epochs": 2} | wrong)


def test_debugging_trains_in_fp32_without_any_switch_whatever_was_measured(tmp_path):
    debug = load_preset("debug", CONFIGS / "use")
    del debug["why"]
    debug["data"]["micro_batch"] = 4
    run = dataclasses.replace(active(tmp_path, precision="bf16", **debug), use="debug")
    run.path("speed.yaml").write_text("speed:\n  sdpa: true\n", encoding="utf-8")
    training = Training(run)
    assert not any(switch.on for switch in training.offered)
    training.fit()
    assert len(training.rows()) == 6
    ran = run.figure("train", "ran")
    assert ran["Mixed precision"].startswith("fp32") and ran["torch.compile"].startswith("off")
    assert ran["Fused attention (SDPA)"].startswith("explicit softmax")


def test_notebook_03_averages_checkpoints_whose_losses_are_those_of_the_log(tmp_path):
    run = active(tmp_path)
    training = Training(run)
    training.fit()
    names = {"run": run, "training": training}
    run_shown("03", "930d29c1", names)
    first, last = (
        checkpoint.load(path)["model"] for path in checkpoint.checkpoints(tmp_path / "checkpoints")
    )
    for name, weight in names["average"].items():
        torch.testing.assert_close(weight, (first[name] + last[name]) / 2)
    losses = names["losses"]
    assert list(losses) == ["step-0000004", "step-0000006", "average by hand"]
    assert losses["step-0000006"] == pytest.approx(training.rows()[-1]["val_loss"], rel=1e-5)
    assert len(set(losses.values())) == 3
    assert training.held_out_loss({}) is None, "a run without checkpoints has no average"


@pytest.mark.long
def test_nobody_watches_and_a_voice_is_left_which_is_not_trained_again(
    tmp_path, capsys, monkeypatch
):
    lines = [str(result) for result in Training(active(tmp_path)).run()]
    assert any(line.startswith("It fits. micro_batch 8: planned") for line in lines)
    assert any("Training: 6 steps of" in line for line in lines) and "gate: off" in lines[4]
    assert "step 1 / 6" in capsys.readouterr().out
    assert lines[-4].startswith("Trained to step 6 of 6 in ") and "(estimated: " in lines[-4]
    run = active(tmp_path)
    train = run.report()["train"]
    assert train["steps"] == 6 and train["steps_per_s"] > 0 and train["ran"]
    training = Training(run)
    assert trained_with(tmp_path / "model-ema.safetensors") == training.data.parts

    log = (tmp_path / "train.jsonl").read_bytes()
    again = [str(result) for result in training.run()]
    assert again[0].startswith("Trained to step 6 of 6 in ") and len(again) == 4
    assert (tmp_path / "train.jsonl").read_bytes() == log and run.report()["train"] == train

    references = tmp_path / "references.safetensors"
    assert train["alignment_head"] is None, "six steps teach no head to follow the text"
    assert load_references(references)["habits"].head is None
    monkeypatch.setattr(text_attention, "MIN_DIAGONALITY", -1.0)
    list(Training(run).run())
    head = run.figure("train", "alignment_head")
    assert AlignmentHead(**head) == load_references(references)["habits"].head


@pytest.mark.long
@pytest.mark.parametrize("lr, learns", [(1e-3, True), (0.9, False)])
def test_a_training_that_diverges_has_failed(tmp_path, capsys, lr, learns):
    train = {"max_steps": 120, "warmup_steps": 10, "eval_steps": 120, "save_steps": 120, "lr": lr}
    train |= {"optimizer": "adamw", "schedule": "constant"}
    reached, *later = unchecked(Training(active(tmp_path, train=train))).run()
    printed = capsys.readouterr().out
    assert "Training with " in printed
    assert f"{'✓' if learns else '✗'}  loss against guessing" in printed
    assert reached.failed != learns and ("has failed: loss against" in reached.line) != learns
    assert len(later) == (3 if learns else 1), "what builds on a voice that learnt nothing is not"
    kept = {row["what"]: row["passed"] for row in active(tmp_path).report()["train"]["checks"]}
    assert kept["loss against guessing"] == learns


def test_an_interrupt_leaves_a_checkpoint_and_the_next_start_resumes(tmp_path):
    longer = {"train": {"max_steps": 400}}
    training = unchecked(Training(active(tmp_path, **longer)))

    def interrupt(event) -> None:
        if event.step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    training.listeners = lambda: (interrupt,)
    with pytest.raises(KeyboardInterrupt):
        list(training.run())
    assert len(training.rows()) == 4 and not training.active.figure("train", "finished")
    assert training.trained().config == training.model, "as the checkpoint has it"
    again = Training(active(tmp_path, **longer), max_steps=8)
    list(unchecked(again).run())
    rows = again.rows()
    assert [row["step"] for row in rows] == [*range(1, 9)]
    assert "resumed from step 4" in rows[4]["note"]


def test_a_setting_of_another_version_in_a_runs_file_is_named(runs):
    path = saved(runs / "mine").folder / "settings.yaml"
    text = path.read_text()
    path.write_text(text.replace("  max_steps:", "  steps:"))
    with pytest.raises(KitError, match=r"settings\.yaml: train .*`steps`.*_steps`.*version"):
        start("mine")


@pytest.mark.long
def test_the_panel_shows_measured_gains_and_a_plan_that_follows_the_switches(tmp_path, watched):
    run = active(tmp_path)
    figures = {"baseline": {"steps_per_s": 2.0, "peak_memory_bytes": 2**30}}
    figures["sdpa"] = {"steps_per_s": 2.5, "peak_memory_bytes": 2**29}
    run.record(bench={"preset": {"variants": figures, "device": CPU.name}})
    training = Training(run)
    figures = training.switches().figures
    assert "; 1.25x, -512.0 MiB here; " in figures["Fused attention (SDPA)"]
    training.panel()
    view = training.shown.view
    cells = view.box.children[0].children  # of the switches
    texts = [part.value for cell in cells for part in getattr(cell, "children", ())]
    assert sum("1.25x, -512.0 MiB here" in str(text) for text in texts) == 1
    before = view.plan.value
    assert "Memory planned: " in before and "by your changes" not in before
    view.boxes["gradient_checkpointing"].value = True
    assert "MiB by your changes" in view.plan.value and "(-" in view.plan.value
    view.boxes["gradient_checkpointing"].value = False
    assert view.plan.value == before
    training.shown.retired.set()
    assert not (tmp_path / "train.jsonl").exists()
    training.verdict = dataclasses.replace(training.verdict, limit_bytes=2**20)
    settings = PanelSettings(training)
    words, fits = settings.planned(settings.values())
    assert not fits and "too much" in words


@pytest.mark.long
def test_the_panel_checks_first_and_its_settings_train_the_run_and_stay(runs, watched, capsys):
    folder = runs / "mine"
    training = Training(saved(folder))
    training.panel()
    printed = capsys.readouterr().out
    for words in ("parameters. 6 steps =", "It fits.", "Training: 6 steps", "Switches: the pre"):
        assert words in printed
    view = training.shown.view
    fields = view.fields
    assert not (folder / "train.jsonl").exists(), "it waits for Start"
    assert view.boxes["ema"].value and fields["micro_batch"].value == 8
    view.boxes["ema"].value = False
    fields["warmup_steps"].text.value = "2"
    fields["max_steps"].text.value = "4"
    assert "4 steps of" in view.plan.value
    for name, wrong in (("lr", "20"), ("micro_batch", "3"), ("warmup_steps", "4"), ("lr", "fast")):
        right = fields[name].text.value
        fields[name].text.value = wrong
        assert "alert" in fields[name].problem.value and view.start.disabled
        fields[name].text.value = right
        assert not fields[name].problem.value and not view.start.disabled
    changed = {"lr": "1e-4", "micro_batch": "2", "effective_batch": "4", "ema_decay": "0.5"}
    changed |= {"workers": "1", "prefetch_factor": "3"}
    for name, text in changed.items():
        fields[name].text.value = text
    view.start.click()
    assert training.wait().line.startswith("Trained to step 4 of 4 in ")
    rows = training.rows()
    assert rows[-1]["steps"] == 4 and max(row["lr"] for row in rows) == pytest.approx(1e-4)
    settings = training.active.report()["settings"]
    kept = settings["train"] | settings["data"]
    assert {name: kept[name] for name in changed} == {n: float(v) for n, v in changed.items()}
    assert training.process.process.pid != os.getpid()
    assert not (folder / "model-ema.safetensors").exists()
    for drawn in (training.curves(), training.fits(), training.attention()):
        assert "<img" in drawn._repr_html_()
    training.shown.retired.set()
    assert Training(start("mine")).config == training.config


def test_epochs_in_the_panel_are_as_many_steps_and_stay_with_the_run(runs):
    training = Training(saved(runs / "mine"))
    settings = PanelSettings(training)
    values = settings.values()
    steps = 2 * training.data.epoch_steps
    changed = values | {"num_train_epochs": 2}
    work = settings.workload_of(changed)
    assert work == settings.workload_of(values | {"max_steps": steps})
    halved = {"effective_batch": 4, "micro_batch": 4}
    assert settings.workload_of(changed | halved).train.max_steps > steps
    settings.keep(work)
    again = PanelSettings(Training(start("mine")))
    fields = {field.name: field.value for field in again.fields()}
    assert (fields["max_steps"], fields["num_train_epochs"]) == (steps, 0)
    with pytest.raises(KitError, match="num_train_epochs = -1") as raised:
        settings.workload_of(values | {"num_train_epochs": -1})
    assert raised.value.field == "num_train_epochs"


def test_before_the_first_step_every_step_says_what_to_do(runs):
    run = saved(runs / "mine")
    training = Training(run)
    for step, fix in (
        (training.wait, "call `panel"),
        (training.curves, "press Start"),
        (lambda: Training(dataclasses.replace(run, folder=runs / "empty")), "01_data_prep first"),
        (lambda: profile("mine"), r"No training of `mine` runs.*kit train --run mine"),
    ):
        with pytest.raises(KitError, match=fix):
            step()


def test_a_trained_run_whose_checkpoints_are_gone_does_not_begin_again(tmp_path):
    training = unchecked(Training(active(tmp_path)))
    list(training.run())
    shutil.rmtree(tmp_path / "checkpoints")
    files = {
        path: path.read_bytes() for path in (tmp_path / "train.jsonl", *tmp_path.glob("model-*"))
    }
    longer = unchecked(Training(active(tmp_path), max_steps=12))
    with pytest.raises(KitError, match=r"trained to step 6.*--base-model"):
        list(longer.run())
    assert files == {path: path.read_bytes() for path in files}
    for name in ("train.jsonl", "train-finished"):
        (tmp_path / name).unlink()
    list(unchecked(Training(active(tmp_path), max_steps=2)).run())
    assert len(read_log(tmp_path / "train.jsonl")) == 2


def test_where_memory_is_short_passes_are_smaller_and_the_batch_stays(tmp_path):
    work = Training(active(tmp_path)).workload()
    memory_bytes = int(0.7 * work.planned_bytes / work.max_memory_fraction)
    tight = dataclasses.replace(CPU, memory_bytes=memory_bytes)
    training = Training(active(tmp_path, tight))
    line = str(training.fits())
    passes = training.data.config.grad_accum
    assert line.startswith("It does not fit.") and "Change: " in line
    assert passes > 1 and f"{passes} of them make a step" in line
    assert training.data.config.effective_batch == 8
    assert len(next(iter(training.batches())).micro) == passes
    with pytest.raises(KitError, match="Not even one row a pass fits"):
        Training(active(tmp_path, dataclasses.replace(CPU, memory_bytes=2**20))).fits()


def test_a_run_keeps_how_many_bits_its_adamw_has(tmp_path, monkeypatch):
    """Another GPU, or 05_benchmark, would choose again, and the checkpoint could not be resumed."""
    installed = Choice(value="yes", reason="installed")
    monkeypatch.setattr("kit.training.switches.eight_bit_adamw", lambda hw, tried: installed)
    unchecked(Training(active(tmp_path), max_steps=2)).fit()
    kept = (tmp_path / "settings.yaml").read_text(encoding="utf-8")
    assert kept.endswith("speed:\n  adamw_8bit: false\n")


def test_a_time_budget_shortens_a_run_and_a_started_one_is_planned_by_its_log(tmp_path):
    budget = {"time_budget": {"minutes": 1e-4}, "train": {"max_steps": 500}}
    shortened = untried(Training(active(tmp_path, **budget)))
    assert "over the budget of" in str(shortened.in_time())
    assert shortened.config.max_steps < 500
    assert f"Training {shortened.config.max_steps:,} instead" in str(shortened.in_time())
    asked = untried(Training(active(tmp_path, **budget), max_steps=500))
    asked.trial_step_s = shortened.trial_step_s
    assert str(asked.in_time()).startswith("Training: 500 steps of")
    run = active(tmp_path)
    leave_log(tmp_path, ({"step": i, "steps": 2000, "wall_s": 0.5} for i in range(1, 30)))
    found = untried(Training(run)).in_time()
    assert "2,000 steps of 0.5 s" in str(found), "a started run keeps its number"
    assert f"1,971 of them to go, about {clock(0.5 * (2000 - 29) + START_S)}" in str(found)


@pytest.mark.long
def test_attention_and_samples_are_kept_from_the_first_step_to_the_last(tmp_path):
    steps = {"train": {"max_steps": 8, "eval_steps": 2}}
    folder = tmp_path / "evaluated"
    training = unchecked(Training(active(folder, **steps)))
    (folder / "attention").mkdir()
    (folder / "attention" / "step-0000099.npy").write_bytes(b"of an earlier training")
    list(training.run())
    kept = load_attention_maps(folder / "attention")
    row = training.data.middle_row()
    texts = int((row.tokens < training.model.text_vocab).sum())
    assert list(kept) == [1, 2, 4, 6, 8]
    assert {grid.shape for grid in kept.values()} == {(row.tokens.shape[1] - texts, texts)}
    assert training.trained().config == training.model
    sounds = training.samples().sounds
    assert [sound.caption for sound in sounds] == [f"after step {n}" for n in (1, 4, 8)]
    deaf = unchecked(Training(active(tmp_path / "deaf", **steps)))
    deaf.listeners = lambda: ()
    list(deaf.run())
    for mine, theirs in zip(training.trained().parameters(), deaf.trained().parameters()):
        assert torch.equal(mine, theirs), "whoever listens changes nothing"


def test_the_boards_of_the_settings_get_each_step(tmp_path, monkeypatch):
    events = []
    for name in ("tensorboard", "tracker"):
        monkeypatch.setattr(f"kit.training.logs.{name}_log", lambda *_: (events.append, "there"))
    none = Training(active(tmp_path / "none", train={"boards": []}))
    assert len(none.listeners()) == 2, "attention and samples"
    two = Training(active(tmp_path / "two", train={"boards": ["trackio", "wandb"]}))
    assert two.listeners()[2:] == (events.append, events.append)
    with pytest.raises(KitError, match=r"boards.*'wandbb'.*tensorboard, wandb, trackio"):
        Training(active(tmp_path, train={"boards": ["wandbb"]}))


def test_what_a_person_set_holds_whatever_is_compiled_or_was_measured(tmp_path):
    run = active(tmp_path).save_settings({"speed": {"sdpa": False}})
    choice = "speed:\n  sdpa: true  # fast\n  fused_adamw: false  # slow\n"
    run.path("speed.yaml").write_text(choice, encoding="utf-8")
    training = Training(run)
    assert not training.speed.sdpa and not training.speed.fused_adamw
    assert training.data.config.micro_batch == 8, "none was measured"
    for size, taken in ((2, 2), (3, 8)):  # 3 is no divisor of the effective batch
        measured = f"{choice}data:\n  micro_batch: {size}\n"
        run.path("speed.yaml").write_text(measured, encoding="utf-8")
        assert Training(run).data.config.micro_batch == taken
    asked = run.save_settings({"data": {"micro_batch": 4}})
    assert Training(asked).data.config.micro_batch == 4


def test_the_gate_evaluates_held_out_sentences_when_it_is_on(tmp_path, monkeypatch):
    monkeypatch.setattr("kit.audio.recognizer.load_recognizer", lambda path: "a recogniser")
    run = active(tmp_path, train={"gate_every": 3})
    run.record(recognizer={"held_out": 0.4})
    training = Training(run)
    line = str(training.judge())
    held_out = sum(row.split == "held_out" for row in manifest())
    assert 0 < len(training.data.held_out_sentences(24)) <= held_out
    assert "sentences every 3 steps" in line
    assert "own CER on recordings: 40.0%" in line and "cannot tell whether a voice" in line
    assert training.gate is not None
