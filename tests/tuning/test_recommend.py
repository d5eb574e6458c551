"""Advice for devices and purposes: settings that exist, each with its reason."""

import dataclasses

import pytest
from helpers import CPU

from kit.base.config import CONFIGS, build, load_preset
from kit.base.errors import KitError
from kit.base.hardware import Hardware
from kit.settings import DataConfig, GPTConfig, SpeedConfig, TrainConfig
from kit.tuning import recommend

SECTIONS = {"model": GPTConfig, "train": TrainConfig, "speed": SpeedConfig, "data": DataConfig}
OVERLAYS = sorted(path.stem for path in (CONFIGS / "use").glob("*.yaml"))
# GiB as the driver reports them, compute capability.
CARDS = {"RTX 2060": (5.8, (7, 5)), "RTX 2070": (7.8, (7, 5))}
CARDS |= {"T4": (14.7, (7, 5)), "RTX 3060": (11.6, (8, 6)), "RTX 4090": (23.6, (8, 9))}
CARDS |= {"H100": (79.1, (9, 0)), "a card of next year": (300.0, (13, 0))}


def card(name: str) -> Hardware:
    gib, capability = CARDS[name]
    gpu = dataclasses.replace(CPU, device="cuda", name=name, capability=capability)
    return dataclasses.replace(gpu, memory_bytes=int(gib * 2**30))


def values(advice: dict[str, dict]) -> dict:
    return {setting: each["value"] for setting, each in advice.items()}


@pytest.mark.parametrize("hw", [CPU, *map(card, CARDS)], ids=lambda hw: hw.name)
def test_every_line_is_a_setting_there_is_with_a_reason(hw):
    found = recommend.recommend(hw)
    assert found
    for setting, each in found.items():
        assert len(each["why"]) > 10
        section, key = setting.split(".")
        base = {"data": {"effective_batch": 64, "micro_batch": 64}}.get(section, {})
        built = build(SECTIONS[section], base | {key: each["value"]})
        assert getattr(built, key) == each["value"]


def test_small_cards_save_memory_and_large_ones_time():
    found = {name: values(recommend.recommend(card(name))) for name in CARDS}
    recompute = "speed.gradient_checkpointing"
    assert found["RTX 2060"][recompute] is True
    assert recompute not in found["T4"] | found["H100"], "the plan of the model decides"
    # A card reports less than its name says; it counts as what it is sold as.
    assert found["RTX 2060"]["speed.ema_offload"] and "speed.ema_offload" not in found["RTX 2070"]


def test_each_architecture_gets_what_it_has():
    found = {name: values(recommend.recommend(card(name))) for name in CARDS}
    assert found["T4"]["speed.mixed_precision"]
    assert not found["T4"]["speed.tf32"] and found["RTX 4090"]["speed.tf32"]
    assert found["H100"]["speed.compile"] and found["a card of next year"]["speed.compile"]
    assert all(each["speed.pinned_memory"] is True for each in found.values())
    assert values(recommend.recommend(CPU))["speed.pinned_memory"] is False


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_overlay_gives_a_reason_for_each_setting_and_no_more(name):
    advice = recommend.use_advice(name)
    assert set(advice) == set(load_preset(name, CONFIGS / "use")["why"])
    assert advice and all(each["why"] for each in advice.values())
    with pytest.raises(KitError, match=f"Did you mean `{name}`"):
        recommend.use_advice(name[:-1])
