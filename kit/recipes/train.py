"""Training: from what 01_data_prep left in a run's folder to the weights of a voice.

`Training(run)` plans: will it fit, how long does it take, which switches are on? `panel()` starts
`python -m kit train` in a process of its own and follows it; in that process `fit` trains. The
results draw themselves in a notebook.
"""

import dataclasses
import functools
import json
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from kit.base.config import ROOT, build, merge
from kit.base.errors import TrainError
from kit.base.files import write_atomic
from kit.base.formatting import format_memory
from kit.base.notes import Note
from kit.base.processes import run_in_process
from kit.base.run import read_run_file
from kit.batches.batching import DataConfig
from kit.batches.code_stream import validation_batches
from kit.model.gpt import SpeechGPT
from kit.model.text_attention import AlignmentHead, find_alignment_head
from kit.model.weights import WEIGHTS, load_model
from kit.notebook.panel.train_panel import TrainPanel
from kit.notebook.plots import heatmaps, memory_bars
from kit.notebook.progress import Lines, Pace, newest, progress_texts
from kit.notebook.result import Result
from kit.notebook.run_plots import run_curves
from kit.recipes.active_run import ActiveRun
from kit.recipes.after_training import learn_reader, learn_sound
from kit.recipes.base_model import (
    describe_base_voice,
    describe_finetuning,
    describe_rehearsal,
    finetuning_figures,
    finetuning_of,
    first_model,
)
from kit.recipes.benchmark import measured_effects
from kit.recipes.run_source import sampling_of, section_for_run
from kit.recipes.shared_jobs import broadcast_order
from kit.recipes.training_data import TrainingData
from kit.recipes.training_samples import (
    AttentionLog,
    SampleLog,
    SamplePlayers,
    load_attention_maps,
    recognizer_accuracy_lines,
    spoken_samples,
    training_gate,
)
from kit.training.config import TrainConfig
from kit.training.launch import (
    PROFILE,
    STOP,
    StopSignals,
    TrainingProcess,
    clear_requests,
    is_requested,
    take_request,
)
from kit.training.logs import Listener, read_log, tensorboard_log, trackio_log, wandb_log
from kit.training.logs import summary as run_figures
from kit.training.ranks import Ranks
from kit.training.run import TrainingRun, finished_steps
from kit.training.switches import SpeedConfig, wants_few_shapes
from kit.training.switches import switches as offered_switches
from kit.tuning.memory_plan import count_parameters, count_trained, plan_bytes
from kit.tuning.monitor import Monitor
from kit.tuning.preflight import (
    Verdict,
    Workload,
    check_changes,
    largest_micro_batch,
    limit_memory,
    preflight,
)
from kit.tuning.profiling import StepProfiler
from kit.tuning.session_plan import (
    SessionLimits,
    SessionPlan,
    TimeBudget,
    describe_epochs,
    on_disk,
    plan_session,
    resolve_steps,
    shortened,
)
from kit.tuning.trial_results import load_choice
from kit.tuning.trials import trial_rows

TRIAL_STEPS = 8
BOARD_PROJECT = "voicekit"  # in W&B and trackio
ALIGNED_ROWS = 4  # training rows that show which head follows the text
GPUS = "gpus"  # a file in a run's folder: how many it was trained on last


def once(step: Callable) -> Callable:
    """A step whose result is kept: when it is called again it is shown, not done again."""

    @functools.wraps(step)
    def kept(self):
        if step.__name__ not in self.results:
            self.results[step.__name__] = step(self)
        return self.results[step.__name__]

    return kept


class Training:
    """One run's training: its plan, the run itself, and what came of it.

    `max_steps` 0 leaves their number to the preset and the data; `session_hours` is how long this
    machine stays, `quota_gb` how much the run may store (0: what the disk has). `plan` is what a
    panel has settled (`start`): nothing is checked again.
    """

    def __init__(
        self,
        run: ActiveRun,
        max_steps: int = 0,
        session_hours: float = 12.0,
        quota_gb: float = 0,
        plan: dict | None = None,
    ):
        self.active = run
        run.fetch_checkpoints()  # a fresh machine continues what another one left
        self.settled = plan
        plan = plan or {}
        self.asked_steps = max_steps
        self.limits = SessionLimits(
            session_hours=session_hours, quota_bytes=int(quota_gb * 1e9) or None
        )
        self.results: dict[str, Result] = {}  # of each step that was done, by its name
        self.finetuning = finetuning_of(run)
        self.data = TrainingData(run)
        if "micro_batch" in plan:
            self.data.with_passes_of(plan["micro_batch"])
        self.model = self.data.model
        self.process = TrainingProcess(run.folder)
        self.rows_before = read_log(self.process.log)
        self.previous_steps = self.rows_before[-1]["steps"] if self.rows_before else 0
        self.measured = load_choice(run.path("speed.yaml"))
        asked = run.settings.get("speed", {})  # by a person: that comes before any measurement
        speed = merge(merge(run.section("speed"), self.measured), asked)
        chosen = dict(plan.get("switches", {}))
        if "grad_accum" in chosen:
            self.data.config = self.data.config.split(chosen.pop("grad_accum"))
        self.speed = build(SpeedConfig, merge(speed, chosen))
        effects = measured_effects(run)
        self.offered = [
            dataclasses.replace(switch, measured=effects.get(switch.name, ""))
            for switch in offered_switches(self.speed, run.hw, self.model)
        ]
        config = build(TrainConfig, run.section("train"))
        self.config = resolve_steps(config, self.data.epoch_steps, max_steps, self.previous_steps)
        if "train" in plan:
            self.config = build(TrainConfig, plan["train"])
        self.finetuning.require_steps(self.config.max_steps)
        self.shown: TrainPanel | None = None
        self.job: TrainingRun | None = None  # in the process that trains

    @property
    def finished(self) -> bool:
        return finished_steps(self.active.folder) >= self.config.max_steps

    def training_run(self, **more) -> TrainingRun:
        """The training itself, to be run in this process."""
        run = self.active
        return TrainingRun(
            model=self.model,
            config=self.config,
            speed=self.speed,
            hw=run.hw,
            folder=run.folder,
            make_batches=self.batches,
            validation=[],
            trained_with=self.data.parts,
            first_model=partial(first_model, run, tokenizer=self.data.tokenizer),
            finetuning=self.finetuning,
            hold=run.hold_shared_lock,
            ranks=run.ranks,
            **more,
        )

    def batches(self, position: dict | None = None):
        """Endless training batches from `position` on (None: the beginning).

        Where kernels are compiled for each length, rows are padded to a few fixed ones.
        """
        return self.data.stream("train", position, few_shapes=self.pads())

    def pads(self) -> bool:
        """Whether the trainer, once it is there, pads its rows to fixed lengths."""
        trainer = self.job.trainer if self.job else None
        return trainer is not None and wants_few_shapes(
            self.active.hw.device, trainer.applied.precision, trainer.applied.on("compile")
        )

    def will_pad(self, speed: SpeedConfig) -> bool:
        """Whether a run with these switches will pad its rows to fixed lengths."""
        run = self.active
        precision = run.precision.value if speed.mixed_precision else "fp32"
        available = {switch.name for switch in self.offered if switch.available}
        compiled = speed.compile and "compile" in available
        return wants_few_shapes(run.hw.device, precision, compiled)

    # --- the plan -----------------------------------------------------------------------------

    def checks(self) -> tuple[Callable[[], Result], ...]:
        """Every step of the plan, in the order in which they build on each other."""
        return (self.size, self.fits, self.in_time, self.switches, self.judge)

    @once
    def size(self) -> Result:
        """The model and the data in numbers, and how long it trains."""
        data = self.data
        config = self.config
        parameters = f"{count_parameters(self.model):,}"
        guide = "none"
        if config.guided_attention_weight:
            weight, steps = config.guided_attention_weight, config.guided_attention_steps
            guide = f"weight {weight:g} at first, gone after {steps:,} steps"
        figures = {
            "parameters": parameters,
            "layers": self.model.layers,
            "width": self.model.width,
            "effective batch": data.config.effective_batch,
            "learning rate": f"{config.lr:g} after {config.warmup_steps:,} steps of warm-up, "
            f"schedule {config.schedule}",
            "guided attention": guide,
            "utterances to learn from": data.rows("train"),
            "utterances held out": data.rows("held_out"),
        }
        length = describe_epochs(config, data.epoch_steps, data.hours)
        line = f"A model of {parameters} parameters. {length}.{self.steps_kept()}"
        lines = [line, describe_base_voice(self.active, data.tokenizer)]
        lines.append(describe_finetuning(self.model, self.finetuning))
        lines.append(describe_rehearsal(data.rehearsal_figures()))
        return Result(line="\n".join(filter(None, lines)), figures=figures)

    def steps_kept(self) -> str:
        """Where the setting `train.max_steps` differs from the number the run began with, say so.

        A run keeps its number, so that its schedule does not jump; only MAX_STEPS changes it.
        """
        steps = self.config.max_steps
        setting = self.active.settings.get("train", {}).get("max_steps", steps)
        if not self.previous_steps or self.asked_steps or setting == steps:
            return ""
        return (
            f" This run was started with {steps:,} steps and keeps them, whatever "
            f"`train.max_steps` says ({setting:,}): set MAX_STEPS, or give --max-steps."
        )

    @once
    def fits(self) -> Result:
        """One real step at the longest lengths. Raises KitError where not even one row fits.

        Where it does not fit, the largest micro-batch that does is searched; accumulation fills the
        rest, so the effective batch and the gradients stay. Tried in a process of its own.
        """
        work = self.workload()
        if self.process.running:
            self.verdict = planned_verdict(work, "the run is training at this moment")
            return Result(line=str(self.verdict))
        verdict = in_process(preflight, work)
        lines = [str(verdict)]
        if not verdict.fits:
            verdict = in_process(largest_micro_batch, work)
            work = work.with_rows(verdict.micro_batch)
            self.data.with_passes_of(verdict.micro_batch)
            lines.append(f"{verdict} {work.data.grad_accum} of them make a step.")
        self.verdict = verdict
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

    def workload(self, speed: SpeedConfig | None = None) -> Workload:
        """The run as far as its memory is concerned."""
        run = self.active
        speed = speed or self.speed
        return Workload(
            model=self.model,
            train=self.config,
            finetuning=self.finetuning,
            speed=speed,
            data=self.data.padded(self.will_pad(speed)),
            hw=run.hw,
            precision=run.precision.value,
            **self.data.longest_row,
            **run.section("memory"),
        )

    @once
    def in_time(self) -> Result:
        """How long training takes here, and whether sessions and disk are enough for it.

        A resumed run is judged by its own log, a new one by a few steps of a temporary model. A
        preset may have a time budget: on a slow machine training takes fewer steps, unless a person
        set their number or the run is resumed.
        """
        self.fits()
        run = self.active
        self.config, line = shortened(
            self.config,
            self.session_plan().per_step_s,
            build(TimeBudget, section_for_run(run, "time_budget")),
            f"{run.threads.reason}; {run.precision.reason}",
            fixed=bool(self.asked_steps or self.previous_steps),
        )
        plan = self.session_plan()
        return Result(line="\n".join([line, *plan.advice]), figures=plan.table())

    def session_plan(self) -> SessionPlan:
        """The plan of the steps to go, from what steps have taken here."""
        resumed = any(row.get("wall_s") for row in self.rows_before)
        parts = plan_bytes(self.model, self.workload().step).parts
        saved = count_trained(self.model, self.finetuning).trained
        sizes = on_disk(
            count_parameters(self.model), parts["optimizer"], self.speed.ema, saved=saved
        )
        return plan_session(
            self.rows_before if resumed else self.trial_rows,
            self.config,
            sizes,
            self.active.folder / "checkpoints",
            self.limits,
            done=self.rows_before[-1]["step"] if resumed else 0,
        )

    @functools.cached_property
    def trial_rows(self) -> list[dict]:
        """Log rows of a few real steps of a temporary model, on batches of usual length.

        Each batch is used twice, and its second step counts: the first one has a new length and
        allocates memory, and takes up to half as long again.
        """
        speed = dataclasses.replace(self.speed, compile=False)
        usual = list(self.data.stream(few_shapes=self.will_pad(speed)).usual(TRIAL_STEPS))
        rows = in_process(
            trial_rows,
            self.model,
            self.config,
            speed,
            self.active.hw,
            self.finetuning,
            [*usual, *usual],
            int(self.active.threads.value),
        )
        return rows[len(usual) :]

    @once
    def switches(self) -> Result:
        """Every optimisation: on or off, what it does here, or why it cannot."""
        source = "measured by 05_benchmark" if self.measured else "of the preset"
        figures = {}
        for switch in self.offered:
            words = ("on" if switch.on else "off", switch.measured, switch.reason)
            figures[switch.label] = "; ".join(filter(None, words))
        lengths = self.data.padded(few_shapes=True).grid_lengths
        when = "Kernels are compiled for each length here, so"
        if not self.will_pad(self.speed):
            when = "If compiled,"
        line = (
            f"Switches: {source}. {when} rows are padded to {len(lengths)} lengths, {lengths[0]} "
            f"to {lengths[-1]} tokens."
        )
        if self.model.text_dropout:
            line += (
                f" {self.model.text_dropout:.0%} of the rows come without their text: a voice that "
                "knows both can be guided by its text (`generate.guidance_scale`)."
            )
        return Result(line=line, figures=figures)

    @once
    def judge(self) -> Result:
        """The gate: held-out sentences are spoken every so often, and the recogniser transcribes.

        Its errors decide which checkpoint is kept, and when to end. With it, how well the
        recogniser itself understands recordings, as 01_data_prep measured.
        """
        self.gate, line = training_gate(self.active, self.data, self.config.gate_every)
        return Result(line="\n".join([line, *recognizer_accuracy_lines(self.active)]))

    def numbers(self) -> dict[str, int]:
        """What the panel offers beside the switches."""
        return {
            "grad_accum": self.data.config.grad_accum,
            "recompute_every": self.speed.recompute_every,
        }

    def values(self) -> dict:
        """Switches and numbers before any change in the panel."""
        return {switch.name: switch.on for switch in self.offered} | self.numbers()

    def planned(self, values: dict) -> tuple[str, bool]:
        """The memory of a step with these switches and numbers, and whether it is there.

        From the plan alone: nothing is allocated. Raises KitError for a `grad_accum` that does
        not divide the effective batch.
        """
        limit_bytes = self.verdict.limit_bytes
        planned_bytes = self.workload_of(values).planned_bytes
        changed_bytes = planned_bytes - self.workload_of(self.values()).planned_bytes
        sizes = f"{format_memory(planned_bytes)} of the {format_memory(limit_bytes)} it may use"
        change = f" ({format_memory(changed_bytes, '+')} by your changes)" if changed_bytes else ""
        fits = planned_bytes <= limit_bytes
        advice = "" if fits else " That is too much: Start tries a step and says what to change."
        return f"Memory planned: {sizes}{change}.{advice}", fits

    def workload_of(self, values: dict) -> Workload:
        """The workload with a panel's switches and numbers."""
        switches = dict(values)
        grad_accum = switches.pop("grad_accum")
        switches.pop(GPUS, None)
        work = self.workload(build(SpeedConfig, switches))
        return dataclasses.replace(work, data=work.data.split(grad_accum))

    # --- the run, from outside ----------------------------------------------------------------

    def panel(self, mode: str | None = None) -> None:
        """Switches, Start, Stop and Profile around the run; an unfinished run resumes.

        Checks that were not made before are made now, with a line each. `mode` is as
        `TrainPanel.run` takes it: "plain" trains at once, with plain lines.
        """
        for step in self.checks():
            if step.__name__ not in self.results:
                print(step())
        sentences = self.data.held_out_sentences(1)
        self.shown = TrainPanel(
            self.process,
            self.start,
            self.offered,
            {**self.numbers(), **gpus_offered(self.active)},
            resumable=self.training_run().resumable(),
            finished=self.finished,
            plan=self.planned,
            players=SamplePlayers(self.samples_folder, sentences[0].text if sentences else ""),
            profile=partial(newest_profile, self.profile_folder),
            session_hours=self.limits.session_hours,
            largest={GPUS: max_processes(self.active)},
        )
        self.shown.run(mode)

    def start(self, values: dict) -> None:
        """Start the training in a process of its own, or one a GPU, with a panel's `values`.

        Switches that were changed since the check are checked first: raises KitError.
        """
        if self.finished:
            raise TrainError(
                f"This run has finished its {self.config.max_steps:,} steps. Set MAX_STEPS to more "
                "to train it further."
            )
        values = dict(values)
        gpus = values.pop(GPUS, 1)
        work = self.workload_of(values)
        notes = []
        if self.verdict.tried:
            note = in_process(
                check_changes, self.workload(), self.verdict, work.speed, values["grad_accum"]
            )
            notes = [note] if note else []
        settled = {
            "switches": values,
            "train": dataclasses.asdict(self.config),
            "micro_batch": self.data.config.micro_batch,
            "notes": notes,
        }
        if self.verdict.tried:
            settled["longest_step_bytes"] = verdict_figures(self.verdict)
        arguments = ["train", "--run", self.active.name, "--plan", json.dumps(settled)]
        write_atomic(self.active.path(GPUS), str(gpus))
        self.process.start(arguments, environment_of(self.active), gpus)

    def wait(self) -> Result:
        """Wait until the run has ended; an interrupt stops it with a checkpoint."""
        if not self.finished:
            if self.shown is None:
                raise TrainError("Nothing was started yet: call `panel()` first, then `wait()`.")
            self.shown.wait()
        return self.reached()

    def reached(self) -> Result:
        """How far the run is."""
        row = self.rows()[-1]
        where = f"step {row['step']:,} of {row['steps']:,}"
        if self.finished:
            return Result(line=f"Trained to {where}.{self.steps_kept()}")
        return Result(line=f"Stopped at {where}. Run this again to resume from its checkpoint.")

    def rows(self) -> list[dict]:
        """The log, one dict a step. Raises TrainError before the first one."""
        rows = read_log(self.process.log)
        if not rows:
            raise TrainError("Not one step has been trained yet: press Start in the panel.")
        return rows

    # --- the run, in the process that trains --------------------------------------------------

    def fit(self) -> None:
        """Train in this process, after `checks` or with what a panel has settled.

        Ctrl-C stops with a checkpoint, and is raised again once the run is recorded.
        """
        run = self.active
        if self.settled is None:  # started by hand: a request of an earlier run does not count
            clear_requests(run.folder)
        limit_memory(run.hw, run.section("memory")["max_memory_fraction"])
        self.judge()
        along = TrainAlong(
            run=dataclasses.replace(run, kept=None, ranks=Ranks()),
            config=self.config,
            speed=self.speed,
            data=self.data.config,
            evaluates=self.gate is not None,
        )
        broadcast_order(run.ranks, lambda: along)
        notes = tuple((self.settled or {}).get("notes", ()))
        self.job = self.training_run(evaluate=self.gate, notes=notes)
        self.job.validation = validation_batches(self.data.stream("held_out"))
        monitor = Monitor(run.hw)
        profiler = StepProfiler(self.profile_folder)
        self.job.sample = partial(monitor_fields, monitor)
        self.job.listeners = self.listeners()
        show = progress_lines()
        with StopSignals() as signals, monitor, profiler:
            for event in self.job.events(partial(should_stop, run.folder, signals)):
                if take_request(run.folder, PROFILE):
                    profiler.request()
                profiler(event)
                show(event)
        self.record(monitor)
        if signals.received is not None:
            print(self.reached())
            self.summary()
            os.kill(os.getpid(), signals.received)

    def listeners(self) -> tuple[Callable, ...]:
        """What gets each step besides log and checkpoints; prints which boards there are."""
        run = self.active
        trainer = lambda: self.job.trainer  # noqa: E731
        listeners = [AttentionLog(trainer, self.data.middle_row(), self.attention_folder)]
        sentences = self.data.held_out_sentences(1)
        if sentences:
            speaking = sampling_of(run, best_of=1)
            voice = self.data.voice()
            listeners.append(SampleLog(trainer, voice, sentences[0], speaking, self.samples_folder))
        for board, why in self.boards():
            print(why)
            if board is not None:
                listeners.append(board)
        return tuple(listeners)

    def boards(self) -> list[tuple[Listener | None, str]]:
        """The listener of each of `train.boards`, or None, and the reason."""
        run = self.active
        names = self.config.boards
        project = os.environ.get("WANDB_PROJECT")
        if project and "wandb" not in names:
            names = (*names, "wandb")
            note = "W&B is used because WANDB_PROJECT is set. That is now a setting: write "
            warnings.warn(f"{note}train.boards: [{', '.join(names)}].", Note, stacklevel=2)
        shown = dataclasses.asdict(self.config) | {"preset": run.preset_name}
        boards = []
        if "tensorboard" in names:
            folder = run.path("tensorboard", "_").parent
            boards.append(tensorboard_log(folder, self.rows_before))
        if "wandb" in names:
            folder = run.path("wandb", "_").parent
            boards.append(wandb_log(project or BOARD_PROJECT, run.name, shown, folder))
        if "trackio" in names:
            boards.append(trackio_log(BOARD_PROJECT, run.name, shown))
        return boards

    def record(self, monitor: Monitor) -> None:
        """Record the figures that only the process which trained knows."""
        figures = {"ran": self.job.trainer.applied.table()}
        if self.pads():
            figures["padded_to"] = self.data.padded(few_shapes=True).grid_lengths
        longest = (self.settled or {}).get("longest_step_bytes")
        if "fits" in self.results:
            longest = verdict_figures(self.verdict)
        if longest:
            figures["longest_step_bytes"] = longest
        if monitor.samples:
            figures["monitor"] = monitor.summary()
        self.active.record(train=figures)

    def run(self) -> Iterator[Result]:
        """All of it without a notebook, one result after the other; Ctrl-C leaves a checkpoint.

        With a panel's plan only the training itself. A finished run is not trained again.
        """
        if self.settled is not None:
            self.fit()
            return
        if not self.finished:
            for step in self.checks():
                yield step()
            self.fit()
        yield self.reached()
        yield self.summary()
        if self.finished:
            yield self.sound()
            yield self.reader()

    # --- what came of it ----------------------------------------------------------------------

    @property
    def attention_folder(self) -> Path:
        return self.active.path("attention", "_").parent

    @property
    def samples_folder(self) -> Path:
        return self.active.path("training-samples", "_").parent

    @property
    def profile_folder(self) -> Path:
        return self.active.path("profile", "_").parent

    def curves(self) -> Result:
        """Loss, learning rate, gradient norm, and what the average of the weights is worth."""
        rows = self.rows()
        return Result(line=f"{len(rows):,} steps", pictures=(run_curves(rows),))

    def samples(self) -> Result:
        """One held-out sentence as the model spoke it at the start, in the middle, at the end."""
        sounds = spoken_samples(self.samples_folder)
        if not sounds:
            return Result(line="No sample was spoken: no held-out sentence can be spoken.")
        row = self.data.held_out_sentences(1)[0]
        return Result(line=f"{row.speaker}: {row.text}", sounds=sounds)

    def attention(self) -> Result:
        """How the codes of one row learnt to look at its text, from the first step to the last."""
        kept = load_attention_maps(self.attention_folder)
        steps = sorted(kept)
        some = [steps[round(i * (len(steps) - 1) / 3)] for i in range(4)] if steps else []
        maps = {f"step {step:,}": kept[step].T for step in dict.fromkeys(some)}
        if not maps:
            return Result(line="No attention was kept: this run was trained by an older kit.")
        picture = heatmaps(maps, "code", "text piece")
        return Result(
            line=f"The head that follows the text best, at {len(maps)} steps", pictures=(picture,)
        )

    def trained(self) -> SpeechGPT:
        """The model as training left it: the average of its weights where a finished run has one.

        Of an unfinished run it is that of the newest checkpoint.
        """
        if not self.finished:
            return self.training_run().load_newest().cpu().eval()
        paths = [self.active.folder / WEIGHTS[kind] for kind in ("ema", "raw")]
        return load_model(paths[0] if paths[0].exists() else paths[1])

    def summary(self) -> Result:
        """Record the figures of the run; save a reference clip of each speaker with the model."""
        head = self.alignment_head()
        self.data.save_references(head)
        figures = run_figures(self.rows())
        ran = self.active.figure("train", "ran") or {}
        recorded = dict(figures)
        recorded["finished"] = self.finished
        recorded["alignment_head"] = head and head._asdict()
        recorded["finetune"] = finetuning_figures(self.model, self.finetuning)
        recorded["finetune"]["rehearsal"] = self.data.rehearsal_figures()
        self.active.record(train=recorded)
        line = (
            f"{figures['steps']:,} steps at {figures['steps_per_s']:.3g} a second, held-out loss "
            f"{figures['val_loss']:.3f}"
        )
        return Result(line=line, figures=figures | ran)

    def alignment_head(self) -> AlignmentHead | None:
        """The head of the finished model that follows the text, by a few rows; None: none does."""
        if not self.finished:
            return None
        return find_alignment_head(self.trained(), self.data.middle_rows(ALIGNED_ROWS))

    def sound(self) -> Result:
        """Teach the codec's decoder what the trained model knows at each code: a clearer sound."""
        if not self.finished:
            return Result(line="Training has not ended: until then sound is made of codes alone.")
        return learn_sound(self.data)

    def reader(self) -> Result:
        """Train a code reader: the voice keeps those of its candidates that say the text."""
        return learn_reader(self.data)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainAlong:
    """What the main rank has settled, for the other ranks to train along with it."""

    run: ActiveRun
    config: TrainConfig
    speed: SpeedConfig
    data: DataConfig
    evaluates: bool  # whether the main rank has a gate

    def follow(self, ranks: Ranks) -> None:
        training = Training(dataclasses.replace(self.run, ranks=ranks))
        training.data.config = self.data
        training.config = self.config
        training.speed = self.speed
        gate = _main_rank_evaluates if self.evaluates else None
        training.job = training.training_run(evaluate=gate)
        training.job.validation = validation_batches(training.data.stream("held_out"))
        for _ in training.job.events():
            pass


def _main_rank_evaluates(model) -> dict:
    raise AssertionError("only the main rank evaluates, and broadcasts the result")


def in_process(function: Callable, *arguments):
    """What `function(*arguments)` returns in a process of its own; this one keeps no memory.

    Tensors travel as bytes: shared memory is too small for them in many containers.
    """
    packed = pickle.dumps((function, arguments))
    return pickle.loads(run_in_process(_unpack_and_call, packed, preload=(__name__,)))


def _unpack_and_call(packed: bytes) -> bytes:
    function, arguments = pickle.loads(packed)
    return pickle.dumps(function(*arguments))


def planned_verdict(work: Workload, reason: str) -> Verdict:
    """A verdict from the plan alone."""
    return Verdict(
        fits=True,
        micro_batch=work.data.micro_batch,
        planned_bytes=work.planned_bytes,
        measured_bytes=None,
        limit_bytes=int(work.max_memory_fraction * work.hw.memory_bytes),
        tried=False,
        change="",
        untried_reason=reason,
    )


def verdict_figures(verdict: Verdict) -> dict:
    """What a check of the longest step measured, for the record."""
    figures = {
        "planned": verdict.planned_bytes,
        "measured": verdict.measured_bytes,
        "limit": verdict.limit_bytes,
    }
    if verdict.reserved_bytes is not None:
        figures["reserved"] = verdict.reserved_bytes
    return figures


def max_processes(run: ActiveRun) -> int:
    """How many processes may train together here: one a GPU; KIT_RANKS says another number."""
    asked = os.environ.get("KIT_RANKS", "")
    if asked.isdecimal():
        return max(1, int(asked))
    return max(1, torch.cuda.device_count()) if run.hw.device == "cuda" else 1


def gpus_offered(run: ActiveRun) -> dict[str, int]:
    """The number of GPUs that a panel offers, where there are several: as many as last time."""
    limit = max_processes(run)
    before = read_run_file(run.path(GPUS)).strip()
    if limit == 1:
        return {}
    return {GPUS: min(limit, int(before)) if before.isdecimal() and int(before) else 1}


def environment_of(run: ActiveRun) -> dict[str, str]:
    """This process's environment, with what leads a new one to this kit and to `run`."""
    environment = dict(os.environ, KIT_RUNS=str(run.folder.parent.resolve()))
    environment.pop("KIT_PRESET", None)  # the run has its own
    paths = [str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment


def should_stop(folder: Path, signals: StopSignals) -> bool:
    return signals.received is not None or is_requested(folder, STOP)


def newest_profile(folder: Path) -> str:
    """Describe the newest profile; "" if there is none."""
    saved = sorted(folder.glob("step-*.operators.json"))
    if not saved:
        return ""
    profiler = StepProfiler(folder)
    profiler.result = json.loads(saved[-1].read_text(encoding="utf-8"))
    return profiler.describe()


def monitor_fields(monitor: Monitor) -> dict:
    """The fields of a StepEvent that the monitor measures."""
    if monitor.newest is None:
        return {}
    return {"device_bytes": monitor.newest.memory_bytes, "load": monitor.newest.load}


def progress_lines() -> Callable:
    """A listener that prints progress with the time left."""
    lines, pace, latest = Lines(), Pace(), {}

    def show(event) -> None:
        row = dataclasses.asdict(event)
        latest.update(newest([row]))
        pace.see(row["unix_s"], row["tokens"])
        notes = [f"step {event.step}: {event.note}"] if event.note else []
        lines.show(latest, progress_texts(latest, pace), notes)

    return show
