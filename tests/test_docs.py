"""What the README claims is what docs/measurements.md holds."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NUMBER = r"(?<![\w.,])(\d[\d,]*(?:\.\d+)?)"
UNITS = r"%|x\b|minutes?\b|min\b|ms\b|s\b|h\b|hours?\b|[KMG]i?B\b|steps/s\b"


def figures(text: str) -> set[tuple[str, str]]:
    """(number, unit) of every number with a unit or of a ratio (`2.40x`)."""
    return set(re.findall(rf"{NUMBER}\s?({UNITS})", text))


def unknown_figures(claims: str, measured: str) -> set[tuple[str, str]]:
    """Figures of `claims` that are not in `measured`, where a ratio's column has no x."""
    known = figures(measured)
    known |= {(number, "x") for number in re.findall(NUMBER, measured)}
    return figures(claims) - known


def test_every_figure_of_the_readme_is_in_the_measurements():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(figures(readme)) >= 15
    measured = (ROOT / "docs/measurements.md").read_text(encoding="utf-8")
    assert unknown_figures(readme, measured) == set()


@pytest.mark.parametrize("claim", ["3.51x as fast", "9.7 min", "in 3.50 ms", "18.1 %", "1.7x less"])
def test_a_figure_that_nobody_measured_is_found(claim):
    measured = "| step | 1.70 | 18 % | 3.50 | 9.6 min |"
    assert len(unknown_figures(claim, measured)) == 1
