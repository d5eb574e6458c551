"""Numbers as words, for any language: amounts by scale, digits one by one, and signs beside them.

A language file calls `read_signs(text, SIGNS)` after `plain_figures`, before it reads the figures
themselves: "$5 million" becomes "5 million dollars", "−1°" (the minus as U+2212) "minus 1 degree".
"""

import dataclasses
import re
from collections.abc import Callable, Sequence

CURRENCY_SIGNS = "$¢-¥₠-⃀"  # as in a regular expression, between [ and ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SignWords:
    """The words of one language for the signs beside figures.

    Words are pairs: after 1, and after any other number. Two more name the hundredth of a currency
    where $2.50 is read as two dollars fifty cents. A currency written in letters (tl) follows its
    figure.
    """

    minus: str
    money: dict[str, tuple[str, ...]]  # by sign
    degrees: dict[str, tuple[str, str]]  # by the scale's letter; "": none
    scales: str = ""  # the words between a figure and its currency: $5 million
    decimal: str = "."  # the mark before decimals
    before_cents: str = ""  # joined to the figure of the cents


def amount(
    value: int,
    below_hundred: Callable[[int], str],
    scales: Sequence[tuple],
    alone: Sequence[str] = (),
) -> str:
    """A whole number as words, each scale behind its count: two thousand three hundred four.

    `scales` are (size, name), largest first, the last (100, name). Those named in `alone` stand
    without a count of one (Turkish 1100: bin yüz).
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
    """The digits of every script as 0-9, without the language's mark between `thousands`."""
    text = re.sub(r"[^\D0-9]", lambda m: str(int(m[0])), text)
    mark = re.escape(thousands)
    grouped = rf"(?<![\d.,])\d{{1,3}}(?:{mark}\d{{3}})+(?!{mark}?\d)"
    text = re.sub(grouped, lambda m: m[0].replace(thousands, ""), text)
    # Two commas or more (1,000,000) are no decimal comma.
    grouped = r"(?<![\d.,])\d{1,3}(?:,\d{3}){2,}(?![.,]?\d)"
    return re.sub(grouped, lambda m: m[0].replace(",", ""), text)


def read_signs(text: str, words: SignWords) -> str:
    """`text` with minus, currency and degree signs as words; the figures stay."""
    if not re.search(r"\d", text):
        return text
    signs = "".join(re.escape(sign) for sign in words.money if not sign.isalpha())
    suffixes = "|".join(rf"{s}(?![^\W\d])" for s in words.money if s.isalpha())
    suffixes = f"[{signs}]|{suffixes}" if suffixes else f"[{signs}]"
    scale = f"(?: (?:{'|'.join(words.scales.split())})(?![^\\W\\d]))?" if words.scales else ""
    mark = re.escape(words.decimal)
    # Beside a sign, one or two digits behind the other language's mark are decimals, too: £2,50.
    number = rf"\d+(?:{mark}\d+|[.,]\d\d?(?!\d))?"

    text = re.sub(rf"([{signs}]) ?− ?(?=\d)", r"−\1", text)  # $−5
    text = re.sub(rf"(?<![^\W\d])− ?(?=[%{signs}]? ?\d)", f" {words.minus} ", text)

    def money(sign: str, amount: str, scale: str) -> str:
        amount = re.sub("[.,]", words.decimal, amount)
        one, many, *hundredths = words.money[sign]
        cents = re.fullmatch(rf"(\d{{1,12}}){mark}(\d\d)", amount)
        if scale or not hundredths or not cents:
            return f"{amount}{scale} {one if amount == '1' and not scale else many}"
        whole = int(cents[1])
        rest = int(cents[2])
        parts = [f"{cents[1]} {one if whole == 1 else many}"] if whole or not rest else []
        if rest:
            joined = words.before_cents if parts else ""
            parts.append(f"{joined}{rest} {hundredths[0 if rest == 1 else 1]}")
        return " ".join(parts)

    def spaced(match: re.Match, reading: str) -> str:
        following = match.string[match.end() : match.end() + 1]
        return f"{reading} " if following.isalnum() else reading

    # The sign first ($5, also of a range: $5-10). In "10 $ 5" it belongs to the figure before it.
    text = re.sub(
        rf"(?<!\d)([{signs}])(?:(?<!\d .) )?({number}(?:-{number})?)({scale})",
        lambda m: spaced(m, money(m[1], m[2], m[3])),
        text,
    )
    # The sign last. A figure within a longer one, such as a date, is left alone.
    text = re.sub(
        rf"(?:(?<![\d.,])({number})|(?<=\d))({scale}) ?({suffixes})",
        lambda m: spaced(m, money(m[3], m[1] or "", m[2])),
        text,
    )

    def degrees(match: re.Match) -> str:
        figure = re.sub("[.,]", words.decimal, match[1] or "")
        one, many = words.degrees[match[2] or ""]
        return spaced(match, f"{figure} {one if figure == '1' else many}")

    text = text.replace("℃", "°c").replace("℉", "°f")
    letters = "".join(words.degrees)
    return re.sub(
        rf"(?:(?<![\d.,])({number})|(?<=\d)) ?[°º˚](?: ?([{letters}])(?![^\W\d]))?",
        degrees,
        text,
    )
