"""`make corpus-ru` on a small package of the same make, from a server on this machine."""

import hashlib
import io
import shutil
import tarfile

import pytest
import russian_corpus as recipe
from hub import COMMIT, serving
from russian_corpus import corpus_command, extract_debian_data, move_to_ljspeech, russian_corpus

from kit.base.errors import DatasetError, KitError
from kit.dataset.archive import unpack
from kit.dataset.layouts import read_dataset
from kit.settings import ArchiveConfig, ManifestConfig

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


def write_package(path, files: dict[str, bytes], data_name: str = "data.tar.xz"):
    """A Debian package written by hand: an `ar` archive with a tar of files in it."""
    control = tar_of({"control": b"Package: test"}) + b"odd"
    members = {"debian-binary": b"2.0\n", "control.tar.xz": control, data_name: tar_of(files)}
    path.write_bytes(b"!<arch>\n" + b"".join(member(*each) for each in members.items()))
    return path


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
    return recipe.Package(name=package.name, size_bytes=len(data), sha256=sha256)


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


def test_fetched_unpacked_and_left_as_a_dataset(tmp_path, server, file):
    into = tmp_path / "into"
    require_whole(russian_corpus(into, None, address(server), file))
    asked = len(server.asked)
    assert russian_corpus(into, None, address(server), file) == into
    assert len(server.asked) == asked


def test_killed_anywhere_it_resumes(tmp_path, server, file, monkeypatch):
    def kill(*_):
        raise KeyboardInterrupt

    into = tmp_path / "into"
    monkeypatch.setattr("kit.base.hub.RANGE_BYTES", 400)
    server.cut = 500
    for place in ("time.sleep", "russian_corpus.unpack"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(place, kill)  # while it is fetched, and while it is unpacked
            russian_corpus(into, None, address(server), file)
        assert not (into / "metadata.csv").exists()
    require_whole(russian_corpus(into, None, address(server), file))
    assert [wanted for _, wanted in server.asked][1:3] == ["bytes=400-799"] * 2


def test_a_kill_among_the_recordings(tmp_path, package, file, monkeypatch):
    into = tmp_path / "into"

    def killed(voice, target):
        (target / "wavs").mkdir()
        shutil.move(voice / f"wav/{NAMES[0]}.wav", target / "wavs")
        raise KeyboardInterrupt

    monkeypatch.setattr(recipe, "move_to_ljspeech", killed)
    with pytest.raises(KeyboardInterrupt):
        russian_corpus(into, package, file=file)
    monkeypatch.undo()
    require_whole(russian_corpus(into, package, file=file))


def test_a_local_package_needs_no_network_and_stays(tmp_path, package, file):
    require_whole(russian_corpus(tmp_path / "into", package, "http://127.0.0.1:9/", file))
    assert package.is_file()


def test_another_file_is_refused(tmp_path, package, file):
    package.write_bytes(package.read_bytes() + b" ")
    with pytest.raises(DatasetError, match=r"is not festvox-ru_0\.5\+dfsg-6_all\.deb: its SHA-256"):
        russian_corpus(tmp_path / "into", package, file=file)


@pytest.mark.long
def test_no_network_is_a_sentence(tmp_path, file):
    with pytest.raises(KitError, match=r"127\.0\.0\.1:9 could not be reached.*PACKAGE=FI"):
        russian_corpus(tmp_path / "into", None, "http://127.0.0.1:9/", file)


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    missing = str(tmp_path / "gone.deb")
    assert corpus_command(["--into", str(tmp_path / "into"), "--package", missing]) == 2
    assert f"There is no {missing}" in capsys.readouterr().err


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


BROKEN = [
    (lambda data: data[:-100], "bytes of data.tar.xz"),
    (lambda data: data.replace(b"100644", b"1006`4").replace(b"`\n2.0", b"??2.0"), "is damaged"),
    (lambda data: b"PK" + data, "is no Debian package"),
    (lambda data: data[:8], "it holds no data.tar"),
    (lambda data: data[:8] + member("debian-binary", b"2.0\n"), "it holds no data.tar"),
]


@pytest.mark.parametrize(("spoil", "why"), BROKEN)
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


TABLE = r"""( ru_0001 "+Окна вол+ос за ухо, 2+2." )
( ru_0002 "Он сказал: \"да\"." )

( ru_0003 "Она" )
"""
TEXTS = {"ru_0001": "Окна волос за ухо, 2+2.", "ru_0002": 'Он сказал: "да".', "ru_0003": "Она"}


@pytest.fixture
def voice(tmp_path):
    folder = tmp_path / "unpacked/usr/share/voice"
    (folder / "etc").mkdir(parents=True)
    (folder / "wav").mkdir()
    (folder / "etc/txt.done.data").write_text(TABLE, encoding="utf-8")
    for name in TEXTS:
        (folder / f"wav/{name}.wav").write_bytes(name.encode())
    return folder


def test_texts_and_recordings_stay_together(voice, tmp_path):
    assert recipe.find_festival_voice(tmp_path / "unpacked") == voice
    assert move_to_ljspeech(voice, tmp_path / "out") == 3
    result = read_dataset(tmp_path / "out", ManifestConfig(held_out_percent=0))
    assert result.layout == "LJSpeech: metadata.csv" and not result.refused
    assert [row.id for row in result.rows] == list(TEXTS)
    for name in TEXTS:
        assert (tmp_path / f"out/wavs/{name}.wav").read_bytes() == name.encode()
    table = (tmp_path / "out/metadata.csv").read_text(encoding="utf-8").splitlines()
    assert dict(line.split("|") for line in table) == TEXTS


def test_missing_recordings_are_reported_and_no_table_is_left(voice, tmp_path):
    (voice / "wav/ru_0002.wav").unlink()
    with pytest.raises(DatasetError, match=r"lacks 1 of its 3 recordings \(ru_0002\)"):
        move_to_ljspeech(voice, tmp_path / "out")
    assert not (tmp_path / "out/metadata.csv").exists()


def test_a_line_of_another_kind_is_reported_by_its_number(voice):
    path = voice / "etc/txt.done.data"
    path.write_text('( a "b" )\nru_0002 text\n', encoding="utf-8")
    with pytest.raises(DatasetError, match=r"line 2: expected .*, got 'ru_0002 text'"):
        recipe.read_festival_transcripts(path)


def test_a_folder_without_a_voice(tmp_path):
    with pytest.raises(DatasetError, match=r"holds no Festival voices with etc/txt\.done\.data"):
        recipe.find_festival_voice(tmp_path)
