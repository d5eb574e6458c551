"""The panel of notebook 02: the switches and numbers that it offers, and what its Start does."""

import copy
import dataclasses
import html
import json
import os
from functools import lru_cache, partial
from pathlib import Path

import torch

from kit.base.config import ROOT, build, require
from kit.base.errors import KitError
from kit.base.formatting import clock, format_memory
from kit.base.run import read_run_file
from kit.notebook.result import sound_html
from kit.notebook.train_panel import TrainPanel
from kit.notebook.widgets import Field
from kit.recipes.open_run import ActiveRun, section_for_run
from kit.recipes.training_listeners import PROFILES, SPOKEN, spoken_samples
from kit.recipes.training_plan import EPOCHS, TrainingPlan, in_process, steps_asked
from kit.settings import DataConfig, SpeedConfig, TrainConfig
from kit.training.run import finished_steps
from kit.tuning.checks import short_lines
from kit.tuning.memory_plan import Workload
from kit.tuning.monitor import STATUS
from kit.tuning.preflight import check_changes

GPUS = "gpus"
# Settings that the panel offers beside the switches: label and meaning.
FIELDS = {
    "lr": ("Learning rate", "Peak learning rate of AdamW, reached after the warm-up"),
    "effective_batch": ("Effective batch", "Utterances per optimiser step, however split"),
    "micro_batch": ("Micro-batch", "Utterances per forward pass, which decide the memory"),
    "max_steps": ("Max steps", "Optimiser steps in all; the schedule ends with them"),
    EPOCHS: ("Epochs", "Passes over the data, instead of Max steps; 0: Max steps decides"),
    GPUS: ("GPUs", "How many train together, each with its share of a batch"),
    "warmup_steps": ("Warm-up steps", "Steps in which the learning rate rises from 0"),
    "ema_decay": ("EMA decay", "How much of the average a step keeps; for the switch EMA"),
    "eval_steps": ("Evaluate every", "Steps between two validations on held-out sentences"),
    "workers": ("Workers", "Processes that make batches ahead; 0: the training process itself"),
    "prefetch_factor": ("Prefetch", "Batches that each worker makes ahead"),
}
DATA_FIELDS = ("effective_batch", "micro_batch", "workers", "prefetch_factor")
TRAIN_FIELDS = ("lr", "max_steps", "warmup_steps", "ema_decay", "eval_steps")
# Below "More settings".
MORE_FIELDS = ("warmup_steps", "ema_decay", "eval_steps", "workers", "prefetch_factor")


def show_panel(training: TrainingPlan) -> TrainPanel:
    """Show settings, Start, Stop and Profile of `training`, a `Training` whose checks are made."""
    folder = training.active.folder
    settings = PanelSettings(training)
    sentences = training.data.held_out_sentences(1)
    sentence = sentences[0].text if sentences else ""
    panel = TrainPanel(
        training.process,
        settings.start,
        training.offered,
        settings.fields(),
        resumable=training.training_run().resumable(),
        finished=training.finished,
        plan=settings.planned,
        players=partial(sample_players, folder / SPOKEN, sentence),
        profile=partial(read_run_file, folder / PROFILES / STATUS),
        health=lambda rows: short_lines(training.log_checks(rows)),
        failure=training.failure,
    )
    panel.run()
    return panel


class PanelSettings:
    """What a panel offers for `training`; `values` are its switches and fields by name."""

    def __init__(self, training: TrainingPlan):
        self.training = training

    def fields(self) -> list[Field]:
        """The fields; the arrow beside one restores the value that the panel opened with."""
        values = self._field_values()
        if max_processes(self.training.active) > 1:
            values[GPUS] = 1
        return [
            Field(
                name=name,
                label=label,
                value=values[name],
                comment=comment,
                more=name in MORE_FIELDS,
            )
            for name, (label, comment) in FIELDS.items()
            if name in values
        ]

    def _field_values(self) -> dict:
        values = {name: getattr(self.training.data.config, name) for name in DATA_FIELDS}
        values |= {name: getattr(self.training.config, name) for name in TRAIN_FIELDS}
        return values | {EPOCHS: 0}  # those asked for before are in `max_steps` by now

    def values(self) -> dict:
        return {switch.name: switch.on for switch in self.training.offered} | self._field_values()

    def planned(self, values: dict) -> tuple[str, bool]:
        """Memory and time with these switches and fields, and whether the memory is there.

        From the plan alone: nothing is allocated. Raises KitError for values that cannot be.
        """
        limit_bytes = self.training.verdict.limit_bytes
        work = self.workload_of(values)
        needed_bytes = work.planned_bytes
        changed_bytes = needed_bytes - self.workload_of(self.values()).planned_bytes
        words = f"Memory planned: {format_memory(needed_bytes)} of the {format_memory(limit_bytes)}"
        words += " it may use"
        if changed_bytes:
            words += f" ({format_memory(changed_bytes, '+')} by your changes)"
        fits = needed_bytes <= limit_bytes
        advice = "" if fits else " That is too much: Start tries a step and says what to change."
        rows = f"{work.data.micro_batch} utterances"
        passes = f"{work.data.grad_accum} forward passes"
        if work.data.grad_accum == 1:
            passes = "one forward pass"
        words += f".{advice} A step has {passes} of {rows}."
        step_s = self.step_seconds(work)
        if step_s:
            steps = work.train.max_steps
            words += f" Time: {steps:,} steps of {step_s:.2g} s, about {clock(steps * step_s)}."
        return words, fits

    def step_seconds(self, work: Workload) -> float:
        """The estimate for a step of `work`; 0: nothing was timed."""
        rows_before = self.training.data.config.effective_batch
        return (self.training.per_step_s or 0.0) * work.data.effective_batch / rows_before

    def workload_of(self, values: dict) -> Workload:
        """The workload with a panel's switches and fields. Raises KitError naming a wrong one."""
        left = dict(values)
        gpus = left.pop(GPUS, 1)
        max_gpus = max_processes(self.training.active)
        if gpus not in range(1, max_gpus + 1):
            raise KitError(f"GPUs must lie in 1 to {max_gpus}, got {gpus}.", field=GPUS)
        epochs = left.pop(EPOCHS)
        batches = {name: left.pop(name) for name in DATA_FIELDS}
        train = {name: left.pop(name) for name in TRAIN_FIELDS}
        speed = build(SpeedConfig, vars(self.training.speed), **left)
        effective_batch = self.training.data.config.effective_batch
        if batches["effective_batch"] != effective_batch and self.training.process.log.exists():
            raise KitError(
                f"A run that has started keeps its effective batch ({effective_batch}). Choose "
                "another RUN to change it.",
                field="effective_batch",
            )
        work = self.training.workload(speed)
        before = self.training.config
        if epochs:
            data = copy.copy(self.training.data)
            data.config = build(DataConfig, vars(data.config), **batches)
            asked_steps = train["max_steps"] if train["max_steps"] != before.max_steps else 0
            train["max_steps"] = steps_asked(asked_steps, epochs, data.epoch_steps)
        max_steps = train["max_steps"]
        # Raises for a number of steps that cannot be, before `for_steps` computes with it.
        build(TrainConfig, vars(before), max_steps=max_steps, num_train_epochs=0.0)
        config = build(TrainConfig, vars(before.for_steps(max_steps)), **train)
        if (config.warmup_steps, max_steps) != (before.warmup_steps, before.max_steps):
            fix = f"must be below Max steps ({max_steps:,})."
            require(config.warmup_steps < max_steps, config, "warmup_steps", fix)
        data = build(DataConfig, vars(work.data), **batches)
        return dataclasses.replace(work, data=data, train=config)

    def keep(self, work: Workload) -> None:
        """Train with the batches and settings of `work`, now and whenever the run is opened."""
        training = self.training
        changes = {}
        if work.train != training.config:
            own = vars(build(TrainConfig, section_for_run(training.active, "train")))
            changes["train"] = {n: v for n, v in vars(work.train).items() if v != own[n]}
        data = {name: getattr(work.data, name) for name in DATA_FIELDS}
        now = vars(training.data.config)
        changed = {name: value for name, value in data.items() if value != now[name]}
        if changed:
            changes["data"] = changed
        if changes:
            training.active = training.active.save_settings(changes)
        training.config = work.train
        training.data.config = dataclasses.replace(training.data.config, **data)

    def start(self, values: dict) -> None:
        """Start the training in a process of its own, or one a GPU, with a panel's `values`.

        Changed settings are checked first (raises KitError), and kept for the life of the run.
        """
        run = self.training.active
        work = self.workload_of(values)
        if finished_steps(run.folder) >= work.train.max_steps:
            raise KitError(
                f"This run has finished its {work.train.max_steps:,} steps. Choose more of them "
                "(Max steps or Epochs in the panel, or MAX_STEPS) to train it further."
            )
        data = {name: getattr(work.data, name) for name in DATA_FIELDS}
        plan = {"switches": vars(work.speed), "train": vars(work.train), "data": data}
        if self.training.verdict.tried:
            note = in_process(check_changes, self.training.workload(), self.training.verdict, work)
            plan["notes"] = [note] if note else []
        if self.step_seconds(work) and not self.training.rows_before:
            run.record(train={"estimated_step_s": self.step_seconds(work)})
        self.keep(work)
        # What leads a new process to this kit and to the run.
        environment = dict(os.environ, KIT_RUNS=str(run.folder.parent.resolve()))
        environment.pop("KIT_PRESET", None)  # the run has its own
        paths = (str(ROOT), environment.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        arguments = ["train", "--run", run.name, "--plan", json.dumps(plan)]
        self.training.process.start(arguments, environment, int(values.get(GPUS, 1)))


def max_processes(run: ActiveRun) -> int:
    """How many processes may train together here: one a GPU; KIT_RANKS says another number."""
    asked = os.environ.get("KIT_RANKS", "")
    if asked.isdecimal():
        return max(1, int(asked))
    return max(1, torch.cuda.device_count()) if run.hw.device == "cuda" else 1


def sample_players(folder: Path, sentence: str) -> str:
    """HTML players of a SampleLog's files, under their sentence; "" before the first."""
    try:
        files = [(path, path.stat().st_mtime_ns) for path in sorted(folder.glob("step-*.wav"))]
        return _players(folder, sentence, tuple(files))
    except FileNotFoundError:
        return ""  # a training that starts again deletes the old files; the next call finds the new


@lru_cache(maxsize=1)  # a panel asks twice a second: files are read again only when they change
def _players(folder: Path, sentence: str, files: tuple) -> str:
    players = "".join(sound_html(sound) for sound in spoken_samples(folder))
    return f"<p>{html.escape(sentence)}</p>{players}" if files else ""
