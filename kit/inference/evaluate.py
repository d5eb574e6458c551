"""Measure a voice, and name each misread word.

It speaks held-out sentences and a recogniser transcribes them. A transcript is aligned with its
text by the cheapest edit path over words (Levenshtein), in which two words may also become one or
one two. Shapes: L samples.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor

from kit.audio.recognizer import SpeechRecognizer, cer, edit_distance
from kit.base.files import encode_wav, write_atomic
from kit.base.hardware import on_device
from kit.dataset.manifest import Utterance
from kit.inference.voice import Speech, Voice
from kit.model.gpt import SpeechGPT
from kit.settings import GenerateConfig
from kit.text.normalize import letters
from kit.text.sentences import SpokenPart

TRANSCRIBE_BATCH = 25  # waveforms transcribed together
SAVED_SAMPLES = 3  # of each variant

KINDS = {
    "left out": "a word of the text that is missing",
    "doubled": "a word that was said twice",
    "added": "a word that the text does not have",
    "merged": "two words that were recognised as one",
    "split": "one word that was recognised as two",
    "replaced": "another word was recognised",
    "misspelt": "a few letters differ: often the recogniser's mistake",
}
MERGE_COST = 0.5  # of two words becoming one, or one two; less than a word left out
MISSPELT = 0.5  # share of letters that may differ in the same word
CACHE_SIZE = 50_000  # pairs of words
STEPS = ((1, 1), (1, 0), (0, 1), (2, 1), (1, 2))  # (words of the text, words of the transcript)


# --- error rates --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    cer: float  # character error rate of the transcripts, 0.04 is 4 %
    eos_rate: float  # share of sentences that ended by STOP
    duration_ratio: float  # seconds spoken / seconds recorded, all sentences together
    sentences: int
    runaway_rate: float = 0.0  # share of sentences that took over twice as long as recorded
    transcripts: tuple[str, ...] = ()

    def figures(self) -> dict:
        """Return the numbers, without transcripts."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k != "transcripts"}


def transcribe(recognizer: SpeechRecognizer, waves: list[Tensor], sample_rate: int) -> list[str]:
    """Return the transcript of each waveform (L,) at `sample_rate` Hz; "" for silence."""
    transcripts = []
    for start in range(0, len(waves), TRANSCRIBE_BATCH):
        batch = waves[start : start + TRANSCRIBE_BATCH]
        transcripts += recognizer.transcribe_waves(batch, sample_rate)
    return transcripts


def score(
    voice: Voice,
    rows: list[Utterance],
    recognizer: SpeechRecognizer,
    config: GenerateConfig,
    batch: int = 64,
) -> tuple[Scores, list[Speech]]:
    """Speak the text of every row in its own speaker's voice, `batch` at a time, and score it."""
    texts = [row.text for row in rows]
    speech = voice.speak(texts, [row.speaker for row in rows], config, batch)
    sample_rate = voice.codec.sample_rate
    transcripts = tuple(transcribe(recognizer, [s.wave for s in speech], sample_rate))
    seconds = [len(s.wave) / sample_rate for s in speech]
    endings = ending_figures(rows, seconds, [s.stopped for s in speech])
    return Scores(cer=cer(transcripts, texts), transcripts=transcripts, **endings), speech


def ending_figures(rows: list[Utterance], seconds: list[float], stopped: list[bool]) -> dict:
    """Return the fields of `Scores` that need no transcript, of the speech of `rows`."""
    return {
        "eos_rate": sum(stopped) / len(rows),
        "duration_ratio": sum(seconds) / sum(row.speech_s for row in rows),
        "runaway_rate": sum(s > 2 * row.speech_s for s, row in zip(seconds, rows)) / len(rows),
        "sentences": len(rows),
    }


def score_codes(voice: Voice, rows: list[Utterance], config: GenerateConfig) -> dict:
    """Return `ending_figures` of the codes of `rows`, for a codec that makes no sound."""
    parts = [SpokenPart(text=row.text, pause_s=0.0) for row in rows]
    speakers = [row.speaker for row in rows]
    generated = voice.generate_parts(parts, speakers, voice.within(config), batch=64)
    seconds = [len(row.codes) / voice.codec.frame_rate for row in generated]
    return ending_figures(rows, seconds, [row.stopped for row in generated])


def gate_evaluator(
    voice: Voice, rows: list[Utterance], recognizer: SpeechRecognizer, config: GenerateConfig
) -> Callable[[SpeechGPT], dict]:
    """Return a function that scores a model on `rows`, with the rest of `voice` on its device."""

    def evaluate(model: SpeechGPT) -> dict:
        current = dataclasses.replace(voice, model=model, decoder=None)
        device = model.final_norm.weight.device
        with on_device(device, voice.codec, voice.reader, recognizer):
            return score(current, rows, recognizer, config)[0].figures()

    return evaluate


def save_samples(
    named: dict[str, tuple[list[str], list[Tensor]]], split: str, rate: int, folder: Path
) -> list[dict]:
    """Write the first waveforms of each variant; return rows for the report. Raises DiskError."""
    rows = []
    for variant, (texts, waves) in named.items():
        for i, (text, wave) in enumerate(zip(texts[:SAVED_SAMPLES], waves)):
            wav = f"samples/{split}-{i}-{variant}.wav"
            write_atomic(Path(folder) / wav, encode_wav(wave.numpy(), rate))
            rows.append({"text": text, "wav": wav, "split": split})
    return rows


# --- misread words -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class WordPair:
    """One or two words of a text, and the words of the transcript in their place."""

    words: tuple[str, ...]  # of the text; none for one that was added
    recognized: tuple[str, ...]  # none for one that was left out
    kind: str  # one of KINDS; "" where both are the same


def align_words(text: str, transcript: str) -> list[WordPair]:
    """Return the words of `text` paired with those of `transcript`, without punctuation."""
    words = letters(text).split()
    recognized_words = letters(transcript).split()
    if words == recognized_words:
        return [WordPair(words=(word,), recognized=(word,), kind="") for word in words]
    best = {(0, 0): (0.0, None)}  # (words, recognized words) so far: cost and last pair
    for i, j in itertools.product(range(len(words) + 1), range(len(recognized_words) + 1)):
        options = []
        for di, dj in STEPS:
            if (i - di, j - dj) in best:
                text_part = tuple(words[i - di : i])
                recognized_part = tuple(recognized_words[j - dj : j])
                cost, kind = word_cost(text_part, recognized_part)
                pair = WordPair(words=text_part, recognized=recognized_part, kind=kind)
                options.append((best[i - di, j - dj][0] + cost, pair))
        if options:
            best[i, j] = min(options, key=lambda option: option[0])
    pairs = []
    i = len(words)
    j = len(recognized_words)
    while i or j:
        pair = best[i, j][1]
        pairs.append(pair)
        i -= len(pair.words)
        j -= len(pair.recognized)
    return pairs[::-1]


@functools.lru_cache(CACHE_SIZE)
def word_cost(words: tuple[str, ...], recognized: tuple[str, ...]) -> tuple[float, str]:
    """Return the cost (or infinity) of `recognized` in place of `words`, and the kind of error."""
    if not recognized:
        return 1.0, "left out"
    if not words:
        return 1.0, "added"
    if len(words) == 2:
        return _joint(words, recognized[0], "merged")
    if len(recognized) == 2:
        doubled = max(difference(word, words[0]) for word in recognized)
        if doubled <= MISSPELT:
            return MERGE_COST + doubled, "doubled"
        return _joint(recognized, words[0], "split")
    distance = difference(words[0], recognized[0])
    if distance == 0:
        return 0.0, ""
    return distance, "misspelt" if distance <= MISSPELT else "replaced"


def _joint(two: tuple[str, ...], one: str, kind: str) -> tuple[float, str]:
    """Return the cost of `one` for both words of `two`: finite if nearer to both than to one."""
    both = "".join(two)
    if abs(len(both) - len(one)) > MISSPELT * max(len(both), len(one)):
        return math.inf, kind  # known from the lengths, much faster
    distance = difference(both, one)
    nearer = distance < min(difference(word, one) for word in two)
    return (MERGE_COST + distance if nearer and distance <= MISSPELT else math.inf), kind


@functools.lru_cache(CACHE_SIZE)
def difference(word: str, other: str) -> float:
    """Return the share of letters that differ, 0 to 1."""
    return edit_distance(word, other) / max(len(word), len(other))


def count_kinds(pairs: list[WordPair]) -> dict[str, int]:
    counts = collections.Counter(pair.kind for pair in pairs)
    return {kind: counts[kind] for kind in KINDS}


@dataclasses.dataclass(frozen=True, kw_only=True)
class WordStats:
    """How often a word was in the texts, and how often it was not recognised."""

    word: str
    count: int
    wrong: int
    kinds: tuple[str, ...]  # of error, most frequent first
    recognized: tuple[str, ...]  # instead, most frequent first


def word_stats(pairs: list[WordPair]) -> list[WordStats]:
    """Return every word of the texts, most errors first."""
    by_word = collections.defaultdict(list)
    for pair in pairs:
        for word in pair.words:
            by_word[word].append(pair)
    stats = []
    for word, word_pairs in by_word.items():
        wrong = [pair for pair in word_pairs if pair.kind]
        record = WordStats(
            word=word,
            count=len(word_pairs),
            wrong=len(wrong),
            kinds=by_frequency(pair.kind for pair in wrong),
            recognized=by_frequency(" ".join(pair.recognized) for pair in wrong),
        )
        stats.append(record)
    return sorted(stats, key=lambda r: (-r.wrong, r.wrong / r.count, r.word))


def by_frequency(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(value for value, _ in collections.Counter(values).most_common())
