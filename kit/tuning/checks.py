"""Checks: what was measured, its bound, whether it passes, and what to do where it does not.

From the rows of a training's log, `learning_checks` judges whether it learns, `training_checks`
also how healthy it is, and `diagnose` says what its steps wait for. `gate_checks` judges a voice.
Thresholds are well above the noise of a healthy run.
"""

import math
import statistics
from collections.abc import Container
from typing import NamedTuple

from kit.base.hardware import Hardware
from kit.batches.code_stream import loader_workers
from kit.settings import GPTConfig
from kit.training.config import PHASES

MARKS = {True: "✓", False: "✗", None: "–"}
HEAD = ("", "check", "measured", "bound", "what it shows, or what to do")
TOO_FEW = "too few steps to judge"
MIN_STEPS = 100  # before a trend is judged
MIN_TIMED = 10  # before a diagnosis
SKIPPED = 5  # steps at each start: compiling, filling caches
FIRST_STEPS = 50  # in which a training that diverges does so
MAX_FIRST = 1.2  # of the first loss, in these steps
RECENT = 100  # steps that count as the newest
MAX_OVERFIT = 1.5  # held-out loss over training loss


class Check(NamedTuple):
    what: str  # was measured
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


def at_most(what: str, value: float, bound: float, text: str, fix: str) -> Check:
    """A check of a number; `text` has a place for it, and for its bound."""
    return judged(what, text.format(value), f"at most {text.format(bound)}", value <= bound, fix)


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


def learning_checks(rows: list[dict], guess_loss: float, clear_cer: float) -> list[Check]:
    """The checks of a log that a finished training must pass.

    What it speaks must become clearer, unless its character error rate is at most `clear_cer`.
    """
    losses = numbers(rows, "loss")
    cers = numbers([row.get("gate") or {} for row in rows], "cer")
    loss = cer = TOO_FEW
    falls = below = clearer = None
    if len(losses) >= MIN_STEPS:
        fifth = len(losses) // 5
        first, last = statistics.median(losses[:fifth]), statistics.median(losses[-fifth:])
        loss = f"{first:.3f}, then {last:.3f}"
        falls, below = last < first, last < guess_loss
        if len(cers) > 1:
            cer = f"CER {cers[0]:.1%}, then {cers[-1]:.1%}"
            clearer = cers[-1] < cers[0] or cers[-1] <= clear_cer
    fix = "lower the learning rate (train.lr), and listen to some recordings"
    guessing = f"below {guess_loss:.3f}"
    clear = f"falling, or at most {clear_cer:.1%}"
    longer = "train longer, or lower the learning rate (train.lr)"
    checks = [
        judged("training loss", loss, "falling", falls, fix),
        judged("loss against guessing", loss, guessing, below, fix),
        judged("errors in what it speaks", cer, clear, clearer, longer),
    ]
    return checks if cers else checks[:2]


def training_checks(rows: list[dict], guess_loss: float, clear_cer: float) -> list[Check]:
    """Those of `learning_checks`, and whether a training is healthy as far as it was measured."""
    checks = learning_checks(rows, guess_loss, clear_cer)
    recent = rows[-RECENT:]
    losses, norms = numbers(rows, "loss"), numbers(rows, "grad_norm")
    loads, held_out = numbers(recent, "load"), numbers(rows, "val_loss")
    lower = "lower the learning rate (train.lr)"
    if len(losses) >= MIN_STEPS and rows[0].get("step") == 1:
        times = max(losses[:FIRST_STEPS]) / losses[0]
        fix = f"more warm-up steps (train.warmup_steps), or {lower}"
        text = "{:.2f} times the first loss"
        checks.append(at_most("first steps", times, MAX_FIRST, text, fix))
    if recent:
        skipped = 1 - len(numbers(recent, "loss")) / len(recent)
        fix = f"{lower}, or train in bf16 or fp32 instead of fp16"
        checks.append(at_most("steps without a finite loss", skipped, 0.01, "{:.0%}", fix))
    if len(norms) >= MIN_STEPS:
        times = statistics.median(norms[-20:]) / statistics.median(norms)
        fix = f"training becomes unstable: stop, {lower}, and resume"
        checks.append(at_most("gradient norm", times, 10, "{:.1f} times the usual", fix))
    if loads:
        idle = 1 - statistics.fmean(loads)
        fix = "it waits: try a larger micro-batch (data.micro_batch), and run 05_benchmark"
        checks.append(at_most("idle device", idle, 0.3, "{:.0%} of the time", fix))
    if held_out and len(losses) >= MIN_STEPS:
        times = held_out[-1] / statistics.median(losses[-20:])
        text = "held-out loss {:.2f} times as high as the training loss"
        fix = "it overfits: add recordings, or begin with a base voice (BASE_MODEL)"
        checks.append(at_most("memorising", times, MAX_OVERFIT, text, fix))
    return checks


# --- what do its steps wait for? -----------------------------------------------------------------


def step_shares(rows: list[dict]) -> dict[str, float]:
    """The share of each phase of the newest steps of a log; {} where it has none."""
    rows = timed_rows(rows)
    total_s = total(rows, "step_s")
    return {words: total(rows, f"{phase}_s") / total_s for phase, words in PHASES.items() if rows}


def diagnose(
    rows: list[dict], hw: Hardware, on: Container[str] = (), workers: int = 0
) -> list[Check]:
    """What holds the newest steps of a log back, each with the one setting that changes it.

    `on` names the switches that run; `workers` is the setting. [] for a healthy run and for fewer
    than MIN_TIMED steps.
    """
    recent = timed_rows(rows)
    if len(recent) < MIN_TIMED:
        return []
    steps_s, wall_s = total(recent, "step_s"), total(recent, "wall_s")
    share = {phase: total(recent, f"{phase}_s") / steps_s for phase in (*PHASES, "sync")}
    evaluating = total(recent, "eval_s") / wall_s
    saving = 1 - evaluating - steps_s / wall_s
    made = 1.0 if "pinned_memory" in on or workers else share["data"]
    advised = max(workers + 1, loader_workers(hw, made, 1 - share["data"]))
    workers_fix = f"set workers (data.workers) to {advised} (now {workers}): they make batches"
    reduce_fix = "a larger effective batch (data.effective_batch), or fewer GPUs"
    save_fix = "fewer checkpoints (a larger train.save_steps), or keep the run on a local disk"
    evaluate_fix = "evaluate more seldom (train.eval_steps and train.gate_every)"
    of_step, of_time = "{:.0%} of a step", "{:.0%} of the time"
    checks = [
        at_most("waiting for data", share["data"], 0.1, of_step, workers_fix),
        at_most("copying batches", share["copy"], 0.05, of_step, "turn Pinned memory on"),
        at_most("summing gradients", share["reduce"], 0.2, of_step, reduce_fix),
        at_most("checkpoints and logs", saving, 0.15, of_time, save_fix),
        at_most("evaluation", evaluating, 0.35, of_time, evaluate_fix),
    ]
    if hw.device == "cuda" and checks[0].passed:
        fix = "turn CUDA graphs on"
        if "cuda_graphs" in on:
            fix = "a larger micro-batch (data.micro_batch)"
        # A GPU that has less work queued waits for the CPU to start its kernels.
        figure, passed = f"for {share['sync']:.0%} of a step", share["sync"] >= 0.03
        checks.append(judged("work queued for the GPU", figure, "at least 3%", passed, fix))
    ram = numbers(recent, "ram_bytes")
    if ram:
        fix = "fewer workers (data.workers), or close other programs: without RAM training is ended"
        text = "{:.0%} of this machine's"
        checks.append(at_most("RAM", max(ram) / hw.ram_bytes, 0.9, text, fix))
    return [check for check in checks if not check.passed]


def timed_rows(rows: list[dict]) -> list[dict]:
    """The newest rows that have phases, of the newest start without its first steps."""
    starts = [i for i, row in enumerate(rows) if "wall_s" in row and row["wall_s"] is None]
    first = max(starts, default=0) + SKIPPED
    timed = [row for row in rows[first:] if row.get("forward_s") or row.get("graph_s")]
    return timed[-RECENT:]


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
    unable = recognizer_warning(floor_cer, worst_cer)
    return [
        at_most("CER of recordings", floor_cer, worst_cer, "{:.1%}", unable),
        at_most("CER of the voice", figures["cer"], worst_cer, "{:.1%}", fix),
        *ending_checks(figures, fix),
    ]


def ending_checks(figures: dict, fix: str) -> list[Check]:
    """The checks of `figures` that need no transcript."""
    ended, pace = figures["eos_rate"], figures["duration_ratio"]
    runaway = "{:.1%} over twice as long as recorded"
    paced = 0.8 < pace < 1.25
    return [
        judged("sentences that end", f"{ended:.1%} of them", "all", ended == 1, fix),
        at_most("sentences far too long", figures["runaway_rate"], 0.02, runaway, fix),
        judged("length of speech", f"{pace:.2f} times the recordings", "0.80 to 1.25", paced, fix),
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
