"""Does a training learn, and what holds it back? All from the rows of its log.

`training_checks` judges whether it learns; `diagnose` says what its steps wait for, each with the
one setting that changes it. Thresholds are well above the noise of a healthy run.
"""

import statistics
from collections.abc import Container

from kit.base.checks import Check
from kit.base.formatting import format_gib
from kit.base.hardware import Hardware
from kit.batches.code_stream import loader_workers
from kit.training.config import PHASES
from kit.training.logs import held_out_losses

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
MIN_ROWS = 40  # before a trend is judged
MAX_NOT_FINITE = 0.01  # share of recent steps
MAX_RISE = 1.03  # held-out loss over the lowest one
PATIENCE = 3  # validations since the lowest one
MAX_OVERFIT = 1.5  # held-out loss over training loss
MAX_NORM_RISE = 10.0  # recent gradient norm over the median
MIN_LOAD = 0.5  # of the device


def step_shares(rows: list[dict], skipped: int = SKIPPED) -> dict[str, float]:
    """The share of each phase of the newest steps of a log; {} where it has none."""
    rows = timed_rows(rows, skipped)[-RECENT:]
    total_s = sum(row["step_s"] for row in rows)
    return {words: total(rows, f"{phase}_s") / total_s for phase, words in PHASES.items() if rows}


def total(rows: list[dict], name: str) -> float:
    """The sum of a field of `rows`; logs of earlier versions may lack it."""
    return sum(row.get(name, 0.0) for row in rows)


def timed_rows(rows: list[dict], skipped: int = SKIPPED) -> list[dict]:
    """The rows of the newest start that have phases, without its first `skipped` steps."""
    starts = [i for i, row in enumerate(rows) if "wall_s" in row and row["wall_s"] is None]
    first = max(starts, default=0) + skipped
    return [row for row in rows[first:] if row.get("forward_s") or row.get("graph_s")]


def diagnose(
    rows: list[dict], hw: Hardware, on: Container[str] = (), workers: int = 0
) -> dict[str, str]:
    """What holds the newest steps of a log back, costliest first: {cause: sentence with its fix}.

    `on` names the switches that run; `workers` is the setting. Empty for a healthy run and for less
    than FEWEST steps.
    """
    recent = timed_rows(rows)[-RECENT:]
    if len(recent) < FEWEST:
        return {}
    gpu = hw.device == "cuda"
    device = "GPU" if gpu else "processor"
    step_s = statistics.fmean(row["step_s"] for row in recent)
    names = [f"{phase}_s" for phase in (*PHASES, "sync")]
    mean_s = {name: total(recent, name) / len(recent) for name in names}
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
        fix = "make `micro_batch` larger" if "cuda_graphs" in on else "turn CUDA graphs on"
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
    return {cause: line for _, cause, line in sorted(causes, reverse=True)}


def slowdown(timed: list[dict]) -> float:
    """How many times as long the newest steps take as the first ones; 1 if they are as fast."""
    count = min(RECENT, len(timed) // 2)
    # Seconds a token, without waiting for data.
    costs = [(row["step_s"] - row["data_s"]) / max(1, row["tokens"]) for row in timed]
    newest = statistics.median(costs[-count:])
    return newest / min(statistics.median(costs[:count]), newest)


def training_checks(rows: list[dict]) -> list[Check]:
    """Return the checks of a log's `rows`, thinned or not, but those that come too early."""
    checks = []
    recent = rows[-RECENT:]

    def check(what: str, measured: str, wanted: str, passed: bool, problem: str) -> None:
        checks.append(Check(what, measured, wanted, "" if passed else problem))

    if rows:
        skipped = sum(row["loss"] is None for row in recent)
        finite = f"{len(recent) - skipped} of {len(recent)} recent steps"
        passed = skipped <= MAX_NOT_FINITE * len(recent)
        fix = "steps are skipped: lower train.lr, or train in bf16 or fp32 instead of fp16"
        check("losses are finite", finite, f"{1 - MAX_NOT_FINITE:.0%} of them", passed, fix)
    losses = _numbers(rows, "loss")
    if len(losses) >= MIN_ROWS:
        fifth = len(losses) // 5
        first, last = statistics.median(losses[:fifth]), statistics.median(losses[-fifth:])
        falls = f"{first:.3f}, then {last:.3f}"
        fix = "nothing is learnt: try a lower train.lr, and listen to some recordings"
        check("the training loss falls", falls, "falling", last < first, fix)
    norms = _numbers(rows, "grad_norm")
    if len(norms) >= MIN_ROWS:
        usual, now = statistics.median(norms), statistics.median(norms[-MIN_ROWS // 2 :])
        norm = f"{now:.2g}, usually {usual:.2g}"
        wanted = f"at most {MAX_NORM_RISE:g} times as large"
        fix = "training becomes unstable: stop, lower train.lr, and resume"
        check("gradients stay as large as usual", norm, wanted, now <= MAX_NORM_RISE * usual, fix)
    timed = timed_rows(rows)
    if len(timed) >= MIN_ROWS:
        times = slowdown(timed)
        pace = f"{times:.1f} times as long as the first ones"
        wanted = f"at most {MAX_SLOWDOWN:g} times"
        fix = "another program uses this machine, or it is too hot (look at nvidia-smi, or top)"
        check("steps keep their pace", pace, wanted, times <= MAX_SLOWDOWN, fix)
    loads = _numbers(recent, "load")
    if loads:
        load = statistics.fmean(loads)
        busy = f"{load:.0%} of the time"
        fix = "it waits: take a larger data.micro_batch, and see what 05_benchmark finds"
        check("the device is busy", busy, f"{MIN_LOAD:.0%} or more", load >= MIN_LOAD, fix)
    steps, held_out = held_out_losses(rows).get("raw", ((), ()))
    if len(held_out) > PATIENCE:
        lowest = min(held_out)
        index = held_out.index(lowest)
        loss = f"{held_out[-1]:.3f}, lowest {lowest:.3f}"
        wanted = f"at most {MAX_RISE - 1:.0%} above the lowest"
        passed = len(held_out) - 1 - index < PATIENCE or held_out[-1] <= MAX_RISE * lowest
        fix = f"it rises since step {steps[index]:,}: more steps do not help"
        check("the held-out loss does not rise", loss, wanted, passed, fix)
    if held_out and len(losses) >= MIN_ROWS:
        own = statistics.median(losses[-MIN_ROWS // 2 :])
        both = f"held-out loss {held_out[-1]:.2f}, training loss {own:.2f}"
        wanted = f"at most {MAX_OVERFIT:g} times as high"
        passed = held_out[-1] <= MAX_OVERFIT * own
        fix = "it overfits: add recordings, or begin with a base voice (BASE_MODEL)"
        check("the recordings are not memorised", both, wanted, passed, fix)
    spoken = [row["gate"]["cer"] for row in rows if "cer" in (row.get("gate") or {})]
    if len(spoken) > 1:
        cers = f"CER {spoken[0]:.1%}, then {spoken[-1]:.1%}"
        fix = "listen to the samples: the voice has become harder to understand"
        check("what it speaks becomes clearer", cers, "falling", spoken[-1] <= spoken[0], fix)
    return checks


def health_line(rows: list[dict]) -> str:
    """Return every check on one line, for a panel; "" before there is a row."""
    return "   ".join(
        f"✗ {what} ({measured}): {problem}" if problem else f"✓ {what}"
        for what, measured, _, problem in training_checks(rows)
    )


def _numbers(rows: list[dict], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]
