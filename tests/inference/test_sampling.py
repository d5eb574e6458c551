"""Sampling: filters by definition and as transformers has them, draws that a seed decides."""

import re

import pytest
import torch

from kit.base.errors import KitError
from kit.inference.generate import (
    GenerateConfig,
    Noise,
    candidate_seed,
    filter_logits,
    penalize,
    sample,
)

CPU = torch.device("cpu")
OPEN = GenerateConfig(temperature=1, top_k=0, top_p=1)
SETTINGS = [
    GenerateConfig(temperature=t, top_k=k, top_p=p)
    for t in (0.3, 1.0, 2.0)
    for k in (0, 1, 5, 100)
    for p in (0.1, 0.8, 1.0)
]


def random_logits(rows: int = 10, codes: int = 40) -> torch.Tensor:
    return 2 * torch.randn(rows, codes, generator=torch.Generator().manual_seed(0))


def filtered(logits: torch.Tensor, config: GenerateConfig) -> torch.Tensor:
    """The shortlist as full rows (B, V): -inf where a code may not be drawn."""
    best, codes = filter_logits(logits, config)
    return torch.full_like(logits, float("-inf")).scatter(1, codes, best)


def allowed(row: list[float], config: GenerateConfig) -> set[int]:
    """Codes that may be drawn, after the definitions: the k best, then the fewest of mass p."""
    order = sorted(range(len(row)), key=lambda i: -row[i])
    if config.top_k:
        order = order[: config.top_k]
    scaled = torch.tensor([row[i] / config.temperature for i in order], dtype=torch.float64)
    kept, mass = set(), 0.0
    for i, share in zip(order, scaled.softmax(0).tolist()):
        if config.top_p < 1 and mass > config.top_p:
            break
        kept.add(i)
        mass += share
    return kept


@pytest.mark.parametrize("config", SETTINGS, ids=lambda c: f"{c.temperature}-{c.top_k}-{c.top_p}")
def test_filters_follow_their_definitions(config):
    logits = random_logits()
    found = filtered(logits, config)
    for row, kept in zip(logits.tolist(), found):
        assert set(torch.isfinite(kept).nonzero()[:, 0].tolist()) == allowed(row, config)
    inside = torch.isfinite(found)
    assert torch.allclose(found[inside], logits[inside] / config.temperature)


def test_filters_are_transformers_own():
    tf = pytest.importorskip("transformers", reason="transformers is not installed")
    logits = random_logits()
    for config in SETTINGS:
        chain = [tf.TemperatureLogitsWarper(float(config.temperature))]
        chain += [tf.TopKLogitsWarper(config.top_k)] if config.top_k else []
        chain += [tf.TopPLogitsWarper(config.top_p)] if config.top_p < 1 else []
        wanted = logits
        for step in chain:
            wanted = step(None, wanted)
        assert torch.allclose(filtered(logits, config), wanted), config


def test_repetition_penalty_is_transformers_own():
    tf = pytest.importorskip("transformers", reason="transformers is not installed")
    logits, ids = random_logits(3, 20), torch.arange(18).view(3, 6)
    seen = torch.zeros(3, 20, dtype=torch.bool).scatter(1, ids, True)
    wanted = tf.RepetitionPenaltyLogitsProcessor(1.4)(ids, logits.clone())
    assert torch.allclose(penalize(logits, seen, 1.4), wanted)


def test_repetition_penalty_by_hand():
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0]])
    seen = torch.tensor([[True, True, False, False]])
    assert penalize(logits, seen, 2.0).tolist() == [[1.0, -4.0, 2.0, -2.0]]
    assert penalize(logits, seen, 1.0).tolist() == logits.tolist()


@pytest.mark.parametrize("config", [OPEN, GenerateConfig(temperature=0.5, top_k=2, top_p=1)])
def test_drawing_follows_the_probabilities(config):
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(2_000, 4)
    noise = Noise([*range(2_000)], config.choices(4), CPU)
    drawn = torch.stack([sample(logits, config, noise.next()) for _ in range(10)])
    shares = drawn.flatten().bincount(minlength=4) / drawn.numel()
    assert torch.allclose(shares, filtered(logits, config)[0].softmax(0), atol=0.015)


def test_temperature_zero_takes_the_best_and_low_ones_come_near():
    logits = random_logits(50, 30)
    assert torch.equal(sample(logits, GenerateConfig(temperature=0), None), logits.argmax(-1))
    for temperature in (1e-5, 1e-30, 1e-300):
        config = GenerateConfig(temperature=temperature, top_k=0, top_p=1)
        drawn = sample(logits, config, Noise([*range(50)], 30, CPU).next())
        assert torch.equal(drawn, logits.argmax(-1))


def test_a_code_that_is_out_of_the_question_is_never_drawn():
    logits = torch.tensor([[0.0, float("-inf"), 0.0, -1e30]]).expand(500, 4)
    noise = Noise([*range(500)], 4, CPU)
    drawn = torch.stack([sample(logits, OPEN, noise.next()) for _ in range(10)])
    assert set(drawn.flatten().tolist()) == {0, 2}


def test_top_k_beyond_the_vocabulary_keeps_all():
    config = GenerateConfig(top_k=1_000)
    assert config.choices(40) == 40 and GenerateConfig(top_k=0).choices(40) == 40
    assert filter_logits(random_logits(), config)[1].shape == (10, 40)


def test_a_row_draws_the_same_whoever_is_beside_it_and_whoever_leaves():
    alone, beside = Noise([7], 6, CPU, steps=4), Noise([3, 7, 9], 6, CPU, steps=4)
    wanted = torch.stack([alone.next()[0] for _ in range(11)])
    found = [beside.next()[1] for _ in range(6)]  # leaves in the middle of a block
    beside.keep(torch.tensor([False, True, True]))
    found += [beside.next()[0] for _ in range(5)]
    assert torch.equal(torch.stack(found), wanted)
    before = Noise([1, 7], 6, CPU)
    before.keep(torch.tensor([False, True]))  # before anything was drawn
    assert torch.equal(before.next()[0], wanted[0])


def test_a_reading_has_a_seed_of_its_own():
    config = GenerateConfig(seed=1)
    seeds = {candidate_seed(config, text, n) for text in ([1, 2], [1, 3], [12]) for n in range(3)}
    assert len(seeds | {candidate_seed(GenerateConfig(seed=2), [1, 2], 0)}) == 10
    assert candidate_seed(config, [1, 2], 0) == candidate_seed(
        GenerateConfig(seed=1, top_k=3), [1, 2], 0
    )


NAN, INF = float("nan"), float("inf")
WRONG = [
    *(("temperature", value) for value in (-0.1, NAN, INF, 1e300, "warm", None)),
    *(("top_p", value) for value in (0.0, 1.1, NAN)),
    *(("top_k", value) for value in (-1, 2.5)),
    *(("repetition_penalty", value) for value in (0.0, NAN, INF)),
    *(("best_of", value) for value in (0, 1.5, 65, True)),
    *(("retries", value) for value in (-1, 0.5, 21, 10**9)),
    *(("max_codes_per_text_id", value) for value in (-1.0, NAN, INF, 1e308)),
    *(("exact_codes", value) for value in (-1, 2.5)),
    *(("seed", value) for value in (None, 0.5)),
    ("kv_cache", "no"),
    *(("follow", value) for value in (-1.0, NAN)),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_settings_out_of_range_are_refused(field, value):
    value_text = re.escape(repr(value))
    wanted = rf"GenerateConfig.{field} (= {value_text}: \S+|must be .*got {value_text} )"
    with pytest.raises(KitError, match=wanted):
        GenerateConfig(**{field: value})
