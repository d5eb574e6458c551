"""Runs are opened: settings checked and kept, a copy fetched on a fresh machine, Colab's part."""

import json
import os
import shutil
import sys
import types
from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers import code_index, world

from kit.audio.spectrogram import DEFAULT_MEL
from kit.base.config import build
from kit.base.errors import KitError
from kit.base.mirror import stamps
from kit.base.run import find_run, parse_settings
from kit.batches.encoding import cache_key
from kit.dataset.manifest import Utterance, read_manifest, write_manifest
from kit.recipes import run_copy as opening
from kit.recipes import start as start_module
from kit.recipes.open_run import ActiveRun
from kit.recipes.start import start
from kit.settings import DataConfig

RATHER_LATE_S = 3600.0  # no copy in the background during a test


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Opens a run on a fresh machine of the name given; that before it is taken away."""
    monkeypatch.setattr(opening, "COPY_EVERY_S", RATHER_LATE_S)
    monkeypatch.setattr(opening, "_COPIES", {})
    monkeypatch.delenv("KIT_RUN")
    (tmp_path / "drive").mkdir()
    monkeypatch.setenv("KIT_MIRROR", str(tmp_path / "drive"))

    def go(name: str, opened: str = "my-voice") -> ActiveRun | None:
        for folder, kept in opening._COPIES.items():
            kept.over.set()
            shutil.rmtree(folder.parent, ignore_errors=True)
        opening._COPIES.clear()
        monkeypatch.setenv("KIT_RUNS", str(tmp_path / name))
        return start(opened) if opened else None

    yield go
    go("none", "")


def row(name: str, audio: Path, split: str) -> Utterance:
    return Utterance(id=name, audio=str(audio), text="ሰላም", speaker="a", split=split, line=1)


def test_what_was_recorded_is_there_on_the_next_machine(machine, tmp_path):
    run = machine("a")
    run.set_permanent("data", "the built-in corpus")
    run.path("tokenizer.model").write_text("pieces")
    run.record(data={"hours": 2.5})
    assert run.copy.folder == tmp_path / "drive" / "my-voice"
    again = machine("b")
    assert again.folder == tmp_path / "b" / "my-voice"
    assert again.report()["data"] == {"hours": 2.5}
    assert again.path("tokenizer.model").read_text() == "pieces"
    with pytest.raises(KitError, match=r"delete .*b/my-voice and .*drive/my-voice"):
        again.set_permanent("data", "another")
    machine("c", "")
    assert start("my-voice", create=False).report()["data"] == {"hours": 2.5}
    with pytest.raises(KitError, match="Did you mean `my-voice`"):
        start("my-vioce", create=False)


def test_figures_that_another_machine_recorded_meanwhile_are_not_lost(machine, tmp_path):
    run = machine("a")
    run.record(data={"hours": 2.5})
    path = tmp_path / "drive" / "my-voice" / "report.json"
    path.write_text(json.dumps(run.report() | {"train": {"steps": 4}}))  # by the other one
    run.record(eval={"cer": 0.1})
    for report in (run.report(), json.loads(path.read_text())):
        figures = [report[section] for section in ("data", "train", "eval")]
        assert figures == [{"hours": 2.5}, {"steps": 4}, {"cer": 0.1}]


def test_what_a_killed_process_was_writing_is_gone_at_the_next_start(machine, tmp_path):
    run = machine("a")
    run.record(data={"hours": 2.5})
    kept = tmp_path / "drive" / "my-voice"
    for folder in (run.folder, kept):
        litter = folder / "checkpoints" / ".step-0000004.safetensors.a1b2c3d4.tmp"
        litter.parent.mkdir(exist_ok=True)
        litter.write_text("half")
        os.utime(litter, (1, 1))
    start("my-voice")
    assert not [*run.folder.rglob("*.tmp"), *kept.rglob("*.tmp")]


def test_without_kit_mirror_nothing_is_kept(machine, monkeypatch, tmp_path):
    machine("a", "")
    monkeypatch.delenv("KIT_MIRROR")
    run = start("alone")
    run.record(data={"hours": 1.0})
    assert run.copy is None
    assert not (run.folder / ".mirrored.json").exists() and not stamps(tmp_path / "drive")
    for wrong, fact in (("not-there", "Is the disk mounted"), ("a", "on another disk, or none")):
        monkeypatch.setenv("KIT_MIRROR", str(tmp_path / wrong))
        for create in (True, False):
            with pytest.raises(KitError, match=fact):
                start("any", create=create)


def leave_codes(run: ActiveRun) -> set[str]:
    """Give `run` a codec and codes, at another speed, too; return the names that belong to it."""
    index, codes = code_index(), run.folder.parent / "codes"
    shutil.copytree(index.parent, codes)
    shutil.copy(world() / "codec.safetensors", run.folder)
    shutil.copy(index, codes / "faster.safetensors")
    data = build(DataConfig, run.section("data"))
    key = cache_key(run.folder / "codec.safetensors", DEFAULT_MEL, data)
    for shard in codes.glob("codes-*"):
        shard.rename(shard.with_name(f"codes-{key}-{shard.name[-12:]}"))
    (codes / "codes-other-1.safetensors").write_text("another run's")
    faster = {"110": "../codes/faster.safetensors"}
    run.record(data={"codes": f"../codes/{index.name}", "at_speeds": faster})
    return set(stamps(codes)) - {"codes-other-1.safetensors"}


def test_checkpoints_and_codes_are_fetched_as_far_as_this_run_needs_them(machine):
    run = machine("a")
    run.path("checkpoints", "step-0000004.safetensors").write_text("weights")
    run.record(train={"steps": 4})
    run = machine("b")
    assert not (run.folder / "checkpoints").exists()
    run.fetch_checkpoints()
    assert run.path("checkpoints", "step-0000004.safetensors").read_text() == "weights"
    belong = leave_codes(machine("a"))
    assert set(stamps(machine("b").folder.parent / "codes")) == belong


def test_held_out_recordings_travel_with_the_run(machine, tmp_path):
    run = machine("a")
    for name in ("learnt", "kept", "kept-2"):
        run.path("corpus", "wavs", f"{name}.wav").write_text(name)
    wavs = run.folder / "corpus" / "wavs"
    rows = [row("1", wavs / "learnt.wav", "train"), row("2", wavs / "kept.wav", "held_out")]
    write_manifest([*rows, row("3", wavs / "kept-2.wav", "long")], run.folder)
    run.record(data={"hours": 1.0})
    run = machine("b")
    learnt, kept, long = read_manifest(run.folder)
    assert not Path(learnt.audio).exists()
    assert [Path(each.audio).read_text() for each in (kept, long)] == ["kept", "kept-2"]
    assert Path(kept.audio).is_relative_to(run.folder) and kept.text == "ሰላም"
    for damaged in ("clips.tar", "manifest.jsonl"):
        os.truncate(tmp_path / "drive" / "my-voice" / damaged, 100)
        assert machine("d").report()["data"] == {"hours": 1.0}, "it can be prepared again"


@pytest.fixture
def drive(monkeypatch, tmp_path):
    """A `google.colab` whose Drive is a folder; `drive.error` is what mounting raises."""

    def mount(where: str) -> None:
        if module.error:
            raise module.error
        Path(where, "MyDrive").mkdir(parents=True, exist_ok=True)

    module = types.SimpleNamespace(error=None, mount=mount)
    monkeypatch.setitem(sys.modules, "google", types.ModuleType("google"))
    monkeypatch.setitem(sys.modules, "google.colab", types.SimpleNamespace(drive=module))
    monkeypatch.setenv("KIT_DRIVE", str(tmp_path / "content"))
    monkeypatch.setenv("KIT_MIRROR", "")
    return module


def test_on_colab_runs_are_kept_on_drive(machine, drive, monkeypatch, tmp_path, capsys):
    machine("a").record(data={"hours": 1.0})
    kept = tmp_path / "content" / "MyDrive" / "voicekit" / "runs" / "my-voice"
    assert json.loads((kept / "report.json").read_text())["data"] == {"hours": 1.0}
    assert capsys.readouterr().out == f"This run is kept in {kept}.\n"
    monkeypatch.setenv("KIT_MIRROR", "")
    drive.error = ValueError("mount failed")
    machine("a")
    assert "Google Drive is not there (ValueError: mount failed)" in capsys.readouterr().out


def test_on_kaggle_runs_are_in_the_folder_kept(machine, drive, monkeypatch, tmp_path, capsys):
    """Also where Colab's packages are loaded: Kaggle has no Drive."""
    monkeypatch.setattr(start_module, "KAGGLE_OUTPUT", tmp_path / "working")
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    monkeypatch.setenv("KIT_RUNS", "")
    run = start("my-voice")
    runs = tmp_path / "working" / "runs"
    assert run.folder == runs / "my-voice" and run.copy is None
    printed = capsys.readouterr().out
    assert str(runs) in printed and "Save Version" in printed


def test_what_colab_lacks_is_installed_and_nothing_else(monkeypatch, capsys):
    failed = types.SimpleNamespace(returncode=1, stdout="", stderr="WARN\nERROR: no network\n")
    pip = Mock(return_value=failed)
    monkeypatch.setattr(start_module.subprocess, "run", pip)
    start_module.install_missing()
    assert not pip.called, "all of requirements-colab.txt is in this environment"
    installed = lambda name: [] if name == "espeakng-loader" else [name]  # noqa: E731
    monkeypatch.setattr("importlib.metadata.distributions", installed)
    start_module.install_missing()
    (command,) = pip.call_args.args
    assert command == [sys.executable, "-m", "pip", "install", "-q", "espeakng-loader"]
    assert capsys.readouterr().out.endswith("pip says: ERROR: no network\n")


def test_values_are_what_yaml_says_and_1e_4_is_a_number():
    words = ["train.lr=1e-4", "train.max_steps=20", "speed.ema=false", "codec.levels=[8, 5]"]
    words += ["train.schedule=linear", "corpus.text=a = b"]
    assert parse_settings(words) == {
        "train": {"lr": 1e-4, "max_steps": 20, "schedule": "linear"},
        "speed": {"ema": False},
        "codec": {"levels": [8, 5]},
        "corpus": {"text": "a = b"},
    }


@pytest.mark.parametrize("word", ["lr=1", "train.lr", ""])
def test_for_anything_else_the_message_says_how_to_write_it(word):
    with pytest.raises(KitError, match=r"write section\.key=value, for instance"):
        parse_settings([word])


@pytest.mark.parametrize(
    "word, reported",
    [
        ("trian.lr=1e-4", "`train`"),
        ("train.max_step=5", "`max_steps`"),
        ("train.lr=fast", "train.lr must be float, got 'fast'"),
        ("model.width=33", "model.width = 33"),
        ("codec.steps=-1", "codec.steps = -1"),
        ("lora.targets=[attn]", "attn.c_attn"),
    ],
)
def test_what_no_code_reads_is_refused_before_it_is_kept(word, reported, runs):
    with pytest.raises(KitError) as error:
        start("mine", "tiny", settings=parse_settings([word]))
    assert reported in str(error.value)
    with pytest.raises(KitError, match=r"SETTINGS .*section"):
        start("mine", "tiny", settings={"lr": 1e-4})
    assert not list(runs.iterdir()), "no folder is left behind"


def test_a_run_that_was_trained_keeps_what_its_weights_were_made_with(runs):
    run = start("mine", "tiny", settings={"data": {"effective_batch": 8, "micro_batch": 8}})
    layers = run.section("model")["layers"]
    start("mine", settings={"model": {"layers": layers + 1}})
    (run.folder / "train.jsonl").write_text("")
    before = (run.folder / "settings.yaml").read_bytes()
    for words, facts in (
        (["model.layers=7"], f"model.layers is {layers + 1}, not 7"),
        (["train.lr=1e-4", "data.effective_batch=16"], "data.effective_batch is 8, not 16"),
        (["finetune.method=lora"], "finetune.method is 'full', not 'lora'"),
        (["finetune.tables=all"], "finetune.tables is 'new', not 'all'"),
        (["codec.levels=[8,8]"], "codec.levels"),
    ):
        with pytest.raises(KitError) as raised:
            start("mine", settings=parse_settings(words))
        assert facts in str(raised.value) and "mine-2" in str(raised.value)
        assert (run.folder / "settings.yaml").read_bytes() == before
    same = parse_settings([f"model.layers={layers + 1}", "train.lr=1e-4", "data.micro_batch=4"])
    assert start("mine", settings=same).section("train")["lr"] == 1e-4


def test_a_use_that_there_is_not_begins_no_run_and_spoils_none(runs):
    with pytest.raises(KitError, match="speedy"):
        start("mine", "tiny", use="speedy")
    assert not list(runs.iterdir())
    start("mine", "tiny", use="quality")
    with pytest.raises(KitError, match="speedy"):
        start("mine", use="speedy")
    assert start("mine").use == "quality"


def test_settings_stay_with_the_run_under_later_ones_and_the_first_are_shown(runs):
    first = parse_settings(["train.lr=1e-4", "speed.ema=false"])
    start("mine", "tiny", "quality", settings=first)
    later = start("mine", settings=parse_settings(["train.lr=2e-4"]))
    assert later.section("train")["lr"] == 2e-4 and later.section("speed")["ema"] is False
    assert find_run(name="mine").preset == later.preset
    assert find_run(name="mine").settings == {"train": {"lr": 2e-4}, "speed": {"ema": False}}
    assert "set train.lr = 0.0002, speed.ema = False" in str(later)
    assert later.record()["settings"]["train"] == {"lr": 2e-4}
