"""The notebooks on a machine with another GPU than this one: every table and sentence is right.

Their recipes run with `detect` answering as that machine's would. What only the device itself can
tell (a product's time, a trial's figures) they say plainly, or get from figures such a card could
have shown.
"""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_presets
import torch
from helpers import code_index, world

from kit.base.hardware import Hardware, choose_precision
from kit.base.run import find_run
from kit.notebook.result import Result
from kit.recipes.benchmark import Benchmark
from kit.recipes.setup import Setup
from kit.recipes.start import start
from kit.recipes.train import Training
from kit.settings import TrialConfig
from kit.training.switches import load_choice
from kit.tuning.measure import Task

GIB = 2**30
# What such cards report of themselves.
NAMES = {
    "T4": "Tesla T4",
    "RTX 3060": "NVIDIA GeForce RTX 3060",
    "H100": "NVIDIA H100 80GB HBM3",
}
# What follows from the compute capability: precision, attention kernel, TF32.
FOLLOWS = {
    (7, 5): ("fp16", "efficient", False),
    (8, 6): ("bf16", "flash", True),
    (9, 0): ("bf16", "flash", True),
}
CPUS = ("no GPU", "this cpu", "this cuda", "this processor", "product on the CPU", "C++ compiler")


@pytest.fixture(params=NAMES)
def card(request, monkeypatch, tmp_path) -> Hardware:
    """A machine with that card, and a run of its own."""
    reported = {"name": NAMES[request.param], "cores": 8, "ram_bytes": 32 * GIB}
    hw = dataclasses.replace(test_presets.card(request.param), **reported)
    for room in ("base.hardware", "base.run"):
        monkeypatch.setattr(f"kit.{room}.detect", lambda: hw)
    quiet = SimpleNamespace(idle=100.0, nice=0.0)  # not two seconds of listening in each notebook
    monkeypatch.setattr("psutil.cpu_times_percent", lambda _seconds: quiet)
    monkeypatch.setenv("KIT_RUN", tmp_path.name)
    monkeypatch.delenv("KIT_PRESET", raising=False)
    threads = torch.get_num_threads()
    yield hw
    torch.set_num_threads(threads)


def started_run(card: Hardware) -> Path:
    """The run's folder with what 01_data_prep leaves, and the log of a run that has started."""
    index, run = code_index(), find_run()
    run.begin()
    for name in ("codec.safetensors", "tokenizer.model"):
        shutil.copy(world() / name, run.path(name))
    run.record(data={"codes": os.path.relpath(index, run.folder), "language": "am"})
    lines = "".join(json.dumps(step_row(number)) + "\n" for number in range(1, 30))
    run.path("train.jsonl").write_text(lines, encoding="utf-8")
    return run.folder


def step_row(number: int) -> dict:
    plain = {"step": number, "steps": 2000, "loss": 3.0, "lr": 1e-3, "grad_norm": 1.0}
    times = {"step_s": 0.5, "unix_s": 0.5 * number, "wall_s": 0.5 if number > 1 else None}
    others = {"tokens": 900, "memory_bytes": 2**30, "val_loss": None, "ema_val_loss": None}
    return plain | times | others | {"gate": None, "note": ""}


def words(results: list[Result]) -> str:
    """All that is printed of `results`, and all that is in their tables."""
    lines = []
    for result in results:
        lines += [str(result), *(f"{name}: {value}" for name, value in result.figures.items())]
        lines += [" ".join(row) for row in result.grid]
    return "\n".join(lines)


def titles(results: list[Result]) -> list[str]:
    pictures = [picture for result in results for picture in result.pictures]
    figures = [picture() if callable(picture) else picture for picture in pictures]
    axes = [axes for figure in figures for axes in figure.axes]
    return [each.get_title(loc="left") or each.get_title() for each in axes]


@pytest.mark.long
def test_00_says_what_follows_from_the_card(card):
    setup = Setup(start())
    found = list(setup.run())
    precision, kernel, tf32 = FOLLOWS[card.capability]
    preset = next(test_presets.CARDS[key][2] for key, name in NAMES.items() if name == card.name)
    choices = setup.machine().figures
    assert choices["precision"].startswith(f"{precision}: ")
    assert choices["attention kernel"].startswith(f"{kernel}: expected")
    assert choices["torch.compile"].startswith("yes: Triton")
    assert choices["preset for this machine"].startswith(f"{preset}: {card.name} ")
    assert choices["speed.mixed_precision"].startswith("on")
    assert choices.get("speed.tf32", "").startswith("on") == tf32
    assert not choices.get("speed.compile", "").startswith("off")
    assert any(card.name in title for title in titles(found))
    assert "It fits." in words(found) or "Change: " in words(found)
    assert [reported for reported in CPUS if reported in words(found)] == []


@pytest.mark.long
def test_02_plans_for_the_card(card):
    started_run(card)
    run = start()
    training = Training(run)
    precision, kernel, tf32 = FOLLOWS[card.capability]
    assert run.hw.device == "cuda" and card.name in str(run)
    found = training.switches().figures
    for name in ("Mixed precision", "Pinned memory"):
        assert found[name].startswith("on")
    assert f"{kernel}: expected for {precision}" in found["Fused attention (SDPA)"]
    assert "larger kernels" in found["torch.compile"], "offered, not refused"
    assert ("8.0" in found["TF32 products"]) == (not tf32)
    fit = training.fits()
    share = run.section("memory")["max_memory_fraction"] * card.memory_bytes / GIB
    assert str(fit).startswith("It fits.") and f"of {share:.2f} GiB" in str(fit)
    assert titles([fit])[0].startswith(card.name)
    message = words([training.size(), fit, training.in_time(), training.switches()])
    assert "only a GPU" not in message and " of 0.5 s" in message
    assert [each for each in CPUS if each in message] == []


def figures(task: Task, config: TrialConfig, on: tuple) -> dict:
    """What such a card could have shown: all switches but pinned memory make it a tenth faster."""
    precision = choose_precision(task.hw).value if "mixed_precision" in on else "fp32"
    seconds = config.steps * 0.9 ** len({*on} - {"pinned_memory"})
    row = {"seconds": seconds, "tokens": 1000 * config.steps, "steps": config.steps}
    row |= {"loss": 3.0, "skipped": 0, "warmup_s": 2.0, "compilations": 1, "recompilations": 0}
    row |= {"peak_memory_bytes": 2 * GIB - len(on) * GIB // 20, "precision": precision}
    return row | {"attention": "flash" if "sdpa" in on else "explicit softmax", "notes": []}


@pytest.mark.long
def test_05_judges_what_the_card_has(card, monkeypatch):
    monkeypatch.setattr("kit.tuning.measure.measure_variant", figures)
    found = list(Benchmark(start()).run())
    tf32 = FOLLOWS[card.capability][-1]
    has = dict.fromkeys(("torch.compile", "Mixed precision", "Pinned memory"), True)
    has["TF32 products"] = tf32
    for label, there in has.items():
        assert ("keep  " if there else "drop  ") + label in words(found)
    assert "only a GPU" not in words(found) and f"# Measured on {card.name}" in words(found)
    chosen = load_choice(find_run().path("speed.yaml"))["speed"]
    assert chosen["compile"] and chosen["tf32"] == tf32 and chosen["pinned_memory"]
    assert titles(found) == ["Speed", "Peak memory"]
    assert [reported for reported in CPUS if reported in words(found)] == []
