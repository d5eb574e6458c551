"""Honest archives come out whole; hostile and damaged ones leave nothing behind."""

import io
import multiprocessing
import os
import signal
import tarfile
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from folders import contents, folder_of

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
    """An archive of `files`; `last` is the last member, in place of a plain one of its name."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            for name, data in files.items():
                packed.writestr(name, data)
        return path
    suffix = next(s for s in MODES if path.name.endswith(s))
    with tarfile.open(path, MODES[suffix]) as packed:
        for name, data in files.items():
            member = last if last and name == last.name else tarfile.TarInfo(name)
            member.size = len(data)
            packed.addfile(member, io.BytesIO(data))
    return path


def pack_member(path: Path, member: tarfile.TarInfo, data: bytes = b"") -> Path:
    return pack(path, {"honest.txt": b"", member.name: data}, member)


def link(kind: bytes, name: str, target: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def refused(archive: Path, into: Path, match: str, config: ArchiveConfig = CONFIG) -> None:
    """Unpacking raises, names the archive, and leaves `into` and its neighbours as they were."""
    before = set(into.parent.rglob("*"))
    with pytest.raises(DatasetError, match=f"{archive}.*{match}"):
        unpack(archive, into, config)
    assert set(into.parent.rglob("*")) - before <= {into}


@pytest.mark.parametrize("suffix", [".zip", *MODES])
def test_every_kind_comes_out_whole_and_only_once(tmp_path, suffix):
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


NAMES = "../out.txt a/../../out.txt /tmp/out.txt ..\\out.txt C:\\out.txt C:out.txt"


@pytest.mark.parametrize("suffix", [".zip", ".tar.gz"])
@pytest.mark.parametrize("name", NAMES.split())
def test_no_path_leads_out(tmp_path, suffix, name):
    archive = pack(tmp_path / f"evil{suffix}", {"honest.txt": b"", name: b"x"})
    refused(archive, tmp_path / "into", "leads out of the folder")


def test_backslashes_of_a_zip_made_on_windows_are_slashes(tmp_path):
    archive = pack(tmp_path / "a.zip", {"wavs\\a.wav": b"x"})
    assert contents(unpack(archive, tmp_path / "into", CONFIG)) == {"wavs/a.wav": b"x"}


MEMBERS = {
    "symlink outside": link(tarfile.SYMTYPE, "link", "/etc/passwd"),
    "symlink inside": link(tarfile.SYMTYPE, "link", "honest.txt"),
    "hard link outside": link(tarfile.LNKTYPE, "link", "../../secret"),
    "character device": link(tarfile.CHRTYPE, "null", ""),
    "block device": link(tarfile.BLKTYPE, "disk", ""),
    "named pipe": link(tarfile.FIFOTYPE, "pipe", ""),
    "unknown kind": link(b"Q", "thing", ""),
    "sparse file": tarfile.TarInfo("a.bin"),
}
MEMBERS["sparse file"].pax_headers = {"GNU.sparse.size": "10", "GNU.sparse.map": "0,1"}


@pytest.mark.parametrize("kind", MEMBERS)
def test_nothing_but_files_and_folders_is_made(tmp_path, kind):
    data = bytes(2048) if kind == "sparse file" else b""
    archive = pack_member(tmp_path / "evil.tar.gz", MEMBERS[kind], data)
    refused(archive, tmp_path / "into", "link, a device or a sparse file")


def test_no_right_but_reading_and_writing_is_taken_over(tmp_path):
    member = tarfile.TarInfo("tool.sh")
    member.mode = 0o6777
    folder = unpack(pack_member(tmp_path / "a.tar.gz", member, b"x"), tmp_path / "into", CONFIG)
    assert not (folder / "tool.sh").stat().st_mode & 0o7111


@pytest.mark.parametrize("suffix", [".zip", ".tar.gz", ".tar.xz", ".tar.bz2"])
def test_a_bomb_is_refused_by_its_ratio_and_its_size(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr("kit.dataset.archive.RATIO_FROM_BYTES", 2**20)
    archive = pack(tmp_path / f"bomb{suffix}", {f"{i}.txt": bytes(2**20) for i in range(4)})
    refused(archive, tmp_path / "into", "over 100 times its own size.*most_ratio")
    archive = pack(tmp_path / f"big{suffix}", {"a": os.urandom(3 * 2**20)})
    refused(archive, tmp_path / "into", "more than 0.001 GiB", ArchiveConfig(most_gib=0.001))


@pytest.mark.filterwarnings("ignore:Python 3.14 will:DeprecationWarning")
def test_a_tar_comes_out_of_a_python_without_filters_too(tmp_path, monkeypatch):
    """Debian 12's 3.11.2; what leads out is refused there as well."""
    monkeypatch.delattr(tarfile, "data_filter")
    plain = lambda member, _folder: member  # noqa: E731
    monkeypatch.setattr(tarfile.TarFile, "extraction_filter", staticmethod(plain), raising=False)
    archive = pack(tmp_path / "corpus.tar.gz", FILES)
    assert contents(unpack(archive, tmp_path / "into", CONFIG)) == FILES
    evil = pack(tmp_path / "evil.tar", {"../out.txt": b"x"})
    refused(evil, tmp_path / "into", "leads out of the folder")


def test_a_zip_that_is_not_what_it_declares_is_refused(tmp_path):
    archive = pack(tmp_path / "less.zip", {"a": bytes(2**24)})
    data = bytearray(archive.read_bytes())
    promise = data.index(b"PK\1\2") + 24
    data[promise : promise + 4] = (10).to_bytes(4, "little")
    archive.write_bytes(data)
    refused(archive, tmp_path / "into", "damaged")
    archive = pack(tmp_path / "name.zip", {"aé.txt": b"x"})
    archive.write_bytes(archive.read_bytes().replace("é".encode(), b"\xff\xfe"))
    refused(archive, tmp_path / "into", "damaged.*utf-8")


def test_what_is_larger_than_the_disk_is_refused_before_it_is_written(tmp_path, monkeypatch):
    archive = pack(tmp_path / "a.zip", {"a": bytes(10**6)})
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10**5))
    with pytest.raises(DiskError, match="needs about 1 MB"):
        unpack(archive, tmp_path / "into", CONFIG)
    assert list((tmp_path / "into").iterdir()) == []
    # While a tar is unpacked, the disk is looked at again.
    archive = pack(tmp_path / "a.tar.gz", {str(i): os.urandom(2**20) for i in range(3)})
    free = iter([2**40, 10, 10])
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=next(free)))
    monkeypatch.setattr("kit.dataset.archive.DISK_STEP_BYTES", 2**20)
    with pytest.raises(DiskError, match="MB left"):
        unpack(archive, tmp_path / "into", CONFIG)


@pytest.mark.parametrize("suffix", [".zip", *MODES])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_download_that_broke_off_is_named_with_the_fix(tmp_path, suffix, share):
    archive = pack(tmp_path / f"part{suffix}", {f"{i}.bin": os.urandom(3000) for i in range(20)})
    whole = archive.read_bytes()
    if suffix == ".tar":  # its end is padding that may well be missing
        whole = whole[: -19 * 512]
    archive.write_bytes(whole[: int(share * len(whole))])
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


MANY = {f"{i}.bin": bytes([i]) * 100 for i in range(200)}


def unpack_slowly(archive: Path, into: Path) -> None:
    unpack(archive, into, CONFIG, lambda *_: time.sleep(0.01))


def test_killed_in_the_middle_it_begins_again_and_comes_out_whole(tmp_path):
    archive, into = pack(tmp_path / "many.tar.gz", MANY), tmp_path / "into"
    process = FORK.Process(target=unpack_slowly, args=(archive, into))
    process.start()
    partial = into / "not yet"
    while not (partial.is_dir() and len(list(partial.iterdir())) > 5):
        partial = next(into.glob(".many.unpacking*"), partial)
        assert process.is_alive()
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert partial.is_dir() and not (into / "many").exists()
    (partial / "junk").write_text("left by another day")
    assert contents(unpack(archive, into, CONFIG)) == MANY
    assert [p.name for p in into.iterdir()] == ["many"]


def test_two_that_unpack_one_archive_get_the_same_whole_folder(tmp_path, capsys):
    archive, into = pack(tmp_path / "many.tar.gz", MANY), tmp_path / "into"
    several = [FORK.Process(target=unpack_slowly, args=(archive, into)) for _ in range(2)]
    for process in several:
        process.start()
        time.sleep(0.3)  # the second finds the first in the middle
    assert contents(unpack(archive, into, CONFIG)) == MANY
    assert capsys.readouterr().out.count("unpacking") == 1
    for process in several:
        process.join()
        assert process.exitcode == 0
    assert contents(into / "many") == MANY
    assert [p.name for p in into.iterdir()] == ["many"]
