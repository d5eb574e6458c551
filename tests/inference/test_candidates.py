"""The code reader: what it learns, how badly codes fit a text, its file; alignment scores."""

import dataclasses
import itertools
import math

import pytest
import torch
from helpers import GPT, random_rows, tiny_model

from kit.audio.fitting import FitSchedule
from kit.audio.recognizer import recognizer_schedule, train_recognizer
from kit.inference import candidates
from kit.inference.candidates import FLOOR, READER, CodeReader, alignment_scores
from kit.inference.decoder import Decoder
from kit.inference.generate import candidate_seed, decode, generate
from kit.model.sequence import pack
from kit.model.text_attention import AlignmentHead, text_attention_maps
from kit.settings import CodeReaderConfig, GenerateConfig

LETTERS = "abcdef"
LEVELS = (4, 3)  # 12 codes: two of them spell each letter
QUICK = {"steps": 150, "minutes": 0, "batch": 8, "lr": 1e-2, "look_every": 50}
CONFIG = CodeReaderConfig(width=32, blocks=1, rows=1, **QUICK)
PARTS = {"codec.safetensors": "a", "tokenizer.model": "b"}


def spoken(count: int, seed: int) -> tuple[list[torch.Tensor], list[str]]:
    """Codes and texts: each letter for two to four codes, of the two that mean it."""
    random = torch.Generator().manual_seed(seed)
    codes, texts = [], []
    for _ in range(count):
        drawn = torch.randint(len(LETTERS), (6,), generator=random).tolist()
        letters = [letter for letter, _ in itertools.groupby(drawn)]
        times = torch.randint(1, 4, (len(letters),), generator=random).tolist()
        pairs = [[n, n + len(LETTERS)][:two] * 2 for n, two in zip(letters, times)]
        codes.append(torch.tensor(list(itertools.chain(*pairs))))
        texts.append("".join(LETTERS[n] for n in letters))
    return codes, texts


def made() -> CodeReader:
    torch.manual_seed(0)
    return CodeReader(CONFIG, LETTERS, LEVELS)


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
    assert sum(a == b for a, b in zip(reader.transcribe(codes), texts)) >= 18
    assert fit_schedule.figure < 0.05 and fit_schedule.ending.startswith("after 150 steps")


def test_a_reading_that_says_its_text_fits_better_than_one_that_does_not(trained):
    reader = trained[0]
    codes, texts = spoken(20, seed=2)
    own = reader.text_mismatch(texts, codes)
    others = reader.text_mismatch([text[2:] + text[:1] for text in texts], codes)
    assert max(own) < min(others) and min(own) >= 0
    alone = [reader.text_mismatch([text], [row])[0] for text, row in zip(texts, codes)]
    assert own == pytest.approx(alone, abs=0.2)  # a longer row's blanks reach a few codes in


def test_too_few_codes_none_at_all_and_no_letters_are_the_worst_there_is_not_an_error(trained):
    reader, _ = trained
    codes = [torch.tensor([0, 1]), torch.tensor([], dtype=torch.long), torch.tensor([0, 6, 0])]
    few, none, silent = reader.text_mismatch(["abcdef", "a", "?!"], codes)
    worst = candidates.MAX_MISMATCH
    assert few == none == worst >= silent >= 0
    assert reader.text_mismatch(["a"], [torch.tensor([], dtype=torch.long)]) == [worst]


def test_its_file_brings_it_back_and_knows_whose_codes_it_reads(trained, tmp_path):
    reader, _ = trained
    candidates.save_reader(reader, tmp_path / READER, PARTS)
    codes, texts = spoken(5, seed=4)
    load = candidates.load_matching_reader
    there = load(tmp_path, PARTS)
    assert there.text_mismatch(texts, codes) == reader.text_mismatch(texts, codes)
    assert there.config == reader.config and there.levels == LEVELS
    assert load(tmp_path, PARTS | {"codec.safetensors": "another"}) is None
    assert load(tmp_path / "nowhere", PARTS) is None


HEAD = AlignmentHead(1, 1)


@pytest.fixture(scope="module")
def model():
    """A random model whose heads attend to some tokens more than to others."""
    model = tiny_model().eval()
    for layer in model.gpt.h:
        layer.attn.c_attn.weight.data *= 10
    return model


def readings():
    """Texts and readings of unequal length, references."""
    texts, codes, cond = random_rows(GPT, 5, seed=2)
    return texts, [torch.tensor(row) for row in codes], cond


@torch.inference_mode()
def test_the_looks_are_those_of_the_models_own_attention(model):
    texts, codes, cond = readings()
    decoder = Decoder(model, alignment_head=HEAD)
    looks, pieces = candidates.text_attention(decoder, texts, cond, codes)
    for i, (text, said) in enumerate(zip(texts, codes)):
        batch = pack(GPT, [text], [said.tolist()], cond[i : i + 1])
        wanted = text_attention_maps(model, batch)[HEAD][: len(said) + 1]
        wanted = wanted / wanted.sum(-1, keepdim=True)
        assert pieces[i] == wanted.shape[1]
        padding, found = looks[i].split([looks.shape[2] - wanted.shape[1], wanted.shape[1]], dim=1)
        assert torch.allclose(found[: len(said) + 1], wanted, atol=1e-5) and not padding.any()


def score_by_hand(looks: torch.Tensor) -> float:
    """The best of all ways from the first piece of a map (Q, T) to its last."""
    codes, pieces = looks.shape
    best = math.log(FLOOR) * codes
    for turns in itertools.combinations(range(1, codes), pieces - 1):
        piece = [sum(n >= turn for turn in turns) for n in range(codes)]
        best = max(best, sum(math.log(looks[n, at] + FLOOR) for n, at in enumerate(piece)))
    return best / codes


def test_the_best_path_is_the_best_of_all():
    random = torch.Generator().manual_seed(0)
    lengths = torch.tensor([7, 4, 6, 3, 3])
    pieces = torch.tensor([4, 4, 2, 1, 4])  # the last has too few codes for its pieces
    looks = torch.rand(5, 7, 4, generator=random)
    looks *= torch.arange(4) >= 4 - pieces[:, None, None]
    found = candidates.best_path_scores(looks, pieces, lengths)
    by_hand = [score_by_hand(looks[i, : lengths[i], 4 - pieces[i] :]) for i in range(5)]
    assert found[-1].item() == pytest.approx(math.log(FLOOR))
    assert found.tolist() == pytest.approx(by_hand, rel=1e-5)


def test_of_several_candidates_the_one_that_follows_the_text_is_kept(model):
    shape = {"best_of": 5, "max_codes_per_text_id": 1.0, "retries": 0}
    config = GenerateConfig(temperature=2.0, top_k=0, **shape)
    texts, _, cond = readings()
    decoder = Decoder(model, alignment_head=HEAD)
    each = [text for text in texts for _ in range(5)]
    references = cond.repeat_interleave(5, 0)
    seeds = [[candidate_seed(config, text, i % 5)] for i, text in enumerate(each)]
    rows = decode(decoder, each, references, config, seeds)
    assert len({tuple(row.codes.tolist()) for row in rows[:5]}) > 1, "drawn apart"
    sure = alignment_scores(decoder, each, references, [row.codes for row in rows])
    choices = []
    for follow in (0.0, 1.5, 1e6):
        found = generate(decoder, texts, cond, dataclasses.replace(config, follow=follow))
        worth = [(row.stopped, row.log_prob + follow * nats) for row, nats in zip(rows, sure)]
        for first, kept in zip(range(0, len(rows), 5), found, strict=True):
            best = max(range(first, first + 5), key=lambda i: worth[i])
            assert torch.equal(kept.codes, rows[best].codes)
        choices.append([row.log_prob for row in found])
    assert choices[0] != choices[2]
    without = [row.log_prob for row in generate(model, texts, cond, config)]
    assert without == choices[0], "no head is known: likelihood alone"


def test_training_on_rows_without_a_way_through_stays_finite():
    reader = made()
    loss = reader.loss([torch.tensor([0, 1]), torch.tensor([2, 8, 2])], ["abcdef", "c"])
    assert torch.isfinite(loss) and loss > 0
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in reader.parameters() if p.grad is not None)


def test_rows_are_scored_alike_alone_and_together(model, monkeypatch):
    texts, codes, cond = readings()
    decoder = Decoder(model, alignment_head=HEAD)
    together = alignment_scores(decoder, texts, cond, codes)
    assert len(set(together)) == len(texts)
    monkeypatch.setitem(candidates.BATCH_ELEMENTS, "cpu", 1)
    assert alignment_scores(decoder, texts, cond, codes) == pytest.approx(together, rel=1e-4)
    pieces = [[mel] for mel in cond]
    assert alignment_scores(decoder, texts, pieces, codes) == pytest.approx(together, rel=1e-4)
