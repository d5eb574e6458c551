"""Switches measured on this device: what is kept, and that nothing is measured twice."""

import dataclasses
import shutil
from pathlib import Path

import pytest
from torch.backends.cpu import get_cpu_capability as isa

from kit.base.errors import KitError
from kit.recipes.benchmark import START_S, Benchmark, devices, devices_folder
from kit.recipes.start import start
from kit.recipes.training_plan import measured_effects
from kit.training.switches import load_choice
from kit.tuning.trials import TrialConfig


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
        return {
            "seconds": config.steps * (0.5 if "fused_adamw" in on else 1.0),
            "tokens": 1000,
            "steps": config.steps,
            "loss": 3.0,
            "skipped": 0,
            "warmup_s": 2.0,
            "peak_memory_bytes": 2**30,
            "compilations": 0,
            "recompilations": 0,
            "precision": "fp32",
            "attention": "explicit softmax",
            "notes": [],
        }

    monkeypatch.setattr("kit.tuning.trials.measure_variant", figures)
    return made


def test_what_pays_is_written_for_training_and_recorded(run, calls):
    found = list(Benchmark(run).run())
    assert all(str(result) and result._repr_html_() for result in found)
    kept = load_choice(run.path("speed.yaml"))
    assert [name for name, on in kept.items() if on] == ["fused_adamw"]
    recorded = run.report()["bench"]
    assert recorded["threads"] == int(run.threads.value)
    assert recorded["preset"]["chosen"] == ["fused_adamw"]
    assert recorded["preset"]["goal"] == "speed"
    assert recorded["preset"]["variants"]["baseline"]["steps_per_s"] == 1.0


def test_each_switch_has_its_effect_and_where_it_was_measured(run, calls):
    assert measured_effects(run) == {}
    list(Benchmark(run).run())
    effects = measured_effects(run)
    assert effects["fused_adamw"] == "2.00x, +0.0 MiB here"
    assert effects["ema"] == effects["sdpa"] == "1.00x, +0.0 MiB here"
    assert "compile" not in effects, "tiny leaves it out"
    elsewhere = dataclasses.replace(run, hw=dataclasses.replace(run.hw, name="another card"))
    assert measured_effects(elsewhere)["sdpa"] == f"1.00x, +0.0 MiB on {run.hw.name}"


def test_the_minutes_are_known_before_it_begins(run, calls):
    benchmark = Benchmark(run, steps=60, rounds=2)
    trials = sum(not variant.reason for variant in benchmark.variants)
    assert "compile" not in {name for v in benchmark.variants if not v.reason for name in v.on}
    assert f"about {2 * trials * (START_S + 2 + 60) / 60:.0f} min" in str(benchmark.about())
    assert calls == [()], "the baseline alone"


def test_each_device_has_a_file_and_a_table(run, calls, tmp_path):
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


def test_the_table_of_docs_is_made_of_its_files(tmp_path):
    folder = Path(__file__).parents[2] / "docs" / "devices"
    shutil.copytree(folder, tmp_path / "devices")
    devices(folder=tmp_path / "devices")
    assert (tmp_path / "devices/README.md").read_text() == (folder / "README.md").read_text()


def test_what_was_measured_is_not_measured_again(run, calls):
    list(Benchmark(run).run())
    once = len(calls)
    list(Benchmark(start("mine")).run())
    assert len(calls) == once
    Benchmark(start("mine"), rounds=2).measure()
    assert len(calls) > once


def test_it_resumes_with_its_first_number_of_threads(run, calls):
    run.record(bench={"threads": 7})
    assert Benchmark(run).task.threads == 7


def test_the_released_size_leaves_the_runs_own_switches_alone(run, calls):
    benchmark = Benchmark(run, model="xtts", steps=2)
    assert benchmark.task.model.layers == 30 and benchmark.config.steps == 2
    assert benchmark.path.name == "speed-xtts.yaml"
    with pytest.raises(KitError, match="choose"):
        Benchmark(run, model="gpt2")


def test_variants_train_in_processes_of_their_own(run):
    """Two real ones; tests/tuning/test_trials.py has the rest."""
    benchmark = Benchmark(run, steps=1)
    benchmark.variants = benchmark.variants[:2]
    assert str(benchmark.measure()) == "2 of 2 variants ran"
    assert benchmark.table().grid[1][0] == "Baseline"
