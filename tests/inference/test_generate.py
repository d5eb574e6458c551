"""Generation: the cache changes nothing, a batch changes nothing, and every end is reported."""

import copy
import dataclasses
import itertools

import pytest
import torch
from helpers import GPT, graphed, opinionated_model, pretended_capture, random_rows, training_states
from torch import Tensor

from kit.base.errors import Note, SpeechError
from kit.inference import decoder_steps
from kit.inference import generate as generation
from kit.inference.decoder import Decoder
from kit.inference.generate import Noise, candidate_seed, generate
from kit.settings import GenerateConfig

GREEDY = GenerateConfig(temperature=0)
PENALIZED = GenerateConfig(temperature=0.7, repetition_penalty=1.3)
SAMPLED = GenerateConfig(temperature=1.0, top_k=0, top_p=1.0, seed=3)
MANY = dataclasses.replace(SAMPLED, best_of=4)
GUIDED = dataclasses.replace(SAMPLED, guidance_scale=2.0)


@pytest.fixture(scope="module")
def model():
    """A random model with opinions: codes differ, and some rows find STOP before others."""
    model = opinionated_model(text_dropout=0.1)
    model.code_head.bias.data[GPT.stop_code] = 0
    return model


def requests(count=8, seed=1):
    texts, _, cond = random_rows(GPT, count, seed)
    return texts, cond


def plain(spoken) -> list[tuple]:
    return [(row.codes.tolist(), row.stopped) for row in spoken]


@pytest.mark.parametrize("config", [GREEDY, SAMPLED, PENALIZED, MANY, GUIDED])
def test_codes_do_not_depend_on_the_cache_and_the_batch(model, config):
    texts, cond = requests()
    decoder = Decoder(model)
    together = plain(generate(decoder, texts, cond, config))
    uncached = dataclasses.replace(config, kv_cache=False)
    assert together == plain(generate(decoder, texts, cond, uncached))
    alone = [generate(decoder, [text], mel[None], config)[0] for text, mel in zip(texts, cond)]
    assert together == plain(alone) and len({len(text) for text in texts}) > 2
    assert len({len(codes) for codes, _ in together}) > 1  # rows left the batch at different times


@torch.no_grad()
def code_logits(model, *row) -> Tensor:
    """What the training path expects at each code and after the last, (N + 1, V)."""
    return model.code_head(training_states(model, *row))


def mean_log_prob(logits: Tensor, row) -> float:
    """Of the codes of `row`, by the logits at each; START is ruled out."""
    logits[:, GPT.start_code] = float("-inf")
    codes = torch.tensor([*row.codes, GPT.stop_code])[: len(row.codes) + row.stopped, None]
    return logits.log_softmax(-1)[: len(codes)].gather(1, codes).mean().item()


def test_guidance_is_the_logits_with_text_away_from_those_without(model):
    # The training path's own choice: cond_logits + (scale - 1) * (cond_logits - uncond_logits).
    texts, cond = requests(4)
    config = dataclasses.replace(GREEDY, guidance_scale=3.0)
    rows = generate(model, texts, cond, config)
    assert plain(rows) != plain(generate(model, texts, cond, GREEDY))
    for text, mel, row in zip(texts, cond, rows):
        codes = row.codes.tolist()
        cond_logits = code_logits(model, text, codes, mel)
        uncond_logits = code_logits(model, [], codes, mel)
        guided = cond_logits + 2.0 * (cond_logits - uncond_logits)
        guided[:, GPT.start_code] = float("-inf")
        chosen = guided.argmax(-1).tolist()
        assert chosen[: len(codes)] == codes and (chosen[-1] == GPT.stop_code) == row.stopped
        # Its likelihood is computed without guidance.
        assert row.log_prob == pytest.approx(mean_log_prob(cond_logits, row), rel=1e-3)


def test_a_model_trained_without_text_dropout_has_no_guidance(model):
    untaught = copy.deepcopy(model)
    untaught.config = dataclasses.replace(model.config, text_dropout=0.0)
    expected = plain(generate(model, *requests(), SAMPLED))
    assert plain(generate(untaught, *requests(), GUIDED)) == expected


def test_a_seed_decides_every_code_and_the_global_generator_is_left_alone(model):
    before = torch.get_rng_state()
    one = plain(generate(model, *requests(), SAMPLED))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert one == plain(generate(model, *requests(), SAMPLED))
    assert one != plain(generate(model, *requests(), dataclasses.replace(SAMPLED, seed=4)))


def with_stop(model, bias: float):
    """The model, likelier or less likely to end."""
    stopping = copy.deepcopy(model)
    stopping.code_head.bias.data[GPT.stop_code] = bias
    return stopping


@pytest.fixture
def hesitant(model):
    """A model whose likeliest code is STOP, by so little that it is seldom drawn while hot."""
    hesitant = with_stop(model, 0.5)
    hesitant.code_head.weight.data.zero_()
    hesitant.code_head.bias.data[: GPT.stop_code] = 0
    return hesitant


HOT = dataclasses.replace(SAMPLED, temperature=32.0, max_codes_per_text_id=0, retries=9)


def test_a_truncated_text_is_generated_again_at_a_lower_temperature(hesitant):
    texts, cond = requests()
    first = generate(hesitant, texts, cond, dataclasses.replace(HOT, retries=0))
    rows = generate(hesitant, texts, cond, HOT)
    assert not all(row.stopped for row in first) and all(row.stopped for row in rows)
    for before, row in zip(first, rows):
        if before.stopped:  # was right at once: it stays
            assert torch.equal(row.codes, before.codes) and row.temperature == 32
        else:
            assert row.temperature in {32 / 2**n for n in range(1, 10)}
    alone = [generate(hesitant, [text], mel[None], HOT)[0] for text, mel in zip(texts, cond)]
    assert plain(alone) == plain(rows)


def test_a_row_says_whether_it_ended_or_was_truncated(model):
    texts, cond = requests()
    config = dataclasses.replace(GREEDY, max_codes_per_text_id=0.5)
    for row in generate(with_stop(model, 1e4), texts, cond, GREEDY):
        assert row.stopped and len(row.codes) == 0
    spoken = generate(with_stop(model, -1e4), texts, cond, config)
    assert not any(row.stopped for row in spoken)
    limits = [generation.length_limit(GPT, config, len(t)) for t in texts]
    assert [len(row.codes) for row in spoken] == limits
    assert limits == [min(39, len(t) // 2 + 40) for t in texts]


@pytest.mark.parametrize(("count", "bias"), [(1, -1e4), (30, 1e4)])
def test_an_exact_number_of_codes_is_spoken(model, count, bias):
    config = dataclasses.replace(GREEDY, exact_codes=count)
    spoken = generate(with_stop(model, bias), *requests(), config)
    assert [len(row.codes) for row in spoken] == [count] * 8


TOO_MUCH = [
    ([[1], [2]], {"exact_codes": 100}, "39 codes"),
    ([[1, 2], []], {}, "0 ids.* 1 to 18"),
    ([[1, 2], [1] * 19], {}, "19 ids.* 1 to 18.* split it"),
]


@pytest.mark.parametrize(("texts", "over", "facts"), TOO_MUCH)
def test_what_does_not_fit_names_the_limit(model, texts, over, facts):
    with pytest.raises(SpeechError, match=facts):
        generate(model, texts, torch.randn(2, 8, 5), dataclasses.replace(GREEDY, **over))


def test_activations_that_overflow_are_reported(model):
    huge = with_stop(model, 0.0)
    huge.gpt.h[0].mlp.c_proj.bias.data[3] = 1e6  # no fp16 number, a sound bf16 one
    generate(Decoder(huge, weights="bf16"), *requests(2), GREEDY)
    with pytest.raises(SpeechError, match=r"not finite.*Use bf16"):
        generate(Decoder(huge, weights="fp16"), *requests(2), GREEDY)


EXACT = dataclasses.replace(PENALIZED, exact_codes=35)
PACED = dataclasses.replace(SAMPLED, max_codes_per_text_id=0.5, top_k=7)
CONFIGS = [GREEDY, GenerateConfig(), SAMPLED, PENALIZED, MANY, GUIDED, EXACT, PACED]


def test_graphs_that_sample_give_the_same_codes(model, monkeypatch):
    # What CUDA graphs replay, step by step on the CPU: positions as tensors, one cache for all.
    monkeypatch.setattr("kit.inference.decoder_steps.BUCKET", 16)
    decoder = graphed(model, monkeypatch, states=True)
    decoder.check_every = 16  # as on a GPU
    eager = Decoder(model, states=True)
    for config in (*CONFIGS, dataclasses.replace(SAMPLED, kv_cache=False), GREEDY):
        for count in (1, 3):
            texts, cond = requests(count)
            actual = generate(decoder, texts, cond, config)
            expected = generate(eager, texts, cond, config)
            assert plain(actual) == plain(expected)
            for one, other in zip(actual, expected):
                assert one.log_prob == pytest.approx(other.log_prob, rel=1e-4)
                torch.testing.assert_close(one.states, other.states, rtol=1e-4, atol=1e-4)
    assert len(decoder.compiled.held) <= decoder_steps.MAX_HELD


@pytest.mark.parametrize("before", [0, 1])
def test_a_failed_capture_falls_back_to_eager_steps(model, before, monkeypatch):
    monkeypatch.setattr("kit.inference.decoder_steps.BUCKET", 16)

    def capture(work, undo, pool):
        if len(made) == before:
            work()  # as a warm-up that fails
            undo()
            raise RuntimeError("CUDA error: not permitted\nmore")
        made.append(1)
        return pretended_capture(work, undo, pool)

    for config in (PENALIZED, GUIDED):
        made = []
        decoder = graphed(model, monkeypatch, capture)
        texts, cond = requests(3)
        expected = plain(generate(model, texts, cond, config))
        for _ in range(2):
            assert plain(generate(decoder, texts, cond, config)) == expected
        assert len(made) == before and decoder.can_drop_rows
        assert decoder.ran.endswith("; no CUDA graph: CUDA error: not permitted")


def test_candidates_of_a_text_share_its_prompt(model, monkeypatch):
    texts, cond = requests(3)
    config = dataclasses.replace(MANY, guidance_scale=2.0)
    seeds = [[candidate_seed(config, text, i) for i in range(4)] for text in texts]
    repeated = [text for text in texts for _ in range(4)]
    repeated_cond = cond.repeat_interleave(4, 0)
    alone = [[seed] for text_seeds in seeds for seed in text_seeds]
    each = generation.decode(Decoder(model), repeated, repeated_cond, config, alone)
    for decoder in (Decoder(model), graphed(model, monkeypatch)):
        asked = short_of_memory(decoder, 32, monkeypatch)
        assert plain(generation.decode(decoder, texts, cond, config, seeds)) == plain(each)
        assert {prompts for _, prompts in asked} == {6}  # with and without their text


def short_of_memory(decoder, most: int, monkeypatch) -> list[tuple[int, int]]:
    """`decoder` as on a GPU that holds `most` rows; the rows and prompts of the batches it got."""
    asked = []
    prefill = decoder.prefill

    def checked(x, padding, longest, prompts):
        asked.append((len(prompts), len(x)))
        if len(prompts) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.30 GiB")
        return prefill(x, padding, longest, prompts)

    monkeypatch.setattr(decoder, "prefill", checked)
    return asked


@pytest.mark.parametrize(("graphs", "config"), [(False, MANY), (True, GREEDY), (True, GUIDED)])
def test_out_of_memory_the_batch_is_halved_and_decoded_again(model, graphs, config, monkeypatch):
    decoder = graphed(model, monkeypatch) if graphs else Decoder(model)
    texts, cond = requests(6)
    expected = plain(generate(model, texts, cond, config))
    short_of_memory(decoder, 4, monkeypatch)
    with pytest.warns(Note, match=r"a batch of (6|24) texts"):
        assert plain(generate(decoder, texts, cond, config)) == expected


def test_out_of_memory_with_one_text_says_what_to_do(model, monkeypatch):
    decoder = Decoder(model)
    texts, cond = requests(3)
    asked = short_of_memory(decoder, 0, monkeypatch)
    fix = pytest.raises(SpeechError, match=rf"{len(texts[0])} ids.*int8")
    with pytest.warns(Note, match="with 1"), fix:
        generate(decoder, texts, cond, GREEDY)
    assert [count for count, _ in asked] == [3, 1]


UNCACHED = dataclasses.replace(GREEDY, kv_cache=False)
FILTERED = dataclasses.replace(SAMPLED, top_k=5)


@torch.inference_mode()
@pytest.mark.parametrize("config", [GREEDY, FILTERED, UNCACHED, MANY])
def test_states_and_log_probabilities_are_those_of_training(model, config):
    texts, cond = requests()
    generated = generate(Decoder(model, states=True), texts, cond, config)
    assert len({len(row.codes) for row in generated}) > 1  # rows left the batch at different times
    assert any(row.stopped for row in generated)
    for text, mel, row in zip(texts, cond, generated, strict=True):
        expected = training_states(model, text, row.codes.tolist(), mel)
        assert row.states.dtype == torch.float32
        torch.testing.assert_close(row.states, expected[:-1], rtol=1e-4, atol=1e-4)
        log_prob = mean_log_prob(model.code_head(expected), row)
        assert row.log_prob == pytest.approx(log_prob, rel=1e-3)


SETTINGS = [
    GenerateConfig(temperature=t, top_k=k, top_p=p)
    for t, k, p in itertools.product((0.3, 1.0, 2.0), (0, 1, 5, 100), (0.1, 0.8, 1.0))
]


def random_logits(rows: int = 10, codes: int = 40) -> Tensor:
    return 2 * torch.randn(rows, codes, generator=torch.Generator().manual_seed(0))


def filtered(logits: Tensor, config: GenerateConfig) -> Tensor:
    """The shortlist as full rows (B, V): -inf where a code may not be drawn."""
    best, codes = generation.filter_logits(logits, config)
    return torch.full_like(logits, float("-inf")).scatter(1, codes, best)


def allowed(row: list[float], config: GenerateConfig) -> set[int]:
    """Codes that may be drawn, after the definitions: the k best, then the fewest of mass p."""
    order = sorted(range(len(row)), key=lambda i: -row[i])
    if config.top_k:
        order = order[: config.top_k]
    scaled = torch.tensor([row[i] / config.temperature for i in order], dtype=torch.float64)
    before = itertools.accumulate(scaled.softmax(0).tolist(), initial=0.0)
    return {i for i, mass in zip(order, before) if config.top_p == 1 or mass <= config.top_p}


@pytest.mark.parametrize("config", SETTINGS, ids=lambda c: f"{c.temperature}-{c.top_k}-{c.top_p}")
def test_filters_follow_their_definitions(config):
    logits = random_logits()
    actual = filtered(logits, config)
    inside = torch.isfinite(actual)
    for row, kept in zip(logits.tolist(), inside):
        assert set(kept.nonzero()[:, 0].tolist()) == allowed(row, config)
    assert torch.allclose(actual[inside], logits[inside] / config.temperature)


def test_the_repetition_penalty_shrinks_what_is_likely_and_seen():
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0]])
    seen = torch.tensor([[True, True, False, False]])
    assert generation.penalize(logits, seen, 2.0).tolist() == [[1.0, -4.0, 2.0, -2.0]]


@pytest.mark.parametrize("config", [SAMPLED, GenerateConfig(temperature=0.5, top_k=2, top_p=1)])
def test_drawing_follows_the_probabilities(config):
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(2_000, 4)
    noise = Noise([*range(2_000)], config.choices(4)).draw()[:10]
    drawn = torch.stack([generation.sample(logits, config, step) for step in noise])
    shares = drawn.flatten().bincount(minlength=4) / drawn.numel()
    assert torch.allclose(shares, filtered(logits, config)[0].softmax(0), atol=0.015)


def test_an_overflow_leaves_nothing_in_the_cache_for_the_next_text(model, monkeypatch):
    # Graphs look at all of a cache, what the text before left there too.
    decoder, (texts, cond) = graphed(model, monkeypatch), requests(2)
    expected = plain(generate(decoder, texts, cond, GREEDY))
    loud = copy.deepcopy(decoder.layers[0].c_attn.bias)
    decoder.layers[0].c_attn.bias.fill_(float("nan"))
    with pytest.raises(SpeechError, match="not finite"):
        generate(decoder, texts, cond, GREEDY)
    decoder.layers[0].c_attn.bias.copy_(loud)
    assert plain(generate(decoder, texts, cond, GREEDY)) == expected


def test_temperature_zero_takes_the_best_and_low_ones_come_near():
    logits = random_logits(50, 30)
    assert torch.equal(generation.sample(logits, GREEDY, None), logits.argmax(-1))
    for temperature in (1e-5, 1e-30, 1e-300):
        config = dataclasses.replace(SAMPLED, temperature=temperature)
        drawn = generation.sample(logits, config, Noise([*range(50)], 30).draw()[0])
        assert torch.equal(drawn, logits.argmax(-1))
