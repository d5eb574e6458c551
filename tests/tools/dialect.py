"""List words of the kit's old private vocabulary: python tests/tools/dialect.py [paths...]

Checks names, comments and strings of Python files, cells of notebooks, Markdown and YAML comments.
Prints `path:line: word -> what to write instead` and exits with 1 if there are any. `make lint`
calls it. The table is that of docs/glossary.md, as far as a word has no other use in this field.
"""

import argparse
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CHECKED = ("README.md", "conftest.py", "configs", "docs", "kit", "notebooks", "tests")
# The archive quotes old output; this file and its test list the words themselves.
SKIPPED = ("docs/measurements-archive.md", "tests/tools/dialect.py", "tests/tools/test_dialect.py")
GLOSSARY_TABLE = "## For contributors"

# A pattern, in which a space is any space, `_` or line break, and what to write instead.
DIALECT = {
    "told|untold|tells of": "cond_logits, uncond_logits; reported, printed, warned",
    "fore(?:told|tells?|telling)": "predicted",
    "heard|hears|hearings?|ears": "recognized, transcript; is called with; evaluation",
    "(?:go|goes|going|went|gone) on(?: from)?": "resume, continue",
    "lies|lie in|lying": "is (in)",
    "in words": "as text; description; number names",
    "mend(?:s|ed|ing)?|cures?|cured": "fix",
    "ledgers?": "data report, rejected clips",
    "whose voice": "speaker, speaker conditioning",
    "knows (?:nothing|no)|nothing of": "leave it out: a test checks the directions of imports",
    "levelled|all told": "pad_micro_batches; all_gather",
    "stands? (?:whole|ready|here|there|before|behind|beside|under|at)": "is (complete, available)",
    "hand(?:s|ed|ing) (?:out|in)|hand out": "scatter, dispatch, pass",
    "begun": "started",
    "anew": "again, from the start",
    "(?:from|with) nothing": "from scratch",
    "promised|promises": "time budget",
    "at hand": "current, available",
    "(?:is|are|was|were) asked (?:of|for)": "requested, evaluated",
    "as long as it takes": "without a limit, or the limit",
    "by itself where": "automatically if",
    "by heart": "memorised",
}
WORDS = {
    re.compile(
        rf"(?<![a-z])(?:{pattern})(?![a-z])".replace(" ", r"(?:[\s_#]|\"\s*f?\")+"), re.IGNORECASE
    ): instead
    for pattern, instead in DIALECT.items()
}

CURE = r"^\s*\"?cure\"?$|\.cure}|cure="
# What may stay: where (a pattern of the path), what (a pattern that covers the word), and why.
ALLOWED = (
    ("", r"ledger\.jsonl", "a file in every run's folder"),
    ("(kit|tests)/dataset/|docs/extending", CURE, "a key in ledger.jsonl, field of Finding"),
    ("", r"[\"'](?:heard|whose_voice)[\"']|free_order whose_voice", "keys of report.json"),
    ("", r"begun_step", "a key in checkpoints"),
    ("kit/dataset/synthetic.py", r"\"begun\"", "a file in the folder of a corpus"),
    ("", r"must lie in", "the usual words for a range"),
)


def python_parts(text: str) -> Iterator[tuple[int, str]]:
    """Names, and comments and strings, adjacent ones joined: a phrase may cross their ends."""
    start, prose = 0, ""
    prose_kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", None)}
    layout = {tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT}
    layout |= {getattr(tokenize, f"FSTRING_{end}", None) for end in ("START", "END")}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        line = token.start[0]
        if token.type in prose_kinds:
            start = start if prose else line
            lines_between = line - start - prose.count("\n")
            prose += "\n" * lines_between + " " + token.string
        elif token.type not in layout:
            yield start, prose
            prose = ""
            if token.type == tokenize.NAME:
                yield line, token.string
    yield start, prose


def parts(path: Path) -> Iterator[tuple[int, str]]:
    """(first line, text) of every part of the file `path` that is checked."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from python_parts(text)
    elif path.suffix == ".ipynb":
        for cell in json.loads(text)["cells"]:
            source = "".join(cell["source"])
            is_python = cell["cell_type"] == "code" and not source.startswith("%%")
            runnable = re.sub(r"^(\s*)[%!]", r"\1#", source, flags=re.MULTILINE)
            yield from python_parts(runnable) if is_python else [(1, source)]
    elif path.suffix == ".yaml":
        for number, line in enumerate(text.splitlines(), 1):
            yield number, line.partition("#")[2]
    else:
        yield 1, text.partition(GLOSSARY_TABLE)[0]


def hits(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line, word, what to write instead) of every word of the table in the file `path`."""
    place = path.relative_to(ROOT).as_posix()
    allowed = [re.compile(what) for where, what, _ in ALLOWED if re.match(where, place)]
    for start, text in parts(path):
        text = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", text)  # camelCase
        spans = [match.span() for pattern in allowed for match in pattern.finditer(text)]
        for pattern, instead in WORDS.items():
            for match in pattern.finditer(text):
                if not any(a <= match.start() and match.end() <= b for a, b in spans):
                    line = start + text.count("\n", 0, match.start())
                    yield line, re.sub(r"[\s#\"]+", " ", match[0]), instead


def files(paths: list[Path]) -> list[Path]:
    """The files to check among `paths` and in folders there."""
    found = [p for path in paths for p in ([path] if path.is_file() else sorted(path.rglob("*")))]
    kinds = (".py", ".ipynb", ".md", ".yaml")
    skipped = [ROOT / name for name in SKIPPED]
    return [p for p in found if p.suffix in kinds and p not in skipped and ".venv" not in p.parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, help="files and folders; default: all")
    paths = [path.resolve() for path in parser.parse_args().paths]
    found = False
    for path in files(paths or [ROOT / name for name in CHECKED]):
        for line, word, instead in sorted(hits(path)):
            print(f"{path.relative_to(ROOT).as_posix()}:{line}: {word} -> {instead}")
            found = True
    sys.exit(found)


if __name__ == "__main__":
    main()
