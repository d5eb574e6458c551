"""Rows in the format of the `datasets` library, taken in whatever happens on the way."""

import io
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile
from helpers import RATE, dataset, speech

from kit.base.errors import DatasetError, KitError
from kit.dataset.data_report import ManifestConfig
from kit.dataset.fetch import HubConfig, from_huggingface, open_huggingface
from kit.dataset.layouts import read_dataset

CONFIG = HubConfig()


def clip(number: int, format: str = "WAV", rate: int = RATE, channels: int = 1) -> bytes:
    """The bytes of a recording, another one for every number."""
    wave = speech(0.3 + 0.01 * (number % 30), rate)
    file = io.BytesIO()
    soundfile.write(file, np.stack([wave] * channels, axis=1), rate, format=format)
    return file.getvalue()


def rows(count: int) -> list[dict]:
    return [
        {"audio": {"bytes": clip(i), "path": f"../../{i}.wav"}, "sentence": f"ሰላም ለሁሉ {i}"}
        for i in range(count)
    ]


def table(folder: Path) -> list[list[str]]:
    lines = (folder / "metadata.csv").read_text(encoding="utf-8").split("\n")
    return [line.split("|") for line in lines if line]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


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
    assert sorted(p.name for p in folder.iterdir()) == [
        "complete",
        "metadata.csv",
        "skipped.jsonl",
        "wavs",
    ]


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
    data = clip(0, format, 44100, channels=2)
    row = {"audio": {"bytes": data, "path": None}, "text": "ሰላም"}
    folder = from_huggingface([row], tmp_path / "out", CONFIG)
    info = soundfile.info(folder / "wavs/00000000.wav")
    assert (info.samplerate, info.channels, info.subtype) == (44100, 1, "PCM_16")


@pytest.mark.parametrize("shape", ["float", "list", "int16", "stereo", "stereo across"])
def test_decoded_audio_is_taken_too(tmp_path, shape):
    wave = speech(0.5)
    array = {
        "float": wave,
        "list": wave.tolist(),
        "int16": (wave * 32767).astype(np.int16),
        "stereo": np.stack([wave, wave], axis=1),
        "stereo across": np.stack([wave, wave]),
    }[shape]
    row = {"audio": {"array": array, "sampling_rate": RATE, "path": "x"}, "text": "ሰላም"}
    folder = from_huggingface([row], tmp_path / "out", CONFIG)
    result, rate = soundfile.read(folder / "wavs/00000000.wav")
    assert rate == RATE and np.abs(result - wave).max() < 1e-3


def bomb() -> bytes:
    """Six hours of silence, packed to some kilobytes."""
    file = io.BytesIO()
    soundfile.write(file, np.zeros(6 * 3600 * 4000, np.int16), 4000, format="FLAC")
    return file.getvalue()


BAD = {
    "no row": (None, "a row must be a dict of columns, got NoneType"),
    "a bomb": ({"audio": {"bytes": bomb()}}, "declare 2.16e+04 s in 1 channels"),
    "no text": ({"text": " "}, "no text in"),
    "text of another kind": ({"text": 7}, "no text in"),
    "no audio": ({"audio": None}, "no audio bytes or array"),
    "a decoder": ({"audio": object()}, "decode=False"),
    "junk bytes": ({"audio": {"bytes": b"junk" * 99}}, "396 bytes cannot be decoded"),
    "truncated": ({"audio": {"bytes": clip(1)[:9000]}}, "truncated"),
    "two joined": ({"audio": {"bytes": clip(1) + clip(2)}}, "joined"),
    "no rate": ({"audio": {"array": [0.1] * 9, "sampling_rate": None}}, "rate is None"),
    "a wild rate": ({"audio": {"array": [0.1] * 9, "sampling_rate": 10**9}}, "rate is 10"),
    "empty": ({"audio": {"array": [], "sampling_rate": RATE}}, "empty"),
    "not finite": ({"audio": {"array": [0.1, np.nan], "sampling_rate": RATE}}, "finite"),
    "words": ({"audio": {"array": ["a", "b"], "sampling_rate": RATE}}, "hold samples"),
    "ragged": (
        {"audio": {"array": [[0.1], [0.1, 0.2]], "sampling_rate": RATE}},
        "does not hold samples",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_row_is_skipped_with_its_number_and_reason(tmp_path, kind):
    over, reason = BAD[kind]
    good = {"audio": {"bytes": clip(0)}, "text": "ሰላም"}
    bad = good | over if isinstance(over, dict) else over
    folder = from_huggingface([good, bad, good], tmp_path / "out", CONFIG)
    assert [row[0] for row in table(folder)] == ["00000000", "00000002"]
    skipped = [json.loads(line) for line in (folder / "skipped.jsonl").open(encoding="utf-8")]
    assert [s["row"] for s in skipped] == [1] and reason in skipped[0]["reason"]


def test_half_a_character_breaks_neither_table_nor_reasons(tmp_path):
    good = {"audio": {"bytes": clip(0)}, "text": "ሰላም \ud800", "speaker": "a\udce9"}
    bad = {"audio": None, "text": "ሰላም", "\ud800": 1}
    folder = from_huggingface([good, {"\ud800": 1}, bad], tmp_path / "out", CONFIG)
    assert table(folder) == [["00000000", "ሰላም ?", "ሰላም ?", "a?"]]
    assert len((folder / "skipped.jsonl").read_text(encoding="utf-8").splitlines()) == 2


def test_text_cannot_break_the_table(tmp_path):
    row = {"audio": {"bytes": clip(0)}, "text": "ሰላም|x\r\nb|c\u2028d\0", "speaker_id": "a|b\n"}
    folder = from_huggingface([row], tmp_path / "out", CONFIG)
    assert table(folder) == [["00000000", "ሰላም x b c d", "ሰላም x b c d", "a b"]]


def test_columns_can_be_named(tmp_path):
    row = {"clip": {"bytes": clip(0)}, "said": "ሰላም", "text": "no", "who": 7}
    config = HubConfig(audio_column="clip", text_column="said", speaker_column="who")
    assert table(from_huggingface([row], tmp_path / "out", config))[0][1:] == ["ሰላም", "ሰላም", "7"]


def test_it_ends_when_there_is_enough(tmp_path):
    config = HubConfig(most_hours=1.0 / 3600)
    endless = (row for _ in iter(int, 1) for row in rows(1))
    folder = from_huggingface(endless, tmp_path / "out", config)
    assert len(table(folder)) == 4  # of 0.3 s


def breaking(all_rows: list[dict], after: int):
    yield from all_rows[:after]
    raise ConnectionError("the network is gone")


@pytest.mark.parametrize("after", [0, 7, 10])
def test_a_stream_that_breaks_off_is_resumed(tmp_path, after):
    config = HubConfig(save_every=5)
    with pytest.raises(DatasetError, match=r"network is gone.*run again"):
        from_huggingface(breaking(rows(25), after), tmp_path / "out", config)
    assert not (tmp_path / "out/metadata.csv").exists()
    from_huggingface(rows(25), tmp_path / "out", config)
    from_huggingface(rows(25), tmp_path / "whole", config)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def take_slowly(into: Path) -> None:
    from_huggingface(rows(60), into, HubConfig(save_every=5), lambda *_: time.sleep(0.01))


def test_killed_in_the_middle_it_resumes_to_the_same_folder(tmp_path):
    process = multiprocessing.get_context("fork").Process(
        target=take_slowly, args=(tmp_path / "out",)
    )
    process.start()
    while not (tmp_path / "out/wavs/00000013.wav").exists():
        assert process.is_alive()
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    read = []
    again = (read.append(1) or row for row in rows(60))
    from_huggingface(again, tmp_path / "out", HubConfig(save_every=5))
    take_slowly(tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


class Stream:
    """Rows that know where they are, as a stream of `datasets` does; they fail after `last`."""

    def __init__(self, all_rows: list[dict], last: int = 10**6):
        self.rows = all_rows
        self.last = last
        self.next = 0
        self.read = []

    def __iter__(self):
        while self.next < len(self.rows):
            if self.next == self.last:
                raise ConnectionError("the network is gone")
            self.read.append(self.next)
            self.next += 1
            yield self.rows[self.next - 1]

    def state_dict(self) -> dict:
        return {"next": self.next}

    def load_state_dict(self, state: dict) -> None:
        self.next = state["next"]


def test_rows_that_know_where_they_are_are_not_read_again(tmp_path):
    config = HubConfig(save_every=5)
    with pytest.raises(DatasetError):
        from_huggingface(Stream(rows(25), last=12), tmp_path / "out", config)
    stream = Stream(rows(25))
    from_huggingface(stream, tmp_path / "out", config)
    assert stream.read == list(range(10, 25))
    from_huggingface(rows(25), tmp_path / "whole", config)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_finished_it_does_nothing_and_other_settings_are_refused(tmp_path):
    from_huggingface(rows(3), tmp_path / "out", CONFIG)
    before = contents(tmp_path / "out")
    from_huggingface(breaking([], 0), tmp_path / "out", CONFIG)
    assert contents(tmp_path / "out") == before
    with pytest.raises(DatasetError, match="other settings"):
        from_huggingface(rows(3), tmp_path / "out", HubConfig(most_hours=1))


def test_a_dataset_of_another_kind_is_never_overwritten(tmp_path):
    folder = dataset(tmp_path / "mine", "a|ሰላም\n", {"a": speech()})
    with pytest.raises(DatasetError, match="move or delete"):
        from_huggingface(rows(3), folder, CONFIG)


def test_no_usable_row_at_all_is_an_error_with_the_first_reason(tmp_path):
    with pytest.raises(DatasetError, match=r"None of 1 rows.*no text in"):
        from_huggingface([{"audio": {"bytes": clip(0)}}], tmp_path / "out", CONFIG)
    with pytest.raises(DatasetError, match="None of 0 rows"):
        from_huggingface([], tmp_path / "two", CONFIG)


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(DatasetError, match="pip install datasets"):
        open_huggingface("mozilla-foundation/common_voice_17_0", "am", "train")


def test_a_revision_is_handed_on(monkeypatch):
    asked = []

    def load_dataset(name, config, **how):
        asked.append((name, how["revision"]))
        return type("rows", (), {"features": None})

    hub = type("datasets", (), {"load_dataset": staticmethod(load_dataset)})
    monkeypatch.setitem(__import__("sys").modules, "datasets", hub)
    open_huggingface("google/fleurs@v2", "am_et", "train")
    open_huggingface("google/fleurs", "am_et", "train")
    assert asked == [("google/fleurs", "v2"), ("google/fleurs", None)]


def test_a_local_parquet_dataset_streams_through_the_library(tmp_path):
    datasets = pytest.importorskip(
        "datasets", reason="needs the optional package `datasets`: pip install datasets"
    )
    columns = {
        "audio": [{"bytes": clip(i, "FLAC"), "path": f"{i}.flac"} for i in range(12)],
        "sentence": [f"ሰላም {i}" for i in range(12)],
    }
    made = datasets.Dataset.from_dict(columns).cast_column("audio", datasets.Audio(decode=False))
    made = made.cast_column("audio", datasets.Audio())
    (tmp_path / "hub").mkdir()
    made.to_parquet(str(tmp_path / "hub/train-00000-of-00001.parquet"))

    def stop_at_seven(done, total):
        if done == 7:
            raise KeyboardInterrupt

    stream = open_huggingface(str(tmp_path / "hub"), None, "train")
    with pytest.raises(KeyboardInterrupt):
        from_huggingface(stream, tmp_path / "out", HubConfig(save_every=5), stop_at_seven)
    stream = open_huggingface(str(tmp_path / "hub"), None, "train")
    from_huggingface(stream, tmp_path / "out", HubConfig(save_every=5))
    assert [row[1] for row in table(tmp_path / "out")] == columns["sentence"]
    result = read_dataset(tmp_path / "out", ManifestConfig())
    assert len(result.rows) == 12 and not result.refused
    with pytest.raises(DatasetError, match="cannot be opened"):
        open_huggingface(str(tmp_path / "nowhere"), None, "train")


@pytest.mark.parametrize("wrong", [{"most_hours": 0.0}, {"save_every": 0}])
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(KitError, match=next(iter(wrong))):
        HubConfig(**wrong)


@pytest.mark.parametrize("data", [b"", b'{"key": "', b"[]", b"\xff", b"[" * 99_999, b"bad rows"])
def test_a_damaged_position_is_named_with_its_fix(tmp_path, data):
    def broken(count):
        yield from rows(count)
        raise OSError("the network is gone")

    config = HubConfig(save_every=1)
    with pytest.raises(DatasetError, match="stream of rows failed"):
        from_huggingface(broken(3), tmp_path / "out", config)
    position = tmp_path / "out" / "position.json"
    if data == b"bad rows":
        saved = json.loads(position.read_bytes())
        data = json.dumps(saved | {"position": {"rows": "three"}}).encode()
    position.write_bytes(data)
    with pytest.raises(DatasetError, match=r"position\.json is damaged.*Delete it"):
        from_huggingface(rows(5), tmp_path / "out", config)
    position.unlink()
    assert len(table(from_huggingface(rows(5), tmp_path / "out", config))) == 5
