"""A machine of Colab's: its own disk, a real kernel of Colab's versions, a Drive that outlives it.

`environment()` makes the Python it runs on; `Machine` is one, taken away at the end of its block.
A notebook is run as "Run all" does: its first cell clones the kit from a snapshot of this checkout.
"""

import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nbformat
from jupyter_client.manager import KernelManager

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ADDRESS = "https://github.com/voicekit/voicekit-notebooks"
CELL_LIMIT_S = 600


def environment() -> Path:
    """The python of build/colab: Colab's notebook packages before those of this environment.

    It has the Python of this environment: another one would need a torch of its own.
    """
    folder = ROOT / "build" / "colab"
    python = folder / "bin" / "python"
    asked = HERE / "requirements.txt"
    mark = folder / "installed"
    if not (mark.is_file() and mark.read_text(encoding="utf-8") == asked.read_text("utf-8")):
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "-r", asked], check=True)
        (own,) = folder.glob("lib/python*/site-packages")
        behind = [path for path in sys.path if path.endswith("site-packages")]
        (own / "behind.pth").write_text("\n".join(behind) + "\n", encoding="utf-8")
        mark.write_text(asked.read_text("utf-8"), encoding="utf-8")
    return python


def snapshot(into: Path) -> Path:
    """The files of this checkout, committed or not, as a repository to clone from."""
    join_names = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(join_names, cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, names.decode().split("\0")):
        if (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, into / name)
    who = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-q", "-m", "snapshot"]):
        subprocess.run(["git", *words], cwd=into, check=True)
    return into


class Killed(Exception):
    """The machine was taken away in the middle of a cell."""


class CellError(AssertionError):
    """A cell raised; the message is its traceback."""


class Machine:
    """A fresh machine whose disk is `place`; `drive` is all that it shares with others.

    The disk has the same path each time, as on Colab. `mood` is the Drive's, see drive.py.
    """

    def __init__(self, place: Path, drive: Path, repository: Path, mood: str = "", **environ: str):
        self.place = place
        shutil.rmtree(place, ignore_errors=True)
        (place / "home").mkdir(parents=True)
        (place / "content").mkdir()
        drive.mkdir(exist_ok=True)
        environ |= {"COLAB_DRIVE": str(drive), "COLAB_DRIVE_MOOD": mood, "KIT_PRESET": "tiny"}
        environ |= {"KIT_DRIVE": str(place / "content" / "drive"), "HOME": str(place / "home")}
        environ |= {"PYTHONPATH": str(HERE / "stand_in"), "OMP_NUM_THREADS": "1"}
        environ["MPLCONFIGDIR"] = str(ROOT / "build" / "matplotlib")
        # Whoever clones the address gets the snapshot.
        environ |= {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_VALUE_0": ADDRESS}
        environ["GIT_CONFIG_KEY_0"] = f"url.{repository}.insteadOf"
        own = {k: v for k, v in os.environ.items() if not k.startswith(("KIT_", "PYTHON"))}
        self.manager = KernelManager()
        self.manager.kernel_spec.argv[0] = str(environment())
        self.manager.start_kernel(cwd=str(place / "content"), env=own | environ)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=300)
        self.buttons: dict[str, str] = {}  # comm ids by what is written on them
        self.output = ""  # all that the notebook printed and drew, as text
        self.execute("import google.colab", allow_stdin=False)  # there before the first cell

    def __enter__(self) -> "Machine":
        return self

    def __exit__(self, *_) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        shutil.rmtree(self.place, ignore_errors=True)

    def run_all(self, name: str, allow_stdin=True, press="", kill_when=None, **parameters) -> str:
        """Run the notebook `name` from the top; returns what it said.

        `press` is how a button begins that is clicked as soon as it is there. Raises CellError
        where a cell fails, and Killed once `kill_when` was true.
        """
        for cell in nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4).cells:
            if cell.cell_type == "code":
                source = cell.source
                if "parameters" in cell.metadata.get("tags", ()):
                    source += "".join(f"\n{key} = {value!r}" for key, value in parameters.items())
                self.execute(source, allow_stdin, press, kill_when)
        return self.output

    def execute(self, source: str, allow_stdin: bool, press="", kill_when=None) -> None:
        ours = self.client.execute(source, allow_stdin=allow_stdin)
        until_s = time.monotonic() + CELL_LIMIT_S
        while time.monotonic() < until_s:
            if kill_when and kill_when():
                self.manager.signal_kernel(9)
                raise Killed(source)
            with contextlib.suppress(queue.Empty):
                message = self.client.get_iopub_msg(timeout=0.2)
                ends = self._hear(message, press, source)
                if ends and message["parent_header"]["msg_id"] == ours:
                    return
            if not self.manager.is_alive():
                raise CellError(f"the kernel died in\n{source}\n{self.output[-2000:]}")
        raise CellError(f"no end after {CELL_LIMIT_S} s:\n{source}\n{self.output[-2000:]}")

    def _hear(self, message: dict, press: str, source: str) -> bool:
        """Note what a message says; whether it ends a cell."""
        kind, content = message["msg_type"], message["content"]
        if kind == "error":
            trace = "\n".join(content["traceback"])
            raise CellError(f"{source}\n{self.output[-3000:]}\n{trace}")
        if kind == "stream":
            self.output += content["text"]
        elif kind in ("display_data", "execute_result", "update_display_data"):
            data = content["data"]
            self.output += data.get("text/html", data.get("text/plain", "")) + "\n"
        elif kind == "comm_open":
            state = content["data"].get("state", {})
            if state.get("_model_name") == "ButtonModel":
                label = state.get("description", "")
                self.buttons[label] = content["comm_id"]
                if press and label.startswith(press):
                    self.click(label)
        return kind == "status" and content["execution_state"] == "idle"

    def click(self, button: str) -> None:
        """Click a button while a cell runs, as a front end does."""
        data = {"method": "custom", "content": {"event": "click"}}
        content = {"comm_id": self.buttons[button], "data": data}
        self.client.shell_channel.send(self.client.session.msg("comm_msg", content))


def report(drive: Path, run: str) -> dict:
    """The record of a run, as it is kept."""
    path = drive / "voicekit" / "runs" / run / "report.json"
    return json.loads(path.read_text(encoding="utf-8"))
