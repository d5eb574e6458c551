"""Languages with a file of their own: what is written in figures or in short becomes words."""

import pytest

from kit.text.normalize import language_example, normalize

AMHARIC = [
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
    ("ዓ/ም, እ.ኤ.አ. 2000, የዶ/ር አበበ", "አመተ ምህረት, እንደ ኤውሮፓ አቆጣጠር ሁለት ሺህ, የዶክተር አበበ"),
    ("ወ/ሮ አልማዝ, ወ/ሪት, ለት/ቤት", "ወይዘሮ አልማዝ, ወይዘሪት, ለትምህርት ቤት"),
    ("በት/ቤቶች እና ፍ/ቤቱን, ዶ/ርን, 5ኪ.ሜ. ርቀት", "በትምህርት ቤቶች እና ፍርድ ቤቱን, ዶክተርን, አምስት ኪሎ ሜትር ርቀት"),
    ("ጠ/ሚ/ር, ኃ/የተ/የግ/ማ, ገ/ማርያም, ኃ/ሥላሴ", "ጠቅላይ ሚኒስትር, ሀላፊነቱ የተወሰነ የግል ማህበር, ገብረ ማርያም, ሀይለ ስላሴ"),
]
ENGLISH = [
    ("“Hello”,  WORLD 42!", "hello, world forty two!"),
    ("1,234; 0, 007", "one thousand two hundred thirty four; zero, zero zero seven"),
    ("3.14, 50%, $5", "three point one four, fifty percent, five dollars"),
    ("the 1st, 2nd, 3rd and 12th", "the first, second, third and twelfth"),
    ("Dr. Smith & Mrs. Jones", "doctor smith and missus jones"),
    ("2-3, 3-1, 1.5-2 km", "two to three, three one, one point five to two km"),
    ("−5, –5 °C, 1°, -1 °F, 20℃", "minus five, minus five degrees celsius, one degree, "
     "minus one degree fahrenheit, twenty degrees celsius"),
    ("I don't know mp3, 5 − 3, word —5", "i don't know mp three, five minus three, word five"),
    ("A-5, covid-19, 5-year-old", "a five, covid nineteen, five year old"),
    ("10-15, 10 -15, 5%-10%, 5€-10€", "ten to fifteen, ten fifteen, five percent ten percent, "
     "five euros ten euros"),
    ("$5 million, $1 million, 5 million €", "five million dollars, one million dollars, "
     "five million euros"),
    ("$5m or £2bn, 1,000,000 or 3.5 kg", "five million dollars or two billion pounds, one million "
     "or three point five kg"),
    ("£2.50, $1.01, €0.50, $2.00", "two pounds fifty pence, one dollar one cent, fifty cents, "
     "two dollars"),
    ("£2,50, $2.5, $2.505", "two pounds fifty pence, two point five dollars, "
     "two point five zero five dollars"),
    ("-$5, $-5, -50%", "minus five dollars, minus five dollars, minus fifty percent"),
    ("$5-10, 5–10%, 3-4pm", "five to ten dollars, five to ten percent, three to four pm"),
    ("1-2-2016, 10:30-11:30, 2024-05", "one two two thousand sixteen, ten thirty eleven thirty, "
     "two thousand twenty four zero five"),
    ("555-1234, 1990-1995", "five hundred fifty five one thousand two hundred thirty four, "
     "one thousand nine hundred ninety to one thousand nine hundred ninety five"),
    ("1990s, the 90s, 1900s, 2000s, 2010s", "nineteen nineties, the nineties, nineteen hundreds, "
     "two thousands, twenty tens"),
]  # fmt: skip
RUSSIAN = [
    (language_example("ru"), "мука: две тысячи триста пятьдесят один рубль."),
    ("+Окна, вол+ос: 2+2", "окна, волос: два + два"),
    ("0, 14, 100, 1000", "ноль, четырнадцать, сто, одна тысяча"),
    ("2000111", "два миллиона сто одиннадцать"),
    ("5 000 000 007", "пять миллиардов семь"),
]
TURKISH = [
    ("Iğdır'da IŞIK, İstanbul'da İYİ!", "ığdırda ışık, istanbulda iyi!"),
    ("I\u0307zmir", "izmir"),  # the dot as a mark of its own
    ("0, 7, 10, 45; 100 kişi, 1000, 1101", "sıfır, yedi, on, kırk beş; yüz kişi, bin, bin yüz bir"),
    ("2,5 kilo; 3,05, 1,2,3", "iki virgül beş kilo; üç virgül sıfır beş, bir, iki, üç"),
    ("1.234,56 TL", "bin iki yüz otuz dört virgül elli altı lira"),
    ("%50 ve 12,5%, ₺20, 5 $", "yüzde elli ve yüzde on iki virgül beş, yirmi lira, beş dolar"),
    ("1990'da, 4'ü, 9'a, %20'si", "bin dokuz yüz doksanda, dördü, dokuza, yüzde yirmisi"),
    ("1. 2. 3. 4. 6. kat", "bir. iki. üç. dört. altıncı kat"),
    ("29. gün, 30. yıl, 100. yıl", "yirmi dokuzuncu gün, otuzuncu yıl, yüzüncü yıl"),
    ("Saat 14.30, 8:05", "saat on dört otuz, sekiz sıfır beş"),
    ("3.5 kg, 36.65, 1.000", "üç nokta beş kg, otuz altı nokta altmış beş, bin"),
    ("0532 123", "sıfır beş üç iki yüz yirmi üç"),
    ("Prof. Dr. Kaya & oğlu, vb.", "profesör doktor kaya ve oğlu, ve benzeri"),
    ("−5, –5 °C'de, 1°", "eksi beş, eksi beş santigrat derecede, bir derece"),
    ("A-5, covid-19, 10-15", "a beş, covid on dokuz, on on beş"),
    ("$5 milyon, 5 milyon TL, 1 milyar €", "beş milyon dolar, beş milyon lira, bir milyar euro"),
    ("£2,50, £2.50", "iki virgül elli sterlin, iki virgül elli sterlin"),
    ("-%5, 5%-10%, %5-10", "eksi yüzde beş, yüzde beş yüzde on, yüzde beş on"),
]
TABLES = {"am": AMHARIC, "en": ENGLISH, "ru": RUSSIAN, "tr": TURKISH}
ROWS = [(language, *row) for language, rows in TABLES.items() for row in rows]


@pytest.mark.parametrize(("language", "raw", "wanted"), ROWS)
def test_text_is_normalised(language, raw, wanted):
    assert normalize(raw, language) == wanted
    assert normalize(wanted, language) == wanted  # nothing is left to do
