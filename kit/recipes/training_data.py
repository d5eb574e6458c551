"""What 01_data_prep left in a run's folder, as training reads it, and what else learns from it.

Two more are trained after the model. A reader transcribes codes, so that the best of several
candidates can be chosen. The codec's decoder learns to use the model's hidden states beside the
codes, as XTTS-v2's vocoder does (Casanova et al. 2024); the codes, and all that was prepared with
them, stay.
"""

import dataclasses
import random
import time
from collections import Counter
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kit.audio.clip import load_speech
from kit.audio.codec import ClipWithStates, Codec, load_codec
from kit.audio.recognizer import alphabet_of, recognizer_schedule, train_recognizer
from kit.audio.spectrogram import front_end_config, load_reference, make_front_end
from kit.base.config import build, by_former_names
from kit.base.errors import KitError
from kit.base.files import digest, file_digest, write_atomic
from kit.base.hardware import on_device
from kit.base.run import read_run_file
from kit.base.tensor_file import arrays_digest, pack_tensors
from kit.batches import code_cache
from kit.batches.batching import DataConfig, chunks
from kit.batches.code_cache import CodeCache, speaker_references
from kit.batches.code_stream import CodeStream
from kit.dataset.manifest import Utterance, read_manifest
from kit.inference import candidates, voice_files
from kit.inference.candidates import CodeReader
from kit.inference.generate import GenerateConfig
from kit.inference.voice import Habits, Voice
from kit.model.gpt import SpeechGPT
from kit.model.sequence import Batch, GPTConfig, collate, pack
from kit.model.text_attention import AlignmentHead
from kit.model.weights import WEIGHTS, load_model
from kit.notebook.progress import Ticker
from kit.notebook.result import Result
from kit.recipes import active_run
from kit.recipes.active_run import START_FROM, ActiveRun, mel_picture, players_of
from kit.text.tokenizer import load_tokenizer
from kit.training.config import FinetuneConfig
from kit.training.ranks import ALONE

REHEARSAL = "rehearsal.safetensors"  # in a run's folder


class TrainingData:
    """The corpus of a run, and the shapes of model and batches that suit it.

    Where the run rehearses what its voice could say before, those rows are there, too, unless
    `rehearsed` is False. Where several ranks train together, a batch is this one's share of it.
    Raises KitError where 01_data_prep has not run yet.
    """

    def __init__(self, run: ActiveRun, rehearsed: bool = True):
        self.run = run
        self.cache = CodeCache(run.index())
        self.codec = load_codec(run.path("codec.safetensors"))
        self.front_end = make_front_end(front_end_config(run.section("front_end")))
        self.language = run.require_figure("data", "language", "01_data_prep")
        self.tokenizer = load_tokenizer(run.path("tokenizer.model"), self.language)
        self.config = shared(build(DataConfig, run.section("data")), run.ranks.world)
        self.model = build(
            GPTConfig,
            active_run.section_for_run(run, "model"),
            text_vocab=self.tokenizer.vocab_size,
            code_vocab=self.codec.vocab_size + 2,  # START and STOP
            n_mels=self.front_end.config.n_mels,
        )
        finetune = build(FinetuneConfig, run.section("finetune"))
        self.rehearsal = finetune.rehearsal if rehearsed else 0.0  # of an epoch's rows
        if not self.rehearsal:
            return
        # The rows that the base voice has spoken, and positions for them.
        spoken = load_rehearsal_rows(run, speaker_references(self.cache)).whole
        path = run.path("tokenizer.model")
        tokenizers = {row.language: load_tokenizer(path, row.language) for row in spoken}
        ids = (tokenizers[row.language].encode_checked(row.text) for row in spoken)
        texts = [np.array(each, dtype=np.int32) for each in ids]
        codes = list(spoken.values())
        lengths = (max(map(len, column), default=0) for column in (texts, codes))
        self.model = self.model.with_positions(*lengths)
        self.cache.add_rehearsal([row.speaker for row in spoken], texts, codes)

    @property
    def parts(self) -> dict[str, str]:
        """The SHA-256 of each file by which texts and recordings became ids."""
        names = ("tokenizer.model", "codec.safetensors")
        return {name: file_digest(self.run.path(name)) for name in names}

    def stream(
        self, split: str = "train", position: dict | None = None, few_shapes: bool = False
    ) -> CodeStream:
        """Endless batches from `position` on (None: the start); `few_shapes`: of fixed lengths."""
        training = split == "train"
        ranks = self.run.ranks if training else ALONE
        return CodeStream(
            self.cache,
            split,
            self.padded(few_shapes),
            partial(collate, self.model),
            position,
            rank=ranks.rank,
            world=ranks.world,
            rehearsal=self.rehearsal if training else 0.0,
            text_dropout=self.model.text_dropout if training else 0.0,
        )

    def padded(self, few_shapes: bool) -> DataConfig:
        """How rows make batches, padded to their longest or for `few_shapes` to fixed lengths."""
        if not few_shapes or self.config.grid_lengths:
            return self.config
        return dataclasses.replace(self.config, grid_lengths=code_cache.fixed_lengths(self.cache))

    def rehearsal_figures(self) -> dict:
        """How many rows there are to rehearse, how many an epoch has, and their share of it."""
        stream = self.stream()
        rows = stream.rehearsal_rows_per_epoch
        share = rows / (rows + len(stream.members))
        return {"rows": len(stream.rehearsed), "rows_an_epoch": rows, "share": share}

    def middle_row(self) -> Batch:
        """The training row of median length, alone and so without padding."""
        return self.middle_rows(1)[0]

    def middle_rows(self, max_rows: int) -> list[Batch]:
        """Up to `max_rows` training rows from the median length on, each alone."""
        stream = self.stream()
        rows = self.cache.sample_of_split("train")
        order = rows[np.argsort(self.cache.lengths(rows), kind="stable")]
        middle = len(order) // 2
        rows = order[middle : middle + max_rows].tolist()
        return [pack(self.model, *stream.part([row], [row], 1)[:3]) for row in rows]

    @property
    def epoch_steps(self) -> int:
        return self.stream().batches_an_epoch

    @property
    def longest_row(self) -> dict[str, int]:
        """Text ids and codes of the longest rows, for a Workload."""
        return {"text_ids": self.cache.longest("texts"), "codes": self.cache.longest("codes")}

    @property
    def habits(self) -> Habits:
        longest, pace = code_cache.longest_text(self.cache), code_cache.slowest_pace(self.cache)
        return Habits(longest_text=longest, pace=pace)

    def voice(self) -> Voice:
        """A voice that waits for its model."""
        return Voice(
            model=None,
            codec=self.codec,
            tokenizer=self.tokenizer,
            references=speaker_references(self.cache),
            front_end=self.front_end,
            language=self.language,
            habits=self.habits,
            vectors=self.speaker_vectors,
        )

    @cached_property
    def speaker_vectors(self) -> dict[str, Tensor]:
        """The codec's speaker vector (S,) of each speaker's reference clip; {} if it needs none.

        Raises SpeechError for a clip without a voice.
        """
        if not self.codec.speaker_width:
            return {}
        recordings = {row.id: row.audio for row in read_manifest(self.run.folder)}
        rate_hz = self.codec.input_sample_rate
        vectors = {}
        with on_device(self.run.hw.device, self.codec):
            for speaker, i in code_cache.reference_rows(self.cache).items():
                wave = load_reference(recordings[self.cache.rows[i]["id"]], rate_hz)
                vectors[speaker] = self.codec.speaker_embedding(wave, rate_hz).cpu()
        return vectors

    def held_out_sentences(self, max_rows: int) -> list[Utterance]:
        """The first held-out rows that the voice can say; none if another package makes sound."""
        if not self.codec.decodes:
            return []
        voice = self.voice()
        rows = (row for row in read_manifest(self.run.folder) if row.split == "held_out")
        return [row for row in rows if voice.can_speak(row.text)][:max_rows]

    def save_references(self, head: AlignmentHead | None = None) -> None:
        """Save what goes with the voice: reference clips, habits, the `head` that follows text."""
        voice_files.save_references(
            speaker_references(self.cache),
            self.run.path("references.safetensors"),
            self.habits.with_alignment_head(head),
            self.front_end.config,
            self.speaker_vectors,
        )


def shared(config: DataConfig, world: int) -> DataConfig:
    """`config` with passes of no more rows than a rank has of a batch, where there are several."""
    rows = -(-config.effective_batch // world)
    if world == 1 or config.micro_batch <= rows:
        return config
    fitting = [n for n in range(1, rows + 1) if config.effective_batch % n == 0]
    return dataclasses.replace(config, micro_batch=fitting[-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class RehearsalRow:
    """A sentence for the base voice to speak, for the `number`-th time."""

    language: str
    text: str
    speaker: str
    number: int


@dataclasses.dataclass(kw_only=True)
class Rehearsed:
    """The rows spoken so far, with their codes (N,); None where the voice did not stop."""

    codes: dict[RehearsalRow, np.ndarray | None]
    seconds: float  # spent on speaking

    @property
    def whole(self) -> dict[RehearsalRow, np.ndarray]:
        """The rows to train on: those where the voice stopped."""
        return {row: codes for row, codes in self.codes.items() if codes is not None}

    def save(self, path: Path, key: str) -> None:
        rows = [{**vars(row), "whole": codes is not None} for row, codes in self.codes.items()]
        none = np.zeros(0, np.int32)
        arrays = [none if codes is None else codes for codes in self.codes.values()]
        tensors = {
            "key": code_cache.as_bytes(key),
            "rows": code_cache.as_bytes(rows),
            "codes": np.concatenate(arrays),
            "code_counts": np.array([len(codes) for codes in arrays]),
            "seconds": np.array([self.seconds]),
        }
        write_atomic(path, pack_tensors(tensors))


def load_rehearsal(path: Path, key: str) -> Rehearsed:
    """Load the rows saved at `path` under `key`, else none. Raises DamagedFileError."""
    table = code_cache.load_tensors(path)
    if code_cache.from_bytes(table["key"]) != key:
        return Rehearsed(codes={}, seconds=0.0)
    codes_by_row = {}
    arrays = code_cache.split_by(table["codes"], table["code_counts"])
    for fields, codes in zip(code_cache.from_bytes(table["rows"]), arrays):
        stopped = fields.pop("whole")
        codes_by_row[RehearsalRow(**fields)] = codes if stopped else None
    return Rehearsed(codes=codes_by_row, seconds=float(table["seconds"][0]))


def rehearsal_sampling(run: ActiveRun) -> GenerateConfig:
    """Sample from the voice's unchanged distribution.

    A lower temperature or a cut tail would teach a narrower distribution than the one to keep
    (docs/measurements-archive.md).
    """
    unchanged = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    return active_run.sampling_of(run, **unchanged, guidance_scale=1.0, best_of=1, retries=0)


def rehearsal_key(run: ActiveRun, references: dict[str, Tensor]) -> str:
    """A digest of the base voice, its sampling and the reference clips."""
    arrays = {name: mel.numpy() for name, mel in references.items()}
    sampling = by_former_names("generate", rehearsal_sampling(run))
    return digest(read_run_file(run.folder / START_FROM), arrays_digest(arrays), sampling)


def load_rehearsal_rows(run: ActiveRun, references: dict[str, Tensor]) -> Rehearsed:
    """Load what was spoken for `run` in these voices. Raises KitError where nothing fits."""
    fix = (
        "run 01_data_prep (python -m kit prepare; in 07 the cell with `to_codes`) again, or set "
        "finetune.rehearsal to 0."
    )
    if not run.figure("finetune", "rehearsal"):
        raise KitError(f"finetune.rehearsal is set, but nothing was spoken for it: {fix}")
    rehearsed = load_rehearsal(run.folder / REHEARSAL, rehearsal_key(run, references))
    if not rehearsed.codes and run.report()["finetune"]["rehearsal"]["spoken"]:
        raise KitError(
            "The rehearsal rows were spoken by another voice, other recordings or another "
            f"`generate`: {fix}"
        )
    return rehearsed


MIN_CLIPS = 20  # to train on
READER_HELD_OUT_ROWS = 64  # to measure the reader on
SHOWN_ROWS = 5  # of them
STATES_BATCH = 16
SOUND_HELD_OUT_CLIPS = 32  # to measure the sound on


def learn_reader(data: TrainingData) -> Result:
    """Train the reader of this run's codes, unless it is there, not asked for, or rows are few."""
    run = data.run
    config = build(candidates.CodeReaderConfig, active_run.section_for_run(run, "reader"))
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
    texts, codes = texts_and_codes(data, balance_speakers(rows, speakers, config.most_repeats))
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
    headings = ("held-out text", "read from the recording's codes")
    grid = [headings, *zip(texts, reader.transcribe(codes))] if texts else ()
    return Result(line=f"{line}.", grid=grid)


def learn_sound(data: TrainingData) -> Result:
    """Train the codec's decoder on the hidden states of the final weights, unless it is trained.

    If that cannot be done, the result says why, and the voice sounds as its codec alone does.
    """
    run = data.run
    config = build(voice_files.DecoderFinetuneConfig, run.section("decoder_finetune"))
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
    for step, steps in codec.finetune_decoder(clips, config.steps, run.hw.device):
        ticker(step, steps)
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
    """A held-out recording, decoded from its codes, and from codes and hidden states."""
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
            own = row_states[: len(row)]
            clips.append(ClipWithStates(wave=wave, codes=torch.tensor(row), states=own))
        tick(len(clips), len(sample))
    return clips
