"""Notebook 05: which switches and which micro-batch pay off on this device.

Every variant trains on the same batches in a process of its own, and its result is cached. What
pays off is written as a preset, which notebook 02 reads, too. No prepared data are needed: with a
run that has codes the rows are as long as its recordings.
"""

import dataclasses
from collections.abc import Iterator

from kit.base.config import ROOT, build, merge
from kit.base.formatting import format_gib
from kit.base.hardware import versions
from kit.base.run import load_use
from kit.batches.code_cache import CodeCache
from kit.notebook.plots import GIB, bars
from kit.notebook.progress import Ticker
from kit.notebook.result import Result
from kit.recipes.open_run import ActiveRun
from kit.recipes.run_parts import finetuning_of, workload
from kit.settings import SpeedConfig, TrialConfig
from kit.training.switches import Switch
from kit.tuning import choose
from kit.tuning.choose import Trial
from kit.tuning.measure import Task, flops_used, preset_task, run_trials, variants
from kit.tuning.preflight import divisors, limit_memory

DEVICES = ROOT / "docs" / "devices" / "README.md"  # a table of what others measured
START_S = 3.0  # to start a trial's process and draw its weights


class Benchmark:
    """Measures the switches of a training step, then micro-batches; `run()` is every step."""

    def __init__(
        self,
        run: ActiveRun,
        steps: int = 0,  # optimiser steps timed in a round (the preset's)
        rounds: int = 0,  # interleaved, two at least; their median counts (the preset's)
    ):
        self.active = run
        asked = {"steps": steps, "rounds": rounds}
        given = {name: number for name, number in asked.items() if number}
        self.config = build(TrialConfig, run.section("trials"), **given)
        # A resumed benchmark keeps its number of threads, so that timings can be compared.
        threads = run.figure("bench", "threads") or int(run.threads.value)
        run.record(bench={"threads": threads})
        # Synthetic rows, as long as those of the run if 01 has run: only lengths matter for speed.
        rows = ()
        if run.figure("data", "codes"):
            cache = CodeCache(run.index())
            sample = cache.sample_of_split("train")
            texts = cache.lengths(sample, "texts").tolist()
            rows = tuple(zip(texts, cache.lengths(sample, "codes").tolist()))
        task = preset_task(run.preset, run.hw, threads, rows)
        self.task = dataclasses.replace(task, finetuning=finetuning_of(run))
        self.variants = variants(self.task, self.config)
        self.measured: list[Trial] = []  # the variants; once chosen, the preset's and that set
        self.resized: list[Trial] = []  # the chosen set in the micro-batch that was found
        self.decisions: list[Switch] = []
        self.micro_batch = self.task.data.micro_batch

    def run(self) -> Iterator[Result]:
        measuring = (self.about, self.measure, self.choose, self.find_micro_batch)
        for step in (*measuring, self.speed, self.table, self.write, self.summary):
            yield step()

    def known(self) -> Result:
        """What was measured on the devices that docs/devices lists, those like this one first."""
        if not DEVICES.is_file():  # an installed package has no docs
            return Result(line="")
        lines = DEVICES.read_text(encoding="utf-8").splitlines()
        cells = [line.strip("|").split("|") for line in lines if line.startswith("|")]
        head, _, *rows = [tuple(cell.strip() for cell in row) for row in cells]
        words = set(self.active.hw.name.split())
        rows.sort(key=lambda row: len(words & set(row[0].split())), reverse=True)
        times = [float(row[head.index("faster")].removesuffix("x")) for row in rows]
        names = [row[0] for row in rows]
        picture = bars(names, times, "times as fast as without switches", "Measured elsewhere")
        return Result(line=f"{len(rows)} devices", pictures=[picture], grid=[head, *rows])

    def about(self) -> Result:
        """Measure the baseline once, and say how many minutes everything takes."""
        (first,) = self._trials(self.task, self.variants[:1], "baseline", rounds=1)
        trial_s = START_S
        if first.loss is not None:
            trial_s += first.warmup_s + self.config.steps / first.steps_per_s
        runs = sum(not variant.reason for variant in self.variants)
        runs += sum(bool(sizes) for sizes in self._other_sizes())
        all_s = self.config.rounds * trial_s * runs
        hw = self.active.hw
        line = f"{hw.device}: {hw.name}, threads: {self.task.threads}. {runs} variants, "
        line += f"{self.config.rounds} rounds of {self.config.steps} steps, take about "
        line += f"{max(1, round(all_s / 60))} min without compiling, less what was measured before."
        return Result(line=line)

    def measure(self) -> Result:
        """Train every variant that was not measured before.

        A switch that is not available here becomes a row with the reason.
        """
        self.measured = self._trials(self.task, self.variants, "trials")
        return Result(line=f"{len(self.ran)} of {len(self.measured)} variants ran")

    @property
    def ran(self) -> list[Trial]:
        return [row for row in (*self.measured, *self.resized) if row.loss is not None]

    def choose(self) -> Result:
        """Keep each switch that pays off, and measure the chosen set beside the preset's.

        Where the rounds differ more than the switch does, the preset's choice stays.
        """
        preset = build(SpeedConfig, self.active.section("speed"))
        decisions = choose.choose_switches(self.measured, preset)
        possible = ("", choose.LEFT_OUT)
        there = [v.on[0] for v in self.variants if v.kind == "alone" and v.reason in possible]
        sets = [
            choose.set_of("Preset's set", (name for name in there if getattr(preset, name))),
            choose.set_of("Chosen set", (d.name for d in decisions if d.on)),
        ]
        self.measured = self._trials(self.task, [*self.variants, *sets], "chosen set")
        own, together = self.measured[-2:]
        self.decisions = choose.keep_or_replace(decisions, own, together)
        on = tuple(d.name for d in self.decisions if d.on)
        if on != together.on:
            self.measured[-1] = dataclasses.replace(own, label=together.label)
        lines = [f"{'keep' if d.on else 'drop':5} {d.label}: {d.reason}" for d in self.decisions]
        return Result(line="\n".join(lines))

    def _trials(self, task: Task, wanted: list, label: str, rounds: int = 0) -> list[Trial]:
        folder = self.active.folder / "bench"
        return run_trials(task, self.config, folder, wanted, Ticker(label), rounds)

    def find_micro_batch(self) -> Result:
        """Measure the chosen set with larger and with smaller micro-batches, as long as they pay.

        The effective batch stays, and so do the gradients. A size that should not fit into memory
        at the longest rows is not tried.
        """
        self.micro_batch = self.task.data.micro_batch
        self.resized = []
        first = self.measured[-1]
        larger, smaller = self._other_sizes()
        if first.loss is None or not (larger or smaller):
            return Result(line=f"Micro-batch: {self.micro_batch}, no other can be compared.")
        rows = [dataclasses.replace(first, label=f"micro-batch {self.micro_batch}")]
        best = first
        for sizes in (larger, smaller):
            for size in sizes:
                trial = self._with_micro_batch(size)
                rows.append(trial)
                if not choose.pays_off(best, trial):
                    break
                best = trial
                self.micro_batch = size
            if best is not first:
                self.resized = [dataclasses.replace(best, label=f"{first.label}, {best.label}")]
                break  # where larger ones pay, smaller ones do not
        line = f"Micro-batch: {self.micro_batch} of an effective batch of "
        line += f"{self.task.data.effective_batch}"
        return Result(line=line, grid=choose.trial_cells(rows))

    def _other_sizes(self) -> tuple[list[int], list[int]]:
        """Larger micro-batches in rising order, and smaller ones in falling order."""
        data = self.task.data
        sizes = divisors(data.effective_batch)
        larger = [size for size in sizes if size > data.micro_batch]
        smaller = [size for size in reversed(sizes) if size < data.micro_batch]
        return larger, smaller

    def _with_micro_batch(self, size: int) -> Trial:
        """The chosen set in passes of `size` rows, measured unless too large for the memory."""
        label = f"micro-batch {size}"
        data = dataclasses.replace(self.task.data, micro_batch=size)
        variant = choose.set_of(label, (d.name for d in self.decisions if d.on))
        speed = SpeedConfig(**dict.fromkeys(variant.on, True))
        work = workload(self.active, finetuning=self.task.finetuning, data=data, speed=speed)
        limit_bytes = limit_memory(work.hw, work.max_memory_fraction)
        if work.planned_bytes > limit_bytes:
            reason = f"planned {format_gib(work.planned_bytes)}, of {format_gib(limit_bytes)}"
            variant = dataclasses.replace(variant, reason=reason)
        task = dataclasses.replace(self.task, data=data)
        (trial,) = self._trials(task, [variant], label)
        return trial

    def speed(self) -> Result:
        """Tokens a second and peak memory, from the baseline down to the chosen set.

        Their rounds differ by as much as the lines at the bars' ends are long.
        """
        names = [row.label for row in self.ran]
        tokens_per_s = [row.tokens_per_s for row in self.ran]
        errors = [row.spread / 2 * row.tokens_per_s for row in self.ran]
        sizes_gib = [row.peak_memory_bytes / GIB for row in self.ran]
        first, last = self.ran[0], self.ran[-1]
        times = last.steps_per_s / first.steps_per_s
        line = f"{last.label}: {times:.2f}x as fast as {first.label}, "
        line += f"{last.tokens_per_s:,.0f} tokens/s, {sizes_gib[-1]:.2f} GiB at most"
        used = flops_used(self.task, last.tokens_per_s)
        if used is not None:
            line += f", {used:.0%} of the matmuls that this device could do (MFU)"
        speed = bars(names, tokens_per_s, "tokens/s", "Speed", errors)
        memory = bars(names, sizes_gib, "GiB", "Peak memory")
        return Result(line=f"{line}.", pictures=[speed, memory])

    def table(self) -> Result:
        rows = [*self.measured, *self.resized]
        return Result(line=f"{len(rows)} variants", grid=choose.trial_cells(rows))

    def write(self) -> Result:
        """Write the chosen set to the run's folder as a preset, with the reasons as comments."""
        run = self.active
        given = merge(load_use(run.use), run.settings)
        sections = {"extends": run.preset_name}
        sections |= merge(given, {"data": {"micro_batch": self.micro_batch}})
        path = run.path("speed.yaml")
        measured_on = f"{run.hw.name}, torch {versions()['torch']}"
        choose.write_choice(self.decisions, path, measured_on, sections)
        figures = {
            "chosen": [decision.name for decision in self.decisions if decision.on],
            "device": run.hw.name,
            "micro_batch": self.micro_batch,
            "variants": choose.trial_figures(self.measured),
        }
        run.record(bench={"preset": figures})
        return Result(line=path.read_text(encoding="utf-8").strip())

    def summary(self) -> Result:
        folder = self.active.folder
        return Result(
            line=f"In {folder}: speed.yaml, bench/ with every result, report.json.\n"
            "Next: 02_train, which takes the switches and the micro-batch of speed.yaml. As PRESET "
            "of a new run, or --preset, that file is a preset."
        )
