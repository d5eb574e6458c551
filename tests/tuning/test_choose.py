"""What measured switches are worth: speed beyond noise, memory, and a loss that stays."""

import dataclasses

import pytest

from kit.base.config import load_preset
from kit.base.errors import KitError
from kit.settings import SpeedConfig
from kit.training.switches import load_choice
from kit.tuning.choose import (
    LEFT_OUT,
    STAYS,
    Trial,
    choose_switches,
    compare,
    keep_or_replace,
    set_of,
    trial_cells,
    write_choice,
)

SWITCHES = ("sdpa", "tf32", "gradient_checkpointing")
BASELINE = Trial(kind="baseline", label="Baseline")
ALONE = [Trial(kind="alone", label=name, on=(name,)) for name in SWITCHES]
ADDED = [Trial(kind="added", label=f"+ {SWITCHES[n]}", on=SWITCHES[: n + 1]) for n in (1, 2)]
OFF = SpeedConfig()
ON = SpeedConfig(**dict.fromkeys(SWITCHES, True))


def ran(*seconds: float, memory: float = 100.0, **over) -> list[dict]:
    """The results of a round each of these seconds for 20 steps."""
    made = {"steps": 20, "tokens": 4000, "loss": 5.0, "warmup_s": 1.0, "recompilations": 0}
    made |= {"peak_memory_bytes": int(memory * 2**20), "skipped": 0, "notes": []}
    made |= {"precision": "fp32", "attention": "explicit softmax"}
    return [made | {"seconds": each} | over for each in seconds]


def rows(results: dict[str, list[dict]], dropout: float = 0.0) -> list[Trial]:
    """Trials of the rounds' results by the names of the switches, "" for none."""
    by_switches = {tuple(names.split()): rounds for names, rounds in results.items()}
    return compare([BASELINE, *ALONE, *ADDED], by_switches, dropout)


def decide(results: dict[str, list[dict]]) -> dict[str, bool]:
    return {d.name: d.on for d in choose_switches(rows(results), OFF)}


FASTER = {"": ran(10.0), "sdpa": ran(8.0), "tf32": ran(9.9), "sdpa tf32": ran(7.95)}
FASTER |= {"gradient_checkpointing": ran(10.8, memory=60), " ".join(SWITCHES): ran(8.6, memory=50)}


def test_the_median_round_counts():
    (row,) = compare([BASELINE], {(): ran(9.0, 30.0, 10.0)}, 0.0)
    assert row.steps_per_s == 2.0 and row.tokens_per_s == 400.0 and row.parity
    assert row.spread == pytest.approx(2.1)


def test_a_switch_that_cannot_run_or_fails_is_a_row_with_its_reason():
    lacking = dataclasses.replace(ALONE[1], reason="only a GPU has it")
    failed = {"error": "its process was ended by SIGKILL"}
    found = compare([BASELINE, ALONE[0], lacking], {(): ran(10.0), ("sdpa",): [failed]}, 0.0)
    assert [r.reason for r in found] == ["", failed["error"], lacking.reason]
    assert [r.loss for r in found] == [5.0, None, None]
    assert [(d.on, d.reason) for d in choose_switches(found, ON)] == [
        (False, failed["error"]),
        (False, lacking.reason),
    ]


LOSSES = [({"loss": 5.004}, 0.0, True), ({"loss": 5.006}, 0.0, False)]
LOSSES += [({"loss": 5.09, "precision": "bf16"}, 0.0, True)]
LOSSES += [({"loss": 5.11, "precision": "fp16"}, 0.0, False)]
LOSSES += [({"loss": 5.2}, 0.1, True)]  # fused attention drops other weights


@pytest.mark.parametrize(("over", "dropout", "same"), LOSSES)
def test_parity_is_within_the_tolerance_of_the_precision(over, dropout, same):
    row = rows({"": ran(10.0), "sdpa": ran(10.0, **over)}, dropout)[1]
    assert row.parity is same and row.loss_change == pytest.approx(over["loss"] / 5 - 1)


def test_the_loss_is_not_compared_over_skipped_steps():
    half = ran(5.0, loss=5.5, skipped=2, precision="fp16", notes=["skipped"])
    row = rows({"": ran(10.0), "sdpa": half})[1]
    assert row.parity is None and row.reason == "skipped"
    assert decide({"": ran(10.0), "sdpa": half})["sdpa"]


def test_what_is_faster_in_company_stays():
    assert decide(FASTER) == {"sdpa": True, "tf32": False, "gradient_checkpointing": False}
    reasons = {d.name: d.reason for d in choose_switches(rows(FASTER), OFF)}
    assert reasons["sdpa"] == "+25.0% speed, +0.0% memory"
    assert reasons["gradient_checkpointing"] == "-7.6% speed, -50.0% memory beside 2 others"


QUIET, NOISY = ran(9.9, 10.0), ran(8.0, 10.0, 11.0)
NOISES = [  # baseline, with the switch; what follows, None where that is the preset's choice
    (QUIET, ran(9.5, 9.55), True),
    (QUIET, ran(13.1, 13.2), False),
    (QUIET, ran(9.85, 9.9), None),
    (NOISY, ran(9.5, 9.55), None),
    (NOISY, ran(9.2, 13.1, 14.2), None),
    (QUIET, ran(9.5, 13.2), None),
    (NOISY, ran(5.0, 5.1), True),
]


@pytest.mark.parametrize("preset", [OFF, ON])
@pytest.mark.parametrize(("before", "after", "keep"), NOISES)
def test_within_noise_the_choice_of_the_preset_stays(before, after, keep, preset):
    found = compare([BASELINE, ALONE[0]], {(): before, ("sdpa",): after}, 0.0)
    (decision,) = choose_switches(found, preset)
    assert decision.on is (preset.sdpa if keep is None else keep)
    assert ("within noise" in decision.reason) == (keep is None)
    assert ("within noise" in trial_cells(found)[2][2]) == (keep is None)


def test_rounds_that_are_alike_by_chance_do_not_make_a_gain():
    noisy = dict.fromkeys((("tf32",), ("gradient_checkpointing",)), ran(8.0, 11.0))
    results = {(): ran(10.0, 10.0), ("sdpa",): ran(9.0, 9.0)} | noisy
    decision, *_ = choose_switches(compare([BASELINE, *ALONE], results, 0.0), OFF)
    assert not decision.on and "within noise" in decision.reason


def test_a_switch_that_moves_the_loss_is_dropped_however_fast():
    moved = {"": ran(10.0), "sdpa": ran(5.0, loss=6.0), "sdpa tf32": ran(4.0, loss=6.0)}
    sdpa, tf32, _ = choose_switches(rows(moved), ON)
    assert not sdpa.on and "loss moved by +20.00%" in sdpa.reason
    assert tf32.on, "it is not to blame for what the switch before it did"


@pytest.mark.parametrize(("reason", "kept"), [(LEFT_OUT, True), ("only a GPU has it", False)])
def test_what_was_left_out_stays_and_what_this_device_lacks_is_off(reason, kept):
    variants = [BASELINE, dataclasses.replace(ALONE[0], reason=reason)]
    (decision,) = choose_switches(compare(variants, {(): ran(10.0)}, 0.0), ON)
    assert decision.on is kept and reason in decision.reason


def test_without_a_baseline_the_presets_switches_stay():
    out = {names: [{"error": "OutOfMemoryError"}] for names in ("", *SWITCHES)}
    largest = {"sdpa tf32": ran(10.0), " ".join(SWITCHES): ran(10.5, memory=60)}
    sdpa, tf32, recompute = choose_switches(rows(out | largest), SpeedConfig(sdpa=True))
    assert sdpa.on and not tf32.on and STAYS in sdpa.reason
    assert not recompute.on and recompute.reason.startswith("-4.8% speed")
    with pytest.raises(KitError, match=r"None of the .* variants ran.*OutOfMemoryError.*bench/"):
        decide(out)


PRESETS = set_of("Preset's set", ("tf32",))
CHOSEN = set_of("Chosen set", SWITCHES[:2])
TOGETHER = {  # seconds of the preset's set and of the chosen one; None: it did not run
    "faster": (10.0, 8.0, True),
    "as fast": (10.0, 9.9, False),
    "slower": (10.0, 12.0, False),
    "the preset's alone runs": (10.0, None, False),
    "the chosen alone runs": (None, 8.0, True),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_the_chosen_set_is_taken_if_it_pays_off_beside_the_presets(case):
    before_s, after_s, taken = TOGETHER[case]
    results = {
        each.on: [{"error": "out of memory"}] if seconds is None else ran(seconds)
        for each, seconds in ((PRESETS, before_s), (CHOSEN, after_s))
    }
    decisions = choose_switches(rows(FASTER), OFF)
    decisions = [dataclasses.replace(d, on=d.name in CHOSEN.on) for d in decisions]
    found = keep_or_replace(decisions, *compare([PRESETS, CHOSEN], results, 0.0))
    assert tuple(d.name for d in found if d.on) == (CHOSEN if taken else PRESETS).on
    assert (STAYS in found[0].reason) is not taken


def test_the_choice_is_a_preset_with_its_reasons(tmp_path):
    path = tmp_path / "speed.yaml"
    assert load_choice(path) == {}
    given = {"extends": "tiny", "speed": {"sdpa": False, "attention_kernel": "math"}}
    given |= {"data": {"micro_batch": 4}}
    write_choice(choose_switches(rows(FASTER), OFF), path, "a processor", given)
    text = path.read_text(encoding="utf-8")
    assert "# Measured on a processor." in text and "# sdpa: +25.0% speed" in text
    preset = load_preset(str(path))
    assert preset["model"] == load_preset("tiny")["model"] and preset["data"]["micro_batch"] == 4
    assert preset["speed"]["sdpa"] is True, "measured, whatever was set"
    assert preset["speed"]["attention_kernel"] == "math", "no switch"
    choice = load_choice(path)
    assert choice["data"] == {"micro_batch": 4} and set(choice["speed"]) == set(SWITCHES)
    assert choice["speed"]["tf32"] is False


def test_the_table_has_a_line_for_every_row():
    slow = dataclasses.replace(ALONE[1], reason="only a GPU has it")
    results = {(): ran(10.0), ("sdpa",): ran(8.0, memory=90)}
    measured = compare([BASELINE, ALONE[0], slow], results, 0.0)
    head, baseline, fused, tf32 = trial_cells(measured)
    assert len({len(row) for row in (head, baseline, fused, tf32)}) == 1
    assert tf32[0] == "tf32" and tf32[-1] == "only a GPU has it"
    under = dict(zip(head, fused))
    wanted = {"steps/s": "2.5", "speed": "1.25x", "spread": "0%", "tokens/s": "500"}
    wanted |= {"memory": "0.09 GiB", "of baseline": "90%"}
    wanted |= {"warm-up": "1.0 s", "loss": "5.0000", "change": "+0.000% same"}
    assert {name: under[name] for name in wanted} == wanted
    assert dict(zip(head, baseline))["speed"] == "1.00x"
    assert fused[-1] == "fp32, explicit softmax"
