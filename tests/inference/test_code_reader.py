"""The reader of codes: what it learns, how badly a reading fits its text, what its file keeps."""

import dataclasses

import pytest
import torch
from helpers import trained_codec

from kit.audio.fitting import FitSchedule
from kit.audio.recognizer import recognizer_schedule, train_recognizer
from kit.base.errors import KitError
from kit.inference.candidates import (
    MAX_MISMATCH,
    READER,
    CodeReader,
    CodeReaderConfig,
    load_matching_reader,
    load_reader,
    save_reader,
)

LETTERS = "abcdef"
LEVELS = (4, 3)  # 12 codes: two of them spell each letter
CONFIG = CodeReaderConfig(
    width=32, blocks=1, steps=150, minutes=0, batch=8, lr=1e-2, rows=1, look_every=50
)
PARTS = {"codec.safetensors": "a", "tokenizer.model": "b"}


def spoken(count: int, seed: int) -> tuple[list[torch.Tensor], list[str]]:
    """Codes and texts: each letter for two to four codes, of the two that mean it."""
    random = torch.Generator().manual_seed(seed)
    codes, texts = [], []
    for _ in range(count):
        said, text = [], []
        for letter in torch.randint(len(LETTERS), (6,), generator=random).tolist():
            if text and text[-1] == LETTERS[letter]:
                continue
            times = int(torch.randint(2, 5, (), generator=random))
            said += [letter, letter + len(LETTERS)][: times - 1] * 2
            text.append(LETTERS[letter])
        codes.append(torch.tensor(said))
        texts.append("".join(text))
    return codes, texts


def made(config: CodeReaderConfig = CONFIG) -> CodeReader:
    torch.manual_seed(0)
    return CodeReader(config, LETTERS, LEVELS)


@pytest.fixture(scope="module")
def trained() -> tuple[CodeReader, FitSchedule]:
    reader = made()
    held = spoken(20, seed=1)
    fit_schedule = recognizer_schedule(reader, list(zip(*held)))
    for _ in train_recognizer(reader, *spoken(80, seed=0), "cpu", "fp32", fit_schedule):
        pass
    return reader, fit_schedule


def test_it_reads_codes_it_never_saw_and_says_how_well(trained):
    reader, fit_schedule = trained
    codes, texts = spoken(20, seed=2)
    read = reader.transcribe(codes)
    assert sum(a == b for a, b in zip(read, texts)) >= 18
    assert fit_schedule.figure < 0.05 and fit_schedule.ending.startswith("after 150 steps")


def test_a_reading_that_says_its_text_fits_better_than_one_that_does_not(trained):
    reader, _ = trained
    codes, texts = spoken(20, seed=2)
    own = reader.text_mismatch(texts, codes)
    others = reader.text_mismatch([text[2:] + text[:1] for text in texts], codes)
    assert max(own) < min(others) and min(own) >= 0


def test_a_row_is_judged_the_same_alone_and_among_longer_ones(trained):
    reader, _ = trained
    codes, texts = spoken(6, seed=3)
    together = reader.text_mismatch(texts, codes)
    alone = [reader.text_mismatch([text], [row])[0] for text, row in zip(texts, codes)]
    assert together == pytest.approx(alone, abs=0.2)  # a longer row's blanks reach a few codes in


def test_too_few_codes_none_at_all_and_no_letters_are_the_worst_there_is_not_an_error(trained):
    reader, _ = trained
    codes = [torch.tensor([0, 1]), torch.tensor([], dtype=torch.long), torch.tensor([0, 6, 0])]
    few, none, silent = reader.text_mismatch(["abcdef", "a", "?!"], codes)
    assert few == none == MAX_MISMATCH
    assert 0 <= silent <= MAX_MISMATCH
    assert reader.text_mismatch(["a"], [torch.tensor([], dtype=torch.long)]) == [MAX_MISMATCH]


def test_training_on_rows_without_a_way_through_stays_finite():
    reader = made()
    loss = reader.loss([torch.tensor([0, 1]), torch.tensor([2, 8, 2])], ["abcdef", "c"])
    assert torch.isfinite(loss) and loss > 0
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in reader.parameters() if p.grad is not None)


def test_codes_are_taken_apart_as_the_codec_makes_them():
    codec = trained_codec()[0]
    codes = torch.arange(codec.vocab_size)
    top = (codec.fsq.levels - 1) / 2
    rest = codes
    for number, levels in enumerate(codec.levels):
        value = codec.fsq.dequantize(codes)[:, number]
        assert torch.equal(((value + 1) * top[number]).round().long(), rest % levels)
        rest = rest // levels
    assert not rest.any()


def test_its_file_brings_it_back_and_knows_whose_codes_it_reads(trained, tmp_path):
    reader, _ = trained
    save_reader(reader, tmp_path / READER, PARTS)
    codes, texts = spoken(5, seed=4)
    there = load_matching_reader(tmp_path, PARTS)
    assert there.text_mismatch(texts, codes) == reader.text_mismatch(texts, codes)
    assert there.config == reader.config and there.levels == LEVELS
    assert load_matching_reader(tmp_path, dict(PARTS, **{"codec.safetensors": "another"})) is None
    assert load_matching_reader(tmp_path / "nowhere", PARTS) is None


@pytest.mark.parametrize("left", [100, -8])
def test_a_damaged_file_is_reported_with_what_to_do(trained, tmp_path, left):
    reader, _ = trained
    path = tmp_path / READER
    save_reader(reader, path, PARTS)
    whole = path.read_bytes()
    path.write_bytes(whole[:left] + bytes(max(0, -left)))
    for load in (lambda: load_matching_reader(tmp_path, PARTS), lambda: load_reader(path)):
        with pytest.raises(KitError, match=r"reader\.safetensors.*delete it, or run"):
            load()


@pytest.mark.parametrize("wrong", [{"width": 0}, {"most_repeats": 0}, {"rows": -1}, {"lr": 0.0}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(KitError, match=next(iter(wrong))):
        dataclasses.replace(CONFIG, **wrong)
