"""Turkish: its own lower case, figures, ordinals and suffixes as words."""

import pytest

from kit.text.normalize import normalize

NORMALIZED = [
    ("Iğdır'da IŞIK, İstanbul'da İYİ!", "ığdırda ışık, istanbulda iyi!"),
    ("I\u0307zmir", "izmir"),  # the dot as a mark of its own
    ("0, 7, 10, 45; 100 kişi, 1000, 1101", "sıfır, yedi, on, kırk beş; yüz kişi, bin, bin yüz bir"),
    ("1.250 lira, 1.250.000", "bin iki yüz elli lira, bir milyon iki yüz elli bin"),
    ("2,5 kilo; 3,05, 1,2,3", "iki virgül beş kilo; üç virgül sıfır beş, bir, iki, üç"),
    ("1.234,56 TL", "bin iki yüz otuz dört virgül elli altı lira"),
    ("%50 ve 12,5%, ₺20, 5 $", "yüzde elli ve yüzde on iki virgül beş, yirmi lira, beş dolar"),
    ("1990'da, 4'ü, 9'a, %20'si", "bin dokuz yüz doksanda, dördü, dokuza, yüzde yirmisi"),
    ("1. 2. 3. 4. 6. kat", "bir. iki. üç. dört. altıncı kat"),
    ("29. gün, 30. yıl, 100. yıl", "yirmi dokuzuncu gün, otuzuncu yıl, yüzüncü yıl"),
    ("4. sınıf; 3'üncü, 4'üncü", "dördüncü sınıf; üçüncü, dördüncü"),
    ("Saat 14.30, 8:05", "saat on dört otuz, sekiz sıfır beş"),
    ("3.5 kg, 36.65, 1.000", "üç nokta beş kg, otuz altı nokta altmış beş, bin"),
    ("29.10.1923", "yirmi dokuz on bin dokuz yüz yirmi üç"),
    ("0532 123", "sıfır beş üç iki yüz yirmi üç"),
    ("Prof. Dr. Kaya & oğlu, vb.", "profesör doktor kaya ve oğlu, ve benzeri"),
    ("-5 derece, (-3,5)", "eksi beş derece, eksi üç virgül beş"),
    ("−5, –5 °C'de, 1°", "eksi beş, eksi beş santigrat derecede, bir derece"),
    ("A-5, covid-19, 10-15", "a beş, covid on dokuz, on on beş"),
    ("$5 milyon, 5 milyon TL, 1 milyar €", "beş milyon dolar, beş milyon lira, bir milyar euro"),
    ("£2,50, £2.50", "iki virgül elli sterlin, iki virgül elli sterlin"),
    ("-%5, 5%-10%, %5-10", "eksi yüzde beş, yüzde beş yüzde on, yüzde beş on"),
    ("1990'lar, 2'nci, 12:30", "bin dokuz yüz doksanlar, ikinci, on iki otuz"),
]


@pytest.mark.parametrize(("raw", "wanted"), NORMALIZED)
def test_turkish_is_normalised(raw, wanted):
    assert normalize(raw, "tr") == wanted
    assert normalize(wanted, "tr") == wanted
