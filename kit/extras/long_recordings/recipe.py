"""Notebook 06: more data. Clips cut from long recordings, transcripts by Whisper, more text.

`LongRecordings` needs transcripts; the run's recogniser finds their words. `transcribe` needs none:
recordings of any length are cut at pauses, and Whisper writes down each clip.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kit.audio.clip import FRAME_S, load_wave
from kit.audio.codec import load_codec
from kit.audio.recognizer import load_recognizer
from kit.base.config import build
from kit.base.errors import DatasetError, KitError
from kit.base.files import cached_result, digest, encode_wav, make_folder, write_atomic
from kit.base.formatting import join_names
from kit.base.run import run_folder
from kit.batches.encoding import manifest_limits
from kit.dataset.alignment import quiet_frames
from kit.dataset.data_report import rows_in_split
from kit.dataset.manifest import Utterance, read_manifest, write_lines
from kit.dataset.tables import read_texts
from kit.extras.long_recordings import segmentation, transcripts
from kit.extras.long_recordings.alignment import Span, WindowReader
from kit.extras.long_recordings.segmentation import SegmentConfig, Segmenter
from kit.extras.whisper.recognizer import (
    WhisperRecognizer,
    new_whisper,
    whisper_folder,
    whisper_unavailable,
)
from kit.notebook.plots import timeline
from kit.notebook.progress import Ticker
from kit.notebook.result import Result, players_of
from kit.notebook.speech_panels import ProofreadPanel, WrittenClip
from kit.recipes.open_run import ActiveRun
from kit.settings import GPTConfig, TokenizerConfig
from kit.text.normalize import language_code
from kit.text.tokenizer import Tokenizer
from kit.text.train_tokenizer import tokenizer_report, train_fitted_tokenizer

EXAMPLE_CLIPS = 12  # clips of the run in the example of a long recording
EXAMPLE_PAUSE_S = 0.6  # of silence between them
MAX_ROWS = 20  # in a table
PLAYED = 2  # clips with a player
COMPARED = ("vocab_size", "tokens_per_word", "tokens_per_character", "byte_rate", "round_trip")

# No word has so long a silence inside. Longer pauses end clips first, long ones always.
CUTS = SegmentConfig(min_s=2.0, max_s=12.0, least_pause_s=0.2, longest_pause_s=1.0)
SENTENCE_PAUSE_S = 0.45
SILENCE = -6.9  # log-loudness, -60 dB: quieter frames are silent whatever is beside them
BLOCK_S = 60.0  # read at a time


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
        self.max_clip_s = limits["max_clip_s"]
        if folder:
            self.folder = Path(folder).expanduser()
            self.into = run.path("cut")
        else:
            self.folder = run.path("long_example", "recordings")
            self.into = run.path("long_example", "cut")
            write_example(read_manifest(run.folder), self.folder, self.codec.sample_rate)

    def show(self) -> Result:
        """Show how long each recording is and how many words its transcript has."""
        rows = [("recording", "seconds", "words of its transcript")]
        recordings = segmentation.find_recordings(self.folder)
        for audio in recordings[:MAX_ROWS]:
            words = "none"
            with contextlib.suppress(OSError):
                text = audio.with_suffix(".txt").read_text(encoding="utf-8-sig", errors="replace")
                words = str(len(text.split()))
            name = audio.relative_to(self.folder).as_posix()
            rows.append((name, f"{segmentation.seconds_of(audio):.1f}", words))
        return Result(line=f"{len(recordings)} recordings in {self.folder}", grid=rows)

    def cut(self) -> Result:
        """Align the transcripts, cut at pauses, and give a reason for every second in no clip."""
        respell = self.active_run.section("text").get("respell", True)
        cutter = Segmenter(self.recognizer, self.language, self.max_clip_s, respell)
        losses = cutter.segment_folder(self.folder, self.into, Ticker("seconds aligned"))
        clips = list(read_texts(self.into).items())
        lost_s = sum(loss.seconds for loss in losses)
        line = f"{len(clips)} clips in {self.into}; {lost_s:.0f} s are in none, see losses.jsonl"
        if clips:
            copy = self.active_run.copy  # other notebooks run on other machines on Colab
            lasting = self.into
            if copy:
                lasting = copy.folder / self.into.relative_to(self.active_run.folder)
            line += f"\nNow set DATA to {lasting} and RUN to a new name, in 01_data_prep."
        sounds = []
        for name, text in clips[:PLAYED]:
            wave = load_wave(str(self.into / "wavs" / f"{name}.wav"), self.codec.sample_rate)
            sounds += players_of({text: wave}, self.codec.sample_rate)
        picture = self._timeline(losses)
        return Result(line=line, pictures=[picture], sounds=sounds, grid=_losses_table(losses))

    def _timeline(self, losses: list[Span]):
        """Draw the first recording's clips, which are between its losses, and the losses."""
        audio = segmentation.find_recordings(self.folder)[0]
        name = audio.relative_to(self.folder).as_posix()
        spans = [(loss.start_s, loss.end_s) for loss in losses if loss.file == name]
        lost = sorted(span for span in spans if span[1] > span[0])
        edges = [0.0, *itertools.chain.from_iterable(lost), segmentation.seconds_of(audio)]
        between = zip(edges[::2], edges[1::2])  # from the end of a loss to the start of the next
        clips = [(start_s, end_s) for start_s, end_s in between if end_s - start_s > 0.01]
        return timeline(clips, lost, name)


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
    text = "".join(f"{row.text.rstrip('.')}.\n" for row in clips)
    write_atomic(audio.with_suffix(".txt"), text)
    write_atomic(audio, encode_wav(np.concatenate(parts), sample_rate))


def _losses_table(losses: list[Span]) -> list[tuple[str, ...]]:
    if not losses:
        return []
    longest = sorted(losses, key=lambda loss: loss.start_s - loss.end_s)[:MAX_ROWS]
    rows = [("recording", "from (s)", "to (s)", "why it is in no clip")]
    for loss in longest:
        rows.append((loss.file, f"{loss.start_s:.1f}", f"{loss.end_s:.1f}", loss.reason))
    return rows


class MoreText:
    """Train a tokenizer on a file of any size: lines, CSV, TSV or JSONL.

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
        before = tokenizer_report(Tokenizer(run.path("tokenizer.model")), held_out)
        after = tokenizer_report(Tokenizer(path), held_out)
        table = [("", "of the recordings", f"of {self.path.name}")]
        table += [(name, f"{before[name]:.4g}", f"{after[name]:.4g}") for name in COMPARED]
        return Result(line=f"A tokenizer trained on {self.path}: {path}", grid=table)


def load_whisper(name: str, language: str, runs: Path) -> WhisperRecognizer:
    """Return Whisper `name` (a size or a folder), fetched once into `runs`/whisper."""
    if whisper_unavailable():
        raise KitError(f"Whisper writes down recordings, but {whisper_unavailable()}.")
    folder = whisper_folder(name, Path(runs) / "whisper")
    recognizer = new_whisper(folder, language_code(language), "")
    _ = recognizer.model  # raises now, not after an hour, if it does not know the language
    return recognizer


def transcribe_with_whisper(
    run: str,
    data: str = "",  # a folder of recordings of any length; they are only read
    out: str = "",  # an LJSpeech folder, made or continued
    language: str = "am",  # that is spoken, such as am, en, tr (am)
    whisper: str = "small",  # a size, tiny to large-v3, or a folder (small)
) -> Result:
    """Transcribe the recordings in `data` into `out`, with a Whisper that all runs share."""
    if not (data and out):
        raise KitError("Name the folder of the recordings (--data) and a new one (--out).")
    return transcribe(data, out, load_whisper(whisper, language, run_folder(run).parent))


def transcribe(data: str | Path, out: str | Path, recognizer: WhisperRecognizer) -> Result:
    """Cut the recordings under `data` into clips, write them down, and fill the folder `out`.

    It is an LJSpeech folder: wavs/, metadata.csv (`id|text`, the person's: an edited row is never
    overwritten), transcripts.csv (what Whisper wrote, how sure it is, where the clip is from) and
    losses.jsonl (every second that is in no clip). A clip's id has its place in the recording, so
    an edited text stays with its sound whatever changes. What an interrupted call finished is not
    repeated. Raises DatasetError where there is nothing to read; a recording that cannot be read is
    among the losses.
    """
    data = Path(data).expanduser()
    out = Path(out).expanduser()
    if not data.is_dir():
        raise DatasetError(f"--data takes a folder with recordings, and {data} is none.")
    if out.resolve().is_relative_to(data.resolve()):
        raise KitError(f"--out must be outside --data ({data}), got {out}: name another folder.")
    paths = segmentation.find_audio(data)
    if not paths:
        raise DatasetError(f"{data} holds no recordings: expected .wav, .flac, .mp3 or others.")
    make_folder(out / "wavs")
    read_texts(out)  # a damaged table is reported now, not after an hour
    transcripts.read_transcripts(out)
    names = segmentation.unique_names(data, paths)

    def write_down(path: Path, name: str, tick: Callable) -> dict:
        return _write_down(path, name, out, recognizer, tick)

    clips: dict[str, list[dict]] = {}  # by recording
    losses = []
    results = segmentation.read_each(paths, names, write_down, Ticker("seconds of recordings"))
    for path, result in zip(paths, results):
        source = path.relative_to(data).as_posix()
        if result["rows"]:
            clips[source] = [row | {"source": source} for row in result["rows"]]
        losses += [Span(**loss, file=source) for loss in result["losses"]]
        transcripts.update_tables(out, clips)  # what is finished can be used, whatever comes
    write_lines(out / "losses.jsonl", (loss.as_loss() for loss in losses))
    kept = len(read_texts(out))
    spoken_s = sum(row["end_s"] - row["start_s"] for rows in clips.values() for row in rows)
    line = f"{kept} clips in {out}, of {spoken_s:.0f} s with speech; "
    line += f"{sum(loss.seconds for loss in losses):.0f} s are in no clip, see losses.jsonl"
    silent = {loss.file: f"{loss.file} ({loss.reason})" for loss in losses}
    silent = [silent[file] for file in sorted(silent) if file not in clips]
    if silent:
        line += f"\nNo clip from {join_names(silent)}"
    if kept:
        line += f"\nProofread the texts in 06_more_data, then prepare with --data {out}"
    return Result(line=line, grid=_losses_table(losses))


def _write_down(
    audio: Path, name: str, out: Path, recognizer: WhisperRecognizer, tick: Callable
) -> dict:
    """Write the clips of a recording to `out`/wavs; return their rows, and its losses.

    What Whisper wrote is kept in `out`/transcribed, and a clip is not transcribed again.
    """
    rows = []
    losses = []
    with WindowReader(audio, recognizer) as reader:
        pauses = find_pauses(frame_loudness(reader), reader.total_s)
        spans = plan_clips(pauses)
        losses += gaps(spans, pauses, reader.total_s)
        state = segmentation.file_state(audio)
        for span in spans:
            clip_id = f"{name}_{round(span.start_s * 1000):08d}_{round(span.end_s * 1000):08d}"
            wav = out / "wavs" / f"{clip_id}.wav"
            transcript = cached_result(
                out / "transcribed" / f"{clip_id}.json",
                digest(state, recognizer.fingerprint(), span),
                partial(_transcribe_clip, span, reader, recognizer, wav),
                lambda kept, wav=wav: bool(kept["problem"]) or wav.is_file(),
            )
            if transcript["problem"]:
                losses.append(dataclasses.replace(span, reason=transcript["problem"]))
            else:
                row = {"id": clip_id, "start_s": span.start_s, "end_s": span.end_s}
                rows.append(row | {key: transcript[key] for key in ("text", "confidence")})
            tick(span.end_s)
    losses.sort(key=lambda loss: loss.start_s)
    return {"rows": rows, "losses": [loss.as_loss() for loss in losses]}


def _transcribe_clip(
    span: Span, reader: WindowReader, recognizer: WhisperRecognizer, wav: Path
) -> dict:
    """Return what Whisper understands in `span`, and write its sound to `wav` if that is a text."""
    wave = reader.samples_of(span.start_s, span.end_s).clip(-1, 1)
    transcript = recognizer.write_down(torch.from_numpy(wave), reader.rate)
    if not transcript.problem:
        segmentation.write_clip(wav, wave, reader.rate)
    return vars(transcript)


def frame_loudness(reader: WindowReader) -> Tensor:
    """Return the log-loudness (S,) of each 20 ms of a recording, read a minute at a time."""
    blocks = []
    for start_s in np.arange(0, reader.total_s, BLOCK_S):
        wave = reader.samples_of(start_s, start_s + BLOCK_S).astype(np.float64)
        if len(wave) == 0:
            break
        starts = np.arange(0, len(wave) / reader.rate, FRAME_S) * reader.rate
        starts = np.unique(starts.astype(int).clip(max=len(wave) - 1))
        power = np.add.reduceat((wave - wave.mean()) ** 2, starts)
        power /= np.diff(starts, append=len(wave))
        blocks.append(torch.from_numpy(np.log(power.clip(1e-12)) / 2))
    return torch.cat(blocks) if blocks else torch.zeros(0)


def find_pauses(loudness: Tensor, total_s: float) -> list[Span]:
    """Return the pauses between words, with one (maybe of 0 s) at each end of the recording.

    A frame is quiet beside its minute or beside the whole recording: a minute may be all silence.
    """
    floor = loudness.float().clamp(min=SILENCE)
    quiet = floor <= SILENCE
    if len(floor):
        quiet |= quiet_frames(floor)
        blocks = floor.split(round(BLOCK_S / FRAME_S))
        quiet |= torch.cat([quiet_frames(block) for block in blocks])
    edges = np.flatnonzero(np.diff(quiet.numpy(), prepend=False, append=False)).reshape(-1, 2)
    pauses = []
    for start, stop in edges * FRAME_S:
        at_an_end = start == 0 or stop >= total_s
        if stop - start >= CUTS.least_pause_s or at_an_end:
            pauses.append(Span(start_s=float(start), end_s=min(float(stop), total_s)))
    if not pauses or pauses[0].start_s > 0:
        pauses.insert(0, Span(start_s=0.0, end_s=0.0))
    if pauses[-1].end_s < total_s:
        pauses.append(Span(start_s=total_s, end_s=total_s))
    return pauses


def plan_clips(pauses: list[Span]) -> list[Span]:
    """Return clips from pause to pause, with no long pause inside; most end in longer pauses."""
    places = [
        segmentation.Boundary(
            pause=pause, allowed=True, ends_sentence=pause.seconds >= SENTENCE_PAUSE_S
        )
        for pause in pauses
    ]
    long = [i for i, pause in enumerate(pauses) if pause.seconds > CUTS.longest_pause_s]
    ends = sorted({0, *long, len(pauses) - 1})
    clips = []
    for first, last in zip(ends, ends[1:]):
        between = places[first : last + 1]
        for i, j in segmentation.choose_clips(between, CUTS):
            start_s = round(between[i].beginning_s(CUTS.margin_s), 3)
            end_s = round(between[j].ending_s(CUTS.margin_s), 3)
            clips.append(Span(start_s=start_s, end_s=end_s))
    return clips


def gaps(clips: list[Span], pauses: list[Span], total_s: float) -> list[Span]:
    """Return what is in no clip, with the reason: clips and gaps cover `total_s` exactly."""
    edges = [0.0, *(edge for clip in clips for edge in (clip.start_s, clip.end_s)), total_s]
    spoken = [(a.end_s, b.start_s) for a, b in zip(pauses, pauses[1:])]
    spans = []
    for start_s, end_s in zip(edges[::2], edges[1::2]):
        if end_s - start_s < 1e-6:
            continue
        seconds = [b - a for a, b in spoken if start_s <= a and b <= end_s and b > a]
        reason = "silence, or a pause"
        if seconds:
            limits = f"{CUTS.min_s:.0f} to {CUTS.max_s:.0f} s"
            reason = f"no pauses make a clip of {limits} with {sum(seconds):.1f} s of sound"
        spans.append(Span(start_s=start_s, end_s=end_s, reason=reason))
    return spans


def proofread(out: str | Path) -> ProofreadPanel:
    """Return the panel with the clips in `out` not yet proofread, the least certain first."""
    out = Path(out).expanduser()
    texts = read_texts(out)
    if not texts:
        raise DatasetError(f"{out} has no clips in metadata.csv: transcribe recordings into it.")
    written = transcripts.read_transcripts(out)
    done = transcripts.read_proofread(out)
    clips = [
        WrittenClip(
            id=name,
            wav=out / "wavs" / f"{name}.wav",
            text=text,
            confidence=float(written[name]["confidence"]),
        )
        for name, text in texts.items()
        if name in written and name not in done and text == written[name]["text"]
    ]
    clips.sort(key=lambda clip: clip.confidence)
    return ProofreadPanel(clips, partial(transcripts.save_text, out))
