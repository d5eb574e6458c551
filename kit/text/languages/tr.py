"""Turkish: I is the capital of ı and İ that of i; words for figures, signs and a few short forms.

Figures as they are written in Turkey: a point between thousands (1.250), a comma before decimals
(2,5), suffixes behind an apostrophe (1990'da). A figure with a point before a word is an ordinal
(3. kat).
"""

import re

from kit.text.normalize import SignWords, amount, plain_figures, read_digits, read_signs

EXAMPLE = "Dr. Işık 2017'de 1.250 TL ödedi!"  # what 01_data_prep shows of all this

_ONES = "sıfır bir iki üç dört beş altı yedi sekiz dokuz".split()
_TENS = "_ on yirmi otuz kırk elli altmış yetmiş seksen doksan".split()
_SCALES = ((10**9, "milyar"), (10**6, "milyon"), (1000, "bin"), (100, "yüz"))
_ALONE = ("bin", "yüz")  # said without a "bir" before them
_SHORT = {"dr": "doktor", "prof": "profesör", "vb": "ve benzeri", "vs": "vesaire", "örn": "örneğin"}
_SHORT_FORM = re.compile(rf"(?<![^\W\d])({'|'.join(_SHORT)})\.")
_MONEY = {
    "₺": "lira",
    "tl": "lira",
    "$": "dolar",
    "€": "euro",
    "£": "sterlin",
    "¥": "yen",
    "₹": "rupi",
}
_DEGREES = {"": "derece", "c": "santigrat derece", "f": "fahrenhayt derece"}
SIGNS = SignWords(
    minus="eksi",
    money={sign: (word, word) for sign, word in _MONEY.items()},  # no plural after a number
    degrees={scale: (word, word) for scale, word in _DEGREES.items()},
    scales="yüz bin milyon milyar trilyon",
    decimal=",",
)
_AMOUNT = r"\d+(?:[.,]\d+)?"
# A point before decimals, as much software writes it: 3.5 but neither 14.30, a time, nor a date.
_DECIMAL = re.compile(r"(?<![\d.,:])(?!(?:[01]?\d|2[0-4])\.[0-5]\d(?!\d))(\d+)\.(\d+)(?![.,:]?\d)")
_HARMONY = {"a": "ı", "e": "i", "o": "u", "ö": "ü"}  # after a vowel; the others follow themselves


def lower(text: str) -> str:
    """`text` in lower case, with the pairs I ı and İ i."""
    return text.replace("İ", "i").replace("I", "ı").lower()


def number_to_words(value: int) -> str:
    """A whole number below a trillion as words: 1234 -> bin iki yüz otuz dört."""
    return amount(value, _ONES, _TENS, _SCALES, _ALONE)


def normalize(text: str) -> str:
    """`text` with its figures, signs and short forms as words, no apostrophe before a suffix."""
    text = _SHORT_FORM.sub(lambda m: f"{_SHORT[m[1]]} ", text.replace("&", " ve "))
    text = read_signs(plain_figures(text, thousands="."), SIGNS)
    text = re.sub(rf"(?<!\d)% ?({_AMOUNT})", r"yüzde \1", text)
    text = re.sub(rf"(?<![\d.,])({_AMOUNT}) ?%", r"yüzde \1", text)
    text = re.sub(r"(?<![\d.,:])(\d+)\.(?= ?[^\W\d])", lambda m: f" {_ordinal(m[1])} ", text)
    text = re.sub(r"(?<![\d,])(\d+),(\d+)(?!,?\d)", lambda m: f"{_say(m[1])} virgül {m[2]}", text)
    text = _DECIMAL.sub(lambda m: f"{_say(m[1])} nokta {m[2]}", text)
    text = re.sub(r"(?<=\d)[.:](?=\d)", " ", text)  # a date, a time
    text = re.sub(r"(?<!\d)(\d+)'([^\W\d]+)", lambda m: f" {_with_suffix(_say(m[1]), m[2])}", text)
    text = re.sub(r"(?<=[^\W\d])'(?=[^\W\d])", "", text)
    return re.sub(r"\d+", lambda m: f" {_say(m[0])} ", text)


def _say(digits: str) -> str:
    return read_digits(digits, number_to_words, _ONES)


def _ordinal(digits: str) -> str:
    """3 -> üçüncü, 6 -> altıncı, 4 -> dördüncü."""
    words = _say(digits)
    vowel = re.findall("[aeıioöuü]", words)[-1]
    vowel = _HARMONY.get(vowel, vowel)
    return _with_suffix(words, f"nc{vowel}" if words[-1] in "iıue" else f"{vowel}nc{vowel}")


def _with_suffix(words: str, suffix: str) -> str:
    """`words` and their suffix in one; the t of dört is soft before a vowel."""
    if words.endswith("dört") and suffix[0] in "aeıioöuü":
        words = f"{words[:-1]}d"
    return words + suffix
