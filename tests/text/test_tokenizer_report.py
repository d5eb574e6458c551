"""Figures of a tokenizer on a text, counted by hand; advice by its rule."""

import collections
import json
import random
from pathlib import Path

import pytest

from kit.base.errors import KitError, SpeechError
from kit.text.tokenizer import Tokenizer
from kit.text.train_tokenizer import (
    TokenizerConfig,
    count_tokens,
    script_shares,
    tokenizer_report,
    train_fitted_tokenizer,
    train_tokenizer,
    vocabulary_advice,
)

LINES = ["ሰላም ለሁሉ ሰው", "ሰው ሁሉ ሰላም ነው", "አለም ሰላም ነው"] * 10


def trained(folder: Path, lines=LINES, **settings) -> Tokenizer:
    return Tokenizer(train_tokenizer(lines, folder / "t.model", TokenizerConfig(**settings)))


def test_the_report_counts_by_hand(tmp_path):
    t = trained(tmp_path)
    texts = ["ሰላም ለሁሉ", "Z"]
    report, ids = tokenizer_report(t, texts), [t.encode(x) for x in texts]
    total = sum(map(len, ids))
    assert report["tokens_per_word"] == total / 3
    assert (
        report["characters_per_token"] == 8 / total and report["tokens_per_character"] == total / 8
    )
    assert report["byte_rate"] == 1 / total and report["unknown_rate"] == 0
    assert report["round_trip"] == 1 and report["uncovered"] == ["Z"]
    assert report["scripts"] == {"Ethiopic": 6 / 7, "Latin": 1 / 7}
    assert report["rare"] == sorted(set("ሰላምለሁሉZ"))


def test_without_bytes_the_unknown_is_counted(tmp_path):
    t = trained(tmp_path, vocab_size=30, byte_fallback=False)
    report = tokenizer_report(t, ["ሰላም Z"])
    assert report["unknown_rate"] > 0 and report["round_trip"] == 0


@pytest.mark.parametrize("texts", [[], ["", " "]])
def test_no_text_has_no_figures(tmp_path, texts):
    with pytest.raises(SpeechError, match="held-out sentences"):
        tokenizer_report(trained(tmp_path), texts)


def test_scripts_by_share_of_letters():
    counts = collections.Counter("ሀሁ, abcд 5!\u4e2d")
    assert script_shares(counts) == {
        "Latin": 3 / 7, "Ethiopic": 2 / 7, "Cyrillic": 1 / 7, "Cjk": 1 / 7,
    }  # fmt: skip
    assert script_shares(collections.Counter("5 !")) == {}


def advice(t: Tokenizer, lines: list[str]) -> tuple[int, str]:
    return vocabulary_advice(t, count_tokens(t, lines))


def test_rare_pieces_make_a_vocabulary_too_large(tmp_path):
    t = trained(tmp_path, vocab_size=300)
    size, reason = advice(t, LINES)  # no piece has 100 examples in 30 lines
    assert size < len(t.model) and reason.startswith("Too large")
    t = trained(tmp_path, vocab_size=size)  # the advice taken: letters alone
    assert not advice(t, LINES)[1].startswith("Too large")


def random_lines() -> list[str]:
    """1500 lines of any three letters in any order: every short row of them occurs often."""
    rng = random.Random(0)
    word = lambda: "".join(rng.choices("ሀለመ", k=rng.randint(1, 6)))  # noqa: E731
    return [" ".join(word() for _ in range(6)) for _ in range(1500)]


def test_letters_alone_make_a_vocabulary_small(tmp_path):
    lines = random_lines()
    t = trained(tmp_path, lines, vocab_size=265)
    size, reason = advice(t, lines)
    assert size > len(t.model) and reason.startswith("Rather small")


def test_a_vocabulary_of_well_known_pieces_fits(tmp_path):
    lines = random_lines()
    t = trained(tmp_path, lines, vocab_size=300)
    size, reason = advice(t, lines)
    assert size == len(t.model) and reason.startswith("Fits")


def words_of(count: int, seed: int = 0) -> list[str]:
    """Lines of eight words, drawn from 400 of which few are frequent."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abdegiklmnorstu", k=rng.randint(2, 7))) for _ in range(400)]
    shares = [1 / (rank + 1) for rank in range(len(words))]
    return [" ".join(rng.choices(words, shares, k=8)) for _ in range(count)]


def test_a_fitted_vocabulary_follows_the_text(tmp_path):
    sizes = {}
    for count in (50, 500, 5000):
        lines, config = words_of(count), TokenizerConfig(vocab_size=2000, fitted=True)
        tokenizer = Tokenizer(train_fitted_tokenizer(lines, tmp_path / "fitted.model", config))
        assert not advice(tokenizer, lines)[1].startswith("Too large"), count
        sizes[count] = tokenizer.model.vocab_size()
    assert 256 < sizes[50] < sizes[500] < sizes[5000] <= 2000


def test_a_vocabulary_that_is_not_to_be_fitted_stays(tmp_path):
    config = TokenizerConfig(vocab_size=400)
    fixed = train_fitted_tokenizer(words_of(50), tmp_path / "fixed.model", config)
    assert Tokenizer(fixed).model.vocab_size() == 400


def test_fitted_and_exact_exclude_each_other():
    with pytest.raises(KitError, match=r"TokenizerConfig\.fitted"):
        TokenizerConfig(fitted=True, exact=True)


@pytest.mark.parametrize("kind", ["more.txt", "more.jsonl"])
def test_pieces_come_from_a_file_and_their_number_from_what_is_spoken(tmp_path, kind):
    spoken, more = words_of(50), [line.upper() for line in words_of(400)]
    rows = [json.dumps({"text": line}) if kind == "more.jsonl" else line for line in more]
    (tmp_path / kind).write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    config = TokenizerConfig(vocab_size=2000, fitted=True)
    path = train_fitted_tokenizer(spoken, tmp_path / "t.model", config, tmp_path / kind, "en")
    of_spoken = Tokenizer(train_fitted_tokenizer(spoken, tmp_path / "s.model", config))
    found = Tokenizer(path)
    assert found.uncovered(more[0].lower()) == [], "upper case is normalised, as any text is"
    assert found.vocab_size == pytest.approx(of_spoken.vocab_size, rel=0.2)
    assert not (tmp_path / ".extracted.txt").exists()
