"""Parts of the GPU check that compare: kernels, numbers, memory, recovery, resuming.

Each is a generator of rows, so that what was measured before a failure is kept.
"""

import contextlib
import dataclasses
import itertools
import math
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
    product_flops_per_s,
    read_bytes_per_s,
    relative_difference,
    seconds,
    some_batches,
    train_losses,
    train_steps,
)
from rows import result
from torch.profiler import ProfilerActivity, profile

from kit.base import compiler
from kit.base.config import build, load_preset
from kit.base.hardware import (
    attention_backend,
    autocast,
    choose_precision,
    release_memory,
    reset_peak_memory,
    silence_profiler,
)
from kit.model.gpt import Attention
from kit.notebook.plots import GIB
from kit.settings import (
    DataConfig,
    GPTConfig,
    SpeedConfig,
    TrainConfig,
)
from kit.training import checkpoint
from kit.training.trainer import Trainer
from kit.tuning.measure import Task, make_batches
from kit.tuning.memory_plan import Workload
from kit.tuning.preflight import trial_peak

ROOT = Path(__file__).resolve().parent.parent.parent
# Files of the suite with tests for a GPU.
TESTS = ("decoder", "preflight", "monitor", "switches", "streaming", "measure")
KERNELS = ("flash", "efficient", "cudnn")  # attention's, as their operators are called
PLAN_OFF, PLAN_AIM = 0.20, 0.15  # relative error of the memory plan
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
VARIANTS = {
    "recomputed layers": {"gradient_checkpointing": True},
    "EMA on the CPU": {"ema": True, "ema_offload": True},
    "CUDA graphs": {"cuda_graphs": True},
    "a recording that fails": {"cuda_graphs": True},
}
GPU_TIERS = ("8gb", "12gb", "t4", "24gb", "80gb")


# --- the machine --------------------------------------------------------------------------------


def machine_rows(setting: Setting) -> Iterator[dict]:
    """What the card and the processor beside it reach, and what compiling needs."""
    device = setting.hw.device
    for precision in ("fp32", setting.precision) if setting.pretended else PRECISIONS:
        tflops = product_flops_per_s(precision, setting) / 1e12
        yield result(f"a large product, {precision}", tflops, "TFLOP/s")
    yield result("reading memory", read_bytes_per_s(setting) / 1e9, "GB/s")
    array = torch.ones(2**20 if setting.pretended else 2**30, device=device)
    copy_s = seconds(array.clone, device, rounds=5)
    yield result("copying memory, read and written", 2 * array.nbytes / copy_s / 1e9, "GB/s")
    small = torch.ones(16, device=device)
    started_s = time.perf_counter()
    for _ in range(2000):
        small.add_(1)
    yield result("launching an operation", (time.perf_counter() - started_s) * 500, "us")
    for kind in ("cpu",) if setting.pretended else ("cuda", "cpu"):
        choice = compiler.compiler_available(kind)
        more = {"status": "ok" if choice.value == "yes" else "off", "reason": choice.reason}
        yield result(f"torch.compile for {kind}", float(choice.value == "yes"), "yes", **more)


# --- attention, numbers, memory -----------------------------------------------------------------


def attention_rows(setting: Setting) -> Iterator[dict]:
    """Which attention kernel the dispatcher predicts, and which really ran; matmuls."""
    silence_profiler()
    for precision in ("fp32", setting.precision):
        for dropout in (0.0, 0.1):
            model = dataclasses.replace(setting.middle.model, dropout=dropout)
            head_width = model.width // model.heads
            predicted = attention_backend(setting.hw, precision, head_width, model.heads, dropout)
            names = kernel_names(setting, Attention(model), precision)
            ran = attention_kernel(names)
            row = f"attention, {precision}, dropout {dropout:g}: {predicted.value} predicted"
            same = ran == ("math" if "explicit" in predicted.value else predicted.value)
            more = {"status": "ok" if same else "off", "names": names, "reason": predicted.reason}
            yield result(row, float(same), f"{ran} ran", "predicted", 1.0, None, **more)


def attention_kernel(names: list[str]) -> str:
    """The attention kernel among these operators and kernels."""
    return next((k for k in KERNELS if any(f"{k}_attention" in name for name in names)), "math")


def kernel_names(setting: Setting, layer: Attention, precision: str) -> list[str]:
    """Attention operators and kernels of one forward and backward pass of `layer`."""
    device = setting.hw.device
    layer = layer.to(device).train()
    x = torch.randn(2, 64, layer.c_proj.weight.shape[0], device=device, requires_grad=True)

    def work() -> None:
        with autocast(device, precision):
            y = layer(x)
        y.float().sum().backward()

    seconds(work, device, rounds=1)
    cuda = [] if setting.pretended else [ProfilerActivity.CUDA]
    with profile(activities=[ProfilerActivity.CPU, *cuda], acc_events=True) as record:
        seconds(work, device, rounds=1)
    names = {event.key for event in record.key_averages()}
    return sorted(name for name in names if "fmha" in name or "flash" in name or "atten" in name)


def parity_rows(setting: Setting) -> Iterator[dict]:
    """Loss curves in half precision beside fp32's, from the same weights on the same batches."""
    for optimizer in ("adamw", "muon"):
        config = dataclasses.replace(setting.middle.train, optimizer=optimizer)
        task = dataclasses.replace(setting.middle, train=config)
        yield from optimizer_parity_rows(setting, task)


def optimizer_parity_rows(setting: Setting, task: Task) -> Iterator[dict]:
    optimizer, count = task.train.optimizer, setting.steps
    batches = some_batches(task, count)
    fp32 = train_losses(new_state(task), batches)
    again = train_losses(new_state(task), batches)
    difference = relative_difference(again, fp32)
    yield limit_row(f"{optimizer}, fp32 twice: difference of the losses", difference, "share", 1e-4)
    for precision in ("bf16", "fp16"):
        row = f"{optimizer}, {precision}: loss after {count} steps beside fp32's, difference"
        if precision == "bf16" and not setting.pretended and setting.hw.capability < (8, 0):
            yield note_row(row, "this GPU has no bf16 units")
            continue
        state = new_state(task, precision, sdpa=True)
        if precision == "fp16":
            state.scaler = torch.amp.GradScaler(task.hw.device, init_scale=256.0)
        losses = train_losses(state, batches)
        if precision == setting.precision:
            again = train_losses(new_state(task, precision, sdpa=True), batches)
            name = f"{optimizer}, {precision} twice: difference of the losses"
            yield result(name, relative_difference(again, losses), "share", status="ok")
        difference = relative_difference(losses[-5:], fp32[-5:])
        yield limit_row(row, difference, "share", 0.02, fp32=fp32, half=losses)
    state = new_state(task, "fp16", sdpa=True)
    events = train_steps(state, batches)
    skipped = sum(not math.isfinite(event.grad_norm) for event in events)
    row = f"{optimizer}, fp16: steps skipped of {count} in the search for its scale"
    yield limit_row(row, skipped, "steps", count / 2, scale=state.scaler.get_scale())


def memory_rows(setting: Setting) -> Iterator[dict]:
    """The memory plan of a step beside the peaks of two real ones, allocated and reserved."""
    for label, work in workloads(setting):
        release_memory(setting.hw.device)
        planned, measured = work.planned_bytes, trial_peak(work)
        row = f"memory plan, {label}"
        if not measured:
            yield note_row(row, f"planned {planned / GIB:.2f} GiB; a real step ran out", "failed")
            continue
        allocated = measured["measured_bytes"]
        error = abs(planned / allocated - 1)
        more = {"status": "ok" if error <= PLAN_OFF else "off", "within_aim": error <= PLAN_AIM}
        peak = allocated / GIB
        ratio = planned / allocated
        yield result(row, planned / GIB, "GiB", "allocated", peak, ratio, **more)
        if not setting.pretended:
            reserved = measured["reserved_bytes"] / GIB
            row = f"{row}: reserved"
            yield result(row, reserved, "GiB", "allocated", peak, peak / reserved, status="ok")


def workloads(setting: Setting) -> Iterator[tuple[str, Workload]]:
    """The longest step of every GPU preset, and of two sizes with single switches.

    A preset that is too large for this GPU has fewer rows a pass.
    """
    here = {"hw": setting.hw, "precision": choose_precision(setting.hw).value}
    half = {"sdpa": True, "mixed_precision": True, "fused_adamw": True}
    middle, xtts = setting.middle, setting.task(setting.xtts)
    cases = {
        "12 x 512, fp32, explicit softmax": (middle, {}, {}),
        "12 x 512, fp32, fused attention": (middle, {"sdpa": True}, {}),
        "12 x 512, half, explicit softmax": (middle, {"mixed_precision": True}, {}),
        "12 x 512, half, fused, Muon": (middle, half, {"optimizer": "muon"}),
        "XTTS-v2, half, fused": (xtts, half, {}),
        "XTTS-v2, half, fused, recomputed": (xtts, half | {"gradient_checkpointing": True}, {}),
        "XTTS-v2, half, fused, CUDA graphs": (xtts, half | {"cuda_graphs": True}, {}),
    }
    for label, (task, switches, train_settings) in cases.items():
        train_config = dataclasses.replace(task.train, **train_settings)
        sizes = {"model": task.model, "data": task.data}
        yield label, Workload(train=train_config, speed=SpeedConfig(**switches), **sizes, **here)
    for name in () if setting.pretended else GPU_TIERS:
        preset = load_preset(name)
        sections = {"model": GPTConfig, "train": TrainConfig}
        sections |= {"data": DataConfig, "speed": SpeedConfig}
        work = Workload(**{n: build(kind, preset[n]) for n, kind in sections.items()}, **here)
        while work.planned_bytes > 0.8 * setting.hw.memory_bytes and work.data.micro_batch > 1:
            work = work.with_rows(work.data.micro_batch // 2)
        yield f"preset {name}, {work.data.micro_batch} rows a pass", work


def add_in_one_order() -> None:
    """Let this process take deterministic kernels, so that equal steps have equal losses."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)  # with warn_only, attention would not be


def recovery_rows(setting: Setting) -> Iterator[dict]:
    """Memory runs out in mid-run: losses as if smaller passes had been planned from there on."""
    add_in_one_order()
    task = setting.middle
    batches = some_batches(task, 6)
    state = new_state(task, setting.precision, sdpa=True)
    losses = train_losses(state, batches[:3])
    with less_memory(state, setting, batches[3:]):
        events = train_steps(state, batches[3:])
    losses += [event.loss for event in events]
    rows, notes = state.micro_rows, [event.note for event in events if event.note]
    row = "rows a pass after memory ran out"
    status = "ok" if rows else "off"
    before = task.data.micro_batch
    yield result(row, rows, "rows", "before", before, None, status=status, notes=notes)
    if not rows:
        return
    planned = new_state(task, setting.precision, sdpa=True)
    expected = train_losses(planned, batches[:3])
    planned.micro_rows = rows
    expected += train_losses(planned, batches[3:])
    row = "losses of a recovered run beside the planned one's, difference"
    yield limit_row(row, relative_difference(losses, expected), "share", 1e-3)


@contextlib.contextmanager
def less_memory(state: Trainer, setting: Setting, batches: list) -> Iterator[None]:
    """Inside, the GPU has half of the memory that the passes of `batches` take beside the weights.

    What they take is measured on a copy of the run. On the CPU more than two rows are refused.
    """
    if setting.pretended:
        hook = state.model.register_forward_pre_hook(refuse_many_rows)
        yield
        hook.remove()
        return
    task = setting.middle
    before = checkpoint.random_state()
    copy = new_state(task, setting.precision, sdpa=True)
    train_losses(copy, batches[:1])
    release_memory("cuda")
    reset_peak_memory("cuda")
    two_runs = torch.cuda.memory_allocated()  # weights and moments of this run and of the copy
    train_losses(copy, batches)
    passes = torch.cuda.max_memory_allocated() - two_runs
    del copy
    checkpoint.restore_random_state(before)
    release_memory("cuda")
    limit = torch.cuda.memory_reserved() + passes // 2
    torch.cuda.set_per_process_memory_fraction(limit / setting.hw.memory_bytes)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def refuse_many_rows(_model, args: tuple) -> None:
    if len(args[0].tokens) > 2:
        raise torch.OutOfMemoryError("CUDA out of memory. (pretended)")


def resume_rows(setting: Setting) -> Iterator[dict]:
    """A run that was saved and resumed, beside two that were not interrupted.

    Where the kernels add in any order, these two differ as well; where they are deterministic, all
    three are equal to the last bit.
    """
    on = {"sdpa": True, "fused_adamw": True, "ema": True}
    for order in ("any order", "one order"):
        if order == "one order":
            add_in_one_order()
        first, second, resumed = (losses_of_a_run(setting, on, stop) for stop in (0, 0, 3))
        apart = relative_difference(second, first)
        row = f"{setting.precision}, sums in {order}: "
        yield result(f"{row}two runs, difference of the losses", apart, "share", status="ok")
        limit = max(2 * apart, 1e-6) if order == "any order" else 0.0
        difference = relative_difference(resumed, first)
        yield limit_row(f"{row}resumed, difference of the losses", difference, "share", limit)


def losses_of_a_run(setting: Setting, on: dict, stop: int) -> list[float]:
    """The losses of eight steps; with `stop`, saved there and resumed by another trainer."""
    task = setting.middle
    batches = some_batches(task, 8)
    state = new_state(task, setting.precision, **on)
    if not stop:
        return train_losses(state, batches)
    losses = train_losses(state, batches[:stop])
    with tempfile.TemporaryDirectory() as folder:
        state.save(Path(folder))
        tree, _ = checkpoint.load_newest(Path(folder))
    resumed = new_state(task, setting.precision, **on)
    resumed.restore(tree)
    return losses + train_losses(resumed, batches[stop:])


def variant_rows(setting: Setting) -> Iterator[dict]:
    """Recomputed layers, an average on the CPU, a graph that fails: the losses stay."""
    task = setting.middle
    # Of few lengths and three times each, so that graphs are replayed.
    batches = list(itertools.islice(make_batches(task, few_shapes=True), 4)) * 3
    expected = train_losses(new_state(task, sdpa=True), batches)
    again = train_losses(new_state(task, sdpa=True), batches)
    limit = max(2 * relative_difference(again, expected), 1e-6)
    for name, switches in VARIANTS.items():
        state = new_state(task, sdpa=True, **switches)
        if name == "a recording that fails":
            if setting.pretended:
                yield note_row(name, "only a GPU records")
                continue
            state.model.register_forward_hook(lambda *_: torch.cuda.synchronize())
        losses = train_losses(state, batches)
        difference = relative_difference(losses, expected)
        more = {"ran": state.applied.names}
        yield limit_row(f"{name}: difference of the losses", difference, "share", limit, **more)


def test_rows(setting: Setting) -> Iterator[dict]:
    """The suite's own tests that need a GPU; without one they are skipped."""
    files = [str(file) for name in TESTS for file in (ROOT / "tests").glob(f"*/test_{name}.py")]
    # addopts name plugins that need not be installed here.
    options = ["-q", "-o", "addopts=", "-k", "gpu or cuda or pinned", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = ended.stdout.strip().splitlines() or [ended.stderr.strip()[-200:]]
    missing = {line.split("'")[1] for line in lines if "ModuleNotFoundError: No module" in line}
    if missing:
        reason = f"No module named {', '.join(sorted(missing))}"
        yield note_row("tests that need a GPU", reason, "failed")
        return
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    more = {"status": "off" if ended.returncode else "ok", "note": lines[-1], "failed": failed}
    yield result("tests that need a GPU", ended.returncode, "exit code", "", 0, None, **more)
