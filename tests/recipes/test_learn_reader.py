"""The code reader of a run: how it is trained, saved, reported, and used for speech."""

import dataclasses

import pytest
from helpers import manifest
from test_state_sound import BRIEF, trained_run
from test_train import active

from kit.base.errors import KitError, SpeechError
from kit.base.files import file_digest
from kit.inference.candidates import READER, save_reader
from kit.inference.export import export_voice, load_export
from kit.inference.voice_files import load_voice
from kit.recipes.active_run import ActiveRun
from kit.recipes.evaluate import EvaluationData
from kit.recipes.train import balance_speakers, learn_reader
from kit.recipes.training_data import TrainingData

ASKED = {"rows": 60}
SEVERAL = dataclasses.replace(BRIEF, temperature=1.0, best_of=4)


@pytest.fixture(scope="module")
def learnt(tmp_path_factory) -> tuple[ActiveRun, object]:
    run = trained_run(tmp_path_factory.mktemp("reader"), reader=ASKED)
    return run, learn_reader(TrainingData(run))


def test_it_learns_from_the_runs_own_codes_and_shows_what_it_reads(learnt):
    run, result = learnt
    assert str(result).startswith("A reader of codes learnt from 60 recordings after 4 steps")
    assert result.grid[0] == ("held-out text", "read from the recording's codes")
    assert 1 < len(result.grid) <= 6
    figures = run.report()["reader"]
    assert figures["rows"] == 60 and figures["steps"] == 4 and figures["held_out"] > 0


def test_it_is_not_learnt_twice_and_a_damaged_one_is_made_again(learnt):
    run, _ = learnt
    path = run.path(READER)
    before = file_digest(path)
    assert str(learn_reader(TrainingData(run))).startswith("The reader of these codes is there")
    assert file_digest(path) == before
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(KitError, match="delete it, or run `reader"):
        load_voice(run.folder)
    assert "learnt from 60" in str(learn_reader(TrainingData(run)))
    assert file_digest(path) == before


def test_the_voice_asks_it_and_so_does_an_export(learnt, tmp_path, monkeypatch):
    run, _ = learnt
    voice = load_voice(run.folder)
    assert voice.within(SEVERAL).reread == 1
    text = manifest()[0].text
    asked = []
    text_mismatch = voice.reader.text_mismatch

    def noted(texts, codes):
        asked.append((texts, len(codes)))
        return text_mismatch(texts, codes)

    monkeypatch.setattr(voice.reader, "text_mismatch", noted)
    said = voice.speak([text], voice.speakers[0], SEVERAL)[0]
    spelt = voice.tokenizer.decode(voice.ids(text))
    assert asked == [([spelt] * 4, 4)]
    voice.speak([text], voice.speakers[0], dataclasses.replace(SEVERAL, reread=0.0))
    voice.speak([text], voice.speakers[0], dataclasses.replace(SEVERAL, best_of=1))
    assert len(asked) == 1
    export_voice(voice, tmp_path / "export", "fp32")
    taken = load_export(tmp_path / "export")
    again = taken.speak([text], taken.speakers[0], SEVERAL)[0]
    assert again.codes.tolist() == said.codes.tolist()
    (tmp_path / "export" / READER).unlink()
    with pytest.raises(SpeechError, match=r"There is no .*reader\.safetensors"):
        load_export(tmp_path / "export")


def test_the_reading_that_fits_its_text_is_kept(learnt, monkeypatch):
    run, _ = learnt
    voice = load_voice(run.folder)
    text = manifest()[0].text
    seen = []

    def third(texts, codes):
        seen[:] = [row.tolist() for row in codes]
        return [0.0 if i == 2 else 1000.0 for i in range(len(codes))]

    monkeypatch.setattr(voice.reader, "text_mismatch", third)
    # Of one length: one that found its end would go first.
    exact = dataclasses.replace(SEVERAL, exact_codes=12)
    said = voice.speak([text], voice.speakers[0], exact)[0]
    assert said.codes.tolist() == seen[2]


def test_a_voice_without_one_does_not_claim_to_be_read_back(tmp_path):
    run = trained_run(tmp_path)
    voice = load_voice(run.folder)
    assert voice.reader is None and voice.within(SEVERAL).reread == 0
    export_voice(voice, tmp_path / "export", "fp32")
    assert load_export(tmp_path / "export").reader is None


def test_of_another_codec_it_is_left_aside(tmp_path):
    run = trained_run(tmp_path, reader=ASKED)
    learn_reader(TrainingData(run))
    voice = load_voice(run.folder)
    assert voice.reader is not None
    path = run.path(READER)
    whole = path.read_bytes()
    digest = file_digest(run.path("codec.safetensors")).encode()
    path.write_bytes(whole.replace(digest, digest[::-1]))
    assert load_voice(run.folder).reader is None


def test_none_is_trained_at_zero_rows_and_too_few_recordings_are_reported(tmp_path):
    run = active(tmp_path)
    assert (
        str(learn_reader(TrainingData(run)))
        == "Candidates are ranked without a code reader: `reader.rows` is 0."
    )
    run = active(tmp_path, reader={"rows": 10})
    message = str(learn_reader(TrainingData(run)))
    assert "10 recordings are fewer than the 20" in message and not run.path(READER).exists()


def test_people_recordings_have_one_by_the_preset(tmp_path):
    run = active(tmp_path)
    run.record(data={"source": {"data": "my/recordings", "language": "am"}})
    assert "learnt from" in str(learn_reader(TrainingData(run)))


def test_speakers_with_few_recordings_count_as_far_as_the_others():
    rows = list(range(10))
    speakers = [0] * 6 + [1] * 3 + [2]
    found = balance_speakers(rows, speakers, max_repeats=4)
    assert sorted(found) == sorted([*range(6), *[6, 7, 8] * 2, *[9] * 4])
    assert balance_speakers(rows, speakers, max_repeats=4) == found
    assert sorted(balance_speakers(rows, speakers, max_repeats=1)) == rows


def test_what_was_spoken_with_another_reader_is_spoken_again(learnt):
    run, _ = learnt
    before = EvaluationData(run, 4).digests
    path = run.path(READER)
    kept = path.read_bytes()
    save_reader(load_voice(run.folder).reader, path)
    assert EvaluationData(run, 4).digests != before
    path.unlink()
    assert EvaluationData(run, 4).digests != before
    path.write_bytes(kept)
    assert EvaluationData(run, 4).digests == before
