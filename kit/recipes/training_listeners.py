"""What listens to a training: attention maps and spoken samples, kept in the run's folder."""

import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from torch import Tensor

from kit.base.files import write_atomic
from kit.base.hardware import autocast, on_device
from kit.dataset.manifest import Utterance
from kit.model import text_attention
from kit.model.gpt import SpeechGPT
from kit.model.lora import merged
from kit.model.sequence import Batch
from kit.notebook.result import Sound
from kit.settings import GenerateConfig
from kit.training import checkpoint, logs
from kit.training.config import StepEvent
from kit.training.run import TrainingRun

# Folders in that of a run.
ATTENTION = "attention"
SPOKEN = "training-samples"
PROFILES = "profile"


@dataclasses.dataclass
class AttentionLog:
    """A listener that saves in `folder` how the codes of `row`, a batch of one, attend to its text.

    It does so after the first step, each validation and the last step, in the precision in which
    the model trains.
    """

    job: TrainingRun
    row: Batch
    folder: Path

    def __call__(self, event: StepEvent) -> None:
        if event.step == 1:
            for stale in self.folder.glob("step-*.npy"):
                stale.unlink()
        if event.step in (1, event.steps) or event.val_loss is not None:
            trainer = self.job.trainer
            with autocast(trainer.hw.device, trainer.applied.precision):
                attention = best_map(trainer.model, self.row)
            file = io.BytesIO()
            np.save(file, attention.numpy().astype(np.float16))
            write_atomic(self.folder / f"step-{event.step:07}.npy", file.getvalue())


def load_attention_maps(folder: Path) -> dict[int, np.ndarray]:
    paths = sorted(folder.glob("step-*.npy"))
    return {int(path.stem.removeprefix("step-")): np.load(path) for path in paths}


def best_map(model: SpeechGPT, row: Batch) -> Tensor:
    """The attention map (N, T), of all layers and heads, that follows the text best."""
    best = int(text_attention.head_diagonality(model, row).argmax())
    return text_attention.text_attention_maps(model, row).flatten(0, 1)[best].cpu()


@dataclasses.dataclass
class SampleLog:
    """A listener that speaks `row` after the first step, in the middle, and after the last.

    The middle is the first validation after half of the steps. Averaged weights speak if there are
    any. Training's random numbers are left as they were.
    """

    job: TrainingRun
    voice: Any  # a Voice: what speaks is loaded where it is needed
    row: Utterance
    config: GenerateConfig
    folder: Path
    newest: logs.SpokenSample | None = None

    def __call__(self, event: StepEvent) -> None:
        if event.step == 1:
            for stale in self.folder.glob("step-*.wav"):
                stale.unlink()
        half = event.val_loss is not None and event.step >= event.steps / 2
        has_middle = len(list(self.folder.glob("step-*.wav"))) > 1
        if event.step in (1, event.steps) or (half and not has_middle):
            self.speak(event.step)

    def speak(self, step: int) -> None:
        """Save what the model says now as a WAV file, named by the step, and as `newest`."""
        trainer = self.job.trainer
        before = checkpoint.random_state()
        trainer.model.eval()
        device = trainer.model.final_norm.weight.device
        # The codec moves outside of inference mode, or its weights could not be trained afterwards.
        with on_device(device, self.voice.codec), trainer.averaged(), torch.inference_mode():
            voice = dataclasses.replace(self.voice, model=merged(trainer.model), decoder=None)
            (speech,) = voice.speak([self.row.text], self.row.speaker, self.config)
        checkpoint.restore_random_state(before)
        rate_hz = voice.codec.sample_rate
        sound = Sound(caption="", wave=speech.wave.numpy(), sample_rate_hz=rate_hz)
        write_atomic(self.folder / f"step-{step:07}.wav", sound.wav_bytes())
        mel = voice.front_end.clip_mel(speech.wave, rate_hz)  # (M, T)
        # As a picture, 0 to 255, the low bands below.
        share = (mel - mel.min()) / (mel.max() - mel.min()).clamp(min=1e-6)
        picture = (255 * share.flip(0)).byte()[..., None].expand(-1, -1, 3)
        self.newest = logs.SpokenSample(
            step=step,
            text=self.row.text,
            wave=sound.wave,
            sample_rate_hz=rate_hz,
            spectrogram=picture.numpy(),
        )


def spoken_samples(folder: Path) -> list[Sound]:
    sounds = []
    for path in sorted(folder.glob("step-*.wav")):
        with path.open("rb") as file:
            wave, rate = soundfile.read(file, dtype="float32")
        step = int(path.stem.removeprefix("step-"))
        sounds.append(Sound(caption=f"after step {step:,}", wave=wave, sample_rate_hz=rate))
    return sounds
