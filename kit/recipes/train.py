"""Training: from what 01_data_prep left in a run's folder to the weights of a voice.

`Training(run)` reads what there is; each step below says what it found and draws it. `panel()` is
the run under buttons and may be called at once: it takes the steps before it that were left out.
`run()` is the same without anybody watching, for `python -m kit train`.
"""

import functools
import os
from collections.abc import Callable, Iterator
from functools import partial

import torch

from kit.audio.recognizer import load_recognizer
from kit.base.config import build, merge
from kit.batches.code_stream import validation_batches
from kit.inference.evaluate import hearing, recognizer_doubt
from kit.inference.sampling import GenerateConfig
from kit.model.gpt import SpeechGPT
from kit.model.weights import WEIGHTS, load_model
from kit.notebook.panel.train_panel import TrainPanel
from kit.notebook.plots import heatmaps, memory_plan, run_curves
from kit.notebook.result import Result
from kit.recipes.active_run import ActiveRun
from kit.recipes.attention import AttentionLog, kept_attention
from kit.recipes.spoken_samples import SampleLog, spoken_samples
from kit.recipes.training_data import TrainingData
from kit.training.logs import read_log, tensorboard_log, wandb_log
from kit.training.run import TrainSession
from kit.training.run import summary as run_figures
from kit.training.settings import TrainConfig, TrainError
from kit.training.state import restore_weights
from kit.training.switches import SpeedConfig
from kit.training.switches import switches as offered_switches
from kit.tuning import session_plan
from kit.tuning.ab_results import load_choice
from kit.tuning.memory_plan import parameter_count, plan_bytes
from kit.tuning.monitor import Monitor
from kit.tuning.preflight import Workload, check_again, largest_micro_batch, preflight
from kit.tuning.profiling import StepProfiler
from kit.tuning.session_plan import Promise, SessionLimits, checkpoint_bytes, for_corpus, in_epochs

GATE_SENTENCES = 24  # held out, spoken at each hearing


def once(step: Callable) -> Callable:
    """A step whose result is kept: asked again it is shown again, and not done again."""

    @functools.wraps(step)
    def kept(self):
        if step.__name__ not in self.found:
            self.found[step.__name__] = step(self)
        return self.found[step.__name__]

    return kept


class Training:
    """One run's training, step by step, each with a result that draws itself.

    `steps` 0 leaves their number to the preset and the data; `session_hours` is how long this
    machine stays, `quota_gb` how much the run may lay down (0: what the disk has).
    """

    def __init__(
        self,
        run: ActiveRun,
        steps: int = 0,
        session_hours: float = 12.0,
        quota_gb: float = 0,
    ):
        torch.set_num_threads(1)  # this thread only waits for the trainer's: threads_for_worker
        self.active = run
        run.bring_checkpoints()  # a fresh machine goes on from what another one left
        self.asked_steps = steps
        self.limits = SessionLimits(
            session_hours=session_hours, quota_bytes=int(quota_gb * 1e9) or None
        )
        self.found: dict[str, Result] = {}  # what each step found, by its name
        self.shown: TrainPanel | None = None
        self.attention_folder = run.path("attention", "_").parent
        self.samples_folder = run.path("training-samples", "_").parent
        self.data = TrainingData(run)
        self.model = self.data.model
        self.rows_before = read_log(run.path("train.jsonl"))
        self.begun_steps = self.rows_before[-1]["steps"] if self.rows_before else 0
        self.measured = load_choice(run.path("speed.yaml"))
        asked = run.settings.get("speed", {})  # by a person: that comes before any measurement
        speed = merge(merge(run.section("speed"), self.measured), asked)
        self.speed = build(SpeedConfig, speed)
        self.offered = offered_switches(self.speed, run.hw, self.model)
        config = build(TrainConfig, run.section("train"))
        self.session = TrainSession(
            model=self.model,
            config=for_corpus(config, self.data.epoch_steps, steps, self.begun_steps),
            hw=run.hw,
            folder=run.folder,
            make_batches=self.batches,
            validation=[],  # made when it is known how many rows fit into a pass
            threads=int(run.threads.value),
            held_by_all=run.held_by_all,
        )

    def batches(self, position: dict | None = None, grad_accum: int = 0):
        """The batches of training, without an end, from `position` on (None: the beginning)."""
        return self.data.stream("train", position, grad_accum)

    # What is known before the first step.

    @once
    def size(self) -> Result:
        """The model and the data in numbers, and how long it trains."""
        data, model = self.data, self.model
        parameters = f"{parameter_count(model):,}"
        length = in_epochs(self.session.config, data.epoch_steps, data.hours)
        figures = {
            "parameters": parameters,
            "layers": model.layers,
            "width": model.width,
            "effective batch": data.config.effective_batch,
            "utterances to learn from": data.rows("train"),
            "utterances held out": data.rows("held_out"),
        }
        return Result(line=f"A model of {parameters} parameters. {length}.", figures=figures)

    @once
    def fits(self) -> Result:
        """A real step at the longest lengths. Raises FitError where not even one row fits.

        Where it does not fit, the most rows a pass can have are searched; accumulation fills the
        rest, so the effective batch and the gradients stay as they are.
        """
        work = self.workload()
        verdict = preflight(work)
        lines = [str(verdict)]
        if not verdict.fits:
            verdict = largest_micro_batch(work).best()
            work = work.with_rows(verdict.micro_batch)
            self.data.with_passes_of(verdict.micro_batch)
            lines.append(f"{verdict} {work.data.grad_accum} of them make a step.")
        self.verdict = verdict
        self.session.check = partial(check_again, work, verdict)
        self.session.validation = validation_batches(self.data.stream("held_out"))
        planned = plan_bytes(self.model, work.step)
        picture = memory_plan(
            planned.parts,
            planned.peak_bytes,
            measured_bytes=verdict.measured_bytes,
            limit_bytes=verdict.limit_bytes,
            device_bytes=work.hw.memory_bytes,
            title=f"{work.hw.name}, fullest at {planned.fullest}",
        )
        return Result(line="\n".join(lines), pictures=(picture,))

    def workload(self) -> Workload:
        """The run as far as its memory is concerned."""
        run = self.active
        return Workload(
            model=self.model,
            train=self.session.config,
            speed=self.speed,
            data=self.data.config,
            hw=run.hw,
            precision=run.precision.value,
            **self.data.longest_row,
            **run.section("memory"),
        )

    @once
    def in_time(self) -> Result:
        """How long training takes here, and whether sessions and disk are enough for it.

        A run that was begun says it with its own log, else a few steps of a throwaway model do. A
        preset may promise how long it takes at most: on a slow machine it takes fewer steps, unless
        a person has asked for their number or the run was begun with it.
        """
        self.fits()
        run, session = self.active, self.session
        step_s = self.plan().per_step_s
        session.config, line = session_plan.shortened(
            session.config,
            step_s,
            build(Promise, run.section("promise")),
            f"{run.threads.reason}; {run.precision.reason}",
            self.asked_steps,
            self.begun_steps,
        )
        ahead = self.plan()
        return Result(line="\n".join([line, *ahead.advice]), figures=ahead.table())

    def plan(self) -> session_plan.SessionPlan:
        """The plan of the steps to go, from what steps have taken here."""
        session = self.session
        begun = any(row.get("wall_s") for row in self.rows_before)
        size = checkpoint_bytes(session.checkpoints, parameter_count(self.model), self.speed.ema)
        return session_plan.plan_session(
            self.rows_before if begun else self.trial_rows,
            session.config,
            size,
            session.checkpoints,
            self.limits,
            done=None if begun else 0,
        )

    @functools.cached_property
    def trial_rows(self) -> list[dict]:
        """Rows of a few real steps of a throwaway model, on batches of usual length."""
        return self.session.trial(self.values(), self.data.stream().usual(12))

    @once
    def switches(self) -> Result:
        """Every optimisation: on or off, what it does here, or why it cannot."""
        whose = "measured by 05_benchmark" if self.measured else "of the preset"
        figures = {s.label: f"{'on' if s.on else 'off'}; {s.reason}" for s in self.offered}
        return Result(line=f"Switches: {whose}.", figures=figures)

    @once
    def judge(self) -> Result:
        """The gate: held-out sentences are spoken every so often, and the recogniser listens.

        What it hears decides which checkpoint is kept, and when to end. With it, how well that
        judge itself understands recordings, as 01_data_prep found.
        """
        run, session = self.active, self.session
        every = session.config.gate_every
        sentences = self.data.held_out_sentences(GATE_SENTENCES) if every else []
        lines = ["no gate"]
        if sentences:
            recognizer = load_recognizer(run.path("recognizer.safetensors"))
            config = build(GenerateConfig, run.section("generate"), candidates=1)
            session.gate = hearing(self.data.voice(), sentences, recognizer, config)
            lines = [f"gate: {len(sentences)} sentences every {every} steps"]
        own_cer = run.report().get("recognizer", {}).get("held_out")
        if own_cer is None:
            lines.append("The recogniser's own errors are not recorded.")
        else:
            lines.append(f"The recogniser's own CER on recordings: {own_cer:.1%}.")
        doubt = recognizer_doubt(own_cer, run.section("evaluate")["worst_cer"])
        return Result(line="\n".join([*lines, doubt] if doubt else lines))

    # The run.

    def panel(self, mode: str | None = None) -> None:
        """Switches, Start, Stop and Profile around the run; it goes on where a run stands.

        What was not asked before is asked now, and told in a line each. `mode` is as
        `TrainPanel.run` takes it: "plain" trains at once, with plain lines.
        """
        for step in (self.size, self.fits, self.in_time, self.switches, self.judge):
            if step.__name__ not in self.found:
                print(step())
        run, session = self.active, self.session
        session.listeners = self.listeners()
        self.shown = TrainPanel(
            self.offered,
            session.run,
            session.log_path,
            session.resumable(),
            self.numbers(),
            monitor=Monitor(run.hw),
            profiler=StepProfiler(run.path("profile", "_").parent),
            session_hours=self.limits.session_hours,
        )
        self.shown.run(mode)

    def listeners(self) -> tuple[Callable, ...]:
        """Who hears each step besides log and checkpoints; says which boards there are.

        W&B is one where WANDB_PROJECT is set, as its own tools take it; offline unless WANDB_MODE
        says otherwise.
        """
        run, session = self.active, self.session
        row = self.data.middle_row()
        found = [AttentionLog(lambda: session.state.model, row, self.attention_folder)]
        sentences = self.data.held_out_sentences(1)
        if sentences:
            speaking = build(GenerateConfig, run.section("generate"), candidates=1)
            voice = self.data.voice()
            folder = self.samples_folder
            found.append(SampleLog(lambda: session.state, voice, sentences[0], speaking, folder))
        boards = [tensorboard_log(run.path("tensorboard", "_").parent, self.rows_before)]
        project = os.environ.get("WANDB_PROJECT")
        if project:
            boards.append(wandb_log(project, run.name, run.path("wandb", "_").parent))
        for board, why in boards:
            print(why)
            if board is not None:
                found.append(board)
        return tuple(found)

    def numbers(self) -> dict[str, int]:
        """What the panel offers beside the switches."""
        return {
            "grad_accum": self.data.config.grad_accum,
            "recompute_every": self.speed.recompute_every,
        }

    def values(self) -> dict:
        """Switches and numbers as they stand before anybody has touched the panel."""
        return {switch.name: switch.on for switch in self.offered} | self.numbers()

    def wait(self) -> Result:
        """Wait until the run has ended; an interrupt stops it with a checkpoint."""
        if not self.session.finished():
            if self.shown is None:
                raise TrainError("Nothing was started yet: call `panel()` first, then `wait()`.")
            self.shown.wait()
        row = self.rows()[-1]
        where = f"step {row['step']:,} of {row['steps']:,}"
        if self.session.finished():
            return Result(line=f"Trained to {where}.")
        return Result(line=f"Stopped at {where}. Run this again: it goes on from its checkpoint.")

    def rows(self) -> list[dict]:
        """The log, one dict a step. Raises TrainError before the first one."""
        rows = read_log(self.session.log_path)
        if not rows:
            raise TrainError("Not one step has been trained yet: press Start in the panel.")
        return rows

    def curves(self) -> Result:
        """Loss, learning rate, gradient norm, and what the average of the weights is worth."""
        rows = self.rows()
        return Result(line=f"{len(rows):,} steps", pictures=(run_curves(rows),))

    def samples(self) -> Result:
        """One held-out sentence as the model said it at the start, in the middle and at the end."""
        sounds = spoken_samples(self.samples_folder)
        if not sounds:
            return Result(line="No sample was spoken: no held-out sentence can be said.")
        row = self.data.held_out_sentences(1)[0]
        return Result(line=f"{row.speaker}: {row.text}", sounds=sounds)

    def attention(self) -> Result:
        """How the codes of one row learnt to look at its text, from the first step to the last."""
        kept = kept_attention(self.attention_folder)
        steps = sorted(kept)
        some = [steps[round(i * (len(steps) - 1) / 3)] for i in range(4)] if steps else []
        maps = {f"step {step:,}": kept[step].T for step in dict.fromkeys(some)}
        if not maps:
            return Result(line="No attention was kept: this run was trained before it was.")
        picture = heatmaps(maps, "code", "text piece")
        return Result(
            line=f"The head that follows the text best, at {len(maps)} steps", pictures=(picture,)
        )

    def trained(self) -> SpeechGPT:
        """The model as it was left: the average of its weights where a finished run has one."""
        state = self.session.state
        if state is not None and not self.session.finished():  # stopped just now
            model = SpeechGPT(self.model).eval()
            restore_weights(model, dict(state.model.named_parameters()))
            return model
        left = [self.active.folder / WEIGHTS[kind] for kind in ("ema", "raw")]
        return load_model(left[0] if left[0].exists() else left[1])

    def summary(self) -> Result:
        """The figures of the run, recorded; leaves a reference clip a speaker beside the model."""
        self.data.save_references()
        state = self.session.state
        figures = run_figures(self.rows(), state.applied if state else None)
        recorded = dict(figures)
        recorded["finished"] = self.session.finished()
        if "fits" in self.found:
            recorded["longest_step_bytes"] = {
                "planned": self.verdict.planned_bytes,
                "measured": self.verdict.measured_bytes,
                "limit": self.verdict.limit_bytes,
            }
        if self.shown and self.shown.monitor.samples:
            recorded["monitor"] = self.shown.monitor.summary()
        self.active.record(train=recorded)
        told = {name: value for name, value in figures.items() if name != "ran"}
        told.update(figures.get("ran", {}))
        line = (
            f"{figures['steps']:,} steps at {figures['steps_per_s']:.3g} a second, held-out loss "
            f"{figures['val_loss']:.3f}"
        )
        return Result(line=line, figures=told)

    def run(self) -> Iterator[Result]:
        """All of it with nobody watching, a result after the other; Ctrl-C leaves a checkpoint.

        A finished run is not trained again: its figures are told.
        """
        if not self.session.finished():
            for step in (self.size, self.fits, self.in_time, self.switches, self.judge):
                yield step()
            self.panel("plain")
            torch.set_num_threads(self.session.threads)  # nothing trains beside this thread now
        yield self.wait()
        yield self.summary()
