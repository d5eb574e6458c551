"""Texts in files of their own, and folders as other tools write them: texts and speakers."""

import json
from pathlib import Path

import pytest
from folders import (
    ALL_ONE,
    SPLIT_OF,
    TEXTS,
    TWO,
    clips,
    folder_of,
    half,
    lines,
    parts,
    read,
    require_rows,
    texts,
    wavs,
)

from kit.base.errors import DatasetError
from kit.dataset.fetch import fetch_dataset


def test_kaldi_folders_with_speakers(tmp_path):
    tables = {}
    for number, split in enumerate(("train", "dev")):
        audio = "u{i} /exp/corpus/data/" + split + "/c{i}.wav"
        for name, row in (("wav.scp", audio), ("text", "u{i} {t}"), ("utt2spk", "u{i} {s}")):
            tables[f"data__{split}__{name}"] = parts(row)[number]
    files = [f"data/{'dev' if i > 7 else 'train'}/c{i}.wav" for i in range(10)]
    result = read(fetch_dataset(folder_of(tmp_path, files, **tables), tmp_path / "into"))
    assert not result.refused
    rows = {row.text: (row.speaker, row.split) for row in result.rows}
    assert rows == {t: (TWO[i], SPLIT_OF[t]) for i, t in enumerate(TEXTS)}


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
    assert rows == {t: (str(i % 2), SPLIT_OF[t]) for i, t in enumerate(TEXTS)}
    assert {Path(finding.file).name for finding in result.refused} == {"0-7.trans.txt"}
    assert [finding.line for finding in result.refused] == [6, 5]
    assert "UTF-8" in result.refused[0].reason and "text is empty" in result.refused[1].reason
    alone = read(folder / "dev-clean").rows  # a part that is given by itself is trained on
    assert {row.split for row in alone} == {"train"} and len(alone) == 2


JSON = {f"c{i}": text for i, text in enumerate(TEXTS)}
PS, FIGURES, TENS = ["p0", "p1"] * 5, ["0", "1"] * 5, ["10", "11"] * 5
LABEL_STUDIO = '{{"audio": "/data/upload/1/ab-c{i}.wav", "id": 1{i}, "transcription": "{t}"}},'
# name: (recordings, files, speakers)
TEXT_FILES = {
    "in a folder of its own": (clips("wav/p{n}/p{n}_{i}.wav"), texts("txt/p{n}/p{n}_{i}.txt"), PS),
    "two microphones": (
        clips("flac/p{n}/{i}_mic1.flac") + clips("flac/p{n}/{i}_mic2.flac"),
        texts("txt/p{n}/{i}.txt"),
        PS,
    ),
    "the same names in the folders of two": (
        [f"s{n}/{i}.wav" for i in range(5) for n in range(2)],
        {f"s{n}__{i}.lab": TEXTS[2 * i + n] for i in range(5) for n in range(2)},
        TWO,
    ),
    "chapters of one": (clips("chapter {n}/c{i}.wav"), texts("chapter {n}/c{i}.txt"), ALL_ONE),
    "Whisper": (
        clips("c{i}.m4a"),
        texts("c{i}.json", '{{"text": " {t}", "segments": []}}'),
        ALL_ONE,
    ),
    "LibriTTS": (
        clips("{n}/7/{n}_7_{i}.wav"),
        texts("{n}/7/{n}_7_{i}.normalized.txt") | texts("{n}/7/{n}_7_{i}.original.txt", "No. {t}"),
        FIGURES,
    ),
    "LibriSpeech": (
        clips("{n}/7/{n}-7-{i}.flac"),
        {f"{n}__7__{n}-7.trans.txt": half("{n}-7-{i} {t}", n) for n in range(2)},
        FIGURES,
    ),
    "a table for each speaker": (
        clips("s{n}/wavs/c{i}.wav"),
        {f"s{n}__metadata.csv": half("c{i}|{t}", n) for n in range(2)},
        TWO,
    ),
    "an object of objects": (
        wavs(),
        {"all.json": json.dumps({f"{k}.wav": {"text": v, "spk_id": 7} for k, v in JSON.items()})},
        ["7"] * 10,
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
        TENS,
    ),
    "LibriTTS-R": (
        clips("1{n}/7/1{n}_7_{i}.wav"),
        texts("1{n}/7/1{n}_7_{i}.normalized.txt")
        | {"10__7__10_7.trans.tsv": lines("1{n}_7_{i}\tNo. {t}\t{t}")}
        | {"10__7__10_7.book.tsv": lines("1{n}_7_{i}\tNo. {t}\tx {t}\t0.5\t1.5")},
        TENS,
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
            f"by_book__x__y__{n}male__s{n}__bk__metadata.csv": half("c{i}|{t}|{t}", n)
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
    "VITS": (
        clips("wav/p{n}/c{i}.wav"),
        {"filelists__all_train.txt": lines("DUMMY2/p{n}/c{i}.wav|{n}|{t}")},
        FIGURES,
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
        {"project.json": f"[{lines(LABEL_STUDIO)[:-2]}]"},
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
    "a voice to imitate": (
        [*wavs(), "ref.wav"],
        {"a.csv": "ref_audio,audio,text\n" + lines("ref.wav,wavs/c{i}.wav,{t}")},
        ALL_ONE,
    ),
}
# Those of one speaker, with recordings in wavs/, and beside the texts.
IN_WAVS = {
    "Kaldi's text alone": {"text": lines("c{i} {t}")},
    "JSUT": {"transcript_utf8.txt": lines("c{i}:{t}")},
    "Festival": {"etc__txt.done.data": lines('( c{i} "{t}" )')},
    "an object of texts": {"metadata.json": json.dumps(JSON)},
    "a list in an object": {
        "a.json": json.dumps({"n": 1, "d": [{"wav": k, "text": v} for k, v in JSON.items()]})
    },
    "audio as an object": {
        "a.json": json.dumps([{"audio": {"path": k}, "text": v} for k, v in JSON.items()])
    },
    "how it is said": {"metadata.csv": half("c{i}|{t}|sad", 0) + half("c{i}|{t}|happy", 1)},
    "arrows": {"list.txt": lines("c{i}.wav -> {t}")},
    "copies of the table": {
        "metadata.csv": lines("c{i}|{t}"),
        "metadata (1).csv": lines("c{i}|old {t}"),
    },
    "separators at the end of some": {"metadata.csv": half("c{i}|{t}", 0) + half("c{i}|{t}|", 1)},
    "a description in JSON": {
        "a.jsonl": lines('{{"audio": "wavs/c{i}.wav", "text_style": "x", "my_text": "{t}"}}')
    },
    "phonemes beside the text": {
        "metadata.csv": "audio|phonemized_text|text\n" + lines("c{i}|ðə dˈɔɡ {i}|{t}")
    },
}
BESIDE = {
    "a text beside each": texts("c{i}.txt"),
    "WhisperX": texts("c{i}.json", '{{"segments": [{{"text": "{t}"}}]}}'),
    "SRT": texts("c{i}.srt", "1\n00:00:00,000 --> 00:00:01,000\n{t}\n\n"),
    "VTT": texts("c{i}.vtt", "WEBVTT\n\n00:00.00 --> 00:02.00\n{t}\n"),
    "Whisper's TSV": texts("c{i}.tsv", "start\tend\ttext\n0\t9\t{t}\n"),
}
TEXT_FILES |= {kind: (wavs(), files, ALL_ONE) for kind, files in IN_WAVS.items()}
TEXT_FILES |= {kind: (clips("c{i}.wav"), files, ALL_ONE) for kind, files in BESIDE.items()}


@pytest.mark.parametrize("kind", TEXT_FILES)
def test_a_text_is_that_of_its_recording(tmp_path, kind):
    require_rows(tmp_path, *TEXT_FILES[kind])


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
