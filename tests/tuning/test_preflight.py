"""Preflight and search: they reject what cannot fit, name the fix, and change nothing."""

import dataclasses

import pytest
import torch
from helpers import CPU, GPT

from kit.base.config import build, load_preset
from kit.base.errors import KitError
from kit.base.hardware import Hardware
from kit.settings import DataConfig, GPTConfig, SpeedConfig, TrainConfig
from kit.tuning import preflight
from kit.tuning.memory_plan import Workload

MODEL = dataclasses.replace(GPT, width=64, heads=4, n_mels=80, max_text=100, max_code=400)


def workload(memory_bytes: int = 2**33, rows: int = 8, **over) -> Workload:
    hw = dataclasses.replace(CPU, memory_bytes=memory_bytes)
    data = DataConfig(effective_batch=8, micro_batch=rows, reference_frames=40)
    settings = {"model": MODEL, "train": TrainConfig(), "speed": SpeedConfig(), "data": data}
    return Workload(**settings | {"hw": hw} | over)


def test_what_fits_is_tried_and_says_so_and_draws_no_random_number():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    verdict = preflight.preflight(workload())
    assert torch.equal(torch.rand(3), expected)
    assert verdict.fits and verdict.tried and not verdict.change
    assert verdict.measured_bytes == pytest.approx(verdict.planned_bytes, rel=0.2)
    assert verdict.reserved_bytes is None, "on a CPU nothing is reserved"
    assert str(verdict).startswith("It fits. micro_batch 8: planned 0.") and "GiB" in str(verdict)


def test_what_the_plan_refuses_is_not_tried_on_a_cpu():
    work = workload()
    small = workload(memory_bytes=int(0.6 * work.planned_bytes / 0.9))
    verdict = preflight.preflight(small)
    assert not verdict.fits and not verdict.tried and verdict.measured_bytes is None
    assert verdict.change == "Change: sdpa on." and str(verdict).endswith(verdict.change)


def test_the_change_it_names_really_fits():
    work = workload()
    for share in (0.8, 0.5, 0.1):
        room = int(share * work.planned_bytes)
        fitting = preflight.first_fitting(work, room)
        assert preflight.trial_peak(fitting)["measured_bytes"] <= 1.15 * room


def test_free_savings_come_before_those_that_cost_time():
    work = workload()
    free = dataclasses.replace(work, speed=SpeedConfig(sdpa=True))
    room = [each.planned_bytes for each in (free, free.with_rows(4), free.with_rows(2))]
    assert preflight.change(work, room[0]) == "Change: sdpa on."
    assert preflight.change(work, room[1]) == "Change: micro_batch 8 -> 4, sdpa on."
    assert preflight.change(work, room[2] - 1).endswith("gradient_checkpointing on.")


SWITCHES = ("sdpa", "gradient_checkpointing", "ema_offload", "adamw_8bit")


@pytest.mark.parametrize(
    ("kept", "rows", "on"),
    [
        pytest.param((), 32, {"sdpa"}, marks=pytest.mark.long),
        pytest.param(("sdpa",), 8, {"gradient_checkpointing"}, marks=pytest.mark.long),
        (SWITCHES, 8, set()),
    ],
)
def test_the_mildest_change_that_fits_is_made_but_what_a_person_set_stays(kept, rows, on):
    work = workload(data=DataConfig(effective_batch=64, micro_batch=64, reference_frames=40))
    limit = work.with_rows(8).planned_bytes * 1.15
    small = dataclasses.replace(CPU, memory_bytes=int(limit / 0.9))
    fitting, verdict = preflight.make_fit(dataclasses.replace(work, hw=small), kept)
    assert verdict.fits and fitting.planned_bytes <= limit
    assert {name for name in SWITCHES if getattr(fitting.speed, name)} == on
    assert (verdict.micro_batch, fitting.data.effective_batch) == (rows, 64)


def test_a_run_of_which_not_one_row_fits_is_refused_with_a_fix():
    assert "smaller tier" in preflight.preflight(workload(memory_bytes=2**20)).change
    with pytest.raises(KitError, match=r"Not even one row.*micro_batch 1: planned.*smaller tier"):
        preflight.make_fit(workload(memory_bytes=2**20))


@pytest.mark.long
def test_changes_that_need_more_than_what_was_checked_are_tried():
    work = workload(speed=SpeedConfig(sdpa=True), rows=4)
    checked = preflight.preflight(work)
    assert preflight.check_changes(work, checked, work.with_rows(2)) == ""
    more = dataclasses.replace(work.with_rows(8), speed=SpeedConfig(ema=True))
    note = preflight.check_changes(work, checked, more)
    assert "micro_batch 4 -> 8, sdpa off, ema on. It fits. micro_batch 8: planned" in note
    tight = dataclasses.replace(CPU, memory_bytes=int(work.planned_bytes * 1.1 / 0.9))
    with pytest.raises(KitError, match=r"sdpa off, ema on\. It does not fit.*Change: "):
        preflight.check_changes(work, checked, dataclasses.replace(more, hw=tight))


def test_a_trial_that_runs_out_of_memory_is_a_verdict_with_a_fix(monkeypatch):
    def out_of_memory(_work):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(preflight, "some_steps", out_of_memory)
    verdict = preflight.preflight(workload())
    assert verdict.tried and not verdict.fits and verdict.measured_bytes is None
    assert "ran out of memory" in str(verdict) and "Change: " in verdict.change


def gpu_step(name: str, gib: float) -> Workload:
    """A step of the preset `name` on a T4 of that memory."""
    preset = load_preset(name)
    sizes = {"ram_bytes": 2**34, "memory_bytes": int(gib * 2**30)}
    hw = Hardware(device="cuda", name=name, cores=2, capability=(7, 5), **sizes)
    sections = {"model": GPTConfig, "train": TrainConfig, "speed": SpeedConfig, "data": DataConfig}
    built = {name: build(cls, preset[name]) for name, cls in sections.items()}
    return Workload(hw=hw, precision="fp16", **built)


def test_rows_are_padded_as_the_stream_pads_them():
    data = {"effective_batch": 8, "micro_batch": 8}
    length = lambda **over: workload(data=DataConfig(**data | over)).length  # noqa: E731
    own = MODEL.max_text + MODEL.max_code
    assert length() == own == 500
    assert length(length_multiple=64) == 512
    assert length(grid_lengths=(256, 600)) == 600


def test_the_limit_is_a_share_of_the_device_and_no_more_than_is_free():
    for share in (0.0, 1.5):
        with pytest.raises(KitError, match="max_memory_fraction"):
            workload(max_memory_fraction=share)
    assert preflight.limit_memory(dataclasses.replace(CPU, memory_bytes=2**30), 0.5) == 2**29
    assert preflight.limit_memory(dataclasses.replace(CPU, memory_bytes=2**60), 1.0) < 2**50


def test_a_peak_is_measured_though_it_is_gone_at_the_end():
    def step():
        first = torch.zeros(1000, 1000)
        del first
        torch.zeros(10)
        return 2.0

    peak = preflight.measure_peak(step, "cpu")
    assert peak.pop("measured_bytes") == pytest.approx(4e6, rel=0.01)
    assert peak == {"reserved_bytes": None, "step_s": 2.0}


def test_on_a_gpu_reserved_memory_is_judged_and_both_figures_are_reported(monkeypatch):
    work = gpu_step("t4", 14.6)
    limit_gib = 0.9 * 14.6
    monkeypatch.setattr(preflight, "is_here", lambda _hw: True)
    monkeypatch.setattr(preflight, "limit_memory", lambda *_: int(limit_gib * 2**30))
    for reserved_gib, fits in ((8.0, True), (limit_gib + 0.2, False)):
        peak = {"measured_bytes": 5 * 2**30, "reserved_bytes": int(reserved_gib * 2**30)}
        monkeypatch.setattr(preflight, "trial_peak", lambda _work, peak=peak: peak)
        verdict = preflight.preflight(work)
        assert verdict.fits is fits and bool(verdict.change) is not fits and verdict.tried
        assert "5.00 GiB" in str(verdict) and f"{reserved_gib:.2f} GiB reserved" in str(verdict)
        assert f"{limit_gib:.2f} GiB it may use" in str(verdict)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_plan_is_near_the_measured_peak():
    from kit.base.hardware import choose_precision, detect

    hw = detect()
    work = dataclasses.replace(gpu_step("8gb", 8), hw=hw, precision=choose_precision(hw).value)
    for rows, switches in ((8, {"sdpa": True}), (4, {}), (8, {"gradient_checkpointing": True})):
        speed = SpeedConfig(mixed_precision=True, fused_adamw=True, ema=True, **switches)
        tried = dataclasses.replace(work.with_rows(rows), speed=speed)
        assert tried.planned_bytes == pytest.approx(
            preflight.trial_peak(tried)["measured_bytes"], rel=0.2
        )
