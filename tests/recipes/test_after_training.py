"""What is trained after the model: the sound of its hidden states, and the reader of its codes."""

import dataclasses

import pytest
import torch
from helpers import leave_voice_files, manifest, real_voice
from made_runs import active

from kit.audio.mel_codec import MelCodec
from kit.base.errors import KitError, SpeechError
from kit.base.files import file_digest
from kit.dataset.manifest import write_manifest
from kit.inference.candidates import READER
from kit.inference.export import export_voice, load_export
from kit.inference.voice_files import SOUND, STALE, load_voice, load_voices
from kit.model.gpt import SpeechGPT
from kit.model.weights import WEIGHTS, load_model, save_model
from kit.recipes.after_training import balance_speakers, learn_reader, learn_sound
from kit.recipes.open_run import ActiveRun
from kit.recipes.training_data import TrainingData
from kit.settings import GenerateConfig

BRIEF = GenerateConfig(temperature=0.0, best_of=1, retries=0, max_codes_per_text_id=2.0)


def trained_run(folder, **sections) -> ActiveRun:
    """A run with the untrained weights of a model, and all else that a voice has."""
    run = active(folder, **sections)
    data = TrainingData(run)
    voice = dataclasses.replace(real_voice(), model=SpeechGPT(data.model))
    save_model(voice.model, run.path(WEIGHTS["raw"]), trained_with=data.parts)
    voice.model.code_head.bias.data[5] += 0.5
    save_model(voice.model, run.path(WEIGHTS["ema"]), trained_with=data.parts)
    leave_voice_files(folder, voice)
    return run


def test_recordings_that_are_gone_are_reported_and_a_persons_lose_their_text_at_times(tmp_path):
    run = active(tmp_path, recordings={"data": {"speeds": []}})
    assert TrainingData(run).model.text_dropout == 0
    run.record(data={"source": {"data": "my/recordings", "language": "am"}})
    data = TrainingData(run)
    assert data.model.text_dropout == data.stream("train").text_dropout == 0.15
    assert data.stream("held_out").text_dropout == 0
    run = trained_run(tmp_path)
    rows = [dataclasses.replace(row, audio=row.audio + ".gone") for row in manifest()]
    write_manifest(rows, run.folder)
    message = str(learn_sound(TrainingData(run)))
    recordings = sum(row.split == "train" for row in rows)
    assert f"0 of the {recordings} recordings to learn from are here, and it takes 20" in message
    assert "run this again" in message and not (run.folder / SOUND).exists()
    off = active(tmp_path, recordings={"decoder_finetune": {"steps": 0}})
    assert "`decoder_finetune.steps` is 0" in str(learn_sound(TrainingData(off)))


def test_it_is_left_beside_the_codec_learnt_once_and_exported(tmp_path):
    run = trained_run(tmp_path / "run")
    result = learn_sound(TrainingData(run))
    assert str(result).startswith("Sound of codes and states: 3 steps on ")
    kept = run.report()["sound"]
    assert kept == result.figures and kept["steps"] == 3
    assert kept["error_of_states"] != kept["error_of_codes"]
    before = file_digest(run.folder / SOUND)
    again = learn_sound(TrainingData(run))
    assert str(again) == "The decoder was trained on hidden states of these weights before."
    assert file_digest(run.folder / SOUND) == before
    for voice in load_voices(run.folder).values():
        assert voice.decodes_from_states and not voice.audio_note()
    exported = load_export(export_voice(voice, tmp_path / "export", "fp32"))
    said = [manifest()[0].text], voice.speakers[0], BRIEF
    assert torch.equal(exported.speak(*said)[0].wave, voice.speak(*said)[0].wave)


def test_that_of_other_weights_or_a_damaged_one_is_reported_and_made_again(tmp_path):
    run = trained_run(tmp_path)
    learn_sound(TrainingData(run))
    model = load_model(run.folder / WEIGHTS["raw"])
    model.code_head.bias.data[7] += 0.5
    save_model(model, run.folder / WEIGHTS["raw"], trained_with=TrainingData(run).parts)
    voice = load_voice(run.folder, WEIGHTS["raw"])
    assert not voice.decodes_from_states and voice.audio_note() == STALE
    assert str(learn_sound(TrainingData(run))).startswith("Sound of codes and states")
    assert load_voice(run.folder, WEIGHTS["raw"]).decodes_from_states
    path = run.folder / SOUND
    whole = path.read_bytes()
    path.write_bytes(whole[:-8] + bytes(8))
    with pytest.raises(ValueError, match=r"sound\.safetensors.*delete it, or run `sound\(\)`"):
        load_voice(run.folder)
    with pytest.warns(UserWarning, match=r"sound\.safetensors is damaged: it is made again"):
        assert "steps on" in str(learn_sound(TrainingData(run)))
    assert not load_voice(run.folder).audio_note()


SEVERAL = dataclasses.replace(BRIEF, temperature=1.0, best_of=4)


@pytest.fixture(scope="module")
def read(tmp_path_factory) -> tuple[ActiveRun, object]:
    run = trained_run(tmp_path_factory.mktemp("reader"), reader={"rows": 60})
    return run, learn_reader(TrainingData(run))


def test_it_learns_from_the_runs_own_codes_once_and_a_damaged_one_is_made_again(read):
    run, result = read
    assert str(result).startswith("A reader of codes learnt from 60 recordings after 4 steps")
    figures = run.report()["reader"]
    assert figures["rows"] == 60 and figures["steps"] == 4 and figures["held_out"] > 0
    path = run.path(READER)
    before = file_digest(path)
    assert str(learn_reader(TrainingData(run))).startswith("The reader of these codes is there")
    assert file_digest(path) == before
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(KitError, match="delete it, or run `reader"):
        load_voice(run.folder)
    assert "learnt from 60" in str(learn_reader(TrainingData(run)))
    assert file_digest(path) == before


def test_the_voice_and_an_export_keep_the_candidate_that_fits(read, tmp_path):
    run, _ = read
    voice = load_voice(run.folder)
    assert voice.within(SEVERAL).reread == 1
    folder = export_voice(voice, tmp_path / "export", "fp32")
    said = [manifest()[0].text], voice.speakers[0], SEVERAL
    codes = [each.speak(*said)[0].codes for each in (voice, load_export(folder))]
    assert torch.equal(*codes)
    (folder / READER).unlink()
    with pytest.raises(SpeechError, match=r"There is no .*reader\.safetensors"):
        load_export(folder)


def test_none_is_trained_on_too_few_recordings_and_speakers_are_balanced(tmp_path):
    run = active(tmp_path)
    assert "`reader.rows` is 0" in str(learn_reader(TrainingData(run)))
    run = active(tmp_path, reader={"rows": 10})
    message = str(learn_reader(TrainingData(run)))
    assert "10 recordings are fewer than the 20" in message and not run.path(READER).exists()
    run = active(tmp_path, recordings={"data": {"speeds": []}})
    run.record(data={"source": {"data": "my/recordings", "language": "am"}})
    assert "learnt from" in str(learn_reader(TrainingData(run)))
    found = balance_speakers(list(range(10)), [0] * 6 + [1] * 3 + [2], max_repeats=4)
    assert sorted(found) == sorted([*range(6), *[6, 7, 8] * 2, *[9] * 4])


def test_a_decoder_that_diverges_leaves_the_sound_to_the_codes(tmp_path, monkeypatch):
    run = trained_run(tmp_path)

    def diverges(*_):
        raise KitError("The loss was nan at step 59 of training the codec's decoder.")
        yield

    monkeypatch.setattr(MelCodec, "finetune_decoder", diverges)
    assert "made of codes alone. The loss was nan" in str(learn_sound(TrainingData(run)))
    assert not (run.folder / SOUND).exists()
