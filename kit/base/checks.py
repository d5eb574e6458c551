"""A check: what was measured, what was wanted, and what to do where they differ."""

from typing import NamedTuple


class Check(NamedTuple):
    what: str
    measured: str
    wanted: str
    problem: str  # what is wrong and what to do; "" if it passes


def problems_of(checks: list[Check]) -> list[str]:
    return [check.problem for check in checks if check.problem]
