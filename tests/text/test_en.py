"""English: figures, signs and short forms as words."""

import pytest

from kit.text.normalize import normalize

NORMALIZED = [
    ("“Hello”,  WORLD 42!", "hello, world forty two!"),
    ("1,234; 0, 007", "one thousand two hundred thirty four; zero, zero zero seven"),
    ("1.2.2016 10:30", "one two two thousand sixteen ten thirty"),
    ("3.14, 50%, $5", "three point one four, fifty percent, five dollars"),
    ("the 1st, 2nd, 3rd and 12th", "the first, second, third and twelfth"),
    ("20th, 21st, 100th", "twentieth, twenty first, one hundredth"),
    ("Dr. Smith & Mrs. Jones", "doctor smith and missus jones"),
    ("2-3, 3-1, 1.5-2 km", "two to three, three one, one point five to two km"),
    ("-5 degrees, (-3.5)", "minus five degrees, minus three point five"),
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
    ("5€, €5, 5 €, £5, ¥5, ₹5", "five euros, five euros, five euros, five pounds, five yen, "
     "five rupees"),
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
    ("0911-23-45-67", "zero nine one one twenty three forty five sixty seven"),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "wanted"), NORMALIZED)
def test_english_is_normalised(raw, wanted):
    assert normalize(raw, "en") == wanted
    assert normalize(wanted, "en") == wanted
