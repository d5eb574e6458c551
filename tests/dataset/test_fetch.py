"""Whatever form a dataset comes in, its folder is found, and nothing is written elsewhere."""

import contextlib
import importlib.util
import itertools
import json
import multiprocessing
import sys
import tarfile
import time
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
import soundfile
from clips import encoded, voice
from folders import TEXTS, contents, folder_of
from helpers import RATE, dataset, speech, start_and_kill

from kit.base.errors import DatasetError
from kit.dataset import fetch as module
from kit.dataset.fetch import fetch_dataset, open_huggingface, write_rows
from kit.dataset.layouts import read_dataset
from kit.settings import HubConfig, ManifestConfig
from kit.text.normalize import normalize

CONFIG = HubConfig()


@pytest.fixture(autouse=True)
def positions_are_saved_often(monkeypatch):
    monkeypatch.setattr("kit.dataset.fetch.SAVE_ROWS", 5)


def clip(number: int, format: str = "WAV", channels: int = 1) -> bytes:
    """A recording, another one for every number."""
    wave = speech(0.3 + 0.01 * (number % 30))
    return encoded(np.stack([wave] * channels, axis=1), RATE, format=format)


def texts(folder: Path) -> list[str]:
    return [row.text for row in read_dataset(folder, ManifestConfig()).rows]


def test_a_common_voice_archive_is_unpacked_found_and_read(tmp_path):
    table = "client_id\tpath\tsentence\tup_votes\n"
    table += "".join(f"x\t{n}.wav\tሰላም {n}\t2\n" for n in "ab")
    files = {f"clips/{n}.wav": clip(ord(n)) for n in "ab"}
    files |= {"validated.tsv": table, "train.tsv": table}
    folder_of(tmp_path / "made/cv-corpus-17.0/am", [], **files)
    archive = tmp_path / "cv-corpus-17.0-am.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(tmp_path / "made", arcname="")
    folder = fetch_dataset(archive, tmp_path / "into")
    assert folder == tmp_path / "into/cv-corpus-17.0-am/cv-corpus-17.0/am"
    assert texts(folder) == ["ሰላም a", "ሰላም b"]
    assert fetch_dataset(archive, tmp_path / "into") == folder


def test_an_ljspeech_zip_from_a_mac_is_found(tmp_path):
    files = {"voice/metadata.csv": "a|ሰላም\n", "voice/wavs/a.wav": clip(1), ".hidden/x.jsonl": "{}"}
    files |= {"__MACOSX/voice/metadata.csv": "junk", "__MACOSX/voice/wavs/a.wav": "junk"}
    with zipfile.ZipFile(tmp_path / "voice.zip", "w") as packed:
        for name, data in files.items():
            packed.writestr(name, data)
    assert fetch_dataset(tmp_path / "voice.zip", tmp_path / "into").name == "voice"


def test_a_folder_or_a_table_is_taken_as_it_is(tmp_path):
    folder = dataset(tmp_path / "mine", "a|ሰላም\n", {"a": speech()})
    assert fetch_dataset(folder, tmp_path / "into") == folder
    assert fetch_dataset(tmp_path, tmp_path / "into") == folder
    assert fetch_dataset(folder / "metadata.csv", tmp_path / "into") == folder / "metadata.csv"
    assert not (tmp_path / "into").exists()


def test_where_there_is_none_it_says_what_was_expected_and_found(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "voice.zip").write_bytes(b"PK\x03\x04")
    wanted = {"": r"wavs/ \(LJSpeech\).*found a/, voice\.zip", "voice.zip": "damaged"}
    wanted["nothing.zip"] = r"There is no .*nothing\.zip"
    for name, facts in wanted.items():
        with pytest.raises(DatasetError, match=facts):
            fetch_dataset(tmp_path / name, tmp_path / "into")


def rows(count: int) -> list[dict]:
    """Rows whose names and paths lead out of the folder."""
    audio = [{"bytes": clip(i), "path": f"../../{i}.wav"} for i in range(count)]
    names = {"id": "../../evil", "file": "/etc/passwd"}
    return [names | {"audio": each, "sentence": f"ሰላም ለሁሉ {i}"} for i, each in enumerate(audio)]


def table(folder: Path) -> list[dict]:
    lines = (folder / "manifest.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_a_dataset_of_the_hub_is_streamed_into_a_folder_of_its_own(tmp_path, monkeypatch):
    for name in ("fleurs", "google/fleurs", "google//train"):
        with pytest.raises(DatasetError, match="NAME/CONFIG/SPLIT"):
            fetch_dataset(f"hf://{name}", tmp_path)
    asked = []
    monkeypatch.setattr(module, "open_huggingface", lambda *a: asked.append(a) or rows(1))
    for _ in range(2):  # the second needs no network
        folder = fetch_dataset("hf://google/fleurs/am_et/train", tmp_path)
        assert asked == [("google/fleurs", "am_et", "train")]
        assert texts(folder) == [normalize("ሰላም ለሁሉ 0")]
    other = fetch_dataset("hf://google/fleurs/am_et/train", tmp_path, hub=HubConfig(most_hours=1.0))
    assert other != folder and texts(other) == texts(folder)


def test_rows_become_a_dataset_whose_recordings_are_theirs(tmp_path):
    reported = []
    folder = write_rows(rows(7), tmp_path / "out", CONFIG, lambda *now: reported.append(now))
    result = read_dataset(folder, ManifestConfig())
    assert [row.text for row in result.rows] == [normalize(f"ሰላም ለሁሉ {i}") for i in range(7)]
    assert not result.refused and reported[0] == (1, 2) and reported[-1] == (7, 7)
    files = {f"out/wavs/{i:08d}.wav": clip(i) for i in range(7)}
    assert contents(tmp_path).items() >= files.items() and len(contents(tmp_path)) == 8


@pytest.mark.parametrize("name", ["a.FLAC", "a.OGG", "a.mp3", None])
def test_audio_of_any_coding_is_kept_as_it_is(tmp_path, name):
    data = clip(0, name[2:].upper() if name else "WAV", channels=2)
    row = {"audio": {"bytes": data, "path": name}, "text": "ሰላም"}
    (line,) = table(write_rows([row], tmp_path / "out", CONFIG))
    assert line["audio"] == f"wavs/00000000.{name[2:].lower() if name else 'wav'}"
    assert (tmp_path / "out" / line["audio"]).read_bytes() == data
    assert soundfile.info(tmp_path / "out" / line["audio"]).samplerate == RATE


BAD = {
    "no text": ({"text": " "}, "no text in"),
    "text of another kind": ({"text": 7}, "no text in"),
    "two texts": ({"sentence": "ሌላ"}, "`text` and `sentence` could both be what is spoken"),
    "no audio": ({"audio": None}, "no audio bytes in column 'audio'"),
    "only a path": ({"audio": {"path": "/etc/passwd"}}, "paths are not followed"),
    "junk bytes": ({"audio": {"bytes": b"junk" * 99}}, "396 bytes cannot be read as audio"),
    "a pointer": ({"audio": {"bytes": b"version https://git-lfs"}}, "a Git LFS pointer"),
    "a page": ({"audio": {"bytes": b"<html>"}}, "a web page"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_row_is_refused_with_its_number_and_reason(tmp_path, kind):
    over, reason = BAD[kind]
    good = {"audio": {"bytes": clip(0)}, "text": "ሰላም"}
    folder = write_rows([good, good | over, good], tmp_path / "out", CONFIG)
    result = read_dataset(folder, ManifestConfig())
    assert [row.line for row in result.rows] == [1, 3]
    (finding,) = result.refused
    assert finding.line == 2 and reason in finding.reason
    assert sorted(p.name for p in (folder / "wavs").iterdir()) == ["00000000.wav", "00000002.wav"]


def test_columns_are_recognized_by_usual_names_or_named(tmp_path):
    row = {"audio": {"bytes": clip(0)}, "transcription": "ሰላም|x\r\nb\u2028", "speaker_id": 0}
    row |= {"raw_transcription": "no", "locale": "am"}
    (line,) = table(write_rows([row], tmp_path / "out", CONFIG))
    assert (line["text"], line["speaker"], line["language"]) == ("ሰላም|x b", "0", "am")
    row = {"clip": {"bytes": clip(0)}, "said": "ሰላም", "text": "no", "who": 7}
    config = HubConfig(audio_column="clip", text_column="said", speaker_column="who")
    (line,) = table(write_rows([row], tmp_path / "two", config))
    assert (line["text"], line["speaker"], line["language"]) == ("ሰላም", "7", "")


class Stream:
    """Rows that know their position, as a stream of `datasets` does; they fail after `last`."""

    def __init__(self, all_rows: list[dict], last: int = 10**6):
        self.rows, self.last, self.next, self.read = all_rows, last, 0, []

    def __iter__(self):
        for row in self.rows[self.next :]:
            if self.next == self.last:
                raise ConnectionError("the network is gone")
            self.read.append(self.next)
            self.next += 1
            yield row

    def state_dict(self) -> dict:
        return {"next": self.next}

    def load_state_dict(self, state: dict) -> None:
        self.next = state["next"]


@pytest.mark.parametrize("after", [0, 7, 10])
@pytest.mark.parametrize("knows_position", [True, False])
def test_a_stream_that_breaks_off_is_resumed(tmp_path, after, knows_position):
    broken = Stream(rows(25), last=after)
    with pytest.raises(DatasetError, match=r"network is gone.*run again"):
        write_rows(broken if knows_position else iter(broken), tmp_path / "out", CONFIG)
    assert not (tmp_path / "out/manifest.jsonl").exists()
    part = tmp_path / "out" / "rows.part"
    part.write_bytes(part.read_bytes() + b'{"position": {"rows')  # a kill may cut a line short
    stream = Stream(rows(25))
    write_rows(stream if knows_position else iter(stream), tmp_path / "out", CONFIG)
    assert stream.read[0] == (after // 5 * 5 if knows_position else 0)
    write_rows(rows(25), tmp_path / "whole", CONFIG)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def take_slowly(into: Path) -> None:
    write_rows(rows(60), into, CONFIG, lambda *_: time.sleep(0.01))


def test_killed_in_the_middle_it_resumes_to_the_same_folder(tmp_path):
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=take_slowly, args=(tmp_path / "out",))
    start_and_kill(process, tmp_path / "out/wavs/00000013.wav", 0)
    assert not (tmp_path / "out/manifest.jsonl").exists()
    write_rows(rows(60), tmp_path / "out", CONFIG)
    write_rows(rows(60), tmp_path / "whole", CONFIG)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    before = contents(tmp_path / "out")
    write_rows(Stream([], last=0), tmp_path / "out", CONFIG)
    assert contents(tmp_path / "out") == before, "it was finished"


def test_it_ends_when_there_is_enough_and_fails_where_no_row_can_be_used(tmp_path):
    endless = itertools.repeat(rows(1)[0])
    folder = write_rows(endless, tmp_path / "out", HubConfig(most_hours=1.0 / 3600))
    assert len(table(folder)) == 4  # of 0.3 s
    with pytest.raises(DatasetError, match=r"None of 1 rows.*no text in"):
        write_rows([{"audio": {"bytes": clip(0)}}], tmp_path / "one", CONFIG)
    with pytest.raises(DatasetError, match="None of 0 rows"):
        write_rows([], tmp_path / "two", CONFIG)


def test_a_revision_is_used_and_the_package_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DatasetError, match="pip install datasets"):
        open_huggingface("mozilla-foundation/common_voice_17_0", "am", "train")
    asked = []

    def load_dataset(name, config, **how):
        asked.append((name, how["revision"]))
        return types.SimpleNamespace(features=None)

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    open_huggingface("google/fleurs@v2", "am_et", "train")
    open_huggingface("google/fleurs", "am_et", "train")
    assert asked == [("google/fleurs", "v2"), ("google/fleurs", None)]


def test_a_local_parquet_dataset_streams_through_the_library(tmp_path):
    datasets = pytest.importorskip("datasets", reason="needs: pip install datasets")
    audio = [{"bytes": clip(i, "FLAC"), "path": f"{i}.flac"} for i in range(12)]
    spoken = [f"ሰላም {i}" for i in range(12)]
    made = datasets.Dataset.from_dict({"audio": audio, "sentence": spoken})
    made = made.cast_column("audio", datasets.Audio(decode=False))
    made = made.cast_column("audio", datasets.Audio())
    (tmp_path / "hub").mkdir()
    made.to_parquet(str(tmp_path / "hub/train-00000-of-00001.parquet"))

    def stop_at_seven(done, total):
        if done == 7:
            raise KeyboardInterrupt

    stream = open_huggingface(str(tmp_path / "hub"), None, "train")
    with pytest.raises(KeyboardInterrupt):
        write_rows(stream, tmp_path / "out", CONFIG, stop_at_seven)
    stream = open_huggingface(str(tmp_path / "hub"), None, "train")
    assert texts(write_rows(stream, tmp_path / "out", CONFIG)) == spoken
    with pytest.raises(DatasetError, match="cannot be opened"):
        open_huggingface(str(tmp_path / "nowhere"), None, "train")


def row_of(i: int) -> dict:
    audio = {"bytes": encoded(voice(1.0, seed=i)), "path": f"{i}.wav"}
    return {"audio": audio, "sentence": TEXTS[i], "speaker_id": i % 2}


class StandIn(contextlib.nullcontext):
    """In place of pyarrow's ParquetFile where there is no pyarrow; the file lists its rows."""

    def __init__(self, path: Path):
        super().__init__(self)
        self.numbers = json.loads(path.read_text())

    def iter_batches(self, batch_size: int):
        for i in self.numbers:
            yield types.SimpleNamespace(to_pylist=lambda i=i: [row_of(i)])


@pytest.fixture
def parquet_folder(tmp_path, monkeypatch):
    """As the hub keeps a dataset: data/train-00000-of-00002.parquet and others."""
    parts = {"train-00000-of-00002": range(4), "train-00001-of-00002": range(4, 8)}
    parts["validation-00000-of-00001"] = range(8, 10)
    files = {f"data/{name}.parquet": json.dumps(list(numbers)) for name, numbers in parts.items()}
    folder = folder_of(tmp_path / "mine", [], **files)
    if importlib.util.find_spec("pyarrow"):
        import pyarrow.parquet

        for path in folder.glob("data/*"):
            table = pyarrow.Table.from_pylist([row_of(i) for i in json.loads(path.read_text())])
            pyarrow.parquet.write_table(table, path, row_group_size=2)
        return folder
    package, parquet = types.ModuleType("pyarrow"), types.ModuleType("pyarrow.parquet")
    package.parquet, package.ArrowException, parquet.ParquetFile = parquet, ValueError, StandIn
    monkeypatch.setitem(sys.modules, "pyarrow", package)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)
    return folder


def test_a_set_of_parquet_files_with_one_missing_is_refused(tmp_path, parquet_folder):
    (parquet_folder / "data/train-00000-of-00002.parquet").unlink()
    missing = r"data/train-\*-of-00002\.parquet, 1 of 2 files are missing\. Copy or download"
    with pytest.raises(DatasetError, match=missing):
        fetch_dataset(parquet_folder, tmp_path / "into")
    for number in (0, 2):  # older files end in a hash of their own
        (tmp_path / f"x-0000{number}-of-00003-0123456789abcdef.parquet").write_bytes(b"")
    with pytest.raises(DatasetError, match=r"x-\*-of-00003\.parquet, 1 of 3"):
        module.require_all_parts(sorted(tmp_path.glob("x*")))


def test_parquet_files_with_audio_are_unpacked(tmp_path, parquet_folder, monkeypatch):
    folder = fetch_dataset(parquet_folder, tmp_path / "into")
    result = read_dataset(folder, ManifestConfig(language="en", held_out_percent=0))
    assert not result.refused and [row.text for row in result.rows] == TEXTS
    assert [row.speaker for row in result.rows] == [str(i % 2) for i in range(10)]
    assert [row.split for row in result.rows] == ["train"] * 8 + ["held_out"] * 2
    assert all(Path(row.audio).read_bytes()[:4] == b"RIFF" for row in result.rows)
    assert fetch_dataset(parquet_folder, tmp_path / "into") == folder
    assert {path.name for path in parquet_folder.iterdir()} == {"data"}
    pointer = folder_of(tmp_path, [], **{"a.parquet": "version https://git-lfs"}) / "a.parquet"
    with pytest.raises(DatasetError, match=r"a\.parquet cannot be read.*git lfs pull"):
        fetch_dataset(pointer, tmp_path / "into")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DatasetError, match="pip install datasets"):
        fetch_dataset(parquet_folder, tmp_path / "without")
