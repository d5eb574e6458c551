"""Notebooks read well and are committed clean. Running them is nbmake's part: `make test` collects
notebooks/*.ipynb in order, as items of the same pytest run (see pyproject.toml and ../conftest.py).
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from torch.utils.data import DataLoader

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MAX_CELL_LINES = 40  # of the training loop; most have a dozen
VOICE = "your_voice"  # the only one that a student must finish: no lesson

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path):
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def code_cells(path: Path) -> list:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def folded(cell) -> bool:
    """Whether its code is hidden until somebody opens it, in JupyterLab and on Colab."""
    return bool(cell.metadata.get("jupyter", {}).get("source_hidden"))


def parse(cell) -> ast.Module:
    """The cell as a syntax tree, its %magic and !shell lines left out."""
    return ast.parse(re.sub(r"(?m)^(\s*)(\w+ = )?[%!].*$", r"\1pass", cell.source))


@each
def test_a_lesson_has_a_number_risks_a_next_step_and_a_result_within_three_code_cells(path):
    """A cell that ends with an expression shows it."""
    first, last = read(path).cells[0], read(path).cells[-1]
    title = "# " if path.stem == VOICE else f"# {int(path.stem[:2])} · "
    assert first.source.startswith(title)
    assert "\n- **What can go wrong**: " in first.source
    assert "\n\nNext: " in last.source
    shown = [cell for cell in code_cells(path) if not folded(cell)]
    ends = [parse(cell).body[-1] for cell in shown[:2]]  # the start is folded
    assert any(isinstance(end, ast.Expr) for end in ends), "nothing is shown in the first three"


@each
def test_every_question_and_the_exercise_have_an_answer(path):
    cells = read(path).cells
    hidden = "<details><summary>Answer</summary>"
    for number, cell in enumerate(cells):
        if "**Question.**" in cell.source:
            after = next(c for c in cells[number + 1 :] if c.cell_type == "markdown")
            assert hidden in cell.source or after.id.startswith("explained"), cell.id
    if path.stem == VOICE:
        return
    (exercise,) = (n for n, cell in enumerate(cells) if cell.source.startswith("## Exercise\n"))
    rest = cells[exercise + 1 :]
    assert any("exercises." in cell.source for cell in rest if cell.cell_type == "code")
    assert any(cell.source.startswith(hidden) for cell in rest)


def test_a_stream_stops_and_resumes_in_a_table_of_a_few_recordings(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("one\ntwo\n")
    (cell,) = (cell for cell in code_cells(FOLDER / "06_more_data.ipynb") if cell.id == "426d49d9")
    exec(cell.source, {"TEXT": str(tmp_path / "text.txt")})
    assert "after 2 records" in capsys.readouterr().out


def test_the_stream_of_the_lesson_resumes_exactly_with_workers_and_shards(tmp_path):
    path = tmp_path / "lines.txt"
    lines = [f"{number} {'x' * (number % 300)}\n" for number in range(400)]
    path.write_text("".join(lines), encoding="utf-8")
    names = {}
    for cell in code_cells(FOLDER / "01_data_prep.ipynb"):
        if cell.id == "stream":
            exec(cell.source, names)

    def read(workers: int, **given) -> list:
        stream = names["Stream"](path, **given)
        loader = DataLoader(stream, batch_size=None, num_workers=workers)
        return [(line, tuple(position)) for line, position in loader]

    whole = read(0, seed=1)
    assert sorted(line for line, _ in whole) == sorted(lines)
    shares = [read(2, seed=1, rank=rank, ranks=2) for rank in (0, 1)]
    assert sorted(line for share in shares for line, _ in share) == sorted(lines)
    for rank, share in enumerate(shares):
        for stop in (1, 75, len(share)):
            left = {"rank": rank, "ranks": 2, "position": share[stop - 1][1]}
            for workers in (2, 3):
                assert read(workers, seed=1, **left) == share[stop:], "in the same order, too"
    orders = [whole, read(0, seed=1, position=(1, 0, 0)), read(0, seed=2)]
    assert len({tuple(line for line, _ in order) for order in orders}) == 3


@each
def test_each_parameter_is_a_field_of_a_colab_form_and_four_are_in_sight(path):
    """The others stand in a folded cell before them: papermill's own follow the tagged cell."""
    (shown,) = (c for c in code_cells(path) if "parameters" in c.metadata.get("tags", []))
    _start, *hidden = [cell for cell in code_cells(path) if folded(cell)]
    assert len(fields(shown)) <= 4
    for cell in hidden:
        assert cell.metadata.get("cellView") == "form" and cell.source.startswith("# @title ")
        assert code_cells(path).index(cell) < code_cells(path).index(shown)
    kinds = {str: "string", int: "integer", float: "number", dict: "raw"}
    for value, spec in [field for cell in (shown, *hidden) for field in fields(cell)]:
        if spec.startswith("["):
            assert value in json.loads(spec.removesuffix(" {allow-input: true}"))
        else:
            assert spec == f'{{type:"{kinds[type(value)]}"}}'


def fields(cell) -> list[tuple]:
    """Value and form of each parameter, which has a comment of its own on the line before."""
    lines = [line for line in cell.source.splitlines() if not line.startswith(("# @", "if "))]
    assert len(lines) % 2 == 0
    pairs = []
    for comment, line in zip(lines[::2], lines[1::2]):
        assert comment.startswith("# ")
        value, spec = re.fullmatch(r"[A-Z_]+ = (.+)  # @param (.+)", line).groups()
        pairs.append((ast.literal_eval(value), spec))
    return pairs


@each
def test_cells_are_short(path):
    lines = {cell.id: len(cell.source.splitlines()) for cell in code_cells(path)}
    long = {name: count for name, count in lines.items() if count > MAX_CELL_LINES}
    assert not long, f"cells over {MAX_CELL_LINES} lines; split them"


@each
def test_valid_without_outputs_and_start_comes_before_anything_heavy(path):
    source = "\n".join(cell.source for cell in code_cells(path)).split(" = start(")[0]
    heavy = [line for line in source.splitlines() if re.match("(from|import) ", line)]
    assert not [line for line in heavy if "say_sample" not in line], "`start` comes first"
    ran = [c.id for c in code_cells(path) if c.outputs or c.execution_count is not None]
    assert not ran, f"run `nbstripout --keep-id notebooks/{path.name}`"
    notebook = read(path)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) >= (4, 5), "ids came with format 4.5"
    ids = [cell.id for cell in notebook.cells]
    assert len(ids) == len(set(ids)), sorted({i for i in ids if ids.count(i) > 1})
    metadata = notebook.metadata
    assert (metadata.accelerator, metadata.colab) == ("GPU", {"gpuType": "T4"})


@each
def test_a_sentence_before_each_code_cell_and_its_place_at_both_ends(path):
    cells = read(path).cells
    assert cells[0].cell_type == "markdown", "begin with a title and what this notebook is for"
    bare = [
        after.id
        for before, after in zip(cells, cells[1:])
        if before.cell_type == after.cell_type == "code"
        and not folded(before)
        and "parameters" not in after.metadata.get("tags", [])
        and not folded(after)
    ]
    assert not bare, "a sentence of prose belongs before each of these cells"
    first, last = cells[0], cells[-1]
    for words in ("**You will have**", "**You need**", "**It takes**"):
        assert words in first.source
    picture = re.search(r"!\[.{20,}\]\(attachment:(.+?)\)", first.source)
    assert picture and picture[1] in first.attachments, "a picture with a description"
    assert last.cell_type == "markdown" and last.source.count("\n- ") == 3


# The first cell, where the notebook is alone in a folder.


def test_every_first_cell_is_the_same_and_says_how_to_bring_a_kit(tmp_path):
    assert len({code_cells(path)[0].source for path in NOTEBOOKS}) == 1
    (tmp_path / "voicekit.zip").write_bytes(b"half an upload")
    _, error, printed = run_first_cell(tmp_path, tmp_path / "none", tmp_path / "input")
    assert error != "None" and "upload a zip" in printed and "voicekit.zip" in printed


RUN_CELL = """
import json, os, sys
from IPython.core.interactiveshell import InteractiveShell
result = InteractiveShell.instance().run_cell(open("cell.py", encoding="utf-8").read())
print(json.dumps([os.getcwd(), repr(result.error_in_exec)]))
"""


def checkout(folder: Path) -> Path:
    (folder / "notebooks").mkdir(parents=True)
    shutil.copy(FOLDER / "start.py", folder / "notebooks")
    (folder / "kit" / "recipes").mkdir(parents=True)
    (folder / "kit" / "recipes" / "start.py").write_text("start = prepare_machine = print")
    return folder


def run_first_cell(folder: Path, repository: Path, kaggle_input: Path) -> tuple[str, str, str]:
    """The folder it ends in, its error and all it printed; whoever clones gets `repository`."""
    address = re.search(r"git clone -q (\S+)", code_cells(NOTEBOOKS[0])[0].source)[1]
    source = code_cells(NOTEBOOKS[0])[0].source.replace("/kaggle/input", kaggle_input.as_posix())
    (folder / "cell.py").write_text(source, encoding="utf-8")
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    own |= {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_VALUE_0": address, "IPYTHONDIR": str(folder)}
    own["GIT_CONFIG_KEY_0"] = f"url.{repository}.insteadOf"
    command = [sys.executable, "-c", RUN_CELL]
    done = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    place, error = json.loads(done.stdout.splitlines()[-1])
    return place, error, done.stdout + done.stderr


@pytest.mark.parametrize("way", ["git", "zip", "zip of GitHub", "zip on Drive", "Kaggle input"])
def test_a_notebook_alone_fetches_the_kit(tmp_path, way):
    kit = checkout(tmp_path / "kept" / "voicekit-notebooks-main")
    alone, repository, inputs = tmp_path / "alone", tmp_path / "none", tmp_path / "input"
    alone.mkdir()
    expected = alone / "voicekit" / "notebooks"
    if way == "git":
        repository = kit
        who = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
        for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-q", "-m", "all"]):
            subprocess.run(["git", *words], cwd=kit, check=True)
    elif way == "zip":
        shutil.make_archive(alone / "voicekit", "zip", kit)
    elif way == "zip of GitHub":
        shutil.make_archive(alone / kit.name, "zip", kit.parent, kit.name)
        expected = alone / "voicekit" / kit.name / "notebooks"
    elif way == "zip on Drive":
        shutil.make_archive(alone / "drive" / "MyDrive" / "voicekit", "zip", kit)
    else:
        expected = checkout(inputs / "mine" / kit.name) / "notebooks"
    for _ in range(2):  # again after the kernel was restarted
        place, error, printed = run_first_cell(alone, repository, inputs)
        assert (Path(place), error) == (expected, "None"), printed


@each
def test_the_demo_skips_cells_tagged_exercise_and_changes_nothing_else(path):
    """papermill skips cells tagged skip-execution; nbmake and "Run all" know neither tag."""
    makefile = (FOLDER.parent / "Makefile").read_text("utf-8")
    command = re.search(r"sed -E '(.+)' notebooks/", makefile)[1].replace("$$", "$")
    given = path.read_text("utf-8")
    done = subprocess.run(["sed", "-E", command], input=given, capture_output=True, text=True)
    expected = json.loads(given)
    for cell in expected["cells"]:
        tags = cell["metadata"].get("tags", [])
        if "exercise" in tags:
            tags[tags.index("exercise")] = "skip-execution"
    assert json.loads(done.stdout) == expected
