"""How surely a reading follows its text: the head's looks, the best way, what it decides."""

import dataclasses
import itertools
import math

import pytest
import torch
from helpers import GPT, random_rows, tiny_model

from kit.inference import candidates
from kit.inference.candidates import (
    FLOOR,
    alignment_scores,
    best_path_scores,
    text_attention,
)
from kit.inference.decoder import Decoder, DecoderConfig
from kit.inference.generate import decode, generate
from kit.inference.sampling import GenerateConfig, candidate_seed
from kit.model.sequence import pack
from kit.model.text_attention import AlignmentHead, find_alignment_head, text_attention_maps

HEAD = AlignmentHead(1, 1)


@pytest.fixture(scope="module")
def model():
    """A random model whose heads look at some pieces more than at others."""
    made = tiny_model().eval()
    for layer in made.gpt.h:
        layer.attn.c_attn.weight.data *= 10
    return made


def readings():
    """Texts and readings of unequal length, references."""
    texts, codes, cond = random_rows(GPT, 5, seed=2)
    return texts, [torch.tensor(row) for row in codes], cond


@pytest.mark.parametrize("head", [HEAD, AlignmentHead(0, 0)])
@torch.inference_mode()
def test_the_looks_are_those_of_the_models_own_attention(model, head):
    texts, codes, cond = readings()
    decoder = Decoder(model, DecoderConfig(alignment_head=head))
    looks, pieces = text_attention(decoder, texts, cond, codes)
    for i, (text, said) in enumerate(zip(texts, codes)):
        batch = pack(GPT, [text], [said.tolist()], cond[i : i + 1])
        wanted = text_attention_maps(model, batch)[head][: len(said) + 1]
        wanted = wanted / wanted.sum(-1, keepdim=True)
        assert pieces[i] == wanted.shape[1]
        found = looks[i, : len(said) + 1, looks.shape[2] - wanted.shape[1] :]
        assert torch.allclose(found, wanted, atol=1e-5)
        assert not looks[i, :, : looks.shape[2] - wanted.shape[1]].any()


def score_by_hand(looks: torch.Tensor) -> float:
    """The best of all ways from the first piece of a map (Q, T) to its last."""
    codes, pieces = looks.shape
    best = math.log(FLOOR) * codes
    for turns in itertools.combinations(range(1, codes), pieces - 1):
        piece = [sum(n >= turn for turn in turns) for n in range(codes)]
        gains = [math.log(looks[n, at] + FLOOR) for n, at in enumerate(piece)]
        best = max(best, sum(gains))
    return best / codes


def test_the_best_path_is_the_best_of_all():
    random = torch.Generator().manual_seed(0)
    lengths = torch.tensor([7, 4, 6, 3])
    pieces = torch.tensor([4, 4, 2, 1])
    looks = torch.rand(4, 7, 4, generator=random)
    for i in range(4):
        looks[i, :, : 4 - pieces[i]] = 0
    found = best_path_scores(looks, pieces, lengths)
    for i in range(4):
        own = looks[i, : lengths[i], 4 - pieces[i] :]
        assert found[i].item() == pytest.approx(score_by_hand(own), rel=1e-5)


def test_a_piece_left_out_or_said_twice_costs_and_too_few_codes_are_the_worst():
    straight = torch.eye(6).repeat_interleave(3, 0)
    left_out = straight[[n for n in range(18) if n // 3 != 3] + [17] * 3]
    twice = straight[[*range(12), *range(6, 12), 15, 17]][:18]
    short = torch.cat((straight[::6], torch.zeros(15, 6)))
    maps = torch.stack((straight, left_out, twice, short))
    lengths = torch.tensor([18, 18, 18, 3])
    good, *slips, worst = best_path_scores(maps, torch.tensor([6] * 4), lengths).tolist()
    assert good == pytest.approx(0, abs=0.01)
    assert max(slips) < good - 0.2
    assert worst == pytest.approx(math.log(FLOOR))


def test_readings_are_scored_alike_alone_and_together(model, monkeypatch):
    texts, codes, cond = readings()
    decoder = Decoder(model, DecoderConfig(alignment_head=HEAD))
    together = alignment_scores(decoder, texts, cond, codes)
    assert len(set(together)) == len(texts)
    monkeypatch.setitem(candidates.BATCH_ELEMENTS, "cpu", 1)
    assert alignment_scores(decoder, texts, cond, codes) == pytest.approx(together, rel=1e-4)
    pieces = [[mel] for mel in cond]
    assert alignment_scores(decoder, texts, pieces, codes) == pytest.approx(together, rel=1e-4)


def test_of_several_candidates_the_one_that_follows_the_text_is_kept(model):
    config = GenerateConfig(temperature=2.0, top_k=0, best_of=5, max_codes_per_text_id=1.0)
    texts, _, cond = readings()
    decoder = Decoder(model, DecoderConfig(alignment_head=HEAD))
    each = [text for text in texts for _ in range(5)]
    references = cond.repeat_interleave(5, 0)
    seeds = [candidate_seed(config, text, i % 5) for i, text in enumerate(each)]
    rows = decode(decoder, each, references, config, seeds)
    sure = alignment_scores(decoder, each, references, [row.codes for row in rows])
    choices = []
    for follow in (0.0, 1.5, 1e6):
        found = generate(
            decoder, texts, cond, dataclasses.replace(config, follow=follow, retries=0)
        )
        worth = [row.log_prob + follow * nats for row, nats in zip(rows, sure)]
        for number, kept in enumerate(found):
            own = range(5 * number, 5 * number + 5)
            best = max(own, key=lambda i: (rows[i].stopped, worth[i]))
            assert torch.equal(kept.codes, rows[best].codes)
        choices.append([row.log_prob for row in found])
    assert choices[0] != choices[2]
    without = generate(model, texts, cond, dataclasses.replace(config, retries=0))
    assert [row.log_prob for row in without] == choices[0], "no head is known: likelihood alone"


def test_a_model_that_has_not_learnt_to_read_has_no_such_head(model):
    texts, codes, cond = readings()
    rows = [
        pack(GPT, [t], [c.tolist()], cond[i : i + 1]) for i, (t, c) in enumerate(zip(texts, codes))
    ]
    assert find_alignment_head(model, rows) is None
