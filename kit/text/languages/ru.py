"""Russian: numbers as words in the nominative; stress marks are removed."""

import re

from kit.text.normalize import plain_figures, read_digits

EXAMPLE = "М+ука: 2 351 рубль."  # what 01_data_prep shows of all this
ONES = (
    "ноль один два три четыре пять шесть семь восемь девять десять одиннадцать двенадцать "
    "тринадцать четырнадцать пятнадцать шестнадцать семнадцать восемнадцать девятнадцать"
).split()
TENS = "_ _ двадцать тридцать сорок пятьдесят шестьдесят семьдесят восемьдесят девяносто".split()
HUNDREDS = "_ сто двести триста четыреста пятьсот шестьсот семьсот восемьсот девятьсот".split()
# Each scale after one, after two to four, and after five or more.
SCALES = (
    (10**9, ("миллиард", "миллиарда", "миллиардов")),
    (10**6, ("миллион", "миллиона", "миллионов")),
    (1000, ("тысяча", "тысячи", "тысяч")),
)
FEMININE = {"один": "одна", "два": "две"}


def number_to_words(value: int) -> str:
    """2351 -> две тысячи триста пятьдесят один."""
    words = []
    rest = value
    for size, forms in SCALES:
        count, rest = divmod(rest, size)
        if count:
            counted = below_thousand(count)
            if size == 1000:
                counted[-1] = FEMININE.get(counted[-1], counted[-1])
            words += [*counted, forms[form_of(count)]]
    if rest or not words:
        words += below_thousand(rest)
    return " ".join(words)


def below_thousand(value: int) -> list[str]:
    hundreds, rest = divmod(value, 100)
    words = [HUNDREDS[hundreds]] if hundreds else []
    if rest >= 20:
        words.append(TENS[rest // 10])
        rest %= 10
    if rest or not words:
        words.append(ONES[rest])
    return words


def form_of(count: int) -> int:
    """Index of the noun's form after `count`: 1, 2 to 4, or any other number."""
    if count % 100 in range(11, 15):
        return 2
    return {1: 0, 2: 1, 3: 1, 4: 1}.get(count % 10, 2)


def normalize(text: str) -> str:
    text = re.sub(r"\+(?=[аеёиоуыэюя])", "", text)
    text = plain_figures(text, thousands=" ")
    return re.sub(r"\d+", lambda m: f" {read_digits(m[0], number_to_words, ONES)} ", text)
