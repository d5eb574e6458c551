"""Notebook 07: fine-tune a base model, such as a released XTTS-v2, on recordings.

The recipes of notebooks 01 and 02, and what only such a run asks: can the tokenizer spell the
language, how does the voice sound before and after, what has it forgotten?
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from kit.audio.clip import load_wave
from kit.audio.spectrogram import load_reference
from kit.base.errors import SpeechError
from kit.base.files import encode_wav, write_atomic
from kit.base.hardware import on_device
from kit.base.run import find_run
from kit.batches.code_cache import CodeCache, reference_rows
from kit.dataset.data_report import rows_in_split
from kit.dataset.manifest import Utterance, read_manifest
from kit.extras.finetune.forgetting import BaseLanguages
from kit.inference.voice import Speech, Voice
from kit.inference.voice_files import load_voice
from kit.model.gpt import SpeechGPT
from kit.model.weights import WEIGHTS, extend_positions
from kit.notebook.plots import bars
from kit.notebook.result import Result, Sound
from kit.recipes.base_model import RELEASE, folder_of, inherited_licence, release_in
from kit.recipes.evaluate import Evaluation
from kit.recipes.exports import chosen_weights, write_export
from kit.recipes.open_run import ActiveRun, activate, sampling_of
from kit.recipes.prepare import Preparation
from kit.recipes.prepare_parts import describe_spelling
from kit.recipes.run_parts import first_model, load_base_tokenizer
from kit.recipes.speak import megabytes, sound_of
from kit.recipes.train import Training
from kit.recipes.training_listeners import SPOKEN, spoken_samples
from kit.text.train_tokenizer import tokenizer_report
from kit.tuning.memory_plan import count_parameters

WITHOUT_SOUND = (
    "Nothing to listen to here: the base model's own package makes its sound, after the export."
)
SEARCHED_SENTENCES = 1000  # held-out ones, for speakers with several
COMPARED_SENTENCES = 12  # of them, for the speaker similarity
COMPARED_SPEAKERS = 3  # where there are more
UNSEEN = "unseen-speaker"  # a speaker who is not in the data


class FineTune:
    """A run that starts from the model `base_model`; `run()` is every step of it.

    `base_model`, `data`, `eval_data`, `language`, `accept_license`, `tokenizer` and `phonemes` are
    as `Preparation` takes them; `max_steps` and `num_train_epochs` as `Training` does.
    """

    def __init__(
        self,
        run: ActiveRun,
        data: str = "",  # a folder, table, archive or hf:// name (espeak-ng's speech)
        language: str = "",  # of the texts, such as am, en, tr (am)
        base_model: str = RELEASE,  # its folder, or hf://OWNER/NAME (hf://coqui/XTTS-v2)
        accept_license: str = "",  # CPML: of XTTS-v2; bilibili: of IndexTTS2 (not yet)
        max_steps: int = 0,  # in total (the preset's)
        num_train_epochs: float = 0.0,  # max_steps in passes over the data (the preset's)
        tokenizer: str = "",  # a SentencePiece model in place of an IndexTTS2's (none)
        eval_data: str = "",  # recordings of their own to evaluate on (some of data)
        phonemes: str = "",  # in which the base voice spells, such as en-us (as it does)
    ):
        self.base_model = base_model
        self.accept_license = accept_license
        self.duration = {"max_steps": max_steps, "num_train_epochs": num_train_epochs}
        self.prepare = Preparation(
            run,
            data,
            language,
            base_model=base_model,
            accept_license=accept_license,
            tokenizer=tokenizer,
            eval_data=eval_data,
            phonemes=phonemes,
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
        yield self.similarity()
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
        return Result(
            line=f"{self.base_model}: {parameters / 1e6:,.1f} million parameters", figures=figures
        )

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
        codec, *others = self.prepare.to_batches()
        line = "\n".join(step.line for step in (codec, *others))
        return Result(line=line, pictures=codec.pictures, sounds=codec.sounds)

    @cached_property
    def training(self) -> Training:
        """The training of 02_train, with what `to_codes` wrote."""
        run = self.active_run
        return Training(activate(find_run(name=run.name), run.copy), **self.duration)

    @cached_property
    def base_languages(self) -> BaseLanguages:
        """The base model and its languages, for the steps after training."""
        sampling = sampling_of(self.active_run)
        return BaseLanguages(self.training.active, self.training.data.voice(), sampling)

    @property
    def sentence(self) -> str:
        """The held-out sentence that training speaks, too; "" if none can be spoken."""
        rows = self.training.data.held_out_sentences(1)
        return rows[0].text if rows else ""

    def before(self) -> Result:
        """How the voice sounds before the first step: in the run's language and in its own."""
        if not self.prepare.codec.decodes:
            return Result(line=WITHOUT_SOUND)
        sounds = self.speak(self.untrained_voice(), "before") + self.base_languages.sounds()
        del self.base_languages  # large: training needs the memory
        return Result(line=f"{len(sounds)} sentences before the first step", sounds=sounds)

    def untrained_voice(self) -> Voice:
        """The run's voice with the model that training starts with."""
        training = self.training
        run = training.active
        model = first_model(run, training.model, tokenizer=training.data.tokenizer)
        return dataclasses.replace(training.data.voice(), model=model.eval().to(run.hw.device))

    def speak(self, voice: Voice, when: str, speaker: str = "") -> list[Sound]:
        """The run's sentence by `voice`, as `speaker` ("": the first); [] if there is none."""
        if not self.sentence:
            return []
        (speech,) = self.speak_once(voice, [self.sentence], [speaker or voice.speakers[0]])
        return [sound_of(voice, speech, f"{voice.language}, {when}: {self.sentence}")]

    def speak_once(self, voice: Voice, texts: list[str], speakers: list[str]) -> list[Speech]:
        """One candidate of each text."""
        once = sampling_of(self.active_run, best_of=1, retries=0)
        with on_device(self.training.active.hw.device, voice.codec):
            return voice.speak(texts, speakers, once)

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
        sounds = self.speak(self.untrained_voice(), "before")
        sounds += spoken_samples(self.active_run.folder / SPOKEN)
        sounds += self.speak(self.voice, "after")
        base = self.base_languages
        for pair in zip(base.sounds(), base.sounds(self.tuned)):
            for when, sound in zip(("before", "after"), pair):
                sounds.append(dataclasses.replace(sound, caption=f"{when}, {sound.caption}"))
        return Result(line=f"The same sentences, {len(sounds)} times", sounds=sounds)

    def similarity(self) -> Result:
        """How alike a person's recordings and the voice's sentences sound, before and after.

        The mean cosine of speaker vectors of different held-out sentences, by the release's own
        speaker encoder. Recordings of one person, and of two, show what is near and what is far.
        """
        codec = self.prepare.codec
        held_out = self.training.data.held_out_sentences(SEARCHED_SENTENCES)
        rows = compared_rows([row for row in held_out if row.speaker in self.voice.speakers])
        speakers = [row.speaker for row in rows]
        if not rows or not codec.speaker_width:
            return Result(
                line="Speaker similarity is not measured: it takes two held-out recordings of one "
                "person, and a base model with a speaker encoder."
            )
        rate_hz = codec.input_sample_rate
        recorded = self.vectors([load_wave(row.audio, rate_hz) for row in rows], rate_hz)
        before = self.spoken_vectors(self.untrained_voice(), rows)
        after = self.spoken_vectors(self.voice, rows)
        cosines = {
            "before fine-tuning": mean_cosine(before, recorded, speakers),
            "after fine-tuning": mean_cosine(after, recorded, speakers),
            "two recordings, one person": mean_cosine(recorded, recorded, speakers),
        }
        if len(set(speakers)) > 1:
            other = mean_cosine(recorded, recorded, speakers, same_person=False)
            cosines["two recordings, two people"] = other
        figures = dict(zip(("before", "after", "same_person", "two_people"), cosines.values()))
        self.training.active.record(finetune={"speaker_similarity": figures})
        line = ", ".join(f"{name} {two_digits(cosine)}" for name, cosine in cosines.items())
        title = f"Speaker similarity to the recordings, {len(rows)} held-out sentences"
        picture = bars(list(cosines), cosines.values(), "cosine; 1: the same", title)
        return Result(line=f"Speaker similarity: {line}", pictures=[picture])

    def spoken_vectors(self, voice: Voice, rows: list[Utterance]) -> Tensor:
        """Speaker vectors (N, S) of the texts of `rows`, each spoken as its own speaker."""
        speakers = [row.speaker for row in rows]
        speech = self.speak_once(voice, [row.text for row in rows], speakers)
        return self.vectors([each.wave for each in speech], voice.codec.sample_rate)

    def vectors(self, waves: list[Tensor], rate_hz: int) -> Tensor:
        """Speaker vectors (N, S) of waveforms (L,), on the CPU; NaN for one without a voice."""
        codec = self.training.data.codec
        vectors = []
        with on_device(self.training.active.hw.device, codec):
            for wave in waves:
                try:
                    vectors.append(codec.speaker_embedding(wave, rate_hz).cpu())
                except SpeechError:  # too short or silent
                    vectors.append(torch.full((codec.speaker_width,), math.nan))
        return torch.stack(vectors)

    def unseen_speaker(self, recording: str = "") -> Result:
        """The run's sentence before and after, in the voice of a person training never saw.

        `recording` is six seconds or more of that person.
        """
        if not self.prepare.codec.decodes:
            return Result(line=WITHOUT_SOUND)
        if not self.sentence:
            return Result(line="There is no held-out sentence that the voice can say.")
        if not recording:
            return Result(
                line="To hear a voice that training never saw, name a recording of somebody who is "
                "not in your data (NEW_VOICE)."
            )
        rate_hz = self.prepare.codec.input_sample_rate
        wave = load_reference(str(Path(recording).expanduser()), rate_hz)
        sounds = [Sound(caption="the recording", wave=wave.numpy(), sample_rate_hz=rate_hz)]
        for when, voice in (("before", self.untrained_voice()), ("after", self.voice)):
            with on_device(self.training.active.hw.device, voice.codec):
                voice = voice.with_speaker(UNSEEN, wave, rate_hz)
            sounds += self.speak(voice, when, UNSEEN)
        line = f"A voice that training never saw: {Path(recording).name}"
        if self.prepare.codec.speaker_width:
            reference, before, after = (
                self.vectors([torch.as_tensor(sound.wave)], sound.sample_rate_hz)[0]
                for sound in sounds
            )
            line += (
                f". Speaker similarity to it: {two_digits(before @ reference)} before fine-tuning, "
                f"{two_digits(after @ reference)} after"
            )
        return Result(line=line, sounds=sounds)

    def forgetting(self) -> Result:
        return self.base_languages.forgetting(self.tuned)

    def export(self, weights: str = "fp16") -> Result:
        """Write the voice to `export`, and one from a release also in that release's own files.

        One whose sound another package makes is only written as that. `weights` is "fp16" or
        "fp32".
        """
        run = self.training.active
        licence = inherited_licence(run)
        source, _ = folder_of(run, self.base_model, self.accept_license or licence)
        release = release_in(source)
        voice = self.voice
        folders = []
        missing = []
        if self.prepare.codec.decodes:
            folders += [write_export(run, voice, weights)]
        if release:
            folders.append(release.export(run, voice, source, weights))
            write_reference(run, voice, folders[-1])
            missing = release.missing_files(folders[-1])
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
        endings, spoken = evaluation.endings(), evaluation.spoken_by_package()
        line = f"{endings.line}\n{spoken.line}"
        return Result(line=line, grid=endings.grid, sounds=spoken.sounds)


def compared_rows(rows: list[Utterance]) -> list[Utterance]:
    """Return some of `rows`, as many of each of a few speakers; [] if none has two."""
    by_speaker = {}
    for row in rows:
        by_speaker.setdefault(row.speaker, []).append(row)
    several = [own for own in by_speaker.values() if len(own) > 1][:COMPARED_SPEAKERS]
    count = COMPARED_SENTENCES // max(1, len(several))
    return [row for own in several for row in own[:count]]


def mean_cosine(
    vectors: Tensor, others: Tensor, speakers: list[str], same_person: bool = True
) -> float:
    """Mean cosine of vectors (N, S) and `others` (N, S) of different sentences; NaN if none is.

    Both are of `speakers`, row by row, and each of length 1; pairs with NaN do not count. The two
    of a pair are of the same person, or of two.
    """
    cosines = [
        vectors[i] @ others[j]
        for i, j in itertools.permutations(range(len(speakers)), 2)
        if (speakers[i] == speakers[j]) == same_person
    ]
    return float(torch.tensor(cosines).nanmean())


def two_digits(cosine: float | Tensor) -> str:
    """A cosine as text; NaN is one of a sentence too short or silent to have a voice."""
    return "not measured" if math.isnan(cosine) else f"{cosine:.2f}"


def write_reference(run: ActiveRun, voice: Voice, folder: Path) -> None:
    """Write a recording of the voice's first speaker to `folder`."""
    cache = CodeCache(run.index())
    reference_id = cache.rows[reference_rows(cache)[voice.speakers[0]]]["id"]
    audio = next(row.audio for row in read_manifest(run.folder) if row.id == reference_id)
    rate_hz = voice.codec.input_sample_rate
    wave = load_reference(audio, rate_hz).numpy()
    write_atomic(folder / "reference.wav", encode_wav(wave, rate_hz))
