"""The embedded corpus: the same bytes every time, honest splits, several voices."""

import dataclasses
import itertools
import time
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest
import soundfile
from folders import contents
from helpers import CORPUS, RATE, corpus, manifest

from kit import settings
from kit.base.errors import KitError
from kit.dataset import synthetic
from kit.dataset.synthetic import load_words, make_corpus, sentences
from kit.settings import CorpusConfig
from kit.text.espeak import SAMPLE_RATE

COUNTS = {"utterances": 50, "held_out": 3, "unseen": 2, "long": 1, "free_order": 1}
SMALL = dataclasses.replace(CORPUS, **COUNTS, speakers=2)


def made_files(folder: Path) -> dict[str, bytes]:
    """Every file by its path, empty marks left out."""
    return {name: data for name, data in contents(folder).items() if data}


def items(text: str, known: set[str], longest: int = 4) -> list[str]:
    """`text` cut into the word list's items, an expression of several words being one."""
    words, result = text.split(), []
    while words:
        starts = (" ".join(words[:n]) for n in range(longest, 0, -1))
        result.append(next(start for start in starts if start in known))
        del words[: len(result[-1].split())]
    return result


def vocabulary(language: str) -> tuple[set[str], set[str]]:
    """Items of the word list, and those of its unseen part."""
    words = load_words(language)
    slots = {k: v for k, v in words.items() if k not in ("order", "unseen")}
    rows = [row if isinstance(row, list) else [row] for slot in slots.values() for row in slot]
    unseen = {item for slot in words["unseen"].values() for item in slot}
    return {item for row in rows for item in row} | unseen, unseen


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return make_corpus(SMALL, tmp_path_factory.mktemp("made"))


@pytest.mark.long
def test_two_makes_are_the_same_bytes_and_a_third_does_nothing(made, tmp_path):
    time.sleep(1.1)  # espeak-ng seeds its noise with the second of the day
    reported = []
    tick = lambda *now: reported.append(now)  # noqa: E731
    assert made_files(make_corpus(SMALL, tmp_path / "again", tick)) == made_files(made)
    assert reported[-1] == (57, 57) and reported == sorted(reported)
    reported.clear()
    before = {p: p.stat().st_mtime_ns for p in made.rglob("*")}
    assert make_corpus(SMALL, made, tick) == made
    assert {p: p.stat().st_mtime_ns for p in made.rglob("*")} == before and not reported


def test_an_interrupted_make_resumes_to_the_same_bytes(made, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        make_corpus(SMALL, tmp_path / "cut", Mock(side_effect=KeyboardInterrupt))
    time.sleep(1.1)
    assert made_files(make_corpus(SMALL, tmp_path / "cut")) == made_files(made)


def test_the_manifest_takes_all_of_it():
    rows = manifest()
    by_split = {"train": 60, "held_out": 6, "unseen": 4, "long": 2, "free_order": 2}
    assert Counter(r.split for r in rows) == by_split
    assert {r.audio for r in rows} == set(map(str, corpus().glob("wavs/*.wav")))
    assert all(soundfile.info(r.audio).samplerate == RATE == SAMPLE_RATE for r in rows)
    assert all(0.3 < r.seconds < 20 for r in rows)
    assert Counter(r.speaker for r in rows)["voice0"] > 10


@pytest.mark.parametrize("language", ["am", "de", "en", "es", "fr"])
def test_held_out_sentences_share_no_two_neighbours_with_training(language):
    splits = sentences(CorpusConfig(language=language, utterances=3000, unseen=1000))
    known, unseen = vocabulary(language)
    assert not unseen & {item for text in splits["train"] for item in items(text, known)}
    assert all(unseen & set(items(text, known)) for text in splits["unseen"])
    assert set("".join(splits["held_out"] + splits["long"])) <= set("".join(splits["train"]))
    pairs = {}
    for name, rows in splits.items():
        pairs[name] = {pair for row in rows for pair in itertools.pairwise(items(row, known))}
    assert len(pairs["held_out"]) > 200 and len(pairs["train"]) > 1000
    assert len(pairs["free_order"]) > 200
    assert not pairs["train"] & (pairs["held_out"] | pairs["long"] | pairs["free_order"])


def test_what_cannot_be_spoken_is_refused():
    for field, value in (("utterances", 3), ("speakers", 9), ("speakers", 0)):
        with pytest.raises(KitError, match=f"CorpusConfig.{field}"):
            CorpusConfig(**{field: value})
    with pytest.raises(KitError, match=r"Config\.language.*of your own \(DATA, --data\)"):
        CorpusConfig(language="tr")


WORD_LIST = """
order: [[subject, 1.0], [verb, 1.0], [object, 1.0]]
subject: ["a, b, c", "d, e"]
verb: ["f, g, h", "i, j"]
object: k, l, m, n
and: o
phrase: p, q
unseen: {object: "r, s, t"}
"""


LACKING = {
    "phrase: [p": "cannot be read as YAML",
    "unseen:": "not written as en.yaml",
    'verb: ["f, g"]': "as many rows are needed for `verb` as for `subject`",
    "order: [subject]": "not written as en.yaml",
}


@pytest.mark.parametrize("line", LACKING)
def test_what_a_word_list_lacks_is_reported(tmp_path, monkeypatch, line):
    monkeypatch.setattr(synthetic, "WORDS", tmp_path)
    monkeypatch.setattr(settings, "WORDS", tmp_path)
    slot = line.split(":")[0]
    kept = [own for own in WORD_LIST.splitlines() if not own.startswith(f"{slot}:")]
    (tmp_path / "xx.yaml").write_text("\n".join([*kept, line]), encoding="utf-8")
    with pytest.raises(KitError, match=rf"xx\.yaml.*{LACKING[line]}"):
        load_words("xx")


def test_words_in_any_order_change_no_other_sentence():
    few = CorpusConfig(utterances=600, free_order=50, any_order=0.0)
    without = sentences(few)
    mixed = sentences(dataclasses.replace(few, any_order=0.5))
    for split in ("held_out", "unseen", "long", "free_order"):
        assert mixed[split] == without[split]
    assert mixed["train"][:300] == without["train"][:300]
    assert len(set(mixed["train"][300:]) - set(without["train"])) > 250
    known, unseen = vocabulary("am")
    words = {item for text in mixed["free_order"] for item in items(text, known)}
    assert len(words) > 100 and not words & unseen


def test_test_sentences_are_distinct_long_ones_long_and_too_few_words_refused(monkeypatch):
    splits = sentences(CorpusConfig(utterances=50))
    for name, count in (("held_out", 250), ("unseen", 100), ("long", 30)):
        assert len(set(splits[name])) == len(splits[name]) == count
    assert min(len(text.split()) for text in splits["long"]) >= 18
    few = {"order": [("subject", 1), ("verb", 1), ("object", 1)], "and": ["and"], "phrase": ["hi"]}
    few |= {"subject": [["he"]], "verb": [["saw"]], "object": ["it"], "unseen": {"object": ["us"]}}
    monkeypatch.setattr("kit.dataset.synthetic.load_words", lambda language: few)
    with pytest.raises(KitError, match=r"yields only \d+ of the 20 sentences"):
        sentences(CorpusConfig(held_out=20))
