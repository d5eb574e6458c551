"""The process that trains a run: started, followed by its log, and found again by its lock.

A notebook holds a `TrainingProcess`: `python -m kit train`, which survives the kernel. A request to
it is a file in the run's folder.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from kit.base.errors import KitError
from kit.base.files import make_folder, write_atomic
from kit.base.lock import current_holder
from kit.training.logs import parse_row
from kit.training.ranks import ANOTHER_ENDED

LOCK = "train.lock"  # in the run's folder while it trains
OUTPUT = "processes"  # the folder with the output of the processes
REQUESTS = "requests"
STOP, PROFILE = "stop", "profile"
TORCH_LOG = re.compile(r"(\[rank\d+\]:)?\[[WI]\d|[=-]+$")  # lines that say no reason


class TrainingProcess:
    """The training of the run in `folder`, started by `start` or already running."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.log = self.folder / "train.jsonl"
        self.process: subprocess.Popen | None = None
        self.log_file = 0  # its inode
        self.read_bytes = 0
        if self.log.exists():
            self.log_file = self.log.stat().st_ino
            # Without the part of a line that a kill left: training removes it when it resumes.
            self.read_bytes = self.log.read_bytes().rfind(b"\n") + 1

    @property
    def running(self) -> bool:
        if self.process is None:  # another process of this machine may train the run
            return current_holder(self.folder / LOCK) is not None
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
        write_atomic(self.folder / REQUESTS / name, "")

    def new_rows(self) -> list[dict]:
        """Rows logged since the last call; a log that was started again is read from its start.

        Lines that are no rows are passed over.
        """
        try:
            with open(self.log, "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self.log_file or status.st_size < self.read_bytes:
                    self.read_bytes = 0
                self.log_file = status.st_ino
                file.seek(self.read_bytes)
                data = file.read()
        except FileNotFoundError:  # not started yet, or about to start again
            self.read_bytes = 0
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self.read_bytes += len(complete)
        return list(filter(None, map(parse_row, complete.splitlines())))

    def error(self) -> KitError | None:
        """Why the processes failed, from the last lines they printed; None if they did not."""
        code = self.process.returncode if self.process else 0
        if not code:
            return None
        output = self.folder / OUTPUT
        last_lines = []
        for path in [*sorted(output.glob("*/*/*/stderr.log")), output / "stderr.log"]:
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
            lines = [line.strip() for line in lines if line.strip() and not TORCH_LOG.match(line)]
            last_lines += lines[-1:]
        # Prefer the process that failed to those that only lost it.
        nothing = f"Training ended with exit code {code}."
        reason = min(last_lines, key=lambda line: ANOTHER_ENDED in line, default=nothing)
        if code < 0:  # what it printed last is not why
            reason = f"Its process was ended by {signal.Signals(-code).name}."
            if code == -signal.SIGKILL:
                reason += " Most likely memory ran out: close other programs, lower `micro_batch`."
        return KitError(f"{reason} (Full output: {output}.)")


def clear_requests(folder: Path) -> None:
    for path in (Path(folder) / REQUESTS).glob("*"):
        path.unlink(missing_ok=True)


def is_requested(folder: Path, name: str) -> bool:
    return (Path(folder) / REQUESTS / name).exists()


def take_request(folder: Path, name: str) -> bool:
    """Whether `name` was requested; removes the request."""
    if not is_requested(folder, name):  # asked at every step
        return False
    (Path(folder) / REQUESTS / name).unlink(missing_ok=True)
    return True


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Within the block, Ctrl-C or SIGTERM is only appended to the list that is yielded.

    A second one has its usual effect, which may lose the steps since the last checkpoint. Outside
    the main thread, which alone gets signals, this does nothing.
    """
    received = []
    with contextlib.ExitStack() as restored:

        def receive(number: int, frame) -> None:
            received.append(number)
            restored.close()

        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                before = signal.signal(number, receive)
                restored.callback(signal.signal, number, before)
        yield received
