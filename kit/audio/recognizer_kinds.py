"""Which recognisers there are, by what their file says. The one place that lists them."""

from pathlib import Path

from torch import nn

from kit.audio.hearing import RecognizerError, SpeechRecognizer
from kit.audio.recognizer import recognizer_of
from kit.audio.whisper import whisper_of
from kit.base.weights_file import load_module


def load_recognizer(path: Path) -> SpeechRecognizer:
    """The recogniser saved at `path`. Raises RecognizerError when it is missing or damaged."""
    return load_module(path, _from_header, RecognizerError, "run notebook 01_data_prep.")


def _from_header(header: dict) -> nn.Module:
    return whisper_of(header) if "whisper" in header else recognizer_of(header)
