"""What the records of runs say: the checklist of one, and two side by side.

Nothing is trained or measured again; only `Compare.listen` lets both voices speak.
"""

import dataclasses
import shlex
from collections.abc import Iterator

import numpy as np

from kit.base.checks import Check, problems_of
from kit.base.config import build
from kit.base.errors import KitError
from kit.base.files import write_atomic
from kit.base.formatting import figure_text, flat, format_gib, text_grid
from kit.base.run import Run, find_run, read_run_file, require_run
from kit.inference.evaluate import Scores
from kit.notebook.plots import column, curves, smooth, thin
from kit.notebook.result import Result, Sound
from kit.recipes.base_model import MIN_HOURS, too_few_hours
from kit.recipes.evaluate import voice_checks
from kit.recipes.open_run import ActiveRun, activate
from kit.recipes.speak import Speaking
from kit.settings import ManifestConfig
from kit.training.logs import held_out_losses, read_log
from kit.tuning.doctor import training_checks

SENTENCES = 3  # to listen to
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
        self.most_rejected_percent = limits.max_rejected_percent

    def run(self) -> Iterator[Result]:
        yield self.result()

    def result(self) -> Result:
        """The list as a table, and the verdict as a line."""
        log = read_log(self.active_run.folder / "train.jsonl")
        checks = {
            "before": self.before(),
            "during": training_checks(log),
            "after": [self.trained(), *self.voice()],
        }
        finished = self.report.get("train", {}).get("finished", False)
        grid = [("", "training", "checked", "measured", "wanted", "what to do")]
        counted = []
        for when, own in checks.items():
            fault = "to do"
            if when == "during" and finished:
                fault = "note"
            else:
                counted += own
            grid += [(fault if check.problem else "pass", when, *check) for check in own]
        problems = problems_of(counted)
        line = f"All {len(counted)} checks pass: the voice is ready."
        if problems:
            passed = len(counted) - len(problems)
            line = f"{passed} of {len(counted)} checks pass. Next: {problems[0]}"
        return Result(line=line, grid=grid)

    def before(self) -> list[Check]:
        wanted = f"at most {self.most_rejected_percent:g} % of the hours"
        hours = f"{MIN_HOURS:g} hours of a person, or a base model"
        letters = "no bytes, every text comes back"
        suits = "the one for its memory"
        return [
            self.check("enough recordings", hours, self.recordings),
            self.check("few rejected clips", wanted, self.rejected),
            self.check("the tokenizer knows the letters", letters, self.tokens),
            self.check("texts match their sound", "judged", self.alignment),
            self.check("the preset suits the machine", suits, self.preset),
            self.check("a step fits into memory", "within the limit", self.memory),
        ]

    def check(self, what: str, wanted: str, measure) -> Check:
        """Check by `measure()`: the figures, and what to do ("": it passes)."""
        measured, problem = measure()
        return Check(what=what, measured=measured, wanted=wanted, problem=problem)

    def not_yet(self, command: str) -> tuple[str, str]:
        """Return what a check shows before `command` has recorded its figures."""
        return "not yet", self.command(command)

    def figures(self, section: str, *names: str) -> list:
        """Return figures of the report by name, [] if one was not recorded yet."""
        recorded = self.report.get(section, {})
        return [recorded[name] for name in names] if recorded.keys() >= set(names) else []

    def recordings(self) -> tuple[str, str]:
        figures = self.figures("data", "hours", "utterances")
        if not figures:
            return self.not_yet("prepare")
        hours, utterances = figures
        measured = f"{hours:.2f} hours, {utterances:,} utterances"
        return measured, too_few_hours(self.active_run, hours)

    def rejected(self) -> tuple[str, str]:
        figures = self.figures("data", "refused_percent", "refused")
        if not figures:
            return self.not_yet("prepare")
        percent, rows = figures
        passed = percent <= self.most_rejected_percent
        fix = "" if passed else "ledger.jsonl names each row and its fix"
        return f"{percent:.2f} %, {rows:,} rows", fix

    def tokens(self) -> tuple[str, str]:
        figures = self.figures("text", "byte_rate", "round_trip")
        if not figures:
            return self.not_yet("prepare")
        byte_rate, round_trip = figures
        passed = byte_rate == 0 and round_trip == 1
        fix = "" if passed else "look for stray letters in the texts (`uncovered` in text)"
        return f"{byte_rate:.2%} bytes, {round_trip:.1%} come back", fix

    def alignment(self) -> tuple[str, str]:
        figures = self.figures("data", "alignment")
        if not figures:
            return self.not_yet("prepare")
        (note,) = figures
        listen = "listen to some clips: the recogniser could not judge them"
        return note, listen if note.startswith("not judged") else ""

    def preset(self) -> tuple[str, str]:
        figures = self.figures("setup", "preset for this machine")
        if not figures:
            return self.not_yet("setup")
        (suitable,) = figures
        own = self.active_run.preset_name
        fix = f"begin a new run with --preset {suitable}, or keep `{own}` on purpose"
        return f"{own}; {suitable} suits this machine", "" if own == suitable else fix

    def memory(self) -> tuple[str, str]:
        figures = self.figures("train", "longest_step_bytes")
        if not figures:
            return self.not_yet("train")
        (sizes,) = figures
        needed = sizes.get("reserved") or sizes.get("measured") or sizes["planned"]
        fix = "take --use low_memory, or the preset of a smaller tier"
        measured = f"{format_gib(needed)} of {format_gib(sizes['limit'])}"
        return measured, "" if needed <= sizes["limit"] else fix

    def trained(self) -> Check:
        train = self.report.get("train", {})
        measured, problem = "not yet", self.command("train")
        if "steps" in train:
            measured = f"{train['steps']:,} steps"
            problem = "" if train.get("finished") else f"{problem} resumes where it stopped"
        return Check("training is finished", measured, "to its end", problem)

    def voice(self) -> list[Check]:
        """The gate's checks of the figures that evaluation has recorded."""
        figures = self.report.get("eval", {})
        if "cer" not in figures:
            fix = self.command("evaluate")
            return [Check("the voice is intelligible", "not yet", "the gate passed", fix)]
        names = ("cer", "eos_rate", "duration_ratio", "runaway_rate", "sentences")
        scores = Scores(**{name: figures[name] for name in names})
        return voice_checks(self.active_run, scores, figures["cer_floor"])

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
