"""Notebook 01: from recordings to batches; each step is a cell.

Every step keeps its files in the run's folder and records its figures. Files made earlier from the
same recordings with the same settings are used again. Several machines share the long steps by
`--shard` (prepare_shard.py).
"""

import dataclasses
import os
from collections.abc import Callable, Iterator
from functools import partial

from kit import settings
from kit.audio.clip import load_wave
from kit.audio.codec import codec_config
from kit.audio.spectrogram import Mel, front_end_config, make_front_end, recognizer_mel
from kit.base import extras
from kit.base.config import build
from kit.base.errors import DatasetError, KitError
from kit.base.files import digest, file_digest
from kit.base.hardware import on_device
from kit.batches.batching import EXTRA_TOKENS, padding_waste
from kit.batches.code_cache import KEPT_PERCENT, CodeCache, fixed_lengths, length_report
from kit.batches.code_stream import CodeStream
from kit.batches.encoding import build_cache, cache_key, fit_positions, manifest_limits
from kit.batches.find_words import find_words
from kit.batches.word_spans import WORDS
from kit.dataset import data_report
from kit.dataset.alignment import align_clips_cached
from kit.dataset.checks import check_dataset, match
from kit.dataset.layouts import hold_out, read_dataset
from kit.dataset.manifest import Utterance
from kit.model.sequence import collate
from kit.notebook.plots import bars, histogram, mel_picture
from kit.notebook.progress import Ticker
from kit.notebook.result import Result, players_of
from kit.recipes import open_run, run_parts
from kit.recipes import prepare_parts as parts
from kit.recipes.base_model import start_from_base
from kit.recipes.open_run import ActiveRun, RunSource
from kit.recipes.prepare_results import alignment_result, check_result
from kit.recipes.prepare_shard import check_shard, encode_shard, parse_shard
from kit.text import train_tokenizer
from kit.text.normalize import language_example, normalize


class Preparation:
    """The steps from recordings to batches, one method each, in the order of `run`.

    What is left empty stays as the run was started; a new run takes the built-in corpus, in
    Amharic. The codec of a `base_model` is used as it is, and its tokenizer is extended, or that of
    an IndexTTS2 replaced by `tokenizer`. All recordings of `eval_data` are held out, and of `data`
    none are chosen for that; a speaker may be new there. Raises DatasetError when too many hours
    are rejected. A step sets attributes that the next ones read.
    """

    def __init__(
        self,
        run: ActiveRun,
        data: str = "",  # a folder, table, archive or hf:// name (espeak-ng's speech)
        language: str = "",  # of the texts, such as am, en, tr (am)
        max_rejected_percent: float | None = None,  # of the hours; 100: any number (5)
        max_clip_seconds: float = 0.0,  # reject longer clips (the model's positions)
        text: str = "",  # a file of any size, to train the tokenizer on (the recordings' texts)
        phonemes: str = "",  # train it on phonemes of espeak-ng, such as en-us (letters)
        base_model: str = "",  # a voice to start from: an export, another run (none)
        accept_license: str = "",  # CPML: of XTTS-v2; bilibili: of IndexTTS2 (not yet)
        columns: str = "",  # audio|text|speaker, coqui, piper ... (as its first line says)
        tokenizer: str = "",  # a SentencePiece model, taken as it is (one is trained)
        eval_data: str = "",  # recordings of their own to evaluate on (some of data)
        speakers: str = "",  # folder: each folder is a speaker (a column says it, or there is one)
        shard: str = "",  # 3/16: check and encode only the third of sixteen parts (all)
        until: str = "",  # stop after this step, such as fit_positions (make_batches)
    ):
        self.shard = shard
        self.until = until
        names = [step.__name__ for step in self.steps()]
        if until and until not in names:
            raise KitError(f"--until {until}: there is no such step. They are {', '.join(names)}.")
        run = start_from_base(run, base_model, accept_license)
        pieces = run.section("text")
        asked = RunSource(
            data=data,
            language=language,
            text=text,
            phonemes=phonemes or pieces.get("phonemes", ""),
            tokenizer=tokenizer,
            eval_data=eval_data,
        )
        self.source, self.source_line = open_run.choose_source(run, asked)
        parts.require_own_tokenizer(run, self.source)
        if self.source.tokenizer and run_parts.base_voice(run):
            run = run.save_settings({"finetune": {"tables": "all"}})  # rows have other pieces
        self.active_run = run
        self.pieces = build(settings.TokenizerConfig, pieces, phonemes=self.source.phonemes)
        self.model = build(settings.GPTConfig, run.section("model"))
        self.codec_config = codec_config(self.source.section(run, "codec"))
        self.front_end = make_front_end(front_end_config(run.section("front_end")))
        self.data_config = build(settings.DataConfig, self.source.section(run, "data"))
        limits = manifest_limits(self.model, self.codec_config.frame_rate, max_clip_seconds)
        limits |= {"language": self.source.language, "columns": columns, "speakers": speakers}
        limits |= {"respell": self.pieces.respell, "max_rejected_percent": max_rejected_percent}
        if self.source.eval_data:
            limits["held_out_percent"] = 0.0
        given = {name: value for name, value in limits.items() if value not in ("", None)}
        self.rules = build(settings.ManifestConfig, run.section("manifest"), **given)
        self.data_report_path = run.path("ledger.jsonl")

    def run(self) -> Iterator[Result]:
        """Take every step in order, or those of a shard; finished work is not repeated."""
        if self.shard:
            run = self.active_run
            part = parse_shard(self.shard)
            yield check_shard(run, self.source, self.rules, part)
            yield encode_shard(run, self.codec_config, self.front_end, self.data_config, part)
            return
        for step in self.steps():
            yield step()
            if step.__name__ == self.until:
                return

    def to_batches(self) -> Iterator[Result]:
        """Take the steps after the tokenizer's."""
        steps = self.steps()
        for step in steps[steps.index(self.train_codec) :]:
            yield step()

    def steps(self) -> list[Callable[[], Result]]:
        return [
            self.check,
            self.require_usable,
            self.train_tokenizer,
            self.train_codec,
            self.train_recognizer,
            self.align,
            self.cut_long,
            self.fit_positions,
            self.encode,
            self.find_words,
            self.measure_lengths,
            self.make_batches,
        ]

    @property
    def rows(self) -> list[Utterance]:
        """The utterances for training, in the order of the code cache."""
        return self.data_report.kept

    def check(self) -> Result:
        """Fetch or synthesise the recordings and measure every clip."""
        run = self.active_run
        parts.text_stamp(self.source.text)  # raises for a text that is not there
        self.source.begin(run)
        self.folder = parts.fetch_recordings(self.source, run, self.rules)
        eval_data = self.source.eval_data
        evaluation = None
        if eval_data:
            evaluation = parts.fetch_own(eval_data, run, "unpacked-eval", self.rules)
        self.checked = check_dataset(
            self.folder, self.rules, run.folder, Ticker("checked"), evaluation
        )
        run.set_permanent("data", str(self.source))  # only once its recordings were found
        return check_result(run, self.source, self.source_line, self.folder, self.checked)

    def require_usable(self) -> Result:
        """Name the table of the clips that are kept; DatasetError when too much was rejected.

        Clips that are too long do not count yet: they are cut once there is a recogniser.
        """
        self.checked.before_segmentation().require_usable(self.rules, self.data_report_path)
        rows = self.checked.kept
        too_long = self.checked.too_long
        if len(rows) == 1 and not too_long:
            raise DatasetError(
                f"Only {rows[0].id} ({rows[0].file}, line {rows[0].line}) can be used, and two "
                "recordings are needed: one of them is held out."
            )
        line = f"The {len(rows):,} clips that are kept: {self.active_run.path('manifest.jsonl')}"
        if too_long:
            minutes = sum(finding.seconds for finding in too_long) / 60
            line += (
                f"\nToo long for a row: {len(too_long):,} of the recordings, {minutes:.1f} "
                "minutes. They are cut at pauses once the recogniser is trained on the others."
            )
        return Result(line=line)

    def train_tokenizer(self) -> Result:
        """Train, extend (with a base voice) or take over the tokenizer; judge it on held-out text.

        It is trained again only when the texts or the settings have changed.
        """
        run = self.active_run
        language = self.source.language
        rows = self.checked.kept
        lines = [row.text for row in rows if row.split == "train"]
        held_out = [row.text for row in rows if row.split == "held_out"] or lines
        self.tokenizer = parts.train_or_load_tokenizer(run, self.pieces, lines, self.source)
        report = train_tokenizer.tokenizer_report(self.tokenizer, held_out)
        run.record(text=report)

        base = run_parts.load_base_tokenizer(run, language)
        counts = train_tokenizer.count_tokens(self.tokenizer, lines)
        size, reason = train_tokenizer.vocabulary_advice(self.tokenizer, counts, base)
        line = f"{self.tokenizer.vocab_size} tokens; recommended: {size}. {reason}"
        if self.source.tokenizer:
            spelling = parts.describe_spelling({f"{self.source.tokenizer}, as it is": report})
            line = f"{spelling}\n{line}"
        if base is not None:
            before = train_tokenizer.tokenizer_report(base, held_out)
            spelling = parts.describe_spelling({"its own pieces": before, "with new ones": report})
            line = f"{run_parts.describe_base_voice(run, self.tokenizer)}\n{line}\n{spelling}"
        example = language_example(language) or f"{lines[0]} 2017"
        grid = [
            ("text", "what becomes of it"),
            (example, normalize(example, language, self.rules.respell)),
            (lines[0], " | ".join(self.tokenizer.pieces(lines[0]))),
        ]
        return Result(line=line, grid=grid, figures=report)

    def train_codec(self) -> Result:
        """Train the codec, or load the one trained with these settings; play a round trip."""
        rows = self.checked.kept
        codec, origin = parts.train_or_load_codec(self.active_run, self.codec_config, rows)
        self.codec = codec
        line = f"{codec.vocab_size} codes, {codec.frame_rate:.1f} of them a second; {origin}"
        if not codec.decodes:
            return Result(line=f"{line}; another package makes sound of them")
        example = [*data_report.rows_in_split(rows, "held_out"), rows[0]][0]
        wave = load_wave(example.audio, codec.sample_rate)
        with on_device(self.active_run.hw.device, codec):
            again = codec.round_trip(wave)
            waves = {"recording": wave, "codec round trip": again}
            picture = mel_picture(waves, codec.sample_rate, self.front_end)
        waves = {f"recording: {example.text}": wave, "codec round trip": again}
        return Result(line=line, pictures=[picture], sounds=players_of(waves, codec.sample_rate))

    def train_recognizer(self) -> Result:
        """Train the recogniser, or load the one trained with these settings."""
        run = self.active_run
        config = build(settings.RecognizerConfig, self.source.section(run, "recognizer"))
        front_end = Mel(recognizer_mel(self.front_end.config))
        self.recognizer, origin = parts.train_or_load_recognizer(
            run, config, self.checked.kept, front_end, self.source.language
        )
        letters = len(self.recognizer.alphabet)
        return Result(line=f"The recogniser knows {letters} letters; {origin}")

    def align(self) -> Result:
        """Align each text with its recording; reject the clips whose text does not fit."""
        run = self.active_run
        config = build(settings.AlignConfig, run.section("align"))
        rows = config.draw(self.checked.kept)
        digests = self.checked.digests(rows)
        path = run.path("aligned.json")
        with on_device(run.hw.device, self.recognizer):
            alignments = align_clips_cached(
                rows, digests, self.recognizer, config, path, Ticker("aligned")
            )
        self.matched = match(rows, alignments, config)
        self.aligned = self.checked.without(self.matched.mismatched)
        run.record(data={"alignment": self.matched.note})
        sample_rate = self.codec.sample_rate
        return alignment_result(rows, alignments, self.matched, self.aligned, sample_rate)

    def cut_long(self) -> Result:
        """Cut recordings that are too long at their pauses; the originals are not changed."""
        run = self.active_run
        too_long = {finding.id for finding in self.aligned.too_long}
        self.cut = self.aligned
        if not too_long:
            return Result(line="No recording is too long.")
        reason = ""
        if not self.matched.judged:
            reason = "the recogniser is not good enough to find the words"
        elif "pauses" not in extras.offered("SEGMENTERS"):
            reason = "the extra long_recordings, which cuts them, is not in kit/extras"
        if reason:
            return Result(
                line=f"Nothing is cut: {reason}. Rejected as too long: {len(too_long):,} of the "
                "recordings."
            )
        segmenter = extras.load("SEGMENTERS", "pauses")
        rules = self.rules
        cutter = segmenter(self.recognizer, rules.language, rules.max_clip_s, rules.respell)
        rows = read_dataset(self.folder, rules).rows
        rows = [row for row in rows if row.id in too_long]
        with on_device(run.hw.device, self.recognizer):
            clips = cutter.segment_rows(rows, run.path("long"), Ticker("seconds aligned"))
        self.cut = self.aligned.with_clips(clips)
        return Result(line=f"{len(clips)} clips from {len(too_long)} recordings that were too long")

    def fit_positions(self) -> Result:
        """Size the model's position tables for the longest rows; write the manifest."""
        frame_rate = self.codec_config.frame_rate
        self.model, beyond = fit_positions(self.model, self.cut.kept, self.tokenizer, frame_rate)
        report = self.cut.without(beyond)
        # The held-out clips may be among those rejected since the check.
        self.data_report = dataclasses.replace(report, kept=hold_out(report.kept, self.rules))
        data_report.write_data_report(self.data_report, self.active_run.folder)
        self.data_report.require_usable(self.rules, self.data_report_path)
        figures = {
            "hours": self.data_report.kept_s / 3600,
            "utterances": len(self.rows),
            "refused": len(self.data_report.refused),
            "refused_percent": self.data_report.lost_percent,
            "language": self.source.language,
            "positions": {"max_text": self.model.max_text, "max_code": self.model.max_code},
        }
        self.active_run.record(data=figures)
        return Result(
            line=f"{self.model.max_text} text positions, {self.model.max_code} code positions; "
            f"{len(beyond)} clips are too long for them",
            figures=figures,
        )

    def encode(self) -> Result:
        """Encode every recording once, into the code cache that all runs share."""
        run = self.active_run
        config = self.data_config
        key = cache_key(run.path("codec.safetensors"), self.front_end.config, config)
        folder = run.folder.parent / "codes"
        digests = self.checked.digests(self.rows)
        tools = self.codec, self.front_end, self.tokenizer
        paths = {}
        with on_device(run.hw.device, self.codec, self.front_end):
            for speed in (100, *config.for_hours(run.figure("data", "hours")).speeds):
                tick = Ticker("encoded" + (f" at {speed} % speed" if speed != 100 else ""))
                index = build_cache(
                    self.rows, *tools, folder, key, config, tick, digests, speed=speed
                )
                paths[str(speed)] = os.path.relpath(index, run.folder)
        own = paths.pop("100")
        run.record(data={"codes": own, "at_speeds": paths})
        self.cache = CodeCache(run.index())
        counts = f"{len(self.cache.rows):,} utterances, {self.cache.total('codes'):,} codes"
        also = f", also at {', '.join(paths)} % of their speed" if paths else ""
        return Result(line=f"{counts}{also} in {folder}")

    def find_words(self) -> Result:
        """Find where each word begins in the codes of its recording: a row may be a few words.

        Only where the preset asks for it, and the recogniser is good enough to find them.
        """
        run = self.active_run
        config = self.data_config.for_hours(run.figure("data", "hours"))
        if not config.span_rows or not self.matched.judged:
            run.record(data={"rows_with_words": 0, "words_key": None})
            why = "" if self.matched.judged else ": the recogniser is not good enough to find words"
            return Result(line=f"Training reads whole recordings{why}.")
        path = run.path(WORDS)
        made_from = run.path("recognizer.safetensors"), run.index()
        key = digest(*map(file_digest, made_from))
        if run.figure("data", "words_key") != key or not path.is_file():
            tools = (self.tokenizer, self.recognizer, self.codec.frame_rate)
            with on_device(run.hw.device, self.recognizer):
                rows = find_words(self.rows, self.cache, *tools, path, Ticker("words found"))
            run.record(data={"rows_with_words": rows, "words_key": key})
        rows = run.figure("data", "rows_with_words")
        return Result(
            line=f"Words were found in {rows:,} of {len(self.rows):,} recordings: training reads "
            "runs of them, short ones first, and whole recordings"
        )

    def measure_lengths(self) -> Result:
        """Show row lengths, a limit that keeps nearly all rows, and lengths to pad to."""
        percentiles, codes, tokens = length_report(self.cache, self.codec.frame_rate)
        fixed = fixed_lengths(self.cache)
        self.active_run.record(data={"fixed_lengths": fixed})
        sample = self.cache.sample_of_split("train")
        lengths = {
            "text pieces": self.cache.lengths(sample, "texts").tolist(),
            "codes": self.cache.lengths(sample, "codes").tolist(),
            "tokens": (self.cache.lengths(sample) + EXTRA_TOKENS).tolist(),
        }
        return Result(
            line=f"One fixed shape for {KEPT_PERCENT} % of the examples: {codes} codes, {tokens} "
            "tokens\n"
            f"{len(fixed)} fixed lengths for compiled kernels: {fixed[0]} to {fixed[-1]} tokens",
            pictures=[histogram(lengths, marks={"tokens": fixed})],
            figures=percentiles,
        )

    def make_batches(self) -> Result:
        """Make the stream that training reads; show its first batch and the padding it needs."""
        self.model = dataclasses.replace(
            self.model,
            text_vocab=self.tokenizer.vocab_size,
            code_vocab=self.codec.vocab_size + 2,
            n_mels=self.front_end.config.n_mels,
        )
        config = self.data_config
        self.stream = CodeStream(self.cache, "train", config, partial(collate, self.model))
        waste = padding_waste(self.stream.lengths, config)
        padded = dataclasses.replace(config, grid_lengths=fixed_lengths(self.cache))
        fixed = padding_waste(self.stream.lengths, padded)["neighbours in length"]
        waste["neighbours, fixed lengths"] = fixed
        first = next(iter(self.stream))
        figures = {
            "padding": waste["neighbours in length"],
            "padding_any_order": waste["any order"],
            "padding_fixed_lengths": fixed,
        }
        self.active_run.record(data=figures)
        grid = tuple(first.micro[0].tokens.shape)
        percent = [100 * share for share in waste.values()]
        return Result(
            line=f"first micro-batch {grid}, {first.tokens} tokens in the batch; position after it "
            f"{first.position}",
            pictures=[bars(list(waste), percent, unit="%", title="Padding in a batch")],
        )
