"""Parts of the GPU check on the speed of training, at XTTS-v2's size (30 x 1024).

Each is a generator of rows, so that what was measured before a failure is kept.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from gpu_setting import (
    Setting,
    covered_us,
    limit_row,
    new_state,
    note_row,
    product_flops_per_s,
    relative_difference,
    some_batches,
    spread,
    wait_for_device,
)
from rows import result
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from kit.base.hardware import release_memory, reset_peak_memory, silence_profiler
from kit.model.gpt import HEAD_ROWS, SpeechGPT
from kit.model.sequence import EffectiveBatch, pack
from kit.notebook.plots import GIB
from kit.training.config import StepEvent
from kit.training.logs import read_log
from kit.training.loop import train
from kit.training.passes import FIRST_RECORDING
from kit.training.switches import pin
from kit.training.trainer import Trainer
from kit.tuning.measure import Task

ROOT = Path(__file__).resolve().parent.parent.parent
WARM = FIRST_RECORDING + 3  # steps before those that are timed, where passes are recorded
RUN_S = 70  # of a real run, of which its start takes 30 to 40
# A folder of runs with one that is called gpu, which `make gpu-run` prepares.
PREPARED = Path(os.environ.get("KIT_GPU_RUNS", ROOT / "runs" / "gpu-session"))
LOSS_TOLERANCE = 0.02
BEST = {"sdpa": True, "fused_adamw": True, "ema": True}
PASSES = {
    "eager": {},
    "CUDA graph": {"cuda_graphs": True},
    "compiled": {"compile": True},
    "compiled, CUDA graph": {"compile": True, "cuda_graphs": True},
}
# Which kernels belong together, by a part of their names; the first that fits.
KINDS = {
    "attention": ("flash", "fmha", "attention", "softmax"),
    "matmul": ("gemm", "nvjet", "cutlass", "xmma", "gemv", "splitk"),
    "update": ("multi_tensor", "adam", "lpnorm", "lerp"),
    "norm": ("layer_norm", "group_norm", "gammabeta", "rms_norm"),
    "cast or copy": ("copy", "memcpy", "memset", "fill", "catarray"),
    "compiled": ("triton",),
}


def eight_or_32(setting: Setting) -> tuple[int, int]:
    return (2, 4) if setting.pretended else (8, 32)


def fixed_task(setting: Setting, rows: int, effective: int) -> Task:
    """Passes of `rows` rows, each of 100 text ids and 400 codes: all passes have one shape."""
    length = (10, 20) if setting.pretended else (100, 400)
    task = setting.task(setting.xtts, rows)
    data = dataclasses.replace(task.data, effective_batch=effective)
    return dataclasses.replace(task, data=data, rows=(length,) * 4 * effective)


def ready_batches(task: Task, setting: Setting) -> list[EffectiveBatch]:
    """Four batches, in page-locked memory where there is a GPU."""
    batches = some_batches(task, 4)
    return batches if setting.pretended else [pin(batch) for batch in batches]


@functools.cache
def flops_a_step(task: Task) -> float:
    """Floating-point operations that the model needs for a step of rows of mean length."""
    text, codes = (round(statistics.fmean(lengths)) for lengths in zip(*task.rows))
    with torch.device("meta"):  # PyTorch counts without computing
        model = SpeechGPT(task.model)
    cond = torch.randn(HEAD_ROWS, task.model.n_mels, task.data.reference_frames)
    texts = [[1] * text] * HEAD_ROWS
    batch = pack(task.model, texts, [[1] * codes] * HEAD_ROWS, cond).to("meta")
    with FlopCounterMode(display=False) as counter:
        sum(model(batch)).backward()
    return counter.get_total_flops() / HEAD_ROWS * task.data.effective_batch


# --- where a step's time goes -----------------------------------------------------------------


def kernel_rows(setting: Setting) -> Iterator[dict]:
    """The kernels of a plain step of 8 and of 32 rows, by kind and the longest by name."""
    silence_profiler()
    for rows in eight_or_32(setting):
        task = fixed_task(setting, rows, rows)
        state = new_state(task, setting.precision, **BEST)
        events = train(state, itertools.cycle(ready_batches(task, setting)))
        list(itertools.islice(events, 3))
        steps = 2
        figures = profiled(lambda: list(itertools.islice(events, steps)), setting)  # noqa: B023
        yield from profile_rows(f"a plain step of {rows} rows", figures, steps)
        events.close()
        release_memory(setting.hw.device)


def profiled(work: Callable[[], object], setting: Setting) -> dict:
    """Wall seconds of `work`, seconds in which the device was busy, and its kernels by name."""
    wait_for_device(setting.hw.device)
    activity = ProfilerActivity.CPU if setting.pretended else ProfilerActivity.CUDA
    with profile(activities=[activity], acc_events=True) as record:
        started_s = time.perf_counter()
        work()
        wait_for_device(setting.hw.device)
        wall_s = time.perf_counter() - started_s
    wanted = DeviceType.CPU if setting.pretended else DeviceType.CUDA
    kernels = [event for event in record.events() if event.device_type == wanted]
    spans = sorted((event.time_range.start, event.time_range.end) for event in kernels)
    by_name = defaultdict(lambda: [0, 0.0])  # calls, milliseconds
    for event in kernels:
        by_name[event.name][0] += 1
        by_name[event.name][1] += event.time_range.elapsed_us() / 1000
    return {"wall_s": wall_s, "busy_s": covered_us(spans) / 1e6, "kernels": dict(by_name)}


def profile_rows(what: str, figures: dict, times: int) -> Iterator[dict]:
    """Rows of a profile of `what`, done so many `times`."""
    busy_ms = 1000 * figures["busy_s"] / times
    wall_ms = 1000 * figures["wall_s"] / times
    longest = sorted(figures["kernels"].items(), key=lambda item: -item[1][1])[:20]
    more = {"kernels": {name[:100]: (n / times, ms / times) for name, (n, ms) in longest}}
    count = sum(calls for calls, _ in figures["kernels"].values()) / times
    row = f"{what}: the GPU is busy, of {count:,.0f} kernels"
    yield result(row, busy_ms, "ms", "wall", wall_ms, busy_ms / wall_ms, status="ok", **more)
    kinds = dict.fromkeys((*KINDS, "other"), 0.0)
    for name, (_, ms) in figures["kernels"].items():
        kinds[kind_of(name)] += ms / times
    for kind, ms in kinds.items():
        yield result(f"{what}: {kind}", ms, "ms", status="ok")


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(p in name for p in parts)), "other")


# --- whole passes -------------------------------------------------------------------------------


def pass_rows(setting: Setting) -> Iterator[dict]:
    """A step whose passes are eager, recorded as a CUDA graph, compiled, or both."""
    eight, many = eight_or_32(setting)
    curves = {}
    for name in ("eager",) if setting.pretended else PASSES:
        for rows in (eight, many):
            task = fixed_task(setting, rows, rows)
            row = f"a step of {rows} rows, {setting.precision}: {name}"
            yield from step_rows(row, task, BEST | PASSES[name], setting, curves, rows)
    task = fixed_task(setting, eight, eight)
    row = f"a step of {eight} rows: fp32, explicit softmax, torch's default AdamW"
    yield from step_rows(row, task, {}, setting, precision="fp32")


def switch_rows(setting: Setting) -> Iterator[dict]:
    """Sets of switches at an effective batch of 32 in passes of 8: speed, memory, loss."""
    eight, many = eight_or_32(setting)
    task = fixed_task(setting, eight, many)
    half = setting.precision
    fast = {} if setting.pretended else PASSES["compiled, CUDA graph"]
    small = {"sdpa": True, "gradient_checkpointing": True, "fused_adamw": True}
    sets = {
        "fp32, nothing on": ("fp32", {}),
        "TF32": ("fp32", {"tf32": True}),
        f"{half}": (half, {"sdpa": True}),
        f"{half}, fused AdamW": (half, {"sdpa": True, "fused_adamw": True}),
        f"{half}, fused AdamW, EMA": (half, BEST),
        f"{half}, fused AdamW, EMA, compiled, CUDA graph": (half, BEST | fast),
        f"{half}, every second layer recomputed": (half, small | {"recompute_every": 2}),
        f"{half}, every layer recomputed": (half, small),
        f"{half}, 8-bit AdamW": (half, {"sdpa": True, "adamw_8bit": True}),
    }
    curves = {}
    for name, (precision, switches) in sets.items():
        row = f"{many} rows in passes of {eight}: {name}"
        yield from step_rows(row, task, switches, setting, curves, precision=precision, steps=3)


def step_rows(
    row: str,
    task: Task,
    switches: dict,
    setting: Setting,
    curves: dict | None = None,
    size: int = 0,
    precision: str = "",
    steps: int = 8,
) -> Iterator[dict]:
    """A step with `switches`, its memory, and its losses beside the first ones of its `size`."""
    precision = precision or setting.precision
    release_memory(setting.hw.device)
    reset_peak_memory(setting.hw.device)
    try:
        state = new_state(task, precision, **switches)
        events, figures = timed_steps(state, task, setting, steps)
    except (RuntimeError, ValueError) as error:
        yield note_row(row, str(error).strip().splitlines()[0][:300], "failed")
        return
    asked = {name for name, value in switches.items() if value is True}
    lacking = asked - {*state.applied.names} and not setting.pretended
    figures["status"] = "off" if lacking else "ok"
    yield result(row, 1000 * figures["step_s"], "ms", **figures)
    if not setting.pretended:
        yield result(f"{row}: allocated", torch.cuda.max_memory_allocated() / GIB, "GiB")
        yield result(f"{row}: reserved", torch.cuda.max_memory_reserved() / GIB, "GiB")
    curve = [event.loss for event in events]
    expected = (curves or {}).setdefault(size, curve)
    if expected is not curve:
        difference = relative_difference(curve, expected)
        yield limit_row(f"{row}: difference of the losses", difference, "share", LOSS_TOLERANCE)


def timed_steps(
    state: Trainer, task: Task, setting: Setting, steps: int
) -> tuple[list[StepEvent], dict]:
    """The events of a warm-up and of `steps` after it, and the figures of those."""
    started_s = time.perf_counter()
    training = train(state, itertools.cycle(ready_batches(task, setting)))
    warm = list(itertools.islice(training, WARM if state.graphs else 3))
    warm_s = time.perf_counter() - started_s
    timed = list(itertools.islice(training, steps))
    training.close()
    taken_s = [event.step_s for event in timed]
    step_s = statistics.fmean(taken_s)
    figures = {
        "step_s": step_s,
        "tokens_per_s": statistics.fmean(event.tokens for event in timed) / step_s,
        "mfu": flops_a_step(task) / step_s / peak_flops(setting),
        "spread": spread(taken_s),
        "warm_s": warm_s,
        "waits_s": statistics.fmean(event.sync_s for event in timed),
        "notes": [event.note for event in [*warm, *timed] if event.note],
        "ran": ", ".join(state.applied.names),
    }
    return [*warm, *timed][: 3 + steps], figures


@functools.cache
def peak_flops(setting: Setting) -> float:
    """Operations a second of a large product in half precision: what MFU is a share of."""
    return product_flops_per_s(setting.precision, setting)


# --- a real run ---------------------------------------------------------------------------------


def run_rows(setting: Setting) -> Iterator[dict]:
    """A run that `make gpu-run` prepared, as its preset sets it, and with passes as CUDA graphs."""
    if not PREPARED.is_dir():
        yield note_row("a real run", "no run was prepared by `make gpu-run`")
        return
    yield from one_run("a real run")
    yield from one_run("a real run, CUDA graphs", "--set", "speed.cuda_graphs=true")


def one_run(name: str, *settings: str) -> Iterator[dict]:
    """`python -m kit train` with these `settings`: when it starts, its loss, speed and load."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(PREPARED, folder, dirs_exist_ok=True)
        environment = os.environ | {"KIT_RUNS": folder, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "kit", "train", "--run", "gpu", *settings]
        with open(Path(folder) / "output", "w+", encoding="utf-8") as output:
            started_s = time.time()
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(RUN_S)
            process.send_signal(signal.SIGINT)  # it stops with a checkpoint
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            output.seek(0)
            last_lines = output.read().splitlines()[-5:]
        log = read_log(Path(folder) / "gpu" / "train.jsonl")
    if log:
        waited_s = log[0]["unix_s"] - started_s
        yield result(f"{name}: from the command to the first step", waited_s, "s")
    yield from log_rows(name, log, last_lines)


def log_rows(name: str, log: list[dict], last_lines: list[str]) -> Iterator[dict]:
    if len(log) < 20:
        yield note_row(name, f"{len(log)} steps; it printed: {last_lines}", "failed")
        return
    curve = {row["step"]: round(row["loss"], 4) for row in log[:: max(1, len(log) // 40)]}
    validations = {row["step"]: row["val_loss"] for row in log if row.get("val_loss") is not None}
    first, last = (statistics.fmean(r["loss"] for r in part) for part in (log[:10], log[-10:]))
    more = {"status": "ok" if last < first else "off", "curve": curve, "validations": validations}
    notes = [f"step {row['step']}: {row['note']}" for row in log if row["note"]]
    more |= {"notes": notes[:10], "printed": last_lines}
    yield result(f"{name}: loss after {len(log)} steps", last, "nats", "first", first, **more)
    half = log[len(log) // 2 :]
    tokens_per_s = sum(r["tokens"] for r in half) / sum(r["step_s"] for r in half)
    yield result(f"{name}: speed", tokens_per_s, "tokens/s", status="ok")
    loads = [row["load"] for row in half if row.get("load") is not None]
    if loads:
        yield result(f"{name}: load of the device", statistics.fmean(loads), "share")
