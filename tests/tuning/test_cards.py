"""GPUs by name, and the time of a step beside what was measured or calculated elsewhere."""

import dataclasses

import pytest

from kit.base.config import build, load_preset
from kit.base.errors import KitError
from kit.settings import DataConfig, FinetuneConfig, GPTConfig, SpeedConfig, TrainConfig
from kit.training.config import FULL, Base, Finetuning
from kit.tuning.cards import find_card, known_cards, step_flop, step_seconds
from kit.tuning.memory_plan import Workload
from kit.tuning.preflight import make_fit, preflight

XTTS = build(GPTConfig, load_preset("xtts_v2")["model"])
ADAPTERS = Finetuning(
    config=FinetuneConfig(method="lora"), base=Base(config=XTTS, sha256="", weights="file")
)
FAST = {"sdpa": True, "mixed_precision": True, "fused_adamw": True, "ema": True}


def workload(card: str, rows: int, effective: int = 0, **over) -> Workload:
    settings = {
        "model": XTTS,
        "train": TrainConfig(),
        "speed": SpeedConfig(**FAST),
        "data": DataConfig(
            effective_batch=effective or rows, micro_batch=rows, reference_frames=258
        ),
        "hw": find_card(card),
        "precision": "fp16",
    }
    return Workload(**settings | over)


FOUND = {
    "T4": ("T4", 14.6, (7, 5)),
    "Tesla T4": ("T4", 14.6, (7, 5)),
    "NVIDIA GeForce RTX 3080": ("RTX 3080", 9.78, (8, 6)),
    "4090": ("RTX 4090", 23.6, (8, 9)),
    "a100 80GB": ("A100 80", 79.1, (8, 0)),
    "16 GiB, 7.5": ("GPU of 16 GiB, 7.5", 16, (7, 5)),
    " 9.78gb,8.6 ": ("GPU of 9.78 GiB, 8.6", 9.78, (8, 6)),
}


@pytest.mark.parametrize("text", FOUND)
def test_a_gpu_is_found_by_name_or_by_memory_and_capability(text):
    name, gib, capability = FOUND[text]
    hw = find_card(text)
    assert (hw.name, hw.capability, hw.device) == (name, capability, "cuda")
    assert hw.memory_bytes == int(gib * 2**30)


@pytest.mark.parametrize("text", ["", "T5", "A100", "16 GiB", "7.5", "0 GiB, 7.5", "16, 7.5", "-1"])
def test_anything_else_is_refused_with_an_example_and_the_names(text):
    with pytest.raises(KitError) as raised:
        find_card(text)
    assert "16 GiB, 7.5" in str(raised.value) and "A100 40" in str(raised.value)
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize(("rows", "measured_s"), [(8, 0.100), (32, 0.156)])
def test_a_step_on_an_h200_takes_what_was_measured_there(rows, measured_s):
    """4,426 tokens in 8 rows (docs/measurements.md)."""
    assert step_seconds(workload("H200", rows), 4426 / 8) == pytest.approx(measured_s, rel=0.1)


def test_adapters_compute_a_third_less_and_recomputing_a_third_more():
    plain = step_flop(workload("T4", 8), 170)
    assert plain == pytest.approx(8 * 170 * 6 * 441e6, rel=0.2), "6 a weight and token"
    assert step_flop(workload("T4", 8, finetuning=ADAPTERS), 170) == pytest.approx(plain * 2 / 3)
    for every, share in ((1, 4 / 3), (2, 7 / 6)):
        speed = SpeedConfig(gradient_checkpointing=True, recompute_every=every)
        assert step_flop(workload("T4", 8, speed=speed), 170) == pytest.approx(plain * share)
    split = step_seconds(workload("T4", 2, effective=8), 170)
    assert split >= step_seconds(workload("T4", 8), 170), "more passes are never faster"


def test_the_seconds_of_an_unknown_gpu_are_unknown():
    assert step_seconds(workload("24 GiB, 12.0", 8), 170) is None
    assert all(find_card(name).name == name for name in known_cards())


def test_all_weights_of_xtts_v2_fit_a_t4_recomputed_unless_that_is_forbidden():
    """At the longest rows that the model has positions for."""
    work = workload("T4", 16)
    assert work.planned_bytes > work.max_memory_fraction * work.hw.memory_bytes
    fitting, verdict = make_fit(work)
    assert verdict.fits and not verdict.tried and verdict.micro_batch == 16
    assert fitting.speed == dataclasses.replace(work.speed, gradient_checkpointing=True)
    forbidden, verdict = make_fit(work, ("gradient_checkpointing",))
    assert verdict.fits and not forbidden.speed.gradient_checkpointing
    small = workload("4 GiB, 7.5", 16, finetuning=dataclasses.replace(ADAPTERS, config=FULL.config))
    assert "`finetune.method` lora" in preflight(small).change
