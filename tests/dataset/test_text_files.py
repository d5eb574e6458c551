"""Texts in files of their own, and folders as other tools write them: texts and speakers."""

import json
from pathlib import Path

import folders
import pytest
from folders import SPLIT_OF, TEXTS, TWO, folder_of, half, lines, parts, read, rows_of, texts, wavs

from kit.base.errors import DatasetError
from kit.dataset.fetch import fetch_dataset


def test_kaldi_folders_with_speakers(tmp_path):
    tables = {}
    for number, split in enumerate(("train", "dev")):
        audio = "u{i} /exp/corpus/data/" + split + "/c{i}.wav"
        for name, row in (("wav.scp", audio), ("text", "u{i} {t}"), ("utt2spk", "u{i} {s}")):
            tables[f"data/{split}/{name}"] = parts(row)[number]
    files = [f"data/{'dev' if i > 7 else 'train'}/c{i}.wav" for i in range(10)]
    result = read(fetch_dataset(folder_of(tmp_path, files, **tables), tmp_path / "into"))
    assert not result.refused
    rows = {row.text: (row.speaker, row.split) for row in result.rows}
    assert rows == {t: (TWO[i], SPLIT_OF[t]) for i, t in enumerate(TEXTS)}


def test_librispeech_folders_with_speakers_and_splits(tmp_path):
    files, tables = [], {"SPEAKERS.TXT": b"; ID | SEX | SUBSET\n0 | F | train-clean\n"}
    for i, text in enumerate(TEXTS):
        place = f"{'dev' if i > 7 else 'train'}-clean/{i % 2}/7/{i % 2}-7"
        files.append(f"{place}-{i}.flac")
        table = f"{place}.trans.txt"
        tables[table] = tables.get(table, b"") + f"{i % 2}-7-{i} {text}\n".encode()
    tables["train-clean/0/7/0-7.trans.txt"] += b"0-7-99\n0-7-98 caf\xe9\n"
    folder = folder_of(tmp_path / "LibriSpeech", files, **tables)
    result = read(fetch_dataset(tmp_path, tmp_path / "into"))
    rows = {row.text: (row.speaker, row.split) for row in result.rows}
    assert rows == {t: (str(i % 2), SPLIT_OF[t]) for i, t in enumerate(TEXTS)}
    assert {Path(finding.file).name for finding in result.refused} == {"0-7.trans.txt"}
    assert [finding.line for finding in result.refused] == [6, 5]
    assert "UTF-8" in result.refused[0].reason and "text is empty" in result.refused[1].reason
    alone = read(folder / "dev-clean").rows  # a part that is given by itself is trained on
    assert {row.split for row in alone} == {"train"} and len(alone) == 2


JSON = {f"c{i}": text for i, text in enumerate(TEXTS)}
LABEL_STUDIO = '{{"audio": "/data/upload/1/ab-c{i}.wav", "id": 1{i}, "transcription": "{t}"}},'
CV_17 = "client_id\tpath\tsentence_id\tsentence\tsentence_domain\n"
# name: (speakers, recordings, {file: its rows}, whole files); see `rows_of`
TEXT_FILES = {
    "in a folder of its own": ("p0 p1", "wav/p{n}/p{n}_{i}.wav", {"txt/p{n}/p{n}_{i}.txt": "{t}"}),
    "two microphones": (
        "p0 p1",
        "flac/p{n}/{i}_mic1.flac; flac/p{n}/{i}_mic2.flac",
        {"txt/p{n}/{i}.txt": "{t}"},
    ),
    "the same names in the folders of two": ("s0 s1", "s{n}/{h}.wav", {"s{n}/{h}.lab": "{t}"}),
    "chapters of one": ("speaker", "chapter {n}/c{i}.wav", {"chapter {n}/c{i}.txt": "{t}"}),
    "Whisper": ("speaker", "c{i}.m4a", {"c{i}.json": '{{"text": " {t}", "segments": []}}'}),
    "LibriTTS": (
        "0 1",
        "{n}/7/{n}_7_{i}.wav",
        {"{n}/7/{n}_7_{i}.normalized.txt": "{t}", "{n}/7/{n}_7_{i}.original.txt": "No. {t}"},
    ),
    "LibriSpeech": ("0 1", "{n}/7/{n}-7-{i}.flac", {"{n}/7/{n}-7.trans.txt": "{n}-7-{i} {t}"}),
    "a table for each speaker": ("s0 s1", "s{n}/wavs/c{i}.wav", {"s{n}/metadata.csv": "c{i}|{t}"}),
    "an object of objects": (
        "7",
        "wavs/c{i}.wav",
        {},
        {"all.json": json.dumps({f"{k}.wav": {"text": v, "spk_id": 7} for k, v in JSON.items()})},
    ),
    "labels beside Festival's list": (
        "speaker",
        "wav/c{i}.wav",
        {"etc/txt.done.data": '( c{i} "{t}" )'},
        {"lab/c1.lab": "#\n0.05 125 pau\n"},
    ),
    "AISHELL": ("S00 S01", "wav/train/S0{n}/B9S0{n}W{i}.wav", {"tr/a.txt": "B9S0{n}W{i} {t}"}),
    "MLS": (
        "10 11",
        "train/audio/1{n}/7/1{n}_7_{i}.flac",
        {
            "train/transcripts.txt": "1{n}_7_{i}\t{t}",
            "train/segments.txt": "1{n}_7_{i}\thttp://x.org/y.mp3\t1.5\t4.{i}",
        },
    ),
    "LibriTTS-R": (
        "10 11",
        "1{n}/7/1{n}_7_{i}.wav",
        {
            "1{n}/7/1{n}_7_{i}.normalized.txt": "{t}",
            "10/7/10_7.trans.tsv": "1{n}_7_{i}\tNo. {t}\t{t}",
            "10/7/10_7.book.tsv": "1{n}_7_{i}\tNo. {t}\tx {t}\t0.5\t1.5",
        },
    ),
    "JVS": ("jvs0 jvs1", "jvs{n}/a/wav/V_{h}.wav", {"jvs{n}/a/transcripts.txt": "V_{h}:{t}"}),
    "M-AILABS": (
        "0male 1male",
        "by_book/x/y/{n}male/s{n}/bk/wavs/c{i}.wav",
        {"by_book/x/y/{n}male/s{n}/bk/metadata.csv": "c{i}|{t}|{t}"},
    ),
    "Emilia": (
        "s0 s1",
        "EN/c{i}.mp3",
        {"EN/c{i}.json": '{{"wav": "EN/c{i}.mp3", "text": "{t}", "speaker": "{s}"}}'},
    ),
    "VITS": ("0 1", "wav/p{n}/c{i}.wav", {"a/all_train.txt": "DUMMY2/p{n}/c{i}.wav|{n}|{t}"}),
    "GPT-SoVITS": (
        "vo",
        "output/slicer_opt/a.wav_{i}.wav",
        {"output/asr_opt/slicer_opt.list": "output\\slicer_opt\\a.wav_{i}.wav|vo|en|{t}"},
    ),
    "Kaldi's spk2utt": (
        "s0 s1",
        "wavs/c{i}.wav",
        {"wav.scp": "u{i} wavs/c{i}.wav", "text": "u{i} {t}"},
        {"spk2utt": "s0 u0 u2 u4 u6 u8\ns1 u1 u3 u5 u7 u9\n"},
    ),
    "Label Studio": (
        "speaker",
        "upload/ab-c{i}.wav",
        {},
        {"project.json": f"[{lines(LABEL_STUDIO)[:-2]}]"},
    ),
    "Common Voice 17's columns": (
        "s0 s1",
        "audios/c{i}.mp3",
        {"invalidated.tsv": "c{i}.mp3\tnot {t}"},
        {"all.tsv": CV_17 + lines("{s}\tc{i}.mp3\tf{i}\t{t}\t")},
    ),
    "a voice to imitate": (
        "speaker",
        "wavs/c{i}.wav; ref.wav",
        {},
        {"a.csv": "ref_audio,audio,text\n" + lines("ref.wav,wavs/c{i}.wav,{t}")},
    ),
}
# Those of one speaker, with recordings in wavs/, and beside the texts.
IN_WAVS = {
    "Kaldi's text alone": {"text": "c{i} {t}"},
    "JSUT": {"transcript_utf8.txt": "c{i}:{t}"},
    "Festival": {"etc/txt.done.data": '( c{i} "{t}" )'},
    "arrows": {"list.txt": "c{i}.wav -> {t}"},
    "copies of the table": {"metadata.csv": "c{i}|{t}", "metadata (1).csv": "c{i}|old {t}"},
    "a description in JSON": {
        "a.jsonl": '{{"audio": "c{i}", "text_style": "x", "my_text": "{t}"}}'
    },
}
WHOLE_IN_WAVS = {
    "an object of texts": json.dumps(JSON),
    "a list in an object": json.dumps({"d": [{"wav": k, "text": v} for k, v in JSON.items()]}),
    "audio as an object": json.dumps([{"audio": {"path": k}, "text": v} for k, v in JSON.items()]),
    "how it is said": half("c{i}|{t}|sad", 0) + half("c{i}|{t}|happy", 1),
    "separators at the end of some": half("c{i}|{t}", 0) + half("c{i}|{t}|", 1),
    "phonemes beside the text": "audio|phonemized_text|text\n" + lines("c{i}|ðə dˈɔɡ {i}|{t}"),
}
BESIDE = {
    "a text beside each": {"c{i}.txt": "{t}"},
    "WhisperX": {"c{i}.json": '{{"segments": [{{"text": "{t}"}}]}}'},
    "SRT": {"c{i}.srt": "1\n00:00:00,000 --> 00:00:01,000\n{t}\n"},
    "VTT": {"c{i}.vtt": "WEBVTT\n\n00:00.00 --> 00:02.00\n{t}"},
    "Whisper's TSV": {"c{i}.tsv": "start\tend\ttext\n0\t9\t{t}"},
}
TEXT_FILES |= {kind: ("speaker", "wavs/c{i}.wav", rows) for kind, rows in IN_WAVS.items()}
TEXT_FILES |= {kind: ("speaker", "c{i}.wav", rows) for kind, rows in BESIDE.items()}
for kind, whole in WHOLE_IN_WAVS.items():
    name = "a.json" if whole[0] in "{[" else "metadata.csv"
    TEXT_FILES[kind] = ("speaker", "wavs/c{i}.wav", {}, {name: whole})


@pytest.mark.parametrize("kind", TEXT_FILES)
def test_a_text_is_that_of_its_recording(tmp_path, kind):
    speakers, recordings, rows, *whole = TEXT_FILES[kind]
    files = dict(*whole)
    for name, row in rows.items():
        for file, line in zip(rows_of(name), rows_of(row)):
            files[file] = files.get(file, "") + f"{line}\n"
    names = [name for pattern in recordings.split("; ") for name in rows_of(pattern)]
    folders.require_rows(tmp_path, names, files, (speakers.split() * 10)[:10])


NO_TEXTS = {
    "IPA": {"metadata.csv": lines("c{i}|ðə dˈɔɡ ɹˈæn {i}|0")},
    "IPA in JSON": {"a.jsonl": lines('{{"audio": "wavs/c{i}.wav", "text": "wˈɜːdz {i}"}}')},
    "ARPABET": {"metadata.csv": lines("c{i}|{{HH AH0 L OW1}} {{W ER1 L D {i}}}")},
    "pinyin": {"metadata.csv": lines("c{i}|jin1 tian1 hao{n}")},
    "tags": {"metadata.csv": lines("c{i}|<speak>{t}</speak>")},
    "labels of speakers": texts("wavs/c{i}.txt", "SPEAKER_00: {t}"),
    "times in brackets": texts("wavs/c{i}.txt", "[00:01] {t}"),
    "its own name": texts("wavs/c{i}.txt", "c0.wav\n{t}"),
    "a line of a table for each": {f"wavs/c{i}.txt": f"c{i}: {t}" for i, t in enumerate(TEXTS)},
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


def test_folders_say_the_split_of_their_texts(tmp_path):
    folder = folder_of(tmp_path, rows_of("{i}/a.wav"), **texts("{i}/a.txt"))
    (folder / "9").rename(folder / "dev-clean")
    assert [r.split for r in read(folder).rows if r.text == TEXTS[9]] == ["held_out"]


def test_texts_are_found_through_links(tmp_path):
    folder_of(tmp_path / "there", wavs(pattern="c{}.wav"), **texts("c{i}.txt"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/speaker").symlink_to(tmp_path / "there")
    assert len(read(tmp_path / "mine").rows) == 10


def test_what_has_no_text_or_only_times_is_reported(tmp_path):
    files = texts("c{i}.txt") | {"c8.txt": "0.000\t1.200\thello\n", "c9.txt": b"\xff\xff"}
    dataset = read(folder_of(tmp_path, [*rows_of("c{i}.wav"), "x.wav"], **files))
    reasons = {finding.file: finding.reason for finding in dataset.refused}
    assert reasons.keys() == {tmp_path.name, "c8.txt", "c9.txt"} and len(dataset.rows) == 8
    assert "x.txt" in reasons[tmp_path.name] and "times" in reasons["c8.txt"]
    assert "UTF-8" in reasons["c9.txt"]
