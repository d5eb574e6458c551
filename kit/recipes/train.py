"""Notebook 02: from what 01_data_prep left in a run's folder to the weights of a voice.

`Training(run)` plans: will it fit, how long does it take, which switches are on? `panel()` starts
`python -m kit train` in a process of its own and follows it; in that process `fit` trains.
Shapes: N codes, T text tokens with START and STOP.
"""

import dataclasses
import html
import io
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import soundfile
import torch
from torch import Tensor

from kit.base.config import ROOT
from kit.base.errors import KitError
from kit.base.files import write_atomic
from kit.base.hardware import autocast, on_device
from kit.base.run import read_run_file
from kit.batches.code_stream import made_ahead, validation_batches
from kit.dataset.manifest import Utterance
from kit.inference.generate import GenerateConfig
from kit.inference.voice import Voice
from kit.model import text_attention
from kit.model.gpt import SpeechGPT
from kit.model.lora import merged
from kit.model.sequence import Batch
from kit.model.weights import WEIGHTS, load_model
from kit.notebook.plots import heatmaps, pixels, run_curves
from kit.notebook.progress import Lines, Pace, newest, progress_texts
from kit.notebook.result import Result, Sound, sound_html
from kit.notebook.train_panel import TrainPanel
from kit.recipes.active_run import ActiveRun, first_model, mel_picture, sampling_of
from kit.recipes.training_data import learn_reader, learn_sound
from kit.recipes.training_plan import DATA_FIELDS, GPUS, TrainingPlan, in_process
from kit.training import checkpoint, logs
from kit.training import run as training_runs
from kit.training.config import StepEvent
from kit.training.ranks import Ranks, broadcast_order
from kit.training.switches import wants_few_shapes
from kit.tuning.doctor import diagnose, step_shares
from kit.tuning.memory_plan import count_parameters, count_trained
from kit.tuning.monitor import STATUS, Monitor, StepProfiler
from kit.tuning.preflight import Verdict, check_changes, limit_memory

BOARD_PROJECT = "voicekit"  # in W&B and trackio
ALIGNED_ROWS = 4  # training rows that show which head follows the text
# Folders in that of a run.
ATTENTION = "attention"
SPOKEN = "training-samples"
PROFILES = "profile"


class Training(TrainingPlan):
    """One run's training: its plan, the run itself, and what came of it."""

    shown: TrainPanel | None = None
    job: training_runs.TrainingRun | None = None  # in the process that trains

    @property
    def finished(self) -> bool:
        return training_runs.finished_steps(self.active.folder) >= self.config.max_steps

    def training_run(self, validation: list = (), **more) -> training_runs.TrainingRun:
        """The training itself, to be run in this process."""
        run = self.active
        return training_runs.TrainingRun(
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
        """Endless training batches from `position` on (None: the beginning)."""
        stream = self.data.stream("train", position, few_shapes=self.pads())
        return made_ahead(stream, self.data.config.workers)

    def pads(self) -> bool:
        """Whether the trainer, once it is there, pads its rows to fixed lengths."""
        trainer = self.job and self.job.trainer
        return trainer is not None and wants_few_shapes(
            self.active.hw.device, trainer.applied.precision, trainer.applied.on("compile")
        )

    def panel(self) -> None:
        """Make missing checks; show settings, Start, Stop and Profile. A stopped run resumes."""
        for step in self.checks():
            if step.__name__ not in self.results:
                print(step())
        sentence = "".join(row.text for row in self.data.held_out_sentences(1))
        self.shown = TrainPanel(
            self.process,
            self.start,
            self.offered,
            self.fields(),
            resumable=self.training_run().resumable(),
            finished=self.finished,
            plan=self.planned,
            players=SamplePlayers(self.active.folder / SPOKEN, sentence),
            profile=partial(read_run_file, self.active.folder / PROFILES / STATUS),
            diagnose=self.advice,
            session_hours=self.limits.session_hours,
        )
        self.shown.run()

    def start(self, values: dict) -> None:
        """Start the training in a process of its own, or one a GPU, with a panel's `values`.

        Changed settings are checked first (raises KitError), and kept for the life of the run.
        """
        run = self.active
        work = self.workload_of(values)
        if training_runs.finished_steps(run.folder) >= work.train.max_steps:
            raise KitError(
                f"This run has finished its {work.train.max_steps:,} steps. Choose more of them "
                "(Max steps or Epochs in the panel, or MAX_STEPS) to train it further."
            )
        data = {name: getattr(work.data, name) for name in DATA_FIELDS}
        settled = {"switches": vars(work.speed), "train": vars(work.train), "data": data}
        if self.verdict.tried:
            note = in_process(check_changes, self.workload(), self.verdict, work)
            settled["notes"] = [note] if note else []
            settled["longest_step_bytes"] = verdict_figures(self.verdict)
        self.keep(work, values)
        gpus = int(values.get(GPUS, 1))
        write_atomic(run.path(GPUS), str(gpus))
        environment = dict(os.environ, KIT_RUNS=str(run.folder.parent.resolve()))
        environment.pop("KIT_PRESET", None)  # the run has its own
        paths = (str(ROOT), environment.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        arguments = ["train", "--run", run.name, "--plan", json.dumps(settled)]
        self.process.start(arguments, environment, gpus)

    def wait(self) -> Result:
        """Wait until the run has ended; an interrupt stops it with a checkpoint."""
        if not self.finished:
            if self.shown is None:
                raise KitError("Nothing was started yet: call `panel()` first, then `wait()`.")
            self.shown.wait()
        return self.reached()

    def reached(self) -> Result:
        row = self.rows()[-1]
        where = f"step {row['step']:,} of {row['steps']:,}"
        if self.finished:
            return Result(line=f"Trained to {where}.{self.steps_kept()}")
        return Result(line=f"Stopped at {where}. Run this again to resume from its checkpoint.")

    def rows(self) -> list[dict]:
        """The log, one dict a step. Raises KitError before the first one."""
        rows = logs.read_log(self.process.log)
        if not rows:
            raise KitError("Not one step has been trained yet: press Start in the panel.")
        return rows

    def fit(self) -> None:
        """Train in this process, after `checks` or with what a panel has settled.

        Ctrl-C stops with a checkpoint, and is raised again once the run is recorded.
        """
        run = self.active
        if self.settled is None:  # started by hand: a request of an earlier run does not count
            training_runs.clear_requests(run.folder)
        limit_memory(run.hw, run.section("memory")["max_memory_fraction"])
        self.judge()
        own = {"switches": self.speed, "train": self.config, "data": self.data.config}
        along = TrainAlong(
            run=dataclasses.replace(run, kept=None, ranks=Ranks()),
            settled={name: vars(config) for name, config in own.items()},
            evaluates=self.gate is not None,
        )
        broadcast_order(run.ranks, along)  # the other processes of torchrun, if there are any
        notes = tuple((self.settled or {}).get("notes", ()))
        validation = validation_batches(self.data.stream("held_out"))
        self.job = self.training_run(validation, evaluate=self.gate, notes=notes)
        monitor = Monitor(run.hw)
        profiler = StepProfiler(run.folder / PROFILES)
        self.job.sample = partial(monitor_fields, monitor)
        self.job.listeners = self.listeners()
        lines, pace, latest = Lines(), Pace(), {}
        with training_runs.stop_signals() as signals, monitor, profiler:
            asked = partial(training_runs.is_requested, run.folder, training_runs.STOP)
            for event in self.job.events(lambda: bool(signals) or asked()):
                if training_runs.take_request(run.folder, training_runs.PROFILE):
                    profiler.request()
                profiler(event)
                latest.update(newest([dataclasses.asdict(event)]))
                pace.see(event.unix_s, event.tokens)
                notes = [f"step {event.step}: {event.note}"] if event.note else []
                lines.show(latest, progress_texts(latest, pace), notes)
        self.record(monitor)
        if signals:
            print(self.reached())
            self.summary()
            os.kill(os.getpid(), signals[0])

    def listeners(self) -> tuple[Callable, ...]:
        """What gets each step besides log and checkpoints; prints which boards there are."""
        run = self.active
        listeners = [AttentionLog(self.job, self.data.middle_row(), run.folder / ATTENTION)]
        spoken = None
        for sentence in self.data.held_out_sentences(1):
            sampling = sampling_of(run, best_of=1)
            voice = self.data.voice()
            spoken = SampleLog(self.job, voice, sentence, sampling, run.folder / SPOKEN)
            listeners.append(spoken)

        def newest_sample() -> logs.SpokenSample | None:
            return spoken and spoken.newest

        shown = dataclasses.asdict(self.config) | {"preset": run.preset_name}
        folder = run.folder / "tensorboard"
        project = os.environ.get("WANDB_PROJECT") or BOARD_PROJECT
        boards = {
            "tensorboard": partial(logs.tensorboard_log, folder, self.rows_before),
            "wandb": partial(logs.wandb_log, project, run.name, shown, run.folder / "wandb"),
            "trackio": partial(logs.trackio_log, BOARD_PROJECT, run.name, shown),
        }
        for name, open_board in boards.items():
            if name in self.config.boards:
                board, why = open_board(newest_sample)
                print(why)
                if board is not None:
                    listeners.append(board)
        return tuple(listeners)

    def record(self, monitor: Monitor) -> None:
        """Record the figures that only the process which trained knows."""
        longest = (self.settled or {}).get("longest_step_bytes")
        if "fits" in self.results:
            longest = verdict_figures(self.verdict)
        padded = self.data.padded(few_shapes=True).grid_lengths if self.pads() else None
        figures = {
            "ran": self.job.trainer.applied.table(),
            "padded_to": padded,
            "longest_step_bytes": longest,
            "monitor": monitor.summary() if monitor.samples else None,
        }
        self.active.record(train={name: value for name, value in figures.items() if value})

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

    def curves(self) -> Result:
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
        maps = load_attention_maps(self.active.folder / ATTENTION)
        if not maps:
            return Result(line="No attention was kept.")
        steps = list(maps)
        some = dict.fromkeys(steps[round(i * (len(steps) - 1) / 3)] for i in range(4))
        picture = heatmaps({f"step {i:,}": maps[i].T for i in some}, "code", "text piece")
        line = f"The head that follows the text best, at {len(some)} steps"
        return Result(line=line, pictures=(picture,))

    def trained(self) -> SpeechGPT:
        """The model as training left it, averaged if it can be, or the newest checkpoint's."""
        if not self.finished:
            return self.training_run().load_newest().cpu().eval()
        ema, raw = (self.active.folder / WEIGHTS[kind] for kind in ("ema", "raw"))
        return load_model(ema if ema.exists() else raw)

    def summary(self) -> Result:
        """Record the figures of the run; save a reference clip of each speaker with the model."""
        head = None  # of the finished model, the one that follows the text, if one does
        if self.finished:
            rows = self.data.middle_rows(ALIGNED_ROWS)
            head = text_attention.find_alignment_head(self.trained(), rows)
        self.data.save_references(head)
        rows = self.rows()
        figures = logs.summary(rows)
        ran = self.active.figure("train", "ran") or {}
        advice = self.advice(rows)
        finetuning = self.finetuning.identity() | {
            "tables_first": self.finetuning.config.tables_first,
            "trained_parameters": count_trained(self.model, self.finetuning).learning,
            "parameters": count_parameters(self.model),
            "rehearsal": self.data.rehearsal_figures(),
        }
        more = {
            "finished": self.finished,
            "alignment_head": head and head._asdict(),
            "finetune": finetuning,
            "step_shares": step_shares(rows),
            "advice": advice,
        }
        self.active.record(train=figures | more)
        speed = f"{figures['steps']:,} steps at {figures['steps_per_s']:.3g} a second"
        line = f"{speed}, held-out loss {figures['val_loss']:.3f}"
        return Result(line="\n".join([line, *advice]), figures=figures | ran)

    def advice(self, rows: list[dict]) -> list[str]:
        """What holds the steps of a log back, each with the setting that changes it."""
        on = [switch.name for switch in self.offered if switch.on]
        return list(diagnose(rows, self.active.hw, on, self.data.config.workers).values())

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
    settled: dict  # as the `plan` of a panel
    evaluates: bool  # whether the main rank has a gate

    def follow(self, ranks: Ranks) -> None:
        training = Training(dataclasses.replace(self.run, ranks=ranks), plan=self.settled)
        gate = dict if self.evaluates else None  # not called: the main rank sends its figures
        validation = validation_batches(training.data.stream("held_out"))
        training.job = training.training_run(validation, evaluate=gate)
        for _ in training.job.events():
            pass


def verdict_figures(verdict: Verdict) -> dict:
    """What a check of the longest step measured, for the record."""
    names = ("planned", "measured", "limit", "reserved")
    figures = {name: getattr(verdict, f"{name}_bytes") for name in names}
    if verdict.reserved_bytes is None:
        del figures["reserved"]
    return figures


@dataclasses.dataclass
class AttentionLog:
    """A listener that saves how the codes of `row`, a batch of one, attend to its text."""

    job: training_runs.TrainingRun
    row: Batch
    folder: Path

    def __call__(self, event: StepEvent) -> None:
        if event.step == 1:
            for stale in self.folder.glob("step-*.npy"):
                stale.unlink()
        if event.step in (1, event.steps) or event.val_loss is not None:
            trainer = self.job.trainer
            with autocast(trainer.hw.device, trainer.applied.precision):
                attention = best_map(trainer.model, self.row)
            file = io.BytesIO()
            np.save(file, attention.numpy().astype(np.float16))
            write_atomic(self.folder / f"step-{event.step:07}.npy", file.getvalue())


def load_attention_maps(folder: Path) -> dict[int, np.ndarray]:
    paths = sorted(folder.glob("step-*.npy"))
    return {int(path.stem.removeprefix("step-")): np.load(path) for path in paths}


def best_map(model: SpeechGPT, row: Batch) -> Tensor:
    """The attention map (N, T), of all layers and heads, that follows the text best."""
    best = int(text_attention.head_diagonality(model, row).argmax())
    return text_attention.text_attention_maps(model, row).flatten(0, 1)[best].cpu()


@dataclasses.dataclass
class SampleLog:
    """A listener that speaks `row` after the first step, in the middle, and after the last.

    The middle is the first validation after half of the steps. Averaged weights speak if there are
    any. Training's random numbers are left as they were.
    """

    job: training_runs.TrainingRun
    voice: Voice
    row: Utterance
    config: GenerateConfig
    folder: Path
    newest: logs.SpokenSample | None = None

    def __call__(self, event: StepEvent) -> None:
        if event.step == 1:
            for stale in self.folder.glob("step-*.wav"):
                stale.unlink()
        half = event.val_loss is not None and event.step >= event.steps / 2
        has_middle = len(list(self.folder.glob("step-*.wav"))) > 1
        if event.step in (1, event.steps) or (half and not has_middle):
            self.speak(event.step)

    def speak(self, step: int) -> None:
        """Save what the model says now as a WAV file, named by the step, and as `newest`."""
        trainer = self.job.trainer
        before = checkpoint.random_state()
        trainer.model.eval()
        device = trainer.model.final_norm.weight.device
        # The codec moves outside of inference mode, or its weights could not be trained afterwards.
        with on_device(device, self.voice.codec), trainer.averaged(), torch.inference_mode():
            voice = dataclasses.replace(self.voice, model=merged(trainer.model), decoder=None)
            (speech,) = voice.speak([self.row.text], self.row.speaker, self.config)
        checkpoint.restore_random_state(before)
        rate_hz = voice.codec.sample_rate
        sound = Sound(caption="", wave=speech.wave.numpy(), sample_rate_hz=rate_hz)
        write_atomic(self.folder / f"step-{step:07}.wav", sound.wav_bytes())
        picture = mel_picture({self.row.speaker: speech.wave}, rate_hz, voice.front_end)
        self.newest = logs.SpokenSample(
            step=step,
            text=self.row.text,
            wave=sound.wave,
            sample_rate_hz=rate_hz,
            spectrogram=pixels(picture),
        )


def spoken_samples(folder: Path) -> list[Sound]:
    sounds = []
    for path in sorted(folder.glob("step-*.wav")):
        wave, rate = soundfile.read(path, dtype="float32")
        step = int(path.stem.removeprefix("step-"))
        sounds.append(Sound(caption=f"after step {step:,}", wave=wave, sample_rate_hz=rate))
    return sounds


@dataclasses.dataclass
class SamplePlayers:
    """HTML players of a SampleLog's files, under their sentence; "" before the first.

    Files are read again only when they change: a panel asks twice a second.
    """

    folder: Path
    sentence: str
    seen: list = dataclasses.field(default_factory=list)
    html: str = ""

    def __call__(self) -> str:
        try:
            files = [(p, p.stat().st_mtime_ns) for p in sorted(self.folder.glob("step-*.wav"))]
            if files != self.seen:
                players = "".join(sound_html(sound) for sound in spoken_samples(self.folder))
                self.html = players and f"<p>{html.escape(self.sentence)}</p>{players}"
                self.seen = files
        except FileNotFoundError:
            pass  # a training that starts again deletes the old files; the next call finds the new
        return self.html


def monitor_fields(monitor: Monitor) -> dict:
    if not monitor.samples:
        return {}
    newest = monitor.samples[-1]
    return {"device_bytes": newest.memory_bytes, "load": newest.load}
