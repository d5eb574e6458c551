"""Does a preset's training step fit here, and which settings train fastest under a target?

`python -m kit check` and `python -m kit tune` need no prepared data; 05_benchmark tunes, too. The
rows are made; with a run that has codes they are as long as its recordings.
"""

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import yaml

from kit.base.config import build, merge, preset_path
from kit.base.errors import KitError
from kit.base.files import digest, write_atomic
from kit.base.formatting import format_gib
from kit.base.hardware import ATTENTION_KERNELS, versions, why_no_kernel
from kit.base.run import load_use
from kit.notebook.progress_line import Ticker
from kit.notebook.result import Result
from kit.recipes.active_run import ActiveRun
from kit.recipes.benchmark import keep_device, rows_of
from kit.recipes.run_parts import finetuning_of, workload
from kit.training.switches import SpeedConfig, switches
from kit.tuning.preflight import Workload, changed_settings, limit_memory
from kit.tuning.recommend import (
    LEFT_OUT,
    Tried,
    axes_of,
    check_step,
    fastest,
    is_better,
    judge,
    parse_target,
    search,
    tried_cells,
)
from kit.tuning.trials import (
    STEP_INCLUDES,
    TrialConfig,
    append_result,
    measure_variant,
    names_of,
    preset_task,
    read_results,
)

SEARCH_SHARE = 0.75  # of the minutes; the rest is for the comparison with the start
PAIRS = 3  # of trials in turns, start and best


def check(run: ActiveRun) -> Iterator[Result]:
    """Take real steps at the longest lengths. Raises KitError, with what to change."""
    work = workload(run, finetuning=finetuning_of(run))
    step = work.step
    lengths = f"{step.rows} rows of {step.text_ids} text ids and {step.codes} codes"
    yield Result(line=f"preset {run.preset_name} on the {run.hw.name}: {lengths} in a pass")
    try:
        verdict, free_bytes = check_step(work, int(run.threads.value))
    except KitError as error:
        raise KitError(f"The step could not be taken: {error}.", exit_code=3) from error
    figures = {"planned": format_gib(verdict.planned_bytes)}
    if verdict.measured_bytes is not None:
        figures["allocated"] = format_gib(verdict.measured_bytes)
        reserved = verdict.reserved_bytes
        figures["reserved"] = "only on a GPU" if reserved is None else format_gib(reserved)
    figures |= {"free": format_gib(free_bytes), "may use": format_gib(verdict.limit_bytes)}
    if verdict.step_s is not None:
        passes = work.data.grad_accum
        figures["step"] = f"{verdict.step_s:.3g} s"
        if passes > 2:  # two stood for all of them
            step_s = verdict.step_s * passes / 2
            figures["step"] = f"about {step_s:.3g} s, from two of {passes} passes"
    yield Result(line="\n".join(f"{name}: {value}" for name, value in figures.items()))
    if not verdict.fits:
        raise KitError(str(verdict), exit_code=3)
    yield Result(line=str(verdict))


class Tuning:
    """Searches for the fastest settings under `target` and writes them as a preset to `write`.

    All of it takes about `minutes`; 0 takes the preset's. Raises KitError for a target that cannot
    be read or reached, and for a path that is not a .yaml file.
    """

    def __init__(
        self, run: ActiveRun, write: Path | str = "", target: str = "", minutes: float = 0
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
        self.target = parse_target(target)
        self.config = build(
            TrialConfig, run.section("trials"), **({"tune_minutes": minutes} if minutes else {})
        )
        self.started_s = time.monotonic()
        threads = int(run.threads.value)
        self.task = dataclasses.replace(
            preset_task(run.preset, run.hw, threads, rows_of(run)), finetuning=finetuning_of(run)
        )
        self.start = workload(run, finetuning=finetuning_of(run))
        self.limit_bytes = limit_memory(run.hw, self.start.max_memory_fraction)
        self.axes, self.off = self._axes()
        key = digest(dataclasses.asdict(self.task), versions(), STEP_INCLUDES)
        folder = run.folder / "bench" if run.name else run.folder
        self.results = folder / f"tune-{key}.jsonl"
        self.found = read_results(self.results)
        self.tried: list[Tried] = []
        self.best: Tried | None = None
        self.searching = True  # within its share of the minutes
        self.before_s: float | None = None  # a step as the settings were, in turns with the best
        self.note = "not compared in turns with the settings as they were"
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
        unavailable |= dict.fromkeys(self.config.leave_out, LEFT_OUT)
        precision = work.precision if work.speed.mixed_precision else "fp32"
        shape = (model.width // model.heads, model.heads, model.dropout)
        kernels = {n: why_no_kernel(n, work.hw, precision, *shape) for n in ATTENTION_KERNELS}
        return axes_of(work.speed, unavailable, kernels)

    def measure(self, work: Workload, steps: int) -> dict:
        """A trial's figures; while searching, those that an earlier search has left, once."""
        planned = work.planned_bytes
        if planned > self.limit_bytes:
            limit = format_gib(self.limit_bytes)
            return {"error": f"planned {format_gib(planned)}, of {limit} it may use"}
        asked = {
            "on": list(names_of(work.speed)),
            "micro_batch": work.data.micro_batch,
            "steps_asked": steps,
        }
        for result in self.found if self.searching else []:
            if asked.items() <= result.items():
                self.found.remove(result)
                return result
        took_s = int(time.monotonic() - self.started_s)
        limit_s = 60 * self.config.tune_minutes - took_s
        if self.searching and self.best is not None:
            limit_s -= 60 * self.config.tune_minutes * (1 - SEARCH_SHARE)
            if limit_s <= 0:
                raise TimeoutError
        else:
            limit_s = max(limit_s, 60.0)
        label = ", ".join(changed_settings(self.start, work)) or "as they were"
        self.tick(took_s, int(60 * self.config.tune_minutes), label)
        task = dataclasses.replace(self.task, data=work.data)
        config = dataclasses.replace(self.config, steps=steps)
        result = asked | measure_variant(task, config, tuple(asked["on"]), limit_s)
        if "not finished after" not in result.get("error", ""):  # a longer search may finish it
            append_result(self.results, result)
        return result

    def search(self) -> Result:
        """Vary one setting after the other. Raises KitError if the target is not reached."""
        self.started_s = time.monotonic()
        steps = self.config.steps
        for best in search(self.start, self.axes, self.measure, self.target, steps, self.tried):
            self.best = best
        if self.best.excess:
            changes = ", ".join(changed_settings(self.start, self.best.work)) or "as they were"
            raise KitError(
                f"No setting tried ({len(self.tried)}) reaches {self.target_text}. The "
                f"nearest ({changes}) takes {format_gib(self.best.memory_bytes)} and "
                f"{self.best.step_s:.3g} s a step. Allow more, or choose the preset of a smaller "
                "model."
            )
        cells = tried_cells(self.tried, self.start, self.off)
        return Result(line=f"{len(self.tried)} settings tried", grid=cells)

    def compare(self) -> Result:
        """Measure start and best in turns; the start stays unless the best is better again."""
        self.searching = False
        if self.best.work == self.start:
            self.note = "the settings as they were"
            return Result(line="None of them is better than the settings as they were.")
        steps = self.config.steps
        works = (self.start, self.best.work)
        found = [[self.measure(work, steps) for work in works] for _ in range(PAIRS)]
        figures = [fastest(turns) for turns in zip(*found)]
        start, best = (judge(w, steps, f, figures[0], self.target) for w, f in zip(works, figures))
        times = start.step_s / best.step_s
        self.before_s = start.step_s
        self.note = f"in turns with the settings as they were, which took {start.step_s:.3g} s"
        line = f"In turns: {start.step_s:.3g} s a step as it was, {best.step_s:.3g} s as tuned"
        if not is_better(best, start):
            self.best = start
            self.before_s = None
            self.note = "the settings as they were"
            return Result(line=f"{line}. That is no gain, so the settings stay.")
        self.best = best
        return Result(line=f"{line} ({times:.2f}x as fast)")

    def write(self) -> Result:
        """Write the best settings as a preset that extends the one they come from."""
        run = self.active
        best = self.best
        changes = changed_settings(self.start, best.work)
        over = merge(load_use(run.use), run.settings)
        tuned = {"data": {"micro_batch": best.work.data.micro_batch}}
        tuned["speed"] = {
            name: value
            for name, value in vars(best.work.speed).items()
            if value != getattr(self.start.speed, name)
        }
        if not changes:
            tuned = {}
        lines = [
            f"# Tuned on {run.hw.name}, {run.threads.value} threads, torch {versions()['torch']}.",
            f"# Target: {self.target_text or 'the fastest step'}. Changed: "
            f"{', '.join(changes) or 'nothing, no other settings were better'}.",
            f"# A step took {best.step_s:.3g} s and {format_gib(best.memory_bytes)}; {self.note}.",
        ]
        sections = {"extends": run.preset_name} | merge(over, tuned)
        plain = yaml.safe_dump(sections, allow_unicode=True, sort_keys=False)
        write_atomic(self.path, "\n".join(lines) + "\n" + plain)
        if not self.searching:
            keep_device(
                run,
                f"{Path(run.preset_name).stem}, tuned",
                ", ".join(changes) or "as they were",
                step_s=best.step_s,
                before_step_s=self.before_s or best.step_s,
                memory_bytes=best.memory_bytes,
            )
        return Result(line=f"{'; '.join(lines[1:])}\nWritten: {self.path}".replace("# ", ""))
