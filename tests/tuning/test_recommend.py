"""Advice with reasons; what measured switches are worth."""

import dataclasses

import pytest
import yaml
from helpers import CPU

from kit.base.config import CONFIGS, build, load_preset
from kit.base.errors import KitError
from kit.base.hardware import Hardware
from kit.settings import DataConfig, GPTConfig, SpeedConfig, TrainConfig
from kit.training.switches import load_choice
from kit.tuning import recommend
from kit.tuning.recommend import LEFT_OUT, Trial, chosen

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


LABELS = {"sdpa": "Fused attention", "tf32": "TF32", "gradient_checkpointing": "Checkpointing"}
SWITCHES = tuple(LABELS)
BASELINE = Trial(kind="baseline", label="Baseline")
ALONE = [Trial(kind="alone", label=LABELS[n], on=(n,)) for n in SWITCHES]
ALL = [Trial(kind="added", label="+ TF32", on=SWITCHES[:2])]
ALL += [Trial(kind="added", label="+ Checkpointing", on=SWITCHES)]


def result(on: tuple = (), seconds: float = 10.0, memory: float = 100.0, **over) -> dict:
    made = {"on": list(on), "seconds": seconds, "steps": 20, "tokens": 4000, "loss": 5.0}
    made |= {"peak_memory_bytes": int(memory * 2**20), "warmup_s": 1.0, "recompilations": 0}
    made |= {"skipped": 0, "precision": "fp32", "attention": "explicit softmax", "notes": []}
    return made | over


def rows(*results: dict, dropout: float = 0.0) -> list:
    return recommend.compare([BASELINE, *ALONE, *ALL], list(results), dropout)


def decide(*results: dict, goal: str = "speed", dropout: float = 0.0) -> dict[str, bool]:
    return {d.name: d.on for d in recommend.choose_switches(rows(*results, dropout=dropout), goal)}


FASTER = [result(), result(("sdpa",), 8.0), result(("tf32",), 9.9)]
FASTER += [result(("gradient_checkpointing",), 10.8, 60.0)]
FASTER += [result(SWITCHES[:2], 7.95), result(SWITCHES, 8.6, 50.0)]


def test_the_median_round_counts_also_as_a_share_of_the_devices_matmuls():
    (row,) = recommend.compare([BASELINE], [result(seconds=s) for s in (9.0, 30.0, 10.0)], 0.0)
    assert row.steps_per_s == 2.0 and row.tokens_per_s == 400.0 and row.parity
    assert row.spread == pytest.approx(2.1) and row.mfu is None, "the device is not here"
    (row,) = recommend.compare([BASELINE], [result(seconds=10.0)], 0.0, peak_tokens_per_s=800.0)
    assert row.tokens_per_s == 400.0 and row.mfu == 0.5
    assert "50%" in recommend.trial_cells([row])[1]


def test_a_switch_that_cannot_run_or_fails_is_a_row_with_its_reason():
    lacking = Trial(kind="alone", label="TF32", on=("tf32",), reason="only a GPU has it")
    failed = {"on": ["sdpa"], "error": "its process was ended by SIGKILL"}
    found = recommend.compare([BASELINE, ALONE[0], lacking], [result(), failed], 0.0)
    assert [r.reason for r in found] == ["", failed["error"], lacking.reason]
    assert [r.loss for r in found] == [5.0, None, None]
    assert [d.on for d in recommend.choose_switches(found)] == [False, False]
    assert [d.reason for d in recommend.choose_switches(found)] == [r.reason for r in found[1:]]


LOSSES = [({"loss": 5.004}, 0.0, True), ({"loss": 5.006}, 0.0, False)]
LOSSES += [({"loss": 5.09, "precision": "bf16"}, 0.0, True)]
LOSSES += [({"loss": 5.11, "precision": "fp16"}, 0.0, False)]
LOSSES += [({"loss": 5.2}, 0.1, True)]  # fused attention drops other weights


@pytest.mark.parametrize(("over", "dropout", "same"), LOSSES)
def test_parity_is_within_the_tolerance_of_the_precision(over, dropout, same):
    row = rows(result(), result(("sdpa",), **over), dropout=dropout)[1]
    assert row.parity is same and row.loss_change == pytest.approx(over["loss"] / 5 - 1)


def test_the_loss_is_not_compared_over_skipped_steps():
    half = result(("sdpa",), 5.0, loss=5.5, skipped=2, precision="fp16", notes=["skipped"])
    row = rows(result(), half)[1]
    assert row.parity is None and row.reason == "skipped" and decide(result(), half)["sdpa"]


def test_what_is_at_least_two_percent_faster_in_company_stays():
    assert decide(*FASTER) == {"sdpa": True, "tf32": False, "gradient_checkpointing": False}
    reasons = {d.name: d.reason for d in recommend.choose_switches(rows(*FASTER))}
    assert reasons["sdpa"] == "+25.0% speed, +0.0% memory"
    assert reasons["gradient_checkpointing"] == "-7.6% speed, -50.0% memory beside 2 others"


@pytest.mark.parametrize(
    ("seconds", "kept"), [(7.8, SWITCHES), (8.0, SWITCHES), (9.0, SWITCHES[:2])]
)
def test_another_set_is_chosen_where_it_was_measured_faster(seconds, kept):
    """The fastest of the others takes 7.95 s: two of the switches."""
    found = rows(*FASTER)
    decisions = [dataclasses.replace(each, on=True) for each in recommend.choose_switches(found)]
    together = dataclasses.replace(found[0], kind="chosen", steps_per_s=20 / seconds, spread=0.0)
    chosen = recommend.prefer_measured(decisions, [*found, together])
    assert tuple(each.name for each in chosen if each.on) == kept


def test_a_chosen_set_that_is_no_faster_than_none_is_dropped():
    found = rows(result(), result(("sdpa",), 9.9))
    decisions = [dataclasses.replace(each, on=True) for each in recommend.choose_switches(found)]
    together = dataclasses.replace(found[0], kind="chosen", spread=0.0)
    assert not any(each.on for each in recommend.prefer_measured(decisions, [*found, together]))
    failed = dataclasses.replace(together, loss=None, steps_per_s=None, reason="out of memory")
    fastest = recommend.prefer_measured(decisions, [*found, failed])
    assert [each.name for each in fastest if each.on] == ["sdpa"]


def test_for_memory_a_tenth_of_the_speed_may_go():
    assert decide(*FASTER, goal="memory")["gradient_checkpointing"]
    slow = [*FASTER[:-1], result(SWITCHES, 9.5, 50.0)]
    assert not decide(*slow, goal="memory")["gradient_checkpointing"]
    with pytest.raises(KitError, match="choose speed or memory"):
        recommend.choose_switches(rows(*FASTER), "size")


def test_a_switch_that_moves_the_loss_is_dropped_however_fast():
    (decision, *_) = recommend.choose_switches(rows(result(), result(("sdpa",), 5.0, loss=6.0)))
    assert not decision.on and "loss moved by +20.00%" in decision.reason


PINNED = Trial(kind="alone", label="Pinned memory", on=("pinned_memory",))


PAYS = [(9.0, "speed", True), (10.1, "speed", True), (10.1, "memory", True), (10.3, "speed", False)]


@pytest.mark.parametrize(("seconds", "goal", "kept"), PAYS)
def test_pinned_memory_stays_unless_it_is_clearly_slower(seconds, goal, kept):
    found = recommend.compare([BASELINE, PINNED], [result(), result(PINNED.on, seconds)], 0.0)
    (decision,) = recommend.choose_switches(found, goal)
    assert decision.on is kept and "% speed" in decision.reason


def test_pinned_memory_is_dropped_where_it_alone_moves_the_loss():
    """Not where the switches before it did: it is not to blame for those."""
    both = Trial(kind="added", label="+ Pinned memory", on=("sdpa", "pinned_memory"))
    moved = result(both.on, loss=6.0)
    for loss, kept in ((5.0, False), (6.0, True)):
        measured = [result(), result(("sdpa",), loss=loss), moved]
        found = recommend.compare([BASELINE, ALONE[0], PINNED, both], measured, 0.0)
        decision = recommend.choose_switches(found)[-1]
        assert decision.name == "pinned_memory" and decision.on is kept


def test_pinned_memory_that_was_left_out_stays_and_one_that_this_device_lacks_does_not():
    for reason, kept in ((LEFT_OUT, True), ("only a GPU has a use for it", False)):
        variants = [BASELINE, dataclasses.replace(PINNED, reason=reason)]
        (decision,) = recommend.choose_switches(recommend.compare(variants, [result()], 0.0))
        assert decision.on is kept and reason in decision.reason


def test_without_a_baseline_the_smallest_set_that_ran_stays():
    out = [{"on": list(on), "error": "OutOfMemoryError"} for on in ((), *((n,) for n in SWITCHES))]
    found = decide(*out, result(SWITCHES[:2]), result(SWITCHES, 10.5, 60.0))
    assert found == {"sdpa": True, "tf32": True, "gradient_checkpointing": False}


def test_the_choice_is_yaml_with_its_reasons_and_builds_the_switches(tmp_path):
    decisions, path = recommend.choose_switches(rows(*FASTER)), tmp_path / "speed.yaml"
    assert load_choice(path) == {}
    recommend.write_choice(decisions, path, "a processor")
    text = path.read_text(encoding="utf-8")
    assert "# Measured on a processor." in text and "sdpa: true  # +25.0% speed" in text
    choice = load_choice(path)
    assert choice == {"speed": yaml.safe_load(text)["speed"], "data": {}}
    assert build(SpeedConfig, choice["speed"]) == SpeedConfig(sdpa=True)
    assert chosen(decisions).on == ("sdpa",)
    for wrong in ("fast, please", "speed: fast"):
        path.write_text(wrong, encoding="utf-8")
        with pytest.raises(KitError, match="Delete it, or run 05_benchmark again"):
            load_choice(path)


def test_with_the_rest_of_a_preset_the_file_is_one(tmp_path):
    path = tmp_path / "speed.yaml"
    given = {"extends": "tiny", "speed": {"sdpa": False, "attention_kernel": "math"}}
    given |= {"data": {"micro_batch": 4}}
    recommend.write_choice(recommend.choose_switches(rows(*FASTER)), path, "a processor", given)
    preset = load_preset(str(path))
    assert preset["model"] == load_preset("tiny")["model"] and preset["data"]["micro_batch"] == 4
    assert preset["speed"]["sdpa"] is True, "measured, whatever was set"
    assert preset["speed"]["attention_kernel"] == "math", "no switch"
    choice = load_choice(path)
    assert choice["data"] == {"micro_batch": 4} and set(choice["speed"]) == set(SWITCHES)


def test_half_the_memory_pays_for_the_goal_memory_alone():
    before, after = recommend.compare(
        [BASELINE, ALONE[0]], [result(), result(("sdpa",), 10.5, 50.0)], 0.0
    )
    assert recommend.pays_off(before, after, "memory")
    assert not recommend.pays_off(before, after, "speed")
    assert recommend.pays_off(after, before, "speed")
    assert not recommend.pays_off(after, before, "speed", least_gain=0.2), "the rounds differ more"


def test_the_table_has_a_line_for_every_row():
    slow = dataclasses.replace(ALONE[1], reason="only a GPU has it")
    found = recommend.compare([BASELINE, ALONE[0], slow], FASTER[:2], 0.0)
    head, baseline, fused, tf32 = recommend.trial_cells(found)
    assert len({len(row) for row in (head, baseline, fused, tf32)}) == 1
    assert baseline[2] == "1.00x" and fused[2] == "1.25x"
    assert tf32[0] == "TF32" and tf32[-1] == "only a GPU has it"
    under = dict(zip(head, fused))
    wanted = {"steps/s": "2.5", "spread": "0%", "tokens/s": "500", "memory": "0.10 GiB"}
    wanted |= {"warm-up": "1.0 s", "loss": "5.0000", "change": "+0.000% same"}
    assert {name: under[name] for name in wanted} == wanted
    assert fused[-1] == "fp32, explicit softmax"
