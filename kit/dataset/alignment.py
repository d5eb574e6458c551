"""Find clips whose text does not match the recording, by forced alignment.

The recogniser's best path through the given text is compared, frame by frame, with its best path
through any text at all. Where the text is what was said the two are the same and the score is 0; a
word too many or too few or a truncated recording costs several nats a character, pauses nothing.
(The alignment is torchaudio's; the score follows Kürzinger et al. 2020.) The recogniser may be
trained on the very clips it checks: those score higher, so they have a separate limit.

Shapes: S output frames of the recogniser, A alphabet + blank, N characters.
"""

import dataclasses
import math
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kit.audio.clip import import_torchaudio, load_wave
from kit.audio.recognizer import RecognizerOutput, SpeechRecognizer
from kit.base.config import require, require_least, require_within
from kit.base.errors import DatasetError
from kit.base.files import cached_result, digest, read_result, save_result
from kit.base.processes import SINGLE_PROCESS, WorkGroup
from kit.dataset.data_report import Finding, Utterance, refuse

PART_BATCHES = 16  # batches whose results share a file until all are done
# Clips are compared only with others of their kind.
TRAINED_ON = "trained on"
UNSEEN = "unseen"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlignConfig:
    clips: int = 0  # how many are checked, drawn at random; 0: every one
    batch: int = 16  # clips that go through the recogniser together
    spread: float = 6.0  # refuse clips this many robust standard deviations below the median ...
    least_gap: float = 0.4  # ... and at least this far (nats a character), however alike they are
    hopeless: float = -1.0  # a median below this says that the recogniser is the wrong one

    def __post_init__(self):
        require(self.spread > 0, self, "spread", "must be positive.")
        require(self.least_gap > 0, self, "least_gap", "must be positive.")
        require_least(self, 0, "clips", "spread", "least_gap")
        require_least(self, 1, "batch")
        require_within(self, -1000, 0, "hopeless")

    def draw(self, rows: list[Utterance]) -> list[Utterance]:
        """Return the rows to be checked: all, or `clips` of them, the same ones every time."""
        sampled = 0 < self.clips < len(rows)
        return random.Random(0).sample(rows, self.clips) if sampled else rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alignment:
    score: float  # nats a character; 0 is perfect, -inf impossible
    worst_at_s: float = 0.0  # where text and recording differ most
    reason: str = ""  # why it could not be aligned


def frames_needed(ids: Tensor) -> int:
    """Return the fewest frames that fit `ids` (N,): a doubled letter needs a blank between."""
    return len(ids) + int((ids[1:] == ids[:-1]).sum())


def best_path(log_probs: Tensor, ids: Tensor) -> tuple[list, Tensor]:
    """Return a span (start, end, score) for each character, and each frame's cost (S,), at most 0.

    `log_probs` (S, A), `ids` (N,) without blanks, S at least `frames_needed(ids)`.
    """
    functional = import_torchaudio().functional
    path, scores = functional.forced_align(log_probs[None].contiguous(), ids[None].int())
    spans = functional.merge_tokens(path[0], scores[0])
    return spans, scores[0] - log_probs.amax(-1)


def quiet_frames(loudness: Tensor) -> Tensor:
    """Return which frames (S,) are pauses: in the lowest quarter between noise floor and speech."""
    low, high = torch.quantile(loudness, torch.tensor([0.01, 0.9]))
    return loudness < low + 0.25 * (high - low)


def alignment_score(recognizer: SpeechRecognizer, output: RecognizerOutput, text: str) -> Alignment:
    """Align `text` with one clip's recogniser output; the score is -inf if it cannot fit."""
    log_probs = output.log_probs
    ids = recognizer.encode(text)
    reason = ""
    if len(ids) == 0:
        reason = "no letter of the text is in the recogniser's alphabet"
    elif frames_needed(ids) > len(log_probs):
        reason = f"{len(ids)} characters do not fit into {len(log_probs)} frames"
    elif not torch.isfinite(log_probs).all():
        reason = "the recogniser's output is not finite"
    if reason:
        return Alignment(score=-math.inf, reason=reason)
    spans, costs = best_path(log_probs, ids)
    spoken = torch.zeros(len(costs), dtype=torch.bool)
    for span in spans:
        spoken[span.start : span.end] = True
    costs = costs * (spoken | ~quiet_frames(output.loudness))
    # The frame in the middle of the half second that costs most.
    width = min(len(costs), max(1, round(0.5 / recognizer.frame_s)))
    worst_frame = int(F.avg_pool1d(costs[None], width, stride=1)[0].argmin()) + width // 2
    return Alignment(
        score=float(costs.sum()) / len(ids), worst_at_s=worst_frame * recognizer.frame_s
    )


def align_clips(
    rows: list[Utterance],
    recognizer: SpeechRecognizer,
    config: AlignConfig,
    advance: Callable[[float], None] = lambda clips: None,
) -> list[Alignment]:
    """Align each of `rows`, in their order; `advance(n)` reports n more.

    A recording that cannot be read scores -inf, with the reason.
    """
    alignments: list = [None] * len(rows)
    order = _by_length(rows)
    sample_rate = recognizer.input_sample_rate
    for start in range(0, len(order), config.batch):
        waves = {}
        batch = order[start : start + config.batch]
        for i in batch:
            try:
                waves[i] = load_wave(rows[i].audio, sample_rate)
            except DatasetError as error:
                alignments[i] = Alignment(score=-math.inf, reason=str(error))
        outputs = recognizer.recognize(list(waves.values()), sample_rate)
        for i, output in zip(waves, outputs, strict=True):
            alignments[i] = alignment_score(recognizer, output, rows[i].text)
        advance(len(batch))
    return alignments


def _by_length(rows: list[Utterance]) -> list[int]:
    """Return the indices of `rows` from short to long, for batches with little padding."""
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
    """`align_clips`, cached in the file `path` by clips, texts and recogniser.

    `digests` change when the recordings do, one a row. The processes of `group` share the clips,
    and save finished parts beside `path`, so that an interrupted call is resumed. Raises KitError
    where one of them failed.
    """
    clips = [(row.id, row.text, sound) for row, sound in zip(rows, digests, strict=True)]
    key = digest(clips, recognizer.fingerprint(), config)
    folder = Path(path).with_suffix(".parts")
    make = partial(_align_in_parts, rows, recognizer, config, folder, key, progress, group)
    values = cached_result(path, key, make)
    shutil.rmtree(folder, ignore_errors=True)
    return [Alignment(**each) for each in values]


def _align_in_parts(
    rows: list[Utterance],
    recognizer: SpeechRecognizer,
    config: AlignConfig,
    folder: Path,
    key: str,
    progress: Callable,
    group: WorkGroup,
) -> list[dict]:
    order = _by_length(rows)
    size = PART_BATCHES * config.batch
    parts = {}
    for start in range(0, len(order), size):
        parts[folder / f"{start // size:06d}.json"] = order[start : start + size]
    missing = [part for part in parts if read_result(part, key) is None]
    before = len(rows) - sum(len(parts[part]) for part in missing)
    if before:
        progress(before, len(rows))
    jobs = []
    # Processes share whole batches: a clip's score depends, in its last bits, on the padding of its
    # batch, so a batch holds the same clips with any number of processes. Parts are ordered by
    # length, so taking them in turn gives each process about the same work.
    for share in group.split_evenly(missing):
        own = {part: [rows[i] for i in parts[part]] for part in share}
        jobs.append(partial(_align_share, own, key, config))
    if missing:
        group.do(jobs, recognizer, lambda done: progress(before + int(done), len(rows)))
    alignments: list = [None] * len(rows)
    for part, indices in parts.items():
        for i, values in zip(indices, read_result(part, key), strict=True):
            alignments[i] = values
    return alignments


def _align_share(
    parts: dict[Path, list[Utterance]],
    key: str,
    config: AlignConfig,
    recognizer: SpeechRecognizer,
    advance: Callable[[float], None],
) -> None:
    """Align what one process of a group does: {result file: its rows}."""
    for part, rows in parts.items():
        alignments = align_clips(rows, recognizer, config, advance)
        save_result(part, key, [dataclasses.asdict(each) for each in alignments])


def lowest_score(alignments: list[Alignment], config: AlignConfig) -> float:
    """Return the score below which text and audio do not match.

    It is far below the median in terms of the median absolute deviation; up to half of the clips
    can hardly move either. Raises DatasetError when the median is below `hopeless`.
    """
    scores = np.array([a.score for a in alignments])
    median = float(np.median(scores)) if len(scores) else 0.0
    if median < config.hopeless:
        raise DatasetError(
            f"The typical clip scores {median:.2f} nats a character (0 is perfect, at least "
            f"{config.hopeless} is needed): the recogniser does not know these voices or this "
            "language, or most texts belong to other recordings. Check the order of the texts, or "
            "let 01_data_prep train it longer on clips like these (`minutes` of the preset's "
            "section `recognizer`), or use Whisper in its place (`whisper` there: base)."
        )
    deviation = 1.4826 * float(np.median(np.abs(scores - median))) if len(scores) else 0.0
    return median - max(config.spread * deviation, config.least_gap)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Match:
    """The result of comparing texts with recordings."""

    mismatched: list[Finding]
    limits: dict[str, float]  # lowest score allowed, by kind of clip; {}: none could be judged
    note: str

    @property
    def judged(self) -> bool:
        return bool(self.limits)


def match(rows: list[Utterance], alignments: list[Alignment], config: AlignConfig) -> Match:
    """Find the rows whose text and audio do not match; none, with a note, where that is unclear.

    Clips that the recogniser was trained on, and the others, have limits of their own.
    """
    kinds = [TRAINED_ON if row.split == "train" else UNSEEN for row in rows]
    limits: dict[str, float] = {}
    for kind in sorted(set(kinds)) or [UNSEEN]:  # those it was trained on first
        own = [alignment for alignment, other in zip(alignments, kinds) if other == kind]
        try:
            limits[kind] = lowest_score(own, config)
        except DatasetError as error:
            if not limits:
                return Match(mismatched=[], limits={}, note=f"not judged: {error}")
    mismatched = []
    unjudged = 0
    for row, alignment, kind in zip(rows, alignments, kinds, strict=True):
        limit = limits.get(kind, -math.inf)
        if alignment.score == -math.inf or alignment.score < limit:
            detail = alignment.reason or (
                f"alignment score {alignment.score:.2f}, lowest allowed {limit:.2f}, worst near "
                f"{alignment.worst_at_s:.1f} s"
            )
            reason = f"text and audio do not match ({detail})"
            mismatched.append(refuse(row, "mismatch", reason, row.seconds))
        elif limit == -math.inf:
            unjudged += 1
    note = f"{len(mismatched)} of {len(rows):,} clips do not match their text"
    if unjudged:
        note += (
            f"; {unjudged:,} that the recogniser was not trained on could not be judged: their "
            "scores are too low"
        )
    return Match(mismatched=mismatched, limits=limits, note=note)
