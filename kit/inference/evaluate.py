"""How good is the voice: figures anyone can measure again, with their noise floor beside them.

Speaks held-out sentences, lets the recogniser write down what it hears, and counts: character
error rate, how often the model found its own end, how long it took against the recording. The same
recogniser on the recordings, and on the codec's round trip, gives the floor. Knows a `Voice` and a
manifest; nothing of training.
"""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from kit.audio.clip import load_wave
from kit.audio.codec import Codec
from kit.audio.recognizer import SpeechRecognizer, cer
from kit.base.files import write_atomic
from kit.base.hardware import on_device
from kit.base.wav import encode_wav
from kit.dataset.data_report import Utterance
from kit.inference.sampling import GenerateConfig
from kit.inference.voice import Speech, Voice
from kit.model.gpt import SpeechGPT

# A held-out loss so many times the training loss is that of a corpus known by heart.
OVERFIT_RATIO = 1.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    cer: float  # character error rate of the transcripts, 0.04 is 4 %
    eos_rate: float  # share of sentences that ended by STOP
    duration_ratio: float  # seconds spoken / seconds of recorded speech, all sentences together
    sentences: int
    runaway_rate: float = 0.0  # share of sentences that took over twice as long as recorded
    heard: tuple[str, ...] = ()

    def figures(self) -> dict:
        """The numbers alone, for the report."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k != "heard"}


def transcribe(
    recognizer: SpeechRecognizer, waves: list[Tensor], sample_rate: int, batch: int = 25
) -> list[str]:
    """What the recogniser hears in each waveform (L,) of `sample_rate` Hz; empty is silence."""
    heard = []
    for start in range(0, len(waves), batch):
        heard += recognizer.transcribe_waves(waves[start : start + batch], sample_rate)
    return heard


def score(
    voice: Voice,
    rows: list[Utterance],
    recognizer: SpeechRecognizer,
    config: GenerateConfig,
    batch: int = 64,
) -> tuple[Scores, list[Speech]]:
    """Speak every row's text in its own speaker's voice, `batch` at a time, and measure."""
    speech = voice.speak([r.text for r in rows], [r.speaker for r in rows], config, batch)
    heard = transcribe(recognizer, [s.wave for s in speech], voice.codec.sample_rate)
    seconds = [len(s.wave) / voice.codec.sample_rate for s in speech]
    scores = Scores(
        cer=cer(heard, [r.text for r in rows]),
        eos_rate=sum(s.stopped for s in speech) / len(speech),
        duration_ratio=sum(seconds) / sum(r.speech_s for r in rows),
        runaway_rate=sum(s > 2 * r.speech_s for s, r in zip(seconds, rows)) / len(rows),
        sentences=len(rows),
        heard=tuple(heard),
    )
    return scores, speech


def hearing(
    voice: Voice, rows: list[Utterance], recognizer: SpeechRecognizer, config: GenerateConfig
) -> Callable[[SpeechGPT], dict]:
    """A gate for training: what a model, in place of the voice's own, makes of `rows`.

    While it speaks, codec, reader and recogniser are on the model's device.
    """

    def listen(model: SpeechGPT) -> dict:
        heard = dataclasses.replace(voice, model=model, decoder=None)
        device = model.final_norm.weight.device
        with on_device(device, voice.codec, voice.reader, recognizer):
            return score(heard, rows, recognizer, config)[0].figures()

    return listen


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoiseFloor:
    """What the recogniser makes of recordings: every other figure is read against it."""

    cer: float  # character error rate on the recordings
    cer_codec: float  # on the recordings after the codec: no voice built on it can be below
    heard: tuple[str, ...]  # after the codec


def noise_floor(rows: list[Utterance], recognizer: SpeechRecognizer, codec: Codec) -> NoiseFloor:
    """The recogniser's own errors on `rows`, and those on the codec's round trip."""
    input_sample_rate = recognizer.input_sample_rate
    recordings = [load_wave(row.audio, input_sample_rate) for row in rows]
    waves = [load_wave(row.audio, codec.sample_rate) for row in rows]
    again = [codec.round_trip(wave) for wave in waves]
    texts = [row.text for row in rows]
    before = transcribe(recognizer, recordings, input_sample_rate)
    after = transcribe(recognizer, again, codec.sample_rate)
    return NoiseFloor(cer=cer(before, texts), cer_codec=cer(after, texts), heard=tuple(after))


def save_samples(
    named: dict[str, tuple[list[str], list[Tensor]]],
    split: str,
    rate: int,
    folder: Path,
    most: int = 3,
) -> list[dict]:
    """Write the first few waveforms of each variant; returns rows for the report's `samples`.

    Raises DiskError with the cure where they cannot be written.
    """
    rows = []
    for variant, (texts, waves) in named.items():
        for i, (text, wave) in enumerate(itertools.islice(zip(texts, waves), most)):
            path = Path(folder) / "samples" / f"{split}-{i}-{variant}.wav"
            write_atomic(path, encode_wav(wave.numpy(), rate))
            rows.append({"text": text, "wav": str(path.relative_to(folder)), "split": split})
    return rows


def recognizer_warning(cer_on_recordings: float | None, worst_cer: float) -> str:
    """What a recogniser's own error on recordings means for its figures; "" where it can judge.

    None: the error is not known.
    """
    if cer_on_recordings is None or cer_on_recordings <= worst_cer:
        return ""
    return (
        f"the recogniser itself mistakes {cer_on_recordings:.1%} of the letters of recordings: it "
        f"cannot say whether a voice stays below {worst_cer:.1%}, only which is better; trust "
        "your ears, give it more `minutes` (preset, section `recognizer`) or more recordings, or "
        "let Whisper listen in its place (--set recognizer.whisper=base)"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One thing a voice is asked for."""

    what: str
    found: str
    wanted: str
    problem: str  # in words, with what to do; "" where it passes


def suggest_fix(loss: float | None, held_out_loss: float | None) -> str:
    """What may make a voice clearer, by its loss on what it trained on, and on held-out speech.

    None: not known.
    """
    if loss is None or held_out_loss is None or held_out_loss <= OVERFIT_RATIO * loss:
        return "train longer"
    return (
        f"it knows its recordings by heart (loss {loss:.2f}, of held-out ones "
        f"{held_out_loss:.2f}), so more steps teach it nothing; more recordings would, or a voice "
        "to begin with (START_FROM in 01_data_prep, --start-from)"
    )


def gate_checks(
    scores: Scores, floor_cer: float, worst_cer: float, cure: str = "train longer"
) -> list[Check]:
    """All that a voice is asked for before it is used; `cure` is `suggest_fix`'s."""
    unclear = f"CER {scores.cer:.1%} is above {worst_cer:.1%} (floor {floor_cer:.1%}): {cure}"
    endless = f"{1 - scores.eos_rate:.1%} of the sentences never ended: {cure}"
    runaway = f"{scores.runaway_rate:.1%} of the sentences took over twice as long as recorded"
    pace = f"speech lasts {scores.duration_ratio:.2f} times the recordings"
    return [
        Check(
            what="the recogniser can judge",
            found=f"CER {floor_cer:.1%} on recordings",
            wanted=f"at most {worst_cer:.1%}",
            problem=recognizer_warning(floor_cer, worst_cer),
        ),
        Check(
            what="intelligible",
            found=f"CER {scores.cer:.1%}",
            wanted=f"at most {worst_cer:.1%}",
            problem=unclear if scores.cer > worst_cer else "",
        ),
        Check(
            what="ends its sentences",
            found=f"{scores.eos_rate:.1%} of them",
            wanted="all",
            problem=endless if scores.eos_rate < 1 else "",
        ),
        Check(
            what="does not run away",
            found=f"{scores.runaway_rate:.1%} over twice as long",
            wanted="at most 2.0%",
            problem=runaway if scores.runaway_rate > 0.02 else "",
        ),
        Check(
            what="keeps the pace",
            found=f"{scores.duration_ratio:.2f} times the recordings",
            wanted="0.80 to 1.25",
            problem="" if 0.8 < scores.duration_ratio < 1.25 else pace,
        ),
    ]


def problems_of(checks: list[Check]) -> list[str]:
    """Reasons why a voice should not be used yet; none when it may."""
    return [check.problem for check in checks if check.problem]
