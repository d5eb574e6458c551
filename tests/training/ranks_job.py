"""What torchrun starts for test_ranks.py: tiny runs of several processes, one after the other.

`ranks_job.py FOLDER NAME...` does the runs of these names, each in its folder inside FOLDER, whose
train.jsonl is then compared with that of a process alone. `RUNS` is read by both sides.
"""

import dataclasses
import itertools
import os
import signal
import sys
from pathlib import Path
from threading import Event

import torch
from helpers import GPT, TRAIN, Session, effective_batch, pack, random_rows, tiny_session

from kit.model.gpt import SpeechGPT
from kit.model.sequence import EffectiveBatch
from kit.training.ranks import ALONE, Ranks, join_ranks

# At the kit's rates: ten times as high, rounding errors grow tenfold in fifty steps.
USUAL = dataclasses.replace(TRAIN, lr=1e-3)
LONG = dataclasses.replace(
    USUAL, max_steps=30, eval_steps=5, save_steps=10, gate_every=10, lr_plateau_patience=1
)
SHORT = dataclasses.replace(USUAL, max_steps=12, save_steps=2)
SLOW = "KIT_SLOW" in os.environ  # ten kills in place of one
BUSY = dataclasses.replace(TRAIN, max_steps=200 if SLOW else 24, save_steps=1, eval_steps=20)
RUNS = {  # settings, dropout
    "parity": (LONG, 0.0),
    "out of memory": (SHORT, 0.0),
    "whole": (SHORT, 0.1),
    "stopped": (SHORT, 0.1),
    "started alone": (SHORT, 0.0),
    "started together": (SHORT, 0.0),
    "killed": (BUSY, 0.1),
}


def uneven_batches(ranks: Ranks, position: dict | None):
    """Batches of 8 rows and fewer, down to one: then all ranks but the first have none."""
    for number in itertools.count((position or {"batch": 0})["batch"]):
        rows = random_rows(GPT, 8 - number % 8, seed=number)
        mine = [column[ranks.rank :: ranks.world] for column in rows]
        micro = [pack(GPT, *mine)] if mine[0] else []
        yield EffectiveBatch(micro=micro, position={"batch": number + 1})


def session(folder: Path, name: str, ranks: Ranks = ALONE) -> Session:
    config, dropout = RUNS[name]
    run = tiny_session(Path(folder) / name, config, dropout=dropout)
    run.make_batches = lambda position, parts: uneven_batches(ranks, position)
    run.validation = [effective_batch(GPT, random_rows(GPT, 4, seed=999 + i)) for i in range(3)]
    run.evaluate = gate if ranks.is_main else never
    run.ranks = ranks
    return run


def gate(model: SpeechGPT) -> dict:
    """A verdict that follows from the weights alone."""
    return {"cer": float(model.code_head.weight.detach().abs().mean()), "eos_rate": 1.0}


def never(model: SpeechGPT) -> dict:
    raise AssertionError("only the main rank evaluates the voice")


def train(run: Session, stop_at: int = 0) -> list:
    """The events of `run`; the main rank alone asks for its end after step `stop_at`."""
    stop = Event()
    events = []
    for event in run.run({"ema": True}, stop):
        events.append(event)
        if event.step == stop_at and run.ranks.is_main:
            stop.set()
    return events


def run_out_of_memory_on_rank_1(ranks: Ranks) -> None:
    """From here on a pass of more than two rows does not fit there, which the others cannot see."""
    forward = SpeechGPT.forward

    def poor_forward(model, batch, text_width=0):
        if ranks.rank == 1 and model.training and len(batch.tokens) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory, as a test says")
        return forward(model, batch, text_width)

    SpeechGPT.forward = poor_forward


def main(folder: str, *names: str) -> None:
    ranks = join_ranks()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, which may come before the words
    Path(folder).mkdir(exist_ok=True)
    Path(folder, f"pid-{ranks.rank}").write_text(str(os.getpid()))
    for name in names:
        run = session(Path(folder), name, ranks)
        if name == "stopped":
            train(run, stop_at=5)
            run = session(Path(folder), name, ranks)
        if name == "started together":
            train(run, stop_at=5)
            continue
        if name == "out of memory":
            run_out_of_memory_on_rank_1(ranks)
        train(run)
    ranks.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
