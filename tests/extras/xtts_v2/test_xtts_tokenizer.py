"""Texts in the ids of an XTTS vocabulary: tags, spaces, what it lacks, and files that are no such.

tests/xtts compares the ids with coqui-tts's own.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from released_xtts import HOLES as RELEASED_HOLES
from released_xtts import SIZE, vocabulary
from xtts_texts import ENGLISH, HOLES, START, TAGS, lines_of, write_vocabulary

from kit.base.errors import KitError, SpeechError
from kit.extras.xtts_v2.tokenizer import XTTSTokenizer, load_vocabulary, tag_of, teach_language
from kit.text.normalize import normalize
from kit.text.train_tokenizer import count_tokens, tokenizer_report, vocabulary_advice


@pytest.fixture
def path(tmp_path) -> Path:
    return write_vocabulary(tmp_path / "vocab.json")


def test_a_text_begins_with_its_tag_and_has_marks_for_spaces(path):
    t = XTTSTokenizer(path, "en")
    ids = t.encode("the voice reads.")
    ends = [t.piece(i) for i in ids]
    assert ends == ["[en]", "the", "[SPACE]", "voice", "[SPACE]", "reads", "."]
    assert t.decode(ids) == "the voice reads." and t.pieces("the voice") == ends[1:4]
    assert (t.start, t.stop) == (START, 0)
    assert t.vocab_size == max(t.vocabulary.ids.values()) + 1
    assert all(t.piece(hole) == "" and t.kind(hole) == "control" for hole in HOLES)


def test_a_region_has_no_tag_of_its_own_but_for_chinese():
    tags = {"en": "en", "pt-BR": "pt", "pt_br": "pt", "zh": "zh-cn", "zh-cn": "zh-cn"}
    assert {language: tag_of(language) for language in tags} == tags


def test_a_language_is_spoken_under_the_requested_tag(path):
    own = XTTSTokenizer(path, "en")
    other = XTTSTokenizer(path, "en", tag="hu")
    assert other.encode("the")[1:] == own.encode("the")[1:]
    assert other.piece(other.encode("the")[0]) == "[hu]"


def test_a_language_without_a_tag_is_reported_with_those_there_are(path):
    t = XTTSTokenizer(path, "am")
    assert t.tokenize("the"), "a text is cut all the same: the report before it grows needs no tag"
    with pytest.raises(SpeechError, match=r"no tag \[am\]; it has de, en, hu, zh-cn. Grow the voc"):
        t.encode("the")
    assert t.tags() == sorted(TAGS)
    with pytest.raises(SpeechError, match="'12' is not a language code"):
        XTTSTokenizer(path, "12")


def test_what_it_cannot_spell_is_named(path):
    t = XTTSTokenizer(path, "en")
    assert t.uncovered("the ሰ 🙂") == ["ሰ", "🙂"]
    with pytest.raises(SpeechError, match="training text had no ሰ"):
        t.encode_checked("the ሰ")
    assert t.encode_checked("the 🙂 voice") == t.encode("the voice")
    with pytest.raises(SpeechError, match="nothing to say"):
        t.encode_checked(" . ")


def test_chinese_letters_are_not_what_it_reads(path):
    t = XTTSTokenizer(path, "zh")
    assert t.encode("ni")[0] == t.vocabulary.ids["[zh-cn]"]
    with pytest.raises(SpeechError, match=r"expects `zh-cn` in pinyin .*, got 你"):
        t.encode_checked("你好")


def test_the_report_and_the_count_take_it(path, tmp_path):
    t = XTTSTokenizer(path, "en")
    lines = lines_of(ENGLISH)
    report = tokenizer_report(t, lines)
    assert report["unknown_rate"] == report["byte_rate"] == 0 and report["round_trip"] == 1
    assert report["tokens_per_word"] < 4 and report["vocab_size"] == t.vocab_size
    strange = tokenizer_report(t, ["ሰላም the"])
    assert strange["unknown_rate"] == 3 / 5 and strange["round_trip"] == 0
    assert strange["scripts"] == {"Ethiopic": 0.5, "Latin": 0.5}
    assert strange["uncovered"] == sorted("ሰላም")
    counts = count_tokens(t, lines)
    assert counts[t.vocabulary.ids["[en]"]] == len(lines)
    size, why = vocabulary_advice(t, counts)
    assert size <= t.vocab_size and why


def test_coqui_is_taught_a_language_and_keeps_the_others():
    def preprocess_text(txt: str, lang: str) -> str:
        if lang != "en":
            raise NotImplementedError(lang)
        return txt.lower()

    coqui = SimpleNamespace(char_limits={"en": 250}, preprocess_text=preprocess_text)
    teach_language(coqui, "am")
    assert coqui.preprocess_text("ሠላም 2", "am") == normalize("ሠላም 2", "am") == "ሰላም ሁለት"
    assert coqui.preprocess_text("The", "en") == "the"
    assert coqui.char_limits == {"en": 250, "am": 250}
    with pytest.raises(NotImplementedError):
        coqui.preprocess_text("x", "xx")


WRONG = {
    "another kind of model": ({"type": "WordPiece"}, r"XTTS.* \(type 'WordPiece'\)"),
    "cut at random": ({"dropout": 0.1}, r"XTTS.*dropout 0\.1"),
    "marks in its words": ({"end_of_word_suffix": "</w>"}, "end_of_word_suffix '</w>'"),
    "nothing for the unknown": ({"unk_token": None}, "`unk_token` is None"),
    "a merge of nothing": ({"merges": ["t h", "zz y"]}, "is damaged .*`zz`"),
    "merges of one piece": ({"merges": ["t"]}, "is damaged .*Merges"),
    "merges of another sort": ({"merges": [["t", 5]]}, "is damaged .*MergeType"),
    "no merges": ({"merges": None}, "is damaged .*MergeType"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_file_of_another_kind_is_reported(kind, tmp_path):
    changes, message = WRONG[kind]
    path = write_vocabulary(tmp_path / "vocab.json", **changes)
    with pytest.raises(KitError, match=message):
        XTTSTokenizer(path, "en")


def test_words_that_would_run_into_each_other_are_reported(path):
    described = json.loads(path.read_text(encoding="utf-8"))
    added = described["added_tokens"]
    described["added_tokens"] = [one for one in added if one["content"] != "[SPACE]"]
    path.write_text(json.dumps(described), encoding="utf-8")
    with pytest.raises(KitError, match=r"no \[SPACE\] among its `added_tokens`"):
        XTTSTokenizer(path, "en")


def written(path, words: dict):
    path.write_text(json.dumps(words, ensure_ascii=False), encoding="utf-8")
    return path


def test_holes_stay_holes_and_every_id_is_kept_in_the_same_bytes(tmp_path):
    words = vocabulary()
    path = written(tmp_path / "vocab.json", words)
    read = load_vocabulary(path)
    assert read.data == path.read_bytes()
    assert read.ids == words["model"]["vocab"]
    assert read.size == SIZE
    assert set(range(SIZE)) - set(read.ids.values()) == set(RELEASED_HOLES)


def test_start_and_stop_are_read(tmp_path):
    for start in (7, 29, SIZE - 1):
        read = load_vocabulary(written(tmp_path / "vocab.json", vocabulary(start=start)))
        assert (read.start, read.stop) == (start, 0)


def test_a_piece_that_was_added_alone_counts(tmp_path):
    words = vocabulary(holes=())
    words["added_tokens"].append(dict(words["added_tokens"][0], id=SIZE, content="[am]"))
    read = load_vocabulary(written(tmp_path / "vocab.json", words))
    assert read.ids["[am]"] == SIZE and read.size == SIZE + 1


def without(piece: str) -> dict:
    words = vocabulary()
    del words["model"]["vocab"][piece]
    words["added_tokens"] = [each for each in words["added_tokens"] if each["content"] != piece]
    return words


def with_id(number) -> dict:
    words = vocabulary()
    words["model"]["vocab"]["more"] = number
    return words


def with_added(piece: str) -> dict:
    words = vocabulary()
    words["added_tokens"].append({"content": piece, "id": 9})
    return words


WRONG_WORDS = {
    "has no [START]": without("[START]"),
    "has no [STOP]": without("[STOP]"),
    "has no `model`": {},
    "has no `vocab`": vocabulary() | {"model": {"type": "BPE"}},
    "both have id 12": with_id(12),
    "has id -1": with_id(-1),
    "has id 1.5": with_id(1.5),
    "has id True": with_id(True),
    "has id 99999999": with_id(99_999_999),
    "claims id 9, tokenizers would give it 39": with_added("[am]"),
    "claims id 9, tokenizers would give it 7": with_added("[START]"),
    "is not an XTTS vocabulary": ["[START]", "[STOP]"],
}


@pytest.mark.parametrize(("kind", "words"), WRONG_WORDS.items())
def test_a_vocabulary_that_cannot_be_right_is_refused(kind, words, tmp_path):
    with pytest.raises(KitError, match=rf"{re.escape(kind)}.*copy vocab\.json again"):
        load_vocabulary(written(tmp_path / "vocab.json", words))


@pytest.mark.parametrize("load", [load_vocabulary, lambda path: XTTSTokenizer(path, "en")])
def test_a_damaged_vocabulary_is_reported_and_of_none_where_it_comes_from(path, load):
    for data in (path.read_bytes()[:-100], b"", b"\xff\xfe", b'{"model": ', b"[" * 100_000):
        path.write_bytes(data)
        with pytest.raises(KitError, match=r"vocab\.json is not an XTTS vocabulary"):
            load(path)
    path.unlink()
    with pytest.raises(KitError, match=r"There is no .*vocab\.json: copy .* it was trained with"):
        load(path)
