"""README, docs, notebooks and messages do as they say, and what they name is there."""

import ast
import functools
import math
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml
from clips import TEXT
from test_notebooks import NOTEBOOKS, code_cells, parse, read

from kit import settings as sections
from kit.__main__ import parser
from kit.base.config import load_preset
from kit.base.errors import Note
from kit.base.run import parse_settings
from kit.dataset.layouts import read_dataset
from kit.recipes.open_run import check_settings
from kit.settings import ManifestConfig, TrainConfig
from kit.streams import formats as streams
from kit.text import normalize as text
from kit.text.train_tokenizer import extract_text
from kit.training.optim import lr_factor

ROOT = Path(__file__).resolve().parent.parent
NUMBER = r"(?<![\w.,])(\d[\d,]*(?:\.\d+)?)"
UNITS = r"%|x\b|minutes?\b|min\b|ms\b|s\b|h\b|hours?\b|[KMG]i?B\b|steps/s\b"


def figures(text: str) -> set[tuple[str, str]]:
    """(number, unit) of every number with a unit or of a ratio (`2.40x`)."""
    return set(re.findall(rf"{NUMBER}\s?({UNITS})", text))


def unknown_figures(claims: str, measured: str) -> set[tuple[str, str]]:
    """Figures of `claims` that are not in `measured`, where a ratio's column has no x."""
    known = figures(measured)
    known |= {(number, "x") for number in re.findall(NUMBER, measured)}
    return figures(claims) - known


def test_every_figure_of_the_readme_is_in_the_measurements():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(figures(readme)) >= 15
    measured = (ROOT / "docs/measurements.md").read_text(encoding="utf-8")
    assert unknown_figures(readme, measured) == set()


CITED = r"([A-Z]\w+) (?:et al\.|(?:and|&) [A-Z]\w+),? \(?((?:19|20)\d\d)\)?"


def test_every_paper_that_the_code_cites_has_a_link():
    references = (ROOT / "docs/references.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"(?m)^\| (\w+)\b.* (\d{4}) \| \[.+?\]\(https://", references))
    for path in (ROOT / "kit").rglob("*.py"):
        source = re.sub(r"\s*\n\s*#?\s*", " ", path.read_text(encoding="utf-8"))
        assert set(re.findall(CITED, source)) <= linked, path


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# What was measured keeps the names of files and commands of its day.
CURRENT = [page for page in PAGES if page.name != "measurements-archive.md"]
GUIDE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")


def cells(path: Path, kind: str) -> list[str]:
    return [cell.source for cell in read(path).cells if cell.cell_type == kind]


def blocks(heading: str, kind: str = "python") -> list[str]:
    section = GUIDE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(rf"```{kind}\n(.*?)```", section, re.DOTALL)


def test_the_languages_read_their_figures(tmp_path, monkeypatch, capsys):
    (tmp_path / "sw.py").write_text(blocks("A language")[0], encoding="utf-8")
    monkeypatch.setattr(text, "LANGUAGES", tmp_path)
    monkeypatch.setattr("kit.text.languages.__path__", [str(tmp_path)])
    text.language_rules.cache_clear()
    read = "bei ni elfu mbili mia tatu na hamsini."
    assert text.normalize(text.language_example("sw"), "sw") == read
    exec(re.search(r'python -c "(.*)"', GUIDE)[1])
    assert capsys.readouterr().out.strip() == read
    numbers = [text.normalize(str(n), "sw") for n in (0, 10, 21, 100, 101, 250_000)]
    assert numbers[:3] == ["sifuri", "kumi", "ishirini na moja"]
    assert numbers[3:] == ["mia moja", "mia moja na moja", "laki mbili na elfu hamsini"]
    text.language_rules.cache_clear()


def test_a_table_of_recordings_is_written_and_read(tmp_path, monkeypatch):
    texts = {"p1/a": TEXT, "p2/b": TEXT, "p2/e": "."}
    for name, sentence in texts.items():
        for path in (tmp_path / f"VCTK/wav48/{name}.wav", tmp_path / f"VCTK/txt/{name}.txt"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(sentence, encoding="utf-8")  # the WAV is only looked for
    (tmp_path / "VCTK/txt/p1/d.txt").write_text(TEXT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (script,) = blocks("A table of recordings")
    exec(script, {})
    dataset = read_dataset(tmp_path / "VCTK", ManifestConfig(held_out_percent=0))
    speakers = {row.id: (row.text, row.speaker) for row in dataset.rows}
    assert speakers == {"wav48/p1/a": (TEXT, "p1"), "wav48/p2/b": (TEXT, "p2")}
    assert sorted(finding.kind for finding in dataset.refused) == ["missing", "row"]


def test_the_format_of_text_is_streamed_as_others_are(tmp_path, monkeypatch):
    source, entry = blocks("A format of text")
    names = {}
    exec(source, names)
    for suffix, kind in eval(entry, names).items():
        monkeypatch.setitem(streams.FORMATS, suffix, kind)
    path = tmp_path / "texts.trn"
    written = "".join(f"{TEXT} (id-{n})\r\n" for n in range(500))
    path.write_text(f"{written}\nno id\n(empty)", encoding="utf-8")
    found = list(streams.open_source(path).rows())
    assert [record["id"] for _, record in found[:500]] == [f"id-{n}" for n in range(500)]
    assert found[0] == (1, {"text": TEXT, "id": "id-0"})
    assert "line 502" in str(found[500][1]) and "`the words (id)` expected" in str(found[500][1])
    assert found[501] == (503, {"text": "", "id": "empty"})
    with pytest.warns(Note, match="1 rows"), extract_text(path, tmp_path, "am") as texts:
        assert len(texts.read_text(encoding="utf-8").splitlines()) == 500


def test_the_schedule_can_be_chosen_and_the_preset_is_one(monkeypatch, tmp_path):
    names = dict(vars(sections))
    exec(blocks("A learning-rate schedule")[0], names)
    for name, schedule in names["SCHEDULES"].items():
        monkeypatch.setitem(sections.SCHEDULES, name, schedule)
    settings = re.search(r"--set (train\.schedule=\S+)", GUIDE)[1]
    check_settings(parse_settings([settings]), load_preset("tiny"))
    config = TrainConfig(max_steps=100, warmup_steps=0, schedule="one_minus_sqrt", final_lr=0.0)
    rates = [lr_factor(config, step) for step in (0, 80, 85, 100)]
    assert rates == pytest.approx([1, 1, 0.5, 0], abs=1e-6)
    assert all(math.isfinite(lr_factor(config, step)) for step in range(120))
    config = TrainConfig(max_steps=100, warmup_steps=5, schedule="inverse_sqrt", final_lr=0.0)
    assert [lr_factor(config, step) for step in (5, 20, 80)] == pytest.approx([1, 0.5, 0.25])
    (source,) = blocks("A preset", "yaml")
    for section, values in yaml.safe_load(source).items():
        if section != "extends":
            check_settings({section: values}, load_preset("cpu"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_every_setting_and_parameter_that_a_notebook_names_is_one(path):
    prose = "\n".join(cells(path, "markdown"))
    for settings in map(ast.literal_eval, re.findall(r'`(\{"\w+": \{.*?\}\})`', prose)):
        check_settings(settings, load_preset("tiny"))
    code = "\n".join(source for each in NOTEBOOKS for source in cells(each, "code"))
    assert {*re.findall(r"`([A-Z_]{4,})`", prose)} <= {*re.findall(r"\b[A-Z_]{4,}\b", code)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page):
    content = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#]+)(?:#([^)]*))?\)", content)
    targets += [(name, "") for name in re.findall(r'<img src="([^"]+)"', content)]
    own = [(page.parent / name, part) for name, part in targets if not name.startswith("http")]
    assert not [str(path) for path, _ in own if not path.exists()]
    for path, part in own:
        if part:
            headings = re.findall("^#+ (.*)", path.read_text(encoding="utf-8"), re.MULTILINE)
            words = (re.sub(r"[^\w -]", "", heading.lower()) for heading in headings)
            assert part in [each.replace(" ", "-") for each in words]  # GitHub's anchors


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: page.name)
def test_every_path_and_command_that_is_named_is_there(page):
    message = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:kit|configs|docs|notebooks|tests)/[\w/.]*)[`#]", message)
    to_write = {"kit/text/languages/CODE.py", "kit/text/languages/sw.py", "configs/words/CODE.yaml"}
    to_write |= {"kit/streams/trn.py"}
    assert not [name for name in {*named} - to_write if not (ROOT / name).exists()]
    message = message.replace("SECTION.KEY=VALUE", "train.lr=1")
    for words in re.findall(r"python -m kit ([^`#\n]+)", message):
        if words.split()[0] in ("COMMAND", "--help"):
            continue
        options = parser().parse_args(shlex.split(re.split(" [|>] ", words)[0]))
        known = {} if "one_minus_sqrt" in words else parse_settings(options.set)
        check_settings(known, load_preset("tiny"))


SOURCES = sorted((ROOT / "kit").rglob("*.py"))
QUOTED = re.compile(r"`([A-Za-z_]\w*)(?:: [^`]*)?`")  # `seed`, `save_steps: 1`, `RUN`


@functools.cache
def trees() -> list[ast.Module]:
    own = [ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES]
    return own + [parse(cell) for path in NOTEBOOKS for cell in code_cells(path)]


def docstrings(tree: ast.Module) -> set[int]:
    """The ids of a module's docstrings: they speak to readers of the code."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, owners)]
    return {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}


@functools.cache
def messages() -> list[str]:
    """Every string of the kit that is no docstring, every string and every word of a notebook."""
    left_out = set().union(*map(docstrings, trees()))
    nodes = [node for tree in trees() for node in ast.walk(tree) if id(node) not in left_out]
    values = [node.value for node in nodes if isinstance(node, ast.Constant)]
    found = [value for value in values if isinstance(value, str)]
    return found + [source for path in NOTEBOOKS for source in cells(path, "markdown")]


def identifiers() -> set[str]:
    """Every name, and every word that is a value, of the kit, the notebooks and the presets."""
    fields = ("id", "arg", "attr", "name")
    nodes = [node for tree in trees() for node in ast.walk(tree)]
    names = {getattr(node, field, None) for node in nodes for field in fields}
    names |= {getattr(node, "value", None) for node in nodes if isinstance(node, ast.Constant)}
    for path in (ROOT / "configs").glob("**/*.yaml"):
        sections = yaml.safe_load(path.read_text(encoding="utf-8"))
        inner = [key for values in sections.values() if isinstance(values, dict) for key in values]
        names |= {str(key) for key in [*sections, *inner]}
        names.add(path.stem)
    return {name for name in names if isinstance(name, str)} | {path.stem for path in SOURCES}


@pytest.mark.long
def test_every_setting_a_message_names_is_there():
    known = identifiers()
    missing = {name: m for m in messages() for name in QUOTED.findall(m) if name not in known}
    assert not missing


def test_every_notebook_and_make_target_that_is_named_is_there():
    presets = (ROOT / "configs").glob("**/*.yaml")
    texts = [*messages(), *(path.read_text(encoding="utf-8") for path in presets)]
    named = {name for text in texts for name in re.findall(r"\b0\d_[a-z][a-z_]+", text)}
    assert named <= {path.stem for path in NOTEBOOKS}
    texts = [*messages(), (ROOT / "README.md").read_text(encoding="utf-8")]
    named = {name for text in texts for name in re.findall(r"`make ([a-z][a-z-]*)", text)}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert named <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


def run_script(folder: Path, source: str) -> subprocess.CompletedProcess:
    path = folder / "script.py"
    path.write_text(source, encoding="utf-8")
    environment = dict(os.environ, KIT_RUNS=str(folder), PYTHONPATH=str(ROOT))
    words = [sys.executable, str(path)]
    return subprocess.run(words, env=environment, capture_output=True, text=True, cwd=folder)


SCRIPT = re.search(
    r"```python\n(from kit.*?)```",
    (ROOT / "docs/running.md").read_text(encoding="utf-8"),
    re.DOTALL,
)[1]


@pytest.mark.long
def test_the_script_trains_a_voice(tmp_path):
    done = run_script(tmp_path, SCRIPT)
    assert done.returncode == 0, done.stderr
    assert "Trained to step 20 of 20 in " in done.stdout
    assert (tmp_path / "script" / "export" / "voice.json").is_file()


@pytest.mark.long
def test_a_script_without_its_guard_gets_a_sentence_and_no_traceback(tmp_path):
    head, body = SCRIPT.split('if __name__ == "__main__":\n')
    done = run_script(tmp_path, head + textwrap.dedent(body))
    assert done.returncode != 0 and 'if __name__ == "__main__"' in done.stderr
    assert "Traceback" not in done.stderr, done.stderr
