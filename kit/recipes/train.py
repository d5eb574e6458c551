"""Training: from what 01_data_prep left in a run's folder to the weights of a voice.

`Training(run)` reads what there is; each step below says what it found and draws it. `panel()` is
the run under buttons and may be called at once: it takes the steps before it that were left out.
`run()` is the same without anybody watching, for `python -m kit train`.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

from kit.base.hardware import all_cores
from kit.model.alignment_head import AlignmentHead, find_alignment_head
from kit.model.gpt import SpeechGPT
from kit.model.lora import plain_state
from kit.model.weights import WEIGHTS, load_model
from kit.notebook.panel.train_panel import TrainPanel
from kit.notebook.plots import heatmaps
from kit.notebook.result import Result
from kit.notebook.run_plots import run_curves
from kit.recipes.attention import AttentionLog, kept_attention
from kit.recipes.code_reader import learn_reader
from kit.recipes.orders import next_order
from kit.recipes.prepare_source import sampling_of
from kit.recipes.several_gpus import (
    GPUS,
    DistantProfiler,
    gpus_of,
    hear_profile_requests,
    processes_here,
    train_on_gpus,
)
from kit.recipes.spoken_samples import SampleLog, SamplePlayers, spoken_samples
from kit.recipes.state_sound import learn_sound
from kit.recipes.train_plan import TrainingPlan
from kit.recipes.train_ranks import train_order
from kit.recipes.trained_parts import finetuning_figures
from kit.training.logs import read_log, tensorboard_log, wandb_log
from kit.training.run import summary as run_figures
from kit.training.settings import StepEvent, TrainError
from kit.tuning.monitor import Monitor

ALIGNED_ROWS = 4  # training rows that show which head follows the text


class Training(TrainingPlan):
    """One run's training: first its plan, then the run, each step with a result that draws itself.

    `steps` 0 leaves their number to the preset and the data; `session_hours` is how long this
    machine stays, `quota_gb` how much the run may lay down (0: what the disk has).
    """

    shown: TrainPanel | None = None  # once `panel` was called

    @functools.cached_property
    def profiler(self) -> DistantProfiler:
        """What the panel's button asks, wherever the steps are taken."""
        return DistantProfiler(self.active.path("profile", "_").parent)

    @property
    def attention_folder(self) -> Path:
        return self.active.path("attention", "_").parent

    @property
    def samples_folder(self) -> Path:
        return self.active.path("training-samples", "_").parent

    def panel(self, mode: str | None = None) -> None:
        """Switches, Start, Stop and Profile around the run; it goes on where a run stands.

        What was not asked before is asked now, and told in a line each. `mode` is as
        `TrainPanel.run` takes it: "plain" trains at once, with plain lines.
        """
        for step in self.checks():
            if step.__name__ not in self.found:
                print(step())
        session = self.session
        session.listeners = self.listeners()
        sentences = self.data.held_out_sentences(1)
        self.shown = TrainPanel(
            self.offered,
            self.begin,
            session.log_path,
            session.resumable(),
            {**self.numbers(), **gpus_of(self.active)},
            plan=self.planned,
            players=SamplePlayers(self.samples_folder, sentences[0].text if sentences else ""),
            monitor=Monitor(self.active.hw),
            profiler=self.profiler,
            session_hours=self.limits.session_hours,
            largest={GPUS: processes_here(self.active)},
        )
        if self.active.ranks.several:
            hear_profile_requests(self.profiler)
        self.shown.run(mode)

    def begin(self, values: dict, stop: Event) -> Iterator[StepEvent]:
        """The run itself, as the session's `run`; other ranks are told to begin with it.

        On several GPUs torchrun has it trained in processes of its own.
        """
        values = dict(values)
        gpus = values.pop(GPUS, 1)
        if gpus > 1:
            options = {
                "steps": self.asked_steps,
                "session_hours": self.limits.session_hours,
                "quota_gb": (self.limits.quota_bytes or 0) / 1e9,
            }
            return train_on_gpus(self.active, values, gpus, options, self.profiler, stop)
        next_order(self.active.ranks, lambda: train_order(self, values))
        return self.session.run(values, stop)

    def listeners(self) -> tuple[Callable, ...]:
        """Who hears each step besides log and checkpoints; says which boards there are.

        W&B is one where WANDB_PROJECT is set, as its own tools take it; offline unless WANDB_MODE
        says otherwise.
        """
        run = self.active
        session = self.session
        found = []
        sentences = self.data.held_out_sentences(1)
        row = self.data.middle_row()
        found.append(AttentionLog(lambda: session.state, row, self.attention_folder))
        if sentences:
            speaking = sampling_of(run, candidates=1)
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

    def wait(self) -> Result:
        """Wait until the run has ended; an interrupt stops it with a checkpoint."""
        if not self.session.finished():
            if self.shown is None:
                raise TrainError("Nothing was started yet: call `panel()` first, then `wait()`.")
            self.shown.wait()
        row = self.rows()[-1]
        where = f"step {row['step']:,} of {row['steps']:,}"
        if self.session.finished():
            return Result(line=f"Trained to {where}.{self.steps_left_aside()}")
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
            model.load_state_dict(plain_state(state.model))
            return model
        left = [self.active.folder / WEIGHTS[kind] for kind in ("ema", "raw")]
        return load_model(left[0] if left[0].exists() else left[1])

    def summary(self) -> Result:
        """The figures of the run, recorded; leaves a reference clip a speaker beside the model."""
        head = self.alignment_head()
        self.data.save_references(head)
        state = self.session.state
        figures = run_figures(self.rows(), state.applied if state else None)
        recorded = dict(figures)
        recorded["finished"] = self.session.finished()
        recorded["alignment_head"] = head and head._asdict()
        recorded["finetune"] = finetuning_figures(self.model, self.session.finetuning)
        recorded["finetune"]["rehearsal"] = self.data.rehearsal_figures()
        if state and self.pads(state.applied):
            recorded["padded_to"] = self.data.padded(few_shapes=True).grid_lengths
        if "fits" in self.found:
            recorded["longest_step_bytes"] = {
                "planned": self.verdict.planned_bytes,
                "measured": self.verdict.measured_bytes,
                "limit": self.verdict.limit_bytes,
            }
            if self.verdict.reserved_bytes is not None:
                recorded["longest_step_bytes"]["reserved"] = self.verdict.reserved_bytes
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

    def alignment_head(self) -> AlignmentHead | None:
        """The head of the finished model that follows the text, by a few rows; None: none does."""
        if not self.session.finished():
            return None
        return find_alignment_head(self.trained(), self.data.middle_rows(ALIGNED_ROWS))

    def sound(self) -> Result:
        """Teach the codec's decoder what the trained model knows at each code: a clearer sound."""
        if not self.session.finished():
            return Result(line="Training has not ended: until then the sound is of codes alone.")
        with self.cores_at_rest():
            return learn_sound(self.data)

    def reader(self) -> Result:
        """Train what reads codes back: the voice keeps those of its readings that say the text."""
        with self.cores_at_rest():
            return learn_reader(self.data)

    def cores_at_rest(self) -> contextlib.AbstractContextManager:
        """Within it this thread has all cores, unless the trainer's is at work."""
        trains = self.shown is not None and not self.shown.idle
        return contextlib.nullcontext() if trains else all_cores(self.session.threads)

    def run(self) -> Iterator[Result]:
        """All of it with nobody watching, a result after the other; Ctrl-C leaves a checkpoint.

        A finished run is not trained again: its figures are told.
        """
        if not self.session.finished():
            for step in self.checks():
                yield step()
            self.panel("plain")
        yield self.wait()
        yield self.summary()
        if self.session.finished():
            yield self.sound()
            yield self.reader()
