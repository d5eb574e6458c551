"""Notebooks read well and are committed clean. Running them is nbmake's part: `make test` collects
notebooks/*.ipynb in order, as items of the same pytest run (see pyproject.toml and ../conftest.py).
"""

import ast
import re
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MAX_CELL_LINES = 15
MAX_DEF_LINES = 3

if not NOTEBOOKS:
    pytest.skip("there are no notebooks yet", allow_module_level=True)

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path):
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def code_cells(path: Path) -> list:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def parse(cell) -> ast.Module:
    """The cell as a syntax tree, its %magic and !shell lines left out."""
    lines = cell.source.splitlines()
    plain = (
        f"{line[: len(line) - len(line.lstrip())]}pass" if is_magic(line) else line
        for line in lines
    )
    return ast.parse("\n".join(plain))


def is_magic(line: str) -> bool:
    return line.lstrip().startswith(("%", "!"))


@each
def test_valid(path):
    nbformat.validate(read(path))


@each
def test_committed_without_outputs(path):
    ran = [c.id for c in code_cells(path) if c.outputs or c.execution_count is not None]
    assert not ran, f"run `nbstripout --keep-id notebooks/{path.name}`"


@each
def test_cell_ids_are_there_and_unique(path):
    notebook = read(path)
    assert (notebook.nbformat, notebook.nbformat_minor) >= (4, 5), "ids came with format 4.5"
    ids = [cell.id for cell in notebook.cells]
    assert len(ids) == len(set(ids)), sorted({i for i in ids if ids.count(i) > 1})


@each
def test_parameters_are_in_the_second_code_cell(path):
    tagged = [
        i for i, c in enumerate(code_cells(path)) if "parameters" in c.metadata.get("tags", [])
    ]
    assert tagged == [1]


@each
def test_cells_are_short(path):
    long = {c.id: n for c in code_cells(path) if (n := len(c.source.splitlines())) > MAX_CELL_LINES}
    assert not long, f"cells over {MAX_CELL_LINES} lines; split them"


@each
def test_no_library_code(path):
    """What deserves a class or a real function lives in kit/."""
    for cell in code_cells(path):
        for node in ast.walk(parse(cell)):
            assert not isinstance(node, ast.ClassDef), f"class {node.name} in cell {cell.id}"
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                assert lines <= MAX_DEF_LINES, f"{node.name} in cell {cell.id}: {lines} lines"


@each
def test_start_comes_before_anything_heavy_is_imported(path):
    """It sets how threads wait, which torch reads once, and installs what Colab has not got."""
    source = "\n".join(cell.source for cell in code_cells(path))
    imports = re.findall(r"(?m)^(?:from|import) (?!os, sys$).*", source.split(" = start(")[0])
    assert imports == ["from kit.recipes.start import start"]


@each
def test_a_sentence_before_each_code_cell(path):
    cells = read(path).cells
    assert cells[0].cell_type == "markdown", "begin with a title and what this notebook is for"
    bare = [
        after.id
        for before, after in zip(cells, cells[1:])
        if before.cell_type == after.cell_type == "code"
        and "parameters" not in after.metadata.get("tags", [])
    ]
    assert not bare, "a sentence of prose belongs before each of these cells"
