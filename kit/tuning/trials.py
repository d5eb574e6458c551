"""Measure which switches pay off on this device: none, each alone, cumulatively, and all.

Every variant trains on the same batches from the same seed in its own process, so its peak memory
is its own, and one that runs out of memory or crashes is a row with its reason. Rounds are
interleaved, so that a noisy machine affects all variants alike, and the median round counts. Each
result is one line of a file, so an interrupted benchmark resumes. recommend.py compares them.
"""

import dataclasses
import functools
import itertools
import json
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import torch
from torch.autograd.profiler import profile

from kit.base import hardware
from kit.base.config import build, load_preset, merge
from kit.base.errors import KitError
from kit.base.files import append_lines, digest, disk_errors, make_folder
from kit.base.hardware import ATTENTION_KERNELS, MATMUL_SHAPES, Hardware, silence_profiler
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
from kit.tuning.checks import step_shares
from kit.tuning.recommend import LEFT_OUT, Trial, compare

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


def step_seconds(preset: dict, hw: Hardware, threads: int) -> float:
    """Seconds of a training step of `preset` here, on rows of usual length: the mean of three.

    In this process, with the preset's switches but those that begin slowly.
    """
    model = build(GPTConfig, preset["model"])
    usual = some_rows((8, model.max_text // 6), (16, model.max_code // 6))
    slow = ("compile", "cuda_graphs")
    on = [name for name, value in preset["speed"].items() if value is True and name not in slow]
    task = preset_task(preset, hw, threads, usual)
    figures = run_variant(task, TrialConfig(steps=3, warmup_steps=3), on)
    return figures["seconds"] / figures["steps"]


def published_task(hw: Hardware, threads: int) -> Task:
    """The released XTTS-v2's size on the rows of the published tables."""
    eight = {"effective_batch": 8, "micro_batch": 8, "effective_tokens": 0}
    preset = merge(load_preset("xtts_v2"), {"data": eight})
    return preset_task(preset, hw, threads, some_rows((60, 200), (200, 600)))


def variants(task: Task, config: TrialConfig) -> list[Trial]:
    """The baseline, each switch alone, and each for speed beside those before it.

    Each that saves memory is beside all of these, so that no other pays for its time. Then EMA and
    the attention kernels, among which nothing is chosen.
    """
    offered = switches.switches(SpeedConfig(), task.hw, task.model)
    refused = dict.fromkeys(config.leave_out, LEFT_OUT)
    refused |= {s.name: s.reason for s in offered if not s.available}
    listed = [Trial(kind="baseline", label="Baseline")]

    def add(kind: str, name: str, on: tuple) -> None:
        reason = refused.get(name, "")
        listed.append(Trial(kind=kind, label=LABELS[name], on=on, reason=reason))

    for name in (*LADDER, *SAVINGS):
        add("alone", name, (name,))
    ladder = tuple(name for name in LADDER if name not in refused)
    rungs = [ladder[:count] for count in range(2, len(ladder) + 1)]
    rungs += [(*ladder, name) for name in SAVINGS if ladder and name not in refused]
    for on in rungs:
        listed.append(Trial(kind="added", label=f"+ {LABELS[on[-1]]}", on=on))
    for count, name in enumerate(COSTS, 1):
        add("cost", name, COSTS[:count])
    return listed + attention_variants(task, refused)


def attention_variants(task: Task, refused: dict[str, str]) -> list[Trial]:
    """Attention written out, and each kernel of SDPA by itself; on a GPU in half precision."""
    model = task.model
    half = task.hw.device == "cuda" and "mixed_precision" not in refused
    on = ("mixed_precision",) if half else ()
    precision = hardware.choose_precision(task.hw).value if half else "fp32"
    listed = [Trial(kind="extra", label="Attention: explicit", on=on)]
    shape = (model.width // model.heads, model.heads, model.dropout)
    for name in ATTENTION_KERNELS:
        reason = refused.get("sdpa") or hardware.why_no_kernel(name, task.hw, precision, *shape)
        chosen = (*on, "sdpa", f"attention_kernel={name}")
        listed.append(Trial(kind="extra", label=f"Attention: {name}", on=chosen, reason=reason))
    return listed


def speed_of(on: Sequence[str]) -> SpeedConfig:
    """Switches from names of those that are on, and settings such as "recompute_every=2"."""
    values = {}
    for entry in on:
        name, equals, value = entry.partition("=")
        if not equals:
            values[name] = True
        else:
            values[name] = int(value) if value.isdigit() else value
    return SpeedConfig(**values)


def some_rows(text: tuple[int, int], codes: tuple[int, int], count: int = 256) -> tuple:
    """`count` rows of (text ids, codes), each drawn evenly from its (least, most)."""
    rng = np.random.default_rng(0)
    columns = (rng.integers(low, high + 1, count).tolist() for low, high in (text, codes))
    return tuple(zip(*columns))


def make_batches(task: Task, few_shapes: bool = False) -> Iterator[EffectiveBatch]:
    """Endless batches with the task's row lengths; the codes wander, so there is much to learn.

    For `few_shapes` rows are padded to a few fixed lengths, as 02_train pads them.
    """
    return (make_batch(task.model, parts) for parts in draw_rows(task, few_shapes))


def make_batch(model: GPTConfig, parts: list[tuple]) -> EffectiveBatch:
    """Collate rows from `draw_rows`: the work that CodeStream does on the rows it has read."""
    micro = [
        (texts, codes, torch.from_numpy(references), length)
        for texts, codes, references, length in parts
    ]
    return collate(model, micro, {})


def draw_rows(task: Task, few_shapes: bool = False) -> Iterator[list[tuple]]:
    """Of each micro-batch of `make_batches`: text ids, codes, references, padded length.

    They are arrays, as rows of the code cache are.
    """
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
            references = rng.standard_normal(shape, dtype=np.float32)
            parts = []
            first = 0
            for rows in batching.micro_batches(batch, totals, data):
                length = batching.padded(max(totals[i] for i in rows), data)
                part = slice(first, first + len(rows))
                parts.append((texts[part], codes[part], references[part], length))
                first += len(rows)
            yield parts


def run_variant(task: Task, config: TrialConfig, on: Sequence[str]) -> dict:
    """Train with `on`, as `speed_of` reads it; returns the figures of the steps after the warm-up.

    Peak memory is that of the allocator on a GPU. On a CPU it is the process's own resident
    memory over what it held before the model was made.
    """
    torch.set_num_threads(task.threads)
    idle_bytes = psutil.Process().memory_info().rss if task.hw.device == "cpu" else 0
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
    trainer = Trainer(model, settings, speed_of(on), task.hw, task.finetuning.without_phases())
    precision = trainer.applied.precision
    few_shapes = switches.wants_few_shapes(task.hw.device, precision, trainer.applied.names)
    # Drawing random rows is no part of training: they are there before the first step. They repeat,
    # so that code compiled for a shape belongs to the warm-up.
    rows = list(itertools.islice(draw_rows(task, few_shapes), config.steps))
    repeated = itertools.islice(itertools.cycle(rows), total)
    made = (make_batch(task.model, r) for r in repeated)
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
    peak_bytes = hardware.peak_memory_bytes(task.hw.device)
    return {
        "seconds": sum(event.step_s for event in timed),
        "shares": step_shares([dataclasses.asdict(event) for event in timed], skipped=0),
        "tokens": sum(event.tokens for event in timed),
        "steps": len(timed),
        "loss": sum(event.loss for event in last) / len(last),
        "skipped": sum(not math.isfinite(event.grad_norm) for event in events),
        "warmup_s": warmup_s,
        "peak_memory_bytes": peak_bytes - idle_bytes,
        "compilations": compiled,
        "recompilations": trainer.compilations - compiled,
        "precision": precision,
        "attention": profile_attention(trainer),
        "notes": list(dict.fromkeys(notes)),
    }


def profile_attention(trainer: Trainer) -> str:
    """Run a layer's attention under the profiler; returns the name of the kernel that ran."""
    device = trainer.hw.device
    x = torch.randn(1, 128, trainer.model.config.width, device=device)
    silence_profiler()
    with hardware.autocast(device, trainer.applied.precision), profile() as record:
        trainer.model.gpt.h[0].attn(x)
    names = " ".join(event.name for event in record.function_events)
    kernel = re.search(r"_scaled_dot_product_(?:attention_)?(flash|efficient|cudnn|math)", names)
    return kernel[1] if kernel else switches.BASELINE["sdpa"]


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
) -> list[Trial]:
    """Measure the variants, round by round, and return a row for each, in order.

    The results of a task and number of steps are in one file under `folder`. What it holds is not
    measured again, and more `rounds` add to it. `tick(done, total, label)` shows progress.
    """
    trained = dataclasses.asdict(task)
    for name in ("boards", "gate_epochs"):  # they change no measurement
        del trained["train"][name]
    measured = (config.steps, config.warmup_steps, hardware.versions(), STEP_INCLUDES)
    path = Path(folder) / f"{digest(trained, *measured)}.jsonl"
    results = read_results(path)
    possible = [v for v in wanted if not v.reason]
    jobs = [(number, variant) for number in range(config.rounds) for variant in possible]
    for done, (number, variant) in enumerate(jobs):
        tick(done, len(jobs), variant.label)
        earlier = [r for r in results if tuple(r["on"]) == variant.on]
        if len(earlier) <= number and not any("error" in r for r in earlier):
            result = {"on": list(variant.on)} | measure_variant(task, config, variant.on)
            append_result(path, result)
            results.append(result)
    tick(len(jobs), len(jobs), "")
    return compare(wanted, results, task.model.dropout, peak_tokens_per_s(task))


@functools.cache
def peak_flops(hw: Hardware, threads: int) -> float:
    """Operations a second of the fastest precision's matmul, measured; inf if `hw` is not here."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    fastest_ms = min(hardware.matmul_ms(hw).values(), default=0.0)
    torch.set_num_threads(before)
    return 2e3 * math.prod(MATMUL_SHAPES[hw.device]) / fastest_ms if fastest_ms else math.inf


def peak_tokens_per_s(task: Task) -> float:
    """Tokens a second if the device did nothing but this model's matmuls."""
    length = statistics.fmean(map(sum, task.rows))
    return peak_flops(task.hw, task.threads) / token_flop(task.model, length)


def read_results(path: Path) -> list[dict]:
    """The lines of a results file; one that is damaged or cut short by a kill is passed over."""
    rows = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
            continue
        if isinstance(row, dict) and isinstance(row.get("on"), list):
            rows.append(row)
    return rows


def append_result(path: Path, result: dict) -> None:
    """Add one line to a results file, on disk when this returns."""
    make_folder(path.parent)
    with disk_errors(path), append_lines(path) as file:
        file.write(json.dumps(result).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
