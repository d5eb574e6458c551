"""Tables as other tools write them: columns and rows, or a question; JSON manifests."""

import csv
import io
import json
import re
import shutil

import pytest
from clips import TEXT
from folders import ALL_ONE, CSV, TEXTS, TWO, folder_of, lines, read, require_rows, wavs

from kit.base.errors import DatasetError, KitError
from kit.dataset.layouts import read_dataset
from kit.settings import ManifestConfig

LOOSE = ManifestConfig(held_out_percent=0)
VOICE = ["v"] * 10
OTHERS = "id\tpath\tgender\tsentence\tduration\tspeaker_id\n"
SEMICOLONS = "path;text;speaker\r\n" + lines("C:\\data\\wavs\\c{i}.WAV;{t};{s}")
# name: (table, speakers); metadata.csv, but for those in FILES
COLUMNS = {
    "LJSpeech": (lines("c{i}|{t}"), ALL_ONE),
    "LJSpeech, normalised": (lines("c{i}|{t} No. 5|{t}"), ALL_ONE),
    "the kit's own": (lines("c{i}|{t}|{t}|{s}"), TWO),
    "the kit's own, one speaker": (lines("c{i}|{t}||v"), VOICE),
    "coqui": (lines("c{i}.wav|{t}|v"), VOICE),
    "coqui with a header": ("audio_file|text|speaker_name\n" + lines("c{i}.wav|{t}|v"), VOICE),
    "coqui with folders": (lines("wavs/c{i}.wav|{t}|{s}"), TWO),
    "a speaker of two words": (lines("c{i}|{t}|Ann Lee"), ["Ann Lee"] * 10),
    "Piper": (lines("c{i}|{s}|{t}"), TWO),
    "GPT-SoVITS": (lines("/workspace/raw/wavs/c{i}.wav|{s}|en|{t}"), TWO),
    "VITS": (lines("wavs/c{i}.wav|{n}|{t}"), ["0", "1"] * 5),
    "text first": (lines("{t}|c{i}.wav"), ALL_ONE),
    "other columns": (OTHERS + lines("u{i}\twavs/c{i}.wav\tf\t{t}\t2.{i}\t{s}"), TWO),
    "normalised": ("file_name,text,normalized_text\n" + lines("c{i},{t} No. 5,{t}"), ALL_ONE),
    "an index and unknown names": (",klang,text\n" + lines("{i},c{i}.wav,{t}"), ALL_ONE),
    "spaces, trailing columns": (lines("c{i} | {t} |  |"), ALL_ONE),
    "semicolons in UTF-16": (SEMICOLONS.encode("utf-16"), TWO),
    "a byte order mark": ("\ufefffile_name,text\n" + lines("c{i}.wav,{t}"), ALL_ONE),
    "everything quoted": (lines('"c{i}"|"{t}"|"{s}"'), TWO),
}
FILES = {"GPT-SoVITS": "esd.list", "VITS": "list.txt", "other columns": "all.tsv"}
FILES["semicolons in UTF-16"] = "table.csv"


@pytest.mark.parametrize("kind", COLUMNS)
def test_columns_are_found(tmp_path, kind):
    table, speakers = COLUMNS[kind]
    require_rows(tmp_path, wavs(), {FILES.get(kind, "metadata.csv"): table}, speakers)


UNCLEAR = {
    "two languages": lines("c{i}|{t}|ceci est encore une phrase numero {i} {t[0]}"),
    "keywords": lines("c{i}|{t} and so on it goes, as was said|{t}"),
    "two speakers": lines("c{i}|{t}|{s}|x{s}"),
    "a speaker for each": lines("c{i}|{t}|person{i}"),
    "two texts in the header": "path|text|sentence\n" + lines("c{i}|{t}|un mot {i}"),
    "no sentences": lines("c{i}|yes|{s}").replace("0|yes", "0|no"),
}


@pytest.mark.parametrize("kind", UNCLEAR)
def test_where_it_is_not_clear_the_user_is_asked_and_can_answer(tmp_path, kind):
    folder = folder_of(tmp_path, wavs(), **{"metadata.csv": UNCLEAR[kind]})
    with pytest.raises(DatasetError) as asked:
        read(folder)
    message = str(asked.value)
    assert "metadata.csv" in message and 'COLUMNS = "audio|' in message and "--columns" in message
    assert sum(line.startswith("  ") for line in message.splitlines()) == 3
    width = UNCLEAR[kind].split("\n")[0].count("|") + 1
    answer = "|".join(["audio", "text", "speaker", "-"][:width])
    rows = read(folder, columns=answer).rows
    third = [row.split("|") for row in UNCLEAR[kind].splitlines()][-10:]
    assert [(r.text, r.speaker) for r in rows] == [(row[1], row[2]) for row in third]


def test_a_wrong_answer_says_what_is_wrong(tmp_path):
    folder = folder_of(tmp_path, wavs(), **{"metadata.csv": lines("c{i}|{t}")})
    answers = {"audio|txet": "text", "audio|speaker": "`text`", "audio|text|speaker": "2 columns"}
    for answer, words in answers.items():
        with pytest.raises(KitError, match=words):
            read(folder, columns=answer)


@pytest.mark.parametrize("delimiter", "|,;\t")
@pytest.mark.parametrize("header", [[], [["file_name", "transcription"]]])
def test_quoted_fields_hold_newlines_and_separators(tmp_path, delimiter, header):
    file = io.StringIO()
    writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")  # as of pandas
    texts = [*TEXTS[:3], f'one half\n{delimiter} "other" half', *TEXTS[4:]]
    writer.writerows([*header, *([f"c{i}", text] for i, text in enumerate(texts))])
    result = read(folder_of(tmp_path, wavs(), **{"metadata.csv": file.getvalue()}))
    texts = [row.text for row in result.rows]
    assert not result.refused and texts[:3] + texts[4:] == TEXTS[:3] + TEXTS[4:]
    assert texts[3].startswith("one half") and texts[3].endswith("other half")


def test_quotes_in_an_unquoted_table_are_part_of_the_text_and_a_header_is_no_row(tmp_path):
    table = lines('c{i}|"{t} he said|"{t} he said').replace('|"it was', "|it was")
    result = read(folder_of(tmp_path, wavs(), **{"metadata.csv": table}))
    assert not result.refused
    assert [row.text for row in result.rows] == [f"{t} he said" for t in TEXTS]
    table = f'c0|"{TEXTS[0]}\nc1|{TEXTS[1]}"\n'  # a quotation that two texts share
    result = read(folder_of(tmp_path, [], **{"metadata.csv": table}))
    assert [row.text for row in result.rows] == TEXTS[:2]
    table = "file_name|transcription\n" + "".join(CSV[:5])  # of a small table
    result = read(folder_of(tmp_path, wavs(5), **{"metadata.csv": table}))
    assert [row.text for row in result.rows] == TEXTS[:5] and not result.refused


BROKEN = {
    "a separator in its text": (lines("c{i}|{t}|{t}"), "one|half|one half", [4]),
    "a separator, two columns": (lines("c{i}|{t}"), "one|half", [4]),
    "a newline in its text": (lines("c{i}|{t}"), "one\nhalf", [4, 5]),
    "a newline, with quotes elsewhere": (lines('c{i}|"{t}" x'), '"one\nhalf" x', [4, 5]),
    "a comma in its text": ("file,text\n" + lines("c{i},{t}"), "one,half", [5]),
    "a quote that never ends": ("file,text\n" + lines("c{i},{t}"), '"one half', [5]),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_row_that_is_broken_is_rejected_and_no_half_of_it_is_read(tmp_path, kind):
    table, bad, rejected = BROKEN[kind]
    table = re.sub("^c3(.).*", rf"c3\1{bad}", table, flags=re.M)
    result = read(folder_of(tmp_path, wavs(), **{"metadata.csv": table}))
    assert [finding.line for finding in result.refused] == rejected
    assert not any("one" in row.text.split() for row in result.rows)
    assert "c3" not in {row.id for row in result.rows}


# --- JSON -----------------------------------------------------------------------------------------


def jsonl(folder, *records: dict | bytes, name: str = "manifest.jsonl"):
    rows = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in records]
    return folder_of(folder, ["a.wav"], **{name: b"\n".join(rows)})


@pytest.mark.parametrize("key", ["audio", "audio_filepath", "path"])
def test_a_jsonl_manifest(tmp_path, key):
    record = {key: "a.wav", "text": TEXT, "speaker": "v", "id": 7, "split": "validation"}
    result = read_dataset(jsonl(tmp_path, record), LOOSE)
    (row,) = result.rows
    assert (row.id, row.speaker, row.split, row.line) == ("7", "v", "held_out", 1)
    assert result.layout == "JSONL: manifest.jsonl" and row.audio == str(tmp_path / "a.wav")
    assert read_dataset(tmp_path / "manifest.jsonl", LOOSE) == result
    (row,) = read_dataset(jsonl(tmp_path, {key: "a.wav", "text": TEXT}), LOOSE).rows
    assert (row.id, row.speaker, row.split) == ("a", "speaker", "train"), "no more is needed"


PLAIN = {"audio": "a.wav", "text": TEXT}
NAMED = PLAIN | {"id": "x"}
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
    "a reserved speaker": (NAMED | {"speaker": "__metadata__"}, "can be called '__metadata__'"),
    "an odd speaker": (NAMED | {"speaker": "a\nb"}, "no speaker can be called"),
}


@pytest.mark.parametrize("kind", JSON_ROWS)
def test_every_unusable_json_line(tmp_path, kind):
    bad, words = JSON_ROWS[kind]
    result = read_dataset(jsonl(tmp_path, PLAIN, b"", bad), LOOSE)
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
    jsonl(tmp_path, PLAIN, name="train.jsonl")
    folder = jsonl(tmp_path, NAMED, name="dev.jsonl")
    splits = {"a": "train", "x": "held_out"}
    assert {row.id: row.split for row in read_dataset(folder, LOOSE).rows} == splits
    # A root that is gone is named; not every row is refused.
    with pytest.raises(DatasetError, match=r"gone is gone: .*`audio_root`"):
        read_dataset(folder, ManifestConfig(audio_root=str(tmp_path / "gone")))
