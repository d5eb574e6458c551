"""Disks that are full, closed to writing, or gone: each time the path, and what to do."""

import contextlib
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from clips import TEXT
from helpers import CODEC, dataset, opinionated_voice, speech, tiny_session

from kit.audio.codec import save_codec
from kit.audio.mel_codec import MelCodec
from kit.base.errors import DiskError
from kit.base.files import write_atomic
from kit.base.run import Run
from kit.dataset.archive import unpack
from kit.dataset.checks import check_dataset
from kit.inference.evaluate import save_samples
from kit.inference.export import export_voice
from kit.settings import ArchiveConfig, ManifestConfig

LOOSE = ManifestConfig(held_out_percent=0)
SPOKEN = {"ema": ([TEXT], [torch.from_numpy(speech(5.0))])}


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A disk of its own at `folder`; the test is skipped where it cannot be had."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder]
    if not sys.platform.startswith("linux") or not shutil.which("mount"):
        pytest.skip("needs Linux, to mount a small disk")
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this user may not mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def full_disk(tmp_path):
    """A disk of 1 MB with 8 KB left, and a file `rest` that holds all others."""
    with mounted(tmp_path / "disk", "size=1m") as disk:
        (disk / "rest").write_bytes(bytes(2**20 - 8192))
        yield disk


@pytest.fixture
def closed_disk(tmp_path):
    with mounted(tmp_path / "disk", "size=1m,ro") as disk:
        yield disk


def recorded(folder: Path) -> Path:
    wave = np.random.default_rng(0).standard_normal((200, 6000)) * 0.1
    clips = {f"c{i}": wave[i].astype(np.float32) for i in range(200)}
    return dataset(folder, "".join(f"c{i}|{TEXT}\n" for i in range(200)), clips)


def run_at(folder: Path) -> Run:
    return Run(name="mine", preset_name="tiny", preset={}, folder=folder)


def archive_at(folder: Path) -> Path:
    (folder / "big.bin").write_bytes(np.random.default_rng(0).bytes(50_000))
    with tarfile.open(folder / "mine.tar", "w") as packed:
        packed.add(folder / "big.bin", "mine/big.bin")
    return folder / "mine.tar"


# name: what is tried on the disk, and a folder beside it to work in
TRIED = {
    "check_dataset": lambda disk, own: check_dataset(recorded(own / "data"), LOOSE, disk / "run"),
    "save_samples": lambda disk, own: save_samples(SPOKEN, "held_out", 22050, disk / "run"),
    "record": lambda disk, own: run_at(disk / "run").record(train={"all": list(range(20_000))}),
    "settle": lambda disk, own: run_at(disk / "run").set_permanent("data", "x" * 50_000),
    "path": lambda disk, own: write_atomic(run_at(disk).path("a", "b"), bytes(50_000)),
    "unpack": lambda disk, own: unpack(archive_at(own), disk / "run", ArchiveConfig()),
    "save_codec": lambda disk, own: save_codec(MelCodec(CODEC), disk / "run" / "codec"),
    "export": lambda disk, own: export_voice(opinionated_voice(own), disk / "run"),
}


@pytest.mark.parametrize("what", TRIED)
def test_a_full_disk_is_reported_with_path_and_fix(full_disk, tmp_path, what):
    with pytest.raises(DiskError, match=r"(?i)free some (disk )?space") as caught:
        TRIED[what](full_disk, tmp_path)
    assert str(full_disk) in str(caught.value)
    left = {path.name for path in full_disk.rglob("*") if path.is_file()}
    assert left <= {"rest", "measures.jsonl"}  # nothing half-written


@pytest.mark.parametrize("what", TRIED)
def test_a_disk_closed_to_writing_is_reported_with_path_and_fix(closed_disk, tmp_path, what):
    with pytest.raises(DiskError, match="may not write there, or the disk is read-only") as caught:
        TRIED[what](closed_disk, tmp_path)
    assert str(closed_disk) in str(caught.value)


def test_a_check_resumes_where_the_full_disk_ended_it(full_disk, tmp_path):
    data = recorded(tmp_path / "data")
    with pytest.raises(DiskError):
        check_dataset(data, LOOSE, full_disk / "run")
    (full_disk / "rest").unlink()
    again = check_dataset(data, LOOSE, full_disk / "run")
    assert len(again.kept) + len(again.refused) == 200


def test_a_runs_folder_deleted_while_it_trains_is_reported(tmp_path):
    session, seen = tiny_session(tmp_path / "run"), []
    with pytest.raises(DiskError, match=r"run/train\.jsonl was deleted or moved .*folder"):
        for event in session.run({"ema": True}):
            seen.append(event.step)
            if event.step == 5:
                shutil.rmtree(tmp_path / "run")
    assert seen == [1, 2, 3, 4, 5]  # the sixth knows; nothing trains on for nobody
