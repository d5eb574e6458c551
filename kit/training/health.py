"""Is a training going well? Checks of the rows of its log, while it runs and afterwards."""

import statistics

from kit.training.logs import held_out_losses

RECENT = 100  # rows
WARM_UP = 10  # rows, which compile and fill caches
MIN_ROWS = 40  # before a trend is judged
MAX_NOT_FINITE = 0.01  # share of recent steps
MAX_RISE = 1.03  # held-out loss over the lowest one
PATIENCE = 3  # validations since the lowest one
MAX_OVERFIT = 1.5  # held-out loss over training loss
MAX_NORM_RISE = 10.0  # recent gradient norm over the median
MAX_SLOWDOWN = 1.5  # recent seconds a step over the median
MIN_LOAD = 0.5  # of the device


def training_checks(rows: list[dict]) -> list[tuple[str, str, str, str]]:
    """Return (what, found, wanted, problem) of each check; problem is "" where it passes.

    `rows` are the log's, thinned or not. What cannot be judged yet is left out.
    """
    checks = []
    recent = rows[-RECENT:]

    def check(what: str, found: str, wanted: str, passed: bool, problem: str) -> None:
        checks.append((what, found, wanted, "" if passed else problem))

    if rows:
        skipped = sum(row["loss"] is None for row in recent)
        check(
            "losses are finite",
            f"{len(recent) - skipped} of {len(recent)} recent steps",
            f"{1 - MAX_NOT_FINITE:.0%} of them",
            skipped <= MAX_NOT_FINITE * len(recent),
            "steps are skipped: lower train.lr, or train in bf16 or fp32 instead of fp16",
        )
    losses = [row["loss"] for row in rows if row["loss"] is not None]
    if len(losses) >= MIN_ROWS:
        first, last = _median(losses[: len(losses) // 5]), _median(losses[-len(losses) // 5 :])
        check(
            "the training loss falls",
            f"{first:.3f}, then {last:.3f}",
            "falling",
            last < first,
            "nothing is learnt: try a lower train.lr, and listen to some recordings",
        )
    norms = _numbers(rows, "grad_norm")
    if len(norms) >= MIN_ROWS:
        usual, now = _median(norms), _median(norms[-MIN_ROWS // 2 :])
        check(
            "gradients stay as large as usual",
            f"{now:.2g}, usually {usual:.2g}",
            f"at most {MAX_NORM_RISE:g} times as large",
            now <= MAX_NORM_RISE * usual,
            "training becomes unstable: stop, lower train.lr, and resume",
        )
    seconds = _numbers(rows[WARM_UP:], "step_s")
    if len(seconds) >= MIN_ROWS:
        usual, now = _median(seconds), _median(seconds[-MIN_ROWS // 4 :])
        check(
            "steps keep their pace",
            f"{now:.3g} s a step, usually {usual:.3g} s",
            f"at most {MAX_SLOWDOWN:g} times as long",
            now <= MAX_SLOWDOWN * usual,
            "something else uses this machine, or it is hot and has slowed down",
        )
    loads = _numbers(recent, "load")
    if loads:
        load = statistics.fmean(loads)
        check(
            "the device is busy",
            f"{load:.0%} of the time",
            f"{MIN_LOAD:.0%} or more",
            load >= MIN_LOAD,
            "it waits: take a larger data.micro_batch, and see what 05_benchmark finds",
        )
    steps, held_out = held_out_losses(rows).get("raw", ((), ()))
    if len(held_out) > PATIENCE:
        lowest = min(held_out)
        since = len(held_out) - 1 - held_out.index(lowest)
        check(
            "the held-out loss does not rise",
            f"{held_out[-1]:.3f}, lowest {lowest:.3f}",
            f"at most {MAX_RISE - 1:.0%} above the lowest",
            since < PATIENCE or held_out[-1] <= MAX_RISE * lowest,
            f"it rises since step {steps[held_out.index(lowest)]:,}: more steps do not help",
        )
    if held_out and len(losses) >= MIN_ROWS:
        own = _median(losses[-MIN_ROWS // 2 :])
        check(
            "the recordings are not memorised",
            f"held-out loss {held_out[-1]:.2f}, training loss {own:.2f}",
            f"at most {MAX_OVERFIT:g} times as high",
            held_out[-1] <= MAX_OVERFIT * own,
            "it overfits: add recordings, or begin with a base voice (BASE_MODEL)",
        )
    spoken = [row["gate"]["cer"] for row in rows if "cer" in (row.get("gate") or {})]
    if len(spoken) > 1:
        check(
            "what it speaks becomes clearer",
            f"CER {spoken[0]:.1%}, then {spoken[-1]:.1%}",
            "falling",
            spoken[-1] <= spoken[0],
            "listen to the samples: the voice has become harder to understand",
        )
    return checks


def health_line(rows: list[dict]) -> str:
    """Return every check on one line, for a panel; "" before there is a row."""
    lines = []
    for what, found, _, problem in training_checks(rows):
        lines.append(f"✗ {what} ({found}): {problem}" if problem else f"✓ {what}")
    return "   ".join(lines)


def _median(values: list[float]) -> float:
    return statistics.median(values)


def _numbers(rows: list[dict], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]
