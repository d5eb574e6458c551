"""Files that check themselves, a folder that keeps below its cap."""

import os
import pickle

import numpy as np
import pytest

from kit.base.errors import DamagedFileError
from kit.base.tensor_file import pack_tensors
from kit.batches.code_cache import MappedFile, load_tensors, touch
from kit.batches.encoding import make_room, narrow, save_columns

TENSORS = {
    "turned": np.arange(12, dtype=np.float16).reshape(3, 4).T,
    "half": np.arange(10, dtype=np.int32)[::2],
    "none": np.zeros(0, dtype=np.int64),
}

ALL = ("*.safetensors",)


def write(path, way: str) -> bytes:
    """Write TENSORS to `path` from memory, or as columns without a copy; return its bytes."""
    if way == "packed":
        path.write_bytes(pack_tensors(TENSORS))
    else:
        save_columns(TENSORS, path)
    return path.read_bytes()


def mapped(path) -> dict[str, np.ndarray]:
    return {name: MappedFile(path, verify=True)[name] for name in TENSORS}


@pytest.fixture(params=[load_tensors, mapped], ids=["read", "mapped"])
def read(request):
    return request.param


def equal(found: dict) -> bool:
    return all(
        found[name].dtype == tensor.dtype and np.array_equal(found[name], tensor)
        for name, tensor in TENSORS.items()
    )


@pytest.mark.parametrize("way", ["packed", "columns"])
def test_tensors_come_back_whatever_their_layout(tmp_path, way, read):
    once = write(tmp_path / "a", way)
    assert write(tmp_path / "b", way) == once
    assert equal(read(tmp_path / "a"))


def test_no_single_byte_can_change_unseen(tmp_path, read):
    path = tmp_path / "a"
    whole = write(path, "columns")
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        try:
            found = read(path)
        except DamagedFileError as error:
            assert str(path) in str(error)
        else:  # a byte that says nothing, as spaces after the header do
            assert equal(found)


def test_no_file_can_be_shorter_or_longer_unseen(tmp_path, read):
    path = tmp_path / "a"
    whole = write(path, "packed")
    for damage in (*(whole[:length] for length in range(len(whole))), whole + b"x"):
        path.write_bytes(damage)
        with pytest.raises(DamagedFileError, match="damaged"):
            read(path)
    with pytest.raises(DamagedFileError, match="There is no"):
        read(tmp_path / "none")


def test_a_mapped_file_outlives_its_name_and_travels_as_its_path(tmp_path):
    write(tmp_path / "a", "columns")
    sent = pickle.dumps(MappedFile(tmp_path / "a"))
    assert len(sent) < 300 and equal(pickle.loads(sent).arrays)
    found = MappedFile(tmp_path / "a")
    (tmp_path / "a").unlink()
    for _ in range(2):
        assert equal(found.arrays)
        found.release()
    with pytest.raises(DamagedFileError, match="no column `other`"):
        found["other"]


@pytest.mark.parametrize("largest, bits", [(0, 8), (255, 8), (256, 16), (70_000, 32), (2**40, 64)])
def test_numbers_take_no_more_room_than_they_need(largest, bits):
    found = narrow(np.array([0, largest]))
    assert found.dtype == f"uint{bits}" and found.tolist() == [0, largest]


def files(folder, ages) -> list:
    """A file of a thousand bytes for each of `ages` (seconds)."""
    paths = [folder / f"{i}.safetensors" for i in range(len(ages))]
    for path, age in zip(paths, ages):
        path.write_bytes(bytes(1000))
        os.utime(path, (2e9 - age, 2e9 - age))
    return paths


@pytest.mark.parametrize("needed, left", [(0, 4), (1000, 3), (1001, 2), (2000, 2)])
def test_the_longest_unused_go_first_and_no_more_than_needed(tmp_path, needed, left):
    paths = files(tmp_path, [1, 9, 5, 7])
    make_room(tmp_path, ALL, 4000 / 2**30, needed, set())
    kept = [paths[i] for i in (0, 2, 3, 1)][:left]  # from young to old
    assert {p for p in paths if p.exists()} == set(kept)


def test_what_is_in_use_stays_however_old(tmp_path):
    paths = files(tmp_path, [1, 9, 5])
    make_room(tmp_path, ALL, 3000 / 2**30, 1000, {paths[1]})
    assert [p.exists() for p in paths] == [True, True, False]
    with pytest.raises(DamagedFileError, match="max_cache_gib"):
        make_room(tmp_path, ALL, 3000 / 2**30, 2500, {paths[1]})
    assert paths[1].exists()


def test_touching_makes_young_and_forgives_what_is_gone(tmp_path):
    paths = files(tmp_path, [1e9, 2e8])
    touch({*paths, tmp_path / "gone"})
    assert abs(paths[0].stat().st_mtime - paths[1].stat().st_mtime) < 60


def test_room_is_made_of_the_caches_own_files_alone(tmp_path):
    for name in ("codes-a.safetensors", "model-ema.safetensors", "codec.safetensors"):
        (tmp_path / name).write_bytes(bytes(1000))
    make_room(tmp_path, ("codes-*.safetensors",), 0.5 * 2000 / 2**30, 1000, set())
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"model-ema.safetensors", "codec.safetensors"}
