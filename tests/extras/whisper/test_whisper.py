"""Whisper as a recogniser, as far as it goes without its weights: tests/judges has the rest."""

import pytest
import torch

from kit.audio.recognizer import RecognizerOutput, load_recognizer, transcripts
from kit.base.errors import KitError
from kit.dataset.alignment import alignment_score
from kit.extras.whisper.recognizer import (
    FRAME_S,
    RATE_HZ,
    WhisperRecognizer,
    emissions,
    save_whisper,
    whisper_folder,
)

ALPHABET = " абвгде"
FRAMES = 150


def whisper(alphabet: str = ALPHABET, language: str = "ru") -> WhisperRecognizer:
    return WhisperRecognizer("nowhere", language, alphabet, "0" * 64)


def output_of(text: str) -> RecognizerOutput:
    """The output of Whisper for `text`, its characters evenly over two seconds."""
    ids = [ALPHABET.index(char) + 1 for char in text]
    times = [0.3 + i * 2.0 / len(ids) for i in range(len(ids))]
    loud = torch.zeros(FRAMES)
    loud[15 : 15 + round(2.0 / FRAME_S)] = 5
    return RecognizerOutput(log_probs=emissions(ids, times, FRAMES, len(ALPHABET)), loudness=loud)


def test_the_transcript_is_there_letter_by_letter():
    row = output_of("абба где да").log_probs
    assert transcripts(ALPHABET, [row]) == ["абба где да"]
    assert row.shape == (FRAMES, len(ALPHABET) + 1)
    assert torch.allclose(row.logsumexp(-1), torch.zeros(FRAMES), atol=1e-5)


def test_a_text_that_was_said_scores_best():
    output = output_of("абба где да")
    texts = ("абба, где да?", "абва где да", "абба да", "еее ввв ггг")
    scores = [alignment_score(whisper(), output, text).score for text in texts]
    assert scores[0] == pytest.approx(0, abs=1e-5)
    assert scores == sorted(scores, reverse=True)


def test_its_spelling_is_that_of_the_alphabet_and_a_clip_too_short_for_a_word_is_silence():
    short = torch.zeros(100)
    assert whisper().transcribe_waves([short], RATE_HZ) == [""]
    assert whisper().recognize([short], RATE_HZ)[0].log_probs.argmax(-1).tolist() == [0]
    assert whisper("абвгдежзийк ").spelt("Ёжик — А!") == "ежик а"
    assert whisper(" ё").spelt("ёе") == "ё"


def test_its_file_says_which_it_is(tmp_path):
    path = tmp_path / "recognizer.safetensors"
    save_whisper(whisper(), path)
    again = load_recognizer(path)
    assert again.fingerprint() == whisper().fingerprint()
    assert again.fingerprint() != whisper(language="uk").fingerprint()
    assert (again.alphabet, again.input_sample_rate, again.language) == (ALPHABET, RATE_HZ, "ru")


def test_a_folder_without_one_is_reported(tmp_path):
    with pytest.raises(KitError, match=r"is no Whisper .*model\.bin.*tiny"):
        whisper_folder(str(tmp_path), tmp_path)
    with pytest.raises(KitError, match=r"is no Whisper|is not installed"):
        whisper().transcribe_waves([torch.zeros(RATE_HZ)], RATE_HZ)
