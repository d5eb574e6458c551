"""The search for the fastest settings, without training: on a made table of timings."""

import dataclasses
import math

import pytest
from helpers import CPU, GPT

from kit.base.errors import KitError
from kit.batches.batching import DataConfig
from kit.training.config import TrainConfig
from kit.training.switches import SpeedConfig
from kit.tuning.preflight import Workload, changed_settings
from kit.tuning.recommend import (
    Target,
    axes_of,
    fastest,
    is_better,
    judge,
    parse_target,
    search,
    tried_cells,
)

GIB = 2**30
KERNELS = {"flash": "", "efficient": "only a GPU has it", "cudnn": "only a GPU has it", "math": ""}
NOT_HERE = {"pinned_memory": "only a GPU", "ema_offload": "only a GPU", "cuda_graphs": "only a GPU"}
START = Workload(
    model=GPT,
    train=TrainConfig(),
    speed=SpeedConfig(sdpa=True, mixed_precision=True),
    data=DataConfig(effective_batch=16, micro_batch=4),
    hw=CPU,
)
AXES, OFF = axes_of(START.speed, NOT_HERE, KERNELS)


def figures(work: Workload, **over) -> dict:
    """Made: larger passes are faster and take more, compiling helps, recomputing saves memory."""
    rows = work.data.micro_batch
    step_s = 1.0 + 2.0 / rows
    memory = GIB * (1 + rows)
    if work.speed.compile:
        step_s *= 0.8
    if work.speed.gradient_checkpointing:
        step_s *= 1 + 0.3 / work.speed.recompute_every
        memory -= 0.5 * GIB * rows / work.speed.recompute_every
    if not work.speed.sdpa or work.speed.attention_kernel == "math":
        step_s *= 1.3
    made = {"step_seconds": [step_s] * 9 + [60.0], "loss": 3.0, "precision": "fp32"}
    return made | {"peak_memory_bytes": memory} | over


def found(target: str = "", measure=lambda work, steps: figures(work), start=START) -> tuple:
    tried = []
    *_, best = search(start, AXES, measure, parse_target(target), 8, tried)
    return best, tried


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("", Target()),
        ("memory<5GiB, step<2s", Target(memory=5 * GIB, step=2.0)),
        ("step <= 500 ms", Target(step=0.5)),
        ("memory<1.5gb", Target(memory=1.5e9)),
    ],
)
def test_a_target_names_memory_step_or_both(text, target):
    assert parse_target(text) == target


@pytest.mark.parametrize(
    "text", ["fast", "memory<5", "memory<5s", "step<2GiB", "step>2s", "step<0s", "step<1s, step<2s"]
)
def test_a_target_that_cannot_be_read_is_a_sentence_with_the_form(text):
    with pytest.raises(KitError, match=r"memory<5GiB.*step<2s"):
        parse_target(text)


def test_the_fastest_settings_are_found_with_a_larger_micro_batch():
    best, tried = found()
    assert changed_settings(START, best.work) == ["micro_batch 4 -> 16", "compile on"]
    assert best.work.data.effective_batch == 16
    assert len({row.work for row in tried}) == len(tried) > 6


def test_memory_is_limited_by_the_target():
    best, _ = found("memory<6GiB")
    assert best.memory_bytes <= 6 * GIB and not best.excess
    assert best.work.data.micro_batch == 4 and best.work.speed.compile


def test_what_cannot_be_reached_leaves_the_nearest_beyond_the_target():
    best, _ = found("memory<1GiB")
    assert best.excess > 0 and best.work.data.micro_batch == 1


def test_a_setting_that_moves_the_loss_is_refused_however_fast():
    def measure(work, steps):
        return figures(work, loss=3.1) if work.speed.compile else figures(work)

    best, tried = found("", measure)
    assert not best.work.speed.compile
    refused = [row for row in tried if row.work.speed.compile]
    assert refused and all("loss" in row.reason for row in refused)
    table = tried_cells(tried, START, OFF)
    assert any("+3.333%" in row and "loss" in row[-1] for row in table)
    assert ("attention_kernel cudnn", "", "", "", "", "only a GPU has it") in table


def test_a_loss_that_is_no_number_is_refused():
    row = judge(START, 4, figures(START, loss=math.nan), figures(START), Target())
    assert row.reason and not is_better(
        row, judge(START, 4, figures(START), figures(START), Target())
    )


def test_what_fails_is_a_row_with_its_reason():
    def measure(work, steps):
        return {"error": "out of memory"} if work.data.micro_batch > 4 else figures(work)

    best, tried = found("", measure)
    assert best.work.data.micro_batch == 4
    assert {r.reason for r in tried if r.work.data.micro_batch > 4} == {"out of memory"}


def test_a_start_that_fails_is_a_sentence():
    with pytest.raises(KitError, match="out of memory"):
        found("", lambda work, steps: {"error": "out of memory"})


def test_when_time_is_up_the_best_so_far_stays():
    calls = []

    def measure(work, steps):
        calls.append((work, steps))
        if len(calls) > 12:
            raise TimeoutError
        return figures(work)

    best, _ = found("", measure)
    assert changed_settings(START, best.work) == ["micro_batch 4 -> 16"]


def test_the_best_is_measured_again_beside_its_rivals():
    """The machine becomes busy: what was measured before must not look faster than all rivals."""
    calls = []

    def measure(work, steps):
        calls.append(work)
        load = 1 + len(calls) / 10
        made = figures(work)
        return made | {"step_seconds": [load * s for s in made["step_seconds"]]}

    best, _ = found("", measure)
    assert "compile on" in changed_settings(START, best.work)


def test_a_busy_moment_of_one_turn_is_passed_over():
    turns = [figures(START, step_seconds=s) for s in ([1.0, 9.0, 2.0], [8.0, 1.5, 2.5])]
    assert fastest(turns)["step_seconds"] == [1.0, 1.5, 2.0]
    assert fastest([turns[0], {"error": "out of memory"}]) == {"error": "out of memory"}


def test_only_the_better_half_is_measured_for_long():
    calls = []

    def measure(work, steps):
        calls.append((work.data.micro_batch, steps))
        return figures(work)

    found("", measure)
    few = {rows for rows, steps in calls if steps == 4}
    many = {rows for rows, steps in calls if steps == 8}
    assert few == {1, 2, 4, 8, 16} and many == {4, 8, 16}


def test_as_fast_with_less_memory_is_better_and_noise_is_not():
    old = judge(START, 4, figures(START), figures(START), Target())
    assert not is_better(old._replace(step_s=0.99 * old.step_s), old)
    assert is_better(old._replace(step_s=0.97 * old.step_s), old)
    assert is_better(old._replace(memory_bytes=0.8 * old.memory_bytes), old)


def test_settings_left_out_or_missing_here_are_not_varied():
    names = {name for axis in AXES for name in axis[0]}
    assert "pinned_memory" not in names and {"compile", "adamw_8bit", "sdpa"} <= names
    with_ema = dataclasses.replace(START.speed, ema=True)
    axes, _ = axes_of(with_ema, {}, KERNELS)
    assert any("ema_offload" in axis[0] for axis in axes)
    assert {"compile": True, "cuda_graphs": True} in [values for axis in axes for values in axis]
