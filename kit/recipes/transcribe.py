"""`python -m kit transcribe`: recordings without text become clips with texts, to be proofread.

Recordings of any length are cut at pauses, and Whisper writes down each clip. The result is an
LJSpeech folder: wavs/, metadata.csv (`id|text`, the person's: an edited row is never overwritten),
transcripts.csv (what Whisper wrote, how sure it is, where the clip is from) and losses.jsonl (every
second that is in no clip). A clip's id has its place in the recording, so an edited text stays with
its sound whatever changes.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import soundfile
import torch
from torch import Tensor

from kit.audio.clip import FRAME_S
from kit.base.errors import DatasetError, DiskError, KitError
from kit.base.files import digest, disk_errors, make_folder
from kit.base.formatting import join_names
from kit.base.result_cache import cached_result
from kit.base.wav import encode_wav
from kit.dataset.alignment import quiet_frames
from kit.dataset.long_alignment import Pause, WindowReader
from kit.dataset.segment_plan import Boundary, SegmentConfig, Span, choose_clips
from kit.dataset.segmentation import (
    UnusedAudio,
    file_state,
    find_audio,
    missing_audio,
    seconds_of,
    unique_names,
    write_losses,
)
from kit.dataset.transcripts import (
    read_proofread,
    read_texts,
    read_transcripts,
    save_text,
    update_tables,
)
from kit.notebook.panel.proofread_panel import ProofreadPanel, WrittenClip
from kit.notebook.progress_line import Ticker
from kit.notebook.result import Result
from kit.recipes.more_data import losses_table
from kit.releases.whisper import (
    WhisperRecognizer,
    new_whisper,
    whisper_folder,
    whisper_unavailable,
)
from kit.text.normalize import language_code

# No word has so long a silence inside. Longer pauses end clips first, long ones always.
CUTS = SegmentConfig(min_s=2.0, max_s=12.0, least_pause_s=0.2, longest_pause_s=1.0)
SENTENCE_PAUSE_S = 0.45
SILENCE = -6.9  # log-loudness, -60 dB: quieter frames are silent whatever is beside them
BLOCK_S = 60.0  # read at a time
PART_CLIPS = 20  # written down between two saves


def load_whisper(name: str, language: str, runs: Path) -> WhisperRecognizer:
    """Return Whisper `name` (a size or a folder), fetched once into `runs`/whisper."""
    if whisper_unavailable():
        raise KitError(f"Whisper writes down recordings, but {whisper_unavailable()}.")
    folder = whisper_folder(name, Path(runs) / "whisper", Ticker("bytes"))
    recognizer = new_whisper(folder, language_code(language), "")
    _ = recognizer.model  # raises now, not after an hour, if it does not know the language
    return recognizer


def transcribe(data: str | Path, out: str | Path, recognizer: WhisperRecognizer) -> Result:
    """Cut the recordings under `data` into clips, write them down, and fill the folder `out`.

    What an interrupted call finished is not repeated. Raises DatasetError where there is nothing to
    read; a recording that cannot be read is among the losses.
    """
    data = Path(data).expanduser()
    out = Path(out).expanduser()
    if not data.is_dir():
        raise DatasetError(f"--data takes a folder with recordings, and {data} is none.")
    if out.resolve().is_relative_to(data.resolve()):
        raise KitError(f"--out must be outside --data ({data}), got {out}: name another folder.")
    paths = find_audio(data)
    if not paths:
        raise DatasetError(f"{data} holds no recordings: expected .wav, .flac, .mp3 or others.")
    make_folder(out / "wavs")
    read_texts(out)  # a damaged table is reported now, not after an hour
    read_transcripts(out)
    seconds = {path: seconds_of(path) for path in paths}
    total_s = sum(seconds.values())
    progress = Ticker("seconds of recordings")
    done_s = 0.0
    clips: dict[str, list[dict]] = {}
    losses = []

    def advance(now_s: float) -> None:
        progress(min(done_s + now_s, total_s), max(total_s, 1.0))

    for path, name in zip(paths, unique_names(data, paths)):
        source = path.relative_to(data).as_posix()
        key = digest(name, file_state(path), recognizer.fingerprint(), CUTS)
        result_file = out / "transcribed" / f"{name}.json"
        make = partial(_transcribe_recording, path, result_file, key, recognizer, advance)
        try:
            result = cached_result(result_file, key, make, partial(_has_clips, out))
            clips[source] = [row | {"source": source} for row in result["clips"]]
            lost = result["losses"]
        except DiskError:
            raise
        except (soundfile.LibsndfileError, DatasetError, OSError) as error:  # tried again next time
            reason = f"cannot be read as audio: {error}"
            lost = [{"start_s": 0.0, "end_s": seconds[path], "reason": reason}]
        losses += [UnusedAudio(file=source, **loss) for loss in lost]
        done_s += seconds[path]
        advance(0.0)
        update_tables(out, clips)  # what is finished can be used, whatever comes
    write_losses(out, losses)
    return _summary(out, clips, losses)


def _summary(out: Path, clips: dict[str, list[dict]], losses: list[UnusedAudio]) -> Result:
    kept = len(read_texts(out))
    spoken_s = sum(row["end_s"] - row["start_s"] for rows in clips.values() for row in rows)
    lost_s = sum(loss.end_s - loss.start_s for loss in losses)
    line = (
        f"{kept} clips in {out}, of {spoken_s:.0f} s with speech; "
        f"{lost_s:.0f} s are in no clip, see losses.jsonl"
    )
    silent = sorted({loss.file for loss in losses if not clips.get(loss.file)})
    if silent:
        reasons = {loss.file: loss.reason for loss in losses}
        line += f"\nNo clip from {join_names([f'{file} ({reasons[file]})' for file in silent])}"
    if kept:
        line += f"\nProofread the texts in 06_more_data, then prepare with --data {out}"
    return Result(line=line, grid=losses_table(losses))


def _transcribe_recording(
    audio: Path,
    result_file: Path,
    key: str,
    recognizer: WhisperRecognizer,
    advance: Callable[[float], None],
) -> dict:
    """Write the clips of one recording to wavs/; return their rows, and the losses."""
    out = result_file.parent.parent
    rows = []
    with WindowReader(audio, recognizer) as reader:
        pauses = find_pauses(frame_loudness(reader), reader.total_s)
        spans = plan_clips(pauses)
        losses = [*gaps(spans, pauses, reader.total_s), *missing_audio(reader)]
        parts = [result_file.with_suffix(f".{n}.json") for n in range(0, len(spans), PART_CLIPS)]
        for number, part in enumerate(parts):
            own = spans[number * PART_CLIPS :][:PART_CLIPS]
            make = partial(_write_down, own, reader, recognizer, out / "wavs", result_file.stem)
            done = cached_result(part, digest(key, *own), make, partial(_has_clips, out))
            rows += done["clips"]
            losses += [Span(**loss) for loss in done["losses"]]
            advance(own[-1].end_s)
    lost = [
        {"start_s": loss.start_s, "end_s": loss.end_s, "reason": loss.reason}
        for loss in sorted(losses, key=lambda loss: loss.start_s)
    ]
    return {"clips": rows, "losses": lost}


def _write_down(
    spans: list[Span], reader: WindowReader, recognizer: WhisperRecognizer, wavs: Path, name: str
) -> dict:
    """Transcribe `spans` of a recording, and write those with a text to `wavs`."""
    rows = []
    losses = []
    for span in spans:
        wave = reader.samples_of(span.start_s, span.end_s).clip(-1, 1)
        transcript = recognizer.write_down(torch.from_numpy(wave), reader.rate)
        place = {"start_s": span.start_s, "end_s": span.end_s}
        if transcript.problem:
            losses.append(place | {"reason": transcript.problem})
            continue
        clip_id = f"{name}_{round(span.start_s * 1000):08d}_{round(span.end_s * 1000):08d}"
        path = wavs / f"{clip_id}.wav"
        with disk_errors(path):
            path.write_bytes(encode_wav(wave, reader.rate))
        words = {"text": transcript.text, "confidence": transcript.confidence}
        rows.append({"id": clip_id} | words | place)
    return {"clips": rows, "losses": losses}


def _has_clips(out: Path, result: dict) -> bool:
    return all((out / "wavs" / f"{row['id']}.wav").is_file() for row in result["clips"])


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


def find_pauses(loudness: Tensor, total_s: float) -> list[Pause]:
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
            pauses.append(Pause(start_s=float(start), end_s=min(float(stop), total_s)))
    if not pauses or pauses[0].start_s > 0:
        pauses.insert(0, Pause(start_s=0.0, end_s=0.0))
    if pauses[-1].end_s < total_s:
        pauses.append(Pause(start_s=total_s, end_s=total_s))
    return pauses


def plan_clips(pauses: list[Pause]) -> list[Span]:
    """Return clips from pause to pause, with no long pause inside; most end in longer pauses."""
    places = [
        Boundary(pause=pause, allowed=True, ends_sentence=pause.seconds >= SENTENCE_PAUSE_S)
        for pause in pauses
    ]
    long = [i for i, pause in enumerate(pauses) if pause.seconds > CUTS.longest_pause_s]
    ends = sorted({0, *long, len(pauses) - 1})
    clips = []
    for first, last in zip(ends, ends[1:]):
        run = places[first : last + 1]
        for i, j in choose_clips(run, CUTS):
            start_s = round(run[i].beginning_s(CUTS.margin_s), 3)
            end_s = round(run[j].ending_s(CUTS.margin_s), 3)
            clips.append(Span(start_s=start_s, end_s=end_s))
    return clips


def gaps(clips: list[Span], pauses: list[Pause], total_s: float) -> list[Span]:
    """Return what is in no clip, with the reason: clips and gaps cover `total_s` exactly."""
    edges = [0.0, *(edge for clip in clips for edge in (clip.start_s, clip.end_s)), total_s]
    spoken = [(a.end_s, b.start_s) for a, b in zip(pauses, pauses[1:])]
    found = []
    for start_s, end_s in zip(edges[::2], edges[1::2]):
        if end_s - start_s < 1e-6:
            continue
        seconds = [b - a for a, b in spoken if start_s <= a and b <= end_s and b > a]
        reason = "silence, or a pause"
        if seconds:
            limits = f"{CUTS.min_s:.0f} to {CUTS.max_s:.0f} s"
            reason = f"no pauses make a clip of {limits} with {sum(seconds):.1f} s of sound"
        found.append(Span(start_s=start_s, end_s=end_s, reason=reason))
    return found


def proofread(out: str | Path) -> ProofreadPanel:
    """Return the panel with the clips in `out` that nobody has proofread, the least certain first.

    Raises DatasetError where there are no clips.
    """
    out = Path(out).expanduser()
    texts = read_texts(out)
    if not texts:
        raise DatasetError(f"{out} has no clips in metadata.csv: transcribe recordings into it.")
    written = read_transcripts(out)
    done = read_proofread(out)
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
    return ProofreadPanel(sorted(clips, key=lambda clip: clip.confidence), partial(save_text, out))
