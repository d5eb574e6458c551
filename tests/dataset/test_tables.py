"""Tables: columns by their names or as the user says, else a question; JSON Lines; broken rows."""

import csv
import io
import json
import re
import shutil

import pytest
from clips import TEXT, encoded
from folders import ALL_ONE, CSV, TEXTS, TWO, folder_of, lines, read, require_rows, wavs
from helpers import speech

from kit.base.errors import DatasetError, KitError
from kit.dataset.layouts import read_dataset
from kit.settings import ManifestConfig

LOOSE = ManifestConfig(held_out_percent=0)
OTHERS = "id\tpath\tgender\tsentence\tlength\tspeaker_id\n"
SEMICOLONS = "path;text;speaker\r\n" + lines("C:\\data\\wavs\\c{i}.WAV;{t};{s}")
KEYS = lines('{{"path": "c{i}", "text": "{t}", "spk": "{s}", "my_text": 1}}')
OBJECTS = lines('{{"audio": {{"path": "c{i}"}}, "text": "{t}"}}')
NEMO = lines('{{"audio_filepath": "wavs/c{i}.wav", "text": "{t}"}}')
OWN_KEYS = lines('{{"said": "{t}", "n": 1, "where": "c{i}"}}')
COQUI = "audio_file|text|speaker_name\n" + lines("c{i}.wav|{t}|{s}")
# name: (file, table, speakers)
NAMED = {
    "LJSpeech": ("metadata.csv", lines("c{i}|{t}"), ALL_ONE),
    "LJSpeech, normalised": ("metadata.csv", lines("c{i}|{t} No. 5|{t}"), ALL_ONE),
    "spaces, empty columns": ("metadata.csv", lines("c{i} | {t} |  |"), ALL_ONE),
    "the kit's own": ("metadata.csv", "id|text|speaker\n" + lines("c{i}|{t}|{s}"), TWO),
    "coqui's header": ("metadata.csv", COQUI, TWO),
    "TSV, more columns": (
        "all.tsv",
        OTHERS + lines("u{i}\twavs/c{i}.wav\tf\t{t}\t2.{i}\t{s}"),
        TWO,
    ),
    "normalised": ("a.csv", "file_name,text,normalized_text\n" + lines("c{i},No. 5,{t}"), ALL_ONE),
    "raw": ("a.csv", "path,raw_transcription,transcription\n" + lines("c{i},No. 5,{t}"), ALL_ONE),
    "a voice to imitate": ("a.csv", "ref_audio,audio,text\n" + lines("c0,c{i},{t}"), ALL_ONE),
    "phonemes beside it": ("a.csv", "audio,phonemes,text\n" + lines("c{i},ðə dˈɔɡ,{t}"), ALL_ONE),
    "semicolons in UTF-16": ("table.csv", SEMICOLONS.encode("utf-16"), TWO),
    "a byte order mark": ("a.csv", "\ufeffFile Name,Text\n" + lines("c{i}.wav,{t}"), ALL_ONE),
    "spaces around a name": ("a.psv", "path | text | speaker\n" + lines("c{i} | {t} | {s} "), TWO),
    "keys": ("a.jsonl", KEYS, TWO),
    "audio as an object": ("a.jsonl", OBJECTS, ALL_ONE),
}
# name: (COLUMNS, file, table, speakers)
SAID = {
    "coqui": ("coqui", "metadata.csv", lines("c{i}.wav|{t}|{s}"), TWO),
    "Piper": ("piper", "metadata.csv", lines('c{i}|{s}|"{t}"'), TWO),
    "GPT-SoVITS": ("gpt-sovits", "esd.list", lines("/raw/wavs/c{i}.wav|{s}|EN|{t}"), TWO),
    "NeMo": ("nemo", "m.json", NEMO, ALL_ONE),
    "VITS": ("audio|speaker|text", "train.txt", lines("wavs/c{i}.wav|{s}|{t}"), TWO),
    "text first": ("text audio", "a.tsv", lines("{t}\tc{i}.wav"), ALL_ONE),
    "keys of its own": ("text|-|audio", "a.jsonl", OWN_KEYS, ALL_ONE),
    "two texts": ("audio|text|text", "a.csv", lines("c{i},No. 5,{t}"), ALL_ONE),
    "a README beside it": ("audio|text", "a.csv", lines("c{i},{t}"), ALL_ONE),
    "other names": ("audio|text", "a.csv", "klang,satz\n" + lines("c{i},{t}"), ALL_ONE),
}


@pytest.mark.parametrize("kind", NAMED)
def test_columns_with_names_are_read_without_a_question(tmp_path, kind):
    name, table, speakers = NAMED[kind]
    require_rows(
        tmp_path, wavs(), {name: table, "README.txt": "All of it, or none | free"}, speakers
    )


@pytest.mark.parametrize("kind", SAID)
def test_other_tables_are_read_as_the_user_says(tmp_path, kind):
    columns, name, table, speakers = SAID[kind]
    files = {name: table, "README.txt": "All of it, or none"}
    require_rows(tmp_path, wavs(), files, speakers, columns=columns)


UNCLEAR = {
    "coqui without names": lines("c{i}|{t}|{s}"),
    "Piper without names": lines("c{i}|{s}|{t}"),
    "another language's text": lines("c{i}|{t}|ceci est encore une phrase numero {i}"),
    "four columns": lines("c{i}|{t}|{t}|{s}"),
    "commas without names": lines("c{i},{t}"),
    "names that the kit does not know": "klang;satz\n" + lines("c{i};{t}"),
    "two texts": "path|text|sentence\n" + lines("c{i}|{t}|un mot {i}"),
    "a name twice": "path|text|text\n" + lines("c{i}|{t}|un mot {i}"),
    "one column": lines("{t}"),
}


@pytest.mark.parametrize("kind", UNCLEAR)
def test_a_table_that_does_not_say_it_is_shown_and_asked_about(tmp_path, kind):
    folder = folder_of(tmp_path, wavs(), **{"metadata.csv": UNCLEAR[kind]})
    for source in (folder, folder / "metadata.csv"):
        with pytest.raises(DatasetError) as asked:
            read(source)
        message = str(asked.value)
        for fact in (
            "metadata.csv",
            'COLUMNS = "audio|text',
            "--columns",
            "manifest.columns",
            "coqui",
        ):
            assert fact in message
        assert sum(line.startswith("  ") for line in message.splitlines()) == 3


def test_tables_without_wavs_beside_them_are_no_ljspeech(tmp_path):
    folder = folder_of(tmp_path, wavs(10, "c{}.wav"), **{"a.csv": "".join(CSV)})
    with pytest.raises(DatasetError, match="COLUMNS"):
        read(folder)
    assert len(read(folder, columns="audio|text").rows) == 10


def test_an_ljspeech_text_may_have_more_commas_than_the_table_has_columns(tmp_path):
    texts = [f"one, two, three; four, number {number}" for number in range(10)]
    table = "".join(f"c{number}|{text}\n" for number, text in enumerate(texts))
    folder = folder_of(tmp_path, wavs(10), **{"metadata.csv": table})
    rows = read(folder).rows
    assert len(rows) == 10 and all(row.text.startswith("one, two, three; four,") for row in rows)


WRONG = {
    "audio|txet": "text",
    "audio|speaker": "`text`",
    "audio|text|speaker": "2 columns",
    "coqi": "coqui",
}


@pytest.mark.parametrize("answer", WRONG)
def test_a_wrong_answer_says_what_is_wrong(tmp_path, answer):
    folder = folder_of(tmp_path, wavs(), **{"metadata.csv": lines("c{i}|{t}")})
    with pytest.raises(KitError, match=WRONG[answer]):
        read(folder, columns=answer)


@pytest.mark.parametrize("delimiter", ",;")
def test_quoted_fields_hold_newlines_and_separators(tmp_path, delimiter):
    file = io.StringIO()
    writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")  # as of pandas
    texts = [*TEXTS[:3], f'one half\n{delimiter} "other" half', *TEXTS[4:]]
    rows = [[f"c{i}", text] for i, text in enumerate(texts)]
    writer.writerows([["file_name", "transcription"], *rows])
    result = read(folder_of(tmp_path, wavs(), **{"metadata.csv": file.getvalue()}))
    texts = [row.text for row in result.rows]
    assert not result.refused and texts[:3] + texts[4:] == TEXTS[:3] + TEXTS[4:]
    assert texts[3].startswith("one half") and texts[3].endswith("other half")


def test_quotes_in_an_unquoted_table_are_part_of_the_text(tmp_path):
    table = lines('c{i}|"{t} he said|"{t} he said').replace('|"it was', "|it was")
    result = read(folder_of(tmp_path, wavs(), **{"metadata.csv": table}))
    assert not result.refused
    assert [row.text for row in result.rows] == [f"{t} he said" for t in TEXTS]
    table = f'c0|"{TEXTS[0]}\nc1|{TEXTS[1]}"\n'  # a quotation that two texts share
    result = read(folder_of(tmp_path, [], **{"metadata.csv": table}))
    assert [row.text for row in result.rows] == TEXTS[:2]


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


NO_TABLES = {
    "a spreadsheet": (b"PK\x03\x04zip", "export it as CSV"),
    "compressed": (b"\x1f\x8b\x08", "gunzip"),
    "a pointer of Git LFS": (
        b"version https://git-lfs.github.com/spec/v1\noid x\n",
        "git lfs pull",
    ),
}


@pytest.mark.parametrize("kind", NO_TABLES)
def test_a_file_that_is_no_table_yet_says_what_to_do(tmp_path, kind):
    data, fact = NO_TABLES[kind]
    folder = folder_of(tmp_path, wavs(), **{"metadata.csv": data})
    with pytest.raises(DatasetError, match=rf"metadata\.csv.*{fact}"):
        read(folder)


# --- rows that are not what they seem -------------------------------------------------------------

HALF_S = speech(0.5)
# Of a recording of half a second: (header, its cells, whether it is the whole of it).
PARTS = {
    "a start": ("start", "0.1", False),
    "an end before its own": ("start,end", "0,0.2", False),
    "its own end": ("start,end", "0.0,0.5", True),
    "an end alone": ("end_time", "0.2", False),
    "offset 0 and a duration": ("offset,duration", "0,0.2", False),
    "offset 0 and its own duration": ("offset,duration", "0,0.5", True),
    "MLS's names": ("begin_time,end_time", "0,0.3", False),
    "a time that is no number": ("segment_start", "0:00:01", False),
    "milliseconds": ("start_ms,end_ms", "100,300", False),
    "a duration alone": ("duration", "0.2", True),
    "empty": ("start,end", ",", True),
}


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_a_part_of_a_recording_is_never_trained_whole(tmp_path, kind, name):
    header, cells, is_whole = PARTS[kind]
    table = f"audio,text,{header}\nc0,{TEXTS[0]},{cells}\n"
    if name == "a.jsonl":
        times = dict(zip(header.split(","), cells.split(",")))
        table = json.dumps({"audio": "c0.wav", "text": TEXTS[0]} | times)
    result = read(folder_of(tmp_path, [], **{name: table, "c0.wav": encoded(HALF_S)}))
    assert [row.text for row in result.rows] == [TEXTS[0]] * is_whole
    assert all("a part of a recording" in f.reason and "ffmpeg" in f.cure for f in result.refused)


def test_times_of_another_file_can_be_left_out(tmp_path):
    table = "audio,text,begin_time\n" + lines("c{i},{t},7.5")
    folder = folder_of(tmp_path, wavs(), **{"a.csv": table})
    assert not read(folder).rows and len(read(folder, columns="audio|text|-").rows) == 10


LANGUAGES = {
    "en": 1,
    "EN": 1,
    "en-GB": 1,
    "eng": 1,
    "English": 1,
    "": 1,
    "de": 0,
    "JP": 0,
    "slang": 0,
}


@pytest.mark.parametrize("language", LANGUAGES)
def test_rows_of_another_language_are_rejected_unless_asked_for(tmp_path, language):
    table = f"audio,text,locale\nc0,{TEXTS[0]},{language}\n"
    folder = folder_of(tmp_path, wavs(1), **{"a.csv": table})
    result = read(folder)
    assert len(result.rows) == LANGUAGES[language]
    for finding in result.refused:
        assert repr(language) in finding.reason and "`en`" in finding.reason
        assert "manifest.other_languages=true" in finding.cure
    assert len(read(folder, other_languages=True).rows) == 1


def test_a_name_in_two_spellings_is_one_speaker(tmp_path):
    names = ["José", "Jose\u0301", " José ", "José\u00a0"]
    table = "audio,text,speaker\n" + "".join(f"c{i},{TEXTS[i]},{n}\n" for i, n in enumerate(names))
    rows = read(folder_of(tmp_path, wavs(), **{"a.csv": table})).rows
    assert [row.speaker for row in rows] == ["José"] * 4
    table = "audio,text,speaker\n" + "".join(
        f"c{i},{TEXTS[i]},{n}\n" for i, n in enumerate(["", "nan"])
    )
    rows = read(folder_of(tmp_path, [], **{"a.csv": table})).rows
    assert [row.speaker for row in rows] == ["speaker"] * 2


NOT_SPOKEN = {
    "IPA": "ðə dˈɔɡ ɹˈæn",
    "ARPABET": "{HH AH0 L OW1} {W ER1 L D}",
    "pinyin": "jin1 tian1 hao3",
    "tags": "<speak>words</speak>",
    "labels of speakers": "SPEAKER_00: words",
    "times": "[00:01] words",
    "a file": "txt/c0.txt",
    "JSON": '{"text": "words"}',
    "entities": "words &amp; more",
    "an empty cell": "NaN",
    "an error of Excel": "#NAME?",
    "a lost letter": "sch\ufffdner",
    "a letter saved as a question mark": "sch?ner",
    "UTF-8 saved as Latin-1": "sch\u00c3\u00b6ner",
    "the same in lower case": "sch\u00e3\u00b6ner",
    "a quote saved twice": "don\u00e2\u20ac\u2122t",
    "subtitles": "{\\an8}words",
    "music": "\u266a words",
    "a smiley": "words \U0001f602",
    "bold": "some **bold** words",
    "a token": "words<|endoftext|>",
    "a label in capitals": "ANNA: words",
    "a number sign": "#2 words",
    "RTF": "{\\rtf1 words}",
    "nothing": "...",
}


@pytest.mark.parametrize("kind", NOT_SPOKEN)
def test_what_nobody_says_is_not_trained(tmp_path, kind):
    table = "audio\ttext\n" + f"c0\t{NOT_SPOKEN[kind]}\nc1\t{TEXTS[1]}\n"
    result = read(folder_of(tmp_path, wavs(), **{"a.tsv": table}))
    assert [row.id for row in result.rows] == ["c1"]
    (finding,) = result.refused
    assert finding.line == 2 and finding.cure


def test_phonemes_are_read_where_the_user_says_so(tmp_path):
    folder = folder_of(tmp_path, wavs(), **{"metadata.csv": lines("c{i}|ðə dˈɔɡ {i}")})
    assert len(read(folder, columns="audio|text").rows) == 10


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
    assert result.layout.startswith("JSONL: manifest.jsonl; columns ")
    assert row.audio == str(tmp_path / "a.wav")
    assert read_dataset(tmp_path / "manifest.jsonl", LOOSE) == result
    (row,) = read_dataset(jsonl(tmp_path, {key: "a.wav", "text": TEXT}), LOOSE).rows
    assert (row.id, row.speaker, row.split) == ("a", "speaker", "train"), "no more is needed"


PLAIN = {"audio": "a.wav", "text": TEXT}
JSON_ROWS = {
    "cut in the middle": (b'{"audio": "a.wav", "text": "\xe1\x88\xb0', ""),
    "an array": (b'["a.wav", "x"]', "object"),
    "no text": ({"audio": "a.wav"}, "`audio` and `text`, both strings, expected; got audio: str"),
    "text is a number": ({"audio": "a.wav", "text": 5}, "text: int"),
    "text is null": ({"audio": "a.wav", "text": None}, "text: NoneType"),
    "no audio": ({"text": TEXT}, "expected; got text: str"),
    "a part": ({"audio": "a.wav", "text": TEXT, "offset": 3.5}, "a part of a recording"),
    "absolute": ({"audio": "/etc/passwd", "text": TEXT}, "the path must lead to a file inside"),
    "../": ({"audio": "../a.wav", "text": TEXT}, "the path must lead to"),
    "../ id": ({"audio": "a.wav", "text": TEXT, "id": "../x"}, "the id must"),
    "gone": ({"audio": "b.wav", "text": TEXT}, "no recording"),
    "half a pair": (b'{"audio": "a.wav", "text": "\\ud800"}', ""),
    "half a speaker": (b'{"audio": "a.wav", "id": "x", "text": "a b", "speaker": "\\ud800"}', ""),
    "a reserved speaker": (PLAIN | {"id": "x", "speaker": "__metadata__"}, "'__metadata__'"),
    "an odd speaker": (PLAIN | {"id": "x", "speaker": "a\x01b"}, "no speaker can be called"),
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
    with pytest.raises(DatasetError, match=r"gone is gone: .*`audio_root`"):
        read_dataset(away, ManifestConfig(audio_root=str(tmp_path / "gone")))
