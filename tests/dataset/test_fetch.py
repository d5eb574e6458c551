"""Whatever form a dataset comes in, its folder is found, and nothing is written elsewhere."""

import io
import tarfile
import zipfile
from pathlib import Path

import pytest
import soundfile
from helpers import RATE, dataset, speech

from kit.base.errors import DatasetError
from kit.dataset import fetch as ingest
from kit.dataset.data_report import ManifestConfig
from kit.dataset.fetch import fetch_dataset
from kit.dataset.layouts import read_dataset


def clip(number: int) -> bytes:
    """The bytes of a recording, another one for every number."""
    file = io.BytesIO()
    soundfile.write(file, speech(0.3 + 0.01 * (number % 30), RATE), RATE, format="WAV")
    return file.getvalue()


def common_voice(folder: Path, language: str = "am") -> Path:
    """A Common Voice corpus of two clips, as its archive holds it."""
    clips = folder / f"cv-corpus-17.0/{language}/clips"
    clips.mkdir(parents=True)
    head = "client_id\tpath\tsentence\tup_votes\n"
    body = "".join(f"x\t{n}.wav\tሰላም {n}\t2\n" for n in "ab")
    for name in ("validated.tsv", "train.tsv"):
        (clips.parent / name).write_text(head + body, encoding="utf-8")
    for n in "ab":
        (clips / f"{n}.wav").write_bytes(clip(ord(n)))
    return folder


def test_a_common_voice_archive_is_unpacked_found_and_read(tmp_path):
    common_voice(tmp_path / "made")
    archive = tmp_path / "cv-corpus-17.0-am.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(tmp_path / "made", arcname="")
    folder = fetch_dataset(archive, tmp_path / "into")
    assert folder.relative_to(tmp_path / "into").as_posix() == (
        "cv-corpus-17.0-am/cv-corpus-17.0/am"
    )
    assert [row.text for row in read_dataset(folder, ManifestConfig()).rows] == ["ሰላም a", "ሰላም b"]
    assert fetch_dataset(archive, tmp_path / "into") == folder


def test_an_ljspeech_zip_from_a_mac_is_found(tmp_path):
    with zipfile.ZipFile(tmp_path / "voice.zip", "w") as packed:
        packed.writestr("voice/metadata.csv", "a|ሰላም\n")
        packed.writestr("voice/wavs/a.wav", clip(1))
        packed.writestr("__MACOSX/voice/metadata.csv", "junk")
        packed.writestr("__MACOSX/voice/wavs/a.wav", "junk")
        packed.writestr(".hidden/x.jsonl", "{}")
    assert fetch_dataset(tmp_path / "voice.zip", tmp_path / "into").name == "voice"
    (tmp_path / "mine").mkdir()
    with zipfile.ZipFile(tmp_path / "mine" / "voice.zip", "w") as packed:  # again, in another
        packed.write(tmp_path / "voice.zip", "voice.zip")
    for source in (tmp_path / "mine", tmp_path / "mine" / "voice.zip"):
        into = tmp_path / f"into {source.name}"
        (row,) = read_dataset(fetch_dataset(source, into), ManifestConfig()).rows
        assert row.text == "ሰላም"
    (tmp_path / "mine" / "metadata.csv").write_text("a|ሰላም\n", encoding="utf-8")
    with pytest.raises(DatasetError, match=r"archives \(voice\.zip\).*unpack them"):
        fetch_dataset(tmp_path / "mine", tmp_path / "into 3")


def test_a_folder_is_taken_as_it_stands(tmp_path):
    folder = dataset(tmp_path / "mine", "a|ሰላም\n", {"a": speech()})
    assert fetch_dataset(folder, tmp_path / "into") == folder
    assert fetch_dataset(tmp_path, tmp_path / "into") == folder
    assert not (tmp_path / "into").exists()


def test_several_datasets_are_listed_to_choose_from(tmp_path):
    for language in ("am", "ti"):
        common_voice(tmp_path / "cv", language)
    with pytest.raises(DatasetError, match=r"several datasets \(cv-corpus-17\.0/am, .*/ti\)"):
        fetch_dataset(tmp_path / "cv", tmp_path / "into")


def test_where_there_is_none_it_says_what_was_expected_and_found(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/readme.txt").write_text("hello")
    with pytest.raises(DatasetError, match=r"wavs/ \(LJSpeech\).*found a/"):
        fetch_dataset(tmp_path, tmp_path / "into")
    with pytest.raises(DatasetError, match=r"There is no .*nothing\.zip"):
        fetch_dataset(tmp_path / "nothing.zip", tmp_path / "into")
    (tmp_path / "broken.zip").write_bytes(b"PK\x03\x04")
    with pytest.raises(DatasetError, match="damaged"):
        fetch_dataset(tmp_path / "broken.zip", tmp_path / "into")


def test_a_table_is_handed_on_as_it_is(tmp_path):
    folder = dataset(tmp_path / "mine", "a|ሰላም\n", {"a": speech()})
    assert fetch_dataset(folder / "metadata.csv", tmp_path / "into") == folder / "metadata.csv"


@pytest.mark.parametrize("name", ["fleurs", "google/fleurs", "google//train"])
def test_a_name_of_the_hub_has_three_parts(tmp_path, name):
    with pytest.raises(DatasetError, match="NAME/CONFIG/SPLIT"):
        fetch_dataset(f"hf://{name}", tmp_path)


def test_a_dataset_of_the_hub_is_streamed_into_a_folder_of_its_own(tmp_path, monkeypatch):
    asked, rows = [], [{"audio": {"bytes": clip(1)}, "sentence": "ሰላም"}]
    monkeypatch.setattr(ingest, "open_huggingface", lambda *a: asked.append(a) or rows)
    folder = fetch_dataset("hf://google/fleurs/am_et/train", tmp_path)
    assert asked == [("google/fleurs", "am_et", "train")]
    assert [row.text for row in read_dataset(folder, ManifestConfig()).rows] == ["ሰላም"]
