"""Is the voice intelligible? Held-out sentences, spoken and heard, against the recordings.

Each step draws what it found and records its own figures. What was spoken and heard before, by the
same weights with the same settings, is not spoken again.
"""

from collections.abc import Iterator

from kit.base.config import build
from kit.base.files import file_digest
from kit.inference.evaluate import Scores, problems_of, save_samples
from kit.inference.settings import EvaluateConfig
from kit.inference.speaker_conditioning import LabeledClip, loss_by_speaker
from kit.inference.word_alignment import count_kinds
from kit.model.weights import WEIGHTS
from kit.notebook.plots import Figure, curves
from kit.notebook.result import Result
from kit.recipes import evaluation_results as results
from kit.recipes.active_run import ActiveRun
from kit.recipes.evaluation_readings import EvaluationReadings
from kit.recipes.sounds import mel_picture, players_of
from kit.training.logs import held_out_losses, read_log

SAMPLES = 3  # recordings that go to samples/
TOLD = 48  # recordings that are told whose voice they are


class Evaluation:
    """The voices of a run, and a method for each thing that is asked of them.

    `sentences` 0 leaves their number to the preset. Raises KitError where a notebook before has
    not run yet, SpeechError and KitError for files that are missing or damaged.
    """

    def __init__(self, run: ActiveRun, sentences: int = 0):
        self.active_run = run
        self.config = build(EvaluateConfig, run.section("evaluate"))
        self.data = EvaluationReadings(run, sentences or self.config.sentences)
        self.weights = list(self.data.voices)[-1]  # of the voice to hear, until it is known better

    def __str__(self) -> str:
        data = self.data
        speakers = data.voices["raw"].speakers
        named = ", ".join(data.voices)
        lines = [f"{len(data.held_out)} held-out sentences, voices {speakers}, weights: {named}"]
        if "ema" not in data.voices:
            lines.append(
                "One set of weights: training kept no average (`ema` was off), so the last are "
                "judged."
            )
        if data.left_out:
            lines.append(f"{data.left_out} left out: they have letters no training text has.")
        return "\n".join(lines)

    __repr__ = __str__  # the plain-text side of a cell's output

    def _repr_html_(self) -> str:
        return Result(line=str(self))._repr_html_()

    def run(self) -> Iterator[Result]:
        """Every step in turn."""
        yield self.hear()
        yield self.floor()
        yield self.compare_weights()
        yield self.best_of_several()
        yield self.harder_sentences()
        yield self.whose_voice()
        yield self.losses()
        yield self.word_errors()
        yield self.verdict()
        yield self.judges()
        yield self.samples()

    def hear(self, number: int = 0) -> Result:
        """Held-out sentence `number`, from 0: recorded, after the codec, and as the voice says it.

        The voice reads it once with the last weights, then as it speaks from here on.
        """
        data = self.data
        row = data.held_out[number]
        recording = data.recording(row)
        once = data.voices["raw"].speak([row.text], row.speaker, data.read_once)[0]
        spoken = data.voices[self.weights].speak([row.text], row.speaker, data.sampling)[0]
        waves = {
            "recording": recording,
            "codec": data.codec.round_trip(recording),
            "raw, read once": once.wave,
            self.best_of(self.weights): spoken.wave,
        }
        line = f"{row.text} | heard: {data.written_down(spoken.wave)}"
        return Result(
            line=line,
            pictures=[mel_picture(waves, data.rate_hz, data.front_end)],
            sounds=players_of(waves, data.rate_hz),
        )

    def floor(self) -> Result:
        """What the recogniser makes of the recordings themselves, and of the codec's copies."""
        found = self.data.floor("held_out")
        line = f"CER on recordings {found.cer:.2%}, after the codec {found.cer_codec:.2%}"
        figures = {"cer_floor": found.cer, "cer_codec": found.cer_codec}
        return self.recorded(line, figures, self.error_bars({}))

    def compare_weights(self) -> Result:
        """The last weights, and their average where there is one: every sentence read once."""
        scores = self.scores_read_once()
        figures = {f"cer_{name}": found.cer for name, found in scores.items()}
        line = f"CER read once: {results.error_rates(scores)}"
        return self.recorded(line, figures, self.error_bars(scores), results.scores_table(scores))

    def best_of_several(self) -> Result:
        """The better weights, reading each sentence several times and keeping the likeliest."""
        best = self.data.best
        self.weights = best
        chosen = self.data.spoken["held_out"].scores
        figures = chosen.figures()
        figures["weights"] = best
        figures["candidates"] = self.data.sampling.candidates
        scores = self.scores_read_once()
        line = f"CER {scores[best].cer:.2%} read once, {chosen.cer:.2%} {self.best_of(best)}"
        scores[self.best_of(best)] = chosen
        return self.recorded(line, figures, self.error_bars(scores), results.scores_table(scores))

    def harder_sentences(self) -> Result:
        """Words that training never saw, long sentences, known words in any order.

        Each beside a floor of its own.
        """
        scores = {split: heard.scores for split, heard in self.data.spoken.items()}
        floors = {split: self.data.floor(split) for split in scores}
        figures = {}
        for split in scores:
            if split != "held_out":
                figures[split] = scores[split].figures()
                figures[split]["cer_floor"] = floors[split].cer
                figures[split]["cer_codec"] = floors[split].cer_codec
        line = f"CER by kind of sentence: {results.error_rates(scores)}"
        picture = results.split_bars(floors, scores)
        return self.recorded(line, figures, picture, results.scores_table(scores))

    def whose_voice(self) -> Result:
        """What a code costs, told the speaker's own reference, and told somebody else's."""
        data = self.data
        voice = data.voices[self.weights]
        recordings = [
            LabeledClip(text=row.text, speaker=row.speaker, wave=data.recording(row))
            for row in data.held_out[:TOLD]
        ]
        costs = loss_by_speaker(voice, recordings)
        if not costs:
            return Result(line="Whose voice: there is one, so nobody is taken for another.")
        figures = {"whose_voice": {name: vars(found) for name, found in costs.items()}}
        self.active_run.record(eval=figures)
        deaf = problems_of(results.whose_voice_checks(self.active_run))
        line = "\n".join([f"Whose voice: {results.whose_voice(costs)}", *deaf])
        pictures = [results.whose_voice_bars(costs)]
        return Result(line=line, pictures=pictures, figures=figures, shown=False)

    def losses(self) -> Result:
        """Held-out loss along training: of the last weights, and of their average."""
        lines = held_out_losses(read_log(self.active_run.path("train.jsonl")))
        at_the_end = {name: values[-1] for name, (_, values) in lines.items()}
        figures = {f"{name.lower()}_loss": loss for name, loss in at_the_end.items()}
        told = ", ".join(f"{name} {loss:.3f}" for name, loss in at_the_end.items())
        line = f"Held-out loss at the end: {told}"
        if "EMA" in at_the_end:
            below = 100 * (1 - at_the_end["EMA"] / at_the_end["raw"])
            where = "below" if below >= 0 else "above"
            line += f"\nAt the end EMA is {abs(below):.1f} % {where} raw."
        return self.recorded(line, figures, curves(lines, "step", "held-out loss"))

    def word_errors(self) -> Result:
        """How words go wrong, and which, beside the recogniser's own mistakes on the codec."""
        pairs = self.data.word_pairs()
        on_codec = self.data.codec_word_pairs()
        counts = count_kinds(pairs)
        words = sum(len(pair.words) for pair in pairs)
        errors = {kind.replace(" ", "_"): count for kind, count in counts.items()}
        return self.recorded(
            f"{sum(counts.values()):,} errors among {words:,} words; of the held-out sentences "
            f"number {self.data.worst_sentence()} has most",
            {"words": words, "word_errors": errors},
            results.kind_bars(pairs, on_codec),
            results.worst_words_table(pairs, on_codec),
        )

    def verdict(self) -> Result:
        """The gate: intelligible, ends its sentences, keeps its pace, hears who is to speak."""
        floor_cer = self.data.floor("held_out").cer
        scores = self.data.spoken["held_out"].scores
        checks = results.voice_checks(self.active_run, scores, floor_cer)
        problems = problems_of(checks)
        line = "Not yet: " + "; ".join(problems) if problems else "The voice passes."
        figures = {"gate": problems or "passed"}
        return self.recorded(line, figures, grid=results.checks_table(checks))

    def judges(self) -> Result:
        """What judges that nobody here trained found, where they were asked: `make judges`."""
        found = self.active_run.report().get("judges", {})
        if not found:
            run = f"make judges RUN={self.active_run.name}"
            line = f"Not judged by others (Whisper, DNSMOS, whose voice it is): {run}"
            return Result(line=line)
        cer = {name: one["cer"] for name, one in found["heard"].items()}
        told = ", ".join(f"{name} {error:.1%}" for name, error in cer.items())
        line = f"Whisper's CER: {told}"
        weights = file_digest(self.active_run.folder / WEIGHTS["raw"])
        if found["weights"] != weights:
            line += "\nOf other weights than the last ones: run `make judges` again."
        return Result(line=line, grid=results.judges_table(found["heard"]))

    def samples(self) -> Result:
        """The first sentences of each kind as files in samples/, for whoever gets the report."""
        data = self.data
        folder = self.active_run.folder
        rows = data.held_out[:SAMPLES]
        recordings = ([row.text for row in rows], [data.recording(row) for row in rows])
        written = save_samples({"recording": recordings}, "held_out", data.rate_hz, folder)
        for reading in (*data.by_weights.values(), *data.spoken.values()):
            written += reading.samples
        self.active_run.record(samples=written)
        first = {split: reading.samples[0] for split, reading in data.spoken.items()}
        waves = {split: data.sample_wave(sample) for split, sample in first.items()}
        captions = {f"{split}: {first[split]['text']}": wave for split, wave in waves.items()}
        return Result(
            line=f"{len(written)} samples in {folder / 'samples'}",
            pictures=[mel_picture(waves, data.rate_hz, data.front_end)],
            sounds=players_of(captions, data.rate_hz),
        )

    def recorded(
        self, line: str, figures: dict, picture: Figure | None = None, grid: list = ()
    ) -> Result:
        """What a step found, its figures now in the run's record under `eval`."""
        self.active_run.record(eval=figures)
        pictures = [picture] if picture else []
        return Result(line=line, pictures=pictures, figures=figures, shown=False, grid=grid)

    def best_of(self, weights: str) -> str:
        """How the voice speaks from here on, in words."""
        return f"{weights}, best of {self.data.sampling.candidates}"

    def scores_read_once(self) -> dict[str, Scores]:
        return {name: heard.scores for name, heard in self.data.by_weights.items()}

    def error_bars(self, scores: dict[str, Scores]) -> Figure:
        """`scores` by name, beside the floor of the held-out sentences."""
        data = self.data
        return results.error_bars(data.floor("held_out"), scores, len(data.held_out))
