"""Whatever form a dataset comes in, its folder is found, and nothing is written elsewhere."""

import contextlib
import importlib.util
import io
import itertools
import json
import multiprocessing
import shutil
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

from kit.base.errors import DatasetError, Note
from kit.dataset import fetch as ingest
from kit.dataset.fetch import fetch_dataset, from_huggingface, open_huggingface
from kit.dataset.layouts import read_dataset
from kit.settings import HubConfig, ManifestConfig

CONFIG = HubConfig()
FIVE = HubConfig(save_every=5)


def clip(number: int, format: str = "WAV", rate: int = RATE, channels: int = 1) -> bytes:
    """A recording, another one for every number."""
    wave = speech(0.3 + 0.01 * (number % 30), rate)
    return encoded(np.stack([wave] * channels, axis=1), rate, format=format)


def common_voice(folder: Path, language: str = "am") -> Path:
    """A Common Voice corpus of two clips, as its archive holds it."""
    table = "client_id\tpath\tsentence\tup_votes\n"
    table += "".join(f"x\t{n}.wav\tሰላም {n}\t2\n" for n in "ab")
    files = {f"clips/{n}.wav": clip(ord(n)) for n in "ab"}
    files |= {"validated.tsv": table, "train.tsv": table}
    folder_of(folder / f"cv-corpus-17.0/{language}", [], **files)
    return folder


def test_a_common_voice_archive_is_unpacked_found_and_read(tmp_path):
    common_voice(tmp_path / "made")
    archive = tmp_path / "cv-corpus-17.0-am.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(tmp_path / "made", arcname="")
    folder = fetch_dataset(archive, tmp_path / "into")
    assert folder == tmp_path / "into/cv-corpus-17.0-am/cv-corpus-17.0/am"
    assert [row.text for row in read_dataset(folder, ManifestConfig()).rows] == ["ሰላም a", "ሰላም b"]
    assert fetch_dataset(archive, tmp_path / "into") == folder


def test_an_ljspeech_zip_from_a_mac_is_found(tmp_path):
    files = {"voice/metadata.csv": "a|ሰላም\n", "voice/wavs/a.wav": clip(1), ".hidden/x.jsonl": "{}"}
    files |= {"__MACOSX/voice/metadata.csv": "junk", "__MACOSX/voice/wavs/a.wav": "junk"}
    with zipfile.ZipFile(tmp_path / "voice.zip", "w") as packed:
        for name, data in files.items():
            packed.writestr(name, data)
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


def test_a_folder_or_a_table_is_taken_as_it_stands(tmp_path):
    folder = dataset(tmp_path / "mine", "a|ሰላም\n", {"a": speech()})
    assert fetch_dataset(folder, tmp_path / "into") == folder
    assert fetch_dataset(tmp_path, tmp_path / "into") == folder
    assert fetch_dataset(folder / "metadata.csv", tmp_path / "into") == folder / "metadata.csv"
    assert not (tmp_path / "into").exists()


def test_where_there_is_none_or_several_it_says_what_was_expected_and_found(tmp_path):
    for language in ("am", "ti"):
        common_voice(tmp_path / "cv", language)
    with pytest.raises(DatasetError, match=r"cv-corpus-17\.0 holds several datasets \(am, ti\)"):
        fetch_dataset(tmp_path / "cv", tmp_path / "into")
    rules = ManifestConfig(speakers="folder")
    both = fetch_dataset(tmp_path / "cv", tmp_path / "into", rules=rules)
    assert both == tmp_path / "cv/cv-corpus-17.0"
    shutil.rmtree(tmp_path / "cv")
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/readme.txt").write_text("hello")
    with pytest.raises(DatasetError, match=r"wavs/ \(LJSpeech\).*found a/"):
        fetch_dataset(tmp_path, tmp_path / "into")
    with pytest.raises(DatasetError, match=r"There is no .*nothing\.zip"):
        fetch_dataset(tmp_path / "nothing.zip", tmp_path / "into")
    (tmp_path / "broken.zip").write_bytes(b"PK\x03\x04")
    with pytest.raises(DatasetError, match="damaged"):
        fetch_dataset(tmp_path / "broken.zip", tmp_path / "into")


def test_a_dataset_of_the_hub_is_streamed_into_a_folder_of_its_own(tmp_path, monkeypatch):
    for name in ("fleurs", "google/fleurs", "google//train"):
        with pytest.raises(DatasetError, match="NAME/CONFIG/SPLIT"):
            fetch_dataset(f"hf://{name}", tmp_path)
    asked, rows = [], [{"audio": {"bytes": clip(1)}, "sentence": "ሰላም"}]
    monkeypatch.setattr(ingest, "open_huggingface", lambda *a: asked.append(a) or rows)
    folder = fetch_dataset("hf://google/fleurs/am_et/train", tmp_path)
    assert asked == [("google/fleurs", "am_et", "train")]
    assert [row.text for row in read_dataset(folder, ManifestConfig()).rows] == ["ሰላም"]


def rows(count: int) -> list[dict]:
    audio = [{"bytes": clip(i), "path": f"../../{i}.wav"} for i in range(count)]
    return [{"audio": each, "sentence": f"ሰላም ለሁሉ {i}"} for i, each in enumerate(audio)]


def table(folder: Path) -> list[list[str]]:
    header, *lines = (folder / "metadata.csv").read_text(encoding="utf-8").split("\n")
    assert header == "id|text|speaker|language"
    return [line.split("|") for line in lines if line]


def test_rows_become_an_ljspeech_folder(tmp_path):
    reported = []
    folder = from_huggingface(rows(5), tmp_path / "out", CONFIG, lambda *now: reported.append(now))
    result = read_dataset(folder, ManifestConfig())
    assert len(result.rows) == 5 and not result.refused
    assert [row[0] for row in table(folder)] == [f"{i:08d}" for i in range(5)]
    assert reported[-1] == (5, 5) and reported[0] == (1, 5)
    wave, rate = soundfile.read(folder / "wavs/00000003.wav", dtype="int16")
    expected, _ = soundfile.read(io.BytesIO(clip(3)), dtype="int16")
    assert rate == RATE and np.abs(wave.astype(int) - expected).max() <= 1
    files = "complete metadata.csv skipped.jsonl wavs"
    assert sorted(p.name for p in folder.iterdir()) == files.split()


def test_names_and_paths_of_the_rows_are_never_used(tmp_path):
    row = rows(1)[0] | {"id": "../../evil", "file": "/etc/passwd"}
    row["audio"]["path"] = str(tmp_path / "evil.wav")
    from_huggingface([row], tmp_path / "out", CONFIG)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    only_a_path = {"audio": {"bytes": None, "path": "/etc/passwd"}, "text": "ሰላም"}
    with pytest.raises(DatasetError, match="paths are not followed"):
        from_huggingface([only_a_path], tmp_path / "two", CONFIG)


@pytest.mark.parametrize("format", ["WAV", "FLAC", "OGG", "MP3"])
def test_audio_of_any_coding_is_decoded(tmp_path, format):
    row = {"audio": {"bytes": clip(0, format, 44100, channels=2), "path": None}, "text": "ሰላም"}
    folder = from_huggingface([row], tmp_path / "out", CONFIG)
    info = soundfile.info(folder / "wavs/00000000.wav")
    assert (info.samplerate, info.channels, info.subtype) == (44100, 1, "PCM_16")


@pytest.mark.parametrize("shape", ["float", "list", "int16", "stereo", "stereo across"])
def test_decoded_audio_is_taken_too(tmp_path, shape):
    wave = speech(0.5)
    arrays = {"float": wave, "list": wave.tolist(), "int16": (wave * 32767).astype(np.int16)}
    arrays |= {"stereo": np.stack([wave, wave], axis=1), "stereo across": np.stack([wave, wave])}
    row = {"audio": {"array": arrays[shape], "sampling_rate": RATE, "path": "x"}, "text": "ሰላም"}
    folder = from_huggingface([row], tmp_path / "out", CONFIG)
    result, rate = soundfile.read(folder / "wavs/00000000.wav")
    assert rate == RATE and np.abs(result - wave).max() < 1e-3


BOMB = encoded(np.zeros(6 * 3600 * 4000, np.int16), 4000, format="FLAC")  # some kilobytes


BAD = {
    "no row": (None, "a row must be a dict of columns, got NoneType"),
    "a bomb": ({"audio": {"bytes": BOMB}}, "360 minutes in 1 channels"),
    "no text": ({"text": " "}, "no text in"),
    "text of another kind": ({"text": 7}, "no text in"),
    "two texts": ({"sentence": "ሌላ"}, "`text` and `sentence` could both be what is spoken"),
    "no audio": ({"audio": None}, "no audio bytes or array"),
    "a decoder": ({"audio": object()}, "decode=False"),
    "junk bytes": ({"audio": {"bytes": b"junk" * 99}}, "396 bytes cannot be read as audio"),
    "truncated": ({"audio": {"bytes": clip(1)[:9000]}}, "truncated"),
    "no rate": ({"audio": {"array": [0.1] * 9, "sampling_rate": None}}, "rate is None"),
    "a wild rate": ({"audio": {"array": [0.1] * 9, "sampling_rate": 10**9}}, "rate is 10"),
    "empty": ({"audio": {"array": [], "sampling_rate": RATE}}, "empty"),
    "not finite": ({"audio": {"array": [0.1, np.nan], "sampling_rate": RATE}}, "finite"),
    "words": ({"audio": {"array": ["a", "b"], "sampling_rate": RATE}}, "hold samples"),
    "ragged": ({"audio": {"array": [[0.1], [0, 0]], "sampling_rate": RATE}}, "hold samples"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_row_is_skipped_with_its_number_and_reason(tmp_path, kind):
    over, reason = BAD[kind]
    good = {"audio": {"bytes": clip(0)}, "text": "ሰላም"}
    bad = good | over if isinstance(over, dict) else over
    with pytest.warns(Note, match=r"1 rows .*skipped\.jsonl"):
        folder = from_huggingface([good, bad, good], tmp_path / "out", CONFIG)
    assert [row[0] for row in table(folder)] == ["00000000", "00000002"]
    skipped = [json.loads(line) for line in (folder / "skipped.jsonl").open(encoding="utf-8")]
    assert [s["row"] for s in skipped] == [1] and reason in skipped[0]["reason"]


def test_text_cannot_break_the_table_and_columns_can_be_named(tmp_path):
    good = {"audio": {"bytes": clip(0)}, "text": "ሰላም \ud800", "speaker": "a\udce9"}
    bad = {"audio": None, "text": "ሰላም", "\ud800": 1}
    folder = from_huggingface([good, {"\ud800": 1}, bad], tmp_path / "half", CONFIG)
    assert table(folder) == [["00000000", "ሰላም ?", "a?", ""]]
    assert len((folder / "skipped.jsonl").read_text(encoding="utf-8").splitlines()) == 2
    row = {"audio": {"bytes": clip(0)}, "text": "ሰላም|x\r\nb|c\u2028d\0", "speaker_id": "a|b\n"}
    folder = from_huggingface([row], tmp_path / "out", CONFIG)
    assert table(folder) == [["00000000", "ሰላም x b c d", "a b", ""]]
    row = {"audio": {"bytes": clip(0)}, "transcription": "ሰላም", "raw_transcription": "no"}
    (line,) = table(from_huggingface([row | {"locale": "am"}], tmp_path / "three", CONFIG))
    assert line[1:] == ["ሰላም", "", "am"]
    row = {"clip": {"bytes": clip(0)}, "said": "ሰላም", "text": "no", "who": 7}
    config = HubConfig(audio_column="clip", text_column="said", speaker_column="who")
    assert table(from_huggingface([row], tmp_path / "two", config))[0][1:] == ["ሰላም", "7", ""]


def breaking(all_rows: list[dict], after: int):
    yield from all_rows[:after]
    raise ConnectionError("the network is gone")


@pytest.mark.parametrize("after", [0, 7, 10])
def test_a_stream_that_breaks_off_is_resumed(tmp_path, after):
    with pytest.raises(DatasetError, match=r"network is gone.*run again"):
        from_huggingface(breaking(rows(25), after), tmp_path / "out", FIVE)
    assert not (tmp_path / "out/metadata.csv").exists()
    from_huggingface(rows(25), tmp_path / "out", FIVE)
    from_huggingface(rows(25), tmp_path / "whole", FIVE)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def take_slowly(into: Path) -> None:
    from_huggingface(rows(60), into, FIVE, lambda *_: time.sleep(0.01))


def test_killed_in_the_middle_it_resumes_to_the_same_folder(tmp_path):
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=take_slowly, args=(tmp_path / "out",))
    start_and_kill(process, tmp_path / "out/wavs/00000013.wav", 0)
    assert not (tmp_path / "out/metadata.csv").exists()
    from_huggingface(rows(60), tmp_path / "out", FIVE)
    take_slowly(tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


class Stream:
    """Rows that know where they are, as a stream of `datasets` does; they fail after `last`."""

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


def test_rows_that_know_where_they_are_are_not_read_again(tmp_path):
    with pytest.raises(DatasetError):
        from_huggingface(Stream(rows(25), last=12), tmp_path / "out", FIVE)
    stream = Stream(rows(25))
    from_huggingface(stream, tmp_path / "out", FIVE)
    assert stream.read == list(range(10, 25))
    from_huggingface(rows(25), tmp_path / "whole", FIVE)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_finished_it_does_nothing_and_what_is_another_dataset_is_never_overwritten(tmp_path):
    from_huggingface(rows(3), tmp_path / "out", CONFIG)
    before = contents(tmp_path / "out")
    from_huggingface(breaking([], 0), tmp_path / "out", CONFIG)
    assert contents(tmp_path / "out") == before
    with pytest.raises(DatasetError, match=r"other settings.*move or delete"):
        from_huggingface(rows(3), tmp_path / "out", HubConfig(most_hours=1))
    folder = dataset(tmp_path / "mine", "a|ሰላም\n", {"a": speech()})
    with pytest.raises(DatasetError, match="move or delete"):
        from_huggingface(rows(3), folder, CONFIG)


def test_it_ends_when_there_is_enough_and_fails_where_no_row_can_be_used(tmp_path):
    endless = itertools.repeat(rows(1)[0])
    folder = from_huggingface(endless, tmp_path / "out", HubConfig(most_hours=1.0 / 3600))
    assert len(table(folder)) == 4  # of 0.3 s
    with pytest.raises(DatasetError, match=r"None of 1 rows.*no text in"):
        from_huggingface([{"audio": {"bytes": clip(0)}}], tmp_path / "one", CONFIG)
    folder = from_huggingface(rows(2), tmp_path / "one", CONFIG)
    assert len(table(folder)) == 2, "they were read again from the first"
    with pytest.raises(DatasetError, match="None of 0 rows"):
        from_huggingface([], tmp_path / "two", CONFIG)


def test_a_revision_is_handed_on_and_the_package_named_where_it_is_missing(monkeypatch):
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
    texts = [f"ሰላም {i}" for i in range(12)]
    made = datasets.Dataset.from_dict({"audio": audio, "sentence": texts})
    made = made.cast_column("audio", datasets.Audio(decode=False))
    made = made.cast_column("audio", datasets.Audio())
    (tmp_path / "hub").mkdir()
    made.to_parquet(str(tmp_path / "hub/train-00000-of-00001.parquet"))

    def stop_at_seven(done, total):
        if done == 7:
            raise KeyboardInterrupt

    stream = open_huggingface(str(tmp_path / "hub"), None, "train")
    with pytest.raises(KeyboardInterrupt):
        from_huggingface(stream, tmp_path / "out", FIVE, stop_at_seven)
    stream = open_huggingface(str(tmp_path / "hub"), None, "train")
    from_huggingface(stream, tmp_path / "out", FIVE)
    assert [row[1] for row in table(tmp_path / "out")] == texts
    result = read_dataset(tmp_path / "out", ManifestConfig())
    assert len(result.rows) == 12 and not result.refused
    with pytest.raises(DatasetError, match="cannot be opened"):
        open_huggingface(str(tmp_path / "nowhere"), None, "train")


def test_a_saved_position_that_a_kill_cut_short_is_left_out(tmp_path):
    with pytest.raises(DatasetError, match="stream of rows failed"):
        from_huggingface(breaking(rows(9), 9), tmp_path / "out", FIVE)
    part = tmp_path / "out" / "rows.part"
    part.write_bytes(part.read_bytes()[:-20] + b'{"key": "')
    from_huggingface(rows(12), tmp_path / "out", FIVE)
    from_huggingface(rows(12), tmp_path / "whole", FIVE)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


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
    package, module = types.ModuleType("pyarrow"), types.ModuleType("pyarrow.parquet")
    package.parquet, package.ArrowException, module.ParquetFile = module, ValueError, StandIn
    monkeypatch.setitem(sys.modules, "pyarrow", package)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", module)
    return folder


def test_parquet_files_with_audio_are_unpacked(tmp_path, parquet_folder, monkeypatch):
    folder = fetch_dataset(parquet_folder, tmp_path / "into")
    result = read_dataset(folder, ManifestConfig(language="en", held_out_percent=0))
    assert not result.refused and [row.text for row in result.rows] == TEXTS
    assert [row.speaker for row in result.rows] == [str(i % 2) for i in range(10)]
    assert [row.split for row in result.rows] == ["train"] * 8 + ["held_out"] * 2
    assert all(Path(row.audio).read_bytes()[:4] == b"RIFF" for row in result.rows)
    assert fetch_dataset(parquet_folder, tmp_path / "into") == folder
    assert {path.name for path in parquet_folder.iterdir()} == {"data"}
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DatasetError, match="pip install datasets"):
        fetch_dataset(parquet_folder, tmp_path / "into")
