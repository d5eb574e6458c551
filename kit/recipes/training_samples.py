"""What training shows of itself: attention maps, spoken samples, boards, progress, the gate.

Shapes: L samples, N codes, T text tokens with START and STOP.
"""

import dataclasses
import html
import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import soundfile
import torch
from torch import Tensor

from kit.audio.spectrogram import Mel
from kit.base.files import write_atomic
from kit.base.hardware import autocast, on_device
from kit.dataset.manifest import Utterance
from kit.inference.generate import GenerateConfig
from kit.inference.voice import Voice
from kit.model.gpt import SpeechGPT
from kit.model.lora import merged
from kit.model.sequence import Batch
from kit.model.text_attention import head_diagonality, text_attention_maps
from kit.notebook.plots import Figure, heatmaps, pixels
from kit.notebook.progress import Lines, Pace, newest, progress_texts
from kit.notebook.result import Result, Sound, sound_html
from kit.recipes.active_run import ActiveRun
from kit.training import checkpoint
from kit.training.config import StepEvent, TrainConfig
from kit.training.logs import (
    Listener,
    NewestSample,
    SpokenSample,
    tensorboard_log,
    trackio_log,
    wandb_log,
)
from kit.training.trainer import Trainer
from kit.tuning.monitor import Monitor

BOARD_PROJECT = "voicekit"  # in W&B and trackio


def mel_picture(waves: dict[str, Tensor], sample_rate: int, front_end: Mel) -> Figure:
    """Log-mel spectrograms of `waves` (L,) by name, side by side."""
    mels = {name: front_end.clip_mel(wave, sample_rate).numpy() for name, wave in waves.items()}
    low = min(float(np.quantile(mel, 0.02)) for mel in mels.values())
    return heatmaps(mels, "time (s)", "mel band", low, 1 / front_end.config.frames_per_s)


def players_of(waves: dict[str, Tensor], sample_rate: int) -> list[Sound]:
    return [
        Sound(caption=caption, wave=wave.numpy(), sample_rate_hz=sample_rate)
        for caption, wave in waves.items()
    ]


class AttentionLog:
    """A listener that saves in `folder` how the codes of `row`, a batch of one, attend to its text.

    It does so after the first step, each validation and the last step. `state()` gives the trainer,
    whose model runs in the precision in which it trains.
    """

    def __init__(self, state: Callable[[], Trainer], row: Batch, folder: Path):
        self.state = state
        self.row = row
        self.folder = folder

    def __call__(self, event: StepEvent) -> None:
        if event.step == 1:
            for stale in self.folder.glob("step-*.npy"):
                stale.unlink()
        if event.step in (1, event.steps) or event.val_loss is not None:
            state = self.state()
            with autocast(state.hw.device, state.applied.precision):
                attention = best_map(state.model, self.row)
            file = io.BytesIO()
            np.save(file, attention.numpy().astype(np.float16))
            write_atomic(self.folder / f"step-{event.step:07}.npy", file.getvalue())


def load_attention_maps(folder: Path) -> dict[int, np.ndarray]:
    paths = sorted(folder.glob("step-*.npy"))
    return {int(path.stem.removeprefix("step-")): np.load(path) for path in paths}


def attention_maps(folder: Path) -> Result:
    """Draw up to four of the maps in `folder`, from the first step to the last."""
    maps = load_attention_maps(folder)
    if not maps:
        return Result(line="No attention was kept.")
    steps = list(maps)
    some = dict.fromkeys(steps[round(i * (len(steps) - 1) / 3)] for i in range(4))
    picture = heatmaps({f"step {i:,}": maps[i].T for i in some}, "code", "text piece")
    line = f"The head that follows the text best, at {len(some)} steps"
    return Result(line=line, pictures=(picture,))


def best_map(model: SpeechGPT, row: Batch) -> Tensor:
    """The attention map (N, T), of all layers and heads, that follows the text best."""
    best = int(head_diagonality(model, row).argmax())
    return text_attention_maps(model, row).flatten(0, 1)[best].cpu()


class SampleLog:
    """A listener that speaks `row` after the first step, in the middle, and after the last.

    The middle is the first validation after half of the steps. `state()` gives the trainer, whose
    averaged weights speak if there are any. Training's random numbers are left as they were.
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
        self.newest: SpokenSample | None = None

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
        state = self.state()
        before = checkpoint.random_state()
        state.model.eval()
        device = state.model.final_norm.weight.device
        # The codec moves outside of inference mode, or its weights could not be trained afterwards.
        with on_device(device, self.voice.codec), state.averaged(), torch.inference_mode():
            voice = dataclasses.replace(self.voice, model=merged(state.model), decoder=None)
            (speech,) = voice.speak([self.row.text], self.row.speaker, self.config)
        checkpoint.restore_random_state(before)
        rate_hz = voice.codec.sample_rate
        sound = Sound(caption="", wave=speech.wave.numpy(), sample_rate_hz=rate_hz)
        write_atomic(self.folder / f"step-{step:07}.wav", sound.wav_bytes())
        picture = mel_picture({self.row.speaker: speech.wave}, rate_hz, voice.front_end)
        self.newest = SpokenSample(
            step=step,
            text=self.row.text,
            wave=sound.wave,
            sample_rate_hz=rate_hz,
            spectrogram=pixels(picture),
        )


def spoken_samples(folder: Path) -> list[Sound]:
    sounds = []
    for path in sorted(folder.glob("step-*.wav")):
        wave, rate = soundfile.read(path, dtype="float32")
        step = int(path.stem.removeprefix("step-"))
        sounds.append(Sound(caption=f"after step {step:,}", wave=wave, sample_rate_hz=rate))
    return sounds


class SamplePlayers:
    """HTML players of a SampleLog's files, under their sentence; "" before the first.

    Files are read again only when they change: a panel asks twice a second.
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
            pass  # a training that starts again deletes the old files; the next call finds the new
        return self.html


def board_listeners(
    run: ActiveRun, config: TrainConfig, rows: list[dict], newest_sample: NewestSample
) -> list[tuple[Listener | None, str]]:
    """The listener of each of `train.boards` or None, and the reason; `rows` are the log so far.

    Each also shows `newest_sample()` at the step that it is from.
    """
    shown = dataclasses.asdict(config) | {"preset": run.preset_name}
    boards = []
    if "tensorboard" in config.boards:
        boards.append(tensorboard_log(run.folder / "tensorboard", rows, newest_sample))
    if "wandb" in config.boards:
        project = os.environ.get("WANDB_PROJECT") or BOARD_PROJECT
        boards.append(wandb_log(project, run.name, shown, run.folder / "wandb", newest_sample))
    if "trackio" in config.boards:
        boards.append(trackio_log(BOARD_PROJECT, run.name, shown, newest_sample))
    return boards


def monitor_fields(monitor: Monitor) -> dict:
    if not monitor.samples:
        return {}
    newest = monitor.samples[-1]
    return {"device_bytes": newest.memory_bytes, "load": newest.load}


def progress_lines() -> Callable:
    """A listener that prints progress with the time left."""
    lines, pace, latest = Lines(), Pace(), {}

    def show(event) -> None:
        row = dataclasses.asdict(event)
        latest.update(newest([row]))
        pace.see(row["unix_s"], row["tokens"])
        notes = [f"step {event.step}: {event.note}"] if event.note else []
        lines.show(latest, progress_texts(latest, pace), notes)

    return show
