"""Clips whose text is not what is said sink to the bottom, and only those."""

import dataclasses
import math
import random
import re
from unittest.mock import Mock, call

import numpy as np
import pytest
import soundfile
import torch
from tones import LETTERS, RATE, ToneRecognizer, noisy, say, silence

from kit.base.errors import DatasetError
from kit.dataset import alignment
from kit.dataset.alignment import Alignment, align_clips, align_clips_cached
from kit.dataset.checks import lowest_score, match
from kit.dataset.manifest import Utterance
from kit.settings import AlignConfig

HEAR = ToneRecognizer().eval()
CONFIG = AlignConfig()
PLACE = {"id": "", "file": "metadata.csv", "line": 1, "split": "train"}
ROW = Utterance(**PLACE, audio="clip.wav", text="dab", speaker="", seconds=1.0)


def score(wave: np.ndarray, text: str) -> Alignment:
    output = HEAR.recognize([torch.from_numpy(noisy(wave))], RATE)[0]
    return alignment.alignment_score(HEAR, output, text)


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> tuple[list[Utterance], dict[str, set[str]]]:
    """A hundred clips, five of each kind of mistake among them."""
    folder, rng = tmp_path_factory.mktemp("clips"), random.Random(0)
    texts = [" ".join("".join(rng.sample(LETTERS, 4)) for _ in range(5)) for _ in range(100)]
    rows, wrong = [], {"swapped": set(), "word left out": set(), "cut short": set()}
    for i, text in enumerate(texts):
        wave, kind = noisy(say(text), seed=i), None
        if i < 5:
            kind, text = "swapped", texts[(i + 1) % 5]
        elif i < 10:
            kind, text = "word left out", " ".join(text.split()[: i - 5] + text.split()[i - 4 :])
        elif i < 15:
            kind, wave = "cut short", wave[: 3 * len(wave) // 4]
        path = folder / f"{i}.wav"
        soundfile.write(path, wave, RATE)
        own = {"id": str(i), "audio": str(path), "text": text, "line": i + 1}
        rows.append(dataclasses.replace(ROW, **own, seconds=len(wave) / RATE))
        if kind:
            wrong[kind].add(str(i))
    return rows, wrong


@pytest.mark.parametrize("text", ["dabble", "dab mail lime", "lime dab", "dab", "lime"])
def test_any_other_text_scores_far_lower(text):
    wave = np.concatenate([say("dab"), silence(0.1), say("lime")])
    right = score(wave, "dab, lime!")
    assert right.score > -0.3 and not right.reason
    assert score(wave, text).score < right.score - 1


UNFIT = {"abcdefghijklm" * 9: r"117 characters do not fit into \d+ frames", "ሰላም": "no letter of"}
UNFIT["aa" * 10] = "20 characters do not fit"  # a letter said twice needs a frame between


@pytest.mark.parametrize("text", UNFIT)
def test_a_text_that_cannot_be_aligned_scores_minus_infinity_with_the_reason(text):
    result = score(say("abcdef"), text)
    assert result.score == -math.inf and re.search(UNFIT[text], result.reason)


def test_precisely_the_wrong_clips_are_refused(clips):
    rows, wrong = clips
    refused = match(rows, align_clips(rows, HEAR, CONFIG), CONFIG).mismatched
    assert {f.id for f in refused} == set().union(*wrong.values()) and len(refused) == 15
    first = refused[0]
    assert first.kind == "mismatch" and first.file == "metadata.csv" and first.line == 1
    assert first.seconds == rows[0].seconds and "text and audio do not match" in first.reason


def test_a_recording_that_cannot_be_read_is_refused_with_its_reason(clips, tmp_path):
    (tmp_path / "bad.wav").write_bytes(b"RIFF" + b"\0" * 60)
    bad = dataclasses.replace(clips[0][20], id="bad", audio=str(tmp_path / "bad.wav"))
    rows = [bad, *clips[0][21:30]]
    (refused,) = match(rows, align_clips(rows, HEAR, CONFIG), CONFIG).mismatched
    assert refused.id == "bad" and "bad.wav" in refused.reason
    assert align_clips([bad], HEAR, CONFIG)[0].score == -math.inf
    gone = dataclasses.replace(bad, audio=str(tmp_path / "gone.wav"))
    with pytest.raises(DatasetError, match=r"gone\.wav"):  # its score would be kept
        align_clips([gone], HEAR, CONFIG)
    assert align_clips([], HEAR, CONFIG) == []


def scored(*scores: float) -> list[Alignment]:
    return [Alignment(score=s) for s in scores]


def test_a_recogniser_of_another_language_rejects_nothing_and_the_note_says_so():
    with pytest.raises(DatasetError, match=r"typical clip scores -7\.00.*01_data_prep"):
        lowest_score(scored(-7.0, -6.0, -8.0), CONFIG)
    judged = match([ROW] * 3, scored(-1.2, -1.1, -9.0), CONFIG)
    assert not judged.judged and judged.mismatched == []
    assert judged.note.startswith("not judged: The typical clip scores -1.20")


def clips_of(learnt: list[float], unseen: list[float]):
    """Rows of two splits with these scores."""
    splits = [("train", i) for i in range(len(learnt))]
    splits += [("held_out", i) for i in range(len(unseen))]
    rows = [dataclasses.replace(ROW, id=f"{split}-{i}", split=split) for split, i in splits]
    return rows, scored(*learnt, *unseen)


# Of 568 recordings of a person: what a recogniser that had memorised the others gave 13 it had
# never seen. Whisper found all thirteen texts right.
PERSON = [-2.33, -1.29, -0.99, -0.87, -0.81, -0.75, -0.72, -0.71, -0.64, -0.55, -0.48, -0.3, -0.26]


def test_new_clips_are_not_rejected_for_scoring_below_memorised_ones():
    judged = match(*clips_of([0.0] * 555, PERSON), CONFIG)
    assert judged.judged and len(judged.mismatched) <= 1  # eleven, by the limit of the others
    with_wrong_texts = clips_of([0.0] * 50 + [-0.9], [*PERSON, -6.0, -math.inf])
    refused = {finding.id for finding in match(*with_wrong_texts, CONFIG).mismatched}
    assert refused >= {"train-50", "held_out-13", "held_out-14"} and len(refused) <= 4


def test_alignments_are_kept_until_a_text_a_clip_or_the_recogniser_changes(clips, tmp_path):
    rows, kept = clips[0][:6], tmp_path / "aligned.json"
    ticks = []

    def align(rows, config=CONFIG, sounds="abcdef") -> list[Alignment]:
        tick = lambda *now: ticks.append(now)  # noqa: E731
        return align_clips_cached(rows, list(sounds), HEAR, config, kept, tick)

    scores = [a.score for a in align_clips(rows, HEAR, CONFIG)]
    first = align(rows)
    assert [a.score for a in first] == scores and align(rows) == first and len(ticks) == 1
    assert align(rows, AlignConfig(hopeless=-2.0)) and len(ticks) == 2
    assert align([dataclasses.replace(rows[0], text=rows[1].text), *rows[1:]]) and len(ticks) == 3
    assert align(rows, sounds="abcdeg") == first and len(ticks) == 4
    kept.write_text("{", encoding="utf-8")
    assert align(rows) == first and len(ticks) == 5


def test_alignments_resume_after_a_kill(clips, tmp_path, monkeypatch):
    rows = clips[0][:90]
    sounds = [row.id for row in rows]
    config = AlignConfig(batch=8)  # three parts
    whole = tmp_path / "whole.json"
    wanted = align_clips_cached(rows, sounds, HEAR, config, whole)
    kept = tmp_path / "kept.json"
    killed = Mock(side_effect=[None, KeyboardInterrupt])
    with pytest.raises(KeyboardInterrupt):
        align_clips_cached(rows, sounds, HEAR, config, kept, killed)
    aligned = Mock(wraps=align_clips)
    monkeypatch.setattr(alignment, "align_clips", aligned)
    reported = Mock()
    assert align_clips_cached(rows, sounds, HEAR, config, kept, reported) == wanted
    assert aligned.call_count == 1, "two parts were whole"
    assert reported.mock_calls == [call(32, 90), call(64, 90), call(90, 90)]
    assert kept.read_bytes() == whole.read_bytes()
    assert not (tmp_path / "kept.parts").exists()


def test_where_text_and_sound_part_is_pointed_at_and_silence_costs_nothing():
    wave = np.concatenate([say("abcdefgh"), say("mmmm"), say("abcdefgh")])
    assert score(wave, "abcdefgh abcdefgh").worst_at_s == pytest.approx(1.3, abs=0.3)
    long = np.concatenate([silence(1.0), say("dab lime"), silence(1.0)])
    assert score(long, "dab lime").score > -0.3


def test_the_lowest_score_follows_the_clips_and_those_it_cannot_judge_stay_with_a_note():
    assert lowest_score(scored(*[-0.01] * 50), CONFIG) == pytest.approx(-0.41)
    unsure = scored(*np.random.default_rng(0).normal(-0.5, 0.2, 200), -9.0, -math.inf)
    assert -1.9 < lowest_score(unsure, CONFIG) < -1.5, "more room"
    judged = match(*clips_of([-0.01] * 20 + [-4.0], [-1.5, -1.9, -2.4, -math.inf]), CONFIG)
    assert [finding.id for finding in judged.mismatched] == ["train-20", "held_out-3"]
    assert judged.note.startswith("2 of 25 clips") and judged.limits.keys() == {"trained on"}
    assert "3 that the recogniser was not trained on" in judged.note
