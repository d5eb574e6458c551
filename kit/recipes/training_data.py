"""What 01_data_prep left in a run's folder, as training reads it."""

import dataclasses
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from torch import Tensor

from kit.audio.codec import load_codec
from kit.audio.spectrogram import front_end_config, load_reference, make_front_end
from kit.base.config import build, by_former_names
from kit.base.errors import KitError
from kit.base.files import digest, file_digest, write_atomic
from kit.base.hardware import on_device
from kit.base.run import read_run_file
from kit.base.tensor_file import arrays_digest, pack_tensors
from kit.batches.batching import DataConfig
from kit.batches.code_cache import (
    CodeCache,
    as_bytes,
    fixed_lengths,
    from_bytes,
    load_tensors,
    longest_text,
    reference_rows,
    slowest_pace,
    speaker_references,
    split_by,
)
from kit.batches.code_stream import CodeStream
from kit.dataset.manifest import Utterance, read_manifest
from kit.inference.generate import GenerateConfig
from kit.inference.voice import Habits, Voice
from kit.inference.voice_files import save_references
from kit.model.sequence import Batch, GPTConfig, collate, pack
from kit.model.text_attention import AlignmentHead
from kit.recipes.active_run import START_FROM, ActiveRun, sampling_of, section_for_run
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
            section_for_run(run, "model"),
            text_vocab=self.tokenizer.vocab_size,
            code_vocab=self.codec.vocab_size + 2,  # START and STOP
            n_mels=self.front_end.config.n_mels,
        )
        finetune = build(FinetuneConfig, run.section("finetune"))
        self.rehearsal = finetune.rehearsal if rehearsed else 0.0  # of an epoch's rows
        if self.rehearsal:
            self._add_rehearsal()

    def _add_rehearsal(self) -> None:
        """Add the rows that the base voice has spoken, and positions for them."""
        spoken = load_rehearsal_rows(self.run, speaker_references(self.cache)).whole
        path = self.run.path("tokenizer.model")
        tokenizers = {row.language: load_tokenizer(path, row.language) for row in spoken}
        ids = [tokenizers[row.language].encode_checked(row.text) for row in spoken]
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
        self,
        split: str = "train",
        position: dict | None = None,
        grad_accum: int = 0,
        few_shapes: bool = False,
    ):
        """An endless CodeStream of effective batches from `position` on (None: the beginning).

        `grad_accum` passes make one; 0: as many as `config` says. For `few_shapes` rows are padded
        to a few fixed lengths. The gradients are the same.
        """
        config = self.padded(few_shapes)
        if grad_accum:
            config = config.split(grad_accum)
        training = split == "train"
        ranks = self.run.ranks if training else ALONE
        return CodeStream(
            self.cache,
            split,
            config,
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
        return dataclasses.replace(self.config, grid_lengths=fixed_lengths(self.cache))

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
        batches = []
        for row in order[middle : middle + max_rows].tolist():
            texts, codes, references, _ = stream.part([row], [row], 1)
            batches.append(pack(self.model, texts, codes, references))
        return batches

    def rows(self, split: str = "train") -> int:
        return len(self.cache.rows_in_split(split))

    @property
    def epoch_steps(self) -> int:
        return self.stream().batches_an_epoch

    @property
    def hours(self) -> float:
        """Of recordings to learn from."""
        return self.cache.total("codes", "train") / self.codec.frame_rate / 3600

    @property
    def longest_row(self) -> dict[str, int]:
        """Text ids and codes of the longest rows, for a Workload."""
        return {"text_ids": self.cache.longest("texts"), "codes": self.cache.longest("codes")}

    @property
    def habits(self) -> Habits:
        return Habits(longest_text=longest_text(self.cache), pace=slowest_pace(self.cache))

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
            for speaker, i in reference_rows(self.cache).items():
                wave = load_reference(recordings[self.cache.rows[i]["id"]], rate_hz)
                vectors[speaker] = self.codec.speaker_embedding(wave, rate_hz).cpu()
        return vectors

    def held_out_sentences(self, max_rows: int) -> list[Utterance]:
        """The first held-out rows that the voice can say; none if another package makes sound."""
        if not self.codec.decodes:
            return []
        voice = self.voice()
        held_out = [row for row in read_manifest(self.run.folder) if row.split == "held_out"]
        return [row for row in held_out if voice.can_speak(row.text)][:max_rows]

    def save_references(self, head: AlignmentHead | None = None) -> None:
        """Save what goes with the voice: reference clips, habits, the `head` that follows text."""
        save_references(
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
        rows = []
        arrays = []
        for row, codes in self.codes.items():
            rows.append({**dataclasses.asdict(row), "whole": codes is not None})
            arrays.append(np.zeros(0, np.int32) if codes is None else codes)
        tensors = {
            "key": as_bytes(key),
            "rows": as_bytes(rows),
            "codes": np.concatenate(arrays),
            "code_counts": np.array([len(codes) for codes in arrays]),
            "seconds": np.array([self.seconds]),
        }
        write_atomic(path, pack_tensors(tensors))


def load_rehearsal(path: Path, key: str) -> Rehearsed:
    """Load the rows saved at `path`; none if they were saved under another key.

    Raises DamagedFileError for a file that is missing or damaged.
    """
    table = load_tensors(path)
    if from_bytes(table["key"]) != key:
        return Rehearsed(codes={}, seconds=0.0)
    codes_by_row = {}
    arrays = split_by(table["codes"], table["code_counts"])
    for fields, codes in zip(from_bytes(table["rows"]), arrays):
        stopped = fields.pop("whole")
        codes_by_row[RehearsalRow(**fields)] = codes if stopped else None
    return Rehearsed(codes=codes_by_row, seconds=float(table["seconds"][0]))


def rehearsal_sampling(run: ActiveRun) -> GenerateConfig:
    """Sample from the voice's unchanged distribution.

    A lower temperature or a cut tail would teach a narrower distribution than the one to keep
    (docs/measurements-archive.md).
    """
    unchanged = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    return sampling_of(run, **unchanged, guidance_scale=1.0, best_of=1, retries=0)


def rehearsal_key(run: ActiveRun, references: dict[str, Tensor]) -> str:
    """A digest of the base voice, its sampling and the reference clips."""
    arrays = {name: mel.numpy() for name, mel in references.items()}
    sampling = by_former_names("generate", rehearsal_sampling(run))
    return digest(read_run_file(run.folder / START_FROM), arrays_digest(arrays), sampling)


def load_rehearsal_rows(run: ActiveRun, references: dict[str, Tensor]) -> Rehearsed:
    """Load what was spoken for `run`, in the voices of `references`.

    Raises KitError where nothing was, or with other settings; DamagedFileError for a damaged file.
    """
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
