"""English: words for figures, signs and a few short forms.

American number names without "and" (105: one hundred five). Years are read as amounts.
"""

import re

from kit.text.normalize import SignWords, amount, plain_figures, read_digits, read_signs

EXAMPLE = "Dr. Smith paid $15 in 2017!"  # what 01_data_prep shows of all this

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
_TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()
_SCALES = ((10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred"))
_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}
_SHORT = {"mr": "mister", "mrs": "missus", "dr": "doctor", "prof": "professor", "vs": "versus"}
SIGNS = SignWords(
    minus="minus",
    money={
        "$": ("dollar", "dollars", "cent", "cents"),
        "€": ("euro", "euros", "cent", "cents"),
        "£": ("pound", "pounds", "penny", "pence"),
        "¥": ("yen", "yen"),
        "₹": ("rupee", "rupees"),
        "₺": ("lira", "lira"),
    },
    degrees={
        "": ("degree", "degrees"),
        "c": ("degree celsius", "degrees celsius"),
        "f": ("degree fahrenheit", "degrees fahrenheit"),
    },
    scales="hundred thousand million billion trillion",
)
_SCALE_LETTERS = {"k": "thousand", "m": "million", "bn": "billion", "tn": "trillion"}  # $5m
# Not a date, a time, a score or a telephone number: 1-2-2016, 10:30-11:30, 3-1, 555-1234.
_RANGE = re.compile(
    r"(?<![\w.,/:-])(?!0\d|\d{3}-\d{4}(?!\d))(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)(?![\d/:-]|[.,]\d)"
)
_DECIMAL = re.compile(r"(?<![\d.])(\d+)\.(\d+)(?!\.?\d)")  # 3.14: three point one four
_SHORT_FORM = re.compile(rf"(?<![^\W\d])({'|'.join(_SHORT)})\.")


def number_to_words(value: int) -> str:
    """A whole number below a trillion as words: 1234 -> one thousand two hundred thirty four."""
    return amount(value, _ONES, _TENS, _SCALES)


def normalize(text: str) -> str:
    """`text` with its figures, signs and short forms as words."""
    text = _SHORT_FORM.sub(lambda m: f"{_SHORT[m[1]]} ", text.replace("&", " and "))
    text = plain_figures(text)
    text = re.sub(
        r"([$€£] ?\d+(?:\.\d+)?) ?(k|m|bn|tn)\b", lambda m: f"{m[1]} {_SCALE_LETTERS[m[2]]}", text
    )
    text = read_signs(text, SIGNS)
    text = _RANGE.sub(_range, text)
    text = re.sub(r"(?<=\d) ?%", " percent ", text)
    text = re.sub(r"(?<![\d.])(\d\d)?([1-9]0|(?<=\d)00)'?s\b", _decade, text)
    text = re.sub(r"(?<!\d)(\d+)(?:st|nd|rd|th)\b", lambda m: f" {_ordinal(_say(m[1]))} ", text)
    text = _DECIMAL.sub(lambda m: f" {m[1]} point {' '.join(m[2])} ", text)
    text = re.sub(r"(?<=\d)[.:](?=\d)", " ", text)  # a date, a time
    return re.sub(r"\d+", lambda m: f" {_say(m[0])} ", text)


def _say(digits: str) -> str:
    return read_digits(digits, number_to_words, _ONES)


def _range(match: re.Match) -> str:
    low, high = match.groups()
    return f"{low} to {high}" if float(low) < float(high) else match[0]


def _decade(match: re.Match) -> str:
    """1990s -> nineteen nineties, 1900s -> nineteen hundreds, 2000s -> two thousands."""
    century = match[1] or ""
    if match[2] != "00":
        words = f"{_say(century)} {_say(match[2])}" if century else _say(match[2])
    elif century.endswith("0"):
        words = _say(f"{century}00")
    else:
        words = f"{_say(century)} hundred"
    return f" {words[:-1]}ies " if words.endswith("y") else f" {words}s "


def _ordinal(words: str) -> str:
    before, space, last = words.rpartition(" ")
    if last in _ORDINALS:
        return f"{before}{space}{_ORDINALS[last]}"
    return f"{before}{space}{last[:-1]}ieth" if last.endswith("y") else f"{words}th"
