"""Print how large the kit is, beside what it should be at most.

`make lint` calls it. Lines are those of files; what a process loads are the modules that its first
module imports, and what these import, but for imports inside of functions.
"""

import ast
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LONG_FILE, LONG_FUNCTION = 450, 60  # lines


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(tree: ast.Module) -> Iterator[str]:
    """The names that a module imports at its top."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def loaded(module: str, trees: dict[str, ast.Module]) -> set[str]:
    seen, todo = set(), {module}
    while todo:
        seen |= todo
        names = {name for each in todo for name in imported(trees[each])}
        todo = (names & trees.keys()) - seen
    return seen


def print_notebooks() -> None:
    """For each notebook how much there is to read before and while it runs, and at most."""
    print("\nnotebook          cells  words  a cell  diagrams  parameters  lines to start")
    cells, words = 0, 0
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))["cells"]
        texts = {"markdown": [], "code": []}
        for cell in notebook:
            texts[cell["cell_type"]].append("".join(cell["source"]))
        counts = [len(text.split()) for text in texts["markdown"]]
        (shown,) = (c for c in notebook if "parameters" in c["metadata"].get("tags", []))
        parameters = sum("@param" in line for line in shown["source"])
        figures = (len(notebook), sum(counts), statistics.median(counts))
        figures += (sum(len(cell.get("attachments", {})) for cell in notebook), parameters)
        figures += (texts["code"][0].count("\n"),)  # below its title
        print(f"{path.stem:18}" + "{:5} {:6} {:7g} {:9} {:11} {:15}".format(*figures))
        if path.stem[0].isdigit():
            cells, words = cells + figures[0], words + figures[1]
    print("at most              -    900      40         1           4               3")
    print(f"lessons together  {cells:5} {words:6}  at most 190 and 7,500")


def main() -> None:
    paths = {module_of(path): path for path in (ROOT / "kit").rglob("*.py")}
    texts = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    lines = {name: text.count("\n") for name, text in texts.items()}

    def total(names) -> int:
        return sum(lines[name] for name in names)

    core = [name for name in lines if not name.startswith("kit.extras")]
    recipes = [name for name in core if name.startswith("kit.recipes")]
    functions = [n for t in trees.values() for n in ast.walk(t) if isinstance(n, ast.FunctionDef)]
    long = [each for each in functions if each.end_lineno - each.lineno >= LONG_FUNCTION]
    tests = sum(p.read_text(encoding="utf-8").count("\n") for p in (ROOT / "tests").rglob("*.py"))
    words = len((ROOT / "README.md").read_text(encoding="utf-8").split())
    rows = {  # figure, and at most
        "lines of kit": (total(lines), 26_500),
        "of the core": (total(core), 21_000),
        "of extras": (total(lines) - total(core), 5_500),
        "of the core's recipes": (total(recipes), 3_300),
        "of kit/__main__.py": (lines["kit.__main__"], 200),
        "that training loads": (total(loaded("kit.recipes.train", trees)), 9_000),
        "that opening a run loads": (total(loaded("kit.recipes.open_run", trees)), 7_000),
        f"files over {LONG_FILE} lines": (sum(n > LONG_FILE for n in lines.values()), 0),
        f"functions over {LONG_FUNCTION} lines": (len(long), 0),
        "lines of tests": (tests, 26_000),
        "words of README": (words, 900),
    }
    for name, (figure, most) in rows.items():
        print(f"{name:28} {figure:8,}  at most {most:,}")
    print_notebooks()


if __name__ == "__main__":
    main()
