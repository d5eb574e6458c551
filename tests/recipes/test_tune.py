"""`check` and `tune` for real, with tiny sizes: exit codes, the written preset, interruptions."""

import dataclasses

import pytest
from commands import Terminal

from kit.base.config import CONFIGS, load_preset
from kit.base.errors import KitError
from kit.base.run import find_run
from kit.recipes.benchmark import Tuning, check, devices
from kit.recipes.open_run import open_settings


@pytest.fixture
def preset(tmp_path, monkeypatch):
    monkeypatch.setenv("KIT_RUNS", str(tmp_path / "runs"))
    return open_settings("", "tiny", "", {"train": {"lr": 0.001}})


def made(work, steps: int) -> dict:
    """Figures of a trial: smaller passes are faster here."""
    seconds = [1.0 + work.data.micro_batch]
    names = {"loss": 3.0, "precision": "fp32", "peak_memory_bytes": 2**30}
    return {"step_seconds": seconds} | names


def tuning(preset, path, monkeypatch, measure=made, **options) -> Tuning:
    found = Tuning(preset, path, **options)
    monkeypatch.setattr(found, "measure", measure)
    return found


def test_a_step_that_fits_has_its_figures_and_nothing_is_written(preset, tmp_path):
    text = "\n".join(map(str, check(preset)))
    assert all(name in text for name in ("planned", "allocated", "reserved", "free", "step: "))
    assert "It fits" in text
    assert not (tmp_path / "runs").exists()


def test_exit_codes_tell_what_fits_what_does_not_and_what_is_wrong(tmp_path, processes):
    terminal = Terminal(tmp_path, processes)
    share = "memory.max_memory_fraction=0.000001"
    code, _, err = terminal.run("check", "--preset", "tiny", "--set", share)
    assert code == 3 and "It does not fit" in err and len(err.splitlines()) == 1
    code, _, err = terminal.run("check", "--set", "train.steeps=1")
    assert (code == 2 and "train.steps" in err) or "steeps" in err


def test_the_change_that_would_fit_is_named(preset):
    work_fraction = {"max_memory_fraction": 1.0}
    small = dataclasses.replace(preset.hw, memory_bytes=2**26 + 2**25)
    sections = preset.preset | {"memory": work_fraction}
    with pytest.raises(KitError, match=r"micro_batch 8 -> \d"):
        list(check(dataclasses.replace(preset, hw=small, preset=sections)))


def test_the_written_preset_is_taken_by_path_and_holds_what_was_set(preset, tmp_path, monkeypatch):
    path = tmp_path / "mine.yaml"
    results = list(tuning(preset, path, monkeypatch).run())
    assert all(str(result) and result._repr_html_() for result in results)
    (row,) = devices().grid[1:]
    assert row[1].startswith("tiny, tuned") and row[2] == "micro_batch 8 -> 1"
    assert row[4] == "4.50x"
    written = load_preset(str(path))
    expected = load_preset("tiny")
    expected["data"]["micro_batch"] = 1
    expected["train"]["lr"] = 0.001
    assert written == expected
    run = find_run(str(path), "", "other")
    assert run.preset == written and run.preset_name == str(path.resolve())
    assert find_run(str(CONFIGS / "tiny.yaml"), "", "other").preset_name == "tiny"


def test_what_is_no_better_in_turns_is_not_written(preset, tmp_path, monkeypatch):
    found = tuning(preset, tmp_path / "mine.yaml", monkeypatch)
    found.search()
    monkeypatch.setattr(found, "measure", lambda *_: made(found.start, 1))
    found.compare()
    found.write()
    assert load_preset(str(tmp_path / "mine.yaml"))["data"]["micro_batch"] == 8


def test_ctrl_c_writes_the_best_so_far(preset, tmp_path, monkeypatch):
    def measure(work, steps):
        if not work.speed.sdpa:
            raise KeyboardInterrupt
        return made(work, steps)

    with pytest.raises(KeyboardInterrupt):
        list(tuning(preset, tmp_path / "mine.yaml", monkeypatch, measure).run())
    assert load_preset(str(tmp_path / "mine.yaml"))["data"]["micro_batch"] == 2


def test_a_target_out_of_reach_is_a_sentence_and_nothing_is_written(preset, tmp_path, monkeypatch):
    short = tuning(preset, tmp_path / "mine.yaml", monkeypatch, target="step<1ms")
    with pytest.raises(KitError, match=r"step<1ms.*micro_batch 8 -> 1"):
        list(short.run())
    assert not (tmp_path / "mine.yaml").exists()


def test_a_path_that_is_no_new_preset_is_refused(preset):
    for path in ("mine", str(CONFIGS / "tiny.yaml")):
        with pytest.raises(KitError, match=r"\.yaml"):
            Tuning(preset, path)


def test_real_trials_are_kept_and_stay_within_their_time(preset, tmp_path):
    first = Tuning(preset, tmp_path / "mine.yaml", minutes=0.1)
    first.axes = []
    list(first.run())
    assert load_preset(str(tmp_path / "mine.yaml"))["model"]["layers"] == 2
    again = Tuning(preset, tmp_path / "mine.yaml", minutes=0.1)
    left = again.found[0]
    assert again.measure(again.start, left["steps_asked"]) == left and left not in again.found
    again.best = first.best
    again.started_s -= 60
    with pytest.raises(TimeoutError):
        again.measure(again.start.with_rows(2), 2)
