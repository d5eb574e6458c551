"""Parts of `make check-gpu` on training: switches, parity, attention, memory, recovery, copies.

Each is a generator of rows, so that what it found before it failed is kept. Knows nothing of
speaking.
"""

import contextlib
import dataclasses
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from gpu_setting import (
    Setting,
    apart,
    checked,
    losses,
    make_batches,
    new_state,
    seconds,
    some_batches,
    told,
)
from rows import result
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from kit.base.config import load_preset
from kit.base.hardware import attention_backend, autocast, choose_preset, hush_profiler
from kit.model.gpt import Attention
from kit.notebook.style import GIB
from kit.training import checkpoint
from kit.training.loop import train
from kit.training.prefetch import prefetched
from kit.training.state import TrainState
from kit.training.switches import SpeedConfig, pin
from kit.tuning.ab_results import Trial, compare
from kit.tuning.ab_test import Task, TrialConfig, in_a_process, preset_task, run_variant, variants
from kit.tuning.preflight import Workload, release, trial_bytes

KERNELS = ("flash", "efficient", "cudnn")  # attention's, as their operators are called
FAR_OFF, AIM = 0.15, 0.05  # of the memory plan


# --- the switches ---------------------------------------------------------------------------


def preset_switch_rows(setting: Setting) -> Iterator[dict]:
    """The table of 05_benchmark at the size of this card's preset."""
    if setting.pretended:
        yield from switch_rows("tiny", setting.middle, setting)
        return
    name = choose_preset(setting.hw).value
    yield from switch_rows(name, preset_task(load_preset(name), setting.hw, 1), setting)


def xtts_switch_rows(setting: Setting) -> Iterator[dict]:
    """The same at XTTS-v2's size: 30 layers of 1024, 8 rows a pass."""
    yield from switch_rows("XTTS-v2", setting.task(setting.xtts), setting)


def switch_rows(size: str, task: Task, setting: Setting) -> Iterator[dict]:
    """Speed, peak memory and loss of each set of switches; the baseline and all on come first."""
    config, found = TrialConfig(steps=6, warmup_steps=2, rounds=1), []
    if setting.pretended:
        config = TrialConfig(steps=2, warmup_steps=1, rounds=1, leave_out=("compile",))
    wanted = variants(task, config)
    wanted.sort(key=lambda variant: variant.kind not in ("baseline", "all"))
    for variant in wanted:
        if not variant.reason:
            work = run_variant if setting.pretended else in_a_process
            found.append({"on": list(variant.on)} | work(task, config, variant.on))
        baseline, trial = compare([wanted[0], variant], found, task.model.dropout)
        yield from trial_rows(size, baseline, trial, measured=not variant.reason)


def trial_rows(size: str, baseline: Trial, trial: Trial, measured: bool) -> Iterator[dict]:
    row = f"{size}: {trial.label}"
    if trial.loss is None:
        yield told(row, trial.reason, "failed" if measured else "skipped")
        return
    more = {name: getattr(trial, name) for name in ("loss_change", "warmup_s", "recompilations")}
    more |= {"ran": trial.ran, "on": trial.on, "loss": trial.loss, "reason": trial.reason}
    same = trial.parity is not False and not trial.recompilations
    more["status"] = "ok" if same else "off"
    if baseline.loss is None:
        yield result(row, trial.steps_per_s, "steps/s", "baseline did not run", None, None, **more)
        return
    speed, memory = trial.steps_per_s, trial.peak_memory_bytes / GIB
    peer_speed, peer_memory = baseline.steps_per_s, baseline.peak_memory_bytes / GIB
    yield result(row, speed, "steps/s", "baseline", peer_speed, speed / peer_speed, **more)
    ratio = peer_memory / memory if memory else None
    yield result(f"{row}: peak memory", memory, "GiB", "baseline", peer_memory, ratio)


# --- numbers --------------------------------------------------------------------------------


def parity_rows(setting: Setting) -> Iterator[dict]:
    """Curves in half precision beside that of fp32, from one start on the same batches."""
    task, count = setting.middle, setting.steps
    batches = some_batches(task, count)
    wanted = losses(new_state(task), batches)
    again = losses(new_state(task), batches)
    yield checked("fp32 twice: difference of the losses", apart(again, wanted), "share", 1e-4)
    for precision in ("bf16", "fp16"):
        if precision == "bf16" and not setting.pretended and setting.hw.capability < (8, 0):
            yield told("bf16: loss beside fp32's", "this GPU has no bf16 units")
            continue
        state = new_state(task, precision, sdpa=True)
        if precision == "fp16":
            state.scaler = torch.amp.GradScaler(task.hw.device, init_scale=256.0)
        found = losses(state, batches)
        row = f"{precision}: loss after {count} steps beside fp32's, difference"
        yield checked(row, apart(found[-5:], wanted[-5:]), "share", 0.02, fp32=wanted, half=found)
    yield scale_row(task, batches)


def scale_row(task: Task, batches: list) -> dict:
    """How long fp16 looks for its scale from where PyTorch begins."""
    state = new_state(task, "fp16", sdpa=True)
    skipped = 0
    for batch in batches:
        losses(state, [batch])
        skipped += "skipped" in " ".join(state.notes)
        state.notes.clear()
    scale = state.scaler.get_scale()
    row = f"fp16: steps skipped of {len(batches)} while it found its scale"
    return checked(row, skipped, "steps", len(batches) / 2, scale=scale)


def attention_rows(setting: Setting) -> Iterator[dict]:
    """Which attention the dispatcher promises, and which operators and kernels really ran."""
    hush_profiler()
    for precision in ("fp32", setting.precision):
        for dropout in (0.0, 0.1):
            model = dataclasses.replace(setting.middle.model, dropout=dropout)
            width = model.width // model.heads
            asked = attention_backend(setting.hw, precision, width, model.heads, dropout)
            names = kernel_names(setting, Attention(model), precision)
            ran = next((k for k in KERNELS if any(f"{k}_attention" in n for n in names)), "math")
            row = f"attention, {precision}, dropout {dropout:g}: {asked.value} promised, {ran} ran"
            status = "ok" if ran == asked.value else "off"
            seen = [n for n in names if "fmha" in n or "flash" in n or "attention" in n]
            more = {"status": status, "names": seen, "reason": asked.reason}
            yield result(row, float(ran == asked.value), "same", "wanted", 1.0, None, **more)


def kernel_names(setting: Setting, layer: Attention, precision: str) -> list[str]:
    """Names of the operators and kernels of one forward and backward pass of `layer`."""
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
    return sorted({event.key for event in record.key_averages()})


# --- memory ---------------------------------------------------------------------------------


def memory_rows(setting: Setting) -> Iterator[dict]:
    """The plan of a step beside the measured peak of two real ones."""
    for label, work in workloads(setting):
        planned, measured = work.planned_bytes, trial_bytes(work)
        row = f"memory plan, {label}"
        if measured is None:
            yield told(row, f"planned {planned / GIB:.2f} GiB; a real step ran out", "failed")
            continue
        off = abs(planned / measured - 1)
        status = "ok" if off <= FAR_OFF else "off"
        more = {"status": status, "within_aim": off <= AIM}
        figures = planned / GIB, "GiB", "measured", measured / GIB, planned / measured
        yield result(row, *figures, **more)


def workloads(setting: Setting) -> Iterator[tuple[str, Workload]]:
    middle, xtts = setting.middle, setting.task(setting.xtts)
    half = {"sdpa": True, "mixed_precision": True, "fused_adamw": True}
    cases = {
        "12 x 512, fp32, explicit softmax": (middle, {}, {}),
        "12 x 512, fp32, fused attention": (middle, {"sdpa": True}, {}),
        "12 x 512, half, explicit softmax": (middle, {"mixed_precision": True}, {}),
        "12 x 512, half, fused, EMA": (middle, half | {"ema": True}, {}),
        "12 x 512, half, fused, Muon": (middle, half, {"optimizer": "muon"}),
        "12 x 512, half, fused, two passes": (middle, half, {"effective_batch": 16}),
        "XTTS-v2, half, fused": (xtts, half, {}),
        "XTTS-v2, half, fused, recomputed": (xtts, half | {"gradient_checkpointing": True}, {}),
    }
    step = 3 if setting.pretended else 1
    for label, (task, switches, over) in list(cases.items())[::step]:
        data = {k: v for k, v in over.items() if k == "effective_batch"}
        train = {k: v for k, v in over.items() if k == "optimizer"}
        yield (
            label,
            Workload(
                model=task.model,
                train=dataclasses.replace(task.train, **train),
                speed=SpeedConfig(**switches),
                data=dataclasses.replace(task.data, **data),
                hw=setting.hw,
                precision=setting.precision,
            ),
        )


def recovery_rows(setting: Setting) -> Iterator[dict]:
    """Memory that shrinks in mid-run: losses as if the run had been planned in smaller passes."""
    task = setting.middle
    batches = some_batches(task, 6)
    on = {"sdpa": True}
    state = new_state(task, setting.precision, **on)
    found = losses(state, batches[:3])
    needs = [steady_bytes(task, setting, rows) for rows in (task.data.micro_batch, 2)]
    with less_memory(state, setting, sum(needs) // 2):
        found += losses(state, batches[3:])
    rows, whole = state.micro_rows, task.data.micro_batch
    yield result("rows a pass after memory ran out", rows, "rows", "before", whole, None)
    if not rows:
        raise RuntimeError(f"memory did not run out: {needs} bytes planned with all and 2 rows")
    planned = new_state(task, setting.precision, **on)
    wanted = losses(planned, batches[:3])
    planned.micro_rows = rows
    wanted += losses(planned, batches[3:])
    row = "losses after a recovered run beside the planned one's, difference"
    yield checked(row, apart(found, wanted), "share", 1e-3)


def steady_bytes(task: Task, setting: Setting, rows: int) -> int:
    """What a step of the longest of the task's rows is planned to need, `rows` a pass."""
    data = dataclasses.replace(task.data, micro_batch=rows)
    work = Workload(
        model=task.model,
        train=task.train,
        speed=SpeedConfig(sdpa=True, mixed_precision=True),
        data=data,
        hw=task.hw,
        precision=setting.precision,
        text_ids=max(text for text, _ in task.rows),
        codes=max(codes for _, codes in task.rows),
    )
    return work.planned_bytes


@contextlib.contextmanager
def less_memory(state: TrainState, setting: Setting, limit_bytes: int) -> Iterator[None]:
    """Inside, the device has but so many bytes; a pretended one no room for more than two rows."""
    if setting.pretended:
        hook = state.model.register_forward_pre_hook(refuse_many_rows)
        yield
        hook.remove()
        return
    release("cuda")
    torch.cuda.set_per_process_memory_fraction(limit_bytes / setting.hw.memory_bytes)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def refuse_many_rows(_model, args: tuple) -> None:
    if len(args[0].tokens) > 2:
        raise torch.OutOfMemoryError("CUDA out of memory. (pretended)")


# --- copies, going on, offload --------------------------------------------------------------


def copy_rows(setting: Setting) -> Iterator[dict]:
    """What bringing a batch to the device costs a step, and whether pinned memory helps."""
    task, device = setting.middle, setting.hw.device
    (batch,) = some_batches(task, 1)
    state = new_state(task, setting.precision, sdpa=True, fused_adamw=True)
    step_ms = 1000 * seconds(lambda: losses(state, [batch]), device)
    plain_ms = 1000 * seconds(lambda: batch.micro[0].to(device), device, rounds=9)
    yield result("copying a batch", plain_ms, "ms", "a step", step_ms, step_ms / plain_ms)
    yield ahead_row(setting, state)
    if setting.pretended:
        yield told("copying a pinned batch", "only a GPU has a use for it")
        return
    pinned = pin(batch)
    ms = 1000 * seconds(lambda: pinned.micro[0].to(device), device, rounds=9)
    yield result("copying a pinned batch", ms, "ms", "pageable", plain_ms, plain_ms / ms)
    pinned_step_ms = 1000 * seconds(lambda: losses(state, [pinned]), device)
    figures = pinned_step_ms, "ms", "pageable", step_ms, step_ms / pinned_step_ms
    yield result("a step from a pinned batch", *figures)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as record:
        losses(state, [pinned])
    copies = [e.key for e in record.key_averages() if e.device_type == DeviceType.CUDA]
    copies = [name for name in copies if "Pinned" in name and "HtoD" in name]
    more = {"status": "ok" if copies else "off", "names": copies}
    yield result(
        "copies that came from pinned memory", len(copies), "kinds", "", None, None, **more
    )


def ahead_row(setting: Setting, state: TrainState, count: int = 8) -> dict:
    """Steps whose batches a thread makes, and pins, beside the same steps that make their own."""

    def steps(ahead: bool) -> None:
        batches = itertools.islice(make_batches(setting.middle), count)
        if not setting.pretended:  # only a GPU has a use for it
            batches = map(pin, batches)
        for _ in itertools.islice(train(state, prefetched(batches) if ahead else batches), count):
            pass

    device = setting.hw.device
    own_ms = 1000 * seconds(lambda: steps(ahead=False), device) / count
    ahead_ms = 1000 * seconds(lambda: steps(ahead=True), device) / count
    what = "a step whose batch was made ahead"
    return result(what, ahead_ms, "ms", "made in between", own_ms, own_ms / ahead_ms)


def resume_rows(setting: Setting) -> Iterator[dict]:
    """A run that goes on from a checkpoint beside one that was never interrupted."""
    for optimizer in ("adamw", "muon"):
        task = dataclasses.replace(
            setting.middle, train=dataclasses.replace(setting.middle.train, optimizer=optimizer)
        )
        batches = some_batches(task, 6)
        on = {"sdpa": True, "fused_adamw": True, "ema": True}
        make = lambda task=task, on=on: new_state(task, setting.precision, **on)  # noqa: E731
        whole = make()
        wanted = losses(whole, batches)
        half = make()
        found = losses(half, batches[:3])
        with tempfile.TemporaryDirectory() as folder:
            half.save(Path(folder))
            tree, _ = checkpoint.load_newest(Path(folder))
        half = make()
        half.restore(tree)
        found += losses(half, batches[3:])
        same = found == wanted
        row = f"resumed, {optimizer}, fused, EMA: difference of the losses"
        yield checked(row, apart(found, wanted), "share", 1e-4, bit_for_bit=same)
    yield from variant_rows(setting)


def variant_rows(setting: Setting) -> Iterator[dict]:
    """Recomputed layers and an average on the CPU: the same numbers as without."""
    task = setting.middle
    batches = some_batches(task, 4)
    base = {"sdpa": True, "ema": True}
    plain = new_state(task, **base)
    wanted = losses(plain, batches)
    averages = {name: t.cpu().clone() for name, t in plain.ema.shadow.items()}
    recomputed = losses(new_state(task, **base, gradient_checkpointing=True), batches)
    row = "recomputed layers: difference of the losses"
    yield checked(row, apart(recomputed, wanted), "share", 1e-4)
    if setting.pretended:
        yield told("EMA on the CPU: difference of the average", "only a GPU has a use for it")
        return
    away = new_state(task, **base, ema_offload=True)
    losses(away, batches)
    row = "EMA on the CPU: difference of the average"
    off = max(float((away.ema.shadow[n].cpu() - t).abs().max()) for n, t in averages.items())
    where = {t.device.type for t in away.ema.shadow.values()}
    yield checked(row, off, "largest", 1e-4, where=sorted(where))
