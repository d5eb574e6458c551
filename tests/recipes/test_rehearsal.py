"""What a voice could say before is said again while it learns: from settings to the record."""

import itertools

import numpy as np
import pytest
from helpers import corpus, unchecked
from xtts_texts import write_readers_release

from kit.base.errors import DamagedFileError, KitError
from kit.recipes import rehearsal
from kit.recipes.open_run import ActiveRun
from kit.recipes.prepare import Preparation
from kit.recipes.rehearsal import (
    REHEARSAL,
    REHEARSED,
    SENTENCES,
    Rehearsal,
    RehearsalRow,
    Rehearsed,
    readings,
    sentences_in,
)
from kit.recipes.start import start
from kit.recipes.train import Training
from kit.recipes.training_data import TrainingData
from kit.settings import FinetuneConfig
from kit.text.normalize import normalize
from kit.training.config import Finetuning

# Every code is about as likely as every other, STOP among them: most readings find an end.
LONG = {"max_codes_per_text_id": 4.0}
FEW = {"max_steps": 3, "gate_every": 0, "eval_steps": 3, "warmup_steps": 1}
SETTINGS = {"train": FEW, "generate": LONG, "finetune": {"rehearsal": 0.25, "rehearsal_rows": 20}}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> ActiveRun:
    """A run that begins with a tiny release, prepared."""
    release = write_readers_release(tmp_path_factory.mktemp("published") / "release")
    base = {"base_model": str(release), "accept_license": "CPML"}
    *_, last = Preparation(start("rehearses", settings=SETTINGS), str(corpus()), **base).run()
    run = start("rehearses")
    assert f"To rehearse: {run.report()['finetune']['rehearsal']['rows']} rows in " in str(last)
    return run


def test_it_trains_on_rehearsal_in_the_voices_of_the_recordings(run):
    noted = run.report()["finetune"]["rehearsal"]
    assert noted["spoken"] == 20 and 0 < noted["rows"] <= 20 and noted["seconds"] > 0
    assert set(noted["languages"]) <= {"en", "de", "hu"} and "en" in noted["languages"]
    training = Training(run)
    data, cache = training.data, training.data.cache
    rows, train = cache.rows_in_split("rehearsal"), cache.rows_in_split("train")
    assert len(rows) == noted["rows"]
    speakers, trained = ({cache.rows[i]["speaker"] for i in split} for split in (rows, train))
    assert speakers == trained
    english = data.tokenizer.vocabulary.ids["[en]"]
    assert english in {int(cache.texts[i][0]) for i in rows}, "spelt under its own tag"
    assert max(len(cache.texts[i]) for i in rows) + 2 <= data.model.max_text
    assert all(max(cache.codes[i]) < data.model.start_code for i in rows)
    assert data.longest_row["codes"] >= max(len(cache.codes[i]) for i in rows)
    stream = data.stream()
    found = list(itertools.chain(*stream.plan(0)))
    assert sorted(i for i in found if i in set(train)) == list(train)
    assert len(found) - len(train) == round(len(train) / 3)
    assert "25% of an epoch is rehearsal: " in str(training.size())
    held_out = data.stream("held_out").plan(0)
    assert not set(itertools.chain(*held_out)) & set(stream.rehearsed)
    list(unchecked(training).run())
    noted = run.report()["train"]["finetune"]["rehearsal"]
    assert noted["share"] == pytest.approx(0.25, abs=0.01)
    assert noted["rows_an_epoch"] == stream.rehearsal_rows_per_epoch > 0


@pytest.fixture
def voice(run):
    """The run's speakers; the speech generated for rehearsal is there again afterwards."""
    kept = (run.folder / REHEARSAL).read_bytes()
    noted = run.report()["finetune"]["rehearsal"]
    yield TrainingData(run, rehearsed=False).voice()
    (run.folder / REHEARSAL).write_bytes(kept)
    run.record(finetune={"rehearsal": noted})


def test_interrupted_it_resumes_with_the_sentences_not_yet_spoken(run, voice, monkeypatch):
    path = run.folder / REHEARSAL
    key = rehearsal.rehearsal_key(run, voice.references)
    monkeypatch.setattr(rehearsal, "ROWS_AT_ONCE", 4)
    path.unlink()
    Rehearsal(run, voice).speak()
    wanted = rehearsal.load_rehearsal(path, key)
    path.unlink()
    read = Rehearsal.read
    parts = []

    def interrupted(self, decoder, part):
        parts.append(part)
        if len(parts) == 3:
            raise KeyboardInterrupt
        return read(self, decoder, part)

    monkeypatch.setattr(Rehearsal, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Rehearsal(run, voice).speak()
    before = rehearsal.load_rehearsal(path, key)
    assert len(before.codes) == 8
    Rehearsal(run, voice).speak()
    assert len(parts) == 3 + 3, "twelve were left, four at once"
    found = rehearsal.load_rehearsal(path, key)
    assert list(found.codes) == list(wanted.codes)
    assert all(np.array_equal(found.codes[r], codes) for r, codes in wanted.codes.items())
    assert found.seconds > before.seconds
    fewer = Rehearsal(run, voice)
    fewer.config = FinetuneConfig(rehearsal_rows=3)
    fewer.speak()
    assert len(rehearsal.load_rehearsal(path, key).codes) == 3, "what training mixes in"


def test_what_was_spoken_otherwise_is_spoken_again_and_not_trained_on(run, voice):
    path = run.folder / REHEARSAL
    reading = RehearsalRow(language="en", text="a voice", speaker="nobody", number=0)
    codes = {reading: np.arange(5, dtype=np.int32)}
    Rehearsed(codes=codes, seconds=1.0).save(path, "another voice")
    with pytest.raises(KitError, match=r"another voice.*run 01_data_prep"):
        TrainingData(run)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DamagedFileError, match="damaged"):
        TrainingData(run)
    Rehearsal(run, voice).speak()
    assert reading not in rehearsal.load_rehearsal_rows(run, voice.references).codes


def test_where_no_reading_found_its_end_it_says_so_and_trains_without(run, voice):
    speaking = Rehearsal(run, voice)
    speaking.base.model.code_head.bias.data[speaking.base.model.config.stop_code] = -1e4
    (run.folder / REHEARSAL).unlink()
    assert "of 20 sentences" in str(speaking.speak())
    nothing = {"rows": 0, "rows_an_epoch": 0, "share": 0.0}
    assert TrainingData(run).rehearsal_figures() == nothing


def test_readings_are_spread_evenly_and_need_a_base_voice():
    texts = {"en": ["a", "b", "c"], "de": ["d"]}
    found = readings(texts, ["one", "two"], 10)
    assert "".join(r.text for r in found) == "adbcadbcad"
    assert [r.number for r in found] == [0] * 4 + [1] * 4 + [2] * 2
    assert len(set(found)) == 10
    assert {r.speaker for r in found if r.text == "a"} == {"one", "two"}
    assert readings({}, ["one"], 10) == readings(texts, ["one"], 0) == []
    asked = Finetuning(config=FinetuneConfig(rehearsal=0.2))
    with pytest.raises(KitError, match=r"finetune.rehearsal = 0.2.*BASE_MODEL"):
        asked.require_voice()
    with pytest.raises(KitError, match="rehearsal"):
        FinetuneConfig(rehearsal=1.0)


def test_sentences_of_ones_own(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text('en: ["The Voice - reads."]\n', encoding="utf-8")
    assert sentences_in(file) == {"en": ["the voice reads."]}
    for wrong in ("en: a sentence", "[a, b]", "en: [1, 2]", "en: ["):
        file.write_text(wrong, encoding="utf-8")
        with pytest.raises(KitError, match="by their language, as in"):
            sentences_in(file)
    with pytest.raises(KitError, match="can be read"):
        sentences_in(tmp_path / "none.yaml")


@pytest.mark.filterwarnings("ignore:There is no kit/text/languages")
def test_what_is_rehearsed_is_none_of_what_forgetting_is_measured_on():
    kept = sentences_in(REHEARSED)
    measured = sentences_in(SENTENCES)
    assert list(kept) == list(measured)
    for language, texts in kept.items():
        assert not set(texts) & set(measured[language])
        assert all(normalize(text, language) == text for text in texts)
