"""Print how large the kit is and how plainly it is written: python tests/tools/size_of_kit.py"""

import ast
from pathlib import Path

from dialect import hits

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = 40  # lines of a module that another one could hold
BASES = {"Exception", "ValueError", "RuntimeError", "OSError"}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(tree: ast.AST, modules: dict) -> set[str]:
    """The kit's modules that a module imports, in its functions, too."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names & modules.keys()


def reached(module: str, graph: dict) -> set[str]:
    seen, todo = set(), {module}
    while todo:
        seen |= todo
        todo = set().union(*(graph[name] for name in todo)) - seen
    return seen


def main() -> None:
    paths = list((ROOT / "kit").rglob("*.py"))
    texts = {module_of(p): p.read_text(encoding="utf-8") for p in paths}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    lines = {name: text.count("\n") for name, text in texts.items()}
    graph = {name: imports(tree, trees) for name, tree in trees.items()}
    classes = [n for tree in trees.values() for n in tree.body if isinstance(n, ast.ClassDef)]
    errors = set(BASES)
    for _ in classes:  # until no class adds a base
        errors |= {c.name for c in classes if {ast.unparse(b) for b in c.bases} & errors}
    rooms = {module_of(path) for path in paths if path.name == "__init__.py"}
    small = [n for n in lines if lines[n] < SMALL and n not in rooms and ".languages." not in n]
    training = reached("kit.recipes.train", graph)
    reached_lines = sum(lines[name] for name in training)
    tests = sum(p.read_text(encoding="utf-8").count("\n") for p in (ROOT / "tests").rglob("*.py"))
    kit_lines = sum(lines.values())
    prose = [*paths, *(ROOT / "notebooks").glob("*.ipynb"), ROOT / "README.md"]
    rows = {
        "lines of kit/": f"{kit_lines:,}",
        f"modules; under {SMALL} lines": f"{len(lines)}; {len(small)}",
        "reached by kit.recipes.train: modules; lines": f"{len(training)}; {reached_lines:,}",
        "exception classes": str(len(errors - BASES)),
        "dialect": f"{sum(len(list(hits(path))) for path in prose):,}",
        "lines of tests/ against kit/": f"{tests / kit_lines:.2f}",
        "README, words": f"{len((ROOT / 'README.md').read_text(encoding='utf-8').split()):,}",
    }
    for name, figure in rows.items():
        print(f"{name:{max(map(len, rows))}}  {figure}")


if __name__ == "__main__":
    main()
