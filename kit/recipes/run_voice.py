"""The voice that training and evaluation left in a run, with what it may be asked to say."""

from dataclasses import replace
from functools import cached_property
from pathlib import Path

from kit.audio.reference import load_reference
from kit.base.config import build
from kit.base.errors import SpeechError
from kit.base.formatting import nearest
from kit.dataset.data_report import rows_in_split
from kit.dataset.manifest import read_manifest
from kit.inference.compare_formats import voices_by_format
from kit.inference.settings import InferConfig
from kit.inference.voice import Speech, Voice
from kit.inference.voice_files import load_voice
from kit.notebook.result import Sound
from kit.recipes.active_run import ActiveRun
from kit.recipes.prepare_source import sampling_of

BREAD = "ትናንት እናቴ ከገበያ ትኩስ ዳቦ ገዛች"  # yesterday my mother bought fresh bread from the market


class RunVoice:
    """The voice of `run`, its settings and its texts.

    `sentence` and `story` are what it is to say; empty, an example of its language and a few
    held-out sentences. Raises KitError where a notebook before has not run yet, SpeechError where
    a file it left is missing or damaged.
    """

    def __init__(self, run: ActiveRun, sentence: str = "", story: str = ""):
        self.active_run = run
        self.config = build(InferConfig, run.section("infer"))
        self.weights = run.require_figure("eval", "weights", "03_evaluate_ema")
        self.weights_file = run.folder / f"model-{self.weights}.safetensors"
        language = run.require_figure("data", "language", "01_data_prep")
        self.voice = load_voice(run.folder, self.weights_file.name, language, run.hw.device)
        self.speaker = self.voice.speakers[0]
        self.rate_hz = self.voice.codec.sample_rate
        self.sampling = sampling_of(run)
        self.read_once = replace(self.sampling, candidates=1)
        rows = rows_in_split(read_manifest(run.folder), "held_out")
        self.held_out = [row for row in rows if self.voice.can_speak(row.text)]
        self.sentence = sentence or self.example()
        self.story = story or ". ".join(row.text for row in self.held_out[:4])

    def __str__(self) -> str:
        note = self.voice.audio_note()
        return (
            f"voices {self.voice.speakers}, {self.weights} weights, "
            f"{self.active_run.threads.value} threads, {self.active_run.hw.name}"
            + (f"; {note}" if note else "")
        )

    __repr__ = __str__  # what a cell shows that ends with it

    def example(self) -> str:
        """A sentence that nobody recorded where the kit has one, else the first held-out one."""
        if self.voice.language == "am" and self.voice.can_speak(BREAD):
            return BREAD
        return self.held_out[0].text

    @cached_property
    def voices(self) -> dict[str, Voice]:
        """The voice in every number format of the preset, by the format's name, fp32 first."""
        return voices_by_format(self.voice, self.config.formats, self.config.compiled)

    def speech(self, text: str, speaker: str, weights: str = "", reference: str = "") -> Speech:
        """`text` said as the preset says, in the number format `weights`; empty: the default
        of this device (`Voice.in_format`).

        `reference` is a recording of somebody: who speaks in it then speaks, in place of `speaker`.
        Raises SpeechError for what the voice cannot say, SpeechError for an unknown speaker or
        format, DatasetError for a recording that cannot be read, SpeechError for one that no voice
        can be heard in.
        """
        if weights and weights not in self.voices:
            known = nearest(weights, self.voices)
            raise SpeechError(f"This voice is not ready in the format {weights!r}.{known}")
        voice = self.voices[weights] if weights else self.voice
        if reference:
            rate_hz = voice.codec.input_sample_rate
            speaker = Path(reference).name
            path = str(Path(reference).expanduser())
            voice = voice.with_speaker(speaker, load_reference(path, rate_hz), rate_hz)
        return voice.speak([text], speaker, self.sampling)[0]

    def sound(self, speech: Speech, caption: str) -> Sound:
        """`speech` to listen to."""
        return Sound(caption=caption, wave=speech.wave.numpy(), sample_rate_hz=self.rate_hz)
