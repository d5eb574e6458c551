"""What the way through torch.distributed costs where there is one process: `make bench-ranks`.

The demo's model takes the same step alone and as the one rank of a group of one, in turns, in one
process on one thread. What else runs here only adds to a step's time, so of each the lower quartile
counts. Leaves runs/bench/ranks.json.
"""

import argparse
import itertools
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from rows import record, result, table

from kit.base.config import build, load_preset
from kit.base.hardware import detect
from kit.model import gpt
from kit.settings import DataConfig, GPTConfig, SpeedConfig, TrainConfig
from kit.training import loop, trainer
from kit.training.ranks import ALONE, Ranks, SeveralRanks
from kit.tuning.measure import Task, make_batches, some_rows


def one_step(task: Task, ranks: Ranks):
    """A callable that takes another step on one batch of `task`, and returns its seconds."""
    torch.manual_seed(0)
    speed = SpeedConfig(sdpa=True, fused_adamw=True, ema=True)
    state = trainer.Trainer(gpt.SpeechGPT(task.model), task.train, speed, task.hw, ranks=ranks)
    events = loop.train(state, itertools.repeat(next(make_batches(task))))

    def step() -> float:
        began_s = time.perf_counter()
        next(events)
        return time.perf_counter() - began_s

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40, help="of steps, one each way (2 or more)")
    parser.add_argument("--preset", default="cpu")
    options = parser.parse_args()
    if options.pairs < 2:
        parser.error(f"--pairs {options.pairs}: give 2 or more, of which quartiles are taken.")
    torch.set_num_threads(1)
    preset = load_preset(options.preset)
    model, data = build(GPTConfig, preset["model"]), build(DataConfig, preset["data"])
    endless = TrainConfig(max_steps=10**6, eval_steps=10**6, lr=1e-5)
    rows = some_rows((10, 40), (40, 150), 64)
    task = Task(model=model, train=endless, data=data, rows=rows, hw=detect(), threads=1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    ways = {"alone": one_step(task, ALONE), "one rank": one_step(task, SeveralRanks())}
    took = {name: [] for name in ways}
    for step in ways.values():
        step()
    for pair in range(options.pairs):
        order = list(ways) if pair % 2 else list(reversed(ways))
        for name in order:
            took[name].append(ways[name]())
    results = {name: 1e3 * statistics.quantiles(times, n=4)[0] for name, times in took.items()}
    ratio = results["alone"] / results["one rank"]
    row = f"a step of the {options.preset} preset's model as one rank of one"
    rows = [result(row, results["one rank"], "ms", "no ranks", results["alone"], ratio)]
    runs = Path(os.environ.get("KIT_RUNS") or Path(__file__).parent.parent.parent / "runs")
    record(rows, runs / "bench" / "ranks.json")
    table(rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
