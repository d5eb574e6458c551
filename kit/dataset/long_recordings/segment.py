"""A folder of long recordings with transcripts becomes a dataset in LJSpeech layout.

`cut_rows` does it for rows of a dataset that are too long for the model. `cut_long` finds the
words of `NAME.txt` in `NAME.wav`, cuts it in the pauses, and writes the clips, `metadata.csv` and a
ledger of every second that is in no clip. The recogniser is one that 01_data_prep trained on
recordings of the same language that were clips already: a first hour or so must come from elsewhere
or be cut by hand. Originals are only read. Knows nothing of where words or cuts are found.
"""

import dataclasses
import io
import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import soundfile

from kit.audio.container import UnreadableError, open_sound
from kit.audio.recognizer import Recognizer
from kit.base.files import digest, make_folder, require_disk, write_atomic, writing
from kit.base.words import no_utf8
from kit.dataset.ledger import Utterance
from kit.dataset.long_recordings.cut import CutConfig, Span, plan_cuts
from kit.dataset.long_recordings.transcript import Walk, WalkConfig, read_tokens
from kit.dataset.long_recordings.windows import Listener

AUDIO = (".wav", ".flac", ".ogg", ".mp3")


class CutError(ValueError):
    """A folder that holds no long recordings with transcripts; the message says what it needs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
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
        if no_utf8(path):
            raise CutError(f"{no_utf8(path)}.")
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
        inside = audio.relative_to(folder).with_suffix("").as_posix()
        name = plain = re.sub(r"[^\w-]+", "_", inside).strip("_")[:100] or "recording"
        number = 2
        while name in names:
            name = f"{plain}-{number}"
            number += 1
        names.append(name)
    return names


def cut_recording(
    audio: Path,
    name: str,
    recognizer: Recognizer,
    into: Path,
    config: CutConfig,
    walk: WalkConfig,
    progress: Callable = lambda *_: None,
) -> tuple[list[dict], list[Loss]]:
    """Write the clips of one recording to `into`/wavs; their table rows, and what was lost."""
    _forget(into, name)
    if not audio.with_suffix(".txt").is_file():
        return [], [_whole(audio, f"no transcript {audio.stem}.txt beside it")]
    try:
        text = audio.with_suffix(".txt").read_text(encoding="utf-8-sig")
        listener = Listener(audio, recognizer)
        tokens = read_tokens(text, recognizer, walk.language)
        heard = Walk(listener, tokens, walk).run(progress)
    except UnicodeDecodeError as error:
        return [], [_whole(audio, f"{audio.stem}.txt is not valid UTF-8: {error.reason}")]
    except (soundfile.LibsndfileError, UnreadableError) as error:
        return [], [_whole(audio, f"cannot be read as audio: {error}")]
    clips, losses = plan_cuts(heard, tokens, listener.total_s, config)
    rows = []
    for number, clip in enumerate(clips, 1):
        rows.append({"id": f"{name}_{number:04d}", "text": clip.text, "seconds": clip.seconds})
        # No fsync for each of a thousand clips: they count only once the recording's mark stands.
        path = into / "wavs" / f"{rows[-1]['id']}.wav"
        with writing(path):
            path.write_bytes(_samples(listener, clip))
    losses += _missing(listener)
    return rows, [
        Loss(file=audio.name, start_s=s.start_s, end_s=s.end_s, reason=s.reason) for s in losses
    ]


def _missing(listener: Listener) -> list[Span]:
    """What a recording lacks of the sound that its header promises."""
    if not listener.extent.problem:
        return []
    promised_s = listener.extent.promised / listener.rate
    reason = f"the recording is {listener.extent.problem}"
    return [Span(start_s=listener.total_s, end_s=promised_s, reason=reason)]


def _whole(audio: Path, reason: str) -> Loss:
    return Loss(file=audio.name, start_s=0.0, end_s=_seconds(audio), reason=reason)


def _seconds(audio: Path) -> float:
    try:
        with open_sound(audio) as (sound, told):
            return told.promised / sound.samplerate
    except (soundfile.LibsndfileError, UnreadableError):
        return 0.0


def _samples(listener: Listener, clip: Span) -> bytes:
    """The clip as a mono 16-bit WAV at the recording's own rate."""
    wave = listener.samples_of(clip.start_s, clip.end_s)
    file = io.BytesIO()
    soundfile.write(file, np.clip(wave, -1, 1), listener.rate, "PCM_16", format="WAV")
    return file.getvalue()


def cut_long(
    folder: Path,
    recognizer: Recognizer,
    into: Path,
    config: CutConfig,
    walk: WalkConfig,
    progress: Callable = lambda *_: None,
) -> list[Loss]:
    """Cut every recording under `folder` with a .txt beside it into the LJSpeech folder `into`.

    Writes wavs/, metadata.csv and losses.jsonl, and returns the losses. A recording that an earlier
    call finished is not heard again. `progress(seconds done, in all)` counts audio. Raises CutError
    where there is nothing to cut, DiskError before it starts when the disk is too small.
    """
    folder = Path(folder)
    into = Path(into)
    recordings = find_recordings(folder)
    make_folder(into / "wavs")
    require_disk(into, sum(audio.stat().st_size for audio in recordings))
    lengths_s = [_seconds(audio) for audio in recordings]
    total_s = sum(lengths_s)
    weights = recognizer.fingerprint()
    rows = []
    losses = []
    before_s = 0.0
    for audio, name, length_s in zip(recordings, names_of(folder, recordings), lengths_s):
        key = digest(name, _state(audio), _state(audio.with_suffix(".txt")), weights, config, walk)
        mark = into / "cut" / f"{name}.json"
        done = _finished(mark)
        if done.get("key") != key:
            tell = shifted(progress, before_s, total_s)
            made = cut_recording(audio, name, recognizer, into, config, walk, tell)
            done = {"key": key, "rows": made[0], "losses": [*map(dataclasses.asdict, made[1])]}
            write_atomic(mark, json.dumps(done, ensure_ascii=False))
        rows = rows + done["rows"]
        losses = losses + [Loss(**loss) for loss in done["losses"]]
        before_s += length_s
        progress(before_s, total_s)
    _write_tables(into, rows, losses)
    return losses


def shifted(progress: Callable, before_s: float, total_s: float) -> Callable:
    """`progress` of the whole work, told of one recording that begins after `before_s` of it."""

    def tell(done_s: float, _length_s: float) -> None:
        progress(before_s + done_s, total_s)

    return tell


def cut_rows(
    rows: list[Utterance],
    recognizer: Recognizer,
    into: Path,
    config: CutConfig,
    walk: WalkConfig,
    progress: Callable = lambda *_: None,
) -> list[Utterance]:
    """The clips that recordings of `rows` make when they are cut in pauses, under `into`.

    For recordings longer than the model has positions for. A clip keeps speaker, split and place in
    the table of its row, whose id its own begins with: ID_0001, ID_0002 ... Originals are copied.
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
        cut_long(whole, recognizer, clips, config, walk, progress)
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


def _finished(mark: Path) -> dict:
    """What an earlier call noted of a recording; {} to hear it again, where that is damaged."""
    try:
        done = json.loads(mark.read_bytes()) if mark.is_file() else {}
        if not isinstance(done, dict):
            raise ValueError(f"it is {type(done).__name__}")
        return done
    except (ValueError, RecursionError) as error:
        warnings.warn(f"{mark} is damaged ({error}): its recording is heard again.", stacklevel=3)
        return {}


def _state(path: Path) -> tuple:
    return (path.stat().st_size, path.stat().st_mtime_ns) if path.is_file() else ()


def _forget(into: Path, name: str) -> None:
    """Remove clips that another configuration, or an interrupted call, left of a recording."""
    for clip in (into / "wavs").glob(f"{name}_[0-9][0-9][0-9][0-9].wav"):
        clip.unlink()


def _write_tables(into: Path, rows: list[dict], losses: list[Loss]) -> None:
    table = "".join(f"{row['id']}|{row['text']}\n" for row in rows)
    lines = (json.dumps(dataclasses.asdict(loss), ensure_ascii=False) for loss in losses)
    write_atomic(into / "losses.jsonl", "".join(f"{line}\n" for line in lines))
    write_atomic(into / "metadata.csv", table)
