"""What 01_data_prep left in a run's folder, as training reads it.

Tokenizer and codec set the sizes of the two vocabularies, the code cache holds the rows.
"""

import dataclasses
from functools import cached_property, partial

import numpy as np
from torch import Tensor

from kit.audio.codec import load_codec
from kit.audio.reference import load_reference
from kit.audio.spectrogram import front_end_config, make_front_end
from kit.base.config import build
from kit.base.files import file_digest
from kit.base.hardware import on_device
from kit.batches.batching import DataConfig
from kit.batches.code_cache import (
    CodeCache,
    longest_text,
    reference_rows,
    slowest_pace,
    speaker_references,
)
from kit.batches.code_stream import CodeStream
from kit.batches.lengths import fixed_lengths
from kit.dataset.data_report import Utterance, rows_in_split
from kit.dataset.manifest import read_manifest
from kit.inference.references import Habits, save_references
from kit.inference.voice import Voice
from kit.model.sequence import Batch, GPTConfig, collate, pack
from kit.model.text_attention import AlignmentHead
from kit.recipes.active_run import ActiveRun
from kit.recipes.rehearsal import load_rehearsal_rows
from kit.recipes.run_source import section_for_run
from kit.text.tokenizer import load_tokenizer
from kit.training.ranks import ALONE
from kit.training.trainable import FinetuneConfig


class TrainingData:
    """The corpus of a run, and the shapes of model and batches that suit it.

    `config` says how rows make batches; `split` gives the same batches in other passes. Where the
    run rehearses what its voice could say before, those rows are there, too; not so where
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
        self.rehearsal = 0.0  # of an epoch's rows
        if rehearsed:
            self.rehearsal = build(FinetuneConfig, run.section("finetune")).rehearsal
        if self.rehearsal:
            self._add_rehearsal()

    def _add_rehearsal(self) -> None:
        """Read along what the voice that the run began with has said; positions for it, too."""
        found = load_rehearsal_rows(self.run, speaker_references(self.cache)).whole
        path = self.run.path("tokenizer.model")
        tokenizers = {reading.language: load_tokenizer(path, reading.language) for reading in found}
        texts = []
        for reading in found:
            ids = tokenizers[reading.language].encode_checked(reading.text)
            texts.append(np.array(ids, dtype=np.int32))
        codes = list(found.values())
        longest_text = max(map(len, texts), default=0)
        longest_codes = max(map(len, codes), default=0)
        self.model = self.model.with_positions(longest_text, longest_codes)
        self.cache.add_rehearsal([reading.speaker for reading in found], texts, codes)

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
        ranks = self.run.ranks if split == "train" else ALONE
        return CodeStream(
            self.cache,
            split,
            config,
            partial(collate, self.model),
            position,
            rank=ranks.rank,
            world=ranks.world,
            rehearsal=self.rehearsal if split == "train" else 0.0,
            text_dropout=self.model.text_dropout if split == "train" else 0.0,
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
        """The training row of middling length, alone and so without padding."""
        return self.middle_rows(1)[0]

    def middle_rows(self, most: int) -> list[Batch]:
        """Up to `most` training rows of about middling length, each alone; the middle one first."""
        stream = self.stream()
        rows = self.cache.sample_of_split("train")
        order = rows[np.argsort(self.cache.lengths(rows), kind="stable")]
        middle = len(order) // 2
        found = []
        for row in order[middle : middle + most].tolist():
            texts, codes, references, _ = stream.part([row], [row], 1)
            found.append(pack(self.model, texts, codes, references))
        return found

    def rows(self, split: str = "train") -> int:
        return len(self.cache.rows_in_split(split))

    @property
    def epoch_steps(self) -> int:
        """Steps that see every row of the training split once."""
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
        found = {}
        with on_device(self.run.hw.device, self.codec):
            for speaker, i in reference_rows(self.cache).items():
                wave = load_reference(
                    recordings[self.cache.rows[i]["id"]], self.codec.input_sample_rate
                )
                found[speaker] = self.codec.speaker_embedding(
                    wave, self.codec.input_sample_rate
                ).cpu()
        return found

    def held_out_sentences(self, most: int) -> list[Utterance]:
        """The first held-out rows that the voice can say."""
        voice = self.voice()
        held_out = rows_in_split(read_manifest(self.run.folder), "held_out")
        return [row for row in held_out if voice.can_speak(row.text)][:most]

    def save_references(self, head: AlignmentHead | None = None) -> None:
        """Leave one reference clip a speaker in the run's folder: it goes with the voice.

        So do its habits, and which `head` of its model follows the text.
        """
        path = self.run.path("references.safetensors")
        references = speaker_references(self.cache)
        habits = self.habits.with_alignment_head(head)
        front_end = self.front_end.config
        save_references(references, path, habits, front_end, self.speaker_vectors)

    def with_passes_of(self, micro_batch: int) -> None:
        """Cut the same effective batches into passes of `micro_batch` rows from here on."""
        self.config = dataclasses.replace(self.config, micro_batch=micro_batch)


def shared(config: DataConfig, world: int) -> DataConfig:
    """`config` with passes of no more rows than a rank has of a batch, where there are several."""
    rows = -(-config.effective_batch // world)
    if world == 1 or config.micro_batch <= rows:
        return config
    fitting = [n for n in range(1, rows + 1) if config.effective_batch % n == 0]
    return dataclasses.replace(config, micro_batch=fitting[-1])
