"""Switches measured on this device, and `tune` with tiny sizes for real."""

import dataclasses
import shutil
from pathlib import Path

import pytest
from torch.backends.cpu import get_cpu_capability as isa

from kit.base.config import CONFIGS, load_preset, merge
from kit.base.errors import KitError
from kit.base.run import find_run
from kit.recipes.benchmark import START_S, Benchmark, Tuning, devices, devices_folder
from kit.recipes.open_run import open_settings
from kit.recipes.start import start
from kit.recipes.training_plan import measured_effects
from kit.settings import TrialConfig
from kit.training.switches import load_choice


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))
    return start("mine", "tiny")


@pytest.fixture
def calls(monkeypatch) -> list:
    """The variants measured so far, by figures of their own: only fused AdamW pays."""
    made = []

    def figures(task, config: TrialConfig, on: tuple) -> dict:
        made.append(on)
        seconds = config.steps * (0.5 if "fused_adamw" in on else 1.0)
        ran = {"precision": "fp32", "attention": "explicit softmax", "notes": []}
        ran |= {"compilations": 0, "recompilations": 0, "skipped": 0, "warmup_s": 2.0}
        ran |= {"tokens": 1000, "loss": 3.0, "peak_memory_bytes": 2**30}
        return ran | {"seconds": seconds, "steps": config.steps}

    monkeypatch.setattr("kit.tuning.trials.measure_variant", figures)
    return made


def test_what_pays_is_written_and_is_not_measured_again(run, calls):
    assert measured_effects(run) == {}
    list(Benchmark(run).run())
    effects = measured_effects(run)
    assert effects["fused_adamw"] == "2.00x, +0.0 MiB here"
    assert effects["ema"] == effects["sdpa"] == "1.00x, +0.0 MiB here"
    assert "compile" not in effects, "tiny leaves it out"
    elsewhere = dataclasses.replace(run, hw=dataclasses.replace(run.hw, name="another card"))
    assert measured_effects(elsewhere)["sdpa"] == f"1.00x, +0.0 MiB on {run.hw.name}"
    once = len(calls)
    found = list(Benchmark(start("mine")).run())
    assert len(calls) == once
    assert all(str(result) and result._repr_html_() for result in found)
    kept = load_choice(run.path("speed.yaml"))
    assert [name for name, on in kept.items() if on] == ["fused_adamw"]
    recorded = run.report()["bench"]
    assert recorded["threads"] == int(run.threads.value)
    figures = recorded["preset"]
    assert figures["chosen"] == ["fused_adamw"] and figures["goal"] == "speed"
    assert figures["variants"]["baseline"]["steps_per_s"] == 1.0
    Benchmark(start("mine"), rounds=2).measure()
    assert len(calls) > once


def test_the_minutes_are_known_before_it_begins(run, calls):
    benchmark = Benchmark(run, steps=60, rounds=2)
    trials = sum(not variant.reason for variant in benchmark.variants)
    assert "compile" not in {name for v in benchmark.variants if not v.reason for name in v.on}
    assert f"about {2 * trials * (START_S + 2 + 60) / 60:.0f} min" in str(benchmark.about())
    assert calls == [()], "the baseline alone"


def test_each_device_has_a_file_and_a_table_as_in_docs(run, calls, tmp_path):
    with pytest.raises(KitError, match="benchmark"):
        devices()
    list(Benchmark(run).run())
    list(Benchmark(run, goal="memory").run())
    (path,) = devices_folder().glob("*.json")
    assert path.parent == tmp_path / "bench" / "devices"
    _, row = devices(folder=path.parent).grid
    assert row[0] == f"{run.hw.name}, {run.hw.cores} cores, {isa()}"
    assert "fused_adamw" in row and "2.00x" in row
    assert row[3] in (path.parent / "README.md").read_text()
    folder = Path(__file__).parents[2] / "docs" / "devices"
    shutil.copytree(folder, tmp_path / "devices")
    devices(folder=tmp_path / "devices")
    assert (tmp_path / "devices/README.md").read_text() == (folder / "README.md").read_text()
    benchmark = Benchmark(run)
    benchmark.variants[0] = dataclasses.replace(benchmark.variants[0], reason="out of memory")
    list(benchmark.run())
    assert devices().grid[1][4] == "", "nothing is faster than a baseline that did not run"
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(KitError, match=path.name):
        devices()


def test_it_resumes_with_its_threads_and_the_released_size_has_a_file_of_its_own(run, calls):
    run.record(bench={"threads": 7})
    assert Benchmark(run).task.threads == 7
    large = Benchmark(run, model="xtts", steps=2)
    found = (large.task.model.layers, large.config.steps, large.path.name)
    assert found == (30, 2, "speed-xtts.yaml")
    with pytest.raises(KitError, match="choose"):
        Benchmark(run, model="gpt2")


def test_variants_train_in_processes_of_their_own(run):
    """Two real ones; tests/tuning/test_trials.py has the rest."""
    benchmark = Benchmark(run, steps=1)
    benchmark.variants = benchmark.variants[:2]
    assert str(benchmark.measure()) == "2 of 2 variants ran"
    assert benchmark.table().grid[1][0] == "Baseline"


@pytest.fixture
def preset(tmp_path, monkeypatch):
    monkeypatch.setenv("KIT_RUNS", str(tmp_path / "runs"))
    return open_settings("", "tiny", "", {"train": {"lr": 0.001}})


def made(work, steps: int) -> dict:
    """Figures of a trial: smaller passes are faster here."""
    figures = {"loss": 3.0, "precision": "fp32", "peak_memory_bytes": 2**30}
    return figures | {"step_seconds": [1.0 + work.data.micro_batch]}


def tuning(preset, path, monkeypatch, measure=made, **options) -> Tuning:
    found = Tuning(preset, path, **options)
    monkeypatch.setattr(found, "measure", measure)
    return found


def test_the_written_preset_is_taken_by_path_and_holds_what_was_set(preset, tmp_path, monkeypatch):
    path = tmp_path / "mine.yaml"
    results = list(tuning(preset, path, monkeypatch).run())
    assert all(str(result) and result._repr_html_() for result in results)
    (row,) = devices().grid[1:]
    assert row[1].startswith("tiny, tuned")
    assert (row[2], row[4]) == ("micro_batch 8 -> 1", "4.50x")
    written = load_preset(str(path))
    changed = {"data": {"micro_batch": 1}, "train": {"lr": 0.001}}
    assert written == merge(load_preset("tiny"), changed)
    run = find_run(str(path), "", "other")
    assert run.preset == written and run.preset_name == str(path.resolve())
    assert find_run(str(CONFIGS / "tiny.yaml"), "", "other").preset_name == "tiny"


def test_the_best_so_far_is_written_unless_it_is_no_better_in_turns(preset, tmp_path, monkeypatch):
    path = tmp_path / "mine.yaml"
    found = tuning(preset, path, monkeypatch)
    found.search()
    monkeypatch.setattr(found, "measure", lambda *_: made(found.start, 1))
    found.compare()
    found.write()
    assert load_preset(str(path))["data"]["micro_batch"] == 8

    def measure(work, steps):
        if not work.speed.sdpa:
            raise KeyboardInterrupt
        return made(work, steps)

    with pytest.raises(KeyboardInterrupt):
        list(tuning(preset, path, monkeypatch, measure).run())
    assert load_preset(str(path))["data"]["micro_batch"] == 2


def test_a_trial_that_time_ends_costs_neither_search_nor_best(preset, tmp_path, monkeypatch):
    found = Tuning(preset, tmp_path / "mine.yaml")
    first, late = iter([made(found.start, 3)]), {"error": "not finished after 60 s"}
    monkeypatch.setattr("kit.tuning.trials.measure_variant", lambda *_: next(first, late))
    found.search()
    found.best = found.best._replace(work=found.start.with_rows(2))
    found.compare()
    found.write()
    assert load_preset(str(found.path))["data"]["micro_batch"] == 2
    assert devices().grid[1][4] == "", "no gain was measured"


def test_a_target_out_of_reach_or_a_wrong_path_is_refused(preset, tmp_path, monkeypatch):
    short = tuning(preset, tmp_path / "mine.yaml", monkeypatch, target="step<1ms")
    with pytest.raises(KitError, match=r"step<1ms.*micro_batch 8 -> 1"):
        list(short.run())
    assert not (tmp_path / "mine.yaml").exists()
    for path in ("mine", str(CONFIGS / "tiny.yaml")):
        with pytest.raises(KitError, match=r"\.yaml"):
            Tuning(preset, path)


def test_real_trials_are_kept_and_stay_within_their_time(preset, tmp_path):
    path = tmp_path / "mine.yaml"
    first = Tuning(preset, path, minutes=0.1)
    first.axes = []
    list(first.run())
    assert load_preset(str(path))["model"]["layers"] == 2
    again = Tuning(preset, path, minutes=0.1)
    left = again.earlier[0]
    assert again.measure(again.start, left["steps_asked"]) == left and left not in again.earlier
    again.best = first.best
    again.started_s -= 60
    with pytest.raises(TimeoutError):
        again.measure(again.start.with_rows(2), 2)
