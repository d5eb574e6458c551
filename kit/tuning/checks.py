"""Checks: what was measured, its bound, whether it passes, and what to do where it does not.

From the rows of a training's log, `learning_checks` judges whether it learns, `training_checks`
also how healthy it is, and `diagnose` says what its steps wait for. `gate_checks` judges a voice.
Thresholds are well above the noise of a healthy run.
"""

import math
import statistics
from collections.abc import Callable, Container
from typing import NamedTuple

from kit.base.hardware import Hardware
from kit.batches.code_stream import loader_workers
from kit.settings import GPTConfig
from kit.training.config import PHASES
from kit.training.logs import held_out_losses

MARKS = {True: "✓", False: "✗", None: "–"}
HEAD = ("", "check", "measured", "bound", "what it shows, or what to do")
TOO_FEW = "too few steps to judge"
MIN_STEPS = 100  # before a trend is judged
MIN_TIMED = 10  # before a diagnosis
SKIPPED = 5  # steps at each start: compiling, filling caches
RECENT = 100  # steps that count as the newest
MIN_LOAD = 0.7  # of the device
MAX_RISE = 1.03  # held-out loss over the lowest one
PATIENCE = 3  # validations since the lowest one
MAX_OVERFIT = 1.5  # held-out loss over training loss


class Check(NamedTuple):
    what: str  # is right where it passes
    figure: str
    bound: str
    passed: bool | None  # None: it cannot be judged, and `figure` says why
    note: str = ""  # what it shows, or what to do where it fails

    @property
    def sentence(self) -> str:
        if self.passed is None:
            return f"{self.what}: {self.figure}"
        note = f": {self.note}" if self.note and not self.passed else ""
        return f"{self.what}: {self.figure} (bound: {self.bound}){note}"

    def __str__(self) -> str:
        return f"{MARKS[self.passed]} {self.sentence}"


def judged(what: str, figure: str, bound: str, passed: bool | None, fix: str) -> Check:
    return Check(what, figure, bound, passed, fix if passed is False else "")


def at_most(what: str, value: float, bound: float, text: Callable, fix: str) -> Check:
    """A check of a number; `text` makes text of it and of its bound."""
    return judged(what, text(value), f"at most {text(bound)}", value <= bound, fix)


def problems(checks: list[Check]) -> list[str]:
    """A sentence for each check that fails."""
    return [check.sentence for check in checks if check.passed is False]


def table(checks: list[Check]) -> list[tuple[str, ...]]:
    return [HEAD, *((MARKS[c.passed], c.what, c.figure, c.bound, c.note) for c in checks)]


def short_lines(checks: list[Check]) -> list[str]:
    """A line for each check that does not pass, and one with all that do."""
    passing = "   ".join(f"✓ {check.what}" for check in checks if check.passed)
    return [*(str(check) for check in checks if not check.passed), passing]


# --- does a training learn? ----------------------------------------------------------------------


def guess_loss(model: GPTConfig) -> float:
    """The loss of a model that has learnt nothing, for which each id is as likely as the others."""
    return model.text_weight * math.log(model.text_vocab) + math.log(model.code_vocab)


def learning_checks(
    rows: list[dict], guess_loss: float | None = None, clear_cer: float = 0.0
) -> list[Check]:
    """The checks of a log that a finished training must pass.

    `guess_loss` is that of an untrained model, None: unknown. What it speaks must become clearer,
    unless its character error rate is at most `clear_cer`.
    """
    losses = numbers(rows, "loss")
    cers = [row["gate"]["cer"] for row in rows if (row.get("gate") or {}).get("cer") is not None]
    loss = cer = TOO_FEW
    last = falls = clearer = None
    if len(losses) >= MIN_STEPS:
        fifth = len(losses) // 5
        first, last = statistics.median(losses[:fifth]), statistics.median(losses[-fifth:])
        loss = f"{first:.3f}, then {last:.3f}"
        falls = last < first
        if len(cers) > 1:
            cer = f"CER {cers[0]:.1%}, then {cers[-1]:.1%}"
            clearer = cers[-1] < cers[0] or cers[-1] <= clear_cer
    fix = "nothing is learnt: lower train.lr, and listen to some recordings"
    checks = [judged("the training loss falls", loss, "falling", falls, fix)]
    if guess_loss is not None:
        below = None if last is None else last < guess_loss
        bound = f"below {guess_loss:.3f}"
        checks.append(judged("the loss is below guessing", loss, bound, below, fix))
    if cers:
        bound = f"falling, or at most {clear_cer:.1%}"
        fix = "listen to the samples, train longer, or lower train.lr"
        checks.append(judged("what it speaks becomes clearer", cer, bound, clearer, fix))
    return checks


def training_checks(rows: list[dict], **limits: float) -> list[Check]:
    """Those of `learning_checks`, which takes the `limits`, and whether a training is healthy."""
    checks = learning_checks(rows, **limits)
    recent = rows[-RECENT:]
    if recent:
        finite = len(numbers(recent, "loss")) / len(recent)
        fix = "steps are skipped: lower train.lr, or train in bf16 or fp32 instead of fp16"
        figure = f"{finite:.0%} of recent steps"
        checks.append(judged("losses are finite", figure, "at least 99%", finite >= 0.99, fix))
    norms = numbers(rows, "grad_norm")
    if len(norms) >= MIN_STEPS:
        times = statistics.median(norms[-20:]) / max(statistics.median(norms), 1e-12)
        fix = "training becomes unstable: stop, lower train.lr, and resume"
        text = "{:.1f} times the usual norm".format
        checks.append(at_most("gradients stay as large as usual", times, 10, text, fix))
    timed = timed_rows(rows)
    if len(timed) >= MIN_STEPS:
        fix = "another program uses this machine, or it is too hot (look at nvidia-smi, or top)"
        text = "{:.1f} times as long as the first ones".format
        checks.append(at_most("steps keep their pace", slowdown(timed), 1.5, text, fix))
    loads = numbers(recent, "load")
    if loads:
        load = statistics.fmean(loads)
        figure = f"{load:.0%} of the time"
        bound = f"at least {MIN_LOAD:.0%}"
        fix = "it waits: take a larger data.micro_batch, and see what 05_benchmark finds"
        checks.append(judged("the device is busy", figure, bound, load >= MIN_LOAD, fix))
    return checks + held_out_checks(rows)


def held_out_checks(rows: list[dict]) -> list[Check]:
    """Whether what a training learns also helps with sentences that it did not see."""
    steps, held_out = held_out_losses(rows).get("raw", ((), ()))
    losses = numbers(rows, "loss")
    checks = []
    if len(held_out) > PATIENCE:
        lowest = min(held_out)
        index = held_out.index(lowest)
        passed = len(held_out) - 1 - index < PATIENCE or held_out[-1] <= MAX_RISE * lowest
        figure = f"{held_out[-1]:.3f}, lowest {lowest:.3f}"
        bound = f"at most {MAX_RISE - 1:.0%} above the lowest"
        fix = f"it rises since step {steps[index]:,}: more steps do not help"
        checks.append(judged("the held-out loss does not rise", figure, bound, passed, fix))
    if held_out and len(losses) >= MIN_STEPS:
        times = held_out[-1] / statistics.median(losses[-20:])
        text = "{:.2f} times the training loss".format
        fix = "it overfits: add recordings, or begin with a base voice (BASE_MODEL)"
        what = "the recordings are not memorised"
        checks.append(at_most(what, times, MAX_OVERFIT, text, fix))
    return checks


# --- what do its steps wait for? -----------------------------------------------------------------


def step_shares(rows: list[dict], skipped: int = SKIPPED) -> dict[str, float]:
    """The share of each phase of the newest steps of a log; {} where it has none."""
    rows = timed_rows(rows, skipped)[-RECENT:]
    total_s = total(rows, "step_s")
    return {words: total(rows, f"{phase}_s") / total_s for phase, words in PHASES.items() if rows}


def diagnose(
    rows: list[dict], hw: Hardware, on: Container[str] = (), workers: int = 0
) -> list[Check]:
    """What holds the newest steps of a log back, each with the one setting that changes it.

    `on` names the switches that run; `workers` is the setting. [] for a healthy run and for fewer
    than MIN_TIMED steps.
    """
    recent = timed_rows(rows)[-RECENT:]
    if len(recent) < MIN_TIMED:
        return []
    steps_s, wall_s = total(recent, "step_s"), total(recent, "wall_s")
    share = {phase: total(recent, f"{phase}_s") / steps_s for phase in (*PHASES, "sync")}
    evaluating = total(recent, "eval_s") / wall_s
    saving = 1 - evaluating - steps_s / wall_s
    of_step, of_time = "{:.0%} of a step".format, "{:.0%} of the time".format

    made = 1.0 if "pinned_memory" in on or workers else share["data"]
    advised = max(workers + 1, loader_workers(hw, made, 1 - share["data"]))
    fix = f"set `workers` to {advised} (now {workers}), so that other processes make the batches"
    checks = [at_most("no step waits for data", share["data"], 0.1, of_step, fix)]
    if hw.device == "cuda" and checks[0].passed:
        fix = "make `micro_batch` larger" if "cuda_graphs" in on else "turn CUDA graphs on"
        # A GPU that has less work queued waits for the CPU to start its kernels.
        figure = f"the CPU waits for it {share['sync']:.0%} of a step"
        passed = share["sync"] >= 0.03
        checks.append(judged("steps keep the GPU busy", figure, "at least 3%", passed, fix))
    fix = "turn Pinned memory on"
    checks.append(at_most("batches are copied quickly", share["copy"], 0.05, of_step, fix))
    fix = "make `effective_batch` larger, or use fewer GPUs"
    checks.append(at_most("gradients are summed quickly", share["reduce"], 0.2, of_step, fix))
    fix = "make `save_steps` larger, or keep the run on a local disk"
    checks.append(at_most("checkpoints and logs are quick", saving, 0.15, of_time, fix))
    fix = "make `eval_steps` and `gate_every` larger"
    checks.append(at_most("evaluation is quick", evaluating, 0.35, of_time, fix))
    peak_bytes, reserved_bytes = recent[-1]["memory_bytes"], recent[-1]["reserved_bytes"]
    if reserved_bytes > 0.8 * hw.memory_bytes:
        fix = "set `length_multiple` to 64, so that batches have fewer shapes"
        text = "{:.1f} times the peak is reserved".format
        what = "memory is not fragmented"
        checks.append(at_most(what, reserved_bytes / peak_bytes, 1.3, text, fix))
    return [check for check in checks if not check.passed]


def slowdown(timed: list[dict]) -> float:
    """How many times as long the newest steps take as the first ones; 1 if they are as fast."""
    count = min(RECENT, len(timed) // 2)
    # Seconds a token, without waiting for data.
    costs = [(row["step_s"] - row["data_s"]) / max(1, row["tokens"]) for row in timed]
    newest = statistics.median(costs[-count:])
    return newest / min(statistics.median(costs[:count]), newest)


def timed_rows(rows: list[dict], skipped: int = SKIPPED) -> list[dict]:
    """The rows of the newest start that have phases, without its first `skipped` steps."""
    starts = [i for i, row in enumerate(rows) if "wall_s" in row and row["wall_s"] is None]
    first = max(starts, default=0) + skipped
    return [row for row in rows[first:] if row.get("forward_s") or row.get("graph_s")]


def total(rows: list[dict], name: str) -> float:
    """The sum of a field of `rows`; logs of earlier versions may lack it."""
    return sum(row.get(name, 0.0) for row in rows)


def numbers(rows: list[dict], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


# --- may a voice be used? ------------------------------------------------------------------------


def gate_checks(
    figures: dict, floor_cer: float, worst_cer: float, fix: str = "train longer"
) -> list[Check]:
    """The checks of a voice's `figures` (`Scores.figures`); `fix` is what `suggest_fix` returns."""
    cer = figures["cer"]
    text = "{:.1%} CER".format
    unable = recognizer_warning(floor_cer, worst_cer)
    return [
        at_most("the recogniser can judge recordings", floor_cer, worst_cer, text, unable),
        at_most("intelligible", cer, worst_cer, text, f"recordings have {floor_cer:.1%}; {fix}"),
        *ending_checks(figures, fix),
    ]


def ending_checks(figures: dict, fix: str) -> list[Check]:
    """The checks of `figures` that need no transcript."""
    ended, pace = figures["eos_rate"], figures["duration_ratio"]
    runaway = "{:.1%} over twice as long as recorded".format
    paced = 0.8 < pace < 1.25
    return [
        judged("ends its sentences", f"{ended:.1%} of them", "all", ended == 1, fix),
        at_most("does not run away", figures["runaway_rate"], 0.02, runaway, fix),
        judged("keeps the pace", f"{pace:.2f} times the recordings", "0.80 to 1.25", paced, fix),
    ]


def suggest_fix(loss: float | None, held_out_loss: float | None) -> str:
    """What may make a voice clearer, given training and held-out loss, if known."""
    if loss is None or held_out_loss is None or held_out_loss <= MAX_OVERFIT * loss:
        return "train longer"
    return (
        f"it has overfitted (training loss {loss:.2f}, held-out loss {held_out_loss:.2f}), so more "
        "steps do not help; more recordings would, or a base voice (BASE_MODEL in 01_data_prep, "
        "--base-model)"
    )


def recognizer_warning(cer_on_recordings: float | None, worst_cer: float) -> str:
    """Why the recogniser cannot judge a voice, or "" (also if its error is unknown)."""
    if cer_on_recordings is None or cer_on_recordings <= worst_cer:
        return ""
    return (
        f"the recogniser itself mistakes {cer_on_recordings:.1%} of the letters of recordings: it "
        f"cannot tell whether a voice is below {worst_cer:.1%}, only which voice is better; "
        "listen yourself, give it more `minutes` (preset, section `recognizer`) or more "
        "recordings, or use Whisper instead (--set recognizer.whisper=base)"
    )
