"""Say in a sentence what holds a training back, and the one setting that changes it.

All from the log of the run: `diagnose(read_log(path), hw)`. Thresholds are shares of the time that
are worth a change, well above the noise of a healthy run.
"""

import statistics
from collections.abc import Container

from kit.base.formatting import format_gib
from kit.base.hardware import Hardware
from kit.batches.code_stream import loader_workers
from kit.training.step_clock import PHASES

SKIPPED = 5  # steps at each start: compiling, filling caches
RECENT = 100  # steps that a diagnosis looks at
FEWEST = 10  # ... at least
MAX_DATA = 0.1
MAX_COPY = 0.05
MAX_REDUCE = 0.2
MAX_SAVING = 0.15
MAX_EVALUATION = 0.35
MIN_SYNC = 0.03  # a GPU that has less work queued waits for the CPU
MAX_RESERVED = 1.3  # times the peak
MAX_SLOWDOWN = 1.5  # seconds a token, against the first steps


def step_shares(rows: list[dict], skipped: int = SKIPPED) -> dict[str, float]:
    """The share of each phase of the newest steps of a log; {} where it has none."""
    rows = timed_rows(rows, skipped)[-RECENT:]
    total_s = sum(row["step_s"] for row in rows)
    return {
        words: sum(row[f"{phase}_s"] for row in rows) / total_s
        for phase, words in PHASES.items()
        if rows
    }


def timed_rows(rows: list[dict], skipped: int = SKIPPED) -> list[dict]:
    """The rows of the newest start that have phases, without its first `skipped` steps."""
    starts = [i for i, row in enumerate(rows) if "wall_s" in row and row["wall_s"] is None]
    first = max(starts, default=0) + skipped
    return [row for row in rows[first:] if row.get("forward_s")]


def diagnose(
    rows: list[dict], hw: Hardware, on: Container[str] = (), workers: int = 0
) -> dict[str, str]:
    """What holds the newest steps of a log back, costliest first: {cause: sentence with its fix}.

    `on` are the names of the switches that run, `workers` the setting. Empty for a healthy run and
    for less than FEWEST steps.
    """
    timed = timed_rows(rows)
    recent = timed[-RECENT:]
    if len(recent) < FEWEST:
        return {}
    gpu = hw.device == "cuda"
    device = "GPU" if gpu else "processor"
    step_s = statistics.fmean(row["step_s"] for row in recent)
    names = [f"{phase}_s" for phase in (*PHASES, "sync")]
    mean_s = {name: statistics.fmean(row[name] for row in recent) for name in names}
    share = {name: seconds / step_s for name, seconds in mean_s.items()}
    wall_s = sum(row["wall_s"] for row in recent)
    evaluating = sum(row["eval_s"] for row in recent) / wall_s
    saving = 1 - evaluating - step_s * len(recent) / wall_s
    causes = []  # (share of the time lost, cause, sentence)

    if share["data_s"] > MAX_DATA:
        busy_s = step_s - mean_s["data_s"]
        batch_s = step_s if "pinned_memory" in on or workers else mean_s["data_s"]
        advised = max(workers + 1, loader_workers(hw, batch_s, busy_s))
        line = f"The {device} waits {share['data_s']:.0%} of a step for data: set `workers` to "
        line += f"{advised} (now {workers}), so that other processes make the batches."
        causes.append((share["data_s"], "data", line))
    elif gpu and share["sync_s"] < MIN_SYNC:
        fix = "make `micro_batch` larger" if "compile" in on else "turn torch.compile on"
        line = f"Steps of {step_s:.2g} s are too short for the GPU: it waits for the CPU to start "
        causes.append((MAX_DATA, "launch", f"{line}its kernels. Better {fix}."))
    if share["copy_s"] > MAX_COPY:
        line = f"Copying batches to the GPU takes {share['copy_s']:.0%} of a step: turn Pinned "
        causes.append((share["copy_s"], "copy", f"{line}memory on."))
    if share["reduce_s"] > MAX_REDUCE:
        line = f"Summing gradients takes {share['reduce_s']:.0%} of a step: make `effective_batch` "
        causes.append((share["reduce_s"], "reduce", f"{line}larger, or use fewer GPUs."))
    if saving > MAX_SAVING:
        line = f"Checkpoints and logs take {saving:.0%} of the time: make `save_steps` larger, or "
        causes.append((saving, "disk", f"{line}keep the run on a local disk."))
    if evaluating > MAX_EVALUATION:
        line = f"Evaluation takes {evaluating:.0%} of the time: make `eval_steps` and `gate_every` "
        causes.append((evaluating, "evaluation", f"{line}larger."))
    peak, reserved = recent[-1]["memory_bytes"], recent[-1]["reserved_bytes"]
    if reserved > MAX_RESERVED * peak and reserved > 0.8 * hw.memory_bytes:
        line = f"PyTorch reserves {format_gib(reserved)} for a peak of {format_gib(peak)}: memory "
        line += "is fragmented. Set `length_multiple` to 64, so that batches have fewer shapes."
        causes.append((0.0, "fragmentation", line))
    slowdown = cost(recent) / min(cost(part) for part in (timed[:RECENT], recent))
    if slowdown > MAX_SLOWDOWN:
        line = f"Steps take {slowdown:.1f} times as long as at the start of this training: the "
        line += f"{device} is too hot, or another program uses it. Look at "
        line += "`nvidia-smi`." if gpu else "the list of processes."
        causes.append((1 - 1 / slowdown, "slowdown", line))
    return {cause: line for _, cause, line in sorted(causes, reverse=True)}


def cost(rows: list[dict]) -> float:
    """Seconds a token of the usual row, without waiting for data."""
    return statistics.median(
        (row["step_s"] - row["data_s"]) / max(1, row["tokens"]) for row in rows
    )
