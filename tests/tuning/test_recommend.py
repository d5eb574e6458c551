"""Advice with reasons; what measured switches are worth; the search for the fastest settings."""

import dataclasses
import itertools
import math

import pytest
import yaml
from helpers import CPU, GPT

from kit.base.config import CONFIGS, build, load_preset
from kit.base.errors import KitError
from kit.base.hardware import Hardware
from kit.settings import DataConfig, GPTConfig, SpeedConfig, TrainConfig
from kit.training.switches import load_choice
from kit.tuning import recommend
from kit.tuning.preflight import Workload, changed_settings
from kit.tuning.recommend import LEFT_OUT, Advice, Target, Variant, chosen

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


def values(advice: list[Advice]) -> dict:
    return {a.setting: a.value for a in advice}


@pytest.mark.parametrize("hw", [CPU, *map(card, CARDS)], ids=lambda hw: hw.name)
def test_every_line_is_a_setting_there_is_with_a_reason(hw):
    found = recommend.recommend(hw)
    assert found and len(values(found)) == len(found)  # a setting is named once
    for advice in found:
        assert len(advice.reason) > 10
        section, key = advice.setting.split(".")
        base = {"data": {"effective_batch": 64, "micro_batch": 64}}.get(section, {})
        built = build(SECTIONS[section], base | {key: advice.value})
        assert getattr(built, key) == advice.value


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
    assert {a.setting for a in advice} == set(load_preset(name, CONFIGS / "use")["why"])
    assert advice and all(a.reason for a in advice)
    with pytest.raises(KitError, match=f"Did you mean `{name}`"):
        recommend.use_advice(name[:-1])


LABELS = {"sdpa": "Fused attention", "tf32": "TF32", "gradient_checkpointing": "Checkpointing"}
SWITCHES = tuple(LABELS)
BASELINE = Variant(kind="baseline", label="Baseline")
ALONE = [Variant(kind="alone", label=LABELS[n], on=(n,)) for n in SWITCHES]
ALL = [Variant(kind="added", label="+ TF32", on=SWITCHES[:2])]
ALL += [Variant(kind="added", label="+ Checkpointing", on=SWITCHES)]


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
    lacking = Variant(kind="alone", label="TF32", on=("tf32",), reason="only a GPU has it")
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


PINNED = Variant(kind="alone", label="Pinned memory", on=("pinned_memory",))


PAYS = [(9.0, "speed", True), (10.1, "speed", True), (10.1, "memory", True), (10.3, "speed", False)]


@pytest.mark.parametrize(("seconds", "goal", "kept"), PAYS)
def test_pinned_memory_stays_unless_it_is_clearly_slower(seconds, goal, kept):
    found = recommend.compare([BASELINE, PINNED], [result(), result(PINNED.on, seconds)], 0.0)
    (decision,) = recommend.choose_switches(found, goal)
    assert decision.on is kept and "% speed" in decision.reason


def test_pinned_memory_is_dropped_where_it_alone_moves_the_loss():
    """Not where the switches before it did: it is not to blame for those."""
    both = Variant(kind="added", label="+ Pinned memory", on=("sdpa", "pinned_memory"))
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
    assert yaml.safe_load(text) == {"speed": load_choice(path)}
    assert build(SpeedConfig, load_choice(path)) == SpeedConfig(sdpa=True)
    assert chosen(decisions).on == ("sdpa",)
    path.write_text("fast, please", encoding="utf-8")
    with pytest.raises(KitError, match="Delete it, or run 05_benchmark again"):
        load_choice(path)


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
AXES, OFF = recommend.axes_of(START.speed, NOT_HERE, KERNELS)


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
    *_, best = recommend.search(start, AXES, measure, recommend.parse_target(target), 8, tried)
    return best, tried


TARGETS = {"": Target(), "memory<5GiB, step<2s": Target(memory=5 * GIB, step=2.0)}
TARGETS |= {"step <= 500 ms": Target(step=0.5), "memory<1.5gb": Target(memory=1.5e9)}


@pytest.mark.parametrize("text", TARGETS)
def test_a_target_names_memory_step_or_both(text):
    assert recommend.parse_target(text) == TARGETS[text]


UNREADABLE = "fast memory<5 memory<5s step<2GiB step>2s step<0s step<1s,step<2s".split()


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_target_that_cannot_be_read_is_a_sentence_with_the_form(text):
    with pytest.raises(KitError, match=r"memory<5GiB.*step<2s"):
        recommend.parse_target(text)


def test_the_fastest_settings_are_found_with_a_larger_micro_batch():
    best, tried = found()
    assert changed_settings(START, best.work) == ["micro_batch 4 -> 16", "compile on"]
    assert best.work.data.effective_batch == 16
    assert len({row.work for row in tried}) == len(tried) > 6


def test_memory_is_limited_by_the_target_or_the_nearest_to_it():
    best, _ = found("memory<6GiB")
    assert best.memory_bytes <= 6 * GIB and not best.excess
    assert best.work.data.micro_batch == 4 and best.work.speed.compile
    best, _ = found("memory<1GiB")
    assert best.excess > 0 and best.work.data.micro_batch == 1


def test_a_setting_that_moves_the_loss_is_refused_however_fast():
    def measure(work, steps):
        return figures(work, loss=3.1) if work.speed.compile else figures(work)

    best, tried = found("", measure)
    assert not best.work.speed.compile
    refused = [row for row in tried if row.work.speed.compile]
    assert refused and all("loss" in row.reason for row in refused)
    table = recommend.tried_cells(tried, START, OFF)
    assert any("+3.333%" in row and "loss" in row[-1] for row in table)
    assert ("attention_kernel cudnn", "", "", "", "", "only a GPU has it") in table


def test_a_loss_that_is_no_number_is_refused():
    row = recommend.judge(START, 4, figures(START, loss=math.nan), figures(START), Target())
    start = recommend.judge(START, 4, figures(START), figures(START), Target())
    assert row.reason and not recommend.is_better(row, start)


def test_what_fails_is_a_row_with_its_reason():
    def measure(work, steps):
        return {"error": "out of memory"} if work.data.micro_batch > 4 else figures(work)

    best, tried = found("", measure)
    assert best.work.data.micro_batch == 4
    assert {r.reason for r in tried if r.work.data.micro_batch > 4} == {"out of memory"}
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
    loads = itertools.count(1.1, 0.1)

    def measure(work, steps):
        made, load = figures(work), next(loads)
        return made | {"step_seconds": [load * s for s in made["step_seconds"]]}

    best, _ = found("", measure)
    assert "compile on" in changed_settings(START, best.work)


def test_a_busy_moment_of_one_turn_is_passed_over():
    turns = [figures(START, step_seconds=s) for s in ([1.0, 9.0, 2.0], [8.0, 1.5, 2.5])]
    assert recommend.fastest(turns)["step_seconds"] == [1.0, 1.5, 2.0]
    assert recommend.fastest([turns[0], {"error": "out of memory"}]) == {"error": "out of memory"}


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
    old = recommend.judge(START, 4, figures(START), figures(START), Target())
    assert not recommend.is_better(old._replace(step_s=0.99 * old.step_s), old)
    assert recommend.is_better(old._replace(step_s=0.97 * old.step_s), old)
    assert recommend.is_better(old._replace(memory_bytes=0.8 * old.memory_bytes), old)


def test_settings_left_out_or_missing_here_are_not_varied():
    names = {name for axis in AXES for name in axis[0]}
    assert "pinned_memory" not in names and {"compile", "adamw_8bit", "sdpa"} <= names
    with_ema = dataclasses.replace(START.speed, ema=True)
    axes, _ = recommend.axes_of(with_ema, {}, KERNELS)
    assert any("ema_offload" in axis[0] for axis in axes)
    assert {"cuda_graphs"} in [set(axis[0]) for axis in axes]
