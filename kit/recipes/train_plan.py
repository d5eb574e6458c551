"""What is known of a training before its first step: will it fit, and will it be done in time?

Each step says what it found and draws it; asked again it is not done again. `Training` adds the
run.
"""

import dataclasses
import functools
from collections.abc import Callable
from functools import partial

from kit.base.config import build, merge
from kit.base.hardware import leave_cores_to_worker
from kit.base.words import memory_size
from kit.batches.code_stream import validation_batches
from kit.notebook.plots import memory_bars
from kit.notebook.result import Result
from kit.recipes.active_run import ActiveRun
from kit.recipes.benchmark import measured_effects
from kit.recipes.prepare_source import section_as_begun
from kit.recipes.start_from import first_model, told_start
from kit.recipes.trained_parts import finetuning_of, told_finetuning, told_rehearsal
from kit.recipes.training_data import TrainingData
from kit.recipes.training_gate import judge_itself, training_gate
from kit.training.logs import read_log
from kit.training.run import TrainSession
from kit.training.settings import TrainConfig
from kit.training.switches import Applied, SpeedConfig, wants_few_shapes
from kit.training.switches import switches as offered_switches
from kit.training.torchrun import TorchrunRun
from kit.tuning.ab_results import load_choice
from kit.tuning.memory_plan import parameter_count, plan_bytes, trained_counts
from kit.tuning.preflight import Verdict, Workload, check_again, largest_micro_batch, preflight
from kit.tuning.session_plan import (
    Promise,
    SessionLimits,
    SessionPlan,
    for_corpus,
    in_epochs,
    on_disk,
    plan_session,
    shortened,
)

TRIAL_STEPS = 8


def once(step: Callable) -> Callable:
    """A step whose result is kept: asked again it is shown again, and not done again."""

    @functools.wraps(step)
    def kept(self):
        if step.__name__ not in self.found:
            self.found[step.__name__] = step(self)
        return self.found[step.__name__]

    return kept


def guide_words(config: TrainConfig) -> str:
    """How strongly, and how long, one head is shown that speech follows its text."""
    if not config.guide:
        return "none"
    return f"weight {config.guide:g} at first, gone after {config.guide_steps:,} steps"


class TrainingPlan:
    """One run's training before it begins.

    `steps` 0 leaves their number to the preset and the data; `session_hours` is how long this
    machine stays, `quota_gb` how much the run may lay down (0: what the disk has). `switches` are
    those of a panel, with its numbers: they come before what was measured, and are not kept.
    """

    def __init__(
        self,
        run: ActiveRun,
        steps: int = 0,
        session_hours: float = 12.0,
        quota_gb: float = 0,
        switches: dict | None = None,
    ):
        leave_cores_to_worker()  # this thread only waits for the trainer's
        self.active = run
        run.bring_checkpoints()  # a fresh machine goes on from what another one left
        self.asked_steps = steps
        self.limits = SessionLimits(
            session_hours=session_hours, quota_bytes=int(quota_gb * 1e9) or None
        )
        self.found: dict[str, Result] = {}  # what each step found, by its name
        finetuning = finetuning_of(run)  # asks for a voice before the data ask what it has said
        self.data = TrainingData(run)
        self.model = self.data.model
        self.rows_before = read_log(run.path("train.jsonl"))
        self.begun_steps = self.rows_before[-1]["steps"] if self.rows_before else 0
        self.measured = load_choice(run.path("speed.yaml"))
        asked = run.settings.get("speed", {})  # by a person: that comes before any measurement
        speed = merge(merge(run.section("speed"), self.measured), asked)
        chosen = dict(switches or {})
        if "grad_accum" in chosen:
            self.data.config = self.data.config.split(chosen.pop("grad_accum"))
        self.speed = build(SpeedConfig, merge(speed, chosen))
        effects = measured_effects(run)
        self.offered = [
            dataclasses.replace(switch, measured=effects.get(switch.name, ""))
            for switch in offered_switches(self.speed, run.hw, self.model)
        ]
        self.compiled = any(switch.on for switch in self.offered if switch.name == "compile")
        config = build(TrainConfig, run.section("train"))
        config = for_corpus(config, self.data.epoch_steps, steps, self.begun_steps)
        self.session = TrainSession(
            model=self.model,
            config=config,
            hw=run.hw,
            folder=run.folder,
            make_batches=self.batches,
            validation=[],  # made when it is known how many rows fit into a pass
            threads=int(run.threads.value),
            trained_with=self.data.parts,
            first_model=partial(first_model, run, tokenizer=self.data.tokenizer),
            finetuning=finetuning,
            held_by_all=run.held_by_all,
            ranks=run.ranks,
        )
        self.session.finetuning.require_steps(config.steps)

    def batches(self, position: dict | None = None, grad_accum: int = 0):
        """The batches of training, without an end, from `position` on (None: the beginning).

        Where kernels are compiled for each length, rows are padded to a few fixed ones.
        """
        state = self.session.state
        few_shapes = state is not None and self.pads(state.applied)
        return self.data.stream("train", position, grad_accum, few_shapes)

    def pads(self, applied: Applied) -> bool:
        """Whether a run in which `applied` is what really runs pads its rows to fixed lengths."""
        device = self.active.hw.device
        return wants_few_shapes(device, applied.precision, applied.on("compile"))

    def will_pad(self, mixed_precision: bool, compiled: bool) -> bool:
        """Whether a run with these switches will pad its rows to fixed lengths."""
        run = self.active
        precision = run.precision.value if mixed_precision else "fp32"
        return wants_few_shapes(run.hw.device, precision, compiled)

    def checks(self) -> tuple[Callable[[], Result], ...]:
        """Every step of the plan, in the order in which they build on each other."""
        return (self.size, self.fits, self.in_time, self.switches, self.judge)

    @once
    def size(self) -> Result:
        """The model and the data in numbers, and how long it trains."""
        data = self.data
        parameters = f"{parameter_count(self.model):,}"
        config = self.session.config
        length = in_epochs(config, data.epoch_steps, data.hours)
        figures = {
            "parameters": parameters,
            "layers": self.model.layers,
            "width": self.model.width,
            "effective batch": data.config.effective_batch,
            "learning rate": f"{config.lr:g} after {config.warmup_steps:,} steps of warm-up, "
            f"schedule {config.schedule}",
            "guided attention": guide_words(config),
            "utterances to learn from": data.rows("train"),
            "utterances held out": data.rows("held_out"),
        }
        line = f"A model of {parameters} parameters. {length}.{self.steps_left_aside()}"
        trains = told_finetuning(self.model, self.session.finetuning)
        lines = [line, told_start(self.active, data.tokenizer), trains]
        lines.append(told_rehearsal(data.rehearsal_figures()))
        return Result(line="\n".join(filter(None, lines)), figures=figures)

    def steps_left_aside(self) -> str:
        """That a setting `train.steps` says another number than the run was begun with; "" if not.

        A run keeps its number, so that its schedule does not jump; only who asks changes it.
        """
        steps = self.session.config.steps
        wanted = self.active.settings.get("train", {}).get("steps", steps)
        if not self.begun_steps or self.asked_steps or wanted == steps:
            return ""
        return (
            f" This run was begun with {steps:,} steps and keeps them, whatever `train.steps` says "
            f"({wanted:,}): set STEPS, or give --steps."
        )

    @once
    def fits(self) -> Result:
        """A real step at the longest lengths. Raises FitError where not even one row fits.

        Where it does not fit, the most rows a pass can have are searched; accumulation fills the
        rest, so the effective batch and the gradients stay as they are.
        """
        work = self.workload()
        if not self.active.ranks.several and TorchrunRun(self.active.folder).main_rank is not None:
            return self.fits_already(work)
        verdict = preflight(work)
        lines = [str(verdict)]
        if not verdict.fits:
            verdict = largest_micro_batch(work)
            work = work.with_rows(verdict.micro_batch)
            self.data.with_passes_of(verdict.micro_batch)
            lines.append(f"{verdict} {work.data.grad_accum} of them make a step.")
        self.verdict = verdict
        self.session.check = partial(check_again, work, verdict)
        self.session.validation = self.held_out()
        planned = plan_bytes(self.model, work.step)
        picture = memory_bars(
            planned.parts,
            planned.peak_bytes,
            measured_bytes=verdict.measured_bytes,
            limit_bytes=verdict.limit_bytes,
            device_bytes=work.hw.memory_bytes,
            title=f"{work.hw.name}, fullest at {planned.fullest}",
        )
        return Result(line="\n".join(lines), pictures=(picture,))

    def fits_already(self, work: Workload) -> Result:
        """As `fits`, from the plan alone: processes that train the run have the memory by now."""
        self.verdict = Verdict(
            fits=True,
            micro_batch=work.data.micro_batch,
            planned_bytes=work.planned_bytes,
            measured_bytes=None,
            limit_bytes=int(work.max_memory_fraction * work.hw.memory_bytes),
            tried=False,
            change="",
            untried="the run is in training at this moment",
        )
        self.session.check = partial(check_again, work, self.verdict)
        self.session.validation = self.held_out()
        return Result(line=str(self.verdict))

    def held_out(self) -> list:
        """The batches that validation goes through."""
        return validation_batches(self.data.stream("held_out"))

    def workload(self) -> Workload:
        """The run as far as its memory is concerned."""
        run = self.active
        return Workload(
            model=self.model,
            train=self.session.config,
            finetuning=self.session.finetuning,
            speed=self.speed,
            data=self.data.padded(self.will_pad(self.speed.mixed_precision, self.compiled)),
            hw=run.hw,
            precision=run.precision.value,
            **self.data.longest_row,
            **run.section("memory"),
        )

    def planned(self, values: dict) -> tuple[str, bool]:
        """The memory of a step with these switches and numbers in words, and whether it is there.

        From the plan alone: nothing is allocated. Raises ConfigError for a `grad_accum` that does
        not divide the effective batch.
        """
        limit_bytes = self.verdict.limit_bytes
        planned_bytes = self._planned_bytes(values)
        changed_bytes = planned_bytes - self._planned_bytes(self.values())
        sizes = f"{memory_size(planned_bytes)} of the {memory_size(limit_bytes)} it may use"
        change = f" ({memory_size(changed_bytes, '+')} by your changes)" if changed_bytes else ""
        fits = planned_bytes <= limit_bytes
        advice = "" if fits else " That is too much: Start tries a step and says what to change."
        return f"Memory planned: {sizes}{change}.{advice}", fits

    def _planned_bytes(self, values: dict) -> int:
        switches = dict(values)
        grad_accum = switches.pop("grad_accum")
        switches.pop("gpus", None)
        speed = build(SpeedConfig, switches)
        few_shapes = self.will_pad(speed.mixed_precision, speed.compile)
        data = self.data.padded(few_shapes).split(grad_accum)
        return dataclasses.replace(self.workload(), speed=speed, data=data).planned_bytes

    @once
    def in_time(self) -> Result:
        """How long training takes here, and whether sessions and disk are enough for it.

        A run that was begun says it with its own log, else a few steps of a throwaway model do. A
        preset may promise how long it takes at most: on a slow machine it takes fewer steps, unless
        a person has asked for their number or the run was begun with it.
        """
        self.fits()
        run = self.active
        session = self.session
        session.config, line = shortened(
            session.config,
            self.plan().per_step_s,
            build(Promise, section_as_begun(run, "promise")),
            f"{run.threads.reason}; {run.precision.reason}",
            fixed=bool(self.asked_steps or self.begun_steps),
        )
        ahead = self.plan()
        return Result(line="\n".join([line, *ahead.advice]), figures=ahead.table())

    def plan(self) -> SessionPlan:
        """The plan of the steps to go, from what steps have taken here."""
        session = self.session
        begun = any(row.get("wall_s") for row in self.rows_before)
        parts = plan_bytes(self.model, self.workload().step).parts
        saved = trained_counts(self.model, session.finetuning).trained
        model_numbers = parameter_count(self.model)
        sizes = on_disk(model_numbers, parts["optimizer"], self.speed.ema, saved=saved)
        return plan_session(
            self.rows_before if begun else self.trial_rows,
            session.config,
            sizes,
            session.checkpoints,
            self.limits,
            done=self.rows_before[-1]["step"] if begun else 0,
        )

    @functools.cached_property
    def trial_rows(self) -> list[dict]:
        """Rows of a few real steps of a throwaway model, on batches of usual length.

        Each goes through twice, and its second step counts: the first meets a length, memory and
        threads that nothing is ready for, and took up to half as long again.
        """
        few_shapes = self.will_pad(self.speed.mixed_precision, compiled=False)
        usual = self.data.stream(few_shapes=few_shapes).usual(TRIAL_STEPS)
        return self.session.trial(self.values(), [*usual, *usual])[len(usual) :]

    @once
    def switches(self) -> Result:
        """Every optimisation: on or off, what it does here, or why it cannot."""
        whose = "measured by 05_benchmark" if self.measured else "of the preset"
        figures = {}
        for switch in self.offered:
            words = ("on" if switch.on else "off", switch.measured, switch.reason)
            figures[switch.label] = "; ".join(filter(None, words))
        lengths = self.data.padded(few_shapes=True).grid_lengths
        pads = self.will_pad(self.speed.mixed_precision, self.compiled)
        when = "Kernels are compiled for each length here, so" if pads else "If compiled,"
        padding = (
            f"{when} rows are padded to {len(lengths)} lengths, {lengths[0]} to {lengths[-1]} "
            "tokens."
        )
        line = f"Switches: {whose}. {padding}"
        untold = self.data.model.text_dropout
        if untold:
            line += (
                f" {untold:.0%} of the rows come without their text: a voice that knows both can "
                "be guided by its text (`generate.guidance`)."
            )
        return Result(line=line, figures=figures)

    @once
    def judge(self) -> Result:
        """The gate: held-out sentences are spoken every so often, and the recogniser listens.

        What it hears decides which checkpoint is kept, and when to end. With it, how well that
        judge itself understands recordings, as 01_data_prep found.
        """
        every = self.session.config.gate_every
        self.session.gate, line = training_gate(self.active, self.data, every)
        return Result(line="\n".join([line, *judge_itself(self.active)]))

    def numbers(self) -> dict[str, int]:
        """What the panel offers beside the switches."""
        return {
            "grad_accum": self.data.config.grad_accum,
            "recompute_every": self.speed.recompute_every,
        }

    def values(self) -> dict:
        """Switches and numbers as they stand before anybody has touched the panel."""
        values = {switch.name: switch.on for switch in self.offered}
        values.update(self.numbers())
        return values
