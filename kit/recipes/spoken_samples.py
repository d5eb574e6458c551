"""One held-out sentence, spoken at the start, in the middle and at the end of training.

A loss says how surprised a model is; this is how it sounds. The first sample is noise.
"""

import dataclasses
import html
from collections.abc import Callable
from pathlib import Path

import soundfile
import torch

from kit.base.files import write_atomic
from kit.base.hardware import on_device
from kit.dataset.data_report import Utterance
from kit.inference.sampling import GenerateConfig
from kit.inference.voice import Voice
from kit.model.lora import merged
from kit.notebook.result import Sound, sound_html
from kit.training import checkpoint
from kit.training.config import StepEvent
from kit.training.trainer import Trainer


class SampleLog:
    """A listener that speaks `row` after the first step, at half of them, and after the last.

    The middle is the first validation from there on. `state()` is the run's; its averaged weights
    speak where there are any. `voice` waits for them, and the random numbers of training stay.
    """

    def __init__(
        self,
        state: Callable[[], Trainer],
        voice: Voice,
        row: Utterance,
        config: GenerateConfig,
        folder: Path,
    ):
        self.state = state
        self.voice = voice
        self.row = row
        self.config = config
        self.folder = folder

    def __call__(self, event: StepEvent) -> None:
        if event.step == 1:
            for stale in self.folder.glob("step-*.wav"):
                stale.unlink()
        half = event.val_loss is not None and event.step >= event.steps / 2
        if event.step in (1, event.steps) or (half and not self.has_middle()):
            self.speak(event.step)

    def has_middle(self) -> bool:
        return len(list(self.folder.glob("step-*.wav"))) > 1

    def speak(self, step: int) -> None:
        """Leave what the model says now as a WAV file, named by the step."""
        state = self.state()
        before = checkpoint.random_state()
        state.model.eval()
        device = state.model.final_norm.weight.device
        # The codec moves outside of inference mode, or its weights could not be trained afterwards.
        with on_device(device, self.voice.codec), state.averaged(), torch.inference_mode():
            voice = dataclasses.replace(self.voice, model=merged(state.model), decoder=None)
            (said,) = voice.speak([self.row.text], self.row.speaker, self.config)
        checkpoint.restore_random_state(before)
        sound = Sound(caption="", wave=said.wave.numpy(), sample_rate_hz=voice.codec.sample_rate)
        write_atomic(self.folder / f"step-{step:07}.wav", sound.wav_bytes())


class SamplePlayers:
    """HTML players of what a SampleLog has left so far, under their sentence; "" before the first.

    Files are read again only when there are others: a panel asks twice a second.
    """

    def __init__(self, folder: Path, sentence: str):
        self.folder = folder
        self.sentence = sentence
        self.seen = []
        self.html = ""

    def __call__(self) -> str:
        try:
            files = [(p, p.stat().st_mtime_ns) for p in sorted(self.folder.glob("step-*.wav"))]
            if files != self.seen:
                players = "".join(sound_html(sound) for sound in spoken_samples(self.folder))
                sentence = html.escape(self.sentence)
                self.html = f"<p>{sentence}</p>{players}" if players else ""
                self.seen = files
        except FileNotFoundError:
            pass  # a run that begins anew takes the old ones away; the next look finds the new
        return self.html


def spoken_samples(folder: Path) -> list[Sound]:
    """What a SampleLog has left, in the order of the steps."""
    sounds = []
    for path in sorted(folder.glob("step-*.wav")):
        wave, rate = soundfile.read(path, dtype="float32")
        step = int(path.stem.removeprefix("step-"))
        sounds.append(Sound(caption=f"after step {step:,}", wave=wave, sample_rate_hz=rate))
    return sounds
