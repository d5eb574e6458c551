"""Notebook 00: what this machine is, what suits it, and whether the run's preset fits.

Nothing is trained but a few steps of a throwaway model, to time one.
"""

import itertools
import shlex
from collections.abc import Iterator

from kit.base import hardware
from kit.base.compiler import compiler_available
from kit.base.config import build
from kit.base.formatting import format_gib
from kit.notebook.plots import bars, memory_bars, number_text
from kit.notebook.result import Result
from kit.recipes.open_run import ActiveRun, RunSource
from kit.recipes.run_parts import workload
from kit.settings import TimeBudget, TrainConfig
from kit.tuning.estimate import estimate_time, time_steps
from kit.tuning.measure import make_batches, preset_task, some_rows
from kit.tuning.memory_plan import Workload, plan_memory
from kit.tuning.preflight import change
from kit.tuning.recommend import advice_table, recommend, use_advice


class Setup:
    """Compares the machine with the run's preset; `run()` is every step."""

    def __init__(
        self,
        run: ActiveRun,
        own: bool = False,  # yes: it is for recordings of your own (no)
    ):
        self.active = run
        self.own = own

    def run(self) -> Iterator[Result]:
        for step in (self.machine, self.products, self.memory, self.time, self.summary):
            yield step()

    def machine(self) -> Result:
        """What this machine is, and what follows from it, each choice with its reason."""
        run = self.active
        hw = run.hw
        choices = {
            "threads": run.threads,
            "precision": run.precision,
            "attention kernel": hardware.attention_backend(hw, run.precision.value),
            "torch.compile": compiler_available(hw.device),
            "preset for this machine": hardware.choose_preset(hw),
        }
        values = {name: choice.value for name, choice in choices.items()}
        run.record(setup=values | {"use": run.use or "none"})
        figures = {"run": str(run.folder), "preset": run.preset_name, "goal": run.use or "none"}
        figures |= {"device": f"{hw.device}: {hw.name}", "cores": hw.cores}
        figures["memory"] = format_gib(hw.memory_bytes)
        if hw.capability:
            figures["RAM"] = format_gib(hw.ram_bytes)
            figures["compute capability"] = hardware.format_capability(hw.capability)
        figures |= hardware.versions()
        figures |= {name: f"{choice.value}: {choice.reason}" for name, choice in choices.items()}
        figures |= advice_table(recommend(hw))
        if run.use:
            changes = advice_table(use_advice(run.use))
            figures |= {f"{name}, for {run.use}": change for name, change in changes.items()}
        line = f"{hw.device}: {hw.name}, {figures['memory']} of memory\n"
        line += ", ".join(f"{name}: {value}" for name, value in values.items())
        return Result(line=line, figures=figures)

    def products(self) -> Result:
        """Time one matmul of training size in each precision of this device."""
        hw = self.active.hw
        times = hardware.matmul_ms(hw)
        if not times:
            return Result(line=f"No {hw.name} is here to be timed.")
        rows, inner, columns = hardware.MATMUL_SHAPES[hw.device]
        title = f"One {rows} x {inner} x {columns} matmul on the {hw.name}"
        picture = bars(list(times), list(times.values()), "ms", title)
        timings = ", ".join(f"{precision} {number_text(ms)} ms" for precision, ms in times.items())
        return Result(line=f"{title}: {timings}", pictures=[picture])

    @property
    def workload(self) -> Workload:
        return workload(self.active)

    def memory(self) -> Result:
        """The planned memory of a training step by part, and its peak beside the device's."""
        run = self.active
        work = self.workload
        parts, peak_bytes = plan_memory(work)
        limit_bytes = int(work.max_memory_fraction * run.hw.memory_bytes)
        run.record(train={"planned_bytes": peak_bytes})
        verdict = "It fits." if peak_bytes <= limit_bytes else change(work, limit_bytes)
        picture = memory_bars(
            parts,
            peak_bytes,
            measured_bytes=None,
            limit_bytes=limit_bytes,
            device_bytes=run.hw.memory_bytes,
            title=f"{work.rows} examples of {work.length} tokens on the {run.hw.name}",
        )
        line = f"Planned: {format_gib(peak_bytes)} of {format_gib(limit_bytes)}. {verdict}"
        return Result(line=line, pictures=[picture])

    def time(self) -> Result:
        """How long training will take; on a CPU, a few real steps are timed."""
        run = self.active
        if run.hw.device != "cpu":
            return Result(line="02_train says how long training takes.")
        source = RunSource(data="a person's" if self.own else "")
        budget = build(TimeBudget, source.section(run, "time_budget"))
        train = build(TrainConfig, source.section(run, "train"))
        threads = int(run.threads.value)
        model = self.workload.model
        usual = some_rows((8, model.max_text // 6), (16, model.max_code // 6))
        batches = make_batches(preset_task(run.preset, run.hw, threads, usual))
        step_s = time_steps(self.workload, list(itertools.islice(batches, 3)), threads)
        slow = f"{run.threads.reason}; {run.precision.reason}"
        _, line = estimate_time(train, step_s, budget, slow)
        return Result(line=f"{line} With recordings of your own, 02_train says how long it takes.")

    def summary(self) -> Result:
        run = self.active
        next_step = f"01_data_prep, or python -m kit prepare --run {shlex.quote(run.name)}"
        return Result(line=f"Written: {run.folder / 'report.json'}. Next: {next_step}")
