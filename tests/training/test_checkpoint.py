"""Checkpoints: complete or none, damage found, nothing unpickled; some of weights alone."""

import errno
import os
import pickle

import pytest
import safetensors.torch
import torch

from kit.base.errors import DamagedFileError
from kit.training import checkpoint
from kit.training.checkpoint import checkpoints, flatten, load, load_newest, save, unflatten


def tree(step: int = 1) -> dict:
    base = torch.arange(12.0).view(3, 4)
    return {
        "views": {"a": base, "same": base, "turned": base.T, "part": base[1:, ::2]},
        "model": {"gpt.h.0.weight": torch.randn(3, 4), "bias": torch.zeros(0)},
        "optimizer": {"0": {"3": {"step": torch.tensor(5.0), "exp_avg": torch.randn(2)}}},
        "random": checkpoint.random_state(),
        "ema": {},
        "run": {"step": step, "position": '{"epoch": 1}', "lr": 0.1, "none": None, "on": True},
        "half": torch.randn(5).bfloat16(),
    }


def equal(a, b) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b


def test_a_tree_survives_flattening_and_the_disk(tmp_path):
    wanted = tree()
    tensors, plain = flatten(wanted)
    assert equal(unflatten(tensors | plain), wanted)
    path = save(wanted, tmp_path, 7)
    assert path.name == "step-0000007.safetensors" and equal(load(path), wanted)
    assert equal(safetensors.torch.load_file(path), tensors)


def test_only_the_newest_are_kept(tmp_path):
    assert load_newest(tmp_path) == (None, []) == load_newest(tmp_path / "none")
    with pytest.raises(DamagedFileError, match="cannot be read"):
        load(tmp_path / "none.safetensors")
    for step in (1, 2, 10, 100):
        save(tree(step), tmp_path, step, keep=2)
    assert [int(p.stem[5:]) for p in checkpoints(tmp_path)] == [10, 100]
    assert len(list(tmp_path.iterdir())) == 4  # and their checksums
    assert load_newest(tmp_path)[0]["run"]["step"] == 100


def damaged(path, how: str) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    texts = {"bit": bytes(data), "empty": b"", "truncated": bytes(data[:-9]), "junk": b"x" * 500}
    path.write_bytes(texts[how])


@pytest.mark.parametrize("how", ["bit", "empty", "truncated", "junk"])
def test_a_damaged_newest_falls_back_and_says_so(tmp_path, how):
    first, second = (save(tree(n), tmp_path, n) for n in (1, 2))
    damaged(second, how)
    found, (note,) = load_newest(tmp_path)
    assert found["run"]["step"] == 1 and str(second) in note and "the one before" in note
    first.with_suffix(".sha256").unlink()  # killed between the two files
    assert load(first)["run"]["step"] == 1
    if how != "bit":
        damaged(first, how)  # found without a checksum, too
        found, notes = load_newest(tmp_path)
        assert found is None and len(notes) == 2


def test_a_step_that_is_saved_again_has_no_old_checksum_beside_it(tmp_path, monkeypatch):
    save(tree(1), tmp_path, 1)
    again = tree(1)  # after a return to it: as before, but for the learning rate

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "write_atomic", killed)
    with pytest.raises(KeyboardInterrupt):
        save(again, tmp_path, 1)
    found, notes = load_newest(tmp_path)
    assert equal(found, again) and not notes


def test_a_pickle_is_never_opened(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "exploded"),))

    path = tmp_path / "step-0000001.safetensors"
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(DamagedFileError, match="damaged"):
        load(path)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_older_checkpoint_and_says_what_to_do(tmp_path, monkeypatch, call):
    wanted = tree(1)
    save(wanted, tmp_path, 1)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="Free some disk space and run again"):
        save(tree(2), tmp_path, 2)
    monkeypatch.undo()
    found, notes = load_newest(tmp_path)
    assert equal(found, wanted) and not notes and len(list(tmp_path.iterdir())) == 2


HEADERS = ["[]", "[" * 99_999, '{"run|step|deep": 1, "run|step": 2}', None]


@pytest.mark.parametrize("plain", HEADERS)
def test_a_file_with_another_header_or_none_is_damaged(tmp_path, plain):
    path = tmp_path / "step-0000001.safetensors"
    safetensors.torch.save_file({"run|step": torch.zeros(2)}, path, plain and {"plain": plain})
    with pytest.raises(DamagedFileError, match="damaged"):
        load(path)
