"""What notebook 00 shows and records of this machine."""

import shutil

from kit.base.hardware import MATMUL_SHAPES
from kit.base.run import last_run
from kit.recipes.open_run import RunSource, name_for_data
from kit.recipes.setup import Setup
from kit.recipes.start import start


def test_a_run_is_named_after_its_data_and_found_again(runs, monkeypatch):
    monkeypatch.delenv("KIT_RUN")
    assert start(preset="tiny", use="speed").name == "demo", "00_setup, before there are any data"
    for data, name in (("", "demo"), ("/a/almaz/wavs", "almaz"), ("/b/samuel.tar.gz", "samuel")):
        run = start(data=data, language="am")
        assert (run.name, run.preset_name) == (name, "tiny"), "as 00_setup chose"
        RunSource(data=data).begin(run)
        assert start(data=data, language="am").name == name, "the same data, the same run"
        assert start().name == name, "the later notebooks open it again"
    names = {"hf://google/fleurs/am_et/train": "google-fleurs-am_et-train", "record": "my-voice"}
    names |= {"/c/ድምፅ": "ድምፅ", "/data/codes": "voice", f"/c/{'ድ' * 50}": "ድ" * 31}
    assert {data: name_for_data(data, "") for data in names} == names
    assert name_for_data("", "en") == "demo-en"
    shutil.rmtree(runs / "samuel")
    assert last_run() == "demo"


def test_every_step_draws_itself_is_recorded_and_reports_what_is_too_large(runs, monkeypatch):
    monkeypatch.setitem(MATMUL_SHAPES, "cpu", (64, 64, 64))
    run = start("mine", "tiny", "balanced")
    results = list(Setup(run).run())
    assert all(str(result) and result._repr_html_() for result in results)
    machine, products, _, time, summary = results
    figures = machine.figures
    assert figures["speed.tf32"].startswith(("on: ", "off: ")) and figures["goal"] == "balanced"
    assert [name for name in figures if name.endswith(", for balanced")]
    assert len(products.pictures) == 1
    assert "steps of" in str(time) and "steps of" in str(Setup(run, own=True).time())
    assert "Next: 01_data_prep, or python -m kit prepare" in str(summary)
    report = run.report()
    assert report["setup"]["use"] == "balanced" and report["setup"]["precision"] in ("fp32", "bf16")
    names = "threads, precision, attention kernel, torch.compile, preset for this machine, use"
    assert set(report["setup"]) == set(names.split(", "))
    assert report["train"]["planned_bytes"] > 1e6
    run.preset["memory"] = {"max_memory_fraction": 1e-4}
    reported = Setup(run).memory()
    assert "It fits." not in str(reported)
    assert "choose the preset of a smaller tier" in str(reported)
    (picture,) = reported.pictures
    assert run.hw.name in "".join(axes.get_title(loc="left") for axes in picture.axes)
