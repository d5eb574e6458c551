"""Switches and micro-batches measured on this device, what is written, and who reads it."""

import dataclasses

import pytest

from kit.base.config import load_preset, merge
from kit.recipes.benchmark import START_S, Benchmark
from kit.recipes.start import start
from kit.recipes.training_plan import measured_effects
from kit.settings import TrialConfig
from kit.training.switches import load_choice


@pytest.fixture
def run(runs):
    return start("mine", "tiny")


@pytest.fixture
def sizes() -> dict[int, float]:
    """The seconds of a step by micro-batch, beside those of the switches."""
    return {}


@pytest.fixture
def calls(monkeypatch, sizes) -> list:
    """The variants measured so far, by figures of their own: only fused AdamW pays.

    Fused attention makes no difference, and half precision is half as fast.
    """
    made = []

    def figures(task, config: TrialConfig, on: tuple) -> dict:
        made.append(on)
        step_s = 0.5 if "fused_adamw" in on else 1.0
        step_s *= 2.0 if "mixed_precision" in on else 1.0
        step_s *= sizes.get(task.data.micro_batch, 1.0)
        if step_s > 60:
            return {"error": "out of memory"}
        seconds = config.steps * step_s
        ran = {"precision": "fp32", "attention": "explicit softmax", "notes": []}
        ran |= {"recompilations": 0, "skipped": 0, "warmup_s": 2.0}
        ran |= {"tokens": 1000, "loss": 3.0, "peak_memory_bytes": 2**30}
        return ran | {"seconds": seconds, "steps": config.steps}

    monkeypatch.setattr("kit.tuning.measure.measure_variant", figures)
    return made


@pytest.mark.long
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
    benchmark = Benchmark(start("mine"))
    found = list(benchmark.run())
    assert len(calls) == once
    assert all(str(result) and result._repr_html_() for result in found)
    kept = load_choice(run.path("speed.yaml"))["speed"]
    assert [name for name, on in kept.items() if on] == ["sdpa", "fused_adamw"]
    recorded = run.report()["bench"]
    assert recorded["threads"] == int(run.threads.value)
    figures = recorded["preset"]
    assert figures["chosen"] == ["sdpa", "fused_adamw"]
    assert figures["variants"]["baseline"]["steps_per_s"] == 1.0
    head, *rows = benchmark.table().grid
    cells = {row[0]: dict(zip(head, row)) for row in rows}
    assert cells["Fused attention (SDPA)"]["speed"] == "1.00x, within noise"
    # Without bf16 on this machine, the preset's set is the chosen one.
    assert cells["Preset's set"]["speed"] in ("1.00x, within noise", "2.00x")
    assert cells["Chosen set"]["speed"] == "2.00x" and cells["Chosen set"]["of baseline"] == "100%"
    Benchmark(start("mine"), rounds=3).measure()
    assert len(calls) > once


def test_the_minutes_are_known_before_it_begins(run, calls):
    benchmark = Benchmark(run, steps=60, rounds=2)
    trials = sum(not variant.reason for variant in benchmark.variants)
    assert "compile" not in {name for v in benchmark.variants if not v.reason for name in v.on}
    trials += 1  # a smaller micro-batch; tiny has no larger one
    assert f"about {2 * trials * (START_S + 2 + 60) / 60:.0f} min" in str(benchmark.about())
    assert calls == [()], "the baseline alone"


# Seconds of a step of 16 examples by micro-batch; what is found from 4 on, in how many trials.
FOUND = {
    "larger": ({4: 1.0, 8: 0.9, 16: 0.8}, 16, 2),
    "larger, until memory runs out": ({4: 1.0, 8: 0.9, 16: 99.0 * 2}, 8, 2),
    "smaller": ({4: 1.0, 8: 1.1, 2: 0.9, 1: 0.95}, 2, 3),
    "neither": ({4: 1.0, 8: 0.99, 2: 0.99}, 4, 2),
}


@pytest.mark.parametrize("what", FOUND)
def test_larger_and_smaller_micro_batches_are_tried_as_long_as_they_pay(run, calls, sizes, what):
    seconds, best, trials = FOUND[what]
    run = run.save_settings({"data": {"effective_batch": 16, "micro_batch": 4}})
    benchmark = Benchmark(run)
    benchmark.measure()
    benchmark.choose()
    sizes.update(seconds)
    measured = set()
    for _ in range(2):  # a cell that is run again gives the same answer
        found = benchmark.find_micro_batch()
        assert (benchmark.micro_batch, len(found.grid)) == (best, 2 + trials)
        measured.add(len(calls))
    assert len(measured) == 1
    benchmark.write()
    path = run.path("speed.yaml")
    written = load_preset(str(path))
    measured = {"data": {"effective_batch": 16, "micro_batch": best}}
    measured |= {"speed": load_choice(path)["speed"]}
    assert written == merge(load_preset("tiny"), measured)
    assert run.report()["bench"]["preset"]["micro_batch"] == best


def test_a_micro_batch_that_is_planned_beyond_the_memory_is_not_tried(run, calls, monkeypatch):
    monkeypatch.setattr("kit.recipes.benchmark.limit_memory", lambda *_: 1)
    benchmark = Benchmark(run)
    benchmark.measure()
    benchmark.choose()
    before = len(calls)
    *_, last = benchmark.find_micro_batch().grid
    assert last[-1].startswith("planned ") and len(calls) == before


def test_a_resumed_benchmark_keeps_its_threads(run):
    run.record(bench={"threads": 7})
    assert Benchmark(run).task.threads == 7
