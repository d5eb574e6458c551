"""docs/extending.md does as it says, and what README and docs point to is there."""

import math
import re
from pathlib import Path

import pytest
import yaml
from clips import TEXT

from kit.__main__ import parser
from kit.base.config import load_preset
from kit.dataset import layouts
from kit.dataset.ledger import ManifestConfig
from kit.recipes.settings import check_settings, parse_settings
from kit.text import normalize as text
from kit.training import schedules
from kit.training.optim import lr_factor
from kit.training.settings import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GUIDE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")


def blocks(heading: str, kind: str = "python") -> list[str]:
    """The code of the section `heading`, block by block."""
    section = GUIDE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(rf"```{kind}\n(.*?)```", section, re.DOTALL)


def test_the_language_reads_its_figures(tmp_path, monkeypatch):
    (tmp_path / "sw.py").write_text(blocks("A language")[0], encoding="utf-8")
    monkeypatch.setattr(text, "LANGUAGES", tmp_path)
    text.language_rules.cache_clear()
    read = "bei ni elfu mbili mia tatu na hamsini."
    assert text.normalize(text.language_example("sw"), "sw") == read
    numbers = [text.normalize(str(n), "sw") for n in (0, 10, 21, 100, 101, 250_000)]
    assert numbers[:3] == ["sifuri", "kumi", "ishirini na moja"]
    assert numbers[3:] == ["mia moja", "mia moja na moja", "laki mbili na elfu hamsini"]
    text.language_rules.cache_clear()


def test_the_layout_is_read_as_others_are(tmp_path, monkeypatch):
    function, entry = blocks("A layout of recordings")
    names = dict(vars(layouts))
    exec(function, names)
    (kaldi,) = eval(f"({entry})", names)
    monkeypatch.setattr(layouts, "LAYOUTS", (*layouts.LAYOUTS, kaldi))
    for name in ("a", "sub/b"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.wav").write_bytes(b"?")  # it is only looked for
    scp = f"a {tmp_path}/a.wav\nb sub/b.wav\nc sph2pipe c.sph |\nd gone.wav\ne a.wav\n"
    (tmp_path / "wav.scp").write_text(scp, encoding="utf-8")
    lines = "".join(f"{name} {TEXT}\n" for name in "abcd")
    (tmp_path / "text").write_text(lines, encoding="utf-8")
    found = layouts.read_dataset(tmp_path, ManifestConfig(held_out_percent=0))
    assert found.layout == "Kaldi: wav.scp"
    assert {row.id: row.text for row in found.rows} == {"a": TEXT, "b": TEXT}
    assert {f.id: f.kind for f in found.refused} == {"c": "row", "d": "missing", "e": "row"}


def test_the_schedule_can_be_chosen(monkeypatch):
    names = dict(vars(schedules))
    exec(blocks("A learning-rate schedule")[0], names)
    for name, schedule in names["SCHEDULES"].items():
        monkeypatch.setitem(schedules.SCHEDULES, name, schedule)
    settings = re.search(r"--set (train\.schedule=\S+)", GUIDE)[1]
    check_settings(parse_settings([settings]), load_preset("tiny"))
    config = TrainConfig(steps=100, warmup_steps=0, schedule="one_minus_sqrt", final_lr=0.0)
    rates = [lr_factor(config, step) for step in (0, 80, 85, 100)]
    assert rates == pytest.approx([1, 1, 0.5, 0], abs=1e-6)
    assert all(math.isfinite(lr_factor(config, step)) for step in range(120))


def test_the_preset_is_one(tmp_path):
    (source,) = blocks("A preset", "yaml")
    for section, values in yaml.safe_load(source).items():
        if section != "extends":
            check_settings({section: values}, load_preset("cpu"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page):
    targets = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    own = [target for target in targets if not target.startswith("http")]
    assert not [target for target in own if not (page.parent / target).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_of_the_kit_that_is_named_is_there(page):
    told = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:kit|configs|docs|notebooks|tests)/[\w/.]*)[`#]", told)
    to_write = {"kit/text/languages/CODE.py", "kit/text/languages/sw.py", "configs/words/CODE.yaml"}
    assert not [name for name in {*named} - to_write if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_one_that_the_command_line_takes(page):
    told = page.read_text(encoding="utf-8").replace("SECTION.KEY=VALUE", "train.lr=1")
    for words in re.findall(r"python -m kit ([^`#\n]+)", told):
        if words.split()[0] in ("COMMAND", "--help"):
            continue
        options = parser().parse_args(words.split())
        known = {} if "one_minus_sqrt" in words else parse_settings(options.set)
        check_settings(known, load_preset("tiny"))
