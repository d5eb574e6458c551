"""Start training in its own processes, follow its log, ask it to stop.

If a notebook's kernel dies, training continues, and a new kernel finds it by its lock. A request is
a file in the run's folder.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from kit.base.errors import KitError
from kit.base.files import make_folder, write_atomic
from kit.base.lock import Holder, is_gone, machine, read_holder

LOCK = "train.lock"  # in the run's folder while it trains
OUTPUT = "processes"  # the folder with the output of the processes
REQUESTS = "requests"
STOP, PROFILE = "stop", "profile"
# The error of a process that did not fail itself.
ANOTHER_ENDED = "processes that work together has ended"
TORCH_LOG = re.compile(r"(\[rank\d+\]:)?\[[WI]\d")  # lines that torch logs while a process ends


class TrainingProcess:
    """The training of the run in `folder`, started by `start` or already running."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.log = self.folder / "train.jsonl"
        self.process: subprocess.Popen | None = None
        self.log_file = self.log.stat().st_ino if self.log.exists() else 0
        self.read_bytes = self.log.stat().st_size if self.log.exists() else 0

    @property
    def holder(self) -> Holder | None:
        """The process on this machine that is training the run, if any."""
        holder = read_holder(self.folder / LOCK)
        if holder is None or holder.machine != machine() or is_gone(holder):
            return None
        return holder

    @property
    def running(self) -> bool:
        if self.process is None:
            return self.holder is not None
        return self.process.poll() is None

    def start(self, arguments: Sequence[str], environment: dict[str, str], count: int = 1) -> None:
        """Start `python -m kit ARGUMENTS`, by torchrun if `count` is above 1."""
        clear_requests(self.folder)
        output = self.folder / OUTPUT
        shutil.rmtree(output, ignore_errors=True)
        make_folder(output)
        command = [sys.executable, "-m", "kit", *arguments]
        if count > 1:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc-per-node={count}", "--log-dir", str(output), "--redirects", "3"]
            command += ["-m", "--", "kit", *arguments]
        with open(output / "stdout.log", "wb") as out, open(output / "stderr.log", "wb") as err:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,  # so that an interrupt of the kernel does not reach it
            )

    def request(self, name: str) -> None:
        """Request STOP (after this step, with a checkpoint) or PROFILE."""
        path = self.folder / REQUESTS / name
        make_folder(path.parent)
        write_atomic(path, "")

    def new_rows(self) -> list[dict]:
        """Rows logged since the last call; a log that was started again is read from its start."""
        if not self.log.exists():
            self.read_bytes = 0
            return []
        with open(self.log, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self.log_file or status.st_size < self.read_bytes:
                self.read_bytes = 0
            self.log_file = status.st_ino
            file.seek(self.read_bytes)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self.read_bytes += len(complete)
        return [json.loads(line) for line in complete.splitlines() if line]

    def error(self) -> KitError | None:
        """Why the processes failed, from the last lines they printed; None if they did not."""
        if self.process is None or not self.process.returncode:
            return None
        output = self.folder / OUTPUT
        last_lines = []
        for path in [*sorted(output.glob("*/*/*/stderr.log")), output / "stderr.log"]:
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
            lines = [line.strip() for line in lines if line.strip() and not TORCH_LOG.match(line)]
            last_lines += lines[-1:]
        if not last_lines:
            return KitError(f"Training ended with exit code {self.process.returncode}.")
        # Prefer the process that failed to those that only lost it.
        reason = min(last_lines, key=lambda line: ANOTHER_ENDED in line)
        return KitError(f"{reason} (Full output: {output}.)")


def clear_requests(folder: Path) -> None:
    for path in (Path(folder) / REQUESTS).glob("*"):
        path.unlink(missing_ok=True)


def is_requested(folder: Path, name: str) -> bool:
    return (Path(folder) / REQUESTS / name).exists()


def take_request(folder: Path, name: str) -> bool:
    """Whether `name` was requested; removes the request."""
    if not is_requested(folder, name):
        return False
    (Path(folder) / REQUESTS / name).unlink(missing_ok=True)
    return True


class StopSignals:
    """Within `with StopSignals() as signals`, Ctrl-C or SIGTERM only sets `signals.received`.

    A second one has its usual effect, which may lose the steps since the last checkpoint. Outside
    the main thread, which alone gets signals, this does nothing.
    """

    def __init__(self):
        self.received: int | None = None
        self.handlers = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_error) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.handlers = {}

    def _receive(self, number: int, frame) -> None:
        self.received = number
        self.__exit__()
