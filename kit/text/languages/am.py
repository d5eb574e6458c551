"""Amharic: one spelling per sound, and words for whatever is written in figures or in short.

Several letters have one sound (ሀ ሐ ኀ; ሰ ሠ; አ ዐ; ጸ ፀ), which a voice learns faster in one spelling.
Letters after the orthography notes of the Ethiopian Languages Academy as summarised by Yacob (2003)
and the W3C Ethiopic layout requirements. Latin letters stay for the tokenizer to report.
"""

import re

from kit.text.normalize import SignWords, amount, plain_figures, read_digits, read_signs

EXAMPLE = "ሠላም! በ2017 ዓ.ም. 15 ኪሎ"  # what 01_data_prep shows of all this
# Where speakers differ, one form is chosen and noted here: one reading is learned sooner than two.
ONES = "ዜሮ አንድ ሁለት ሶስት አራት አምስት ስድስት ሰባት ስምንት ዘጠኝ አስር".split()
ONES += [f"አስራ {one}" for one in ONES[1:10]]
# 80 is also written ሰማኒያ, and 50 also said አምሳ.
_TENS = "_ አስር ሀያ ሰላሳ አርባ ሀምሳ ስልሳ ሰባ ሰማንያ ዘጠና".split()
# ሺህ is also written ሺ. Years, too, are counted in thousands here (1988: አንድ ሺህ ዘጠኝ መቶ ...); many
# speakers say nineteen hundreds (አስራ ዘጠኝ መቶ ...).
_SCALES = ((10**9, "ቢሊዮን"), (10**6, "ሚሊዮን"), (1000, "ሺህ"), (100, "መቶ"))
_ETHIOPIC = {chr(0x1369 + i): v for i, v in enumerate([*range(1, 10), *range(10, 91, 10)])}
_BLOCK = "(?:[፲-፺]?[፩-፱]?፻)?[፲-፺]?[፩-፱]?"  # up to 9999
_LONGEST = 17  # signs, of 999 999 999 999
_NUMERAL = re.compile(f"{_BLOCK}(?:፼{_BLOCK})*")

# Each row of eight vowel orders starts at these letters: variant -> the one kept.
_ROWS = {"ሐ": "ሀ", "ኀ": "ሀ", "ሠ": "ሰ", "ዐ": "አ", "ፀ": "ጸ"}
_FOLD = {ord(v) + i: ord(k) + i for v, k in _ROWS.items() for i in range(7)}
# ኸ is a softened ከ, said as h. Only its first order has no twin: ሀ is said with another vowel.
_FOLD.update({ord("ኸ") + i: ord("ሀ") + i for i in range(1, 7)})
# First and fourth order of the throat letters are said alike: ሃ = ሀ, ኣ = አ.
_FOLD.update(dict.fromkeys(map(ord, "ሃሓኃኻ"), "ሀ"))
_FOLD.update(dict.fromkeys(map(ord, "ኣዓ"), "አ"))
# Rounded letters for which today's writers put the plain ones (ጐንደር, ጎንደር), and twins of the rest.
_FOLD.update({ord(v): k for v, k in zip("ቈኰጐኈቍኵጕኍሗሇሧ", "ቆኮጎሆቁኩጉሁኋኋሷ")})

# Short forms whose reading is settled; written with strokes here, with strokes or dots in text.
# አ.አ. is missing: spelled this way it may be አዲስ አበባ or ዓመተ ዓለም.
_SHORT = {
    "ዶ/ር": "ዶክተር", "ፕ/ር": "ፕሮፌሰር", "ኢ/ር": "ኢንጂነር", "መ/ር": "መምህር", "መ/ርት": "መምህርት",
    "ወ/ሮ": "ወይዘሮ", "ወ/ሪት": "ወይዘሪት", "ወ/ት": "ወይዘሪት", "ኮ/ል": "ኮሎኔል", "ጄ/ል": "ጄኔራል",
    "ጠ/ሚ": "ጠቅላይ ሚኒስትር", "ጠ/ሚ/ር": "ጠቅላይ ሚኒስትር", "ጠ/ሚኒስትር": "ጠቅላይ ሚኒስትር",
    "ቤ/ክ": "ቤተ ክርስቲያን", "ቤ/ክርስቲያን": "ቤተ ክርስቲያን",
    "ክ/ከተማ": "ክፍለ ከተማ", "ክ/ሀገር": "ክፍለ ሀገር", "ክ/ዘመን": "ክፍለ ዘመን",
    "ዓ/ም": "ዓመተ ምህረት", "እ/ኤ/አ": "እንደ ኤውሮፓ አቆጣጠር", "ቅ/ል/ክ": "ቅድመ ልደተ ክርስቶስ",
    "ኪ/ሜ": "ኪሎ ሜትር", "ሴ/ሜ": "ሴንቲ ሜትር", "ሚ/ሜ": "ሚሊ ሜትር", "ካ/ሜ": "ካሬ ሜትር", "ኪ/ግ": "ኪሎ ግራም",
    "ተ/ቁ": "ተራ ቁጥር", "ስ/ቁ": "ስልክ ቁጥር", "ፖ/ሳ/ቁ": "ፖስታ ሳጥን ቁጥር", "አ/ማ": "አክሲዮን ማህበር",
    "ኃ/የተ/የግ/ማ": "ኃላፊነቱ የተወሰነ የግል ማህበር", "ወ/ዘ/ተ": "ወዘተ",
}  # fmt: skip
# What kind of house: before ቤት and its forms (ት/ቤት, ት/ቤቱ, ት/ቤቶች).
_HOUSES = {"ት": "ትምህርት", "መ": "መስሪያ", "ጽ": "ጽህፈት", "ፍ": "ፍርድ", "ም": "ምክር"}
# First parts of names, shortened before a second part that only names have: ገ/ማርያም.
_NAME_HEADS = {"ገ": "ገብረ", "ወ": "ወልደ", "ኃ": "ኃይለ", "ተ": "ተክለ"}
_NAME_TAILS = (
    "ማርያም ሚካኤል ጊዮርጊስ ገብርኤል ሥላሴ እግዚአብሔር ኢየሱስ መድህን መስቀል ህይወት ክርስቶስ ጻድቅ ሃና ዮሐንስ "
    "ሩፋኤል ኪዳን ሃይማኖት አረጋዊ ጨርቆስ ወልድ"
).split()
_SHORT = {k.translate(_FOLD): v.translate(_FOLD) for k, v in _SHORT.items()}
_NAME_HEADS = {k.translate(_FOLD): v.translate(_FOLD) for k, v in _NAME_HEADS.items()}
_NAME_TAILS = [name.translate(_FOLD) for name in _NAME_TAILS]

_L = "[\u1200-\u135a\u1380-\u138f\u2d80-\u2ddf\uab00-\uab2f]"  # an Ethiopic letter
_START = rf"(?<!{_L})(?<!{_L}\.)"  # where a short form may begin: not inside a longer one
_FORMS = "|".join(k.replace("/", "[./]") for k in sorted(_SHORT, key=len, reverse=True))
_SHORT_FORM = re.compile(rf"{_START}([በከለየ]?)({_FORMS})(?=[ንምናው](?!{_L})|(?!\.?{_L}))(\.(?!\s*$))?")
_HOUSE = re.compile(rf"{_START}([በከለየ]?)([{''.join(_HOUSES)}])[./](?=ቤ[ትቱቶታ])")
_NAME = re.compile(rf"{_START}([በከለየ]?)([{''.join(_NAME_HEADS)}])/(?={'|'.join(_NAME_TAILS)})")

_N = r"\d+(?:\.\d+)?(?!\.?\d)"  # 3 or 3.5
_PREFIXES = set("በ ከ ለ የ ስለ እስከ ወደ እንደ በየ ከየ ለየ የየ".split())  # said as one word with a number
_LONGEST_FIRST = sorted(_PREFIXES, key=lambda prefix: (-len(prefix), prefix))
_DEGREES = {"": "ዲግሪ", "c": "ዲግሪ ሴልሺየስ", "f": "ዲግሪ ፋራንሀይት"}
# Names after CLDR, without the country's. Nouns after a number have no plural.
SIGNS = SignWords(
    minus="ነጌቲቭ",  # as in school; ማይነስ and ከዜሮ በታች (below zero) are said, too
    money={
        "$": ("ዶላር", "ዶላር", "ሳንቲም", "ሳንቲም"),
        "€": ("ዩሮ", "ዩሮ", "ሳንቲም", "ሳንቲም"),
        "£": ("ፓውንድ", "ፓውንድ", "ፔንስ", "ፔንስ"),
        "¥": ("የን", "የን"),
        "₹": ("ሩፒ", "ሩፒ"),
        "₺": ("ሊራ", "ሊራ"),
    },
    degrees={scale: (word, word) for scale, word in _DEGREES.items()},
    scales="መቶ ሺህ ሺ ሚሊዮን ቢሊዮን ትሪሊዮን",
    before_cents="ከ",
)
_ORDINAL = r"[ተነረደ]?ኛ"  # 2ኛ and, copying the sound, 2ተኛ
_ENDING = f"[ንምናው](?!{_L})"  # 5ን
_THE = f"[ቱዱሩኙ](?={_ENDING}|(?!{_L}))"  # 5ቱ, 9ኙ; many write ቱ after any figure
_PHONE = re.compile(r"(?<![\d.,/-])(?:\+\d|0\d)\d*(?:[ -]\d{2,})*")
_RANGE = re.compile(rf"(?<![\d.-])((?:{'|'.join(_LONGEST_FIRST)})?)({_N})-({_N})(?![-\d])")
_CLOCK = re.compile(rf"(?<![\d:])([01]?\d|2[0-4]):([0-5]\d)\s*ሰአት(?!{_L}{_L})")
_CENTS = re.compile(rf"(?<![\d.])(\d+)\.(\d\d) *ብር(?!{_L}{_L})")
_DECADE = r"ዎ(?=[ቹች])"  # 1990ዎቹ
_BEFORE = re.compile(r"(?<![^\W\d])[^\W\d]+(?=\d)")
_NEXT = re.compile(rf"(\d)(?!{_ORDINAL}|{_ENDING}|{_THE}|{_DECADE})(?=[^\W\d])")


def respell(text: str) -> str:
    """`text` with one spelling per sound."""
    return text.translate(_FOLD)


def normalize(text: str) -> str:
    """`text` with one spelling per sound, and figures, numerals and short forms as words."""
    text = respell(text).replace("'", " ")
    text = _NAME.sub(lambda m: f"{m[1]}{_NAME_HEADS[m[2]]} ", text)
    text = _HOUSE.sub(lambda m: f"{m[1]}{_HOUSES[m[2]]} ", text)
    text = _SHORT_FORM.sub(_expand, text)
    if not re.search(r"[\d፩-፼]", text):
        return text
    # Numerals of every script as 0-9, symbols that follow a figure as words, gaps in place.
    text = re.sub(r"(?<=\d)(?=[፩-፼])|(?<=[፩-፼])(?=\d)", " ", text)
    text = re.sub("[፩-፼]+", _from_ethiopic, text)
    text = plain_figures(text)
    text = re.sub(r"(?<=\d) ?%", " በመቶ ", text)
    text = read_signs(text, SIGNS)
    text = _NEXT.sub(r"\1 ", text)
    text = _BEFORE.sub(lambda m: m[0] if m[0] in _PREFIXES else f"{m[0]} ", text)
    # Every figure as words; its neighbours decide how it is read.
    text = _PHONE.sub(_phone, text)
    text = _CLOCK.sub(_clock, text)
    text = _CENTS.sub(_cents, text)
    text = _RANGE.sub(_range, text)
    text = re.sub(rf"(?<!\d)(\d+){_ORDINAL}", lambda m: ordinal(digits_to_words(m[1])), text)
    text = re.sub(rf"(?<!\d)(\d+){_THE}", lambda m: definite(digits_to_words(m[1])), text)
    text = re.sub(rf"(?<!\d)(\d+){_DECADE}", lambda m: plural(digits_to_words(m[1])), text)
    text = re.sub(r"(?<![\d.])\d+\.\d+(?!\.?\d)", lambda m: _say(m[0]), text)
    text = re.sub(r"(?<=\d)[.:](?=\d)", " ", text)  # a date, a verse
    text = re.sub(r"(?<=\d)([,;])(?=\d)", r"\1 ", text)
    return re.sub(r"\d+", lambda m: digits_to_words(m[0]), text)


def _expand(match: re.Match) -> str:
    prefix, form, dot = match.groups()
    stop = "." if dot and "." not in form else ""  # after dots, one more belongs to them
    return f"{prefix}{_SHORT[form.replace('.', '/')]}{stop}"


def _from_ethiopic(match: re.Match) -> str:
    value = ethiopic_numeral(match[0])
    if value is not None:
        return str(value)
    return " ".join(str(ethiopic_numeral(sign)) for sign in match[0])  # no number: sign by sign


def _say(number: str) -> str:
    """3.14 -> ሶስት ነጥብ አንድ አራት: after the point one digit at a time (some say ነጥብ አስራ አራት)."""
    whole, _, part = number.partition(".")
    point = ["ነጥብ", *map(digits_to_words, part)] if part else []
    return " ".join([digits_to_words(whole), *point])


def _phone(match: re.Match) -> str:
    digits = re.sub(r"\D", "", match[0])
    if not 9 <= len(digits) <= 15:
        return match[0]
    return " ".join(map(digits_to_words, digits))


def _clock(match: re.Match) -> str:
    """3:30 ሰአት -> ሶስት ሰአት ተኩል. Only before that word: 3:16 may be a verse."""
    hour = digits_to_words(str(int(match[1])))
    minutes = int(match[2])
    if minutes == 30:
        return f"{hour} ሰአት ተኩል"
    return f"{hour} ሰአት ከ{digits_to_words(str(minutes))} ደቂቃ" if minutes else f"{hour} ሰአት"


def _cents(match: re.Match) -> str:
    birr = digits_to_words(match[1])
    cents = int(match[2])
    return f"{birr} ብር ከ{digits_to_words(str(cents))} ሳንቲም" if cents else f"{birr} ብር"


def _range(match: re.Match) -> str:
    """5-10 -> ከአምስት እስከ አስር. A falling pair (a score, 3-1) is no range and stays two numbers."""
    before, low, high = match.groups()
    if float(low) >= float(high):
        return f"{before}{_say(low)} {_say(high)}"
    return f"{before or 'ከ'}{_say(low)} እስከ {_say(high)}"


def number_to_words(value: int) -> str:
    """A whole number below a trillion as words: 1234 -> አንድ ሺህ ሁለት መቶ ሰላሳ አራት."""
    return amount(value, ONES, _TENS, _SCALES)


def digits_to_words(digits: str) -> str:
    """A row of digits as it is read out: an amount, or digit by digit."""
    return read_digits(digits, number_to_words, ONES)


def ordinal(words: str) -> str:
    """The ordinal of a number that `words` name: ሁለት -> ሁለተኛ, አስራ ዘጠኝ -> አስራ ዘጠነኛ, ሀያ -> ሀያኛ."""
    if words.endswith("ዘጠኝ"):  # the last sound gives way to that of the ending
        return f"{words[:-1]}ነኛ"
    if words.endswith("ሺህ"):  # some say ሺኛ
        return f"{words}ኛ"
    return f"{_with_vowel(words, 0) or words}ኛ"


def definite(words: str) -> str:
    """What `words` name, as known already: አምስት -> አምስቱ, ዘጠኝ -> ዘጠኙ, አርባ -> አርባው."""
    return _with_vowel(words, 1) or f"{words}ው"


def plural(words: str) -> str:
    """The plural of what `words` name, without its last letter: ዘጠና -> ዘጠናዎ, አስር -> አስሮ."""
    if words.endswith("ሺህ"):
        return f"{words[:-1]}ዎ"
    return _with_vowel(words, 6) or f"{words}ዎ"


def _with_vowel(words: str, order: int) -> str:
    """`words` with vowel `order` on a last letter that has none; "" when it has one.

    The letters of one consonant are eight neighbours: 0 carries ä, 1 u ... 5 none.
    """
    *_, last = words
    return words[:-1] + chr(ord(last) - 5 + order) if ord(last) % 8 == 5 else ""


def ethiopic_numeral(text: str) -> int | None:
    """The value of an Ethiopic numeral: ፳፻፲፯ -> 2017. None when its signs make no number."""
    if len(text) > _LONGEST or not _NUMERAL.fullmatch(text):
        return None
    total = hundreds = group = 0
    for char in text:
        if char == "፻":  # multiplies what precedes it by 100, ፼ all before it; neither needs a ፩
            hundreds = (group or 1) * 100
            group = 0
        elif char == "፼":
            total = (total + hundreds + group or 1) * 10_000
            hundreds = 0
            group = 0
        else:
            group += _ETHIOPIC[char]
    value = total + hundreds + group
    return value if value < 10**12 else None  # nor when there are no words for it
