"""Whisper in the place of the kit's own recogniser: aligning, cutting, judging."""

import dataclasses

import numpy as np
import pytest
import soundfile
from judges import whisper_folder

from kit.audio.clip import load_wave
from kit.audio.recognizer import alphabet_of, cer
from kit.dataset.alignment import align_clips
from kit.dataset.checks import match
from kit.dataset.layouts import read_dataset
from kit.dataset.synthetic import make_corpus
from kit.extras.long_recordings.segmentation import Segmenter
from kit.extras.whisper.recognizer import new_whisper
from kit.inference.evaluate import transcribe
from kit.settings import AlignConfig, CorpusConfig, ManifestConfig

CLIPS = 12


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> list:
    config = CorpusConfig(language="en", utterances=50, held_out=1, unseen=1, long=1, speakers=1)
    folder = make_corpus(config, tmp_path_factory.mktemp("corpus"))
    spoken = read_dataset(folder, ManifestConfig(language="en")).rows
    return sorted((row for row in spoken if row.split == "train"), key=lambda row: row.id)[:CLIPS]


@pytest.fixture(scope="module")
def whisper(tmp_path_factory, rows):
    folder = whisper_folder(tmp_path_factory.mktemp("models"))
    return new_whisper(folder, "en", alphabet_of([row.text for row in rows]))


def test_it_writes_down_what_is_said(whisper, rows):
    transcripts = transcribe(whisper, [load_wave(row.audio, 22_050) for row in rows[:4]], 22_050)
    assert cer(transcripts, [row.text for row in rows[:4]]) < 0.5


def test_texts_of_other_recordings_score_lowest(whisper, rows):
    mixed = list(rows)
    mixed[0] = dataclasses.replace(rows[0], text=rows[1].text)
    results = align_clips(mixed, whisper, AlignConfig())
    assert np.argmin([one.score for one in results]) == 0
    # Whisper mishears some of what espeak-ng says anyway: a third of the usual distance.
    judged = match(mixed, results, AlignConfig(hopeless=-4.0, spread=2.0))
    assert judged.judged
    assert {finding.id for finding in judged.mismatched} == {mixed[0].id}


def test_a_long_recording_is_cut_where_its_words_end(whisper, rows, tmp_path):
    rate = 22_050
    pause = np.zeros(round(0.6 * rate), np.float32)
    waves = [load_wave(row.audio, rate).numpy() for row in rows[:6]]
    path = tmp_path / "long.wav"
    soundfile.write(path, np.concatenate([part for wave in waves for part in (wave, pause)]), rate)
    text = " ".join(f"{row.text}." for row in rows[:6])
    path.with_suffix(".txt").write_text(text, encoding="utf-8")
    cutter = Segmenter(whisper, "en", max_s=8.0)
    cutter.segment_folder(tmp_path, tmp_path / "cut")
    clips = read_dataset(tmp_path / "cut", ManifestConfig(language="en", held_out_percent=0)).rows
    said = sum(len(wave) for wave in waves) / rate
    assert clips and sum(soundfile.info(clip.audio).duration for clip in clips) > 0.6 * said
    written = whisper.transcribe_waves([load_wave(clip.audio, rate) for clip in clips], rate)
    assert cer(written, [clip.text for clip in clips]) < 0.5
