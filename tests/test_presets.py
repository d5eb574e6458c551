"""Presets of real cards: values of their own, memory and time that the card they are for has."""

import dataclasses

import pytest
from helpers import CPU

from kit.base.config import CONFIGS, build, load_preset, merge
from kit.base.errors import KitError
from kit.base.hardware import Hardware, choose_precision, choose_preset
from kit.settings import DataConfig, GPTConfig, SpeedConfig, TrainConfig
from kit.training.switches import LABELS, switches
from kit.tuning.estimate import resolve_steps
from kit.tuning.memory_plan import Workload
from kit.tuning.recommend import recommend

SECTIONS = {"model": GPTConfig, "train": TrainConfig, "speed": SpeedConfig, "data": DataConfig}
# (GiB as the driver reports them, compute capability, tier)
CARDS = {
    "GTX 1650": (3.9, (7, 5), "8gb"),
    "RTX 2060": (5.8, (7, 5), "8gb"),
    "RTX 2070": (7.8, (7, 5), "8gb"),
    "RTX 3050": (7.8, (8, 6), "8gb"),
    "T4": (14.6, (7, 5), "t4"),
    "RTX 2080 Ti": (10.7, (7, 5), "12gb"),
    "RTX 3080": (9.78, (8, 6), "12gb"),
    "RTX 3060": (11.6, (8, 6), "12gb"),
    "RTX 4080": (15.7, (8, 9), "12gb"),
    "L4": (22.2, (8, 9), "24gb"),
    "RTX 3090": (23.6, (8, 6), "24gb"),
    "A100 40": (39.4, (8, 0), "24gb"),
    "A6000": (47.4, (8, 6), "24gb"),
    "A100 80": (79.1, (8, 0), "80gb"),
    "H100": (79.1, (9, 0), "80gb"),
    "H200": (139.8, (9, 0), "80gb"),
}
TIERS = ("8gb", "t4", "12gb", "24gb", "80gb")
GPU_PRESETS = (*TIERS, "xtts_v2")
OVERLAYS = sorted(path.stem for path in (CONFIGS / "use").glob("*.yaml"))
each_card = pytest.mark.parametrize("name", CARDS)
each_tier = pytest.mark.parametrize("name", GPU_PRESETS)


def card(name: str) -> Hardware:
    gib, capability, _ = CARDS[name]
    gpu = {"device": "cuda", "memory_bytes": int(gib * 2**30), "capability": capability}
    return dataclasses.replace(CPU, name=name, **gpu)


def workload(preset: dict, hw: Hardware, **over) -> Workload:
    built = {section: build(cls, preset[section]) for section, cls in SECTIONS.items()}
    return Workload(hw=hw, precision=choose_precision(hw).value, **built | preset["memory"] | over)


def fits(work: Workload) -> bool:
    return work.planned_bytes <= work.max_memory_fraction * work.hw.memory_bytes


def laid_over(preset: dict, use: str) -> dict:
    """`preset` with the overlay `use` over it; "" is none."""
    overlay = load_preset(use, CONFIGS / "use") if use else {}
    overlay.pop("why", None)  # the reasons
    return merge(preset, overlay)


@each_tier
def test_a_run_from_a_base_model_is_short(name):
    preset = load_preset(name)
    scratch, tuned = preset, merge(preset, preset["base_model"])
    data = build(DataConfig, tuned["data"])
    assert data.effective_batch == 16 and tuned["model"] == scratch["model"]
    train = build(TrainConfig, tuned["train"])
    epoch_steps = 3 * 3600 // 5 // data.effective_batch  # 3 hours in clips of 5 s
    steps = resolve_steps(train, epoch_steps)
    assert 6 <= steps.max_steps / epoch_steps <= 20
    assert (train.min_steps, steps.gate_every, steps.eval_steps) == (300, 100, 100)
    assert 0 < train.lr_plateau_patience < train.early_stopping_patience
    for few in (1, epoch_steps):  # checkpoints, evaluations and an end before the last step
        short = resolve_steps(train, few)
        assert short.gate_every * short.gate_patience < short.max_steps
        assert short.save_steps < short.max_steps and short.warmup_steps <= short.max_steps / 10
    assert build(TrainConfig, scratch["train"]).min_steps == 4000


@pytest.mark.parametrize("use", ["", *OVERLAYS])
@pytest.mark.parametrize("name", ["tiny", "cpu", *GPU_PRESETS])
def test_every_preset_halves_its_rates_on_a_plateau_before_it_stops(name, use):
    """A GPU has batches made ahead and adapts to spikes, too."""
    sections = laid_over(load_preset(name), use)
    train = build(TrainConfig, sections["train"])
    assert 0 < train.lr_plateau_patience < train.early_stopping_patience
    if name in GPU_PRESETS:
        assert sections["speed"]["pinned_memory"] is (use != "debug")
        assert train.spike > 1


@pytest.mark.parametrize("name", ["tiny", "cpu", *GPU_PRESETS])
def test_debugging_turns_every_optimisation_off(name):
    debug = laid_over(load_preset(name), "debug")
    speed = dataclasses.asdict(build(SpeedConfig, debug["speed"]))
    assert not any(speed[switch] for switch in LABELS)
    assert build(TrainConfig, debug["train"]).detect_anomaly
    for use in ("", *OVERLAYS):
        if use != "debug":
            assert not build(TrainConfig, laid_over(load_preset(name), use)["train"]).detect_anomaly


@each_card
def test_every_card_gets_its_tier_and_recommendations_agree_with_it(name):
    hw, wanted = card(name), CARDS[name][2]
    choice = choose_preset(hw)
    assert choice.value == wanted, choice.reason
    assert name in choice.reason and "GiB" in choice.reason
    preset = laid = load_preset(wanted)
    for setting, each in recommend(hw).items():
        section, key = setting.split(".")
        laid = merge(laid, {section: {key: each["value"]}})
    recompute = "gradient_checkpointing"
    assert laid["speed"].get(recompute, False) == preset["speed"].get(recompute, False)
    on = {each.name for each in switches(build(SpeedConfig, preset["speed"]), hw) if each.on}
    assert ("tf32" in on) == (hw.capability >= (8, 0))
    assert fits(workload(laid, hw))


def test_the_reason_names_what_decided():
    reason = lambda name: choose_preset(card(name)).reason  # noqa: E731
    assert "no bf16" in reason("T4")
    assert "gpu" not in {path.stem for path in CONFIGS.glob("*.yaml")}
    with pytest.raises(KitError, match="no preset `gpu`"):
        load_preset("gpu")
    hw = card("A100 40")
    work = workload(load_preset("80gb"), hw)
    assert fits(work.with_rows(16)) and not fits(work)


@pytest.mark.parametrize("use", ["", *OVERLAYS])
@each_card
def test_every_cards_tier_fits_in_the_precision_it_has(name, use):
    hw = card(name)
    assert fits(workload(laid_over(load_preset(CARDS[name][2]), use), hw))
