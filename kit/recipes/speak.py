"""Notebook 04 and `python -m kit speak`: say texts, measure what that costs, export the voice."""

import dataclasses
import io
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import soundfile
import torch

from kit.audio.spectrogram import load_reference
from kit.base.config import build
from kit.base.errors import KitError, SpeechError
from kit.base.files import write_atomic
from kit.base.hardware import detect
from kit.dataset.data_report import rows_in_split
from kit.dataset.manifest import read_manifest
from kit.inference.compare_formats import voices_by_format
from kit.inference.evaluate import save_samples
from kit.inference.export import CARD, load_export, read_card
from kit.inference.voice import Speech, Voice, remark
from kit.inference.voice_files import load_voice
from kit.model.weights import WEIGHTS
from kit.notebook.plots import mel_picture
from kit.notebook.result import Result, Sound, players_of
from kit.notebook.speech_panels import SpeakPanel, show_download_button, zip_folder
from kit.recipes.base_model import SAMPLE, release_in, voice_folder
from kit.recipes.exports import chosen_weights, current_export, write_export
from kit.recipes.open_run import ActiveRun, sampling_of
from kit.recipes.speak_file import speak_file
from kit.recipes.speaking_costs import SpeakingCosts
from kit.recipes.start import is_colab
from kit.settings import GenerateConfig, InferConfig

BREAD = "ትናንት እናቴ ከገበያ ትኩስ ዳቦ ገዛች"  # yesterday my mother bought fresh bread from the market
COMPARED = 3  # sentences that two voices say side by side
SETTINGS = {  # of GenerateConfig
    "temperature": "0 takes the most likely code, 1 samples from the model's own probabilities",
    "top_k": "sample only from this many of the most likely codes; 0: all",
    "top_p": "sample only from the most likely codes that make up this share",
    "guidance_scale": "how far to move away from what is likely without the text; 1: not at all",
    "best_of": "candidates for a text; the best one is kept: likely, and following the text",
    "follow": "weight of following the text, beside being likely; 0: none",
    "retries": "of a candidate that never ended, each at half the temperature",
    "seed": "another number gives another candidate",
}
SOUND_FILES = (".wav", ".flac", ".ogg", ".mp3")


class Speaking:
    """The voice of a run, ready to speak; `run()` is all of the notebook.

    `sentence` and `story` are what it says; if empty, an example of its language and a few held-out
    sentences.
    """

    def __init__(self, run: ActiveRun, sentence: str = "", story: str = ""):
        self.active_run = run
        self.config = build(InferConfig, run.section("infer"))
        if run.hw.capability and run.hw.capability < (8, 0):
            # Triton 3.3 has no matrix products (`tl.dot`) for Turing and older GPUs (triton#5066).
            self.config = dataclasses.replace(self.config, compiled=())
        self.weights = chosen_weights(run)
        language = run.require_figure("data", "language", "01_data_prep")
        self.voice = load_voice(run.folder, WEIGHTS[self.weights], language, run.hw.device)
        self.speaker = self.voice.speakers[0]
        self.rate_hz = self.voice.codec.sample_rate
        self.sampling = sampling_of(run)
        self.read_once = dataclasses.replace(self.sampling, best_of=1)
        rows = [row for row in read_manifest(run.folder) if self.voice.can_speak(row.text)]
        # A run of a single recording has no held-out rows, and speaks all the same.
        self.held_out = rows_in_split(rows, "held_out") or rows
        self.sentence = sentence or self.example()
        self.story = story or ". ".join(row.text for row in self.held_out[:4])
        self.costs = SpeakingCosts(self)

    def __str__(self) -> str:
        note = self.voice.audio_note()
        return (
            f"voices {self.voice.speakers}, {self.weights} weights, "
            f"threads: {self.active_run.threads.value}, {self.active_run.hw.name}"
            + (f"; {note}" if note else "")
        )

    __repr__ = __str__  # what a cell shows that ends with it

    def example(self) -> str:
        """The kit's own sentence in Amharic; in other languages the first held-out one."""
        if self.voice.language == "am" and self.voice.can_speak(BREAD):
            return BREAD
        if not self.held_out:
            raise SpeechError("This voice can speak no text of its manifest: give a sentence.")
        return self.held_out[0].text

    @cached_property
    def voices(self) -> dict[str, Voice]:
        """The voice in every number format of the preset, by the format's name, fp32 first."""
        return voices_by_format(self.voice, self.config.formats, self.config.compiled)

    def run(self) -> Iterator[Result]:
        yield self.say()
        yield self.stream()
        yield from self.costs.run()
        yield self.say_in_each_format()
        yield self.export()

    def say(self, text: str = "", speaker: str = "", reference: str = "") -> Result:
        """Say `text` (of any length); shows its sound, spectrogram, and the parts it was split in.

        Defaults: the example, the first speaker. With `reference`, the path of a recording, the
        voice is that of the recording. Raises SpeechError and DatasetError.
        """
        voice, speaker = choose_speaker(self.voice, speaker, reference)
        speech = voice.speak([text or self.sentence], speaker, self.sampling)[0]
        parts = [(part, str(len(voice.ids(part)))) for part in speech.parts]
        grid = [("spoken in one go", "text ids"), *parts] if len(parts) > 1 else []
        picture = mel_picture({"speech": speech.wave}, self.rate_hz, voice.front_end)
        result = spoken_result(voice, speech, self.sampling)
        return dataclasses.replace(result, pictures=[picture], grid=grid)

    def panel(self) -> None:
        """Show a text box, voices, formats, sampling, an upload for a reference, a button."""
        sampling = self.sampling
        choices = {
            "voice": self.voice.speakers,
            "weights": list(self.voices),
            "temperature": (0.0, 1.5, float(sampling.temperature)),
            "candidates": (1, 32, sampling.best_of),
        }
        if self.voice.decoder.config.text_dropout:
            choices["guidance"] = (1.0, 5.0, float(sampling.guidance_scale))
        choices["key-value cache"] = sampling.kv_cache
        SpeakPanel(self.panel_speech, self.sentence, choices).run()

    def panel_speech(self, text: str, choice: dict, reference: str = "") -> tuple[bytes, str]:
        """`text` as a WAV file; how long that took, and what went wrong."""
        sampling = dataclasses.replace(
            self.sampling,
            temperature=choice["temperature"],
            best_of=choice["candidates"],
            guidance_scale=choice.get("guidance", 1.0),
            kv_cache=choice["key-value cache"],
        )
        speaker = "" if reference else choice["voice"]
        began_s = time.perf_counter()
        voice, speaker = choose_speaker(self.voices[choice["weights"]], speaker, reference)
        speech = voice.speak([text], speaker, sampling)[0]
        took_s = time.perf_counter() - began_s
        seconds = len(speech.wave) / self.rate_hz
        line = f"{seconds:.1f} s of speech, made in {took_s:.2g} s. {remark(speech, sampling)}"
        return sound_of(voice, speech).wav_bytes(), line.strip()

    def settings(self) -> Result:
        grid = [("setting", "now", "what it does")]
        for name, meaning in SETTINGS.items():
            grid.append((name, str(getattr(self.sampling, name)), meaning))
        return Result(line="How codes are sampled", grid=grid)

    def say_in_each_format(self) -> Result:
        """The same sentence once in every number format, saved as the run's typed samples."""
        sounds = []
        waves = {}
        for name, voice in self.voices.items():
            speech = voice.speak([self.sentence], self.speaker, self.read_once)[0]
            note = "" if speech.stopped else " (cut at the length limit)"
            sounds.append(sound_of(voice, speech, name + note))
            waves[name.replace(", ", "-")] = ([self.sentence], [speech.wave])
        recorded = self.active_run.report().get("samples", [])
        samples = [sample for sample in recorded if sample["split"] != "typed"]
        samples += save_samples(waves, "typed", self.rate_hz, self.active_run.folder)
        self.active_run.record(samples=samples)
        return Result(line=f"{self.sentence}, in {len(sounds)} number formats", sounds=sounds)

    def compare(self, first: str = "", second: str = "") -> Result:
        """A few sentences by two voices, with the two players of each side by side.

        Each is a number format of this voice (fp32, and int8 where there is one), or the folder of
        another exported voice. Raises SpeechError for sentences that the other cannot say.
        """
        names = list(self.voices)
        second = second or ("int8" if "int8" in names else names[-1])
        texts = [self.sentence, *(row.text for row in self.held_out)]
        texts = list(dict.fromkeys(texts))[:COMPARED]
        columns = {}
        for name in (first or names[0], second):
            voice, speaker = self.voices.get(name), self.speaker
            if voice is None:
                if not (Path(name) / CARD).is_file():
                    raise SpeechError(
                        f"{name!r} is neither a number format of this voice ({', '.join(names)}) "
                        "nor the folder of an exported voice."
                    )
                voice = load_export(Path(name), self.active_run.hw.device)
                speaker = voice.speakers[0]
            spoken = voice.speak(texts, speaker, self.read_once)
            columns[name] = [sound_of(voice, speech) for speech in spoken]
        line = f"{len(texts)} sentences: {' beside '.join(columns)}"
        return Result(line=line, compared=columns)

    def stream(self) -> Result:
        """The sentence streamed in chunks, compared with the sentence made in one go."""
        chunks = []
        note = ""
        try:
            for chunk in self.voice.stream(self.sentence, self.speaker, self.sampling):
                chunks.append(chunk)
        except SpeechError as error:  # raised after the sound, if the model never ended it
            if not chunks:
                raise
            note = f"\n{error}"
        once = dataclasses.replace(self.read_once, retries=0)
        # One part at a time, as in the stream: in a batch, rounding may lead to other codes.
        complete = self.voice.speak([self.sentence], self.speaker, once, batch=1)[0].wave
        difference = float((torch.cat(chunks) - complete).abs().max())
        lengths_s = ", ".join(f"{len(chunk) / self.rate_hz:.2f}" for chunk in chunks)
        return Result(
            line=f"Chunks of {lengths_s} s; the largest difference from the sound made in one go "
            f"is {difference:.1e} of full scale{note}"
        )

    def export(self, weights: str = "fp16") -> Result:
        """The voice in one folder, its weights fp32, fp16, bf16 or int8; loaded again to speak."""
        folder = write_export(self.active_run, self.voice, weights)
        exported = load_export(folder, self.active_run.hw.device)
        before = self.voice.speak([self.sentence], self.speaker, self.read_once)[0]
        again = exported.speak([self.sentence], self.speaker, self.read_once)[0]
        same = "the same codes as before"
        if not torch.equal(again.codes, before.codes):
            same = f"codes differ from before, as {weights} rounds the weights"
        sound = sound_of(exported, again, "Said by the exported voice")
        return Result(line=f"{folder}: {megabytes(folder)}; {same}", sounds=[sound])

    def download(self) -> Result:
        """The exported voice as one zip file, with a link or, on Colab, a button to download it."""
        run = self.active_run
        folder = current_export(run)
        path = run.path("download", f"{run.name}.zip")
        zip_folder(folder, path)
        return to_download(f"{path.resolve()}: {megabytes(path)}", path)


def choose_speaker(voice: Voice, speaker: str, reference: str) -> tuple[Voice, str]:
    """Return `voice` and who speaks: `speaker` ("": the first), or who speaks in `reference`."""
    if not reference:
        return voice, speaker or voice.speakers[0]
    if speaker:
        raise SpeechError(
            f"Who is to speak: {speaker!r} of this voice, or who speaks in {reference}? Give only "
            "one of the two."
        )
    path = Path(reference).expanduser()
    rate_hz = voice.codec.input_sample_rate
    return voice.with_speaker(path.name, load_reference(str(path), rate_hz), rate_hz), path.name


def to_download(line: str, path: Path) -> Result:
    """`line` with a link that downloads `path` or, on Colab, under a button that does."""
    if is_colab():
        show_download_button(path)
        return Result(line=line)
    return Result(line=line, link=path)


def sound_of(voice: Voice, speech: Speech, caption: str = "") -> Sound:
    """A player of `speech`; its caption is by default the text."""
    wave = speech.wave.numpy()
    return Sound(caption=caption or speech.text, wave=wave, sample_rate_hz=voice.codec.sample_rate)


def spoken_result(voice: Voice, speech: Speech, sampling: GenerateConfig) -> Result:
    """The sound of `speech`, how long it is, and what was unusual."""
    line = f"{len(speech.wave) / voice.codec.sample_rate:.1f} s of speech"
    note = remark(speech, sampling)
    if len(speech.parts) > 1:
        line = f"{len(speech.parts)} parts, {line}"
        note = note or "every part ended by itself"
    return Result(line=f"{line}; {note}" if note else line, sounds=[sound_of(voice, speech)])


def megabytes(path: Path) -> str:
    parts = path.iterdir() if path.is_dir() else [path]
    return f"{sum(part.stat().st_size for part in parts) / 1e6:.1f} MB"


def speak(
    run: ActiveRun | str,
    text: str | None = None,  # say only this (measure every way to speak, and export)
    file: Path | None = None,  # say its lines, a sentence each; finished ones stay
    out: Path | None = None,  # .wav, .flac, .ogg or .mp3 (spoken.wav); with --file a folder
    voice: str = "",  # an exported voice, hf://OWNER/NAME, or "sample", the kit's own (the run's)
    speaker: str = "",  # who says it (the first)
    reference: str = "",  # a recording of another person, to sound like that
) -> Iterator[Result]:
    """Say `text` or the lines of `file`; without both, take all steps of 04_inference."""
    if file is not None:
        if text is not None or out is None:
            raise KitError("--file needs --out, a folder for the WAV files, and no --text.")
        if voice:
            spoken_by, sampling = load_exported(voice)
        else:
            speaking = Speaking(run)
            spoken_by, sampling = speaking.voice, speaking.sampling
        spoken_by, speaker = choose_speaker(spoken_by, speaker, reference)
        yield speak_file(spoken_by, file, out, sampling, speaker)
        return
    if text is None:
        if voice or reference or speaker or out:
            raise KitError("Add a --text to say, or a --file of sentences.")
        yield from Speaking(run).run()
        return
    if not text.strip():
        raise KitError("--text is empty: write what to say.")
    if out and out.suffix.lower() not in SOUND_FILES:
        raise KitError(f"--out {out}: name a file that ends with {', '.join(SOUND_FILES)}.")
    if voice:
        result = say_exported(voice, text, speaker, reference)
        yield written(result, out or Path("spoken.wav"))
    else:
        result = Speaking(run).say(text, speaker, reference=reference)
        yield written(result, out or run.path("spoken.wav"))


def say_exported(name: str, text: str, speaker: str = "", reference: str = "") -> Result:
    """Say `text` in the exported voice `name`, as `voice_folder` takes it."""
    path = Path(name).expanduser()
    release = release_in(path)
    if release and release.speaker:
        if speaker:
            raise KitError(f"An {release.name} has no --speaker: give it a --reference.")
        package = release.speaker(path, reference)
        return Result(
            line=text, sounds=players_of({text: package.speak(text)}, package.sample_rate)
        )
    voice, sampling = load_exported(name)
    voice, speaker = choose_speaker(voice, speaker, reference)
    return spoken_result(voice, voice.speak([text], speaker, sampling)[0], sampling)


def load_exported(name: str) -> tuple[Voice, GenerateConfig]:
    """Return the exported voice `name`, as `voice_folder` takes it, and its sampling settings."""
    release = release_in(Path(name).expanduser())
    if release and release.speaker:
        raise KitError(f"An {release.name} takes --text and --reference, no --file.")
    folder = voice_folder(name)
    return load_export(folder, detect().device), read_card(folder).settings


def say_sample(text: str = BREAD) -> Result:
    """Say `text`, in Amharic, in the voice that comes with the kit."""
    return say_exported(SAMPLE, text)


def written(result: Result, path: Path) -> Result:
    """Write the sound of `result` to `path`, whose suffix is one of SOUND_FILES."""
    sound = result.sounds[0]
    data = io.BytesIO()
    wave = np.clip(sound.wave, -1, 1)
    soundfile.write(data, wave, sound.sample_rate_hz, format=path.suffix[1:].upper())
    write_atomic(path, data.getvalue())
    line = f"{result.line}\nWritten: {path}"
    return dataclasses.replace(result, line=line, figures={"audio": str(path)}, shown=False)
