"""Measure the switches on this device: none, each alone, each beside those before it.

Every variant trains on the same batches from the same seed in a process of its own, so its peak
memory is its own, and one that runs out of memory or crashes is a row with its reason. Rounds are
interleaved, so that a noisy machine affects all variants alike, and the median round counts. Each
result is a file, so an interrupted benchmark resumes. choose.py compares them.
"""

import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from kit.base import hardware
from kit.base.config import build
from kit.base.errors import KitError
from kit.base.files import cached_result, digest
from kit.base.hardware import MATMUL_SHAPES, Hardware
from kit.base.processes import run_in_process
from kit.batches import batching
from kit.model.gpt import SpeechGPT
from kit.model.sequence import EffectiveBatch, collate
from kit.settings import DataConfig, GPTConfig, SpeedConfig, TrainConfig, TrialConfig
from kit.training import switches
from kit.training.config import FULL, Finetuning
from kit.training.loop import train
from kit.training.switches import LABELS
from kit.training.trainer import Trainer
from kit.tuning.cards import token_flop
from kit.tuning.choose import LEFT_OUT, Trial, compare

COSTS = ("ema", "ema_offload")  # no speed-ups: each has a row, none is chosen here
SAVINGS = ("gradient_checkpointing", "adamw_8bit")  # they save memory, and cost time
LADDER = tuple(name for name in LABELS if name not in (*COSTS, *SAVINGS))
# Results of steps that include something else are not comparable.
STEP_INCLUDES = "collating, rows drawn together"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What every variant trains: plain values, from which its process builds the rest."""

    model: GPTConfig
    train: TrainConfig
    data: DataConfig
    rows: tuple  # (text ids, codes) of each row
    hw: Hardware
    threads: int  # for PyTorch
    finetuning: Finetuning = FULL  # what trains


def preset_task(preset: dict, hw: Hardware, threads: int, rows: tuple = ()) -> Task:
    """A preset's model and settings on `rows`.

    Without rows: their lengths go up to a quarter of what the model has positions for.
    """
    model = build(GPTConfig, preset["model"])
    train = build(TrainConfig, preset["train"])
    data = build(DataConfig, preset["data"])
    rows = rows or some_rows((8, model.max_text // 4), (16, model.max_code // 4))
    return Task(model=model, train=train, data=data, rows=rows, hw=hw, threads=threads)


def variants(task: Task, config: TrialConfig) -> list[Trial]:
    """The baseline, each switch alone, and each for speed beside those before it.

    Each that saves memory is beside all of these, so that no other pays for its time. EMA comes
    last: it is not chosen here.
    """
    offered = switches.switches(SpeedConfig(), task.hw, task.model)
    refused = dict.fromkeys(config.leave_out, LEFT_OUT)
    refused |= {s.name: s.reason for s in offered if not s.available}
    listed = [("alone", (name,)) for name in (*LADDER, *SAVINGS)]
    ladder = tuple(name for name in LADDER if name not in refused)
    listed += [("added", ladder[:count]) for count in range(2, len(ladder) + 1)]
    listed += [("added", (*ladder, name)) for name in SAVINGS if ladder and name not in refused]
    listed += [("cost", COSTS[:count]) for count in (1, 2)]
    trials = [Trial(kind="baseline", label="Baseline")]
    for kind, on in listed:
        label = f"+ {LABELS[on[-1]]}" if kind == "added" else LABELS[on[-1]]
        trials.append(Trial(kind=kind, label=label, on=on, reason=refused.get(on[-1], "")))
    return trials


def some_rows(text: tuple[int, int], codes: tuple[int, int], count: int = 256) -> tuple:
    """`count` rows of (text ids, codes), each drawn evenly from its (least, most)."""
    rng = np.random.default_rng(0)
    columns = (rng.integers(low, high + 1, count).tolist() for low, high in (text, codes))
    return tuple(zip(*columns))


def make_batches(task: Task, few_shapes: bool = False) -> Iterator[EffectiveBatch]:
    """Endless batches with the task's row lengths; the codes wander, so there is much to learn.

    For `few_shapes` rows are padded to a few fixed lengths, as 02_train pads them.
    """
    return (collate(task.model, parts, {}) for parts in draw_rows(task, few_shapes))


def draw_rows(task: Task, few_shapes: bool) -> Iterator[list[tuple]]:
    """What `collate` makes batches of, as CodeStream reads it from the code cache."""
    model = task.model
    data = dataclasses.replace(task.data, short_first=0.0)
    totals = [text + codes + batching.EXTRA_TOKENS for text, codes in task.rows]
    if few_shapes and not data.grid_lengths:
        lengths = batching.padding_lengths(np.bincount(totals))
        data = dataclasses.replace(data, grid_lengths=lengths)
    rng = np.random.default_rng(task.train.seed)
    for epoch in itertools.count():
        for batch in batching.plan_batches(totals, data, epoch):
            # Drawn together, so that they do not depend on how the batch is split.
            texts = [rng.integers(0, model.text_vocab - 2, task.rows[i][0]) for i in batch]
            walks = [rng.integers(-2, 3, task.rows[i][1]).cumsum() for i in batch]
            codes = [walk % model.start_code for walk in walks]
            shape = (len(batch), model.n_mels, data.reference_frames)
            references = torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))
            parts = []
            first = 0
            for rows in batching.chunks(batch, data.micro_batch):
                length = batching.padded(max(totals[i] for i in rows), data)
                part = slice(first, first + len(rows))
                parts.append((texts[part], codes[part], references[part], length))
                first += len(rows)
            yield parts


def run_variant(task: Task, config: TrialConfig, on: Sequence[str]) -> dict:
    """Train with the switches `on`; return the figures of the steps after the warm-up.

    Peak memory is that of the allocator on a GPU. On a CPU it is the process's own resident
    memory over what it held before the model was made.
    """
    torch.set_num_threads(task.threads)
    before_bytes = hardware.reset_peak_memory(task.hw.device)
    torch.manual_seed(task.train.seed)
    with torch.device(task.hw.device):  # drawn there: seconds less at 441 million weights
        model = SpeechGPT(task.model)
    # The run's settings for a few steps that do learn, with no validation in between.
    total = config.warmup_steps + config.steps
    settings = dataclasses.replace(
        task.train,
        max_steps=total + 1,
        num_train_epochs=0.0,
        eval_steps=total + 1,
        warmup_steps=min(task.train.warmup_steps, config.warmup_steps),
    )
    speed = SpeedConfig(**dict.fromkeys(on, True))
    trainer = Trainer(model, settings, speed, task.hw, task.finetuning)
    precision = trainer.applied.precision
    few_shapes = switches.wants_few_shapes(task.hw.device, precision, trainer.applied.names)
    # Drawing random rows is no part of training: they are there before the first step. They repeat,
    # so that code compiled for a shape belongs to the warm-up.
    rows = list(itertools.islice(draw_rows(task, few_shapes), config.steps))
    repeated = itertools.islice(itertools.cycle(rows), total)
    made = (collate(task.model, parts, {}) for parts in repeated)
    batches = switches.prefetch_if_on(made, trainer.applied)
    events = []
    began_s = time.perf_counter()
    for event in itertools.islice(train(trainer, batches), total):
        events.append(event)
        if event.step == config.warmup_steps:
            warmup_s = time.perf_counter() - began_s
            compiled = trainer.compilations
    failed = {"compile", "cuda_graphs"}.intersection(on).difference(trainer.applied.names)
    if failed:  # its figures are another variant's
        return {"error": "; ".join(event.note for event in events if event.note)}
    timed = events[config.warmup_steps :]
    last = timed[-max(1, len(timed) // 4) :]
    notes = [*trainer.applied.notes, *(event.note for event in events if event.note)]
    return {
        "seconds": sum(event.step_s for event in timed),
        "tokens": sum(event.tokens for event in timed),
        "steps": len(timed),
        "loss": sum(event.loss for event in last) / len(last),
        "skipped": sum(not math.isfinite(event.grad_norm) for event in events),
        "warmup_s": warmup_s,
        "peak_memory_bytes": hardware.memory_used(task.hw.device, before_bytes)["memory_bytes"],
        "recompilations": trainer.compilations - compiled,
        "precision": precision,
        "attention": trainer.applied.ran("sdpa"),
        "notes": list(dict.fromkeys(notes)),
    }


def measure_variant(task: Task, config: TrialConfig, on: tuple) -> dict:
    """`run_variant` in a fresh process; {"error": reason} where it fails or dies."""
    # An optimizer imports torch._dynamo: over a second, and memory that is not the variant's.
    try:
        preload = (__name__, "torch._dynamo")
        return run_in_process(_child, task, config, on, preload=preload)
    except KitError as error:
        return {"error": str(error)}


def _child(task: Task, config: TrialConfig, on: tuple) -> dict:
    try:
        return run_variant(task, config, on)
    except Exception as error:  # the parent makes a row of it
        first = str(error).strip().split("\n")[0][:200]
        return {"error": f"{type(error).__name__}: {first}"}


def run_trials(
    task: Task,
    config: TrialConfig,
    folder: Path,
    wanted: Sequence[Trial],
    tick: Callable[[int, int, str], None] = lambda *_: None,
    rounds: int = 0,  # 0: as `config` says
) -> list[Trial]:
    """Measure the variants, round by round, and return a row for each, in order.

    Each result is a file in `folder`, and is not measured again; more `rounds` add to them.
    `tick(done, total, label)` shows progress.
    """
    trained = dataclasses.asdict(task)
    for name in ("boards", "gate_epochs"):  # they change no measurement
        del trained["train"][name]
    measured = (config.steps, config.warmup_steps, hardware.versions(), STEP_INCLUDES)
    results = {}
    possible = [v for v in wanted if not v.reason]
    jobs = [(number, v) for number in range(rounds or config.rounds) for v in possible]
    for done, (number, variant) in enumerate(jobs):
        tick(done, len(jobs), variant.label)
        earlier = results.setdefault(variant.on, [])
        if len(earlier) > number or any("error" in result for result in earlier):
            continue  # another variant is the same set; a failure is not tried again
        key = digest(trained, *measured, variant.on, number)
        measure = functools.partial(measure_variant, task, config, variant.on)
        earlier.append(cached_result(Path(folder) / f"{key}.json", key, measure))
    tick(len(jobs), len(jobs), "")
    return compare(wanted, results, task.model.dropout)


def flops_used(task: Task, tokens_per_s: float) -> float | None:
    """The share of the device's fastest matmul that training uses (MFU); None: it is not here."""
    before = torch.get_num_threads()
    torch.set_num_threads(task.threads)
    fastest_ms = min(hardware.matmul_ms(task.hw).values(), default=0.0)
    torch.set_num_threads(before)
    if not fastest_ms:
        return None
    peak_flop_per_s = 2e3 * math.prod(MATMUL_SHAPES[task.hw.device]) / fastest_ms
    length = statistics.fmean(map(sum, task.rows))
    return tokens_per_s * token_flop(task.model, length) / peak_flop_per_s
