"""From real bytes to rows: every layout one way, every unusable line a finding with its fix."""

from pathlib import Path

import folders
import pytest
from clips import TEXT, encoded, voice
from folders import ALL_ONE, CSV, TEXTS, TWO, folder_of, lines, read, rows_of, texts, wavs
from helpers import dataset, speech

from kit.base.errors import DatasetError
from kit.dataset.checks import check_dataset
from kit.dataset.data_report import Finding
from kit.dataset.layouts import hold_out, read_dataset
from kit.dataset.manifest import Utterance
from kit.settings import ManifestConfig
from kit.streams.stream import is_held_out

LOOSE = ManifestConfig(held_out_percent=0)
HEADER = "client_id\tpath\tsentence\tup_votes\n"


def noted(tmp_path, table: str | bytes) -> tuple[dict, list[Finding]]:
    """Texts by id that are kept of `table`, and what is refused; there is one recording, `a`."""
    result = read_dataset(dataset(tmp_path, table, {"a": speech()}), LOOSE)
    return {row.id: row.text for row in result.rows}, result.refused


def common_voice(folder, **tables: str | bytes):
    """A Common Voice folder with the recordings a.mp3 to d.mp3; they are only looked for."""
    tables = {f"{name}.tsv": table for name, table in tables.items()}
    return folder_of(folder, [f"clips/{name}.mp3" for name in "abcd"], **tables)


# --- LJSpeech and Common Voice ------------------------------------------------------------------


LJSPEECH_ROWS = [
    (f"b|{TEXT}\n", "no recording wavs/b.wav"),
    (f"|{TEXT}\n", "inside wavs/, got ''"),
    ("a|।...\n", "the text is empty"),
    (f"/etc/passwd|{TEXT}\n", "inside wavs/"),
    (f"x/../../a|{TEXT}\n", "inside wavs/"),
    (f"..\\a|{TEXT}\n", "inside wavs/"),
    (f".|{TEXT}\n", "inside wavs/"),
    (f"a\0|{TEXT}\n", "a NUL byte"),
    (b"a|caf\xe9 caf\xe9\n", "not valid UTF-8: invalid continuation byte at byte 5"),
    (f"a|{TEXT}\rb|{TEXT}\n", "between what looks like two rows"),
    (f"{'x' * 300}|{TEXT}\n", "no recording"),
]
COMMON_VOICE_ROWS = [
    ("x\ta.mp3\tone two\n", "4 columns expected"),
    ("x\te.mp3\tone two\t1\n", "no recording clips/e.mp3"),
    (b"x\ta.mp3\tcaf\xe9\t1\n", "UTF-8"),
]
# Of each kind: a recording, its table, what is above the bad row, and a good one below it.
KINDS = {
    "LJSpeech": ("wavs/a.wav", "metadata.csv", "", f"a|{TEXT}\n"),
    "Common Voice": ("clips/a.mp3", "validated.tsv", HEADER, f"x\ta.mp3\t{TEXT}\t1\r\n"),
}
ROWS = [("LJSpeech", *row) for row in LJSPEECH_ROWS]
ROWS += [("Common Voice", *row) for row in COMMON_VOICE_ROWS]


@pytest.mark.parametrize(("kind", "bad", "reason"), ROWS, ids=ascii)
def test_every_unusable_row_names_table_line_and_fix(tmp_path, kind, bad, reason):
    recording, name, head, good = KINDS[kind]
    bad = bad if isinstance(bad, bytes) else bad.encode()
    table = f"\ufeff{head}".encode() + bad + good.encode()
    result = read_dataset(folder_of(tmp_path, [recording], **{name: table}), LOOSE)
    assert [row.id for row in result.rows] == ["a"]
    (refusal,) = result.refused
    assert reason in refusal.reason and refusal.cure
    assert (refusal.file, refusal.line) == (name, 2 if head else 1)


# No newline at the end, a byte order mark, empty lines, an id with a suffix, a normalised text ...
HARMLESS = [f"a|{TEXT}", f"\ufeffa|{TEXT}\n", f"\r\n\n  \na|{TEXT}\r\n\n", f"a.wav|{TEXT}\n"]
HARMLESS += [f"a|not {TEXT}|{TEXT}\n", f"a|{TEXT}\n".encode("utf-16")]


@pytest.mark.parametrize("table", HARMLESS, ids=repr)
def test_harmless_variations_are_read(tmp_path, table):
    kept, refused = noted(tmp_path, table)
    assert list(kept.values()) == [TEXT] and not refused


def test_quotes_and_odd_line_separators_do_not_merge_rows(tmp_path):
    lines = ['a|"ሰላም', "b|ሰላም\u2028ለሁሉ\u0085ሰው", "c|ሰላም\x0bለሁሉ", "d|ሰላም\rለሁሉ", "001|ሰላም", "NA|ሰላም"]
    names = ["a", "b", "c", "d", "001", "NA"]
    result = read_dataset(dataset(tmp_path, "\n".join(lines), {n: speech() for n in names}), LOOSE)
    assert [(row.line, row.id) for row in result.rows] == list(enumerate(names, 1))
    assert not result.refused


def test_a_repeated_id_is_kept_once_and_says_where_the_first_is(tmp_path):
    kept, (refusal,) = noted(tmp_path, f"a|{TEXT}\na|{TEXT}\n")
    assert kept == {"a": TEXT} and refusal.line == 2
    assert refusal.reason == "this id is already used in metadata.csv, line 1"
    kept, refused = noted(tmp_path, f"a|{TEXT}\na|ሌላ\n")  # nobody knows which is right
    assert not kept and sorted(finding.line for finding in refused) == [1, 2]


def test_a_common_voice_folder(tmp_path):
    rows = f'cafe{"0" * 124}\ta.mp3\t"ሰላም" ለሁሉ ሰው\t2\nbeef{"1" * 124}\tb.mp3\t{TEXT}\t2\n'
    result = read_dataset(common_voice(tmp_path, validated=HEADER + rows), LOOSE)
    assert result.layout == "validated.tsv (speaker|audio|text|-)"
    assert not result.refused
    rows = [(row.id, row.text, row.line, row.split) for row in result.rows]
    assert rows == [("a", TEXT, 2, "train"), ("b", TEXT, 3, "train")]
    assert [row.speaker for row in result.rows] == ["cafe00000000", "beef11111111"]
    assert result.rows[0].audio == str(tmp_path / "clips" / "a.mp3")


def test_common_voice_splits_are_kept_and_a_table_can_be_asked_for(tmp_path):
    row = lambda name: f"{HEADER}x\t{name}.mp3\t{TEXT}\t1\n"  # noqa: E731
    tables = {"train": "a", "dev": "b", "test": "c", "validated": "d"}
    folder = common_voice(tmp_path, **{name: row(clip) for name, clip in tables.items()})
    result = read_dataset(folder, ManifestConfig(held_out_percent=100))
    assert {r.id: r.split for r in result.rows} == {"a": "train", "b": "held_out", "c": "test"}
    assert result.layout.startswith("train.tsv, dev.tsv, test.tsv (")
    assert result.layout.endswith("not read: validated.tsv")
    assert [r.id for r in read_dataset(folder / "validated.tsv", LOOSE).rows] == ["d"]


# --- any layout ---------------------------------------------------------------------------------


WITHOUT_TEXTS = [
    ({}, "my clips.*found no folder"),
    ({"wavs/a.wav": b"", "wavs/b.wav": b""}, "2 recordings.*transcribe"),
    ({"a.wav": b"", "a": b"some words"}, "1 recordings.*metadata.csv"),
    ({"a.wav": b"", "t.xlsx": b"PK\x03\x04zip"}, "exported as CSV.*t.xlsx"),
    ({"a.wav": b"", "t.csv": b"\x1f\x8b\x08"}, "t.csv.*gunzip"),
    ({"a.wav": b"", "t.csv": b"version https://git-lfs.github.com/spec/v1\n"}, "git lfs pull"),
    ({"a.wav": b"", "m.json": b'[{"audio": "a"}]'}, "json needs COLUMNS.*m.json"),
    ({"wavs/a.wav": b"", "metadata.csv": b"\r\n \n"}, "metadata.csv has 4 bytes and no rows"),
    ({"clips/a.mp3": b"", "validated.tsv": HEADER}, "validated.tsv has no rows below"),
]


@pytest.mark.parametrize(("files", "facts"), WITHOUT_TEXTS)
def test_a_folder_without_texts_says_what_to_do(tmp_path, files, facts):
    folder = folder_of(tmp_path / "my clips", [], **files)
    with pytest.raises(DatasetError, match=rf"(?s){facts}"):
        read_dataset(folder, LOOSE)


@pytest.mark.parametrize(("count", "wanted"), [(1, 0), (2, 1), (40, 4), (120, 7)])
def test_of_few_recordings_some_are_held_out(tmp_path, count, wanted):
    table = "".join(f"a{i}|{TEXT}\n" for i in range(count))
    folder = folder_of(tmp_path, wavs(count, "wavs/a{}.wav"), **{"metadata.csv": table})
    result = [r.id for r in read_dataset(folder, ManifestConfig()).rows if r.split == "held_out"]
    assert len(result) == wanted >= sum(is_held_out(f"a{i}", 2) for i in range(count))
    assert not any(r.split == "held_out" for r in read_dataset(folder, LOOSE).rows)


def test_splits_that_are_not_for_training_and_tables_that_are_not_read_are_named(tmp_path):
    tables = {"metadata.csv": "".join(CSV[:5]), "metadata_more.csv": "".join(CSV[5:])}
    result = read(folder_of(tmp_path / "mine", wavs(), **tables))
    assert [row.text for row in result.rows] == TEXTS[:5]
    assert result.layout == "metadata.csv (id|text); not read: metadata_more.csv"
    tables = {"metadata_anna.csv": "".join(CSV[:8]), "metadata_ben.csv": "".join(CSV[8:])}
    with pytest.raises(DatasetError, match=r"`anna` \(8 rows\), `ben` \(2 rows\).*train\.csv"):
        check_dataset(folder_of(tmp_path / "a", wavs(), **tables), ManifestConfig(), tmp_path / "b")


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


def test_texts_of_something_else_are_no_dataset(tmp_path):
    files = {"README.txt": "All of it is free.\n", "config.json": '{"audio": "yes", "text": "no"}'}
    with pytest.raises(DatasetError, match=r"c0\.txt"):
        read(folder_of(tmp_path, wavs(), **files))
    with pytest.raises(DatasetError, match=r"c0\.wav is not a dataset.*found no folder"):
        read(tmp_path / "wavs/c0.wav")
    header = "path\tsentence\n"
    folder_of(tmp_path, [], **{"invalidated.tsv": header + lines("c{i}.wav\t{t}")})
    with pytest.raises(DatasetError, match="not a dataset"):
        read(tmp_path)


# --- a text beside each recording -----------------------------------------------------------------


def test_a_text_is_that_of_the_recording_beside_it(tmp_path):
    folders.require_rows(tmp_path / "a", rows_of("c{i}.m4a"), texts("c{i}.txt"), ALL_ONE)
    files = texts("s{n}/c{i}.txt")
    folders.require_rows(tmp_path / "b", rows_of("s{n}/c{i}.wav"), files, ALL_ONE)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/speaker").symlink_to(tmp_path / "a")
    (tmp_path / "a/circle").symlink_to(tmp_path / "a")
    assert len(read(tmp_path / "linked").rows) == 10
    folder_of(tmp_path / "c", rows_of("{i}/a.wav"), **texts("{i}/a.txt"))
    (tmp_path / "c/9").rename(tmp_path / "c/dev-clean")
    assert [r.split for r in read(tmp_path / "c").rows if r.text == TEXTS[9]] == ["held_out"]


def test_what_has_no_text_or_something_else_in_it_is_reported(tmp_path):
    files = texts("c{i}.txt") | {"c5.txt": f"c5: {TEXTS[5]}", "c6.txt": "x|words"}
    files |= {"c7.txt": "1\n00:00:00,000 --> 00:00:02,000\nhello\n"}
    files |= {"c8.txt": "0.000\t1.200\thello\n", "c9.txt": b"\xff\xff"}
    dataset = read(folder_of(tmp_path, [*rows_of("c{i}.wav"), "x.wav"], **files))
    reasons = {finding.file: finding.reason for finding in dataset.refused}
    assert reasons.keys() == {tmp_path.name, *(f"c{i}.txt" for i in range(5, 10))}
    assert "x.txt" in reasons[tmp_path.name] and "UTF-8" in reasons["c9.txt"]
    assert len(dataset.rows) == 5


# --- speakers -------------------------------------------------------------------------------------

# What folders look like, and the speaker of each recording where folders are speakers.
FOLDERS = {
    "below wavs/": ("wavs/s{n}/c{i}.wav", {"metadata.csv": lines("s{n}/c{i}|{t}")}),
    "with a text each": ("s{n}/book {h}/c{i}.wav", texts("s{n}/book {h}/c{i}.txt")),
    "below splits": ("train-clean/s{n}/c{i}.wav", texts("train-clean/s{n}/c{i}.txt")),
    "with a table each": (
        "s{n}/wavs/c{i}.wav",
        {f"s{n}/metadata.csv": "".join(CSV[n::2]) for n in (0, 1)},
    ),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_folders_are_speakers_only_where_the_user_says_so(tmp_path, kind):
    recordings, files = FOLDERS[kind]
    folder = folder_of(tmp_path, rows_of(recordings), **files)
    if "table" in kind:
        with pytest.raises(DatasetError, match=r"several datasets \(s0, s1\).*--speakers"):
            read(folder)
    else:
        assert {row.speaker for row in read(folder).rows} == {"speaker"}
    rows = sorted(read(folder, speakers="folder").rows, key=lambda row: TEXTS.index(row.text))
    assert [row.speaker for row in rows] == TWO and len({row.id for row in rows}) == 10


def test_held_out_rows_are_chosen_again_where_the_checks_reject_the_only_one(tmp_path):
    files = {f"wavs/c{i}.wav": encoded(voice(2.0, seed=i)) for i in range(10)}
    folder_of(tmp_path / "mine", [], **files, **{"metadata.csv": lines("c{i}|{t}")})
    config = ManifestConfig(language="en")
    before = read_dataset(tmp_path / "mine", config).rows
    (chosen,) = [row for row in before if row.split == "held_out"]
    Path(chosen.audio).write_bytes(b"no audio")
    report = check_dataset(tmp_path / "mine", config, tmp_path / "run")
    assert [finding.id for finding in report.refused] == [chosen.id]
    (again,) = [row for row in report.kept if row.split == "held_out"]
    assert again.id != chosen.id


def test_held_out_rows_of_a_script_with_thousands_of_letters_may_have_letters_of_their_own():
    texts = [chr(0x4E00 + 3 * i) + chr(0x4E00 + 3 * i + 1) for i in range(40)]
    rows = hold_out([utterance(i, t) for i, t in enumerate(texts)], ManifestConfig())
    assert sum(row.split == "held_out" for row in rows) >= 4


def test_an_id_that_is_not_utf_8_can_be_written_to_the_report(tmp_path):
    table = f"a|{TEXT}\n".encode() + b"caf\xe9|x y\n"
    report = check_dataset(dataset(tmp_path, table, {"a": speech()}), LOOSE, tmp_path / "run")
    assert [finding.id for finding in report.refused] == ["caf?"]
    assert "caf?" in (tmp_path / "run/ledger.jsonl").read_text(encoding="utf-8")


def test_a_link_out_of_the_folder_is_the_users_own_wish(tmp_path):
    folder = folder_of(tmp_path / "mine", [], **{"metadata.csv": f"a|{TEXT}\n"})
    (folder / "wavs").symlink_to(dataset(tmp_path / "away", "", {"a": speech()}) / "wavs")
    assert [r.id for r in read_dataset(folder, LOOSE).rows] == ["a"]
    result = read(folder, speakers="folder")
    assert not result.rows and "SPEAKERS" in result.refused[0].cure
