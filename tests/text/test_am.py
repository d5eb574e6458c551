"""Amharic: one spelling per sound; figures, numerals and short forms as a reader says them."""

import random

import pytest

from kit.text.languages.am import (
    ONES,
    digits_to_words,
    ethiopic_numeral,
    number_to_words,
    ordinal,
)
from kit.text.normalize import normalize

NORMALIZED = [
    # letters that sound alike, one spelling
    ("ሐገር", "ሀገር"),
    ("ኀይል", "ሀይል"),
    ("ሃገር", "ሀገር"),
    ("ሓሳብ", "ሀሳብ"),
    ("ኃይል", "ሀይል"),
    ("ኻያ", "ሀያ"),
    ("ኹኔታ", "ሁኔታ"),
    ("ሠላም", "ሰላም"),
    ("ሥራ", "ስራ"),
    ("ንጉሥ", "ንጉስ"),
    ("ዐይን", "አይን"),
    ("ዓለም", "አለም"),
    ("ኣበበ", "አበበ"),
    ("ዕለት", "እለት"),
    ("ፀሐይ", "ጸሀይ"),
    ("ፅሑፍ", "ጽሁፍ"),
    ("ዒላማ", "ኢላማ"),
    ("ጐንደር", "ጎንደር"),
    ("ቍጥር", "ቁጥር"),
    ("ከበ\u135fደ", "ከበደ"),
    # punctuation
    ("ሰላም፡ለሁሉ።", "ሰላም ለሁሉ."),
    ("ሰላም፡፡", "ሰላም."),
    ("መጣ።ሄደ", "መጣ. ሄደ"),
    ("አበበ፣ ከበደ", "አበበ, ከበደ"),
    ("አበበ፥ ከበደ", "አበበ, ከበደ"),
    ("መጣ፤ ሄደ", "መጣ; ሄደ"),
    ("እንዲህ፦ አለ", "እንዲህ: አለ"),
    ("መጣ፧", "መጣ?"),
    ("«ሰላም» (አለ)", "ሰላም አለ"),
    ("  ሰላም \t\n ለሁሉ ", "ሰላም ለሁሉ"),
    ("ኮምፒውተር PC", "ኮምፒውተር pc"),
    # amounts
    ("0", "ዜሮ"),
    ("7", "ሰባት"),
    ("10", "አስር"),
    ("11", "አስራ አንድ"),
    ("20", "ሀያ"),
    ("99", "ዘጠና ዘጠኝ"),
    ("100", "አንድ መቶ"),
    ("205", "ሁለት መቶ አምስት"),
    ("1000", "አንድ ሺህ"),
    ("1234", "አንድ ሺህ ሁለት መቶ ሰላሳ አራት"),
    ("15,000", "አስራ አምስት ሺህ"),
    ("1,000,000", "አንድ ሚሊዮን"),
    ("2000000001", "ሁለት ቢሊዮን አንድ"),
    ("٣ እና ५", "ሶስት እና አምስት"),
    ("3.5", "ሶስት ነጥብ አምስት"),
    ("1,234.05", "አንድ ሺህ ሁለት መቶ ሰላሳ አራት ነጥብ ዜሮ አምስት"),
    ("15%", "አስራ አምስት በመቶ"),
    ("2.5 %", "ሁለት ነጥብ አምስት በመቶ"),
    ("$5", "አምስት ዶላር"),
    ("20€", "ሀያ ዩሮ"),
    ("500 ብር", "አምስት መቶ ብር"),
    ("5.50 ብር", "አምስት ብር ከሀምሳ ሳንቲም"),
    ("7.00 ብር", "ሰባት ብር"),
    ("-5 ዲግሪ", "ነጌቲቭ አምስት ዲግሪ"),
    ("−5 °C, 1°", "ነጌቲቭ አምስት ዲግሪ ሴልሺየስ, አንድ ዲግሪ"),
    ("ክፍል A-5, ኮቪድ-19", "ክፍል a አምስት, ኮቪድ አስራ ዘጠኝ"),
    ("$5 ሚሊዮን", "አምስት ሚሊዮን ዶላር"),
    ("5 ቢሊዮን €", "አምስት ቢሊዮን ዩሮ"),
    ("በ$1", "በአንድ ዶላር"),
    ("5€ እና £5", "አምስት ዩሮ እና አምስት ፓውንድ"),
    ("£2.50, $0.50", "ሁለት ፓውንድ ከሀምሳ ፔንስ, ሀምሳ ሳንቲም"),
    ("-$5, -50%", "ነጌቲቭ አምስት ዶላር, ነጌቲቭ ሀምሳ በመቶ"),
    ("$5-10", "ከአምስት እስከ አስር ዶላር"),
    ("በ1990ዎቹ", "በአንድ ሺህ ዘጠኝ መቶ ዘጠናዎቹ"),
    ("የ2010ዎቹ, 2000ዎቹ", "የሁለት ሺህ አስሮቹ, ሁለት ሺዎቹ"),
    # what is joined to a figure
    ("ገጽ5ነው", "ገጽ አምስት ነው"),
    ("mp3", "mp ሶስት"),
    ("በ2017", "በሁለት ሺህ አስራ ሰባት"),
    ("እስከ10", "እስከአስር"),
    ("5ቱ", "አምስቱ"),
    ("9ኙም", "ዘጠኙም"),
    ("21ዱ", "ሀያ አንዱ"),
    ("10ቱ ትእዛዛት", "አስሩ ትእዛዛት"),
    ("40ቱ", "አርባው"),
    ("5ን", "አምስትን"),
    ("10ሰዎች", "አስር ሰዎች"),
    ("1ኛ", "አንደኛ"),
    ("2ተኛው", "ሁለተኛው"),
    ("9ኛ", "ዘጠነኛ"),
    ("በ20ኛው", "በሀያኛው"),
    ("1ኛ-3ኛ", "አንደኛ ሶስተኛ"),
    # two figures
    ("5-10", "ከአምስት እስከ አስር"),
    ("ከ5–10%", "ከአምስት እስከ አስር በመቶ"),
    ("የ2010-2012", "የሁለት ሺህ አስር እስከ ሁለት ሺህ አስራ ሁለት"),
    ("3-1", "ሶስት አንድ"),
    ("12/3/2016", "አስራ ሁለት ሶስት ሁለት ሺህ አስራ ስድስት"),
    ("3:16", "ሶስት አስራ ስድስት"),
    ("ከቀኑ 8:30 ሰዓት ላይ", "ከቀኑ ስምንት ሰአት ተኩል ላይ"),
    ("8፡00 ሰዓት", "ስምንት ሰአት"),
    ("3:05 ሰዓት", "ሶስት ሰአት ከአምስት ደቂቃ"),
    # Ethiopic numerals
    ("፩", "አንድ"),
    ("፲፩", "አስራ አንድ"),
    ("፻", "አንድ መቶ"),
    ("፳፻፲፯", "ሁለት ሺህ አስራ ሰባት"),
    ("፼", "አስር ሺህ"),
    ("፲፪ኛ", "አስራ ሁለተኛ"),
    ("፩፪", "አንድ ሁለት"),
    # short forms
    ("በ፲፱፻፹፰ ዓ.ም. ተወለደ", "በአንድ ሺህ ዘጠኝ መቶ ሰማንያ ስምንት አመተ ምህረት ተወለደ"),
    ("በ2017 ዓ.ም።", "በሁለት ሺህ አስራ ሰባት አመተ ምህረት."),
    ("ዓ/ም", "አመተ ምህረት"),
    ("እ.ኤ.አ. 2000", "እንደ ኤውሮፓ አቆጣጠር ሁለት ሺህ"),
    ("የዶ/ር አበበ", "የዶክተር አበበ"),
    ("ወ/ሮ አልማዝ", "ወይዘሮ አልማዝ"),
    ("ወ/ሪት", "ወይዘሪት"),
    ("ለት/ቤት", "ለትምህርት ቤት"),
    ("በት/ቤቶች እና ፍ/ቤቱን", "በትምህርት ቤቶች እና ፍርድ ቤቱን"),
    ("ዶ/ርን", "ዶክተርን"),
    ("5ኪ.ሜ. ርቀት", "አምስት ኪሎ ሜትር ርቀት"),
    ("ጠ/ሚ/ር", "ጠቅላይ ሚኒስትር"),
    ("ኃ/የተ/የግ/ማ", "ሀላፊነቱ የተወሰነ የግል ማህበር"),
    ("ገ/ማርያም", "ገብረ ማርያም"),
    ("ኃ/ሥላሴ", "ሀይለ ስላሴ"),
    ("ሀ.ለ.ሐ", "ሀ.ለ.ሀ"),  # an unknown one stays
]


@pytest.mark.parametrize(("raw", "wanted"), NORMALIZED)
def test_amharic_is_normalised(raw, wanted):
    assert normalize(raw) == wanted
    assert normalize(wanted) == wanted  # nothing is left to do


@pytest.mark.parametrize("text", ["0911234567", "0911-23-45-67", "0911 23 45 67"])
def test_a_phone_number_is_read_digit_by_digit(text):
    assert normalize(f"ስልክ {text}") == "ስልክ " + " ".join(ONES[int(d)] for d in "0911234567")


def test_a_phone_number_with_its_country():
    assert normalize("+251 911 234567").split() == [ONES[int(d)] for d in "251911234567"]


@pytest.mark.parametrize("digits", ["007", "1234567890123", "0251911234567"])
def test_what_is_no_amount_is_read_digit_by_digit(digits):
    assert digits_to_words(digits).split() == [ONES[int(d)] for d in digits]
    assert normalize(f"ስልክ{digits}ነው").split() == ["ስልክ", *digits_to_words(digits).split(), "ነው"]


def value(words: str) -> int:
    """The number that `words` name: the rule of the words, read the other way round."""
    tens = "አስር ሀያ ሰላሳ አርባ ሀምሳ ስልሳ ሰባ ሰማንያ ዘጠና".split()
    unit = {w: i for i, w in enumerate(ONES)} | {w: 10 * i for i, w in enumerate(tens, 1)}
    unit["አስራ"] = 10
    total = group = 0
    for word in words.split():
        if word == "መቶ":
            group *= 100
        elif word in (scales := {"ሺህ": 10**3, "ሚሊዮን": 10**6, "ቢሊዮን": 10**9}):
            total, group = total + group * scales[word], 0
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


@pytest.mark.parametrize("signs", ["፩፪", "፲፳", "፻፻", "፩፲", "፼፼፼፼", "፼" * 1000])
def test_signs_that_make_no_number_are_read_one_by_one(signs):
    assert ethiopic_numeral(signs) is None
    each = {"፩": "አንድ", "፪": "ሁለት", "፲": "አስር", "፳": "ሀያ", "፻": "አንድ መቶ", "፼": "አስር ሺህ"}
    assert normalize(signs) == " ".join(each[s] for s in signs)


def test_ordinals_keep_the_number_and_change_its_last_sound():
    for number in range(1, 1000):
        *before, last = ordinal(number_to_words(number)).split()
        *same, stem = number_to_words(number).split()
        assert before == same and last.endswith("ኛ") and last[0] == stem[0]
    assert len({ordinal(number_to_words(n)) for n in range(1000)}) == 1000
