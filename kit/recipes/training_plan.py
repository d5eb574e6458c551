"""The plan of a training: does it fit, how long does it take, which switches are on?"""

import dataclasses
import functools
import math
from collections.abc import Callable

from kit.base.config import build, merge
from kit.base.errors import KitError
from kit.base.formatting import format_memory
from kit.base.processes import run_in_process
from kit.base.run import load_use
from kit.batches.code_stream import validation_batches
from kit.notebook.result import Result
from kit.recipes import open_run, run_parts
from kit.recipes.open_run import ActiveRun, section_for_run
from kit.recipes.training_data import TrainingData
from kit.settings import EvaluateConfig, GPTConfig, SpeedConfig, TimeBudget, TrainConfig
from kit.training.config import Finetuning
from kit.training.logs import read_log
from kit.training.process import TrainingProcess
from kit.training.switches import LABELS, load_choice, switches, wants_few_shapes
from kit.tuning import estimate
from kit.tuning.checks import recognizer_warning
from kit.tuning.memory_plan import (
    Workload,
    count_parameters,
    count_trained,
    plan_memory,
    trainable_of,
)

TRIAL_STEPS = 8
GATE_SENTENCES = 24  # held-out sentences that the gate speaks each time
EPOCHS = "num_train_epochs"


def once(step: Callable) -> Callable:
    """A step that is done when it is first called; then its result is shown again."""

    @functools.wraps(step)
    def kept(self):
        if kept not in self.results:
            self.results[kept] = step(self)
        return self.results[kept]

    return kept


class TrainingPlan:
    """The plan of a run's training.

    `max_steps`, or `num_train_epochs` passes over the data, is how long it trains; 0 leaves that to
    the preset and the data. With the `plan` of a panel (`start`) nothing is checked again.
    """

    per_step_s: float | None = None  # as `in_time` measured it

    def __init__(
        self,
        run: ActiveRun,
        max_steps: int = 0,  # in total; a finished run trains on if it is raised (the preset's)
        plan: dict | None = None,  # what a panel has checked, as JSON (checked here)
        num_train_epochs: float = 0.0,  # max_steps in passes over the data (the preset's)
    ):
        self.active = run
        run.fetch_checkpoints()  # a fresh machine continues what another one left
        self.panel_plan = plan
        plan = plan or {}
        self.results: dict[Callable, Result] = {}  # of each step that was done
        self.finetuning = run_parts.finetuning_of(run)
        self.data = TrainingData(run)
        self.model = self.data.model
        self.process = TrainingProcess(run.folder)
        self.rows_before = read_log(self.process.log)
        self.previous_steps = self.rows_before[-1]["steps"] if self.rows_before else 0
        # `debug` is for a run without any optimisation, whatever was measured.
        choice = {} if run.use == "debug" else load_choice(run.path("speed.yaml"))
        self.measured = choice.get("speed", {})
        size = choice.get("data", {}).get("micro_batch")
        # What a person asked for comes before any measurement.
        if size and "micro_batch" not in run.settings.get("data", {}):
            self.data.set_micro_batch(size)
        self.data.config = dataclasses.replace(self.data.config, **plan.get("data", {}))
        asked = run.settings.get("speed", {})
        speed = merge(merge(run.section("speed"), self.measured), asked)
        self.set_speed(build(SpeedConfig, merge(speed, plan.get("switches", {}))))
        epoch_steps = self.data.epoch_steps
        self.asked_steps = steps_asked(max_steps, num_train_epochs, epoch_steps)
        self.config = build(TrainConfig, plan.get("train", section_for_run(run, "train")))
        if "train" not in plan:
            self.config = estimate.resolve_steps(
                self.config, epoch_steps, self.asked_steps, self.previous_steps
            )

    def set_speed(self, speed: SpeedConfig) -> None:
        self.speed = speed
        effects = measured_effects(self.active)
        self.offered = [
            dataclasses.replace(switch, measured=effects.get(switch.name, ""))
            for switch in switches(speed, self.active.hw, self.model)
        ]

    def checks(self) -> tuple[Callable[[], Result], ...]:
        """Every step of the plan, in the order in which they build on each other."""
        return (self.size, self.fits, self.in_time, self.switches, self.judge)

    def will_pad(self, speed: SpeedConfig) -> bool:
        """Whether a run with these switches will pad its rows to fixed lengths."""
        run = self.active
        precision = run.precision.value if speed.mixed_precision else "fp32"
        on = [s.name for s in self.offered if s.available and getattr(speed, s.name)]
        return wants_few_shapes(run.hw.device, precision, on)

    @once
    def size(self) -> Result:
        """The model and the data in numbers, and how long it trains."""
        data = self.data
        config = self.config
        parameters = f"{count_parameters(self.model):,}"
        guide = "none"
        if config.guided_attention_weight:
            guide = f"weight {config.guided_attention_weight:g} at first, gone after "
            guide += f"{config.guided_attention_steps:,} steps"
        figures = {
            "parameters": parameters,
            "layers": self.model.layers,
            "width": self.model.width,
            "effective batch": data.config.effective_batch,
            "validation": f"every {config.eval_steps:,} steps",
            "checkpoint": f"every {config.save_steps:,} steps",
            "learning rate": f"{config.lr:g} after {config.warmup_steps:,} steps of warm-up, "
            f"schedule {config.schedule}",
            "guided attention": guide,
            "utterances to learn from": len(data.cache.rows_in_split("train")),
            "utterances held out": len(data.cache.rows_in_split("held_out")),
        }
        hours = data.cache.total("codes", "train") / data.codec.frame_rate / 3600
        length = estimate.describe_epochs(config, data.epoch_steps, hours)
        lines = [
            f"A model of {parameters} parameters. {length}.",
            self.steps_kept(),
            run_parts.describe_base_voice(self.active, data.tokenizer),
            describe_finetuning(self.model, self.finetuning),
        ]
        return Result(line="\n".join(filter(None, lines)), figures=figures)

    def steps_kept(self) -> str:
        """That a run keeps its number of steps, so that its schedule does not jump, if it does."""
        steps = self.config.max_steps
        setting = self.active.settings.get("train", {}).get("max_steps", steps)
        if not self.previous_steps or self.asked_steps or setting == steps:
            return ""
        return (
            f"This run began with {steps:,} steps and keeps them, whatever `train.max_steps` says: "
            "set MAX_STEPS, or give --max-steps."
        )

    @once
    def fits(self) -> Result:
        """One real step at the longest lengths. Raises KitError where not even one row fits.

        Where it does not fit, passes get fewer rows or layers are recomputed, unless a person has
        set that; the effective batch and the gradients stay. Tried in a process of its own.
        """
        from kit.notebook.plots import memory_bars
        from kit.tuning import preflight

        work = self.workload()
        if self.process.running:
            self.verdict = preflight.Verdict(
                fits=True,
                micro_batch=work.data.micro_batch,
                planned_bytes=work.planned_bytes,
                limit_bytes=int(work.max_memory_fraction * work.hw.memory_bytes),
                tried=False,
                change="",
            )
            return Result(line=f"The run is training at this moment. {self.verdict}")
        verdict = in_process(preflight.preflight, work)
        line = str(verdict)
        if not verdict.fits:
            # The switches that a person or a use has set, and the precision.
            by_use = load_use(self.active.use).get("speed", {})
            kept = (*by_use, *self.active.settings.get("speed", {}), "mixed_precision")
            fitting, verdict = in_process(preflight.make_fit, work, kept)
            changes = ", ".join(preflight.changed_settings(work, fitting))
            work = fitting
            self.set_speed(work.speed)
            rows = work.data.micro_batch
            self.data.config = dataclasses.replace(self.data.config, micro_batch=rows)
            line += f"\nChanged: {changes}. {verdict} {work.data.grad_accum} of them make a step."
        self.verdict = verdict
        draw = functools.partial(
            memory_bars,
            *plan_memory(work),
            measured_bytes=verdict.measured_bytes,
            limit_bytes=verdict.limit_bytes,
            device_bytes=work.hw.memory_bytes,
            title=work.hw.name,
        )
        return Result(line=line, pictures=(draw,))

    def workload(self, speed: SpeedConfig | None = None) -> Workload:
        """What a step with the switches `speed` (None: the run's) must hold in memory."""
        speed = speed or self.speed
        cache = self.data.cache
        return run_parts.workload(
            self.active,
            model=self.model,
            train=self.config,
            finetuning=self.finetuning,
            speed=speed,
            data=self.data.padded(self.will_pad(speed)),
            text_ids=cache.longest("texts"),
            codes=cache.longest("codes"),
        )

    @once
    def in_time(self) -> Result:
        """How long training takes here, and whether the disk has room for it.

        A resumed run is timed by its own log, a new one by a few steps of a temporary model. A
        preset may have a time budget: on a slow machine training takes fewer steps, unless a person
        set their number or the run is resumed.
        """
        self.fits()
        run = self.active
        rows = self.rows_before
        resumed = any(row.get("wall_s") for row in rows)
        if resumed:
            self.per_step_s = estimate.seconds_per_step(rows, self.config)
        else:
            self.per_step_s = self.trial_step_s
            run.record(train={"estimated_step_s": self.per_step_s})
        self.config, line = estimate.estimate_time(
            self.config,
            self.per_step_s,
            build(TimeBudget, section_for_run(run, "time_budget")),
            slow=f"{run.threads.reason}; {run.precision.reason}",
            done=rows[-1]["step"] if resumed else 0,
            fixed=bool(self.asked_steps or self.previous_steps),
        )
        needed_bytes = estimate.stored_bytes(
            self.config,
            count_parameters(self.model),
            plan_memory(self.workload())[0]["optimizer"],
            self.speed.ema,
            saved=count_trained(self.model, self.finetuning),
        )
        warning = estimate.disk_warning(needed_bytes, run.folder / "checkpoints")
        return Result(line=f"{line}\n{warning}" if warning else line)

    @functools.cached_property
    def trial_step_s(self) -> float:
        """Seconds of a step by a few of a temporary model, on batches of usual length."""
        print("Timing a few steps of a temporary model, and how long it takes to judge it ...")
        speed = dataclasses.replace(self.speed, compile=False)
        stream = self.data.stream(few_shapes=self.will_pad(speed))
        batches = stream.representative_batches(TRIAL_STEPS, self.config.max_steps)
        return in_process(
            estimate.time_steps,
            self.workload(speed),
            batches,
            int(self.active.threads.value),
            validation_batches(self.data.stream("held_out")),
            self.make_gate,
        )

    @once
    def switches(self) -> Result:
        """Every optimisation: on or off, what it does here, or why it cannot."""
        source = "measured by 05_benchmark" if self.measured else "the preset's"
        figures = {}
        for switch in self.offered:
            state = "on" if switch.on else "off"
            words = (state if switch.available else "", switch.measured, switch.explanation)
            figures[switch.label] = "; ".join(filter(None, words))
        lengths = self.data.padded(few_shapes=True).grid_lengths
        when = "Kernels are compiled for each length here, so"
        if not self.will_pad(self.speed):
            when = "If compiled,"
        line = (
            f"Switches: {source}. {when} examples are padded to {len(lengths)} lengths, "
            f"{lengths[0]} to {lengths[-1]} tokens."
        )
        return Result(line=line, figures=figures)

    @once
    def judge(self) -> Result:
        """The gate: held-out sentences are spoken every so often, and the recogniser transcribes.

        Its errors decide which checkpoint is kept, and when to end. With it, how well the
        recogniser itself understands recordings, as 01_data_prep measured.
        """
        run = self.active
        self.gate = self.make_gate() if self.make_gate else None
        line = "Quality gate: off."
        if self.gate:
            sentences = len(self.data.held_out_sentences(GATE_SENTENCES))
            line = f"Quality gate: {sentences} sentences every {self.config.gate_every} steps."
        own_cer = run.figure("recognizer", "held_out")
        if own_cer is not None:
            line += f"\nThe recogniser's own CER on recordings: {own_cer:.1%}."
        worst_cer = build(EvaluateConfig, run.section("evaluate")).worst_cer
        warning = recognizer_warning(own_cer, worst_cer)
        return Result(line=f"{line}\nWarning: {warning}" if warning else line)

    @functools.cached_property
    def make_gate(self) -> Callable | None:
        """What makes the gate's function of a model; None where no sentence is spoken."""
        run = self.active
        sentences = self.data.held_out_sentences(GATE_SENTENCES) if self.config.gate_every else []
        if not sentences:
            return None
        from kit.audio.recognizer import load_recognizer
        from kit.inference.evaluate import gate_evaluator

        recognizer = load_recognizer(run.path("recognizer.safetensors"))
        config = open_run.sampling_of(run, best_of=1)
        return functools.partial(gate_evaluator, self.data.voice(), sentences, recognizer, config)


def steps_asked(max_steps: int, num_train_epochs: float, epoch_steps: int) -> int:
    """The steps that a person asked for, as such or as epochs; 0: neither."""
    if max_steps and num_train_epochs:
        raise KitError(
            f"max_steps = {max_steps} and num_train_epochs = {num_train_epochs:g} both say how "
            "long to train: give one of them.",
            field=EPOCHS,
        )
    if not 0 <= num_train_epochs < 1e6:
        raise KitError(f"num_train_epochs = {num_train_epochs:g}: must be 0 or more.", field=EPOCHS)
    return max_steps or math.ceil(num_train_epochs * epoch_steps)


def in_process(function: Callable, *arguments):
    """What `function(*arguments)` returns in a process of its own; this one keeps no memory."""
    return run_in_process(function, *arguments, preload=(__name__, "kit.tuning.preflight"))


def measured_effects(run: ActiveRun) -> dict[str, str]:
    """The measured effect of each switch alone: {"sdpa": "1.08x, -0.20 GiB here"}.

    {} before notebook 05 has run; a switch that did not run has no entry.
    """
    bench = run.report().get("bench", {}).get("preset", {})
    variants = bench.get("variants", {})
    device = bench.get("device", "another machine")
    where = "here" if device == run.hw.name else f"on {device}"
    pairs = {name: (name, "baseline") for name in LABELS}
    pairs["ema_offload"] = ("ema+ema_offload", "ema")  # the EMA that it moves is its baseline
    effects = {}
    for name, (on, off) in pairs.items():
        after, before = variants.get(on, {}), variants.get(off, {})
        if "steps_per_s" in after and "steps_per_s" in before:
            times = after["steps_per_s"] / before["steps_per_s"]
            more_bytes = after["peak_memory_bytes"] - before["peak_memory_bytes"]
            effects[name] = f"{times:.2f}x, {format_memory(more_bytes, '+')} {where}"
    return effects


def describe_finetuning(model: GPTConfig, finetuning: Finetuning) -> str:
    """Describe what of `model` trains; "" if all of it does."""
    if not finetuning.adapters:
        return ""
    trained = trainable_of(model, finetuning)
    lora = finetuning.lora
    tables = ", and the new rows of embeddings and heads" if trained.first_rows else ""
    if finetuning.config.tables == "all":
        tables = ", and all embeddings and heads"
    return (
        f"LoRA: {trained.count:,} parameters train, "
        f"{trained.count / count_parameters(model):.1%} as many as the model has: adapters "
        f"of rank {lora.rank} beside {', '.join(lora.targets)}{tables}. With mixed precision "
        "the frozen matrices beside them take half the memory."
    )
