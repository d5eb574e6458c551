"""Russian: numbers as words, in the nominative; marks of stress are left out."""

import pytest

from kit.text.normalize import language_example, normalize

NORMALIZED = [
    (language_example("ru"), "мука: две тысячи триста пятьдесят один рубль."),
    ("+Окна, вол+ос: 2+2", "окна, волос: два + два"),
    ("0, 14, 100, 1000", "ноль, четырнадцать, сто, одна тысяча"),
    ("12000; 21 342", "двенадцать тысяч; двадцать одна тысяча триста сорок два"),
    ("2000111", "два миллиона сто одиннадцать"),
    ("5 000 000 007", "пять миллиардов семь"),
]


@pytest.mark.parametrize(("raw", "wanted"), NORMALIZED)
def test_russian_is_normalised(raw, wanted):
    assert normalize(raw, "ru") == wanted
    assert normalize(wanted, "ru") == wanted
