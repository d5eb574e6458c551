"""Where things lie, for tests that start processes of their own."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def python_path(test: str) -> str:
    """PYTHONPATH of a process that imports the kit, the tests' helpers and the test file `test`."""
    folders = [ROOT, ROOT / "tests", Path(test).resolve().parent]
    return os.pathsep.join(str(folder) for folder in folders)
