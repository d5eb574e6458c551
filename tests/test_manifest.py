"""From real bytes to a checked manifest: whatever cannot be trained on stands in the ledger."""

import io
import json
import struct
import wave as wave_module

import numpy as np
import pytest
import soundfile
from helpers import RATE, dataset, manifest, speech, world

from kit.config import ConfigError
from kit.manifest import (
    DatasetError,
    ManifestConfig,
    Refusal,
    check_clips,
    held_out,
    load_manifest,
    read_clip,
    read_ljspeech,
    read_manifest,
)
from kit.text import letters

LOOSE = ManifestConfig(refuse_percent=100)
TEXT = "ሰላም ለሁሉ ሰው"


def encoded(wave, rate=RATE, **how) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, wave, rate, **{"format": "WAV"} | how)
    return file.getvalue()


def judged(tmp_path, data: bytes, suffix: str = ".wav", text: str = TEXT):
    """The manifest's verdict on one recording made of these bytes: (kept, refused)."""
    folder = dataset(tmp_path, f"one|{text}\n")
    (folder / "wavs" / f"one{suffix}").write_bytes(data)
    rows, unreadable = read_ljspeech(folder, LOOSE)
    kept, refused = check_clips(rows, LOOSE)
    return kept, unreadable + refused


def noted(tmp_path, table: str | bytes) -> tuple[dict, list[Refusal]]:
    """Texts by id that are kept of `table`, and what is refused; there is one recording, `a`."""
    folder = dataset(tmp_path, table, {"a": speech()})
    kept, refused = read_ljspeech(folder, LOOSE)
    return {row.id: row.text for row in kept}, refused


def wav_with_comment(comment: bytes) -> bytes:
    """A sound WAV whose LIST chunk stands before its data chunk, as ffmpeg and DAWs write it."""
    whole = encoded(speech())
    info = b"INFO" + b"ICMT" + struct.pack("<I", len(comment)) + comment
    chunk = b"LIST" + struct.pack("<I", len(info)) + info
    size = struct.unpack("<I", whole[4:8])[0] + len(chunk)
    return whole[:4] + struct.pack("<I", size) + whole[8:36] + chunk + whole[36:]


GOOD = {
    "16 bit": lambda: encoded(speech()),
    "8 bit": lambda: encoded(speech(), subtype="PCM_U8"),
    "24 bit": lambda: encoded(speech(), subtype="PCM_24"),
    "32 bit": lambda: encoded(speech(), subtype="PCM_32"),
    "float": lambda: encoded(speech(), subtype="FLOAT"),
    "double": lambda: encoded(speech(), subtype="DOUBLE"),
    "mu-law": lambda: encoded(speech(), subtype="ULAW"),
    "extensible": lambda: encoded(speech(), format="WAVEX"),
    "stereo": lambda: encoded(np.stack([speech(), 0.3 * speech()], axis=1)),
    "96 kHz": lambda: encoded(speech(rate=96_000), 96_000),
    "8 kHz": lambda: encoded(speech(rate=8000), 8000),
    "a comment": lambda: wav_with_comment(b"my voice"),
    "FLAC called .wav": lambda: encoded(speech(), format="FLAC"),
}


@pytest.mark.parametrize("kind", GOOD)
def test_every_usual_kind_of_recording_is_measured(tmp_path, kind):
    (row,), refused = judged(tmp_path, GOOD[kind]())
    assert not refused and row.seconds == pytest.approx(1, abs=1e-3)
    wave, _ = read_clip(row.audio)
    assert wave.dtype == np.float32 and wave.ndim == 1 and 0.3 < np.abs(wave).max() < 0.52


@pytest.mark.parametrize("suffix", [".flac", ".ogg", ".mp3"])
def test_compressed_recordings_are_found_beside_wavs(tmp_path, suffix):
    data = encoded(speech(), format=suffix[1:].upper())
    (row,), _ = judged(tmp_path, data, suffix)
    assert row.audio.endswith(suffix) and row.seconds == pytest.approx(1, abs=0.1)


BAD = {
    "zero bytes": (lambda: b"", "cannot be read"),
    "text": (lambda: b"this is no audio at all" * 99, "cannot be read"),
    "web page": (lambda: b"<!doctype html><title>404 Not Found</title>", "cannot be read"),
    "truncated": (lambda: encoded(speech())[:20_000], "truncated"),
    "header only": (lambda: encoded(speech())[:44], "truncated"),
    "half a header": (lambda: encoded(speech())[:30], "cannot be read"),
    "no samples": (lambda: encoded(np.zeros(0, np.float32)), "truncated"),
    "truncated FLAC": (lambda: encoded(speech(), format="FLAC")[:9000], "truncated|cannot be read"),
    "not a number": (lambda: encoded(speech() * np.nan, subtype="FLOAT"), "finite"),
    "infinite": (lambda: encoded(np.full(RATE, np.inf), subtype="FLOAT"), "finite"),
    "silent": (lambda: encoded(np.zeros(RATE, np.float32)), "silent"),
    "nearly silent": (lambda: encoded(0.002 * speech()), "silent"),
    "clipped": (lambda: encoded(np.clip(9 * speech(), -1, 1)), "clipped"),
    "float, not scaled": (lambda: encoded(speech() * 3e4, subtype="FLOAT"), "clipped"),
    "too long": (lambda: encoded(speech(14.5)), "longer than 14"),
    "too short": (lambda: encoded(speech(0.1)), "shorter than 0.2"),
    "far too slow": (lambda: encoded(speech(12)), "characters a second"),
    "far too fast": (lambda: encoded(speech(0.21)), "characters a second"),
}


@pytest.mark.parametrize("kind", BAD)
def test_every_unusable_recording_stands_in_the_ledger(tmp_path, kind):
    data, reason = BAD[kind][0](), BAD[kind][1]
    kept, (refusal,) = judged(tmp_path, data)
    assert not kept and (refusal.id, refusal.line) == ("one", 1)
    assert any(part in refusal.reason for part in reason.split("|")), refusal.reason


def test_a_comment_that_says_data_is_no_truncation(tmp_path):
    (row,), refused = judged(tmp_path, wav_with_comment(b"take 3 of data set"))
    assert not refused and row.seconds == pytest.approx(1, abs=1e-3)


def test_samples_equal_pythons_own_reader(tmp_path):
    path = tmp_path / "a.wav"
    path.write_bytes(encoded(speech()))
    with wave_module.open(str(path)) as file:
        own = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 2**15
    assert np.array_equal(read_clip(str(path))[0], own.astype(np.float32))


def test_stereo_becomes_the_mean_of_both(tmp_path):
    path = tmp_path / "a.wav"
    path.write_bytes(encoded(np.stack([speech(), np.zeros(RATE)], axis=1), subtype="FLOAT"))
    assert np.allclose(read_clip(str(path))[0], speech() / 2, atol=1e-7)


def test_an_unreadable_file_names_its_path(tmp_path):
    with pytest.raises(DatasetError, match=r"gone\.wav cannot be read"):
        read_clip(str(tmp_path / "gone.wav"))


ROWS = {
    "one column": ("a\n", "2 to 4 columns expected"),
    "five columns": ("a|ሰላም|ሰላም|v|more\n", "2 to 4 columns expected"),
    "no recording": (f"b|{TEXT}\n", "no recording wavs/b.wav"),
    "no id": (f"|{TEXT}\n", "the id must name"),
    "no text": ("a|\n", "the text is empty"),
    "punctuation": ("a|።...\n", "the text is empty"),
    "absolute path": (f"/etc/passwd|{TEXT}\n", "inside wavs/"),
    "../ path": (f"../../a|{TEXT}\n", "inside wavs/"),
    "../ inside": (f"x/../a|{TEXT}\n", "inside wavs/"),
    "directory": (f".|{TEXT}\n", "no recording"),
    "NUL": (f"a\0|{TEXT}\n", "inside wavs/"),
    "Latin-1": (b"a|caf\xe9 caf\xe9\n", "not valid UTF-8"),
    "UTF-16": (f"a|{TEXT}\n".encode("utf-16"), "not valid UTF-8"),
}


@pytest.mark.parametrize("kind", ROWS)
def test_every_unusable_row_stands_in_the_ledger(tmp_path, kind):
    kept, refused = noted(tmp_path, ROWS[kind][0])
    assert not kept and ROWS[kind][1] in refused[0].reason
    assert refused[0].file == "metadata.csv" and refused[0].line == 1


def test_an_id_longer_than_a_file_name_is_refused_not_raised(tmp_path):
    kept, (refusal,) = noted(tmp_path, f"{'x' * 300}|{TEXT}\n")
    assert not kept and refusal.line == 1


def test_a_directory_where_a_recording_should_be(tmp_path):
    (tmp_path / "wavs" / "b.wav").mkdir(parents=True)
    kept, refused = noted(tmp_path, f"b|{TEXT}\n")
    assert not kept and "no recording" in refused[0].reason


@pytest.mark.parametrize(
    "table",
    [
        f"a|{TEXT}",  # no newline at the end
        f"\ufeffa|{TEXT}\n",  # byte order mark
        f"a|{TEXT}\r\n",
        f"\r\n\n  \na|{TEXT}\r\n\n",  # empty lines
        f"a.wav|{TEXT}\n",  # the id with its suffix
        f"a|not this|{TEXT}\n",  # the normalised column is the one spoken
        f"a|{TEXT}| |\n",
        f" a |{TEXT}||v\n",
    ],
    ids=repr,
)
def test_harmless_variations_are_read(tmp_path, table):
    kept, refused = noted(tmp_path, table)
    assert list(kept.values()) == [TEXT] and not refused


def test_quotes_and_odd_line_separators_do_not_merge_rows(tmp_path):
    lines = ['a|"ሰላም', "b|ሰላም\u2028ለሁሉ\u0085ሰው", "c|ሰላም\x0bለሁሉ"]
    folder = dataset(tmp_path, "\n".join(lines), {n: speech() for n in "abc"})
    kept, refused = read_ljspeech(folder, LOOSE)
    assert [(r.id, r.line) for r in kept] == [("a", 1), ("b", 2), ("c", 3)] and not refused


def test_ids_keep_their_zeros_and_words_like_na(tmp_path):
    folder = dataset(tmp_path, f"001|{TEXT}\nNA|{TEXT}\n", {n: speech() for n in ("001", "NA")})
    assert [r.id for r in read_ljspeech(folder, LOOSE)[0]] == ["001", "NA"]


def test_a_repeated_id_is_kept_once(tmp_path):
    kept, (refusal,) = noted(tmp_path, f"a|{TEXT}\na|ሌላ\n")
    assert kept == {"a": TEXT} and refusal.line == 2 and "already" in refusal.reason


def test_recordings_may_lie_in_folders_below_wavs(tmp_path):
    (tmp_path / "wavs" / "s1").mkdir(parents=True)
    folder = dataset(tmp_path, f"s1/a|{TEXT}||s1\n", {"s1/a": speech()})
    (row,), _ = read_ljspeech(folder, LOOSE)
    assert (row.id, row.speaker) == ("s1/a", "s1")


@pytest.mark.parametrize("kind", ["missing", "empty", "file", "no wavs", "no table"])
def test_a_folder_that_is_no_dataset_says_what_was_expected(tmp_path, kind):
    folder = tmp_path / "mine"
    if kind == "file":
        folder.write_text("?")
    elif kind != "missing":
        (folder / "wavs").mkdir(parents=True)
    if kind in ("empty", "no wavs"):
        (folder / "wavs").rmdir()
    if kind == "no wavs":
        (folder / "metadata.csv").write_text("a|b\n")
    with pytest.raises(DatasetError, match=r"mine is not a dataset in LJSpeech layout: expected"):
        read_ljspeech(folder, LOOSE)


def many(folder, good: int, bad: int):
    table = "".join(f"c{i}|{TEXT}\n" for i in range(good + bad))
    return dataset(folder, table, {f"c{i}": speech() for i in range(good)})


def test_too_much_refused_stops_with_reasons_and_cure(tmp_path):
    folder = many(tmp_path / "data", 18, 2)
    config = ManifestConfig(held_out_percent=0)
    with pytest.raises(DatasetError, match=r"10\.0 % .*limit 5\.0 %.* mend the clips"):
        load_manifest(folder, config, tmp_path / "run")
    ledger = (tmp_path / "run" / "ledger.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["line"] for line in ledger] == [19, 20]


def test_a_refused_share_below_the_limit_goes_on(tmp_path):
    folder = many(tmp_path / "data", 18, 2)
    config = ManifestConfig(refuse_percent=10.1, held_out_percent=0)
    kept, refused = load_manifest(folder, config, tmp_path / "run")
    assert (len(kept), len(refused)) == (18, 2) and read_manifest(tmp_path / "run") == kept


def test_nothing_to_train_on_is_told(tmp_path):
    with pytest.raises(DatasetError, match=r"No utterance can be trained on.*no recording"):
        load_manifest(many(tmp_path / "data", 0, 3), LOOSE, tmp_path / "run")
    with pytest.raises(DatasetError, match="Refused: nothing"):
        load_manifest(dataset(tmp_path / "none", ""), LOOSE, tmp_path / "run")


def test_adding_rows_moves_no_row_to_another_split():
    few, more = ([f"id{i}" for i in range(n)] for n in (1000, 3000))
    before = {n for n in few if held_out(n, 2)}
    assert before == {n for n in more if held_out(n, 2)} & set(few)
    assert 0.01 < sum(held_out(n, 2) for n in more) / len(more) < 0.03
    assert not any(held_out(n, 0) for n in few) and all(held_out(n, 100) for n in few)


def test_splits_come_from_the_names_of_the_tables(tmp_path):
    folder = dataset(tmp_path, f"a|{TEXT}\n", {n: speech() for n in "ab"})
    (folder / "metadata_test-clean.csv").write_text(f"b|{TEXT}\n", encoding="utf-8")
    config = ManifestConfig(held_out_percent=0)
    assert {r.id: r.split for r in read_ljspeech(folder, config)[0]} == {
        "a": "train",
        "b": "test-clean",
    }


def test_originals_are_only_read(tmp_path):
    folder = many(tmp_path / "data", 3, 0)
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}
    load_manifest(folder, ManifestConfig(held_out_percent=0), tmp_path / "run")
    after = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}
    assert after == before


def test_the_manifest_on_disk_is_the_one_returned():
    rows = manifest()
    assert read_manifest(world()) == rows
    assert all(2 <= len(letters(r.text)) / r.seconds <= 40 for r in rows)


def test_a_missing_manifest_names_the_notebook(tmp_path):
    with pytest.raises(DatasetError, match="01_data_prep"):
        read_manifest(tmp_path)


def test_limits_that_exclude_everything_are_refused():
    with pytest.raises(ConfigError, match="shortest_s"):
        ManifestConfig(shortest_s=30)
