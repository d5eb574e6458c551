"""Where errors are: each kind is distinguished from the others, and every word is accounted for."""

import pytest

from kit.audio.recognizer import edit_distance
from kit.inference.evaluate import KINDS, align_words, count_kinds, word_stats

TEXT = "my mother bought fresh bread from the market"
TRANSCRIPTS = {
    "left out": "my mother bought bread from the market",
    "doubled": "my mother bought bought fresh bread from the market",
    "added": "my mother bought some fresh bread from the market",
    "merged": "my mother bought freshbread from the market",
    "split": "my mo ther bought fresh bread from the market",
    "replaced": "my mother bought fresh grapes from the market",
    "misspelt": "my mother bought fresh breat from the market",
}


@pytest.mark.parametrize(("kind", "transcript"), TRANSCRIPTS.items())
def test_each_kind_is_distinguished_from_the_others(kind, transcript):
    pairs = align_words(TEXT, transcript)
    assert [pair.kind for pair in pairs if pair.kind] == [kind]
    assert [word for pair in pairs for word in pair.words] == TEXT.split()
    assert [word for pair in pairs for word in pair.recognized] == transcript.split()
    assert set(TRANSCRIPTS) == set(KINDS)


def test_the_word_that_was_joined_or_doubled_is_named():
    (merged,) = (p for p in align_words(TEXT, TRANSCRIPTS["merged"]) if p.kind)
    assert (merged.words, merged.recognized) == (("fresh", "bread"), ("freshbread",))
    (doubled,) = (p for p in align_words(TEXT, TRANSCRIPTS["doubled"]) if p.kind)
    assert (doubled.words, doubled.recognized) == (("bought",), ("bought", "bought"))


def test_a_short_word_left_out_after_a_long_one_is_not_merged():
    (pair,) = (p for p in align_words("after breakfast a walk", "after breakfast walk") if p.kind)
    assert (pair.words, pair.kind) == (("a",), "left out")


def test_punctuation_is_no_error_and_silence_leaves_all_out():
    assert not any(pair.kind for pair in align_words("ሰላም፣ ለሁሉም!", "ሰላም ለሁሉም"))
    assert count_kinds(align_words(TEXT, "")) == {**dict.fromkeys(KINDS, 0), "left out": 8}
    assert align_words("", "") == []


def test_it_is_never_dearer_than_the_plain_distance_over_words():
    transcript = "mother my bought the the fresh bread form market now"
    wrong = sum(bool(pair.kind) for pair in align_words(TEXT, transcript))
    assert 0 < wrong <= edit_distance(TEXT.split(), transcript.split())


def test_the_word_that_is_wrong_most_often_comes_first():
    pairs = align_words("two apples and two pears", "two apples and ten pears")
    pairs += align_words("two plums", "plums")
    first, *others = word_stats(pairs)
    assert (first.word, first.count, first.wrong) == ("two", 3, 2)
    assert set(first.kinds) == {"replaced", "left out"} and "ten" in first.recognized
    assert not any(record.wrong for record in others)
