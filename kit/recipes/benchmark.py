"""Notebook 05: which switches pay off on this device, alone and together.

Every variant trains on the same batches in a process of its own, and its result is cached. What
pays off is written to a file for notebook 02.
"""

import dataclasses
from collections.abc import Iterator

from kit.base.config import build
from kit.base.errors import KitError
from kit.base.hardware import versions
from kit.batches.code_cache import CodeCache
from kit.notebook.plots import bars
from kit.notebook.progress_line import Ticker
from kit.notebook.result import Result
from kit.notebook.style import GIB
from kit.recipes.active_run import ActiveRun
from kit.recipes.trained_parts import finetuning_of
from kit.training.switches import load_choice
from kit.tuning.memory_plan import count_parameters
from kit.tuning.recommend import (
    Decision,
    Trial,
    choose_switches,
    chosen,
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


def rows_of(run: ActiveRun) -> tuple:
    """(text ids, codes) of each training row of a run; () before 01_data_prep."""
    if not run.figure("data", "codes"):
        return ()
    cache = CodeCache(run.index())
    sample = cache.sample_of_split("train")
    texts = cache.lengths(sample, "texts").tolist()
    return tuple(zip(texts, cache.lengths(sample, "codes").tolist()))


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
        asked = {"steps": steps, "rounds": rounds}
        given = {name: number for name, number in asked.items() if number}
        self.config = build(TrialConfig, run.section("trials"), **given)
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
        task = preset_task(run.preset, run.hw, threads, rows_of(run))
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
        return Result(line=f"{hw.device}: {hw.name}, threads: {task.threads}", figures=figures)

    def measure(self) -> Result:
        """Train every variant that was not measured before.

        A switch that is not available here becomes a row with the reason.
        """
        self.measured = self._trials(self.variants, "trials")
        return Result(line=f"{len(self.ran)} of {len(self.measured)} variants ran")

    @property
    def ran(self) -> list[Trial]:
        return [row for row in self.measured if row.loss is not None]

    def choose(self) -> Result:
        """Keep each switch that pays off, and measure the chosen set once more."""
        self.decisions = choose_switches(self.measured, self.goal)
        self.measured = self._trials([*self.variants, chosen(self.decisions)], "chosen set")
        lines = [f"{'keep' if d.on else 'drop':5} {d.label}: {d.reason}" for d in self.decisions]
        return Result(line="\n".join(lines))

    def _trials(self, sets: list, label: str) -> list[Trial]:
        return run_trials(self.task, self.config, self.folder, sets, Ticker(label))

    def speed(self) -> Result:
        """Steps per second, from the baseline at the top to the chosen set at the bottom."""
        names = [row.label for row in self.ran]
        steps_per_s = [row.steps_per_s for row in self.ran]
        times = steps_per_s[-1] / steps_per_s[0]
        line = f"{names[-1]}: {times:.2f}x as fast as {names[0]}"
        return Result(line=line, pictures=[bars(names, steps_per_s, "steps/s", "Speed")])

    def memory(self) -> Result:
        """Peak memory of the same variants."""
        names = [row.label for row in self.ran]
        sizes = [row.peak_memory_bytes / GIB for row in self.ran]
        picture = bars(names, sizes, "GiB", "Peak memory")
        return Result(line=f"{names[-1]}: {sizes[-1]:.2f} GiB at most", pictures=[picture])

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
