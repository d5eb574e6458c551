"""One long recording, heard window by window, with its pauses: bounded memory, whatever its length.

A window is read, resampled and passed through the recogniser by itself, with half a second before
it for the convolutions to see. Knows nothing of transcripts.

Shapes: S output frames of the recogniser, A alphabet + blank, L samples.
"""

import dataclasses
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kit.audio.clip import resampled
from kit.audio.container import count_decodable, open_audio, read_segment
from kit.audio.recognizer import SpeechRecognizer
from kit.dataset.alignment import quiet_frames

LEAD_S = 0.5  # heard before a window's first frame: what the recogniser's convolutions see
PAUSE_S = 0.1  # shorter silences belong to the letters: the closure of a t or a k
WILDCARD_COST = 0.1  # nats a frame, so that text is preferred where it fits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pause:
    """A quiet stretch beside a word; of no length where the words run together."""

    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    start_s: float
    log_probs: Tensor  # (S, A + 1), the last column the wildcard
    quiet: np.ndarray  # (S,) which frames are pauses
    frame_s: float
    last: bool  # whether the recording ends with it

    @property
    def end_s(self) -> float:
        return self.second(len(self.log_probs))

    def second(self, frame: int) -> float:
        return self.start_s + int(frame) * self.frame_s

    def pause(self, start: int, end: int, near_end: bool) -> Pause:
        """The quiet stretch of frames start..end nearest to one end, short ones last of all."""
        start = max(0, start)
        end = min(end, len(self.quiet))
        quiet = self.quiet[start:end]
        runs = np.flatnonzero(np.diff(quiet, prepend=False, append=False)).reshape(-1, 2)
        if len(runs) == 0:
            at_s = self.second(end if near_end else start)
            return Pause(start_s=at_s, end_s=at_s)
        long = runs[np.diff(runs)[:, 0] * self.frame_s >= PAUSE_S]
        if len(long):
            first, stop = long[-1 if near_end else 0]
        else:
            first, stop = runs[np.argmax(np.diff(runs)[:, 0])]
        return Pause(start_s=self.second(start + first), end_s=self.second(start + stop))


class Listener:
    """One recording, heard window by window: bounded memory, whatever its length."""

    def __init__(self, path: Path, recognizer: SpeechRecognizer):
        self.path = path
        self.recognizer = recognizer
        self.input_sample_rate = recognizer.input_sample_rate  # Hz
        with open_audio(path) as (sound, _):
            self.rate = sound.samplerate
        self.extent = count_decodable(path)
        self.samples = self.extent.frames
        self.total_s = self.samples / self.rate

    def samples_of(self, start_s: float, end_s: float) -> np.ndarray:
        """Mono samples (L,) at the recording's own rate, as they stand there."""
        first = round(start_s * self.rate)
        stop = min(round(end_s * self.rate), self.samples)
        wave = read_segment(self.path, first, stop, self.samples)
        return wave.mean(axis=1)

    def wave(self, start_s: float, end_s: float) -> Tensor:
        """Mono samples (L,) at the rate the recogniser hears."""
        wave = np.nan_to_num(self.samples_of(start_s, end_s))  # what is no number is silence
        wave = torch.from_numpy(wave.clip(-1, 1))
        return resampled(wave, self.rate, self.input_sample_rate)

    def window(self, start_s: float, length_s: float) -> Window:
        """What is heard from `start_s` on for `length_s`, or to the end."""
        from_s = max(0.0, start_s - LEAD_S)
        end_s = min(start_s + length_s, self.total_s)
        wave = self.wave(from_s, end_s)
        heard = self.recognizer.recognize([wave], self.input_sample_rate)[0]
        frame_s = self.recognizer.frame_s
        lead = round((start_s - from_s) / frame_s)
        log_probs = heard.log_probs[lead:]
        wildcard = log_probs.amax(-1, keepdim=True) - WILDCARD_COST
        return Window(
            start_s=from_s + lead * frame_s,
            log_probs=torch.cat((log_probs, wildcard), dim=-1),
            quiet=quiet_frames(heard.loudness[lead:]).numpy(),
            frame_s=frame_s,
            last=end_s >= self.total_s,
        )
