"""Long recordings and their transcripts become clips that say what their text says."""

import copy
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from helpers import EAR, few_words, in_time
from shared_work import PretendedGroup
from tones import LETTERS, RATE, ToneRecognizer, noisy, say, silence

from kit.audio.container import frame_header
from kit.audio.recognizer import (
    Recognizer,
    RecognizerConfig,
    alphabet_of,
    cer,
    edit_distance,
    train_recognizer,
)
from kit.audio.spectrogram import Mel
from kit.base.errors import DatasetError
from kit.dataset import long_alignment
from kit.dataset.data_report import DataReport, ManifestConfig, Utterance, refuse
from kit.dataset.layouts import read_dataset
from kit.dataset.long_alignment import (
    LongAligner,
    WindowReader,
    read_tokens,
    split_phrases,
)
from kit.dataset.segmentation import (
    SegmentConfig,
    Segmenter,
    find_recordings,
    unique_names,
)

HEAR = ToneRecognizer().eval()
CUT = SegmentConfig(min_s=0.5, max_s=6.0)


@pytest.fixture(autouse=True)
def short_windows(monkeypatch) -> None:
    """For recordings that are short, and spoken slowly."""
    monkeypatch.setattr(long_alignment, "WINDOW_S", 10.0)
    monkeypatch.setattr(long_alignment, "FIRST_PACE", 7.0)


def sentences(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    make = lambda: " ".join("".join(rng.sample(LETTERS, 4)) for _ in range(rng.randint(2, 5)))  # noqa: E731
    return [make() + rng.choice(".!?") for _ in range(count)]


def record(path: Path, spoken: list[str | float], transcript: str, seed: int = 0) -> float:
    """A recording of sentences (text) and silences (seconds), with its transcript; its seconds."""
    parts = [silence(s) if isinstance(s, float) else say(s) for s in spoken]
    wave = noisy(np.concatenate(parts), seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, wave, RATE)
    path.with_suffix(".txt").write_text(transcript, encoding="utf-8")
    return len(wave) / RATE


def paused(texts: list[str], seed: int = 0) -> list[str | float]:
    rng = random.Random(seed)
    return [part for text in texts for part in (rng.uniform(0.2, 0.6), text)] + [0.3]


def cutter(recognizer=HEAR, config: SegmentConfig = CUT) -> Segmenter:
    return Segmenter(recognizer=recognizer, cuts=config, language="en")


def cut(folder: Path, into: Path, recognizer=HEAR, config: SegmentConfig = CUT, **options):
    losses = cutter(recognizer, config).segment_folder(folder, into, **options)
    lines = (into / "metadata.csv").read_text(encoding="utf-8").splitlines()
    return [line.split("|") for line in lines], losses


def clip_seconds(into: Path) -> float:
    return sum(soundfile.info(p).duration for p in (into / "wavs").glob("*.wav"))


def letters_in(path: Path) -> str:
    wave = torch.from_numpy(soundfile.read(path, dtype="float32")[0])
    return HEAR.transcribe([HEAR.front_end.clip_mel(wave, RATE)])[0]


def test_every_sentence_becomes_a_clip_that_says_it(tmp_path):
    texts = sentences(30)
    seconds = record(tmp_path / "in" / "a tale.wav", paused(texts), " ".join(texts))
    reported = []
    rows, losses = cut(
        tmp_path / "in", tmp_path / "out", progress=lambda *now: reported.append(now)
    )
    assert [text for _, text in rows] == texts and [r[0] for r in rows][:1] == ["a_tale_0001"]
    for name, text in rows:
        transcript = letters_in(tmp_path / "out/wavs" / f"{name}.wav")
        assert edit_distance(transcript, "".join(c for c in text if c in LETTERS)) <= 4
    assert clip_seconds(tmp_path / "out") + sum(x.end_s - x.start_s for x in losses) == (
        pytest.approx(seconds, abs=0.01)
    )
    assert reported[-1] == pytest.approx((seconds, seconds)) and reported == sorted(reported)


@pytest.fixture(scope="module")
def spoken() -> tuple[Recognizer, list[str], list[np.ndarray]]:
    """A recogniser that learned real speech in seconds; sentences new to it, and their speech."""
    texts, speech = few_words()
    mels = [Mel().clip_mel(torch.from_numpy(wave), RATE) for wave in speech]
    torch.manual_seed(0)
    recognizer = Recognizer(RecognizerConfig(**EAR), alphabet_of(texts))
    list(train_recognizer(recognizer, mels[:60], texts[:60], "cpu", "fp32"))
    return recognizer, texts[60:], speech[60:]


def test_real_speech_is_cut_into_its_sentences(tmp_path, spoken):
    recognizer, texts, speech = spoken
    parts = [part for wave in speech for part in (wave, silence(0.35))]
    wave = noisy(np.concatenate(parts))
    (tmp_path / "in").mkdir()
    soundfile.write(tmp_path / "in/book.flac", wave, RATE)
    transcript = " ".join(f"{text}።" for text in texts)
    (tmp_path / "in/book.txt").write_text(transcript, encoding="utf-8")
    tight = SegmentConfig(min_s=0.5, max_s=6.0, margin_s=0.02)  # as the speech it learned from
    rows, losses = cut(tmp_path / "in", tmp_path / "out", recognizer, tight)
    said = " ".join(text for _, text in rows)
    assert len(said) > 0.9 * len(transcript) and len(rows) >= 15
    assert {sentence.strip() for sentence in said.split("።")} <= {*texts, ""}
    lost_s = sum(x.end_s - x.start_s for x in losses)
    assert clip_seconds(tmp_path / "out") + lost_s == pytest.approx(len(wave) / RATE, abs=0.01)
    clips = [tmp_path / f"out/wavs/{name}.wav" for name, _ in rows]
    waves = [torch.from_numpy(soundfile.read(clip, dtype="float32")[0]) for clip in clips]
    transcripts = recognizer.transcribe(Mel().log_mels(waves, RATE))
    assert cer(transcripts, [text for _, text in rows]) < 0.25


def test_processes_that_share_the_recordings_cut_as_one_does(tmp_path):
    for number in range(3):
        texts = sentences(6, seed=number)
        record(tmp_path / f"in/{number}.wav", paused(texts), " ".join(texts))
    cut(tmp_path / "in", tmp_path / "alone")
    with pytest.raises(KeyboardInterrupt):
        cut(tmp_path / "in", tmp_path / "apart", group=PretendedGroup(3, fails=1))
    reported = []
    group = PretendedGroup(2)
    cut(
        tmp_path / "in", tmp_path / "apart", group=group, progress=lambda *now: reported.append(now)
    )
    assert (
        reported == sorted(reported) and reported[0][0] > 0 and reported[-1][0] == reported[-1][1]
    )
    left = [
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*")}
        for folder in (tmp_path / "alone", tmp_path / "apart")
    ]
    assert left[0] == left[1]


def test_the_folder_is_a_dataset_like_any_other(tmp_path):
    texts = sentences(8)
    record(tmp_path / "in/a.wav", paused(texts), " ".join(texts))
    cut(tmp_path / "in", tmp_path / "out")
    result = read_dataset(tmp_path / "out", ManifestConfig(language="en"))
    assert len(result.rows) == 8 and not result.refused


def test_rows_too_long_for_the_model_become_clips_at_their_pauses(tmp_path):
    rows = []
    for number in range(2):
        texts = sentences(8, seed=number)
        audio = tmp_path / "data" / f"r {number}.wav"
        seconds = record(audio, paused(texts, number), "")
        rows.append(
            Utterance(
                id=f"r_{number}", audio=str(audio), text=" ".join(texts), speaker=f"s{number}",
                split="train", line=number + 1, seconds=seconds, file="metadata.csv",
            )
        )  # fmt: skip
    made = cutter().segment_rows(rows, tmp_path / "long")
    for row in rows:
        own = [clip for clip in made if clip.line == row.line]
        assert [clip.id for clip in own][:2] == [f"{row.id}_0001", f"{row.id}_0002"]
        assert " ".join(clip.text for clip in own) == row.text
        assert {clip.speaker for clip in own} == {row.speaker}
    assert all(0 < clip.seconds <= CUT.max_s and Path(clip.audio).is_file() for clip in made)
    marks = (tmp_path / "long/clips/cut").glob("*.json")
    dates = {mark: mark.stat().st_mtime_ns for mark in marks}
    again = cutter().segment_rows(rows, tmp_path / "long")
    assert again == made and all(mark.stat().st_mtime_ns == dates[mark] for mark in dates)

    lost = [refuse(row, "too long", "too long", row.seconds) for row in rows]
    report = DataReport(layout="", kept=[], refused=lost, warned=[]).with_clips(made)
    assert report.kept == made and report.lost_percent < 30  # the pauses
    assert all("kept, split at pauses" in finding.reason for finding in report.refused)
    assert cutter().segment_rows([], tmp_path / "none") == []


def test_what_is_not_in_the_transcript_and_what_is_not_said_is_lost_alone(tmp_path):
    texts, extra, unsaid = sentences(24), sentences(3, seed=7), sentences(3, seed=8)
    spoken, written = list(texts), list(texts)
    for n, at in enumerate((18, 11, 4)):
        spoken.insert(at, extra[n])
        written.insert(at + 2, unsaid[n])
    seconds = record(tmp_path / "in/a.wav", paused(spoken), "\n\n".join(written))
    rows, losses = cut(tmp_path / "in", tmp_path / "out")
    kept = {text for _, text in rows}
    assert kept <= set(texts) and len(kept) >= 21
    reasons = "\n".join(loss.reason for loss in losses)
    assert all(text in reasons for text in unsaid)
    assert clip_seconds(tmp_path / "out") + sum(x.end_s - x.start_s for x in losses) == (
        pytest.approx(seconds, abs=0.01)
    )
    lines = (tmp_path / "out/losses.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["reason"] for line in lines] == [x.reason for x in losses]


def test_after_minutes_of_other_speech_the_text_is_found_again(tmp_path):
    texts, other = sentences(20), sentences(16, seed=5)
    spoken = texts[:8] + other + texts[8:]
    record(tmp_path / "in/a.wav", paused(spoken), " ".join(texts))
    rows, losses = cut(tmp_path / "in", tmp_path / "out")
    assert {text for _, text in rows} <= set(texts) and len(rows) >= 18
    assert max(x.end_s - x.start_s for x in losses) > 20


def test_pages_that_were_not_read_are_leapt_over(tmp_path):
    texts, unread = sentences(20), sentences(25, seed=5)
    record(tmp_path / "in/a.wav", paused(texts), " ".join(texts[:8] + unread + texts[8:]))
    rows, losses = cut(tmp_path / "in", tmp_path / "out")
    assert {text for _, text in rows} <= set(texts) and len(rows) >= 17
    assert any(unread[3] in x.reason or unread[0] in x.reason for x in losses)


def test_the_wrong_transcript_yields_nothing(tmp_path):
    seconds = record(tmp_path / "in/a.wav", paused(sentences(12)), " ".join(sentences(12, seed=99)))
    rows, losses = cut(tmp_path / "in", tmp_path / "out")
    assert rows == [] and sum(x.end_s - x.start_s for x in losses) == pytest.approx(seconds)


def test_a_second_call_recognises_only_what_changed(tmp_path):
    for name in "ab":
        texts = sentences(6, seed=ord(name))
        record(tmp_path / f"in/{name}.wav", paused(texts), " ".join(texts))
    first, _ = cut(tmp_path / "in", tmp_path / "out")
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "out/wavs").iterdir()}
    deaf = copy.deepcopy(HEAR)
    deaf.forward = None  # would raise
    assert cut(tmp_path / "in", tmp_path / "out", recognizer=deaf)[0] == first
    texts = sentences(4, seed=1)
    record(tmp_path / "in/b.wav", paused(texts), " ".join(texts))
    again, _ = cut(tmp_path / "in", tmp_path / "out")
    assert [t for n, t in again if n.startswith("b")] == texts
    files = {p.stem for p in (tmp_path / "out/wavs").iterdir()}
    assert files == {name for name, _ in again}, "no clip of the old recording is left"
    assert all(p.stat().st_mtime_ns == t for p, t in times.items() if p.name.startswith("a_"))


def cut_slowly(folder: Path, into: Path) -> None:
    cut(folder, into, progress=lambda *_: time.sleep(0.2))


def test_killed_in_the_middle_it_resumes_to_the_same_clips(tmp_path):
    torch.set_num_threads(1)
    for name in "abc":
        texts = sentences(6, seed=ord(name))
        record(tmp_path / f"in/{name}.wav", paused(texts), " ".join(texts))
    process = multiprocessing.get_context("fork").Process(
        target=cut_slowly, args=(tmp_path / "in", tmp_path / "out")
    )
    process.start()
    while not (tmp_path / "out/cut/a.json").is_file():
        assert process.is_alive()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not (tmp_path / "out/metadata.csv").exists()
    cut(tmp_path / "in", tmp_path / "out")
    cut(tmp_path / "in", tmp_path / "whole")
    for whole in (tmp_path / "whole").rglob("*.*"):
        assert (tmp_path / "out" / whole.relative_to(tmp_path / "whole")).read_bytes() == (
            whole.read_bytes()
        )


def test_recordings_that_cannot_be_used_are_in_the_data_report(tmp_path):
    texts = sentences(4)
    record(tmp_path / "in/good.wav", paused(texts), " ".join(texts))
    seconds = record(tmp_path / "in/alone.wav", ["abcd", 0.5], "")
    (tmp_path / "in/alone.txt").unlink()
    (tmp_path / "in/broken.wav").write_bytes(b"not audio")
    (tmp_path / "in/broken.txt").write_text("abcd")
    record(tmp_path / "in/latin.wav", ["abcd", 0.5], "")
    (tmp_path / "in/latin.txt").write_bytes("café".encode("latin-1"))
    record(tmp_path / "in/mute.wav", ["abcd", 0.5], "")
    record(tmp_path / "in/nan.wav", ["abcd", 0.5], "abcd.")
    soundfile.write(tmp_path / "in/nan.wav", np.full(RATE, np.nan), RATE, "FLOAT")
    rows, losses = cut(tmp_path / "in", tmp_path / "out")
    assert [text for _, text in rows] == texts
    reasons = {x.file: x.reason for x in losses}
    assert "no transcript alone.txt" in reasons["alone.wav"]
    assert "cannot be read as audio" in reasons["broken.wav"]
    assert "latin.txt is not valid UTF-8" in reasons["latin.wav"]
    assert {"mute.wav", "nan.wav"} <= set(reasons)
    assert next(x for x in losses if x.file == "alone.wav").end_s == pytest.approx(seconds)


def test_other_rates_channels_and_coding_give_the_same_result(tmp_path):
    texts = sentences(5)
    record(tmp_path / "in/a.wav", paused(texts), " ".join(texts))
    wave, _ = soundfile.read(tmp_path / "in/a.wav")
    wave = np.interp(np.arange(0, len(wave), RATE / 48000), np.arange(len(wave)), wave)
    soundfile.write(tmp_path / "in/a.flac", np.stack([wave, wave], axis=1), 48000, "PCM_24")
    (tmp_path / "in/a.wav").unlink()
    rows, _ = cut(tmp_path / "in", tmp_path / "out")
    assert [text for _, text in rows] == texts
    info = soundfile.info(tmp_path / "out/wavs/a_0001.wav")
    assert (info.samplerate, info.channels, info.subtype) == (48000, 1, "PCM_16")


def test_a_folder_without_transcripts_says_what_is_expected(tmp_path):
    soundfile.write(tmp_path / "a.wav", say("abc"), RATE)
    with pytest.raises(DatasetError, match=r"NAME\.txt, found 1 recordings"):
        find_recordings(tmp_path)
    with pytest.raises(DatasetError, match="found 0 recordings"):
        find_recordings(tmp_path / "missing")


def test_names_are_plain_and_never_used_twice(tmp_path):
    files = [tmp_path / n for n in ("a b.wav", "a|b.wav", "x/ሰላም.mp3", "..wav", "a b.flac")]
    assert unique_names(tmp_path, files) == ["a_b", "a_b-2", "x_ሰላም", "recording", "a_b-3"]


def test_sentences_end_at_stops_or_at_lines_where_there_are_none():
    def ends(text: str) -> list[str]:
        return [t.text for t in read_tokens(text, HEAR, "en") if t.ends_sentence]

    assert ends("ab cd. ef\ngh! “ij?” kl") == ["cd.", "gh!", "“ij?”", "kl"]
    assert ends("a heading\n\nab cd.") == ["heading", "cd."]
    assert ends("ab cd\nef gh\n") == ["cd", "gh"]
    assert ends("አበባ። አበበ፧ ab") == ["አበባ።", "አበበ፧", "ab"]


def test_every_word_belongs_to_one_piece_of_text():
    words = read_tokens("— ab cd. " + "ab " * 40 + ". — —", HEAR, "en")
    pieces = split_phrases(words)
    assert [n for piece in pieces for n in piece] == list(range(len(words)))
    assert all(any(words[n].ids for n in piece) for piece in pieces) and max(map(len, pieces)) <= 15
    assert split_phrases(read_tokens("— —", HEAR, "en")) == []


def test_memory_does_not_grow_with_the_recording(tmp_path):
    """Never more than a window of samples is read, however long the recording."""
    texts = sentences(60)
    record(tmp_path / "a.wav", paused(texts), "")
    listener, asked = WindowReader(tmp_path / "a.wav", HEAR), []
    listen = listener.samples_of

    def samples_of(start_s: float, end_s: float) -> np.ndarray:
        asked.append(end_s - start_s)
        return listen(start_s, end_s)

    listener.samples_of = samples_of
    aligned = LongAligner(listener, read_tokens(" ".join(texts), HEAR, "en")).run()
    assert len(aligned) == len(" ".join(texts).split())
    assert max(asked) <= long_alignment.WINDOW_S + 1 and sum(asked) < 2 * listener.total_s


def test_scratch_is_not_left_in_the_folder(tmp_path):
    record(tmp_path / "in/a.wav", paused(sentences(3)), " ".join(sentences(3)))
    before = sorted((tmp_path / "in").iterdir())
    cut(tmp_path / "in", tmp_path / "out")
    assert sorted((tmp_path / "in").iterdir()) == before
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "cut",
        "losses.jsonl",
        "metadata.csv",
        "wavs",
    ]
    shutil.rmtree(tmp_path / "out")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_pipes_among_the_recordings_are_not_waited_for(tmp_path):
    record(tmp_path / "in" / "a.wav", ["abc."], "abc.")
    record(tmp_path / "in" / "b.wav", ["abc."], "abc.")
    (tmp_path / "in" / "b.txt").unlink()
    os.mkfifo(tmp_path / "in" / "b.txt")
    os.mkfifo(tmp_path / "in" / "c.wav")
    (tmp_path / "in" / "c.txt").write_text("abc.")
    with in_time(30):
        losses = cutter().segment_folder(tmp_path / "in", tmp_path / "out")
    assert {x.reason for x in losses if x.file == "b.wav"} == {"no transcript b.txt beside it"}
    assert not [x for x in losses if x.file == "c.wav"]


CUT_SHORT = ["WAV", "RF64", "FLAC", "OGG", "MP3"]


@pytest.mark.parametrize("format", CUT_SHORT)
def test_a_recording_cut_in_the_middle_gives_what_is_left_and_a_row_for_the_rest(tmp_path, format):
    texts = sentences(12)
    seconds = record(tmp_path / "whole.wav", paused(texts), " ".join(texts))
    wave, rate = soundfile.read(tmp_path / "whole.wav")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text(" ".join(texts), encoding="utf-8")
    path = tmp_path / f"in/a.{format.lower()}"
    soundfile.write(path, wave, rate, format=format)
    whole = path.read_bytes()
    path.rename(path.with_suffix(".wav")).write_bytes(whole[: int(0.55 * len(whole))])
    rows, losses = cut(tmp_path / "in", tmp_path / "out")
    assert 3 <= len(rows) < len(texts) and rows[0][1] == texts[0]
    (missing,) = [loss for loss in losses if "the recording is truncated" in loss.reason]
    if format != "OGG":  # it does not tell how long it was
        assert missing.end_s == pytest.approx(seconds, abs=0.1) and missing.start_s < 0.7 * seconds


def test_a_long_flac_of_unknown_length_is_cut_like_any_other(tmp_path):
    texts = sentences(8)
    record(tmp_path / "whole.wav", paused(texts), " ".join(texts))
    wave, rate = soundfile.read(tmp_path / "whole.wav")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text(" ".join(texts), encoding="utf-8")
    soundfile.write(tmp_path / "in/a.flac", wave, rate)
    whole = bytearray((tmp_path / "in/a.flac").read_bytes())
    whole[21:26] = bytes([whole[21] & 0xF0, 0, 0, 0, 0])
    (tmp_path / "in/a.flac").write_bytes(whole)
    reported = []
    rows, _ = cut(tmp_path / "in", tmp_path / "out", progress=lambda *now: reported.append(now))
    assert [text for _, text in rows] == texts
    assert reported[-1] == pytest.approx((len(wave) / rate, len(wave) / rate))


@pytest.mark.parametrize("kind", ["VBR MP3 without a header", "two MP3s", "opposite phase"])
def test_recordings_as_people_have_them_are_cut_to_their_last_sentence(tmp_path, kind):
    texts = sentences(8)
    record(tmp_path / "whole.wav", paused(texts), " ".join(texts))
    wave, rate = soundfile.read(tmp_path / "whole.wav")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text(" ".join(texts), encoding="utf-8")
    if kind == "opposite phase":
        soundfile.write(tmp_path / "in/a.WAV", np.stack([wave, -wave], axis=1), rate)
    elif kind == "two MP3s":
        soundfile.write(tmp_path / "half.mp3", wave[: len(wave) // 2], rate)
        soundfile.write(tmp_path / "rest.mp3", wave[len(wave) // 2 :], rate)
        joined = b"".join((tmp_path / name).read_bytes() for name in ("half.mp3", "rest.mp3"))
        (tmp_path / "in/a.Mp3").write_bytes(joined)
    else:
        soundfile.write(tmp_path / "a.mp3", wave, rate, bitrate_mode="VARIABLE")
        whole = (tmp_path / "a.mp3").read_bytes()
        (tmp_path / "in/a.MP3").write_bytes(whole[frame_header(whole, 0).size_bytes :])
    rows, _ = cut(tmp_path / "in", tmp_path / "out")
    assert rows[0][1] == texts[0] and rows[-1][1] == texts[-1]
    assert len(rows) >= len(texts) - 1  # the place where two files meet may be in a sentence


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are Unicode there")
def test_a_recording_whose_name_is_not_utf_8_is_reported(tmp_path):
    odd = os.fsencode(tmp_path) + b"/caf\xe9.wav"
    record(tmp_path / "a.wav", paused(sentences(2)), "x")
    os.rename(tmp_path / "a.wav", odd)
    with pytest.raises(DatasetError, match=r"caf\\udce9\.wav.*not UTF-8: rename it") as caught:
        find_recordings(tmp_path)
    assert str(caught.value).encode()
