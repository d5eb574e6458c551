"""`make corpus-ru` on a small package of the same make, from a server on this machine."""

import hashlib
import io
import re
import tarfile

import pytest
from hub import COMMIT, serving
from russian_corpus import Package, corpus_command, russian_corpus

from kit.base.errors import DatasetError

VOICE = "usr/share/festival/voices/russian/msu"
NAMES = ("ru_0001", "ru_0002")
WAV = bytes(range(256)) * 9000


def member(name: str, data: bytes) -> bytes:
    """A member of an `ar` archive, header and padding included."""
    header = f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n".encode()
    return header + data + b"\n" * (len(data) % 2)


def tar_of(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return packed.getvalue()


@pytest.fixture
def package(tmp_path):
    files = {f"{VOICE}/wav/{name}.wav": name.encode() + WAV for name in NAMES}
    table = "".join(f'( {name} "+Окна вол+ос." )\n' for name in NAMES)
    files[f"{VOICE}/etc/txt.done.data"] = table.encode()
    files["usr/share/doc/festvox-ru/copyright"] = b"free, with this notice"
    path = tmp_path / "pool/festvox-ru_0.5+dfsg-6_all.deb"
    path.parent.mkdir()
    control = tar_of({"control": b"Package: test"}) + b"odd"
    members = {"debian-binary": b"2.0\n", "control.tar.xz": control, "data.tar.xz": tar_of(files)}
    path.write_bytes(b"!<arch>\n" + b"".join(member(*each) for each in members.items()))
    return path


@pytest.fixture
def file(package):
    data = package.read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    return Package(name=package.name, size_bytes=len(data), sha256=sha256)


@pytest.fixture
def server(package):
    with serving(package.parent, "debian/pool") as server:
        yield server


def address(server) -> str:
    return f"{server.address}/debian/pool/resolve/{COMMIT}/"


def require_whole(folder) -> None:
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["about.txt", "copyright", "metadata.csv", "wavs"]
    table = (folder / "metadata.csv").read_text(encoding="utf-8")
    assert table == "".join(f"{name}|Окна волос.\n" for name in NAMES)
    for name in NAMES:
        assert (folder / f"wavs/{name}.wav").read_bytes() == name.encode() + WAV
    assert (folder / "copyright").read_bytes() == b"free, with this notice"


def test_fetched_unpacked_and_left_as_a_dataset(tmp_path, package, server, file):
    into = tmp_path / "into"
    require_whole(russian_corpus(into, None, address(server), file))
    asked = len(server.asked)
    assert russian_corpus(into, None, address(server), file) == into
    assert len(server.asked) == asked
    require_whole(russian_corpus(tmp_path / "local", package, "http://127.0.0.1:9/", file))
    assert package.is_file(), "a package of one's own needs no network and stays"


def test_what_is_no_such_package_is_refused(tmp_path, package, file, capsys):
    package.write_bytes(package.read_bytes() + b" ")
    with pytest.raises(DatasetError, match=rf"is not {re.escape(file.name)}: its SHA-256"):
        russian_corpus(tmp_path / "into", package, file=file)
    gone = str(tmp_path / "gone.deb")
    assert corpus_command(["--into", str(tmp_path / "into"), "--package", gone]) == 2
    assert f"There is no {gone}" in capsys.readouterr().err


def test_killed_anywhere_it_resumes(tmp_path, server, file, monkeypatch):
    def kill(*_):
        raise KeyboardInterrupt

    into = tmp_path / "into"
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 400)
    server.cut = 500
    for place in ("time.sleep", "russian_corpus.unpack"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(place, kill)  # while it is fetched, and while it is unpacked
            russian_corpus(into, None, address(server), file)
        assert not (into / "metadata.csv").exists()
    require_whole(russian_corpus(into, None, address(server), file))
