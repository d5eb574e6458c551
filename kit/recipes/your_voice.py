"""Notebook your_voice: from recordings to a voice, by the recipes of the lessons in their order.

What it adds is the choice of what training starts from. The run keeps it, so that a cell that is
run again asks nothing.
"""

import dataclasses

from kit.audio.clip import load_wave, read_clip
from kit.base.errors import KitError
from kit.base.run import find_run, numbered
from kit.dataset import data_report
from kit.notebook.question import ask_question
from kit.notebook.result import Result, Sound, is_watched
from kit.recipes.base_model import CODEC, RELEASE, Release, releases, require_licence
from kit.recipes.evaluate import Evaluation
from kit.recipes.open_run import ActiveRun, activate
from kit.recipes.prepare import Preparation
from kit.recipes.prepare_results import draw_data_report, script_warning
from kit.recipes.run_parts import base_voice
from kit.recipes.speak import Speaking, to_download
from kit.recipes.train import Training

SCRATCH = "scratch"
# Hours of speech from which on training from scratch is recommended. Of one person 1.66 hours were
# tried at most, of synthetic speech 9.4.
ENOUGH_HOURS = 5.0
GPU_GIB = 8  # the smallest GPU on which fine-tuning the release was planned to fit
# Hours, whose speech, and the letters that a recogniser got wrong (docs/measurements.md).
MEASURED = (
    (0.56, "33 minutes of one person", "42 % of the letters: many words are lost"),
    (1.66, "1.7 hours of one person", "15 %: most words are understood"),
    (9.4, "9.4 hours of synthetic speech", "2 to 3 %"),
)


class YourVoice:
    """A voice from `data`; the methods in their order are the notebook.

    `way` is what training starts from: SCRATCH, the name of the release, another base model as
    `Preparation` takes it, or "": the hours, the machine and a click decide.
    """

    def __init__(
        self,
        run: ActiveRun,
        data: str = "",
        language: str = "",
        way: str = "",
        accept_license: str = "",
        max_steps: int = 0,
        **recordings,  # what else `Preparation` takes
    ):
        self.active_run = run
        self.options = {"data": data, "language": language, **recordings}
        self.way = way
        self.accept_license = accept_license
        self.max_steps = max_steps
        self.preparation = Preparation(run, **self.options)
        self.training: Training | None = None  # made by `prepare`

    def report(self) -> Result:
        """Check the recordings: what is kept, five lines, a picture and one clip."""
        self.preparation.check()
        report = self.preparation.checked.before_segmentation()
        kept = report.kept
        language = self.preparation.source.language
        kinds = data_report.by_kind(report.refused)
        reasons = ", ".join(f"{len(same):,} {kind}" for kind, same in kinds.items())
        too_long = len(self.preparation.checked.too_long)
        cut = f" {too_long:,} long recordings are cut at pauses later." if too_long else ""
        held_out_s = sum(row.seconds for row in kept if row.split != "train")
        lines = [
            f"Kept: {duration(report.kept_s)} in {len(kept):,} clips. Rejected: "
            f"{duration(report.lost_s)} ({report.lost_percent:.1f} %).",
            f"Rejected clips: {reasons or 'none'}.{cut}",
            f"Speakers: {data_report.hours_of(kept, 'speaker')}.",
            f"Language: {language}. {script_warning(kept, language)}".strip(),
            f"Held out, to test the voice with: {duration(held_out_s)}.",
        ]
        sounds = []
        for row in data_report.rows_in_split(kept, "train")[:1]:
            wave, rate_hz = read_clip(row.audio)
            sounds.append(Sound(caption=row.text, wave=wave, sample_rate_hz=rate_hz))
        return Result(
            line="\n".join(lines),
            pictures=draw_data_report(report)[:1],
            sounds=sounds,
            grid=data_report.findings_table(report.refused),
        )

    def require_usable(self) -> None:
        """Raise DatasetError if too much was rejected."""
        self.preparation.require_usable()

    @property
    def hours(self) -> float:
        """Of speech to learn from, with recordings that are cut later."""
        checked = self.preparation.checked
        return (checked.kept_s + sum(finding.seconds for finding in checked.too_long)) / 3600

    def expect(self) -> Result:
        """What such hours have given so far, in a table with a row for these."""
        grid = [("speech", "what a recogniser gets wrong")]
        less = [row for row in MEASURED if row[0] <= self.hours]
        more = MEASURED[len(less) :]
        where = "between these two" if less and more else "more than was measured"
        if not less:
            where = "less than was measured"
        grid += [row[1:] for row in less]
        grid.append((f"→ yours: {duration(3600 * self.hours)}", where))
        grid += [row[1:] for row in more]
        if released():
            grid.append((f"any hours, from {released().name}", "not measured yet"))
        line = "Voices trained from scratch; the arrow marks your hours"
        return Result(line=line, grid=grid)

    def choose(self) -> Result:
        """Decide what training starts from, and keep it with the run; may wait for a click."""
        run = self.active_run
        base = base_voice(run)
        kept = run.report().get("way", {})
        release = released()
        licence = self.accept_license or kept.get("licence", "")
        if self.way == SCRATCH and base:
            free = next(n for n in numbered(run.name) if not (run.folder.parent / n).exists())
            raise KitError(f"The run `{run.name}` started from {base}: set RUN = {free!r}.")
        if self.way:
            way, why = self.way, "as WAY says"
        elif kept:
            way, why = kept["from"], "as before"
        elif base or (run.folder / CODEC).exists():
            way, why = base or SCRATCH, "as this run was started"
        else:
            way, why = self.ask(release, licence)
            licence = "" if way == SCRATCH else release.licence
        if release and way == release.name and not base:
            require_licence(RELEASE, licence, release.licence)
        run.record(way={"from": way, "licence": licence})
        return Result(line=f"Training starts from {way}, {why}.")

    def ask(self, release: Release | None, licence: str) -> tuple[str, str]:
        """Return what training starts from and why; the release only once its licence is."""
        hw = self.active_run.hw
        if not self.preparation.source.data:
            return SCRATCH, "as the built-in corpus needs no other voice"
        if release is None:
            return SCRATCH, "as no extra here reads a published voice"
        if hw.device != "cuda" or round(hw.memory_bytes / 2**30) < GPU_GIB:
            return (
                SCRATCH,
                f"as {release.name} needs a GPU with {GPU_GIB} GB, and this is {hw.name}",
            )
        few = self.hours < ENOUGH_HOURS
        recommended = release.name if few else SCRATCH
        reason = f"{'fewer' if few else 'no fewer'} than {ENOUGH_HOURS:g} hours of speech"
        default = recommended if licence == release.licence or not few else ""
        if not is_watched():
            if not default:
                return SCRATCH, "as nobody is here to accept a licence"
            return default, f"as there are {reason}"
        terms = f"you accept the {release.licence}: {release.condition}"
        answers = {
            release.name: f"Start from {release.name} ({terms})",
            SCRATCH: "From scratch (the voice is yours)",
        }
        words = release.name if few else "from scratch"
        text = f"Recommended with {reason}: {words}."
        return ask_question(text, answers, default), "as was answered"

    def prepare(self) -> Result:
        """Take every step from recordings to batches; finished ones are not repeated."""
        kept = self.active_run.report()["way"]
        release = released()
        base = {SCRATCH: "", release and release.name: RELEASE}.get(kept["from"], kept["from"])
        licence = self.accept_license or kept["licence"]
        preparation = Preparation(
            self.active_run, **self.options, base_model=base, accept_license=licence
        )
        results = {step.__name__: step() for step in preparation.steps()}
        run = preparation.active_run
        self.active_run = activate(find_run(name=run.name), run.copy)  # it has positions now
        self.training = Training(self.active_run, self.max_steps)
        codec = preparation.codec
        line = (
            f"{preparation.tokenizer.vocab_size} tokens; {codec.vocab_size:,} codes, "
            f"{codec.frame_rate:.1f} of them a second\n{preparation.matched.note}\n"
            f"Ready to train on: {duration(3600 * run.figure('data', 'hours'))}"
        )
        return Result(line=line, sounds=results["train_codec"].sounds)

    def time(self) -> Result:
        """Whether training fits and how long it takes, before it starts."""
        training = self.training
        for step in training.checks():  # the panel shows their results
            step()
        if training.finished:
            return Result(line="Training has ended: the panel shows its curve.")
        return Result(line=f"{training.verdict}\n{training.in_time()}")

    def wait(self) -> Result:
        """Wait for the end of the training."""
        reached = self.training.wait()
        if self.training.finished:
            self.training.summary()  # saves the voice's references
        return dataclasses.replace(reached, grid=())

    def verdict(self) -> Result:
        """Make the sound clearer, then evaluate: a sentence, the error rates, one pair to hear."""
        self.require_trained()
        self.training.sound()
        self.training.reader()
        evaluation = Evaluation(self.training.active)
        rates = evaluation.error_rates()
        verdict = evaluation.verdict()
        evaluation.samples()
        figures = verdict.figures
        line = (
            f"{verdict.line}\nOf 100 letters the recogniser gets {100 * figures['cer']:.0f} wrong "
            f"in what the voice says, and {100 * figures['cer_floor']:.0f} in recordings."
        )
        data = evaluation.data
        sample = data.spoken["held_out"].samples[0]
        spoken = self.training.active.folder / sample["wav"]
        files = {"recording": data.held_out[0].audio, "your voice": spoken}
        pair = {}
        for name, file in files.items():
            wave = load_wave(str(file), data.rate_hz).numpy()
            pair[name] = [Sound(caption=sample["text"], wave=wave, sample_rate_hz=data.rate_hz)]
        pictures = rates.pictures
        return dataclasses.replace(verdict, line=line, pictures=pictures, compared=pair, grid=())

    def speaking(self, sentence: str = "") -> Speaking:
        """The trained voice; `sentence` is what its panel offers to say ("": an example)."""
        self.require_trained()
        return Speaking(self.training.active, sentence)

    def page(self) -> Result:
        """The record of the run as one page."""
        path = self.active_run.path("report.html")
        return to_download(f"All figures and sounds on one page: {path}", path)

    def require_trained(self) -> None:
        """Raise KitError before the end of the training."""
        if self.training is None or not self.training.finished:
            raise KitError("Training has not ended yet: run the cells above again, and it resumes.")


def duration(seconds: float) -> str:
    return f"{seconds / 60:.1f} minutes" if seconds < 3600 else f"{seconds / 3600:.2f} hours"


def released() -> Release | None:
    """The published model that the notebook offers; None without the extra that reads it."""
    known = (release for release in releases() if RELEASE.endswith(release.repository))
    return next(known, None)
