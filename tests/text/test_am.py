"""Amharic: one spelling per sound; figures, numerals and short forms as a reader says them."""

import random

import pytest

from kit.text.languages.am import ONES, ethiopic_numeral, number_to_words
from kit.text.normalize import normalize

NORMALIZED = [
    # letters that sound alike, one spelling
    ("ሐገር, ኀይል, ሃገር, ሓሳብ, ኃይል, ኻያ, ኹኔታ, ሠላም, ሥራ", "ሀገር, ሀይል, ሀገር, ሀሳብ, ሀይል, ሀያ, ሁኔታ, ሰላም, ስራ"),
    ("ንጉሥ, ዐይን, ዓለም, ኣበበ, ዕለት, ፀሐይ, ፅሑፍ, ዒላማ", "ንጉስ, አይን, አለም, አበበ, እለት, ጸሀይ, ጽሁፍ, ኢላማ"),
    # punctuation
    ("ሰላም፡ለሁሉ። ሰላም፡፡", "ሰላም ለሁሉ. ሰላም."),
    ("መጣ።ሄደ፤ እንዲህ፦ አለ፧", "መጣ. ሄደ; እንዲህ: አለ?"),
    ("  «ሰላም» \t\n (አለ) PC፣ ከበደ፥ አበበ", "ሰላም አለ pc, ከበደ, አበበ"),
    # amounts
    ("205, 1000, 1234, 15,000", "ሁለት መቶ አምስት, አንድ ሺህ, አንድ ሺህ ሁለት መቶ ሰላሳ አራት, አስራ አምስት ሺህ"),
    ("1,000,000, 2000000001, ٣ እና ५, 3.5", "አንድ ሚሊዮን, ሁለት ቢሊዮን አንድ, ሶስት እና አምስት, ሶስት ነጥብ አምስት"),
    ("2.5 %, $5, 20€, 500 ብር", "ሁለት ነጥብ አምስት በመቶ, አምስት ዶላር, ሀያ ዩሮ, አምስት መቶ ብር"),
    ("5.50 ብር, 7.00 ብር, -5 ዲግሪ", "አምስት ብር ከሀምሳ ሳንቲም, ሰባት ብር, ነጌቲቭ አምስት ዲግሪ"),
    ("−5 °C, 1°, ክፍል A-5, ኮቪድ-19", "ነጌቲቭ አምስት ዲግሪ ሴልሺየስ, አንድ ዲግሪ, ክፍል a አምስት, ኮቪድ አስራ ዘጠኝ"),
    ("5€ እና £5, £2.50, $0.50", "አምስት ዩሮ እና አምስት ፓውንድ, ሁለት ፓውንድ ከሀምሳ ፔንስ, ሀምሳ ሳንቲም"),
    ("-$5, -50%, $5-10", "ነጌቲቭ አምስት ዶላር, ነጌቲቭ ሀምሳ በመቶ, ከአምስት እስከ አስር ዶላር"),
    ("በ1990ዎቹ, የ2010ዎቹ, 2000ዎቹ", "በአንድ ሺህ ዘጠኝ መቶ ዘጠናዎቹ, የሁለት ሺህ አስሮቹ, ሁለት ሺዎቹ"),
    # what is joined to a figure
    ("ገጽ5ነው, mp3, በ2017, እስከ10, 5ቱ", "ገጽ አምስት ነው, mp ሶስት, በሁለት ሺህ አስራ ሰባት, እስከአስር, አምስቱ"),
    ("9ኙም, 21ዱ, 10ቱ ትእዛዛት, 40ቱ, 5ን, 10ሰዎች", "ዘጠኙም, ሀያ አንዱ, አስሩ ትእዛዛት, አርባው, አምስትን, አስር ሰዎች"),
    ("1ኛ, 2ተኛው, 9ኛ, በ20ኛው, 1ኛ-3ኛ", "አንደኛ, ሁለተኛው, ዘጠነኛ, በሀያኛው, አንደኛ ሶስተኛ"),
    # two figures
    ("5-10, ከ5–10%", "ከአምስት እስከ አስር, ከአምስት እስከ አስር በመቶ"),
    ("12/3/2016, 3:16", "አስራ ሁለት ሶስት ሁለት ሺህ አስራ ስድስት, ሶስት አስራ ስድስት"),
    ("ከቀኑ 8:30 ሰዓት ላይ, 8፡00 ሰዓት, 3:05 ሰዓት", "ከቀኑ ስምንት ሰአት ተኩል ላይ, ስምንት ሰአት, ሶስት ሰአት ከአምስት ደቂቃ"),
    # Ethiopic numerals
    ("፩, ፲፩, ፻, ፳፻፲፯, ፼, ፲፪ኛ", "አንድ, አስራ አንድ, አንድ መቶ, ሁለት ሺህ አስራ ሰባት, አስር ሺህ, አስራ ሁለተኛ"),
    # short forms
    ("በ፲፱፻፹፰ ዓ.ም. ተወለደ", "በአንድ ሺህ ዘጠኝ መቶ ሰማንያ ስምንት አመተ ምህረት ተወለደ"),
    ("በ2017 ዓ.ም።", "በሁለት ሺህ አስራ ሰባት አመተ ምህረት."),
    ("ዓ/ም, እ.ኤ.አ. 2000, የዶ/ር አበበ", "አመተ ምህረት, እንደ ኤውሮፓ አቆጣጠር ሁለት ሺህ, የዶክተር አበበ"),
    ("ወ/ሮ አልማዝ, ወ/ሪት, ለት/ቤት", "ወይዘሮ አልማዝ, ወይዘሪት, ለትምህርት ቤት"),
    ("በት/ቤቶች እና ፍ/ቤቱን, ዶ/ርን, 5ኪ.ሜ. ርቀት", "በትምህርት ቤቶች እና ፍርድ ቤቱን, ዶክተርን, አምስት ኪሎ ሜትር ርቀት"),
    ("ጠ/ሚ/ር, ኃ/የተ/የግ/ማ, ገ/ማርያም, ኃ/ሥላሴ", "ጠቅላይ ሚኒስትር, ሀላፊነቱ የተወሰነ የግል ማህበር, ገብረ ማርያም, ሀይለ ስላሴ"),
]


@pytest.mark.parametrize(("raw", "wanted"), NORMALIZED)
def test_amharic_is_normalised(raw, wanted):
    assert normalize(raw) == wanted
    assert normalize(wanted) == wanted  # nothing is left to do


def test_what_is_no_amount_is_read_digit_by_digit():
    for number in ("0911234567", "0911-23-45-67", "+251 911 234567", "007", "1234567890123"):
        digits = [ONES[int(d)] for d in number if d.isdecimal()]
        assert normalize(f"ስልክ {number}").split() == ["ስልክ", *digits]


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


def test_letters_of_one_sound_can_stay_as_they_are():
    pairs = {
        "ሠላም! ፀሐይ በ2017 ዓ.ም. ኃ/ማርያም": "ሠላም! ፀሐይ በሁለት ሺህ አስራ ሰባት አመተ ምህረት ሀይለ ማርያም",
        "ሠላም ሰላም ሠላም": "ሠላም ሰላም ሠላም",
        "3:30 ሰዓት": "ሶስት ሰዓት ተኩል",
    }
    for raw, wanted in pairs.items():
        assert normalize(raw, respell=False) == wanted
        assert normalize(wanted, respell=False) == wanted
        assert normalize(wanted) == normalize(raw)
