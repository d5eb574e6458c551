"""Add data to a prepared run: clips cut from long recordings, and text of any size.

The run's recogniser finds the words of a long recording; tokenizers are compared on the run's
held-out text.
"""

from pathlib import Path

import numpy as np
import soundfile

from kit.audio.clip import load_wave
from kit.audio.codec import load_codec
from kit.audio.container import duration_s
from kit.audio.recognizer import load_recognizer
from kit.base.config import build
from kit.base.errors import DatasetError
from kit.base.files import write_atomic
from kit.batches.lengths import manifest_limits
from kit.dataset.data_report import Utterance, rows_in_split
from kit.dataset.long_alignment import LongAlignConfig
from kit.dataset.manifest import read_manifest
from kit.dataset.segment_plan import SegmentConfig
from kit.dataset.segmentation import Segmenter, UnusedAudio, find_recordings
from kit.model.sequence import GPTConfig
from kit.notebook.plots import timeline
from kit.notebook.progress_line import Ticker
from kit.notebook.result import Result
from kit.recipes.active_run import ActiveRun
from kit.recipes.training_samples import players_of
from kit.text.tokenizer import Tokenizer
from kit.text.tokenizer_report import tokenizer_report
from kit.text.train_tokenizer import TokenizerConfig, train_fitted_tokenizer

EXAMPLE_CLIPS = 12  # clips of the run in the example of a long recording
EXAMPLE_PAUSE_S = 0.6  # of silence between them
MAX_ROWS = 20  # in a table
PLAYED = 2  # clips with a player
COMPARED = ("vocab_size", "tokens_per_word", "characters_per_token", "byte_rate", "round_trip")


class LongRecordings:
    """Cut long recordings `NAME.wav` with transcripts `NAME.txt` into a dataset of clips.

    `folder` holds them and is only read; "" makes an example of the run's own clips. The run's
    recogniser must be trained on similar voices. No clip is longer than `max_clip_seconds` (0: the
    most that the model has positions for).
    """

    def __init__(self, run: ActiveRun, folder: str = "", max_clip_seconds: float = 0.0):
        self.active_run = run
        self.codec = load_codec(run.path("codec.safetensors"))
        recognizer = load_recognizer(run.path("recognizer.safetensors"))
        self.recognizer = recognizer.to(run.hw.device)
        self.language = run.require_figure("data", "language", "01_data_prep")
        model = build(GPTConfig, run.section("model"))
        limits = manifest_limits(model, self.codec.frame_rate, max_clip_seconds)
        self.cuts = SegmentConfig(max_s=limits["max_clip_s"])
        if folder:
            self.folder = Path(folder)
            self.into = run.path("cut")
        else:
            self.folder = run.path("long_example", "recordings")
            self.into = run.path("long_example", "cut")
            write_example(read_manifest(run.folder), self.folder, self.codec.sample_rate)

    @property
    def lasting(self) -> Path:
        """The folder of the clips for other notebooks, which run on other machines on Colab."""
        kept = self.active_run.kept
        return kept.run.kept / self.into.relative_to(self.active_run.folder) if kept else self.into

    def show(self) -> Result:
        """Show how long each recording is and how many words its transcript has."""
        rows = [("recording", "seconds", "words of its transcript")]
        recordings = find_recordings(self.folder)
        for audio in recordings[:MAX_ROWS]:
            transcript = audio.with_suffix(".txt")
            words = "none"
            if transcript.is_file():
                text = transcript.read_text(encoding="utf-8-sig", errors="replace")
                words = str(len(text.split()))
            rows.append((audio.name, f"{duration_s(audio):.1f}", words))
        return Result(line=f"{len(recordings)} recordings in {self.folder}", grid=rows)

    def cut(self) -> Result:
        """Align the transcripts, cut at pauses, and give a reason for every second in no clip."""
        cutter = Segmenter(
            recognizer=self.recognizer,
            cuts=self.cuts,
            walk=LongAlignConfig(language=self.language),
        )
        losses = cutter.segment_folder(self.folder, self.into, Ticker("seconds aligned"))
        table = (self.into / "metadata.csv").read_text(encoding="utf-8")
        clips = [line.split("|") for line in table.splitlines()]
        lost_s = sum(loss.end_s - loss.start_s for loss in losses)
        line = f"{len(clips)} clips in {self.into}; {lost_s:.0f} s are in none, see losses.jsonl"
        if clips:
            line += f"\nNow set DATA to {self.lasting} and RUN to a new name, in 01_data_prep."
        first = find_recordings(self.folder)[0]
        lost = [loss for loss in losses if loss.file == first.name]
        sounds = []
        for name, text in clips[:PLAYED]:
            wave = load_wave(str(self.into / "wavs" / f"{name}.wav"), self.codec.sample_rate)
            sounds += players_of({text: wave}, self.codec.sample_rate)
        return Result(
            line=line,
            pictures=[_timeline(first, lost)],
            sounds=sounds,
            grid=losses_table(losses),
        )


def write_example(rows: list[Utterance], folder: Path, sample_rate: int) -> None:
    """Join the first clips of one speaker into a recording in `folder`, with its transcript."""
    audio = folder / "example.wav"
    if audio.is_file():
        return
    local = [row for row in rows if Path(row.audio).is_file()]  # on a fresh machine maybe none
    if not local:
        raise DatasetError(
            "None of the run's recordings are on this machine: set LONG to a folder of long ones, "
            "or run 01_data_prep here."
        )
    clips = [row for row in local if row.speaker == local[0].speaker][:EXAMPLE_CLIPS]
    pause = np.zeros(round(EXAMPLE_PAUSE_S * sample_rate), dtype=np.float32)
    parts = []
    for row in clips:
        parts += [load_wave(row.audio, sample_rate).numpy(), pause]
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{row.text.rstrip('.')}.\n" for row in clips)
    write_atomic(audio.with_suffix(".txt"), text)
    soundfile.write(audio, np.concatenate(parts), sample_rate, "PCM_16")


def _timeline(audio: Path, losses: list[UnusedAudio]):
    """The clips, which are between the losses, and the losses."""
    lost = sorted((loss.start_s, loss.end_s) for loss in losses if loss.end_s > loss.start_s)
    total_s = duration_s(audio)
    clips = []
    clip_start_s = 0.0
    for start_s, end_s in [*lost, (total_s, total_s)]:
        if start_s - clip_start_s > 0.01:
            clips.append((clip_start_s, start_s))
        clip_start_s = end_s
    return timeline(clips, lost, audio.name)


def losses_table(losses: list[UnusedAudio]) -> list[tuple[str, ...]]:
    """The longest losses; empty where there are none."""
    if not losses:
        return []
    rows = [("recording", "from (s)", "to (s)", "why it is in no clip")]
    for loss in sorted(losses, key=lambda loss: loss.start_s - loss.end_s)[:MAX_ROWS]:
        rows.append((loss.file, f"{loss.start_s:.1f}", f"{loss.end_s:.1f}", loss.reason))
    return rows


class MoreText:
    """Train a tokenizer on a file of any size: lines, CSV, TSV, JSONL or a JSON array.

    `path` is streamed; in a table the column `text` is read. "" takes the run's own manifest.
    """

    def __init__(self, run: ActiveRun, path: str = ""):
        self.active_run = run
        self.path = Path(path) if path else run.path("manifest.jsonl")
        self.language = run.require_figure("data", "language", "01_data_prep")

    def compare(self) -> Result:
        """Compare a tokenizer trained on this text with the run's own, on held-out text."""
        run = self.active_run
        rows = read_manifest(run.folder)
        lines = [row.text for row in rows_in_split(rows, "train")]
        held_out = [row.text for row in rows_in_split(rows, "held_out")] or lines
        config = build(TokenizerConfig, run.section("text"))
        path = run.path("more_text", "tokenizer.model")
        train_fitted_tokenizer(lines, path, config, self.path, self.language)
        reports = [
            tokenizer_report(Tokenizer(model), held_out)
            for model in (run.path("tokenizer.model"), path)
        ]
        table = [("", "of the recordings", f"of {self.path.name}")]
        for name in COMPARED:
            table.append((name, *(f"{report[name]:.4g}" for report in reports)))
        return Result(line=f"pieces learned from {self.path}, in {path}", grid=table)
