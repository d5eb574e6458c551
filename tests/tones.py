"""Speech that needs no training to be understood: each letter is a tone, and a recogniser of tones.

It goes the whole real way, samples to mels to log-probabilities, in milliseconds.
"""

import numpy as np
import torch

from kit.audio.mel_codec import MelCodec
from kit.audio.recognizer import Recognizer
from kit.audio.spectrogram import Mel
from kit.settings import MelCodecConfig, RecognizerConfig

RATE = 22050
LETTERS = "abcdefghijklm"
CODEC = MelCodec(MelCodecConfig(width=8, blocks=1)).eval()


def tone(letter: str, seconds: float = 0.09) -> np.ndarray:
    t = np.arange(int(seconds * RATE)) / RATE
    edge = np.minimum(1, np.minimum(t, t[::-1]) / 0.005)
    return 0.4 * edge * np.sin(2 * np.pi * 400 * 1.25 ** LETTERS.index(letter) * t)


def silence(seconds: float) -> np.ndarray:
    return np.zeros(int(seconds * RATE))


def say(text: str) -> np.ndarray:
    """`text` in tones, a letter in 0.13 s, 0.06 s more between words; other signs are skipped."""
    parts = []
    for letter in text.lower():
        if letter in LETTERS:
            parts += [tone(letter), silence(0.04)]
        elif letter == " ":
            parts.append(silence(0.06))
    return np.concatenate(parts[:-1]).astype(np.float32)


def noisy(wave: np.ndarray, seed: int = 0) -> np.ndarray:
    return (wave + np.random.default_rng(seed).normal(0, 2e-4, len(wave))).astype(np.float32)


class ToneRecognizer(Recognizer):
    """Recognises the letter whose tone is nearest; silence is the blank."""

    def __init__(self):
        super().__init__(RecognizerConfig(width=8, blocks=1), LETTERS)
        waves = [silence(0.3), *(tone(letter, 0.3) for letter in LETTERS)]
        mels = Mel()(torch.from_numpy(noisy(np.stack(waves).ravel()).reshape(14, -1)))[0]
        self.register_buffer("templates", mels[:, :, 8:18].mean(-1))

    def forward(self, mel: torch.Tensor) -> torch.Tensor:
        frames = mel[..., ::2].mT[:, :, None]  # (B, S, 1, M)
        return (-4 * (frames - self.templates).square().mean(-1)).log_softmax(-1)
