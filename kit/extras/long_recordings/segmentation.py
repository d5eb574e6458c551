"""Split long recordings with transcripts into an LJSpeech dataset of clips.

The recogniser is trained on clips of the same language (01_data_prep), so the first hour or so must
be split by hand. A clip begins and ends in a pause, at a sentence's end if possible; the choice is
optimal, by dynamic programming. Every second is in a clip or among the losses, with the reason.
"""

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from kit.audio.container import SUFFIXES, duration_s
from kit.audio.recognizer import SpeechRecognizer
from kit.base import files
from kit.base.config import require, require_within
from kit.base.errors import DatasetError
from kit.base.formatting import non_utf8_problem
from kit.dataset.manifest import Utterance, write_lines
from kit.extras.long_recordings import alignment
from kit.extras.long_recordings.alignment import AlignedToken, Pause, Token, WindowReader

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
        require(0 < self.min_s < self.max_s, self, "min_s", f"between 0 and max_s ({self.max_s}).")
        require(0 < self.least_pause_s <= 3600, self, "least_pause_s", "must be positive.")
        require_within(self, 0, 3600, "max_s", "longest_pause_s", "margin_s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """A stretch of one recording: a clip with its text, or a loss with its reason."""

    start_s: float
    end_s: float
    text: str = ""
    reason: str = ""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Boundary:
    """A place between two words (or beside one) where a clip may begin or end."""

    pause: Pause
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

    Text that was not recognised is a loss, of 0 seconds where a clip covers its place.
    """
    clips = []
    used = set()
    for run in split_runs(aligned, tokens, config):
        places = boundaries(run, total_s, config)
        for i, j in choose_clips(places, config):
            numbers = range(run[i].number, run[j - 1].number + 1)
            used.update(numbers)
            previous_end_s = clips[-1].end_s if clips else 0.0
            start_s = max(previous_end_s, places[i].beginning_s(config.margin_s))
            end_s = min(total_s, places[j].ending_s(config.margin_s))
            text = " ".join(tokens[n].text for n in numbers)
            clips.append(Span(start_s=start_s, end_s=end_s, text=text))
    reasons = []  # text between recognised tokens, then runs of recognised ones in no clip
    numbers = [-1, *(item.number for item in aligned), len(tokens)]
    starts_s = [0.0, *(item.end_s for item in aligned)]
    ends_s = [*(item.start_s for item in aligned), total_s]
    for last, stop, start_s, end_s in zip(numbers, numbers[1:], starts_s, ends_s):
        if any(token.ids for token in tokens[last + 1 : stop]):
            reason = f"not recognised as written: {_excerpt(tokens[last + 1 : stop])}"
            reasons.append(Span(start_s=start_s, end_s=end_s, reason=reason))
    for in_clip, group in itertools.groupby(aligned, lambda item: item.number in used):
        run = list(group)
        if not in_clip:
            words = _excerpt(tokens[run[0].number : run[-1].number + 1])
            reason = f"no pauses make a clip of {config.min_s} to {config.max_s} s with: {words}"
            reasons.append(Span(start_s=run[0].start_s, end_s=run[-1].end_s, reason=reason))
    losses = []  # each stretch between clips, with the reasons that overlap it
    edges = [0.0, *(edge for clip in clips for edge in (clip.start_s, clip.end_s)), total_s]
    gaps = [(a, b) for a, b in zip(edges[::2], edges[1::2]) if b - a > 1e-6]
    for start_s, end_s in gaps:
        own = [r for r in reasons if r.start_s < end_s and start_s < r.end_s]
        reasons = [r for r in reasons if r not in own]
        reason = "; ".join(r.reason for r in own) or "a pause, or sound the transcript lacks"
        losses.append(Span(start_s=start_s, end_s=end_s, reason=reason))
    covered = [dataclasses.replace(r, end_s=r.start_s) for r in reasons]
    return clips, sorted(losses + covered, key=lambda span: span.start_s)


def _excerpt(tokens: list[Token]) -> str:
    words = " ".join(token.text for token in tokens[:EXCERPT_WORDS])
    return f"{words} …" if len(tokens) > EXCERPT_WORDS else words


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnusedAudio:
    """A line of losses.jsonl: audio in no clip, or (of 0 seconds) text that was not recognised."""

    file: str
    start_s: float
    end_s: float
    reason: str


def find_audio(folder: Path) -> list[Path]:
    """Return the audio files under `folder`. Raises DatasetError for a name that is not UTF-8."""
    paths = Path(folder).rglob("*")
    recordings = sorted(p for p in paths if p.suffix.lower() in SUFFIXES and p.is_file())
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
        plain = files.shorten_name(plain, 200)  # of 255 that file systems allow: suffixes follow
        numbered = (f"{plain}-{number}" for number in itertools.count(2))
        names.append(next(n for n in itertools.chain([plain], numbered) if n not in names))
    return names


def _read_transcript(path: Path) -> str:
    if not path.is_file():
        raise DatasetError(f"no transcript {path.name} beside it")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path.name} is not valid UTF-8: {error.reason}") from error


def seconds_of(audio: Path) -> float:
    """Return the seconds of a recording by its header; 0 where it cannot be read."""
    try:
        return duration_s(audio)
    except DatasetError:
        return 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segmenter:
    recognizer: SpeechRecognizer
    cuts: SegmentConfig
    language: str
    respell: bool = True  # see kit/text/normalize.py

    def segment_folder(
        self, folder: Path, into: Path, progress: Callable = lambda *_: None
    ) -> list[UnusedAudio]:
        """Split recordings under `folder` that have a .txt into the LJSpeech folder `into`.

        Writes wavs/, metadata.csv and losses.jsonl, and returns the losses. Recordings that an
        earlier call finished are not processed again. `progress(done, total)` counts seconds of
        audio. Raises DatasetError where there is nothing to split or a file cannot be opened,
        DiskError before it starts when the disk is too small.
        """
        folder, into = Path(folder), Path(into)
        paths = find_recordings(folder)
        sources = [(path, name, None) for path, name in zip(paths, unique_names(folder, paths))]
        results = self._segment(sources, into, progress)
        lines = [f"{row['id']}|{row['text']}\n" for result in results for row in result["rows"]]
        losses = []
        for path, result in zip(paths, results):
            file = path.relative_to(folder).as_posix()
            losses += [UnusedAudio(**loss | {"file": file}) for loss in result["losses"]]
        write_lines(into / "losses.jsonl", map(vars, losses))
        files.write_atomic(into / "metadata.csv", "".join(lines))
        return losses

    def segment_rows(
        self, rows: list[Utterance], into: Path, progress: Callable = lambda *_: None
    ) -> list[Utterance]:
        """Split the recordings of `rows`, too long for the model, into clips under `into`.

        A clip keeps speaker, split and table line of its row; its id is the row's with a number:
        ID_0001, ID_0002 ... Originals are only read.
        """
        clips = Path(into) / "clips"
        sources = [(Path(r.audio), f"{number:06d}", r.text) for number, r in enumerate(rows, 1)]
        utterances = []
        for row, result in zip(rows, self._segment(sources, clips, progress)):
            for clip in result["rows"]:
                audio = clips / "wavs" / f"{clip['id']}.wav"
                clip_id = f"{row.id}_{clip['id'].rpartition('_')[2]}"
                values = {"id": clip_id, "audio": str(audio), "text": clip["text"], "written": ""}
                utterances.append(dataclasses.replace(row, **values, seconds=seconds_of(audio)))
        return utterances

    def _segment(self, sources: list[tuple], into: Path, progress: Callable) -> list[dict]:
        """Write the clips of (audio, name, text) to `into`/wavs; return rows and losses of each."""
        files.make_folder(into / "wavs")
        files.require_disk(into, sum(audio.stat().st_size for audio, _, _ in sources))
        seconds = [seconds_of(audio) for audio, _, _ in sources]
        total_s = sum(seconds) or 1.0  # none is readable
        results = []
        for number, (audio, name, text) in enumerate(sources):
            before_s = sum(seconds[:number])
            content = file_state(audio.with_suffix(".txt")) if text is None else text
            settings = (self.recognizer.fingerprint(), self.cuts, self.language, self.respell)
            key = files.digest(name, file_state(audio), content, *settings)

            def report(now_s: float, own_s: float, before_s: float = before_s) -> None:
                if now_s < own_s:  # the end is reported once the clips are written
                    progress(before_s + now_s, total_s)

            make = partial(self._segment_one, audio, name, text, into / "wavs", report)
            results.append(files.cached_result(into / "cut" / f"{name}.json", key, make))
            progress(total_s if number + 1 == len(sources) else before_s + seconds[number], total_s)
        return results

    def _segment_one(
        self, audio: Path, name: str, text: str | None, wavs: Path, progress: Callable
    ) -> dict:
        """Write the clips of one recording to `wavs`; return table rows and losses.

        A `text` of None is that of the .txt beside it.
        """
        for leftover in wavs.glob(f"{name}_[0-9][0-9][0-9][0-9].wav"):
            leftover.unlink()  # of other settings, or an interrupted call
        rows = []
        with contextlib.ExitStack() as stack:
            try:
                if text is None:
                    text = _read_transcript(audio.with_suffix(".txt"))
                reader = stack.enter_context(WindowReader(audio, self.recognizer))
                tokens = alignment.read_tokens(text, self.recognizer, self.language, self.respell)
                aligned = alignment.LongAligner(reader, tokens).run(progress)
                clips, losses = plan_segments(aligned, tokens, reader.total_s, self.cuts)
            except (DatasetError, OSError) as error:
                if isinstance(error.__cause__ or error, OSError):  # it would stay a loss
                    raise DatasetError(f"{audio}: {error}. Change that, and run again.") from error
                clips = []
                losses = [Span(start_s=0.0, end_s=seconds_of(audio), reason=str(error))]
            for number, clip in enumerate(clips, 1):
                clip_id = f"{name}_{number:04d}"
                rows.append({"id": clip_id, "text": clip.text, "seconds": clip.seconds})
                # No fsync for each of a thousand clips: they count once the result file lists them.
                path = wavs / f"{clip_id}.wav"
                with files.disk_errors(path):
                    wave = reader.samples_of(clip.start_s, clip.end_s)
                    path.write_bytes(files.encode_wav(wave, reader.rate))
        kept = ("start_s", "end_s", "reason")
        unused = [{key: vars(span)[key] for key in kept} for span in losses]
        return {"rows": rows, "losses": unused}


def new_segmenter(
    recognizer: SpeechRecognizer, language: str, max_s: float, respell: bool = True
) -> Segmenter:
    """Return what cuts recordings into clips of at most `max_s` seconds."""
    cuts = SegmentConfig(max_s=max_s)
    return Segmenter(recognizer=recognizer, cuts=cuts, language=language, respell=respell)


def file_state(path: Path) -> tuple:
    return (path.stat().st_size, path.stat().st_mtime_ns) if path.is_file() else ()
