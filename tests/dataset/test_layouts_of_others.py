"""Folders as other tools write them: exact texts, speakers and splits, or a question."""

import csv
import dataclasses
import importlib.util
import io
import json
import sys
import types
import unicodedata
from pathlib import Path

import pytest
from clips import encoded, voice

from kit.audio.container import SUFFIXES
from kit.base.errors import DatasetError, KitError
from kit.dataset.checks import check_dataset
from kit.dataset.data_report import DataReport, Finding, ManifestConfig, Utterance
from kit.dataset.fetch import fetch_dataset
from kit.dataset.layouts import hold_out, read_dataset
from kit.dataset.recordings import canonical_split

TEXTS = [
    "printing in the only sense.",
    "in being comparatively modern.",
    "the dog ran home today.",
    "a quick brown fox jumps.",
    "we are going to the sea.",
    "nobody knows the trouble.",
    "it was the best of times.",
    "she sells sea shells here.",
    "all that glitters is not gold.",
    "they went away again.",
]
RULES = {"language": "en", "held_out_percent": 0}


def folder_of(root: Path, recordings: list[str], **tables: str | bytes) -> Path:
    """A folder with empty `recordings`, which are only looked for, and `tables` by name."""
    for name in recordings:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"?")
    for name, data in tables.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    return root


def wavs(count: int = 10, pattern: str = "wavs/c{}.wav") -> list[str]:
    return [pattern.format(i) for i in range(count)]


def lines(pattern: str, **values: list) -> str:
    """Ten rows: {i} is the number, {t} the text, {s} one of two speakers."""
    rows = [pattern.format(i=i, t=text, s=f"s{i % 2}", n=i % 2) for i, text in enumerate(TEXTS)]
    return "".join(f"{row}\n" for row in rows)


def read(folder: Path, **over):
    return read_dataset(folder, ManifestConfig(**{**RULES, **over}))


# --- columns ------------------------------------------------------------------------------------

ALL_ONE, TWO = ["speaker"] * 10, [f"s{i % 2}" for i in range(10)]
# name: (file, table, speakers)
COLUMNS = {
    "LJSpeech": ("metadata.csv", lines("c{i}|{t}"), ALL_ONE),
    "LJSpeech, normalised": ("metadata.csv", lines("c{i}|{t} No. 5|{t}"), ALL_ONE),
    "the kit's own": ("metadata.csv", lines("c{i}|{t}|{t}|{s}"), TWO),
    "the kit's own, one speaker": ("metadata.csv", lines("c{i}|{t}||v"), ["v"] * 10),
    "coqui": ("metadata.csv", lines("c{i}.wav|{t}|coqui"), ["coqui"] * 10),
    "coqui with a header": (
        "metadata.csv",
        "audio_file|text|speaker_name\n" + lines("c{i}.wav|{t}|coqui"),
        ["coqui"] * 10,
    ),
    "coqui with folders": ("metadata.csv", lines("wavs/c{i}.wav|{t}|{s}"), TWO),
    "a speaker of two words": ("metadata.csv", lines("c{i}|{t}|Ann Lee"), ["Ann Lee"] * 10),
    "Piper": ("metadata.csv", lines("c{i}|{s}|{t}"), TWO),
    "GPT-SoVITS": ("esd.list", lines("/workspace/raw/wavs/c{i}.wav|{s}|en|{t}"), TWO),
    "VITS": ("list.txt", lines("wavs/c{i}.wav|{n}|{t}"), [str(i % 2) for i in range(10)]),
    "text first": ("metadata.csv", lines("{t}|c{i}.wav"), ALL_ONE),
    "other columns": (
        "all.tsv",
        "id\tpath\tgender\tsentence\tduration\tspeaker_id\n"
        + lines("u{i}\twavs/c{i}.wav\tf\t{t}\t2.{i}\t{s}"),
        TWO,
    ),
    "raw and normalised": (
        "metadata.csv",
        "file_name,text,normalized_text\n" + lines("c{i},{t} No. 5,{t}"),
        ALL_ONE,
    ),
    "an index and unknown names": (
        "metadata.csv",
        ",klang,text\n" + lines("{i},c{i}.wav,{t}"),
        ALL_ONE,
    ),
    "spaces, trailing columns": ("metadata.csv", lines("c{i} | {t} |  |"), ALL_ONE),
    "semicolons in UTF-16": (
        "table.csv",
        ("path;text;speaker\r\n" + lines("C:\\data\\wavs\\c{i}.WAV;{t};{s}")).encode("utf-16"),
        TWO,
    ),
    "a byte order mark": (
        "metadata.csv",
        "\ufefffile_name,text\n" + lines("c{i}.wav,{t}"),
        ALL_ONE,
    ),
    "everything quoted": ("metadata.csv", lines('"c{i}"|"{t}"|"{s}"'), TWO),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_columns_are_found(tmp_path, kind):
    name, table, speakers = COLUMNS[kind]
    result = read(folder_of(tmp_path, wavs(), **{name: table}))
    assert not result.refused
    assert [row.text for row in result.rows] == TEXTS
    assert [row.speaker for row in result.rows] == speakers
    assert [Path(row.audio).name for row in result.rows] == [f"c{i}.wav" for i in range(10)]
    assert {row.split for row in result.rows} == {"train"}


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


@pytest.mark.parametrize(
    ("answer", "words"),
    [("audio|txet", "text"), ("audio|speaker", "`text`"), ("audio|text|speaker", "2 columns")],
)
def test_a_wrong_answer_says_what_is_wrong(tmp_path, answer, words):
    folder = folder_of(tmp_path, wavs(), **{"metadata.csv": lines("c{i}|{t}")})
    with pytest.raises(KitError, match=words):
        read(folder, columns=answer)


# --- rows ---------------------------------------------------------------------------------------


def quoted(delimiter: str, header: list[str] | None = None) -> str:
    """A table as pandas writes it; the text of row 3 has a newline, a separator and quotes."""
    file = io.StringIO()
    writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")
    writer.writerows([header] if header else [])
    writer.writerows(
        [f"c{i}", f'one half\n{delimiter} "other" half' if i == 3 else t]
        for i, t in enumerate(TEXTS)
    )
    return file.getvalue()


@pytest.mark.parametrize("delimiter", "|,;\t")
@pytest.mark.parametrize("header", [None, ["file_name", "transcription"]])
def test_quoted_fields_hold_newlines_and_separators(tmp_path, delimiter, header):
    result = read(folder_of(tmp_path, wavs(), **{"metadata.csv": quoted(delimiter, header)}))
    texts = [row.text for row in result.rows]
    assert not result.refused and texts[:3] + texts[4:] == TEXTS[:3] + TEXTS[4:]
    assert texts[3].startswith("one half") and texts[3].endswith("other half")


def test_quotes_in_an_unquoted_table_are_part_of_the_text(tmp_path):
    table = lines('c{i}|"{t} he said|"{t} he said').replace('|"it was', "|it was")
    result = read(folder_of(tmp_path, wavs(), **{"metadata.csv": table}))
    assert not result.refused and [row.text for row in result.rows] == [
        f"{t} he said" for t in TEXTS
    ]
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
    mark = table[table.index("c0") + 2]
    table = "\n".join(
        f"c3{mark}{bad}" if line.startswith("c3") else line for line in table.split("\n")
    )
    result = read(folder_of(tmp_path, wavs(), **{"metadata.csv": table}))
    assert [finding.line for finding in result.refused] == rejected
    assert not any("one" in row.text.split() for row in result.rows)
    assert "c3" not in {row.id for row in result.rows}


# --- splits -------------------------------------------------------------------------------------

RECORD = '{{"audio": "wavs/c{i}.wav", "text": "{t}"}}'
TRAIN, HELD = ("".join(lines(RECORD).splitlines(True)[a:b]) for a, b in ((0, 8), (8, 10)))
CSV = lines("c{i}|{t}").splitlines(True)
AUDIO_FOLDER = lines("c{i}.wav,{t}").splitlines(True)
HEADER = "file_name,transcription\n"
SPLITS = {
    "JSONL manifests": {"train_manifest.jsonl": TRAIN, "val_manifest.jsonl": HELD},
    "NeMo": {
        "train_manifest.json": TRAIN.replace('"audio"', '"audio_filepath"'),
        "dev_manifest.json": HELD.replace('"audio"', '"audio_filepath"'),
        "config.json": "{}",
    },
    "with a hyphen": {
        "metadata-train.csv": "".join(CSV[:8]),
        "metadata-eval.csv": "".join(CSV[8:]),
    },
    "beside a list of all": {
        "metadata.csv": "".join(CSV),
        "metadata_train.csv": "".join(CSV[:8]),
        "metadata_val.csv": "".join(CSV[8:]),
    },
    "capitals": {"train_data.jsonl": TRAIN, "Validation.jsonl": HELD},
    "VITS": {
        "x_audio_train_filelist.txt": lines("wavs/c{i}.wav|{t}").split("wavs/c8")[0],
        "x_audio_val_filelist.txt": "wavs/c8" + lines("wavs/c{i}.wav|{t}").split("wavs/c8")[1],
        "README.txt": "One voice | read aloud\n",
    },
    "a key": {
        "all.jsonl": TRAIN.replace("}", ', "split": "Training"}')
        + HELD.replace("}", ', "split": "Validation"}')
    },
    "a column": {
        "metadata.csv": "split|id|text\n"
        + "".join(f"{'dev' if i > 7 else 'TRAIN'}|{row}" for i, row in enumerate(CSV))
    },
}


@pytest.mark.parametrize("kind", SPLITS)
def test_the_usual_names_of_splits_are_known(tmp_path, kind):
    result = read(folder_of(tmp_path, wavs(), **SPLITS[kind]))
    assert not result.refused
    splits = {row.text: row.split for row in result.rows}
    assert splits == {t: "held_out" if i > 7 else "train" for i, t in enumerate(TEXTS)}


def test_a_folder_for_each_split_is_one_dataset(tmp_path):
    tables = {
        "train__metadata.csv": HEADER + "".join(AUDIO_FOLDER[:8]),
        "validation__metadata.csv": HEADER + "".join(AUDIO_FOLDER[8:]),
    }
    files = [f"{'validation' if i > 7 else 'train'}/c{i}.wav" for i in range(10)]
    folder = fetch_dataset(folder_of(tmp_path / "mine", files, **tables), tmp_path / "into")
    result = read(folder)
    assert {row.text: row.split for row in result.rows} == {
        t: "held_out" if i > 7 else "train" for i, t in enumerate(TEXTS)
    }
    assert {row.file for row in result.rows} == {"train/metadata.csv", "validation/metadata.csv"}


def test_kaldi_folders_with_speakers(tmp_path):
    tables = {
        f"data__{split}__{name}": "".join(lines(row).splitlines(True)[part])
        for split, part in (("train", slice(0, 8)), ("dev", slice(8, 10)))
        for name, row in (
            ("wav.scp", "u{i} /exp/corpus/data/" + split + "/c{i}.wav"),
            ("text", "u{i} {t}"),
            ("utt2spk", "u{i} {s}"),
        )
    }
    files = [f"data/{'dev' if i > 7 else 'train'}/c{i}.wav" for i in range(10)]
    result = read(fetch_dataset(folder_of(tmp_path, files, **tables), tmp_path / "into"))
    assert not result.refused
    rows = {row.text: (row.speaker, row.split) for row in result.rows}
    assert rows == {t: (TWO[i], "held_out" if i > 7 else "train") for i, t in enumerate(TEXTS)}


def test_librispeech_folders_with_speakers_and_splits(tmp_path):
    files, tables = [], {}
    for i in range(10):
        place = f"{'dev' if i > 7 else 'train'}-clean/{i % 2}/7"
        files.append(f"{place}/{i % 2}-7-{i}.flac")
        table = f"{place.replace('/', '__')}__{i % 2}-7.trans.txt"
        tables[table] = tables.get(table, "") + f"{i % 2}-7-{i} {TEXTS[i]}\n"
    tables["train-clean__0__7__0-7.trans.txt"] += "0-7-99\n0-7-98 caf\udce9\n"
    encoded_tables = {name: t.encode(errors="surrogateescape") for name, t in tables.items()}
    folder = folder_of(tmp_path / "LibriSpeech", files, **encoded_tables)
    (folder / "SPEAKERS.TXT").write_text("; ID | SEX | SUBSET\n0 | F | train-clean\n")
    result = read(fetch_dataset(tmp_path, tmp_path / "into"))
    rows = {row.text: (row.speaker, row.split) for row in result.rows}
    assert rows == {t: (str(i % 2), "held_out" if i > 7 else "train") for i, t in enumerate(TEXTS)}
    assert [(Path(finding.file).name, finding.line) for finding in result.refused] == [
        ("0-7.trans.txt", 6), ("0-7.trans.txt", 5)
    ]  # fmt: skip
    assert "UTF-8" in result.refused[0].reason and "text is empty" in result.refused[1].reason
    alone = read(folder / "dev-clean").rows  # a part that is given by itself is trained on
    assert {row.split for row in alone} == {"train"} and len(alone) == 2


def test_splits_of_which_none_is_for_training_are_named(tmp_path):
    tables = {"anna.jsonl": TRAIN, "ben.jsonl": HELD}
    with pytest.raises(DatasetError, match=r"`anna` \(8 rows\), `ben` \(2 rows\).*train\.csv"):
        check_dataset(folder_of(tmp_path / "a", wavs(), **tables), ManifestConfig(), tmp_path / "b")


@pytest.mark.parametrize(
    ("name", "split"),
    [("Validation", "held_out"), ("train-clean-100", "train"), ("dev_clean", "held_out"),
     ("train_nodev", "train"), ("train_dev", "held_out"), ("test-clean", "test-clean"),
     ("unseen", "unseen"), ("held-out", "held_out"), ("", "")],
)  # fmt: skip
def test_names_of_splits(name, split):
    assert canonical_split(name) == split


# --- held-out rows ------------------------------------------------------------------------------


def utterance(i: int, text: str, split: str = "train") -> Utterance:
    return Utterance(id=f"c{i}", audio=f"{i}.wav", text=text, speaker="v", split=split, line=i)


def test_held_out_rows_are_among_those_that_training_can_spell():
    texts = [f"{t}{'z' if i % 2 else ''}" for i, t in enumerate(["ab"] * 18)] + ["xq"]
    rows = hold_out([utterance(i, t) for i, t in enumerate(texts)], ManifestConfig())
    held_out = [row for row in rows if row.split == "held_out"]
    letters = {c for row in rows if row.split == "train" for c in row.text}
    assert held_out and all(set(row.text) <= letters for row in held_out)
    for other in ("xq", "zz ab"):  # the dataset's own held-out row cannot be spelled, or is
        rows = [utterance(i, "ab ba") for i in range(9)] + [utterance(9, other, "held_out")]
        assert sum(row.split == "held_out" for row in hold_out(rows, ManifestConfig())) == 2


def test_held_out_rows_are_chosen_again_where_the_checks_reject_the_only_one(tmp_path):
    table = lines("c{i}|{t}")
    folder_of(tmp_path / "mine", [], **{"metadata.csv": table})
    (tmp_path / "mine" / "wavs").mkdir()
    config = ManifestConfig(language="en")
    for i in range(10):
        (tmp_path / "mine" / "wavs" / f"c{i}.wav").write_bytes(encoded(voice(2.0, seed=i)))
    before = read_dataset(tmp_path / "mine", config).rows
    (chosen,) = [row for row in before if row.split == "held_out"]
    Path(chosen.audio).write_bytes(b"no audio")
    report = check_dataset(tmp_path / "mine", config, tmp_path / "run")
    assert [finding.id for finding in report.refused] == [chosen.id]
    (again,) = [row for row in report.kept if row.split == "held_out"]
    assert again.id != chosen.id


# --- recordings ---------------------------------------------------------------------------------

NFC, NFD = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
PATHS = {
    "composed": (f"{NFC}.wav", f"wavs/{NFD}.wav"),
    "decomposed": (NFD, f"wavs/{NFC}.wav"),
    "capitals": ("x", "wavs/x.WAV"),
    "a backslash": ("wavs\\x.wav", "wavs/x.wav"),
    "a full path": ("/home/me/corpus/wavs/x.wav", "wavs/x.wav"),
    "a full path of Windows": ("D:\\corpus\\wavs\\x.wav", "wavs/x.wav"),
    "the folder": ("wavs/x.wav", "wavs/x.wav"),
    "another suffix": ("x.mp3", "wavs/x.wav"),
    "a dot in the name": ("x.1", "wavs/x.1.flac"),
    "a folder below": ("s1/x", "wavs/s1/x.ogg"),
    "a variable": ("$root/wavs/x.wav", "wavs/x.wav"),
}


@pytest.mark.parametrize("kind", PATHS)
def test_recordings_are_found_however_the_table_spells_them(tmp_path, kind):
    name, path = PATHS[kind]
    result = read(folder_of(tmp_path, [*wavs(3), path], **{"metadata.csv": f"{name}|{TEXTS[0]}\n"}))
    (row,) = result.rows
    assert Path(row.audio) == tmp_path / path and not Path(row.id).is_absolute()


def test_a_header_in_a_small_table_is_no_row(tmp_path):
    table = "file_name|transcription\n" + "".join(CSV[:5])
    result = read(folder_of(tmp_path, wavs(5), **{"metadata.csv": table}))
    assert [row.text for row in result.rows] == TEXTS[:5] and not result.refused


def test_what_is_missing_names_what_is_there(tmp_path):
    files = [*wavs(5), "wavs/s1/y.wav", "wavs/s2/y.wav", "wavs/z.sph", "rejected/q.wav"]
    bad = "".join(f"{name}|{TEXTS[9]}\n" for name in ("x", "y", "z", "q", "other/c1"))
    result = read(folder_of(tmp_path, files, **{"metadata.csv": "".join(CSV[:5]) + bad}))
    reasons = {finding.id: finding.reason for finding in result.refused}
    assert "c0.wav, c1.wav, c2.wav and 4 more" in reasons["x"]
    assert "s1/y.wav" in reasons["y"].replace("y, ", "y.wav, ") and "2 have" in reasons["y"]
    assert "z.sph" in reasons["z"] and "convert" in reasons["z"]
    assert "no recording" in reasons["q"] and "there is c1.wav" in reasons["other/c1"]
    assert len(result.rows) == 5


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".aiff", ".webm", ".M4A"])
def test_an_id_finds_every_format_that_can_be_read(tmp_path, suffix):
    result = read(folder_of(tmp_path, [f"wavs/c0{suffix}"], **{"metadata.csv": CSV[0]}))
    assert [(row.id, Path(row.audio).name) for row in result.rows] == [("c0", f"c0{suffix}")]


def test_a_format_that_needs_pyav_names_it_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    folder = folder_of(tmp_path / "mine", [*wavs(2)], **{"metadata.csv": "".join(CSV[:3])})
    (folder / "wavs/c2.m4a").write_bytes(b"\0\0\0\x18ftypM4A " + bytes(64))
    report = check_dataset(folder, ManifestConfig(**RULES), tmp_path / "run")
    (reason,) = [finding.reason for finding in report.refused if finding.id == "c2"]
    assert "pip install av" in reason


def test_recordings_may_be_in_a_folder_for_each_speaker(tmp_path):
    files = [f"audio/s{i % 2}/c{i}.wav" for i in range(10)]
    table = "name,speaker,text\n" + lines("c{i},{s},{t}")
    result = read(folder_of(tmp_path, files, **{"all.csv": table}))
    assert [Path(row.audio) for row in result.rows] == [tmp_path / name for name in files]
    assert [row.speaker for row in result.rows] == TWO


# --- texts in files of their own, tables in subfolders, JSON objects ----------------------------


def texts(pattern: str, content: str = "{t}\n") -> dict[str, str]:
    return {
        pattern.format(i=i, n=i % 2).replace("/", "__"): content.format(t=text)
        for i, text in enumerate(TEXTS)
    }


def clips(pattern: str) -> list[str]:
    return [pattern.format(i=i, n=i % 2) for i in range(10)]


JSON = {f"c{i}": text for i, text in enumerate(TEXTS)}
# name: (recordings, files, speakers)
TEXT_FILES = {
    "a text beside each": (clips("c{i}.wav"), texts("c{i}.txt"), ALL_ONE),
    "in a folder of its own": (
        clips("wav48/p{n}/p{n}_{i}.wav"),
        texts("txt/p{n}/p{n}_{i}.txt"),
        ["p0", "p1"] * 5,
    ),
    "two microphones": (
        clips("flac/p{n}/{i}_mic1.flac") + clips("flac/p{n}/{i}_mic2.flac"),
        texts("txt/p{n}/{i}.txt"),
        ["p0", "p1"] * 5,
    ),
    "the same names in the folders of two": (
        [f"s{n}/{i}.wav" for i in range(5) for n in range(2)],
        {f"s{n}__{i}.lab": TEXTS[2 * i + n] for i in range(5) for n in range(2)},
        TWO,
    ),
    "chapters of one": (clips("chapter {n}/c{i}.wav"), texts("chapter {n}/c{i}.txt"), ALL_ONE),
    "Whisper": (
        clips("c{i}.m4a"),
        {f"c{i}.json": json.dumps({"text": f" {t}", "segments": []}) for i, t in enumerate(TEXTS)},
        ALL_ONE,
    ),
    "LibriTTS": (
        clips("{n}/7/{n}_7_{i}.wav"),
        texts("{n}/7/{n}_7_{i}.normalized.txt") | texts("{n}/7/{n}_7_{i}.original.txt", "No. {t}"),
        ["0", "1"] * 5,
    ),
    "LibriSpeech": (
        clips("{n}/7/{n}-7-{i}.flac"),
        {
            f"{n}__7__{n}-7.trans.txt": "".join(
                f"{n}-7-{i} {text}\n" for i, text in enumerate(TEXTS) if i % 2 == n
            )
            for n in range(2)
        },
        ["0", "1"] * 5,
    ),
    "Kaldi's text alone": (wavs(), {"text": lines("c{i} {t}")}, ALL_ONE),
    "JSUT": (wavs(), {"transcript_utf8.txt": lines("c{i}:{t}")}, ALL_ONE),
    "Festival": (wavs(), {"etc__txt.done.data": lines('( c{i} "{t}" )')}, ALL_ONE),
    "a table for each speaker": (
        clips("s{n}/wavs/c{i}.wav"),
        {
            f"s{n}__metadata.csv": "".join(
                f"c{i}|{text}\n" for i, text in enumerate(TEXTS) if i % 2 == n
            )
            for n in range(2)
        },
        TWO,
    ),
    "an object of texts": (wavs(), {"metadata.json": json.dumps(JSON)}, ALL_ONE),
    "an object of objects": (
        wavs(),
        {"all.json": json.dumps({f"{k}.wav": {"text": v, "spk_id": 7} for k, v in JSON.items()})},
        ["7"] * 10,
    ),
    "a list in an object": (
        wavs(),
        {"a.json": json.dumps({"n": 1, "d": [{"wav": k, "text": v} for k, v in JSON.items()]})},
        ALL_ONE,
    ),
    "audio as an object": (
        wavs(),
        {"a.json": json.dumps([{"audio": {"path": k}, "text": v} for k, v in JSON.items()])},
        ALL_ONE,
    ),
    "how it is said": (
        wavs(),
        {
            "metadata.csv": "".join(
                f"{k}|{v}|{'sad' * ('a' in v) or 'happy'}\n" for k, v in JSON.items()
            )
        },
        ALL_ONE,
    ),
    "labels beside Festival's list": (
        clips("wav/c{i}.wav"),
        {"etc__txt.done.data": lines('( c{i} "{t}" )'), "lab__c1.lab": "#\n0.05 125 pau\n"},
        ALL_ONE,
    ),
    "AISHELL": (
        clips("wav/train/S0{n}/B9S0{n}W{i}.wav"),
        {"transcript__a.txt": lines("B9S0{n}W{i} {t}")},
        ["S00", "S01"] * 5,
    ),
    "MLS": (
        clips("train/audio/1{n}/7/1{n}_7_{i}.flac"),
        {
            "train__transcripts.txt": lines("1{n}_7_{i}\t{t}"),
            "train__segments.txt": lines("1{n}_7_{i}\thttp://x.org/y.mp3\t1.5\t4.{i}"),
        },
        ["10", "11"] * 5,
    ),
    "LibriTTS-R": (
        clips("1{n}/7/1{n}_7_{i}.wav"),
        texts("1{n}/7/1{n}_7_{i}.normalized.txt")
        | {"10__7__10_7.trans.tsv": lines("1{n}_7_{i}\tNo. {t}\t{t}")}
        | {"10__7__10_7.book.tsv": lines("1{n}_7_{i}\tNo. {t}\tx {t}\t0.5\t1.5")},
        ["10", "11"] * 5,
    ),
    "JVS": (
        [f"jvs{n}/parallel/wav/V_{i}.wav" for i in range(5) for n in range(2)],
        {
            f"jvs{n}__parallel__transcripts.txt": "".join(
                f"V_{i}:{TEXTS[2 * i + n]}\n" for i in range(5)
            )
            for n in range(2)
        },
        ["jvs0", "jvs1"] * 5,
    ),
    "M-AILABS": (
        clips("by_book/x/y/{n}male/s{n}/bk/wavs/c{i}.wav"),
        {
            f"by_book__x__y__{n}male__s{n}__bk__metadata.csv": "".join(
                f"c{i}|{text}|{text}\n" for i, text in enumerate(TEXTS) if i % 2 == n
            )
            for n in range(2)
        },
        ["0male", "1male"] * 5,
    ),
    "Emilia": (
        clips("EN/c{i}.mp3"),
        {
            f"EN__c{i}.json": json.dumps({"wav": f"EN/c{i}.mp3", "text": t, "speaker": f"s{i % 2}"})
            for i, t in enumerate(TEXTS)
        },
        TWO,
    ),
    "WhisperX": (
        clips("c{i}.wav"),
        {f"c{i}.json": json.dumps({"segments": [{"text": t}]}) for i, t in enumerate(TEXTS)},
        ALL_ONE,
    ),
    "SRT": (
        clips("c{i}.wav"),
        texts("c{i}.srt", "1\n00:00:00,000 --> 00:00:01,000\n{t}\n\n"),
        ALL_ONE,
    ),
    "VTT": (
        clips("c{i}.wav"),
        texts("c{i}.vtt", "WEBVTT\n\n00:00.00 --> 00:02.00\n{t}\n"),
        ALL_ONE,
    ),
    "Whisper's TSV": (
        clips("c{i}.wav"),
        texts("c{i}.tsv", "start\tend\ttext\n0\t9\t{t}\n"),
        ALL_ONE,
    ),
    "arrows": (wavs(), {"list.txt": lines("c{i}.wav -> {t}")}, ALL_ONE),
    "VITS": (
        clips("wav/p{n}/c{i}.wav"),
        {"filelists__all_train.txt": lines("DUMMY2/p{n}/c{i}.wav|{n}|{t}")},
        ["0", "1"] * 5,
    ),
    "GPT-SoVITS": (
        clips("output/slicer_opt/a.wav_{i}.wav"),
        {"output__asr_opt__slicer_opt.list": lines("output\\slicer_opt\\a.wav_{i}.wav|vo|en|{t}")},
        ["vo"] * 10,
    ),
    "Kaldi's spk2utt": (
        wavs(),
        {
            "wav.scp": lines("u{i} wavs/c{i}.wav"),
            "text": lines("u{i} {t}"),
            "spk2utt": "s0 u0 u2 u4 u6 u8\ns1 u1 u3 u5 u7 u9\n",
        },
        TWO,
    ),
    "Label Studio": (
        clips("upload/ab-c{i}.wav"),
        {
            "project.json": json.dumps(
                [
                    {"audio": f"/data/upload/1/ab-c{i}.wav", "id": i + 1, "transcription": t}
                    for i, t in enumerate(TEXTS)
                ]
            )
        },
        ALL_ONE,
    ),
    "Common Voice 17's columns": (
        clips("audios/c{i}.mp3"),
        {
            "all.tsv": "client_id\tpath\tsentence_id\tsentence\tsentence_domain\n"
            + lines("{s}\tc{i}.mp3\tf{i}\t{t}\t"),
            "invalidated.tsv": "path\tsentence\n" + lines("c{i}.mp3\tnot {t}"),
        },
        TWO,
    ),
    "copies of the table": (
        wavs(),
        {"metadata.csv": lines("c{i}|{t}"), "metadata (1).csv": lines("c{i}|old {t}")},
        ALL_ONE,
    ),
    "separators at the end of some": (
        wavs(),
        {
            "metadata.csv": "".join(
                f"{k}|{v}{'|' * (i % 2)}\n" for i, (k, v) in enumerate(JSON.items())
            )
        },
        ALL_ONE,
    ),
    "a voice to imitate": (
        [*wavs(), "ref.wav"],
        {"a.csv": "ref_audio,audio,text\n" + lines("ref.wav,wavs/c{i}.wav,{t}")},
        ALL_ONE,
    ),
    "a description in JSON": (
        wavs(),
        {"a.jsonl": lines('{{"audio": "wavs/c{i}.wav", "text_style": "x", "my_text": "{t}"}}')},
        ALL_ONE,
    ),
    "phonemes beside the text": (
        wavs(),
        {"metadata.csv": "audio|phonemized_text|text\n" + lines("c{i}|ðə dˈɔɡ {i}|{t}")},
        ALL_ONE,
    ),
}


@pytest.mark.parametrize("kind", TEXT_FILES)
def test_a_text_is_that_of_its_recording(tmp_path, kind):
    recordings, files, speakers = TEXT_FILES[kind]
    dataset = read(folder_of(tmp_path, recordings, **files))
    assert not dataset.refused
    rows = sorted(dataset.rows, key=lambda row: TEXTS.index(row.text))
    assert [row.text for row in rows] == TEXTS and len({row.id for row in rows}) == 10
    assert [row.speaker for row in rows] == speakers
    assert [Path(row.audio) for row in rows] == [tmp_path / name for name in recordings[:10]]
    assert {row.split for row in rows} == {"train"}


NO_TEXTS = {
    "IPA": {"metadata.csv": lines("c{i}|ðə dˈɔɡ ɹˈæn {i}|0")},
    "IPA in JSON": {"a.jsonl": lines('{{"audio": "wavs/c{i}.wav", "text": "wˈɜːdz {i}"}}')},
    "ARPABET": {"metadata.csv": lines("c{i}|{{HH AH0 L OW1}} {{W ER1 L D {i}}}")},
    "pinyin": {"metadata.csv": lines("c{i}|jin1 tian1 hao{n}")},
    "tags": {"metadata.csv": lines("c{i}|<speak>{t}</speak>")},
    "labels of speakers": texts("wavs/c{i}.txt", "SPEAKER_00: {t}"),
    "times in brackets": texts("wavs/c{i}.txt", "[00:01] {t}"),
    "its own name": texts("wavs/c{i}.txt", "c0.wav\n{t}"),
    "a line of a table for each": {f"wavs__c{i}.txt": f"c{i}: {t}" for i, t in enumerate(TEXTS)},
    "JSON in .txt": texts("wavs/c{i}.txt", '{{"text": "{t}"}}'),
    "speakers alone": {"metadata.csv": lines("c{i}|{s}")},
    "entities": {"metadata.csv": lines("c{i}|{t} &amp; more")},
    "empty cells of pandas": {"metadata.csv": "audio,text\n" + lines("c{i}.wav,NaN")},
    "errors of Excel": {"metadata.csv": "audio,text\n" + lines("c{i}.wav,#NAME?")},
    "names of files": {"metadata.csv": "audio,text_file\n" + lines("c{i}.wav,txt/c{i}.txt")},
    "subtitles called .txt": texts("wavs/c{i}.txt", "1\n00:00:00,000 --> 00:00:02,000\n{t}\n"),
    "labels with commas": texts("wavs/c{i}.txt", "0,000\t2,000\t{t}\n"),
    "RTF": texts("wavs/c{i}.txt", "{{\\rtf1 {t}}}"),
    "a table for each": texts("wavs/c{i}.txt", "x|{t}\n"),
    "two texts for a recording": {"metadata.csv": lines("c{i}|{t}") + lines("c{i}.wav|not {t}")},
    "parts of one recording": {"m.csv": "file,start,end,text\n" + lines("c0.wav,{i},9,{t}")},
    "parts in JSON": {"m.json": lines('{{"audio_filepath": "c0", "offset": {i}, "text": "{t}"}}')},
    "two lines in Kaldi's text": {
        "wav.scp": lines("u{i} wavs/c{i}.wav"),
        "text": lines("u{i} {t}") + lines("u{i} not {t}"),
    },
    "commas in an unquoted text": {"metadata.csv": "audio,text\n" + lines("c{i}.wav,{t}, and")},
    "what listeners refused": {"invalidated.tsv": "path\tsentence\n" + lines("c{i}.wav\t{t}")},
    "two columns of recordings": {"metadata.csv": lines("c{i}|c{n}{i}|{t}")},
}


@pytest.mark.parametrize("kind", NO_TEXTS)
def test_what_is_no_text_is_not_trained(tmp_path, kind):
    files = [*wavs(), *[f"wavs/c{i % 2}{i}.wav" for i in range(10) if "two columns" in kind]]
    folder = folder_of(tmp_path, files, **NO_TEXTS[kind])
    try:
        assert not read(folder).rows
    except DatasetError as error:
        assert str(folder) in str(error) or "COLUMNS" in str(error)


def test_phonemes_are_read_where_the_user_says_so(tmp_path):
    folder = folder_of(tmp_path, wavs(), **{"metadata.csv": lines("c{i}|ðə dˈɔɡ {i}")})
    assert len(read(folder, columns="audio|text").rows) == 10


def test_a_name_in_two_folders_is_a_question(tmp_path):
    files = [f"{folder}/{i}.wav" for folder in "ab" for i in range(5)]
    table = "".join(f"{i}|{TEXTS[i]}\n" for i in range(5))
    folder = folder_of(tmp_path, files, **{"metadata.csv": table})
    result = read(folder)
    assert not result.rows and "a/0.wav, b/0.wav" in result.refused[0].reason
    assert "audio_root" in result.refused[0].cure
    assert len(read(folder, audio_root=str(folder / "b")).rows) == 5


def test_names_that_differ_in_capitals_alone_are_two_recordings(tmp_path):
    table = f"Ab|{TEXTS[0]}\nwavs\\aB.wav|{TEXTS[1]}\nAB|{TEXTS[2]}\n"
    folder = folder_of(tmp_path / "a", ["wavs/Ab.wav", "wavs/aB.wav"], **{"metadata.csv": table})
    if len(list((folder / "wavs").iterdir())) < 2:
        pytest.skip("this disk does not tell capitals from small letters")
    result = read(folder)
    assert [(Path(r.audio).name, r.text) for r in result.rows] == [
        ("Ab.wav", TEXTS[0]), ("aB.wav", TEXTS[1])
    ]  # fmt: skip
    (refused,) = result.refused
    assert refused.id == "AB" and "Ab.wav, aB.wav" in refused.reason
    own = folder_of(tmp_path / "b", ["Ab.wav", "aB.wav"], **{"Ab.txt": TEXTS[0]})
    assert [row.id for row in read(own).rows] == ["Ab"] and "aB.txt" in read(own).refused[0].reason


def test_a_second_table_that_is_not_read_is_named(tmp_path):
    tables = {"metadata.csv": "".join(CSV[:5]), "metadata_more.csv": "".join(CSV[5:])}
    result = read(folder_of(tmp_path, wavs(), **tables))
    assert [row.text for row in result.rows] == TEXTS[:5]
    assert result.layout == "LJSpeech: metadata.csv; not read: metadata_more.csv"


def test_linked_folders_are_searched_and_circles_left(tmp_path):
    table = "path,text\n" + lines("c{i},{t}")
    folder = folder_of(tmp_path / "mine", [], **{"audio__list.csv": table})
    folder_of(tmp_path / "away", wavs())
    (folder / "audio" / "x").symlink_to(tmp_path / "away")
    (tmp_path / "away" / "circle").symlink_to(tmp_path / "away")
    assert len(read(folder).rows) == 10


def test_folders_say_the_split_of_their_texts(tmp_path):
    folder = folder_of(tmp_path, clips("{i}/a.wav"), **texts("{i}/a.txt"))
    (folder / "9").rename(folder / "dev-clean")
    assert [r.split for r in read(folder).rows if r.text == TEXTS[9]] == ["held_out"]


def test_what_has_no_text_or_only_times_is_reported(tmp_path):
    files = texts("c{i}.txt") | {"c8.txt": "0.000\t1.200\thello\n", "c9.txt": b"\xff\xff"}
    dataset = read(folder_of(tmp_path, [*clips("c{i}.wav"), "x.wav"], **files))
    reasons = {finding.file: finding.reason for finding in dataset.refused}
    assert reasons.keys() == {tmp_path.name, "c8.txt", "c9.txt"} and len(dataset.rows) == 8
    assert "x.txt" in reasons[tmp_path.name] and "times" in reasons["c8.txt"]
    assert "UTF-8" in reasons["c9.txt"]


def test_texts_of_something_else_are_no_dataset(tmp_path):
    files = {"README.txt": "All of it is free.\n", "config.json": '{"audio": "yes", "text": "no"}'}
    with pytest.raises(DatasetError, match=r"c0\.txt"):
        read(folder_of(tmp_path, wavs(), **files))
    (tmp_path / "text").write_text("none of it\nis a name\n")
    (tmp_path / "wav.scp").mkdir()
    with pytest.raises(DatasetError):
        read(tmp_path)


# --- Parquet ------------------------------------------------------------------------------------


def row_of(i: int) -> dict:
    audio = {"bytes": encoded(voice(1.0, seed=i)), "path": f"{i}.wav"}
    return {"audio": audio, "sentence": TEXTS[i], "speaker_id": i % 2}


class StandIn:
    """In place of pyarrow's ParquetFile where there is no pyarrow; the file lists its rows."""

    def __init__(self, path: Path):
        self.numbers = json.loads(path.read_text())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def iter_batches(self, batch_size: int):
        for i in self.numbers:
            yield types.SimpleNamespace(to_pylist=lambda i=i: [row_of(i)])


@pytest.fixture
def parquet_folder(tmp_path, monkeypatch):
    """As the hub keeps a dataset: data/train-00000-of-00002.parquet and others."""
    parts = {"train-00000-of-00002": range(4), "train-00001-of-00002": range(4, 8)}
    parts["validation-00000-of-00001"] = range(8, 10)
    names = [f"data/{name}.parquet" for name in parts]
    folder = folder_of(tmp_path / "mine", names)
    if importlib.util.find_spec("pyarrow"):
        import pyarrow.parquet

        for name, numbers in zip(names, parts.values()):
            table = pyarrow.Table.from_pylist([row_of(i) for i in numbers])
            pyarrow.parquet.write_table(table, folder / name, row_group_size=2)
        return folder
    for name, numbers in zip(names, parts.values()):
        (folder / name).write_text(json.dumps(list(numbers)))
    package, module = types.ModuleType("pyarrow"), types.ModuleType("pyarrow.parquet")
    package.parquet, package.ArrowException, module.ParquetFile = module, ValueError, StandIn
    monkeypatch.setitem(sys.modules, "pyarrow", package)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", module)
    return folder


def test_parquet_files_with_audio_are_unpacked(tmp_path, parquet_folder):
    folder = fetch_dataset(parquet_folder, tmp_path / "into")
    result = read(folder)
    assert not result.refused and [row.text for row in result.rows] == TEXTS
    assert [row.speaker for row in result.rows] == [str(i % 2) for i in range(10)]
    assert [row.split for row in result.rows] == ["train"] * 8 + ["held_out"] * 2
    assert all(Path(row.audio).read_bytes()[:4] == b"RIFF" for row in result.rows)
    assert fetch_dataset(parquet_folder, tmp_path / "into") == folder
    assert {path.name for path in parquet_folder.iterdir()} == {"data"}


def test_without_pyarrow_the_command_that_installs_it_is_named(
    tmp_path, parquet_folder, monkeypatch
):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DatasetError, match="pip install datasets"):
        fetch_dataset(parquet_folder, tmp_path / "into")


# --- the data report ----------------------------------------------------------------------------


def test_the_report_begins_with_hours_and_the_commonest_reasons():
    def finding(line: int, kind: str) -> Finding:
        return Finding(
            file="metadata.csv", line=line, id=f"r{line}", kind=kind, reason=f"why {kind}"
        )

    kinds = ["silent"] * 4 + ["missing"] * 3 + ["clipped"] * 2 + ["noisy"]
    kept = [dataclasses.replace(utterance(i, "a"), seconds=3600) for i in range(10)]
    refused = [finding(i, kind) for i, kind in enumerate(kinds, 1)]
    report = DataReport(layout="x", kept=kept, refused=refused, warned=[])
    first, *reasons = report.summary()
    assert (
        "10.00 hours kept in 10 utterances" in first and "10.00 hours (50.00 %) lost in 10" in first
    )
    assert [(r.split()[0], r.split(":")[0].split(", ")[1]) for r in reasons] == [
        ("4", "silent"), ("3", "missing"), ("2", "clipped")
    ]  # fmt: skip
    assert "metadata.csv:1 r1" in reasons[0] and "why silent" in reasons[0]
