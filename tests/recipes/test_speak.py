"""The speaking recipe: a voice of a run is played, measured, recorded and exported."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import soundfile
import torch
from helpers import code_index, leave_voice_files, manifest, real_voice

from kit.base.config import merge
from kit.base.errors import DatasetError, KitError, SpeechError
from kit.inference.export import load_export
from kit.inference.generate import GenerateConfig
from kit.inference.voice import Speech
from kit.model.weights import save_model
from kit.recipes.active_run import ActiveRun
from kit.recipes.speak import BREAD, STEPS, Speaking
from kit.recipes.start import start

SMALL = {
    "infer": {"lengths": [4, 8], "batches": [1, 2], "formats": ["fp32", "int8"], "rows": 2},
    "generate": {"best_of": 2, "max_codes_per_text_id": 0.5, "retries": 0},
}


@pytest.fixture(scope="module")
def active_run(tmp_path_factory) -> ActiveRun:
    """A run as 01 to 03 leave it, its model untrained."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KIT_RUNS", str(tmp_path_factory.mktemp("runs")))
        # A busy machine is listened to for six seconds, at every start.
        idle = SimpleNamespace(idle=100.0, nice=0.0)
        patch.setattr("psutil.cpu_times_percent", lambda _seconds: idle)
        run = start("spoken", "tiny")
    torch.set_num_threads(threads)
    voice = real_voice()
    save_model(voice.model, run.path("model-ema.safetensors"))
    leave_voice_files(run.folder, voice)
    run.record(eval={"weights": "ema"}, data={"language": "am", "codes": str(code_index())})
    return dataclasses.replace(run, preset=merge(run.preset, SMALL))


@pytest.fixture(scope="module")
def speaking(active_run) -> Speaking:
    return Speaking(active_run)


def test_a_text_of_any_length_is_shown_with_sound_spectrogram_and_parts(speaking):
    said = speaking.say()
    assert said.sounds[0].caption == BREAD and len(said.sounds[0].wave) > 1000
    assert "s of speech" in str(said) and len(said.pictures) == 1
    drawn = said._repr_html_()
    assert drawn.index("<img") < drawn.index("<audio")
    said = speaking.say(speaking.story, speaking.voice.speakers[-1], "int8")
    parts = said.grid[1:]
    assert len(parts) > 1 and str(said).startswith(f"{len(parts)} parts, ")
    assert all(0 < int(ids) <= 40 for _, ids in parts)


def test_a_voice_without_an_end_is_played_with_a_remark(active_run, monkeypatch, capsys):
    own = Speaking(active_run, sentence="ሰላም", story="ሰላም. ሰላም")
    assert own.say().sounds[0].caption == "ሰላም" and own.story == "ሰላም. ሰላም"
    own = Speaking(active_run, "one")
    cut = Speech(text="one", wave=torch.full((900,), 1.5), codes=torch.zeros(3), stopped=False)
    monkeypatch.setattr(type(own.voice), "speak", lambda *_: [cut])
    own.panel()
    assert "did not find the end of 'one'" in capsys.readouterr().out
    assert "did not find the end of 'one'" in str(own.say())


def test_a_voice_speaks_without_evaluation_and_held_out_rows(active_run, tmp_path, monkeypatch):
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))
    folder = tmp_path / "alone"
    shutil.copytree(active_run.folder, folder)
    run = dataclasses.replace(active_run, folder=folder)
    (folder / "report.json").write_text(
        json.dumps({"data": {"language": "ti", "codes": str(code_index())}}), encoding="utf-8"
    )
    (folder / "model-ema.safetensors").rename(folder / "model-raw.safetensors")
    rows = (folder / "manifest.jsonl").read_text(encoding="utf-8").replace("held_out", "train")
    (folder / "manifest.jsonl").write_text(rows, encoding="utf-8")
    alone = Speaking(run)
    assert alone.weights == "raw" and alone.say().sounds[0].caption == alone.held_out[0].text


def test_errors_settings_and_the_panel_without_a_front_end(speaking, monkeypatch):
    with pytest.raises(SpeechError):
        speaking.say("!")
    with pytest.raises(SpeechError, match="No voice 'nobody'"):
        speaking.say(speaker="nobody")
    with pytest.raises(SpeechError, match=r"'int9'\. Did you mean `int8`"):
        speaking.say(dtype="int9")
    settings = {row[0]: row for row in speaking.settings().grid[1:]}
    assert settings["best_of"][1] == "2"
    assert set(settings) <= {field.name for field in dataclasses.fields(GenerateConfig)}
    asked = []
    monkeypatch.setattr("kit.notebook.speech_panels.display", asked.append)
    speaking.panel()
    assert asked[0].data.startswith(b"RIFF")


def test_whoever_is_recorded_is_spoken_like(speaking, tmp_path):
    recording = next(row.audio for row in manifest() if row.split == "held_out")
    said = speaking.say(reference=recording)
    assert len(said.sounds[0].wave) > 1000
    choice = {"voice": "", "weights": "fp32", "temperature": 0.0, "candidates": 2}
    wav, line = speaking.panel_speech("ሰላም", choice | {"key-value cache": False}, recording)
    assert "s of speech, made in" in line
    assert wav.startswith(b"RIFF")
    with pytest.raises(SpeechError, match="Who is to speak: 'voice0' of this voice, or who speaks"):
        speaking.say(speaker="voice0", reference=recording)
    with pytest.raises(DatasetError, match=r"nobody\.wav cannot be read"):
        speaking.say(reference=str(tmp_path / "nobody.wav"))
    soundfile.write(tmp_path / "silence.wav", torch.zeros(22_050).numpy(), 22_050)
    with pytest.raises(SpeechError, match=r"silence\.wav is silent"):
        speaking.say(reference=str(tmp_path / "silence.wav"))


@pytest.fixture(scope="module")
def report(speaking) -> dict:
    lines = [str(result) for result in speaking.run()]
    assert len(lines) == 6 + len(STEPS) and all(lines)
    return speaking.active_run.report()


def test_each_step_records_its_figures_once_and_leaves_samples_and_an_export(
    report, speaking, active_run
):
    figures = report["infer"]
    for key in ("kv_speedup", "first_sound_ms", "real_time_factor", "real_time_factor_once"):
        assert figures[key] > 0
    assert figures["chosen"] in speaking.voices and figures["real_time_factor_chosen"] > 0
    assert set(figures["variants"]) == {"fp32", "int8"}
    assert figures["variants"]["fp32"]["cer"] == figures["cer_fp32"]
    assert figures["variants"]["int8"]["cer"] == figures["cer_int8"]
    assert 0 < figures["int8_top1_agreement"] <= 1 and 0 < figures["int8_size_ratio"] < 1
    assert 0 < figures["int8_linear_size_ratio"] < 0.5 and figures["int8_speedup"] > 0
    folder = speaking.active_run.folder
    typed = [sample for sample in report["samples"] if sample["split"] == "typed"]
    assert [Path(sample["wav"]).name for sample in typed] == [
        "typed-0-fp32.wav",
        "typed-0-int8.wav",
    ]
    assert all((folder / sample["wav"]).is_file() for sample in typed)
    speaking.say_in_each_format()
    again = [s for s in speaking.active_run.report()["samples"] if s["split"] == "typed"]
    assert again == typed
    folder = speaking.active_run.folder
    exported = load_export(folder / "export")
    once = dataclasses.replace(speaking.sampling, best_of=1, exact_codes=9, temperature=0)
    waves = [
        voice.speak(["ሰላም"], speaking.speaker, once)[0].codes
        for voice in (exported, speaking.voice)
    ]
    assert torch.equal(*waves)
    assert (folder / "programs" / "decode_one.pt2").is_file()
    assert all("measured before" in str(result) for result in Speaking(active_run).costs.run())
    assert active_run.report()["infer"] == report["infer"] and "measured" not in report["infer"]
    page = (active_run.folder / "report.html").read_text(encoding="utf-8")
    assert Speaking(active_run).costs.fingerprint not in page
    trained_on = Speaking(active_run)
    trained_on.weights_file = active_run.folder / "longer.safetensors"
    trained_on.weights_file.write_bytes(b"other weights")
    assert "measured before" not in str(next(trained_on.costs.run()))


def test_two_voices_say_the_same_sentences_side_by_side(report, speaking):
    compared = speaking.compare()
    assert list(compared.compared) == ["fp32", "int8"]
    captions = [[sound.caption for sound in sounds] for sounds in compared.compared.values()]
    assert captions[0] == captions[1] and captions[0][0] == BREAD
    assert compared._repr_html_().count("<audio") == 2 * len(captions[0])
    export = str(speaking.active_run.folder / "export")
    other = speaking.compare("fp32", export).compared
    assert len(other[export]) == len(captions[0])
    with pytest.raises(SpeechError, match=r"'int9' is neither.*Did you mean `int8`"):
        speaking.compare("int9")


def test_the_export_is_downloaded_by_a_link_or_on_colab_a_button(
    report, speaking, tmp_path, monkeypatch
):
    folder = speaking.active_run.folder
    monkeypatch.chdir(folder.parent)
    offered = speaking.download()
    path = folder / "download" / "spoken.zip"
    assert offered.link == path and f"{path.stat().st_size / 1e6:.1f} MB" in str(offered)
    assert "href='spoken/download/spoken.zip'" in offered._repr_html_()
    shutil.unpack_archive(path, tmp_path)
    assert load_export(tmp_path / "spoken").speakers == speaking.voice.speakers
    written_ns = path.stat().st_mtime_ns
    speaking.download()
    assert path.stat().st_mtime_ns == written_ns
    speaking.export()
    speaking.download()
    assert path.stat().st_mtime_ns > written_ns
    assert list(path.parent.iterdir()) == [path]
    shown = []
    sent = []
    files = SimpleNamespace(download=sent.append)
    monkeypatch.setitem(sys.modules, "google", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "google.colab", SimpleNamespace(files=files))
    monkeypatch.setattr("kit.notebook.speech_panels.display", shown.append)
    offered = speaking.download()
    (button,) = shown
    assert "<a href" not in offered._repr_html_() and "MB" in button.description and not sent
    button.click()
    assert sent == [str(speaking.active_run.folder / "download" / "spoken.zip")]


def test_without_a_voice_the_step_before_is_named(speaking, tmp_path, monkeypatch, active_run):
    bare = dataclasses.replace(speaking.active_run, folder=tmp_path)
    monkeypatch.setattr(speaking, "active_run", bare)
    with pytest.raises(SpeechError, match=r"speaking\.export\(\)"):
        speaking.download()
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))
    empty = dataclasses.replace(active_run, folder=tmp_path)
    with pytest.raises(KitError, match="run 03_evaluate_ema first"):
        Speaking(empty)
