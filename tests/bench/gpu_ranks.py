"""The part of `make check-gpu` that wants two GPUs: a model trained by two processes, over NCCL.

`ranks_rows` compares their losses with those of one process; run as a script, by torchrun, this
file is one of the two. On a CPU they are two gloo processes of a tiny model.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from gpu_setting import (
    Setting,
    limit_row,
    new_state,
    note_row,
    relative_difference,
    some_batches,
    train_losses,
)
from rows import result

from kit.base.files import write_atomic
from kit.base.hardware import detect
from kit.model.gpt import SpeechGPT
from kit.model.sequence import EffectiveBatch
from kit.settings import SpeedConfig
from kit.training.loop import split_batch
from kit.training.ranks import join_ranks
from kit.training.trainer import Trainer
from kit.tuning.measure import Task

WORLD = 2
STEPS = 12


def task_of(setting: Setting) -> Task:
    """One that draws no dropout: two processes would draw other."""
    task = setting.middle
    return dataclasses.replace(task, model=dataclasses.replace(task.model, dropout=0.0))


def ranks_rows(setting: Setting) -> Iterator[dict]:
    """The losses and speed of two GPUs that train one model, beside one GPU."""
    if not setting.pretended and torch.cuda.device_count() < WORLD:
        yield note_row("two GPUs beside one", "this machine has one GPU")
        return
    task = task_of(setting)
    batches = some_batches(task, STEPS)
    wanted, alone_s = timed_losses(new_state(task, sdpa=True), batches)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        called = ["--standalone", f"--nproc-per-node={WORLD}", __file__, str(path)]
        root = str(Path(__file__).resolve().parent.parent.parent)
        paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
        environment = dict(os.environ, PYTHONPATH=paths)
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *called], env=environment, check=True
        )
        results = json.loads(path.read_text(encoding="utf-8"))
    row = f"two processes, {results['backend']}: difference of the losses"
    yield limit_row(row, relative_difference(results["losses"], wanted), "share", 1e-4)
    took_s = results["seconds"]
    row = f"two processes: {STEPS - 1} steps"
    yield result(row, took_s, "s", "one process", alone_s, alone_s / took_s)


def timed_losses(state: Trainer, batches: list) -> tuple[list[float], float]:
    """The losses of all steps, and the seconds that all but the first took."""
    first = train_losses(state, batches[:1])
    began_s = time.perf_counter()
    rest = train_losses(state, batches[1:])
    return first + rest, time.perf_counter() - began_s


def share(batch: EffectiveBatch, rank: int) -> EffectiveBatch:
    """The rows of `batch` that are one rank's."""
    micro = []
    for whole in batch.micro:
        micro += split_batch(whole, len(whole.tokens) // WORLD)[rank::WORLD]
    return EffectiveBatch(micro=micro, position=batch.position)


def main(path: Path) -> None:
    """One of the processes; the main one writes losses and seconds to `path`."""
    ranks = join_ranks()
    setting = Setting(hw=detect())
    task = task_of(setting)
    batches = [share(batch, ranks.rank) for batch in some_batches(task, STEPS)]
    torch.manual_seed(0)
    with torch.device(task.hw.device):
        model = SpeechGPT(task.model)
    state = Trainer(model, task.train, SpeedConfig(sdpa=True), task.hw, ranks=ranks)
    curve, took_s = timed_losses(state, batches)
    backend = "nccl" if task.hw.device == "cuda" else "gloo"
    if ranks.is_main:
        write_atomic(path, json.dumps({"losses": curve, "seconds": took_s, "backend": backend}))
    ranks.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
