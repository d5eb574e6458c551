"""Notebook 02: from what 01_data_prep left in a run's folder to the weights of a voice.

`Training(run)` plans: will it fit, how long does it take, which switches are on? `panel()` starts
`python -m kit train` in a process of its own and follows it; in that process `fit` trains.
"""

import dataclasses
import os
import shlex
import time
from collections.abc import Callable, Iterator
from functools import cached_property, partial

import torch
from torch import Tensor

from kit.base.config import build
from kit.base.errors import KitError
from kit.base.formatting import clock, text_grid
from kit.base.run import read_run_file, require_run
from kit.batches.code_stream import prefetched, validation_batches
from kit.model.gpt import SpeechGPT
from kit.model.text_attention import find_alignment_head
from kit.model.weights import WEIGHTS, load_model
from kit.notebook.progress import Lines, Pace, newest, progress_texts
from kit.notebook.result import Result
from kit.recipes.open_run import ActiveRun, sampling_of
from kit.recipes.run_parts import first_model
from kit.recipes.training_listeners import (
    ATTENTION,
    PROFILES,
    SPOKEN,
    AttentionLog,
    SampleLog,
    load_attention_maps,
    spoken_samples,
)
from kit.recipes.training_plan import TrainingPlan
from kit.settings import EvaluateConfig
from kit.training import logs, process
from kit.training.ranks import Ranks, broadcast_order
from kit.training.run import TrainingRun, finished_steps, validation_loss
from kit.training.switches import wants_few_shapes
from kit.training.trainer import Trainer
from kit.tuning import checks
from kit.tuning.estimate import estimate_again
from kit.tuning.memory_plan import count_parameters, trainable_of
from kit.tuning.monitor import STATUS, Monitor, StepProfiler

BOARD_PROJECT = "voicekit"  # in W&B and trackio
POLL_S = 0.5  # between two looks whether a profile is there
ALIGNED_ROWS = 4  # training rows that show which head follows the text
TIMED_STEPS = 100  # after which the estimate of the time is checked


class Training(TrainingPlan):
    """One run's training: its plan, the run itself, and what came of it."""

    shown = None  # the TrainPanel, once there is one
    job: TrainingRun | None = None  # in the process that trains

    @property
    def finished(self) -> bool:
        return finished_steps(self.active.folder) >= self.config.max_steps

    def training_run(self, validation: list = (), **more) -> TrainingRun:
        """The training itself, to be run in this process."""
        run = self.active
        return TrainingRun(
            model=self.model,
            config=self.config,
            speed=self.speed,
            hw=run.hw,
            folder=run.folder,
            make_batches=self.batches,
            validation=validation,
            trained_with=self.data.parts,
            first_model=partial(first_model, run, tokenizer=self.data.tokenizer),
            finetuning=self.finetuning,
            hold=run.hold_shared_lock,
            ranks=run.ranks,
            **more,
        )

    def batches(self, position: dict | None = None):
        """Endless training batches from `position` on (None: the beginning).

        Once there is a trainer, rows are padded to fixed lengths if it asks for that.
        """
        few_shapes = False
        if self.job and self.job.trainer:
            applied = self.job.trainer.applied
            device = self.active.hw.device
            few_shapes = wants_few_shapes(device, applied.precision, applied.names)
        stream = self.data.stream("train", position, few_shapes=few_shapes)
        return prefetched(stream, self.data.config)

    def panel(self) -> None:
        """Show settings, Start, Stop and Profile; an unfinished run resumes.

        Checks that were not made before are made now, with a line each.
        """
        from kit.recipes.panel import show_panel  # only here: it loads ipywidgets

        for step in self.checks():
            if step.__func__ not in self.results:
                print(step())
        self.shown = show_panel(self)

    def wait(self) -> Result:
        """Wait until the run has ended; an interrupt stops it with a checkpoint."""
        if not self.finished:
            if self.shown is None:
                raise KitError("Nothing was started yet: call `panel()` first, then `wait()`.")
            self.shown.wait()
        return self.reached()

    def reached(self) -> Result:
        """How far it is; a training that has finished and learnt nothing has failed."""
        rows = self.rows()
        where = f"step {rows[-1]['step']:,} of {rows[-1]['steps']:,}"
        if not self.finished:
            return Result(line=f"Stopped at {where}. Run this again to resume from its checkpoint.")
        failure = self.failure(rows)
        took = clock(sum(row["wall_s"] or 0 for row in rows))
        estimated_step_s = self.active.figure("train", "estimated_step_s")
        if estimated_step_s:
            took += f" (estimated: {clock(len(rows) * estimated_step_s)})"
        line = f"Trained to {where} in {took}. {failure}".strip()
        return Result(line=line, grid=checks.table(self.log_checks(rows)), failed=bool(failure))

    def rows(self) -> list[dict]:
        """The log, one dict a step. Raises KitError before the first one."""
        rows = logs.read_log(self.process.log)
        if not rows:
            raise KitError("Not one step has been trained yet: press Start in the panel.")
        return rows

    def fit(self) -> None:
        """Train in this process, after `checks` or by the plan of a panel.

        Ctrl-C stops with a checkpoint, and is raised again once the run is recorded.
        """
        from kit.tuning.preflight import limit_memory

        run = self.active
        if self.panel_plan is None:  # started by hand: a request of an earlier run does not count
            process.clear_requests(run.folder)
        limit_memory(run.hw, run.section("memory")["max_memory_fraction"])
        self.judge()
        configs = {"switches": self.speed, "train": self.config, "data": self.data.config}
        along = TrainAlong(
            run=dataclasses.replace(run, copy=None, ranks=Ranks()),
            plan={name: vars(config) for name, config in configs.items()},
            evaluates=self.gate is not None,
        )
        broadcast_order(run.ranks, along)  # the other processes of torchrun, if there are any
        notes = tuple((self.panel_plan or {}).get("notes", ()))
        validation = validation_batches(self.data.stream("held_out"))
        self.job = self.training_run(validation, evaluate=self.gate, notes=notes)
        monitor = Monitor(run.hw)
        profiler = StepProfiler(run.folder / PROFILES)
        self.job.sample = partial(monitor_fields, monitor)
        self.job.listeners = self.listeners()
        lines = Lines()
        pace = Pace()
        latest = {}
        steps_here = 0
        with process.stop_signals() as signals, monitor, profiler:

            def should_stop() -> bool:
                return bool(signals) or process.is_requested(run.folder, process.STOP)

            for event in self.job.events(should_stop):
                if not latest:
                    print(f"Training with {self.job.trainer.applied.line}")
                    self.keep_optimizer()
                if process.take_request(run.folder, process.PROFILE):
                    profiler.request()
                profiler(event)
                latest.update(newest([dataclasses.asdict(event)]))
                pace.see(event.unix_s, event.tokens)
                step_notes = [f"step {event.step}: {event.note}"] if event.note else []
                lines.show(latest, progress_texts(latest, pace), step_notes)
                steps_here += 1
                if steps_here == TIMED_STEPS:
                    self.job.trainer.notes += self.new_estimate()
        figures = {"ran": self.job.trainer.applied.table()}
        if monitor.samples:
            figures["monitor"] = monitor.summary()
        run.record(train=figures)
        print(text_grid(checks.table(self.log_checks(logs.read_log(self.process.log)))))
        if signals:
            print(self.reached())
            self.summary()
            os.kill(os.getpid(), signals[0])

    def keep_optimizer(self) -> None:
        """Keep how many bits a new run's AdamW has: its checkpoints are resumed with no other.

        On a resume neither the check of memory nor 05_benchmark may change it.
        """
        switches = self.job.trainer.applied.switches
        switch = next(switch for switch in switches if switch.name == "adamw_8bit")
        if not self.rows_before and switch.available:
            self.active = self.active.save_settings({"speed": {"adamw_8bit": switch.on}})

    def new_estimate(self) -> list[str]:
        """A note if the steps so far take another time than was estimated."""
        estimated_step_s = self.active.figure("train", "estimated_step_s")
        if not estimated_step_s:
            return []
        rows = logs.read_log(self.process.log)[-TIMED_STEPS:]
        note = estimate_again(rows, self.config, estimated_step_s)
        return [note] if note else []

    def listeners(self) -> tuple[Callable, ...]:
        """What gets each step besides log and checkpoints; prints which boards there are."""
        run = self.active
        listeners = [AttentionLog(self.job, self.data.middle_row(), run.folder / ATTENTION)]
        spoken = None
        sentences = self.data.held_out_sentences(1)
        if sentences:
            sampling = sampling_of(run, best_of=1)
            voice = self.data.voice()
            spoken = SampleLog(self.job, voice, sentences[0], sampling, run.folder / SPOKEN)
            listeners.append(spoken)

        def newest_sample() -> logs.SpokenSample | None:
            return spoken and spoken.newest

        shown = dataclasses.asdict(self.config) | {"preset": run.preset_name}
        for name in self.config.boards:
            folder = run.folder / name
            if name == "tensorboard":
                board, why = logs.tensorboard_log(folder, newest_sample)
            else:
                project = BOARD_PROJECT
                if name == "wandb":
                    project = os.environ.get("WANDB_PROJECT") or project
                about = (project, run.name, shown, folder)
                board, why = logs.tracker_log(name, *about, newest_sample)
            print(why)
            if board is not None:
                listeners.append(board)
        return tuple(listeners)

    def run(self) -> Iterator[Result]:
        """All of it without a notebook, one result after the other; Ctrl-C leaves a checkpoint.

        With a panel's plan only the training itself. A finished run is not trained again.
        """
        if self.panel_plan is not None:
            self.fit()
            return
        if not self.finished:
            for step in self.checks():
                yield step()
            self.fit()
        reached = self.reached()
        yield reached
        yield self.summary()
        if self.finished and not reached.failed:
            yield self.sound()
            yield self.reader()

    def curves(self) -> Result:
        from kit.notebook.training_curves import run_curves

        rows = self.rows()
        return Result(line=f"{len(rows):,} steps", pictures=(run_curves(rows),))

    def samples(self) -> Result:
        """One held-out sentence as the model spoke it at the start, in the middle, at the end."""
        sounds = spoken_samples(self.active.folder / SPOKEN)
        if not sounds:
            return Result(line="No sample was spoken: no held-out sentence can be spoken.")
        row = self.data.held_out_sentences(1)[0]
        return Result(line=f"{row.speaker}: {row.text}", sounds=sounds)

    def attention(self) -> Result:
        """Up to four of the maps that were kept, from the first step to the last."""
        from kit.notebook.plots import heatmaps

        maps = load_attention_maps(self.active.folder / ATTENTION)
        if not maps:
            return Result(line="No attention was kept.")
        steps = list(maps)
        some = dict.fromkeys(steps[round(i * (len(steps) - 1) / 3)] for i in range(4))
        picture = heatmaps({f"step {i:,}": maps[i].T for i in some}, "code", "text piece")
        line = f"The head that follows the text best, at {len(some)} steps"
        return Result(line=line, pictures=(picture,))

    def trained(self) -> SpeechGPT:
        """The model as training left it: the average of its weights where a finished run has one.

        Of an unfinished run it is that of the newest checkpoint.
        """
        if not self.finished:
            return self.training_run().load_newest().cpu().eval()
        ema, raw = (self.active.folder / WEIGHTS[kind] for kind in ("ema", "raw"))
        return load_model(ema if ema.exists() else raw)

    @cached_property
    def validator(self) -> tuple[Trainer, list]:
        """A trainer to put weights into, and the held-out batches."""
        job = self.training_run()
        job.speed = dataclasses.replace(job.speed, compile=False, cuda_graphs=False, ema=False)
        return job.build_trainer(), validation_batches(self.data.stream("held_out"))

    def held_out_loss(self, weights: dict[str, Tensor]) -> float | None:
        """The held-out loss, as in the log, with the trained `weights` by name; None for {}."""
        if not weights:
            return None
        trainer, batches = self.validator
        with torch.no_grad():
            for name, parameter in trainer.trainable.parameters.items():
                parameter.copy_(weights[name])
        precision = trainer.applied.precision
        return validation_loss(trainer.model.eval(), batches, self.active.hw.device, precision)

    def summary(self) -> Result:
        """Record the figures of the run; save a reference clip of each speaker with the model."""
        head = None  # of the finished model, the one that follows the text, if one does
        if self.finished:
            head = find_alignment_head(self.trained(), self.data.middle_rows(ALIGNED_ROWS))
        self.data.save_references(head)
        rows = self.rows()
        figures = logs.summary(rows)
        ran = self.active.figure("train", "ran") or {}
        finetuning = self.finetuning.identity() | {
            "trained_parameters": trainable_of(self.model, self.finetuning).count,
            "parameters": count_parameters(self.model),
        }
        more = {
            "finished": self.finished,
            "curve": loss_lines(rows),
            "alignment_head": head and head._asdict(),
            "finetune": finetuning,
            "step_shares": checks.step_shares(rows),
            "checks": [check._asdict() for check in self.log_checks(rows)],
        }
        self.active.record(train=figures | more)
        speed = f"{figures['steps']:,} steps at {figures['steps_per_s']:.3g} a second"
        line = f"{speed}, held-out loss {figures['val_loss']:.3f}"
        return Result(line=line, figures=figures | ran)

    @property
    def limits(self) -> dict[str, float]:
        """What `learning_checks` compares with."""
        clear_cer = build(EvaluateConfig, self.active.section("evaluate")).worst_cer
        return {"guess_loss": checks.guess_loss(self.model), "clear_cer": clear_cer}

    def log_checks(self, rows: list[dict]) -> list[checks.Check]:
        """Whether a training with such a log goes well, and what its steps wait for."""
        on = [switch.name for switch in self.offered if switch.on]
        waits = checks.diagnose(rows, self.active.hw, on, self.data.config.workers)
        return checks.training_checks(rows, **self.limits) + waits

    def failure(self, rows: list[dict]) -> str:
        """Why a training that has finished with such a log has failed; "": it has learnt."""
        faults = checks.problems(checks.learning_checks(rows, **self.limits))
        return f"This training has failed: {'; '.join(faults)}." if faults else ""

    def sound(self) -> Result:
        """Teach the codec's decoder what the trained model knows at each code: a clearer sound."""
        from kit.recipes.after_training import learn_sound

        if not self.finished:
            return Result(line="Training has not ended: until then sound is made of codes alone.")
        return learn_sound(self.data)

    def reader(self) -> Result:
        """Train a code reader: the voice keeps those of its candidates that say the text."""
        from kit.recipes.after_training import learn_reader

        return learn_reader(self.data)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainAlong:
    """The plan of the main rank, by which the other ranks train along with it."""

    run: ActiveRun
    plan: dict  # as that of a panel
    evaluates: bool  # whether the main rank has a gate

    def follow(self, ranks: Ranks) -> None:
        training = Training(dataclasses.replace(self.run, ranks=ranks), plan=self.plan)
        gate = dict if self.evaluates else None  # not called: the main rank sends its figures
        validation = validation_batches(training.data.stream("held_out"))
        training.job = training.training_run(validation, evaluate=gate)
        for _ in training.job.events():
            pass


def monitor_fields(monitor: Monitor) -> dict:
    """What `monitor` measured last, as fields of a StepEvent."""
    if not monitor.samples:
        return {}
    sample = monitor.samples[-1]
    return {"device_bytes": sample.memory_bytes, "load": sample.load, "ram_bytes": sample.ram_bytes}


def profile(run: str) -> Result:
    """Profile ten steps of the training of the run of this name, which another process runs.

    Raises KitError where none does on this machine, and where it ends before.
    """
    folder = require_run(run)
    training = process.TrainingProcess(folder)
    status = folder / PROFILES / STATUS
    status.unlink(missing_ok=True)
    if training.running:
        training.request(process.PROFILE)
    while training.running:
        done = read_run_file(status)
        if done and not done.startswith("Profiling"):
            return Result(line=f"{done} The operators that took most are in {status.parent}.")
        time.sleep(POLL_S)
    raise KitError(
        f"No training of `{folder.name}` runs on this machine, or it ended before ten steps were "
        f"profiled. Start it (python -m kit train --run {shlex.quote(folder.name)}), and give this "
        "command beside it."
    )


def loss_lines(rows: list[dict]) -> dict[str, tuple[list, list]]:
    """(steps, losses) by the name of each line: training, smoothed, and held out."""
    from kit.notebook.training_curves import column, smooth, thin

    if not rows:
        return {}
    few = thin(rows)
    losses = smooth(column(few, "loss"), len(few) // 30)
    lines = {"training": ([row["step"] for row in few], losses.tolist())}
    for weights, line in logs.held_out_losses(rows).items():
        lines[f"held out, {weights}"] = line
    return lines
