"""The book-keeping: hours lost, the threshold, the table a person reads."""

import pytest
from clips import TEXT

from kit.base.errors import DatasetError
from kit.dataset import data_report
from kit.dataset.data_report import FIXES, DataReport, Finding, refuse
from kit.dataset.manifest import Utterance
from kit.settings import ManifestConfig

SAME = {"text": TEXT, "speaker": "v", "split": "train", "seconds": 2.0}


def kept(count: int, **over) -> list[Utterance]:
    return [Utterance(id=f"k{i}", audio="", line=i, **SAME | over) for i in range(count)]


def finding(line: int, kind: str, seconds: float = 0.0, reason: str = "why") -> Finding:
    row = Utterance(**SAME, id=f"r{line}", audio="", file="metadata.csv", line=line)
    return refuse(row, kind, reason, seconds)


def book(rows, refused) -> DataReport:
    return DataReport(layout="LJSpeech", kept=rows, refused=refused, warned=[])


def test_every_kind_has_a_fix_and_clips_of_unknown_length_count_as_average_ones():
    assert all(finding(1, kind).cure == fix for kind, fix in FIXES.items())
    result = book(kept(18), [finding(1, "missing"), finding(2, "silent", seconds=6.0)])
    assert (result.kept_s, result.lost_s) == (36, 8)
    assert result.lost_percent == pytest.approx(100 * 8 / 44)


def test_too_much_rejected_ends_it_with_the_reasons_and_so_does_no_row_to_train_on(tmp_path):
    result = book(kept(2), [finding(line, "silent", seconds=line) for line in range(1, 21)])
    facts = r"(?s)98\.1 %.*limit 5 %.*20 clips, silent.*metadata\.csv:1 .*/rejected\.jsonl\."
    with pytest.raises(DatasetError, match=rf"{facts}.*max_rejected_percent=99"):
        result.require_usable(ManifestConfig(), tmp_path / "rejected.jsonl")
    result.require_usable(ManifestConfig(max_rejected_percent=98.2), tmp_path)
    for rows, refused in (([], []), (kept(3, split="held_out"), []), ([], [finding(1, "silent")])):
        with pytest.raises(DatasetError, match=r"No utterance can be trained on\."):
            book(rows, refused).require_usable(ManifestConfig(max_rejected_percent=100), tmp_path)


def test_the_table_shows_the_worst_first_and_counts_the_rest():
    table = data_report.findings_table
    head, first, *others = table([finding(i, "silent", i) for i in range(1, 31)])
    assert head[0] == "where" and first[:3] == ("metadata.csv:30", "r30", "30.0")
    assert len(others) == 20 and others[-1][0] == "and 10 more" and table([]) == []
    assert table([finding(1, "row")])[1][2] == "?", "an unmeasured clip"


def test_the_report_begins_with_hours_and_the_commonest_reasons():
    kinds = ["silent"] * 4 + ["missing"] * 3 + ["clipped"] * 2 + ["pace"]
    refused = [finding(i, kind, reason=f"why {kind}") for i, kind in enumerate(kinds, 1)]
    first, *reasons = book(kept(10, seconds=3600), refused).summary()
    assert "10.00 hours kept in 10 utterances" in first
    assert "10.00 hours (50.00 %) lost in 10" in first
    commonest = ["4 clips, silent", "3 clips, missing", "2 clips, clipped"]
    assert [reason.split(":")[0].strip() for reason in reasons] == commonest
    assert "metadata.csv:1 r1" in reasons[0] and "why silent" in reasons[0]
