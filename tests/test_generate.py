"""Generation: the cache changes nothing, a batch changes nothing, and every end is told."""

import dataclasses

import pytest
import torch
from helpers import GPT, random_rows, tiny_model

from kit.config import ConfigError
from kit.generate import (
    GenerateConfig,
    GenerationError,
    decode,
    filter_logits,
    generate,
    length_limit,
    penalize,
    sample,
)
from kit.model import pack

GREEDY = GenerateConfig(temperature=0)
PENALIZED = GenerateConfig(temperature=0.7, repetition_penalty=1.3)
SAMPLED = GenerateConfig(temperature=1.0, top_k=0, top_p=1.0, seed=3)


@pytest.fixture(scope="module")
def model():
    """A random model with opinions: codes differ, and some rows find STOP before others."""
    model = tiny_model()
    model.code_head.weight.data *= 20
    for table in (model.code_position, model.text_embedding):
        table.weight.data += torch.randn_like(table.weight)
    for layer in model.gpt.h:
        layer.attn.c_attn.weight.data *= 8
        layer.attn.c_proj.weight.data *= 8
    model.code_head.bias.data[GPT.stop_code] = 0
    return model.eval()


def requests(count=8, seed=1):
    texts, _, cond = random_rows(GPT, count, seed)
    return texts, cond


def plain(spoken) -> list[tuple]:
    return [(row.codes.tolist(), row.stopped) for row in spoken]


@pytest.mark.parametrize(
    "config", [GREEDY, SAMPLED, PENALIZED], ids=["greedy", "sampled", "penalized"]
)
def test_the_cache_changes_no_code(model, config):
    uncached = dataclasses.replace(config, kv_cache=False)
    cached = plain(generate(model, *requests(), config))
    assert cached == plain(generate(model, *requests(), uncached))
    assert len({len(codes) for codes, _ in cached}) > 1  # rows left the batch at different times


def test_a_batch_of_unequal_prompts_is_each_alone(model):
    texts, cond = requests(8)
    together = plain(generate(model, texts, cond, GREEDY))
    alone = [plain(generate(model, texts[i : i + 1], cond[i : i + 1], GREEDY))[0] for i in range(8)]
    assert together == alone and len({len(t) for t in texts}) > 2


def test_greedy_codes_are_the_training_paths_own_choice(model):
    # Generation and training run different code over the same sequence: they must agree.
    texts, cond = requests(4)
    for i, row in enumerate(generate(model, texts, cond, GREEDY)):
        batch = pack(GPT, texts[i : i + 1], [row.codes.tolist()], cond[i : i + 1])
        logits = model.code_head(model.hidden(batch))[0, batch.code_at]
        logits[:, GPT.start_code] = float("-inf")
        chosen = logits.argmax(-1)[: len(row.codes) + 1].tolist()
        assert chosen[:-1] == row.codes.tolist()
        assert (chosen[-1] == GPT.stop_code) == row.stopped


def test_a_seed_decides_every_code(model):
    one, again = (plain(generate(model, *requests(), SAMPLED)) for _ in range(2))
    torch.manual_seed(99)
    assert one == again == plain(generate(model, *requests(), SAMPLED))
    assert one != plain(generate(model, *requests(), dataclasses.replace(SAMPLED, seed=4)))


def test_a_readings_log_probability_is_the_training_paths_own(model):
    texts, cond = requests(8)
    rows = generate(model, texts, cond, dataclasses.replace(SAMPLED, top_k=5))
    assert any(row.stopped for row in rows)
    for text, reference, row in zip(texts, cond, rows):
        batch = pack(GPT, [text], [row.codes.tolist()], reference[None])
        hidden = model.hidden(batch).flatten(0, 1)[batch.code_at]
        logits = model.code_head(hidden).float()
        logits[:, GPT.start_code] = float("-inf")
        expected = logits.log_softmax(-1).gather(1, batch.code_targets[:, None])[:, 0]
        mean = expected[: len(row.codes) + row.stopped].mean().item()
        assert row.log_prob == pytest.approx(mean, rel=1e-3)


def test_of_several_candidates_the_likeliest_is_kept(model):
    texts, cond = requests(4)
    four = dataclasses.replace(SAMPLED, candidates=4)
    all_of_them = decode(
        model, [t for t in texts for _ in range(4)], cond.repeat_interleave(4, 0), four
    )
    for number, kept in enumerate(generate(model, texts, cond, four)):
        own = all_of_them[4 * number : 4 * number + 4]
        ended = [r for r in own if r.stopped] or own
        assert kept.stopped == any(r.stopped for r in own)
        assert kept.log_prob == max(r.log_prob for r in ended)
        assert any(torch.equal(kept.codes, r.codes) for r in ended)
    greedy = dataclasses.replace(GREEDY, candidates=4)
    assert plain(generate(model, texts, cond, greedy)) == plain(
        generate(model, texts, cond, GREEDY)
    )


def test_generation_leaves_the_global_generator_alone(model):
    before = torch.get_rng_state()
    generate(model, *requests(), SAMPLED)
    assert torch.equal(torch.get_rng_state(), before)


def with_stop(model, bias: float):
    stopping = tiny_model()
    stopping.load_state_dict(model.state_dict())
    stopping.code_head.bias.data[GPT.stop_code] = bias
    return stopping


def test_a_row_that_ends_says_so(model):
    for row in generate(with_stop(model, 1e4), *requests(), GREEDY):
        assert row.stopped and len(row.codes) == 0


def test_a_row_that_is_cut_says_so(model):
    texts, cond = requests()
    config = dataclasses.replace(GREEDY, max_codes_per_text_id=0.5)
    spoken = generate(with_stop(model, -1e4), texts, cond, config)
    assert not any(row.stopped for row in spoken)
    limits = [length_limit(GPT, config, len(t)) for t in texts]
    assert [len(row.codes) for row in spoken] == limits
    assert limits == [min(39, len(t) // 2 + 40) for t in texts]


def test_neither_start_nor_stop_is_ever_among_the_codes(model):
    for row in generate(model, *requests(), dataclasses.replace(SAMPLED, temperature=5.0)):
        assert row.codes.numel() == 0 or row.codes.max() < GPT.start_code


@pytest.mark.parametrize("count", [1, 7, 30])
@pytest.mark.parametrize("bias", [-1e4, 1e4])
def test_an_exact_number_of_codes_is_spoken(model, count, bias):
    config = dataclasses.replace(GREEDY, exact_codes=count)
    spoken = generate(with_stop(model, bias), *requests(), config)
    assert [len(row.codes) for row in spoken] == [count] * 8


def test_more_exact_codes_than_positions_are_refused(model):
    with pytest.raises(GenerationError, match="39 positions"):
        generate(model, *requests(), dataclasses.replace(GREEDY, exact_codes=100))


@pytest.mark.parametrize("length", [0, 19, 500])
def test_a_text_that_does_not_fit_names_the_limit(model, length):
    with pytest.raises(GenerationError, match=rf"{length} ids .* 1 to 18 fit.* Split it"):
        generate(model, [[1, 2], [1] * length], torch.randn(2, 8, 5), GREEDY)


def test_the_longest_text_fits(model):
    assert generate(model, [[1] * 18], torch.randn(1, 8, 5), GREEDY)[0].codes.numel() <= 39


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_damaged_weights_are_told(model, value):
    damaged = with_stop(model, 0.0)
    damaged.gpt.h[1].mlp.c_fc.weight.data[3, 3] = value
    with pytest.raises(GenerationError, match="not finite"):
        generate(damaged, *requests(), GREEDY)


def reference_filter(row: list[float], config: GenerateConfig) -> set[int]:
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


SETTINGS = [
    GenerateConfig(temperature=t, top_k=k, top_p=p)
    for t in (0.3, 1.0, 2.0)
    for k in (0, 1, 5, 100)
    for p in (0.1, 0.8, 1.0)
]


@pytest.mark.parametrize("config", SETTINGS, ids=lambda c: f"{c.temperature}-{c.top_k}-{c.top_p}")
def test_filters_follow_their_definitions(config):
    logits = torch.randn(10, 40, generator=torch.Generator().manual_seed(0)) * 2
    found = filter_logits(logits, config)
    for row, kept in zip(logits.tolist(), found):
        assert set(torch.isfinite(kept).nonzero()[:, 0].tolist()) == reference_filter(row, config)
    inside = torch.isfinite(found)
    assert torch.allclose(found[inside], logits[inside] / config.temperature)


def test_filters_are_transformers_own():
    tf = pytest.importorskip("transformers", reason="transformers is not installed")
    logits = torch.randn(10, 40, generator=torch.Generator().manual_seed(0)) * 2
    for config in SETTINGS:
        chain = [tf.TemperatureLogitsWarper(float(config.temperature))]
        chain += [tf.TopKLogitsWarper(config.top_k)] if config.top_k else []
        chain += [tf.TopPLogitsWarper(config.top_p)] if config.top_p < 1 else []
        wanted = logits
        for step in chain:
            wanted = step(None, wanted)
        assert torch.allclose(filter_logits(logits, config), wanted), config


def test_repetition_penalty_is_transformers_own():
    tf = pytest.importorskip("transformers", reason="transformers is not installed")
    logits, ids = torch.randn(3, 20), torch.randint(20, (3, 6))
    seen = torch.zeros(3, 20, dtype=torch.bool).scatter(1, ids, True)
    wanted = tf.RepetitionPenaltyLogitsProcessor(1.4)(ids, logits.clone())
    assert torch.allclose(penalize(logits, seen, 1.4), wanted)


def test_repetition_penalty_by_hand():
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0]])
    seen = torch.tensor([[True, True, False, False]])
    assert penalize(logits, seen, 2.0).tolist() == [[1.0, -4.0, 2.0, -2.0]]
    assert penalize(logits, seen, 1.0) is logits


def test_drawing_follows_the_probabilities():
    logits = torch.tensor([[0.0, 1.0, 2.0]]).expand(20_000, 3)
    config = GenerateConfig(temperature=1, top_k=0, top_p=1)
    drawn = sample(logits, config, torch.Generator().manual_seed(0)).bincount() / 20_000
    assert torch.allclose(drawn, logits[0].softmax(0), atol=0.02)


def test_temperature_zero_takes_the_best_and_low_ones_come_near():
    logits = torch.randn(50, 30)
    generator = torch.Generator().manual_seed(0)
    assert torch.equal(sample(logits, GREEDY, generator), logits.argmax(-1))
    nearly = GenerateConfig(temperature=1e-3, top_k=0, top_p=1)
    assert (sample(logits, nearly, generator) == logits.argmax(-1)).float().mean() > 0.9


WRONG = [("temperature", -0.1), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -1)]


@pytest.mark.parametrize(("field", "value"), [*WRONG, ("repetition_penalty", 0.0)])
def test_settings_out_of_range_are_refused(field, value):
    with pytest.raises(ConfigError, match=f"GenerateConfig.{field} = {value}"):
        GenerateConfig(**{field: value})
