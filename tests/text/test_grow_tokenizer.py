"""A tokenizer that learns another text keeps every id, and says how its new pieces were spelt."""

import random

import pytest
from helpers import manifest, tokenizer

from kit.base.errors import SpeechError
from kit.text.tokenizer import START, STOP, Tokenizer, base_spellings
from kit.text.train_tokenizer import (
    TokenizerConfig,
    grow_tokenizer,
    tokenizer_report,
    train_tokenizer,
)

WORDS = "the voice reads what nobody has ever written down before in another place".split()
CONFIG = TokenizerConfig(vocab_size=500)


def english(lines: int = 400, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=6)) for _ in range(lines)]


@pytest.fixture(scope="module")
def grown(tmp_path_factory) -> Tokenizer:
    path = tmp_path_factory.mktemp("grown") / "tokenizer.model"
    return grow_tokenizer(tokenizer(), english(), path, CONFIG)


def piece(of: Tokenizer, number: int) -> str:
    return of.model.id_to_piece(number)


def test_every_id_keeps_its_piece_and_every_old_text_its_ids(grown):
    base = tokenizer()
    assert (grown.start, grown.stop) == (base.start, base.stop)
    assert (piece(grown, base.start), piece(grown, base.stop)) == (START, STOP)
    assert all(piece(grown, i) == piece(base, i) for i in range(base.start))
    for row in manifest():
        assert grown.encode(row.text) == base.encode(row.text)


def test_another_text_is_spelt_in_fewer_pieces_and_comes_back(grown):
    unseen = english(seed=1)
    before, after = (tokenizer_report(each, unseen) for each in (tokenizer(), grown))
    assert before["byte_rate"] > 0.5
    assert after["byte_rate"] == 0 and after["round_trip"] == 1 and not after["uncovered"]
    assert after["tokens_per_word"] < before["tokens_per_word"] / 3
    assert after["vocab_size"] == grown.vocab_size < tokenizer().vocab_size + CONFIG.vocab_size


def test_pieces_that_the_text_hardly_uses_are_left_out(grown, tmp_path):
    few = grow_tokenizer(tokenizer(), english(20), tmp_path / "few.model", CONFIG)
    letters = set("".join(WORDS))
    new = [piece(few, i) for i in range(tokenizer().vocab_size, few.vocab_size)]
    assert set(new) >= letters, "a letter is never left out"
    assert few.vocab_size < grown.vocab_size


def test_it_grows_again_and_always_to_the_same_bytes(grown, tmp_path):
    twice = [
        grow_tokenizer(grown, ["zzz qqq"] * 200, tmp_path / f"{i}.model", CONFIG) for i in range(2)
    ]
    more, again = twice
    assert more.model.serialized_model_proto() == again.model.serialized_model_proto()
    assert (more.start, more.stop) == (grown.start, grown.stop)
    pieces = [piece(more, i) for i in range(more.vocab_size)]
    assert pieces[: grown.vocab_size] == [piece(grown, i) for i in range(grown.vocab_size)]
    assert pieces.count(START) == 1 and more.encode("zzz") != grown.encode("zzz")
    unchanged = grow_tokenizer(grown, english(), tmp_path / "same.model", CONFIG)
    assert unchanged.vocab_size == grown.vocab_size, "there is nothing left to learn"


def test_a_new_piece_was_spelt_in_old_ones(grown):
    base = tokenizer()
    found = base_spellings(base, grown)
    assert list(found) == list(range(base.vocab_size, grown.vocab_size))
    for number, ids in found.items():
        assert ids and max(ids) < base.start
        assert base.decode(ids).strip() == piece(grown, number).replace("▁", " ").strip()
        assert piece(grown, number)[0] == "▁" or piece(base, ids[0])[0] != "▁", "within a word"


def test_a_unigram_grows_too(tmp_path):
    lines = [row.text for row in manifest() if row.split == "train"]
    config = TokenizerConfig(vocab_size=420, kind="unigram")
    base = Tokenizer(train_tokenizer(lines, tmp_path / "unigram.model", config))
    grown = grow_tokenizer(base, english(), tmp_path / "grown.model", config)
    assert grown.encode(lines[0]) == base.encode(lines[0])
    assert tokenizer_report(grown, english(seed=1))["byte_rate"] == 0


def test_letters_do_not_grow_phonemes(tmp_path):
    with pytest.raises(SpeechError, match=r"letters.* en-us: leave PHONEMES"):
        grow_tokenizer(
            tokenizer(), english(), tmp_path / "t.model", TokenizerConfig(phonemes="en-us")
        )
