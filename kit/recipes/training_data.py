"""What 01_data_prep left in a run's folder, as training reads it."""

import dataclasses
from functools import cached_property, partial

import numpy as np
from torch import Tensor

from kit.audio.codec import load_codec
from kit.audio.spectrogram import front_end_config, load_reference, make_front_end
from kit.base.config import build
from kit.base.errors import KitError
from kit.base.files import file_digest
from kit.base.hardware import on_device
from kit.batches import code_cache
from kit.batches.code_cache import CodeCache, longest_text, slowest_pace, speaker_references
from kit.batches.code_stream import CodeStream
from kit.batches.word_spans import LEAST_S, WORDS, WordSpans
from kit.dataset.manifest import Utterance, read_manifest
from kit.model.sequence import Batch, collate, pack
from kit.model.text_attention import AlignmentHead
from kit.recipes.open_run import ActiveRun, section_for_run
from kit.recipes.run_parts import base_voice
from kit.settings import DataConfig, GPTConfig
from kit.text.tokenizer import load_tokenizer
from kit.training.ranks import ALONE


class TrainingData:
    """The corpus of a run, and the shapes of model and batches that suit it.

    Where several ranks train together, a batch is this one's share of it.
    Raises KitError where 01_data_prep has not run yet.
    """

    def __init__(self, run: ActiveRun):
        self.run = run
        self.cache = CodeCache(run.index())
        self.codec = load_codec(run.path("codec.safetensors"))
        self.front_end = make_front_end(front_end_config(run.section("front_end")))
        self.language = run.require_figure("data", "language", "01_data_prep")
        self.tokenizer = load_tokenizer(run.path("tokenizer.model"), self.language)
        self.config = shared(build(DataConfig, section_for_run(run, "data")), run.ranks.world)
        model = section_for_run(run, "model")
        from_scratch = not base_voice(run)
        shares = model.get("share_digits") and from_scratch and len(self.codec.levels) > 1
        self.model = build(
            GPTConfig,
            model,
            text_vocab=self.tokenizer.vocab_size,
            code_vocab=self.codec.vocab_size + 2,  # START and STOP
            code_levels=self.codec.levels if shares else (),
            pretrained_layers=from_scratch and model.get("pretrained_layers", False),
            n_mels=self.front_end.config.n_mels,
        )

    def set_micro_batch(self, size: int) -> None:
        """Take passes of `size` rows, unless the effective batch is no multiple of that."""
        if self.config.effective_batch % size == 0:
            config = dataclasses.replace(self.config, micro_batch=size)
            self.config = shared(config, self.run.ranks.world)

    @property
    def parts(self) -> dict[str, str]:
        """The SHA-256 of each file by which texts and recordings became ids."""
        names = ("tokenizer.model", "codec.safetensors")
        return {name: file_digest(self.run.path(name)) for name in names}

    def stream(
        self, split: str = "train", position: dict | None = None, few_shapes: bool = False
    ) -> CodeStream:
        """An endless CodeStream of effective batches from `position` on (None: the beginning).

        For `few_shapes` rows are padded to a few fixed lengths. The gradients are the same.
        """
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
            text_dropout=self.model.text_dropout if training else 0.0,
            spans=self.spans if training else None,
            at_speeds=self.at_speeds if training else (),
        )

    @cached_property
    def at_speeds(self) -> list[CodeCache]:
        """The recordings at other speeds, for the section data's `speeds`."""
        indexes = self.run.figure("data", "at_speeds") or {}
        hours = self.run.figure("data", "hours") or 0.0
        speeds = [str(speed) for speed in self.config.for_hours(hours).speeds]
        lacking = [speed for speed in speeds if speed not in indexes]
        if lacking:
            raise KitError(
                f"No recording was encoded at {', '.join(lacking)} % of its speed (`speeds` of the "
                "section data): run notebook 01_data_prep again."
            )
        return [CodeCache(self.run.folder / indexes[speed]) for speed in speeds]

    @cached_property
    def spans(self) -> WordSpans | None:
        """Where the words of the recordings lie; None where rows are whole recordings."""
        if not self.config.span_rows or not self.run.figure("data", "rows_with_words"):
            return None
        least_codes = round(LEAST_S * self.codec.frame_rate)
        return WordSpans(self.run.path(WORDS), self.config.span_rows, least_codes, self.config.seed)

    def padded(self, few_shapes: bool) -> DataConfig:
        """How rows make batches, padded to their longest or for `few_shapes` to fixed lengths."""
        if not few_shapes or self.config.grid_lengths:
            return self.config
        return dataclasses.replace(self.config, grid_lengths=code_cache.fixed_lengths(self.cache))

    def middle_row(self) -> Batch:
        """The training row of median length, alone and so without padding."""
        return self.middle_rows(1)[0]

    def middle_rows(self, max_rows: int) -> list[Batch]:
        """Up to `max_rows` training rows from the median length on, each alone."""
        rows = self.cache.sample_of_split("train")
        order = rows[np.argsort(self.cache.lengths(rows), kind="stable")]
        middle = len(order) // 2
        batches = []
        for row in order[middle : middle + max_rows].tolist():
            batches.append(pack(self.model, *self.cache.example(row)))
        return batches

    @property
    def epoch_steps(self) -> int:
        return self.stream().batches_an_epoch

    @property
    def habits(self):
        """The Habits of the voice."""
        from kit.inference.voice import Habits  # what speaks is loaded where it is needed

        return Habits(
            longest_text=longest_text(self.cache),
            pace=slowest_pace(self.cache),
            respell=section_for_run(self.run, "text").get("respell", True),
        )

    def voice(self):
        """A Voice that waits for its model; speakers of held-out recordings alone speak, too."""
        from kit.inference.voice import Voice

        return Voice(
            model=None,
            codec=self.codec,
            tokenizer=self.tokenizer,
            references=speaker_references(self.cache, "held_out") | speaker_references(self.cache),
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
        rows = code_cache.reference_rows(self.cache, "held_out")
        rows |= code_cache.reference_rows(self.cache)
        with on_device(self.run.hw.device, self.codec):
            for speaker, i in rows.items():
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
        from kit.inference.voice_files import save_references

        references = speaker_references(self.cache)
        vectors = self.speaker_vectors
        save_references(
            references,
            self.run.path("references.safetensors"),
            self.habits.with_alignment_head(head),
            self.front_end.config,
            {name: vector for name, vector in vectors.items() if name in references},
        )


def shared(config: DataConfig, world: int) -> DataConfig:
    """`config` with passes of no more rows than a rank has of a batch, where there are several."""
    rows = -(-config.effective_batch // world)
    if world == 1 or config.micro_batch <= rows:
        return config
    fitting = [n for n in range(1, rows + 1) if config.effective_batch % n == 0]
    return dataclasses.replace(config, micro_batch=fitting[-1])
