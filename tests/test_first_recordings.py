"""The first real recordings: sentences longer than a preset's positions, and what is reported."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from helpers import CPU, GPT

from kit.audio.clip import ClipMeasure
from kit.base.checks import problems_of
from kit.base.config import CONFIGS, build
from kit.base.run import find_run
from kit.batches.encoding import fit_positions, longest, manifest_limits
from kit.dataset import checks, manifest
from kit.inference.evaluate import Scores, gate_checks, recognizer_warning
from kit.model.sequence import pack
from kit.settings import (
    MAX_CODE_POSITIONS,
    MAX_TEXT_POSITIONS,
    GPTConfig,
    ManifestConfig,
    TokenizerConfig,
)
from kit.text.tokenizer import Tokenizer
from kit.text.train_tokenizer import train_tokenizer
from kit.tuning.measure import preset_task

NOTEBOOKS = CONFIGS.parent / "notebooks"
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


def test_rows_longer_than_the_presets_positions_pack_into_those_given_them(tmp_path):
    texts = ["one fine morning " * 12, "two "]
    corpus = [dataclasses.replace(r, text=t) for r, t in zip(rows((2, 3.0), (2, 1.0)), texts)]
    pieces = TokenizerConfig(vocab_size=280)
    tokenizer = Tokenizer(train_tokenizer(texts * 20, tmp_path / "t.model", pieces))
    small = dataclasses.replace(GPT, max_text=8, text_vocab=tokenizer.vocab_size)
    model, refused = fit_positions(small, corpus, tokenizer, FRAME_RATE)
    ids = [tokenizer.encode(t) for t in texts]
    assert not refused and len(ids[0]) > 8
    assert pack(model, ids, [[1], [2]], torch.zeros(2, GPT.n_mels, 4)).tokens.shape[1] > 8
    with pytest.raises(ValueError, match="8 text"):
        pack(small, ids, [[1], [2]], torch.zeros(2, GPT.n_mels, 4))


def test_every_later_notebook_sees_the_positions_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))
    monkeypatch.setenv("KIT_RUN", "mine")
    run = find_run("tiny")
    before = run.section("model")
    run.record(data={"positions": {"max_text": 224, "max_code": 608}})
    assert find_run().section("model") == before | {"max_text": 224, "max_code": 608}
    assert preset_task(find_run().preset, CPU, 1, rows=((200, 300),)).model.max_text == 224


def test_what_a_person_may_have_to_change_is_a_parameter_of_the_notebook():
    notebook = json.loads((NOTEBOOKS / "01_data_prep.ipynb").read_text(encoding="utf-8"))
    code = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    for name in ("MAX_REJECTED_PERCENT", "MAX_CLIP_SECONDS"):
        assert f"\n{name} = " in code[1] and any(name in cell for cell in code[2:])


def test_the_gate_says_that_a_recogniser_with_a_bad_floor_cannot_judge():
    good = Scores(cer=0.05, eos_rate=1.0, duration_ratio=1.0, sentences=9)
    (found,) = problems_of(gate_checks(good, 0.4, 0.12))
    assert "the recogniser itself mistakes 40.0%" in found and "12.0%" in found
    assert recognizer_warning(0.02, 0.12) == recognizer_warning(None, 0.12) == ""
