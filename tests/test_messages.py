"""What messages, notebooks and README tell people to set, run or open is there under that name."""

import ast
import functools
import re
from pathlib import Path

import nbformat
import yaml

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "kit").rglob("*.py"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
QUOTED = re.compile(r"`([A-Za-z_]\w*)(?:: [^`]*)?`")  # `seed`, `save_steps: 1`, `RUN`


def cells(path: Path, kind: str) -> list[str]:
    book = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    return [cell.source for cell in book.cells if cell.cell_type == kind]


def parse_cell(source: str) -> ast.Module:
    """A code cell as a tree, without its %magic and !shell lines."""
    return ast.parse(re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", source))


@functools.cache
def trees() -> list[ast.Module]:
    own = [ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES]
    return own + [parse_cell(source) for path in NOTEBOOKS for source in cells(path, "code")]


def docstrings(tree: ast.Module) -> set[int]:
    """The ids of a module's docstrings: they speak to readers of the code."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, owners)]
    return {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}


@functools.cache
def messages() -> list[str]:
    """Every string of the kit that is no docstring, every string and every word of a notebook."""
    found = []
    for tree in trees():
        left_out = docstrings(tree)
        for node in ast.walk(tree):
            whole = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if whole and id(node) not in left_out:
                found.append(node.value)
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
