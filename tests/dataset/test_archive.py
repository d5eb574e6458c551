"""Honest archives come out complete; hostile and damaged ones leave nothing behind."""

import contextlib
import io
import multiprocessing
import os
import tarfile
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from folders import contents, folder_of
from helpers import start_and_kill

from kit.base.errors import DatasetError, DiskError
from kit.dataset.archive import unpack
from kit.settings import ArchiveConfig

FILES = {
    "cv/am/validated.tsv": b"path\tsentence\n" * 50,
    "cv/am/clips/a.mp3": bytes(range(256)) * 400,
    "cv/am/clips/ሰላም b.mp3": b"",
}
MODES = {".tar": "w:", ".tar.gz": "w:gz", ".tgz": "w:gz", ".tar.bz2": "w:bz2", ".tar.xz": "w:xz"}
CONFIG = ArchiveConfig()
FORK = multiprocessing.get_context("fork")


def pack(path: Path, files: dict[str, bytes], last: tarfile.TarInfo | None = None) -> Path:
    """An archive of `files`, and of the tar's member `last`."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            for name, data in files.items():
                packed.writestr(name, data)
        return path
    suffix = next(s for s in MODES if path.name.endswith(s))
    with tarfile.open(path, MODES[suffix]) as packed:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            packed.addfile(member, io.BytesIO(data))
        if last:
            packed.addfile(last)
    return path


def refused(archive: Path, into: Path, match: str, config: ArchiveConfig = CONFIG) -> None:
    """Unpacking raises, names the archive, and leaves `into` and its neighbours as they were."""
    before = set(into.parent.rglob("*"))
    with pytest.raises(DatasetError, match=f"(?s){archive}.*{match}"):
        unpack(archive, into, config)
    assert set(into.parent.rglob("*")) - before <= {into}


@pytest.mark.parametrize("suffix", [".zip", *MODES])
def test_every_kind_comes_out_complete_and_only_once(tmp_path, suffix):
    archive = pack(tmp_path / f"corpus.v1{suffix}", FILES)
    counted = []
    folder = unpack(archive, tmp_path / "into", CONFIG, lambda *now: counted.append(now))
    assert folder == tmp_path / "into" / "corpus.v1" and contents(folder) == FILES
    size = archive.stat().st_size
    assert counted == sorted(counted) and counted[-1] == (size, size)
    (folder / "cv/am/clips/a.mp3").write_bytes(b"mine now")
    assert unpack(archive, tmp_path / "into", CONFIG) == folder
    assert contents(folder)["cv/am/clips/a.mp3"] == b"mine now"
    assert [p.name for p in (tmp_path / "into").iterdir()] == ["corpus.v1"]


@pytest.mark.parametrize("suffix", [".zip", ".tar.gz"])
@pytest.mark.parametrize("name", ["../out.txt", "a/../../out.txt", "/tmp/out.txt", "..\\out.txt"])
def test_no_path_leads_out(tmp_path, suffix, name):
    archive = pack(tmp_path / f"evil{suffix}", {"honest.txt": b"", name: b"x"})
    with contextlib.suppress(DatasetError):  # refused, or inside under another name
        unpack(archive, tmp_path / "into", CONFIG)
    assert set(tmp_path.iterdir()) == {archive, tmp_path / "into"}
    assert set((tmp_path / "into").iterdir()) <= {tmp_path / "into/evil"}
    assert not Path("/tmp/out.txt").exists()


def test_backslashes_of_a_zip_made_on_windows_are_slashes(tmp_path):
    archive = pack(tmp_path / "a.zip", {"wavs\\a.wav": b"x"})
    assert contents(unpack(archive, tmp_path / "into", CONFIG)) == {"wavs/a.wav": b"x"}


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, b"Q"])
def test_nothing_but_files_and_folders_is_made(tmp_path, kind):
    member = tarfile.TarInfo("link")
    member.type, member.linkname = kind, "honest.txt"
    archive = pack(tmp_path / "evil.tar.gz", {"honest.txt": b""}, member)
    refused(archive, tmp_path / "into", "a link or a device, 'link'")


@pytest.mark.parametrize("suffix", [".zip", ".tar.gz", ".tar.xz"])
def test_a_bomb_is_refused_by_its_ratio_and_its_size(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr("kit.dataset.archive.RATIO_FROM_BYTES", 2**20)
    archive = pack(tmp_path / f"bomb{suffix}", {f"{i}.txt": bytes(2**20) for i in range(4)})
    refused(archive, tmp_path / "into", r"archive\.most_ratio = 100 .*archive\.most_ratio=")
    archive = pack(tmp_path / f"big{suffix}", {"a": os.urandom(5 * 2**18)})
    limits = ArchiveConfig(most_gib=0.001)
    refused(archive, tmp_path / "into", r"archive\.most_gib = 0\.001 .*most_gib=", limits)


def test_a_tar_needs_a_python_whose_tarfile_checks_paths(tmp_path, monkeypatch):
    monkeypatch.delattr(tarfile, "data_filter")
    archive = pack(tmp_path / "corpus.tar.gz", FILES)
    refused(archive, tmp_path / "into", r"use 3\.11\.4 or later.*tar -xf corpus\.tar\.gz")


def test_a_zip_that_is_not_what_it_declares_is_refused(tmp_path):
    archive = pack(tmp_path / "less.zip", {"a": bytes(2**24)})
    data = bytearray(archive.read_bytes())
    size = data.index(b"PK\1\2") + 24
    data[size : size + 4] = (10).to_bytes(4, "little")
    archive.write_bytes(data)
    refused(archive, tmp_path / "into", "damaged")


def test_what_is_larger_than_the_disk_is_refused_before_it_is_written(tmp_path, monkeypatch):
    archive = pack(tmp_path / "a.zip", {"a": bytes(10**6)})
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10**5))
    with pytest.raises(DiskError, match="needs about 1 MB"):
        unpack(archive, tmp_path / "into", CONFIG)
    assert not contents(tmp_path / "into")


@pytest.mark.parametrize("suffix", [".zip", *MODES])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_a_download_that_broke_off_is_named_with_the_fix(tmp_path, suffix, share):
    archive = pack(tmp_path / f"part{suffix}", {f"{i}.bin": os.urandom(3000) for i in range(20)})
    data = archive.read_bytes()
    if suffix == ".tar":  # its end is padding that may well be missing
        data = data[: -19 * 512]
    archive.write_bytes(data[: int(share * len(data))])
    refused(archive, tmp_path / "into", "download it again")


@pytest.mark.parametrize("suffix", [".zip", *MODES])
def test_a_flipped_bit_is_noticed_or_in_a_plain_tar_harmless(tmp_path, suffix):
    archive = pack(tmp_path / f"bad{suffix}", {"a.bin": os.urandom(20_000)})
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 0x40
    archive.write_bytes(data)
    if suffix == ".tar":  # only headers have checksums there
        assert unpack(archive, tmp_path / "into", CONFIG)
    else:
        refused(archive, tmp_path / "into", "damaged")


def test_a_broken_header_in_the_middle_of_a_tar_is_not_taken_for_its_end(tmp_path):
    archive = pack(tmp_path / "bad.tar", {"a": b"a" * 512, "b": b"b" * 512})
    data = bytearray(archive.read_bytes())
    data[1024:1030] = b"junk!!"
    archive.write_bytes(data)
    refused(archive, tmp_path / "into", "broken header")


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz"])
def test_what_was_saved_in_place_of_an_archive_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    refused(tmp_path / name, tmp_path / "into", "Git LFS pointer.*git lfs pull")
    (tmp_path / name).write_bytes(b"\n<!DOCTYPE html><html>Sign in</html>")
    refused(tmp_path / name, tmp_path / "into", "web page")


def test_a_folder_of_the_users_own_is_never_replaced_and_what_is_no_archive_reported(tmp_path):
    archive = pack(tmp_path / "corpus.zip", FILES)
    folder_of(tmp_path / "into/corpus", [], **{"mine.txt": "mine"})
    with pytest.raises(DatasetError, match="in the way"):
        unpack(archive, tmp_path / "into", CONFIG)
    assert contents(tmp_path / "into/corpus") == {"mine.txt": b"mine"}
    (tmp_path / "a.rar").write_bytes(b"x")
    for path in (tmp_path / "a.rar", tmp_path / "missing.zip", tmp_path):
        with pytest.raises(DatasetError, match=r"not an archive.*\.tar\.gz"):
            unpack(path, tmp_path / "into", CONFIG)


MANY = {f"{i}.bin": bytes([i]) * 100 for i in range(80)}


def unpack_slowly(archive: Path, into: Path) -> None:
    unpack(archive, into, CONFIG, lambda *_: time.sleep(0.01))


def test_killed_in_the_middle_it_starts_again_and_comes_out_complete(tmp_path):
    archive, into = pack(tmp_path / "many.tar.gz", MANY), tmp_path / "into"
    partial = into / ".many.unpacking"
    process = FORK.Process(target=unpack_slowly, args=(archive, into))
    start_and_kill(process, partial / "5.bin", 0)
    assert partial.is_dir() and not (into / "many").exists()
    (partial / "junk").write_text("left by another day")
    assert contents(unpack(archive, into, CONFIG)) == MANY
    assert [p.name for p in into.iterdir()] == ["many"]


def test_two_that_unpack_one_archive_get_the_same_folder(tmp_path, capsys):
    archive, into = pack(tmp_path / "many.tar.gz", MANY), tmp_path / "into"
    other = FORK.Process(target=unpack_slowly, args=(archive, into))
    other.start()
    while not (into / ".many.unpacking").is_dir():
        time.sleep(0.005)
    assert contents(unpack(archive, into, CONFIG)) == MANY
    assert capsys.readouterr().out.count("unpacking") == 1
    other.join()
    assert other.exitcode == 0 and [p.name for p in into.iterdir()] == ["many"]
