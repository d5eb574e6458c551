"""Amharic spelling, numbers as words, and what the tokenizer can and cannot cover."""

import random

import pytest
import sentencepiece
from helpers import manifest, tokenizer, world

from kit.text import (
    TextError,
    Tokenizer,
    ethiopic_numeral,
    letters,
    normalize,
    number_to_words,
    tokenizer_report,
    train_tokenizer,
)


def train_text() -> str:
    return next(row.text for row in manifest() if row.split == "train")


NORMALIZED = [
    # letters that sound alike, one spelling
    ("ሐገር", "ሀገር"),
    ("ኀይል", "ሀይል"),
    ("ሃገር", "ሀገር"),
    ("ሓሳብ", "ሀሳብ"),
    ("ኃይል", "ሀይል"),
    ("ኻያ", "ሀያ"),
    ("ሠላም", "ሰላም"),
    ("ሥራ", "ስራ"),
    ("ንጉሥ", "ንጉስ"),
    ("ዐይን", "አይን"),
    ("ዓለም", "አለም"),
    ("ኣበበ", "አበበ"),
    ("ዕለት", "እለት"),
    ("ፀሐይ", "ጸሀይ"),
    ("ፅሑፍ", "ጽሁፍ"),
    ("ዒላማ", "ኢላማ"),
    # punctuation
    ("ሰላም፡ለሁሉ።", "ሰላም ለሁሉ."),
    ("አበበ፣ ከበደ", "አበበ, ከበደ"),
    ("አበበ፥ ከበደ", "አበበ, ከበደ"),
    ("መጣ፤ ሄደ", "መጣ; ሄደ"),
    ("እንዲህ፦ አለ", "እንዲህ: አለ"),
    ("መጣ፧", "መጣ?"),
    ("«ሰላም» (አለ)", "ሰላም አለ"),
    ("  ሰላም \t\n ለሁሉ ", "ሰላም ለሁሉ"),
    # figures
    ("0", "ዜሮ"),
    ("7", "ሰባት"),
    ("10", "አስር"),
    ("11", "አስራ አንድ"),
    ("20", "ሀያ"),
    ("99", "ዘጠና ዘጠኝ"),
    ("100", "አንድ መቶ"),
    ("205", "ሁለት መቶ አምስት"),
    ("1000", "አንድ ሺህ"),
    ("1234", "አንድ ሺህ ሁለት መቶ ሰላሳ አራት"),
    ("15,000", "አስራ አምስት ሺህ"),
    ("1,000,000", "አንድ ሚሊዮን"),
    ("2000000001", "ሁለት ቢሊዮን አንድ"),
    ("ገጽ5ነው", "ገጽ አምስት ነው"),
    ("0251911234567", "ዜሮ ሁለት አምስት አንድ ዘጠኝ አንድ አንድ ሁለት ሶስት አራት አምስት ስድስት ሰባት"),
    # Ethiopic numerals
    ("፩", "አንድ"),
    ("፲፩", "አስራ አንድ"),
    ("፻", "አንድ መቶ"),
    ("፳፻፲፯", "ሁለት ሺህ አስራ ሰባት"),
    ("በ፲፱፻፹፰ዓ.ም.", "በ አንድ ሺህ ዘጠኝ መቶ ሰማንያ ስምንት አ.ም."),
    ("፼", "አስር ሺህ"),
]


@pytest.mark.parametrize(("raw", "wanted"), NORMALIZED)
def test_amharic_is_normalised(raw, wanted):
    assert normalize(raw) == wanted
    assert normalize(wanted) == wanted  # nothing is left to do


NUMERALS = {"፩": 1, "፲": 10, "፺፱": 99, "፻፩": 101, "፪፻": 200, "፲፻": 1000, "፳፻፲፯": 2017}
NUMERALS |= {"፲፱፻፺፱": 1999, "፼": 10_000, "፼፩": 10_001, "፲፼": 100_000, "፻፼": 1_000_000}
NUMERALS |= {"፪፻፼": 2_000_000, "፲፪፼፴፬፻፶፮": 123_456, "፼፼": 100_000_000}


@pytest.mark.parametrize(("numeral", "value"), NUMERALS.items())
def test_ethiopic_numerals_have_their_value(numeral, value):
    assert ethiopic_numeral(numeral) == value


def test_every_number_up_to_ten_thousand_has_its_own_words():
    words = {number_to_words(n) for n in range(10_001)}
    assert len(words) == 10_001 and not any("_" in w or "  " in w for w in words)


@pytest.mark.parametrize("text", ["ስልክ 0911234567", "0911-23-45-67", "ቁጥር 007"])
def test_a_leading_zero_is_read_out(text):
    # A phone number is no amount: its first digit must not vanish.
    assert "ዜሮ" in normalize(text)


def test_a_long_number_keeps_its_distance_from_letters():
    assert normalize("ስልክ1234567890123ነው").split()[0] == "ስልክ"


def test_other_languages_keep_letters_and_figures():
    assert normalize("“Hello”,  WORLD 42!", "en") == "hello , world 42!"
    assert normalize("ሠላም", "ti") == "ሠላም"


def test_composed_and_decomposed_letters_are_one():
    assert normalize("cafe\u0301", "fr") == normalize("café", "fr") == "café"


def test_letters_drops_punctuation_but_keeps_marks():
    assert letters("ሰላም, ለሁሉ! (42)") == "ሰላም ለሁሉ 42"
    assert letters("!?… 🙂") == ""


def test_round_trip_on_unseen_text_is_sentencepieces_own():
    mine = tokenizer()
    own = sentencepiece.SentencePieceProcessor(model_file=str(world() / "tokenizer.model"))
    unseen = [row.text for row in manifest() if row.split != "train"]
    rng = random.Random(0)
    alphabet = sorted(set("".join(unseen)) - {" "})
    words = ["".join(rng.choices(alphabet, k=rng.randint(1, 9))) for _ in range(200)]
    for text in [*unseen, " ".join(words), "abc ñ 🙂 中文"]:
        ids = mine.encode(text)
        assert ids == own.encode(text) and mine.decode(ids) == own.decode(ids) == text


def test_start_and_stop_are_no_pieces():
    t = tokenizer()
    assert (t.start, t.stop, t.vocab_size) == (t.vocab_size - 2, t.vocab_size - 1, len(t.model) + 2)
    assert max(i for row in manifest() for i in t.encode(row.text)) < t.start


def test_uncovered_characters_are_named():
    known = train_text()
    assert tokenizer().uncovered(known) == []
    assert tokenizer().uncovered(f"{known} Z🙂") == ["Z", "🙂"]


@pytest.mark.parametrize("text", ["", "   ", "።", "...!?", "🙂🎉", "— «»", "\u200b"])
def test_nothing_to_say_is_told(text):
    with pytest.raises(TextError, match="type at least one word"):
        tokenizer().encode_checked(normalize(text))


def test_marks_without_letters_are_nothing_to_say():
    with pytest.raises(TextError):
        tokenizer().encode_checked("\u0301")


@pytest.mark.parametrize("text", ["hello", "привет", "中文", "ሰላም Q", "שלום", "٣abc"])
def test_another_script_names_the_letters_and_the_cure(text):
    with pytest.raises(TextError, match=r"never heard .* Spell it with letters"):
        tokenizer().encode_checked(normalize(text))


def test_signs_nobody_speaks_are_left_out():
    known = train_text()
    t = tokenizer()
    assert t.encode_checked(f"🙂 {known} 🎉") == t.encode(known)


def test_a_missing_tokenizer_names_the_notebook(tmp_path):
    with pytest.raises(TextError, match="01_data_prep"):
        Tokenizer(tmp_path / "none.model")


@pytest.mark.parametrize("data", [b"", b"not a model", "half"], ids=["empty", "junk", "truncated"])
def test_a_damaged_tokenizer_is_told(tmp_path, data):
    whole = (world() / "tokenizer.model").read_bytes() if tokenizer() else b""
    path = tmp_path / "damaged.model"
    path.write_bytes(whole[: len(whole) // 2] if data == "half" else data)
    with pytest.raises(TextError, match=r"damaged\.model is damaged"):
        Tokenizer(path)


def test_the_same_lines_give_the_same_model(tmp_path):
    lines = [row.text for row in manifest()]
    one, two = (train_tokenizer(lines, tmp_path / name, 400).read_bytes() for name in "ab")
    assert one == two


@pytest.mark.parametrize("lines", [[], ["", ""]])
def test_no_text_trains_no_tokenizer(tmp_path, lines):
    with pytest.raises(TextError, match="no text"):
        train_tokenizer(lines, tmp_path / "t.model", 400)


def test_too_small_a_vocabulary_is_told(tmp_path):
    with pytest.raises(TextError, match="vocab_size"):
        train_tokenizer(["ሰላም ለሁሉ"], tmp_path / "t.model", 100)


def test_the_report_counts_by_hand():
    texts = ["ሰላም ለሁሉ", "Z"]
    ids = [tokenizer().encode(t) for t in texts]
    report = tokenizer_report(tokenizer(), texts)
    pieces = sum(map(len, ids))
    assert report["tokens_per_word"] == pieces / 3
    assert report["characters_per_token"] == 8 / pieces
    assert report["byte_rate"] > 0 and report["round_trip"] == 1
