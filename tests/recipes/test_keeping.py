"""A run resumes on a fresh machine from the kept folder alone, and Colab's part in it."""

import json
import os
import shutil
import sys
import types
from pathlib import Path

import pytest
from helpers import code_index, trained_codec, world

from kit.audio.spectrogram import DEFAULT_MEL
from kit.base.config import build
from kit.base.errors import KitError
from kit.base.mirror import stamps
from kit.batches.batching import DataConfig
from kit.batches.encoding import cache_key
from kit.dataset.data_report import Utterance
from kit.dataset.manifest import read_manifest, write_manifest
from kit.recipes import open_run
from kit.recipes import start as start_module
from kit.recipes.start import start

RATHER_LATE_S = 3600.0  # no copy in the background during a test


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Goes over to a fresh machine of the name given; that before it is taken away."""
    monkeypatch.setattr(open_run, "COPY_EVERY_S", RATHER_LATE_S)
    monkeypatch.setattr(open_run, "_COPIES", {})
    monkeypatch.delenv("KIT_RUN")
    (tmp_path / "drive").mkdir()
    monkeypatch.setenv("KIT_MIRROR", str(tmp_path / "drive"))

    def go(name: str) -> Path:
        leave()
        monkeypatch.setenv("KIT_RUNS", str(tmp_path / name))
        return tmp_path / name

    def leave() -> None:
        for folder, kept in open_run._COPIES.items():
            kept.over.set()
            shutil.rmtree(folder.parent)
        open_run._COPIES.clear()

    yield go
    leave()


def row(name: str, audio: Path, split: str) -> Utterance:
    return Utterance(id=name, audio=str(audio), text="ሰላም", speaker="a", split=split, line=1)


def test_what_was_recorded_is_there_on_the_next_machine(machine, tmp_path):
    machine("a")
    run = start("my-voice")
    run.set_permanent("data", "the built-in corpus")
    run.path("tokenizer.model").write_text("pieces")
    run.record(data={"hours": 2.5})
    assert str(tmp_path / "drive" / "my-voice") in run._repr_html_()
    machine("b")
    again = start("my-voice")
    assert again.folder == tmp_path / "b" / "my-voice"
    assert again.report()["data"] == {"hours": 2.5}
    assert again.path("tokenizer.model").read_text() == "pieces"
    with pytest.raises(KitError, match=r"delete .*b/my-voice and .*drive/my-voice"):
        again.set_permanent("data", "another")


def test_without_kit_mirror_nothing_is_kept(machine, monkeypatch, tmp_path):
    machine("a")
    monkeypatch.delenv("KIT_MIRROR")
    run = start("alone")
    run.record(data={"hours": 1.0})
    assert run.kept is None and "kept in" not in run._repr_html_()
    assert not (run.folder / ".mirror.json").exists() and not stamps(tmp_path / "drive")


def test_a_disk_that_is_not_mounted_is_reported(machine, monkeypatch, tmp_path):
    machine("a")
    monkeypatch.setenv("KIT_MIRROR", str(tmp_path / "not-there"))
    with pytest.raises(KitError, match="Is the disk mounted"):
        start("any")
    monkeypatch.setenv("KIT_MIRROR", os.environ["KIT_RUNS"])
    (tmp_path / "a").mkdir()
    with pytest.raises(KitError, match="on another disk, or none"):
        start("any")


def test_checkpoints_are_fetched_only_when_needed(machine):
    machine("a")
    run = start("my-voice")
    run.path("checkpoints", "step-0000004.safetensors").write_text("weights")
    run.record(train={"steps": 4})
    machine("b")
    run = start("my-voice")
    assert not (run.folder / "checkpoints").exists()
    run.fetch_checkpoints()
    assert run.path("checkpoints", "step-0000004.safetensors").read_text() == "weights"


def test_the_code_cache_comes_as_far_as_this_run_needs_it(machine):
    trained_codec()
    index, codec = code_index(), world() / "codec.safetensors"
    runs = machine("a")
    run = start("my-voice")
    shutil.copytree(index.parent, runs / "codes")
    shutil.copy(codec, run.folder)
    data = build(DataConfig, run.section("data"))
    key = cache_key(run.folder / "codec.safetensors", DEFAULT_MEL, data)
    for shard in (runs / "codes").glob("codes-*"):
        shard.rename(shard.with_name(f"codes-{key}-{shard.name[-12:]}"))
    (runs / "codes" / "codes-other-1.safetensors").write_text("another run's")
    run.record(data={"codes": f"../codes/{index.name}"})
    made = {name for name in stamps(runs / "codes") if name.startswith(f"codes-{key}")}
    here = machine("b")
    start("my-voice")
    came = set(stamps(here / "codes"))
    assert made and came == made | {index.name}


def test_held_out_recordings_travel_with_the_run(machine):
    machine("a")
    run = start("my-voice")
    for name in ("learnt", "kept", "kept-2"):
        run.path("corpus", "wavs", f"{name}.wav").write_text(name)
    wavs = run.folder / "corpus" / "wavs"
    rows = [row("1", wavs / "learnt.wav", "train"), row("2", wavs / "kept.wav", "held_out")]
    write_manifest([*rows, row("3", wavs / "kept-2.wav", "long")], run.folder)
    run.record(data={"hours": 1.0})
    machine("b")
    run = start("my-voice")
    learnt, kept, long = read_manifest(run.folder)
    assert not Path(learnt.audio).exists()
    assert [Path(each.audio).read_text() for each in (kept, long)] == ["kept", "kept-2"]
    assert Path(kept.audio).is_relative_to(run.folder) and kept.text == "ሰላም"
    run.record(eval={"cer": 0.1})
    machine("c")
    again = read_manifest(start("my-voice").folder)
    assert [Path(each.audio).read_text() for each in again[1:]] == ["kept", "kept-2"]


def test_a_first_cell_may_be_run_twice(machine):
    machine("a")
    first, second = start("my-voice"), start("my-voice")
    assert first.kept is second.kept


# Colab itself.


@pytest.fixture
def drive(monkeypatch, tmp_path):
    """A `google.colab` whose Drive is a folder; `drive.error` is what mounting raises."""
    module = types.SimpleNamespace(error=None)

    def mount(where: str) -> None:
        if module.error:
            raise module.error
        Path(where, "MyDrive").mkdir(parents=True, exist_ok=True)

    module.mount = mount
    monkeypatch.setitem(sys.modules, "google", types.ModuleType("google"))
    monkeypatch.setitem(sys.modules, "google.colab", types.SimpleNamespace(drive=module))
    monkeypatch.setenv("KIT_DRIVE", str(tmp_path / "content"))
    monkeypatch.setenv("KIT_MIRROR", "")
    return module


def test_on_colab_runs_are_kept_on_drive(drive, machine, monkeypatch, tmp_path, capsys):
    machine("a")
    monkeypatch.setenv("KIT_MIRROR", "")
    start("my-voice").record(data={"hours": 1.0})
    kept = tmp_path / "content" / "MyDrive" / "voicekit" / "runs" / "my-voice"
    assert json.loads((kept / "report.json").read_text())["data"] == {"hours": 1.0}
    assert capsys.readouterr().out == f"This run is kept in {kept}.\n"


def test_a_refused_drive_is_a_sentence_and_no_end(drive, machine, monkeypatch, capsys):
    machine("a")
    monkeypatch.setenv("KIT_MIRROR", "")
    drive.error = ValueError("mount failed")
    run = start("my-voice")
    message = capsys.readouterr().out
    assert "Google Drive is not there (ValueError: mount failed)" in message
    assert "lost with it" in message
    assert run.kept is None


def test_on_kaggle_runs_are_in_the_folder_that_save_version_keeps(
    drive, machine, monkeypatch, tmp_path, capsys
):
    """Also where Colab's packages are loaded: Kaggle has no Drive."""
    machine("a")
    monkeypatch.setattr(start_module, "KAGGLE_OUTPUT", tmp_path / "working")
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    monkeypatch.setenv("KIT_MIRROR", "")
    monkeypatch.setenv("KIT_RUNS", "")
    run = start("my-voice")
    assert run.folder == tmp_path / "working" / "runs" / "my-voice" and run.kept is None
    printed = capsys.readouterr().out
    assert str(tmp_path / "working" / "runs") in printed and "Save Version" in printed
    start("my-voice")
    assert capsys.readouterr().out == "", "it is said once"


def test_what_colab_lacks_is_installed_and_nothing_else(monkeypatch, capsys):
    called = []

    def pip(command, **_):
        called.append(command)
        return types.SimpleNamespace(returncode=1, stdout="", stderr="WARN\nERROR: no network\n")

    monkeypatch.setattr(start_module.subprocess, "run", pip)
    start_module.install_missing()
    assert called == [], "all of requirements-colab.txt is in this environment"
    installed = lambda name: [] if name == "espeakng-loader" else [name]  # noqa: E731
    monkeypatch.setattr("importlib.metadata.distributions", installed)
    start_module.install_missing()
    assert called == [[sys.executable, "-m", "pip", "install", "-q", "espeakng-loader"]]
    reported = capsys.readouterr().out
    assert reported.startswith(
        "Could not install espeakng-loader; perhaps this machine has no network."
    )
    assert reported.endswith("pip says: ERROR: no network\n")


def test_outside_colab_it_does_nothing(machine, monkeypatch):
    machine("a")
    monkeypatch.setattr(start_module, "keep_on_drive", lambda: pytest.fail("not on Colab"))
    monkeypatch.setattr(start_module, "install_missing", lambda: pytest.fail("not on Colab"))
    assert start("my-voice").kept is not None
    assert os.environ["KIT_MIRROR"]
