"""Long recordings and their transcripts become clips that say what their text says."""

import copy
import itertools
import json
import multiprocessing
import random
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import soundfile
import torch
from helpers import start_and_kill
from tones import LETTERS, RATE, ToneRecognizer, noisy, say, silence

from kit.audio.recognizer import edit_distance
from kit.base.errors import DatasetError
from kit.dataset.data_report import DataReport, refuse
from kit.dataset.layouts import read_dataset
from kit.dataset.manifest import Utterance
from kit.extras.long_recordings import alignment, segmentation
from kit.extras.long_recordings.alignment import AlignedToken, Span, Token, read_tokens
from kit.extras.long_recordings.segmentation import SegmentConfig, Segmenter, plan_segments
from kit.settings import ManifestConfig

HEAR = ToneRecognizer().eval()
CUT = SegmentConfig(min_s=0.5, max_s=6.0)
CUTTER = Segmenter(HEAR, "en", CUT.max_s)
CUTTER.cuts = CUT


@pytest.fixture(autouse=True)
def short_windows(monkeypatch) -> None:
    """For recordings that are short, and spoken slowly."""
    monkeypatch.setattr(alignment, "WINDOW_S", 10.0)
    monkeypatch.setattr(alignment, "FIRST_PACE", 7.0)


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


def book(folder: Path, count: int, seed: int = 0, name: str = "a") -> tuple[list[str], float]:
    """A recording of so many sentences, and its transcript; the sentences and its seconds."""
    texts = sentences(count, seed)
    return texts, record(folder / f"{name}.wav", paused(texts), " ".join(texts))


def paused(texts: list[str], seed: int = 0) -> list[str | float]:
    rng = random.Random(seed)
    return [part for text in texts for part in (rng.uniform(0.2, 0.6), text)] + [0.3]


def utterance(audio: Path, text: str, seconds: float, line: int = 1) -> Utterance:
    row = {"id": f"r_{line}", "line": line, "speaker": f"s{line}", "file": "a.csv"}
    return Utterance(**row, audio=str(audio), text=text, seconds=seconds, split="train")


def cut(tmp_path: Path, into: str = "out", cutter: Segmenter = CUTTER, **options):
    """Split `in`; the rows (id, text), and the losses."""
    losses = cutter.segment_folder(tmp_path / "in", tmp_path / into, **options)
    lines = (tmp_path / into / "metadata.csv").read_text(encoding="utf-8").splitlines()
    return [line.split("|") for line in lines], losses


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of each file that is not hidden, by its path in `folder`."""
    files = (p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}


def lost_seconds(losses: list) -> float:
    return sum(loss.seconds for loss in losses)


def require_all(tmp_path: Path, losses: list, seconds: float) -> None:
    """Clips and losses have all seconds of the recording."""
    clips_s = sum(soundfile.info(p).duration for p in (tmp_path / "out/wavs").glob("*.wav"))
    assert clips_s + lost_seconds(losses) == pytest.approx(seconds, abs=0.01)


def test_every_sentence_becomes_a_clip_that_says_it(tmp_path):
    texts, seconds = book(tmp_path / "in", 30, name="a tale")
    before = sorted((tmp_path / "in").iterdir())
    reported = []
    rows, losses = cut(tmp_path, progress=lambda *now: reported.append(now))
    assert [text for _, text in rows] == texts and rows[0][0] == "a_tale_0001"
    for name, text in rows:
        wave = soundfile.read(tmp_path / "out/wavs" / f"{name}.wav", dtype="float32")[0]
        mel = HEAR.front_end.clip_mel(torch.from_numpy(wave), RATE)
        letters = "".join(c for c in text if c in LETTERS)
        assert edit_distance(HEAR.transcribe([mel])[0], letters) <= 4
    require_all(tmp_path, losses, seconds)
    assert reported[-1] == pytest.approx((seconds, seconds)) and reported == sorted(reported)
    assert sorted((tmp_path / "in").iterdir()) == before, "no scratch is left there"
    files = "cut losses.jsonl metadata.csv wavs"
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == files.split()
    result = read_dataset(tmp_path / "out", ManifestConfig(language="en"))
    assert len(result.rows) == 30 and not result.refused, "a dataset like any other"


def test_rows_too_long_for_the_model_become_clips_at_their_pauses(tmp_path):
    rows = []
    for number in range(2):
        texts = sentences(8, seed=number)
        audio = tmp_path / "data" / f"r {number}.wav"
        seconds = record(audio, paused(texts, number), "")
        rows.append(utterance(audio, " ".join(texts), seconds, number + 1))
    made = CUTTER.segment_rows(rows, tmp_path / "long")
    for row in rows:
        own = [clip for clip in made if clip.line == row.line]
        assert [clip.id for clip in own][:2] == [f"{row.id}_0001", f"{row.id}_0002"]
        assert " ".join(clip.text for clip in own) == row.text
        assert {clip.speaker for clip in own} == {row.speaker}
    assert all(0 < clip.seconds <= CUT.max_s and Path(clip.audio).is_file() for clip in made)
    dates = {mark: mark.stat().st_mtime_ns for mark in (tmp_path / "long/clips/cut").glob("*.json")}
    again = CUTTER.segment_rows(rows, tmp_path / "long")
    assert again == made and all(mark.stat().st_mtime_ns == dates[mark] for mark in dates)

    lost = [refuse(row, "too long", "too long", row.seconds) for row in rows]
    report = DataReport(layout="", kept=[], refused=lost, warned=[]).with_clips(made)
    assert report.kept == made and report.lost_percent < 30  # the pauses
    assert all("kept, split at pauses" in finding.reason for finding in report.refused)
    assert CUTTER.segment_rows([], tmp_path / "none") == []


def test_what_is_not_in_the_transcript_and_what_is_not_said_is_lost_alone(tmp_path):
    texts, extra, unsaid = sentences(24), sentences(3, seed=7), sentences(3, seed=8)
    spoken, written = list(texts), list(texts)
    for n, at in enumerate((18, 11, 4)):
        spoken.insert(at, extra[n])
        written.insert(at + 2, unsaid[n])
    seconds = record(tmp_path / "in/a.wav", paused(spoken), "\n\n".join(written))
    rows, losses = cut(tmp_path)
    kept = {text for _, text in rows}
    assert kept <= set(texts) and len(kept) >= 21
    reasons = "\n".join(loss.reason for loss in losses)
    assert all(text in reasons for text in unsaid)
    require_all(tmp_path, losses, seconds)
    lines = (tmp_path / "out/losses.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["reason"] for line in lines] == [x.reason for x in losses]
    # Of the wrong transcript nothing is kept.
    seconds = record(tmp_path / "in/a.wav", paused(sentences(12)), " ".join(sentences(12, seed=99)))
    rows, losses = cut(tmp_path)
    assert rows == [] and lost_seconds(losses) == pytest.approx(seconds)


@pytest.mark.parametrize("kind", ["minutes of other speech", "pages that were not read"])
def test_the_text_is_aligned_again_after(tmp_path, kind):
    texts, other = sentences(20), sentences(16 if "speech" in kind else 25, seed=5)
    both = texts[:8] + other + texts[8:]
    spoken, written = (both, texts) if "speech" in kind else (texts, both)
    record(tmp_path / "in/a.wav", paused(spoken), " ".join(written))
    rows, losses = cut(tmp_path)
    assert {text for _, text in rows} <= set(texts) and len(rows) >= 17
    lost_s = max(x.seconds for x in losses)
    reasons = "\n".join(x.reason for x in losses)
    assert lost_s > 20 if "speech" in kind else other[0] in reasons or other[3] in reasons


def test_a_second_call_recognises_only_what_changed(tmp_path):
    for name in "ab":
        book(tmp_path / "in", 6, seed=ord(name), name=name)
    first, _ = cut(tmp_path)
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "out/wavs").iterdir()}
    deaf = copy.deepcopy(CUTTER)
    deaf.recognizer.forward = None  # would raise
    assert cut(tmp_path, cutter=deaf)[0] == first
    texts, _ = book(tmp_path / "in", 4, seed=1, name="b")
    again, _ = cut(tmp_path)
    assert [t for n, t in again if n.startswith("b")] == texts
    files = {p.stem for p in (tmp_path / "out/wavs").iterdir()}
    assert files == {name for name, _ in again}, "no clip of the old recording is left"
    assert all(p.stat().st_mtime_ns == t for p, t in times.items() if p.name.startswith("a_"))


def test_killed_in_the_middle_it_resumes_to_the_same_clips(tmp_path):
    torch.set_num_threads(1)
    for name in "abc":
        book(tmp_path / "in", 6, seed=ord(name), name=name)
    slowly = {"progress": lambda *_: time.sleep(0.2)}
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=cut, args=(tmp_path,), kwargs=slowly)
    first = tmp_path / "out/cut/a.json"
    start_and_kill(process, first, 0)
    assert first.is_file() and not (tmp_path / "out/metadata.csv").exists()
    cut(tmp_path)
    cut(tmp_path, "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_recordings_that_cannot_be_used_are_in_the_data_report(tmp_path):
    texts, _ = book(tmp_path / "in", 4, name="good")
    for name in ("b/alone", "broken", "latin", "mute", "nan", "half"):
        seconds = record(tmp_path / f"in/{name}.wav", ["abcd", 0.5], "abcd")
    half = (tmp_path / "in/half.wav").read_bytes()
    (tmp_path / "in/half.wav").write_bytes(half[: len(half) // 2])
    (tmp_path / "in/mute.txt").write_text("")
    (tmp_path / "in/b/alone.txt").unlink()
    (tmp_path / "in/broken.wav").write_bytes(b"not audio")
    (tmp_path / "in/latin.txt").write_bytes("café".encode("latin-1"))
    soundfile.write(tmp_path / "in/nan.wav", np.full(RATE, np.nan), RATE, "FLOAT")
    rows, losses = cut(tmp_path)
    assert [text for _, text in rows] == texts
    reasons = {x.file: x.reason for x in losses}
    assert "no transcript alone.txt" in reasons["b/alone.wav"]
    assert "cannot be read as audio" in reasons["broken.wav"]
    assert "latin.txt is not valid UTF-8" in reasons["latin.wav"]
    assert "truncated" in reasons["half.wav"]
    assert {"mute.wav", "nan.wav"} <= set(reasons)
    assert next(x for x in losses if x.file == "b/alone.wav").end_s == pytest.approx(seconds)


def test_rows_that_share_a_recording_keep_their_own_texts(tmp_path):
    texts = sentences(8)
    audio = tmp_path / "r.wav"
    seconds = record(audio, paused(texts, 0), "")
    halves = (" ".join(texts[:4]), " ".join(texts[4:]))
    rows = [utterance(audio, half, seconds, line) for line, half in enumerate(halves, 1)]
    made = CUTTER.segment_rows(rows, tmp_path / "long")
    for row in rows:
        own = [clip.text for clip in made if clip.line == row.line]
        assert own and all(text in row.text for text in own)


def test_a_disk_that_fails_stops_the_cutting_of_rows(tmp_path, monkeypatch):
    """An hour would be missing from the training, with a wrong reason."""
    audio = tmp_path / "r.wav"
    row = utterance(audio, "abcd", record(audio, ["abcd", 0.5], ""))
    denied = Mock(side_effect=PermissionError(13, "denied"))
    monkeypatch.setattr(alignment, "open_audio", denied)
    with pytest.raises(DatasetError, match=r"r\.wav.*denied"):
        CUTTER.segment_rows([row], tmp_path / "long")


def test_what_cannot_be_opened_is_tried_again(tmp_path, monkeypatch):
    texts, _ = book(tmp_path / "in", 4)
    denied = Mock(side_effect=PermissionError(13, "denied"))
    for place, name in [(Path, "read_text"), (alignment, "open_audio")]:
        with monkeypatch.context() as patch:
            patch.setattr(place, name, denied)
            (loss,) = CUTTER.segment_folder(tmp_path / "in", tmp_path / "out")
            assert "denied" in loss.reason
    assert [text for _, text in cut(tmp_path)[0]] == texts


def test_a_folder_without_transcripts_says_what_is_expected(tmp_path):
    soundfile.write(tmp_path / "a.wav", say("abc"), RATE)
    with pytest.raises(DatasetError, match=r"NAME\.txt, found 1 recordings"):
        segmentation.find_recordings(tmp_path)
    with pytest.raises(DatasetError, match="found 0 recordings"):
        segmentation.find_recordings(tmp_path / "missing")
    files = [tmp_path / n for n in ("a b.wav", "a|b.wav", "x/ሰላም.mp3", "..wav", "a b.flac")]
    names = segmentation.unique_names(tmp_path, files)
    assert names == ["a_b", "a_b-2", "x_ሰላም", "recording", "a_b-3"]


def test_sentences_end_at_stops_or_at_lines_where_there_are_none():
    def ends(text: str) -> list[str]:
        return [t.text for t in read_tokens(text, HEAR, "en") if t.ends_sentence]

    assert ends("ab cd. ef\ngh! “ij?” kl") == ["cd.", "gh!", "“ij?”", "kl"]
    assert ends("a heading\n\nab cd.") == ["heading", "cd."]
    assert ends("ab cd\nef gh\n") == ["cd", "gh"]
    assert ends("አበባ። አበበ፧ ab") == ["አበባ።", "አበበ፧", "ab"]


def test_memory_does_not_grow_with_the_recording(tmp_path):
    """Never more than a window of samples is read, however long the recording."""
    texts, seconds = book(tmp_path, 60)
    with alignment.WindowReader(tmp_path / "a.wav", HEAR) as reader:
        reader.samples_of = Mock(wraps=reader.samples_of)
        aligned = alignment.LongAligner(reader, read_tokens(" ".join(texts), HEAR, "en")).run()
    assert len(aligned) == len(" ".join(texts).split())
    asked = [end_s - start_s for (start_s, end_s), _ in reader.samples_of.call_args_list]
    assert max(asked) <= alignment.WINDOW_S + 1 and sum(asked) < 2 * seconds


# --- the plan: cuts are in pauses, and every second is accounted for ----------------------------

CONFIG = SegmentConfig(min_s=1.0, max_s=5.0, least_pause_s=0.1, margin_s=0.15)


def recording(words: list[tuple[str, float, float]], lost: frozenset = frozenset()):
    """(tokens, aligned, seconds) of (word, seconds it takes, seconds of silence after it)."""
    tokens, aligned = [], []
    after = Span(start_s=0.0, end_s=0.0)
    for number, (text, length_s, pause_s) in enumerate(words):
        before, start_s, end_s = after, after.end_s, after.end_s + length_s
        after = Span(start_s=end_s, end_s=end_s + pause_s)
        token = Token(text=text, ids=(1,), ends_sentence=text.endswith("."))
        tokens.append(token)
        if number not in lost:
            place = {"number": number, "start_s": start_s, "end_s": end_s}
            aligned.append(AlignedToken(token=token, **place, before=before, after=after))
    return tokens, aligned, after.end_s


def plan(words, config: SegmentConfig = CONFIG, lost: frozenset = frozenset()):
    tokens, aligned, total_s = recording(words, lost)
    clips, losses = plan_segments(aligned, tokens, total_s, config)
    spans = sorted([*clips, *losses], key=lambda s: (s.start_s, s.end_s))
    assert sum(s.seconds for s in spans) == pytest.approx(total_s)
    for before, after in itertools.pairwise(s for s in spans if s.seconds):
        assert before.end_s == pytest.approx(after.start_s), "they cover it without overlap"
    return clips, losses


def test_each_sentence_becomes_a_clip_with_a_margin():
    clips, losses = plan([("ab", 1, 0), ("cd.", 1, 0.3), ("ef", 1, 0), ("gh.", 1, 0)])
    assert [c.text for c in clips] == ["ab cd.", "ef gh."] and losses == []
    assert clips[0].end_s == pytest.approx(2.15)  # the middle of the pause
    clips, losses = plan([("ab.", 2, 0.9), ("cd.", 2, 0)])
    assert [c.seconds for c in clips] == pytest.approx([2.15, 2.15])
    assert [loss.seconds for loss in losses] == pytest.approx([0.6])
    assert losses[0].reason.startswith("a pause")


def test_short_sentences_are_joined_and_long_ones_cut_at_their_pauses_or_lost():
    clips, losses = plan([("no.", 0.4, 0.2), ("indeed", 2, 0.2), ("not.", 1, 0.2), ("oh.", 0.4, 0)])
    assert [c.text for c in clips] == ["no. indeed not. oh."] and losses == []
    clips, _ = plan([("one", 2, 0.02), ("two,", 2, 0.3), ("three", 2, 0.02), ("four.", 2, 0)])
    assert [c.text for c in clips] == ["one two,", "three four."]
    clips, losses = plan([("a", 3, 0), ("b.", 3, 0.3), ("c.", 2, 0)])
    assert [c.text for c in clips] == ["c."]
    assert losses[0].seconds == pytest.approx(6.15)
    assert losses[0].reason == "no pauses make a clip of 1.0 to 5.0 s with: a b."


def test_random_recordings_are_covered_and_clips_keep_their_limits():
    rng = random.Random(1)
    for _ in range(40):
        words = [
            (f"w{i}" + "." * (rng.random() < 0.3), rng.uniform(0.1, 1.5), rng.choice([0, 0.2, 2]))
            for i in range(40)
        ]
        lost = frozenset(rng.sample(range(40), 4))
        clips, _ = plan(words, lost=lost)
        assert all(CONFIG.min_s <= c.seconds <= CONFIG.max_s for c in clips)
        said = " ".join(c.text for c in clips).split()
        assert said == [w for w, _, _ in words if w in said]
        assert not {f"w{i}" for i in lost} & set(said)


def test_no_clip_includes_words_that_were_not_aligned_or_begins_within_the_one_before():
    clips, losses = plan([("a.", 2, 0.3), ("b.", 2, 0.3), ("c.", 2, 0)], lost=frozenset({1}))
    assert [c.text for c in clips] == ["a.", "c."]
    assert [loss.reason for loss in losses] == ["not recognised as written: b."]
    # Where no pause separates aligned words from missing ones, the next pause begins the clip.
    clips, losses = plan([("lost", 1, 0), ("a", 1, 0.3), ("b.", 2, 0)], lost=frozenset({0}))
    assert [c.text for c in clips] == ["b."]
    assert "not recognised as written: lost" in losses[0].reason and "with: a" in losses[0].reason


def test_words_never_spoken_are_reported_without_seconds_and_none_at_all_is_one_loss():
    tokens, aligned, total_s = recording([("a.", 2, 0.2), ("c.", 2, 0)])
    tokens.insert(1, Token(text="b.", ids=(1,), ends_sentence=True))
    aligned[1] = AlignedToken(**(vars(aligned[1]) | {"number": 2}))
    clips, losses = plan_segments(aligned, tokens, total_s, CONFIG)
    assert [c.text for c in clips] == ["a.", "c."] and sum(c.seconds for c in clips) == total_s
    (loss,) = losses
    assert (loss.seconds, loss.reason) == (0, "not recognised as written: b.")
    clips, losses = plan_segments([], tokens, total_s, CONFIG)
    assert clips == [] and [(s.start_s, s.end_s) for s in losses] == [(0, total_s)]


def clip_s(first: segmentation.Boundary, last: segmentation.Boundary) -> float:
    return last.ending_s(CONFIG.margin_s) - first.beginning_s(CONFIG.margin_s)


def best_by_trying(places: list, config: SegmentConfig) -> float:
    """The most seconds that any choice of cuts can keep, found by trying all of them."""
    best = 0.0
    for chosen in itertools.product((0, 1, 2), repeat=len(places)):  # no cut, cut, gap after
        edges = [(place, cut) for place, cut in zip(places, chosen) if cut]
        kept = 0.0
        for (first, how), (last, _) in itertools.pairwise(edges):
            fits = config.min_s <= clip_s(first, last) <= config.max_s
            if how == 1 and fits and first.allowed and last.allowed:
                kept += clip_s(first, last)
        best = max(best, kept)
    return best


def test_no_choice_of_cuts_keeps_more():
    rng = random.Random(0)
    for _ in range(25):
        words = [
            (f"w{i}" + rng.choice(["", "."]), rng.uniform(0.2, 3), rng.choice([0, 0.05, 0.2, 0.5]))
            for i in range(6)
        ]
        _, aligned, total_s = recording(words)
        config = SegmentConfig(min_s=1.0, max_s=5.0, longest_pause_s=99)
        places = segmentation.boundaries(aligned, total_s, config)
        clips = segmentation.choose_clips(places, config)
        kept = sum(clip_s(places[i], places[j]) for i, j in clips)
        assert kept == pytest.approx(best_by_trying(places, config), abs=0.35)  # pauses cost a bit


def test_other_rates_channels_and_coding_give_the_same_result(tmp_path):
    texts, _ = book(tmp_path / "in", 5)
    wave, _ = soundfile.read(tmp_path / "in/a.wav")
    (tmp_path / "in/a.wav").unlink()
    wave = np.interp(np.arange(0, len(wave), RATE / 48000), np.arange(len(wave)), wave)
    soundfile.write(tmp_path / "in/a.flac", np.stack([wave, wave], axis=1), 48000, "PCM_24")
    rows, _ = cut(tmp_path)
    assert [text for _, text in rows] == texts
    info = soundfile.info(tmp_path / "out/wavs/a_0001.wav")
    assert (info.samplerate, info.channels, info.subtype) == (48000, 1, "PCM_16")
