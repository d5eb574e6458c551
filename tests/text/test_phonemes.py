"""Phonemes by espeak-ng: known words, punctuation kept, the same lines the same phonemes."""

import pytest

from kit.text.phonemes import phonemize


def test_phonemes_keep_the_line_and_its_punctuation():
    lines = ["hello, world. how are you?", "", "one; two: three", "hello"]
    spoken = phonemize(lines, "en")
    assert len(spoken) == 4 and spoken[1] == ""
    assert spoken[0].startswith(f"{spoken[3]}, wˈɜːld. ") and spoken[0].endswith("?")
    assert [c for c in spoken[2] if c in ";:"] == [";", ":"]


def test_amharic_homophones_sound_alike_and_no_language_marks_are_left():
    one, two, mixed = phonemize(["ሰላም", "ሠላም", "ሰላም abc"], "am")
    assert one == two and mixed.startswith(one) and "(" not in mixed


def test_the_order_of_lines_changes_nothing():
    lines = ["read it", "two words", "ten"]
    assert phonemize(lines[::-1], "en")[::-1] == phonemize(lines, "en")


def test_an_unknown_voice_is_told():
    with pytest.raises(RuntimeError, match=r"no phonemes for `zz`: .*no voice zz"):
        phonemize(["a"], "zz")
