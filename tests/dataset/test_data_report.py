"""The book-keeping: hours lost, the threshold, the table a person reads."""

import pytest
from clips import TEXT

from kit.base.errors import DatasetError, KitError
from kit.dataset.data_report import (
    FIXES,
    DataReport,
    Finding,
    ManifestConfig,
    Utterance,
    by_kind,
    findings_table,
)


def kept(count: int, seconds: float = 2.0, split: str = "train") -> list[Utterance]:
    same = {"text": TEXT, "speaker": "v", "split": split, "seconds": seconds}
    return [Utterance(id=f"k{i}", audio="", line=i, **same) for i in range(count)]


def finding(line: int, kind: str, seconds: float = 0.0, reason: str = "why") -> Finding:
    where = {"file": "metadata.csv", "line": line, "id": f"r{line}"}
    return Finding(**where, kind=kind, reason=reason, seconds=seconds)


def book(rows, refused) -> DataReport:
    return DataReport(layout="LJSpeech", kept=rows, refused=refused, warned=[])


def test_every_kind_has_a_fix_and_a_row_may_bring_its_own():
    assert all(finding(1, kind).cure == fix for kind, fix in FIXES.items())
    own = Finding(file="t", line=1, id="", kind="row", reason="why", cure="save it as UTF-8")
    assert own.cure == "save it as UTF-8"


def test_clips_of_unknown_length_count_as_average_ones():
    result = book(kept(18), [finding(1, "missing"), finding(2, "silent", seconds=6.0)])
    assert (result.kept_s, result.lost_s) == (36, 8)
    assert result.lost_percent == pytest.approx(100 * 8 / 44)


def test_too_much_refused_stops_with_reasons_and_fix(tmp_path):
    result = book(kept(18), [finding(1, "missing"), finding(2, "missing")])
    message = (
        r"10\.0 % .*limit 5 %\): 2 rows\n  .*csv:1 r1: why; put .*\n(.*\n)+.*rejected_percent=10"
    )
    with pytest.raises(DatasetError, match=message):
        result.require_usable(ManifestConfig(), tmp_path / "ledger.jsonl")
    result.require_usable(ManifestConfig(max_rejected_percent=10.1), tmp_path)


def test_a_message_names_the_first_refused_rows_and_counts_the_rest(tmp_path):
    result = book(kept(2), [finding(line, "silent", seconds=line) for line in range(1, 21)])
    with pytest.raises(DatasetError) as caught:
        result.require_usable(ManifestConfig(), tmp_path)
    assert str(caught.value).splitlines()[1].startswith("  metadata.csv:20 ")
    assert "csv:12 " not in str(caught.value) and "\n  and 12 more" in str(caught.value)


def test_nothing_to_train_on_is_reported(tmp_path):
    for rows, refused in (([], []), (kept(3, split="held_out"), []), ([], [finding(1, "silent")])):
        with pytest.raises(DatasetError, match=r"No utterance can be trained on\. Refused: "):
            book(rows, refused).require_usable(ManifestConfig(max_rejected_percent=100), tmp_path)


def test_findings_are_grouped_by_kind_the_commonest_first():
    one, two, three = finding(1, "clipped", 5), finding(2, "silent", 1), finding(3, "silent", 2)
    assert list(by_kind([one, two, three]).items()) == [
        ("silent", [two, three]),
        ("clipped", [one]),
    ]
    assert by_kind([]) == {}


def test_the_table_shows_the_worst_first_and_counts_the_rest():
    head, first, *others = findings_table(
        [finding(i, "silent", i) for i in range(1, 31)], max_rows=5
    )
    assert head[0] == "where" and first[:3] == ("metadata.csv:30", "r30", "30.0")
    assert len(others) == 5 and others[-1][0] == "and 25 more"


def test_the_table_of_nothing_is_empty_and_an_unmeasured_clip_has_no_length():
    assert findings_table([]) == []
    assert findings_table([finding(1, "row")])[1][2] == "?"


@pytest.mark.parametrize(
    "field, value",
    [
        ("min_clip_s", 30),
        ("characters_per_s", (40, 2)),
        ("max_rejected_percent", 101),
        ("held_out_percent", -1),
        ("odd_share", 0.7),
        ("pace_deviations", 0),
        ("most_repeats", 0),
    ],
)
def test_limits_that_make_no_sense_are_refused_by_name(field, value):
    with pytest.raises(KitError, match=rf"ManifestConfig\.{field} = "):
        ManifestConfig(**{field: value})
