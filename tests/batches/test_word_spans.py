"""Rows of a few words: exactly their part of the recording, drawn again after a resume."""

import itertools
import random
from functools import partial

import numpy as np
import pytest
import soundfile
from helpers import made_cache
from tones import LETTERS, RATE, ToneRecognizer, noisy, say

from kit.base.errors import DamagedFileError
from kit.base.files import write_atomic
from kit.base.tensor_file import pack_tensors
from kit.batches.batching import EXTRA_TOKENS
from kit.batches.code_stream import CodeStream
from kit.batches.find_words import find_words, token_edges
from kit.batches.word_spans import FIRST_WORDS, LAST_WORDS, WHOLE_SHARE, WordSpans
from kit.dataset.manifest import Utterance
from kit.settings import DataConfig, TokenizerConfig
from kit.text.tokenizer import Tokenizer
from kit.text.train_tokenizer import train_tokenizer

CLIPS = 40
CONFIG = DataConfig(effective_batch=8, micro_batch=4, sort_window=32)
LEAST_CODES = 6
SLOW = 500_000  # added to the codes of what is played slowly


@pytest.fixture
def cache():
    """Recordings whose text ids and codes all differ, every tenth of them held out."""
    chance = random.Random(0)
    words = [chance.randint(1, 12) for _ in range(CLIPS)]
    splits = ["train" if i % 10 else "held_out" for i in range(CLIPS)]
    rows = [{"id": f"u{i}", "speaker": "v", "split": split} for i, split in enumerate(splits)]
    texts = [1000 * i + np.arange(3 * count, dtype=np.int32) for i, count in enumerate(words)]
    codes = [1000 * i + np.arange(5 * count + 2, dtype=np.int32) for i, count in enumerate(words)]
    return made_cache(rows, texts, codes, [np.full((2, 3), i, np.float16) for i in range(CLIPS)])


@pytest.fixture
def spans(cache, tmp_path):
    """Words of three text ids and five codes."""
    counts = [len(cache.texts[i]) // 3 + 1 for i in range(CLIPS)]
    edges = [list(range(count)) for count in counts]
    codes = [[5 * edge for edge in own[:-1]] + [len(cache.codes[i])] for i, own in enumerate(edges)]
    arrays = {
        "counts": np.array(counts),
        "texts": np.array([3 * edge for own in edges for edge in own], dtype=np.int32),
        "codes": np.array([edge for own in codes for edge in own], dtype=np.int32),
    }
    path = tmp_path / "words.safetensors"
    write_atomic(path, pack_tensors(arrays))
    return WordSpans(path, 5 * CLIPS, LEAST_CODES, seed=0)


@pytest.fixture
def slow(cache):
    """The same recordings at half their speed: each code twice."""
    codes = [np.repeat(cache.codes[i] + SLOW, 2) for i in range(CLIPS)]
    references = [np.full((2, 3), -i, np.float16) for i in range(CLIPS)]
    return made_cache(list(cache.rows), list(cache.texts), codes, references)


def keep(parts, position):
    plain = [
        (np.asarray(text), np.asarray(code)) for part in parts for text, code in zip(*part[:2])
    ]
    return plain, dict(position)


def stream(cache, spans, position=None, **more) -> CodeStream:
    return CodeStream(cache, "train", CONFIG, keep, position, spans=spans, **more)


def epoch_rows(s: CodeStream, epochs: int) -> list[list]:
    batches = iter(s)
    return [[row for _ in s.plan(epoch) for row in next(batches)[0]] for epoch in range(epochs)]


def test_rows_are_short_at_first_longer_later_and_at_times_whole(cache, spans):
    first, *rest = epoch_rows(stream(cache, spans), 25)
    late = [text for rows in rest[8:] for text, _ in rows]
    assert max(len(text) // 3 for text, _ in first) <= FIRST_WORDS
    lengths = {len(text) // 3 for text in late}
    assert LAST_WORDS in lengths and max(lengths) > LAST_WORDS
    whole = [len(text) // 3 > LAST_WORDS for text in late]
    assert 0 < sum(whole) / len(whole) < WHOLE_SHARE
    again = epoch_rows(stream(cache, spans), 1)[0]
    assert all(np.array_equal(a, b) for one, two in zip(first, again) for a, b in zip(one, two))


@pytest.mark.parametrize("has_words, has_speeds", [(True, False), (True, True), (False, True)])
def test_a_row_is_exactly_some_words_of_its_recording(cache, spans, slow, has_words, has_speeds):
    slowly = {True: 0, False: 0}
    at_speeds = [slow] if has_speeds else []
    for rows in epoch_rows(stream(cache, spans if has_words else None, at_speeds=at_speeds), 8):
        assert len(rows) == 36, "every recording of the split, each once"
        assert {int(text[0]) // 1000 % 10 for text, _ in rows} == set(range(1, 10)), "held out"
        for text, codes in rows:
            is_slow = bool(codes[0] >= SLOW)
            if is_slow:
                assert np.array_equal(codes[::2], codes[1::2])
                codes = codes[::2] - SLOW
            i, first = divmod(int(text[0]), 1000)
            start, end = 5 * (first // 3), 5 * (first // 3 + len(text) // 3)
            last = first + len(text) == len(cache.texts[i])
            assert np.array_equal(codes, cache.codes[i][start : None if last else end])
            assert len(codes) >= min(LEAST_CODES, len(cache.codes[i]))
            assert np.array_equal(text, cache.texts[i][first : first + len(text)])
            whole = {"codes": 2 * len(cache.codes[i])}
            whole["tokens"] = whole["codes"] + len(cache.texts[i])
            if all(length <= cache.longest(what) for what, length in whole.items()):
                slowly[is_slow] += 1
            else:
                assert not is_slow, "longer than model and memory suffice for"
    wanted = pytest.approx(0.5, abs=0.1) if has_speeds else 0
    assert slowly[True] / sum(slowly.values()) == wanted


def test_a_reference_has_the_speed_of_its_row(cache, slow):
    def collate(parts, _):
        return [(int(c[0]), r[0, 0].item()) for p in parts for c, r in zip(p[1], p[2])]

    batches = CodeStream(cache, "train", CONFIG, collate, at_speeds=[slow])
    pairs = [pair for batch in itertools.islice(batches, 20) for pair in batch]
    assert all((code >= SLOW) == (reference < 0) for code, reference in pairs)
    assert len({code >= SLOW for code, _ in pairs}) == 2


def test_a_resumed_stream_draws_the_same_words(cache, spans, slow):
    with_speeds = partial(stream, at_speeds=[slow])
    whole = list(itertools.islice(with_speeds(cache, spans), 30))
    for stop in (1, 7, 18):
        rest = itertools.islice(with_speeds(cache, spans, whole[stop - 1][1]), 30 - stop)
        for (rows, place), (wanted, its_place) in zip(rest, whole[stop:], strict=True):
            assert place == its_place
            assert all(np.array_equal(a[1], b[1]) for a, b in zip(rows, wanted, strict=True))


def test_another_way_to_draw_words_is_another_order_of_the_data(cache, spans, slow):
    position = next(iter(stream(cache, spans)))[1]
    for spans_now, at_speeds in ((None, []), (spans, [slow])):
        with pytest.raises(DamagedFileError, match="other batches"):
            stream(cache, spans_now, position, at_speeds=at_speeds)


WORDS = "abel cable dame face gleam hike jail kale lamb made".split()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    chance = random.Random(1)
    lines = [" ".join(chance.choices(WORDS, k=6)) + "." for _ in range(200)]
    train_tokenizer(lines, path, TokenizerConfig(vocab_size=40, byte_fallback=False))
    return Tokenizer(path)


def test_text_ids_of_words_are_those_of_the_words_alone(tokenizer):
    text = "dame face, lamb — made jail. kale"
    ids = tokenizer.encode(text)
    edges = token_edges(tokenizer, text, ids)
    words = ["dame", "face,", "lamb —", "made", "jail.", "kale"]
    assert [ids[a:b] for a, b in itertools.pairwise(edges)] == [tokenizer.encode(w) for w in words]


def test_words_begin_in_the_quiet_between_two_words(tokenizer, tmp_path):
    texts = ["abel face mad", "dame", "jail — lamb gleam"]
    rows, codes = [], []
    for number, text in enumerate(texts):
        path = tmp_path / f"{number}.wav"
        wave = noisy(say(text))
        soundfile.write(path, wave, RATE)
        common = {"speaker": "v", "split": "train", "text": text, "file": "t", "line": number + 1}
        rows.append(Utterance(id=str(number), audio=str(path), seconds=len(wave) / RATE, **common))
        codes.append(np.arange(round(len(wave) / RATE * 43), dtype=np.int32))
    ids = [np.array(tokenizer.encode(text), dtype=np.int32) for text in texts]
    cache = made_cache([{"id": r.id, "speaker": "v", "split": "train"} for r in rows], ids, codes)
    path = tmp_path / "words.safetensors"
    assert find_words(rows, cache, tokenizer, ToneRecognizer().eval(), 43.0, path) == 3
    found = WordSpans(path, 1, 1, seed=0)
    begin_s = np.array(found.edges(0)[1][1:-1]) / 43
    # A letter takes 0.13 s and a pause 0.06 s more: words begin between the tones beside it.
    for second, end_s in zip(begin_s, (4 * 0.13 - 0.04, 8 * 0.13 + 0.06 - 0.04)):
        assert end_s - 0.03 < second < end_s + 0.10 + 0.03
    assert found.edges(1) == ([0, len(ids[1])], [0, len(codes[1])])
    assert len(found.edges(2)[0]) == 4, "a dash belongs to the word before it"
    assert set("".join(WORDS)) <= set(LETTERS)


def test_steps_are_timed_with_the_lengths_of_all_the_training(cache, spans):
    """A short one ends while rows are short; most of a long one has long rows."""
    every = stream(cache, spans)
    usual = []
    for steps in (every.batches_an_epoch, 100 * every.batches_an_epoch):
        batches = every.representative_batches(6, steps)
        usual.append(sum(len(t) + len(c) + EXTRA_TOKENS for rows, _ in batches for t, c in rows))
    assert usual[1] > 1.3 * usual[0]
