"""Columns in a mapped file: they come back as they were, and damage is found where it is read."""

import pickle

import numpy as np
import pytest

from kit.base.errors import DamagedFileError
from kit.batches import columns
from kit.batches.columns import ColumnFile, Strings, narrow, save_columns, strings_columns

WORDS = ["ሰላም", "", "a", "ለአለም " * 9, "b", "", "one more"]


def table() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    letters, offsets = strings_columns(WORDS)
    return {
        "few": rng.integers(0, 200, 90).astype(np.uint8),
        "many": rng.integers(0, 2**31, 90).astype(np.uint32),
        "grid": rng.integers(-9, 9, (3, 5)),
        "none": np.zeros(0, np.uint16),
        "letters": letters,
        "offsets": offsets,
    }


@pytest.fixture(params=["small", "large"])
def size(request, monkeypatch) -> str:
    """As a file that is checked when it is opened, and as one that is checked block by block."""
    monkeypatch.setattr(columns, "BLOCK_BYTES", 32)
    if request.param == "large":
        monkeypatch.setattr(columns, "CHECKED_AT_OPEN_BYTES", 0)
    return request.param


@pytest.fixture
def path(tmp_path, size):
    save_columns(table(), tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def test_columns_come_back_by_number_slice_and_array(path):
    found = ColumnFile(path)
    for name in ("few", "many"):
        wanted = table()[name]
        assert list(found[name]) == wanted.tolist() and len(found[name]) == 90
        assert [found[name][i] for i in (0, 7, -1)] == wanted[[0, 7, -1]].tolist()
        assert found[name][5:41].tolist() == wanted[5:41].tolist()
        rows = np.array([88, 3, 3, 41])
        assert found[name][rows].tolist() == wanted[rows].tolist()
        part = found[name].part(10, 30)
        assert list(part) == wanted[10:30].tolist() and part[rows % 20].tolist()
        assert part[19] == wanted[29]
        with pytest.raises(IndexError):
            part[20]
    assert found.read_all("grid").tolist() == table()["grid"].tolist()
    assert not len(found["none"]) and not list(found["none"])
    with pytest.raises(DamagedFileError, match="no column `other`"):
        found["other"]


def test_strings_come_back_one_by_one_and_together(path):
    found = ColumnFile(path)
    strings = Strings(found["letters"], found["offsets"])
    assert list(strings) == WORDS
    rows = np.array([3, 0, 0, 5])
    assert [piece.decode() for piece in strings.encoded(rows)] == [WORDS[i] for i in rows]


def test_no_changed_byte_is_ever_read(path):
    whole = path.read_bytes()
    seen = 0
    for at in range(8, len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        try:
            found = ColumnFile(path)
            read = {name: found.read_all(name) for name in table()}
        except DamagedFileError as error:
            assert str(path) in str(error)
            seen += 1
        else:  # a byte that says nothing, as of the checksum of the whole
            for name, wanted in table().items():
                assert np.array_equal(read[name], wanted)
    assert seen > 0.5 * len(whole)


def test_no_file_can_be_cut_short_or_lengthened_unseen(path):
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedFileError, match="damaged"):
            ColumnFile(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(DamagedFileError, match="damaged"):
        ColumnFile(path)
    with pytest.raises(DamagedFileError, match="There is no"):
        ColumnFile(path.with_name("none"))


@pytest.mark.parametrize("size", ["large"], indirect=True)
def test_of_a_large_file_what_nobody_reads_is_not_asked_for(path):
    raw = path.read_bytes()
    at = raw.index(table()["many"].tobytes()) + 4 * 50
    path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
    found = ColumnFile(path)
    assert list(found["few"]) == table()["few"].tolist()
    assert found["many"][0:40].tolist() == table()["many"][:40].tolist()
    reads = (
        lambda: found["many"][50],
        lambda: found["many"][45:60],
        lambda: found["many"][np.array([1, 51])],
        lambda: found["many"].part(44, 90)[6],
        lambda: found["many"].pieces(np.array([2]), np.array([80])),  # a long one, over many blocks
    )
    for read in reads:
        for _ in range(2):  # asked again, it is no better
            with pytest.raises(DamagedFileError, match="a part of it does not match its checksum"):
                read()


def test_writing_twice_gives_the_same_bytes(path, tmp_path):
    save_columns(dict(reversed(table().items())), tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == path.read_bytes()


def test_it_travels_as_its_path_and_what_was_read_may_be_let_go(path):
    found = ColumnFile(path)
    again = pickle.loads(pickle.dumps(found))
    assert len(pickle.dumps(found)) < 300
    for _ in range(2):
        assert list(again["many"]) == table()["many"].tolist()
        again.release()


def test_an_open_file_outlives_its_name(path):
    found = ColumnFile(path)
    path.unlink()
    assert list(found["many"]) == table()["many"].tolist()


@pytest.mark.parametrize("largest, bits", [(0, 8), (255, 8), (256, 16), (70_000, 32), (2**40, 64)])
def test_numbers_take_no_more_room_than_they_need(largest, bits):
    found = narrow(np.array([0, largest]))
    assert found.dtype == f"uint{bits}" and found.tolist() == [0, largest]
