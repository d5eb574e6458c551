"""Recommendations: each with a reason, each about a setting there is."""

import dataclasses

import pytest
from helpers import CPU

from kit.base.config import CONFIGS, build, load_preset, merge
from kit.base.errors import KitError
from kit.base.hardware import Hardware
from kit.batches.batching import DataConfig
from kit.model.sequence import GPTConfig
from kit.training.config import TrainConfig
from kit.training.switches import SpeedConfig
from kit.tuning.recommend import Advice, advice_table, overlay, recommend

SECTIONS = {"model": GPTConfig, "train": TrainConfig, "speed": SpeedConfig, "data": DataConfig}
PRESETS = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
OVERLAYS = sorted(path.stem for path in (CONFIGS / "use").glob("*.yaml"))
CARDS = {  # GiB as the driver reports them, compute capability
    "GTX 1060": (5.9, (6, 1)),
    "GTX 1080": (7.9, (6, 1)),
    "V100": (15.8, (7, 0)),
    "T4": (14.7, (7, 5)),
    "RTX 3060": (11.6, (8, 6)),
    "RTX 4090": (23.6, (8, 9)),
    "H100": (79.1, (9, 0)),
    "a card of next year": (300.0, (13, 0)),
}


def card(name: str) -> Hardware:
    gib, capability = CARDS[name]
    size = int(gib * 2**30)
    return dataclasses.replace(
        CPU, device="cuda", name=name, memory_bytes=size, capability=capability
    )


def values(advice: list[Advice]) -> dict:
    return {a.setting: a.value for a in advice}


@pytest.mark.parametrize("hw", [CPU, *map(card, CARDS)], ids=lambda hw: hw.name)
def test_every_line_is_a_setting_there_is_with_a_reason(hw):
    found = recommend(hw)
    assert found and len(values(found)) == len(found)  # a setting is named once
    for advice in found:
        assert len(advice.reason) > 10
        section, key = advice.setting.split(".")
        base = {"data": {"effective_batch": 64, "micro_batch": 64}}.get(section, {})
        built = build(SECTIONS[section], base | {key: advice.value})
        assert getattr(built, key) == advice.value


def test_small_cards_save_memory_and_large_ones_time():
    small, middle, large = (values(recommend(card(c))) for c in ("GTX 1060", "T4", "H100"))
    assert small["speed.gradient_checkpointing"] and small["speed.ema_offload"]
    assert not middle["speed.gradient_checkpointing"] and not large["speed.gradient_checkpointing"]
    # A card reports less than its name says; it counts as what it is sold as.
    assert "speed.ema_offload" not in values(recommend(card("GTX 1080")))


def test_each_architecture_gets_what_it_has():
    found = {name: values(recommend(card(name))) for name in CARDS}
    assert not found["GTX 1060"]["speed.mixed_precision"]
    assert found["V100"]["speed.mixed_precision"] and found["T4"]["speed.mixed_precision"]
    assert not found["T4"]["speed.tf32"] and found["RTX 4090"]["speed.tf32"]
    assert found["H100"]["speed.compile"] and found["a card of next year"]["speed.compile"]


@pytest.mark.parametrize("name", CARDS)
def test_every_gpu_makes_its_batches_ahead_and_no_cpu_does(name):
    assert values(recommend(card(name)))["speed.pinned_memory"] is True
    assert values(recommend(CPU))["speed.pinned_memory"] is False


def test_an_unknown_overlay_names_the_nearest():
    with pytest.raises(KitError, match="Did you mean `speed`"):
        overlay("sped")


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_overlay_gives_a_reason_for_each_setting_and_no_more(name):
    found = overlay(name)
    settings = {f"{s}.{k}" for s, section in found.sections.items() for k in section}
    assert settings == {a.setting for a in found.advice} and settings
    assert settings == set(load_preset(name, CONFIGS / "use")["why"])
    assert all(a.reason for a in found.advice)


@pytest.mark.parametrize("name", OVERLAYS)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_overlay_can_be_laid_over_every_preset(preset, name):
    laid = merge(load_preset(preset), overlay(name).sections)
    for section, cls in SECTIONS.items():
        build(cls, laid[section])


def test_the_table_says_on_and_off_and_leaves_numbers():
    rows = [
        Advice(setting="speed.ema", value=True, reason="why"),
        Advice(setting="speed.recompute_every", value=1, reason="all"),
    ]
    assert advice_table(rows) == {"speed.ema": "on: why", "speed.recompute_every": "1: all"}
