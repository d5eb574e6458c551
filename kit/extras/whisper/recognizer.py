"""Whisper (Radford et al. 2022) as a recogniser: a hundred languages, without training.

It runs in faster-whisper, an optional dependency that is imported for the first transcript. Whisper
returns words and their times, but no probabilities of letters. So the letters of a word are spread
evenly over its time, in the form of a CTC output, and Whisper can replace the kit's own recogniser.

Shapes: L samples, S output frames, A alphabet + blank, N characters.
"""

import dataclasses
import importlib.util
import math
import unicodedata
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from kit.audio.clip import resampled
from kit.audio.recognizer import RecognizerOutput, SpeechRecognizer
from kit.base.errors import KitError
from kit.base.files import digest, file_digest
from kit.base.formatting import shorten
from kit.base.hub import fetch_model
from kit.base.tensor_file import save_module
from kit.text.normalize import letters, normalize

RATE_HZ = 16_000
FRAME_S = 0.02
# Limits of a transcript: from unintelligible audio Whisper may repeat itself for minutes.
TOKENS_PER_S = 12
TOKENS = 20
WINDOW_S = 30  # length of Whisper's input
REPETITIVE = 2.4  # compression ratio of a text beyond which OpenAI's code rejects it, too
SIZES = ("tiny", "base", "small", "medium", "large-v3")
FILES = ("model.bin", "config.json", "tokenizer.json")
VOCABULARIES = ("vocabulary.txt", "vocabulary.json")  # one of them
SETTINGS = ("language", "alphabet", "model_sha256")  # beside the folder


def whisper_unavailable() -> str:
    """Return why Whisper cannot be used here, or ""."""
    if importlib.util.find_spec("faster_whisper"):
        return ""
    return 'faster-whisper is not installed (pip install "faster-whisper>=1.1")'


def whisper_folder(name: str, into: Path) -> Path:
    """Return the folder of the model `name`: a size such as `base`, or a local folder.

    A size is fetched once, under `into`, and checked against the SHA-256 of the hub. Raises
    KitError for a folder without a model, or if it cannot be fetched.
    """
    if name in SIZES:
        model = f"faster-whisper-{name}"
        folder = Path(into) / model
        fetch_model(f"Systran/{model}", "main", FILES, folder, VOCABULARIES)
    else:
        folder = Path(name).expanduser().absolute()
    require_whisper(folder)
    return folder


def require_whisper(folder: Path) -> None:
    missing = [name for name in FILES if not (folder / name).is_file()]
    if not any((folder / name).is_file() for name in VOCABULARIES):
        missing.append(VOCABULARIES[0])
    if missing:
        raise KitError(
            f"{folder} is no Whisper model for faster-whisper: it has no {', '.join(missing)}. "
            f"Name a folder that has, or one of the sizes {', '.join(SIZES)}."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transcript:
    text: str = ""  # with its punctuation
    confidence: float = 0.0  # 0 to 1: a token's mean probability, times that of speech at all
    problem: str = ""  # why there is no usable text


class WhisperRecognizer(nn.Module, SpeechRecognizer):
    """Whisper from `folder`, for `language`, with transcripts in the letters of `alphabet`."""

    input_sample_rate = RATE_HZ
    frame_s = FRAME_S

    def __init__(self, folder: Path, language: str, alphabet: str, model_sha256: str):
        super().__init__()
        self.folder = Path(folder)
        self.language = language
        self.alphabet = alphabet
        self.model_sha256 = model_sha256
        self.spoken = language.lower().replace("_", "-").split("-")[0]  # as Whisper names it

    @cached_property
    def model(self):
        """The faster-whisper model, with as many CPU threads as torch. Raises KitError."""
        why = whisper_unavailable()
        if why:
            raise KitError(f"Whisper is to recognise speech here, but {why}.")
        require_whisper(self.folder)
        from faster_whisper import WhisperModel

        # Not on a GPU: there CTranslate2 needs libraries of CUDA 12, which torch may not have.
        model = WhisperModel(
            str(self.folder), device="cpu", compute_type="int8", cpu_threads=torch.get_num_threads()
        )
        if self.spoken not in model.supported_languages:
            known = ", ".join(sorted(model.supported_languages))
            raise KitError(
                f"Whisper does not know the language `{self.language}`. It knows {known}. For the "
                "recogniser of a run, leave `recognizer.whisper` empty."
            )
        return model

    def fingerprint(self) -> str:
        return digest("whisper", self.model_sha256, self.language, self.alphabet)

    def recognize(self, waves: list[Tensor], sample_rate: int) -> list[RecognizerOutput]:
        return [self._recognize(resampled(wave, sample_rate, RATE_HZ)) for wave in waves]

    def transcribe_waves(self, waves: list[Tensor], sample_rate: int) -> list[str]:
        written = []
        for wave in waves:
            segments = self._segments(resampled(wave, sample_rate, RATE_HZ), timed=False)
            text = " ".join(self.spelt(segment.text) for segment in segments)
            written.append(" ".join(text.split()))
        return written

    def write_down(self, wave: Tensor, sample_rate: int) -> Transcript:
        """Return the text of one clip (L,), as it would be printed, and how sure Whisper is."""
        segments = self._segments(resampled(wave, sample_rate, RATE_HZ), timed=False)
        text = " ".join(" ".join(segment.text for segment in segments).replace("|", " ").split())
        if not letters(normalize(text, self.language)):
            return Transcript(problem="no speech, Whisper says")
        if max(segment.compression_ratio for segment in segments) > REPETITIVE:
            return Transcript(problem=f"Whisper repeats itself: {shorten(text, 60)}")
        tokens = [len(segment.tokens) + 1 for segment in segments]  # and the end's
        log_probs = [segment.avg_logprob * count for segment, count in zip(segments, tokens)]
        spoken = 1 - max(segment.no_speech_prob for segment in segments)
        confidence = spoken * math.exp(min(0.0, sum(log_probs) / sum(tokens)))
        return Transcript(text=text, confidence=round(confidence, 3))

    def _recognize(self, wave: Tensor) -> RecognizerOutput:
        frames = max(1, math.ceil(len(wave) / RATE_HZ / FRAME_S))
        ids = []
        times = []
        segments = self._segments(wave, timed=True)
        for word in [word for segment in segments for word in segment.words]:
            text = self.spelt(word.word).replace(" ", "")
            if text and ids and " " in self.alphabet:
                ids.append(self.alphabet.index(" ") + 1)
                times.append((times[-1] + word.start) / 2)
            for number, char in enumerate(text):
                ids.append(self.alphabet.index(char) + 1)
                times.append(word.start + (number + 0.5) * (word.end - word.start) / len(text))
        log_probs = emissions(ids, times, frames, len(self.alphabet))
        return RecognizerOutput(log_probs=log_probs, loudness=frame_loudness(wave, frames))

    def _segments(self, wave: Tensor, timed: bool) -> list:
        """Return faster-whisper's segments of `wave` (L,) of 16 kHz; those of no speech are not."""
        if len(wave) < 0.1 * RATE_HZ:  # it contains no word
            return []
        longest_s = min(WINDOW_S, len(wave) / RATE_HZ)
        segments, _ = self.model.transcribe(
            wave.detach().float().cpu().clamp(-1, 1).numpy(),
            language=self.spoken,
            beam_size=5,
            temperature=0.0,
            condition_on_previous_text=False,
            without_timestamps=not timed,
            word_timestamps=timed,
            max_new_tokens=round(TOKENS_PER_S * longest_s) + TOKENS,
        )
        return list(segments)

    def spelt(self, text: str) -> str:
        """Return `text` in the letters of the alphabet; others lose their marks or are left out."""
        spelt = ""
        for char in letters(normalize(text, self.language)):
            bare = char if char in self.alphabet else unicodedata.normalize("NFD", char)[0]
            spelt += bare if bare in self.alphabet or bare == " " else ""
        return spelt


def emissions(ids: list[int], times: list[float], frames: int, letters_count: int) -> Tensor:
    """Return CTC log-probabilities (S, A) of the characters `ids` at `times`, in seconds.

    Each takes one frame, with blanks between; characters closer than a frame are moved apart.
    """
    places = [round(time / FRAME_S) for time in times]
    # Frames from the character before: of two equal ones, the blank between them is needed.
    min_steps = [2 if i and ids[i] == ids[i - 1] else 1 for i in range(len(ids))]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + min_steps[i])
    latest = frames - 1
    for i in reversed(range(len(places))):
        places[i] = min(places[i], latest)
        latest = places[i] - min_steps[i]
    labels = torch.zeros(frames, dtype=torch.long)
    for char, place in zip(ids, places):
        if place >= 0:  # below 0: more characters than frames
            labels[place] = char
    # The recognised character's log-probability is 4 above that of any other.
    return (4.0 * torch.nn.functional.one_hot(labels, letters_count + 1)).log_softmax(-1)


def frame_loudness(wave: Tensor, frames: int) -> Tensor:
    hop = round(FRAME_S * RATE_HZ)
    padded = torch.nn.functional.pad(wave.float(), (0, frames * hop - len(wave)))
    return padded.unflatten(0, (frames, hop)).square().mean(-1).clamp(min=1e-10).log() / 2


def save_whisper(model: WhisperRecognizer, path: Path) -> None:
    """Write the model's folder and settings, without weights, in the kit's recogniser format."""
    settings = {name: getattr(model, name) for name in SETTINGS}
    save_module(path, model, whisper=str(model.folder), **settings)


def new_whisper(folder: Path, language: str, alphabet: str) -> WhisperRecognizer:
    return WhisperRecognizer(folder, language, alphabet, file_digest(folder / "model.bin"))


def whisper_from_header(header: dict) -> WhisperRecognizer:
    return WhisperRecognizer(Path(header["whisper"]), *(header[name] for name in SETTINGS))
