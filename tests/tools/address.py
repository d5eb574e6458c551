"""The address of the repository: one value in pyproject.toml, and the places that must repeat it.

`make address URL=https://github.com/OWNER/NAME` writes it everywhere: badges, clone cells and
pip's commands are used before there is a checkout to look it up in. Needs the standard library
alone.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VALUE = re.compile(r'^(Repository = ")([^"]*)(")$', re.MULTILINE)
# In a badge, a link or a clone cell: what comes before the name of owner and repository.
SITES = r"https://github\.com|colab\.research\.google\.com/github"
PLACE = re.compile(rf"((?:{SITES})/)([\w.-]+/[\w.-]+)")
# Links to others' repositories, if a text should need one, are left alone: only these are ours.
OURS = re.compile(
    r"git clone[^\n]*|colab\.research\.google\.com/github/[^)\s\"]*"
    r"|git\+https://[^`\s\"]*|repository-code: [^\n]*"
    r"|https://github\.com/[\w.-]+/[\w.-]+/blob/main/"  # of the notebooks
)
# Beside the notebooks.
FILES = ("README.md", "docs/running.md", "CITATION.cff", "kit/inference/export.py")


def address(root: Path = ROOT) -> str:
    """The one value: https://github.com/OWNER/NAME."""
    result = VALUE.search((root / "pyproject.toml").read_text(encoding="utf-8"))
    if not result:
        raise SystemExit('pyproject.toml has no `Repository = "..."` under [project.urls].')
    return result[2]


def repeating(root: Path = ROOT) -> list[Path]:
    """The files that repeat it."""
    return [*sorted((root / "notebooks").glob("*.ipynb")), *(root / name for name in FILES)]


def repeated(text: str) -> list[str]:
    """Every OWNER/NAME in the badges and clone cells of `text`."""
    return [place[2] for ours in OURS.findall(text) for place in PLACE.finditer(ours)]


def rewrite(url: str, root: Path = ROOT) -> list[Path]:
    """Write `url` to every place; returns the files that changed. Exits if Colab can't open it."""
    result = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?/?", url)
    if not result:
        raise SystemExit(
            f"URL={url}: Colab opens notebooks from GitHub alone, so it must read "
            "https://github.com/OWNER/NAME."
        )
    name = result[1]
    changed = []
    for path in [root / "pyproject.toml", *repeating(root)]:
        before = path.read_text(encoding="utf-8")
        if path.name == "pyproject.toml":
            after = VALUE.sub(rf"\g<1>https://github.com/{name}\g<3>", before)
        else:
            after = OURS.sub(lambda ours: PLACE.sub(rf"\g<1>{name}", ours[0]), before)
        if after != before:
            path.write_text(after, encoding="utf-8", newline="\n")
            changed.append(path)
    return changed


if __name__ == "__main__":
    if any(sys.argv[1:]):
        files = rewrite(sys.argv[1])
        print("\n".join(str(file.relative_to(ROOT)) for file in files) or "It is so already.")
    else:
        command = "make address URL=https://github.com/OWNER/NAME"
        print(f"It is {address()} now. To change it: {command}")
