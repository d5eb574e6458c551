"""Figures in words, for any language: amounts by scale, and digits one by one."""

import re
from collections.abc import Callable, Sequence


def amount(
    value: int,
    below_hundred: Callable[[int], str],
    scales: Sequence[tuple],
    alone: Sequence[str] = (),
) -> str:
    """A whole number in words, each scale behind its count: two thousand three hundred four.

    `scales` are (size, name), largest first, the last (100, name). Those named in `alone` stand
    without a count of one (Turkish 1100: bin yüz). Raises AssertionError for a negative number.
    """
    assert value >= 0, value
    for size, name in scales:
        if value >= size:
            count, rest = divmod(value, size)
            words = name
            if count > 1 or name not in alone:
                words = f"{amount(count, below_hundred, scales, alone)} {name}"
            return f"{words} {amount(rest, below_hundred, scales, alone)}" if rest else words
    return below_hundred(value)


def read_digits(digits: str, words: Callable[[int], str], ones: Sequence[str]) -> str:
    """`digits` as an amount; one by one if they begin with zero (a phone number) or exceed 12."""
    if len(digits) > 12 or (len(digits) > 1 and digits[0] == "0"):
        return " ".join(ones[int(d)] for d in digits)
    return words(int(digits))


def plain_figures(text: str, thousands: str = ",") -> str:
    """The digits of every script as 0-9, and nothing between thousands.

    `thousands` is the mark that the language writes there: a comma, or a point (1.250).
    """
    text = re.sub(r"[^\D0-9]", lambda m: str(int(m[0])), text)
    mark = re.escape(thousands)
    grouped = rf"(?<![\d.,])\d{{1,3}}(?:{mark}\d{{3}})+(?!{mark}?\d)"
    return re.sub(grouped, lambda m: m[0].replace(thousands, ""), text)
