"""Print the oldest versions that pyproject.toml's ranges allow, as pins for pip.

`>=2.9` gives `==2.9.*`: the last bug-fix release of the oldest version claimed. `make test-oldest`
installs them and runs the tests with them.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
EXTRAS = ("demo", "lab", "watch", "test")  # what `make` installs, too


def oldest(project: dict) -> list[str]:
    """Pins for the dependencies of `project` ("project" of pyproject.toml) and of EXTRAS."""
    ranges, extras = list(project["dependencies"]), project.get("optional-dependencies", {})
    for extra in EXTRAS:
        ranges += extras.get(extra, [])
    pins = []
    for text in ranges:
        result = re.match(r"([\w.-]+)>=([\d.]+)", text)
        if not result:
            raise ValueError(f"{text!r} in pyproject.toml says no oldest version (name>=version).")
        pins.append(f"{result[1]}=={result[2]}.*")
    return pins


if __name__ == "__main__":
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    print("\n".join(oldest(settings["project"])))
