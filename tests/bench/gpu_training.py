"""Parts of the GPU check on training: attention, numbers, memory, recovery, switches, copies.

Each is a generator of rows, so that what was measured before a failure is kept.
"""

import contextlib
import dataclasses
import itertools
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from gpu_setting import (
    Setting,
    limit_row,
    new_state,
    note_row,
    relative_difference,
    seconds,
    some_batches,
    spread,
    timed,
    train_losses,
    train_steps,
)
from rows import result
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from kit.base.config import build, load_preset
from kit.base.hardware import (
    DTYPES,
    attention_backend,
    autocast,
    choose_preset,
    release_memory,
    reset_peak_memory,
    silence_profiler,
)
from kit.batches.batching import DataConfig
from kit.model.gpt import HEAD_ROWS, Attention, SpeechGPT
from kit.model.sequence import GPTConfig, pack
from kit.notebook.plots import GIB
from kit.training import checkpoint
from kit.training.config import TrainConfig
from kit.training.loop import train
from kit.training.switches import SpeedConfig, pin, prefetched
from kit.training.trainer import Trainer
from kit.tuning.preflight import Workload, trial_peak
from kit.tuning.recommend import Trial, compare
from kit.tuning.trials import (
    Task,
    TrialConfig,
    make_batches,
    measure_variant,
    preset_task,
    run_variant,
    variants,
)

KERNELS = ("flash", "efficient", "cudnn")  # attention's, as their operators are called
PLAN_OFF, PLAN_AIM = 0.15, 0.10  # relative error of the memory plan
# In which kinds of variants are measured.
ORDER = ("baseline", "added", "all", "cost", "alone", "extra")
GPU_TIERS = ("8gb", "12gb", "t4", "24gb", "80gb")


# --- attention and matrix products ----------------------------------------------------------


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
    for precision in ("fp32", "tf32", "bf16", "fp16"):
        if setting.pretended and precision in ("tf32", "fp16"):
            continue
        size = 256 if setting.pretended else 8192
        tflops = product_flops_per_s(precision, size, setting) / 1e12
        row = f"{size} x {size} x {size} product, {precision}"
        yield result(row, tflops, "TFLOP/s", status="ok")


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


def product_flops_per_s(precision: str, size: int, setting: Setting) -> float:
    """Floating-point operations a second of a large square product."""
    dtype = DTYPES.get(precision, torch.float32)
    a = torch.randn(size, size, device=setting.hw.device).to(dtype)
    b = torch.randn(size, size, device=setting.hw.device).to(dtype)
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        return 2 * size**3 / seconds(lambda: a @ b, setting.hw.device, rounds=5)
    finally:
        torch.set_float32_matmul_precision("highest")


# --- numbers --------------------------------------------------------------------------------


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


# --- memory ---------------------------------------------------------------------------------


def memory_rows(setting: Setting) -> Iterator[dict]:
    """The memory plan of a step beside the peaks of two real ones, allocated and reserved."""
    for label, work in workloads(setting):
        release_memory(setting.hw.device)
        planned, measured = work.planned_bytes, trial_peak(work)
        row = f"memory plan, {label}"
        if measured is None:
            yield note_row(row, f"planned {planned / GIB:.2f} GiB; a real step ran out", "failed")
            continue
        error = abs(planned / measured.allocated_bytes - 1)
        more = {"status": "ok" if error <= PLAN_OFF else "off", "within_aim": error <= PLAN_AIM}
        peak = measured.allocated_bytes / GIB
        ratio = planned / measured.allocated_bytes
        yield result(row, planned / GIB, "GiB", "allocated", peak, ratio, **more)
        if not setting.pretended:
            reserved = measured.reserved_bytes / GIB
            row = f"{row}: reserved"
            yield result(row, reserved, "GiB", "allocated", peak, peak / reserved, status="ok")


def workloads(setting: Setting) -> Iterator[tuple[str, Workload]]:
    """The longest step of every GPU preset, and of two sizes with single switches.

    A preset that would take more than half of this GPU has fewer rows a pass: other parts run
    beside this one.
    """
    here = {"hw": setting.hw, "precision": setting.precision}
    half = {"sdpa": True, "mixed_precision": True, "fused_adamw": True}
    middle, xtts = setting.middle, setting.task(setting.xtts)
    cases = {
        "12 x 512, fp32, explicit softmax": (middle, {}, {}),
        "12 x 512, fp32, fused attention": (middle, {"sdpa": True}, {}),
        "12 x 512, half, explicit softmax": (middle, {"mixed_precision": True}, {}),
        "12 x 512, half, fused, Muon": (middle, half, {"optimizer": "muon"}),
        "XTTS-v2, half, fused": (xtts, half, {}),
        "XTTS-v2, half, fused, recomputed": (xtts, half | {"gradient_checkpointing": True}, {}),
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
        while work.planned_bytes > setting.hw.memory_bytes / 2 and work.data.micro_batch > 1:
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
    """A run resumed from a checkpoint beside one that was never interrupted."""
    add_in_one_order()
    for optimizer in ("adamw", "muon"):
        config = dataclasses.replace(setting.middle.train, optimizer=optimizer)
        task = dataclasses.replace(setting.middle, train=config)
        batches = some_batches(task, 6)
        on = {"sdpa": True, "fused_adamw": True, "ema": True}
        expected = train_losses(new_state(task, setting.precision, **on), batches)
        interrupted = new_state(task, setting.precision, **on)
        losses = train_losses(interrupted, batches[:3])
        with tempfile.TemporaryDirectory() as folder:
            interrupted.save(Path(folder))
            tree, _ = checkpoint.load_newest(Path(folder))
        resumed = new_state(task, setting.precision, **on)
        resumed.restore(tree)
        losses += train_losses(resumed, batches[3:])
        difference = relative_difference(losses, expected)
        row = f"resumed, {optimizer}, fused, EMA: difference of the losses"
        yield limit_row(row, difference, "share", 1e-4, bit_for_bit=losses == expected)
    yield from variant_rows(setting)


def variant_rows(setting: Setting) -> Iterator[dict]:
    """Recomputed layers: the same losses as without; an average on the CPU: as by hand."""
    task = setting.middle
    batches = some_batches(task, 4)
    plain = new_state(task, sdpa=True, ema=True)
    expected = train_losses(plain, batches)
    recomputed = new_state(task, sdpa=True, ema=True, gradient_checkpointing=True)
    difference = relative_difference(train_losses(recomputed, batches), expected)
    yield limit_row("recomputed layers: difference of the losses", difference, "share", 1e-4)
    row = "EMA on the CPU: difference of the average"
    if setting.pretended:
        yield note_row(row, "only a GPU has a use for it")
        return
    offloaded = new_state(task, sdpa=True, ema=True, ema_offload=True)
    start = {name: p.detach().cpu() for name, p in offloaded.trainable.parameters.items()}
    train_losses(offloaded, batches)
    results = offloaded.ema.state_dict()
    kept = math.prod((1 + n) / (10 + n) for n in range(len(batches)))  # it moved once for them all
    difference = max(
        float((results[name] - torch.lerp(p.detach().cpu(), start[name], kept)).abs().max())
        for name, p in offloaded.trainable.parameters.items()
    )
    yield limit_row(row, difference, "largest", 1e-4)


# --- the switches ---------------------------------------------------------------------------


def xtts_switch_rows(setting: Setting) -> Iterator[dict]:
    """Every switch at XTTS-v2's size: 30 layers of 1024, 8 rows a pass."""
    yield from switch_rows("XTTS-v2", setting.task(setting.xtts), setting)


def preset_switch_rows(setting: Setting) -> Iterator[dict]:
    """The same at the size of this card's preset, as 05_benchmark measures it."""
    if setting.pretended:
        yield from switch_rows("tiny", setting.middle, setting)
        return
    name = choose_preset(setting.hw).value
    yield from switch_rows(name, preset_task(load_preset(name), setting.hw, 1), setting)


def switch_rows(size: str, task: Task, setting: Setting) -> Iterator[dict]:
    """Speed, memory and loss of each set of switches, beside the plain baseline.

    The baseline is eager fp32 with explicit softmax and torch's default AdamW. Variants share this
    process, which saves seconds for each; after one that failed in an unknown way, every other has
    a process of its own.
    """
    config = TrialConfig(steps=9, warmup_steps=2, rounds=1)
    if setting.pretended:
        config = TrialConfig(steps=3, warmup_steps=1, rounds=1, leave_out=("compile",))
    measured, work = [], run_variant
    wanted = sorted(variants(task, config), key=lambda variant: ORDER.index(variant.kind))
    for variant in wanted:
        if not variant.reason:
            figures, work = try_variant(work, task, config, variant.on)
            measured.append({"on": list(variant.on)} | figures)
        baseline, trial = compare([wanted[0], variant], measured, task.model.dropout)
        figures = next((m for m in measured if tuple(m["on"]) == variant.on), {})
        yield from trial_rows(size, task, baseline, trial, figures, setting)


def try_variant(work, task: Task, config: TrialConfig, on: tuple) -> tuple[dict, object]:
    """Figures of one variant or {"error": reason}, and how to measure the next one."""
    release_memory(task.hw.device)
    reset_peak_memory(task.hw.device)
    try:
        return work(task, config, on), work
    except torch.OutOfMemoryError as error:
        return {"error": str(error).splitlines()[0]}, work
    except Exception as error:  # it becomes a row; CUDA may be unusable in this process
        first_line = (str(error).strip().splitlines() or [""])[0]
        return {"error": f"{type(error).__name__}: {first_line}"[:200]}, measure_variant


def trial_rows(
    size: str, task: Task, baseline: Trial, trial: Trial, figures: dict, setting: Setting
) -> Iterator[dict]:
    row = f"{size}: {trial.label}"
    if trial.loss is None:
        yield note_row(row, trial.reason, "failed" if "error" in figures else "skipped")
        return
    names = ("loss", "loss_change", "warmup_s", "recompilations", "tokens_per_s", "ran", "on")
    more = {name: getattr(trial, name) for name in names} | {"reason": trial.reason}
    rounds = thirds(figures["step_seconds"])
    more["spread"] = spread(rounds)
    more["first_step_s"] = figures["first_step_s"]
    more["shares"] = figures["shares"]  # of a step, by phase
    more["tflops"] = flops_a_step(task) * trial.steps_per_s / 1e12
    same = trial.parity is not False and not trial.recompilations
    more["status"] = "ok" if same else "off"
    if baseline.loss is None:
        peer = "the baseline did not run"
        yield result(row, trial.steps_per_s, "steps/s", peer, None, None, **more)
        return
    peer = "baseline: eager fp32, explicit softmax, default AdamW"
    ratio = trial.steps_per_s / baseline.steps_per_s
    yield result(row, trial.steps_per_s, "steps/s", peer, baseline.steps_per_s, ratio, **more)
    memory, peer_memory = trial.peak_memory_bytes / GIB, baseline.peak_memory_bytes / GIB
    ratio = peer_memory / memory if memory else None
    yield result(f"{row}: peak memory", memory, "GiB", "baseline", peer_memory, ratio, status="ok")


def thirds(step_seconds: list[float]) -> list[float]:
    """Mean seconds of a step in each of three rounds."""
    size = max(1, len(step_seconds) // 3)
    starts = range(0, len(step_seconds), size)
    return [statistics.fmean(step_seconds[i : i + size]) for i in starts]


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


def peer_step_rows(setting: Setting) -> Iterator[dict]:
    """A step of transformers' GPT-2 in a plain loop, in both precisions, beside the kit's.

    The same trunk, rows of the same length, AdamW and clipping; the loss is read every step, as
    usual training loops do. All in this process, in turns, with 8 and 32 rows a pass.
    """
    from train_steps import gpt2_step

    model, length = setting.xtts, (10, 20) if setting.pretended else (100, 400)
    device, precision = setting.hw.device, setting.precision
    for rows in (2, 4) if setting.pretended else (8, 32):
        task = dataclasses.replace(setting.task(model, rows), rows=(length,) * rows)
        (batch,) = some_batches(task, 1)
        state = new_state(task, precision, sdpa=True, fused_adamw=True)
        steps = {"kit": partial(train_losses, state, [batch])}
        peer = gpt2_step(model, batch.micro[0].to(device))
        for name in ("fp32", precision):
            steps[name] = partial(in_precision, name, peer, device)
        taken_s = {name: [] for name in steps}
        for _ in range(6):
            for name, step in steps.items():
                taken_s[name].append(timed(step, device))
        medians = {name: 1000 * statistics.median(each[1:]) for name, each in taken_s.items()}
        kit_ms = medians.pop("kit")
        for name, peer_ms in medians.items():
            row = f"a step of {rows} rows, {precision}, SDPA, fused AdamW"
            peer_name = f"transformers GPT2LMHeadModel, {name}, SDPA, fused AdamW"
            more = {"spread": spread(taken_s["kit"][1:]), "peer_spread": spread(taken_s[name][1:])}
            more["status"] = "ok"
            yield result(row, kit_ms, "ms", peer_name, peer_ms, peer_ms / kit_ms, **more)
        del state, steps, peer
        release_memory(device)


def in_precision(name: str, step: Callable[[], float], device: str) -> None:
    with autocast(device, name):
        step()


# --- copies ---------------------------------------------------------------------------------


def copy_rows(setting: Setting) -> Iterator[dict]:
    """What making a batch and bringing it to the device costs a step, and what hides it."""
    task, device = setting.middle, setting.hw.device
    (batch,) = some_batches(task, 1)
    state = new_state(task, setting.precision, sdpa=True, fused_adamw=True)
    step_ms = 1000 * seconds(lambda: train_losses(state, [batch]), device)
    plain_ms = 1000 * seconds(lambda: batch.micro[0].to(device), device, rounds=9)
    yield result("copying a batch", plain_ms, "ms", "a step", step_ms, step_ms / plain_ms)
    yield prefetch_row(setting, state)
    if setting.pretended:
        yield note_row("copying a pinned batch", "only a GPU has a use for it")
        return
    pinned = pin(batch)
    ms = 1000 * seconds(lambda: pinned.micro[0].to(device), device, rounds=9)
    yield result("copying a pinned batch", ms, "ms", "pageable", plain_ms, plain_ms / ms)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as record:
        train_losses(state, [pinned])
    copies = [e.key for e in record.key_averages() if e.device_type == DeviceType.CUDA]
    copies = [name for name in copies if "Pinned" in name and "HtoD" in name]
    more = {"status": "ok" if copies else "off", "names": copies}
    row = "copies that came from pinned memory"
    yield result(row, len(copies), "kinds", **more)
    # The loss and the norm are read once a step; nothing else may wait for the device.
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as record:
        train_losses(state, [pinned] * 4)
    reads = sum(e.count for e in record.key_averages() if e.key == "aten::_local_scalar_dense")
    yield limit_row("reads of a number from the device, a step", reads / 4, "reads", 2)


def prefetch_row(setting: Setting, state: Trainer, count: int = 8) -> dict:
    """Steps whose batches a thread makes, and pins, beside the same steps that make their own."""

    def steps(ahead: bool) -> None:
        batches = itertools.islice(make_batches(setting.middle), count)
        if not setting.pretended:  # pinning needs CUDA
            batches = map(pin, batches)
        for _ in itertools.islice(train(state, prefetched(batches) if ahead else batches), count):
            pass

    device = setting.hw.device
    inline_ms = 1000 * seconds(lambda: steps(ahead=False), device) / count
    ahead_ms = 1000 * seconds(lambda: steps(ahead=True), device) / count
    row = "a step whose batch was made ahead"
    return result(row, ahead_ms, "ms", "made in between", inline_ms, inline_ms / ahead_ms)
