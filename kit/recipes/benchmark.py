"""Notebook 05: which switches pay off on this device, alone and together.

Every variant trains on the same batches in a process of its own. Results are cached, so an
interrupted benchmark resumes. What pays off is written to a file for notebook 02.
"""

import dataclasses
from collections.abc import Iterator

from kit.base.config import build
from kit.base.errors import KitError
from kit.base.formatting import format_memory
from kit.base.hardware import versions
from kit.batches.code_cache import CodeCache
from kit.notebook.plots import bars
from kit.notebook.progress_line import Ticker
from kit.notebook.result import Result
from kit.notebook.style import GIB
from kit.recipes.active_run import ActiveRun
from kit.recipes.base_model import finetuning_of
from kit.training.switches import LABELS
from kit.tuning.memory_plan import count_parameters
from kit.tuning.trial_results import (
    Decision,
    Trial,
    choose_switches,
    chosen,
    load_choice,
    trial_cells,
    trial_figures,
    write_choice,
)
from kit.tuning.trials import (
    Task,
    TrialConfig,
    preset_task,
    published_task,
    run_trials,
    variants,
)


def measured_effects(run: ActiveRun) -> dict[str, str]:
    """The measured effect of each switch alone: {"sdpa": "1.08x, -0.20 GiB here"}.

    {} before notebook 05 has run; a switch that did not run has no entry.
    """
    bench = run.report().get("bench", {}).get("preset", {})
    variants = bench.get("variants", {})
    same_device = bench.get("device") == run.hw.name
    where = "here" if same_device else f"on {bench.get('device', 'another machine')}"
    pairs = {name: (name, "baseline") for name in LABELS}
    pairs["ema_offload"] = ("ema+ema_offload", "ema")  # the EMA that it moves is its baseline
    effects = {}
    for name, (on, off) in pairs.items():
        after = variants.get(on, {})
        before = variants.get(off, {})
        if "steps_per_s" not in after or "steps_per_s" not in before:
            continue
        times = after["steps_per_s"] / before["steps_per_s"]
        more_bytes = after["peak_memory_bytes"] - before["peak_memory_bytes"]
        effects[name] = f"{times:.2f}x, {format_memory(more_bytes, '+')} {where}"
    return effects


class Benchmark:
    """Measures the switches of a training step and chooses among them; `run()` is every step.

    `steps` are timed in each of `rounds`; 0 takes the preset's number. `model` "xtts" measures a
    model of the released XTTS-v2's size instead of the preset's; `goal` "memory" also keeps
    switches that save a tenth of the memory at a small cost. Raises KitError for any other model.
    """

    def __init__(
        self,
        run: ActiveRun,
        steps: int = 0,
        rounds: int = 0,
        model: str = "",
        goal: str = "speed",
    ):
        if model not in ("", "xtts"):
            raise KitError(f'model = {model!r}: choose "" (the preset\'s) or "xtts".')
        self.active = run
        self.model = model
        self.goal = goal
        over = {}
        if steps:
            over["steps"] = steps
        if rounds:
            over["rounds"] = rounds
        self.config = build(TrialConfig, run.section("trials"), **over)
        self.folder = run.folder / "bench"
        self.task = self._task()
        self.variants = variants(self.task, self.config)
        self.measured: list[Trial] = []
        self.decisions: list[Decision] = []

    def run(self) -> Iterator[Result]:
        """Run every step, in order; `python -m kit benchmark`."""
        yield self.about()
        yield self.measure()
        yield self.choose()
        yield self.speed()
        yield self.memory()
        yield self.table()
        yield self.write()
        yield self.summary()

    def _task(self) -> Task:
        """What every variant trains: the preset's model, or XTTS-v2's, on synthetic rows.

        They are as long as the rows of the corpus if 01 has run: only lengths matter for speed.
        """
        run = self.active
        # A resumed benchmark keeps its number of threads, so that timings can be compared.
        threads = run.figure("bench", "threads") or int(run.threads.value)
        run.record(bench={"threads": threads})
        if self.model == "xtts":
            return published_task(run.hw, threads)
        rows = ()
        if run.figure("data", "codes"):
            cache = CodeCache(run.index())
            sample = cache.sample_of_split("train")
            texts = cache.lengths(sample, "texts").tolist()
            rows = tuple(zip(texts, cache.lengths(sample, "codes").tolist()))
        task = preset_task(run.preset, run.hw, threads, rows)
        return dataclasses.replace(task, finetuning=finetuning_of(run))

    def about(self) -> Result:
        """The model, its batches, and the number of steps."""
        task = self.task
        figures = {
            "parameters": f"{count_parameters(task.model):,}",
            "micro-batch": task.data.micro_batch,
            "rows": len(task.rows),
            "steps": self.config.steps,
            "rounds": self.config.rounds,
        }
        hw = self.active.hw
        return Result(line=f"{hw.device}: {hw.name}, {task.threads} threads", figures=figures)

    def measure(self) -> Result:
        """Train every variant that was not measured before.

        A switch that is not available here becomes a row with the reason.
        """
        self.measured = self._trials(self.variants, "trials")
        count = sum(row.loss is not None for row in self.measured)
        return Result(line=f"{count} of {len(self.measured)} variants ran")

    def choose(self) -> Result:
        """Keep each switch that pays off, and measure the chosen set once more."""
        self.decisions = choose_switches(self.measured, self.goal)
        self.measured = self._trials([*self.variants, chosen(self.decisions)], "chosen set")
        lines = [
            f"{'keep' if decision.on else 'drop':5} {decision.label}: {decision.reason}"
            for decision in self.decisions
        ]
        return Result(line="\n".join(lines))

    def _trials(self, sets: list, label: str) -> list[Trial]:
        return run_trials(self.task, self.config, self.folder, sets, Ticker(label))

    def speed(self) -> Result:
        """Steps per second, from the baseline at the top to the chosen set at the bottom."""
        rows = [row for row in self.measured if row.loss is not None]
        names = [row.label for row in rows]
        picture = bars(names, [row.steps_per_s for row in rows], "steps/s", "Speed")
        first = rows[0]
        last = rows[-1]
        times = last.steps_per_s / first.steps_per_s
        line = f"{last.label}: {times:.2f}x as fast as {first.label}"
        return Result(line=line, pictures=[picture])

    def memory(self) -> Result:
        """Peak memory of the same variants."""
        rows = [row for row in self.measured if row.loss is not None]
        names = [row.label for row in rows]
        sizes = [row.peak_memory_bytes / GIB for row in rows]
        picture = bars(names, sizes, "GiB", "Peak memory")
        return Result(line=f"{rows[-1].label}: {sizes[-1]:.2f} GiB at most", pictures=[picture])

    def table(self) -> Result:
        """All figures."""
        return Result(line=f"{len(self.measured)} variants", grid=trial_cells(self.measured))

    def write(self) -> Result:
        """Write the chosen set to the run's folder, with the reasons as comments."""
        path = self.path
        write_choice(self.decisions, path, f"{self.active.hw.name}, torch {versions()['torch']}")
        on = [name for name, kept in load_choice(path).items() if kept]
        figures = {
            "chosen": on,
            "goal": self.goal,
            "variants": trial_figures(self.measured),
            "device": self.active.hw.name,
        }
        self.active.record(bench={self.model or "preset": figures})
        return Result(line=path.read_text(encoding="utf-8").strip())

    @property
    def path(self):
        """The file of the chosen set; notebook 02 reads only speed.yaml."""
        return self.active.path("speed-xtts.yaml" if self.model else "speed.yaml")

    def summary(self) -> Result:
        """What was written, and the next step."""
        line = (
            f"In {self.active.folder}: {self.path.name}, bench/ with every result, report.json.\n"
            "Next: 02_train, which takes the switches of speed.yaml."
        )
        return Result(line=line)
