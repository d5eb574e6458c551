"""What an evaluation works with: a run's voices, and the texts that they are to say."""

import dataclasses

import soundfile
import torch
from torch import Tensor

from kit.audio.clip import load_wave
from kit.audio.codec import load_codec
from kit.audio.recognizer import load_recognizer
from kit.base.errors import KitError
from kit.dataset.data_report import Utterance, rows_in_split
from kit.dataset.manifest import read_manifest
from kit.inference.evaluate import transcribe
from kit.inference.voice_files import load_voices
from kit.recipes.active_run import ActiveRun
from kit.recipes.prepare_source import sampling_of


class EvaluationData:
    """Voices by their weights ("raw", and "ema" where training kept an average), and texts.

    The held-out texts are the first `sentences` of the split in manifest order, less those with
    letters that no training text has. Raises KitError where a notebook before has not run yet,
    SpeechError and KitError for files that are missing or damaged.
    """

    def __init__(self, run: ActiveRun, sentences: int):
        self.run = run
        self.rows = read_manifest(run.folder)
        recognizer = load_recognizer(run.path("recognizer.safetensors"))
        self.recognizer = recognizer.to(run.hw.device)
        self.language = run.require_figure("data", "language", "01_data_prep")
        self.voices = load_voices(run.folder, self.language, run.hw.device)
        codec = load_codec(run.path("codec.safetensors"))
        self.codec = codec.to(run.hw.device)  # of codes alone
        self.rate_hz = self.codec.sample_rate
        self.front_end = self.voices["raw"].front_end
        self.sampling = sampling_of(run)
        self.read_once = dataclasses.replace(self.sampling, candidates=1)
        written = rows_in_split(self.rows, "held_out")[:sentences]
        self.held_out = self.sayable(written)
        self.left_out = len(written) - len(self.held_out)
        if not self.held_out:
            raise KitError(
                f"The run `{run.name}` has no held-out sentence that the voice can say: give some "
                "rows of the table the split `held_out` and run 01_data_prep and 02_train again."
            )

    def sayable(self, rows: list[Utterance]) -> list[Utterance]:
        """Those of `rows` whose letters the training text has."""
        return [row for row in rows if self.voices["raw"].can_speak(row.text)]

    def split(self, name: str) -> list[Utterance]:
        """The rows of a split that are spoken; there may be none."""
        if name == "held_out":
            return self.held_out
        return self.sayable(rows_in_split(self.rows, name))

    def recording(self, row: Utterance) -> Tensor:
        """The waveform (L,) of a row."""
        return load_wave(row.audio, self.rate_hz)

    def sample_wave(self, sample: dict) -> Tensor:
        """The waveform (L,) of a sample that was written."""
        samples = soundfile.read(self.run.folder / sample["wav"], dtype="float32")[0]
        return torch.from_numpy(samples)

    def written_down(self, wave: Tensor) -> str:
        """What the recogniser hears in `wave` (L,)."""
        return transcribe(self.recognizer, [wave], self.rate_hz)[0]
