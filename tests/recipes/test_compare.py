"""Two runs side by side: curves, figures, settings that differ, and blind listening."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest

from kit.base.errors import KitError
from kit.base.run import Run, find_run
from kit.notebook.panel.one_by_one import ListenPanel
from kit.recipes import compare
from kit.recipes.compare import Compare, same_level, wilson, write_comparison

RATE_HZ = 8000


@pytest.fixture
def runs(tmp_path, monkeypatch) -> tuple[Run, Run]:
    """Two runs as training and evaluation leave them; one has no peak memory on record."""
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))
    monkeypatch.setenv("KIT_PRESET", "cpu")  # that of another run, which counts for neither
    pair = []
    for name, lr, cer in (("slow", 1e-4, 0.2), ("fast", 1e-3, 0.1)):
        run = find_run("tiny", name=name)
        run.begin()
        run = run.save_settings({"train": {"lr": lr}})
        rows = []
        for step in range(1, 51):
            row = {"step": step, "steps": 50, "loss": 5 - step * lr, "lr": lr, "grad_norm": 1.0}
            row |= {"tokens": 10, "step_s": 0.1, "memory_bytes": 2**20, "unix_s": 0.0}
            rows.append(row | {"val_loss": 4.0 if step % 25 == 0 else None, "ema_val_loss": None})
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (run.folder / "train.jsonl").write_text(lines, encoding="utf-8")
        run.record(train={"steps": 50, "steps_per_s": 10.0}, eval={"cer": cer})
        pair.append(run)
    pair[0].record(train={"peak_memory_bytes": 2**30})
    return tuple(pair)


def test_figures_curves_and_only_what_differs_in_the_settings(runs):
    result = Compare(runs[0], "fast").result()
    rows = {row[0]: row[1:] for row in result.grid}
    assert rows[""] == ("slow", "fast")
    assert rows["CER"] == ("20.00%", "10.00%") and rows["steps/s"] == ("10", "10")
    assert rows["peak memory"][1] == "-" and rows["train.lr"] == ("0.0001", "0.001")
    assert "preset" not in rows and "train.max_steps" not in rows
    (picture,) = result.pictures
    names = [line.get_label() for line in picture.axes[0].get_lines()]
    assert names == [
        "slow, training",
        "slow, held out, raw",
        "fast, training",
        "fast, held out, raw",
    ]


def test_without_a_log_the_figures_are_compared(runs):
    for run in runs:
        (run.folder / "train.jsonl").unlink()
    result = Compare(*runs).result()
    assert not result.pictures and len(result.grid) > 1


def test_the_command_prints_the_table_and_writes_a_page(runs):
    result = write_comparison("slow", **{"with": "fast"})
    assert all(fact in result.line for fact in ("train.lr", "20.00%", "compare-fast.html"))
    page = (runs[0].folder / "compare-fast.html").read_text(encoding="utf-8")
    assert "<img" in page and "train.lr" in page


def test_a_missing_run_and_the_run_itself_are_refused(runs):
    with pytest.raises(KitError, match=r"`fats`.*`fast`"):
        Compare(runs[0], "fats")
    with pytest.raises(KitError, match="itself"):
        Compare(runs[0], "slow")
    with pytest.raises(KitError, match="--with"):
        write_comparison("slow")
    assert not (runs[0].folder.parent / "fats").exists()


def test_without_a_second_run_each_step_says_so(runs):
    comparison = Compare(runs[0], "")
    assert "RUN_B" in comparison.result().line and "RUN_B" in comparison.listen().line


class OneNote:
    """A voice that says everything with one note, the run's own."""

    def __init__(self, run: Run):
        self.note_hz = 200 if run.name == "slow" else 400
        self.voice = self
        self.speaker, self.sampling, self.rate_hz = "anna", None, RATE_HZ
        self.held_out = [SimpleNamespace(text=f"sentence {n}") for n in range(20)]

    def can_speak(self, text: str) -> bool:
        return not text.endswith("9")

    def speak(self, texts, speaker, sampling) -> list:
        wave = np.sin(2 * np.pi * self.note_hz * np.arange(RATE_HZ) / RATE_HZ)
        return [SimpleNamespace(wave=self.note_hz / 1000 * wave) for _ in texts]


@pytest.fixture
def panel(runs, monkeypatch) -> ListenPanel:
    random.seed(0)
    monkeypatch.setattr(compare, "Speaking", OneNote)
    monkeypatch.setattr(compare, "active_run", lambda run: run)
    return Compare(*runs).listen(10)


def is_fast(wav: bytes) -> bool:
    wave = np.frombuffer(wav[44:], np.int16).astype(float)
    return np.abs(np.fft.rfft(wave)).argmax() > 300


def test_blind_listening_counts_the_voice_wherever_it_is_played(panel, runs):
    sides = []
    for number in range(10):
        first, second = (is_fast(player.value) for player in panel.players)
        assert first != second and not any(r.name in panel.place.value for r in runs)
        sides.append(first)
        name = "Equal" if number == 9 else ("First" if first else "Second")
        panel.buttons[name].click()
    assert 0 < sum(sides) < 10, "the sides are random"
    assert "fast is preferred" in panel.status.value
    assert all(button.disabled for button in panel.buttons.values())
    own, other = (run.report()["listening"] for run in runs)
    low, high = wilson(9, 9)
    assert other["slow"] == {
        "preferred": 9,
        "other_preferred": 0,
        "equal": 1,
        "preference_low": low,
        "preference_high": high,
    }
    assert own["fast"]["preferred"] == 0 and own["fast"]["other_preferred"] == 9


def test_without_a_front_end_the_panel_says_what_it_would_play(panel, capsys):
    panel.run()
    assert "10 pairs" in capsys.readouterr().out


def test_the_interval_is_wilsons():
    # Newcombe, Statistics in Medicine 17 (1998), table I: 81 of 263 and 15 of 148, 0 of 20.
    for wins, trials, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605)):
        assert wilson(wins, trials) == pytest.approx((low, high), abs=1e-4)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)


def test_the_louder_voice_has_no_advantage():
    loud, quiet = same_level([np.array([0.8, -0.8]), np.array([0.2, -0.2])])
    assert np.allclose(loud, quiet) and np.allclose(quiet, [0.2, -0.2])
    assert not same_level([np.zeros(2), np.ones(2)])[0].any()
