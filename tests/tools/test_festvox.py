"""A Festival voice's recordings as an LJSpeech folder."""

import pytest
from russian_corpus import find_festival_voice, move_to_ljspeech, read_festival_transcripts

from kit.base.errors import DatasetError
from kit.dataset.data_report import ManifestConfig
from kit.dataset.layouts import read_dataset

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
    assert find_festival_voice(tmp_path / "unpacked") == voice
    assert move_to_ljspeech(voice, tmp_path / "out") == 3
    found = read_dataset(tmp_path / "out", ManifestConfig(held_out_percent=0))
    assert found.layout == "LJSpeech: metadata.csv" and not found.refused
    assert [row.id for row in found.rows] == list(TEXTS)
    for name in TEXTS:
        assert (tmp_path / f"out/wavs/{name}.wav").read_bytes() == name.encode()
    table = (tmp_path / "out/metadata.csv").read_text(encoding="utf-8").splitlines()
    assert dict(line.split("|") for line in table) == TEXTS


def test_an_interrupted_move_resumes(voice, tmp_path):
    (tmp_path / "out/wavs").mkdir(parents=True)
    (voice / "wav/ru_0001.wav").rename(tmp_path / "out/wavs/ru_0001.wav")
    assert move_to_ljspeech(voice, tmp_path / "out") == 3
    assert len(list((tmp_path / "out/wavs").iterdir())) == 3


def test_missing_recordings_are_reported_and_no_table_is_left(voice, tmp_path):
    (voice / "wav/ru_0002.wav").unlink()
    with pytest.raises(DatasetError, match=r"lacks 1 of its 3 recordings \(ru_0002\)"):
        move_to_ljspeech(voice, tmp_path / "out")
    assert not (tmp_path / "out/metadata.csv").exists()


def test_a_line_of_another_kind_is_reported_by_its_number(voice):
    path = voice / "etc/txt.done.data"
    path.write_text('( a "b" )\nru_0002 text\n', encoding="utf-8")
    with pytest.raises(DatasetError, match=r"line 2: expected .*, got 'ru_0002 text'"):
        read_festival_transcripts(path)


def test_a_folder_without_a_voice(tmp_path):
    with pytest.raises(DatasetError, match=r"holds no Festival voices with etc/txt\.done\.data"):
        find_festival_voice(tmp_path)
