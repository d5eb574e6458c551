"""The rules of the ledger: from a row's text and measures to refusals and warnings.

Some look at one row (too long, silent, clipped), some at the whole dataset (a recording that stands
there twice, a reading pace far from everyone else's, letters of another script): for those, a
`Survey` is taken first. The limits are ManifestConfig's. Knows no file format and reads no audio.
"""

import collections
import dataclasses
import functools
import itertools
import math
import statistics
import unicodedata
from collections.abc import Iterator

from kit.audio.clip import KEPT_SILENCE_S, ClipMeasure
from kit.dataset.data_report import Finding, ManifestConfig, Utterance, refuse
from kit.text.normalize import letters, unicode_script

SLOWEST_HZ = 4000
FASTEST_HZ = 768_000  # below, no speech is left; above, the header is wrong
LOUD = 1.1  # times full scale: what MP3 and Vorbis overshoot by is not worth a word


def judge_rows(
    rows: list[Utterance], measures: dict[str, ClipMeasure | str], config: ManifestConfig
) -> tuple[list[Utterance], list[Finding], list[Finding]]:
    """(kept rows with their seconds, refusals, warnings), each in the order of `rows`.

    `measures` by path of the recording, or in words why it has none.
    """
    readable = [r for r in rows if isinstance(measures[r.audio], ClipMeasure)]
    whole = survey(readable, measures, config)
    kept = []
    refused = []
    warned = []
    for row in rows:
        measure = measures[row.audio]
        if isinstance(measure, str):
            refused.append(refuse(row, "unreadable", measure))
            continue
        against = list(own_faults(row, measure, config)) or list(odd_ones(row, measure, whole))
        if against:
            reason = "; ".join(text for _, text in against)
            refused.append(refuse(row, against[0][0], reason, measure.seconds))
            continue
        silence_s = superfluous_silence_s(measure)
        kept.append(dataclasses.replace(row, seconds=measure.seconds, silence_s=silence_s))
        warned += [
            refuse(row, *found, measure.seconds) for found in doubts(row, measure, whole, config)
        ]
    return kept, refused, warned


def superfluous_silence_s(measure: ClipMeasure) -> float:
    """Seconds at both ends that `trim_silence` leaves out."""
    edges_s = (measure.leading_s or 0.0, measure.trailing_s or 0.0)
    return round(sum(max(edge_s - KEPT_SILENCE_S, 0.0) for edge_s in edges_s), 2)


def own_faults(
    row: Utterance, measure: ClipMeasure, config: ManifestConfig
) -> Iterator[tuple[str, str]]:
    """(kind, reason) of everything wrong with a row by itself."""
    seconds = measure.seconds
    if seconds < config.shortest_s:
        yield "too short", f"shorter than {config.shortest_s} s"
    if seconds > config.longest_s:
        yield "too long", f"{seconds:.1f} s, longer than {config.longest_s:.1f} s"
        return  # an hour is not even decoded
    if not SLOWEST_HZ <= measure.rate_hz <= FASTEST_HZ:
        yield "sample rate", f"{measure.rate_hz:,} Hz, no rate that speech is recorded at"
    if len(row.text) > config.most_characters:
        yield "long text", f"text longer than {config.most_characters} characters"
    if measure.peak < config.silence_peak:
        yield "silent", f"silent (peak {measure.peak:.4f} of full scale)"
    if measure.clipped > config.clipped_share:
        yield "clipped", f"clipped ({measure.clipped:.1%} of samples)"
    if measure.peak > config.most_peak:
        yield "too loud", f"its samples reach {measure.peak:.3g} times full scale"
    if abs(measure.dc) > config.most_dc:
        yield "dc offset", f"its mean is {measure.dc:+.2f} of full scale, not zero"
    if None not in (config.least_snr_db, measure.snr_db) and measure.snr_db < config.least_snr_db:
        yield "noisy", f"speech only {measure.snr_db:.0f} dB above the noise"
    low, high = config.characters_per_s
    pace = pace_of(row, measure)
    if not low <= pace <= high:
        yield "pace", f"{pace:.1f} characters a second: text and audio do not match"


def pace_of(row: Utterance, measure: ClipMeasure) -> float:
    """Letters and spaces a second, of the whole clip."""
    return len(letters(row.text)) / max(measure.seconds, 1e-3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Survey:
    """What is usual in a dataset, and what stands there more than once."""

    pace: tuple[float, float]  # the lowest and highest that is no outlier, characters a second
    odd_rates_hz: dict[int, int]  # a rate few clips have -> the rate most have
    odd_scripts: set[str]  # as Unicode names them: LATIN, CYRILLIC ...
    rare_letters: set[str]
    same_audio: dict[str, list[Utterance]]  # digest -> rows, where there are several
    same_text: dict[tuple[str, str], list[Utterance]]  # (speaker, text) -> rows
    training_texts: set[str]
    most_repeats: float


def survey(rows: list[Utterance], measures: dict, config: ManifestConfig) -> Survey:
    """The dataset-wide facts that `odd_ones` and `doubts` hold a row against."""
    heard = collections.defaultdict(list)
    said = collections.defaultdict(list)
    for row in rows:
        if measures[row.audio].digest:
            heard[measures[row.audio].digest].append(row)
        said[row.speaker, row.text].append(row)
    texts = [row.text for row in rows]
    return Survey(
        pace=usual_paces([pace_of(r, measures[r.audio]) for r in rows], config.pace_deviations),
        odd_rates_hz=_odd_rates([measures[r.audio].rate_hz for r in rows], config.odd_share),
        odd_scripts=_odd_scripts(texts, config.odd_share),
        rare_letters=_rare_letters(texts),
        same_audio={digest: found for digest, found in heard.items() if len(found) > 1},
        same_text={key: found for key, found in said.items() if len(found) > 1},
        training_texts={row.text for row in rows if row.split == "train"},
        most_repeats=config.most_repeats or math.inf,
    )


def usual_paces(paces: list[float], deviations: float) -> tuple[float, float]:
    """The lowest and highest pace that is no outlier, from median and median deviation of its log.

    No limits below 30 clips. One deviation is at least 15 %, which sentences of one calm reader
    differ by: in a very even dataset nothing else would be refused but what is short.
    """
    logs = [math.log(pace) for pace in paces if pace > 0]
    if len(logs) < 30:
        return 0.0, math.inf
    middle = statistics.median(logs)
    spread = 1.4826 * statistics.median(abs(value - middle) for value in logs)
    width = min(deviations * max(spread, 0.15), 700.0)  # exp of more is no float
    return math.exp(middle - width), math.exp(middle + width)


def _odd_rates(rates_hz: list[int], share: float) -> dict[int, int]:
    counts = collections.Counter(rates_hz)
    usual_hz = counts.most_common(1)[0][0] if counts else 0
    return {rate: usual_hz for rate, n in counts.items() if n < share * len(rates_hz)}


def _odd_scripts(texts: list[str], share: float) -> set[str]:
    counts = collections.Counter()
    for letter, count in collections.Counter(itertools.chain.from_iterable(texts)).items():
        counts[script(letter)] += count
    counts.pop("", None)
    return {name for name, count in counts.items() if count < share * counts.total()}


@functools.cache
def script(letter: str) -> str:
    """The script of a letter as Unicode names it, such as ETHIOPIC; "" for all other characters."""
    if unicodedata.category(letter) not in ("Lu", "Ll", "Lt", "Lo"):  # Lm: ʼ goes with any script
        return ""
    return unicode_script(letter)


def _rare_letters(texts: list[str]) -> set[str]:
    """Letters that only one or two texts of a thousand and more have."""
    if len(texts) < 1000:
        return set()
    counts = collections.Counter(itertools.chain.from_iterable(map(set, texts)))
    return {letter for letter, count in counts.items() if count <= 2 and letter.isalpha()}


def odd_ones(row: Utterance, measure: ClipMeasure, whole: Survey) -> Iterator[tuple[str, str]]:
    """(kind, reason) of what sets a row apart from the rest of its dataset."""
    twins = whole.same_audio.get(measure.digest, [])
    others = [twin for twin in twins if twin.text != row.text]
    if others:
        yield "same recording", f"the very recording of {_place(others[0])}, under another text"
    elif twins and twins[0] is not row:
        yield "same recording", f"the very recording of {_place(twins[0])}"
    usual_hz = whole.odd_rates_hz.get(measure.rate_hz)
    if usual_hz:
        yield "sample rate", f"{measure.rate_hz} Hz among recordings of {usual_hz} Hz"
    strange = sorted({c for c in row.text if script(c) in whole.odd_scripts})
    if strange:
        names = ", ".join(sorted({script(c).title() for c in strange}))
        yield "alphabet", f"letters of another script ({names}): {' '.join(strange)}"
    pace = pace_of(row, measure)
    (low, high) = whole.pace
    if not low <= pace <= high:
        yield "pace", f"{pace:.1f} characters a second, far from the usual {low:.1f} to {high:.1f}"
    repeats = whole.same_text.get((row.speaker, row.text), [])
    if len(repeats) > whole.most_repeats and row not in repeats[: whole.most_repeats]:
        yield "repeated text", f"said {len(repeats)} times by {row.speaker}"


def _place(row: Utterance) -> str:
    return f"{row.id} ({row.file}, line {row.line})"


def doubts(
    row: Utterance, measure: ClipMeasure, whole: Survey, config: ManifestConfig
) -> Iterator[tuple[str, str]]:
    """(kind, what) worth a look in a row that is kept; a repeated text is told once."""
    repeats = whole.same_text.get((row.speaker, row.text), [])
    if repeats and repeats[0] is row:
        yield "repeated text", f"said {len(repeats)} times by {row.speaker}"
    if max(measure.leading_s, measure.trailing_s) > config.edge_silence_s:
        ends = f"{measure.leading_s:.1f} s before, {measure.trailing_s:.1f} s after"
        yield "edge silence", f"silence round the speech: {ends}"
    if measure.clipped > config.clipped_share / 10:
        yield "clipped", f"partly clipped ({measure.clipped:.2%} of samples)"
    if measure.peak > LOUD:
        scaled = f"its samples reach {measure.peak:.3g} times full scale"
        yield "too loud", f"{scaled}: it is read scaled down to 1"
    rare = sorted(whole.rare_letters.intersection(row.text))
    if rare:
        yield "rare letter", f"letters that hardly any other text has: {' '.join(rare)}"
    if row.split != "train" and row.text in whole.training_texts:
        yield "also in training", f"this sentence of `{row.split}` is in training, too"
