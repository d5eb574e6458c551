"""The files of a Debian package come out of it without an installation."""

import pytest
from debian_package import member, write_package
from russian_corpus import extract_debian_data

from kit.base.errors import DatasetError
from kit.dataset.archive import ArchiveConfig, unpack

FILES = {"usr/share/a.txt": b"a" * 1001, "usr/share/b/c.wav": bytes(range(256))}


def test_its_files_come_out_as_they_are(tmp_path):
    package = write_package(tmp_path / "voice_1.0+x-2_all.deb", FILES)
    archive = extract_debian_data(package, tmp_path / "work")
    assert archive.name == "voice_1.0+x-2_all.data.tar.xz"
    folder = unpack(archive, tmp_path / "out", ArchiveConfig())
    for name, data in FILES.items():
        assert (folder / name).read_bytes() == data
    changed = archive.stat().st_mtime_ns
    assert extract_debian_data(package, tmp_path / "work").stat().st_mtime_ns == changed


def cut(data: bytes) -> bytes:
    return data[:-100]


def mangled(data: bytes) -> bytes:
    return data.replace(b"100644", b"1006`4").replace(b"`\n2.0", b"??2.0")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (cut, "bytes of data.tar.xz"),
        (mangled, "header is damaged"),
        (lambda data: b"PK" + data, "is no Debian package"),
        (lambda data: data[:8], "it holds no data.tar"),
        (lambda data: data[:8] + member("debian-binary", b"2.0\n"), "it holds no data.tar"),
    ],
)
def test_a_broken_one_is_reported(tmp_path, spoil, why):
    package = write_package(tmp_path / "voice.deb", FILES)
    package.write_bytes(spoil(package.read_bytes()))
    with pytest.raises(DatasetError, match=why) as error:
        extract_debian_data(package, tmp_path / "work")
    assert str(package) in str(error.value)
    assert not list((tmp_path / "work").glob("*"))


def test_one_packed_in_another_way_says_how_to_unpack_it(tmp_path):
    package = write_package(tmp_path / "voice.deb", FILES, "data.tar.zst")
    with pytest.raises(DatasetError, match=r"data\.tar\.zst\): unpack it with `dpkg-deb -x`"):
        extract_debian_data(package, tmp_path)


def test_one_that_is_not_there(tmp_path):
    with pytest.raises(DatasetError, match="There is no"):
        extract_debian_data(tmp_path / "gone.deb", tmp_path)
