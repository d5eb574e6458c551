"""Forced alignment of texts with clips: how well a clip's text fits.

The recogniser's best path through the given text is compared, frame by frame, with its best
path through any text at all. Where the text is what was said the two are the same and the score is
0; a word too many or too few or a truncated recording costs several nats a character, pauses
nothing. (The alignment is torchaudio's; the score follows Kürzinger et al. 2020.)

Shapes: S output frames of the recogniser, A alphabet + blank, N characters.
"""

import dataclasses
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kit.audio.clip import import_torchaudio, load_wave
from kit.audio.recognizer import RecognizerOutput, SpeechRecognizer
from kit.base.errors import DatasetError
from kit.base.files import cached_result, digest
from kit.dataset.manifest import Utterance
from kit.settings import AlignConfig

PART_BATCHES = 4  # batches whose results share a file until all are done


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alignment:
    score: float  # nats a character; 0 is perfect, -inf impossible
    worst_at_s: float = 0.0  # where text and recording differ most
    reason: str = ""  # why it could not be aligned


def frames_needed(ids: Tensor) -> int:
    """Return the fewest frames that fit `ids` (N,): a doubled letter needs a blank between."""
    return len(ids) + int((ids[1:] == ids[:-1]).sum())


def best_path(log_probs: Tensor, ids: Tensor) -> tuple[list, Tensor]:
    """Return a span (start, end) for each of `ids` and each frame's cost (S,), at most 0.

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
    unfit = partial(Alignment, score=-math.inf)
    if len(ids) == 0:
        return unfit(reason="no letter of the text is in the recogniser's alphabet")
    if frames_needed(ids) > len(log_probs):
        return unfit(reason=f"{len(ids)} characters do not fit into {len(log_probs)} frames")
    if not torch.isfinite(log_probs).all():
        return unfit(reason="the recogniser's output is not finite")
    spans, costs = best_path(log_probs, ids)
    spoken = torch.zeros(len(costs), dtype=torch.bool)
    for span in spans:
        spoken[span.start : span.end] = True
    costs = costs * (spoken | ~quiet_frames(output.loudness))
    # The frame in the middle of the half second that costs most.
    width = min(len(costs), max(1, round(0.5 / recognizer.frame_s)))
    worst_frame = int(F.avg_pool1d(costs[None], width, stride=1)[0].argmin()) + width // 2
    worst_at_s = worst_frame * recognizer.frame_s
    return Alignment(score=float(costs.sum()) / len(ids), worst_at_s=worst_at_s)


def align_clips(
    rows: list[Utterance], recognizer: SpeechRecognizer, config: AlignConfig
) -> list[Alignment]:
    """Align each of `rows`, in their order.

    A damaged recording scores -inf, with the reason. Raises DatasetError for one that is gone.
    """
    alignments: list = [None] * len(rows)
    order = sorted(range(len(rows)), key=lambda i: rows[i].seconds)  # little padding in a batch
    sample_rate = recognizer.input_sample_rate
    for start in range(0, len(order), config.batch):
        waves = {}
        batch = order[start : start + config.batch]
        for i in batch:
            try:
                waves[i] = load_wave(rows[i].audio, sample_rate)
            except DatasetError as error:
                if isinstance(error.__cause__, OSError):  # the score would be kept
                    raise DatasetError(f"{error}. Is its disk mounted? Run again.") from error
                alignments[i] = Alignment(score=-math.inf, reason=str(error))
        outputs = recognizer.recognize(list(waves.values()), sample_rate)
        for i, output in zip(waves, outputs, strict=True):
            alignments[i] = alignment_score(recognizer, output, rows[i].text)
    return alignments


def align_clips_cached(
    rows: list[Utterance],
    digests: list[str | None],
    recognizer: SpeechRecognizer,
    config: AlignConfig,
    path: Path,
    progress: Callable = lambda *_: None,
) -> list[Alignment]:
    """`align_clips`, cached in the file `path` by clips, texts and recogniser.

    `digests`, one a row, change when the recordings do. Parts are saved beside `path`, to resume
    from.
    """
    clips = [(row.id, row.text, sound) for row, sound in zip(rows, digests, strict=True)]
    key = digest(clips, recognizer.fingerprint(), config)
    folder = Path(path).with_suffix(".parts")

    def align_part(part: list[int]) -> list[dict]:
        alignments = align_clips([rows[i] for i in part], recognizer, config)
        return [dataclasses.asdict(alignment) for alignment in alignments]

    def align_in_parts() -> list[dict]:
        order = sorted(range(len(rows)), key=lambda i: rows[i].seconds)
        size = PART_BATCHES * config.batch
        by_row = {}
        for start in range(0, len(order), size):
            part = order[start : start + size]
            part_file = folder / f"{start // size:06d}.json"
            values = cached_result(part_file, key, partial(align_part, part))
            by_row |= zip(part, values, strict=True)
            progress(len(by_row), len(rows))
        return [by_row[i] for i in range(len(rows))]

    values = cached_result(path, key, align_in_parts)
    shutil.rmtree(folder, ignore_errors=True)
    return [Alignment(**value) for value in values]
