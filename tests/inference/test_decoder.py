"""The decode path: each step is the training path's, whatever the batch, positions or graph."""

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import GPT, graphed, random_rows, tiny_model, training_states
from torch._dynamo.utils import counters

from kit.base.compiler import compiler_available
from kit.base.errors import SpeechError
from kit.inference.compare_formats import GivenCodes, forced_logits
from kit.inference.decoder import Decoder, attend
from kit.inference.generate import generate
from kit.settings import GenerateConfig

GREEDY = GenerateConfig(temperature=0, max_codes_per_text_id=0)


def loud(**shape):
    """A random model whose logits are as far apart as a trained one's."""
    model = tiny_model(**shape).eval()
    model.code_head.weight.data *= 20
    return model


@pytest.fixture(scope="module")
def model():
    return loud()


@pytest.fixture(scope="module")
def one_layer():
    """Enough of a model to compile: a second layer takes the compiler as long again."""
    return loud(layers=1)


def rows(count: int = 4, codes: int = 12, seed: int = 1):
    """Texts of unequal length, `codes` codes of each (B, N), references."""
    texts, _, cond = random_rows(GPT, count, seed)
    random = torch.Generator().manual_seed(seed)
    made = torch.randint(GPT.start_code, (count, codes), generator=random)
    return texts, made, cond


def decoded(decoder: Decoder, texts, codes, cond) -> torch.Tensor:
    """Logits (B, N + 1, V) of a first code and of what follows each of `codes`, step by step."""
    return forced_logits(decoder, list(zip(texts, codes.tolist(), cond))).transpose(0, 1)


@torch.inference_mode()
def trained(model, texts, codes, cond) -> torch.Tensor:
    """The same logits, in one pass of the training path over each row."""
    rows = zip(texts, codes.tolist(), cond)
    return torch.stack([model.code_head(training_states(model, *row)) for row in rows])


def codes_of(decoder, texts, cond, config: GenerateConfig = GREEDY) -> list[list[int]]:
    return [row.codes.tolist() for row in generate(decoder, texts, cond, config)]


def same_logits(one: Decoder, other: Decoder, request) -> None:
    torch.testing.assert_close(decoded(one, *request), decoded(other, *request))


IDS = {"start_text_id": 3, "stop_text_id": 0, "start_code_id": 5, "stop_code_id": 1}


@pytest.mark.parametrize("ids", [{}, IDS])
def test_every_step_gives_the_logits_of_training(ids):
    model = loud(**ids)
    expected, actual = trained(model, *rows()), decoded(Decoder(model), *rows())
    assert expected.abs().max() > 1  # or the tolerance would say nothing
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))
    texts, _, cond = rows()
    stops = {model.config.start_code, model.config.stop_code}
    assert not any(stops & {*codes} for codes in codes_of(model, texts, cond))


@pytest.mark.parametrize("weights", ["fp32", "bf16", "fp16", "int8-weight-only"])
def test_a_row_is_the_same_alone_and_among_longer_ones(model, weights):
    decoder, (texts, codes, cond) = Decoder(model, weights=weights), rows()
    together = decoded(decoder, texts, codes, cond)
    near = 1e-4 if weights == "fp32" else 0.02 * together.std().item()
    for i in range(len(texts)):
        alone = decoded(decoder, texts[i : i + 1], codes[i : i + 1], cond[i : i + 1])[0]
        assert (alone - together[i]).abs().mean() < near


@pytest.mark.parametrize("masked", [False, True])
def test_attention_for_the_compiler_is_pytorchs(masked):
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    q, k, v = draw(2, 4, 1, 64), *draw(2, 2, 4, 110, 64)
    mask = torch.where(draw(2, 1, 1, 110) > 1, float("-inf"), 0.0) if masked else None
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(torch.compile(attend, backend="eager")(q, k, v, mask), expected)


def test_graphs_of_every_batch_size_share_one_cache(model, monkeypatch):
    """What a text left in it changes nothing; a larger batch drops it and its graphs."""
    decoder, eager = graphed(model, monkeypatch), Decoder(model)
    for seed in (1, 2, 1):
        same_logits(decoder, eager, rows(2, seed=seed))
    steps = decoder.compiled
    old = [weakref.ref(kv) for kv in steps.layers]
    small = weakref.ref(next(iter(steps.ready.values()))[0])
    same_logits(decoder, eager, rows(4))
    gc.collect()  # a pretended graph is a cycle
    assert small() is None and not any(kv() is not None for kv in old)
    kept = [kv.data_ptr() for kv in steps.layers]
    for count in (1, 2, 4, 1):
        same_logits(decoder, eager, rows(count))
    assert sorted(case[0] for case in steps.ready) == [1, 2, 4]
    assert [kv.data_ptr() for kv in steps.layers] == kept
    assert [kv.shape[1] for kv in steps.layers] == [4] * GPT.layers


@pytest.fixture
def compiler(monkeypatch):
    if compiler_available("cpu").value == "no":
        pytest.skip("no C++ compiler here")
    # No step loses to another: beside other work the clock would choose which graphs are made.
    monkeypatch.setattr("kit.base.compiler.best_seconds", lambda work: work() is None)
    # Kernels to choose from are compiled one by one: half a minute that tells nothing here.
    with torch._inductor.config.patch(max_autotune_gemm_backends="ATEN"):
        yield


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.long
def test_a_compiled_step_is_the_eager_one(one_layer, compiler):
    decoder, eager = Decoder(one_layer, compile=True), Decoder(one_layer)
    texts, codes, cond = rows(3)
    before = graphs()
    assert codes_of(decoder, texts, cond) == codes_of(eager, texts, cond)
    [(count, _)] = decoder.compiled.ready
    assert count == 4 and decoder.warm_up_s > 0  # filled up from 3 rows
    assert graphs() == before + 1

    # One graph for prompts and caches of every length, padded or not.
    for same in ([[1] * 3] * 4, [[1] * 18, *texts]):
        four = cond[[0, 1, 2, 0]]
        short = GenerateConfig(temperature=0, exact_codes=5)
        assert codes_of(decoder, same, four, short) == codes_of(eager, same, four, short)
    forced = [*texts, texts[0]], codes[[0, 1, 2, 0]], cond[[0, 1, 2, 0]]
    actual = decoded(decoder, *forced)
    torch.testing.assert_close(actual, decoded(eager, *forced), rtol=1e-4, atol=1e-4)
    assert graphs() == before + 1 and decoder.ran == "fp32"


@pytest.mark.long
def test_if_the_compiler_fails_steps_run_without_it(one_layer, compiler):
    decoder, (texts, _, cond) = Decoder(one_layer, compile=True), rows(3)
    expected = codes_of(Decoder(one_layer), texts, cond)
    with torch._inductor.config.patch({"cpp.cxx": ("/no/such/compiler",)}):
        for _ in range(2):
            assert codes_of(decoder, texts, cond) == expected
    assert decoder.ran.startswith("fp32; not compiled: ") and decoder.ran.count("not") == 1


@torch.inference_mode()
def test_another_text_decoded_meanwhile_changes_no_step(model, monkeypatch):
    decoder, request = graphed(model, monkeypatch), rows(2)
    single = [tuple(part[i : i + 1] for part in request) for i in (0, 1)]
    alone = [decoded(Decoder(model), *each) for each in single]
    (texts, codes, cond), other = single
    batch = GivenCodes(GPT, codes.T)
    x, padding = decoder.prompt(texts, cond)
    output, cache = decoder.prefill(x, padding, codes.shape[1])
    batch.take(*output, 0)
    for n in range(1, codes.shape[1] + 1):
        decoder.advance(batch, n, cache)
        if n == 3:  # a whole text is spoken in between, in memory of its own
            torch.testing.assert_close(decoded(decoder, *other), alone[1])
    torch.testing.assert_close(batch.logits[: codes.shape[1] + 1, 0], alone[0][0])
    assert decoder.compiled.owns(cache) and len(decoder.compiled.ready) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8"])
def test_cuda_graphs_compute_what_eager_steps_do_in_any_thread(weights):
    model, request = loud().cuda(), rows(3, codes=20)
    expected = decoded(Decoder(model, weights=weights), *request)
    decoder = Decoder(model, weights=weights, compile=True)
    with ThreadPoolExecutor(1) as other:
        work = partial(decoded, decoder, *request)
        for logits in (work(), other.submit(work).result()):
            difference = (logits - expected).abs().mean()
            assert difference < (1e-3 if weights == "fp32" else 0.05) * expected.std()
    assert not decoder.can_drop_rows
    assert "not compiled" not in decoder.ran and "no CUDA graph" not in decoder.ran


def test_without_a_compiler_steps_are_eager(model, monkeypatch):
    monkeypatch.setenv("PATH", "")
    eager, decoder = Decoder(model), Decoder(model, compile=True)
    assert decoder.ran == f"{eager.ran}; not compiled: no C++ compiler (install g++)"
    texts, _, cond = rows(3)
    assert codes_of(decoder, texts, cond) == codes_of(eager, texts, cond)
    assert not decoder.warm_up_s


@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8", "int8-weight-only"])
def test_the_model_is_not_changed(weights):
    model = tiny_model().train()
    before = copy.deepcopy(model.state_dict())
    decoded(Decoder(model, weights=weights), *rows())
    assert all(module.training for module in model.modules())
    assert all(p.requires_grad for p in model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


DAMAGED = "code_position.* is not finite.* earlier checkpoint"
REFUSED = [("fp32", float("nan"), DAMAGED), ("int8", float("inf"), DAMAGED)]
REFUSED += [("int5", 0.0, "'int5'.*`int8`")]


@pytest.mark.parametrize(("weights", "value", "facts"), REFUSED)
def test_damaged_weights_and_unknown_formats_are_refused(weights, value, facts):
    model = tiny_model()
    model.code_position.weight.data[3, 3] = value
    with pytest.raises(SpeechError, match=facts):
        Decoder(model, weights)


@pytest.mark.long
def test_two_threads_may_speak_while_one_compiles(one_layer, compiler):
    decoder, (texts, _, cond) = Decoder(one_layer, compile=True), rows(3)
    expected = codes_of(Decoder(one_layer), texts, cond)
    with ThreadPoolExecutor(2) as both:
        for asked in [both.submit(codes_of, decoder, texts, cond) for _ in range(2)]:
            assert asked.result() == expected


def test_if_triton_fails_plain_steps_are_captured(model, monkeypatch):
    errors = pytest.importorskip("triton.runtime.errors")
    settings = []

    def fail(*_args):
        settings.append(torch._inductor.config.coordinate_descent_tuning)
        raise errors.OutOfResources(100_000, 65_536, "shared memory")  # no RuntimeError

    decoder, (texts, _, cond) = graphed(model, monkeypatch), rows(3)
    decoder.compiled.compiles = True
    decoder.compiled.parts = fail, fail
    expected = codes_of(Decoder(model), texts, cond)
    for _ in range(2):
        assert codes_of(decoder, texts, cond) == expected
    assert decoder.ran.startswith("fp32; not compiled: out of resource: shared memory")
    assert decoder.compiled is not None and decoder.compiled.ready
    assert settings == [True]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_cuda_graphs_sample_what_eager_steps_do(compiled, monkeypatch):
    monkeypatch.setattr("kit.inference.decoder_steps.BUCKET", 16)
    model = loud(text_dropout=0.1).cuda()
    eager = Decoder(model)
    decoder = Decoder(model, compile=compiled, graphs=True)
    texts, _, cond = rows(3)
    configs = [GREEDY, GenerateConfig(temperature=0.7, top_k=5, repetition_penalty=1.2, best_of=2)]
    configs += [GenerateConfig(temperature=1.0, top_k=0, guidance_scale=2.0, exact_codes=30)]
    alike = []
    for config in (*configs, *configs):
        for count in (1, 3):
            expected = codes_of(eager, texts[:count], cond[:count].cuda(), config)
            actual = codes_of(decoder, texts[:count], cond[:count].cuda(), config)
            alike += [one == other for one, other in zip(actual, expected)]
    assert sum(alike) >= 0.9 * len(alike)  # rounding may turn a near tie
    assert "not compiled" not in decoder.ran and "no CUDA graph" not in decoder.ran
