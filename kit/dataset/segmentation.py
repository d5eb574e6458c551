"""A folder of long recordings with transcripts becomes a dataset in LJSpeech layout.

`Segmenter.segment_folder` finds the words of `NAME.txt` in `NAME.wav`, cuts it in the pauses, and
writes the clips, `metadata.csv` and a report of every second that is in no clip; `segment_rows`
does it for rows of a dataset that are too long for the model. The recogniser is one that
01_data_prep trained on clips of the same language, so a first hour must come from elsewhere or
be segmented by hand. Originals are only read.
"""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import soundfile

from kit.audio.container import open_audio
from kit.audio.recognizer import SpeechRecognizer
from kit.base.errors import DatasetError
from kit.base.files import digest, disk_errors, make_folder, require_disk, write_atomic
from kit.base.formatting import non_utf8_problem
from kit.base.result_cache import cached_result, read_result
from kit.base.wav import encode_wav
from kit.base.work_group import SINGLE_PROCESS, WorkGroup
from kit.dataset.data_report import Utterance
from kit.dataset.long_alignment import LongAlignConfig, LongAligner, read_tokens
from kit.dataset.long_recordings.cut import SegmentConfig, Span, plan_cuts
from kit.dataset.long_recordings.windows import Listener

ROUNDING_S = 0.001  # so much may be lost where seconds are added up
AUDIO = (".wav", ".flac", ".ogg", ".mp3")


class CutError(ValueError):
    """A folder that holds no long recordings with transcripts; the message says what it needs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnusedAudio:
    """A row of the ledger: audio in no clip, or (of 0 seconds) text that was not heard."""

    file: str
    start_s: float
    end_s: float
    reason: str


def find_recordings(folder: Path) -> list[Path]:
    """The audio files under `folder`. Raises CutError when none has a transcript beside it."""
    here = Path(folder).rglob("*")
    found = sorted(p for p in here if p.suffix.lower() in AUDIO and p.is_file())
    for path in found:
        if non_utf8_problem(path):
            raise CutError(f"{non_utf8_problem(path)}.")
    if not any(p.with_suffix(".txt").is_file() for p in found):
        raise CutError(
            f"{folder} holds no recording with a transcript beside it: expected NAME.wav (or "
            f".flac, .ogg, .mp3) and NAME.txt, found {len(found)} recordings and no .txt of theirs."
        )
    return found


def names_of(folder: Path, recordings: list[Path]) -> list[str]:
    """A name for the clips of each recording: its path in `folder`, plain and never used twice."""
    names: list[str] = []
    for audio in recordings:
        inside = audio.relative_to(folder).as_posix().removesuffix(audio.suffix)
        name = plain = re.sub(r"[^\w-]+", "_", inside).strip("_")[:100] or "recording"
        number = 2
        while name in names:
            name = f"{plain}-{number}"
            number += 1
        names.append(name)
    return names


def _missing(listener: Listener) -> list[Span]:
    """What a recording lacks of the sound that its header promises."""
    if not listener.extent.problem:
        return []
    promised_s = listener.extent.expected / listener.rate
    reason = f"the recording is {listener.extent.problem}"
    return [Span(start_s=listener.total_s, end_s=promised_s, reason=reason)]


def _seconds(audio: Path) -> float:
    try:
        with open_audio(audio) as (sound, told):
            return told.expected / sound.samplerate
    except (soundfile.LibsndfileError, DatasetError):
        return 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segmenter:
    """Cuts recordings where `recognizer` hears their words to end."""

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
        """Cut every recording under `folder` with a .txt beside it into the LJSpeech folder `into`.

        Writes wavs/, metadata.csv and losses.jsonl, and returns the losses. A recording that an
        earlier call finished is not heard again; the others are shared by the processes of `group`.
        `progress(seconds done, in all)` counts audio. Raises CutError where there is nothing to
        cut, DiskError before it starts when the disk is too small, KitError where another process
        failed.
        """
        folder = Path(folder)
        into = Path(into)
        recordings = find_recordings(folder)
        make_folder(into / "wavs")
        require_disk(into, sum(audio.stat().st_size for audio in recordings))
        hearing = (self.recognizer.fingerprint(), self.cuts, self.walk)
        whole = []
        for audio, name in zip(recordings, names_of(folder, recordings)):
            key = digest(name, _state(audio), _state(audio.with_suffix(".txt")), *hearing)
            whole.append(LongRecording(audio=audio, name=name, key=key, seconds=_seconds(audio)))
        todo = [each for each in whole if read_result(each.kept_in(into), each.key) is None]
        total_s = sum(recording.seconds for recording in whole)
        before_s = total_s - sum(recording.seconds for recording in todo)

        def tell(done_s: float) -> None:
            now_s = before_s + done_s
            at_end = total_s - now_s < ROUNDING_S
            progress(total_s if at_end else now_s, total_s)

        if before_s:
            tell(0.0)
        jobs = []
        for share in group.split_evenly(todo):
            jobs.append(
                SegmentJob(recordings=list(share), into=into, cuts=self.cuts, walk=self.walk)
            )
        if todo:
            group.do(jobs, self.recognizer, tell)
        rows = []
        losses = []
        for recording in whole:
            done = read_result(recording.kept_in(into), recording.key)
            rows += done["rows"]
            losses += [UnusedAudio(**loss) for loss in done["losses"]]
        _write_tables(into, rows, losses)
        return losses

    def segment_recording(self, audio: Path, name: str, into: Path, progress: Callable) -> dict:
        """Write the clips of one recording to `into`/wavs; their table rows, and what was lost."""
        _forget(into, name)
        try:
            rows, lost = self._write_clips(audio, name, into, progress)
        except CutError as error:
            rows = []
            lost = [Span(start_s=0.0, end_s=_seconds(audio), reason=str(error))]
        losses = [
            UnusedAudio(file=audio.name, start_s=span.start_s, end_s=span.end_s, reason=span.reason)
            for span in lost
        ]
        return {"rows": rows, "losses": [dataclasses.asdict(loss) for loss in losses]}

    def _write_clips(
        self, audio: Path, name: str, into: Path, progress: Callable
    ) -> tuple[list[dict], list[Span]]:
        """Table rows of the clips, and spans in none. Raises CutError where nothing can be cut."""
        if not audio.with_suffix(".txt").is_file():
            raise CutError(f"no transcript {audio.stem}.txt beside it")
        try:
            text = audio.with_suffix(".txt").read_text(encoding="utf-8-sig")
            listener = Listener(audio, self.recognizer)
            tokens = read_tokens(text, self.recognizer, self.walk.language)
            heard = LongAligner(listener, tokens, self.walk).run(progress)
        except UnicodeDecodeError as error:
            raise CutError(f"{audio.stem}.txt is not valid UTF-8: {error.reason}") from error
        except (soundfile.LibsndfileError, DatasetError) as error:
            raise CutError(f"cannot be read as audio: {error}") from error
        clips, lost = plan_cuts(heard, tokens, listener.total_s, self.cuts)
        rows = []
        for number, clip in enumerate(clips, 1):
            clip_id = f"{name}_{number:04d}"
            rows.append({"id": clip_id, "text": clip.text, "seconds": clip.seconds})
            # No fsync for each of a thousand clips: they count only once all of them are noted.
            path = into / "wavs" / f"{clip_id}.wav"
            with disk_errors(path):
                wave = listener.samples_of(clip.start_s, clip.end_s)
                path.write_bytes(encode_wav(wave, listener.rate))
        return rows, lost + _missing(listener)

    def segment_rows(
        self,
        rows: list[Utterance],
        into: Path,
        progress: Callable = lambda *_: None,
        group: WorkGroup = SINGLE_PROCESS,
    ) -> list[Utterance]:
        """The clips that recordings of `rows` make when they are cut in pauses, under `into`.

        For recordings longer than the model has positions for. A clip keeps speaker, split and
        place in the table of its row, whose id its own begins with: ID_0001, ID_0002 ... Originals
        are copied.
        """
        whole = Path(into) / "whole"
        clips = Path(into) / "clips"
        shutil.rmtree(whole, ignore_errors=True)
        whole.mkdir(parents=True)
        owner = {}
        for number, row in enumerate(rows, 1):
            audio = whole / f"{number:06d}{Path(row.audio).suffix}"
            shutil.copy2(row.audio, audio)  # with its date: what was cut before is not cut again
            audio.with_suffix(".txt").write_text(row.text, encoding="utf-8")
            shutil.copystat(row.audio, audio.with_suffix(".txt"))
            owner[audio.stem] = row
        if rows:
            self.segment_folder(whole, clips, progress, group)
        shutil.rmtree(whole)
        table = clips / "metadata.csv"
        lines = table.read_text(encoding="utf-8").splitlines() if rows else []
        made = []
        for line in lines:
            name, text = line.split("|")
            number, part = name.split("_")
            audio = clips / "wavs" / f"{name}.wav"
            row = owner[number]
            made.append(
                dataclasses.replace(
                    row, id=f"{row.id}_{part}", audio=str(audio), text=text, seconds=_seconds(audio)
                )
            )
        return made


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongRecording:
    """One that is to be cut."""

    audio: Path
    name: str  # what those of its clips begin with
    key: str  # changes with the recording, its transcript, and how it is heard and cut
    seconds: float

    def kept_in(self, into: Path) -> Path:
        """What was made of it, once all of its clips are there."""
        return into / "cut" / f"{self.name}.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentJob:
    """The recordings that one process cuts; each is heard by itself, so any share will do."""

    recordings: list[LongRecording]
    into: Path
    cuts: SegmentConfig
    walk: LongAlignConfig

    def run(self, recognizer: SpeechRecognizer, tell: Callable[[float], None]) -> None:
        cutter = Segmenter(recognizer=recognizer, cuts=self.cuts, walk=self.walk)
        for recording in self.recordings:
            self._cut(recording, cutter, tell)

    def _cut(
        self, recording: LongRecording, cutter: Segmenter, tell: Callable[[float], None]
    ) -> None:
        heard_s = 0.0

        def hear(now_s: float, _length_s: float) -> None:
            nonlocal heard_s
            if now_s < recording.seconds:  # its end counts once its clips are kept
                tell(now_s - heard_s)
                heard_s = now_s

        cut = partial(cutter.segment_recording, recording.audio, recording.name, self.into, hear)
        cached_result(recording.kept_in(self.into), recording.key, cut)
        tell(recording.seconds - heard_s)


def _state(path: Path) -> tuple:
    return (path.stat().st_size, path.stat().st_mtime_ns) if path.is_file() else ()


def _forget(into: Path, name: str) -> None:
    """Remove clips that another configuration, or an interrupted call, left of a recording."""
    for clip in (into / "wavs").glob(f"{name}_[0-9][0-9][0-9][0-9].wav"):
        clip.unlink()


def _write_tables(into: Path, rows: list[dict], losses: list[UnusedAudio]) -> None:
    table = "".join(f"{row['id']}|{row['text']}\n" for row in rows)
    lines = (json.dumps(dataclasses.asdict(loss), ensure_ascii=False) for loss in losses)
    write_atomic(into / "losses.jsonl", "".join(f"{line}\n" for line in lines))
    write_atomic(into / "metadata.csv", table)
