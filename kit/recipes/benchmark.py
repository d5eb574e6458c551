"""Notebook 05: which switches and which micro-batch pay off on this device.

Every variant trains on the same batches in a process of its own, and its result is cached. What
pays off is written as a preset, which notebook 02 reads, too. No prepared data are needed: with a
run that has codes the rows are as long as its recordings.
"""

import dataclasses
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from kit.base.config import build, merge, parse_object
from kit.base.errors import KitError
from kit.base.files import make_folder, write_atomic
from kit.base.formatting import format_gib
from kit.base.hardware import versions
from kit.base.run import load_use, runs_folder
from kit.batches.code_cache import CodeCache
from kit.notebook.plots import GIB, bars
from kit.notebook.progress import Ticker
from kit.notebook.result import Result
from kit.recipes.open_run import ActiveRun
from kit.recipes.run_parts import finetuning_of, workload
from kit.settings import TrialConfig
from kit.training.switches import Switch
from kit.tuning import recommend, trials
from kit.tuning.memory_plan import count_parameters
from kit.tuning.preflight import divisors, limit_memory

START_S = 3.0  # to start a trial's process and draw its weights
COMPILE_S = 30.0
DEVICE_HEAD = ("what, threads", "settings", "a step", "faster", "tokens/s", "MFU")
DEVICE_HEAD += ("memory", "measured")
DEVICES_NOTE = (
    "Made of the JSON files beside it by `python -m kit devices --folder FOLDER`. *Switches*: the "
    "set that 05_benchmark chose, against all off."
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
    """Measures the switches of a training step, then micro-batches; `run()` is every step.

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
        self.decisions: list[Switch] = []
        self.micro_batch = self.task.data.micro_batch

    def run(self) -> Iterator[Result]:
        """Run every step, in order; `python -m kit benchmark`."""
        steps = (self.about, self.measure, self.choose, self.find_micro_batch, self.speed)
        for step in (*steps, self.memory, self.table, self.write, self.summary):
            yield step()

    def about(self) -> Result:
        """Measure the baseline, and tell the minutes that the whole takes."""
        task = self.task
        once = dataclasses.replace(self.config, rounds=1)
        (first,) = self._trials(task, once, self.variants[:1], "baseline")
        trial_s = START_S
        if first.loss is not None:
            trial_s += first.warmup_s + self.config.steps / first.steps_per_s
        sets = [variant.on for variant in self.variants if not variant.reason]
        compiled = sum("compile" in on for on in sets)
        runs = len(sets) + sum(bool(sizes) for sizes in self._other_sizes())
        all_s = self.config.rounds * (trial_s * runs + COMPILE_S * compiled)
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
        self.measured = self._trials(self.task, self.config, self.variants, "trials")
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
        self.measured = self._trials(self.task, self.config, variants, "chosen set")

    def _trials(
        self, task: trials.Task, config: TrialConfig, variants: list, label: str
    ) -> list[recommend.Trial]:
        folder = self.active.folder / "bench"
        return trials.run_trials(task, config, folder, variants, Ticker(label))

    def find_micro_batch(self) -> Result:
        """Measure the chosen set with larger and with smaller micro-batches, as long as they pay.

        The effective batch stays, and so do the gradients. A size that should not fit into memory
        at the longest rows is not tried.
        """
        self.micro_batch = self.task.data.micro_batch
        self.measured = self.measured[: len(self.variants) + 1]  # without an earlier answer
        chosen = self.measured[-1]
        larger, smaller = self._other_sizes()
        if chosen.loss is None or not (larger or smaller):
            return Result(line=f"Micro-batch: {self.micro_batch}, no other can be compared.")
        rows = [dataclasses.replace(chosen, label=f"micro-batch {self.micro_batch}")]
        best = chosen
        for sizes in (larger, smaller):
            for size in sizes:
                trial = self._with_micro_batch(size)
                rows.append(trial)
                if not self._pays(chosen, best, trial):
                    break
                best = trial
                self.micro_batch = size
            if best is not chosen:
                break  # where larger ones pay, smaller ones do not
        if best is not chosen:
            label = f"{chosen.label}, {best.label}"
            self.measured.append(dataclasses.replace(best, label=label))
        line = f"Micro-batch: {self.micro_batch} of an effective batch of "
        line += f"{self.task.data.effective_batch}"
        return Result(line=line, grid=recommend.trial_cells(rows))

    def _pays(self, chosen: recommend.Trial, best: recommend.Trial, trial: recommend.Trial) -> bool:
        """Whether `trial` is better than `best` so far, and not much slower than the first."""
        if trial.loss is None:
            return False
        gain = max(recommend.LEAST_GAIN, (best.spread + trial.spread) / 2)
        faster, _ = recommend.changes(chosen, trial)
        pays = recommend.pays_off(best, trial, self.goal, gain)
        return pays and faster >= -recommend.MOST_LOSS

    def _other_sizes(self) -> tuple[list[int], list[int]]:
        """Larger micro-batches in rising order, and smaller ones in falling order.

        None where other figures must stay comparable, or where tokens decide the size.
        """
        data = self.task.data
        if self.model or data.effective_tokens:
            return [], []
        sizes = divisors(data.effective_batch)
        larger = [size for size in sizes if size > data.micro_batch]
        smaller = [size for size in reversed(sizes) if size < data.micro_batch]
        return larger, smaller

    def _with_micro_batch(self, size: int) -> recommend.Trial:
        """The chosen set in passes of `size` rows, measured unless too large for the memory."""
        chosen = recommend.chosen(self.decisions)
        data = dataclasses.replace(self.task.data, micro_batch=size)
        speed = trials.speed_of(chosen.on)
        work = workload(self.active, finetuning=self.task.finetuning, data=data, speed=speed)
        limit_bytes = limit_memory(work.hw, work.max_memory_fraction)
        reason = ""
        if work.planned_bytes > limit_bytes:
            reason = f"planned {format_gib(work.planned_bytes)}, of {format_gib(limit_bytes)}"
        variant = dataclasses.replace(chosen, label=f"micro-batch {size}", reason=reason)
        task = dataclasses.replace(self.task, data=data)
        (trial,) = self._trials(task, self.config, [variant], variant.label)
        return trial

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
        """Write the chosen set to the run's folder as a preset, with the reasons as comments."""
        run = self.active
        name = run.hw.name
        sections = None
        if not self.model:
            given = merge(load_use(run.use), run.settings)
            measured = {"data": {"micro_batch": self.micro_batch}}
            sections = {"extends": run.preset_name} | merge(given, measured)
        measured_on = f"{name}, torch {versions()['torch']}"
        recommend.write_choice(self.decisions, self.path, measured_on, sections)
        on = [decision.name for decision in self.decisions if decision.on]
        figures = {"chosen": on, "goal": self.goal, "device": name}
        figures["micro_batch"] = self.micro_batch
        of_switches = self.measured[: len(self.variants) + 1]
        figures["variants"] = recommend.trial_figures(of_switches)
        run.record(bench={self.model or "preset": figures})
        baseline, last = self.measured[0], self.ran[-1]
        before_s = None if baseline.loss is None else 1 / baseline.steps_per_s
        gained = {"step_s": 1 / last.steps_per_s, "before_step_s": before_s}
        gained |= {"tokens_per_s": last.tokens_per_s, "mfu": last.mfu}
        gained["memory_bytes"] = last.peak_memory_bytes
        what = f"{self.model or Path(run.preset_name).stem}, switches"
        settings = ", ".join(on) or "none"
        if self.micro_batch != self.task.data.micro_batch:
            settings += f", micro-batch {self.micro_batch}"
        keep_device(run, what, settings, self.task.threads, **gained)
        return Result(line=self.path.read_text(encoding="utf-8").strip())

    @property
    def path(self) -> Path:
        """The file of the chosen set; notebook 02 reads only speed.yaml."""
        return self.active.path("speed-xtts.yaml" if self.model else "speed.yaml")

    def summary(self) -> Result:
        return Result(
            line=f"In {self.active.folder}: {self.path.name}, bench/ with every result, "
            f"report.json.\nFor the table of devices: {devices_folder()}.\n"
            "Next: 02_train, which takes the switches and the micro-batch of speed.yaml. As PRESET "
            "of a new run, or --preset, that file is a preset."
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
        raise KitError(f"{folder} has no measurements: `benchmark` writes them.")
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
