"""Measure a voice: errors, endings, pace, speaker conditioning and forgetting.

The voice speaks held-out sentences and a recogniser transcribes them. The same recogniser on the
recordings, and on the codec's round trip of them, gives the noise floor.

Shapes: L samples, N codes with the STOP after them, V code vocabulary, M mels, T mel frames.
"""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kit.audio.clip import load_wave, resampled
from kit.audio.codec import Codec
from kit.audio.recognizer import SpeechRecognizer, cer
from kit.base.config import require_within
from kit.base.files import encode_wav, write_atomic
from kit.base.hardware import on_device
from kit.dataset.data_report import Utterance
from kit.inference.generate import GeneratedCodes
from kit.inference.sampling import GenerateConfig
from kit.inference.voice import Speech, Voice
from kit.model.gpt import SpeechGPT
from kit.model.sequence import pack
from kit.text.sentences import SpokenPart

OVERFIT_RATIO = 1.5  # held-out loss over training loss, above which the model has overfitted
BATCH = 16  # examples at a time when measuring the loss of a speaker
MIN_GAIN = 0.001  # share of the loss that a speaker's own reference must save to count as used


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoiseFloor:
    """Errors of the recogniser itself."""

    cer: float  # character error rate on the recordings
    cer_codec: float  # on the recordings after the codec: a voice cannot do better
    transcripts: tuple[str, ...]  # after the codec


def noise_floor(rows: list[Utterance], recognizer: SpeechRecognizer, codec: Codec) -> NoiseFloor:
    """Return the recogniser's errors on the recordings of `rows` and on their codec round trip."""
    input_sample_rate = recognizer.input_sample_rate
    recordings = [load_wave(row.audio, input_sample_rate) for row in rows]
    copies = [codec.round_trip(load_wave(row.audio, codec.sample_rate)) for row in rows]
    texts = [row.text for row in rows]
    before = transcribe(recognizer, recordings, input_sample_rate)
    after = transcribe(recognizer, copies, codec.sample_rate)
    return NoiseFloor(cer=cer(before, texts), cer_codec=cer(after, texts), transcripts=tuple(after))


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


class Check(NamedTuple):
    what: str
    found: str
    wanted: str
    problem: str  # what is wrong and what to do; "" if it passes


def suggest_fix(loss: float | None, held_out_loss: float | None) -> str:
    """Return what may make a voice clearer, given training and held-out loss, if known."""
    if loss is None or held_out_loss is None or held_out_loss <= OVERFIT_RATIO * loss:
        return "train longer"
    return (
        f"it has overfitted (training loss {loss:.2f}, held-out loss {held_out_loss:.2f}), so more "
        "steps do not help; more recordings would, or a base voice (BASE_MODEL in 01_data_prep, "
        "--base-model)"
    )


def gate_checks(
    scores: Scores, floor_cer: float, worst_cer: float, fix: str = "train longer"
) -> list[Check]:
    """Return every check of a voice before it is used; `fix` is what `suggest_fix` returns."""
    cer_limit = f"at most {worst_cer:.1%}"
    blind = recognizer_warning(floor_cer, worst_cer)
    unclear = ""
    if scores.cer > worst_cer:
        unclear = f"CER {scores.cer:.1%} is above {worst_cer:.1%} (floor {floor_cer:.1%}): {fix}"
    return [
        Check("the recogniser can judge", f"CER {floor_cer:.1%} on recordings", cer_limit, blind),
        Check("intelligible", f"CER {scores.cer:.1%}", cer_limit, unclear),
        *ending_checks(scores.figures(), fix),
    ]


def ending_checks(figures: dict, fix: str) -> list[Check]:
    """Return the checks of `ending_figures`."""
    eos_rate = figures["eos_rate"]
    runaway_rate = figures["runaway_rate"]
    ended = f"{eos_rate:.1%} of them"
    runaway = f"{runaway_rate:.1%} over twice as long"
    pace = f"{figures['duration_ratio']:.2f} times the recordings"
    endless = runs_away = off_pace = ""
    if eos_rate < 1:
        endless = f"{1 - eos_rate:.1%} of the sentences never ended: {fix}"
    if runaway_rate > 0.02:
        runs_away = f"{runaway_rate:.1%} of the sentences took over twice as long as recorded"
    if not 0.8 < figures["duration_ratio"] < 1.25:
        off_pace = f"speech lasts {pace}"
    return [
        Check("ends its sentences", ended, "all", endless),
        Check("does not run away", runaway, "at most 2.0%", runs_away),
        Check("keeps the pace", pace, "0.80 to 1.25", off_pace),
    ]


def problems_of(checks: list[Check]) -> list[str]:
    return [check.problem for check in checks if check.problem]


# --- speaker conditioning ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabeledClip:
    text: str
    speaker: str
    wave: Tensor  # (L,) at the codec's `sample_rate`


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeakerLoss:
    """Loss in nats a code over a speaker's recordings.

    A model that ignores references has the same loss with every reference.
    """

    own: float  # with a reference of that speaker
    other: float  # with a reference of another speaker

    @property
    def uses_reference(self) -> bool:
        return self.other - self.own > MIN_GAIN * self.own


def loss_by_speaker(voice: Voice, clips: list[LabeledClip]) -> dict[str, SpeakerLoss]:
    """Return the loss on each speaker's clips; {} for a voice with one speaker.

    The other speaker is the next by name. Clips too long for the model, or of a speaker without a
    reference, are left out.
    """
    names = voice.speakers
    if len(names) < 2:
        return {}
    losses = {}
    for name, other in zip(names, names[1:] + names[:1]):
        examples = encode_clips(voice, [clip for clip in clips if clip.speaker == name])
        if examples:
            losses[name] = SpeakerLoss(
                own=mean_loss(voice, examples, name), other=mean_loss(voice, examples, other)
            )
    return losses


def encode_clips(voice: Voice, clips: list[LabeledClip]) -> list[tuple[list[int], list[int]]]:
    config = voice.model.config
    examples = []
    for clip in clips:
        wave = resampled(clip.wave, voice.codec.sample_rate, voice.codec.input_sample_rate)
        codes = voice.codec.encode(wave[None])[0].tolist()
        ids = voice.ids(clip.text)
        if len(ids) + 2 <= config.max_text and len(codes) + 2 <= config.max_code:
            examples.append((ids, codes))
    return sorted(examples, key=lambda example: len(example[1]))


@torch.inference_mode()
def mean_loss(voice: Voice, examples: list[tuple[list[int], list[int]]], speaker: str) -> float:
    device = voice.model.final_norm.weight.device
    reference = voice.reference(speaker).to(device)
    loss_sum = 0.0
    targets = 0
    for first in range(0, len(examples), BATCH):
        texts, codes = zip(*examples[first : first + BATCH])
        batch = pack(voice.model.config, texts, codes, reference.expand(len(texts), -1, -1))
        _, code_loss = voice.model(batch.to(device))
        loss_sum += code_loss.item()
        targets += len(batch.code_targets)
    return loss_sum / targets


# --- forgetting ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseSample:
    """A sentence as the base model spoke it."""

    base_ids: list[int]  # its text, by the base model's tokenizer
    tuned_ids: list[int]  # by the fine-tuned model's tokenizer
    spoken: GeneratedCodes
    mel: Tensor  # (M, T) reference that it was spoken with


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseDivergence:
    """Cross-entropy in nats a code, under the base model's distribution."""

    base: float  # of the base model itself: its entropy
    tuned: float  # of the fine-tuned model

    @property
    def forgotten(self) -> float:
        """The Kullback-Leibler divergence: 0 if nothing was forgotten."""
        return self.tuned - self.base


@torch.inference_mode()
def measure_divergence(
    base: SpeechGPT, tuned: SpeechGPT, samples: list[BaseSample]
) -> BaseDivergence:
    """Return how far `tuned` has moved from `base`, both in eval mode, over all codes of `samples`.

    Needs no recordings and no recogniser (Li and Hoiem 2016, arXiv:1606.09282).
    """
    base_nats = []
    tuned_nats = []
    for sample in samples:
        base_log_probs = code_log_probs(base, sample.base_ids, sample)
        tuned_log_probs = code_log_probs(tuned, sample.tuned_ids, sample)
        weights = base_log_probs.exp()
        base_nats.append(-(weights * base_log_probs).sum(-1))
        tuned_nats.append(-(weights * tuned_log_probs).sum(-1))
    return BaseDivergence(
        base=float(torch.cat(base_nats).mean()), tuned=float(torch.cat(tuned_nats).mean())
    )


@torch.inference_mode()
def code_log_probs(model: SpeechGPT, ids: list[int], sample: BaseSample) -> Tensor:
    """Return log-probabilities (N, V) at each position of `sample`, STOP's last, on the CPU."""
    # The layout used for speaking, whatever the model was trained with.
    config = dataclasses.replace(model.config, text_stop_input=True, stop_targets=1)
    codes = sample.spoken.codes.tolist()
    device = model.final_norm.weight.device
    batch = pack(config, [ids], [codes], sample.mel[None].float()).to(device)
    indices = batch.code_indices[: len(codes) + sample.spoken.stopped]
    states = model.hidden(batch).flatten(0, 1)[indices]
    return model.code_head(states).float().log_softmax(-1).cpu()
