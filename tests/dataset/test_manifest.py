"""The whole way, on real bytes: from a folder to a manifest, a data report, a cleaned table."""

import json
from pathlib import Path

import pytest
from clips import BAD, TEXT, voice
from helpers import dataset

from kit.base.errors import DatasetError
from kit.dataset.checks import check_dataset
from kit.dataset.data_report import by_kind
from kit.dataset.manifest import read_manifest
from kit.settings import ManifestConfig

RULES = ManifestConfig(held_out_percent=0)
LINE = '{"id": "a", "audio": "a", "text": "b", "speaker": "", "split": "train", "line": 1}'


def many(folder, good: int, missing: int):
    """An LJSpeech folder of `good` different recordings, and rows of `missing` ones."""
    table = "".join(f"c{i}|{TEXT} {'ሀሁሂሃሄህሆለሉሊላሌልሎ'[i % 14]}\n" for i in range(good + missing))
    return dataset(folder, table, {f"c{i}": voice(1.0, i) for i in range(good)})


@pytest.mark.parametrize("kind", BAD)
def test_every_unusable_recording_names_line_reason_and_fix(tmp_path, kind):
    make, category, words = BAD[kind]
    folder = dataset(tmp_path / "data", f"one|{TEXT}\n")
    (folder / "wavs/one.wav").write_bytes(make())
    result = check_dataset(folder, RULES, tmp_path / "run")
    (refusal,) = result.refused
    assert not result.kept
    assert (refusal.id, refusal.line, refusal.file) == ("one", 1, "metadata.csv")
    assert refusal.kind == category and words in refusal.reason and refusal.cure
    assert refusal.audio.endswith("one.wav") and str(tmp_path) not in refusal.reason


def test_the_report_is_the_same_as_the_files_on_disk(tmp_path):
    result = check_dataset(many(tmp_path / "data", 18, 2), RULES, tmp_path / "run")
    rejected, warned = (
        (tmp_path / "run" / name).read_text(encoding="utf-8").splitlines()
        for name in ("ledger.jsonl", "warnings.jsonl")
    )
    assert [json.loads(line)["line"] for line in rejected] == [19, 20]
    assert read_manifest(tmp_path / "run") == result.kept and len(result.kept) == 18
    assert len(warned) == len(result.warned)
    assert result.measures[result.kept[0].audio].snr_db > 20 and len(result.measures) == 18
    assert list(by_kind(result.refused)) == ["missing"]


def test_recordings_in_a_runs_folder_move_with_it(tmp_path, monkeypatch):
    """As one that was taken from Drive to another machine; other recordings stay where they are."""
    kept = check_dataset(many(tmp_path / "run" / "corpus", 3, 0), RULES, tmp_path / "run").kept
    (tmp_path / "run").rename(tmp_path / "moved")
    result = read_manifest(tmp_path / "moved")
    assert [row.id for row in result] == [row.id for row in kept]
    assert all(Path(row.audio).is_file() for row in result)
    monkeypatch.chdir(many(tmp_path / "data", 3, 0).parent)
    check_dataset(Path("data"), RULES, tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved")
    assert all(Path(row.audio).is_file() for row in read_manifest(Path(".")))


def test_a_text_with_odd_line_separators_comes_back_whole(tmp_path):
    line = json.loads(LINE) | {"text": "ሰላም\u2028ለሁሉ\u0085"}
    data = json.dumps(line, ensure_ascii=False)
    (tmp_path / "manifest.jsonl").write_text(f"{data}\n{data}\n", encoding="utf-8")
    assert [row.text for row in read_manifest(tmp_path)] == [line["text"]] * 2


def test_a_damaged_a_missing_or_an_empty_manifest_names_line_and_fix(tmp_path):
    path = tmp_path / "manifest.jsonl"
    with pytest.raises(DatasetError, match="01_data_prep"):
        read_manifest(tmp_path)
    for line in ('{"id": "a", "au', "[]", "{}", "[" * 99_999, ""):
        path.write_text(f"{LINE}\n{line}\n")
        with pytest.raises(DatasetError, match=r"t\.jsonl, line 2 is damaged.*01_data_prep"):
            read_manifest(tmp_path)
    path.write_text("")
    with pytest.raises(DatasetError, match=r"manifest\.jsonl has no rows: run notebook 01"):
        read_manifest(tmp_path)
