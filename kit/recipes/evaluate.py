"""Notebook 03: is the voice intelligible? And the checklist of a whole run.

Held-out sentences are spoken, transcribed by the recogniser and compared with the recordings.
"""

import dataclasses
from collections.abc import Iterator
from functools import cached_property

from kit.audio.clip import load_wave
from kit.audio.recognizer import cer
from kit.base.config import build
from kit.base.errors import KitError
from kit.base.files import file_digest
from kit.base.formatting import format_gib
from kit.base.run import Run
from kit.dataset.data_report import ManifestConfig
from kit.inference.evaluate import (
    Check,
    EvaluateConfig,
    Scores,
    WordPair,
    count_kinds,
    ending_checks,
    gate_checks,
    problems_of,
    save_samples,
    score_codes,
    suggest_fix,
    transcribe,
    word_stats,
)
from kit.model.weights import WEIGHTS
from kit.notebook.plots import Figure, bars, curves, grouped_bars
from kit.notebook.result import Result
from kit.recipes.active_run import ActiveRun
from kit.recipes.base_model import MIN_HOURS, too_few_hours
from kit.recipes.evaluation_data import EvaluationData, LabeledClip, SpeakerLoss, loss_by_speaker
from kit.recipes.training_samples import mel_picture, players_of
from kit.releases.indextts2.speak import EXPORT_FOLDER, PackageSpeaker
from kit.training.config import TrainConfig
from kit.training.logs import held_out_losses, read_log
from kit.tuning.doctor import training_checks

SAMPLES = 3  # recordings saved to samples/
PACKAGE_SENTENCES = 24  # that the package of an IndexTTS2 speaks, one after the other
SPEAKER_CLIPS = 48  # recordings whose loss is compared with another speaker's reference
WORST_WORDS = 12  # in the table


class Evaluation:
    """The evaluation of a run; `run()` is all of it.

    `sentences` 0 takes their number from the preset. Raises KitError if an earlier notebook has
    not run yet, and for missing or damaged files.
    """

    def __init__(self, run: ActiveRun, sentences: int = 0):
        self.active_run = run
        config = build(EvaluateConfig, run.section("evaluate"))
        self.data = EvaluationData(run, sentences or config.sentences)

    def __str__(self) -> str:
        data = self.data
        speakers = data.voices["raw"].speakers
        weights = ", ".join(data.voices)
        lines = [f"{len(data.held_out)} held-out sentences, voices {speakers}, weights: {weights}"]
        if data.left_out:
            lines.append(f"{data.left_out} left out: they have letters that no training text has.")
        return "\n".join(lines)

    __repr__ = __str__  # the plain-text side of a cell's output

    def _repr_html_(self) -> str:
        return Result(line=str(self))._repr_html_()

    def run(self) -> Iterator[Result]:
        """Run every step in turn; of an IndexTTS2 those that do without the kit's sound."""
        if not self.data.codec.decodes:
            yield self.losses()
            yield self.speaker_conditioning()
            yield self.endings()
            yield self.spoken_by_package()
            return
        yield self.hear()
        yield self.error_rates()
        yield self.harder_sentences()
        yield self.speaker_conditioning()
        yield self.losses()
        yield self.word_errors()
        yield self.verdict()
        yield self.judges()
        yield self.samples()

    def hear(self, number: int = 0) -> Result:
        """Play held-out sentence `number`, from 0: recording, codec, and the voice.

        The voice speaks once with the last weights, then with the better weights and `best_of`.
        """
        data = self.data
        row = data.held_out[number]
        recording = data.recording(row)
        once = data.voices["raw"].speak([row.text], row.speaker, data.read_once)[0]
        spoken = data.voices[data.best].speak([row.text], row.speaker, data.sampling)[0]
        waves = {
            "recording": recording,
            "codec": data.codec.round_trip(recording),
            "raw, one candidate": once.wave,
            self.best_of(data.best): spoken.wave,
        }
        (transcript,) = transcribe(data.recognizer, [spoken.wave], data.rate_hz)
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
        figures = {}
        for split, floor in floors.items():
            if split != "held_out":
                floor_figures = {"cer_floor": floor.cer, "cer_codec": floor.cer_codec}
                figures[split] = scores[split].figures() | floor_figures
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
        clips = [
            LabeledClip(text=row.text, speaker=row.speaker, wave=data.recording(row))
            for row in data.held_out[:SPEAKER_CLIPS]
        ]
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
        lines = [line + ", ".join(costs), *problems_of(speaker_checks(self.active_run))]
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
        figures = score_codes(data.voices[data.best], data.held_out, data.read_once)
        checks = ending_checks(figures, suggested_fix(self.active_run))
        grid = checks_table(checks)
        result = self.record("Codes of held-out sentences", figures, grid=grid)
        return dataclasses.replace(result, failed=bool(problems_of(checks)))

    def spoken_by_package(self, sentences: int = PACKAGE_SENTENCES) -> Result:
        """The CER of an exported IndexTTS2: its package speaks, in the reference's voice.

        Says what is missing where it cannot speak.
        """
        data = self.data
        folder = self.active_run.folder / EXPORT_FOLDER
        rows = data.held_out[:sentences]
        try:
            speaker = PackageSpeaker(folder)
        except KitError as error:
            return Result(line=f"The CER was not measured: {error}")
        waves = [speaker.speak(row.text) for row in rows]
        texts = [row.text for row in rows]
        spoken = transcribe(data.recognizer, waves, speaker.sample_rate)
        figures = {"cer": cer(spoken, texts)}
        line = f"CER of {len(rows)} sentences as the package speaks them: {figures['cer']:.2%}"
        sounds = players_of(dict(zip(texts[:SAMPLES], waves)), speaker.sample_rate)
        return dataclasses.replace(self.record(line, figures), sounds=sounds, shown=True)

    def word_errors(self) -> Result:
        """Kinds of word errors and the worst words, beside the recogniser's own errors."""
        pairs = self.data.word_pairs()
        on_codec = self.data.word_pairs(of_codec=True)
        counts = count_kinds(pairs)
        words = sum(len(pair.words) for pair in pairs)
        errors = {kind.replace(" ", "_"): count for kind, count in counts.items()}
        groups = {"the voice": counts.values(), "codec": count_kinds(on_codec).values()}
        title = f"Word errors among {words:,} words"
        return self.record(
            f"{sum(counts.values()):,} errors among {words:,} words; held-out sentence number "
            f"{self.data.worst_sentence()} has the most",
            {"words": words, "word_errors": errors},
            grouped_bars(list(counts), groups, "errors", title),
            worst_words_table(pairs, on_codec),
        )

    def verdict(self) -> Result:
        """The gate: is it intelligible, does it end, keep its pace and use the reference?"""
        floor_cer = self.data.floor("held_out").cer
        scores = self.data.spoken["held_out"].scores
        _ = self.speaker_losses  # recorded: the checks read them
        checks = voice_checks(self.active_run, scores, floor_cer)
        problems = problems_of(checks)
        line = "Not yet: " + "; ".join(problems) if problems else "The voice passes."
        result = self.record(line, {"gate": problems or "passed"}, grid=checks_table(checks))
        return dataclasses.replace(result, failed=bool(problems))

    def judges(self) -> Result:
        """The scores of independent models, if `make judges` has been run."""
        judged = self.active_run.report().get("judges", {})
        if not judged:
            command = f"make judges RUN={self.active_run.name}"
            line = f"Not yet judged by Whisper, DNSMOS and speaker similarity: run {command}"
            return Result(line=line)
        scores = judged["heard"]
        errors = ", ".join(f"{name} {score['cer']:.1%}" for name, score in scores.items())
        line = f"Whisper's CER: {errors}"
        if judged["weights"] != file_digest(self.active_run.folder / WEIGHTS["raw"]):
            line += "\nOf other weights than the last ones: run `make judges` again."
        return Result(line=line, grid=judges_table(scores))

    def samples(self) -> Result:
        """Save the first sentences of each kind in samples/, for readers of the report."""
        data = self.data
        folder = self.active_run.folder
        rows = data.held_out[:SAMPLES]
        recordings = ([row.text for row in rows], [data.recording(row) for row in rows])
        written = save_samples({"recording": recordings}, "held_out", data.rate_hz, folder)
        for spoken in (*data.by_weights.values(), *data.spoken.values()):
            written += spoken.samples
        self.active_run.record(samples=written)
        waves, captions = {}, {}
        for split, spoken in data.spoken.items():
            first = spoken.samples[0]
            waves[split] = load_wave(str(folder / first["wav"]), data.rate_hz)
            captions[f"{split}: {first['text']}"] = waves[split]
        return Result(
            line=f"{len(written)} samples in {folder / 'samples'}",
            pictures=[mel_picture(waves, data.rate_hz, data.front_end)],
            sounds=players_of(captions, data.rate_hz),
        )

    def record(
        self, line: str, figures: dict, picture: Figure | None = None, grid: list = ()
    ) -> Result:
        """Record `figures` under `eval` in the run's report; returns the step's result."""
        self.active_run.record(eval=figures)
        pictures = [picture] if picture else []
        return Result(line=line, pictures=pictures, figures=figures, shown=False, grid=grid)

    def best_of(self, weights: str) -> str:
        return f"{weights}, best of {self.data.sampling.best_of}"


def list_cer(scores: dict[str, Scores]) -> str:
    return ", ".join(f"{name} {score.cer:.2%}" for name, score in scores.items())


def scores_table(scores: dict[str, Scores]) -> list[tuple[str, ...]]:
    """Rows of a table of `scores` by name, the headings first."""
    grid = [("", "CER", "ended by themselves", "length", "ran away", "sentences")]
    for name, own in scores.items():
        rates = (f"{own.cer:.2%}", f"{own.eos_rate:.1%}", f"{own.duration_ratio:.2f} x")
        grid.append((name, *rates, f"{own.runaway_rate:.1%}", str(own.sentences)))
    return grid


def judges_table(scores: dict[str, dict]) -> list[tuple[str, ...]]:
    """Rows of a table of the scores of independent models, the headings first."""
    grid = [("", "Whisper CER", "DNSMOS, 1 to 5", "same voice, at most 1", "clips")]
    for name, own in scores.items():
        row = (f"{own['cer']:.1%}", f"{own['dnsmos']:.2f}", f"{own['similarity']:.3f}")
        grid.append((name, *row, str(own["clips"])))
    return grid


def worst_words_table(pairs: list[WordPair], on_codec: list[WordPair]) -> list[tuple[str, ...]]:
    """Rows of a table of the words with the most errors, the headings first."""
    wrong_on_codec = {word.word: word.wrong for word in word_stats(on_codec)}
    grid = [("word", "in the texts", "wrong", "wrong on the codec", "how", "recognised as")]
    for word in word_stats(pairs)[:WORST_WORDS]:
        if word.wrong:
            counts = (word.count, word.wrong, wrong_on_codec[word.word])
            recognized = " | ".join(words or "nothing" for words in word.recognized[:3])
            grid.append((word.word, *map(str, counts), ", ".join(word.kinds), recognized))
    return grid


def voice_checks(run: Run, scores: Scores, floor_cer: float) -> list[Check]:
    """Check `scores` of the voice against the CER of the recordings and the run's settings."""
    worst_cer = build(EvaluateConfig, run.section("evaluate")).worst_cer
    return gate_checks(scores, floor_cer, worst_cer, suggested_fix(run)) + speaker_checks(run)


def suggested_fix(run: Run) -> str:
    train = run.report().get("train", {})
    return suggest_fix(train.get("loss"), train.get("val_loss"))


def checks_table(checks: list[Check]) -> list[tuple[str, ...]]:
    """Rows of a table of `checks`, the headings first."""
    grid = [("", "asked of a voice", "found", "wanted")]
    for check in checks:
        grid.append(("✗" if check.problem else "✓", check.what, check.measured, check.wanted))
    return grid


def speaker_checks(run: Run) -> list[Check]:
    """Check the recorded losses by speaker; [] for a voice with one speaker."""
    recorded = run.report().get("eval", {}).get("whose_voice", {})
    if not recorded:
        return []
    train = build(TrainConfig, run.section("train"))
    alike = [name for name, loss in recorded.items() if not SpeakerLoss(**loss).uses_reference]
    problem = (
        f"{', '.join(alike)}: the model ignores the speaker reference, so they may sound alike; "
        "train longer, or with a lower train.conditioner_lr "
        f"(it was {train.conditioner_lr or train.lr:g})"
    )
    check = Check(
        what="uses the speaker reference",
        measured=f"{len(recorded) - len(alike)} of {len(recorded)} speakers",
        wanted="all of them",
        problem=problem if alike else "",
    )
    return [check]


class Checklist:
    """What must be right before, during and after training, read from the run's report and log.

    What was not recorded is not passed: its row names the command that measures it. Once training
    is finished, what was wrong during it is a note: only the voice counts.
    """

    def __init__(self, run: Run):
        self.active_run = run
        self.report = run.report()

    def run(self) -> Iterator[Result]:
        yield self.result()

    def result(self) -> Result:
        """The list as a table, and the verdict as a line."""
        log = read_log(self.active_run.folder / "train.jsonl")
        checks = {
            "before": self.before(),
            "during": [Check(*check) for check in training_checks(log)],
            "after": [self.trained(), *self.voice()],
        }
        finished = self.report.get("train", {}).get("finished", False)
        grid = [("", "training", "checked", "found", "wanted", "what to do")]
        counted = []
        for when, own in checks.items():
            is_past = when == "during" and finished
            counted += [] if is_past else own
            for check in own:
                mark = ("note" if is_past else "to do") if check.problem else "pass"
                grid.append((mark, when, *check))
        problems = problems_of(counted)
        line = f"All {len(counted)} checks pass: the voice is ready."
        if problems:
            passed = len(counted) - len(problems)
            line = f"{passed} of {len(counted)} checks pass. Next: {problems[0]}"
        return Result(line=line, grid=grid)

    def before(self) -> list[Check]:
        most = build(ManifestConfig, self.active_run.section("manifest")).max_rejected_percent
        wanted = f"at most {most:g} % of the hours"
        hours = f"{MIN_HOURS:g} hours of a person, or a base model"
        letters = "no bytes, every text comes back"
        suits = "the one for its memory"

        def rejected() -> tuple[str, str]:
            data = self.report["data"]
            found = f"{data['refused_percent']:.2f} %, {data['refused']:,} rows"
            passed = data["refused_percent"] <= most
            return found, "" if passed else "ledger.jsonl names each row and its fix"

        return [
            self.check("enough recordings", hours, "prepare", self.recordings),
            self.check("few rejected clips", wanted, "prepare", rejected),
            self.check("the tokenizer knows the letters", letters, "prepare", self.tokens),
            self.check("texts match their sound", "judged", "prepare", self.alignment),
            self.check("the preset suits the machine", suits, "setup", self.preset),
            self.check("a step fits into memory", "within the limit", "train", self.memory),
        ]

    def check(self, what: str, wanted: str, command: str, measure) -> Check:
        """Check by `measure()`: what was found, and what to do ("": it passes).

        If it asks for a figure that is not in the report, `command` is what records it.
        """
        try:
            found, problem = measure()
        except KeyError:
            found, problem = "not yet", self.command(command)
        return Check(what=what, measured=found, wanted=wanted, problem=problem)

    def recordings(self) -> tuple[str, str]:
        data = self.report["data"]
        found = f"{data['hours']:.2f} hours, {data['utterances']:,} utterances"
        return found, too_few_hours(self.active_run, data["hours"])

    def tokens(self) -> tuple[str, str]:
        text = self.report["text"]
        found = f"{text['byte_rate']:.2%} bytes, {text['round_trip']:.1%} come back"
        passed = text["byte_rate"] == 0 and text["round_trip"] == 1
        return found, "" if passed else "look for stray letters in the texts (`uncovered` in text)"

    def alignment(self) -> tuple[str, str]:
        note = self.report["data"]["alignment"]
        listen = "listen to some clips: the recogniser could not judge them"
        return note, listen if note.startswith("not judged") else ""

    def preset(self) -> tuple[str, str]:
        suitable = self.report["setup"]["preset for this machine"]
        own = self.active_run.preset_name
        fix = f"begin a new run with --preset {suitable}, or keep `{own}` on purpose"
        return f"{own}; {suitable} suits this machine", "" if own == suitable else fix

    def memory(self) -> tuple[str, str]:
        sizes = self.report["train"]["longest_step_bytes"]
        needed = sizes.get("reserved") or sizes["measured"] or sizes["planned"]
        found = f"{format_gib(needed)} of {format_gib(sizes['limit'])}"
        fix = "take --use low_memory, or the preset of a smaller tier"
        return found, "" if needed <= sizes["limit"] else fix

    def trained(self) -> Check:
        train = self.report.get("train", {})
        found, problem = "not yet", self.command("train")
        if "steps" in train:
            found = f"{train['steps']:,} steps"
            problem = "" if train.get("finished") else f"{problem} resumes where it stopped"
        return Check("training is finished", found, "to its end", problem)

    def voice(self) -> list[Check]:
        """The gate's checks of the figures that evaluation has recorded."""
        figures = self.report.get("eval", {})
        if "cer" not in figures:
            fix = self.command("evaluate")
            return [Check("the voice is intelligible", "not yet", "the gate passed", fix)]
        names = ("cer", "eos_rate", "duration_ratio", "runaway_rate", "sentences")
        scores = Scores(**{name: figures[name] for name in names})
        return voice_checks(self.active_run, scores, figures["cer_floor"])

    def command(self, name: str) -> str:
        return f"python -m kit {name} --run {self.active_run.name}"
