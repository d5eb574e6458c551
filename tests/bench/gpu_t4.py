"""Part of the GPU check: the `t4` preset's model, trained as a T4 would run it, on this GPU.

fp16 with loss scaling, no flash and no cuDNN attention, 14.6 GB of memory, batches from the real
stream made ahead and pinned; beside it the same run in bf16 with every kernel. It shows a T4's
numerics, kernels and memory, not its speed.
"""

import dataclasses
import itertools
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from gpu_setting import Setting, limit_row, new_state
from gpu_training import profiled
from rows import result

from kit.base.config import build, load_preset
from kit.base.hardware import reset_peak_memory, silence_profiler
from kit.batches.code_cache import CodeCache
from kit.batches.code_stream import CodeStream
from kit.model.sequence import collate
from kit.notebook.plots import GIB
from kit.settings import DataConfig, GPTConfig, TrainConfig
from kit.training.config import StepEvent
from kit.training.loop import train
from kit.training.switches import pin, prefetched
from kit.tuning.measure import Task

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from made_index import made_index

T4_BYTES = int(14.6 * 1e9)
STEPS, PROFILED = 25, 4
TEXT_VOCAB, CODE_VOCAB = 2000, 1602  # of the preset's tokenizer and codec


def t4_rows(setting: Setting) -> Iterator[dict]:
    silence_profiler()
    with tempfile.TemporaryDirectory() as folder:
        rows = 600 if setting.pretended else 4000
        cache = CodeCache(made_index(Path(folder), rows, text_vocab=TEXT_VOCAB))
        curves = {}
        for name, precision in (("as a T4, fp16", "fp16"), ("bf16, every kernel", "bf16")):
            as_t4 = precision == "fp16"
            if not setting.pretended:
                torch.backends.cuda.enable_flash_sdp(not as_t4)
                limit = T4_BYTES if as_t4 else setting.hw.memory_bytes
                torch.cuda.set_per_process_memory_fraction(limit / setting.hw.memory_bytes)
            events, more = run(cache, precision, setting)
            curves[name] = [event.loss for event in events]
            yield from run_rows(name, events, more, setting)
        fp16, bf16 = (statistics.fmean(curve[-8:]) for curve in curves.values())
        row = "t4 preset: mean loss of the last 8 steps, fp16 beside bf16, difference"
        yield limit_row(row, abs(fp16 / bf16 - 1), "share", 0.02, curves=curves)


def run(cache: CodeCache, precision: str, setting: Setting) -> tuple[list[StepEvent], dict]:
    """The events of a run, and its scale, kernels and how busy the device was."""
    preset = load_preset("t4")
    sizes = {"text_vocab": TEXT_VOCAB, "code_vocab": CODE_VOCAB, "max_code": 608}
    if setting.pretended:
        sizes |= {"layers": 2, "width": 64, "heads": 4}
    task = Task(
        model=build(GPTConfig, preset["model"], **sizes),
        train=endless(build(TrainConfig, preset["train"])),
        data=build(DataConfig, preset["data"], short_first=0.0),
        rows=(),
        hw=setting.hw,
        threads=torch.get_num_threads(),
    )
    state = new_state(task, precision, sdpa=True, fused_adamw=True, ema=True)
    batches = CodeStream(cache, "train", task.data, partial(collate, task.model))
    batches = iter(batches) if setting.pretended else prefetched(map(pin, batches))
    steps = setting.steps if setting.pretended else STEPS
    reset_peak_memory(setting.hw.device)
    training = train(state, batches)
    events = list(itertools.islice(training, steps))
    more = {"scale": state.scaler.get_scale()}
    if not setting.pretended:
        more["peak_bytes"] = torch.cuda.max_memory_reserved()
        figures = profiled(lambda: list(itertools.islice(training, PROFILED)), setting)
        more["busy"] = figures["busy_s"] / figures["wall_s"]
        longest = sorted(figures["kernels"].items(), key=lambda item: -item[1][1])[:12]
        more["kernels"] = {name[:80]: ms / PROFILED for name, (_, ms) in longest}
    training.close()
    return events, more


def endless(config: TrainConfig) -> TrainConfig:
    """The preset's training without validation or gate, its rate reached after a few steps."""
    never = {"max_steps": 10**6, "eval_steps": 10**6, "save_steps": 10**6}
    return dataclasses.replace(config, **never, gate_every=0, gate_patience=0, warmup_steps=20)


def run_rows(name: str, events: list[StepEvent], more: dict, setting: Setting) -> Iterator[dict]:
    row = f"t4 preset, {name}"
    skipped = sum(not math.isfinite(event.grad_norm) for event in events)
    yield limit_row(f"{row}: steps skipped of {len(events)}", skipped, "steps", 10, **more)
    first = statistics.fmean(event.loss for event in events[:5])
    last = statistics.fmean(event.loss for event in events[-5:])
    status = "ok" if math.isfinite(last) and last < first else "off"
    yield result(f"{row}: loss", last, "nats", "first steps", first, None, status=status)
    median_ms = 1000 * statistics.median(event.step_s for event in events[len(events) // 2 :])
    first_ms = 1000 * events[0].step_s
    yield result(f"{row}: median step", median_ms, "ms", "first step", first_ms, None, status="ok")
    if setting.pretended:
        return
    peak = more["peak_bytes"] / GIB
    yield limit_row(f"{row}: peak memory, reserved", peak, "GiB", T4_BYTES / GIB)
    busy, row = more["busy"], f"{row}: share of a step the GPU is busy"
    status = "ok" if busy >= 0.9 else "off"
    yield result(row, busy, "share", "aim", 0.9, busy / 0.9, status=status)
