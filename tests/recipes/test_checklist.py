"""The checklist of a run: every figure in the record gets its row, and what is missing says how."""

import json

import pytest

from kit.base.run import Run
from kit.recipes.active_run import START_FROM
from kit.recipes.base_model import MIN_HOURS, RELEASE
from kit.recipes.reports import Checklist

PEOPLE = {"data": "my/recordings", "language": "en"}
SOUND = {
    "data": {
        "hours": 9.4,
        "utterances": 18373,
        "refused": 7,
        "refused_percent": 0.02,
        "alignment": "0 of 1,500 clips do not match their text",
    },
    "text": {"byte_rate": 0.0, "round_trip": 1.0},
    "setup": {"preset for this machine": "cpu"},
    "train": {
        "steps": 2200,
        "finished": True,
        "longest_step_bytes": {"planned": 2**30, "measured": 2**30, "limit": 2**33},
    },
    "eval": {
        "cer": 0.03,
        "cer_floor": 0.01,
        "eos_rate": 1.0,
        "duration_ratio": 1.02,
        "runaway_rate": 0.0,
        "sentences": 250,
    },
}


@pytest.fixture
def run(tmp_path) -> Run:
    preset = {"evaluate": {"worst_cer": 0.12}, "manifest": {}}
    return Run(name="mine", preset_name="cpu", preset=preset, folder=tmp_path)


def to_do(run: Run) -> dict[str, str]:
    """What is left to do, by what was checked."""
    rows = Checklist(run).result().grid[1:]
    assert all((mark == "pass") != bool(problem) for mark, *_, problem in rows)
    return {what: problem for mark, _, what, _, _, problem in rows if mark == "to do"}


def write_log(run: Run, **fault) -> None:
    """Leave the log of a training; its newer half has the values of `fault`."""
    rows = []
    for step in range(1, 101):
        row = {"step": step, "steps": 100, "loss": 5 - step / 50, "lr": 1e-3, "grad_norm": 1.0}
        row |= {"tokens": 10, "step_s": 0.1, "memory_bytes": 2**20, "unix_s": 0.0}
        row |= {"forward_s": 0.1, "data_s": 0.0}
        rows.append(row | {"val_loss": None, "ema_val_loss": None} | (fault if step > 50 else {}))
    lines = [json.dumps(row) for row in rows]
    (run.folder / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_a_run_without_a_record_gets_every_command_in_order(run):
    result = Checklist(run).result()
    assert str(result) == "0 of 8 checks pass. Next: python -m kit prepare --run mine"
    asked = [row[-1].split()[3] for row in result.grid[1:]]
    assert list(dict.fromkeys(asked)) == ["prepare", "setup", "train", "evaluate"]


def test_a_sound_run_passes(run):
    run.record(**SOUND)
    assert to_do(run) == {}
    assert str(Checklist(run).result()) == "All 12 checks pass: the voice is ready."


@pytest.mark.parametrize(
    "section, figures, what, fix",
    [
        ("data", {"hours": 1.2, "source": PEOPLE}, "enough recordings", "BASE_MODEL"),
        ("data", {"refused_percent": 30.0}, "few rejected clips", "ledger.jsonl"),
        ("data", {"alignment": "not judged: it is lost"}, "texts match their sound", "listen"),
        ("text", {"byte_rate": 0.1}, "the tokenizer knows the letters", "stray letters"),
        ("setup", {"preset for this machine": "t4"}, "the preset suits the machine", "--preset t4"),
        ("train", {"finished": False}, "training is finished", "python -m kit train --run mine"),
        ("train", {"longest_step_bytes": {"measured": 2**34}}, "a step fits into memory", "low_"),
        ("train", {"longest_step_bytes": {"reserved": 2**34}}, "a step fits into memory", "low_"),
        ("eval", {"cer": 0.5}, "intelligible", "train longer"),
        ("eval", {"eos_rate": 0.9}, "ends its sentences", "never ended"),
    ],
)
def test_what_does_not_pass_says_what_to_do(run, section, figures, what, fix):
    run.record(**SOUND)
    run.record(**{section: figures})
    found = to_do(run)
    assert list(found) == [what] and fix in found[what]


def test_what_goes_wrong_during_training_is_to_do_until_it_has_ended(run):
    run.record(**SOUND)
    write_log(run)
    assert to_do(run) == {}
    when = [row[1] for row in Checklist(run).result().grid[1:]]
    assert list(dict.fromkeys(when)) == ["before", "during", "after"]
    write_log(run, step_s=0.9)
    assert to_do(run) == {}
    notes = [row for row in Checklist(run).result().grid if row[0] == "note"]
    assert [row[2] for row in notes] == ["steps keep their pace"]
    run.record(train={"finished": False})
    assert list(to_do(run)) == ["steps keep their pace", "training is finished"]


def test_few_hours_of_a_person_are_named_with_what_was_measured_and_both_base_voices(run):
    run.record(**SOUND)
    run.record(data={"hours": 1.2, "source": PEOPLE})
    warning = to_do(run)["enough recordings"]
    facts = ("1.20 hours", "1.5 hours", "89 %", "18 %", "estimate", f"{MIN_HOURS:g}")
    ways = ("BASE_MODEL", RELEASE, "07_finetune_xtts", "export")
    assert all(fact in warning for fact in (*facts, *ways))


def test_enough_hours_the_built_in_corpus_and_a_base_model_are_not_warned_of(run):
    run.record(**SOUND)
    run.record(data={"hours": MIN_HOURS, "source": PEOPLE})
    assert to_do(run) == {}
    run.record(data={"hours": 0.2, "source": {"data": "", "language": "am"}})
    assert to_do(run) == {}
    run.record(data={"source": PEOPLE})
    assert list(to_do(run)) == ["enough recordings"]
    (run.folder / START_FROM).write_text("0123 /voices/export", encoding="utf-8")
    assert to_do(run) == {}


def test_a_voice_that_does_not_hear_who_is_to_speak_is_not_ready(run):
    losses = {"anna": {"own": 1.331, "other": 1.704}, "boris": {"own": 1.391, "other": 1.391}}
    run.record(**SOUND)
    run.record(eval={"whose_voice": losses})
    (problem,) = to_do(run).values()
    assert problem.startswith("boris: the model ignores the speaker reference")
    run.record(eval={"whose_voice": {"boris": {"own": 1.391, "other": 1.45}}})
    assert str(Checklist(run).result()) == "All 13 checks pass: the voice is ready."


def test_a_voice_that_memorised_its_recordings_needs_more_of_them(run):
    run.record(**SOUND)
    run.record(train={"loss": 2.2, "val_loss": 6.9}, eval={"cer": 0.5})
    assert "more recordings would" in to_do(run)["intelligible"]
