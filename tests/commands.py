"""`python -m kit` in a process of its own, and all that a terminal sees of it.

A fresh interpreter takes seconds to import torch. Where a test is not about that, the process
comes from a server that has imported it already (the fixture `processes`); it has an environment,
a process group, standard streams and an exit code of its own, and runs the very module.
"""

import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from helpers import until

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 280


def run_as_main(words: tuple[str, ...], environment: dict[str, str], streams: str) -> None:
    """The body of a process that becomes `python -m kit` with `words`, printing into `streams`."""
    os.setsid()  # as a shell starts it: Ctrl-C reaches all of its group
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        with open(f"{streams}/{number}", "wb") as file:
            os.dup2(file.fileno(), number)
        stream.reconfigure(line_buffering=True)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    sys.argv = ["kit", *words]
    runpy.run_module("kit", run_name="__main__", alter_sys=True)


class ForkedCommand:
    """What a test needs of `subprocess.Popen`, from the server of `processes`."""

    def __init__(self, processes, words: tuple[str, ...], environment: dict[str, str]):
        self.streams = tempfile.mkdtemp(dir=environment["KIT_RUNS"], prefix=".streams-")
        given = (words, environment, self.streams)
        self.process = processes.Process(target=run_as_main, args=given)
        self.process.start()
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def communicate(self, timeout: float = TIMEOUT_S) -> tuple[str, str]:
        """(stdout, stderr) once it has ended."""
        self.process.join(timeout)
        if self.poll() is None:
            self.process.kill()
            raise TimeoutError(f"it ran for more than {timeout} s")
        return tuple(Path(self.streams, name).read_text(encoding="utf-8") for name in "12")


class Terminal:
    def __init__(self, runs: Path, processes):
        self.runs = runs
        self.processes = processes

    def start(self, *words: str, afresh: bool = False) -> subprocess.Popen | ForkedCommand:
        """`python -m kit` with `words`; `afresh`: by an interpreter that has imported nothing."""
        env = dict(os.environ, KIT_RUNS=str(self.runs), KIT_PRESET="tiny", PYTHONUNBUFFERED="1")
        if not afresh:
            return ForkedCommand(self.processes, words, env)
        command = [sys.executable, "-m", "kit", *words]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, **streams)

    def run(self, *words: str, afresh: bool = False) -> tuple[int, str, str]:
        process = self.start(*words, afresh=afresh)
        streams = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, *streams

    def done(self, *words: str, afresh: bool = False) -> str:
        code, out, err = self.run(*words, afresh=afresh)
        assert code == 0, f"{words}: {code}\n{out}\n{err}"
        return out

    def interrupt(
        self, reached: Callable[[], bool], *words: str, afresh: bool = False
    ) -> tuple[int, str, str]:
        """As `run`, with Ctrl-C once `reached()`: a terminal sends it to the whole group."""
        process = self.start(*words, afresh=afresh)
        until(lambda: reached() or process.poll() is not None, TIMEOUT_S)
        assert process.poll() is None, process.communicate()
        os.killpg(process.pid, signal.SIGINT)
        streams = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, *streams
