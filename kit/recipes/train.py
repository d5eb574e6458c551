"""Notebook 02: from what 01_data_prep left in a run's folder to the weights of a voice.

`Training(run)` plans: will it fit, how long does it take, which switches are on? `panel()` starts
`python -m kit train` in a process of its own and follows it; in that process `fit` trains.

Two more are trained after the model. A reader transcribes codes, so that the best of several
candidates can be chosen. The codec's decoder learns to use the model's hidden states beside the
codes, as XTTS-v2's vocoder does (Casanova et al. 2024); the codes, and all that was prepared with
them, stay.

Shapes: N codes, T text tokens with START and STOP.
"""

import dataclasses
import html
import io
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import soundfile
import torch
from torch import Tensor

from kit.audio.clip import load_speech
from kit.audio.codec import ClipWithStates, Codec
from kit.audio.recognizer import alphabet_of, recognizer_schedule, train_recognizer
from kit.base.config import ROOT, build
from kit.base.errors import KitError
from kit.base.files import write_atomic
from kit.base.formatting import text_grid
from kit.base.hardware import autocast, on_device
from kit.base.run import read_run_file
from kit.batches.batching import chunks
from kit.batches.code_cache import speaker_references
from kit.batches.code_stream import prefetched, validation_batches
from kit.batches.word_spans import WHOLE
from kit.dataset.manifest import Utterance, read_manifest
from kit.inference import candidates, voice_files
from kit.inference.candidates import CodeReader
from kit.inference.voice import Voice
from kit.model import text_attention
from kit.model.gpt import SpeechGPT
from kit.model.lora import merged
from kit.model.sequence import Batch, pack
from kit.model.weights import WEIGHTS, load_model
from kit.notebook.plots import heatmaps, mel_picture, pixels, run_curves
from kit.notebook.progress import Lines, Pace, Ticker, newest, progress_texts
from kit.notebook.result import Result, Sound, players_of, sound_html
from kit.notebook.train_panel import TrainPanel
from kit.recipes.open_run import ActiveRun, sampling_of, section_for_run
from kit.recipes.run_parts import first_model
from kit.recipes.training_data import TrainingData
from kit.recipes.training_plan import DATA_FIELDS, GPUS, TrainingPlan, in_process
from kit.settings import CodeReaderConfig, DecoderFinetuneConfig, EvaluateConfig, GenerateConfig
from kit.training import checkpoint, logs
from kit.training import run as training_runs
from kit.training.config import StepEvent
from kit.training.ranks import Ranks, broadcast_order
from kit.training.switches import wants_few_shapes
from kit.tuning.checks import (
    Check,
    diagnose,
    guess_loss,
    learning_checks,
    problems,
    short_lines,
    step_shares,
    table,
    training_checks,
)
from kit.tuning.memory_plan import count_parameters, count_trained
from kit.tuning.monitor import STATUS, Monitor, StepProfiler
from kit.tuning.preflight import Verdict, check_changes, limit_memory

BOARD_PROJECT = "voicekit"  # in W&B and trackio
ALIGNED_ROWS = 4  # training rows that show which head follows the text
# Folders in that of a run.
ATTENTION = "attention"
SPOKEN = "training-samples"
PROFILES = "profile"

# Of what is trained after the model.
MIN_CLIPS = 20  # to train on
READER_PARTS = 8  # of each recording, as training learns them, that it also learns
READER_HELD_OUT_ROWS = 64  # to measure the reader on
SHOWN_ROWS = 5  # of them
STATES_BATCH = 16
SOUND_HELD_OUT_CLIPS = 32  # to measure the sound on


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
        return prefetched(stream, self.data.config.workers)

    def pads(self) -> bool:
        """Whether the trainer, once it is there, pads its rows to fixed lengths."""
        trainer = self.job.trainer if self.job else None
        return trainer is not None and wants_few_shapes(
            self.active.hw.device, trainer.applied.precision, trainer.applied.names
        )

    def panel(self) -> None:
        """Show settings, Start, Stop and Profile; an unfinished run resumes.

        Checks that were not made before are made now, with a line each.
        """
        for step in self.checks():
            if step.__func__ not in self.results:
                print(step())
        sentences = self.data.held_out_sentences(1)
        sentence = sentences[0].text if sentences else ""
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
            health=lambda rows: short_lines(self.log_checks(rows)),
            failure=self.failure,
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
        plan = {"switches": vars(work.speed), "train": vars(work.train), "data": data}
        if self.verdict.tried:
            note = in_process(check_changes, self.workload(), self.verdict, work)
            plan["notes"] = [note] if note else []
            plan["longest_step_bytes"] = verdict_figures(self.verdict)
        self.keep(work, values)
        gpus = int(values.get(GPUS, 1))
        write_atomic(run.path(GPUS), str(gpus))
        # What leads a new process to this kit and to the run.
        environment = dict(os.environ, KIT_RUNS=str(run.folder.parent.resolve()))
        environment.pop("KIT_PRESET", None)  # the run has its own
        paths = (str(ROOT), environment.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        arguments = ["train", "--run", run.name, "--plan", json.dumps(plan)]
        self.process.start(arguments, environment, gpus)

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
        line = f"Trained to {where}.{self.steps_kept()} {failure}".strip()
        return Result(line=line, grid=table(self.log_checks(rows)), failed=bool(failure))

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
        run = self.active
        if self.panel_plan is None:  # started by hand: a request of an earlier run does not count
            training_runs.clear_requests(run.folder)
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
        with training_runs.stop_signals() as signals, monitor, profiler:

            def should_stop() -> bool:
                return bool(signals) or training_runs.is_requested(run.folder, training_runs.STOP)

            for event in self.job.events(should_stop):
                if not latest:
                    print(f"Training with {self.job.trainer.applied.line}")
                if training_runs.take_request(run.folder, training_runs.PROFILE):
                    profiler.request()
                profiler(event)
                latest.update(newest([dataclasses.asdict(event)]))
                pace.see(event.unix_s, event.tokens)
                step_notes = [f"step {event.step}: {event.note}"] if event.note else []
                lines.show(latest, progress_texts(latest, pace), step_notes)
        self.record(monitor)
        print(text_grid(table(self.log_checks(logs.read_log(self.process.log)))))
        if signals:
            print(self.reached())
            self.summary()
            os.kill(os.getpid(), signals[0])

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
        longest = (self.panel_plan or {}).get("longest_step_bytes")
        if Training.fits in self.results:
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
        """The model as training left it: the average of its weights where a finished run has one.

        Of an unfinished run it is that of the newest checkpoint.
        """
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
        finetuning = self.finetuning.identity() | {
            "tables_first": self.finetuning.config.tables_first,
            "trained_parameters": count_trained(self.model, self.finetuning).learning,
            "parameters": count_parameters(self.model),
        }
        more = {
            "finished": self.finished,
            "alignment_head": head and head._asdict(),
            "finetune": finetuning,
            "step_shares": step_shares(rows),
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
        return {"guess_loss": guess_loss(self.model), "clear_cer": clear_cer}

    def log_checks(self, rows: list[dict]) -> list[Check]:
        """Whether a training with such a log goes well, and what its steps wait for."""
        on = [switch.name for switch in self.offered if switch.on]
        waits = diagnose(rows, self.active.hw, on, self.data.config.workers)
        return training_checks(rows, **self.limits) + waits

    def failure(self, rows: list[dict]) -> str:
        """Why a training that has finished with such a log has failed; "": it has learnt."""
        faults = problems(learning_checks(rows, **self.limits))
        return f"This training has failed: {'; '.join(faults)}." if faults else ""

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


@dataclasses.dataclass
class AttentionLog:
    """A listener that saves in `folder` how the codes of `row`, a batch of one, attend to its text.

    It does so after the first step, each validation and the last step, in the precision in which
    the model trains.
    """

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
        with path.open("rb") as file:
            wave, rate = soundfile.read(file, dtype="float32")
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
                sentence = html.escape(self.sentence)
                self.html = f"<p>{sentence}</p>{players}" if players else ""
                self.seen = files
        except FileNotFoundError:
            pass  # a training that starts again deletes the old files; the next call finds the new
        return self.html


def monitor_fields(monitor: Monitor) -> dict:
    if not monitor.samples:
        return {}
    newest = monitor.samples[-1]
    return {"device_bytes": newest.memory_bytes, "load": newest.load}


def learn_reader(data: TrainingData) -> Result:
    """Train the reader of this run's codes on its recordings, unless there is one already.

    If there are too few recordings, or the preset asks for none, the result says so.
    """
    run = data.run
    config = build(CodeReaderConfig, section_for_run(run, "reader"))
    without = "Candidates are ranked without a code reader:"
    if not config.rows:
        return Result(line=f"{without} `reader.rows` is 0.")
    sample = data.cache.sample_of_split("held_out", READER_HELD_OUT_ROWS)
    held_out = texts_and_codes(data, sample.tolist())
    try:
        existing = candidates.load_matching_reader(run.folder, data.parts)
    except KitError:
        existing = None  # a damaged one is trained again
    if existing and existing.config == config:
        return reader_result(existing, held_out, "The reader of these codes is there already")
    rows = data.cache.sample_of_split("train", config.rows).tolist()
    if len(rows) < MIN_CLIPS:
        few = f"{len(rows)} recordings are fewer than the {MIN_CLIPS} that a reader needs."
        return Result(line=f"{without} {few}")
    speakers = data.cache.speakers(rows).tolist()
    rows = balance_speakers(rows, speakers, config.most_repeats)
    texts, codes = texts_and_codes(data, rows, READER_PARTS)
    torch.manual_seed(0)
    reader = CodeReader(config, alphabet_of(texts), data.codec.levels)
    fit_schedule = recognizer_schedule(reader, list(zip(held_out[1], held_out[0])))
    device, precision = run.hw.device, run.precision.value
    steps = train_recognizer(reader, codes, texts, device, precision, fit_schedule)
    figures = fit_schedule.follow(steps, Ticker("reader step"))
    candidates.save_reader(reader, run.path(candidates.READER), data.parts)
    run.record(reader=figures | {"rows": len(rows)})
    line = f"A reader of codes learnt from {len(rows):,} recordings {fit_schedule.ending}"
    return reader_result(reader, held_out, line)


def texts_and_codes(
    data: TrainingData, rows: list[int], parts: int = 0
) -> tuple[list[str], list[Tensor]]:
    """Texts and codes (N,) of `rows`, and of up to `parts` parts of each that training learns."""
    stream = data.stream()
    texts, codes = [], []
    for i in rows:
        for cut in (WHOLE, *stream.parts(i, parts)):
            ids, row_codes = data.cache.texts[i], stream.caches[cut.speed].codes[i]
            texts.append(data.tokenizer.decode(ids[cut.texts].tolist()))
            codes.append(torch.from_numpy(row_codes[cut.codes].astype("int64")))
    return texts, codes


def balance_speakers(rows: list[int], speakers: list[str], max_repeats: int) -> list[int]:
    """Repeat `rows` of speakers with few of them, up to `max_repeats` times, and shuffle."""
    counts = Counter(speakers)
    largest = max(counts.values())
    repeats = {speaker: min(max_repeats, largest // count) for speaker, count in counts.items()}
    balanced = [row for row, speaker in zip(rows, speakers) for _ in range(repeats[speaker])]
    random.Random(0).shuffle(balanced)
    return balanced


def reader_result(
    reader: CodeReader, held_out: tuple[list[str], list[Tensor]], line: str
) -> Result:
    texts, codes = (column[:SHOWN_ROWS] for column in held_out)
    headings = ("held-out text", "read from the recording's codes")
    grid = [headings, *zip(texts, reader.transcribe(codes))] if texts else ()
    return Result(line=f"{line}.", grid=grid)


def learn_sound(data: TrainingData) -> Result:
    """Train the codec's decoder on the hidden states of the final weights, unless it is trained.

    If that cannot be done, the result says why, and the voice sounds as its codec alone does.
    """
    run = data.run
    config = build(DecoderFinetuneConfig, section_for_run(run, "decoder_finetune"))
    if not config.steps:
        return Result(line="The sound is made of codes alone: `decoder_finetune.steps` is 0.")
    codec = data.codec.with_state_inputs(data.model.width)
    if codec is None:
        return Result(line="This codec's decoder cannot be trained on hidden states.")
    paths = [run.folder / name for name in WEIGHTS.values()]
    weights = [path for path in paths if path.is_file()]
    models = [load_model(path) for path in weights]
    held_out = clips_with_states(data, models, "held_out", SOUND_HELD_OUT_CLIPS)
    existing = voice_files.load_finetuned_codec(run.folder, weights)
    if existing is not None:
        line = "The decoder was trained on hidden states of these weights before."
        return compare_sounds(data, existing, held_out, line=line)
    start_s = time.perf_counter()
    clips = clips_with_states(data, models, "train", config.clips)
    if len(clips) < MIN_CLIPS:
        return Result(
            line=f"The sound stays made of codes alone: {len(clips)} of the recordings are here, "
            f"and it takes {MIN_CLIPS} to learn from. Bring them back and run this again."
        )
    figures = {"steps": config.steps, "clips": len(clips)}
    line = f"Sound of codes and states: {config.steps:,} steps on {len(clips):,} recordings"
    if held_out:
        with on_device(run.hw.device, codec):
            figures["error_of_codes"] = codec.decoder_error(held_out)
    ticker = Ticker("sound step")
    try:
        for step, steps in codec.finetune_decoder(clips, config.steps, run.hw.device):
            ticker(step, steps)
    except KitError as error:  # the voice is there without it
        return Result(line=f"The sound stays made of codes alone. {error}")
    voice_files.save_finetuned_codec(codec, run.folder, weights)
    if held_out:
        with on_device(run.hw.device, codec):
            figures["error_of_states"] = codec.decoder_error(held_out)
        before, after = figures["error_of_codes"], figures["error_of_states"]
        line += f"; error on held-out speech {after:.3f}, {before:.3f} before"
    figures["seconds"] = round(time.perf_counter() - start_s, 1)
    run.record(sound=figures)
    return compare_sounds(data, codec, held_out, line=f"{line}.", figures=figures)


def compare_sounds(
    data: TrainingData, codec: Codec, held_out: list[ClipWithStates], **result
) -> Result:
    """A held-out recording, decoded from its codes, and from codes and hidden states.

    `result` are more fields of the Result.
    """
    if not held_out:
        return Result(**result)
    clip = held_out[len(held_out) // 2]
    states = clip.states[None].float()
    with on_device(data.run.hw.device, data.codec, codec):
        of_codes = data.codec.decode(clip.codes[None])[0].cpu()
        of_states = codec.decode(clip.codes[None], states=states)[0].cpu()
    with_states = "its codes and the model's states"
    waves = {"recording": clip.wave, "its codes": of_codes, with_states: of_states}
    picture = mel_picture(waves, codec.sample_rate, data.front_end)
    return Result(pictures=[picture], sounds=players_of(waves, codec.sample_rate), **result)


def clips_with_states(
    data: TrainingData, models: list[SpeechGPT], split: str, max_clips: int
) -> list[ClipWithStates]:
    """Up to `max_clips` recordings of `split` that exist, with the states of `models` in turn.

    A decoder trained on the last weights and on their average fits both. The states (N, D), half
    precision, are those that predict the codes.
    """
    cache = data.cache
    rows = read_manifest(data.run.folder)
    recordings = {row.id: row.audio for row in rows if Path(row.audio).is_file()}
    sample = [int(i) for i in cache.sample_of_split(split)]
    random.Random(0).shuffle(sample)
    sample = [i for i in sample if cache.rows[i]["id"] in recordings][:max_clips]
    sample.sort(key=lambda i: int(cache.lengths([i])[0]))  # similar lengths together
    references = speaker_references(cache, split)
    device = data.run.hw.device
    models = [model.to(device) for model in models]
    clips = []
    tick = Ticker("hidden states")
    for number, batch in enumerate(chunks(sample, STATES_BATCH)):
        model = models[number % len(models)]
        texts = [cache.texts[i].tolist() for i in batch]
        codes = [cache.codes[i].tolist() for i in batch]
        mels = torch.stack([references[cache.rows[i]["speaker"]].float() for i in batch])
        packed = pack(model.config, texts, codes, mels).to(device)
        with torch.no_grad():
            states = model.hidden(packed).flatten(0, 1)[packed.code_indices].half().cpu()
        lengths = [len(row) + model.config.stop_targets for row in codes]
        for i, row, row_states in zip(batch, codes, states.split(lengths)):
            wave = load_speech(recordings[cache.rows[i]["id"]], data.codec.sample_rate)
            states_of_codes = row_states[: len(row)]
            clip = ClipWithStates(wave=wave, codes=torch.tensor(row), states=states_of_codes)
            clips.append(clip)
        tick(len(clips), len(sample))
    return clips
