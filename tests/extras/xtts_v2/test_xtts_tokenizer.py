"""Texts in the ids of an XTTS vocabulary: tags, spaces, what it lacks, and files that are no such.

tests/xtts compares the ids with coqui-tts's own.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from released_xtts import vocabulary
from xtts_texts import AMHARIC, ENGLISH, HOLES, START, TAGS, lines_of, write_vocabulary

from kit.base.errors import KitError, SpeechError
from kit.extras.xtts_v2 import tokenizer
from kit.extras.xtts_v2.tokenizer import XTTSTokenizer, teach_language
from kit.text.normalize import normalize
from kit.text.train_tokenizer import tokenizer_report


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
    assert t.vocab_size == max(t.ids.values()) + 1
    assert all(t.piece(hole) == "" and t.kind(hole) == "control" for hole in HOLES)


def test_a_language_without_a_tag_is_reported_with_those_there_are(path):
    t = XTTSTokenizer(path, "am")
    assert t.tokenize("the"), "a text is cut all the same: the report before it grows needs no tag"
    with pytest.raises(SpeechError, match=r"no tag \[am\].* de, en, hu, zh-cn"):
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
    chinese = XTTSTokenizer(path, "zh")
    assert chinese.encode("ni")[0] == t.ids["[zh-cn]"]
    with pytest.raises(SpeechError, match=r"pinyin .*你"):
        chinese.encode_checked("你好")


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


def without(piece: str) -> bytes:
    words = vocabulary()
    del words["model"]["vocab"][piece]
    words["added_tokens"] = [each for each in words["added_tokens"] if each["content"] != piece]
    return json.dumps(words).encode()


def with_model(**changes) -> bytes:
    words = vocabulary()
    return json.dumps(words | {"model": words["model"] | changes}).encode()


WRONG_FILES = [
    (r"no \[START\]", without("[START]")),
    (r"no \[SPACE\]", without("[SPACE]")),
    ("two pieces with one id", with_model(vocab=vocabulary()["model"]["vocab"] | {"more": 12})),
    ("unk_token", with_model(unk_token=None)),
    (r"not an XTTS vocabulary \(", b'["[START]", "[STOP]"]'),
    ("copy vocab.json again", with_model(merges=["zz y"])),
    ("copy vocab.json again", json.dumps(vocabulary()).encode()[:-100]),
    ("copy vocab.json again", b""),
    ("copy vocab.json again", b"\xff\xfe"),
]


@pytest.mark.parametrize(("facts", "data"), WRONG_FILES)
def test_a_file_that_is_no_vocabulary_is_refused(facts, data, tmp_path):
    path = tmp_path / "vocab.json"
    path.write_bytes(data)
    with pytest.raises(KitError, match=rf"vocab\.json.*{facts}"):
        XTTSTokenizer(path, "en")


@pytest.fixture
def base(path) -> XTTSTokenizer:
    return XTTSTokenizer(path, "am")


def grown_from(base: XTTSTokenizer) -> XTTSTokenizer:
    return base.grow(lines_of(AMHARIC), base.path.parent / "grown.json")


def test_every_id_keeps_its_piece_and_every_hole_stays(base):
    grown = grown_from(base)
    old = base.ids
    assert {piece: grown.ids[piece] for piece in old} == old
    assert set(range(grown.vocab_size)) - set(grown.ids.values()) == set(HOLES)
    assert (grown.start, grown.stop) == (base.start, base.stop) == (START, 0)
    new = set(grown.ids.values()) - set(old.values())
    assert new == set(range(base.vocab_size, grown.vocab_size)), "no hole is filled"
    english = XTTSTokenizer(grown.path, "en")
    for line in lines_of(ENGLISH, 20):
        assert english.encode(line) == XTTSTokenizer(base.path, "en").encode(line)


def test_another_text_is_spelt_in_fewer_pieces_and_comes_back(base):
    unseen = lines_of(AMHARIC, 50, seed=1)
    grown = grown_from(base)
    before = tokenizer_report(base, unseen)
    after = tokenizer_report(grown, unseen)
    assert before["unknown_rate"] > 0.5 and before["round_trip"] == 0
    assert after["unknown_rate"] == 0 and after["round_trip"] == 1 and not after["uncovered"]
    assert after["tokens_per_word"] < 2.5, "a word, a space; at times a stop"
    ids = grown.encode(unseen[0])
    assert grown.piece(ids[0]) == "[am]" and grown.decode(ids) == unseen[0]


def test_it_grows_by_what_the_text_can_teach_and_says_so(base, monkeypatch):
    lines = lines_of(AMHARIC, 5)
    few = base.grow(lines, base.path.parent / "few.json")
    letters = set("".join(lines)) - set(" .")
    new = {few.piece(i) for i in range(base.vocab_size, few.vocab_size)}
    assert new == letters | {"[am]"}, "a letter is never left out, a rare piece always"
    message = base.describe_growth(few)
    assert f"{len(letters)} characters, 0 longer pieces and the tag [am]" in message
    assert "fewer than 100 times" in message
    monkeypatch.setattr(tokenizer, "PIECES", 7)
    seven = grown_from(base)
    longer = [seven.piece(i) for i in range(base.vocab_size, seven.vocab_size)]
    assert len([piece for piece in longer if len(piece) > 1]) == 7 + 1
    assert "room" not in base.describe_growth(seven)


def test_a_new_piece_was_spelt_in_old_ones(base):
    grown = grown_from(base)
    spelt = base.spellings(grown)
    assert list(spelt) == list(range(base.vocab_size, grown.vocab_size))
    old = set(base.ids.values())
    assert all(ids and set(ids) <= old for ids in spelt.values())
    ids = grown.ids
    assert spelt[ids["[am]"]] == [base.ids[f"[{tag}]"] for tag in base.tags()]
    assert spelt[ids["ለ"]] == base.tokenize("la"), "ETHIOPIC SYLLABLE LA"
    assert spelt[ids["ሰላም"]] == base.tokenize("salaame")
    accented = base.grow(["é ñ ß"] * 9, base.path.parent / "accents.json")
    spelt = base.spellings(accented)
    assert spelt[accented.ids["é"]] == base.tokenize("e")
