"""Whisper as a recogniser, as far as it goes without its weights: tests/judges has the rest."""

import math

import pytest
import torch
from clips import voice

from kit.audio.recognizer import RecognizerOutput, load_recognizer, transcripts
from kit.base.errors import KitError
from kit.dataset.alignment import alignment_score, quiet_frames
from kit.extras.whisper.recognizer import (
    FRAME_S,
    RATE_HZ,
    WhisperRecognizer,
    emissions,
    frame_loudness,
    save_whisper,
    whisper_folder,
)

ALPHABET = " абвгде"
FRAMES = 150


def whisper(alphabet: str = ALPHABET, language: str = "ru") -> WhisperRecognizer:
    return WhisperRecognizer("nowhere", language, alphabet, "0" * 64)


def output_of(text: str, seconds: float = 2.0) -> RecognizerOutput:
    """The output of Whisper for `text`, its characters evenly over so many seconds."""
    ids = [ALPHABET.index(char) + 1 for char in text]
    times = [0.3 + i * seconds / len(ids) for i in range(len(ids))]
    loud = torch.zeros(FRAMES)
    loud[15 : 15 + round(seconds / FRAME_S)] = 5
    return RecognizerOutput(log_probs=emissions(ids, times, FRAMES, len(ALPHABET)), loudness=loud)


@pytest.mark.parametrize("seconds", [2.0, 0.1, 0.0])
def test_the_transcript_is_there_letter_by_letter(seconds):
    row = output_of("абба где да", seconds).log_probs
    assert transcripts(ALPHABET, [row]) == ["абба где да"]
    assert row.shape == (FRAMES, len(ALPHABET) + 1)
    assert torch.allclose(row.logsumexp(-1), torch.zeros(FRAMES), atol=1e-5)


def test_more_than_a_clip_has_frames_for_keeps_its_end():
    row = emissions([2, 3, 3, 2, 4], [0.0] * 5, 4, len(ALPHABET))
    assert transcripts(ALPHABET, [row]) == ["бав"]
    assert emissions([], [], 4, len(ALPHABET)).argmax(-1).tolist() == [0] * 4


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


def test_pauses_are_quiet():
    wave = torch.cat((torch.zeros(RATE_HZ), torch.from_numpy(voice(1.0)), torch.zeros(RATE_HZ)))
    frames = math.ceil(len(wave) / RATE_HZ / FRAME_S)
    loud = frame_loudness(wave, frames)
    quiet = quiet_frames(loud)
    assert loud.shape == (frames,) and quiet[:45].all() and quiet[-20:].all()
    assert not quiet[50:90].all()


def test_its_file_says_which_it_is(tmp_path):
    path = tmp_path / "recognizer.safetensors"
    save_whisper(whisper(), path)
    again = load_recognizer(path)
    assert again.fingerprint() == whisper().fingerprint()
    assert again.fingerprint() != whisper(language="uk").fingerprint()
    assert (again.alphabet, again.input_sample_rate, again.language) == (ALPHABET, RATE_HZ, "ru")


def test_a_folder_without_one_is_reported(tmp_path):
    with pytest.raises(KitError, match=r"is no Whisper .* it has no model\.bin, .*sizes tiny"):
        whisper_folder(str(tmp_path), tmp_path)
    with pytest.raises(KitError, match=r"is no Whisper|is not installed"):
        whisper().transcribe_waves([torch.zeros(RATE_HZ)], RATE_HZ)
