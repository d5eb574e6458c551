"""Recordings however a table spells them, and splits and speakers by the names of folders."""

import unicodedata
from pathlib import Path

import pytest
from folders import CSV, SPLIT_OF, TEXTS, TWO, folder_of, lines, parts, read, require_rows, wavs

from kit.audio.container import SUFFIXES
from kit.base.errors import DatasetError
from kit.dataset.fetch import fetch_dataset
from kit.dataset.recordings import canonical_split

TRAIN, HELD = parts('{{"audio": "wavs/c{i}.wav", "text": "{t}"}}')
LISTS = ["path|text\n" + part for part in parts("wavs/c{i}.wav|{t}")]
TRAIN_CSV, HELD_CSV = parts("c{i}|{t}")
KEYS = TRAIN.replace("}", ', "split": "Training"}') + HELD.replace("}", ', "split": "Validation"}')
COLUMN = "split|id|text\n" + parts("TRAIN|c{i}|{t}")[0] + parts("dev|c{i}|{t}")[1]
SPLITS = {
    "JSONL manifests": {"train_manifest.jsonl": TRAIN, "val_manifest.jsonl": HELD},
    "beside a list of all": {
        "metadata.csv": TRAIN_CSV + HELD_CSV,
        "metadata_train.csv": TRAIN_CSV,
        "metadata_val.csv": HELD_CSV,
    },
    "file lists": dict(zip(("x_audio_train.csv", "x_audio_val.csv"), LISTS)),
    "a key": {"all.jsonl": KEYS},
    "a column": {"metadata.csv": COLUMN},
}


@pytest.mark.parametrize("kind", SPLITS)
def test_the_usual_names_of_splits_are_known(tmp_path, kind):
    result = read(folder_of(tmp_path, wavs(), **SPLITS[kind]))
    assert not result.refused
    assert {row.text: row.split for row in result.rows} == SPLIT_OF


def test_a_folder_for_each_split_is_one_dataset(tmp_path):
    train, held_out = ("file_name,transcription\n" + part for part in parts("c{i}.wav,{t}"))
    tables = {"train/metadata.csv": train, "validation/metadata.csv": held_out}
    files = [f"{'validation' if i > 7 else 'train'}/c{i}.wav" for i in range(10)]
    result = read(fetch_dataset(folder_of(tmp_path / "mine", files, **tables), tmp_path / "into"))
    assert {row.text: row.split for row in result.rows} == SPLIT_OF
    assert {row.file for row in result.rows} == {"train/metadata.csv", "validation/metadata.csv"}


NFC, NFD = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
PATHS = {
    "composed": (f"{NFC}.wav", f"wavs/{NFD}.wav"),
    "capitals": ("x", "wavs/x.WAV"),
    "a backslash": ("wavs\\x.wav", "wavs/x.wav"),
    "a full path": ("/home/me/corpus/wavs/x.wav", "wavs/x.wav"),
    "a full path of Windows": ("D:\\corpus\\wavs\\x.wav", "wavs/x.wav"),
    "a folder in another spelling": (f"{NFC}/x", f"wavs/{NFD}/x.wav"),
    "another suffix": ("x.mp3", "wavs/x.wav"),
    "a folder below": ("s1/x", "wavs/s1/x.ogg"),
}


@pytest.mark.parametrize("kind", PATHS)
def test_recordings_are_found_however_the_table_spells_them(tmp_path, kind):
    name, path = PATHS[kind]
    table = {"metadata.csv": f"{name}|{TEXTS[0]}\n"}
    (row,) = read(folder_of(tmp_path, [*wavs(3), path], **table)).rows
    assert Path(row.audio) == tmp_path / path and not Path(row.id).is_absolute()


def test_what_is_missing_names_what_is_there(tmp_path):
    files = [*wavs(5), "wavs/s1/y.wav", "wavs/z.sph", "rejected/q.wav"]
    bad = "".join(f"{name}|{TEXTS[9]}\n" for name in ("x", "y", "z", "q", "other/c1"))
    result = read(folder_of(tmp_path, files, **{"metadata.csv": "".join(CSV[:5]) + bad}))
    reasons = {finding.id: finding.reason for finding in result.refused}
    assert reasons.keys() == {"x", "y", "z", "q", "other/c1"}
    for name, reason in reasons.items():
        assert f"no recording wavs/{name}.wav" in reason
        assert "c0.wav, c1.wav, c2.wav and 2 more" in reason
    assert {finding.kind for finding in result.refused} == {"missing"} and len(result.rows) == 5


def test_two_folders_with_recordings_of_one_name_need_a_word(tmp_path):
    table = {"metadata.csv": "".join(CSV)}
    for kind, pattern in {"clips": "clips/c{}.wav", "above": "c{}.mp3"}.items():
        folder = folder_of(tmp_path / kind, [*wavs(), *wavs(3, pattern)], **table)
        with pytest.raises(DatasetError, match=r"Two recordings fit 'c0'.*audio_root"):
            read(folder)
        rows = read(folder, audio_root=str(folder / "wavs")).rows
        assert [Path(row.audio).parent.name for row in rows] == ["wavs"] * 10
    # What names its folder or its suffix fits one; a link is the same recording.
    both = [*wavs(), *wavs(3, "clips/c{}.wav")]
    table = {"list.csv": "path,text\n" + lines("wavs/c{i}.wav,{t}")}
    assert len(read(folder_of(tmp_path / "exact", both, **table)).rows) == 10
    both = [*wavs(), *wavs(3, "c{}.mp3")]
    table = {"list.csv": "path,text\n" + lines("c{i}.wav,{t}")}
    folder = folder_of(tmp_path / "suffix", both, **table)
    (folder / "clips").symlink_to(folder / "wavs")
    assert len(read(folder).rows) == 10


def test_an_id_finds_every_format_that_can_be_read(tmp_path):
    for suffix in [*SUFFIXES, ".M4A"]:
        folder = folder_of(tmp_path / suffix, [f"wavs/c0{suffix}"], **{"metadata.csv": CSV[0]})
        assert [Path(row.audio).name for row in read(folder).rows] == [f"c0{suffix}"]


def test_paths_start_from_wavs_the_table_or_the_folder_above(tmp_path):
    table = "name,speaker,text\n" + lines("s{n}/c{i},{s},{t}")
    recordings = [f"wavs/s{i % 2}/c{i}.wav" for i in range(10)]
    require_rows(tmp_path, recordings, {"filelists/all.csv": table}, TWO)


def test_names_of_splits():
    names = {"train": "train-clean-100 train_nodev", "test-clean": "test-clean", "unseen": "unseen"}
    names["held_out"] = "Validation dev_clean train_dev held-out"
    for split, own in names.items():
        assert {canonical_split(name) for name in own.split()} == {split}


def test_names_that_differ_in_capitals_alone_are_two_recordings(tmp_path):
    table = f"Ab|{TEXTS[0]}\nwavs\\aB.wav|{TEXTS[1]}\nAB|{TEXTS[2]}\n"
    folder = folder_of(tmp_path / "a", ["wavs/Ab.wav", "wavs/aB.wav"], **{"metadata.csv": table})
    if len(list((folder / "wavs").iterdir())) < 2:
        pytest.skip("this disk does not tell capitals from small letters")
    result = read(folder)
    names = {"Ab.wav": TEXTS[0], "aB.wav": TEXTS[1]}
    assert {Path(row.audio).name: row.text for row in result.rows} == names
    (refused,) = result.refused
    assert refused.id == "AB" and "Ab.wav" in refused.reason and "aB.wav" in refused.reason
