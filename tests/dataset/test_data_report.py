"""The book-keeping: hours lost, the threshold, the table a person reads; rows in a file."""

import dataclasses
import pickle
import tracemalloc

import pytest
from clips import TEXT
from folders import folder_of
from test_checks import SOUND

from kit.audio.clip import ClipMeasure
from kit.base.errors import DatasetError, KitError
from kit.dataset import checks, data_report
from kit.dataset.data_report import FIXES, DataReport, Finding, Spool
from kit.dataset.layouts import read_dataset
from kit.dataset.manifest import Utterance, write_manifest
from kit.dataset.segmentation import SegmentConfig
from kit.settings import AlignConfig, ArchiveConfig, HubConfig, ManifestConfig


def kept(count: int, seconds: float = 2.0, split: str = "train") -> list[Utterance]:
    same = {"text": TEXT, "speaker": "v", "split": split, "seconds": seconds}
    return [Utterance(id=f"k{i}", audio="", line=i, **same) for i in range(count)]


def finding(line: int, kind: str, seconds: float = 0.0, reason: str = "why") -> Finding:
    where = {"file": "metadata.csv", "line": line, "id": f"r{line}"}
    return Finding(**where, kind=kind, reason=reason, seconds=seconds)


def book(rows, refused) -> DataReport:
    return DataReport(layout="LJSpeech", kept=rows, refused=refused, warned=[])


def test_every_kind_has_a_fix_and_clips_of_unknown_length_count_as_average_ones():
    assert all(finding(1, kind).cure == fix for kind, fix in FIXES.items())
    own = Finding(file="t", line=1, id="", kind="row", reason="why", cure="save it as UTF-8")
    assert own.cure == "save it as UTF-8"
    result = book(kept(18), [finding(1, "missing"), finding(2, "silent", seconds=6.0)])
    assert (result.kept_s, result.lost_s) == (36, 8)
    assert result.lost_percent == pytest.approx(100 * 8 / 44)


def test_too_much_refused_stops_with_reasons_and_fix(tmp_path):
    result = book(kept(18), [finding(1, "missing"), finding(2, "missing")])
    rows = r"2 rows\n  .*csv:1 r1: why; put .*\n(.*\n)+.*MAX_REJECTED_PERCENT.*01_data_prep"
    with pytest.raises(DatasetError, match=rf"10\.0 % .*limit 5 %\): {rows}.*_percent=10"):
        result.require_usable(ManifestConfig(), tmp_path / "ledger.jsonl")
    result.require_usable(ManifestConfig(max_rejected_percent=10.1), tmp_path)


def test_a_message_names_the_first_refused_rows_and_says_that_no_row_is_left(tmp_path):
    result = book(kept(2), [finding(line, "silent", seconds=line) for line in range(1, 21)])
    with pytest.raises(DatasetError) as caught:
        result.require_usable(ManifestConfig(), tmp_path)
    assert str(caught.value).splitlines()[1].startswith("  metadata.csv:20 ")
    assert "csv:12 " not in str(caught.value) and "\n  and 12 more" in str(caught.value)
    for rows, refused in (([], []), (kept(3, split="held_out"), []), ([], [finding(1, "silent")])):
        with pytest.raises(DatasetError, match=r"No utterance can be trained on\. Refused: "):
            book(rows, refused).require_usable(ManifestConfig(max_rejected_percent=100), tmp_path)


def test_findings_are_grouped_by_kind_the_commonest_first():
    one, two, three = finding(1, "clipped", 5), finding(2, "silent", 1), finding(3, "silent", 2)
    grouped = data_report.by_kind([one, two, three])
    assert list(grouped.items()) == [("silent", [two, three]), ("clipped", [one])]


def test_the_table_shows_the_worst_first_and_counts_the_rest():
    table = data_report.findings_table
    head, first, *others = table([finding(i, "silent", i) for i in range(1, 31)])
    assert head[0] == "where" and first[:3] == ("metadata.csv:30", "r30", "30.0")
    assert len(others) == 20 and others[-1][0] == "and 10 more" and table([]) == []
    assert table([finding(1, "row")])[1][2] == "?", "an unmeasured clip"


SENSELESS = {
    AlignConfig: {"batch": 0, "spread": 0.0, "least_gap": -1.0},
    ArchiveConfig: {"most_gib": 0.0, "most_ratio": 0.5},
    HubConfig: {"most_hours": 0.0},
    ManifestConfig: {"min_clip_s": 30, "characters_per_s": (40, 2), "max_rejected_percent": 101}
    | {"held_out_percent": -1, "odd_share": 0.7, "pace_deviations": 0, "most_repeats": 0},
    SegmentConfig: {"min_s": 0.0, "max_s": 0.5, "least_pause_s": 0.0, "margin_s": -0.1},
}


@pytest.mark.parametrize("config", SENSELESS)
def test_limits_that_make_no_sense_are_refused_by_name(config):
    for field, value in SENSELESS[config].items():
        name = "min_s" if field == "max_s" else field  # it is below that
        with pytest.raises(KitError, match=rf"{config.__name__}\.{name} = "):
            config(**{field: value})


def test_the_report_begins_with_hours_and_the_commonest_reasons():
    kinds = ["silent"] * 4 + ["missing"] * 3 + ["clipped"] * 2 + ["noisy"]
    refused = [finding(i, kind, reason=f"why {kind}") for i, kind in enumerate(kinds, 1)]
    first, *reasons = book(kept(10, seconds=3600), refused).summary()
    assert "10.00 hours kept in 10 utterances" in first
    assert "10.00 hours (50.00 %) lost in 10" in first
    commonest = ["4 clips, silent", "3 clips, missing", "2 clips, clipped"]
    assert [reason.split(":")[0].strip() for reason in reasons] == commonest
    assert "metadata.csv:1 r1" in reasons[0] and "why silent" in reasons[0]


# --- rows in a file -----------------------------------------------------------------------------


@pytest.fixture(params=[2**24, 1], ids=["in memory", "in a file"])
def values(request, monkeypatch) -> Spool:
    monkeypatch.setattr(data_report, "IN_MEMORY_BYTES", request.param)
    return Spool({"n": n} for n in range(9))


def test_it_reads_like_a_list(values):
    plain = [{"n": n} for n in range(9)]
    assert list(values) == plain and values == plain and plain == values
    assert (values[0], values[-1], values[2:5]) == (plain[0], plain[-1], plain[2:5])
    assert values != plain[:-1] and len(values) == 9 and not Spool()
    assert list(zip(values, values[1:])) == list(zip(plain, plain[1:]))
    with pytest.raises(IndexError):
        values[9]


def test_some_of_it_keep_their_order_and_travel(values, monkeypatch):
    odd = data_report.rows_where(values, lambda value: value["n"] % 2)
    assert isinstance(odd, Spool) and [value["n"] for value in odd] == [1, 3, 5, 7]
    assert pickle.loads(pickle.dumps(odd)) == odd
    monkeypatch.setattr(data_report, "BLOCK", 4)
    assert list(Spool(range(1000))) == list(range(1000))


def made_dataset(folder, rows: int):
    lines = [f"clip_{number:07d}|{TEXT} {TEXT} {TEXT} {number % 7919}\n" for number in range(rows)]
    recordings = [f"wavs/clip_{number:07d}.wav" for number in range(rows)]
    return folder_of(folder, recordings, **{"metadata.csv": "".join(lines)})


class MadeMeasures(dict):
    """Has no items, and yet one for each path."""

    def __missing__(self, path: str) -> ClipMeasure:
        return dataclasses.replace(SOUND, seconds=4.0)


def peak_bytes(folder, rows: int) -> int:
    data = made_dataset(folder / "data", rows)
    tracemalloc.start()
    try:
        checks.check_dataset(data, ManifestConfig(most_characters=200), folder / "run")
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.long
def test_a_row_costs_few_bytes_until_it_is_in_the_manifest(tmp_path, monkeypatch):
    monkeypatch.setattr(data_report, "IN_MEMORY_BYTES", 1)
    monkeypatch.setattr(checks, "measure_clips", lambda *_, **__: MadeMeasures())
    few, many = (peak_bytes(tmp_path / str(rows), rows) for rows in (1000, 3000))
    assert (many - few) / 2000 < 500  # a folder's own listing is most of it


def test_the_manifest_is_that_of_a_list(tmp_path):
    rows = read_dataset(made_dataset(tmp_path / "data", 50), ManifestConfig()).rows
    assert isinstance(rows, Spool) and {row.split for row in rows} == {"train", "held_out"}
    write_manifest(rows, tmp_path / "a")
    write_manifest(list(rows), tmp_path / "b")
    one, other = ((tmp_path / name / "manifest.jsonl").read_bytes() for name in "ab")
    assert one == other and one.count(b"\n") == 50
