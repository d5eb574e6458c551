"""Values that strangers wrote are checked against a table, and the first wrong part is named."""

import dataclasses

import pytest

from kit.base.config import MAX_DEPTH, checked, parse_object
from kit.base.errors import KitError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    width: int = 8
    levels: tuple[int, ...] = (2,)


SCHEMA = {
    "rate": (int, 8000, 192_000),
    "names": (list, 1, 3, (str, 1, 5)),
    "files": (dict, 0, 2, {"bytes": (int, 0, 10)}),
    "note": (str | None, 0, 9),
    "gain": (float, 0, 1),
    "size": Size,
}
GOOD = {
    "rate": 8000,
    "names": ["a", "b"],
    "files": {"x": {"bytes": 3}},
    "note": None,
    "gain": 1,
    "size": {"width": 9, "levels": [3, 4]},
}


def test_what_fits_is_returned_with_its_dataclasses_built():
    assert checked(GOOD, SCHEMA, "card") == GOOD | {"size": Size(width=9, levels=(3, 4))}


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"rate": 7999}, r"card\.rate is 7999: must lie in 8000 to 192000"),
        ({"rate": True}, r"card\.rate must be of type int, got True"),
        ({"rate": 8000.0}, r"card\.rate must be of type int, got 8000\.0"),
        ({"names": []}, r"length of card\.names is 0"),
        ({"names": "ab"}, r"card\.names must be of type list, got 'ab'"),
        ({"names": [1, "a"]}, r"card\.names\[0\] must be of type str, got 1"),
        ({"files": {"x": {}}}, r"card\.files\['x'\] has no bytes"),
        ({"files": {"x": {"bytes": 3, "byte": 4}}}, r"unknown key `byte`.*`bytes`"),
        ({"note": 7}, r"card\.note must be of type str \| None"),
        ({"gain": float("nan")}, r"card\.gain is nan"),
        ({"size": {"wide": 1}}, r"no setting `wide`"),
        ({"size": {"levels": [3, "x"]}}, r"Size\.levels must be a list.*tuple\[int, \.\.\.\]"),
        ({"size": []}, r"card\.size must be of type dict, got a list of length 0"),
        ({"rat": 1}, r"unknown key `rat`"),
    ],
)
def test_what_does_not_fit_is_named(over, message):
    with pytest.raises(KitError, match=message):
        checked(GOOD | over, SCHEMA, "card")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must be a JSON object, got a list"),
        ("null", "got None"),
        ("{", "not valid JSON"),
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"a": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}", "levels deep"),
    ],
)
def test_what_is_no_plain_object_is_refused(text, message):
    with pytest.raises(KitError, match=f"header .*{message}"):
        parse_object(text, "header")
