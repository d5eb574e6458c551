"""Notebook 02: from what 01_data_prep left in a run's folder to the weights of a voice.

`Training(run)` plans: will it fit, how long does it take, which switches are on? `panel()` starts
`python -m kit train` in a process of its own and follows it; in that process `fit` trains.

Two more are trained after the model. A reader transcribes codes, so that the best of several
candidates can be chosen. The codec's decoder learns to use the model's hidden states beside the
codes, as XTTS-v2's vocoder does (Casanova et al. 2024); the codes, and all that was prepared with
them, stay.
"""

import dataclasses
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kit.audio.clip import load_speech
from kit.audio.codec import ClipWithStates, Codec
from kit.audio.recognizer import alphabet_of, recognizer_schedule, train_recognizer
from kit.base.config import ROOT, build
from kit.base.errors import KitError
from kit.base.files import write_atomic
from kit.base.hardware import on_device
from kit.base.run import read_run_file
from kit.batches.batching import DataConfig, chunks
from kit.batches.code_cache import speaker_references
from kit.batches.code_stream import made_ahead, validation_batches
from kit.dataset.manifest import read_manifest
from kit.inference.candidates import (
    READER,
    CodeReader,
    CodeReaderConfig,
    load_matching_reader,
    save_reader,
)
from kit.inference.voice_files import (
    DecoderFinetuneConfig,
    load_finetuned_codec,
    save_finetuned_codec,
)
from kit.model.gpt import SpeechGPT
from kit.model.sequence import pack
from kit.model.text_attention import AlignmentHead, find_alignment_head
from kit.model.weights import WEIGHTS, load_model
from kit.notebook.plots import run_curves
from kit.notebook.progress import Ticker
from kit.notebook.result import Result
from kit.notebook.train_panel import TrainPanel
from kit.recipes.active_run import (
    ActiveRun,
    first_model,
    sampling_of,
    section_for_run,
)
from kit.recipes.training_data import TrainingData
from kit.recipes.training_plan import DATA_FIELDS, GPUS, TrainingPlan, in_process
from kit.recipes.training_samples import (
    AttentionLog,
    SampleLog,
    SamplePlayers,
    attention_maps,
    board_listeners,
    mel_picture,
    monitor_fields,
    players_of,
    progress_lines,
    spoken_samples,
)
from kit.training.config import TrainConfig
from kit.training.logs import read_log
from kit.training.logs import summary as run_figures
from kit.training.ranks import Ranks, broadcast_order
from kit.training.run import (
    PROFILE,
    STOP,
    TrainingRun,
    clear_requests,
    finished_steps,
    is_requested,
    stop_signals,
    take_request,
)
from kit.training.switches import SpeedConfig, wants_few_shapes
from kit.tuning.doctor import diagnose, step_shares
from kit.tuning.memory_plan import count_parameters, count_trained
from kit.tuning.monitor import STATUS, Monitor, StepProfiler
from kit.tuning.preflight import Verdict, check_changes, limit_memory

ALIGNED_ROWS = 4  # training rows that show which head follows the text
# Folders in that of a run.
ATTENTION = "attention"
SPOKEN = "training-samples"
PROFILES = "profile"


class Training(TrainingPlan):
    """One run's training: its plan, the run itself, and what came of it."""

    shown: TrainPanel | None = None
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
        """Endless training batches from `position` on (None: the beginning)."""
        stream = self.data.stream("train", position, few_shapes=self.pads())
        return made_ahead(stream, self.data.config.workers)

    def pads(self) -> bool:
        """Whether the trainer, once it is there, pads its rows to fixed lengths."""
        trainer = self.job.trainer if self.job else None
        return trainer is not None and wants_few_shapes(
            self.active.hw.device, trainer.applied.precision, trainer.applied.on("compile")
        )

    def panel(self) -> None:
        """Settings, Start, Stop and Profile around the run; an unfinished run resumes.

        Checks that were not made before are made now, with a line each.
        """
        for step in self.checks():
            if step.__name__ not in self.results:
                print(step())
        sentences = self.data.held_out_sentences(1)
        self.shown = TrainPanel(
            self.process,
            self.start,
            self.offered,
            self.fields(),
            resumable=self.training_run().resumable(),
            finished=self.finished,
            plan=self.planned,
            players=SamplePlayers(
                self.active.folder / SPOKEN, sentences[0].text if sentences else ""
            ),
            profile=partial(read_run_file, self.active.folder / PROFILES / STATUS),
            diagnose=self.advice,
            session_hours=self.limits.session_hours,
        )
        self.shown.run()

    def start(self, values: dict) -> None:
        """Start the training in a process of its own, or one a GPU, with a panel's `values`.

        Settings that were changed since the check are checked first: raises KitError. They are kept
        for the life of the run.
        """
        work = self.workload_of(values)
        if finished_steps(self.active.folder) >= work.train.max_steps:
            raise KitError(
                f"This run has finished its {work.train.max_steps:,} steps. Choose more of them "
                "(Max steps or Epochs in the panel, or MAX_STEPS) to train it further."
            )
        notes = []
        if self.verdict.tried:
            note = in_process(check_changes, self.workload(), self.verdict, work)
            notes = [note] if note else []
        self.keep(work, values)
        settled = {
            "switches": vars(work.speed),
            "train": dataclasses.asdict(work.train),
            "data": {name: getattr(work.data, name) for name in DATA_FIELDS},
            "notes": notes,
        }
        if self.verdict.tried:
            settled["longest_step_bytes"] = verdict_figures(self.verdict)
        arguments = ["train", "--run", self.active.name, "--plan", json.dumps(settled)]
        gpus = int(values.get(GPUS, 1))
        write_atomic(self.active.path(GPUS), str(gpus))
        self.process.start(arguments, environment_of(self.active), gpus)

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
        rows = read_log(self.process.log)
        if not rows:
            raise KitError("Not one step has been trained yet: press Start in the panel.")
        return rows

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
        broadcast_order(run.ranks, along)  # the other processes of torchrun, if there are any
        notes = tuple((self.settled or {}).get("notes", ()))
        validation = validation_batches(self.data.stream("held_out"))
        self.job = self.training_run(validation, evaluate=self.gate, notes=notes)
        monitor = Monitor(run.hw)
        profiler = StepProfiler(run.folder / PROFILES)
        self.job.sample = partial(monitor_fields, monitor)
        self.job.listeners = self.listeners()
        show = progress_lines()
        with stop_signals() as signals, monitor, profiler:

            def should_stop() -> bool:
                return bool(signals) or is_requested(run.folder, STOP)

            for event in self.job.events(should_stop):
                if take_request(run.folder, PROFILE):
                    profiler.request()
                profiler(event)
                show(event)
        self.record(monitor)
        if signals:
            print(self.reached())
            self.summary()
            os.kill(os.getpid(), signals[0])

    def listeners(self) -> tuple[Callable, ...]:
        """What gets each step besides log and checkpoints; prints which boards there are."""
        run = self.active
        trainer = lambda: self.job.trainer  # noqa: E731
        listeners = [AttentionLog(trainer, self.data.middle_row(), run.folder / ATTENTION)]
        sentences = self.data.held_out_sentences(1)
        spoken = None
        if sentences:
            sampling = sampling_of(run, best_of=1)
            voice = self.data.voice()
            spoken = SampleLog(trainer, voice, sentences[0], sampling, run.folder / SPOKEN)
            listeners.append(spoken)
        newest_sample = lambda: spoken and spoken.newest  # noqa: E731
        for board, why in board_listeners(run, self.config, self.rows_before, newest_sample):
            print(why)
            if board is not None:
                listeners.append(board)
        return tuple(listeners)

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
        return attention_maps(self.active.folder / ATTENTION)

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
        rows = self.rows()
        figures = run_figures(rows)
        ran = self.active.figure("train", "ran") or {}
        advice = self.advice(rows)
        finetuning = self.finetuning.identity() | {
            "tables_first": self.finetuning.config.tables_first,
            "trained_parameters": count_trained(self.model, self.finetuning).learning,
            "parameters": count_parameters(self.model),
            "rehearsal": self.data.rehearsal_figures(),
        }
        self.active.record(
            train=figures
            | {
                "finished": self.finished,
                "alignment_head": head and head._asdict(),
                "finetune": finetuning,
                "step_shares": step_shares(rows),
                "advice": advice,
            }
        )
        line = (
            f"{figures['steps']:,} steps at {figures['steps_per_s']:.3g} a second, held-out loss "
            f"{figures['val_loss']:.3f}"
        )
        return Result(line="\n".join([line, *advice]), figures=figures | ran)

    def advice(self, rows: list[dict]) -> list[str]:
        """What holds the steps of a log back, each with the setting that changes it."""
        on = [switch.name for switch in self.offered if switch.on]
        return list(diagnose(rows, self.active.hw, on, self.data.config.workers).values())

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


def environment_of(run: ActiveRun) -> dict[str, str]:
    """This process's environment, with what leads a new one to this kit and to `run`."""
    environment = dict(os.environ, KIT_RUNS=str(run.folder.parent.resolve()))
    environment.pop("KIT_PRESET", None)  # the run has its own
    paths = [str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment


MIN_CLIPS = 20  # to train on
READER_HELD_OUT_ROWS = 64  # to measure the reader on
SHOWN_ROWS = 5  # of them
STATES_BATCH = 16
SOUND_HELD_OUT_CLIPS = 32  # to measure the sound on


def learn_reader(data: TrainingData) -> Result:
    """Train the reader of this run's codes on its recordings, unless there is one already.

    If there are too few recordings, or the preset asks for none, the result says so.
    """
    run = data.run
    config = build(CodeReaderConfig, section_for_run(run, "reader"))
    if not config.rows:
        return Result(line="Candidates are ranked without a code reader: `reader.rows` is 0.")
    held_out_rows = data.cache.sample_of_split("held_out", READER_HELD_OUT_ROWS).tolist()
    held_out = texts_and_codes(data, held_out_rows)
    try:
        existing = load_matching_reader(run.folder, data.parts)
    except KitError:
        existing = None  # a damaged one is trained again
    if existing and existing.config == config:
        return reader_result(existing, held_out, "The reader of these codes is there already")
    rows = data.cache.sample_of_split("train", config.rows).tolist()
    if len(rows) < MIN_CLIPS:
        return Result(
            line=f"Candidates are ranked without a code reader: {len(rows)} recordings are fewer "
            f"than the {MIN_CLIPS} that a reader needs."
        )
    speakers = data.cache.speakers(rows).tolist()
    texts, codes = texts_and_codes(data, balance_speakers(rows, speakers, config.most_repeats))
    torch.manual_seed(0)
    reader = CodeReader(config, alphabet_of(texts), data.codec.levels)
    fit_schedule = recognizer_schedule(reader, list(zip(held_out[1], held_out[0])))
    device, precision = run.hw.device, run.precision.value
    steps = train_recognizer(reader, codes, texts, device, precision, fit_schedule)
    figures = fit_schedule.follow(steps, Ticker("reader step"))
    figures["rows"] = len(rows)
    save_reader(reader, run.path(READER), data.parts)
    run.record(reader=figures)
    line = f"A reader of codes learnt from {len(rows):,} recordings {fit_schedule.ending}"
    return reader_result(reader, held_out, line)


def texts_and_codes(data: TrainingData, rows: list[int]) -> tuple[list[str], list[Tensor]]:
    cache = data.cache
    texts = [data.tokenizer.decode(cache.texts[i].tolist()) for i in rows]
    return texts, [torch.from_numpy(cache.codes[i].astype("int64")) for i in rows]


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
    if not texts:
        return Result(line=f"{line}.")
    headings = ("held-out text", "read from the recording's codes")
    return Result(line=f"{line}.", grid=[headings, *zip(texts, reader.transcribe(codes))])


def learn_sound(data: TrainingData) -> Result:
    """Train the codec's decoder on the hidden states of the final weights, unless it is trained.

    If that cannot be done, the result says why, and the voice sounds as its codec alone does.
    """
    run = data.run
    config = build(DecoderFinetuneConfig, run.section("decoder_finetune"))
    if not config.steps:
        return Result(line="The sound is made of codes alone: `decoder_finetune.steps` is 0.")
    codec = data.codec.with_state_inputs(data.model.width)
    if codec is None:
        return Result(line="This codec's decoder cannot be trained on hidden states.")
    paths = [run.folder / name for name in WEIGHTS.values()]
    weights = [path for path in paths if path.is_file()]
    models = [load_model(path) for path in weights]
    held_out = clips_with_states(data, models, "held_out", SOUND_HELD_OUT_CLIPS)
    existing = load_finetuned_codec(run.folder, weights)
    if existing is not None:
        line = "The decoder was trained on hidden states of these weights before."
        return dataclasses.replace(compare_sounds(data, existing, held_out), line=line)
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
    for step, steps in codec.finetune_decoder(clips, config.steps, run.hw.device):
        ticker(step, steps)
    save_finetuned_codec(codec, run.folder, weights)
    if held_out:
        with on_device(run.hw.device, codec):
            after = codec.decoder_error(held_out)
        figures["error_of_states"] = after
        line += f"; error on held-out speech {after:.3f}, {figures['error_of_codes']:.3f} before"
    figures["seconds"] = round(time.perf_counter() - start_s, 1)
    run.record(sound=figures)
    result = compare_sounds(data, codec, held_out)
    return dataclasses.replace(result, line=f"{line}.", figures=figures)


def compare_sounds(data: TrainingData, codec: Codec, held_out: list[ClipWithStates]) -> Result:
    """A held-out recording, decoded from its codes, and from codes and hidden states."""
    if not held_out:
        return Result(line="")
    clip = held_out[len(held_out) // 2]
    states = clip.states[None].float()
    with on_device(data.run.hw.device, data.codec, codec):
        of_codes = data.codec.decode(clip.codes[None])[0].cpu()
        of_states = codec.decode(clip.codes[None], states=states)[0].cpu()
    with_states = "its codes and the model's states"
    waves = {"recording": clip.wave, "its codes": of_codes, with_states: of_states}
    return Result(
        line="",
        pictures=[mel_picture(waves, codec.sample_rate, data.front_end)],
        sounds=players_of(waves, codec.sample_rate),
    )


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
        texts, codes = (
            [column[i].tolist() for i in batch] for column in (cache.texts, cache.codes)
        )
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
