"""Normalise text: one spelling, however it was typed.

All languages share NFC, lower case, single spaces, one form of each letter (not ﬁ, Ａ or 𝗛), and
the removal of invisible characters, quotes and brackets. What one language adds is in
`kit/text/languages/CODE.py` and nowhere else: files beside a voice or a notebook are never run. It
needs one function `normalize(text) -> str` (docs/extending.md). That is given composed lower-case
text without quotes, brackets or spaces before punctuation, and must not change its own output
again: texts are normalised when they are read and once more when they are spoken. EXAMPLE is a text
that shows what it does; `lower` is for languages whose lower case is not Python's, `respell` for
those with several letters of one sound.

A minus before a figure is − (U+2212) in that text, however it was typed (-5, but not A-5 or 10-15);
`read_signs` reads it. A − that is left is removed.
"""

import collections
import dataclasses
import difflib
import functools
import importlib
import re
import types
import unicodedata
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from kit.base.errors import Note, SpeechError

CURRENCY_SIGNS = "$¢-¥₠-⃀"  # as in a regular expression, between [ and ]
LANGUAGES = Path(__file__).resolve().parent / "languages"  # where languages are looked for
LANGUAGE_NAMES = LANGUAGES.with_name("language_names.txt")
# Subtags as in BCP 47: `am`, `pt_br`, `zh_hant_tw`.
_CODE = re.compile("[a-z][a-z0-9]{0,7}(_[a-z0-9]{1,8}){0,3}")
# Control and format characters that show nothing, halves of characters, Ethiopic marks of
# gemination (schoolbooks have them, hardly any other text does), Arabic tatweel, and the joiners
# outside the scripts that spell with them.
_UNSEEN = re.compile(
    "[\0-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u0640\u135d-\u135f\u200b\u200e\u200f\u202a-\u202e"
    "\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
    "|(?<!(?=[\u0600-\u0dff])\\D)[\u200c\u200d]+"
)
# ። stays until the end, else the stop of a sentence and the dot of an abbreviation look the same.
_PUNCTUATION = str.maketrans(
    {"፣": ",", "፥": ",", "፤": ";", "፦": ":", "፧": "?", "፨": "። "}
    | {"\u2581": " "}  # SentencePiece's own mark of a space
    | dict.fromkeys('“”„«»‹›"()[]{}…_\\', " ")
    | dict.fromkeys("‐‑‒–—―", "-")
    | dict.fromkeys("‘’`´", "'")
)
# ʻ and ʼ are letters of Uzbek and Hausa; within a word they are also typed as an apostrophe. A
# double quote within a Hebrew word is its gershayim.
_INNER = ((re.compile(r"(?<=[^\W\d_])[ʻʼ](?=[^\W\d_])"), "'"),)
_INNER += ((re.compile(r"(?<=[\u05d0-\u05ea])[\"“”](?=[\u05d0-\u05ea])"), "״"),)
# Letters in another form: ligatures, of a place in a word, of another width, of a font. What else
# Unicode calls compatible is pronounced otherwise (½, ², №) and stays.
_FORMS = re.compile(
    "[\u0132\u0133\u01c4-\u01cc\u01f1-\u01f3\ufb00-\ufb17\ufb50-\ufdff\ufe70-\ufefc\uff00-\uffef"
    "\U0001d400-\U0001d7ff]"
)
_REMOVED = {sign for sign, replaced in _PUNCTUATION.items() if replaced == " "}
_DOTLESS = {"az", "kk"}  # languages in which I is the capital of ı, as in Turkish
# A minus precedes a figure and follows nothing that it could join to it: it is none in A-5,
# 10-15, 10 -15, 5%-10%, 5 €-10 € and (555) -1234, nor before the zero of a telephone number.
_MINUS = re.compile(
    rf"(?<![\w.,/)\]-])(?<!\d.)(?<!\d.[%°{CURRENCY_SIGNS}])(?<!\d[%°{CURRENCY_SIGNS})\]]\s)"
    rf"[-‐‑–](?=[%{CURRENCY_SIGNS}]?\d)(?!0\d)"
)
_WORD = re.compile(r"[^\W\d_]+")
_LONE = re.compile(r"(?<!\w)['/-]+|['/-]+(?!\w)")  # these mean something between letters only


def normalize(text: str, language: str = "am", respell: bool = True) -> str:
    """`text` as the tokenizer sees it. Idempotent; takes any string whatever.

    Without `respell`, letters of one sound stay as they are written. Warns once of a language
    without a file of its own.
    """
    rules = language_rules(language)
    text = _FORMS.sub(lambda match: unicodedata.normalize("NFKC", match[0]), text)
    if rules:
        text = _MINUS.sub("−", text)
    text = unicodedata.normalize("NFC", _UNSEEN.sub("", text))
    if rules is None and language_code(language) in _DOTLESS:
        text = text.replace("I", "ı").replace("İ", "i")
    text = getattr(rules, "lower", str.lower)(text)
    for sign, replaced in _INNER:
        text = sign.sub(replaced, text)
    text = unicodedata.normalize("NFC", text.translate(_PUNCTUATION))
    text = _LONE.sub(" ", text)
    text = re.sub(r"(?<=[\d፩-፼])፡(?=[\d፩-፼])", ":", text)  # 3፡30, a time
    text = re.sub(r"[፡:](?:\s*[፡:])+|።", "። ", text)  # ፡፡ is typed more often than ።
    text = _tidy(text.replace("፡", " "))
    if rules:
        written = text
        text = rules.normalize(text)
        if not respell and hasattr(rules, "respell"):
            text = _as_written(text, written, rules.respell)
        text = text.replace("−", " ")
    text = text.replace("።", ".").replace("/", " ").replace("-", " ")
    return _tidy(unicodedata.normalize("NFC", _LONE.sub(" ", text)))


def _as_written(text: str, written: str, respell: Callable[[str], str]) -> str:
    """`text`, whose words are respelt, with those of `written` in their own letters."""
    spellings = collections.defaultdict(list)  # of each word, in their order
    for word in _WORD.findall(written):
        spellings[respell(word)].append(word)

    def own_spelling(match: re.Match) -> str:
        own = spellings.get(match[0], [match[0]])
        return own.pop(0) if len(own) > 1 else own[0]

    return _WORD.sub(own_spelling, text)


def text_changes(written: str, text: str, language: str) -> list[str]:
    """What normalising changed of `written`, which became `text`, beside capitals and spaces."""
    respell = getattr(language_rules(language), "respell", str)
    respelt = (c for c in set(written) - set(text) if respell(c) != c)
    removed = (c for c in set(written) - set(text) if ord(c) in _REMOVED)
    has_figures = re.search(r"\d", written) and not re.search(r"\d", text)
    signs = {
        "letters in another form": _FORMS.search(written),
        "letters respelt": any(respelt),
        "signs removed": any(removed) or _UNSEEN.search(written),
        "numbers spelt out": has_figures,
    }
    return [kind for kind, is_it in signs.items() if is_it]


def _tidy(text: str) -> str:
    """One space between words, none before punctuation, none at the ends."""
    return re.sub(r" ([.,;:?!።])", r"\1", " ".join(text.split()))


@functools.cache
def language_rules(language: str) -> types.ModuleType | None:
    """The language's own file as a module, or None, with one warning, where it has none."""
    code = language_code(language).replace("-", "_")
    if not (LANGUAGES / f"{code}.py").is_file():
        warnings.warn(
            f"There is no kit/text/languages/{code}.py: text in `{language}` keeps its letters and "
            "figures as they are, lower-cased. Numbers and abbreviations are not turned into "
            "words; docs/extending.md shows how to add that.",
            category=Note,
            stacklevel=3,
        )
        return None
    return importlib.import_module(f"kit.text.languages.{code}")


def language_example(language: str) -> str:
    """A text that shows what the language's own file does; "" where it has none."""
    return getattr(language_rules(language), "EXAMPLE", "")


def language_code(language: str) -> str:
    """The kit's code of `language`, given as a code or by name: "eng" and "English" become en."""
    known = codes_by_name()
    written = {path.stem for path in LANGUAGES.glob("[a-z]*.py")}
    name = _plain_name(language)
    first, *others = known.get(name, name).split(" ")
    first = known.get(first, first)
    subtags = [first, *others]
    # ISO 639-3 has some 7,900 codes of three letters, which are not listed here.
    is_language = first in written or first in known.values() or len(first) == 3
    if not (is_language and _CODE.fullmatch("_".join(subtags))):
        close = difflib.get_close_matches(name[:80], known, n=1)
        similar = f" Did you mean `{close[0]}` ({known[close[0]]})?" if close else ""
        raise SpeechError(
            f"{language[:80]!r} is no language code or name.{similar} Give the ISO 639 code of the "
            "language, such as `am`, `en` or `pt-br`, or its name in English."
        )
    # A region (pt-br) stays where it has a file of its own, or where the language has none.
    for count in range(len(subtags), 0, -1):
        if "_".join(subtags[:count]) in written:
            return "-".join(subtags[:count])
    return "-".join(subtags)


@functools.cache
def codes_by_name() -> dict[str, str]:
    """The kit's code by every code and name of a language, names without capitals and accents."""
    known = {}
    for line in LANGUAGE_NAMES.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        codes, names = line.split(": ")
        code, *others = codes.split()
        for name in (code, *others, *map(_plain_name, names.split(", "))):
            known.setdefault(name, code)
    return known


def _plain_name(name: str) -> str:
    """`name` as names are compared: lower case, no accents or apostrophes, single spaces."""
    letters = unicodedata.normalize("NFD", name.casefold())
    kept = "".join(c for c in letters if not unicodedata.combining(c) and c not in "'’‘`")
    return " ".join(filter(None, re.split("[ _-]", kept)))


def letters(text: str) -> str:
    """`text` without punctuation, single spaces: what a character error rate compares."""
    kept = "".join(c if c.isalnum() or unicodedata.category(c)[0] == "M" else " " for c in text)
    return " ".join(kept.split())


def unicode_script(char: str) -> str:
    """The script of a letter: the first word of its Unicode name (ETHIOPIC SYLLABLE HA), or ""."""
    return unicodedata.name(char, "").split(" ")[0]


# --- numbers as words, for the files of languages --------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class SignWords:
    """The words of one language for the signs beside figures.

    Words are pairs: after 1, and after any other number. Two more name the hundredth of a currency
    where $2.50 is read as two dollars fifty cents. A currency in letters (tl) follows its figure.
    """

    minus: str
    money: dict[str, tuple[str, ...]]  # by sign
    degrees: dict[str, tuple[str, str]]  # by the scale's letter; "": none
    scales: str = ""  # the words between a figure and its currency: $5 million
    decimal: str = "."  # the mark before decimals
    before_cents: str = ""  # joined to the figure of the cents


def amount(
    value: int,
    ones: Sequence[str],
    tens: Sequence[str],
    scales: Sequence[tuple],
    alone: Sequence[str] = (),
) -> str:
    """A whole number as words, each scale behind its count: two thousand three hundred four.

    `ones` are the names from 0 to 9, or of all that have their own (to 19 in English), `tens` those
    of 0, 10 ... 90; `scales` are (size, name), largest first, the last (100, name). Those named in
    `alone` stand without a count of one (Turkish 1100: bin yüz).
    """
    assert value >= 0, value
    if value < len(ones):
        return ones[value]
    if value < 100:
        return f"{tens[value // 10]} {ones[value % 10]}" if value % 10 else tens[value // 10]
    size, name = next(scale for scale in scales if value >= scale[0])
    count, rest = divmod(value, size)
    words = name
    if count > 1 or name not in alone:
        words = f"{amount(count, ones, tens, scales, alone)} {name}"
    return f"{words} {amount(rest, ones, tens, scales, alone)}" if rest else words


def read_digits(digits: str, words: Callable[[int], str], ones: Sequence[str]) -> str:
    """`digits` as an amount; one by one if they begin with zero (a phone number) or exceed 12."""
    is_amount = digits == "0" or (digits[0] != "0" and len(digits) <= 12)
    return words(int(digits)) if is_amount else " ".join(ones[int(d)] for d in digits)


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
    suffixes = "|".join([f"[{signs}]", *(rf"{s}(?![^\W\d])" for s in words.money if s.isalpha())])
    scale = f"(?: (?:{'|'.join(words.scales.split())})(?![^\\W\\d]))?" if words.scales else ""
    mark = re.escape(words.decimal)
    # Beside a sign, one or two digits behind the other language's mark are decimals, too: £2,50.
    number = rf"\d+(?:{mark}\d+|[.,]\d\d?(?!\d))?"

    text = re.sub(rf"([{signs}]) ?− ?(?=\d)", r"−\1", text)  # $−5
    text = re.sub(rf"(?<![^\W\d])− ?(?=[%{signs}]? ?\d)", f" {words.minus} ", text)

    def money(sign: str, figure: str, scale: str) -> str:
        figure = re.sub("[.,]", words.decimal, figure)
        one, many, *hundredths = words.money[sign]
        cents = re.fullmatch(rf"(\d{{1,12}}){mark}(\d\d)", figure)
        if scale or not hundredths or not cents:
            return f"{figure}{scale} {one if figure == '1' and not scale else many}"
        whole = int(cents[1])
        rest = int(cents[2])
        spoken = f"{cents[1]} {one if whole == 1 else many}"
        if not rest:
            return spoken
        of_cents = f"{rest} {hundredths[0 if rest == 1 else 1]}"
        return f"{spoken} {words.before_cents}{of_cents}" if whole else of_cents

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
    scales = "".join(words.degrees)
    return re.sub(
        rf"(?:(?<![\d.,])({number})|(?<=\d)) ?[°º˚](?: ?([{scales}])(?![^\W\d]))?", degrees, text
    )
