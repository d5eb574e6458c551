"""Cuts are in pauses, clips have the right length, and every second is accounted for."""

import itertools
import random

import pytest

from kit.base.errors import KitError
from kit.dataset.alignment import AlignedToken, Pause, Token
from kit.dataset.segmentation import (
    SegmentConfig,
    boundaries,
    choose_clips,
    plan_segments,
    split_runs,
)

CONFIG = SegmentConfig(min_s=1.0, max_s=5.0, least_pause_s=0.1, margin_s=0.15)


def recording(words: list[tuple[str, float, float]], lost: frozenset = frozenset()):
    """(tokens, aligned, seconds) of (word, seconds it takes, seconds of silence after it)."""
    tokens, times, now = [], [], 0.0
    for text, length_s, pause_s in words:
        tokens.append(Token(text=text, ids=(1,), ends_sentence=text.endswith(".")))
        times.append((now, now + length_s, pause_s))
        now += length_s + pause_s
    aligned = []
    for number, (start_s, end_s, pause_s) in enumerate(times):
        before_s = times[number - 1][2] if number else 0.0
        if number not in lost:
            aligned.append(
                AlignedToken(
                    token=tokens[number],
                    number=number,
                    start_s=start_s,
                    end_s=end_s,
                    before=Pause(start_s=start_s - before_s, end_s=start_s),
                    after=Pause(start_s=end_s, end_s=end_s + pause_s),
                )
            )
    return tokens, aligned, now


def plan(words, config: SegmentConfig = CONFIG, lost: frozenset = frozenset()):
    tokens, aligned, total_s = recording(words, lost)
    clips, losses = plan_segments(aligned, tokens, total_s, config)
    spans = sorted([*clips, *losses], key=lambda s: (s.start_s, s.end_s))
    assert sum(s.seconds for s in spans) == pytest.approx(total_s)
    for before, after in itertools.pairwise(s for s in spans if s.seconds):
        assert before.end_s == pytest.approx(after.start_s), "they cover it without overlap"
    return clips, losses


def test_each_sentence_becomes_a_clip():
    words = [("ab", 1, 0), ("cd.", 1, 0.3), ("ef", 1, 0), ("gh.", 1, 0)]
    clips, losses = plan(words)
    assert [c.text for c in clips] == ["ab cd.", "ef gh."] and losses == []
    assert clips[0].end_s == pytest.approx(2.15)  # the middle of the pause


def test_a_long_pause_leaves_a_margin_and_the_rest_is_reported():
    clips, losses = plan([("ab.", 2, 0.9), ("cd.", 2, 0)])
    assert [c.seconds for c in clips] == pytest.approx([2.15, 2.15])
    assert [loss.seconds for loss in losses] == pytest.approx([0.6])
    assert losses[0].reason.startswith("a pause")


def test_short_sentences_are_joined_with_a_neighbour():
    clips, losses = plan([("no.", 0.4, 0.2), ("indeed", 2, 0.2), ("not.", 1, 0.2), ("oh.", 0.4, 0)])
    assert [c.text for c in clips] == ["no. indeed not. oh."] and losses == []


def test_a_sentence_too_long_is_cut_at_its_pauses():
    words = [("one", 2, 0.02), ("two,", 2, 0.3), ("three", 2, 0.02), ("four.", 2, 0)]
    clips, _ = plan(words)
    assert [c.text for c in clips] == ["one two,", "three four."]


def test_a_sentence_too_long_without_pauses_is_lost_with_its_words():
    clips, losses = plan([("a", 3, 0), ("b.", 3, 0.3), ("c.", 2, 0)])
    assert [c.text for c in clips] == ["c."]
    assert losses[0].seconds == pytest.approx(6.15)
    assert losses[0].reason == "no pauses make a clip of 1.0 to 5.0 s with: a b."


def test_no_clip_includes_words_that_were_not_aligned():
    words = [("a.", 2, 0.3), ("b.", 2, 0.3), ("c.", 2, 0)]
    clips, losses = plan(words, lost=frozenset({1}))
    assert [c.text for c in clips] == ["a.", "c."]
    assert [loss.reason for loss in losses] == ["not recognised as written: b."]


def test_words_never_spoken_are_reported_without_seconds():
    tokens, aligned, total_s = recording([("a.", 2, 0.2), ("c.", 2, 0)])
    tokens.insert(1, Token(text="b.", ids=(1,), ends_sentence=True))
    aligned[1] = AlignedToken(**(vars(aligned[1]) | {"number": 2}))
    clips, losses = plan_segments(aligned, tokens, total_s, CONFIG)
    assert [c.text for c in clips] == ["a.", "c."] and sum(c.seconds for c in clips) == total_s
    assert [(loss.seconds, loss.reason) for loss in losses] == [
        (0, "not recognised as written: b.")
    ]


def test_no_clip_begins_within_the_word_before_it():
    """Where no pause separates aligned words from missing ones, the next pause begins the clip."""
    words = [("lost", 1, 0), ("a", 1, 0.3), ("b.", 2, 0)]
    clips, losses = plan(words, lost=frozenset({0}))
    assert [c.text for c in clips] == ["b."]
    assert "not recognised as written: lost" in losses[0].reason and "with: a" in losses[0].reason


def test_no_aligned_word_at_all_is_one_loss():
    tokens, _, total_s = recording([("a.", 2, 0.2), ("c.", 2, 0)])
    clips, losses = plan_segments([], tokens, total_s, CONFIG)
    assert clips == [] and [(s.start_s, s.end_s) for s in losses] == [(0, total_s)]
    assert losses[0].reason == "not recognised as written: a. c."


def best_by_trying(words, config: SegmentConfig) -> float:
    """The most seconds that any choice of cuts can keep, found by trying all of them."""
    _, aligned, total_s = recording(words)
    places = boundaries(aligned, total_s, config)
    best = 0.0
    for chosen in itertools.product((0, 1, 2), repeat=len(places)):  # no cut, cut, gap after
        edges = [(i, c) for i, c in enumerate(chosen) if c]
        kept = 0.0
        for (i, how), (j, _) in itertools.pairwise(edges):
            length_s = places[j].ending_s(config.margin_s) - places[i].beginning_s(config.margin_s)
            fits = config.min_s <= length_s <= config.max_s
            if how == 1 and fits and places[i].allowed and places[j].allowed:
                kept += length_s
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
        places = boundaries(aligned, total_s, config)
        kept = sum(
            places[j].ending_s(config.margin_s) - places[i].beginning_s(config.margin_s)
            for i, j in choose_clips(places, config)
        )
        assert kept == pytest.approx(best_by_trying(words, config), abs=0.35)  # pauses cost a bit


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
        assert said == [w for w, _, _ in words if w in said] and not {f"w{i}" for i in lost} & set(
            said
        )


def test_a_run_ends_at_a_gap():
    tokens, aligned, _ = recording([("a", 1, 0.3), ("b", 1, 1.5), ("c", 1, 0)])
    assert [[h.token.text for h in run] for run in split_runs(aligned, tokens, CONFIG)] == [
        ["a", "b"],
        ["c"],
    ]


@pytest.mark.parametrize(
    "wrong", [{"min_s": 0.0}, {"min_s": 15.0}, {"least_pause_s": 0.0}, {"margin_s": -0.1}]
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(KitError, match=next(iter(wrong))):
        SegmentConfig(**wrong)
