"""One run, one folder, one record."""

import base64
import html
import json
import multiprocessing
import os
import re
import time

import pytest
import soundfile
from helpers import RATE, speech

from kit.base.errors import KitError
from kit.base.report_page import loss_curve, report_page, verdict
from kit.base.run import Run, find_run, git_state, runs_folder


@pytest.fixture
def run(tmp_path) -> Run:
    return Run(name="mine", preset_name="tiny", preset={}, folder=tmp_path / "mine")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty runs folder, and no environment variables of the kit."""
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))
    for name in ("KIT_RUN", "KIT_PRESET", "KIT_DEMO_STARTED"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def open_run(preset: str = "", name: str = "") -> Run:
    run = find_run(preset, name=name)
    run.begin()
    return run


def on_disk(run: Run) -> dict:
    return json.loads((run.folder / "report.json").read_text(encoding="utf-8"))


def test_figures_are_merged_not_replaced_in_json_that_anyone_can_read(run):
    run.record(train={"steps": 3, "loss": 2.0}, samples=[])
    run.record(train={"loss": 1.5, "val_loss": float("nan")}, eval={"cer": 0.1})
    assert "NaN" not in (run.folder / "report.json").read_text()
    report = on_disk(run)
    assert report["train"] == {"steps": 3, "loss": 1.5, "val_loss": None}
    assert report["eval"] == {"cer": 0.1} and report["preset"] == "tiny"
    assert report["versions"]["torch"] and report["device"]
    assert run.report() == report


def test_the_clock_of_a_demo_is_the_sum_of_its_starts_until_it_has_finished(run, monkeypatch):
    assert "wall_s" not in run.record()
    for age_s in (1000, 300):
        monkeypatch.setenv("KIT_DEMO_STARTED", str(time.time() - age_s))
        report = run.record()
    assert report["wall_s"] == pytest.approx(1300, abs=5)
    run.path("demo-finished").touch()
    assert run.record()["wall_s"] == report["wall_s"]


def test_the_page_is_self_contained_and_escapes_text(run):
    nasty = "<script>alert('x')</script> & \"ሰላም\""
    soundfile.write(run.path("samples", "a.wav"), speech(0.1), RATE)
    samples = [{"text": nasty, "wav": "samples/a.wav", "split": "<b>"}]
    run.record(samples=[*samples, {"text": "gone", "wav": "samples/none.wav", "split": "x"}])
    run.record(note={nasty: nasty})
    page = (run.folder / "report.html").read_text(encoding="utf-8")
    tags = re.findall(r"<(\w+)", page)
    assert tags.count("audio") == 1 and not {"script", "b", "link", "img"} & set(tags)
    assert re.findall(r"(?:src|href)=.(.{22})", page) == ["data:audio/wav;base64,"]
    assert html.unescape(page).count(nasty) == 3


PASSED = {"gate": "passed", "cer": 0.024, "cer_floor": 0.005}
VERDICTS = [
    ({}, ["Not judged yet", "kit prepare --run 'my voice'"]),
    ({"data": {"codes": "codes/k.json"}}, ["kit train --run"]),
    ({"data": {"codes": "k"}, "train": {"finished": True}}, ["kit evaluate --run"]),
    ({"eval": PASSED}, ["The voice passes"]),
    ({"eval": {"gate": ["CER: 50.0%", "no end"]}}, ["Not yet: CER: 50.0%", "1 more"]),
    ({"eval": PASSED, "verify": {"failed": ["causality"]}}, ["Do not trust", "causality"]),
]


@pytest.mark.parametrize(("report", "facts"), VERDICTS)
def test_the_page_begins_with_a_verdict_or_what_comes_next(tmp_path, report, facts):
    sentence = verdict(report, "my voice")
    assert all(fact in sentence for fact in facts)
    assert html.escape(sentence) in report_page(report, "my voice", tmp_path)


def test_the_page_has_figures_then_the_curve_then_a_row_of_players_for_each_sentence(run):
    soundfile.write(run.path("samples", "a.wav"), speech(0.1), RATE)
    names = [f"held_out-{n}-{kind}" for n in range(2) for kind in ("recording", "raw", "best")]
    names += ["long-0-ema", "held_out-2-raw"]
    samples = []
    for name in names:
        (run.folder / "samples" / f"{name}.wav").symlink_to("a.wav")
        split, number, _ = name.split("-")
        samples.append({"text": f"t{number}", "wav": f"samples/{name}.wav", "split": split})
    train = {"val_loss": 1.279, "ema_val_loss": 1.171, "seconds": 125, "steps": 3000}
    train |= {"peak_memory_bytes": 2**30, "curve": {"training": [[1, 2], [7.4, 1.3]]}}
    run.record(samples=samples, train=train, eval=PASSED, infer={"real_time_factor": 0.19})
    page = (run.folder / "report.html").read_text(encoding="utf-8")
    assert page.index("1.171") < page.index("<figure>") < page.index("<table class=players>")
    assert all(text in page for text in ("2:05", "1.00 GiB", "2.40%", "0.190", "1.300</b>"))
    players, *folded = page.split("<table class=players>")[1:]
    rows = players.split("</table>")[0].split("<tr>")[2:]
    assert [row.count("<audio") for row in rows] == [3, 3, 1]
    assert [re.match("<td>(t.)<", row)[1] for row in rows] == ["t0", "t1", "t2"]
    assert len(folded) == 1 and "<details>" in players and "curve" not in folded[0]


def test_a_loss_that_was_not_finite_is_left_out_of_the_curve():
    curve = loss_curve({"training": [[1, 2, 4], [8.0, None, 2.0]], "held out": [[3], [None]]})
    assert "points='25.00,0.00 100.00,75.00'" in curve
    assert loss_curve({}) == "" == loss_curve({"training": [[1], [None]]})


def test_a_run_keeps_its_preset_and_its_data_for_life(place):
    first = open_run("tiny")
    assert (first.name, first.folder) == ("demo", place / "demo")
    assert open_run() == first == open_run("tiny")
    with pytest.raises(KitError, match=r"started with the preset `tiny`.*`cpu`.*demo-2"):
        open_run("cpu")
    for _ in range(2):
        first.set_permanent("data", "my voice")
    with pytest.raises(KitError, match=r"started with the data `my voice`, .*demo-2"):
        first.set_permanent("data", "another")
    (first.folder / "preset").write_text("tiny\n")  # by an editor
    assert open_run() == first


def test_the_environment_names_run_and_preset_or_the_machine_decides(place, monkeypatch):
    assert find_run().preset_name in {"cpu", "8gb", "12gb", "t4", "24gb", "80gb"}
    monkeypatch.setenv("KIT_RUN", "other")
    monkeypatch.setenv("KIT_PRESET", "tiny")
    run = open_run()
    assert run.folder == place / "other" and run.preset_name == "tiny"
    assert run.section("train")["max_steps"] == 12 and run.section("none") == {}
    monkeypatch.setenv("KIT_RUNS", "~/runs")
    assert runs_folder().is_absolute()


def test_data_come_before_their_index(run):
    with pytest.raises(KitError, match=r"`mine` has no `data\.codes` yet: run 01_data_prep"):
        run.index()
    run.record(data={"codes": "codes/k.json"})
    assert run.index() == run.folder / "codes" / "k.json"


def test_the_commit_is_named_where_there_is_git(monkeypatch):
    assert re.fullmatch(r"([0-9a-f]{7,}\+?)?", git_state())
    monkeypatch.setenv("PATH", "")
    assert git_state() == ""
    monkeypatch.setattr("kit.base.config.IS_CHECKOUT", False)
    assert git_state() == "", "the commit of another project"


@pytest.mark.parametrize("way", ["absolute", "above", "link"])
def test_no_file_from_outside_the_run_goes_into_the_page(tmp_path, way):
    secret = tmp_path / "secret.wav"
    secret.write_bytes(b"nobody's business")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "link.wav").symlink_to(secret)
    wav = {"absolute": str(secret), "above": "../secret.wav", "link": "link.wav"}[way]
    sample = {"text": "a", "wav": wav, "split": "b"}
    page = report_page({"samples": [sample]}, "run", tmp_path / "run")
    assert base64.b64encode(secret.read_bytes()).decode() not in page
    assert f"{wav} is left out" in page


def record_each(run: Run, names: list[str]) -> None:
    for name in names:
        run.record(**{name: {"figure": 1}})


def test_two_processes_that_record_lose_no_section(run):
    names = [str(number) for number in range(12)]
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        pool.starmap(record_each, [(run, names[:6]), (run, names[6:])])
    assert on_disk(run).keys() >= set(names)
    assert {p.name for p in run.folder.iterdir()} == {"report.json", "report.html"}


DAMAGED = [b"", b'{"data": {"codes"', b"[]", b"7", b"\xff\xfe", b"[" * 99_999]


@pytest.mark.parametrize("data", DAMAGED)
def test_a_damaged_record_is_named_with_the_fix_and_kept(run, data):
    run.path("report.json").write_bytes(data)
    for use in (run.report, run.index, lambda: run.record(train={"loss": 1.0})):
        with pytest.raises(KitError, match=r"report\.json .*move or delete it.*00_setup"):
            use()
    assert run.path("report.json").read_bytes() == data


@pytest.mark.parametrize("mark", ["preset", "use", "data"])
def test_a_damaged_mark_of_a_run_is_named(place, mark):
    run = open_run("tiny")
    (run.folder / mark).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(KitError, match=rf"{mark} is damaged .*Write that there, or delete"):
        open_run().set_permanent("data", "my voice")


NAMES = ["demo", "my-voice_2", "v1.2", "ድምፅ", "a b", "console", "common"]
NO_NAMES = ["", "   ", "../../x", "/etc", "a\\b", "C:x", "a" * 300, "ሰ" * 40, "a\nb", "a\0b"]
NO_NAMES += [*". .. .hidden dot. codes Codes bench".split(), " a"]


def test_plain_names_are_taken_and_what_no_folder_can_have_is_refused(place, monkeypatch):
    for name in NO_NAMES:
        monkeypatch.setattr("os.environ", {**os.environ, "KIT_RUN": name})  # it takes no NUL itself
        with pytest.raises(KitError, match=r"KIT_RUN = .* cannot name a folder.*Choose letters"):
            open_run("tiny")
        assert not list(place.iterdir())
    for name in NAMES:
        os.environ["KIT_RUN"] = name
        assert open_run("tiny").folder == place / name
