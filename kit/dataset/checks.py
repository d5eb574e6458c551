"""Check every row's text and measured audio (limits: ManifestConfig). Originals are only read.

Some checks look at one row, some compare it with the whole dataset. Alignments tell whether a text
is what is said (AlignConfig). The recogniser may be trained on the very clips it checks: those
score higher, and have a limit of their own.
"""

import collections
import dataclasses
import functools
import math
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from kit.audio.clip import KEPT_SILENCE_S, ClipMeasure
from kit.base.errors import DatasetError
from kit.dataset.alignment import Alignment
from kit.dataset.clip_stats import MEASURES, measure_clips
from kit.dataset.data_report import DataReport, Finding, refuse, write_data_report
from kit.dataset.layouts import (
    EVALUATION,
    hold_out,
    read_dataset,
    require_training_rows,
    with_evaluation,
)
from kit.dataset.manifest import Utterance
from kit.settings import AlignConfig, ManifestConfig
from kit.text.normalize import letters, unicode_script

LEAST_SPOKEN = 0.1  # of the lowest pace: a long recording with less has lost most of its text
MAX_GAP_S = 1.0  # of silence within the speech, before a warning


def check_dataset(
    source: Path,
    config: ManifestConfig,
    into: Path,
    progress: Callable = lambda *_: None,
    evaluation: Path | None = None,
) -> DataReport:
    """Check a folder or table; write manifest.jsonl, ledger.jsonl and warnings.jsonl under `into`.

    All rows of `evaluation`, another one, are held out.

    Clips measured before, and unchanged since, are not read again (`measures.jsonl`), so an
    interrupted check is resumed. `progress(done, total)` counts clips. Raises DatasetError when
    `source` is not a dataset or disappears; for refused rows call `DataReport.require_usable`.
    """
    into = Path(into)
    dataset = read_dataset(source, config)
    require_training_rows(dataset.rows)
    if evaluation:
        own_root = dataclasses.replace(config, audio_root="")  # that of the other dataset
        dataset = with_evaluation(dataset, read_dataset(evaluation, own_root))
    paths = [row.audio for row in dataset.rows]
    measures = measure_clips(paths, into / MEASURES, config.max_clip_s, progress=progress)
    kept, refused, warned = judge_rows(dataset.rows, measures, config)
    trained = sum(row.split == "train" for row in dataset.rows)
    if evaluation and not any(row.id.startswith(EVALUATION) for row in kept):
        reasons = [each for each in dataset.refused + refused if each.id.startswith(EVALUATION)]
        raise DatasetError(
            f"No recording of the evaluation data {evaluation} can be used. The first: "
            f"{reasons[0].id}: {reasons[0].reason}; {reasons[0].cure}."
        )
    kept = hold_out(kept, config, trained)  # the held-out rows may be among the rejected ones
    report = DataReport(
        layout=dataset.layout,
        kept=kept,
        refused=dataset.refused + refused,
        warned=warned,
        measures={path: m for path, m in measures.items() if isinstance(m, ClipMeasure)},
    )
    write_data_report(report, into)
    return report


def judge_rows(
    rows: list[Utterance], measures: dict[str, ClipMeasure | str], config: ManifestConfig
) -> tuple[list[Utterance], list[Finding], list[Finding]]:
    """Return kept rows with their seconds, refusals and warnings, each in the order of `rows`.

    `measures` holds, by path of the recording, its measure or the reason why there is none.
    """
    readable = [row for row in rows if isinstance(measures[row.audio], ClipMeasure)]
    stats = DatasetStats(readable, measures, config)
    kept = []
    refused = []
    warned = []
    for row in rows:
        measure = measures[row.audio]
        if isinstance(measure, str):
            refused.append(refuse(row, "unreadable", measure))
            continue
        problems = list(own_faults(row, measure, config)) or list(outliers(row, measure, stats))
        if problems:
            reason = "; ".join(text for _, text in problems)
            refused.append(refuse(row, problems[0][0], reason, measure.seconds))
            continue
        silence_s = trimmed_s(measure)
        kept.append(dataclasses.replace(row, seconds=measure.seconds, silence_s=silence_s))
        for kind, reason in row_warnings(row, measure, stats, config):
            warned.append(refuse(row, kind, reason, measure.seconds))
    return kept, refused, warned


Problems = Iterator[tuple[str, str]]  # (kind, reason)


def own_faults(row: Utterance, measure: ClipMeasure, config: ManifestConfig) -> Problems:
    """Yield everything wrong with a row by itself."""
    seconds = measure.seconds
    if seconds < config.min_clip_s:
        yield "too short", f"shorter than {config.min_clip_s} s"
    low, high = config.characters_per_s
    pace = pace_of(row, measure)
    if seconds > config.max_clip_s:
        yield "too long", f"{seconds:.1f} s, longer than {config.max_clip_s:.1f} s"
        if pace < LEAST_SPOKEN * low:
            yield "pace", f"its {len(row.text)} characters of text are those of a few seconds"
        return  # it was not decoded
    if not 4000 <= measure.rate_hz <= 768_000:  # lower is inaudible, a higher one a wrong header
        yield "sample rate", f"{measure.rate_hz:,} Hz, not a sample rate of speech"
    if len(row.text) > config.most_characters:
        yield "long text", f"text longer than {config.most_characters} characters"
    if measure.mono_peak < config.silence_peak:
        yield "silent", f"silent (peak {measure.mono_peak:.4f} of full scale)"
    if measure.differs:
        yield "two channels", "its two channels hold different sound, as of two people"
    if measure.clipped > config.clipped_share:
        yield "clipped", f"clipped ({measure.clipped:.1%} of samples)"
    if measure.peak > config.most_peak:
        yield "too loud", f"its samples reach {measure.peak:.3g} times full scale"
    if abs(measure.dc) > config.most_dc:
        yield "dc offset", f"its mean is {measure.dc:+.2f} of full scale, not zero"
    if not low <= pace <= high:
        yield "pace", f"{pace:.1f} characters a second: text and audio do not match"


def trimmed_s(measure: ClipMeasure) -> float:
    """Return how much silence around the speech is trimmed, in seconds."""
    edges_s = (measure.leading_s or 0.0, measure.trailing_s or 0.0)
    return round(sum(max(edge_s - KEPT_SILENCE_S, 0.0) for edge_s in edges_s), 2)


def pace_of(row: Utterance, measure: ClipMeasure) -> float:
    """Return letters and spaces per second of the clip, without the silence around its speech."""
    return len(letters(row.text)) / max(measure.seconds - trimmed_s(measure), 1e-3)


class DatasetStats:
    """What is usual in a dataset, and what occurs more than once."""

    def __init__(self, rows: list[Utterance], measures: dict, config: ManifestConfig):
        paces = [pace_of(row, measures[row.audio]) for row in rows]
        self.pace = usual_paces(paces, config.pace_deviations)  # lowest, highest: characters a s
        rates_hz = collections.Counter(measures[row.audio].rate_hz for row in rows)
        self.usual_hz = rates_hz.most_common(1)[0][0] if rates_hz else 0
        few_clips = config.odd_share * rates_hz.total()
        self.odd_rates_hz = {rate for rate, count in rates_hz.items() if count < few_clips}
        scripts = collections.Counter()  # letters of each, as Unicode names it: LATIN, CYRILLIC ...
        for letter, count in collections.Counter("".join(row.text for row in rows)).items():
            scripts[script(letter)] += count
        scripts.pop("", None)
        few_letters = config.odd_share * scripts.total()
        self.odd_scripts = {name for name, count in scripts.items() if count < few_letters}
        self.same_audio = collections.defaultdict(list)  # digest -> rows
        self.same_text = collections.defaultdict(list)  # (speaker, text) -> rows
        for row in rows:
            self.same_audio[measures[row.audio].digest].append(row)
            self.same_text[row.speaker, row.text].append(row)
        self.training_texts = {row.text for row in rows if row.split == "train"}


def usual_paces(paces: Iterable[float], deviations: float) -> tuple[float, float]:
    """Return the lowest and highest pace that is usual, from the median deviation of its log.

    No limits below 30 clips.
    """
    logs = np.log([pace for pace in paces if pace > 0])
    if len(logs) < 30:
        return 0.0, math.inf
    median = float(np.median(logs))
    deviation = 1.4826 * float(np.median(np.abs(logs - median)))
    # At least 15 %, the variation of one calm reader: else a very even dataset would lose all its
    # short sentences.
    width = min(deviations * max(deviation, 0.15), 700.0)  # exp of more overflows
    return math.exp(median - width), math.exp(median + width)


@functools.cache
def script(letter: str) -> str:
    """Return the Unicode script of a letter, such as ETHIOPIC; "" for all other characters."""
    is_letter = unicodedata.category(letter) in ("Lu", "Ll", "Lt", "Lo")  # Lm: ʼ is in any script
    return unicode_script(letter) if is_letter else ""


def outliers(row: Utterance, measure: ClipMeasure, stats: DatasetStats) -> Problems:
    """Yield what sets a row apart from the rest of its dataset."""
    same = stats.same_audio[measure.digest] if measure.digest else [row]
    other_text = [twin for twin in same if twin.text != row.text]
    if other_text or same[0] != row:
        first = (other_text or same)[0]
        reason = f"the same recording as {first.id} ({first.file}, line {first.line})"
        yield "same recording", reason + ", under another text" * bool(other_text)
    if measure.rate_hz in stats.odd_rates_hz:
        yield "sample rate", f"{measure.rate_hz} Hz among recordings of {stats.usual_hz} Hz"
    odd_letters = sorted({c for c in row.text if script(c) in stats.odd_scripts})
    if odd_letters:
        names = ", ".join(sorted({script(c).title() for c in odd_letters}))
        yield "alphabet", f"letters of another script ({names}): {' '.join(odd_letters)}"
    pace = pace_of(row, measure)
    low, high = stats.pace
    if not low <= pace <= high:
        yield "pace", f"{pace:.1f} characters a second, far from the usual {low:.1f} to {high:.1f}"


def row_warnings(
    row: Utterance, measure: ClipMeasure, stats: DatasetStats, config: ManifestConfig
) -> Problems:
    """Yield warnings about a kept row; a repeated text is reported once."""
    repeats = stats.same_text[row.speaker, row.text]
    if len(repeats) > 1 and repeats[0] == row:
        yield "repeated text", f"said {len(repeats)} times by {row.speaker}"
    if max(measure.leading_s, measure.trailing_s) > config.edge_silence_s:
        ends = f"{measure.leading_s:.1f} s before, {measure.trailing_s:.1f} s after"
        yield "edge silence", f"silence around the speech: {ends}"
    if measure.gap_s > MAX_GAP_S:
        yield "gap", f"{measure.gap_s:.1f} s of silence within the speech"
    if measure.clipped > config.clipped_share / 10:
        yield "clipped", f"partly clipped ({measure.clipped:.2%} of samples)"
    if measure.cancels:
        reason = f"its {measure.channels} channels cancel each other: the loudest one is taken"
        yield "opposite phase", reason
    if row.split != "train" and row.text in stats.training_texts:
        yield "also in training", f"this sentence of `{row.split}` is also in training"


# --- texts that do not match their recordings -----------------------------------------------------


def lowest_score(alignments: list[Alignment], config: AlignConfig) -> float:
    """Return the score below which text and audio do not match.

    It is far below the median in terms of the median absolute deviation; up to half of the clips
    can hardly move either. Raises DatasetError when the median is below `hopeless`.
    """
    scores = np.array([a.score for a in alignments] or [0.0])
    median = float(np.median(scores))
    if median < config.hopeless:
        raise DatasetError(
            f"The typical clip scores {median:.2f} nats a character (0 is perfect, at least "
            f"{config.hopeless} is needed): the recogniser does not know these voices or this "
            "language, or most texts belong to other recordings. Check the order of the texts, or "
            "let 01_data_prep train it longer on clips like these (`minutes` of the preset's "
            "section `recognizer`), or use Whisper in its place (`whisper` there: base)."
        )
    deviation = 1.4826 * float(np.median(np.abs(scores - median)))
    return median - max(config.spread * deviation, config.least_gap)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Match:
    mismatched: list[Finding]
    limits: dict[str, float]  # lowest score allowed, by kind of clip; {}: none could be judged
    note: str

    @property
    def judged(self) -> bool:
        return bool(self.limits)


def match(rows: list[Utterance], alignments: list[Alignment], config: AlignConfig) -> Match:
    """Find the rows whose text and audio do not match; none, with a note, where that is unclear."""
    # Clips that the recogniser was trained on score higher, so each kind has a limit of its own.
    kinds = ["trained on" if row.split == "train" else "unseen" for row in rows]
    limits: dict[str, float] = {}
    for kind in sorted(set(kinds)) or ["unseen"]:  # those it was trained on first
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
            scores = f"alignment score {alignment.score:.2f}, lowest allowed {limit:.2f}"
            detail = alignment.reason or f"{scores}, worst near {alignment.worst_at_s:.1f} s"
            reason = f"text and audio do not match ({detail})"
            mismatched.append(refuse(row, "mismatch", reason, row.seconds))
        elif limit == -math.inf:
            unjudged += 1
    note = f"{len(mismatched)} of {len(rows):,} clips do not match their text"
    if unjudged:
        note += f"; {unjudged:,} that the recogniser was not trained on score too low to be judged"
    return Match(mismatched=mismatched, limits=limits, note=note)
