"""English: figures, signs and short forms as words."""

import random

import pytest

from kit.text.languages.en import number_to_words
from kit.text.normalize import normalize

NORMALIZED = [
    ("“Hello”,  WORLD 42!", "hello, world forty two!"),
    ("I don't know", "i don't know"),
    ("1,234", "one thousand two hundred thirty four"),
    ("0", "zero"),
    ("007", "zero zero seven"),
    ("3.14", "three point one four"),
    ("1.2.2016 10:30", "one two two thousand sixteen ten thirty"),
    ("50%", "fifty percent"),
    ("$5", "five dollars"),
    ("the 1st, 2nd, 3rd and 12th", "the first, second, third and twelfth"),
    ("20th, 21st, 100th", "twentieth, twenty first, one hundredth"),
    ("Dr. Smith & Mrs. Jones", "doctor smith and missus jones"),
    ("mp3", "mp three"),
    ("2-3", "two three"),
]


@pytest.mark.parametrize(("raw", "wanted"), NORMALIZED)
def test_english_is_normalised(raw, wanted):
    assert normalize(raw, "en") == wanted
    assert normalize(wanted, "en") == wanted


def test_numbers_have_words_of_their_own():
    rng = random.Random(0)
    numbers = {*range(2000), *(rng.randrange(10**12) for _ in range(500))}
    assert len({number_to_words(n) for n in numbers}) == len(numbers)
