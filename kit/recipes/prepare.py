"""From recordings to batches: ledger, tokenizer, codec, recogniser, and codes on disk.

Every step keeps what it made in the run's folder and records its own figures; where that lies
already, made from the same recordings with the same settings, it is used again. Processes that
torchrun has started share the long ones (prepare_ranks.py).
"""

import dataclasses
import os
from collections.abc import Iterator

from kit.audio.codec import codec_config
from kit.audio.ctc_recognizer import RecognizerConfig
from kit.audio.spectrogram import Mel, front_end_config, make_front_end, recognizer_mel
from kit.base.config import build
from kit.base.errors import KitError
from kit.base.hardware import on_device
from kit.base.run import read_run_file
from kit.batches.batching import DataConfig
from kit.batches.code_cache import CodeCache
from kit.batches.encoding import build_cache, cache_key
from kit.batches.lengths import fit_positions, fixed_lengths, length_report, manifest_limits
from kit.dataset.data_report import ManifestConfig, Utterance, rows_in_split
from kit.dataset.manifest import check_dataset, write_data_report, write_fixed
from kit.model.sequence import GPTConfig
from kit.notebook.progress_line import Ticker
from kit.notebook.result import Result
from kit.recipes import prepare_results as results
from kit.recipes.active_run import ActiveRun
from kit.recipes.prepare_batches import first_batches, record_lengths
from kit.recipes.prepare_clips import align_texts, cut_too_long, cutter_for
from kit.recipes.prepare_networks import fitted_codec, fitted_recognizer
from kit.recipes.prepare_ranks import encoding_group, group_of
from kit.recipes.prepare_source import RunSource, choose_source
from kit.recipes.prepare_text import fitted_pieces
from kit.recipes.rehearsal import Rehearsal
from kit.recipes.start_from import BEGUN, begun_from, tokenizer_of_start, told_start
from kit.recipes.training_data import TrainingData
from kit.text.grow_tokenizer import grown_vocabulary_advice
from kit.text.tokenizer_report import count_tokens, tokenizer_report
from kit.text.train_tokenizer import TokenizerConfig
from kit.training.trainable import FinetuneConfig

# What a step leaves for those after it.
LEFT_BY = {
    "checked": "check",
    "tokenizer": "train_tokenizer",
    "codec": "train_codec",
    "recognizer": "train_recognizer",
    "matched": "align",
    "aligned": "align",
    "cut": "cut_long",
    "ledger": "fit_positions",
    "cache": "encode",
    "stream": "make_batches",
}


class Preparation:
    """What stands between recordings and training, a method a step, in the order of `run`.

    `data` is a folder, a table, an archive or a hf:// name; `language` a code like "am". Left empty
    they are what the run was begun with; a new one takes the built-in corpus, in Amharic. Clips
    longer than `longest_s` are left out (0: those that the model can have no positions for), and
    more refused hours than `refuse_percent` end the preparation (None: as the run's settings say).
    Text pieces are learned from the recordings' texts, or from the file `text`, of any size; or
    from the phonemes of the former, where `phonemes` is a language by espeak-ng's name, such as
    "en-us". `start_from` is a folder with a voice to begin with, an export or another run's: its
    codec is taken as it is, and the text pieces are added to its own. That of a released XTTS-v2 is
    taken with `licence` "CPML", by which its licence is accepted.
    """

    def __init__(
        self,
        run: ActiveRun,
        data: str = "",
        language: str = "",
        refuse_percent: float | None = None,
        longest_s: float = 0.0,
        text: str = "",
        phonemes: str = "",
        start_from: str = "",
        licence: str = "",
    ):
        run = begun_from(run, start_from, licence)
        self.active_run = run
        pieces = run.section("text")
        asked = RunSource(
            data=data,
            language=language,
            text=text,
            phonemes=phonemes or pieces.get("phonemes", ""),
        )
        self.source, self.source_lines = choose_source(run, asked)
        self.pieces = build(TokenizerConfig, pieces, phonemes=self.source.phonemes)
        self.model = build(GPTConfig, run.section("model"))
        self.codec_config = codec_config(self.source.codec_settings(run))
        self.front_end = make_front_end(front_end_config(run.section("front_end")))
        self.data_config = build(DataConfig, run.section("data"))
        limits = manifest_limits(self.model, self.codec_config.frame_rate, longest_s)
        limits["language"] = self.source.language
        if refuse_percent is not None:
            limits["refuse_percent"] = refuse_percent
        self.rules = build(ManifestConfig, run.section("manifest"), **limits)
        self.ledger_path = run.path("ledger.jsonl")

    def __getattr__(self, name: str):  # only where there is no such attribute yet
        if name in LEFT_BY:
            raise KitError(
                f"There is no `{name}` yet: `{LEFT_BY[name]}()` makes it. In a notebook, run the "
                "cells from the top."
            )
        raise AttributeError(name)

    def run(self) -> Iterator[Result]:
        """Every step, in order; what was finished before is not done again."""
        yield self.check()
        yield self.require_usable()
        yield self.train_tokenizer()
        yield self.train_codec()
        yield self.train_recognizer()
        yield self.align()
        yield self.cut_long()
        yield self.fit_positions()
        yield self.encode()
        yield self.measure_lengths()
        yield self.make_batches()
        if self.rehearses:
            yield self.rehearse()

    @property
    def rehearses(self) -> bool:
        """Whether the run asks for rehearsal, and begins with a voice that can."""
        asked = build(FinetuneConfig, self.active_run.section("finetune")).rehearsal
        return bool(asked and read_run_file(self.active_run.folder / BEGUN))

    @property
    def rows(self) -> list[Utterance]:
        """The recordings that training gets, in the order of the code cache."""
        return self.ledger.kept

    def check(self) -> Result:
        """Fetch or speak the recordings and measure every clip; the ledger lists what is unfit."""
        run = self.active_run
        self.source.begin(run)
        self.folder = self.source.fetch(run)
        self.checked = check_dataset(
            self.folder, self.rules, run.folder, progress=Ticker("checked"), group=group_of(run)
        )
        self.source.set_permanent(run)
        found = results.of_ledger(self.checked, self.folder, self.source.language)
        return dataclasses.replace(found, line="\n".join([*self.source_lines, found.line]))

    def require_usable(self) -> Result:
        """Raise DatasetError where too much was refused; else leave a cleaned table.

        What is too long does not count yet: it is cut once there is a recogniser.
        """
        self.checked.before_segmentation().require_usable(self.rules, self.ledger_path)
        rows = self.checked.kept
        fixed = write_fixed(rows, self.active_run.path("fixed.jsonl"), root=self.folder)
        line = f"{len(rows):,} rows in {fixed}"
        too_long = self.checked.too_long
        if too_long:
            minutes = sum(finding.seconds for finding in too_long) / 60
            line += (
                f"\nToo long for a row: {len(too_long):,} of the recordings, {minutes:.1f} "
                "minutes. They are cut at their pauses once the recogniser is trained on these."
            )
        return Result(line=line)

    def train_tokenizer(self) -> Result:
        """Learn text pieces from the training text; held-out text says whether they fit."""
        run = self.active_run
        rows = self.checked.kept
        lines = [row.text for row in rows_in_split(rows, "train")]
        held_out = [row.text for row in rows_in_split(rows, "held_out")]
        self.tokenizer = fitted_pieces(run, self.source, self.pieces, lines)
        fitness = tokenizer_report(self.tokenizer, held_out or lines)
        run.record(text=fitness)
        base = tokenizer_of_start(run, self.source.language)
        before = tokenizer_report(base, held_out or lines) if base else None
        counts = count_tokens(self.tokenizer, lines, run.path("count.json"))
        advice = grown_vocabulary_advice(self.tokenizer, counts, base)
        found = results.of_tokenizer(self.tokenizer, fitness, advice, lines, self.source.language)
        if before is None:
            return found
        return results.of_growth(found, before, fitness, told_start(run, self.tokenizer))

    def train_codec(self) -> Result:
        """Train the codec on these recordings, unless one of the same settings is there."""
        rows = self.checked.kept
        path = self.active_run.path("codec.safetensors")
        self.codec, how = fitted_codec(self.active_run, self.codec_config, rows, path)
        example = next(iter(rows_in_split(rows, "held_out")), rows[0])
        with on_device(self.active_run.hw.device, self.codec):
            return results.of_codec(self.codec, how, example, self.front_end)

    def train_recognizer(self) -> Result:
        """Train the recogniser on these recordings, unless one of the same settings is there."""
        run = self.active_run
        config = build(RecognizerConfig, run.section("recognizer"))
        path = run.path("recognizer.safetensors")
        ears = Mel(recognizer_mel(self.front_end.config))
        rows = self.checked.kept
        language = self.source.language
        self.recognizer, how = fitted_recognizer(run, config, rows, ears, path, language)
        return Result(line=f"The recogniser knows {len(self.recognizer.alphabet)} letters; {how}")

    def align(self) -> Result:
        """Lay each text over its recording; what does not fit leaves the rows for the ledger."""
        heard = align_texts(self.active_run, self.checked, self.recognizer)
        self.matched = heard.matched
        self.aligned = self.checked.without(self.matched.mismatched)
        self.active_run.record(data={"alignment": self.matched.note})
        return results.of_alignment(heard, self.aligned, self.codec.sample_rate)

    def cut_long(self) -> Result:
        """Cut what is too long for the model at its pauses; the originals stay as they are."""
        if not self.matched.judged:
            self.cut = self.aligned
            line = "Nothing is cut: the recogniser cannot say where words are."
            left = len(self.cut.too_long)
            if left:
                line += f" Too long for a row, and so refused: {left:,} of the recordings."
            return Result(line=line)
        cutter = cutter_for(self.rules, self.recognizer)
        clips, count = cut_too_long(self.active_run, self.aligned, self.folder, self.rules, cutter)
        self.cut = self.aligned.with_clips(clips)
        return Result(line=f"{len(clips)} clips from {count} recordings that were too long")

    def fit_positions(self) -> Result:
        """Give the model positions for the longest rows; write the manifest of what stays."""
        frame_rate = self.codec_config.frame_rate
        self.model, beyond = fit_positions(self.model, self.cut.kept, self.tokenizer, frame_rate)
        self.ledger = self.cut.without(beyond)
        write_data_report(self.ledger, self.active_run.folder)
        self.ledger.require_usable(self.rules, self.ledger_path)
        figures = results.figures_of(self.ledger)
        figures["language"] = self.source.language
        figures["positions"] = {"max_text": self.model.max_text, "max_code": self.model.max_code}
        self.active_run.record(data=figures)
        return Result(
            line=f"{self.model.max_text} text positions, {self.model.max_code} code positions; "
            f"{len(beyond)} rows are too long for any",
            figures=figures,
        )

    def encode(self) -> Result:
        """Send every recording through the codec, once: the code cache is shared by all runs."""
        run = self.active_run
        with on_device(run.hw.device, self.codec, self.front_end):
            index = build_cache(
                self.rows,
                self.codec,
                self.front_end,
                self.tokenizer,
                run.folder.parent / "codes",
                cache_key(run.path("codec.safetensors"), self.front_end.config, self.data_config),
                self.data_config,
                Ticker("encoded"),
                self.checked.digests(self.rows),
                group=encoding_group(run, self.front_end.config, self.source.language),
            )
        self.cache = CodeCache(index)
        run.record(data={"codes": os.path.relpath(index, run.folder)})
        codes = self.cache.total("codes")
        return Result(
            line=f"{len(self.cache.rows):,} utterances, {codes:,} codes in {index.parent}"
        )

    def measure_lengths(self) -> Result:
        """How long the rows are, the limit that keeps nearly all, and lengths to pad them to."""
        report = length_report(self.cache, self.codec.frame_rate)
        return record_lengths(self.active_run, report, self.cache)

    def make_batches(self) -> Result:
        """The stream that training reads, its first batches, and what padding they need."""
        self.model = dataclasses.replace(
            self.model,
            text_vocab=self.tokenizer.vocab_size,
            code_vocab=self.codec.vocab_size + 2,
            n_mels=self.front_end.config.n_mels,
        )
        self.stream, result = first_batches(
            self.active_run, self.cache, self.model, self.data_config, fixed_lengths(self.cache)
        )
        return result

    def rehearse(self) -> Result:
        """Let the voice that the run begins with say what it can, to be read along in training."""
        run = self.active_run
        return Rehearsal(run, TrainingData(run, rehearsed=False).voice()).speak()
