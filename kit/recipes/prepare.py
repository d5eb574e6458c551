"""From recordings to batches: ledger, tokenizer, codec, recogniser, and codes on disk.

Every step keeps what it made in the run's folder and records its own figures; where that lies
already, made from the same recordings with the same settings, it is used again.
"""

import dataclasses
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from kit.audio.codec_kinds import codec_config
from kit.audio.recognizer import RecognizerConfig
from kit.audio.spectrogram import Mel, MelConfig
from kit.base.config import ConfigError, build
from kit.base.files import digest, write_atomic
from kit.batches.batching import DataConfig, padding_waste
from kit.batches.code_cache import CodeCache, build_cache, cache_key
from kit.batches.code_stream import CodeStream, loader_settings
from kit.batches.lengths import fit_positions, ledger_limits, length_report
from kit.dataset.alignment import AlignConfig, align_clips_once, match
from kit.dataset.fetch import fetch_dataset
from kit.dataset.layouts import read_dataset
from kit.dataset.ledger import ManifestConfig, Utterance
from kit.dataset.long_recordings.cut import CutConfig
from kit.dataset.long_recordings.segment import cut_rows
from kit.dataset.long_recordings.transcript import WalkConfig
from kit.dataset.manifest import check_dataset, write_checked, write_fixed
from kit.dataset.synthetic import CorpusConfig, make_corpus
from kit.model.sequence import GPTConfig, collate
from kit.notebook.progress_line import Ticker
from kit.notebook.result import Result
from kit.notebook.run_record import read_mark
from kit.recipes import prepare_results as results
from kit.recipes.active_run import ActiveRun
from kit.recipes.prepare_networks import fitted_codec, fitted_recognizer
from kit.text.tokenizer import Tokenizer
from kit.text.tokenizer_report import (
    count_tokens,
    fitted_tokenizer,
    tokenizer_report,
    vocabulary_advice,
)
from kit.text.train_tokenizer import TokenizerConfig

STEP_S = 0.2  # a training step of middling length: beside it the making of batches is judged
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

    `data` is a folder, a table, an archive or a hf:// name, "" for the built-in corpus; `language`
    a code like "am". Clips longer than `longest_s` are left out (0: those that the model can have
    no positions for), and more refused hours than `refuse_percent` end the preparation (None: as
    the run's settings say). Text pieces are learned from the recordings' texts, or from the file
    `text`, of any size; or from the phonemes of the former, where `phonemes` is a language by
    espeak-ng's name, such as "en-us".
    """

    def __init__(
        self,
        run: ActiveRun,
        data: str = "",
        language: str = "am",
        refuse_percent: float | None = None,
        longest_s: float = 0.0,
        text: str = "",
        phonemes: str = "",
    ):
        self.active_run = run
        self.data = data
        self.language = language
        self.text = Path(text) if text else None
        pieces = dict(run.section("text"))
        if phonemes:
            pieces["phonemes"] = phonemes
        self.pieces = build(TokenizerConfig, pieces)
        self.model = build(GPTConfig, run.section("model"))
        self.codec_config = codec_config(run.section("codec"))
        self.front_end = Mel(build(MelConfig, run.section("front_end")))
        self.data_config = build(DataConfig, run.section("data"))
        limits = ledger_limits(self.model, self.codec_config.frame_rate, longest_s)
        limits["language"] = language
        if refuse_percent is not None:
            limits["refuse_percent"] = refuse_percent
        self.rules = build(ManifestConfig, run.section("manifest"), **limits)
        self.ledger_path = run.path("ledger.jsonl")

    def __getattr__(self, name: str):  # only where there is no such attribute yet
        if name in LEFT_BY:
            raise ConfigError(
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

    @property
    def rows(self) -> list[Utterance]:
        """The recordings that training gets, in the order of the code cache."""
        return self.ledger.kept

    def check(self) -> Result:
        """Fetch or speak the recordings and measure every clip; the ledger lists what is unfit."""
        run = self.active_run
        corpus = None
        if not self.data:
            corpus = build(CorpusConfig, run.section("corpus"), language=self.language)
        begun_with = f"{self.data or 'the built-in corpus'}, language {self.language}"
        if self.text:
            begun_with += f", pieces of {self.text}"
        if self.pieces.phonemes:
            begun_with += f", phonemes of {self.pieces.phonemes}"
        run.settle("data", begun_with)
        if corpus:
            self.folder = make_corpus(corpus, run.path("corpus"), Ticker("spoken"))
        else:
            unpacking = Ticker("bytes unpacked")
            self.folder = fetch_dataset(self.data, run.path("unpacked"), progress=unpacking)
        self.checked = check_dataset(
            self.folder, self.rules, run.folder, progress=Ticker("checked")
        )
        return results.of_ledger(self.checked, self.folder, self.language)

    def require_usable(self) -> Result:
        """Raise DatasetError where too much was refused; else leave a cleaned table."""
        self.checked.require_usable(self.rules, self.ledger_path)
        rows = self.checked.kept
        fixed = write_fixed(rows, self.active_run.path("fixed.jsonl"), root=self.folder)
        return Result(line=f"{len(rows):,} rows in {fixed}")

    def train_tokenizer(self) -> Result:
        """Learn text pieces from the training text; held-out text says whether they fit."""
        run = self.active_run
        lines = [row.text for row in self._split("train")]
        held_out = [row.text for row in self._split("held_out")]
        path = run.path("tokenizer.model")
        mark = run.path("tokenizer.key")  # what the one that lies there was made from
        key = digest(self.pieces, lines, self.language, _stamp(self.text) if self.text else "")
        if not path.exists() or read_mark(mark) != key:
            fitted_tokenizer(lines, path, self.pieces, self.text, self.language)
            write_atomic(mark, key)
        self.tokenizer = Tokenizer(path)
        fitness = tokenizer_report(self.tokenizer, held_out or lines)
        counts = count_tokens(self.tokenizer, lines, run.path("count.json"))
        advice = vocabulary_advice(self.tokenizer, counts)
        run.record(text=fitness)
        return results.of_tokenizer(self.tokenizer, fitness, advice, lines, self.language)

    def train_codec(self) -> Result:
        """Train the codec on these recordings, unless one of the same settings is there."""
        rows = self.checked.kept
        path = self.active_run.path("codec.safetensors")
        self.codec, how = fitted_codec(self.active_run, self.codec_config, rows, path)
        example = next(iter(self._split("held_out")), rows[0])
        return results.of_codec(self.codec, how, example, self.front_end)

    def train_recognizer(self) -> Result:
        """Train the recogniser on these recordings, unless one of the same settings is there."""
        run = self.active_run
        config = build(RecognizerConfig, run.section("recognizer"))
        path = run.path("recognizer.safetensors")
        rows = self.checked.kept
        self.recognizer, how = fitted_recognizer(run, config, rows, self.front_end, path)
        return Result(line=f"The recogniser knows {len(self.recognizer.alphabet)} letters; {how}")

    def align(self) -> Result:
        """Lay each text over its recording; what does not fit leaves the rows for the ledger."""
        run = self.active_run
        config = build(AlignConfig, run.section("align"))
        rows = config.draw(self.checked.kept)
        alignments = align_clips_once(
            rows,
            self._digests(rows),
            self.recognizer,
            config,
            run.path("aligned.json"),
            Ticker("aligned"),
        )
        self.matched = match(rows, alignments, config)
        self.aligned = self.checked.without(self.matched.mismatched)
        run.record(data={"alignment": self.matched.note})
        rate_hz = self.codec.sample_rate
        return results.of_alignment(self.matched, self.aligned, rows, alignments, rate_hz)

    def cut_long(self) -> Result:
        """Cut what is too long for the model at its pauses; the originals stay as they are."""
        gone = set()
        if self.matched.judged:  # else the recogniser cannot say where words are
            gone = {f.id for f in self.aligned.refused if f.kind == "too long"}
        whole = []
        if gone:
            found = read_dataset(self.folder, self.rules)
            whole = [row for row in found.rows if row.id in gone]
        clips = cut_rows(
            whole,
            self.recognizer,
            self.active_run.path("long"),
            CutConfig(max_s=self.rules.longest_s),
            WalkConfig(language=self.language),
            Ticker("seconds heard"),
        )
        self.cut = self.aligned.with_clips(clips)
        return Result(line=f"{len(clips)} clips from {len(gone)} recordings that were too long")

    def fit_positions(self) -> Result:
        """Give the model positions for the longest rows; write the manifest of what stays."""
        frame_rate = self.codec_config.frame_rate
        self.model, beyond = fit_positions(self.model, self.cut.kept, self.tokenizer, frame_rate)
        self.ledger = self.cut.without(beyond)
        write_checked(self.ledger, self.active_run.folder)
        self.ledger.require_usable(self.rules, self.ledger_path)
        figures = results.figures_of(self.ledger)
        figures["language"] = self.language
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
        index = build_cache(
            self.rows,
            self.codec,
            self.front_end,
            self.tokenizer,
            run.folder.parent / "codes",
            cache_key(run.path("codec.safetensors"), self.front_end.config, self.data_config),
            self.data_config,
            Ticker("encoded"),
            self._digests(self.rows),
        )
        self.cache = CodeCache(index)
        run.record(data={"codes": os.path.relpath(index, run.folder)})
        codes = sum(map(len, self.cache.codes))
        return Result(
            line=f"{len(self.cache.rows):,} utterances, {codes:,} codes in {index.parent}"
        )

    def measure_lengths(self) -> Result:
        """How long the rows are, and the limit that keeps nearly all of them."""
        report = length_report(self.cache, self.codec.frame_rate)
        return results.of_lengths(report, self.cache)

    def make_batches(self) -> Result:
        """The stream that training reads, its first batches, and what padding they need."""
        self.model = dataclasses.replace(
            self.model,
            text_vocab=self.tokenizer.vocab_size,
            code_vocab=self.codec.vocab_size + 2,
            n_mels=self.front_end.config.n_mels,
        )
        self.stream = CodeStream(
            self.cache, "train", self.data_config, partial(collate, self.model)
        )
        waste = padding_waste(self.stream.lengths, self.data_config)
        began_s = time.perf_counter()
        batches = iter(self.stream)
        first = next(batches)
        for _ in range(9):
            next(batches)
        batch_s = (time.perf_counter() - began_s) / 10
        self.active_run.record(
            data={
                "padding": waste["neighbours in length"],
                "padding_any_order": waste["any order"],
                "batch_s": batch_s,
            }
        )
        advice = loader_settings(self.active_run.hw, batch_s, STEP_S)
        return results.of_batches(first, waste, advice.reason)

    def _digests(self, rows: list[Utterance]) -> list[str | None]:
        """Of the sound, as the check measured it; None for a clip that was cut since."""
        measures = self.checked.measures
        return [measures[r.audio].digest if r.audio in measures else None for r in rows]

    def _split(self, split: str) -> list[Utterance]:
        return [row for row in self.checked.kept if row.split == split]


def _stamp(path: Path) -> tuple:
    """Changes when the file does, however large it is."""
    if not path.is_file():
        raise ConfigError(f"There is no {path}: is the name right, and the disk mounted?")
    found = path.stat()
    return (str(path.absolute()), found.st_size, found.st_mtime_ns)
