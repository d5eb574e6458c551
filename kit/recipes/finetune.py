"""Fine-tuning: a released voice and a person's recordings in, that voice in their language out.

`FineTune(run)` is notebook 07: the recipes of 01 and 02 with a voice to begin with, and around them
what only such a run has to ask: can the voice's tokenizer spell the language, how does it speak
before and after, and what has it forgotten? Each step draws what it found.
"""

import dataclasses
from collections.abc import Iterator
from functools import cached_property

from kit.base.hardware import on_device
from kit.dataset.data_report import rows_in_split
from kit.inference.export import export_voice
from kit.inference.sampling import GenerateConfig
from kit.inference.voice import Voice
from kit.inference.voice_files import load_voice
from kit.model.gpt import SpeechGPT
from kit.model.warm_start import extend_positions
from kit.model.weights import WEIGHTS
from kit.notebook.result import Result, Sound
from kit.recipes import prepare_results as results
from kit.recipes.active_run import ActiveRun, active_run
from kit.recipes.base_languages import BaseLanguages
from kit.recipes.export_coqui import export_for_coqui
from kit.recipes.prepare import Preparation
from kit.recipes.prepare_source import sampling_of
from kit.recipes.release_files import RELEASE
from kit.recipes.spoken_samples import spoken_samples
from kit.recipes.start_from import first_model, folder_of, tokenizer_of_start
from kit.recipes.start_from_xtts import release_weights
from kit.recipes.train import Training
from kit.text.tokenizer_report import tokenizer_report
from kit.tuning.memory_plan import count_parameters


class FineTune:
    """A run that begins with the voice `start_from`: every step of it, in the order of `run`.

    `start_from` is a folder or `hf://OWNER/NAME`, as `Preparation` takes it, and so are `data` and
    `language`; `licence` "CPML" accepts that of a released XTTS-v2, without which nothing is read.
    `steps`, `session_hours` and `quota_gb` are as `Training` takes them. `rehearsal` is the share
    of an epoch's rows in which the voice says what it could say before (None: as the run's settings
    have it).
    """

    def __init__(
        self,
        run: ActiveRun,
        data: str = "",
        language: str = "",
        start_from: str = RELEASE,
        licence: str = "",
        steps: int = 0,
        session_hours: float = 12.0,
        quota_gb: float = 0,
        rehearsal: float | None = None,
    ):
        if rehearsal is not None:
            run = run.save_settings({"finetune": {"rehearsal": rehearsal}})
        self.start_from = start_from
        self.licence = licence
        self.length = {"steps": steps, "session_hours": session_hours, "quota_gb": quota_gb}
        self.prepare = Preparation(run, data, language, start_from=start_from, licence=licence)
        self.active_run = self.prepare.active_run

    def run(self) -> Iterator[Result]:
        """Every step with nobody watching; what was finished before is not done again."""
        yield self.begun()
        yield self.recordings()
        yield self.spelling()
        yield self.grow()
        yield self.to_codes()
        yield self.before()
        yield from self.training.run()
        yield self.after()
        yield self.forgetting()
        yield self.export()

    @property
    def language(self) -> str:
        return self.prepare.source.language

    def begun(self) -> Result:
        """Which voice it is, under which licence, and how large."""
        found = self.active_run.report().get("start_from", {})
        model = self.prepare.model
        parameters = count_parameters(model)
        figures = {
            "it is": found.get("release") or "none that is known by its hash",
            "licence": found.get("licence") or "its owner's to say",
            "parameters": f"{parameters:,}",
            "layers": model.layers,
            "width": model.width,
            "text ids": model.text_vocab,
            "codes": model.code_vocab,
        }
        line = f"{self.start_from}: {parameters / 1e6:,.1f} million parameters"
        return Result(line=line, figures=figures)

    def recordings(self) -> Result:
        """The recordings and their ledger. Raises DatasetError where too much was refused."""
        checked = self.prepare.check()
        usable = self.prepare.require_usable()
        return dataclasses.replace(checked, line=f"{checked.line}\n{usable.line}")

    def spelling(self) -> Result:
        """What the voice's own tokenizer makes of the held-out texts."""
        rows = self.prepare.checked.kept
        texts = [row.text for row in rows_in_split(rows, "held_out") or rows]
        base = tokenizer_of_start(self.active_run, self.language)
        return results.of_spelling({"its own pieces": tokenizer_report(base, texts)})

    def grow(self) -> Result:
        """Add the pieces that the texts can teach behind its own; the same picture, before, after.

        Ids that were there stay what they are.
        """
        return self.prepare.train_tokenizer()

    def to_codes(self) -> Result:
        """All that is left of 01_data_prep, in one go: a line each, and the codec to listen to."""
        prepare = self.prepare
        codec = prepare.train_codec()
        steps = [codec, prepare.train_recognizer(), prepare.align(), prepare.cut_long()]
        steps += [prepare.fit_positions(), prepare.encode()]
        steps += [prepare.measure_lengths(), prepare.make_batches()]
        if prepare.rehearses:
            steps.append(prepare.rehearse())
        line = "\n".join(step.line for step in steps)
        return Result(line=line, pictures=codec.pictures, sounds=codec.sounds)

    @cached_property
    def training(self) -> Training:
        """The training of 02_train, from what `to_codes` left."""
        run = self.active_run
        return Training(active_run(run.name, kept=run.kept), **self.length)

    @cached_property
    def sampling(self) -> GenerateConfig:
        return sampling_of(self.active_run)

    def first_voice(self) -> BaseLanguages:
        """The voice that the run began with, and its languages; not kept: it is as large again."""
        return BaseLanguages(self.training.active, self.training.data.voice(), self.sampling)

    @cached_property
    def base_languages(self) -> BaseLanguages:
        """The same, once training is over."""
        return self.first_voice()

    @property
    def sentence(self) -> str:
        """The held-out sentence that training speaks, too."""
        rows = self.training.data.held_out_sentences(1)
        return rows[0].text if rows else ""

    def before(self) -> Result:
        """How the voice speaks before it has learnt anything: the language, and those it knew."""
        sounds = self.first_words() + self.first_voice().heard()
        return Result(line=f"{len(sounds)} sentences before the first step", sounds=sounds)

    def first_words(self) -> list[Sound]:
        """The run's sentence by the model that training begins with."""
        training = self.training
        run = training.active
        model = first_model(run, training.model, tokenizer=training.data.tokenizer)
        voice = dataclasses.replace(training.data.voice(), model=model.eval().to(run.hw.device))
        with on_device(run.hw.device, voice.codec):
            return self.said(voice, "before")

    def said(self, voice: Voice, when: str) -> list[Sound]:
        if not self.sentence:
            return []
        once = dataclasses.replace(self.sampling, candidates=1, retries=0)
        (speech,) = voice.speak([self.sentence], voice.speakers[0], once)
        caption = f"{voice.language}, {when}: {self.sentence}"
        wave = speech.wave.cpu().numpy()
        return [Sound(caption=caption, wave=wave, sample_rate_hz=voice.codec.sample_rate)]

    @cached_property
    def voice(self) -> Voice:
        """The voice as training left it: with the weights that 03 chose, or their average.

        Raises SpeechError where training has not ended.
        """
        run = self.training.active
        best = run.figure("eval", "weights")
        averaged = (run.folder / WEIGHTS["ema"]).is_file()
        kind = best or ("ema" if averaged else "raw")
        voice = load_voice(run.folder, WEIGHTS[kind], self.language, run.hw.device)
        return voice

    @cached_property
    def tuned(self) -> SpeechGPT:
        """Its model, with all positions of the one it began as."""
        return extend_positions(self.voice.model, self.base_languages.model)

    def after(self) -> Result:
        """The same sentences before, during and after training, and those in the languages before.

        Two sounds for each of those: as it was, and as it is.
        """
        sounds = self.first_words()
        sounds += spoken_samples(self.training.samples_folder)
        sounds += self.said(self.voice, "after")
        pairs = zip(self.base_languages.heard(), self.base_languages.heard(self.tuned))
        for before, after in pairs:
            sounds.append(dataclasses.replace(before, caption=f"before, {before.caption}"))
            sounds.append(dataclasses.replace(after, caption=f"after, {after.caption}"))
        return Result(line=f"The same sentences, {len(sounds)} times", sounds=sounds)

    def forgetting(self) -> Result:
        """How much is left of the languages that the voice spoke before."""
        return self.base_languages.forgetting(self.tuned)

    def export(self, weights: str = "fp16") -> Result:
        """The voice in the kit's folder `export`; of a released XTTS-v2 also as coqui-tts's files.

        `weights` is "fp16" or "fp32".
        """
        run = self.training.active
        folders = [export_voice(self.voice, run.path("export"), weights, self.sampling)]
        release, _ = folder_of(run, self.start_from, self.licence)
        if release_weights(release):
            coqui = run.path("coqui")
            folders.append(export_for_coqui(run, self.voice, release, coqui, weights))
        grid = [("file", "MB")]
        exported = {}
        for folder in folders:
            sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
            exported[folder.name] = {"weights": weights, "bytes": sum(sizes.values())}
            grid += [(f"{folder.name}/{name}", f"{size / 1e6:.1f}") for name, size in sizes.items()]
        run.record(finetune={"exported": exported})
        line = "\n".join(f"{folder}: a voice to take away" for folder in folders)
        return Result(line=line, grid=grid)
