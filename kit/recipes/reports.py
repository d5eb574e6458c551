"""What the records of runs say: the checklist of one, and two side by side.

Nothing is trained or measured again; only `Compare.listen` lets both voices speak.
"""

import dataclasses
import shlex
from collections.abc import Callable, Iterator

import numpy as np

from kit.base.config import build
from kit.base.errors import KitError
from kit.base.files import write_atomic
from kit.base.formatting import figure_text, flat, format_gib, text_grid
from kit.base.run import Run, find_run, read_run_file, require_run
from kit.notebook.plots import column, curves, smooth, thin
from kit.notebook.result import Result, Sound
from kit.recipes.base_model import MIN_HOURS, too_few_hours
from kit.recipes.evaluate import voice_checks
from kit.recipes.open_run import ActiveRun, activate
from kit.recipes.speak import Speaking
from kit.settings import ManifestConfig
from kit.training.logs import held_out_losses, read_log
from kit.tuning.checks import HEAD, Check, judged, table, training_checks

SENTENCES = 3  # to listen to
# Of the record: the command that writes each section.
SECTIONS = {"data": "prepare", "text": "prepare", "setup": "setup", "train": "train"}
SKIPPED = "Skipped: RUN_B is empty. Write the name of a second run there to compare it with."
# Of the record: name, section, key, and how it is written.
FIGURES = (
    ("hours of speech", "data", "hours", "{:.2f}".format),
    ("steps", "train", "steps", "{:,}".format),
    ("steps/s", "train", "steps_per_s", "{:.3g}".format),
    ("peak memory", "train", "peak_memory_bytes", format_gib),
    ("training loss", "train", "loss", "{:.3f}".format),
    ("held-out loss", "train", "val_loss", "{:.3f}".format),
    ("held-out loss, EMA", "train", "ema_val_loss", "{:.3f}".format),
    ("CER", "eval", "cer", "{:.2%}".format),
    ("CER of the recordings", "eval", "cer_floor", "{:.2%}".format),
    ("sentences that end", "eval", "eos_rate", "{:.1%}".format),
    ("real-time factor", "infer", "real_time_factor", "{:.3f}".format),
)


class Checklist:
    """What must be right before, during and after training, read from the run's report and log.

    What was not recorded is not passed: its row names the command that measures it. Once training
    is finished, what was wrong during it is a note: only the voice counts.
    """

    def __init__(self, run: Run):
        self.active_run = run
        self.report = run.report()
        limits = build(ManifestConfig, run.section("manifest"))
        self.max_rejected_percent = limits.max_rejected_percent

    def run(self) -> Iterator[Result]:
        yield self.result()

    def result(self) -> Result:
        """The list as a table, and the verdict as a line."""
        train = self.report.get("train", {})
        log = read_log(self.active_run.folder / "train.jsonl")
        during = training_checks(log, **train.get("limits", {})) if log else []
        checks = {"before": self.before(), "during": during, "after": self.after()}
        grid = [("training", *HEAD)]
        counted = []
        for when, own in checks.items():
            title = when
            if when == "during" and train.get("finished"):
                title = "during (only a note)"
            else:
                counted += [check for check in own if check.passed is not None]
            grid += [(title, *row) for row in table(own)[1:]]
        failing = [check for check in counted if not check.passed]
        line = f"All {len(counted)} checks pass: the voice is ready."
        if failing:
            passed = len(counted) - len(failing)
            line = f"{passed} of {len(counted)} checks pass. Next: {failing[0].note}"
        return Result(line=line, grid=grid)

    def before(self) -> list[Check]:
        least = f"{MIN_HOURS:g} hours of a person, or a base model"
        most = f"at most {self.max_rejected_percent:g} % of the hours"
        letters = "no bytes, every text comes back"
        row = self.row
        checks = [
            row("enough recordings", least, self.recordings, "data.hours", "data.utterances"),
            row("few rejected clips", most, self.rejected, "data.refused_percent", "data.refused"),
            row("the letters are known", letters, self.tokens, "text.byte_rate", "text.round_trip"),
            row("texts match their sound", "judged", self.alignment, "data.alignment"),
            row("the preset suits", "the machine", self.preset, "setup.preset for this machine"),
            row("a step fits", "in memory", self.memory, "train.longest_step_bytes"),
        ]
        verified = self.report.get("verify")
        if verified:
            failed = ", ".join(verified["failed"])
            fix = "do not trust this training: see docs/verify.md"
            figure = f"{failed} failed" if failed else "no proof failed"
            checks.append(judged("training is right, here", figure, "none", not failed, fix))
        return checks

    def row(self, what: str, bound: str, judge: Callable, *names: str) -> Check:
        """Check figures of the report; `judge` returns them as text, and what to do ("": pass)."""
        values = []
        for section, name in (name.split(".") for name in names):
            recorded = self.report.get(section, {})
            if name not in recorded:
                return Check(what, "not yet", bound, False, self.command(SECTIONS[section]))
            values.append(recorded[name])
        figure, fix = judge(*values)
        return Check(what, figure, bound, not fix, fix)

    def recordings(self, hours: float, utterances: int) -> tuple[str, str]:
        measured = f"{hours:.2f} hours, {utterances:,} utterances"
        return measured, too_few_hours(self.active_run, hours)

    def rejected(self, percent: float, rows: int) -> tuple[str, str]:
        passed = percent <= self.max_rejected_percent
        fix = "" if passed else "ledger.jsonl names each row and its fix"
        return f"{percent:.2f} %, {rows:,} rows", fix

    def tokens(self, byte_rate: float, round_trip: float) -> tuple[str, str]:
        passed = byte_rate == 0 and round_trip == 1
        fix = "" if passed else "look for stray letters in the texts (`uncovered` in text)"
        return f"{byte_rate:.2%} bytes, {round_trip:.1%} come back", fix

    def alignment(self, note: str) -> tuple[str, str]:
        listen = "listen to some clips: the recogniser could not judge them"
        return note, listen if note.startswith("not judged") else ""

    def preset(self, suitable: str) -> tuple[str, str]:
        own = self.active_run.preset_name
        fix = f"begin a new run with --preset {suitable}, or keep `{own}` on purpose"
        return f"{own}; {suitable} suits this machine", "" if own == suitable else fix

    def memory(self, sizes: dict) -> tuple[str, str]:
        needed = sizes.get("reserved") or sizes.get("measured") or sizes["planned"]
        fix = "take --use low_memory, or the preset of a smaller tier"
        measured = f"{format_gib(needed)} of {format_gib(sizes['limit'])}"
        return measured, "" if needed <= sizes["limit"] else fix

    def after(self) -> list[Check]:
        """Whether training has ended, and the gate's checks of what evaluation has recorded."""
        train = self.report.get("train", {})
        steps = f"{train['steps']:,} steps" if "steps" in train else "not yet"
        fix = self.command("train")
        finished = bool(train.get("finished"))
        trained = judged("training is finished", steps, "to its end", finished, fix)
        figures = self.report.get("eval", {})
        if "cer" in figures:
            return [trained, *voice_checks(self.active_run, figures, figures["cer_floor"])]
        fix = self.command("evaluate")
        return [trained, Check("intelligible", "not yet", "the gate passed", False, fix)]

    def command(self, name: str) -> str:
        return f"python -m kit {name} --run {shlex.quote(self.active_run.name)}"


class Compare:
    """Run `run_a` beside `run_b`, another run or its name; with "" every step is skipped.

    Raises KitError for a run that does not exist, and for a run beside itself.
    """

    def __init__(self, run_a: Run, run_b: Run | str):
        if isinstance(run_b, str):
            run_b = existing_run(run_b) if run_b else None
        if run_b and run_b.folder.resolve() == run_a.folder.resolve():
            raise KitError(f"`{run_a.name}` cannot be compared with itself: name another run.")
        self.runs = {run.name: run for run in (run_a, run_b) if run}

    def result(self) -> Result:
        """Loss curves of both, then a table: figures, and settings that differ."""
        if len(self.runs) == 1:
            return Result(line=SKIPPED)
        lines = self.losses()
        pictures = [curves(lines, "step", "loss (nats per target)")] if lines else []
        differing = self.differing_settings()
        line = f"{' beside '.join(self.runs)}: {len(differing)} settings differ"
        grid = [("", *self.runs), *self.figures(), *differing]
        return Result(line=line, pictures=pictures, grid=grid)

    def losses(self) -> dict[str, tuple]:
        """(steps, losses) by the name of each curve: training, smoothed, and held out."""
        lines = {}
        for name, run in self.runs.items():
            rows = read_log(run.folder / "train.jsonl")
            if rows:
                few = thin(rows)
                losses = smooth(column(few, "loss"), len(few) // 30)
                lines[f"{name}, training"] = (column(few, "step"), losses)
            for weights, line in held_out_losses(rows).items():
                lines[f"{name}, held out, {weights}"] = line
        return lines

    def figures(self) -> list[tuple[str, ...]]:
        reports = [run.report() for run in self.runs.values()]
        rows = []
        for name, section, key, write in FIGURES:
            values = [report.get(section, {}).get(key) for report in reports]
            if any(value is not None for value in values):
                rows.append((name, *("-" if value is None else write(value) for value in values)))
        return rows

    def differing_settings(self) -> list[tuple[str, ...]]:
        """A row for each setting, and for machine, versions and recordings, that differ."""
        columns = []
        for run in self.runs.values():
            report = run.report()
            values = {"preset": run.preset_name, "use": run.use or "-"}
            values["recordings"] = read_run_file(run.folder / "data") or "-"
            values |= {name: report.get(name, "-") for name in ("device", "git")}
            values |= dict(flat(report.get("versions", {}), "versions."))
            columns.append(values | dict(flat(run.preset)))
        names = dict.fromkeys([*columns[0], *columns[1]])
        missing = object()
        rows = []
        for name in names:
            pair = [values.get(name, missing) for values in columns]
            if pair[0] != pair[1]:
                rows.append((name, *("-" if v is missing else figure_text(v) for v in pair)))
        return rows

    def listen(self, count: int = SENTENCES) -> Result:
        """The same held-out sentences spoken by both voices, equally loud."""
        if len(self.runs) == 1:
            return Result(line=SKIPPED)
        voices = []
        for run in self.runs.values():
            voices.append(Speaking(run if isinstance(run, ActiveRun) else activate(run)))
        texts = [row.text for row in voices[0].held_out if voices[1].voice.can_speak(row.text)]
        if not texts:
            raise KitError(
                f"One of {', '.join(self.runs)} can speak no held-out sentence of the other: "
                "compare runs of one language."
            )
        speech = [each.voice.speak(texts[:count], each.speaker, each.sampling) for each in voices]
        sounds = []
        for text, *spoken in zip(texts, *speech):
            waves = same_level([np.asarray(each.wave) for each in spoken])
            for name, voice, wave in zip(self.runs, voices, waves):
                sounds.append(
                    Sound(caption=f"{name}: {text}", wave=wave, sample_rate_hz=voice.rate_hz)
                )
        return Result(line=f"{' and '.join(self.runs)}, equally loud", sounds=sounds)


def write_comparison(
    run: str,
    with_: str = "",  # the other run
) -> Result:
    """Write a page with the run `run` beside the run `with_`; the command `compare`."""
    if not with_:
        raise KitError("Name the run to compare with: --with NAME.")
    first = existing_run(run)
    result = Compare(first, with_).result()
    page = first.folder / f"compare-{with_}.html"
    write_atomic(page, f"<!doctype html><meta charset='utf-8'>{result._repr_html_()}")
    line = f"{result.line}\n{text_grid(result.grid)}\nWith the loss curves: {page}"
    return dataclasses.replace(result, line=line, grid=())


def existing_run(name: str) -> Run:
    """Return the run `name`. Raises KitError where there is none, with the nearest name."""
    folder = require_run(name)
    return find_run(read_run_file(folder / "preset"), name=name)


def same_level(waves: list[np.ndarray]) -> list[np.ndarray]:
    """Return `waves` (L,) scaled down to the lowest RMS of them: the louder one sounds better."""
    levels = [float(np.sqrt(np.mean(np.square(wave)))) if len(wave) else 0.0 for wave in waves]
    lowest = min(levels)
    return [wave * (lowest / level) if lowest else wave for wave, level in zip(waves, levels)]
