"""Notebook 03: is the voice intelligible?

Held-out sentences are spoken, transcribed by the recogniser and compared with the recordings. The
recogniser on the recordings, and on the codec's round trip of them, gives the noise floor. A
speaker's loss with the reference of another one shows whether the voice uses references.
"""

import dataclasses
import shlex
from collections.abc import Iterator
from functools import cached_property

from kit.audio.clip import load_wave
from kit.audio.recognizer import cer
from kit.base.config import build
from kit.base.errors import KitError
from kit.base.files import file_digest
from kit.base.run import Run
from kit.inference import evaluate as scoring
from kit.model.weights import WEIGHTS
from kit.notebook.plots import bars, curves, mel_picture
from kit.notebook.result import Result, Sound, players_of
from kit.recipes.base_model import package_speaker
from kit.recipes.evaluation_data import EvaluationData, SpeakerLoss, loss_by_speaker
from kit.recipes.open_run import ActiveRun
from kit.settings import EvaluateConfig, TrainConfig
from kit.training.logs import held_out_losses, read_log
from kit.tuning import checks

SAMPLES = 3  # recordings saved to samples/
PACKAGE_SENTENCES = 24  # that the package of an IndexTTS2 speaks, one after the other
SPEAKER_CLIPS = 48  # recordings whose loss is compared with another speaker's reference
WORST_WORDS = 12  # in the table


class Evaluation:
    """The evaluation of a run; `run()` is all of it. Raises as `EvaluationData` does."""

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
        picture = bars(list(scores), groups, "%", title)
        line = f"CER by kind of sentence: {list_cer(scores)}"
        return self.record(line, figures, picture, scores_table(scores))

    @cached_property
    def speaker_losses(self) -> dict[str, SpeakerLoss]:
        """Loss per code of each speaker with the own reference and with another's; recorded."""
        data = self.data
        clips = []
        for row in data.held_out[:SPEAKER_CLIPS]:
            clips.append((row.text, row.speaker, load_wave(row.audio, data.rate_hz)))
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
        picture = bars(list(losses), groups, "nats per code", title)
        costs = [f"{name} {loss.own:.3f} ({loss.other:.3f})" for name, loss in losses.items()]
        line = "Speaker conditioning, nats per code with the own reference (another's): "
        lines = [line + ", ".join(costs), *checks.problems(speaker_checks(self.active_run))]
        figures = {"whose_voice": {name: vars(loss) for name, loss in losses.items()}}
        return Result(line="\n".join(lines), pictures=[picture], figures=figures, shown=False)

    def losses(self) -> Result:
        """Held-out loss along training: of the last weights, and of their average; both speak."""
        lines = held_out_losses(read_log(self.active_run.path("train.jsonl")))
        final = {name: values[-1] for name, (_, values) in lines.items()}
        figures = {f"{name.lower()}_loss": loss for name, loss in final.items()}
        line = "Held-out loss at the end: "
        line += ", ".join(f"{name} {loss:.3f}" for name, loss in final.items())
        if "EMA" in final:
            line += f"\nThe loss of EMA is {final['EMA'] / final['raw'] - 1:+.1%} against raw."
        result = self.record(line, figures, curves(lines, "step", "held-out loss"))
        if not self.data.codec.decodes:
            return result
        return dataclasses.replace(result, compared=self.sounds_by_weights())

    def sounds_by_weights(self) -> dict[str, list[Sound]]:
        sounds = {}
        for name, spoken in self.data.by_weights.items():
            sounds[name] = []
            for sample in spoken.samples:
                wave = load_wave(str(self.active_run.folder / sample["wav"]), self.data.rate_hz)
                sounds[name] += players_of({sample["text"]: wave}, self.data.rate_hz)
        return sounds

    def endings(self) -> Result:
        """Whether held-out sentences end by themselves, and how long they are: from codes alone."""
        data = self.data
        figures = scoring.score_codes(data.voices[data.best], data.held_out, data.read_once)
        judged = checks.ending_checks(figures, suggested_fix(self.active_run))
        result = self.record("Codes of held-out sentences", figures, grid=checks.table(judged))
        return dataclasses.replace(result, failed=bool(checks.problems(judged)))

    def spoken_by_package(self) -> Result:
        """The CER of an exported IndexTTS2: its package speaks, in the reference's voice."""
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
        picture = bars(list(counts), groups, "errors", f"Word errors among {words:,} words")
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
        judged = voice_checks(self.active_run, scores.figures(), floor_cer)
        faults = checks.problems(judged)
        line = "Not yet: " + "; ".join(faults) if faults else "The voice passes."
        figures = scores.figures() | {"cer_floor": floor_cer, "gate": faults or "passed"}
        result = self.record(line, figures, grid=checks.table(judged))
        return dataclasses.replace(result, failed=bool(faults))

    def judges(self) -> Result:
        """The scores of independent models, if `make judges` has been run."""
        recorded = self.active_run.report().get("judges", {})
        if not recorded:
            line = "Not yet judged by Whisper, DNSMOS and speaker similarity: run make judges RUN="
            return Result(line=line + shlex.quote(self.active_run.name))
        scores = recorded["heard"]
        line = "Whisper's CER: "
        line += ", ".join(f"{name} {score['cer']:.1%}" for name, score in scores.items())
        if recorded["weights"] != file_digest(self.active_run.folder / WEIGHTS["raw"]):
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


def voice_checks(run: Run, figures: dict, floor_cer: float) -> list[checks.Check]:
    """Check a voice's `figures` against the CER of the recordings and the run's settings."""
    worst_cer = build(EvaluateConfig, run.section("evaluate")).worst_cer
    gate = checks.gate_checks(figures, floor_cer, worst_cer, suggested_fix(run))
    return gate + speaker_checks(run)


def suggested_fix(run: Run) -> str:
    train = run.report().get("train", {})
    return checks.suggest_fix(train.get("loss"), train.get("val_loss"))


def speaker_checks(run: Run) -> list[checks.Check]:
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
    return [checks.judged("speakers distinguished", used, "all of them", not alike, fix)]
