"""The first real recordings: sentences longer than a preset's positions, and what is reported."""

import dataclasses
from types import SimpleNamespace

import pytest
from helpers import CPU

from kit.audio.clip import ClipMeasure
from kit.base.config import build
from kit.base.run import find_run
from kit.batches.encoding import fit_positions, longest, manifest_limits
from kit.dataset import checks, manifest
from kit.settings import MAX_CODE_POSITIONS, MAX_TEXT_POSITIONS, GPTConfig, ManifestConfig
from kit.tuning.measure import preset_task

PRESET = GPTConfig(layers=1, width=32, heads=1, max_text=40, max_code=100)
FRAME_RATE = 28.7  # codes a second


def rows(*lengths: tuple[int, float]) -> list[manifest.Utterance]:
    """Utterances of so many letters and seconds."""
    plain = {"audio": "", "speaker": "s", "split": "train", "line": 1}
    return [
        manifest.Utterance(id=str(i), text="ab" * (letters // 2), seconds=seconds, **plain)
        for i, (letters, seconds) in enumerate(lengths)
    ]


# A tokenizer with a piece for every two letters.
LETTERS = SimpleNamespace(encode=lambda text: [0] * (len(text) // 2))
FITTED = [  # (preset, letters and seconds of the rows), (text positions, code positions)
    (({}, [(20, 1.0), (199, 9.0)]), (112, 304)),  # a tenth more than 101 and 264, by 16
    (({}, [(70, 1.0)]), (48, 100)),  # pieces count, not letters
    (({}, [(20, 1.0)]), (40, 100)),  # short rows leave the preset as it is
    (({"max_text": 404, "max_code": 608}, [(700, 20.0)]), (404, 608)),  # XTTS-v2's
    (({"max_text": 500}, [(700, 20.0)]), (500, 608)),
]


@pytest.mark.parametrize(("given", "wanted"), FITTED)
def test_positions_follow_from_the_longest_rows_with_room(given, wanted):
    preset, lengths = given
    model = dataclasses.replace(PRESET, **preset)
    fitted, refused = fit_positions(model, rows(*lengths), LETTERS, FRAME_RATE)
    assert not refused and (fitted.max_text, fitted.max_code) == wanted


def test_only_what_is_longer_than_the_cap_is_refused_with_both_numbers():
    model, refused = fit_positions(PRESET, rows((806, 1.0), (804, 1.0), (9, 30.0)), LETTERS, 28.7)
    assert model.max_text == MAX_TEXT_POSITIONS and model.max_code == MAX_CODE_POSITIONS
    assert [(f.id, f.kind) for f in refused] == [("0", "long text"), ("2", "too long")]
    assert "403 tokens" in refused[0].reason and "402" in refused[0].reason
    assert "30.0 s" in refused[1].reason and "21.0 s" in refused[1].reason
    assert longest(PRESET).max_code_s(28.7) == pytest.approx(21.01, abs=0.01)


def test_the_data_report_rejects_no_clip_that_can_be_given_positions():
    rules = build(ManifestConfig, manifest_limits(PRESET, FRAME_RATE))
    clip = {"rate_hz": 22050, "channels": 1, "subtype": "PCM_16", "snr_db": 40.0}
    levels = {"peak": 0.5, "mono_peak": 0.5, "dc": 0.0, "clipped": 0.0}
    kinds = []
    for row in rows((800, 20.9), (6500, 1.0), (20, 21.1)):
        measure = ClipMeasure(seconds=row.seconds, **clip, **levels)
        kinds.append([kind for kind, _ in checks.own_faults(row, measure, rules)])
    assert "long text" not in kinds[0] and "too long" not in kinds[0]
    assert "long text" in kinds[1] and "too long" in kinds[2]
    assert manifest_limits(PRESET, FRAME_RATE, 5.0)["max_clip_s"] == 5.0
    assert manifest_limits(PRESET, FRAME_RATE, 99.0)["max_clip_s"] < 22


def test_every_later_notebook_sees_the_positions_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))
    monkeypatch.setenv("KIT_RUN", "mine")
    run = find_run("tiny")
    before = run.section("model")
    run.record(data={"positions": {"max_text": 224, "max_code": 608}})
    assert find_run().section("model") == before | {"max_text": 224, "max_code": 608}
    assert preset_task(find_run().preset, CPU, 1, rows=((200, 300),)).model.max_text == 224
