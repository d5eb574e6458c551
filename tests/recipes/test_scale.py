"""`python -m kit scale`: the committed page is the one it leaves, and says how it knows."""

import re
from pathlib import Path

import pytest

from kit.__main__ import parser
from kit.base.config import ConfigError, load_preset
from kit.notebook.open_run import open_run
from kit.recipes.scale import HEADINGS, Scaling, Wanted
from kit.tuning.scale_parts import ASSUMED, CARDS, DATA_SHEET, DISKS, MEASURED, NETWORKS, PARTS

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "scale.md").read_text(encoding="utf-8")


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))
    monkeypatch.delenv("KIT_PRESET")
    return tmp_path


def given(words: str) -> list[str]:
    """What the command prints."""
    options = parser().parse_args(words.split())
    return [str(result) for result in options.command.results(options, options)]


def test_the_committed_page_is_what_its_command_leaves(runs, monkeypatch):
    monkeypatch.chdir(runs)
    (runs / "docs").mkdir()
    words = re.search(r"^    python -m kit (scale .*)$", PAGE, re.MULTILINE)[1]
    assert given(words)[-1] == "Written: docs/scale.md"
    made = (runs / "docs" / "scale.md").read_text(encoding="utf-8")
    assert made == PAGE, f"the plan has changed: give python -m kit {words}, and read the page"


def test_it_prints_a_table_and_what_breaks_first(runs):
    (told,) = given("scale")
    lines = told.splitlines()
    assert "Preset 80gb on H100" in lines[0] and "nothing was measured on a GPU" in lines[1]
    assert lines[2].split()[0] == HEADINGS[0]
    rows = [line.split()[:2] for line in lines[3:8]]
    assert rows == [["1", "128"], ["8", "128"], ["8", "256"], ["64", "128"], ["64", "2,048"]]
    assert lines[8] == "What breaks first."
    assert lines[9].startswith("At any number of GPUs: the code cache is larger than it may be")
    assert lines[10].startswith("With 2 GPUs and 128 rows a step: the quality gate")
    assert not list(runs.iterdir()), "it begins no run"


def test_a_run_is_planned_with_its_own_settings(runs):
    run = open_run("tiny", name="mine").keep_settings({"data": {"effective_batch": 64}})
    assert run.section("data")["effective_batch"] == 64
    (told,) = given("scale --run mine --gpus 2 --hours 5 --card t4")
    assert "Preset tiny on T4" in told and told.splitlines()[3].split()[:2] == ["2", "64"]
    assert "the schedule ends before the corpus does (one pass takes 57 steps of 64 rows" in told


def test_the_card_chooses_the_preset_where_none_is_named(runs, monkeypatch):
    assert given("scale --card t4 --gpus 1")[0].startswith("Preset t4 on T4")
    monkeypatch.setenv("KIT_PRESET", "12gb")
    assert given("scale --gpus 1")[0].startswith("Preset 12gb on H100")
    assert given("scale --preset 24gb --gpus 1")[0].startswith("Preset 24gb on H100")


def test_settings_and_a_use_are_laid_over_the_preset(runs):
    plain = Scaling(Wanted(preset="80gb"), gpus=[1])
    laid = Scaling(Wanted(preset="80gb", use="low_memory"), gpus=[1])
    assert laid.plans[0].memory_bytes < plain.plans[0].memory_bytes
    deaf = "train.gate_every=0 train.gate_patience=0"
    assert "quality gate" in given("scale --gpus 2")[0]
    assert "quality gate" not in given(f"scale --gpus 2 --set {deaf}")[0]


@pytest.mark.parametrize(
    "words, told",
    [
        ("--preset 80", r"There is no preset `80`"),
        ("--card a10", r"There is no card `a10`. Did you mean `a100`"),
        ("--network token-ring", r"There is no network `token-ring`. Known: ib400"),
        ("--disk tape", r"There is no disk `tape`. Known: nvme"),
        ("--gpus 8 0", r"gpus = 0: give whole numbers"),
        ("--hours -1", r"hours = -1.0: must lie in"),
        ("--run nowhere", r"There is no run `nowhere` yet"),
        ("--set data.rows=3", r"has no setting `rows`"),
        ("--set model.width=65536 model.heads=64 --gpus 1 2", r"Not even one row a pass fits"),
    ],
)
def test_what_is_wrong_is_told(runs, words, told):
    with pytest.raises(ValueError, match=told) as found:
        given(f"scale {words}")
    assert type(found.value).__module__.startswith("kit.")


def test_gpus_without_room_are_a_line_and_a_cell(runs, tmp_path):
    large = "--set model.layers=48 model.width=4096 model.heads=32"
    path = tmp_path / "page.md"
    told = given(f"scale --card a100 --gpus 1 8 {large} --write {path}")[0]
    assert told.splitlines()[3].split(maxsplit=1) == ["1", "no room for one"]
    page = path.read_text(encoding="utf-8")
    assert "a share of the weights" in page and "no room for one row" in page


def test_every_number_says_how_it_is_known():
    measured = (DOCS / "measurements.md").read_text(encoding="utf-8")
    for part in PARTS:
        assert part.how in (MEASURED, DATA_SHEET, ASSUMED) and part.source
        assert f"| {part.name} | " in PAGE and f"| {part.how} | {part.source} |" in PAGE
        if part.how == MEASURED:
            heading = part.source.split(", ")[1].split(":")[0].split(";")[0]
            assert f"\n## {heading}\n" in measured
            section = measured.split(f"\n## {heading}\n")[1].split("\n## ")[0]
            scaled = (part.value, part.value / 1e9, 100 * part.value)
            assert any(f"{number:,.10g} " in section for number in scaled), part.name
            assert not re.search("H100|A100|T4|NVIDIA", part.name + part.source)
    for each in (*CARDS.values(), *NETWORKS.values(), *DISKS.values()):
        assert f"| {each.name} | " in PAGE and each.source in PAGE
    assert "Nothing here was measured on a GPU." in " ".join(PAGE.split())


def test_wanted_knows_a_preset_of_its_own():
    name, sections = Wanted(preset="t4").sections("80gb")
    assert name == "t4" and sections == load_preset("t4")
    with pytest.raises(ConfigError, match="There is no section `trian`"):
        Wanted(preset="t4", settings={"trian": {"lr": 1}}).sections("80gb")
