"""Recording and uploading: what is saved and refused, and that nothing is ever overwritten."""

import sys
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import speech, usable

from kit.base.errors import DatasetError, KitError
from kit.base.files import encode_wav
from kit.extras.recorder import recipe as record
from kit.extras.recorder.recipe import RecordingFolder, add_files, sentences_to_read
from kit.settings import ManifestConfig

RATE = 48_000
SENTENCE = "the farmer found a small red house"
OTHER = "my brother lives near the river."


def wav(path, gain=1.0, seconds=2.5, before_s=0.3):
    syllable = np.concatenate([speech(0.4, RATE), np.zeros(RATE // 10)])
    voice = np.tile(syllable, round(seconds / 0.5))
    wave = np.concatenate([np.zeros(int(before_s * RATE)), voice, np.zeros(RATE // 4)])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_wav(gain * wave, RATE))
    return path


@pytest.fixture
def folder(tmp_path):
    return RecordingFolder(tmp_path / "recordings", [SENTENCE, OTHER], "en")


@pytest.mark.parametrize(
    ("sentence", "changed", "fact"),
    [
        (SENTENCE, {"gain": 0}, "silent"),
        (SENTENCE, {"gain": 40}, "clipped"),
        (SENTENCE, {"seconds": 20}, r"20\.\d s"),
        (SENTENCE, {"seconds": 0.5}, "short for this sentence"),
        ("", {}, "reload the page"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_and_not_saved(
    folder, tmp_path, sentence, changed, fact
):
    with pytest.raises(DatasetError, match=fact):
        folder.save(sentence, wav(tmp_path / "audio.wav", **changed))
    assert not list(folder.path.rglob("*.*")) and folder.next() == SENTENCE


def test_recordings_become_a_dataset_and_a_second_one_overwrites_nothing(folder, tmp_path):
    first = wav(tmp_path / "first.wav")
    second = wav(tmp_path / "second.wav", before_s=0.5)
    assert "1 recordings" in folder.save(SENTENCE, first)
    assert folder.next() == folder.next(SENTENCE) == OTHER
    assert "2 recordings" in folder.save(SENTENCE, second)
    assert "3 recordings" in folder.save(OTHER, wav(tmp_path / "third.wav", before_s=0.4))
    again = RecordingFolder(folder.path, folder.sentences, "en")
    assert again.next() == ""
    kept, refused = usable(folder.path, ManifestConfig(language="en"), tmp_path / "run")
    assert not refused and sorted(row.text for row in kept) == [OTHER, SENTENCE, SENTENCE]
    saved = {path.read_bytes() for path in folder.path.glob("wavs/*.wav")}
    assert {first.read_bytes(), second.read_bytes()} < saved


def test_two_uploads_with_the_same_names_are_both_kept(tmp_path):
    uploads = tmp_path / "uploads"
    sources = []
    for number, text in enumerate((SENTENCE, OTHER)):
        source = tmp_path / f"session {number}"
        wav(source / "1.wav", before_s=0.3 + number / 10)
        (source / "metadata.csv").write_text(f"1|{text}\n")
        sources.append(source)
        add_files(uploads, [source / "1.wav"])
        line = add_files(uploads, [source / "metadata.csv"])
    assert str(uploads / "batch-2") in line
    for number, source in enumerate(sources, 1):
        for name in ("1.wav", "metadata.csv"):
            copy = uploads / f"batch-{number}" / name
            assert copy.read_bytes() == (source / name).read_bytes()
    kept, refused = usable(uploads, ManifestConfig(language="en"), tmp_path / "run")
    assert not refused and sorted(row.text for row in kept) == [OTHER, SENTENCE]


def test_archives_are_unpacked_beside_each_other_and_other_files_are_refused(tmp_path):
    uploads = tmp_path / "uploads"
    archive = tmp_path / "voice.zip"
    for text in (SENTENCE, OTHER):
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr("metadata.csv", f"a|{text}\n")
            file.write(wav(tmp_path / "a.wav", before_s=len(text) / 100), "wavs/a.wav")
        add_files(uploads, [archive])
    tables = sorted(uploads.rglob("metadata.csv"))
    assert [path.read_text() for path in tables] == [f"a|{SENTENCE}\n", f"a|{OTHER}\n"]
    (tmp_path / "virus.exe").write_bytes(b"MZ")
    with pytest.raises(DatasetError, match=r"virus\.exe.*\.wav"):
        add_files(uploads, [tmp_path / "a.wav", tmp_path / "virus.exe"])
    assert len(list(uploads.iterdir())) == 2, "that upload is not saved in part"


def test_sentences_are_offered_and_own_lines_are_split(tmp_path):
    chosen = sentences_to_read("am")
    assert len(set(chosen)) == record.OFFERED
    text = tmp_path / "own.txt"
    text.write_text("word " * 60 + "\nA | bar.\n")
    own = sentences_to_read("en", str(text))
    assert max(map(len, own)) <= 140 and "A bar." in own
    text.write_text("\n...\n")
    for path in (text, tmp_path / "none.txt"):
        with pytest.raises(DatasetError, match=path.name):
            sentences_to_read("en", str(path))
    with pytest.raises(DatasetError, match="SENTENCES"):
        sentences_to_read("cy")


def test_without_gradio_a_sentence_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(KitError, match="pip install gradio"):
        record.record_page(folder)


def test_a_notebook_in_one_piece_waits_until_all_is_recorded(tmp_path, monkeypatch):
    """Where something was uploaded before, a countdown continues."""
    defaults = []

    page = SimpleNamespace(launch=lambda **_: None)
    monkeypatch.setattr(record, "upload_page", lambda _folder: page)
    monkeypatch.setattr(
        record, "ask_question", lambda _text, _answers, default: defaults.append(default)
    )
    run = SimpleNamespace(path=lambda name: tmp_path / name)
    assert record.recordings(run, "", "en", wait=True) == ""
    record.recordings(run, "upload", "en", wait=True)
    assert defaults == [], "a program waits for nobody"
    monkeypatch.setattr(record, "is_watched", lambda: True)
    record.recordings(run, "upload", "en", wait=True)
    wav(tmp_path / "uploads" / "batch-1" / "a.wav")
    assert record.recordings(run, "upload", "en", wait=True) == str(tmp_path / "uploads")
    record.recordings(run, "upload", "en")
    assert defaults == ["", "continue"]
