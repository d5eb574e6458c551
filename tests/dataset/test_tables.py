"""Tables: columns by their names or as the user says, else a question; JSON Lines; broken rows."""

import csv
import io
import json
import re
import shutil

import pytest
from clips import TEXT, encoded
from folders import ALL_ONE, TEXTS, TWO, folder_of, lines, read, require_rows, wavs
from helpers import speech

from kit.base.errors import DatasetError, KitError
from kit.dataset.layouts import read_dataset
from kit.settings import ManifestConfig

LOOSE = ManifestConfig(held_out_percent=0)
OTHERS = "id\tpath\tgender\tsentence\tlength\tspeaker_id\n"
SEMICOLONS = "path;text;speaker\r\n" + lines("C:\\data\\wavs\\c{i}.WAV;{t};{s}")
KEYS = lines('{{"path": "c{i}", "text": "{t}", "spk": "{s}", "my_text": 1}}')
NEMO = lines('{{"audio_filepath": "wavs/c{i}.wav", "text": "{t}"}}')
OWN_KEYS = lines('{{"said": "{t}", "n": 1, "where": "c{i}"}}')
COQUI = "audio_file|text|speaker_name\n" + lines("c{i}.wav|{t}|{s}")
# name: (file, table, speakers)
NAMED = {
    "LJSpeech": ("metadata.csv", lines("c{i}|{t}"), ALL_ONE),
    "LJSpeech, normalised": ("metadata.csv", lines("c{i}|{t} No. 5|{t}"), ALL_ONE),
    "the kit's own": ("metadata.csv", "id|text|speaker\n" + lines("c{i}|{t}|{s}"), TWO),
    "coqui's header": ("metadata.csv", COQUI, TWO),
    "more columns": ("all.tsv", OTHERS + lines("u{i}\twavs/c{i}.wav\tf\t{t}\t2.{i}\t{s}"), TWO),
    "normalised": ("a.csv", "file_name,text,normalized_text\n" + lines("c{i},No. 5,{t}"), ALL_ONE),
    "a voice to imitate": ("a.csv", "ref_audio,audio,text\n" + lines("c0,c{i},{t}"), ALL_ONE),
    "semicolons in UTF-16": ("table.csv", SEMICOLONS.encode("utf-16"), TWO),
    "a byte order mark": ("a.csv", "\ufeffFile Name,Text\n" + lines("c{i}.wav,{t}"), ALL_ONE),
    "spaces around a name": ("a.csv", "path | text | speaker\n" + lines("c{i} | {t} | {s} "), TWO),
    "keys": ("a.jsonl", KEYS, TWO),
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
    "other names": ("audio|text", "a.csv", "path,satz\n" + lines("c{i},{t}"), ALL_ONE),
}


@pytest.mark.parametrize("kind", NAMED)
def test_columns_with_names_are_read_without_a_question(tmp_path, kind):
    name, table, speakers = NAMED[kind]
    files = {name: table, "README.txt": "All of it, or none | free"}
    require_rows(tmp_path, wavs(), files, speakers)


@pytest.mark.parametrize("kind", SAID)
def test_other_tables_are_read_as_the_user_says(tmp_path, kind):
    columns, name, table, speakers = SAID[kind]
    files = {name: table, "README.txt": "All of it, or none"}
    require_rows(tmp_path, wavs(), files, speakers, columns=columns)


UNCLEAR = {
    "coqui without names": lines("c{i}|{t}|{s}"),
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
        facts = ("metadata.csv", 'COLUMNS = "audio|text', "--columns", "manifest.columns", "coqui")
        assert all(fact in message for fact in facts)
        assert sum(line.startswith("  ") for line in message.splitlines()) == 3
    wrong = {"audio|txet": "text", "audio|speaker": "`text`", "coqi": "coqui"}
    for answer, facts in wrong.items():
        with pytest.raises(KitError, match=facts):
            read(folder, columns=answer)


def test_an_ljspeech_text_may_have_more_commas_than_the_table_has_columns(tmp_path):
    texts = [f"one, two, three; four, number {number}" for number in range(10)]
    table = "".join(f"c{number}|{text}\n" for number, text in enumerate(texts))
    folder = folder_of(tmp_path, wavs(10), **{"metadata.csv": table})
    rows = read(folder).rows
    assert len(rows) == 10 and all(row.text.startswith("one, two, three; four,") for row in rows)


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


# --- rows that are not what they seem -------------------------------------------------------------

# Of a recording of half a second: (header, its cells, whether it is the whole of it).
PARTS = [
    ("start", "0.1", False),
    ("start,end", "0,0.2", False),
    ("start,end", "0.0,0.5", True),
    ("offset,duration", "0,0.2", False),
    ("segment_start", "0:00:01", False),
    ("start_ms,end_ms", "100,300", False),
    ("duration", "0.2", True),
    ("start,end", ",", True),
]


@pytest.mark.parametrize(("header", "cells", "is_whole"), PARTS)
@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_a_part_of_a_recording_is_never_trained_whole(tmp_path, header, cells, is_whole, name):
    table = f"audio,text,{header}\nc0,{TEXTS[0]},{cells}\n"
    if name == "a.jsonl":
        times = dict(zip(header.split(","), cells.split(",")))
        table = json.dumps({"audio": "c0.wav", "text": TEXTS[0]} | times)
    result = read(folder_of(tmp_path, [], **{name: table, "c0.wav": encoded(speech(0.5))}))
    assert [row.text for row in result.rows] == [TEXTS[0]] * is_whole
    assert all("a part of a recording" in f.reason and "ffmpeg" in f.cure for f in result.refused)


@pytest.mark.parametrize("language", ["en-GB", "English", "", "de", "slang"])
def test_rows_of_another_language_are_rejected_unless_asked_for(tmp_path, language):
    table = f"audio,text,locale\nc0,{TEXTS[0]},{language}\n"
    folder = folder_of(tmp_path, wavs(1), **{"a.csv": table})
    result = read(folder)
    assert len(result.rows) == (language not in ("de", "slang"))
    for finding in result.refused:
        assert repr(language) in finding.reason and "`en`" in finding.reason
        assert "manifest.other_languages=true" in finding.cure
    assert len(read(folder, other_languages=True).rows) == 1


def test_a_name_in_two_spellings_is_one_speaker(tmp_path):
    names = ["José", "Jose\u0301", " José ", "José\u00a0"]
    table = "audio,text,speaker\n" + "".join(f"c{i},{TEXTS[i]},{n}\n" for i, n in enumerate(names))
    rows = read(folder_of(tmp_path, wavs(), **{"a.csv": table})).rows
    assert [row.speaker for row in rows] == ["José"] * 4


# IPA, ARPABET, pinyin; tags, labels, times; a file; a row, an entity, cells without a text.
NOT_SPOKEN = ["ðə dˈɔɡ ɹˈæn", "{HH AH0 L OW1} {W ER1 L D}", "jin1 tian1 hao3", "<b>words</b>"]
NOT_SPOKEN += ["SPEAKER_00: words", "[00:01] words", "txt/c0.txt", '{"text": "words"}']
NOT_SPOKEN += ["words &amp; more", "NaN", "#NAME?", "sch\ufffdner", "..."]
# Letters lost in saving; subtitles, music, a smiley, bold, a token, a label, a number sign.
NOT_SPOKEN += ["sch?ner", "sch\u00c3\u00b6ner", "sch\u00e3\u00b6ner", "don\u00e2\u20ac\u2122t"]
NOT_SPOKEN += ["{\\an8}words", "\u266a words", "words \U0001f602", "some **bold** words"]
NOT_SPOKEN += ["words<|endoftext|>", "ANNA: words", "#2 words"]


@pytest.mark.parametrize("text", NOT_SPOKEN)
def test_what_nobody_says_is_not_trained(tmp_path, text):
    table = "audio\ttext\n" + f"c0\t{text}\nc1\t{TEXTS[1]}\n"
    result = read(folder_of(tmp_path, wavs(), **{"a.tsv": table}))
    assert [row.id for row in result.rows] == ["c1"]
    (finding,) = result.refused
    assert finding.line == 2 and finding.cure


# --- JSON -----------------------------------------------------------------------------------------


PLAIN = {"audio": "a.wav", "text": TEXT}


def jsonl(folder, *records: dict | bytes):
    rows = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in records]
    return folder_of(folder, ["a.wav"], **{"manifest.jsonl": b"\n".join(rows)})


def test_a_jsonl_manifest(tmp_path):
    record = {"audio_filepath": "a.wav", "text": TEXT, "speaker": "v", "id": 7}
    result = read_dataset(jsonl(tmp_path, record | {"split": "validation"}), LOOSE)
    (row,) = result.rows
    assert (row.id, row.speaker, row.split, row.line) == ("7", "v", "held_out", 1)
    assert result.layout == "manifest.jsonl (audio|text|speaker|id|split)"
    assert row.audio == str(tmp_path / "a.wav")
    assert read_dataset(tmp_path / "manifest.jsonl", LOOSE) == result
    (row,) = read_dataset(jsonl(tmp_path, PLAIN), LOOSE).rows
    assert (row.id, row.speaker, row.split) == ("a", "speaker", "train"), "no more is needed"


JSON_ROWS = [
    (b'{"audio": "a.wav", "text": "\xe1\x88\xb0', ""),
    (b'["a.wav", "x"]', "object"),
    ({"audio": "a.wav", "text": 5}, "`audio` and `text`, both strings, expected; .*text: int"),
    ({"text": TEXT}, "expected; got text: str"),
    ({"audio": "../a.wav", "text": TEXT}, "the path must lead to"),
    ({"audio": "a.wav", "text": TEXT, "id": "../x"}, "the id must"),
    (b'{"audio": "a.wav", "id": "x", "text": "a b", "speaker": "\\ud800"}', ""),
]


@pytest.mark.parametrize(("bad", "facts"), JSON_ROWS)
def test_every_unusable_json_line(tmp_path, bad, facts):
    result = read_dataset(jsonl(tmp_path, PLAIN, b"", bad), LOOSE)
    assert [row.id for row in result.rows] == ["a"]
    (refusal,) = result.refused
    assert re.search(facts, refusal.reason)
    assert (refusal.file, refusal.line) == ("manifest.jsonl", 3)
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


def test_what_the_user_says_of_columns_goes_before_what_they_seem_to_be(tmp_path):
    table = "audio,text,begin_time\n" + lines("c{i},{t},7.5")
    folder = folder_of(tmp_path / "times", wavs(), **{"a.csv": table})
    assert not read(folder).rows and len(read(folder, columns="audio|text|-").rows) == 10
    folder = folder_of(tmp_path / "ipa", wavs(), **{"metadata.csv": lines("c{i}|ðə dˈɔɡ {i}")})
    assert len(read(folder, columns="audio|text").rows) == 10
    table = f"audio,text,speaker\nc0,{TEXTS[0]},\nc1,{TEXTS[1]},nan\n"
    rows = read(folder_of(tmp_path / "nobody", wavs(), **{"a.csv": table})).rows
    assert [row.speaker for row in rows] == ["speaker"] * 2
