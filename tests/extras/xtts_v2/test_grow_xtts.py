"""An XTTS vocabulary that learns another text keeps every id, its holes, START and STOP."""

from collections import Counter

import pytest
from xtts_texts import AMHARIC, ENGLISH, HOLES, START, lines_of, write_vocabulary

from kit.extras.xtts_v2 import tokenizer as xtts
from kit.extras.xtts_v2.tokenizer import XTTSTokenizer
from kit.text.train_tokenizer import OFTEN, tokenizer_report


def test_the_pair_seen_most_is_merged_first_and_rare_ones_never():
    words = Counter({("a", "b", "c"): 150, ("a", "b"): 120, ("c", "d"): OFTEN - 1})
    assert xtts.learned_merges(words, 9, set()) == [("a", "b"), ("ab", "c")]
    assert xtts.learned_merges(words, 1, set()) == [("a", "b")]
    assert xtts.learned_merges(words, 9, {"ab"}) == [("b", "c"), ("a", "bc")], "a piece comes once"
    assert xtts.learned_merges(Counter({("a",) * 4: 100}), 9, set()) == [("a", "a"), ("aa", "aa")]


@pytest.fixture
def base(tmp_path) -> XTTSTokenizer:
    return XTTSTokenizer(write_vocabulary(tmp_path / "vocab.json"), "am")


def grown_from(base: XTTSTokenizer, words=AMHARIC, name="grown.json", **asked) -> XTTSTokenizer:
    return base.grow(lines_of(words), base.path.parent / name, **asked)


def test_every_id_keeps_its_piece_and_every_hole_stays(base):
    grown = grown_from(base)
    old = base.vocabulary.ids
    assert {piece: grown.vocabulary.ids[piece] for piece in old} == old
    assert set(range(grown.vocab_size)) - set(grown.vocabulary.ids.values()) == set(HOLES)
    assert (grown.start, grown.stop) == (base.start, base.stop) == (START, 0)
    new = set(grown.vocabulary.ids.values()) - set(old.values())
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


def test_it_grows_by_what_the_text_can_teach_and_says_so(base):
    lines = lines_of(AMHARIC, 5)
    few = base.grow(lines, base.path.parent / "few.json")
    letters = set("".join(lines)) - set(" .")
    new = {few.piece(i) for i in range(base.vocab_size, few.vocab_size)}
    assert new == letters | {"[am]"}, "a letter is never left out, a rare piece always"
    message = base.describe_growth(few)
    assert f"{len(letters)} characters, 0 longer pieces and the tag [am]" in message
    assert "fewer than 100 times" in message
    seven = grown_from(base, pieces=7)
    longer = [seven.piece(i) for i in range(base.vocab_size, seven.vocab_size)]
    assert len([piece for piece in longer if len(piece) > 1]) == 7 + 1
    assert "requested" not in base.describe_growth(seven, 7)


def test_it_grows_again_and_always_to_the_same_bytes(base):
    grown = grown_from(base)
    assert grown_from(base, name="again.json").file_bytes() == grown.file_bytes()
    same = grown_from(grown, name="same.json")
    assert same.vocabulary.ids == grown.vocabulary.ids, "there is nothing left to learn"
    more = grown.grow(["qqzz ቀቀ"] * 200, base.path.parent / "more.json")
    assert more.vocab_size > grown.vocab_size
    assert list(more.vocabulary.ids)[: len(grown.vocabulary.ids)] == list(grown.vocabulary.ids)
    assert more.pieces("qqzz") == ["qqzz"]


def test_a_new_piece_was_spelt_in_old_ones(base):
    grown = grown_from(base)
    spelt = base.spellings(grown)
    assert list(spelt) == list(range(base.vocab_size, grown.vocab_size))
    old = set(base.vocabulary.ids.values())
    assert all(ids and set(ids) <= old for ids in spelt.values())
    ids = grown.vocabulary.ids
    assert spelt[ids["[am]"]] == [base.vocabulary.ids[f"[{tag}]"] for tag in base.tags()]
    assert spelt[ids["ለ"]] == base.tokenize("la"), "ETHIOPIC SYLLABLE LA"
    assert spelt[ids["ሰላም"]] == base.tokenize("salaame")
    accented = base.grow(["é ñ ß"] * 9, base.path.parent / "accents.json")
    spelt = base.spellings(accented)
    assert spelt[accented.vocabulary.ids["é"]] == base.tokenize("e")
