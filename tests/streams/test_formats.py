"""Formats on real bytes: the records of the standard readers, in any order; bad ones reported."""

import csv
import dataclasses
import io
import json
import random
import re

import pytest

from kit.base.errors import DatasetError
from kit.streams.formats import JsonLines, Table, TextLines, array_to_lines, open_source
from kit.streams.stream import BadRecord, Split, StreamConfig

ODD = "ሀ ለ\u2028\x85\x0b\x0c\x1c[]{}:\\'" + '"",\t|\n\r\x7f😀é'


def small(block_bytes: int, **over) -> StreamConfig:
    return StreamConfig(block_bytes=block_bytes, group_blocks=3, **over)


def write(folder, name: str, data: bytes | str):
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def words(rng: random.Random, without: str = "\n") -> str:
    return "".join(rng.choices([c for c in ODD if c not in without], k=rng.randrange(12)))


def everything(source) -> list:
    """Its records in file order, also found in shares, and by rows()."""
    records = list(source)
    again = []
    config = source.config
    for rank in range(3):
        source.config = dataclasses.replace(config, rank=rank, ranks=3)
        again += list(source)
    assert sorted(map(repr, again)) == sorted(map(repr, records))
    assert [record for _, record in source.rows()] == records
    source.config = config
    return records


ENDS = [(b"", []), (b"\n", [""]), (b"\n\n", ["", ""]), (b"a", ["a"]), (b"\xef\xbb\xbf", [])]
ENDS += [(b"\xef\xbb\xbfa\nb", ["a", "b"]), (b"a\r\n\r\nb\r\n", ["a", "", "b"])]
ENDS += [(b"x" * 300 + b"\ny", ["x" * 300, "y"])]


@pytest.mark.parametrize("block_bytes", [1, 7, 65536])
def test_lines_end_at_newlines_and_nowhere_else(tmp_path, block_bytes):
    rng = random.Random(0)
    lines = [words(rng, "\n\r") for _ in range(20 if block_bytes < 7 else 60)]
    lines += ["a\rb", "", "\u2028", "ሰላም"]
    files = [
        (end.join(lines).encode() + last.encode(), lines)
        for end in ("\n", "\r\n")
        for last in ("", end)
    ]
    for data, wanted in files + ENDS:
        assert everything(TextLines(write(tmp_path, "a.txt", data), small(block_bytes))) == wanted


GOOD = {"a.txt": "one\ntwo\nfour\n", "a.jsonl": '{"n": 1}\n{"n":2}\n{"n": 4}\n'}
GOOD["a.csv"] = "a,b\n1,2\n8,9\n"
BAD_LINES = [  # (file, a line before its last one, words of the reason)
    ("a.txt", b"caf\xe9", "not valid UTF-8: 0xe9 at its byte 3"),
    ("a.txt", b"a\0b", "NUL"),
    ("a.jsonl", b'{"a": 1, "b', "JSON"),
    ("a.jsonl", b"[1, 2]", "got list"),
    ("a.jsonl", b'{"a": 1}, {}', "JSON"),
    ("a.jsonl", b"NaN", "JSON"),
    ("a.csv", b"3,4,5", "got 3"),
    ("a.csv", b"3", "got 1"),
    ("a.csv", b'1,"x"y', "expected after"),
    ("a.csv", b'1,"x', "never closed.* a row is one line"),
    ("a.csv", b"1,x\ry", "new-line"),
    ("a.csv", b"1,x\0y", "NUL"),
]


@pytest.mark.parametrize("block_bytes", [4, 65536])
@pytest.mark.parametrize(("name", "raw", "reason"), BAD_LINES, ids=ascii)
def test_a_bad_line_is_reported_with_its_place(tmp_path, name, raw, reason, block_bytes):
    first, second, last = GOOD[name].encode().splitlines(keepends=True)
    path = write(tmp_path, name, first + second + raw + b"\n" + last)
    offset = len(first + second)
    config = small(block_bytes)
    with pytest.raises(DatasetError, match=f"{name}, line 3, byte {offset}: .*on_bad_record="):
        list(open_source(path, config))
    bad = []
    records = list(open_source(path, config, on_bad_record=bad.append))
    assert records == list(open_source(write(tmp_path, f"good-{name}", GOOD[name])))
    (record,) = bad
    assert (record.file, record.offset) == (str(path), offset)
    assert re.search(reason, record.reason)
    numbered = list(open_source(path).rows())
    assert [line for line, _ in numbered][-3:] == [2, 3, 4]
    assert isinstance(numbered[-2][1], BadRecord)


def test_bad_records_are_reported_once_also_after_resuming(tmp_path):
    lines = [b"%d %s\n" % (i, b"\xff" * (i % 9 == 0)) for i in range(400)]
    path = write(tmp_path, "a.txt", b"".join(lines))
    config, whole = small(64, shuffle=True), []
    records = list(TextLines(path, config, on_bad_record=whole.append))
    assert len(whole) == len({bad.offset for bad in whole}) == 45
    for stop in range(1, 355, 71):
        reported = []
        source, resumed = (TextLines(path, config, on_bad_record=reported.append) for _ in range(2))
        parts = iter(source)
        seen = [next(parts) for _ in range(stop)]
        resumed.load_state_dict(source.state_dict())
        assert seen + list(resumed) == records and reported == whole


def test_a_line_without_end_does_not_fill_the_memory(tmp_path):
    path = write(tmp_path, "a.txt", b"ok\n" + b"x" * 5000 + b"\nlast\n")
    bad = []
    source = TextLines(path, small(64, longest_record_bytes=1000), on_bad_record=bad.append)
    assert list(source) == ["ok", "last"]
    assert len(bad) == 1 and "longer than longest_record_bytes (1000)" in bad[0].reason
    assert [line for line, _ in source.rows()] == [1, 2, 3]


UNUSABLE = [(TextLines, "ሰ".encode("utf-16"), "UTF-16"), (TextLines, b"\x1f\x8b\x08", "gzip")]
UNUSABLE += [(Table, head, "header") for head in ("", "a,a\n", "a,,c\n", "\n", '"a\n')]


@pytest.mark.parametrize("kind, data, reason", UNUSABLE, ids=ascii)
def test_a_file_that_cannot_be_used_is_reported_at_once(tmp_path, kind, data, reason):
    with pytest.raises(DatasetError, match=reason):
        kind(write(tmp_path, "a", data))


@pytest.mark.parametrize("block_bytes", [2, 64, 65536])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_quoted_tables_are_what_the_csv_module_writes(tmp_path, block_bytes, end):
    rng = random.Random(block_bytes)
    table = [
        {"id": f"{i:03d}", "text": words(rng, "\n\r"), "x y": words(rng, "\n\r")} for i in range(60)
    ]
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, ["id", "text", "x y"], lineterminator=end)
    writer.writeheader()
    writer.writerows(table)
    path = write(tmp_path, "a.csv", file.getvalue())
    assert everything(Table(path, small(block_bytes))) == table
    with open(path, newline="", encoding="utf-8") as lines:
        assert list(csv.DictReader(lines)) == table


@pytest.mark.parametrize("block_bytes", [1, 9, 65536])
def test_with_tabs_and_bars_quotes_are_letters_and_values_stay_text(tmp_path, block_bytes):
    data = 'a|he said "no|x\nb|5" wide|y\nc|"|z'
    path = write(tmp_path, "metadata.csv", data)
    table = Table(path, small(block_bytes), columns=["id", "text", "norm"], delimiter="|")
    assert [list(r.values()) for r in everything(table)] == [r.split("|") for r in data.split("\n")]
    path = write(tmp_path, "train.tsv", 'path\tsentence\tup_votes\nx.mp3\t"ሰላም" አለ\t001\n')
    assert list(open_source(path)) == [{"path": "x.mp3", "sentence": '"ሰላም" አለ', "up_votes": "001"}]


def test_a_bom_is_no_part_of_the_first_column_which_may_be_the_only_one(tmp_path):
    path = write(tmp_path, "a.csv", b"\xef\xbb\xbfid,text\r\n1,x\r\n")
    assert list(Table(path)) == [{"id": "1", "text": "x"}]
    path = write(tmp_path, "a.csv", 'text\none\n\n""\ntwo\n')
    assert everything(Table(path)) == [{"text": "one"}, {"text": ""}, {"text": "two"}]
    assert [line for line, _ in Table(path).rows()] == [2, 4, 5]


def some_objects(count: int) -> list[dict]:
    rng = random.Random(3)
    value = lambda: rng.choice([words(rng, ""), rng.random(), None, [{"a": [1]}], "]", "{", "\\"])  # noqa: E731
    return [{"id": f"{i:03d}", words(rng, ""): value(), "deep": [value()]} for i in range(count)]


@pytest.mark.parametrize("block_bytes", [1, 64, 65536])
@pytest.mark.parametrize("ascii", [True, False])
def test_json_lines(tmp_path, block_bytes, ascii):
    objects = some_objects(8 if block_bytes == 1 else 30)
    lines = [json.dumps(o, ensure_ascii=ascii) for o in objects]
    for end in ("\n", "\r\n", "\n\n"):
        path = write(tmp_path, "a.jsonl", end.join(lines))
        assert everything(JsonLines(path, small(block_bytes))) == objects


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array_is_converted_once(tmp_path, indent):
    objects = some_objects(30)
    path = write(tmp_path, "a.json", "\ufeff" + json.dumps(objects, indent=indent))
    with pytest.raises(DatasetError, match=r"a\.json.*array_to_lines"):
        open_source(path)
    array_to_lines(path, tmp_path / "a.jsonl")
    assert list(open_source(tmp_path / "a.jsonl")) == objects
    for text in ("", '{"a": 1}', '[{"a": 1}] [', '[{"a": 1}', "[1]"):
        with pytest.raises(DatasetError, match=r"b\.json is not "):
            array_to_lines(write(tmp_path, "b.json", text), tmp_path / "b.jsonl")
    assert not (tmp_path / "b.jsonl").exists()


def test_a_split_goes_by_a_column(tmp_path):
    path = write(tmp_path, "a.csv", "id,text\n" + "".join(f"{i},x\n" for i in range(500)))
    keep, hold = (Split(20, held_out, key="id") for held_out in (False, True))
    train, held = (list(Table(path, small(64), keep=k)) for k in (keep, hold))
    assert 60 < len(held) < 140 and len(train) + len(held) == 500
    assert all(hold(record) and not keep(record) for record in held)


def test_the_suffix_decides(tmp_path):
    kinds = {"txt": TextLines, "csv": Table, "tsv": Table, "jsonl": JsonLines}
    for suffix, kind in kinds.items():
        assert type(open_source(write(tmp_path, f"a.{suffix}", "[]"))) is kind
    assert list(open_source(write(tmp_path, "A.TSV", "a\tb\n1\t2\n"))) == [{"a": "1", "b": "2"}]
    assert type(open_source(write(tmp_path, "a.psv", "a|b\n"), delimiter="|")) is Table
    with pytest.raises(DatasetError, match=r"`\.xlsx`.*Known: \.txt"):
        open_source(write(tmp_path, "a.xlsx", ""))
