"""A notebook's training on several GPUs: how many there are, and how the run is begun on them.

The notebook's own process trains on one alone. For more, torchrun starts this very kit's command
line in processes of their own, and what the panel shows is read from the run's log.
"""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import torch

from kit.base.config import CONFIGS
from kit.base.files import write_atomic
from kit.notebook.run_record import read_mark
from kit.recipes.active_run import ActiveRun
from kit.training.settings import StepEvent
from kit.training.torchrun import PROFILE_SIGNAL, TorchrunRun
from kit.tuning.profiling import StepProfiler

GPUS = "gpus"  # a file in a run's folder: on how many it was begun last


def processes_here(run: ActiveRun) -> int:
    """How many processes may train together here: one a GPU; KIT_RANKS says another number.

    In a process that torchrun has started there is no choice any more.
    """
    if run.ranks.several or PROFILE_SIGNAL is None:
        return 1
    asked = os.environ.get("KIT_RANKS", "")
    if asked.isdecimal():
        return max(1, int(asked))
    return max(1, torch.cuda.device_count()) if run.hw.device == "cuda" else 1


def gpus_of(run: ActiveRun) -> dict[str, int]:
    """The number that a panel offers where there are several GPUs: as many as the last time."""
    here = processes_here(run)
    before = read_mark(run.path(GPUS)).strip()
    if here == 1:
        return {}
    return {GPUS: min(here, int(before)) if before.isdecimal() and int(before) else 1}


class DistantProfiler(StepProfiler):
    """A StepProfiler whose steps may be taken in another process: it is asked, and read from.

    `elsewhere` sends the request there; None while the run is trained in this process.
    """

    elsewhere: Callable[[], bool] | None = None

    def __call__(self, event) -> None:
        if self.elsewhere is None:
            return super().__call__(event)
        if self.asked.is_set():
            self.asked.clear()
            heard = self.elsewhere()
            self.said = (
                "Profiling in the main process." if heard else "There is nothing to profile."
            )
        self._guarded(self._read)

    def _read(self) -> None:
        """Take over the newest profile that another process has left."""
        left = sorted(self.folder.glob("step-*.operators.json"))
        if not left:
            return
        result = json.loads(left[-1].read_text(encoding="utf-8"))
        if result != self.result:
            self.result = result
            self.said = self._in_words(self.folder / result["trace"])


def hear_profile_requests(profiler: StepProfiler) -> None:
    """Let a signal ask `profiler` in this process; another one has the panel."""
    if PROFILE_SIGNAL is not None:
        signal.signal(PROFILE_SIGNAL, lambda *_: profiler.request())


def train_on_gpus(
    run: ActiveRun, values: dict, gpus: int, options: dict, profiler: DistantProfiler, stop: Event
) -> Iterator[StepEvent]:
    """The events of `run`, trained with a panel's `values` on so many `gpus` by torchrun.

    `options` are those of the train command. Where processes train it already (the kernel that
    began them was started anew) they are followed.
    """
    training = TorchrunRun(run.folder)
    profiler.elsewhere = lambda: training.ask(PROFILE_SIGNAL)
    write_atomic(run.path(GPUS), str(gpus))
    try:
        with run.held_by_all("training"):
            if training.main_rank is None:
                if torch.cuda.is_initialized():
                    torch.cuda.empty_cache()  # of what was tried here before
                training.begin(train_words(run, values, options), gpus, environment_of(run))
            yield from training.events(stop)
    finally:
        profiler.elsewhere = None


def train_words(run: ActiveRun, values: dict, options: dict) -> list[str]:
    """What `python -m` is given to train `run`."""
    words = ["kit", "train", "--run", run.name, "--switches", json.dumps(values)]
    for name, value in options.items():
        if value:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def environment_of(run: ActiveRun) -> dict[str, str]:
    """That of this process, with what leads to this kit and to `run`.

    What keeps the run elsewhere, too, goes on doing so in this process.
    """
    found = dict(os.environ, KIT_RUNS=str(run.folder.parent.resolve()))
    found.pop("KIT_MIRROR", None)
    found.pop("KIT_PRESET", None)  # the run has its own
    paths = [str(Path(CONFIGS).parent), found.get("PYTHONPATH", "")]
    found["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return found
