"""Amharic: numbers of every size as words, Ethiopic numerals as numbers."""

import random

from kit.text.languages.am import ONES, ethiopic_numeral, number_to_words
from kit.text.normalize import normalize


def test_what_is_no_amount_is_read_digit_by_digit():
    for number in ("0911234567", "0911-23-45-67", "+251 911 234567", "007", "1234567890123"):
        digits = [ONES[int(d)] for d in number if d.isdecimal()]
        assert normalize(f"ስልክ {number}").split() == ["ስልክ", *digits]


def value(words: str) -> int:
    """The number that `words` name: the rule of the words, read the other way round."""
    tens = "አስር ሀያ ሰላሳ አርባ ሀምሳ ስልሳ ሰባ ሰማንያ ዘጠና".split()
    unit = {w: i for i, w in enumerate(ONES)} | {w: 10 * i for i, w in enumerate(tens, 1)}
    unit["አስራ"] = 10
    scales = {"ሺህ": 10**3, "ሚሊዮን": 10**6, "ቢሊዮን": 10**9}
    total = group = 0
    for word in words.split():
        if word == "መቶ":
            group *= 100
        elif word in scales:
            total += group * scales[word]
            group = 0
        else:
            group += unit[word]
    return total + group


def test_number_words_name_their_number():
    rng = random.Random(0)
    wanted = [*range(10_001), *(rng.randrange(10 ** rng.randint(4, 12)) for _ in range(500))]
    for number in wanted:
        assert value(number_to_words(number)) == number
        assert value(normalize(f"{number:,}")) == number


def in_ethiopic(number: int) -> str:
    """The algorithm of CSS Counter Styles Level 3, "ethiopic-numeric"."""
    if number == 1:
        return "፩"
    groups = [number // 100**i % 100 for i in range((len(str(number)) + 1) // 2)]
    written = ""
    for i, group in reversed(list(enumerate(groups))):
        tens, ones = divmod(group, 10)
        if not (group == 1 and (i % 2 or i == len(groups) - 1)):
            written += " ፲፳፴፵፶፷፸፹፺"[tens].strip() + " ፩፪፫፬፭፮፯፰፱"[ones].strip()
        if i % 2:
            written += "፻" if group else ""
        elif i:
            written += "፼"
    return written


def test_ethiopic_numerals_have_their_value():
    assert in_ethiopic(780_100_000_092) == "፸፰፻፩፼፼፺፪"  # an example of that specification
    rng = random.Random(0)
    wanted = [*range(1, 10_001), *(rng.randrange(1, 10 ** rng.randint(5, 12)) for _ in range(500))]
    for number in wanted:
        assert ethiopic_numeral(in_ethiopic(number)) == number
    assert value(normalize(in_ethiopic(123_456))) == 123_456


def test_letters_of_one_sound_can_stay_as_they_are():
    pairs = {
        "ሠላም! ፀሐይ በ2017 ዓ.ም. ኃ/ማርያም": "ሠላም! ፀሐይ በሁለት ሺህ አስራ ሰባት አመተ ምህረት ሀይለ ማርያም",
        "ሠላም ሰላም ሠላም": "ሠላም ሰላም ሠላም",
        "3:30 ሰዓት": "ሶስት ሰዓት ተኩል",
    }
    for raw, wanted in pairs.items():
        assert normalize(raw, respell=False) == wanted
        assert normalize(wanted, respell=False) == wanted
        assert normalize(wanted) == normalize(raw)
