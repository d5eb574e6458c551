"""What the records of runs say: the checklist of one, and two side by side.

Nothing is trained or measured again; only `Compare.listen` lets both voices speak.
"""

import dataclasses
import shlex
from collections.abc import Iterator

from kit.base.errors import KitError
from kit.base.files import write_atomic
from kit.base.formatting import figure_text, flat, text_grid
from kit.base.report_page import FIGURES
from kit.base.run import Run, find_run, read_run_file, require_run
from kit.notebook.plots import curves
from kit.notebook.result import Result
from kit.recipes.base_model import MIN_HOURS, too_few_hours
from kit.recipes.evaluate import voice_checks
from kit.recipes.open_run import ActiveRun, activate
from kit.recipes.speak import Speaking, sound_of
from kit.recipes.train import loss_lines
from kit.training.logs import read_log
from kit.tuning.checks import HEAD, Check, judged, table

SENTENCES = 3  # to listen to


class Checklist:
    """What must be right before, during and after training, as the run's report has it.

    What was not recorded is not passed: its row names the command that measures it. Once training
    is finished, what was wrong during it is a note: only the voice counts.
    """

    def __init__(self, run: Run):
        self.active_run = run
        self.report = run.report()

    def run(self) -> Iterator[Result]:
        yield self.result()

    def result(self) -> Result:
        train = self.report.get("train", {})
        during = [Check(**row) for row in train.get("checks", [])]
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
        """The recordings, their texts, and the proofs of `verify` where they were tried."""
        data, text, verified = (self.report.get(name, {}) for name in ("data", "text", "verify"))
        if not {"hours", "utterances", "alignment"} <= data.keys() or "round_trip" not in text:
            fix = self.command("prepare")
            return [Check("preparation", "not yet", "to the end", False, fix)]
        hours = f"{data['hours']:.2f} hours, {data['utterances']:,} utterances"
        least = f"{MIN_HOURS:g} hours of a person, or a base model"
        few = too_few_hours(self.active_run, data["hours"])
        spelt = f"{text['byte_rate']:.2%} bytes, {text['round_trip']:.1%} come back"
        known = text["byte_rate"] == 0 and text["round_trip"] == 1
        stray = "look for stray letters in the texts (`uncovered` in text)"
        aligned = not data["alignment"].startswith("not judged")
        listen = "listen to some clips: the recogniser could not judge them"
        checks = [
            judged("recordings", hours, least, not few, few),
            judged("letters", spelt, "no bytes, every text comes back", known, stray),
            judged("texts and their sound", data["alignment"], "judged", aligned, listen),
        ]
        if verified:
            figure = f"{', '.join(verified['failed']) or 'no proof'} failed"
            passed = not verified["failed"]
            fix = "do not trust this training: see docs/verify.md"
            checks.append(judged("proofs of `verify`", figure, "none", passed, fix))
        return checks

    def after(self) -> list[Check]:
        """Whether training has ended, and the gate's checks of what evaluation has recorded."""
        train = self.report.get("train", {})
        steps = f"{train['steps']:,} steps" if "steps" in train else "not yet"
        fix = self.command("train")
        finished = bool(train.get("finished"))
        trained = judged("training", steps, "to its end", finished, fix)
        figures = self.report.get("eval", {})
        if {"cer", "cer_floor"} <= figures.keys():
            return [trained, *voice_checks(self.active_run, figures, figures["cer_floor"])]
        fix = self.command("evaluate")
        return [trained, Check("CER of the voice", "not yet", "the gate passed", False, fix)]

    def command(self, name: str) -> str:
        return f"python -m kit {name} --run {shlex.quote(self.active_run.name)}"


class Compare:
    """The run `first` beside the run named `second`.

    Raises KitError for a run that does not exist, and for a run beside itself.
    """

    def __init__(self, first: Run, second: str):
        other = existing_run(second)
        if other.folder.resolve() == first.folder.resolve():
            raise KitError(f"`{first.name}` cannot be compared with itself: name another run.")
        self.runs = {run.name: run for run in (first, other)}

    def result(self) -> Result:
        lines = {}
        for name, run in self.runs.items():
            own = loss_lines(read_log(run.folder / "train.jsonl"))
            lines |= {f"{name}, {what}": line for what, line in own.items()}
        pictures = [curves(lines, "step", "loss (nats per target)")] if lines else []
        differing = self.differing_settings()
        line = f"{' beside '.join(self.runs)}: {len(differing)} settings differ"
        grid = [("", *self.runs), *self.figures(), *differing]
        return Result(line=line, pictures=pictures, grid=grid)

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
            values = {"preset": run.preset_name, "goal": run.use or "-"}
            values["recordings"] = read_run_file(run.folder / "data") or "-"
            values |= {name: report.get(name, "-") for name in ("device", "git")}
            values |= dict(flat(report.get("versions", {}), "versions."))
            columns.append(values | dict(flat(run.preset)))
        first, second = columns
        rows = []
        for name in first | second:
            pair = [values.get(name, "-") for values in columns]
            if pair[0] != pair[1]:
                rows.append((name, *map(figure_text, pair)))
        return rows

    def listen(self, count: int = SENTENCES) -> Result:
        """The same held-out sentences spoken by both voices."""
        voices = []
        for run in self.runs.values():
            voices.append(Speaking(run if isinstance(run, ActiveRun) else activate(run)))
        texts = [row.text for row in voices[0].held_out if voices[1].voice.can_speak(row.text)]
        if not texts:
            raise KitError(
                f"One of {', '.join(self.runs)} can speak no held-out sentence of the other: "
                "compare runs of one language."
            )
        columns = {}
        for name, each in zip(self.runs, voices):
            spoken = each.voice.speak(texts[:count], each.speaker, each.sampling)
            columns[name] = [sound_of(each.voice, speech) for speech in spoken]
        return Result(line=" beside ".join(self.runs), compared=columns)


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
