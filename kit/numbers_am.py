"""Amharic numbers: a value in words, an ordinal in words, the value of an Ethiopic numeral.

Words are spelled the way `kit.lang_am` spells everything (ሀያ, ሶስት). Where speakers differ, one
form is taken and said so below: a voice that learns one reading per figure learns it sooner. Knows
nothing of the sentence around a number.
"""

import re

from kit.numbers import amount, read_digits

ONES = "ዜሮ አንድ ሁለት ሶስት አራት አምስት ስድስት ሰባት ስምንት ዘጠኝ".split()
# 80 is also written ሰማኒያ, and 50 also said አምሳ.
_TENS = "_ አስር ሀያ ሰላሳ አርባ ሀምሳ ስልሳ ሰባ ሰማንያ ዘጠና".split()
# ሺህ is also written ሺ. Years, too, are counted in thousands here (1988: አንድ ሺህ ዘጠኝ መቶ ...); many
# speakers say nineteen hundreds (አስራ ዘጠኝ መቶ ...).
_SCALES = ((10**9, "ቢሊዮን"), (10**6, "ሚሊዮን"), (1000, "ሺህ"), (100, "መቶ"))
_ETHIOPIC = {chr(0x1369 + i): v for i, v in enumerate([*range(1, 10), *range(10, 91, 10)])}
_BLOCK = "(?:[፲-፺]?[፩-፱]?፻)?[፲-፺]?[፩-፱]?"  # up to 9999
_LONGEST = 17  # signs, of 999 999 999 999
_NUMERAL = re.compile(f"{_BLOCK}(?:፼{_BLOCK})*")


def number_to_words(value: int) -> str:
    """A whole number below a trillion in words: 1234 -> አንድ ሺህ ሁለት መቶ ሰላሳ አራት."""
    return amount(value, _below_hundred, _SCALES)


def _below_hundred(value: int) -> str:
    if value < 10:
        return ONES[value]
    tens, ones = divmod(value, 10)
    name = "አስራ" if tens == 1 and ones else _TENS[tens]
    return f"{name} {ONES[ones]}" if ones else name


def digits_to_words(digits: str) -> str:
    """A row of digits as it is read out: an amount, or digit by digit."""
    return read_digits(digits, number_to_words, ONES)


def ordinal(words: str) -> str:
    """The ordinal of a number in `words`: ሁለት -> ሁለተኛ, አስራ ዘጠኝ -> አስራ ዘጠነኛ, ሀያ -> ሀያኛ."""
    if words.endswith("ዘጠኝ"):  # the last sound gives way to that of the ending
        return f"{words[:-1]}ነኛ"
    if words.endswith("ሺህ"):  # ሺኛ is heard as well
        return f"{words}ኛ"
    return f"{_with_vowel(words, 0) or words}ኛ"


def definite(words: str) -> str:
    """What `words` name, as known already: አምስት -> አምስቱ, ዘጠኝ -> ዘጠኙ, አርባ -> አርባው."""
    return _with_vowel(words, 1) or f"{words}ው"


def _with_vowel(words: str, order: int) -> str:
    """`words` with vowel `order` on a last letter that has none; "" when it has one.

    The letters of one consonant are eight neighbours: 0 carries ä, 1 u ... 5 none.
    """
    *_, last = words
    return words[:-1] + chr(ord(last) - 5 + order) if ord(last) % 8 == 5 else ""


def ethiopic_numeral(text: str) -> int | None:
    """The value of an Ethiopic numeral: ፳፻፲፯ -> 2017. None when its signs make no number.

    ፻ multiplies what stands before it by 100, ፼ all before it by 10 000; neither needs a ፩.
    """
    if len(text) > _LONGEST or not _NUMERAL.fullmatch(text):
        return None
    total = hundreds = group = 0
    for char in text:
        if char == "፻":
            hundreds, group = (group or 1) * 100, 0
        elif char == "፼":
            total, hundreds, group = (total + hundreds + group or 1) * 10_000, 0, 0
        else:
            group += _ETHIOPIC[char]
    value = total + hundreds + group
    return value if value < 10**12 else None  # nor when there are no words for it
