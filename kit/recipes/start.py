"""The first call of every notebook and command: opens the run and prepares this machine.

On Colab and Kaggle it installs missing packages. Colab's runs are kept on Google Drive, Kaggle's in
the notebook's output. Imports only the standard library at the top: environment variables must be
set before torch is loaded, and packages may be missing.
"""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements-colab.txt"
DRIVE_FOLDER = "MyDrive/voicekit/runs"  # on Google Drive
# Processes that share the work import the script that started them, and would start all again.
UNGUARDED = (
    'Put what this script does below the line `if __name__ == "__main__":` (docs/running.md): the '
    "kit starts more processes, and each of them reads the script from its beginning."
)
KAGGLE_OUTPUT = Path("/kaggle/working")  # what "Save Version" keeps


def start(
    name: str = "",
    preset: str = "",
    use: str = "",
    settings: dict | None = None,
    data: str | None = None,
    language: str = "",
    create: bool = True,
):
    """Open the run `name` on this machine as an `ActiveRun`.

    It is created if it does not exist, unless `create` is False: then KitError.
    An empty `name` is KIT_RUN's, else what suits `data` and `language` if `data` is given, else
    the run that was opened last. `preset` and `use` are as `find_run` takes them; `settings`
    ({"train": {"lr": 1e-4}}) are applied over both, and saved with the run as `use` is.
    Raises KitError for a name that cannot be a folder's, another preset and an unknown setting.
    """
    if sys._getframe(1).f_globals.get("__name__") == "__mp_main__":
        print(UNGUARDED, file=sys.stderr, flush=True)  # what starts it prints no SystemExit
        raise SystemExit(1)
    prepare_machine()
    if is_kaggle():
        keep_in_output()
    elif is_colab():
        keep_on_drive()
    from kit.notebook.result import plain_errors, print_results
    from kit.recipes.open_run import open_active_run

    plain_errors()
    print_results()
    return open_active_run(name, preset, use, settings or {}, data, language, create)


def prepare_machine() -> None:
    """Prepare what must be done before torch and the kit's packages are imported."""
    set_thread_waiting()
    if is_kaggle() or is_colab():
        install_missing()


def set_thread_waiting() -> None:
    """Set how torch's threads wait for each other. Has no effect after torch was imported."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # with few cores, do not spin
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # spin shortly before sleeping


def is_colab() -> bool:
    return "google.colab" in sys.modules and not is_kaggle()  # Kaggle has Colab's packages


def is_kaggle() -> bool:
    return "KAGGLE_KERNEL_RUN_TYPE" in os.environ


def install_missing() -> None:
    """Install what Colab or Kaggle lacks; prints a message on failure: not all is always needed."""
    lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    names = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    missing = [name for name in names if not list(importlib.metadata.distributions(name=name))]
    if not missing:
        return
    command = [sys.executable, "-m", "pip", "install", "-q", *missing]
    done = subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", errors="replace"
    )
    if done.returncode:
        output = (done.stderr.strip() or done.stdout.strip()).splitlines()
        print(
            f"Could not install {', '.join(missing)}; perhaps this machine has no network. Run "
            "this cell again, or continue without: what needs it will say so.\n"
            f"pip says: {output[-1] if output else f'error {done.returncode}'}"
        )


def keep_on_drive() -> None:
    """Mount Google Drive and set KIT_MIRROR to a folder there, or print why it is not mounted."""
    if os.environ.get("KIT_MIRROR"):
        return
    mount = Path(os.environ.get("KIT_DRIVE") or "/content/drive")
    try:
        from google.colab import drive

        drive.mount(str(mount))
        kept = mount / DRIVE_FOLDER
        kept.mkdir(parents=True, exist_ok=True)
    except Exception as error:  # Colab raises anything: refused, popup blocked, no network
        print(
            f"Google Drive is not there ({type(error).__name__}: {error}), so runs stay on this "
            "machine and are lost with it, after 12 hours at the latest. Run this cell again to "
            "allow access; a run that was started without Drive then needs a new name in RUN if "
            "Drive holds one of the same name."
        )
        return
    os.environ["KIT_MIRROR"] = str(kept)


def keep_in_output() -> None:
    """Set KIT_RUNS to a folder that Kaggle keeps with the notebook, and print which."""
    if os.environ.get("KIT_RUNS"):
        return
    runs = KAGGLE_OUTPUT / "runs"
    os.environ["KIT_RUNS"] = str(runs)
    print(f'Runs are in {runs}: "Save Version" keeps them; without it they end with this session.')
