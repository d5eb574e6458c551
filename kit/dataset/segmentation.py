"""Split long recordings with transcripts into an LJSpeech dataset of clips.

The recogniser is trained on clips of the same language (01_data_prep), so the first hour or so must
be split by hand.
"""

import contextlib
import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import soundfile

from kit.audio.container import SUFFIXES, duration_s
from kit.audio.recognizer import SpeechRecognizer
from kit.base.errors import DatasetError
from kit.base.files import (
    cached_result,
    digest,
    disk_errors,
    encode_wav,
    make_folder,
    read_result,
    require_disk,
    write_atomic,
)
from kit.base.formatting import non_utf8_problem
from kit.base.processes import SINGLE_PROCESS, WorkGroup
from kit.dataset.data_report import Utterance
from kit.dataset.long_alignment import LongAlignConfig, LongAligner, WindowReader, read_tokens
from kit.dataset.segment_plan import SegmentConfig, Span, plan_segments

ROUNDING_S = 0.001  # error of adding up seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnusedAudio:
    """A line of losses.jsonl: audio in no clip, or (of 0 seconds) text that was not recognised."""

    file: str
    start_s: float
    end_s: float
    reason: str


def find_audio(folder: Path) -> list[Path]:
    """Return the audio files under `folder`. Raises DatasetError for a name that is not UTF-8."""
    files = Path(folder).rglob("*")
    recordings = sorted(p for p in files if p.suffix.lower() in SUFFIXES and p.is_file())
    for path in recordings:
        if non_utf8_problem(path):
            raise DatasetError(f"{non_utf8_problem(path)}.")
    return recordings


def find_recordings(folder: Path) -> list[Path]:
    """Return the audio files under `folder`. Raises DatasetError when none has a transcript."""
    recordings = find_audio(folder)
    if not any(p.with_suffix(".txt").is_file() for p in recordings):
        raise DatasetError(
            f"{folder} holds no recording with a transcript beside it: expected NAME.wav (or "
            f"{', '.join(SUFFIXES[1:])}) and NAME.txt, found {len(recordings)} recordings and no "
            ".txt of theirs."
        )
    return recordings


def unique_names(folder: Path, recordings: list[Path]) -> list[str]:
    """Return a plain, unique name for the clips of each recording, from its path in `folder`."""
    names: list[str] = []
    for audio in recordings:
        relative = audio.relative_to(folder).as_posix().removesuffix(audio.suffix)
        plain = re.sub(r"[^\w-]+", "_", relative).strip("_")[:100] or "recording"
        name = plain
        number = 2
        while name in names:
            name = f"{plain}-{number}"
            number += 1
        names.append(name)
    return names


def _read_transcript(path: Path) -> str:
    if not path.is_file():
        raise DatasetError(f"no transcript {path.name} beside it")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path.name} is not valid UTF-8: {error.reason}") from error


def missing_audio(reader: WindowReader) -> list[Span]:
    """Return what the header declares and the file lacks."""
    if not reader.extent.problem:
        return []
    expected_s = reader.extent.expected / reader.rate
    reason = f"the recording is {reader.extent.problem}"
    return [Span(start_s=reader.total_s, end_s=expected_s, reason=reason)]


def seconds_of(audio: Path) -> float:
    """Return the seconds of a recording by its header; 0 where it cannot be read."""
    try:
        return duration_s(audio)
    except (soundfile.LibsndfileError, DatasetError):
        return 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segmenter:
    """Splits recordings at pauses between the words that `recognizer` finds."""

    recognizer: SpeechRecognizer
    cuts: SegmentConfig
    walk: LongAlignConfig

    def segment_folder(
        self,
        folder: Path,
        into: Path,
        progress: Callable = lambda *_: None,
        group: WorkGroup = SINGLE_PROCESS,
    ) -> list[UnusedAudio]:
        """Split recordings under `folder` that have a .txt into the LJSpeech folder `into`.

        Writes wavs/, metadata.csv and losses.jsonl, and returns the losses. Recordings that an
        earlier call finished are not processed again; the processes of `group` share the others.
        `progress(seconds done, total)` counts audio. Raises DatasetError where there is nothing to
        split, DiskError before it starts when the disk is too small, KitError where another process
        failed.
        """
        folder = Path(folder)
        into = Path(into)
        paths = find_recordings(folder)
        make_folder(into / "wavs")
        require_disk(into, sum(path.stat().st_size for path in paths))
        settings = (self.recognizer.fingerprint(), self.cuts, self.walk)
        recordings = []
        for path, name in zip(paths, unique_names(folder, paths)):
            key = digest(name, file_state(path), file_state(path.with_suffix(".txt")), *settings)
            seconds = seconds_of(path)
            recordings.append(LongRecording(audio=path, name=name, key=key, seconds=seconds))
        todo = [r for r in recordings if read_result(r.result_file(into), r.key) is None]
        total_s = sum(recording.seconds for recording in recordings)
        before_s = total_s - sum(recording.seconds for recording in todo)

        def advance(done_s: float) -> None:
            now_s = before_s + done_s
            complete = total_s - now_s < ROUNDING_S
            progress(total_s if complete else now_s, total_s)

        if before_s:
            advance(0.0)
        if todo:
            common = {"into": into, "cuts": self.cuts, "walk": self.walk}
            shares = group.split_evenly(todo)
            jobs = [SegmentJob(recordings=list(share), **common) for share in shares]
            group.do(jobs, self.recognizer, advance)
        rows = []
        losses = []
        for recording in recordings:
            result = read_result(recording.result_file(into), recording.key)
            rows += result["rows"]
            losses += [UnusedAudio(**loss) for loss in result["losses"]]
        write_losses(into, losses)
        write_atomic(into / "metadata.csv", "".join(f"{row['id']}|{row['text']}\n" for row in rows))
        return losses

    def segment_recording(self, audio: Path, name: str, into: Path, progress: Callable) -> dict:
        """Write the clips of one recording to `into`/wavs; return table rows and losses."""
        for leftover in (into / "wavs").glob(f"{name}_[0-9][0-9][0-9][0-9].wav"):
            leftover.unlink()  # of other settings, or an interrupted call
        rows = []
        with contextlib.ExitStack() as stack:
            try:
                text = _read_transcript(audio.with_suffix(".txt"))
                try:
                    reader = stack.enter_context(WindowReader(audio, self.recognizer))
                    tokens = read_tokens(text, self.recognizer, self.walk.language)
                    aligned = LongAligner(reader, tokens, self.walk).run(progress)
                except (soundfile.LibsndfileError, DatasetError) as error:
                    raise DatasetError(f"cannot be read as audio: {error}") from error
                clips, losses = plan_segments(aligned, tokens, reader.total_s, self.cuts)
                losses += missing_audio(reader)
            except DatasetError as error:
                clips = []
                losses = [Span(start_s=0.0, end_s=seconds_of(audio), reason=str(error))]
            for number, clip in enumerate(clips, 1):
                clip_id = f"{name}_{number:04d}"
                rows.append({"id": clip_id, "text": clip.text, "seconds": clip.seconds})
                # No fsync for each of a thousand clips: they count once the result file lists them.
                path = into / "wavs" / f"{clip_id}.wav"
                with disk_errors(path):
                    wave = reader.samples_of(clip.start_s, clip.end_s)
                    path.write_bytes(encode_wav(wave, reader.rate))
        unused = []
        for span in losses:
            values = {"start_s": span.start_s, "end_s": span.end_s, "reason": span.reason}
            unused.append({"file": audio.name, **values})
        return {"rows": rows, "losses": unused}

    def segment_rows(
        self,
        rows: list[Utterance],
        into: Path,
        progress: Callable = lambda *_: None,
        group: WorkGroup = SINGLE_PROCESS,
    ) -> list[Utterance]:
        """Split the recordings of `rows`, too long for the model, into clips under `into`.

        A clip keeps speaker, split and table line of its row; its id is the row's with a number:
        ID_0001, ID_0002 ... Originals are copied.
        """
        copies = Path(into) / "whole"
        clips = Path(into) / "clips"
        shutil.rmtree(copies, ignore_errors=True)
        copies.mkdir(parents=True)
        row_of = {}
        for number, row in enumerate(rows, 1):
            audio = copies / f"{number:06d}{Path(row.audio).suffix}"
            shutil.copy2(row.audio, audio)  # with its date: finished ones are not split again
            audio.with_suffix(".txt").write_text(row.text, encoding="utf-8")
            shutil.copystat(row.audio, audio.with_suffix(".txt"))
            row_of[audio.stem] = row
        if rows:
            self.segment_folder(copies, clips, progress, group)
        shutil.rmtree(copies)
        table = clips / "metadata.csv"
        lines = table.read_text(encoding="utf-8").splitlines() if rows else []
        utterances = []
        for line in lines:
            name, text = line.split("|")
            number, part = name.split("_")
            audio = clips / "wavs" / f"{name}.wav"
            row = row_of[number]
            values = {"id": f"{row.id}_{part}", "audio": str(audio), "text": text}
            utterances.append(dataclasses.replace(row, **values, seconds=seconds_of(audio)))
        return utterances


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongRecording:
    audio: Path
    name: str  # prefix of its clips
    key: str  # changes with the recording, its transcript, the recogniser and the settings
    seconds: float

    def result_file(self, into: Path) -> Path:
        """Return the file that is written once all clips are there."""
        return into / "cut" / f"{self.name}.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentJob:
    """The recordings that one process splits."""

    recordings: list[LongRecording]
    into: Path
    cuts: SegmentConfig
    walk: LongAlignConfig

    def run(self, recognizer: SpeechRecognizer, advance: Callable[[float], None]) -> None:
        segmenter = Segmenter(recognizer=recognizer, cuts=self.cuts, walk=self.walk)
        for recording in self.recordings:
            reported_s = 0.0

            def report(now_s: float, _total_s: float, recording: LongRecording = recording) -> None:
                nonlocal reported_s
                if now_s < recording.seconds:  # the end is reported once the clips are written
                    advance(now_s - reported_s)
                    reported_s = now_s

            place = (recording.audio, recording.name, self.into)
            make = partial(segmenter.segment_recording, *place, report)
            cached_result(recording.result_file(self.into), recording.key, make)
            advance(recording.seconds - reported_s)


def file_state(path: Path) -> tuple:
    return (path.stat().st_size, path.stat().st_mtime_ns) if path.is_file() else ()


def write_losses(into: Path, losses: list[UnusedAudio]) -> None:
    """Write losses.jsonl, a line a loss."""
    lines = (json.dumps(dataclasses.asdict(loss), ensure_ascii=False) for loss in losses)
    write_atomic(into / "losses.jsonl", "".join(f"{line}\n" for line in lines))
