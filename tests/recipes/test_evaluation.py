"""The evaluation recipe: what it shows, records and leaves, and that nothing is spoken twice."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import last_value, real_voice, run_shown
from made_runs import trained_run

from kit.base.config import merge
from kit.base.errors import KitError, SpeechError
from kit.base.files import file_digest
from kit.dataset.manifest import read_manifest, write_manifest
from kit.inference.evaluate import KINDS
from kit.inference.voice import Voice
from kit.inference.voice_files import save_references
from kit.recipes.evaluate import Evaluation
from kit.recipes.open_run import ActiveRun
from kit.text.normalize import letters

TEACHING = Path(__file__).resolve().parents[2] / "docs" / "teaching.md"
SMALL = {
    "generate": {"best_of": 2, "max_codes_per_text_id": 0.5, "retries": 0},
    "evaluate": {"sentences": 4, "worst_cer": 0.12},
}
# What report.json says under `eval`, which later notebooks and the checklist read.
RECORDED = (
    "raw_loss ema_loss weights candidates gate cer_floor cer_codec cer_raw cer_ema cer eos_rate "
    "duration_ratio sentences runaway_rate unseen long free_order whose_voice"
).split()
STEPS = "hear rates harder whose losses words verdict judges samples".split()
SAYABLE = 3  # of the four sentences, one has a letter that no training text has


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> ActiveRun:
    return trained_run(tmp_path_factory.mktemp("runs"), SMALL)


@pytest.fixture(scope="module")
def evaluated(run) -> tuple[Evaluation, dict]:
    """An evaluation that took every step, and its results by step."""
    evaluation = Evaluation(run)
    return evaluation, dict(zip(STEPS, evaluation.run(), strict=True))


def test_every_sentence_can_be_played_and_every_comparison_is_drawn(evaluated):
    evaluation, results = evaluated
    chosen = f"{evaluation.data.best}, best of 2"
    with pytest.raises(KitError, match=f"choose 0 to {SAYABLE - 1}"):
        evaluation.hear(SAYABLE)
    for result in (results["hear"], evaluation.hear(2)):
        captions = [sound.caption for sound in result.sounds]
        assert captions == ["recording", "codec", "raw, one candidate", chosen]
    for name in ("rates", "harder", "whose", "losses", "words", "samples"):
        assert results[name].pictures, name
    assert len(results["rates"].grid) == 4  # headings, raw, ema, best of several
    beside = results["losses"].compared
    texts = [[sound.caption for sound in beside[name]] for name in ("raw", "ema")]
    assert texts[0] == texts[1] == [row.text for row in evaluation.data.held_out]


def test_figures_word_errors_and_samples_are_recorded(evaluated, run):
    data = evaluated[0].data
    figures = run.report()["eval"]
    assert set(RECORDED) <= set(figures)
    assert figures["sentences"] == SAYABLE and figures["candidates"] == 2
    assert figures["raw_loss"] == 3.0 and figures["ema_loss"] == pytest.approx(4.1 - 4 / 3)
    for split in ("unseen", "long", "free_order"):
        assert {"cer", "eos_rate", "cer_floor", "cer_codec"} <= set(figures[split])
    assert figures["cer"] == data.spoken["held_out"].scores.cer
    rows = [row for split in data.spoken for row in data.splits[split]]
    assert figures["words"] == sum(len(row.text.split()) for row in rows)
    assert len(figures["word_errors"]) == len(KINDS) and sum(figures["word_errors"].values()) > 0
    names = {sample["wav"] for sample in run.report()["samples"]}
    best = figures["weights"]
    kinds = [f"held_out-0-{kind}" for kind in ("raw", "ema", "best", "recording")]
    kinds += [f"unseen-0-{best}", f"long-0-{best}"]
    assert {f"samples/{kind}.wav" for kind in kinds} <= names
    assert all((run.folder / name).is_file() for name in names)


def test_the_verdict_names_what_an_untrained_voice_lacks(evaluated, run):
    verdict, message = evaluated[1]["verdict"], str(evaluated[1]["whose"])
    figures = run.report()["eval"]
    costs = figures["whose_voice"]
    assert set(costs) <= set(evaluated[0].data.voices["raw"].speakers) and costs
    deaf = any(cost["other"] - cost["own"] <= 0.001 * cost["own"] for cost in costs.values())
    assert ("may sound alike" in message) == deaf
    assert str(verdict) == "Not yet: " + "; ".join(figures["gate"])
    marks = {row[1]: row[0] for row in verdict.grid[1:]}
    assert marks["speakers distinguished"] == ("✗" if deaf else "✓")
    assert marks["CER of the voice"] == "✗"
    ended = figures["eos_rate"] == 1  # chance decides, with untrained weights
    assert marks["sentences that end"] == ("✓" if ended else "✗")


@pytest.fixture
def batches(monkeypatch) -> list[int]:
    """How many texts each call of `Voice.speak` was given from now on."""
    asked, speak = [], Voice.speak

    def counted(self, texts, *others):
        asked.append(len(texts))
        return speak(self, texts, *others)

    monkeypatch.setattr(Voice, "speak", counted)
    return asked


def test_only_other_weights_or_settings_are_spoken_again(evaluated, run, batches):
    before = run.report()["eval"]
    assert len(list(Evaluation(run).run())) == len(STEPS) and run.report()["eval"] == before
    assert batches == [1, 1]  # the sentence to play
    del batches[:]
    warm = merge(run.preset, {"generate": {"temperature": 0.9}})
    assert Evaluation(dataclasses.replace(run, preset=warm)).data.by_weights
    assert batches == [SAYABLE] * 2


def test_what_was_deleted_or_damaged_is_made_again(evaluated, run, batches):
    evaluation = Evaluation(run)
    evaluation.samples()
    del batches[:]
    (run.folder / "samples" / f"unseen-0-{evaluation.data.best}.wav").unlink()
    Evaluation(run).samples()
    assert batches == [len(evaluation.data.splits["unseen"])]
    assert all((run.folder / s["wav"]).is_file() for s in run.report()["samples"])
    del batches[:]
    run.path("transcripts", "held_out-ema.json").write_text('{"key', encoding="utf-8")
    with pytest.warns(UserWarning, match=r"held_out-ema\.json is damaged .* made again"):
        assert Evaluation(run).data.by_weights
    assert batches == [SAYABLE]


def test_a_run_without_an_average_is_judged_also_by_independent_models(tmp_path):
    run = trained_run(tmp_path, SMALL, ema=False)
    evaluation = Evaluation(run)
    assert evaluation.error_rates().pictures and evaluation.losses().pictures
    figures = run.report()["eval"]
    assert figures["weights"] == "raw" and not {"cer_ema", "ema_loss"} & set(figures)
    found = {"cer": 0.25, "dnsmos": 3.1, "similarity": 0.9, "clips": 4}
    weights = file_digest(run.folder / "model-raw.safetensors")
    run.record(judges={"heard": {"recordings": found}, "weights": weights})
    shown = evaluation.judges()
    assert shown.grid[1] == ("recordings", "25.0%", "3.10", "0.900", "4")
    run.record(judges={"weights": "of before"})
    assert "Of other weights" in str(evaluation.judges())


def test_the_exercises_of_teaching_count_rare_words_and_compare_three_frame_rates(run, evaluated):
    names = {"evaluation": evaluated[0], "run": run, "letters": letters}
    rare, *rates = re.findall(r"(?s)```python\n(.*?)```", TEACHING.read_text(encoding="utf-8"))
    counted = last_value(rare, names)
    spoken = evaluated[0].data.word_pairs()
    numbers = [int(n) for n in re.findall(r"\((\d+) words\)", " ".join(names["percent"]))]
    assert len(counted.pictures) == 1 and sum(numbers) == sum(len(p.words) for p in spoken)
    shown = last_value("\n".join(rates), names)
    rates = [float(row[1]) for row in shown.grid[1:]]
    assert rates == sorted(rates, reverse=True) and len(rates) == 3
    assert all("iB" in row[2] and row[3].endswith("%") for row in shown.grid[1:])


def test_the_table_of_the_edit_distance_leads_from_the_text_to_the_transcript(evaluated):
    text, transcript = "the quick brown fox runs", "the quick quick fox ran"
    held_out = [SimpleNamespace(text=text)]
    spoken = {"held_out": SimpleNamespace(scores=SimpleNamespace(transcripts=(transcript,)))}
    data = SimpleNamespace(held_out=held_out, spoken=spoken, worst_sentence=lambda: 0)
    shown = run_shown("03", "3c5a90e1", {"evaluation": SimpleNamespace(data=data)})
    assert str(shown) == "2 of 5 words need correction"
    steps = [cell.split()[1] for row in shown.grid[1:] for cell in row[1:] if " " in cell]
    assert steps == ["✓", "✓", "replaced", "✓", "replaced"]


def test_a_speaker_of_held_out_recordings_alone_speaks_from_one_of_them(tmp_path, monkeypatch):
    run = trained_run(tmp_path, SMALL)
    rows = read_manifest(run.folder)
    write_manifest([dataclasses.replace(row, speaker="new") for row in rows], run.folder)
    mel = next(iter(real_voice().references.values()))
    known = SimpleNamespace(references={"new": mel}, vectors={})
    made = SimpleNamespace(voice=lambda: known)
    monkeypatch.setattr("kit.recipes.evaluation_data.TrainingData", lambda run: made)
    data = Evaluation(run).data
    row = data.held_out[0]
    speech = data.voices["raw"].speak([row.text], row.speaker, data.read_once)
    assert len(speech) == 1 and set(data.voices["ema"].speakers) > {row.speaker}


def test_what_is_missing_is_named_with_the_notebook_to_run(tmp_path):
    run = trained_run(tmp_path, SMALL)
    run.path("references.safetensors").unlink()
    with pytest.raises(SpeechError, match="02_train"):
        Evaluation(run)
    with pytest.raises(KitError, match="sentences = -1"):
        Evaluation(run, sentences=-1)
    manifest = run.path("manifest.jsonl")
    rows = manifest.read_text(encoding="utf-8").replace("held_out", "train")
    manifest.write_text(rows, encoding="utf-8")
    save_references(real_voice().references, run.path("references.safetensors"))
    with pytest.raises(KitError, match=r"no held-out sentence.*01_data_prep"):
        Evaluation(run)
