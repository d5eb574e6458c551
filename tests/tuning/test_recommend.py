"""Advice for devices and purposes: settings that exist, each with its reason."""

import pytest
from helpers import CPU
from test_presets import OVERLAYS, SECTIONS, card

from kit.base.config import CONFIGS, build, load_preset
from kit.base.errors import KitError
from kit.tuning import recommend

CARDS = {name: card(name) for name in ("RTX 2060", "RTX 2070", "T4", "RTX 3090", "H100")}


@pytest.mark.parametrize("hw", [CPU, *CARDS.values()], ids=lambda hw: hw.name)
def test_every_line_is_a_setting_there_is_with_a_reason(hw):
    found = recommend.recommend(hw)
    assert found
    for setting, each in found.items():
        assert len(each["why"]) > 10
        section, key = setting.split(".")
        base = {"data": {"effective_batch": 64, "micro_batch": 64}}.get(section, {})
        built = build(SECTIONS[section], base | {key: each["value"]})
        assert getattr(built, key) == each["value"]


def test_small_cards_save_memory_and_each_architecture_gets_what_it_has():
    found = {}
    for name, hw in CARDS.items():
        advice = recommend.recommend(hw)
        found[name] = {setting.split(".")[1]: each["value"] for setting, each in advice.items()}
    assert found["RTX 2060"]["gradient_checkpointing"] is True
    # A card reports less than its name says; it counts as what it is sold as.
    assert found["RTX 2060"]["ema_offload"] and "ema_offload" not in found["RTX 2070"]
    recompute = "gradient_checkpointing"
    assert recompute not in found["T4"] | found["H100"], "the plan of the model decides"
    assert found["T4"]["mixed_precision"] and found["H100"]["compile"]
    assert not found["T4"]["tf32"] and found["RTX 3090"]["tf32"]
    assert all(each["pinned_memory"] is True for each in found.values())
    assert recommend.recommend(CPU)["speed.pinned_memory"]["value"] is False


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_overlay_gives_a_reason_for_each_setting_and_no_more(name):
    advice = recommend.use_advice(name)
    assert set(advice) == set(load_preset(name, CONFIGS / "use")["why"])
    assert advice and all(each["why"] for each in advice.values())
    with pytest.raises(KitError, match=f"Did you mean `{name}`"):
        recommend.use_advice(name[:-1])
