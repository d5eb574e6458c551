"""Notebook 05: which switches pay off on this device, and which settings train fastest.

Every variant trains on the same batches in a process of its own, and its result is cached. What
pays off is written to a file for notebook 02. `python -m kit tune` needs no prepared data: with a
run that has codes the rows are as long as its recordings.
"""

import dataclasses
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import yaml

from kit.base.config import build, merge, parse_object, preset_path
from kit.base.errors import KitError
from kit.base.files import digest, make_folder, write_atomic
from kit.base.formatting import format_gib
from kit.base.hardware import ATTENTION_KERNELS, versions, why_no_kernel
from kit.base.run import load_use, runs_folder
from kit.batches.code_cache import CodeCache
from kit.notebook.plots import GIB, bars
from kit.notebook.progress import Ticker
from kit.notebook.result import Result
from kit.recipes.active_run import ActiveRun
from kit.recipes.run_parts import finetuning_of, workload
from kit.settings import SpeedConfig, TrialConfig
from kit.training.switches import load_choice, switches
from kit.tuning import recommend, trials
from kit.tuning.memory_plan import count_parameters
from kit.tuning.preflight import Workload, changed_settings, limit_memory

START_S = 3.0  # to start a trial's process and draw its weights
COMPILE_S = 30.0
DEVICE_HEAD = ("what, threads", "settings", "a step", "faster", "tokens/s", "MFU")
DEVICE_HEAD += ("memory", "measured")
SEARCH_SHARE = 0.75  # of the minutes; the rest is for the comparison with the start
PAIRS = 3  # of trials in turns, start and best
DEVICES_NOTE = (
    "Made of the JSON files beside it by `python -m kit devices --folder FOLDER`. *Switches*: the "
    "set that 05_benchmark chose, against all off. *Tuned*: what `tune` found, against the preset."
)


def task_of(run: ActiveRun, threads: int) -> trials.Task:
    """What of the run's preset is trained in trials, on synthetic rows.

    They are as long as the run's training rows if 01 has run: only lengths matter for speed.
    """
    rows = ()
    if run.figure("data", "codes"):
        cache = CodeCache(run.index())
        sample = cache.sample_of_split("train")
        texts = cache.lengths(sample, "texts").tolist()
        rows = tuple(zip(texts, cache.lengths(sample, "codes").tolist()))
    task = trials.preset_task(run.preset, run.hw, threads, rows)
    return dataclasses.replace(task, finetuning=finetuning_of(run))


class Benchmark:
    """Measures the switches of a training step and chooses among them; `run()` is every step.

    `steps` are timed in each of `rounds`; 0 takes the preset's number. `model` "xtts" measures a
    model of the released XTTS-v2's size instead of the preset's; `goal` "memory" also keeps
    switches that save a tenth of the memory at a small cost. Raises KitError for any other model.
    """

    def __init__(
        self,
        run: ActiveRun,
        steps: int = 0,  # optimiser steps timed in a round (the preset's)
        rounds: int = 0,  # interleaved; their median counts (the preset's)
        model: str = "",  # xtts: the released XTTS-v2's size (the preset's)
        goal: str = "speed",  # speed, or memory (speed)
    ):
        if model not in ("", "xtts"):
            raise KitError(f'model = {model!r}: choose "" (the preset\'s) or "xtts".')
        self.active = run
        self.model = model
        self.goal = goal
        asked = {"steps": steps, "rounds": rounds}
        given = {name: number for name, number in asked.items() if number}
        self.config = build(TrialConfig, run.section("trials"), **given)
        # A resumed benchmark keeps its number of threads, so that timings can be compared.
        threads = run.figure("bench", "threads") or int(run.threads.value)
        run.record(bench={"threads": threads})
        self.task = trials.published_task(run.hw, threads) if model else task_of(run, threads)
        self.variants = trials.variants(self.task, self.config)
        self.measured: list[recommend.Trial] = []
        self.decisions: list[recommend.Decision] = []

    def run(self) -> Iterator[Result]:
        """Run every step, in order; `python -m kit benchmark`."""
        steps = (self.about, self.measure, self.choose, self.speed, self.memory)
        for step in (*steps, self.table, self.write, self.summary):
            yield step()

    def about(self) -> Result:
        """Measure the baseline, and tell the minutes that the whole takes."""
        task = self.task
        (first,) = self._trials(self.variants[:1], "baseline", rounds=1)
        trial_s = START_S
        if first.loss is not None:
            trial_s += first.warmup_s + self.config.steps / first.steps_per_s
        sets = [variant.on for variant in self.variants if not variant.reason]
        compiled = sum("compile" in on for on in sets)
        all_s = self.config.rounds * (trial_s * len(sets) + COMPILE_S * compiled)
        figures = {"parameters": f"{count_parameters(task.model):,}"}
        figures |= {"micro-batch": task.data.micro_batch, "rows": len(task.rows)}
        figures |= {"steps": self.config.steps, "rounds": self.config.rounds}
        hw = self.active.hw
        line = f"{hw.device}: {hw.name}, threads: {task.threads}. Measuring takes about "
        line += f"{max(1, round(all_s / 60))} min, less what was measured before."
        return Result(line=line, figures=figures)

    def measure(self) -> Result:
        """Train every variant that was not measured before.

        A switch that is not available here becomes a row with the reason.
        """
        self.measured = self._trials(self.variants, "trials")
        return Result(line=f"{len(self.ran)} of {len(self.measured)} variants ran")

    @property
    def ran(self) -> list[recommend.Trial]:
        return [row for row in self.measured if row.loss is not None]

    def choose(self) -> Result:
        """Keep each switch that pays off, and measure the chosen set once more."""
        self.decisions = recommend.choose_switches(self.measured, self.goal)
        self._measure_chosen()
        if self.goal == "speed" or self.measured[-1].loss is None:
            self.decisions = recommend.prefer_measured(self.decisions, self.measured)
            self._measure_chosen()
        lines = [f"{'keep' if d.on else 'drop':5} {d.label}: {d.reason}" for d in self.decisions]
        return Result(line="\n".join(lines))

    def _measure_chosen(self) -> None:
        variants = [*self.variants, recommend.chosen(self.decisions)]
        self.measured = self._trials(variants, "chosen set")

    def _trials(self, sets: list, label: str, **config: int) -> list[recommend.Trial]:
        config = dataclasses.replace(self.config, **config)
        folder = self.active.folder / "bench"
        return trials.run_trials(self.task, config, folder, sets, Ticker(label))

    def speed(self) -> Result:
        """Tokens a second, from the baseline at the top to the chosen set at the bottom.

        Their rounds differ by as much as the lines at the bars' ends are long.
        """
        names = [row.label for row in self.ran]
        tokens_per_s = [row.tokens_per_s for row in self.ran]
        errors = [row.spread / 2 * row.tokens_per_s for row in self.ran]
        first, last = self.ran[0], self.ran[-1]
        times = last.steps_per_s / first.steps_per_s
        line = f"{last.label}: {times:.2f}x as fast as {first.label}, "
        line += f"{last.tokens_per_s:,.0f} tokens/s"
        if last.mfu is not None:
            line += f", {last.mfu:.0%} of the matmuls that this device could do (MFU)"
        picture = bars(names, tokens_per_s, "tokens/s", "Speed", errors)
        return Result(line=f"{line}.", pictures=[picture])

    def memory(self) -> Result:
        names = [row.label for row in self.ran]
        sizes = [row.peak_memory_bytes / GIB for row in self.ran]
        picture = bars(names, sizes, "GiB", "Peak memory")
        return Result(line=f"{names[-1]}: {sizes[-1]:.2f} GiB at most", pictures=[picture])

    def table(self) -> Result:
        grid = recommend.trial_cells(self.measured)
        return Result(line=f"{len(self.measured)} variants", grid=grid)

    def write(self) -> Result:
        """Write the chosen set to the run's folder, with the reasons as comments."""
        name = self.active.hw.name
        recommend.write_choice(self.decisions, self.path, f"{name}, torch {versions()['torch']}")
        on = [switch for switch, kept in load_choice(self.path).items() if kept]
        figures = {"chosen": on, "goal": self.goal, "device": name}
        figures["variants"] = recommend.trial_figures(self.measured)
        self.active.record(bench={self.model or "preset": figures})
        baseline, last = self.measured[0], self.ran[-1]
        before_s = None if baseline.loss is None else 1 / baseline.steps_per_s
        gained = {"step_s": 1 / last.steps_per_s, "before_step_s": before_s}
        gained |= {"tokens_per_s": last.tokens_per_s, "mfu": last.mfu}
        gained["memory_bytes"] = last.peak_memory_bytes
        what = f"{self.model or Path(self.active.preset_name).stem}, switches"
        keep_device(self.active, what, ", ".join(on) or "none", self.task.threads, **gained)
        return Result(line=self.path.read_text(encoding="utf-8").strip())

    @property
    def path(self) -> Path:
        """The file of the chosen set; notebook 02 reads only speed.yaml."""
        return self.active.path("speed-xtts.yaml" if self.model else "speed.yaml")

    def summary(self) -> Result:
        return Result(
            line=f"In {self.active.folder}: {self.path.name}, bench/ with every result, "
            f"report.json.\nFor the table of devices: {devices_folder()}.\n"
            "Next: 02_train, which takes the switches of speed.yaml."
        )


def devices_folder() -> Path:
    """Where this machine's measurements are kept: beside the runs."""
    return runs_folder() / "bench" / "devices"


def keep_device(
    run: ActiveRun, what: str, settings: str, threads: int, **figures: float | None
) -> None:
    """Keep what `settings` gained here in this device's file, in place of an earlier `what`."""
    name = run.hw.name
    if run.hw.device == "cpu":
        name += f", {run.hw.cores} cores, {torch.backends.cpu.get_cpu_capability()}"
    path = make_folder(devices_folder()) / (re.sub(r"\W+", "-", name.lower()) + ".json")
    known = {"device": name}
    if path.exists():
        known = read_device(path)
    made_with = {"settings": settings, "threads": threads, "torch": versions()["torch"]}
    known[what] = figures | made_with | {"date": time.strftime("%Y-%m-%d")}
    write_atomic(path, json.dumps(known, indent=1) + "\n")


def read_device(path: Path) -> dict:
    """Return what was measured on a device. Raises KitError if the file is damaged."""
    return parse_object(path.read_bytes(), f"{path} (delete it if it is damaged)")


def devices(
    _name: str = "",
    folder: Path | None = None,  # one JSON file a device (runs/bench/devices)
) -> Result:
    """Merge the files of `folder`, one a device, into its table README.md; `voicekit devices`."""
    folder = folder or devices_folder()
    paths = sorted(Path(folder).glob("*.json"))
    files = [read_device(path) for path in paths]
    if not files:
        raise KitError(f"{folder} has no measurements: `benchmark` and `tune` write them.")
    lines = ["# Measured on these devices", "", DEVICES_NOTE, ""]
    grid = [("device", *DEVICE_HEAD)]
    for file in files:
        device = file.pop("device")
        rows = [device_cells(what, row) for what, row in file.items()]
        grid += [(device, *row) for row in rows]
        table = [DEVICE_HEAD, ["---"] * len(DEVICE_HEAD), *rows]
        lines += [f"## {device}", "", *(f"| {' | '.join(row)} |" for row in table), ""]
    path = Path(folder) / "README.md"
    write_atomic(path, "\n".join(lines))
    return Result(line=f"Devices: {len(files)}. Written: {path}", grid=grid)


def device_cells(what: str, row: dict) -> tuple[str, ...]:
    tokens_per_s, mfu = row.get("tokens_per_s"), row.get("mfu")
    before_s = row["before_step_s"]
    return (
        f"{what}, {row['threads']}",
        row["settings"],
        f"{1000 * row['step_s']:,.0f} ms",
        "" if before_s is None else f"{before_s / row['step_s']:.2f}x",
        "" if tokens_per_s is None else f"{tokens_per_s:,.0f}",
        "" if mfu is None else f"{mfu:.0%}",
        format_gib(row["memory_bytes"]),
        f"{row['date']}, torch {row['torch']}",
    )


class Tuning:
    """Searches for the fastest settings under `target` and writes them as a preset to `write`.

    All of it takes about `minutes`; 0 takes the preset's. Raises KitError for a target that cannot
    be read or reached, and for a path that is not a .yaml file.
    """

    def __init__(
        self,
        run: ActiveRun,
        write: Path | str = "",  # the preset to write
        target: str = "",  # such as "memory<5GiB, step<2s" (the fastest)
        minutes: float = 0,  # for all of it (the preset's trials.tune_minutes)
    ):
        self.active = run
        self.path = Path(write).expanduser()
        if self.path.suffix != ".yaml":
            raise KitError(
                f"--write {write}: a preset's file ends in .yaml, such as configs/mine.yaml."
            )
        if self.path.resolve() == preset_path(run.preset_name).resolve():
            raise KitError(f"{write} is the preset that is tuned: write another file.")
        self.target_text = target
        self.target = recommend.parse_target(target)
        given = {"tune_minutes": minutes} if minutes else {}
        self.config = build(TrialConfig, run.section("trials"), **given)
        self.started_s = time.monotonic()
        self.task = task_of(run, int(run.threads.value))
        self.start = workload(run, finetuning=finetuning_of(run))
        self.limit_bytes = limit_memory(run.hw, self.start.max_memory_fraction)
        self.axes, self.off = self._axes()
        key = digest(dataclasses.asdict(self.task), versions(), trials.STEP_INCLUDES)
        folder = run.folder / "bench" if run.name else run.folder
        self.results = folder / f"tune-{key}.jsonl"
        self.earlier = trials.read_results(self.results)
        self.tried: list[recommend.Tried] = []
        self.best: recommend.Tried | None = None
        self.searching = True  # within its share of the minutes
        self.before_s: float | None = None  # a step as the settings were, in turns with the best
        self.tick = Ticker("tuning, seconds")

    def run(self) -> Iterator[Result]:
        """Search, compare the best with the start in turns, and write it; `python -m kit tune`."""
        try:
            yield self.search()
            yield self.compare()
        except KeyboardInterrupt:
            if self.best is not None:
                print(self.write(), flush=True)
            raise
        yield self.write()

    def _axes(self) -> tuple[list, list]:
        work = self.start
        model = work.model
        offered = switches(SpeedConfig(), work.hw, model)
        unavailable = {s.name: s.reason for s in offered if not s.available}
        unavailable |= dict.fromkeys(self.config.leave_out, recommend.LEFT_OUT)
        precision = work.precision if work.speed.mixed_precision else "fp32"
        shape = (model.width // model.heads, model.heads, model.dropout)
        kernels = {n: why_no_kernel(n, work.hw, precision, *shape) for n in ATTENTION_KERNELS}
        return recommend.axes_of(work.speed, unavailable, kernels)

    def _changes(self, work: Workload) -> str:
        return ", ".join(changed_settings(self.start, work))

    def measure(self, work: Workload, steps: int) -> dict:
        """A trial's figures; while searching, those that an earlier search has left, once."""
        planned = work.planned_bytes
        if planned > self.limit_bytes:
            limit = format_gib(self.limit_bytes)
            return {"error": f"planned {format_gib(planned)}, of {limit} it may use"}
        on = trials.names_of(work.speed)
        asked = {"on": list(on), "micro_batch": work.data.micro_batch, "steps_asked": steps}
        for result in self.earlier if self.searching else []:
            if asked.items() <= result.items():
                self.earlier.remove(result)
                return result
        all_s = 60 * self.config.tune_minutes
        took_s = int(time.monotonic() - self.started_s)
        limit_s = max(all_s - took_s, 60.0)
        if self.searching and self.best is not None:
            limit_s = SEARCH_SHARE * all_s - took_s
            if limit_s <= 0:
                raise TimeoutError
        self.tick(took_s, int(all_s), self._changes(work) or "as they were")
        task = dataclasses.replace(self.task, data=work.data)
        config = dataclasses.replace(self.config, steps=steps)
        result = asked | trials.measure_variant(task, config, on, limit_s)
        if "not finished after" not in result.get("error", ""):  # a longer search may finish it
            trials.append_result(self.results, result)
        elif self.searching and self.best is not None:
            raise TimeoutError
        return result

    def search(self) -> Result:
        """Vary one setting after the other. Raises KitError if the target is not reached."""
        self.started_s = time.monotonic()
        steps = self.config.steps
        for best in recommend.search(
            self.start, self.axes, self.measure, self.target, steps, self.tried
        ):
            self.best = best
        best = self.best
        if best.excess:
            raise KitError(
                f"No setting tried ({len(self.tried)}) reaches {self.target_text}. The nearest "
                f"({self._changes(best.work) or 'as they were'}) takes "
                f"{format_gib(best.memory_bytes)} and {best.step_s:.3g} s a step. Allow more, or "
                "choose the preset of a smaller model."
            )
        cells = recommend.tried_cells(self.tried, self.start, self.off)
        return Result(line=f"{len(self.tried)} settings tried", grid=cells)

    def compare(self) -> Result:
        """Measure start and best in turns; the start stays unless the best is better again."""
        self.searching = False
        if self.best.work == self.start:
            return Result(line="None of them is better than the settings as they were.")
        steps = self.config.steps
        works = (self.start, self.best.work)
        turns = [[self.measure(work, steps) for work in works] for _ in range(PAIRS)]
        figures = [recommend.fastest(each) for each in zip(*turns)]
        if "error" in figures[0]:
            reason = figures[0]["error"]
            return Result(line=f"The settings as they were could not be measured again: {reason}")
        start, best = (
            recommend.judge(work, steps, each, figures[0], self.target)
            for work, each in zip(works, figures)
        )
        line = f"In turns: {start.step_s:.3g} s a step as it was, {best.step_s:.3g} s as tuned"
        if not recommend.is_better(best, start):
            self.best = start
            return Result(line=f"{line}. That is no gain, so the settings stay.")
        self.best = best
        self.before_s = start.step_s
        return Result(line=f"{line} ({start.step_s / best.step_s:.2f}x as fast)")

    def write(self) -> Result:
        """Write the best settings as a preset that extends the one they come from."""
        run = self.active
        best = self.best
        changes = self._changes(best.work)
        sections = {"extends": run.preset_name} | merge(load_use(run.use), run.settings)
        if changes:
            before, after = vars(self.start.speed), vars(best.work.speed)
            speed = {name: value for name, value in after.items() if value != before[name]}
            micro_batch = best.work.data.micro_batch
            sections = merge(sections, {"data": {"micro_batch": micro_batch}, "speed": speed})
        note = "not compared in turns with the settings as they were"
        if self.before_s:
            note = f"in turns with the settings as they were, which took {self.before_s:.3g} s"
        elif not changes:
            note = "the settings as they were"
        lines = [
            f"# Tuned on {run.hw.name}, {run.threads.value} threads, torch {versions()['torch']}.",
            f"# Target: {self.target_text or 'the fastest step'}. Changed: "
            f"{changes or 'nothing, no other settings were better'}.",
            f"# A step took {best.step_s:.3g} s and {format_gib(best.memory_bytes)}; {note}.",
        ]
        plain = yaml.safe_dump(sections, allow_unicode=True, sort_keys=False)
        write_atomic(self.path, "\n".join(lines) + "\n" + plain)
        if not self.searching:
            before_s = best.step_s if best.work == self.start else self.before_s
            gained = {"step_s": best.step_s, "before_step_s": before_s}
            gained["memory_bytes"] = best.memory_bytes
            what = f"{Path(run.preset_name).stem}, tuned"
            threads = int(run.threads.value)
            keep_device(run, what, changes or "as they were", threads, **gained)
        return Result(line=f"{'; '.join(lines[1:])}\nWritten: {self.path}".replace("# ", ""))
