"""A training in several processes, seen from the one that has torchrun start them.

torchrun is a process of its own: launchers that fork fail once CUDA was used, as in a notebook it
was. The run tells its events by its log, is stopped and profiled by signals to its main rank, and
goes on where this process ends: whoever comes back follows it again. Knows processes and files;
nothing of what is trained.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event

from kit.base.files import make_folder
from kit.base.lock import Holder, is_gone, machine, read_holder
from kit.training.settings import StepEvent, TrainError

LOOK_S = 0.2  # between two looks at the log
PROFILE_SIGNAL = getattr(signal, "SIGUSR1", None)  # not on Windows
OWN_WORDS = "processes"  # the folder with what each process prints
ANOTHER_ENDED = "processes that work together has ended"  # what a process that did not fail says
TORCHS_OWN = re.compile(r"(\[rank\d+\]:)?\[[WI]\d")  # its log, which goes on as a process ends


class TorchrunRun:
    """The run in `folder`, trained by processes that `begin` starts, or that are there already."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.log = self.folder / "train.jsonl"
        self.process: subprocess.Popen | None = None

    @property
    def main_rank(self) -> Holder | None:
        """The process on this machine that trains the run at this moment."""
        holder = read_holder(self.folder / "train.lock")
        if holder is None or holder.machine != machine() or holder.pid == os.getpid():
            return None
        return None if is_gone(holder) else holder

    @property
    def alive(self) -> bool:
        if self.process is None:
            return self.main_rank is not None
        return self.process.poll() is None

    def begin(self, words: list[str], processes: int, environment: dict[str, str]) -> None:
        """Have torchrun start `python -m` `words` in so many `processes`."""
        said = self.folder / OWN_WORDS
        shutil.rmtree(said, ignore_errors=True)
        make_folder(said)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={processes}", "--log-dir", str(said), "--redirects", "3"]
        with open(said / "torchrun.log", "wb") as out:
            self.process = subprocess.Popen(
                [*command, "-m", "--", *words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a kernel's interrupt or restart is not meant for it
            )

    def events(self, stop: Event) -> Iterator[StepEvent]:
        """The run's events until it ends; `stop` makes it save a checkpoint and end.

        Raises TrainError with what its processes said where they failed.
        """
        rows = NewRows(self.log)
        asked = False
        while self.alive:
            if stop.is_set() and not asked:
                asked = self.ask(signal.SIGINT)
            yield from map(as_event, rows.read())
            time.sleep(LOOK_S)
        yield from map(as_event, rows.read())
        if self.process is not None and self.process.returncode and not stop.is_set():
            raise TrainError(self.last_words())

    def ask(self, number: int) -> bool:
        """Send the main rank a signal; whether there was one to send it to.

        While it still plans, torchrun is asked to end it.
        """
        holder = self.main_rank
        with contextlib.suppress(ProcessLookupError):
            if holder is not None:
                os.kill(holder.pid, number)
                return True
            if self.process is not None and number == signal.SIGINT:
                self.process.send_signal(number)
                return True
        return False

    def last_words(self) -> str:
        """Why the run failed: what a rank said last, the main one before others, else torchrun.

        One that only tells that another has ended is asked last.
        """
        said = self.folder / OWN_WORDS
        found = []
        for path in [*sorted(said.glob("*/*/*/stderr.log")), said / "torchrun.log"]:
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
            told = [line.strip() for line in lines if line.strip() and not TORCHS_OWN.match(line)]
            found += told[-1:]
        if not found:
            return f"torchrun ended with code {self.process.returncode} and said nothing."
        words = min(found, key=lambda told: ANOTHER_ENDED in told)
        return f"{words} (All that its processes said: {said}.)"


class NewRows:
    """The rows that are appended to a log from now on; a log that begins anew is read anew."""

    def __init__(self, path: Path):
        self.path = path
        self.seen_bytes = path.stat().st_size if path.exists() else 0

    def read(self) -> list[dict]:
        """Those that came since the last call; a line in the making waits for the next."""
        if not self.path.exists():
            self.seen_bytes = 0
            return []
        with open(self.path, "rb") as file:
            if os.fstat(file.fileno()).st_size < self.seen_bytes:
                self.seen_bytes = 0
            file.seek(self.seen_bytes)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self.seen_bytes += len(whole)
        return [json.loads(line) for line in whole.splitlines() if line]


def as_event(row: dict) -> StepEvent:
    """The event that a row of the log tells of; what was not finite is NaN again."""
    known = {field.name: field for field in dataclasses.fields(StepEvent)}
    values = {}
    for name, field in known.items():
        value = row.get(name)
        needed = field.default is dataclasses.MISSING
        if value is not None:
            values[name] = value
        elif needed:
            values[name] = float("nan")
    return StepEvent(**values)
