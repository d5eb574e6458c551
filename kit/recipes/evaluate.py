"""Notebook 03: is the voice intelligible? Shapes: L samples.

Held-out sentences are spoken, transcribed by the recogniser and compared with the recordings. The
recogniser on the recordings, and on the codec's round trip of them, gives the noise floor. A
speaker's loss with the reference of another one shows whether the voice uses references.
"""

import dataclasses
import shlex
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kit.audio.clip import load_wave, resampled
from kit.audio.codec import Codec, load_codec
from kit.audio.recognizer import SpeechRecognizer, cer, load_recognizer
from kit.base.config import build
from kit.base.errors import KitError
from kit.base.files import cached_result, digest, file_digest, file_digests
from kit.base.run import Run
from kit.dataset.data_report import rows_in_split
from kit.dataset.manifest import Utterance, read_manifest
from kit.inference import evaluate as scoring
from kit.inference.voice import Voice
from kit.inference.voice_files import load_voices
from kit.model.sequence import pack
from kit.model.weights import WEIGHTS
from kit.notebook.plots import bars, curves, grouped_bars, mel_picture
from kit.notebook.progress import Ticker
from kit.notebook.result import Result, players_of
from kit.recipes.base_model import package_speaker
from kit.recipes.exports import JUDGED_WITH
from kit.recipes.open_run import ActiveRun, sampling_of
from kit.settings import EvaluateConfig, GenerateConfig, TrainConfig
from kit.training.logs import held_out_losses, read_log
from kit.tuning.checks import (
    Check,
    ending_checks,
    gate_checks,
    judged,
    problems,
    suggest_fix,
    table,
)

SAMPLES = 3  # recordings saved to samples/
PACKAGE_SENTENCES = 24  # that the package of an IndexTTS2 speaks, one after the other
SPEAKER_CLIPS = 48  # recordings whose loss is compared with another speaker's reference
WORST_WORDS = 12  # in the table
# Splits: words that training never saw, long sentences, and known words in any order.
HARDER = ("unseen", "long", "free_order")
BATCH = 16  # examples at a time when measuring the loss of a speaker
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
        """Digests of what results depend on beside the model's weights."""
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
        transcripts = self.spoken["held_out"].scores.transcripts
        errors = [
            sum(bool(pair.kind) for pair in scoring.align_words(row.text, line))
            for row, line in zip(self.held_out, transcripts)
        ]
        return errors.index(max(errors))


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
    before = scoring.transcribe(recognizer, recordings, input_sample_rate)
    after = scoring.transcribe(recognizer, copies, codec.sample_rate)
    return NoiseFloor(cer=cer(before, texts), cer_codec=cer(after, texts), transcripts=tuple(after))


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


class Evaluation:
    """The evaluation of a run; `run()` is all of it.

    `sentences` 0 takes their number from the preset. Raises KitError if an earlier notebook has
    not run yet, and for missing or damaged files.
    """

    def __init__(
        self,
        run: ActiveRun,
        sentences: int = 0,  # held-out ones to speak (the preset's)
    ):
        self.active_run = run
        over = {"sentences": sentences} if sentences else {}
        config = build(EvaluateConfig, run.section("evaluate"), **over)
        self.data = EvaluationData(run, config.sentences)

    def __str__(self) -> str:
        data = self.data
        speakers = data.voices["raw"].speakers
        weights = ", ".join(data.voices)
        line = f"{len(data.held_out)} held-out sentences, voices {speakers}, weights: {weights}"
        if data.left_out:
            line += f"\n{data.left_out} left out: they have letters that no training text has."
        return line

    __repr__ = __str__  # the plain-text side of a cell's output

    def _repr_html_(self) -> str:
        return Result(line=str(self))._repr_html_()

    def run(self) -> Iterator[Result]:
        """Run every step in turn; of an IndexTTS2 those that do without the kit's sound."""
        steps = (self.hear, self.error_rates, self.harder_sentences, self.speaker_conditioning)
        steps += (self.losses, self.word_errors, self.verdict, self.judges, self.samples)
        if not self.data.codec.decodes:
            steps = (self.losses, self.speaker_conditioning, self.endings, self.spoken_by_package)
        for step in steps:
            yield step()

    def hear(self, number: int = 0) -> Result:
        """Play held-out sentence `number`, from 0: recording, codec, and the voice.

        The voice speaks once with the last weights, then with the better weights and `best_of`.
        Raises KitError for a number that no sentence has.
        """
        data = self.data
        count = len(data.held_out)
        if not 0 <= number < count:
            raise KitError(f"There is no held-out sentence {number}: choose 0 to {count - 1}.")
        row = data.held_out[number]
        recording = load_wave(row.audio, data.rate_hz)
        once = data.voices["raw"].speak([row.text], row.speaker, data.read_once)[0]
        spoken = data.voices[data.best].speak([row.text], row.speaker, data.sampling)[0]
        waves = {
            "recording": recording,
            "codec": data.codec.round_trip(recording),
            "raw, one candidate": once.wave,
            self.best_of(data.best): spoken.wave,
        }
        (transcript,) = scoring.transcribe(data.recognizer, [spoken.wave], data.rate_hz)
        return Result(
            line=f"{row.text} | transcript: {transcript}",
            pictures=[mel_picture(waves, data.rate_hz, data.front_end)],
            sounds=players_of(waves, data.rate_hz),
        )

    def error_rates(self) -> Result:
        """CER of recordings, of the codec, of each set of weights, and with several candidates."""
        data = self.data
        floor = data.floor("held_out")
        chosen = data.spoken["held_out"].scores
        scores = {name: spoken.scores for name, spoken in data.by_weights.items()}
        figures = {"cer_floor": floor.cer, "cer_codec": floor.cer_codec}
        figures |= {f"cer_{name}": score.cer for name, score in scores.items()}
        figures |= chosen.figures() | {"weights": data.best, "candidates": data.sampling.best_of}
        figures["weights_sha256"] = file_digest(self.active_run.folder / WEIGHTS[data.best])
        scores[self.best_of(data.best)] = chosen
        line = f"CER on recordings {floor.cer:.2%}, after the codec {floor.cer_codec:.2%}"
        percent = {"recordings": 100 * floor.cer, "codec": 100 * floor.cer_codec}
        percent |= {name: 100 * score.cer for name, score in scores.items()}
        title = f"Character error rate, {len(data.held_out)} held-out sentences"
        picture = bars(list(percent), percent.values(), "%", title)
        return self.record(f"{line}; {list_cer(scores)}", figures, picture, scores_table(scores))

    def harder_sentences(self) -> Result:
        """Unseen words, long sentences and known words in any order, each with its own floor."""
        scores = {split: spoken.scores for split, spoken in self.data.spoken.items()}
        floors = {split: self.data.floor(split) for split in scores}
        figures = {
            split: scores[split].figures() | {"cer_floor": floor.cer, "cer_codec": floor.cer_codec}
            for split, floor in floors.items()
            if split != "held_out"
        }
        groups = {
            "the voice": [100 * score.cer for score in scores.values()],
            "codec": [100 * floor.cer_codec for floor in floors.values()],
            "recordings": [100 * floor.cer for floor in floors.values()],
        }
        title = "Character error rate by kind of sentence"
        picture = grouped_bars(list(scores), groups, "%", title)
        line = f"CER by kind of sentence: {list_cer(scores)}"
        return self.record(line, figures, picture, scores_table(scores))

    @cached_property
    def speaker_losses(self) -> dict[str, SpeakerLoss]:
        """Loss per code of each speaker with the own reference and with another's; recorded."""
        data = self.data
        clips = []
        for row in data.held_out[:SPEAKER_CLIPS]:
            wave = load_wave(row.audio, data.rate_hz)
            clips.append(LabeledClip(text=row.text, speaker=row.speaker, wave=wave))
        losses = loss_by_speaker(data.voices[data.best], clips)
        if losses:
            figures = {name: vars(loss) for name, loss in losses.items()}
            self.active_run.record(eval={"whose_voice": figures})
        return losses

    def speaker_conditioning(self) -> Result:
        """Loss per code with the speaker's own reference, and with another speaker's."""
        losses = self.speaker_losses
        if not losses:
            return Result(line="Speaker conditioning: not evaluated, there is only one speaker.")
        groups = {
            "own reference": [loss.own for loss in losses.values()],
            "another's": [loss.other for loss in losses.values()],
        }
        title = "Does the model use the speaker reference?"
        picture = grouped_bars(list(losses), groups, "nats per code", title)
        costs = [f"{name} {loss.own:.3f} ({loss.other:.3f})" for name, loss in losses.items()]
        line = "Speaker conditioning, nats per code with the own reference (another's): "
        lines = [line + ", ".join(costs), *problems(speaker_checks(self.active_run))]
        figures = {"whose_voice": {name: vars(loss) for name, loss in losses.items()}}
        return Result(line="\n".join(lines), pictures=[picture], figures=figures, shown=False)

    def losses(self) -> Result:
        """Held-out loss along training: of the last weights, and of their average."""
        lines = held_out_losses(read_log(self.active_run.path("train.jsonl")))
        final = {name: values[-1] for name, (_, values) in lines.items()}
        figures = {f"{name.lower()}_loss": loss for name, loss in final.items()}
        line = "Held-out loss at the end: "
        line += ", ".join(f"{name} {loss:.3f}" for name, loss in final.items())
        if "EMA" in final:
            line += f"\nThe loss of EMA is {final['EMA'] / final['raw'] - 1:+.1%} against raw."
        return self.record(line, figures, curves(lines, "step", "held-out loss"))

    def endings(self) -> Result:
        """Whether held-out sentences end by themselves, and how long they are: from codes alone."""
        data = self.data
        figures = scoring.score_codes(data.voices[data.best], data.held_out, data.read_once)
        checks = ending_checks(figures, suggested_fix(self.active_run))
        result = self.record("Codes of held-out sentences", figures, grid=table(checks))
        return dataclasses.replace(result, failed=bool(problems(checks)))

    def spoken_by_package(self) -> Result:
        """The CER of an exported IndexTTS2: its package speaks, in the reference's voice.

        Says what is missing where it cannot speak.
        """
        try:
            speaker = package_speaker(self.active_run)
        except KitError as error:
            return Result(line=f"The CER was not measured: {error}")
        texts = [row.text for row in self.data.held_out[:PACKAGE_SENTENCES]]
        waves = [speaker.speak(text) for text in texts]
        spoken = scoring.transcribe(self.data.recognizer, waves, speaker.sample_rate)
        figures = {"cer": cer(spoken, texts)}
        line = f"CER of {len(texts)} sentences as the package speaks them: {figures['cer']:.2%}"
        sounds = players_of(dict(zip(texts[:SAMPLES], waves)), speaker.sample_rate)
        return dataclasses.replace(self.record(line, figures), sounds=sounds, shown=True)

    def word_errors(self) -> Result:
        """Kinds of word errors and the worst words, beside the recogniser's own errors."""
        pairs = self.data.word_pairs()
        on_codec = self.data.word_pairs(of_codec=True)
        counts = scoring.count_kinds(pairs)
        words = sum(len(pair.words) for pair in pairs)
        errors = {kind.replace(" ", "_"): count for kind, count in counts.items()}
        groups = {"the voice": counts.values(), "codec": scoring.count_kinds(on_codec).values()}
        picture = grouped_bars(list(counts), groups, "errors", f"Word errors among {words:,} words")
        wrong_on_codec = {word.word: word.wrong for word in scoring.word_stats(on_codec)}
        grid = [("word", "in the texts", "wrong", "wrong on the codec", "how", "recognised as")]
        for word in scoring.word_stats(pairs)[:WORST_WORDS]:
            if word.wrong:
                numbers = map(str, (word.count, word.wrong, wrong_on_codec[word.word]))
                recognized = " | ".join(read or "nothing" for read in word.recognized[:3])
                grid.append((word.word, *numbers, ", ".join(word.kinds), recognized))
        line = f"{sum(counts.values()):,} errors among {words:,} words; held-out sentence number "
        line += f"{self.data.worst_sentence()} has the most"
        return self.record(line, {"words": words, "word_errors": errors}, picture, grid)

    def verdict(self) -> Result:
        """The gate: is it intelligible, does it end, keep its pace and use the reference?"""
        scores = self.data.spoken["held_out"].scores
        _ = self.speaker_losses  # recorded: the checks read them
        floor_cer = self.data.floor("held_out").cer
        checks = voice_checks(self.active_run, scores.figures(), floor_cer)
        faults = problems(checks)
        line = "Not yet: " + "; ".join(faults) if faults else "The voice passes."
        result = self.record(line, {"gate": faults or "passed"}, grid=table(checks))
        return dataclasses.replace(result, failed=bool(faults))

    def judges(self) -> Result:
        """The scores of independent models, if `make judges` has been run."""
        judged = self.active_run.report().get("judges", {})
        if not judged:
            line = "Not yet judged by Whisper, DNSMOS and speaker similarity: run make judges RUN="
            return Result(line=line + shlex.quote(self.active_run.name))
        scores = judged["heard"]
        line = "Whisper's CER: "
        line += ", ".join(f"{name} {score['cer']:.1%}" for name, score in scores.items())
        if judged["weights"] != file_digest(self.active_run.folder / WEIGHTS["raw"]):
            line += "\nOf other weights than the last ones: run `make judges` again."
        return Result(line=line, grid=judges_table(scores))

    def samples(self) -> Result:
        """Save the first sentences of each kind in samples/, for readers of the report."""
        data = self.data
        folder = self.active_run.folder
        rows = data.held_out[:SAMPLES]
        waves = [load_wave(row.audio, data.rate_hz) for row in rows]
        recordings = ([row.text for row in rows], waves)
        written = scoring.save_samples({"recording": recordings}, "held_out", data.rate_hz, folder)
        for spoken in (*data.by_weights.values(), *data.spoken.values()):
            written += spoken.samples
        self.active_run.record(samples=written)
        waves = {}
        captions = {}
        for split, spoken in data.spoken.items():
            first = spoken.samples[0]
            waves[split] = load_wave(str(folder / first["wav"]), data.rate_hz)
            captions[f"{split}: {first['text']}"] = waves[split]
        return Result(
            line=f"{len(written)} samples in {folder / 'samples'}",
            pictures=[mel_picture(waves, data.rate_hz, data.front_end)],
            sounds=players_of(captions, data.rate_hz),
        )

    def record(self, line: str, figures: dict, picture=None, grid: list = ()) -> Result:
        """Record `figures` under `eval` in the run's report; returns the step's result."""
        self.active_run.record(eval=figures)
        pictures = [picture] if picture else []
        return Result(line=line, pictures=pictures, figures=figures, shown=False, grid=grid)

    def best_of(self, weights: str) -> str:
        return f"{weights}, best of {self.data.sampling.best_of}"


def list_cer(scores: dict[str, scoring.Scores]) -> str:
    return ", ".join(f"{name} {score.cer:.2%}" for name, score in scores.items())


def scores_table(scores: dict[str, scoring.Scores]) -> list[tuple[str, ...]]:
    grid = [("", "CER", "ended by themselves", "length", "ran away", "sentences")]
    for name, score in scores.items():
        rates = (f"{score.cer:.2%}", f"{score.eos_rate:.1%}", f"{score.duration_ratio:.2f} x")
        grid.append((name, *rates, f"{score.runaway_rate:.1%}", str(score.sentences)))
    return grid


def judges_table(scores: dict[str, dict]) -> list[tuple[str, ...]]:
    grid = [("", "Whisper CER", "DNSMOS, 1 to 5", "same voice, at most 1", "clips")]
    for name, score in scores.items():
        row = (f"{score['cer']:.1%}", f"{score['dnsmos']:.2f}", f"{score['similarity']:.3f}")
        grid.append((name, *row, str(score["clips"])))
    return grid


def voice_checks(run: Run, figures: dict, floor_cer: float) -> list[Check]:
    """Check a voice's `figures` against the CER of the recordings and the run's settings."""
    worst_cer = build(EvaluateConfig, run.section("evaluate")).worst_cer
    return gate_checks(figures, floor_cer, worst_cer, suggested_fix(run)) + speaker_checks(run)


def suggested_fix(run: Run) -> str:
    train = run.report().get("train", {})
    return suggest_fix(train.get("loss"), train.get("val_loss"))


def speaker_checks(run: Run) -> list[Check]:
    """Check the recorded losses by speaker; [] for a voice with one speaker."""
    recorded = run.report().get("eval", {}).get("whose_voice", {})
    if not recorded:
        return []
    train = build(TrainConfig, run.section("train"))
    alike = [name for name, loss in recorded.items() if not SpeakerLoss(**loss).uses_reference]
    fix = (
        f"{', '.join(alike)}: the model ignores the speaker reference, so they may sound alike; "
        "train longer, or with a lower train.conditioner_lr "
        f"(it was {train.conditioner_lr or train.lr:g})"
    )
    used = f"{len(recorded) - len(alike)} of {len(recorded)} speakers"
    return [judged("speakers distinguished", used, "all of them", not alike, fix)]
