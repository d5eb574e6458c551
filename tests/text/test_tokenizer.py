"""What a tokenizer covers, and what it refuses."""

import pytest
from helpers import manifest, tokenizer

from kit.base.errors import SpeechError
from kit.settings import TokenizerConfig
from kit.text.normalize import normalize
from kit.text.tokenizer import Tokenizer
from kit.text.train_tokenizer import train_tokenizer


def test_start_and_stop_are_no_pieces():
    t = tokenizer()
    assert (t.start, t.stop, t.vocab_size) == (t.vocab_size - 2, t.vocab_size - 1, len(t.model) + 2)
    assert max(i for row in manifest() for i in t.encode(row.text)) < t.start


def test_uncovered_characters_are_named_and_signs_nobody_speaks_are_left_out():
    known, t = next(row.text for row in manifest() if row.split == "train"), tokenizer()
    assert t.uncovered(known) == [] and t.uncovered(f"{known} Z🙂") == ["Z", "🙂"]
    assert t.encode_checked(f"🙂 {known} 🎉") == t.encode(known)


def test_only_marks_that_are_often_not_written_are_left_out(tmp_path):
    lines = [normalize(text, "hi") for text in ("डर के बाद क्या", "रात को क्टर", "محمد")]
    config = TokenizerConfig(vocab_size=400)
    t = Tokenizer(train_tokenizer(10 * lines, tmp_path / "t.model", config))
    assert t.encode_checked("डर \u2764\ufe0f") == t.encode("डर")
    assert t.encode_checked("مُحَمَّد") == t.encode("محمد")
    with pytest.raises(SpeechError, match="training text had no ॉ"):
        t.encode_checked(normalize("डॉक्टर", "hi"))  # डक्टर is another word


REFUSED = dict.fromkeys(("", "።", "🙂🎉", "— «»", "\u200b", "́"), "at least one word")
REFUSED |= {"привет": "had no .*[Uu]se letters", "ሰላም Q": "had no q.*[Uu]se letters"}


@pytest.mark.parametrize(("text", "facts"), REFUSED.items())
def test_what_cannot_be_said_names_the_letters_and_the_fix(text, facts):
    with pytest.raises(SpeechError, match=facts):
        tokenizer().encode_checked(normalize(text))


def test_a_file_that_is_no_tokenizer_is_reported(tmp_path):
    path = tmp_path / "other.model"
    with pytest.raises(SpeechError, match=r"other\.model.*01_data_prep"):
        Tokenizer(path)
    whole = tokenizer().file_bytes()
    kinds = {"empty": b"", "of an unknown kind": b"not a model", "zip": b"PK\x03\x04" + bytes(40)}
    for kind, data in (kinds | {"damaged": whole[: len(whole) // 2]}).items():
        path.write_bytes(data)
        with pytest.raises(SpeechError, match=rf"other\.model.*{kind}"):
            Tokenizer(path)
