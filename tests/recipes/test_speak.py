"""A voice of a run is played, measured, recorded and exported."""

import dataclasses
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import soundfile
import torch
from helpers import code_index, manifest
from made_runs import trained_run

from kit.base.errors import DatasetError, KitError, SpeechError
from kit.extras.indextts2.base import INDEXTTS2
from kit.inference.export import load_export, read_card
from kit.inference.voice import Speech
from kit.model.weights import WEIGHTS
from kit.notebook.result import Result, Sound
from kit.recipes.base_model import SAMPLE, voice_folder
from kit.recipes.exports import chosen_weights, current_export
from kit.recipes.open_run import ActiveRun
from kit.recipes.speak import BREAD, SOUND_FILES, Speaking, say_sample, speak, written

SMALL = {
    "infer": {"lengths": [4, 8], "batches": [1, 2], "formats": ["fp32", "int8"], "rows": 2},
    "generate": {"best_of": 2, "max_codes_per_text_id": 0.5, "retries": 0},
}


@pytest.fixture(scope="module")
def active_run(tmp_path_factory) -> ActiveRun:
    """A run as 01 to 03 leave it, its model untrained."""
    run = trained_run(tmp_path_factory.mktemp("runs"), SMALL)
    run.record(eval={"weights": "ema"}, data={"codes": str(code_index())})
    return run


@pytest.fixture(scope="module")
def speaking(active_run) -> Speaking:
    return Speaking(active_run)


def test_a_text_of_any_length_is_shown_with_sound_spectrogram_and_parts(speaking, capsys):
    said = speaking.say()
    assert said.sounds[0].caption == BREAD and len(said.sounds[0].wave) > 1000
    assert "s of speech" in str(said) and len(said.pictures) == 1
    speaking.panel()  # without a front end it says the sentence
    assert "s of speech" in capsys.readouterr().out
    said = speaking.say(speaking.story, speaking.voice.speakers[-1])
    parts = said.grid[1:]
    assert len(parts) > 1 and str(said).startswith(f"{len(parts)} parts, ")


def test_a_voice_without_an_end_is_played_with_a_remark(active_run, monkeypatch, capsys):
    own = Speaking(active_run, "one")
    cut = Speech(text="one", wave=torch.full((900,), 1.5), codes=torch.zeros(3), stopped=False)
    monkeypatch.setattr(type(own.voice), "speak", lambda *_: [cut])
    own.panel()
    assert "did not find the end of 'one'" in capsys.readouterr().out
    assert "did not find the end of 'one'" in str(own.say())


def test_settings_are_shown_as_they_are_now(speaking):
    settings = {row[0]: row for row in speaking.settings().grid[1:]}
    assert settings["best_of"][1] == "2"


def test_whoever_is_recorded_is_spoken_like(speaking):
    recording = next(row.audio for row in manifest() if row.split == "held_out")
    assert len(speaking.say(reference=recording).sounds[0].wave) > 1000
    choice = {"voice": "voice0", "weights": "fp32", "temperature": 0.0, "candidates": 2}
    wav, line = speaking.panel_speech("ሰላም", choice | {"key-value cache": False}, recording)
    assert "s of speech, made in" in line and wav.startswith(b"RIFF")


@pytest.mark.parametrize(
    "words, error, fact",
    [
        ({"text": "!"}, SpeechError, "no text|nothing|empty"),
        ({"speaker": "nobody"}, SpeechError, "No voice 'nobody'"),
        ({"speaker": "voice0", "reference": "a.wav"}, SpeechError, "'voice0' of this voice, or"),
        ({"reference": "nobody.wav"}, DatasetError, r"nobody\.wav cannot be read"),
        ({"reference": "silence.wav"}, SpeechError, r"silence\.wav is silent"),
    ],
)
def test_what_cannot_be_said_is_refused(words, error, fact, speaking, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    soundfile.write("silence.wav", np.zeros(22_050), 22_050)
    with pytest.raises(error, match=fact):
        speaking.say(**words)


@pytest.fixture(scope="module")
def report(speaking) -> dict:
    lines = [str(result) for result in speaking.run()]
    assert len(lines) == 9 and all(lines)
    return speaking.active_run.report()


def test_steps_record_figures_and_leave_an_export(report, speaking):
    figures = report["infer"]
    for key in ("kv_speedup", "first_sound_ms", "int8_speedup"):
        assert figures[key] > 0
    for which in ("", "_once", "_chosen"):
        assert figures[f"real_time_factor{which}"] > 0
    assert figures["chosen"] in speaking.voices
    cer = {name: variant["cer"] for name, variant in figures["variants"].items()}
    assert cer == {"fp32": figures["cer_fp32"], "int8": figures["cer_int8"]}
    folder = speaking.active_run.folder
    voices = (load_export(folder / "export"), speaking.voice)
    once = dataclasses.replace(speaking.sampling, best_of=1, exact_codes=9, temperature=0)
    codes = [voice.speak(["ሰላም"], speaking.speaker, once)[0].codes for voice in voices]
    assert torch.equal(*codes)


def test_two_voices_say_the_same_sentences_side_by_side(report, speaking):
    compared = speaking.compare()
    assert list(compared.compared) == ["fp32", "int8"]
    captions = [[sound.caption for sound in sounds] for sounds in compared.compared.values()]
    assert captions[0] == captions[1] and captions[0][0] == BREAD
    assert compared._repr_html_().count("<audio") == 2 * len(captions[0])
    export = str(speaking.active_run.folder / "export")
    other = speaking.compare("fp32", export).compared
    assert len(other[export]) == len(captions[0])
    with pytest.raises(SpeechError, match=r"'int9' is neither"):
        speaking.compare("int9")


def test_the_export_is_offered_by_a_link_or_colabs_button(report, speaking, tmp_path, monkeypatch):
    folder = speaking.active_run.folder
    monkeypatch.chdir(folder.parent)
    offered = speaking.download()
    path = folder / "download" / "spoken.zip"
    offered_bytes = path.stat().st_size
    assert offered.link == path and f"{offered_bytes / 1e6:.1f} MB" in str(offered)
    assert "href='spoken/download/spoken.zip'" in offered._repr_html_()
    shutil.unpack_archive(path, tmp_path)
    assert load_export(tmp_path / "spoken").speakers == speaking.voice.speakers
    speaking.export("fp32")
    assert speaking.download().link.stat().st_size > 1.2 * offered_bytes
    shown, sent = [], []
    files = SimpleNamespace(download=sent.append)
    monkeypatch.setitem(sys.modules, "google", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "google.colab", SimpleNamespace(files=files))
    monkeypatch.setattr("kit.notebook.speech_panels.display", shown.append)
    speaking.download()
    (button,) = shown
    button.click()
    assert sent == [str(path)]


def test_without_a_voice_the_step_before_is_named(speaking, tmp_path, monkeypatch, active_run):
    empty = dataclasses.replace(active_run, folder=tmp_path)
    monkeypatch.setattr(speaking, "active_run", empty)
    with pytest.raises(KitError, match="04_inference"):
        speaking.download()
    with pytest.raises(KitError, match="run 03_evaluate_ema first"):
        Speaking(empty)


def test_an_export_is_renewed_once_weights_or_settings_have_changed(active_run, tmp_path):
    folder = Path(shutil.copytree(active_run.folder, tmp_path / "run"))
    run = dataclasses.replace(active_run, folder=folder)
    card = current_export(run) / "voice.json"
    written_ns = card.stat().st_mtime_ns
    current_export(run)
    assert card.stat().st_mtime_ns == written_ns
    (folder / "export" / "onnx").mkdir()
    warmer = run.save_settings({"generate": {"temperature": 0.75}})
    assert read_card(current_export(warmer)).settings.temperature == 0.75
    assert not (folder / "export" / "onnx").exists()
    weights = safetensors.torch.load_file(folder / "model-raw.safetensors")
    shutil.copyfile(folder / "model-raw.safetensors", folder / "model-ema.safetensors")
    voice = load_export(current_export(warmer))
    name = next(iter(weights))
    torch.testing.assert_close(voice.model.state_dict()[name], weights[name], atol=1e-2, rtol=1e-2)
    assert chosen_weights(warmer) == "ema"
    (folder / WEIGHTS["ema"]).unlink()  # as training further without an average does
    assert chosen_weights(warmer) == "raw"
    (folder / WEIGHTS["raw"]).unlink()  # deleted to make room: the export stands alone
    assert current_export(warmer) == folder / "export"


@pytest.mark.parametrize("suffix", SOUND_FILES)
def test_the_suffix_of_out_decides_the_kind_of_the_file(suffix, tmp_path):
    sound = Sound(caption="", wave=np.sin(np.arange(22050) / 9), sample_rate_hz=22050)
    written(Result(line="said", sounds=[sound]), tmp_path / f"said{suffix.upper()}")
    about = soundfile.info(tmp_path / f"said{suffix.upper()}")
    assert about.format == suffix[1:].upper() and about.duration == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    "options, named",
    [
        ({"voice": "export"}, "--text"),
        ({"text": " "}, "--text is empty"),
        ({"text": "a", "out": Path(".")}, r"\.wav, \.flac, \.ogg, \.mp3"),
        ({"text": "a", "out": Path("said.m4a")}, r"said\.m4a"),
        ({"text": "a", "voice": "index", "speaker": "alma"}, "no --speaker"),
    ],
)
def test_options_that_do_not_belong_together(options, named, monkeypatch):
    release = "kit.recipes.speak.release_in"
    monkeypatch.setattr(release, lambda folder: INDEXTTS2 if folder.name == "index" else None)
    with pytest.raises(KitError, match=named):
        list(speak("mine", **options))


def test_the_voice_that_comes_with_the_kit_speaks_before_anything_is_trained():
    result = say_sample()
    seconds = len(result.sounds[0].wave) / result.sounds[0].sample_rate_hz
    assert 1.5 < seconds < 4 and "cut" not in result.line
    folder = voice_folder(SAMPLE)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 6e6
