"""Generation: the cache changes nothing, a batch changes nothing, and every end is reported."""

import copy
import dataclasses

import pytest
import torch
from helpers import (
    GPT,
    graphed,
    opinionated_model,
    pretended_capture,
    random_rows,
    tiny_model,
)

from kit.base.errors import Note, SpeechError
from kit.inference.decoder import Decoder, DecoderConfig
from kit.inference.generate import (
    GenerateConfig,
    best_of,
    candidate_seed,
    decode,
    decode_stream,
    generate,
    length_limit,
)
from kit.model.sequence import pack

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


@pytest.mark.parametrize(
    "config",
    [GREEDY, SAMPLED, PENALIZED, GUIDED],
    ids=["greedy", "sampled", "penalized", "guided"],
)
def test_the_cache_changes_no_code(model, config):
    uncached = dataclasses.replace(config, kv_cache=False)
    cached = plain(generate(model, *requests(), config))
    assert cached == plain(generate(model, *requests(), uncached))
    assert len({len(codes) for codes, _ in cached}) > 1  # rows left the batch at different times


@pytest.mark.parametrize(
    "config", [GREEDY, PENALIZED, MANY, GUIDED], ids=["greedy", "sampled", "four", "guided"]
)
def test_a_batch_of_unequal_prompts_is_each_alone(model, config):
    texts, cond = requests(6)
    decoder = Decoder(model)
    together = plain(generate(decoder, texts, cond, config))
    alone = [generate(decoder, [text], mel[None], config)[0] for text, mel in zip(texts, cond)]
    assert together == plain(alone) and len({len(text) for text in texts}) > 2
    assert len({len(codes) for codes, _ in together}) > 1  # some left before others


def code_logits(model, text: list[int], codes: list[int], mel: torch.Tensor) -> torch.Tensor:
    """What the training path expects at each code and after the last, (N + 1, V)."""
    batch = pack(GPT, [text], [codes], mel[None])
    return model.code_head(model.hidden(batch).flatten(0, 1)[batch.code_indices])[: len(codes) + 1]


def mean_log_prob(logits: torch.Tensor, row) -> float:
    """Of the codes of `row`, by what was expected at each; START is ruled out."""
    logits[:, GPT.start_code] = float("-inf")
    said = torch.tensor([*row.codes, GPT.stop_code])[: len(row.codes) + row.stopped, None]
    return logits.log_softmax(-1)[: len(said)].gather(1, said).mean().item()


@pytest.mark.parametrize("guidance", [1.5, 3.0])
def test_guidance_leans_to_the_text_away_from_no_text(model, guidance):
    # The training path's own choice: cond_logits + (guidance - 1) * (cond_logits - uncond_logits).
    texts, cond = requests(4)
    config = dataclasses.replace(GREEDY, guidance_scale=guidance)
    found = generate(model, texts, cond, config)
    assert plain(found) != plain(generate(model, texts, cond, GREEDY))
    for text, mel, row in zip(texts, cond, found):
        codes = row.codes.tolist()
        cond_logits = code_logits(model, text, codes, mel)
        uncond_logits = code_logits(model, [], codes, mel)
        leaning = cond_logits + (guidance - 1) * (cond_logits - uncond_logits)
        leaning[:, GPT.start_code] = float("-inf")
        chosen = leaning.argmax(-1).tolist()
        assert chosen[: len(codes)] == codes and (chosen[-1] == GPT.stop_code) == row.stopped
        # Its likelihood is computed without guidance.
        assert row.log_prob == pytest.approx(mean_log_prob(cond_logits, row), rel=1e-3)


def test_a_model_that_always_had_a_text_speaks_without_guidance(model):
    untaught = copy.deepcopy(model)
    untaught.config = dataclasses.replace(model.config, text_dropout=0.0)
    wanted = plain(generate(model, *requests(), SAMPLED))
    assert plain(generate(untaught, *requests(), GUIDED)) == wanted


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
        logits = code_logits(model, text, row.codes.tolist(), reference)
        assert row.log_prob == pytest.approx(mean_log_prob(logits, row), rel=1e-3)


def test_of_several_candidates_the_likeliest_is_kept(model):
    texts, cond = requests(4)
    each = [(text, n) for text in texts for n in range(4)]
    seeds = [candidate_seed(MANY, text, n) for text, n in each]
    readings = [text for text, _ in each]
    found = decode(Decoder(model), readings, cond.repeat_interleave(4, 0), MANY, seeds)
    for number, kept in enumerate(generate(model, texts, cond, MANY)):
        own = found[4 * number : 4 * number + 4]
        assert len({tuple(r.codes.tolist()) for r in own}) > 1  # drawn apart
        ended = [r for r in own if r.stopped] or own
        assert kept.stopped == any(r.stopped for r in own)
        assert kept.log_prob == max(r.log_prob for r in ended)
        assert any(torch.equal(kept.codes, r.codes) for r in ended)


def test_generation_leaves_the_global_generator_alone(model):
    before = torch.get_rng_state()
    generate(model, *requests(), SAMPLED)
    assert torch.equal(torch.get_rng_state(), before)


def with_stop(model, bias: float):
    """The model, likelier or less likely to end."""
    stopping = tiny_model()
    stopping.load_state_dict(model.state_dict())
    stopping.code_head.bias.data[GPT.stop_code] = bias
    return stopping


def test_a_row_that_ends_says_so(model):
    for row in generate(with_stop(model, 1e4), *requests(), GREEDY):
        assert row.stopped and len(row.codes) == 0


@pytest.fixture
def hesitant(model):
    """A model whose likeliest code is STOP, by so little that it is seldom drawn while hot."""
    hesitant = with_stop(model, 0.0)
    hesitant.code_head.weight.data.zero_()
    hesitant.code_head.bias.data.zero_()
    hesitant.code_head.bias.data[GPT.stop_code] = 0.5
    return hesitant


HOT = GenerateConfig(temperature=32.0, top_k=0, top_p=1.0, max_codes_per_text_id=0, retries=9)


def test_a_reading_that_was_cut_is_read_again_cooler(hesitant):
    texts, cond = requests()
    first = generate(hesitant, texts, cond, dataclasses.replace(HOT, retries=0))
    found = generate(hesitant, texts, cond, HOT)
    assert not all(row.stopped for row in first) and all(row.stopped for row in found)
    for before, row in zip(first, found):
        if before.stopped:  # was right at once: it stays
            assert torch.equal(row.codes, before.codes) and row.temperature == 32
        else:
            assert row.temperature in {32 / 2**n for n in range(1, 10)}
    alone = [generate(hesitant, [text], mel[None], HOT)[0] for text, mel in zip(texts, cond)]
    assert plain(alone) == plain(found)


@pytest.mark.parametrize("retries", [0, 2])
def test_a_model_that_never_ends_is_reported_after_all(model, retries):
    config = dataclasses.replace(SAMPLED, retries=retries, max_codes_per_text_id=0)
    for row in generate(with_stop(model, -1e4), *requests(3), config):
        assert not row.stopped and len(row.codes) == 39
        assert row.temperature == 1 / 2**retries


def test_neither_greedy_nor_timed_readings_are_made_again(model, monkeypatch):
    made = []
    monkeypatch.setattr("kit.inference.generate.best_of", lambda *a: made.append(1) or best_of(*a))
    endless = with_stop(model, -1e4)
    assert generate(endless, *requests(2), GREEDY)[0].temperature == 0
    generate(endless, *requests(2), dataclasses.replace(SAMPLED, exact_codes=5))
    assert len(made) == 2


def test_the_codes_so_far_are_reported_at_every_step(model):
    texts, cond = requests(3)
    wanted, steps = generate(model, texts, cond, GREEDY), []
    for said in decode_stream(Decoder(model), texts, cond, GREEDY, [0] * 3):
        steps.append(said.steps)
        for row, whole in zip(said.spoken(0.0), wanted):
            assert torch.equal(row.codes, whole.codes[: said.steps])
    assert steps == list(range(1, len(steps) + 1))
    assert plain(said.spoken(0.0)) == plain(wanted)


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
    with pytest.raises(SpeechError, match="39 codes"):
        generate(model, *requests(), dataclasses.replace(GREEDY, exact_codes=100))


@pytest.mark.parametrize("length", [0, 19, 500])
def test_a_text_that_does_not_fit_names_the_limit(model, length):
    with pytest.raises(SpeechError, match=rf"{length} ids.* 1 to 18.* split it"):
        generate(model, [[1, 2], [1] * length], torch.randn(2, 8, 5), GREEDY)


def test_the_longest_text_fits_and_no_text_is_no_codes(model):
    assert generate(model, [[1] * 18], torch.randn(1, 8, 5), GREEDY)[0].codes.numel() <= 39
    assert generate(model, [], torch.randn(0, 8, 5), SAMPLED) == []


def test_every_text_needs_a_reference(model):
    with pytest.raises(SpeechError, match="2 texts and 3 references"):
        generate(model, [[1], [2]], torch.randn(3, 8, 5), MANY)


def test_numbers_that_outgrow_their_format_are_reported(model, monkeypatch):
    huge = with_stop(model, 0.0)
    huge.gpt.h[0].mlp.c_proj.bias.data[3] = 1e6  # no fp16 number, a sound bf16 one
    for sound in ("bf16", "fp16"):  # on a CPU fp16 is how weights lie; what is counted is fp32
        generate(Decoder(huge, DecoderConfig(weights=sound)), *requests(2), GREEDY)
    monkeypatch.setattr("kit.inference.linear_formats.has_fbgemm", lambda: False)  # as on a GPU
    with pytest.raises(SpeechError, match=r"not finite.*Use bf16"):
        generate(Decoder(huge, DecoderConfig(weights="fp16")), *requests(2), GREEDY)


@pytest.mark.parametrize("kv_cache", [True, False])
def test_graphs_with_fixed_shapes_say_the_same(model, kv_cache, monkeypatch):
    # What CUDA graphs replay, step by step on the CPU: positions as tensors, one cache for all.
    decoder = graphed(model, monkeypatch)
    config = dataclasses.replace(SAMPLED, kv_cache=kv_cache)
    for count, guidance in ((1, 1.0), (3, 1.0), (3, 2.0)):
        texts, cond = requests(count)
        config = dataclasses.replace(config, guidance_scale=guidance)
        wanted = plain(generate(model, texts, cond, config))
        assert plain(generate(decoder, texts, cond, config)) == wanted


def test_a_text_that_outgrew_the_format_spoils_no_other(model, monkeypatch):
    # Graphs look at all of a cache, what the text before left there too.
    decoder, (texts, cond) = graphed(model, monkeypatch), requests(2)
    wanted = plain(generate(decoder, texts, cond, GREEDY))
    loud = copy.deepcopy(decoder.layers[0].c_attn.bias)
    decoder.layers[0].c_attn.bias.fill_(float("nan"))
    with pytest.raises(SpeechError, match="not finite"):
        generate(decoder, texts, cond, GREEDY)
    decoder.layers[0].c_attn.bias.copy_(loud)
    assert plain(generate(decoder, texts, cond, GREEDY)) == wanted


def short_of_memory(decoder, most: int, monkeypatch) -> list[int]:
    """`decoder` as on a GPU that holds `most` rows; the batch sizes that it got."""
    asked = []
    prefill = decoder.prefill

    def checked(x, padding, longest):
        asked.append(len(x))
        if len(x) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.30 GiB")
        return prefill(x, padding, longest)

    monkeypatch.setattr(decoder, "prefill", checked)
    return asked


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("config", [GREEDY, SAMPLED, MANY, GUIDED])
def test_out_of_memory_the_batch_is_halved_and_spoken_again(model, graphs, config, monkeypatch):
    decoder = graphed(model, monkeypatch) if graphs else Decoder(model)
    texts, cond = requests(6)
    wanted = plain(generate(model, texts, cond, config))
    asked = short_of_memory(decoder, 4, monkeypatch)
    with pytest.warns(Note, match=r"a batch of (6|24) texts"):
        assert plain(generate(decoder, texts, cond, config)) == wanted
    assert max(asked) > 4 and asked[-1] <= 4
    first = len(asked)
    assert plain(generate(decoder, texts, cond, config)) == wanted
    assert max(asked[first:]) <= 4  # it is remembered
    decoder.tidy()
    assert decoder.row_limit is None  # until what was to be spoken has been


def test_out_of_memory_in_a_step_frees_the_graphs_of_the_larger_batch(model, monkeypatch):
    decoder = graphed(model, monkeypatch)
    texts, cond = requests(4)
    wanted = plain(generate(model, texts, cond, GREEDY))

    def capture(work, pool=None):
        if decoder.memory.rows > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        return pretended_capture(work, pool)

    monkeypatch.setattr("kit.inference.decoder_steps.capture_graph", capture)
    with pytest.warns(Note, match="4 texts.* with 2"):
        assert plain(generate(decoder, texts, cond, GREEDY)) == wanted
    assert decoder.memory.rows == 2 and decoder.compiled is not None


def test_out_of_memory_with_one_text_says_what_to_do(model, monkeypatch):
    decoder = Decoder(model)
    texts, cond = requests(3)
    asked = short_of_memory(decoder, 0, monkeypatch)
    with (
        pytest.warns(Note, match="with 1"),
        pytest.raises(SpeechError, match=rf"{len(texts[0])} ids.*int8"),
    ):
        generate(decoder, texts, cond, GREEDY)
    assert asked == [3, 1]


def test_another_error_is_no_reason_to_speak_again(model, monkeypatch):
    decoder = Decoder(model)

    def fail(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(decoder, "prefill", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        generate(decoder, *requests(2), GREEDY)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("fit", [0, 1, 3, 5, 100])
def test_no_more_rows_are_decoded_than_free_memory_holds(model, graphs, fit, monkeypatch):
    decoder = graphed(model, monkeypatch) if graphs else Decoder(model)
    texts, cond = requests(6)
    asked = short_of_memory(decoder, 100, monkeypatch)
    monkeypatch.setattr(decoder, "rows_that_fit", lambda: fit)
    for config in (GREEDY, GUIDED):
        wanted = plain(generate(model, texts, cond, config))
        asked.clear()
        assert plain(generate(decoder, texts, cond, config)) == wanted
        least = 2 if config is GUIDED else 1  # rows of one text
        assert max(asked) <= max(fit, least)


def test_whoever_stops_listening_gives_the_cache_back(model):
    decoder, (texts, cond) = Decoder(model), requests(2)
    said = decode_stream(decoder, texts, cond, GREEDY, [0, 0])
    next(said)
    assert not decoder.memory.spare
    said.close()
    assert decoder.memory.spare
