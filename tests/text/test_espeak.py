"""Phonemes by espeak-ng: known words, punctuation kept, the same lines the same phonemes."""

import pytest

from kit.base.errors import KitError, SpeechError
from kit.settings import TokenizerConfig
from kit.text import train_tokenizer as training
from kit.text.espeak import _Phonemizer, phonemize
from kit.text.tokenizer import Tokenizer


def test_phonemes_keep_the_line_and_its_punctuation():
    lines = ["hello, world. how are you?", "", "one; two: three", "hello"]
    spoken = phonemize(lines, "en")
    assert len(spoken) == 4 and spoken[1] == ""
    assert spoken[0].startswith(f"{spoken[3]}, wˈɜːld. ") and spoken[0].endswith("?")
    assert [c for c in spoken[2] if c in ";:"] == [";", ":"]


def test_amharic_homophones_sound_alike_and_no_language_marks_are_left():
    one, two, mixed = phonemize(["ሰላም", "ሠላም", "ሰላም abc"], "am")
    assert one == two and mixed.startswith(one) and "(" not in mixed


def test_neither_the_order_of_lines_nor_a_new_process_changes_anything():
    lines = ["read it", "two words", "ten"]
    before = phonemize(lines, "en")
    assert phonemize(lines[::-1], "en")[::-1] == before
    _Phonemizer("en").process.kill()
    _Phonemizer("en").process.wait()
    assert phonemize(lines, "en") == before


def test_after_an_interruption_no_line_gets_the_phonemes_of_another(monkeypatch):
    before = phonemize(["two words"], "en")

    def interrupted():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(_Phonemizer("en").process.stdout, "readline", interrupted)
        phonemize(["read it"], "en")
    assert phonemize(["two words"], "en") == before


SPOKEN = ["hello my friend", "the night is cold", "a friend in the night", "my cold hello"] * 5


def test_a_tokenizer_of_phonemes_says_so_in_its_file_and_spells_in_them(tmp_path):
    config = TokenizerConfig(vocab_size=320, phonemes="en-us")
    tokenizer = Tokenizer(training.train_tokenizer(SPOKEN, tmp_path / "t.model", config))
    assert tokenizer.phonemes == "en-us"
    assert tokenizer.decode(tokenizer.encode("my friend")) == phonemize(["my friend"], "en-us")[0]
    assert tokenizer.encode_checked("night") == tokenizer.encode("knight"), "they sound alike"
    report = training.tokenizer_report(tokenizer, SPOKEN[:4])
    assert report["round_trip"] == 1 and report["byte_rate"] == 0
    with pytest.raises(SpeechError, match="training text had no "):
        tokenizer.encode_checked("ʘ sound")


def test_phonemes_of_an_unknown_voice_and_of_a_file_are_refused(tmp_path):
    with pytest.raises(KitError, match=r"no phonemes for `zz`: .*no voice zz.*en-us") as error:
        phonemize(["a"], "zz")
    assert "KitError" not in str(error.value)  # it comes from a process of its own
    config = TokenizerConfig(phonemes="am")
    with pytest.raises(KitError, match="leave the file out"):
        training.train_fitted_tokenizer([], tmp_path / "t", config, tmp_path / "a.txt")
