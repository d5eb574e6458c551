"""The sound of a trained voice learns from the model's states: what is left, shown and refused."""

import dataclasses
import json

import pytest
import torch
from helpers import leave_voice_files, manifest, real_voice
from test_train import active

from kit.base.errors import SpeechError
from kit.base.files import file_digest
from kit.dataset.manifest import write_manifest
from kit.inference.export import export_voice, load_export
from kit.inference.sampling import GenerateConfig
from kit.inference.voice_files import SOUND, STALE, codec_matches_weights, load_voice, load_voices
from kit.model.gpt import SpeechGPT
from kit.model.weights import WEIGHTS, load_model, save_model
from kit.recipes.active_run import ActiveRun
from kit.recipes.train import learn_sound
from kit.recipes.training_data import TrainingData

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


def test_what_people_recorded_is_learnt_without_its_text_at_times_and_never_judged_so(tmp_path):
    run = active(tmp_path)
    assert TrainingData(run).model.text_dropout == 0
    language = run.figure("data", "language")
    run.record(data={"source": {"data": "my/recordings", "language": language}})
    data = TrainingData(run)
    assert data.model.text_dropout == 0.15
    assert data.stream("train").text_dropout == 0.15
    assert data.stream("held_out").text_dropout == 0


@pytest.fixture(scope="module")
def learnt(tmp_path_factory) -> tuple[ActiveRun, object]:
    run = trained_run(tmp_path_factory.mktemp("sound"))
    return run, learn_sound(TrainingData(run))


def test_it_is_left_beside_the_codec_and_reported(learnt):
    run, result = learnt
    assert str(result).startswith("Sound of codes and states: 3 steps on ")
    assert len(result.pictures) == 1 and len(result.sounds) == 3
    assert [sound.caption for sound in result.sounds] == [
        "recording",
        "its codes",
        "its codes and the model's states",
    ]
    kept = json.loads((run.folder / "report.json").read_bytes())["sound"]
    assert kept == result.figures and kept["steps"] == 3
    assert kept["error_of_states"] != kept["error_of_codes"]
    assert all(codec_matches_weights(run.folder, run.folder / name) for name in WEIGHTS.values())


def test_it_is_not_learnt_twice(learnt):
    run, result = learnt
    before = file_digest(run.folder / SOUND)
    again = learn_sound(TrainingData(run))
    assert str(again) == "The decoder was trained on hidden states of these weights before."
    assert file_digest(run.folder / SOUND) == before
    assert [sound.wav_bytes() for sound in again.sounds] == [s.wav_bytes() for s in result.sounds]


def test_both_sets_of_weights_speak_with_it_and_so_does_an_export(learnt, tmp_path):
    run, _ = learnt
    for voice in load_voices(run.folder).values():
        assert voice.decodes_from_states and not voice.audio_note()
    text = manifest()[0].text
    said = voice.speak([text], voice.speakers[0], BRIEF)[0]
    alone = voice.codec.decode(said.codes[None])[0]
    assert said.wave.shape == alone.shape and not torch.allclose(said.wave, alone, atol=1e-5)
    pieces = []
    with pytest.raises(SpeechError, match="did not find the end"):  # it is untrained
        for piece in voice.stream(text, voice.speakers[0], BRIEF):
            pieces.append(piece)
    assert torch.allclose(torch.cat(pieces), said.wave, atol=1e-6)
    export_voice(voice, tmp_path / "export", "fp32")
    taken = load_export(tmp_path / "export")
    assert torch.equal(taken.speak([text], voice.speakers[0], BRIEF)[0].wave, said.wave)


def test_other_weights_speak_with_codes_alone_and_say_so(tmp_path):
    run = trained_run(tmp_path)
    learn_sound(TrainingData(run))
    model = load_model(run.folder / WEIGHTS["raw"])
    model.code_head.bias.data[7] += 0.5
    save_model(model, run.folder / WEIGHTS["raw"], trained_with=TrainingData(run).parts)
    voice = load_voice(run.folder, WEIGHTS["raw"])
    assert not voice.decodes_from_states and voice.audio_note() == STALE
    assert load_voice(run.folder).decodes_from_states
    assert str(learn_sound(TrainingData(run))).startswith("Sound of codes and states")
    assert load_voice(run.folder, WEIGHTS["raw"]).decodes_from_states


def test_a_damaged_one_is_reported_or_passed_over(tmp_path):
    run = trained_run(tmp_path)
    learn_sound(TrainingData(run))
    path = run.folder / SOUND
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    assert load_voice(run.folder).audio_note() == STALE
    path.write_bytes(whole[:-8] + bytes(8))
    with pytest.raises(ValueError, match=r"sound\.safetensors.*delete it, or run `sound\(\)`"):
        load_voice(run.folder)
    with pytest.warns(UserWarning, match=r"sound\.safetensors is damaged: it is made again"):
        assert "steps on" in str(learn_sound(TrainingData(run)))
    assert not load_voice(run.folder).audio_note()


def test_recordings_that_are_gone_and_what_was_turned_off_are_reported(tmp_path):
    run = trained_run(tmp_path)
    rows = [dataclasses.replace(row, audio=row.audio + ".gone") for row in manifest()]
    write_manifest(rows, run.folder)
    message = str(learn_sound(TrainingData(run)))
    assert (
        "0 of the recordings are here, and it takes 20" in message and "run this again" in message
    )
    assert not (run.folder / SOUND).exists()
    off = active(tmp_path, decoder_finetune={"steps": 0})
    assert "`decoder_finetune.steps` is 0" in str(learn_sound(TrainingData(off)))
