"""Does the text belong to the recording? Forced alignment finds the clips where it does not.

The recogniser's best path through the given text is compared, frame by frame, with its best path
through any text at all. Where the text is what was said the two are the same and the score is 0; a
word too many, a word too few or a recording cut short costs several nats a character, wherever in
the clip it is. Silence costs nothing, whatever a recogniser that never met it makes of it. (The
alignment is torchaudio's; scoring it this way: Kürzinger et al. 2020.) The recogniser is one
trained on recordings of the same language, as notebook 01 does; it may have learnt from the very
clips it judges, for a few wrong ones teach it little. What it learnt from fits better than what it
never heard (a small corpus it knows by heart), so the two kinds have a limit each. Knows nothing of
how clips are mended.

Shapes: S output frames of the recogniser, A alphabet + blank, N characters.
"""

import dataclasses
import math
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchaudio.functional import forced_align, merge_tokens

from kit.audio.clip import load_wave
from kit.audio.recognizer import RecognizerOutput, SpeechRecognizer
from kit.base.config import require, require_within
from kit.base.errors import DatasetError
from kit.base.files import digest
from kit.base.result_cache import cached_result, read_result, save_result
from kit.base.work_group import SINGLE_PROCESS, WorkGroup
from kit.dataset.data_report import Finding, Utterance
from kit.text.normalize import letters

PART_BATCHES = 16  # batches whose results are kept together until all are there
IMPOSSIBLE = -math.inf  # the score of a text that cannot be laid over its recording at all
NO_LIMIT = -1e9  # below it lies IMPOSSIBLE alone
# The kinds of clips that are compared with each other.
LEARNT = "learnt from"
NEVER_HEARD = "never heard"


class AlignError(ValueError):
    """Scores that tell nothing, because the recogniser does not know this kind of recording."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlignConfig:
    clips: int = 0  # how many are heard, drawn by chance; 0: every one
    batch: int = 16  # clips that go through the recogniser together
    weak: float = -1.0  # a character scoring below this (nats) counts as weak
    spread: float = 6.0  # refuse clips this many robust standard deviations below the median ...
    least_gap: float = 0.4  # ... and at least this far (nats a character), however alike they are
    hopeless: float = -1.0  # a median below this says that the recogniser is the wrong one

    def __post_init__(self):
        require(self.clips >= 0, self, "clips", "0 (every one) or more.")
        require(self.batch >= 1, self, "batch", "must be at least 1.")
        require(self.spread > 0, self, "spread", "must be positive.")
        require(self.least_gap > 0, self, "least_gap", "must be positive.")
        require_within(self, 0, 1e9, "clips", "batch", "spread", "least_gap")
        require_within(self, -1e6, 0, "weak", "hopeless")

    def draw(self, rows: list[Utterance]) -> list[Utterance]:
        """The rows to be heard: all, or `clips` of them, the same ones every time."""
        few = 0 < self.clips < len(rows)
        return random.Random(0).sample(rows, self.clips) if few else rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Word:
    text: str
    start_s: float
    end_s: float
    score: float  # mean log-probability of its characters, nats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alignment:
    score: float  # nats a character that the text costs; 0 is perfect, -inf impossible
    weak_share: float = 1.0  # of its characters: weakly heard, or unknown to the recogniser
    words: tuple[Word, ...] = ()
    worst_at_s: float = 0.0  # where in the recording text and sound part most
    reason: str = ""  # why it could not be aligned


def frames_needed(ids: Tensor) -> int:
    """Frames without which `ids` (N,) cannot be aligned: a letter said twice needs a blank."""
    return len(ids) + int((ids[1:] == ids[:-1]).sum())


def best_path(log_probs: Tensor, ids: Tensor) -> tuple[list, Tensor]:
    """Spans (start, end, score) of each character, and what each frame (S,) costs, at most 0.

    `log_probs` (S, A), `ids` (N,) without blanks, S at least `frames_needed(ids)`.
    """
    path, scores = forced_align(log_probs[None].contiguous(), ids[None].int())
    spans = merge_tokens(path[0], scores[0])
    return spans, scores[0] - log_probs.amax(-1)


def quiet_frames(loud: Tensor) -> Tensor:
    """Which frames (S,) are pauses: in the lowest quarter between noise floor and speech."""
    low, high = torch.quantile(loud, torch.tensor([0.01, 0.9]))
    return loud < low + 0.25 * (high - low)


def alignment_score(
    recognizer: SpeechRecognizer, heard: RecognizerOutput, text: str, config: AlignConfig
) -> Alignment:
    """`text` laid over one clip, as `recognizer` heard it.

    Never raises for a text that does not fit: the score is then -inf, with the reason.
    """
    log_probs = heard.log_probs
    ids = recognizer.encode(text)
    reason = _impossible(log_probs, ids)
    if reason:
        return Alignment(score=IMPOSSIBLE, reason=reason)
    spans, costs = best_path(log_probs, ids)
    spoken = torch.zeros(len(costs), dtype=torch.bool)
    for span in spans:
        spoken[span.start : span.end] = True
    costs = costs * (spoken | ~quiet_frames(heard.loudness))
    wanted = len(letters(text))
    frame_s = recognizer.frame_s
    weak = sum(span.score < config.weak for span in spans) + wanted - len(spans)
    return Alignment(
        score=float(costs.sum()) / len(ids),
        weak_share=weak / wanted,
        words=tuple(_words(recognizer.alphabet, text, spans, frame_s)),
        worst_at_s=_worst_frame(costs, frame_s) * frame_s,
    )


def _impossible(log_probs: Tensor, ids: Tensor) -> str:
    if len(ids) == 0:
        return "the recogniser knows no letter of the text"
    if frames_needed(ids) > len(log_probs):
        return f"{len(ids)} characters cannot be said in {len(log_probs)} frames"
    return "" if torch.isfinite(log_probs).all() else "the recogniser's output is not finite"


def _words(alphabet: str, text: str, spans: list, frame_s: float) -> Iterator[Word]:
    """The words of `text` with their times; one whose letters are all unknown is left out."""
    rest = iter(spans)
    for number, word in enumerate(letters(text).split(" ")):
        if number and " " in alphabet:
            next(rest)  # the space before it
        own = [next(rest) for char in word if char in alphabet]
        if own:
            yield Word(
                text=word,
                start_s=own[0].start * frame_s,
                end_s=own[-1].end * frame_s,
                score=sum(span.score for span in own) / len(own),
            )


def _worst_frame(costs: Tensor, frame_s: float, around_s: float = 0.5) -> int:
    """The frame in the middle of the half second that costs most."""
    width = min(len(costs), max(1, round(around_s / frame_s)))
    return int(F.avg_pool1d(costs[None], width, stride=1)[0].argmin()) + width // 2


def align_clips(
    rows: list[Utterance],
    recognizer: SpeechRecognizer,
    config: AlignConfig,
    progress: Callable = lambda *_: None,
) -> list[Alignment]:
    """An alignment for each of `rows`, in their order; `progress(done, total)` along the way.

    A recording that cannot be read scores -inf, with the reason.
    """
    found: list = [None] * len(rows)
    order = by_length(rows)
    for start in range(0, len(order), config.batch):
        at = order[start : start + config.batch]
        for i, alignment in zip(at, _align_batch([rows[i] for i in at], recognizer, config)):
            found[i] = alignment
        progress(min(start + config.batch, len(rows)), len(rows))
    return found


def by_length(rows: list[Utterance]) -> list[int]:
    """The numbers of `rows` from short to long: neighbours make batches with little padding."""
    return sorted(range(len(rows)), key=lambda i: rows[i].seconds)


def align_clips_cached(
    rows: list[Utterance],
    digests: list[str | None],
    recognizer: SpeechRecognizer,
    config: AlignConfig,
    path: Path,
    progress: Callable = lambda *_: None,
    group: WorkGroup = SINGLE_PROCESS,
) -> list[Alignment]:
    """`align_clips`, kept in the file `path`: the same clips, texts and recogniser, no new hearing.

    `digests` change when the recordings do, one a row. The words' times are not kept. The processes
    of `group` share the clips, and keep what they have done in parts beside `path`, so that it goes
    on after a kill. Raises KitError where one of them failed.
    """
    clips = [(row.id, row.text, sound) for row, sound in zip(rows, digests, strict=True)]
    key = digest(clips, recognizer.fingerprint(), config)
    folder = Path(path).with_suffix(".parts")

    def make() -> list[dict]:
        return _align_in_parts(rows, recognizer, config, folder, key, progress, group)

    found = cached_result(path, key, make)
    shutil.rmtree(folder, ignore_errors=True)
    return [Alignment(**values) for values in found]


def _align_in_parts(
    rows: list[Utterance],
    recognizer: SpeechRecognizer,
    config: AlignConfig,
    folder: Path,
    key: str,
    progress: Callable,
    group: WorkGroup,
) -> list[dict]:
    """The values of each row's alignment, without its words; parts that are in `folder` stand."""
    order = by_length(rows)
    size = PART_BATCHES * config.batch
    parts = {}
    for start in range(0, len(order), size):
        parts[folder / f"{start // size:06d}.json"] = order[start : start + size]
    missing = [part for part in parts if read_result(part, key) is None]
    before = len(rows) - sum(len(parts[part]) for part in missing)
    if before:
        progress(before, len(rows))
    jobs = []
    # Whole batches are shared out: what is heard in a clip depends, in its last bits, on how far
    # its batch is padded, so a batch holds the same clips however many processes there are. Parts
    # stand in the order of length, so those dealt in turn take about the same time.
    for share in group.split_evenly(missing):
        own = {part: [rows[i] for i in parts[part]] for part in share}
        jobs.append(AlignJob(parts=own, key=key, config=config))
    if missing:
        group.do(jobs, recognizer, lambda done: progress(before + int(done), len(rows)))
    found: list = [None] * len(rows)
    for part, members in parts.items():
        for i, values in zip(members, read_result(part, key), strict=True):
            found[i] = values
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlignJob:
    """The parts of an alignment that one process makes: for each file the rows it is of."""

    parts: dict[Path, list[Utterance]]
    key: str
    config: AlignConfig

    def run(self, recognizer: SpeechRecognizer, tell: Callable[[float], None]) -> None:
        for part, rows in self.parts.items():
            done = 0

            def heard(now: int, _total: int) -> None:
                nonlocal done
                tell(now - done)
                done = now

            made = align_clips(rows, recognizer, self.config, heard)
            values = [dataclasses.asdict(alignment) for alignment in made]
            for each in values:
                del each["words"]
            save_result(part, self.key, values)


def _align_batch(rows: list, recognizer: SpeechRecognizer, config: AlignConfig) -> list:
    rate = recognizer.input_sample_rate
    waves = [_wave_or_reason(row, rate) for row in rows]
    heard = iter(recognizer.recognize([wave for wave in waves if isinstance(wave, Tensor)], rate))
    return [
        alignment_score(recognizer, next(heard), row.text, config)
        if isinstance(wave, Tensor)
        else Alignment(score=IMPOSSIBLE, reason=wave)
        for row, wave in zip(rows, waves)
    ]


def _wave_or_reason(row: Utterance, sample_rate: int) -> Tensor | str:
    try:
        return load_wave(row.audio, sample_rate)
    except DatasetError as error:
        return str(error)


def worst(rows: list, alignments: list[Alignment], count: int) -> list[tuple]:
    """The `count` (row, alignment) pairs with the lowest scores, the worst first: listen to them.

    The usual reading: words missing in the text, words too many, another sentence's recording.
    """
    return sorted(zip(rows, alignments), key=lambda pair: pair[1].score)[:count]


def lowest_score(alignments: list[Alignment], config: AlignConfig) -> float:
    """The score below which text and audio do not match: far under the median, in robust terms.

    Median and median absolute deviation, which up to half of the clips cannot move far. Raises
    AlignError when the median itself is hopeless, for then the scores tell nothing apart.
    """
    scores = np.array([a.score for a in alignments])
    middle = float(np.median(scores)) if len(scores) else 0.0
    if middle < config.hopeless:
        raise AlignError(
            f"The typical clip scores {middle:.2f} nats a character, where 0 is perfect and "
            f"{config.hopeless} is the least that tells anything: the recogniser does not know "
            "these voices or this language, or most texts belong to other recordings. Check the "
            "order of the texts, or let 01_data_prep train it longer on clips like these "
            "(`minutes` of the preset's section `recognizer`), or let Whisper listen in its place "
            "(`whisper` there: base)."
        )
    spread = 1.4826 * float(np.median(np.abs(scores - middle))) if len(scores) else 0.0
    return middle - max(config.spread * spread, config.least_gap)


def clip_kind(row: Utterance) -> str:
    """Which clips `row` is compared with: its recogniser learns from the training split alone."""
    return LEARNT if row.split == "train" else NEVER_HEARD


def lowest_scores(
    rows: list[Utterance], alignments: list[Alignment], config: AlignConfig
) -> dict[str, float]:
    """`lowest_score` of each kind of clip that `rows` has.

    Raises AlignError where the scores of the clips learnt from tell nothing apart, or of all, where
    none was learnt from. Where only those of the others do, these have no limit.
    """
    by_kind: dict[str, list[Alignment]] = {}
    for row, alignment in zip(rows, alignments, strict=True):
        by_kind.setdefault(clip_kind(row), []).append(alignment)
    first = LEARNT if LEARNT in by_kind else NEVER_HEARD
    found = {first: lowest_score(by_kind.pop(first, []), config)}
    for kind, own in by_kind.items():
        try:
            found[kind] = lowest_score(own, config)
        except AlignError:
            continue
    return found


def refuse_mismatched(
    rows: list[Utterance], alignments: list[Alignment], config: AlignConfig
) -> tuple[list[Utterance], list[Finding]]:
    """`rows` whose text and audio belong together, and ledger rows for the others.

    Raises AlignError as `lowest_scores` does.
    """
    return _split_at(lowest_scores(rows, alignments, config), rows, alignments)


def _split_at(
    limits: dict[str, float], rows: list[Utterance], alignments: list[Alignment]
) -> tuple[list[Utterance], list[Finding]]:
    kept = []
    refused = []
    for row, alignment in zip(rows, alignments, strict=True):
        lowest = limits.get(clip_kind(row), NO_LIMIT)
        if alignment.score >= lowest:
            kept.append(row)
        else:
            refused.append(_mismatch(row, alignment, lowest))
    return kept, refused


@dataclasses.dataclass(frozen=True, kw_only=True)
class Match:
    """What became of a check of texts against recordings."""

    mismatched: list[Finding]
    limits: dict[str, float]  # the score below which clips of a kind were refused; {}: none judged
    note: str  # in words

    @property
    def judged(self) -> bool:
        return bool(self.limits)


def match(rows: list[Utterance], alignments: list[Alignment], config: AlignConfig) -> Match:
    """`refuse_mismatched`, or, where the scores tell nothing apart, nothing refused and why."""
    try:
        limits = lowest_scores(rows, alignments, config)
    except AlignError as error:
        return Match(mismatched=[], limits={}, note=f"not judged: {error}")
    kept, mismatched = _split_at(limits, rows, alignments)
    note = f"{len(mismatched)} of {len(rows):,} clips do not hold what their text says"
    unjudged = sum(clip_kind(row) not in limits for row in kept)
    if unjudged:
        note += f"; {unjudged:,} that the recogniser never heard it knows too little of to judge"
    return Match(mismatched=mismatched, limits=limits, note=note)


def _mismatch(row: Utterance, alignment: Alignment, lowest: float) -> Finding:
    measured = f"alignment score {alignment.score:.2f}, lowest allowed {lowest:.2f}"
    detail = alignment.reason or f"{measured}, worst near {alignment.worst_at_s:.1f} s"
    return Finding(
        file=row.file,
        line=row.line,
        id=row.id,
        kind="mismatch",
        reason=f"text and audio do not match ({detail})",
        seconds=row.seconds,
        cure="listen to it: correct the text, or cut the recording where the text begins and ends",
        audio=row.audio,
    )
