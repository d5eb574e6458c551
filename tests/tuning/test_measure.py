"""Every variant is measured in a process of its own, from the same seed, on the same batches."""

import dataclasses
import itertools
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from helpers import CPU, DATA, GPT, TRAIN

from kit.base.config import CONFIGS, load_preset
from kit.batches.batching import padding_lengths
from kit.settings import TrialConfig
from kit.tuning import measure
from kit.tuning.choose import LEFT_OUT, Trial
from kit.tuning.measure import LADDER, SAVINGS, Task

ROWS = measure.some_rows((3, 9), (5, 25), 40)
TASK = Task(model=GPT, train=TRAIN, data=DATA, rows=ROWS, hw=CPU, threads=1)
SLOW = ("mixed_precision", "compile", "gradient_checkpointing")
SHORT = TrialConfig(steps=4, warmup_steps=1, rounds=2, leave_out=SLOW)
BASELINE = Trial(kind="baseline", label="Baseline")


def test_variants_are_the_baseline_each_alone_and_each_beside_those_before_it():
    found = measure.variants(TASK, dataclasses.replace(SHORT, leave_out=("sdpa", "pinned_memory")))
    possible = [n for n in LADDER if any(v.on == (n,) and not v.reason for v in found)]
    saving = [n for n in SAVINGS if any(v.on == (n,) and not v.reason for v in found)]
    sets = [v.on for v in found if v.kind == "added"]
    assert found[0].kind == "baseline" and found[0].on == ()
    assert [v.on for v in found if v.kind == "alone"] == [(n,) for n in (*LADDER, *SAVINGS)]
    ladder = [tuple(possible[:n]) for n in range(2, len(possible) + 1)]
    assert sets == ladder + [(*possible, n) for n in saving] and "gradient_checkpointing" in saving
    reasons = {v.on: v.reason for v in found}
    assert reasons[("sdpa",)] == LEFT_OUT and "GPU" in reasons[("tf32",)]
    assert "GPU" in reasons[("pinned_memory",)], "not left out: this device lacks it"
    assert [v.on for v in found if v.kind == "cost"] == [("ema",), ("ema", "ema_offload")]


def test_batches_have_the_rows_lengths_and_are_the_same_each_time():
    one, two = ([*itertools.islice(measure.make_batches(TASK), 12)] for _ in range(2))
    for a, b in zip(one, two):
        assert all((x.tokens == y.tokens).all() for x, y in zip(a.micro, b.micro))
    epoch = one[: len(TASK.rows) // DATA.effective_batch]
    stops = 1 + GPT.stop_targets  # targets besides the ids: text STOP, code STOPs
    wanted = sum(text + codes + stops for text, codes in TASK.rows)
    assert sum(b.text_targets + b.code_targets for b in epoch) == wanted
    assert {len(b.micro) for b in epoch} == {DATA.grad_accum}


FEW = {*padding_lengths(np.bincount([text + codes + 6 for text, codes in TASK.rows]))}
PADDED = [({"grid_lengths": (32, 64)}, False, {32, 64}), ({"length_multiple": 64}, False, {64})]


@pytest.mark.parametrize(("over", "few_shapes", "lengths"), [*PADDED, ({}, True, FEW)])
def test_batches_are_padded_as_the_data_are(over, few_shapes, lengths):
    task = dataclasses.replace(TASK, data=dataclasses.replace(DATA, **over))
    batches = itertools.islice(measure.make_batches(task, few_shapes), 10)
    assert {m.tokens.shape[1] for b in batches for m in b.micro} <= lengths


@pytest.mark.parametrize("name", sorted(p.stem for p in CONFIGS.glob("*.yaml")))
def test_every_preset_has_a_task_whose_rows_fit_its_model(name):
    task = measure.preset_task(load_preset(name), CPU, threads=1)
    batch = next(measure.make_batches(task))  # raises where a row is too long
    assert sum(len(m.tokens) for m in batch.micro) == task.data.effective_batch


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder, ticks = tmp_path_factory.mktemp("trials"), []
    wanted = measure.variants(TASK, SHORT)
    rows = measure.run_trials(TASK, SHORT, folder, wanted, lambda *given: ticks.append(given))
    return folder, rows, ticks


def test_every_variant_has_a_row_and_the_loss_stays(measured):
    folder, rows, ticks = measured
    ran = [row for row in rows if row.loss is not None]
    both = ("sdpa", "fused_adamw")
    assert [row.on for row in ran] == [(), *((name,) for name in both), both, ("ema",)]
    assert all(row.parity and row.steps_per_s > 0 and row.peak_memory_bytes > 0 for row in ran)
    assert all(row.spread > 0 and row.noise >= row.spread for row in ran)
    assert rows[0].ran == "fp32, explicit softmax" and "flash" in rows[1].ran
    assert all(row.reason for row in rows if row.loss is None)
    assert ticks[0][:2] == (0, 10) and ticks[-1][:2] == (10, 10)
    labels = [label for *_, label in ticks[:-1]]
    assert labels[:5] == labels[5:], "rounds are interleaved"
    assert len(list(folder.glob("*.json"))) == 10


def test_finished_trials_are_not_run_again_and_an_interrupted_benchmark_resumes(
    measured, tmp_path, monkeypatch
):
    folder, rows, _ = measured
    results = sorted(folder.glob("*.json"))
    for path in results[2:]:
        shutil.copy(path, tmp_path)
    (tmp_path / results[2].name).write_text(results[2].read_text()[:20])  # a damaged disk
    again, real = [], measure.measure_variant
    counted = lambda *given: again.append(given) or real(*given)  # noqa: E731
    monkeypatch.setattr(measure, "measure_variant", counted)
    wanted = measure.variants(TASK, SHORT)
    with pytest.warns(match="is damaged"):
        found = measure.run_trials(TASK, SHORT, tmp_path, wanted)
    assert len(again) == 3
    assert [row.loss for row in found] == [row.loss for row in rows]
    assert measure.run_trials(TASK, SHORT, folder, wanted) == rows and len(again) == 3


def test_a_variant_that_raises_is_a_row_with_its_reason(tmp_path):
    long = dataclasses.replace(TASK, rows=((3, 5), (3, 500)))  # beyond the model's positions
    (row,) = measure.run_trials(long, SHORT, tmp_path, [BASELINE])
    assert row.loss is None and row.reason.startswith("ValueError: A row of 3 text ids and 500")
    assert len(list(tmp_path.iterdir())) == 1  # and is not tried in every round


def killed(*_):
    os.kill(os.getpid(), 9)


def test_a_variant_whose_process_dies_is_a_row_with_its_reason(monkeypatch):
    monkeypatch.setattr(measure, "_child", killed)
    found = measure.measure_variant(TASK, SHORT, ())
    assert found == {"error": "its process was ended by SIGKILL: most likely memory ran out"}


WATCH = """
import torch
for name in ("_cuda_getDeviceCount", "_cuda_init"):
    if hasattr(torch._C, name):
        setattr(torch._C, name, lambda *_, n=name: print(n) or 0)
import torch._dynamo, kit.tuning.measure
"""


@pytest.mark.long
def test_what_the_server_imports_leaves_the_gpu_alone():
    done = subprocess.run([sys.executable, "-c", WATCH], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
