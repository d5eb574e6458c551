"""Notebook 07: fine-tune a base model, such as a released XTTS-v2, on recordings.

The recipes of notebooks 01 and 02, and what only such a run asks: can the tokenizer spell the
language, how does the voice sound before and after, what has it forgotten?
"""

import copy
import dataclasses
import shutil
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import torch

from kit.audio.spectrogram import load_reference
from kit.base.files import encode_wav, write_atomic
from kit.base.hardware import on_device
from kit.base.run import find_run
from kit.batches.code_cache import CodeCache, reference_rows
from kit.dataset.data_report import rows_in_split
from kit.dataset.manifest import read_manifest
from kit.inference.export import export_voice
from kit.inference.sampling import GenerateConfig
from kit.inference.voice import Voice
from kit.inference.voice_files import load_voice
from kit.model.gpt import SpeechGPT
from kit.model.weights import WEIGHTS, extend_positions
from kit.notebook.result import Result, Sound
from kit.recipes.active_run import ActiveRun, active_run
from kit.recipes.base_model import (
    RELEASE,
    WITH_THEM,
    folder_of,
    inherited_licence,
    release_weights,
)
from kit.recipes.evaluate import Evaluation
from kit.recipes.prepare import Preparation
from kit.recipes.prepare_parts import describe_spelling
from kit.recipes.rehearsal import BaseLanguages
from kit.recipes.run_parts import first_model, load_base_tokenizer, sampling_of
from kit.recipes.speak import chosen_weights, megabytes, sound_of
from kit.recipes.train import SPOKEN, Training
from kit.recipes.training_samples import spoken_samples
from kit.releases.indextts2.model import indextts2_in, load_indextts2, save_indextts2
from kit.releases.indextts2.speak import EXPORT_FOLDER, missing_files
from kit.releases.indextts2.speak import README as INDEXTTS2_README
from kit.releases.xtts_v2.model import load_xtts, save_xtts
from kit.releases.xtts_v2.tokenizer import load_vocabulary, tag_of
from kit.text.train_tokenizer import tokenizer_report
from kit.tuning.memory_plan import count_parameters

WITHOUT_SOUND = (
    "Nothing to listen to here: the base model's own package makes its sound, after the export."
)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}

README = """# A fine-tuned XTTS-v2

For coqui-tts (`pip install coqui-tts "transformers<5.24"`: a later one breaks its generation); the
kit speaks from the folder `export` beside this one.

    from TTS.tts.configs.xtts_config import XttsConfig
    from TTS.tts.models.xtts import Xtts
    config = XttsConfig()
    config.load_json("config.json")
    model = Xtts.init_from_config(config)
    model.load_checkpoint(config, checkpoint_dir=".", strict=True)
{teach}    latents, speaker = model.get_conditioning_latents(audio_path=["reference.wav"])
    made = model.inference("...", "{tag}", latents, speaker)["wav"]  # 24 kHz

Neither this model nor its speech may be used commercially: it is made from XTTS-v2, which is under
the Coqui Public Model License (https://coqui.ai/cpml). Whoever is given it, or its speech, must be
given that licence, too.
"""
TEACH = """\
    # coqui-tts does not normalise texts in this language.
    from kit.releases.xtts_v2.tokenizer import teach_language
    teach_language(model.tokenizer, "{language}")
"""
# Languages in which coqui-tts 0.28 normalises texts itself.
CLEANED = "en es fr de it pt pl tr ru nl cs ar zh-cn ja hu ko hi".split()


class FineTune:
    """A run that starts from the model `base_model`; `run()` is every step of it.

    `base_model`, `data`, `language`, `accept_license` and `tokenizer` are as `Preparation` takes
    them; `max_steps`, `num_train_epochs`, `session_hours` and `quota_gb` as `Training` does.
    `rehearsal` is the share of an epoch's rows in which the voice repeats sentences of its base
    model's languages (None: the run's setting).
    """

    def __init__(
        self,
        run: ActiveRun,
        data: str = "",
        language: str = "",
        base_model: str = RELEASE,
        accept_license: str = "",
        max_steps: int = 0,
        session_hours: float = 12.0,
        quota_gb: float = 0,
        rehearsal: float | None = None,
        num_train_epochs: float = 0.0,
        tokenizer: str = "",
    ):
        if rehearsal is not None:
            run = run.save_settings({"finetune": {"rehearsal": rehearsal}})
        self.base_model = base_model
        self.accept_license = accept_license
        self.duration = {"max_steps": max_steps, "num_train_epochs": num_train_epochs}
        self.duration |= {"session_hours": session_hours, "quota_gb": quota_gb}
        self.prepare = Preparation(
            run,
            data,
            language,
            base_model=base_model,
            accept_license=accept_license,
            tokenizer=tokenizer,
        )
        self.active_run = self.prepare.active_run
        self.language = self.prepare.source.language

    def run(self) -> Iterator[Result]:
        """Run every step without a notebook; finished steps are not repeated."""
        yield self.describe_base()
        yield self.recordings()
        yield self.spelling()
        yield self.grow()
        yield self.to_codes()
        yield self.before()
        yield from self.training.run()
        yield self.after()
        yield self.forgetting()
        yield self.export()
        yield self.evaluate()

    def describe_base(self) -> Result:
        source = self.active_run.report().get("start_from", {})
        model = self.prepare.model
        parameters = count_parameters(model)
        figures = {
            "it is": source.get("release") or "none that is known by its hash",
            "licence": source.get("licence") or "its owner's to say",
            "parameters": f"{parameters:,}",
            "layers": model.layers,
            "width": model.width,
            "text ids": model.text_vocab,
            "codes": model.code_vocab,
        }
        line = f"{self.base_model}: {parameters / 1e6:,.1f} million parameters"
        return Result(line=line, figures=figures)

    def recordings(self) -> Result:
        """Check the recordings. Raises DatasetError if too many were rejected."""
        checked = self.prepare.check()
        usable = self.prepare.require_usable()
        return dataclasses.replace(checked, line=f"{checked.line}\n{usable.line}")

    def spelling(self) -> Result:
        """How the base model's tokenizer spells the held-out texts."""
        rows = self.prepare.checked.kept
        texts = [row.text for row in rows_in_split(rows, "held_out") or rows]
        base = load_base_tokenizer(self.active_run, self.language)
        return Result(line=describe_spelling({"its own pieces": tokenizer_report(base, texts)}))

    def grow(self) -> Result:
        """Add tokens learned from the texts behind its own, whose ids stay; before and after."""
        return self.prepare.train_tokenizer()

    def to_codes(self) -> Result:
        """The rest of 01_data_prep in one go: a line each, and the codec to listen to."""
        steps = list(self.prepare.to_batches())
        codec = steps[0]
        line = "\n".join(step.line for step in steps)
        return Result(line=line, pictures=codec.pictures, sounds=codec.sounds)

    @cached_property
    def training(self) -> Training:
        """The training of 02_train, with what `to_codes` wrote."""
        run = self.active_run
        return Training(active_run(find_run(name=run.name), run.kept), **self.duration)

    @cached_property
    def sampling(self) -> GenerateConfig:
        return sampling_of(self.active_run)

    @cached_property
    def base_languages(self) -> BaseLanguages:
        """The base model and its languages, for the steps after training."""
        return BaseLanguages(self.training.active, self.training.data.voice(), self.sampling)

    @property
    def sentence(self) -> str:
        """The held-out sentence that training speaks, too; "" if none can be spoken."""
        rows = self.training.data.held_out_sentences(1)
        return rows[0].text if rows else ""

    def before(self) -> Result:
        """How the voice sounds before the first step: in the run's language and in its own."""
        if not self.prepare.codec.decodes:
            return Result(line=WITHOUT_SOUND)
        sounds = self.untrained_sounds() + self.base_languages.sounds()
        del self.base_languages  # large: training needs the memory
        return Result(line=f"{len(sounds)} sentences before the first step", sounds=sounds)

    def untrained_sounds(self) -> list[Sound]:
        """The run's sentence by the model that training starts with."""
        training = self.training
        run = training.active
        model = first_model(run, training.model, tokenizer=training.data.tokenizer)
        voice = dataclasses.replace(training.data.voice(), model=model.eval().to(run.hw.device))
        with on_device(run.hw.device, voice.codec):
            return self.speak(voice, "before")

    def speak(self, voice: Voice, when: str) -> list[Sound]:
        """The run's sentence by `voice`, once; [] if there is none."""
        if not self.sentence:
            return []
        once = dataclasses.replace(self.sampling, best_of=1, retries=0)
        (speech,) = voice.speak([self.sentence], voice.speakers[0], once)
        return [sound_of(voice, speech, f"{voice.language}, {when}: {self.sentence}")]

    @cached_property
    def voice(self) -> Voice:
        """The trained voice, with the weights that 03 chose, else their average.

        Raises SpeechError if training is not finished.
        """
        run = self.training.active
        return load_voice(run.folder, WEIGHTS[chosen_weights(run)], self.language, run.hw.device)

    @cached_property
    def tuned(self) -> SpeechGPT:
        """The trained model, with all positions of the base model."""
        return extend_positions(self.voice.model, self.base_languages.model)

    def after(self) -> Result:
        """The same sentences before, during and after training, in old and new languages."""
        if not self.prepare.codec.decodes:
            return Result(line=WITHOUT_SOUND)
        sounds = self.untrained_sounds()
        sounds += spoken_samples(self.active_run.folder / SPOKEN)
        sounds += self.speak(self.voice, "after")
        pairs = zip(self.base_languages.sounds(), self.base_languages.sounds(self.tuned))
        for before, after in pairs:
            sounds.append(dataclasses.replace(before, caption=f"before, {before.caption}"))
            sounds.append(dataclasses.replace(after, caption=f"after, {after.caption}"))
        return Result(line=f"The same sentences, {len(sounds)} times", sounds=sounds)

    def forgetting(self) -> Result:
        return self.base_languages.forgetting(self.tuned)

    def export(self, weights: str = "fp16") -> Result:
        """Write the voice to `export`, and one from an XTTS-v2 also to `coqui`, for coqui-tts.

        One from an IndexTTS2 is written to `indextts2` alone, for its own package. `weights` is
        "fp16" or "fp32".
        """
        run = self.training.active
        licence = inherited_licence(run)
        release, _ = folder_of(run, self.base_model, self.accept_license or licence)
        voice = self.voice
        missing = []
        if indextts2_in(release):
            folders = [run.path(EXPORT_FOLDER)]
            export_for_indextts2(run, voice, release, folders[0], weights)
            missing = missing_files(folders[0])
        else:
            folders = [export_voice(voice, run.path("export"), weights, self.sampling, licence)]
        if release_weights(release):
            folders.append(run.path("coqui"))
            export_for_coqui(run, voice, release, folders[1], weights)
        exported = {}
        for folder in folders:
            size_bytes = sum(file.stat().st_size for file in folder.iterdir())
            exported[folder.name] = {"weights": weights, "bytes": size_bytes}
        run.record(finetune={"exported": exported})
        lines = [f"{folder}: the voice, ready to copy ({megabytes(folder)})" for folder in folders]
        if missing:
            lines.append(f"To speak, it also needs from the release: {', '.join(missing)}.")
        return Result(line="\n".join(lines))

    def evaluate(self) -> Result:
        """Of an IndexTTS2: do its sentences end, and what is its CER when its package speaks?"""
        run = self.training.active
        if self.prepare.codec.decodes:
            return Result(line=f"03_evaluate_ema with RUN = {run.name!r} evaluates this voice.")
        evaluation = Evaluation(run)
        endings = evaluation.endings()
        spoken = evaluation.spoken_by_package()
        line = f"{endings.line}\n{spoken.line}"
        return Result(line=line, grid=endings.grid, sounds=spoken.sounds)


def export_for_coqui(
    run: ActiveRun, voice: Voice, release: Path, folder: Path, weights: str
) -> None:
    """Write `voice` to `folder` as an XTTS-v2; what training did not change comes from `release`.

    A recording of the first speaker, the licence and a README are beside it. `weights` is fp32 or
    fp16. Raises KitError for a release that is missing or damaged, DiskError if the disk is full.
    """
    xtts = load_xtts(release)
    model = extend_positions(voice.model, xtts.model)
    settings = copy.deepcopy(xtts.config)
    tag = tag_of(voice.language)
    languages = settings.setdefault("languages", [])
    if tag not in languages:
        languages.append(tag)
    vocabulary = load_vocabulary(run.folder / "tokenizer.model")
    tuned = dataclasses.replace(xtts, model=model, config=settings, vocabulary=vocabulary)
    save_xtts(tuned, folder, DTYPES[weights])
    teach = "" if tag in CLEANED else TEACH.format(language=voice.language)
    write_atomic(folder / "README.md", README.format(teach=teach, tag=tag))
    for name in WITH_THEM:
        if (release / name).is_file():
            shutil.copyfile(release / name, folder / name)
    write_reference(run, voice, folder)


def export_for_indextts2(
    run: ActiveRun, voice: Voice, release: Path, folder: Path, weights: str
) -> None:
    """Write `voice` to `folder` as an IndexTTS2; what training did not change is from `release`."""
    base = load_indextts2(release)
    tuned = dataclasses.replace(
        base,
        model=extend_positions(voice.model, base.model),
        settings=base.settings | {"language": voice.language},
        tokenizer=(run.folder / "tokenizer.model").read_bytes(),
    )
    readme = INDEXTTS2_README.format(language=voice.language)
    save_indextts2(tuned, folder, DTYPES[weights], readme)
    write_reference(run, voice, folder)


def write_reference(run: ActiveRun, voice: Voice, folder: Path) -> None:
    """Write a recording of the voice's first speaker to `folder`."""
    cache = CodeCache(run.index())
    reference_id = cache.rows[reference_rows(cache)[voice.speakers[0]]]["id"]
    audio = next(row.audio for row in read_manifest(run.folder) if row.id == reference_id)
    rate_hz = voice.codec.input_sample_rate
    wave = load_reference(audio, rate_hz)
    write_atomic(folder / "reference.wav", encode_wav(wave.numpy(), rate_hz))
