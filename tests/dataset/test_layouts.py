"""From real bytes to rows: every layout one way, every unusable line a finding with its fix."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from clips import TEXT
from helpers import dataset, in_time, speech

from kit.base.errors import DatasetError
from kit.dataset.checks import check_dataset
from kit.dataset.data_report import Finding, ManifestConfig
from kit.dataset.layouts import read_dataset
from kit.streams.stream import is_held_out

LOOSE = ManifestConfig(held_out_percent=0)
HEADER = "client_id\tpath\tsentence\tup_votes\n"


def noted(tmp_path, table: str | bytes) -> tuple[dict, list[Finding]]:
    """Texts by id that are kept of `table`, and what is refused; there is one recording, `a`."""
    result = read_dataset(dataset(tmp_path, table, {"a": speech()}), LOOSE)
    return {row.id: row.text for row in result.rows}, result.refused


def common_voice(folder, **tables: str | bytes):
    """A Common Voice folder with the recordings a.mp3 to d.mp3; they are only looked for."""
    (folder / "clips").mkdir(parents=True)
    for name in "abcd":
        (folder / "clips" / f"{name}.mp3").write_bytes(b"?")
    for name, table in tables.items():
        data = table.encode() if isinstance(table, str) else table
        (folder / f"{name}.tsv").write_bytes(data)
    return folder


def jsonl(folder, *records: dict | bytes, name: str = "manifest.jsonl"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.wav").write_bytes(b"?")
    lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in records]
    (folder / name).write_bytes(b"\n".join(lines))
    return folder


# --- LJSpeech -----------------------------------------------------------------------------------

ROWS = {
    "one column": ("a\n", "2 to 4 columns expected"),
    "no recording": (f"b|{TEXT}\n", "no recording wavs/b.wav"),
    "no id": (f"|{TEXT}\n", "inside wavs/, got ''"),
    "no text": ("a|\n", "the text is empty"),
    "punctuation": ("a|።...\n", "the text is empty"),
    "absolute path": (f"/etc/passwd|{TEXT}\n", "inside wavs/"),
    "../ path": (f"../../a|{TEXT}\n", "inside wavs/"),
    "../ inside": (f"x/../a|{TEXT}\n", "inside wavs/"),
    "..\\ path": (f"..\\a|{TEXT}\n", "inside wavs/"),
    "directory": (f".|{TEXT}\n", "a folder, not a recording"),
    "NUL": (f"a\0|{TEXT}\n", "a NUL byte"),
    "Latin-1": (b"a|caf\xe9 caf\xe9\n", "not valid UTF-8: invalid continuation byte at byte 5"),
    "UTF-16 without its mark": (f"a|{TEXT}\n".encode("utf-16-le"), "not valid UTF-8"),
    "two rows, Mac's line end": (f"a|{TEXT}\rb|{TEXT}\n", "between what looks like two rows"),
    "many rows, Mac's line ends": (f"a|{TEXT}\rb|{TEXT}\rc|{TEXT}", "what looks like two rows"),
    "a name too long": (f"{'x' * 300}|{TEXT}\n", "no recording"),
}


@pytest.mark.parametrize("kind", ROWS)
def test_every_unusable_row_names_table_line_and_fix(tmp_path, kind):
    kept, refused = noted(tmp_path, ROWS[kind][0])
    assert not kept and ROWS[kind][1] in refused[0].reason
    assert (refused[0].file, refused[0].line) == ("metadata.csv", 1) and refused[0].cure


def test_an_id_that_is_not_utf_8_can_be_written_to_the_report(tmp_path):
    table = f"a|{TEXT}\n".encode() + b"caf\xe9|x y\n"
    report = check_dataset(dataset(tmp_path, table, {"a": speech()}), LOOSE, tmp_path / "run")
    assert [finding.id for finding in report.refused] == ["caf?"]
    assert "caf?" in (tmp_path / "run/ledger.jsonl").read_text(encoding="utf-8")


def test_five_columns_that_say_nothing_are_asked_about(tmp_path):
    with pytest.raises(DatasetError, match=r"a \| ሰላም \| ሰላም \| v \| more(.*\n)*.*COLUMNS = "):
        noted(tmp_path, "a|ሰላም|ሰላም|v|more\n")


def test_a_directory_where_a_recording_should_be(tmp_path):
    (tmp_path / "wavs" / "b").mkdir(parents=True)
    kept, (refusal,) = noted(tmp_path, f"b|{TEXT}\n")
    assert not kept and refusal.kind == "missing" and "a folder" in refusal.reason


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
        f"a,{TEXT}\n",
        f"a;{TEXT}\n",
        f"a|{TEXT}\n".encode("utf-16"),
    ],
    ids=repr,
)
def test_harmless_variations_are_read(tmp_path, table):
    kept, refused = noted(tmp_path, table)
    assert list(kept.values()) == [TEXT] and not refused


def test_quotes_and_odd_line_separators_do_not_merge_rows(tmp_path):
    lines = ['a|"ሰላም', "b|ሰላም\u2028ለሁሉ\u0085ሰው", "c|ሰላም\x0bለሁሉ", "d|ሰላም\rለሁሉ"]
    result = read_dataset(dataset(tmp_path, "\n".join(lines), {n: speech() for n in "abcd"}), LOOSE)
    assert [(r.id, r.line) for r in result.rows] == [("a", 1), ("b", 2), ("c", 3), ("d", 4)]
    assert not result.refused


def test_ids_keep_their_zeros_and_words_like_na(tmp_path):
    folder = dataset(tmp_path, f"001|{TEXT}\nNA|{TEXT}\n", {n: speech() for n in ("001", "NA")})
    assert [r.id for r in read_dataset(folder, LOOSE).rows] == ["001", "NA"]


def test_a_repeated_id_is_kept_once_and_says_where_the_first_is(tmp_path):
    kept, (refusal,) = noted(tmp_path, f"a|{TEXT}\na|{TEXT}\n")
    assert kept == {"a": TEXT} and refusal.line == 2
    assert refusal.reason == "this id is already used in metadata.csv, line 1"
    kept, refused = noted(tmp_path, f"a|{TEXT}\na|ሌላ\n")  # nobody knows which is right
    assert not kept and sorted(finding.line for finding in refused) == [1, 2]


def test_recordings_may_be_in_folders_below_wavs(tmp_path):
    (tmp_path / "wavs" / "s1").mkdir(parents=True)
    folder = dataset(tmp_path, f"s1/a|{TEXT}||s1\n", {"s1/a": speech()})
    (row,) = read_dataset(folder, LOOSE).rows
    assert (row.id, row.speaker, row.file) == ("s1/a", "s1", "metadata.csv")


def test_a_link_out_of_the_folder_is_the_users_own_wish(tmp_path):
    away = dataset(tmp_path / "away", "", {"a": speech()})
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "wavs").symlink_to(away / "wavs")
    (folder / "metadata.csv").write_text(f"a|{TEXT}\n", encoding="utf-8")
    assert [r.id for r in read_dataset(folder, LOOSE).rows] == ["a"]


def test_splits_come_from_the_names_of_the_tables(tmp_path):
    folder = dataset(tmp_path, f"a|{TEXT}\n", {n: speech() for n in "abc"})
    (folder / "metadata_test-clean.csv").write_text(f"b|{TEXT}\n", encoding="utf-8")
    (folder / "metadata_dev.csv").write_text(f"c|{TEXT}\n", encoding="utf-8")
    result = read_dataset(folder, ManifestConfig(held_out_percent=100))
    splits = {"a": "train", "b": "test-clean", "c": "held_out"}
    assert {row.id: row.split for row in result.rows} == splits
    (alone,) = read_dataset(folder / "metadata_dev.csv", LOOSE).rows
    assert alone.id == "c"


# --- Common Voice -------------------------------------------------------------------------------


def test_a_common_voice_folder(tmp_path):
    rows = f'cafe{"0" * 124}\ta.mp3\t"ሰላም" ለሁሉ ሰው\t2\nbeef{"1" * 124}\tb.mp3\t{TEXT}\t2\n'
    result = read_dataset(common_voice(tmp_path, validated=HEADER + rows), LOOSE)
    assert result.layout == "Common Voice: validated.tsv" and not result.refused
    assert [(r.id, r.text, r.line, r.split) for r in result.rows] == [
        ("a", TEXT, 2, "train"),
        ("b", TEXT, 3, "train"),
    ]
    assert [row.speaker for row in result.rows] == ["cafe00000000", "beef11111111"]
    assert result.rows[0].audio == str(tmp_path / "clips" / "a.mp3")


def test_common_voice_splits_are_kept_and_a_table_can_be_asked_for(tmp_path):
    row = lambda name: f"{HEADER}x\t{name}.mp3\t{TEXT}\t1\n"  # noqa: E731
    tables = {"train": "a", "dev": "b", "test": "c", "validated": "d"}
    folder = common_voice(tmp_path, **{name: row(clip) for name, clip in tables.items()})
    result = read_dataset(folder, ManifestConfig(held_out_percent=100))
    assert {r.id: r.split for r in result.rows} == {"a": "train", "b": "held_out", "c": "test"}
    assert result.layout == "Common Voice: train.tsv, dev.tsv, test.tsv"
    assert [r.id for r in read_dataset(folder / "validated.tsv", LOOSE).rows] == ["d"]


CV_ROWS = {
    "missing column": (f"x\ta.mp3\t{TEXT}\n", "4 columns expected"),
    "extra column": (f"x\ta.mp3\t{TEXT}\t1\t2\n", "4 columns expected"),
    "gone": (f"x\te.mp3\t{TEXT}\t1\n", "no recording clips/e.mp3"),
    "absolute": (f"x\t/etc/passwd\t{TEXT}\t1\n", "inside clips/"),
    "../": (f"x\t../a.mp3\t{TEXT}\t1\n", "inside clips/"),
    "no path": (f"x\t\t{TEXT}\t1\n", "inside clips/"),
    "NUL": (f"x\ta.mp3\t{TEXT}\0\t1\n", "NUL"),
    "Latin-1": (b"x\ta.mp3\tcaf\xe9\t1\n", "UTF-8"),
    "no words": ("x\ta.mp3\t...\t1\n", "the text is empty"),
}


@pytest.mark.parametrize("kind", CV_ROWS)
def test_every_unusable_common_voice_row(tmp_path, kind):
    bad, words = CV_ROWS[kind]
    bad = bad.encode() if isinstance(bad, str) else bad
    table = b"\xef\xbb\xbf" + HEADER.encode() + bad + f"x\tb.mp3\t{TEXT}\t1\r\n".encode()
    result = read_dataset(common_voice(tmp_path, validated=table), LOOSE)
    assert [row.id for row in result.rows] == ["b"]
    (refusal,) = result.refused
    assert words in refusal.reason and (refusal.file, refusal.line) == ("validated.tsv", 2)
    assert refusal.cure


@pytest.mark.parametrize("column", ["", "Unnamed: 2"])
def test_a_text_column_without_a_name_is_asked_about(tmp_path, column):
    head = f"client_id\tpath\t{column}\tup_votes\n"
    rows = "".join(f"x\t{name}.mp3\t{TEXT} {name}\t1\n" for name in "abcd")
    folder = common_voice(tmp_path, validated=head + rows)
    with pytest.raises(DatasetError, match=r"validated\.tsv: it is not clear(.*\n)*.*COLUMNS = "):
        read_dataset(folder, LOOSE)
    answer = ManifestConfig(held_out_percent=0, columns="speaker|audio|text|-")
    assert [row.text for row in read_dataset(folder, answer).rows] == [
        f"{TEXT} {n}" for n in "abcd"
    ]


def test_texts_with_the_separator_in_them_are_asked_about_with_both_ways_out(tmp_path):
    texts = [
        "the train leaves, it rains",
        "he bought a coat, snow fell",
        "open the door, my friend",
    ]
    texts += ["she reads, and he writes", "the bread is warm, eat it", "we saw a boat, a small one"]
    lines = "".join(f"a{i},{text}\n" for i, text in enumerate(texts))
    (tmp_path / "wavs").mkdir()
    for i in range(len(texts)):
        (tmp_path / "wavs" / f"a{i}.wav").touch()
    with pytest.raises(DatasetError, match=r"(?s)3 columns.*COLUMNS = .*quote .*\|"):
        noted(tmp_path, lines)


# --- JSONL --------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["audio", "audio_filepath", "path"])
def test_a_jsonl_manifest(tmp_path, key):
    record = {key: "a.wav", "text": TEXT, "speaker": "v", "id": 7, "split": "validation"}
    result = read_dataset(jsonl(tmp_path, record), LOOSE)
    (row,) = result.rows
    assert (row.id, row.speaker, row.split, row.line) == ("7", "v", "held_out", 1)
    assert result.layout == "JSONL: manifest.jsonl" and row.audio == str(tmp_path / "a.wav")
    assert read_dataset(tmp_path / "manifest.jsonl", LOOSE) == result


def test_a_jsonl_needs_no_more_than_audio_and_text(tmp_path):
    (row,) = read_dataset(jsonl(tmp_path, {"audio": "a.wav", "text": TEXT}), LOOSE).rows
    assert (row.id, row.speaker, row.split) == ("a", "speaker", "train")


JSON_ROWS = {
    "cut in the middle": (b'{"audio": "a.wav", "text": "\xe1\x88\xb0', ""),
    "an array": (b'["a.wav", "x"]', "object"),
    "no text": ({"audio": "a.wav"}, "`audio` and `text`, both strings, expected; got audio: str"),
    "text is a number": ({"audio": "a.wav", "text": 5}, "text: int"),
    "text is null": ({"audio": "a.wav", "text": None}, "text: NoneType"),
    "no audio": ({"text": TEXT}, "expected; got text: str"),
    "a part": ({"audio": "a.wav", "text": TEXT, "offset": 3.5}, "a part of a recording"),
    "absolute": ({"audio": "/etc/passwd", "text": TEXT}, "the path must lead to a file inside"),
    "../": ({"audio": "../a.wav", "text": TEXT, "id": "x"}, "the path must lead to"),
    "../ id": ({"audio": "a.wav", "text": TEXT, "id": "../x"}, "the id must"),
    "gone": ({"audio": "b.wav", "text": TEXT}, "no recording"),
    "half a pair": (b'{"audio": "a.wav", "text": "\\ud800"}', ""),
    "half a speaker": (b'{"audio": "a.wav", "id": "x", "text": "a b", "speaker": "\\ud800"}', ""),
    "a reserved speaker": (
        {"audio": "a.wav", "id": "x", "text": TEXT, "speaker": "__metadata__"},
        "no speaker can be called '__metadata__'",
    ),
    "an odd speaker": (
        {"audio": "a.wav", "id": "x", "text": TEXT, "speaker": "a\nb"},
        "no speaker can be called",
    ),
}


@pytest.mark.parametrize("kind", JSON_ROWS)
def test_every_unusable_json_line(tmp_path, kind):
    bad, words = JSON_ROWS[kind]
    result = read_dataset(jsonl(tmp_path, {"audio": "a.wav", "text": TEXT}, b"", bad), LOOSE)
    assert [row.id for row in result.rows] == ["a"]
    (refusal,) = result.refused
    assert words in refusal.reason and (refusal.file, refusal.line) == ("manifest.jsonl", 3)
    assert refusal.cure


def test_absolute_paths_below_the_root_are_the_same_as_relative_ones(tmp_path):
    folder = jsonl(tmp_path / "data", {"audio": str(tmp_path / "data" / "a.wav"), "text": TEXT})
    (row,) = read_dataset(folder, LOOSE).rows
    assert (row.id, row.audio) == ("a", str(folder / "a.wav"))
    (tmp_path / "away").mkdir()
    away = shutil.move(folder / "manifest.jsonl", tmp_path / "away")
    assert "audio_root" in read_dataset(away, LOOSE).refused[0].cure
    config = ManifestConfig(held_out_percent=0, audio_root=str(folder))
    assert read_dataset(away, config).rows == [row]


def test_several_jsonl_tables_are_splits_by_their_names(tmp_path):
    jsonl(tmp_path, {"audio": "a.wav", "text": TEXT}, name="train.jsonl")
    folder = jsonl(tmp_path, {"audio": "a.wav", "text": TEXT, "id": "b"}, name="dev.jsonl")
    assert {r.id: r.split for r in read_dataset(folder, LOOSE).rows} == {
        "a": "train",
        "b": "held_out",
    }


def test_a_root_that_is_gone_says_so_instead_of_refusing_every_row(tmp_path):
    folder = jsonl(tmp_path, {"audio": "a.wav", "text": TEXT})
    with pytest.raises(DatasetError, match=r"gone is gone: .*`audio_root`"):
        read_dataset(folder, ManifestConfig(audio_root=str(tmp_path / "gone")))


def test_a_json_array_is_read_like_lines(tmp_path):
    folder = jsonl(tmp_path, b'[{"audio": "a.wav", "text": "x y"}]', name="mine.json")
    assert [r.text for r in read_dataset(folder / "mine.json", LOOSE).rows] == ["x y"]


# --- any layout ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["missing", "empty", "file", "no wavs", "no table", "no clips"])
def test_a_folder_that_is_no_dataset_says_what_was_expected_and_found(tmp_path, kind):
    folder = tmp_path / "mine"
    content = {
        "missing": "no such file or folder",
        "empty": "an empty folder",
        "file": "a file mine",
        "no wavs": "metadata.csv",
        "no table": "wavs/",
        "no clips": "validated.tsv",
    }[kind]
    if kind == "file":
        folder.write_text("?")
    elif kind != "missing":
        folder.mkdir()
    if kind in ("no wavs", "no clips"):
        (folder / content).write_text("a|b\n")
    if kind == "no table":
        (folder / "wavs").mkdir()
    with pytest.raises(
        DatasetError, match=rf"mine is not a dataset .* expected .* found {content}"
    ):
        read_dataset(folder, LOOSE)


@pytest.mark.parametrize(
    ("files", "facts"),
    [
        ({"wavs/a.wav": b"", "wavs/b.wav": b""}, "2 recordings.*transcribe"),
        ({"a.wav": b"", "a": b"some words"}, "1 recordings.*metadata.csv"),
        ({"a.wav": b"", "t.csv": "a.wav;für;x\n".encode("cp1252")}, "t.csv.*UTF-8.*save"),
        ({"a.wav": b"", "t.csv": b"PK\x03\x04zip"}, "t.csv.*export it as CSV"),
        ({"a.wav": b"", "t.xlsx": b"PK\x03\x04zip"}, "t.xlsx.*export it as CSV"),
        ({"a.wav": b"", "readme.txt": "für".encode("cp1252")}, "1 recordings.*metadata.csv"),
    ],
)
def test_a_folder_without_texts_says_what_to_do(tmp_path, files, facts):
    folder = tmp_path / "my clips"
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    with pytest.raises(DatasetError, match=rf"not a dataset.*(?s:{facts})"):
        read_dataset(folder, LOOSE)


def test_a_single_recording_is_no_dataset(tmp_path):
    (tmp_path / "a.wav").write_bytes(b"")
    with pytest.raises(DatasetError, match=r"a\.wav is not a dataset.*single recording"):
        read_dataset(tmp_path / "a.wav", LOOSE)


def test_adding_rows_moves_no_row_to_another_split():
    few, more = ([f"id{i}" for i in range(n)] for n in (1000, 3000))
    before = {n for n in few if is_held_out(n, 2)}
    assert before == {n for n in more if is_held_out(n, 2)} & set(few)
    assert 0.01 < sum(is_held_out(n, 2) for n in more) / len(more) < 0.03
    assert not any(is_held_out(n, 0) for n in few) and all(is_held_out(n, 100) for n in few)


def test_a_dataset_without_a_held_out_split_gets_one(tmp_path):
    table = "".join(f"c{i}|{TEXT}\n" for i in range(40))
    folder = dataset(tmp_path, table, {f"c{i}": speech(0.01) for i in range(40)})
    shutil.move(folder / "metadata.csv", folder / "metadata_train.csv")
    result = read_dataset(folder, ManifestConfig(held_out_percent=20)).rows
    assert {r.id for r in result if r.split == "held_out"} == {
        f"c{i}" for i in range(40) if is_held_out(f"c{i}", 20)
    }


@pytest.mark.parametrize(("rows", "wanted"), [(1, 0), (2, 1), (10, 1), (40, 4), (60, 5), (120, 7)])
def test_of_few_recordings_some_are_held_out(tmp_path, rows, wanted):
    names = [f"a{i}" for i in range(rows)]
    table = "".join(f"{name}|{TEXT}\n" for name in names)
    folder = dataset(tmp_path, table, {name: speech(0.01) for name in names})
    result = [r.id for r in read_dataset(folder, ManifestConfig()).rows if r.split == "held_out"]
    assert len(result) == wanted >= sum(is_held_out(name, 2) for name in names)
    assert not any(r.split == "held_out" for r in read_dataset(folder, LOOSE).rows)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("name", ["metadata.csv", "table.jsonl"])
def test_a_pipe_in_the_place_of_a_table_is_reported_and_not_waited_for(tmp_path, name):
    (tmp_path / "wavs").mkdir()
    os.mkfifo(tmp_path / name)
    with in_time(20), pytest.raises(DatasetError, match=f"{name} is a named pipe"):
        read_dataset(tmp_path, LOOSE)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_device_behind_a_link_is_no_table(tmp_path):
    (tmp_path / "wavs").mkdir()
    (tmp_path / "metadata.csv").symlink_to("/dev/zero")
    with in_time(20), pytest.raises(DatasetError, match=r"metadata\.csv is a device, not a file"):
        read_dataset(tmp_path, LOOSE)


NOTHING = {
    "an empty LJSpeech table": ("metadata.csv", "wavs", b"", "has 0 bytes and no rows"),
    "empty lines": ("metadata.csv", "wavs", b"\r\n \n", "has 4 bytes and no rows"),
    "a header and no rows": ("validated.tsv", "clips", HEADER.encode(), "its first line, 'client"),
    "an empty JSONL": ("manifest.jsonl", "x", b"\n\n", "Expected {audio, text} in every line"),
}


@pytest.mark.parametrize("kind", NOTHING)
def test_a_dataset_of_nothing_is_an_error_that_says_what_was_found(tmp_path, kind):
    name, folder, data, words = NOTHING[kind]
    (tmp_path / folder).mkdir()
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DatasetError, match=re.escape(words)) as caught:
        read_dataset(tmp_path, LOOSE)
    assert name in str(caught.value)


@pytest.mark.skipif(os.name == "nt" or sys.platform == "darwin", reason="names are Unicode there")
def test_a_folder_whose_name_is_not_utf_8_is_reported_in_printable_text(tmp_path):
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    dataset(tmp_path / "plain", f"a|{TEXT}\n", {"a": speech()}).rename(odd)
    for look in (odd, odd / "metadata.csv"):
        with pytest.raises(DatasetError, match=r"caf\\udce9.*not UTF-8: rename it") as caught:
            read_dataset(look, LOOSE)
        assert str(caught.value).encode()
    (tmp_path / "mine").mkdir()
    odd.rename(tmp_path / "mine" / odd.name)
    with pytest.raises(DatasetError, match=r"found caf\?/") as caught:
        read_dataset(tmp_path / "mine", LOOSE)
    assert str(caught.value).encode()
