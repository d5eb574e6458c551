"""The records of runs: two side by side, and the checklist of one."""

from types import SimpleNamespace

import pytest
import torch
from made_runs import leave_log

from kit.base.errors import KitError
from kit.base.run import Run, find_run
from kit.recipes import reports
from kit.recipes.base_model import MIN_HOURS, RELEASE
from kit.recipes.reports import Checklist, Compare, write_comparison
from kit.recipes.run_parts import START_FROM
from kit.tuning.checks import Check


@pytest.fixture
def two(runs, monkeypatch) -> tuple[Run, Run]:
    """Two runs as training and evaluation leave them; one has no peak memory on record."""
    monkeypatch.setenv("KIT_PRESET", "cpu")  # that of another run, which counts for neither
    pair = []
    for name, lr, cer in (("slow", 1e-4, 0.2), ("fast", 1e-3, 0.1)):
        run = find_run("tiny", name=name)
        run.begin()
        run = run.save_settings({"train": {"lr": lr}})
        log = {"steps": 100, "val_loss": 4.0}
        leave_log(run.folder, (log | {"step": n, "loss": 5 - n / 50} for n in range(1, 101)))
        run.record(train={"steps": 100, "steps_per_s": 10.0}, eval={"cer": cer})
        pair.append(run)
    pair[0].record(train={"peak_memory_bytes": 2**30})
    return tuple(pair)


def test_figures_curves_and_only_what_differs_in_the_settings(two):
    result = Compare(two[0], "fast").result()
    rows = {row[0]: row[1:] for row in result.grid}
    assert rows[""] == ("slow", "fast")
    assert rows["CER"] == ("20.00%", "10.00%") and rows["steps/s"] == ("10", "10")
    assert rows["peak memory"][1] == "-" and rows["train.lr"] == ("0.0001", "0.001")
    assert "preset" not in rows and "train.max_steps" not in rows
    (picture,) = result.pictures
    names = [line.get_label() for line in picture.axes[0].get_lines()]
    kinds = ("training", "held out, raw")
    assert names == [f"{run}, {kind}" for run in ("slow", "fast") for kind in kinds]
    for run in two:
        (run.folder / "train.jsonl").unlink()
    result = Compare(two[0], "fast").result()
    assert not result.pictures and len(result.grid) > 1


def test_the_command_writes_a_page_and_wrong_runs_are_refused(two):
    result = write_comparison("slow", "fast")
    assert all(fact in result.line for fact in ("train.lr", "20.00%", "compare-fast.html"))
    page = (two[0].folder / "compare-fast.html").read_text(encoding="utf-8")
    assert "<img" in page and "train.lr" in page
    for wrong, fact in (("fats", "`fats`.*`fast`"), ("slow", "itself")):
        with pytest.raises(KitError, match=fact):
            Compare(two[0], wrong)
    with pytest.raises(KitError, match="--with"):
        write_comparison("slow")
    assert not (two[0].folder.parent / "fats").exists()


class OneNote:
    """A voice that says everything with one note, the run's own."""

    def __init__(self, run: Run):
        self.note = 0.2 if run.name == "slow" else 0.4
        self.voice = self
        self.codec = SimpleNamespace(sample_rate=8000)
        self.speaker, self.sampling = "anna", None
        self.held_out = [SimpleNamespace(text=f"sentence {n}") for n in range(20)]

    def can_speak(self, text: str) -> bool:
        return text != "sentence 0"

    def speak(self, texts, speaker, sampling) -> list:
        return [SimpleNamespace(text=text, wave=torch.full((9,), self.note)) for text in texts]


def test_both_voices_say_what_both_can(two, monkeypatch):
    monkeypatch.setattr(reports, "Speaking", OneNote)
    monkeypatch.setattr(reports, "activate", lambda run: run)
    columns = Compare(two[0], "fast").listen(2).compared
    for name, note in (("slow", 0.2), ("fast", 0.4)):
        assert [sound.caption for sound in columns[name]] == ["sentence 1", "sentence 2"]
        assert all(sound.wave[0] == pytest.approx(note) for sound in columns[name])


PEOPLE = {"data": "my/recordings", "language": "en"}
DATA = {"hours": 9.4, "utterances": 18373}
EVAL = {"cer": 0.03, "cer_floor": 0.01, "eos_rate": 1.0, "duration_ratio": 1.02}
SOUND = {
    "data": DATA | {"alignment": "0 of 1,500 clips do not match their text"},
    "text": {"byte_rate": 0.0, "round_trip": 1.0},
    "train": {"steps": 2200, "finished": True},
    "eval": EVAL | {"runaway_rate": 0.0, "sentences": 250},
}


@pytest.fixture
def run(tmp_path) -> Run:
    preset = {"evaluate": {"worst_cer": 0.12}}
    return Run(name="mine", preset_name="cpu", preset=preset, folder=tmp_path)


def to_do(run: Run) -> dict[str, str]:
    rows = Checklist(run).result().grid[1:]
    assert all((mark == "✗") == bool(note) for _, mark, *_, note in rows)
    failing = [row for row in rows if row[1] == "✗" and "note" not in row[0]]
    return {what: note for *_, what, _, _, note in failing}


def test_a_run_without_a_record_gets_every_command_and_a_sound_one_passes(run):
    result = Checklist(run).result()
    assert str(result) == "0 of 3 checks pass. Next: python -m kit prepare --run mine"
    asked = [row[-1].split()[3] for row in result.grid[1:]]
    assert list(dict.fromkeys(asked)) == ["prepare", "train", "evaluate"]
    run.record(**SOUND)
    assert to_do(run) == {}
    assert str(Checklist(run).result()) == "All 9 checks pass: the voice is ready."


@pytest.mark.parametrize(
    "section, figures, what, fix",
    [
        ("data", {"alignment": "not judged: it is lost"}, "texts and their sound", "listen"),
        ("text", {"byte_rate": 0.1}, "letters", "stray letters"),
        ("verify", {"failed": ["causality"]}, "proofs of `verify`", "docs/verify.md"),
        ("train", {"finished": False}, "training", "python -m kit train --run mine"),
        ("eval", {"cer": 0.5}, "CER of the voice", "train longer"),
    ],
)
def test_what_does_not_pass_says_what_to_do(run, section, figures, what, fix):
    run.record(**SOUND)
    run.record(**{section: figures})
    found = to_do(run)
    assert list(found) == [what] and fix in found[what]


def test_what_goes_wrong_during_training_is_to_do_until_it_has_ended(run):
    slow = Check("time of a step", "9 times as long", "at most 2", False, "look at top")
    early = Check("training loss", "too few steps", "falling", None)
    run.record(**SOUND)
    run.record(train={"checks": [early._asdict(), slow._asdict()]})
    assert to_do(run) == {}
    when = [row[0] for row in Checklist(run).result().grid[1:]]
    assert list(dict.fromkeys(when)) == ["before", "during (only a note)", "after"]
    run.record(train={"finished": False})
    assert list(to_do(run)) == ["time of a step", "training"]
    page = (run.folder / "report.html").read_text(encoding="utf-8")
    assert ">time of a step</td>" in page and ">look at top</td>" in page


def test_few_hours_of_a_person_are_named_but_not_beside_a_base_model(run):
    run.record(**SOUND)
    run.record(data={"hours": 1.2, "source": PEOPLE})
    warning = to_do(run)["recordings"]
    facts = ("1.20 hours", "1.66 hours", "15 %")
    ways = ("BASE_MODEL", RELEASE, "07_finetune_xtts", "export")
    assert all(fact in warning for fact in (*facts, *ways))
    run.record(data={"hours": MIN_HOURS})
    assert to_do(run) == {}
    run.record(data={"hours": 0.2, "source": {"data": "", "language": "am"}})
    assert to_do(run) == {}
    run.record(data={"source": PEOPLE})
    assert list(to_do(run)) == ["recordings"]
    (run.folder / START_FROM).write_text("0123 /voices/export", encoding="utf-8")
    assert to_do(run) == {}


def test_a_voice_that_ignores_the_speaker_or_memorised_its_recordings_is_not_ready(run):
    losses = {"anna": {"own": 1.331, "other": 1.704}, "boris": {"own": 1.391, "other": 1.391}}
    run.record(**SOUND)
    run.record(eval={"whose_voice": losses})
    (problem,) = to_do(run).values()
    assert problem.startswith("boris: the model ignores the speaker reference")
    run.record(eval={"whose_voice": {"boris": {"own": 1.391, "other": 1.45}}})
    assert str(Checklist(run).result()) == "All 10 checks pass: the voice is ready."
    run.record(train={"loss": 2.2, "val_loss": 6.9}, eval={"cer": 0.5})
    assert "more recordings would" in to_do(run)["CER of the voice"]
