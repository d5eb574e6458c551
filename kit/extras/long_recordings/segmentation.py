"""Split long recordings with transcripts into an LJSpeech dataset of clips.

The recogniser is trained on clips of the same language (01_data_prep), so the first hour or so must
be split by hand. A clip begins and ends in a pause, at a sentence's end if possible; the choice is
optimal, by dynamic programming. Every second is in a clip or among the losses, with the reason.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from kit.audio.container import SUFFIXES, duration_s
from kit.audio.recognizer import SpeechRecognizer
from kit.base import files
from kit.base.config import require
from kit.base.errors import DatasetError, DiskError
from kit.dataset.manifest import Utterance, write_lines
from kit.extras.long_recordings import alignment
from kit.extras.long_recordings.alignment import AlignedToken, Span, Token, WindowReader

EDGE_S = 0.1  # a boundary this near to an end of the recording needs no pause
NEAR_S = 0.4  # a pause further from a word has something else in between
LOSS_COST = 10.0  # of a second in no clip; a clip that ends within a sentence costs 1
JOIN_COST = 0.2  # of each further sentence in one clip
EXCERPT_WORDS = 12  # in the reason of a loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentConfig:
    min_s: float = 1.0  # shortest clip
    max_s: float = 14.0  # longest clip: what the model has positions for
    least_pause_s: float = 0.1  # no boundary in a shorter pause
    longest_pause_s: float = 1.0  # nor a longer stretch without text inside a clip
    margin_s: float = 0.15  # of silence left at both ends of a clip, at most

    def __post_init__(self):
        require(self.min_s < self.max_s <= 3600, self, "max_s", f"above {self.min_s}, up to 3600.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Boundary:
    """A place between two words (or beside one) where a clip may begin or end."""

    pause: Span
    allowed: bool
    ends_sentence: bool

    def ending_s(self, margin_s: float) -> float:
        """Return where a clip before it ends: mid-pause, or `margin_s` into a long pause."""
        return min(self.pause.start_s + margin_s, (self.pause.start_s + self.pause.end_s) / 2)

    def beginning_s(self, margin_s: float) -> float:
        return max(self.pause.end_s - margin_s, (self.pause.start_s + self.pause.end_s) / 2)


def split_runs(
    aligned: list[AlignedToken], tokens: list[Token], config: SegmentConfig
) -> Iterator[list[AlignedToken]]:
    """Yield stretches of `aligned` with no unrecognised word and no long gap inside."""
    run: list[AlignedToken] = []
    for item in aligned:
        between = tokens[run[-1].number + 1 : item.number] if run else []
        is_far = bool(run) and item.start_s - run[-1].end_s > config.longest_pause_s
        if is_far or any(token.ids for token in between):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def boundaries(run: list[AlignedToken], total_s: float, config: SegmentConfig) -> list[Boundary]:
    """Return the len(run) + 1 boundaries of a run of words; clip (i, j) holds run[i:j]."""
    first, last = run[0], run[-1]
    pauses = [item.before for item in run] + [last.after]
    ends = [True] + [item.token.ends_sentence for item in run]
    allowed = [pause.seconds >= config.least_pause_s for pause in pauses]
    allowed[0] &= first.start_s - first.before.end_s <= NEAR_S
    allowed[0] |= first.start_s <= EDGE_S
    allowed[-1] &= last.after.start_s - last.end_s <= NEAR_S
    allowed[-1] |= last.end_s >= total_s - EDGE_S
    places = zip(pauses, allowed, ends)
    return [Boundary(pause=pause, allowed=ok, ends_sentence=end) for pause, ok, end in places]


def choose_clips(places: list[Boundary], config: SegmentConfig) -> list[tuple[int, int]]:
    """Return the pairs (i, j) of boundaries that enclose clips.

    Minimises seconds lost, then sentences broken, then sentences joined.
    """
    begins_s = [place.beginning_s(config.margin_s) for place in places]
    best: list[tuple[float, int, bool]] = [(0.0, 0, False)]  # cost, previous boundary, is a clip
    for j, last in enumerate(places[1:], 1):
        end_s = last.ending_s(config.margin_s)
        options = [(best[j - 1][0] + LOSS_COST * (end_s - begins_s[j - 1]), j - 1, False)]
        joined = 0
        for i in range(j - 1, -1, -1):
            length_s = end_s - begins_s[i]
            if length_s > config.max_s:
                break
            if places[i].allowed and last.allowed and length_s >= config.min_s:
                cost = (not last.ends_sentence) + JOIN_COST * joined
                options.append((best[i][0] + cost, i, True))
            joined += places[i].ends_sentence
        best.append(min(options))
    clips = []
    j = len(places) - 1
    while j > 0:
        _, i, is_clip = best[j]
        if is_clip:
            clips.append((i, j))
        j = i
    return clips[::-1]


def plan_segments(
    aligned: list[AlignedToken], tokens: list[Token], total_s: float, config: SegmentConfig
) -> tuple[list[Span], list[Span]]:
    """Return clips and losses, which together cover `total_s` seconds exactly.

    Text that was not recognised is a loss, of 0 seconds where clips cover its place.
    """
    clips = []
    numbers = []  # of the tokens of each clip
    for run in split_runs(aligned, tokens, config):
        places = boundaries(run, total_s, config)
        for i, j in choose_clips(places, config):
            numbers.append(range(run[i].number, run[j - 1].number + 1))
            previous_end_s = clips[-1].end_s if clips else 0.0
            start_s = max(previous_end_s, places[i].beginning_s(config.margin_s))
            end_s = min(total_s, places[j].ending_s(config.margin_s))
            text = " ".join(tokens[n].text for n in numbers[-1])
            clips.append(Span(start_s=start_s, end_s=end_s, text=text))
    losses = []
    recognized = {item.number for item in aligned}
    end_s = 0.0
    next_number = 0
    end = Span(start_s=total_s, end_s=total_s)
    after_all = range(len(tokens), len(tokens))
    for clip, own in zip([*clips, end], [*numbers, after_all]):
        between = range(next_number, own.start)
        reason = _reason(between, tokens, recognized, config)
        if reason or clip.start_s - end_s > 1e-6:
            reason = reason or "a pause, or sound the transcript lacks"
            losses.append(Span(start_s=end_s, end_s=clip.start_s, reason=reason))
        end_s = clip.end_s
        next_number = own.stop
    return clips, losses


def _reason(
    numbers: range, tokens: list[Token], recognized: set[int], config: SegmentConfig
) -> str:
    """Return why the tokens `numbers` are in no clip; "" if there are none with letters."""
    limits = f"no pauses make a clip of {config.min_s} to {config.max_s} s with"
    words = {"not recognised as written": [], limits: []}
    for number in numbers:
        if tokens[number].ids:
            why = limits if number in recognized else "not recognised as written"
            words[why].append(tokens[number].text)
    return "; ".join(f"{why}: {_excerpt(own)}" for why, own in words.items() if own)


def _excerpt(words: list[str]) -> str:
    return " ".join(words[:EXCERPT_WORDS]) + (" …" if len(words) > EXCERPT_WORDS else "")


def find_audio(folder: Path) -> list[Path]:
    paths = Path(folder).rglob("*")
    return sorted(p for p in paths if p.suffix.lower() in SUFFIXES and p.is_file())


def find_recordings(folder: Path) -> list[Path]:
    """Return the audio files under `folder`. Raises DatasetError when none has a transcript."""
    recordings = find_audio(folder)
    if not any(p.with_suffix(".txt").is_file() for p in recordings):
        raise DatasetError(
            f"{folder} holds no recording with a transcript beside it: expected NAME.wav and "
            f"NAME.txt, found {len(recordings)} recordings."
        )
    return recordings


def unique_names(folder: Path, recordings: list[Path]) -> list[str]:
    """Return a plain, unique name for the clips of each recording, from its path in `folder`."""
    names: list[str] = []
    for audio in recordings:
        relative = audio.relative_to(folder).as_posix().removesuffix(audio.suffix)
        plain = re.sub(r"[^\w-]+", "_", relative).strip("_")[:100] or "recording"
        plain = files.shorten_name(plain, 200)  # of 255 that file systems allow: suffixes follow
        numbered = (f"{plain}-{number}" for number in itertools.count(2))
        names.append(next(n for n in itertools.chain([plain], numbered) if n not in names))
    return names


def seconds_of(audio: Path) -> float:
    """Return the seconds of a recording by its header; 0 where it cannot be read."""
    try:
        return duration_s(audio)
    except DatasetError:
        return 0.0


class Segmenter:
    """Cuts recordings of `language` into clips of at most `max_s` seconds.

    `respell` is as in kit/text/normalize.py.
    """

    def __init__(
        self, recognizer: SpeechRecognizer, language: str, max_s: float, respell: bool = True
    ):
        self.recognizer = recognizer
        self.language = language
        self.cuts = SegmentConfig(max_s=max_s)
        self.respell = respell

    def segment_folder(
        self, folder: Path, into: Path, progress: Callable = lambda *_: None
    ) -> list[Span]:
        """Split recordings under `folder` that have a .txt into the LJSpeech folder `into`.

        Writes wavs/, metadata.csv and losses.jsonl, and returns the losses. Recordings that an
        earlier call finished are not processed again. `progress(done, total)` counts seconds of
        audio. Raises DatasetError where there is nothing to split, DiskError before it starts when
        the disk is too small.
        """
        paths = find_recordings(folder)
        names = unique_names(folder, paths)
        texts = [path.with_suffix(".txt") for path in paths]
        lines = []
        losses = []
        for path, result in zip(paths, self._segment(paths, names, texts, into, progress)):
            lines += [f"{row['id']}|{row['text']}\n" for row in result["rows"]]
            file = path.relative_to(folder).as_posix()
            losses += [Span(**loss, file=file) for loss in result["losses"]]
        write_lines(into / "losses.jsonl", (loss.as_loss() for loss in losses))
        files.write_atomic(into / "metadata.csv", "".join(lines))
        return losses

    def segment_rows(
        self, rows: list[Utterance], into: Path, progress: Callable = lambda *_: None
    ) -> list[Utterance]:
        """Split the recordings of `rows`, too long for the model, into clips under `into`.

        A clip keeps speaker, split and table line of its row; its id is the row's with a number:
        ID_0001, ID_0002 ... Originals are only read. Raises DatasetError where one cannot be read.
        """
        clips = into / "clips"
        paths = [Path(row.audio) for row in rows]
        names = [f"{number:06d}" for number in range(1, len(rows) + 1)]
        texts = [row.text for row in rows]
        utterances = []
        for row, result in zip(rows, self._segment(paths, names, texts, clips, progress)):
            error = result.get("error")
            if error and isinstance(error.__cause__ or error, OSError):  # the disk, not the data
                reason = f"{row.audio}: {error}. Change that, and run again."
                raise DatasetError(reason) from error
            for clip in result["rows"]:
                audio = clips / "wavs" / f"{clip['id']}.wav"
                clip_id = f"{row.id}_{clip['id'].rpartition('_')[2]}"
                values = {"id": clip_id, "audio": str(audio), "text": clip["text"], "written": ""}
                utterances.append(dataclasses.replace(row, **values, seconds=seconds_of(audio)))
        return utterances

    def _segment(
        self,
        paths: list[Path],
        names: list[str],
        texts: list[str | Path],
        into: Path,
        progress: Callable,
    ) -> Iterator[dict]:
        """Write the clips of each recording to `into`/wavs; yield its rows and losses.

        A clip's name begins with that of its recording in `names`; a text may be in a file.
        """
        wavs = files.make_folder(into / "wavs")
        files.require_disk(into, sum(path.stat().st_size for path in paths))
        text_of = dict(zip(names, texts))  # by name: several rows may share a recording

        def segment(audio: Path, name: str, tick: Callable) -> dict:
            text = text_of[name]
            if isinstance(text, Path):
                text = _read_transcript(text)
            settings = (self.recognizer.fingerprint(), self.cuts, self.language, self.respell)
            key = files.digest(name, file_state(audio), text, *settings)
            make = partial(self._segment_one, audio, name, text, wavs, tick)
            return files.cached_result(into / "cut" / f"{name}.json", key, make)

        return read_each(paths, names, segment, progress)

    def _segment_one(
        self, audio: Path, name: str, text: str, wavs: Path, progress: Callable
    ) -> dict:
        """Write the clips of one recording to `wavs`; return table rows and losses."""
        for leftover in wavs.glob(f"{name}_[0-9][0-9][0-9][0-9].wav"):
            leftover.unlink()  # of other settings, or an interrupted call
        rows = []
        with WindowReader(audio, self.recognizer) as reader:
            tokens = alignment.read_tokens(text, self.recognizer, self.language, self.respell)
            aligned = alignment.LongAligner(reader, tokens).run(progress)
            clips, losses = plan_segments(aligned, tokens, reader.total_s, self.cuts)
            for number, clip in enumerate(clips, 1):
                clip_id = f"{name}_{number:04d}"
                rows.append({"id": clip_id, "text": clip.text})
                wave = reader.samples_of(clip.start_s, clip.end_s)
                write_clip(wavs / f"{clip_id}.wav", wave, reader.rate)
        return {"rows": rows, "losses": [loss.as_loss() for loss in losses]}


def read_each(
    paths: list[Path], names: list[str], work: Callable, progress: Callable
) -> Iterator[dict]:
    """Yield `work(path, name, tick)` of each recording: its "rows" and "losses".

    `tick(seconds)` counts those of the recording, `progress(done, total)` those of all. A recording
    that cannot be read is a loss, with its "error", and tried again by the next call.
    """
    seconds = [seconds_of(path) for path in paths]
    total_s = sum(seconds) or 1.0  # none is readable
    done_s = 0.0
    for path, name, own_s in zip(paths, names, seconds):

        def tick(now_s: float, before_s: float = done_s) -> None:
            progress(before_s + now_s, total_s)

        try:
            result = work(path, name, tick)
        except DiskError:
            raise
        except (DatasetError, OSError) as error:
            loss = Span(start_s=0.0, end_s=own_s, reason=str(error))
            result = {"rows": [], "losses": [loss.as_loss()], "error": error}
        done_s += own_s
        progress(done_s, total_s)
        yield result


def write_clip(path: Path, wave: np.ndarray, sample_rate: int) -> None:
    """Write a clip without an fsync: clips count once the result file lists them."""
    with files.disk_errors(path):
        path.write_bytes(files.encode_wav(wave, sample_rate))


def _read_transcript(path: Path) -> str:
    if not path.is_file():
        raise DatasetError(f"no transcript {path.name} beside it")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path.name} is not valid UTF-8: {error.reason}") from error


def file_state(path: Path) -> tuple:
    return (path.stat().st_size, path.stat().st_mtime_ns)
