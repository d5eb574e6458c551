"""Trials: every variant in a process of its own, from the same seed, on the same batches."""

import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from helpers import CPU, DATA, GPT, TRAIN, until

from kit.base.config import CONFIGS, load_preset, merge
from kit.base.errors import KitError
from kit.base.hardware import MATMUL_SHAPES
from kit.batches.batching import padding_lengths
from kit.model.gpt import SpeechGPT
from kit.settings import SpeedConfig, TrialConfig
from kit.training import switches
from kit.training.switches import Applied
from kit.tuning import trials
from kit.tuning.recommend import LEFT_OUT, Trial
from kit.tuning.trials import LADDER, SAVINGS, Task

ROWS = trials.some_rows((3, 9), (5, 25), 40)
TASK = Task(model=GPT, train=TRAIN, data=DATA, rows=ROWS, hw=CPU, threads=1)
SLOW = ("mixed_precision", "compile", "gradient_checkpointing")
SHORT = TrialConfig(steps=4, warmup_steps=1, rounds=2, leave_out=SLOW)
BASELINE = Trial(kind="baseline", label="Baseline")


def test_variants_are_the_baseline_each_alone_and_each_beside_those_before_it():
    found = trials.variants(TASK, dataclasses.replace(SHORT, leave_out=("sdpa", "pinned_memory")))
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
    one, two = ([*itertools.islice(trials.make_batches(TASK), 12)] for _ in range(2))
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
    batches = itertools.islice(trials.make_batches(task, few_shapes), 10)
    assert {m.tokens.shape[1] for b in batches for m in b.micro} <= lengths


@pytest.mark.parametrize("name", sorted(p.stem for p in CONFIGS.glob("*.yaml")))
def test_every_preset_has_a_task_whose_rows_fit_its_model(name):
    task = trials.preset_task(load_preset(name), CPU, threads=1)
    batch = next(trials.make_batches(task))  # raises where a row is too long
    assert sum(len(m.tokens) for m in batch.micro) == task.data.effective_batch
    published = trials.published_task(CPU, threads=1)
    assert (published.model.layers, published.model.width) == (30, 1024)
    assert published.data.micro_batch == 8 and max(published.rows) <= (200, 600)


def watched_trial(monkeypatch, pinned: bool) -> tuple[list, list]:
    """A trial with the switch on or off: (what, thread) in order, and the tokens of each batch."""
    order, tokens = [], []
    collate, train = trials.collate, trials.train

    def note(what: str) -> None:
        order.append((what, threading.current_thread().name))

    def watched_collate(model, parts, position):
        note("collate")
        batch = collate(model, parts, position)
        tokens.append(torch.cat([micro.tokens.flatten() for micro in batch.micro]))
        return batch

    def watched_train(*given):
        for event in train(*given):
            note("step")
            yield event

    really_on = Applied.on
    on = lambda self, name: pinned if name == "pinned_memory" else really_on(self, name)  # noqa: E731
    monkeypatch.setattr(Applied, "on", on)
    monkeypatch.setattr(trials, "collate", watched_collate)
    monkeypatch.setattr(trials, "train", watched_train)
    monkeypatch.setattr(switches, "pin", lambda batch: note("pin") or batch)
    trials.run_variant(TASK, dataclasses.replace(SHORT, warmup_steps=2), ())
    return order, tokens


def test_with_pinned_memory_the_same_batches_are_made_in_a_thread_of_their_own(monkeypatch):
    order, inline = watched_trial(monkeypatch, pinned=False)
    mine = threading.current_thread().name
    assert order == [("collate", mine), ("step", mine)] * 6
    assert all(torch.equal(inline[i], inline[i + 4]) for i in range(2)), "the rows repeat"
    assert not torch.equal(inline[0], inline[1])
    monkeypatch.undo()
    order, tokens = watched_trial(monkeypatch, pinned=True)
    made = [each for each in order if each[0] != "step"]
    assert made == [("collate", "batches_0"), ("pin", "batches_0")] * 6
    assert all(map(torch.equal, tokens, inline)) and len(tokens) == len(inline)
    until(lambda: "batches_0" not in [thread.name for thread in threading.enumerate()])


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder, ticks = tmp_path_factory.mktemp("trials"), []
    wanted = trials.variants(TASK, SHORT)
    rows = trials.run_trials(TASK, SHORT, folder, wanted, lambda *given: ticks.append(given))
    return folder, rows, ticks


def test_every_variant_has_a_row_and_the_loss_stays(measured):
    _, rows, ticks = measured
    ran = [row for row in rows if row.loss is not None]
    # Baseline, two alone, both, EMA; attention written out and the CPU's two kernels.
    assert len(ran) == 8
    by_label = {row.label: row for row in rows}
    for name in ("explicit softmax", "flash", "math"):
        assert by_label[f"Attention: {name.partition(' ')[0]}"].ran == f"fp32, {name}"
    for label in ("Attention: efficient", "Attention: cudnn", "CUDA graphs"):
        assert by_label[label].loss is None and by_label[label].reason
    assert all(row.parity and row.steps_per_s > 0 and row.peak_memory_bytes > 0 for row in ran)
    assert rows[0].ran == "fp32, explicit softmax" and rows[1].ran == "fp32, flash"
    assert all(row.reason for row in rows if row.loss is None)
    assert ticks[0][:2] == (0, 16) and ticks[-1][:2] == (16, 16)


def test_rounds_are_interleaved_and_every_result_is_a_line(measured):
    (path,) = measured[0].glob("*.jsonl")
    order = [tuple(r["on"]) for r in trials.read_results(path)]
    assert order[:7] == order[7:] and len(set(order)) == 7


def test_finished_trials_are_not_run_again(measured, monkeypatch):
    monkeypatch.setattr(trials, "measure_variant", lambda *_: pytest.fail("measured again"))
    assert trials.run_trials(TASK, SHORT, measured[0], trials.variants(TASK, SHORT)) == measured[1]


def test_an_interrupted_benchmark_resumes_where_it_was(measured, tmp_path):
    (path,) = measured[0].glob("*.jsonl")
    lines = path.read_text().splitlines()
    (tmp_path / path.name).write_text("\n".join([*lines[:8], lines[8][:40]]))
    rows = trials.run_trials(TASK, SHORT, tmp_path, trials.variants(TASK, SHORT))
    kept = (tmp_path / path.name).read_text().splitlines()
    assert kept[:8] == lines[:8] and len(trials.read_results(tmp_path / path.name)) == 14
    assert [row.loss for row in rows] == [row.loss for row in measured[1]]


def test_a_variant_that_raises_is_a_row_with_its_reason(tmp_path):
    long = dataclasses.replace(TASK, rows=((3, 5), (3, 500)))  # beyond the model's positions
    (row,) = trials.run_trials(long, SHORT, tmp_path, [BASELINE])
    assert row.loss is None and row.reason.startswith("ValueError: A row of 3 text ids and 500")
    (path,) = tmp_path.glob("*.jsonl")
    assert len(trials.read_results(path)) == 1  # and is not tried in every round


def killed(*_):
    os.kill(os.getpid(), 9)


def test_switches_and_settings_are_read_from_their_names():
    speed = SpeedConfig(sdpa=True, attention_kernel="math", recompute_every=2)
    assert trials.speed_of(("sdpa", "attention_kernel=math", "recompute_every=2")) == speed


def test_a_variant_whose_process_dies_is_a_row_with_its_reason(monkeypatch):
    monkeypatch.setattr(trials, "_child", killed)
    found = trials.measure_variant(TASK, SHORT, ())
    assert found == {"error": "its process was ended by SIGKILL: most likely memory ran out"}


WATCH = """
import torch
for name in ("_cuda_getDeviceCount", "_cuda_init"):
    if hasattr(torch._C, name):
        setattr(torch._C, name, lambda *_, n=name: print(n) or 0)
import torch._dynamo, kit.tuning.trials
"""


@pytest.mark.long
def test_what_the_server_imports_leaves_the_gpu_alone():
    done = subprocess.run([sys.executable, "-c", WATCH], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_line_cut_short_does_not_swallow_the_next(tmp_path):
    path = tmp_path / "deep" / "results.jsonl"
    trials.append_result(path, {"on": [], "seconds": 1.0})
    path.write_bytes(path.read_bytes() + b'{"on": ["sd')
    trials.append_result(path, {"on": ["sdpa"], "seconds": 2.0})
    path.write_bytes(path.read_bytes() + b"\xff\xfe\n" + b"[" * 10**5 + b"\n")  # a damaged disk
    assert [r["on"] for r in trials.read_results(path)] == [[], ["sdpa"]]
    assert json.loads(path.read_bytes().splitlines()[0])["seconds"] == 1.0


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"rounds": 0}, {"leave_out": ("flash",)}])
def test_settings_that_measure_nothing_are_refused(wrong):
    with pytest.raises(KitError, match=f"TrialConfig.{next(iter(wrong))}"):
        TrialConfig(**wrong)


def test_a_step_of_a_preset_is_timed_in_a_moment():
    before = torch.get_num_threads()
    try:
        assert 0 < trials.step_seconds(load_preset("tiny"), CPU, 1) < 60
        epochs = {"num_train_epochs": 16, "min_steps": 4000, "max_steps": 60000}
        assert 0 < trials.step_seconds(merge(load_preset("tiny"), {"train": epochs}), CPU, 1) < 60
    finally:
        torch.set_num_threads(before)


def test_the_matmuls_of_a_token_are_counted(monkeypatch):
    """Beside the weights of a model; its attention and code head come on top."""
    monkeypatch.setattr("kit.base.hardware.matmul_ms", lambda hw: {"fp32": 2.0, "bf16": 1.0})
    trials.peak_flops.cache_clear()
    operations = 2e3 * math.prod(MATMUL_SHAPES["cpu"]) / trials.peak_tokens_per_s(TASK)
    matrices = sum(p.numel() for p in SpeechGPT(GPT).gpt.h.parameters() if p.dim() == 2)
    assert 6 * matrices < operations < 2 * 6 * matrices
    monkeypatch.setattr("kit.base.hardware.matmul_ms", lambda hw: {})
    trials.peak_flops.cache_clear()
    assert trials.peak_tokens_per_s(TASK) == math.inf
    trials.peak_flops.cache_clear()
