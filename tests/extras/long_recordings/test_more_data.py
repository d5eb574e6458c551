"""Long recordings become clips, with transcripts or by a stand-in for Whisper; more text."""

import csv
import json
import shutil
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import soundfile
import torch
from helpers import RATE, corpus, manifest, speech, spoken_by_espeak, trained_codec, usable, world

from kit.audio.clip import load_wave
from kit.audio.recognizer import Recognizer, alphabet_of, save_recognizer
from kit.base.errors import DatasetError, KitError
from kit.dataset.checks import check_dataset
from kit.dataset.tables import read_texts
from kit.extras.long_recordings import recipe as more_data
from kit.extras.long_recordings.recipe import CUTS, LongRecordings, MoreText, proofread, transcribe
from kit.extras.long_recordings.transcripts import read_transcripts, save_text
from kit.extras.whisper.recognizer import RATE_HZ, Transcript, WhisperRecognizer
from kit.recipes.start import start
from kit.settings import ManifestConfig, RecognizerConfig, TokenizerConfig
from kit.text.train_tokenizer import train_tokenizer

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


def test_an_example_is_made_of_the_runs_own_clips_and_every_second_has_a_clip_or_a_reason(run):
    recordings = LongRecordings(run)
    audio = recordings.folder / "example.wav"
    lines = audio.with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    texts = {row.text for row in manifest()}
    assert len(lines) == 12 and all(line[:-1] in texts for line in lines)
    before = audio.read_bytes()
    recordings = LongRecordings(run)
    shown = recordings.show()
    assert audio.read_bytes() == before
    assert shown.grid[1][0] == "example.wav" and "1 recordings" in str(shown)
    found = recordings.cut()
    assert found.pictures and f"clips in {recordings.into}" in str(found)
    lost_s = sum(float(row[2]) - float(row[1]) for row in found.grid[1:])
    clips_s = sum(soundfile.info(p).duration for p in (recordings.into / "wavs").glob("*.wav"))
    assert lost_s + clips_s == pytest.approx(soundfile.info(audio).duration, abs=0.3)


def test_more_text_is_compared_on_the_held_out_text(run, tmp_path, monkeypatch):
    text = tmp_path / "more.txt"
    text.write_text("".join(f"{row.text}\n" for row in manifest()), encoding="utf-8")
    compared = MoreText(run, str(text)).compare()
    assert compared.grid[0] == ("", "of the recordings", "of more.txt")
    assert {row[0]: row[2] for row in compared.grid}["round_trip"] == "1"
    assert run.path("more_text", "tokenizer.model").is_file()
    assert MoreText(run).compare().grid[0][2] == "of manifest.jsonl"
    soundfile.write(tmp_path / "talk.wav", speech(2.0), RATE)
    with pytest.raises(DatasetError, match="no recording with a transcript"):
        LongRecordings(run, str(tmp_path)).show()
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))
    with pytest.raises(KitError, match="run 01_data_prep first"):
        MoreText(start("nothing"))


TEXTS = (
    "ሰላም ለሁሉም ይሁን ዛሬ ጥሩ ቀን ነው",
    "ነገ ወደ ቤት እንሄዳለን እንዴት ነህ ሰላም ለሁሉም ይሁን",
    "ሰላም ነገ ጥሩ ቀን ይሁን ነገ ወደ ቤት እንሄዳለን እንዴት ነህ ዛሬ ጥሩ ቀን ነው",
)


class StandIn(WhisperRecognizer):
    """Knows each sentence by its length; `calls` counts what it was given, `fails_at` stops it."""

    def __init__(self, seconds: dict[str, float], model: str = "one"):
        super().__init__("nowhere", "am", "", model)
        self.seconds = seconds
        self.calls = 0
        self.fails_at = 0

    def write_down(self, wave, sample_rate):
        self.calls += 1
        if self.calls == self.fails_at:
            raise KeyboardInterrupt
        if wave.std() < 0.01:
            return Transcript(problem="no speech, Whisper says")
        length_s = len(wave) / sample_rate - 2 * CUTS.margin_s
        text = min(self.seconds, key=lambda text: abs(self.seconds[text] - length_s))
        confidence = 0.9 - 0.1 * TEXTS.index(text)
        return Transcript(text=f"{text} {self.model_sha256}", confidence=confidence)


@pytest.fixture(scope="module")
def spoken() -> dict[str, np.ndarray]:
    waves = spoken_by_espeak(list(TEXTS))
    return {text: wave / np.abs(wave).max() / 2 for text, wave in zip(TEXTS, waves)}


@pytest.fixture
def whisper(spoken):
    """A recogniser, also of another `model`."""
    seconds = {text: len(wave) / RATE for text, wave in spoken.items()}
    return lambda model="one": StandIn(seconds, model)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "clips"


@pytest.fixture
def talks(tmp_path, spoken):
    """Two talks, stereo FLAC and WAV, with long pauses; one silent file, one that is no sound."""
    folder = tmp_path / "talks"
    folder.mkdir()
    rng = np.random.default_rng(0)
    pause = 1e-4 * rng.standard_normal(round(1.5 * RATE))
    one = np.concatenate([pause, *(part for wave in spoken.values() for part in (wave, pause))])
    soundfile.write(folder / "one.flac", np.stack([one, one], axis=1), RATE)
    soundfile.write(folder / "two.wav", np.concatenate([spoken[TEXTS[2]], pause]), RATE)
    soundfile.write(folder / "silent.wav", np.zeros(5 * RATE), RATE)
    (folder / "broken.mp3").write_bytes(b"no sound at all" * 9)
    return folder


def test_clips_have_texts_and_every_second_is_accounted_for(talks, out, tmp_path, whisper, spoken):
    result = transcribe(talks, out, whisper())
    texts = read_texts(out)
    assert list(texts.values()) == [f"{text} one" for text in (*TEXTS, TEXTS[2])]
    rows = list(csv.DictReader((out / "transcripts.csv").read_text("utf-8").splitlines()))
    assert [row["source"] for row in rows] == ["one.flac"] * 3 + ["two.wav"]
    assert [float(row["confidence"]) for row in rows] == pytest.approx([0.9, 0.8, 0.7, 0.7])
    losses = [json.loads(line) for line in (out / "losses.jsonl").read_text().splitlines()]
    for name in ("one.flac", "two.wav", "silent.wav"):
        edges = [(float(r["start_s"]), float(r["end_s"])) for r in rows if r["source"] == name]
        edges += [(loss["start_s"], loss["end_s"]) for loss in losses if loss["file"] == name]
        edges.sort()
        assert edges[0][0] == 0 and [end for _, end in edges[:-1]] == [a for a, _ in edges[1:]]
        assert edges[-1][1] == pytest.approx(soundfile.info(talks / name).duration)
    assert "silent.wav (silence" in result.line and "broken.mp3" in result.line
    kept, refused = usable(out, ManifestConfig(language="am", max_rejected_percent=0), tmp_path)
    assert len(kept) == 4 and not refused, "01_data_prep reads the folder"
    for name, wave in zip(texts, spoken.values()):
        clip = load_wave(str(out / "wavs" / f"{name}.wav"), RATE).numpy()
        cut, whole = (np.ptp(np.flatnonzero(np.abs(each) > 0.02)) for each in (clip, wave))
        assert cut == pytest.approx(whole, abs=0.01 * RATE), "no sound of it is lost"


def test_after_a_kill_finished_clips_are_not_repeated(talks, out, whisper):
    killed = whisper()
    killed.fails_at = 3
    with pytest.raises(KeyboardInterrupt):
        transcribe(talks, out, killed)
    for calls in (2, 0):
        again = whisper()
        transcribe(talks, out, again)
        assert again.calls == calls and len(read_texts(out)) == 4
    shutil.rmtree(out / "wavs")
    transcribe(talks, out, again)
    assert again.calls == 4, "clips that were deleted are made again"


def test_what_a_person_wrote_stays(talks, out, whisper):
    transcribe(talks, out, whisper())
    edited, left_out, confirmed, untouched = read_texts(out)
    table = (out / "metadata.csv").read_text(encoding="utf-8").splitlines()
    by_hand = [f"{edited}|በእጅ", *table[2:], "mine|የኔ"]  # and the second row is deleted
    (out / "metadata.csv").write_text("\ufeff" + "\r\n".join(by_hand), encoding="utf-8")
    save_text(out, confirmed, read_texts(out)[confirmed])
    (talks / "new.wav").write_bytes((talks / "two.wav").read_bytes())
    transcribe(talks, out, whisper("two"))
    texts = read_texts(out)
    assert texts[edited] == "በእጅ" and texts["mine"] == "የኔ" and left_out not in texts
    assert texts[confirmed] == f"{TEXTS[2]} one" and texts[untouched] == f"{TEXTS[2]} two"
    assert len(texts) == 5, "the new recording's"
    assert read_transcripts(out)[edited]["text"] == f"{TEXTS[0]} two"


def test_the_panel_saves_at_once_the_least_certain_first(talks, out, whisper, capsys):
    transcribe(talks, out, whisper())
    first, second, third, fourth = read_texts(out)
    panel = proofread(out)
    assert [clip.id for clip in panel.clips] == [third, fourth, second, first]
    wav = (out / "wavs" / f"{third}.wav").read_bytes()
    assert bytes(panel.player.value) == wav and "70%" in panel.place.value
    panel.text.value = " |"
    panel.buttons["Save"].click()
    assert "Leave out" in panel.status.value and panel.number == 0
    panel.text.value = "ሰላም |\n ነገ"
    panel.buttons["Save"].click()
    assert read_texts(out)[third] == "ሰላም ነገ" and "Saved" in panel.status.value
    panel.buttons["Leave out"].click()
    assert fourth not in read_texts(out)
    panel.buttons["Next"].click()
    panel.buttons["Save"].click()
    assert panel.buttons["Save"].disabled and "No clips" in panel.place.value
    assert list(read_texts(out)) == [first, second, third]
    assert [clip.id for clip in proofread(out).clips] == [second], "nobody has checked it yet"
    proofread(out).run()
    assert "1 clip" in capsys.readouterr().out
    (out / "metadata.csv").unlink()
    with pytest.raises(DatasetError, match=r"metadata\.csv"):
        proofread(out)


def test_what_cannot_be_used_is_said(talks, tmp_path, whisper, monkeypatch):
    new, empty, damaged = (tmp_path / name for name in ("new", "empty", "damaged"))
    empty.mkdir()
    damaged.mkdir()
    (damaged / "metadata.csv").write_text("one\n")
    for data, out, error, why in (
        (tmp_path / "nowhere", new, DatasetError, "nowhere"),
        (talks, talks / "clips", KitError, "--out must be outside"),
        (empty, new, DatasetError, "no recordings"),
        (talks, damaged, DatasetError, r"metadata\.csv, line 1: .*got one"),
    ):
        with pytest.raises(error, match=why):
            transcribe(data, out, whisper())
    monkeypatch.setattr(more_data, "whisper_unavailable", lambda: "it is missing")
    for out, why in (("", "--out"), (str(new), "it is missing")):
        with pytest.raises(KitError, match=why):
            more_data.transcribe_with_whisper("", data=str(talks), out=out)


def segment(text: str, log_prob: float = -0.1, repeats: float = 1.2, silent: float = 0.0):
    rates = {"avg_logprob": log_prob, "compression_ratio": repeats, "no_speech_prob": silent}
    return SimpleNamespace(text=text, tokens=[1] * 4, **rates)


def test_whisper_says_how_sure_it_is():
    recognizer = WhisperRecognizer("nowhere", "en", "", "0")

    def written(*segments) -> Transcript:
        model = SimpleNamespace(transcribe=lambda wave, **_: (iter(segments), None))
        recognizer.__dict__["model"] = model
        return recognizer.write_down(torch.zeros(RATE_HZ), RATE_HZ)

    sure = written(segment(" Well,"), segment(" yes|no."))
    assert (sure.text, sure.problem) == ("Well, yes no.", "")
    assert sure.confidence == pytest.approx(np.exp(-0.1), abs=1e-3)
    assert written(segment("a", log_prob=-2.0)).confidence < 0.2
    assert written(segment("Thank you.", silent=0.7)).confidence < 0.3
    for silent in (written(), written(segment(" ..."))):
        assert silent.text == "" and "no speech" in silent.problem
    assert "repeats" in written(segment("la " * 40, repeats=9.0)).problem
