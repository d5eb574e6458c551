"""Measure a voice: errors, endings and pace.

It speaks held-out sentences and a recogniser transcribes them.

Shapes: L samples.
"""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from kit.audio.recognizer import SpeechRecognizer, cer
from kit.base.config import require_within
from kit.base.files import encode_wav, write_atomic
from kit.base.hardware import on_device
from kit.dataset.manifest import Utterance
from kit.inference.sampling import GenerateConfig
from kit.inference.voice import Speech, Voice
from kit.model.gpt import SpeechGPT
from kit.text.sentences import SpokenPart


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """The section `evaluate` of a preset."""

    sentences: int = 250  # held-out sentences that the voice speaks
    worst_cer: float = 0.12  # a voice whose CER, less that of the recordings, is higher fails

    def __post_init__(self):
        require_within(self, 1, 100_000, "sentences")
        require_within(self, 0, 1, "worst_cer")


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


def transcribe(
    recognizer: SpeechRecognizer, waves: list[Tensor], sample_rate: int, batch: int = 25
) -> list[str]:
    """Return the transcript of each waveform (L,) at `sample_rate` Hz; "" for silence."""
    transcripts = []
    for start in range(0, len(waves), batch):
        transcripts += recognizer.transcribe_waves(waves[start : start + batch], sample_rate)
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
    transcripts = transcribe(recognizer, [s.wave for s in speech], sample_rate)
    seconds = [len(s.wave) / sample_rate for s in speech]
    scores = Scores(
        cer=cer(transcripts, texts),
        transcripts=tuple(transcripts),
        **ending_figures(rows, seconds, [s.stopped for s in speech]),
    )
    return scores, speech


def ending_figures(rows: list[Utterance], seconds: list[float], stopped: list[bool]) -> dict:
    """Return the fields of `Scores` that need no transcript, of the speech of `rows`."""
    return {
        "eos_rate": sum(stopped) / len(rows),
        "duration_ratio": sum(seconds) / sum(row.speech_s for row in rows),
        "runaway_rate": sum(s > 2 * row.speech_s for s, row in zip(seconds, rows)) / len(rows),
        "sentences": len(rows),
    }


def score_codes(
    voice: Voice, rows: list[Utterance], config: GenerateConfig, batch: int = 64
) -> dict:
    """Return `ending_figures` of the codes of `rows`, for a codec that makes no sound."""
    parts = [SpokenPart(text=row.text, pause_s=0.0) for row in rows]
    speakers = [row.speaker for row in rows]
    generated = voice.generate_parts(parts, speakers, voice.within(config), batch)
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
    named: dict[str, tuple[list[str], list[Tensor]]],
    split: str,
    rate: int,
    folder: Path,
    most: int = 3,
) -> list[dict]:
    """Write the first waveforms of each variant; return rows for the report. Raises DiskError."""
    rows = []
    for variant, (texts, waves) in named.items():
        for i, (text, wave) in enumerate(itertools.islice(zip(texts, waves), most)):
            path = Path(folder) / "samples" / f"{split}-{i}-{variant}.wav"
            write_atomic(path, encode_wav(wave.numpy(), rate))
            rows.append({"text": text, "wav": str(path.relative_to(folder)), "split": split})
    return rows


# --- checks that a voice must pass -------------------------------------------------------------


def recognizer_warning(cer_on_recordings: float | None, worst_cer: float) -> str:
    """Return why the recogniser cannot judge a voice, or "" (also if its error is unknown)."""
    if cer_on_recordings is None or cer_on_recordings <= worst_cer:
        return ""
    return (
        f"the recogniser itself mistakes {cer_on_recordings:.1%} of the letters of recordings: it "
        f"cannot tell whether a voice is below {worst_cer:.1%}, only which voice is better; "
        "listen yourself, give it more `minutes` (preset, section `recognizer`) or more "
        "recordings, or use Whisper instead (--set recognizer.whisper=base)"
    )
