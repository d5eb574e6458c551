"""What an evaluation speaks, transcribes and measures; results are kept. Shapes: L samples."""

import dataclasses
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kit.audio.clip import load_wave, resampled
from kit.audio.codec import Codec, load_codec
from kit.audio.recognizer import SpeechRecognizer, cer, load_recognizer
from kit.base.errors import KitError
from kit.base.files import cached_result, digest, file_digest, file_digests
from kit.dataset.data_report import rows_in_split
from kit.dataset.manifest import Utterance, read_manifest
from kit.inference import evaluate as scoring
from kit.inference.voice import Voice
from kit.inference.voice_files import load_voices
from kit.model.sequence import pack
from kit.model.weights import WEIGHTS
from kit.notebook.progress import Ticker
from kit.recipes.exports import JUDGED_WITH
from kit.recipes.open_run import ActiveRun, sampling_of
from kit.recipes.training_data import TrainingData
from kit.settings import GenerateConfig

# Splits: words that training never saw, long sentences, and known words in any order.
HARDER = ("unseen", "long", "free_order")
MIN_GAIN = 0.001  # share of the loss that a speaker's own reference must save to count as used


class SpokenTexts(NamedTuple):
    """Some texts as a voice has spoken them."""

    scores: scoring.Scores
    samples: list[dict]  # the first few, as rows of the report: text, wav, split


class EvaluationData:
    """Voices by weights ("raw", and "ema" if training kept an average), and the texts to speak.

    The held-out texts are the first `sentences` of the split in manifest order, without those that
    have letters no training text has. Raises KitError if an earlier notebook has not run yet,
    SpeechError and KitError for missing or damaged files.
    """

    def __init__(self, run: ActiveRun, sentences: int):
        self.run = run
        self.rows = read_manifest(run.folder)
        recognizer = load_recognizer(run.path("recognizer.safetensors"))
        self.recognizer = recognizer.to(run.hw.device)
        self.language = run.require_figure("data", "language", "01_data_prep")
        self.voices = load_voices(run.folder, self.language, run.hw.device)
        codec = load_codec(run.path("codec.safetensors"))
        self.codec = codec.to(run.hw.device)  # decodes codes alone, without hidden states
        self.rate_hz = self.codec.sample_rate
        self.front_end = self.voices["raw"].front_end
        self.sampling = sampling_of(run)
        self.read_once = dataclasses.replace(self.sampling, best_of=1)
        rows = {split: rows_in_split(self.rows, split) for split in ("held_out", *HARDER)}
        rows["held_out"] = rows["held_out"][:sentences]
        speakers = {row.speaker for split_rows in rows.values() for row in split_rows}
        if not speakers <= set(self.voices["raw"].speakers):  # some are not in training
            known = TrainingData(run).voice()
            for voice in self.voices.values():
                voice.references = known.references | voice.references
                voice.vectors = known.vectors | voice.vectors
        can_speak = self.voices["raw"].can_speak
        self.splits = {}
        for split, split_rows in rows.items():
            self.splits[split] = [row for row in split_rows if can_speak(row.text)]
        self.held_out = self.splits["held_out"]
        self.left_out = len(rows["held_out"]) - len(self.held_out)
        if not self.held_out:
            raise KitError(
                f"The run `{run.name}` has no held-out sentence that the voice can say: give some "
                "rows of the table the split `held_out` and run 01_data_prep and 02_train again."
            )

    def floor(self, split: str) -> "NoiseFloor":
        rows = self.splits[split]
        path = self.run.path("transcripts", f"{split}-recordings.json")
        key = digest(self.digests, [vars(row) for row in rows])
        return NoiseFloor(
            **cached_result(path, key, lambda: vars(noise_floor(rows, self.recognizer, self.codec)))
        )

    def speak(self, split: str, weights: str, config: GenerateConfig, label: str) -> SpokenTexts:
        """Speak the texts of `split` with `weights`, and transcribe and score them.

        The first few are saved in samples/, with `label` in the names of the files.
        """
        rows = self.splits[split]
        model = file_digest(self.run.folder / WEIGHTS[weights])

        def measure() -> dict:
            scores, speech = scoring.score(self.voices[weights], rows, self.recognizer, config)
            waves = {label: ([s.text for s in speech], [s.wave for s in speech])}
            samples = scoring.save_samples(waves, split, self.rate_hz, self.run.folder)
            return {"scores": dataclasses.asdict(scores), "samples": samples}

        def has_samples(result: dict) -> bool:
            return all((self.run.folder / row["wav"]).is_file() for row in result["samples"])

        path = self.run.path("transcripts", f"{split}-{label}.json")
        key = digest(self.digests, model, config, [vars(row) for row in rows])
        result = cached_result(path, key, measure, has_samples)
        return SpokenTexts(scoring.Scores(**result["scores"]), result["samples"])

    @cached_property
    def digests(self) -> list[str]:
        """What results depend on beside the model's weights."""
        return [self.language, *file_digests(self.run.folder / name for name in JUDGED_WITH)]

    @cached_property
    def by_weights(self) -> dict[str, SpokenTexts]:
        """The held-out texts by each set of weights, one candidate each."""
        spoken = {}
        tick = Ticker("spoken")
        for name in self.voices:
            spoken[name] = self.speak("held_out", name, self.read_once, name)
            tick(len(spoken), len(self.voices), f"{name}: CER {spoken[name].scores.cer:.2%}")
        return spoken

    @cached_property
    def best(self) -> str:
        """The weights with the lower error rate; the average if they are equal or make no sound."""
        if not self.codec.decodes:
            return list(self.voices)[-1]
        cer = {name: spoken.scores.cer for name, spoken in self.by_weights.items()}
        return "ema" if "ema" in cer and cer["ema"] <= cer["raw"] else "raw"

    @cached_property
    def spoken(self) -> dict[str, SpokenTexts]:
        """The texts of every split by the best weights, the most likely of several candidates."""
        spoken = {"held_out": self.speak("held_out", self.best, self.sampling, "best")}
        for split in HARDER:
            if self.splits[split]:
                spoken[split] = self.speak(split, self.best, self.sampling, self.best)
        return spoken

    def word_pairs(self, of_codec: bool = False) -> list[scoring.WordPair]:
        """The words of all texts, aligned with the transcripts of the voice.

        `of_codec`: with those of the recordings after the codec.
        """
        pairs = []
        for split, spoken in self.spoken.items():
            source = self.floor(split) if of_codec else spoken.scores
            for row, line in zip(self.splits[split], source.transcripts, strict=True):
                pairs += scoring.align_words(row.text, line)
        return pairs

    def worst_sentence(self) -> int:
        """The number of the held-out sentence with the most errors."""
        transcripts = self.spoken["held_out"].scores.transcripts

        def errors(number: int) -> int:
            pairs = scoring.align_words(self.held_out[number].text, transcripts[number])
            return sum(bool(pair.kind) for pair in pairs)

        return max(range(len(self.held_out)), key=errors)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoiseFloor:
    """Errors of the recogniser itself."""

    cer: float  # character error rate on the recordings
    cer_codec: float  # on the recordings after the codec; a voice may speak clearer than they do
    transcripts: tuple[str, ...]  # after the codec


def noise_floor(rows: list[Utterance], recognizer: SpeechRecognizer, codec: Codec) -> NoiseFloor:
    """Return the recogniser's errors on the recordings of `rows` and on their codec round trip."""
    input_sample_rate = recognizer.input_sample_rate
    recordings = [load_wave(row.audio, input_sample_rate) for row in rows]
    copies = [codec.round_trip(load_wave(row.audio, codec.sample_rate)) for row in rows]
    texts = [row.text for row in rows]
    before = scoring.transcribe(recognizer, recordings, input_sample_rate)
    after = scoring.transcribe(recognizer, copies, codec.sample_rate)
    return NoiseFloor(cer=cer(before, texts), cer_codec=cer(after, texts), transcripts=tuple(after))


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


@torch.inference_mode()
def loss_by_speaker(voice: Voice, clips: list[tuple[str, str, Tensor]]) -> dict[str, SpeakerLoss]:
    """Return the loss on each speaker's `clips`; {} for a voice with one speaker.

    A clip is a text, its speaker, and its sound (L,) at the codec's `sample_rate`. The other
    speaker is the next by name. Clips too long for the model, or of a speaker without a reference,
    are left out.
    """
    names = voice.speakers
    if len(names) < 2:
        return {}
    config = voice.model.config
    device = voice.model.final_norm.weight.device
    losses = {}
    for name, other in zip(names, names[1:] + names[:1]):
        references = [voice.reference(each)[None].to(device) for each in (name, other)]
        sums = [0.0, 0.0]
        codes_read = 0
        for text, _, wave in (clip for clip in clips if clip[1] == name):
            wave = resampled(wave, voice.codec.sample_rate, voice.codec.input_sample_rate)
            codes = voice.codec.encode(wave[None])[0].tolist()
            ids = voice.ids(text)
            if len(ids) + 2 > config.max_text or len(codes) + 2 > config.max_code:
                continue
            for i, reference in enumerate(references):
                batch = pack(config, [ids], [codes], reference)
                _, code_loss = voice.model(batch.to(device))
                sums[i] += code_loss.item()
            codes_read += len(batch.code_targets)
        if codes_read:
            losses[name] = SpeakerLoss(own=sums[0] / codes_read, other=sums[1] / codes_read)
    return losses
