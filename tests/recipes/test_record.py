"""Recordings made or uploaded in a notebook: sentences, checks, folders that `prepare` reads."""

import zipfile

import numpy as np
import pytest
from helpers import speech, usable

from kit.base.errors import DatasetError
from kit.base.files import encode_wav
from kit.recipes.record import (
    RecordingFolder,
    choose_sentences,
    describe_folder,
    kit_sentences,
    receive,
)
from kit.settings import ManifestConfig

RATE = 48_000
SENTENCE = "the farmer found a small red house"


def recording(gain=1.0, before_s=0.4, after_s=0.4, seconds=2.0, noise=1e-4) -> bytes:
    syllable = np.concatenate([speech(0.4, RATE), np.zeros(RATE // 10)])
    voice = np.tile(syllable, round(seconds / 0.5))[: -RATE // 10]
    wave = np.concatenate([np.zeros(int(before_s * RATE)), voice, np.zeros(int(after_s * RATE))])
    return encode_wav(gain * wave + np.random.default_rng(0).normal(0, noise, len(wave)), RATE)


@pytest.fixture
def own(tmp_path):
    lines = (SENTENCE, "", "who bought it? nobody|knows.", "my brother lives near the river.")
    (tmp_path / "own.txt").write_text("\n".join(lines))
    return RecordingFolder(tmp_path / "made", "en", str(tmp_path / "own.txt"))


@pytest.mark.parametrize(
    ("changed", "fact", "usable"),
    [
        ({}, "", True),
        ({"gain": 0}, "silent (peak 0.0", False),
        ({"gain": 8}, "clipped", False),
        ({"after_s": 20}, "longer than", False),
        ({"seconds": 0.5}, "short for this sentence", True),
        ({"gain": 0.08}, "quiet (peak 0.0", True),
        ({"noise": 0.05}, "dB above the noise", True),
        ({"before_s": 0}, "starts within a sound", True),
        ({"after_s": 0}, "ends within a sound", True),
    ],
)
def test_what_is_wrong_with_a_recording_is_said_at_once(own, changed, fact, usable):
    take = own.check(SENTENCE, recording(**changed))
    assert fact.lower() in " ".join(take.problems).lower() and take.usable == usable
    assert bool(take.problems) == bool(fact)


def test_recordings_become_a_dataset_and_the_recorder_resumes(own, tmp_path):
    for sentence in own.sentences[:2]:
        own.save(sentence, recording(before_s=0.3 + 0.1 * len(own.texts)))
    own.skip(own.sentences[2])
    again = RecordingFolder(own.folder, "en", str(tmp_path / "own.txt"))
    assert all(map(again.done, own.sentences)) and again.progress() == own.progress()
    kept, refused = usable(own.folder, ManifestConfig(language="en"), tmp_path / "run")
    assert not refused and {row.text for row in kept} == set(own.sentences[:2])
    (own.folder / "wavs" / f"{kept[0].id}.wav").unlink()
    assert not all(map(RecordingFolder(own.folder, "en").done, [row.text for row in kept]))


def test_sentences_with_most_letters_come_first_and_a_persons_are_split(tmp_path):
    pool = kit_sentences("am")
    chosen = choose_sentences(pool, "am", 30)
    letters = set("".join(pool)) - {" "}
    assert len(set(chosen)) == 30
    assert len(set("".join(chosen)) & letters) > 1.2 * len(set("".join(pool[:30])) & letters)
    assert set(choose_sentences(["aa", "ab", "cd", "ab"], "en", 9)) == {"aa", "ab", "cd"}
    text = tmp_path / "own.txt"
    text.write_text("word " * 60 + "\nA | bar.\n")
    folder = RecordingFolder(tmp_path / "made", "en", str(text))
    assert max(map(len, folder.sentences)) <= 140 and "A bar." in folder.sentences
    table = text.rename(tmp_path / "own.csv")
    assert "A bar." in RecordingFolder(tmp_path / "made", "en", str(table)).sentences
    text.write_text("\n...\n")
    for path in (text, tmp_path / "none.txt"):
        with pytest.raises(DatasetError, match=path.name):
            RecordingFolder(tmp_path / "made", "en", str(path))


def test_uploads_are_moved_or_unpacked_and_described(tmp_path):
    folder = tmp_path / "uploads"
    folder.mkdir()
    assert "No recordings" in describe_folder(folder)
    (tmp_path / "me.wav").write_bytes(recording())
    receive(folder, tmp_path / "me.wav")
    assert (folder / "me.wav").is_file()
    assert "1 recording and no texts" in describe_folder(folder)
    with zipfile.ZipFile(tmp_path / "more.zip", "w") as archive:
        archive.writestr("metadata.csv", f"a|{SENTENCE}\n")
        archive.writestr("wavs/a.wav", recording())
    receive(folder, tmp_path / "more.zip")
    assert not (tmp_path / "more.zip").exists()
    assert "2 recordings and metadata.csv" in describe_folder(folder)
    kept, _ = usable(folder / "more", ManifestConfig(language="en"), tmp_path / "run")
    assert [row.text for row in kept] == [SENTENCE]
    (tmp_path / "virus.exe").write_bytes(b"MZ")
    with pytest.raises(DatasetError, match=r"virus.exe.*\.wav"):
        receive(folder, tmp_path / "virus.exe")
