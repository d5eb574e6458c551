"""The code reader: what it learns, how badly codes fit a text, its file; alignment scores."""

import dataclasses
import itertools
import math
import random

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
    rng = random.Random(seed)
    codes, texts = [], []
    for _ in range(count):
        letters = [n for n, _ in itertools.groupby(rng.choices(range(6), k=6))]
        row = [rng.choice(((n, n), (n, n + 6, n, n + 6))) for n in letters]
        codes.append(torch.tensor(sum(row, ())))
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


def test_it_transcribes_new_codes_and_reports_its_error_rate(trained):
    reader, fit_schedule = trained
    codes, texts = spoken(20, seed=2)
    assert sum(a == b for a, b in zip(reader.transcribe(codes), texts)) >= 18
    assert fit_schedule.figure < 0.05 and fit_schedule.ending.startswith("after 150 steps")


def test_codes_match_their_own_text_better_than_another(trained):
    reader = trained[0]
    codes, texts = spoken(20, seed=2)
    own = reader.text_mismatch(texts, codes)
    others = reader.text_mismatch([text[2:] + text[:1] for text in texts], codes)
    assert max(own) < min(others) and min(own) >= 0
    alone = [reader.text_mismatch([text], [row])[0] for text, row in zip(texts, codes)]
    assert own == pytest.approx(alone, abs=0.2)  # a longer row's blanks reach a few codes in


def test_too_few_codes_and_texts_without_letters_get_a_score_not_an_error(trained):
    reader, _ = trained
    codes = [torch.tensor([0, 1]), torch.tensor([], dtype=torch.long), torch.tensor([0, 6, 0])]
    few, none, silent = reader.text_mismatch(["abcdef", "a", "?!"], codes)
    worst = candidates.MAX_MISMATCH
    assert few == none == worst >= silent >= 0
    assert reader.text_mismatch(["a"], [torch.tensor([], dtype=torch.long)]) == [worst]


def test_a_saved_reader_is_loaded_only_for_the_tokenizer_and_codec_it_was_trained_with(
    trained, tmp_path
):
    reader, _ = trained
    candidates.save_reader(reader, tmp_path / READER, PARTS)
    codes, texts = spoken(5, seed=4)
    load = candidates.load_matching_reader
    loaded = load(tmp_path, PARTS)
    assert loaded.text_mismatch(texts, codes) == reader.text_mismatch(texts, codes)
    assert loaded.config == reader.config and loaded.levels == LEVELS
    assert load(tmp_path, PARTS | {"codec.safetensors": "another"}) is None
    assert load(tmp_path / "nowhere", PARTS) is None


def test_the_loss_of_too_few_codes_is_finite():
    reader = made()
    loss = reader.loss([torch.tensor([0, 1]), torch.tensor([2, 8, 2])], ["abcdef", "c"])
    assert torch.isfinite(loss) and loss > 0
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in reader.parameters() if p.grad is not None)


HEAD = AlignmentHead(1, 1)


@pytest.fixture(scope="module")
def model():
    """A random model whose heads attend to some tokens more than to others."""
    model = tiny_model().eval()
    for layer in model.gpt.h:
        layer.attn.c_attn.weight.data *= 10
    return model


def candidate_rows():
    """Texts and codes of unequal length, references."""
    texts, codes, cond = random_rows(GPT, 5, seed=2)
    return texts, [torch.tensor(row) for row in codes], cond


@torch.inference_mode()
def test_text_attention_is_the_models_own(model):
    texts, codes, cond = candidate_rows()
    decoder = Decoder(model, alignment_head=HEAD)
    attention, tokens = candidates.text_attention(decoder, texts, cond, codes)
    for i, (text, row_codes) in enumerate(zip(texts, codes)):
        batch = pack(GPT, [text], [row_codes.tolist()], cond[i : i + 1])
        count = len(row_codes) + 1
        expected = text_attention_maps(model, batch)[HEAD][:count]
        expected = expected / expected.sum(-1, keepdim=True)
        assert tokens[i] == expected.shape[1]
        padding, actual = attention[i].tensor_split([-expected.shape[1]], dim=1)
        assert torch.allclose(actual[:count], expected, atol=1e-5) and not padding.any()


def score_by_hand(attention: torch.Tensor) -> float:
    """The best of all paths from the first token of a map (Q, T) to its last."""
    codes, tokens = attention.shape
    best = math.log(FLOOR) * codes
    for steps in itertools.combinations(range(1, codes), tokens - 1):
        path = [sum(n >= step for step in steps) for n in range(codes)]
        best = max(best, sum(math.log(attention[n, i] + FLOOR) for n, i in enumerate(path)))
    return best / codes


def test_the_best_path_is_the_best_of_all_paths():
    torch.manual_seed(0)
    lengths = torch.tensor([7, 4, 6, 3, 3])
    tokens = torch.tensor([4, 4, 2, 1, 4])  # the last has too few codes for its tokens
    attention = torch.rand(5, 7, 4)
    attention *= torch.arange(4) >= 4 - tokens[:, None, None]
    scores = candidates.best_path_scores(attention, tokens, lengths)
    by_hand = [score_by_hand(attention[i, : lengths[i], 4 - tokens[i] :]) for i in range(5)]
    assert scores[-1].item() == pytest.approx(math.log(FLOOR))
    assert scores.tolist() == pytest.approx(by_hand, rel=1e-5)


def test_of_several_candidates_the_one_that_follows_the_text_is_chosen(model):
    shape = {"best_of": 5, "max_codes_per_text_id": 1.0, "retries": 0}
    config = GenerateConfig(temperature=2.0, top_k=0, **shape)
    texts, _, cond = candidate_rows()
    decoder = Decoder(model, alignment_head=HEAD)
    seeds = [[candidate_seed(config, text, i) for i in range(5)] for text in texts]
    rows = decode(decoder, texts, cond, config, seeds)
    assert len({tuple(row.codes.tolist()) for row in rows[:5]}) > 1, "each was sampled"
    repeated = [text for text in texts for _ in range(5)], cond.repeat_interleave(5, 0)
    alignment = alignment_scores(decoder, *repeated, [row.codes for row in rows])
    log_probs = []
    for follow in (0.0, 1.5, 1e6):
        chosen = generate(decoder, texts, cond, dataclasses.replace(config, follow=follow))
        scores = [(row.stopped, row.log_prob + follow * n) for row, n in zip(rows, alignment)]
        for first, row in zip(range(0, len(rows), 5), chosen, strict=True):
            best = max(range(first, first + 5), key=scores.__getitem__)
            assert torch.equal(row.codes, rows[best].codes)
        log_probs.append([row.log_prob for row in chosen])
    assert log_probs[0] != log_probs[2]
    without_head = [row.log_prob for row in generate(model, texts, cond, config)]
    assert without_head == log_probs[0], "by likelihood alone"


def test_scores_do_not_depend_on_the_batch(model, monkeypatch):
    texts, codes, cond = candidate_rows()
    decoder = Decoder(model, alignment_head=HEAD)
    together = alignment_scores(decoder, texts, cond, codes)
    assert len(set(together)) == len(texts)
    monkeypatch.setitem(candidates.BATCH_ELEMENTS, "cpu", 1)
    assert alignment_scores(decoder, texts, cond, codes) == pytest.approx(together, rel=1e-4)
    segments = [[mel] for mel in cond]
    assert alignment_scores(decoder, texts, segments, codes) == pytest.approx(together, rel=1e-4)
