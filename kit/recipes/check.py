"""Does a training step fit? Real steps on this device, plans for a GPU that is not here.

Neither needs prepared data: with a run that has codes the rows are as long as its recordings.
"""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

from kit.audio.codec import codec_config
from kit.base.config import build, merge
from kit.base.errors import KitError
from kit.base.files import write_atomic
from kit.base.formatting import format_gib, text_grid
from kit.base.hardware import choose_preset, format_capability
from kit.base.processes import run_in_process
from kit.batches.batching import EXTRA_TOKENS
from kit.notebook.result import Result
from kit.recipes.base_model import finetuning_settings, releases
from kit.recipes.open_run import ActiveRun, open_settings
from kit.recipes.run_parts import finetuning_of, workload
from kit.settings import FinetuneConfig, GPTConfig, LoRAConfig
from kit.training.config import Base, Finetuning
from kit.tuning import cards
from kit.tuning.estimate import resolve_steps
from kit.tuning.memory_plan import Workload
from kit.tuning.preflight import first_fitting, free_memory, milder, preflight

HOURS = 3.0  # of speech, whose training time is calculated
CLIP_S = 5.0
TEXT_IDS_PER_S = 5.0
# The longest rows of a released model, with which its memory is planned.
LONGEST_S = 10.0
LONGEST_TEXT_IDS = 120
HEAD = ("what trains", "fits", "planned peak", "rows a pass", "effective batch", "saving memory")
HEAD += ("a step", f"{HOURS:g} hours of speech")
SAVINGS = {
    "gradient_checkpointing": "recomputing",
    "ema_offload": "EMA on the CPU",
    "adamw_8bit": "8-bit AdamW",
}
ASSUMED = (
    "Memory is planned: a preset at the longest rows its model has positions for, a released model "
    f"at rows of {LONGEST_S:g} s. Seconds and hours are calculated, for {HOURS:g} hours of speech "
    f"in clips of {CLIP_S:g} s, without validation, gate and checkpoints."
)
PAGE = f"""# What fits which GPU

Written by `python -m kit check --table docs/devices/planned.md`; `python -m kit check --gpu T4`
prints a section of it, for any GPU (`--gpu "16 GiB, 7.5"`), preset and settings.

{ASSUMED}
"""


def check(
    run: ActiveRun,
    gpu: str = "",  # plan for this one instead: a T4, or "16 GiB, 7.5" (none)
    table: Path | None = None,  # write these plans for all known GPUs (none)
) -> Iterator[Result]:
    """Take real steps at the longest lengths; on another GPU, which `run` is on, plan them.

    Raises KitError, with what to change, where they do not fit.
    """
    if table is not None:
        yield write_table(table)
        return
    if gpu:
        yield from check_elsewhere(run)
        return
    work = workload(run, finetuning=finetuning_of(run))
    lengths = f"{work.rows} rows of {work.longest_text} text ids and {work.longest_codes} codes"
    line = f"preset {run.preset_name} on the {run.hw.name}: {lengths} in a pass"
    if work.finetuning.adapters:
        line += f", adapters of rank {work.finetuning.lora.rank}"
    yield Result(line=line)
    try:
        preload = (preflight.__module__, "torch._dynamo")
        verdict = run_in_process(preflight, work, int(run.threads.value), preload=preload)
    except KitError as error:
        raise KitError(f"The step could not be taken: {error}.", exit_code=3) from error
    if not verdict.fits:
        raise KitError(str(verdict), exit_code=3)
    line = f"{verdict} Free: {format_gib(free_memory(work.hw))}."
    if verdict.step_s is not None:  # two passes stand for all of them
        line += f" A step takes about {verdict.step_s * max(1, work.data.grad_accum / 2):.3g} s."
    yield Result(line=line)


def check_elsewhere(run: ActiveRun) -> Iterator[Result]:
    """Plan for the GPU that `run` is on. Raises KitError where the preset does not fit."""
    yield Result(line=describe_card(run))
    grid = planned_grid(run)
    yield Result(line=f"{text_grid(grid)}\n{ASSUMED}", grid=grid)
    if grid[1][1] == "no":
        raise KitError(f"A step does not fit: {grid[1][2]}.", exit_code=3)


def describe_card(run: ActiveRun) -> str:
    hw = run.hw
    limit_bytes = run.section("memory")["max_memory_fraction"] * hw.memory_bytes
    return (
        f"{hw.name}, {format_gib(hw.memory_bytes)}, of which a run may use "
        f"{format_gib(limit_bytes)}; compute capability {format_capability(hw.capability)}: preset "
        f"{run.preset_name}, {run.precision.value}, adapters of rank {run.section('lora')['rank']}."
    )


def planned_grid(run: ActiveRun) -> list[tuple[str, ...]]:
    """What `run`, and without a run what the released models, take on the GPU it is on."""
    own = workload(run, finetuning=finetuning_of(run))
    frame_rate = codec_config(run.section("codec")).frame_rate
    if run.name:
        return [HEAD, planned_cells(run.name, own, frame_rate)]
    grid = [HEAD, planned_cells(f"{run.preset_name}, from scratch", own, frame_rate)]
    for release in releases():
        model = build(GPTConfig, release.sizes())
        settings = finetuning_settings(run, model, release.defaults)
        tuned = dataclasses.replace(run, preset=merge(run.preset, settings))
        for method, what in (("lora", "adapters"), ("full", "all weights")):
            default = " (default)" if method == settings["finetune"]["method"] else ""
            finetuning = Finetuning(
                config=build(FinetuneConfig, tuned.section("finetune"), method=method),
                lora=build(LoRAConfig, tuned.section("lora")),
                base=Base(config=model, sha256="", weights=Path(release.name)),
            )
            codes = round(LONGEST_S * release.frame_rate)
            lengths = {"text_ids": LONGEST_TEXT_IDS, "codes": codes}
            work = workload(tuned, model=model, finetuning=finetuning, **lengths)
            label = f"{release.name}, {what}{default}"
            grid.append(planned_cells(label, work, release.frame_rate))
    return grid


def planned_cells(what: str, work: Workload, frame_rate: float) -> tuple[str, ...]:
    """A line of the table: `work`, or the mildest change of it that fits."""
    limit_bytes = int(work.max_memory_fraction * work.hw.memory_bytes)
    if work.planned_bytes > limit_bytes:
        *_, least = milder(work)
        work = first_fitting(work, limit_bytes) or least
    if work.planned_bytes > limit_bytes:
        return (what, "no", f"{format_gib(work.planned_bytes)} at least", *[""] * (len(HEAD) - 3))
    row_tokens = work.model.latents + CLIP_S * (frame_rate + TEXT_IDS_PER_S) + EXTRA_TOKENS
    step_s = cards.step_seconds(work, row_tokens)
    epoch_steps = math.ceil(3600 * HOURS / CLIP_S / work.data.effective_batch)
    steps = resolve_steps(work.train, epoch_steps).max_steps
    times = ("unknown", f"{steps:,} steps")
    if step_s is not None:
        all_s = steps * step_s
        duration = f"{all_s / 3600:.1f} h" if all_s >= 3600 else f"{all_s / 60:.0f} min"
        times = (f"{step_s:.2g} s", f"{steps:,} steps, {duration}")
    savings = [label for name, label in SAVINGS.items() if getattr(work.speed, name)]
    rows = (str(work.data.micro_batch), str(work.data.effective_batch))
    return (what, "yes", format_gib(work.planned_bytes), *rows, ", ".join(savings), *times)


def write_table(path: Path) -> Result:
    """Write what every known GPU can train, with the preset that it gets, to the page `path`."""
    lines = [PAGE]
    for name in cards.known_cards():
        preset = choose_preset(cards.find_card(name)).value
        on_card = open_settings("", preset, "", {}, gpu=name)
        head, *rows = planned_grid(on_card)
        lines += [f"## {name}", "", describe_card(on_card), ""]
        lines += [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)] + [""]
    write_atomic(path, "\n".join(lines))
    return Result(line=f"GPUs: {len(cards.known_cards())}. Written: {path}")
