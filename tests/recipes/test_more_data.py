"""Long recordings become clips that can be played; more text gives tokens of its own."""

import dataclasses
import shutil
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import soundfile
import torch
from helpers import RATE, corpus, manifest, speech, trained_codec, world
from tones import CODEC, ToneRecognizer, noisy, say

from kit.audio.recognizer import Recognizer, RecognizerConfig, alphabet_of, save_recognizer
from kit.base.errors import DatasetError, KitError
from kit.dataset.checks import check_dataset
from kit.dataset.data_report import ManifestConfig, Utterance
from kit.dataset.segmentation import UnusedAudio
from kit.recipes.more_data import LongRecordings, MoreText, write_example
from kit.recipes.start import start
from kit.text.train_tokenizer import TokenizerConfig, train_tokenizer

TINY = RecognizerConfig(width=32, blocks=1)


@pytest.fixture(scope="module")
def run():
    """A run as 01 leaves it, with a recogniser that has learnt nothing."""
    idle = SimpleNamespace(idle=100.0, nice=0.0)
    threads = torch.get_num_threads()
    with patch("psutil.cpu_times_percent", lambda _seconds: idle):
        run = start("more_data")
    trained_codec()
    check_dataset(corpus(), ManifestConfig(), run.folder)
    shutil.copy(world() / "codec.safetensors", run.path("codec.safetensors"))
    texts = [row.text for row in manifest()]
    save_recognizer(Recognizer(TINY, alphabet_of(texts)), run.path("recognizer.safetensors"))
    train_tokenizer(texts, run.path("tokenizer.model"), TokenizerConfig(vocab_size=410))
    run.record(data={"language": "am"})
    yield run
    torch.set_num_threads(threads)


def test_without_recordings_an_example_is_made_of_the_runs_own_clips(run):
    recordings = LongRecordings(run)
    audio = recordings.folder / "example.wav"
    lines = audio.with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    texts = {row.text for row in manifest()}
    assert len(lines) == 12 and all(line[:-1] in texts for line in lines)
    before = audio.read_bytes()
    shown = LongRecordings(run).show()
    assert audio.read_bytes() == before
    assert shown.grid[1][0] == "example.wav" and "1 recordings" in str(shown)


def test_every_second_is_in_a_clip_or_has_a_reason(run):
    recordings = LongRecordings(run)
    found = recordings.cut()
    assert found.pictures and f"clips in {recordings.into}" in str(found)
    lost_s = sum(float(row[2]) - float(row[1]) for row in found.grid[1:])
    clips_s = sum(soundfile.info(p).duration for p in (recordings.into / "wavs").glob("*.wav"))
    length_s = soundfile.info(recordings.folder / "example.wav").duration
    assert lost_s + clips_s == pytest.approx(length_s, abs=0.3)


def test_clips_can_be_played_and_the_next_step_is_named(run, tmp_path, monkeypatch):
    soundfile.write(tmp_path / "talk.wav", np.concatenate([speech(2.0)] * 3), RATE)
    (tmp_path / "talk.txt").write_text("ሰላም ለሁሉም.\nዛሬ ጥሩ ቀን ነው.", encoding="utf-8")

    def cut_in_two(self, folder, into, progress):
        (into / "wavs").mkdir(parents=True, exist_ok=True)
        for name in ("talk_0001", "talk_0002"):
            soundfile.write(into / "wavs" / f"{name}.wav", speech(2.0), RATE)
        (into / "metadata.csv").write_text("talk_0001|ሰላም\ntalk_0002|ዛሬ\n", encoding="utf-8")
        return [UnusedAudio(file="talk.wav", start_s=4.0, end_s=6.0, reason="a long pause")]

    monkeypatch.setattr("kit.recipes.more_data.Segmenter.segment_folder", cut_in_two)
    recordings = LongRecordings(run, str(tmp_path), max_clip_seconds=3.0)
    assert recordings.cuts.max_s == 3.0
    found = recordings.cut()
    assert [sound.caption for sound in found.sounds] == ["ሰላም", "ዛሬ"]
    assert "2 clips" in str(found) and "2 s are in none" in str(found)
    assert f"set DATA to {run.folder / 'cut'} and RUN to a new name" in str(found)
    assert found.grid[1] == ("talk.wav", "4.0", "6.0", "a long pause")


def test_a_folder_without_transcripts_is_reported(run, tmp_path):
    soundfile.write(tmp_path / "talk.wav", speech(2.0), RATE)
    with pytest.raises(DatasetError, match="no recording with a transcript"):
        LongRecordings(run, str(tmp_path)).show()


def test_more_text_is_compared_on_the_recordings_held_out_text(run, tmp_path):
    text = tmp_path / "more.txt"
    text.write_text("".join(f"{row.text}\n" for row in manifest()), encoding="utf-8")
    compared = MoreText(run, str(text)).compare()
    assert compared.grid[0] == ("", "of the recordings", "of more.txt")
    assert {row[0]: row[2] for row in compared.grid}["round_trip"] == "1"
    assert run.path("more_text", "tokenizer.model").is_file()
    assert MoreText(run).compare().grid[0][2] == "of manifest.jsonl"


def test_before_01_it_is_said_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))
    with pytest.raises(KitError, match="run 01_data_prep first"):
        MoreText(start("nothing"))


def test_an_example_in_a_voice_that_is_understood_is_cut_into_its_sentences(
    run, tmp_path, monkeypatch
):
    texts = ["abc def ghi", "lmk jih", "fed cba mlk abc"]
    rows = []
    for number, text in enumerate(texts):
        audio = tmp_path / f"{number}.wav"
        soundfile.write(audio, noisy(say(text)), RATE)
        rows.append(
            Utterance(
                id=str(number), audio=str(audio), text=text, speaker="", split="train", line=1
            )
        )
    gone = dataclasses.replace(rows[0], id="gone", audio=str(tmp_path / "gone.wav"))
    monkeypatch.setattr("kit.recipes.more_data.load_recognizer", lambda _: ToneRecognizer().eval())
    monkeypatch.setattr("kit.recipes.more_data.load_codec", lambda _: CODEC)
    write_example([gone, *rows], tmp_path / "long", RATE)
    with pytest.raises(DatasetError, match="None of the run's recordings"):
        write_example([gone], tmp_path / "none", RATE)
    recordings = LongRecordings(run, str(tmp_path / "long"))
    recordings.language = "en"
    recordings.into = tmp_path / "cut"
    recordings.cuts = dataclasses.replace(recordings.cuts, min_s=0.5)
    found = recordings.cut()
    table = (tmp_path / "cut" / "metadata.csv").read_text(encoding="utf-8").split()
    assert " ".join(table).count("|") >= 1 and "set DATA to" in str(found)
    captions = " ".join(sound.caption for sound in found.sounds)
    assert captions.startswith("abc def ghi.")
