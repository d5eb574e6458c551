"""Rows in a temporary file: a sequence like a list, and a check of a dataset that needs no list."""

import pickle
import tracemalloc

import pytest

from kit.audio.clip import ClipMeasure
from kit.dataset import checks, data_report
from kit.dataset.data_report import ManifestConfig, Spool
from kit.dataset.layouts import read_dataset
from kit.dataset.manifest import write_manifest

MEASURE = ClipMeasure(
    rate_hz=22050,
    channels=1,
    subtype="PCM_16",
    seconds=4.0,
    peak=0.5,
    mono_peak=0.5,
    dc=0.0,
    clipped=0.0,
    leading_s=0.1,
    trailing_s=0.1,
    digest="",
)
TEXT = "The train leaves at ten in the morning, and my mother reads a book every evening"


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


def test_some_of_it_keep_their_order_and_some_of_those(values):
    odd = values.where(lambda value: value["n"] % 2)
    assert [value["n"] for value in odd] == [1, 3, 5, 7]
    assert odd.where(lambda value: value["n"] > 3) == [{"n": 5}, {"n": 7}]
    assert pickle.loads(pickle.dumps(odd)) == odd


def test_values_far_apart_and_many_are_read_in_order(monkeypatch):
    monkeypatch.setattr(data_report, "BLOCK", 4)
    values = Spool(range(1000))
    assert list(values) == list(range(1000))
    for step in (3, 100):
        assert list(values.where(lambda n, step=step: n % step == 1)) == list(range(1, 1000, step))


def made_dataset(folder, rows: int):
    (folder / "wavs").mkdir(parents=True)
    lines = []
    for number in range(rows):
        (folder / "wavs" / f"clip_{number:07d}.wav").touch()
        lines.append(f"clip_{number:07d}|{TEXT} {number % 7919}\n")
    (folder / "metadata.csv").write_text("".join(lines), encoding="utf-8")
    return folder


class MadeMeasures:
    def __getitem__(self, path: str) -> ClipMeasure:
        return MEASURE

    def items(self):
        return ()


def peak_bytes(folder, rows: int) -> int:
    data = made_dataset(folder / "data", rows)
    tracemalloc.start()
    try:
        checks.check_dataset(data, ManifestConfig(most_characters=200), folder / "run")
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_row_costs_few_bytes_until_it_is_in_the_manifest(tmp_path, monkeypatch):
    monkeypatch.setattr(data_report, "IN_MEMORY_BYTES", 1)
    monkeypatch.setattr(checks, "measure_clips", lambda *_, **__: MadeMeasures())
    few, many = (peak_bytes(tmp_path / str(rows), rows) for rows in (1000, 3000))
    assert (many - few) / 2000 < 500  # a folder's own listing is most of it


def test_the_manifest_is_that_of_a_list(tmp_path):
    rows = read_dataset(made_dataset(tmp_path / "data", 50), ManifestConfig()).rows
    assert isinstance(rows, Spool) and {row.split for row in rows} == {"train", "held_out"}
    for name, given in (("a", rows), ("b", list(rows))):
        write_manifest(given, tmp_path / name)
    manifests = [(tmp_path / name / "manifest.jsonl").read_bytes() for name in "ab"]
    assert manifests[0] == manifests[1] and manifests[0].count(b"\n") == 50
