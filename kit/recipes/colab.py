"""Google Colab: the packages it lacks, and Google Drive to keep runs on.

Colab's own torch, ipywidgets and ipykernel stay as they are. Imports nothing but the standard
library: what it installs is not there yet.
"""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements-colab.txt"
KEPT = "MyDrive/voicekit/runs"  # on Drive


def is_colab() -> bool:
    return "google.colab" in sys.modules


def missing_packages() -> list[str]:
    """Names in requirements-colab.txt that are not installed."""
    lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    names = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return [name for name in names if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def install_missing() -> None:
    """Install what Colab lacks. Where that fails it says so: not all of it is always needed."""
    missing = missing_packages()
    if not missing:
        return
    called = [sys.executable, "-m", "pip", "install", "-q", *missing]
    done = subprocess.run(
        called, capture_output=True, text=True, encoding="utf-8", errors="replace"
    )
    if done.returncode:
        told = (done.stderr.strip() or done.stdout.strip()).splitlines()
        print(
            f"Could not install {', '.join(missing)}; perhaps this machine has no network. Run "
            "this cell again, or go on without: what needs it will say so.\n"
            f"pip says: {told[-1] if told else f'error {done.returncode}'}"
        )


def keep_on_drive() -> None:
    """Mount Google Drive and keep runs there (KIT_MIRROR), or say why that is not so."""
    if os.environ.get("KIT_MIRROR"):
        return
    mount = Path(os.environ.get("KIT_DRIVE") or "/content/drive")
    try:
        from google.colab import drive

        drive.mount(str(mount))
        kept = mount / KEPT
        kept.mkdir(parents=True, exist_ok=True)
    except Exception as error:  # whatever Colab raises: refused, a popup blocked, no network
        print(
            f"Google Drive is not there ({type(error).__name__}: {error}), so runs stay on this "
            "machine and are lost with it, after 12 hours at the latest. Run this cell again to "
            "allow it; a run that was begun without Drive then needs a new RUN if Drive holds one "
            "of its name."
        )
        return
    os.environ["KIT_MIRROR"] = str(kept)
