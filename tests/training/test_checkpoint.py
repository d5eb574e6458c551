"""Checkpoints: complete or none, damage found, nothing unpickled; some of weights alone."""

import dataclasses
import errno
import itertools
import os
import pickle
from threading import Event

import pytest
import safetensors.torch
import torch
from helpers import TRAIN, start_and_kill, tiny_session, train_in

from kit.base.errors import DamagedFileError
from kit.settings import TrainConfig
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


# `checkpoint: weights`: a quarter on the disk; a run resumes with a new optimizer.

ON = {"ema": True}
SMALL = dataclasses.replace(TRAIN, checkpoint="weights")
NEW_OPTIMIZER = "the checkpoint holds only weights, in half precision: the optimizer starts again"


def files(folder) -> list:
    return checkpoint.checkpoints(folder / "checkpoints")


def begin(folder, steps: int, config: TrainConfig = SMALL) -> list:
    """Train so many steps, as where a session is cut; returns their events."""
    return list(itertools.islice(tiny_session(folder, config).run(ON, Event()), steps))


def test_a_small_checkpoint_is_a_quarter_without_the_optimizer_and_changes_no_run(tmp_path):
    events = train_in(tmp_path / "full")
    assert [e.loss for e in train_in(tmp_path / "small", SMALL)] == [e.loss for e in events]
    raw = [tmp_path / name / "model-raw.safetensors" for name in ("full", "small")]
    assert raw[0].read_bytes() == raw[1].read_bytes()
    full, small = (files(tmp_path / name)[-1] for name in ("full", "small"))
    assert small.stat().st_size < 0.3 * full.stat().st_size  # 4 bytes a parameter, not 16
    tree, whole = checkpoint.load(small), checkpoint.load(full)
    assert not tree["optimizer"] and tree["checkpoint"] == "weights"
    for name, weight in flatten({part: whole[part] for part in ("model", "ema")})[0].items():
        part, key = name.split("|")
        kept = tree[part][key]
        assert kept.dtype == (torch.float16 if weight.is_floating_point() else weight.dtype)
        assert torch.allclose(kept.float(), weight.float(), rtol=1e-3, atol=1e-6)
    assert tree["run"] == whole["run"] and tree["made_with"] == whole["made_with"]


def test_resumed_it_says_that_the_optimizer_starts_again_and_warms_up(tmp_path):
    config = dataclasses.replace(SMALL, max_steps=20, schedule="constant", warmup_steps=4)
    begin(tmp_path, 10, config)  # the newest checkpoint is of step 9
    rest = train_in(tmp_path, config)
    assert f"resumed from step 9; {NEW_OPTIMIZER}, with 4 steps of warm-up" in rest[0].note
    assert [e.lr / config.lr for e in rest[:6]] == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1])
    assert [e.step for e in rest] == list(range(10, 21))


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.long)])
def test_a_killed_run_resumes_and_learns(processes, tmp_path, optimizer):
    config = dataclasses.replace(
        SMALL, max_steps=20, save_steps=1, schedule="constant", optimizer=optimizer
    )
    child = processes.Process(target=train_in, args=(str(tmp_path), config))
    start_and_kill(child, tmp_path / "train.jsonl", 7)
    assert child.exitcode == -9
    _, notes = checkpoint.load_newest(tmp_path / "checkpoints")
    assert not notes, "a killed run must not leave a damaged checkpoint"
    rest = train_in(tmp_path, config)
    assert rest[0].step > 6 and NEW_OPTIMIZER in rest[0].note
    whole = train_in(tmp_path / "whole", config)
    assert rest[-1].step == 20 and (tmp_path / "train-finished").read_text() == "20"
    assert rest[-1].val_loss == pytest.approx(whole[-1].val_loss, rel=0.05)


def test_data_and_random_numbers_resume_where_they_were(tmp_path):
    """Without a step of its weights, a resumed run draws and reads what the whole one would."""
    still = dataclasses.replace(SMALL, max_steps=12, lr=1e-12, warmup_steps=0)
    whole = train_in(tmp_path / "whole", still)
    begin(tmp_path / "cut", 7, still)
    rest = train_in(tmp_path / "cut", still)
    assert rest[0].step == 7
    assert [e.tokens for e in rest] == [e.tokens for e in whole[6:]]
    assert [e.loss for e in rest] == pytest.approx([e.loss for e in whole[6:]], rel=1e-3)
