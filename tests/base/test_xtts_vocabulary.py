"""Ids of a released vocabulary are read as they stand: holes stay, START is where it is."""

import json

import pytest
from released_xtts import HOLES, SIZE, vocabulary

from kit.base.errors import KitError
from kit.releases.xtts_v2.tokenizer import load_vocabulary


def written(path, words: dict):
    path.write_text(json.dumps(words, ensure_ascii=False), encoding="utf-8")
    return path


def test_holes_stay_holes_and_every_id_is_kept(tmp_path):
    words = vocabulary()
    found = load_vocabulary(written(tmp_path / "vocab.json", words))
    assert found.ids == words["model"]["vocab"]
    assert found.size == SIZE
    assert set(range(SIZE)) - set(found.ids.values()) == set(HOLES)


@pytest.mark.parametrize("start", [7, 29, SIZE - 1])
def test_start_and_stop_are_read(start, tmp_path):
    found = load_vocabulary(written(tmp_path / "vocab.json", vocabulary(start=start)))
    assert (found.start, found.stop) == (start, 0)


def test_a_piece_that_was_added_alone_counts(tmp_path):
    words = vocabulary(holes=())
    words["added_tokens"].append(dict(words["added_tokens"][0], id=SIZE, content="[am]"))
    found = load_vocabulary(written(tmp_path / "vocab.json", words))
    assert found.ids["[am]"] == SIZE and found.size == SIZE + 1


def test_the_file_is_kept_to_the_byte(tmp_path):
    path = written(tmp_path / "vocab.json", vocabulary())
    assert load_vocabulary(path).data == path.read_bytes()


def without(words: dict, piece: str) -> dict:
    del words["model"]["vocab"][piece]
    words["added_tokens"] = [each for each in words["added_tokens"] if each["content"] != piece]
    return words


def with_id(words: dict, piece: str, number) -> dict:
    words["model"]["vocab"][piece] = number
    return words


def with_added(words: dict, **entry) -> dict:
    words["added_tokens"].append(entry)
    return words


WRONG = {
    "has no [START]": lambda v: without(v, "[START]"),
    "has no [STOP]": lambda v: without(v, "[STOP]"),
    "has no `model`": lambda v: {},
    "has no `vocab`": lambda v: v | {"model": {"type": "BPE"}},
    "both have id 12": lambda v: with_id(v, "twin", 12),
    "has id -1": lambda v: with_id(v, "below", -1),
    "has id 1.5": lambda v: with_id(v, "between", 1.5),
    "has id True": lambda v: with_id(v, "true", True),
    "has id 99999999": lambda v: with_id(v, "far", 99_999_999),
    "claims id 9, tokenizers would give it 39": lambda v: with_added(v, content="[am]", id=9),
    "claims id 9, tokenizers would give it 7": lambda v: with_added(v, content="[START]", id=9),
    "is not an XTTS vocabulary": lambda v: ["[START]", "[STOP]"],
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_vocabulary_that_cannot_be_right_is_refused(kind, tmp_path):
    path = written(tmp_path / "vocab.json", WRONG[kind](vocabulary()))
    with pytest.raises(KitError) as caught:
        load_vocabulary(path)
    assert kind in str(caught.value) and "copy vocab.json again" in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b'{"model": ', b"[" * 100_000])
def test_a_damaged_vocabulary_is_reported(data, tmp_path):
    (tmp_path / "vocab.json").write_bytes(data)
    with pytest.raises(KitError, match=r"vocab\.json is not an XTTS vocabulary"):
        load_vocabulary(tmp_path / "vocab.json")


def test_a_missing_vocabulary_says_where_it_comes_from(tmp_path):
    with pytest.raises(KitError, match=r"There is no .*vocab\.json: copy .* or name"):
        load_vocabulary(tmp_path / "vocab.json")
