"""With the sound of a released XTTS-v2 in place of the kit's own, the steps are the same.

A tiny one with random weights: its sound means nothing, but every step must accept it.
"""

import dataclasses

import pytest
import soundfile
import torch
from helpers import corpus, unchecked
from released_sound import spoken
from released_xtts import random_dvae, random_sound, settings

from kit.audio.clip import load_wave
from kit.audio.codec import save_codec
from kit.base.errors import KitError
from kit.batches.code_cache import reference_rows
from kit.dataset.data_report import read_manifest
from kit.inference.export import load_export
from kit.recipes.active_run import ActiveRun
from kit.recipes.evaluate import Evaluation
from kit.recipes.prepare import Preparation
from kit.recipes.speak import Speaking
from kit.recipes.start import start
from kit.recipes.train import Training
from kit.recipes.training_data import TrainingData
from kit.releases.xtts_v2.codec import XTTSCodec, xtts_codec
from kit.releases.xtts_v2.dvae import XTTSMel

SMALL = {
    "model": {"width": 96},  # of the states that its sound is made of
    "train": {"max_steps": 4, "eval_steps": 2, "gate_every": 2, "save_steps": 2},
    "generate": {"best_of": 2, "max_codes_per_text_id": 0.5, "retries": 0},
    "evaluate": {"sentences": 2},
    "infer": {"formats": ["fp32"], "sentences": 2},
}


@pytest.fixture(scope="module")
def run() -> ActiveRun:
    """A run that was prepared, trained and evaluated with it."""
    codec = xtts_codec(random_sound(), random_dvae(), settings())
    sections = {
        **SMALL,
        "codec": dataclasses.asdict(codec.config),
        "front_end": dataclasses.asdict(codec.reference_mel.config),
    }
    run = start("xtts-sound", "tiny", settings=sections)
    save_codec(codec, run.path("codec.safetensors"))
    reported = [str(result) for result in Preparation(run, str(corpus())).run()]
    assert "32 codes, 21.5 of them a second; the one of before" in reported[3]
    list(unchecked(Training(run)).run())
    list(Evaluation(run).run())
    return run


def test_its_codes_are_what_is_learned(run):
    report = run.report()
    assert report["train"]["steps"] == 4
    assert {"cer", "cer_codec", "cer_floor"} <= set(report["eval"])


def test_it_speaks_in_one_go_and_in_a_stream(run):
    speaking = Speaking(run)
    said = speaking.say()
    assert said.sounds[0].sample_rate_hz == 24_000 and len(said.sounds[0].wave) > 1000
    assert "largest difference" in str(speaking.stream())
    assert speaking.voice.decodes_from_states and "codes alone" not in str(speaking)
    speech = speaking.speech(speaking.sentence, speaking.speaker)
    assert (speech.wave - speaking.voice.codec.decode(speech.codes[None])[0]).abs().max() > 1e-2


def test_each_speaker_vector_is_that_of_the_reference(run):
    voice = Speaking(run).voice
    assert sorted(voice.vectors) == voice.speakers
    cache = TrainingData(run).cache
    recordings = {row.id: row.audio for row in read_manifest(run.folder)}
    for speaker, i in reference_rows(cache).items():
        wave = load_wave(recordings[cache.rows[i]["id"]], 22_050)
        vector = voice.codec.speaker_embedding(wave, 22_050)
        assert torch.allclose(voice.vectors[speaker], vector, atol=1e-5)


def test_whoever_is_recorded_is_spoken_like(run, tmp_path):
    both = torch.stack((spoken(5 * 48_000, rate=48_000), spoken(5 * 48_000, 1, 48_000)))
    soundfile.write(tmp_path / "guest.wav", both.T.numpy(), 48_000)
    speaking = Speaking(run)
    said = speaking.say(reference=str(tmp_path / "guest.wav"))
    assert said.sounds[0].sample_rate_hz == 24_000
    assert "guest.wav" not in speaking.voice.speakers


def test_a_voice_with_it_is_exported_and_comes_back(run):
    speaking = Speaking(run)
    assert "the same codes as before" in str(speaking.export("fp32"))
    voice = load_export(run.folder / "export")
    assert isinstance(voice.codec, XTTSCodec) and isinstance(voice.front_end, XTTSMel)
    assert voice.front_end.config == voice.codec.reference_mel.config


def test_without_a_release_there_is_none():
    run = start("xtts-alone", "tiny", settings={**SMALL, "codec": {"kind": "xtts"}})
    preparation = Preparation(run, str(corpus()))
    preparation.check()
    with pytest.raises(KitError, match="XTTS's codec is not trained here: it comes with a rel"):
        preparation.train_codec()
