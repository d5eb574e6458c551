"""`make corpus-ru` on a small package of the same make, from a server on this machine."""

import hashlib
import shutil

import pytest
import russian_corpus as recipe
from debian_package import write_package
from hub import COMMIT, serving
from russian_corpus import corpus_command, russian_corpus

from kit.base import hub
from kit.base.errors import DatasetError, KitError
from kit.base.hub import RemoteFile

VOICE = "usr/share/festival/voices/russian/msu"
NAMES = ("ru_0001", "ru_0002")
WAV = bytes(range(256)) * 9000


@pytest.fixture
def package(tmp_path):
    files = {f"{VOICE}/wav/{name}.wav": name.encode() + WAV for name in NAMES}
    table = "".join(f'( {name} "+Окна вол+ос." )\n' for name in NAMES)
    files[f"{VOICE}/etc/txt.done.data"] = table.encode()
    files["usr/share/doc/festvox-ru/copyright"] = b"free, with this notice"
    (tmp_path / "pool").mkdir()
    return write_package(tmp_path / "pool/festvox-ru_0.5+dfsg-6_all.deb", files)


@pytest.fixture
def file(package):
    data = package.read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    return RemoteFile(name=package.name, size_bytes=len(data), sha256=sha256)


@pytest.fixture
def server(package, monkeypatch):
    monkeypatch.setattr(hub, "PAUSE_S", 0.0)
    monkeypatch.setattr(hub, "PIECE_BYTES", 512)
    with serving(package.parent, "debian/pool") as server:
        yield server


def address(server) -> str:
    return f"{server.address}/debian/pool/resolve/{COMMIT}/"


def require_whole(folder) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [
        "about.txt",
        "copyright",
        "metadata.csv",
        "wavs",
    ]
    table = (folder / "metadata.csv").read_text(encoding="utf-8")
    assert table == "".join(f"{name}|Окна волос.\n" for name in NAMES)
    for name in NAMES:
        assert (folder / f"wavs/{name}.wav").read_bytes() == name.encode() + WAV
    assert (folder / "copyright").read_bytes() == b"free, with this notice"


def test_fetched_unpacked_and_left_as_a_dataset(tmp_path, server, file):
    reported = []
    into = tmp_path / "into"
    russian_corpus(into, None, address(server), file, lambda *seen: reported.append(seen))
    require_whole(into)
    assert (file.size_bytes, file.size_bytes) in reported
    asked = len(server.asked)
    assert russian_corpus(into, None, address(server), file) == into
    assert len(server.asked) == asked


def test_killed_anywhere_it_resumes(tmp_path, server, file):
    into = tmp_path / "into"
    for after in (1, 5, 1000):  # while it is fetched, a little later, while it is unpacked
        calls = []

        def kill(done, total, calls=calls, after=after):
            calls.append(done)
            if len(calls) == after or (after == 1000 and done == total):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            russian_corpus(into, None, address(server), file, kill)
        assert not (into / "metadata.csv").exists()
    require_whole(russian_corpus(into, None, address(server), file))
    assert any(wanted for _, wanted in server.asked)


def test_a_kill_among_the_recordings(tmp_path, package, file, monkeypatch):
    into = tmp_path / "into"
    whole = recipe.move_to_ljspeech

    def killed(voice, target):
        (target / "wavs").mkdir()
        shutil.move(voice / f"wav/{NAMES[0]}.wav", target / "wavs")
        raise KeyboardInterrupt

    monkeypatch.setattr(recipe, "move_to_ljspeech", killed)
    with pytest.raises(KeyboardInterrupt):
        russian_corpus(into, package, file=file)
    monkeypatch.setattr(recipe, "move_to_ljspeech", whole)
    require_whole(russian_corpus(into, package, file=file))


def test_a_local_package_needs_no_network_and_stays(tmp_path, package, file):
    require_whole(russian_corpus(tmp_path / "into", package, "http://127.0.0.1:9/", file))
    assert package.is_file()


def test_another_file_is_refused(tmp_path, package, file):
    package.write_bytes(package.read_bytes() + b" ")
    with pytest.raises(DatasetError, match=r"is not festvox-ru_0\.5\+dfsg-6_all\.deb: its SHA-256"):
        russian_corpus(tmp_path / "into", package, file=file)


def test_no_network_is_a_sentence(tmp_path, file, monkeypatch):
    monkeypatch.setattr(hub, "PAUSE_S", 0.0)
    with pytest.raises(KitError, match=r"Debian's server .*could not be reached.*PACKAGE=FI"):
        russian_corpus(tmp_path / "into", None, "http://127.0.0.1:9/", file)


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    missing = str(tmp_path / "gone.deb")
    assert corpus_command(["--into", str(tmp_path / "into"), "--package", missing]) == 2
    assert capsys.readouterr().err == (
        f"There is no {missing}: is the name right, and the disk mounted?\n"
    )
