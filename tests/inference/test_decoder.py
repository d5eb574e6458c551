"""The decode path: each step is the training path's, whatever the batch, positions or graph."""

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import GPT, graphed, random_rows, tiny_model
from torch._dynamo.utils import counters

from kit.base.compiler import compiler_available
from kit.base.errors import KitError, SpeechError
from kit.inference.decoder import Decoder, DecoderConfig, attend
from kit.inference.generate import generate
from kit.model.sequence import pack
from kit.settings import GenerateConfig

COMPILED = DecoderConfig(compile=True)
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


def rows(count: int = 4, codes: int = 12):
    """Texts of unequal length, `codes` codes of each (B, N), references."""
    texts, _, cond = random_rows(GPT, count, seed=1)
    made = torch.randint(GPT.start_code, (count, codes), generator=torch.Generator().manual_seed(1))
    return texts, made, cond


@torch.inference_mode()
def decoded(decoder: Decoder, texts, codes, cond) -> torch.Tensor:
    """Logits (B, N + 1, V) of a first code and of what follows each of `codes`, step by step."""
    x, padding = decoder.prompt(texts, cond)
    logits, cache = decoder.prefill(x, padding, codes.shape[1])
    found = [logits.clone()]
    for n, column in enumerate(codes.T.contiguous()):
        found.append(decoder.decode_one(column, n + 1, cache).clone())
    decoder.release(cache)
    return torch.stack(found, dim=1)


@torch.inference_mode()
def trained(model, texts, codes, cond) -> torch.Tensor:
    """The same logits, in one pass of the training path over each row."""
    found = []
    for text, said, mel in zip(texts, codes.tolist(), cond):
        batch = pack(model.config, [text], [said], mel[None])
        hidden = model.hidden(batch)[0, batch.code_indices[: len(said) + 1]]
        found.append(model.code_head(hidden))
    return torch.stack(found)


def said(decoder, texts, cond, config: GenerateConfig = GREEDY) -> list[list[int]]:
    return [row.codes.tolist() for row in generate(decoder, texts, cond, config)]


def same_logits(one: Decoder, other: Decoder, request) -> None:
    torch.testing.assert_close(decoded(one, *request), decoded(other, *request))


IDS = {"start_text_id": 3, "stop_text_id": 0, "start_code_id": 5, "stop_code_id": 1}


@pytest.mark.parametrize("ids", [{}, IDS])
def test_every_step_is_the_training_paths(ids):
    model = loud(**ids)
    wanted, found = trained(model, *rows()), decoded(Decoder(model), *rows())
    assert wanted.abs().max() > 1  # or the tolerance would say nothing
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))
    texts, _, cond = rows()
    stops = {model.config.start_code, model.config.stop_code}
    assert not any(stops & {*codes} for codes in said(model, texts, cond))


@pytest.mark.parametrize("weights", ["fp32", "bf16", "fp16", "int8-weight-only"])
def test_a_row_is_the_same_alone_and_among_longer_ones(model, weights):
    decoder, (texts, codes, cond) = Decoder(model, DecoderConfig(weights=weights)), rows()
    together = decoded(decoder, texts, codes, cond)
    near = 1e-4 if weights == "fp32" else 0.02 * together.std().item()
    for i in range(len(texts)):
        alone = decoded(decoder, texts[i : i + 1], codes[i : i + 1], cond[i : i + 1])[0]
        assert (alone - together[i]).abs().mean() < near


@pytest.mark.parametrize("masked", [False, True])
def test_attention_made_for_the_compiler_is_the_same(masked):
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    q, k, v = draw(2, 4, 1, 64), *draw(2, 2, 4, 110, 64)
    mask = torch.where(draw(2, 1, 1, 110) > 1, float("-inf"), 0.0) if masked else None
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(torch.compile(attend, backend="eager")(q, k, v, mask), wanted)


@pytest.mark.parametrize("graphs", [True, False])
def test_a_cache_is_taken_again_and_leaves_no_trace(model, graphs, monkeypatch):
    decoder = graphed(model, monkeypatch) if graphs else Decoder(model)

    def place() -> int:
        memory = decoder.memory
        return (memory.graphs_memory if graphs else memory.spare["memory"])[0].data_ptr()

    (texts, codes, cond), places = rows(2), set()
    wanted = decoded(decoder, texts, codes, cond)
    for _ in range(3):
        decoded(decoder, texts[::-1], codes.flip(0).roll(1, 1), cond.flip(0))
        torch.testing.assert_close(decoded(decoder, texts, codes, cond), wanted)
        places.add(place())
    decoded(decoder, *(part[:1] for part in (texts, codes, cond)))  # fewer rows take it, too
    assert len(places | {place()}) == 1


def test_one_cache_serves_graphs_of_every_batch_size(model, monkeypatch):
    """A larger batch drops the graphs of the smaller one, whose memory goes back."""
    decoder, eager = graphed(model, monkeypatch), Decoder(model)
    same_logits(decoder, eager, rows(2))
    old = [weakref.ref(flat) for flat in decoder.memory.graphs_memory]
    small = weakref.ref(next(iter(decoder.compiled.ready.values()))[0])
    same_logits(decoder, eager, rows(4))
    gc.collect()  # a pretended graph is a cycle
    assert decoder.memory.rows == 4 and not decoder.memory.spare
    assert small() is None and not any(flat() is not None for flat in old)
    sizes = [flat.numel() for flat in decoder.memory.graphs_memory]
    wanted = 2 * 4 * GPT.width * decoder.max_positions  # keys and values of four rows
    assert sizes == [wanted] * GPT.layers
    for count in (1, 2, 4, 1):
        same_logits(decoder, eager, rows(count))
    assert sorted(case[0] for case in decoder.compiled.ready) == [1, 2, 4]
    assert [flat.numel() for flat in decoder.memory.graphs_memory] == sizes


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
    decoder, eager = Decoder(one_layer, COMPILED), Decoder(one_layer)
    texts, codes, cond = rows(3)
    before = graphs()
    assert said(decoder, texts, cond) == said(eager, texts, cond)
    [(case, seconds)] = decoder.warm_up_s.items()
    assert case[0] == 4 and seconds > 0  # filled up from 3 rows
    assert graphs() == before + 1

    # One graph for prompts and caches of every length, padded or not.
    for same in ([[1] * 3] * 4, [[1] * 18, *texts]):
        four = cond[[0, 1, 2, 0]]
        short = GenerateConfig(temperature=0, exact_codes=5)
        assert said(decoder, same, four, short) == said(eager, same, four, short)
    forced = [*texts, texts[0]], codes[[0, 1, 2, 0]], cond[[0, 1, 2, 0]]
    found = decoded(decoder, *forced)
    torch.testing.assert_close(found, decoded(eager, *forced), rtol=1e-4, atol=1e-4)
    assert graphs() == before + 1 and decoder.ran == "fp32"


@pytest.mark.long
def test_where_the_compiler_fails_steps_run_without_it(one_layer, compiler):
    decoder, (texts, _, cond) = Decoder(one_layer, COMPILED), rows(3)
    wanted = said(Decoder(one_layer), texts, cond)
    with torch._inductor.config.patch({"cpp.cxx": ("/no/such/compiler",)}):
        for _ in range(2):
            assert said(decoder, texts, cond) == wanted
    assert decoder.ran.startswith("fp32; not compiled: ") and decoder.ran.count("not") == 1


@pytest.mark.parametrize(("bucket", "kept"), [(8, True), (256, False)])
def test_replayed_steps_say_the_same(model, bucket, kept, monkeypatch):
    """Also where a text passes from graph to graph, each of more positions."""
    monkeypatch.setattr("kit.inference.decoder_steps.BUCKET", bucket)
    decoder = graphed(model, monkeypatch, states=kept)
    texts, _, cond = rows(3)
    for _ in range(2):
        for same in (texts, texts[::-1], texts[:1]):
            part = same, cond[: len(same)]
            assert said(decoder, *part) == said(Decoder(model), *part)
    made = [*decoder.warm_up_s]  # filled up from 3 rows; once for each
    if bucket == 256:
        assert made == [(4, decoder.max_positions), (1, decoder.max_positions)]
    else:
        assert {count for count, _ in made} == {4, 1} and len(made) == len(set(made)) > 4


def test_who_speaks_beside_a_graph_spoils_no_step_of_it(model, monkeypatch):
    decoder, request = graphed(model, monkeypatch), rows(2)
    single = [tuple(part[i : i + 1] for part in request) for i in (0, 1)]
    alone = [decoded(Decoder(model), *each) for each in single]
    for first in (0, 1):
        mine, other = single[first], single[1 - first]
        with torch.inference_mode():
            x, padding = decoder.prompt(mine[0], mine[2])
            logits, cache = decoder.prefill(x, padding, mine[1].shape[1])
            found = [logits.clone()]
            for n, code in enumerate(mine[1][0]):
                found.append(decoder.decode_one(code[None], n + 1, cache))
                if n == 3:  # a whole text is spoken in between, in memory of its own
                    torch.testing.assert_close(decoded(decoder, *other), alone[1 - first])
            decoder.release(cache)
        torch.testing.assert_close(torch.stack(found, dim=1), alone[first])
        assert decoder.memory.owns(cache.layers)
    assert len(decoder.compiled.ready) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8"])
def test_cuda_graphs_compute_what_eager_steps_do_in_any_thread(weights):
    model, (texts, codes, cond) = loud().cuda(), rows(3, codes=20)
    request = texts, codes.cuda(), cond.cuda()
    wanted = decoded(Decoder(model, DecoderConfig(weights=weights)), *request)
    decoder = Decoder(model, DecoderConfig(weights=weights, compile=True))
    with ThreadPoolExecutor(1) as other:
        work = partial(decoded, decoder, *request)
        for logits in (work(), other.submit(work).result()):
            difference = (logits - wanted).abs().mean()
            assert difference < (1e-3 if weights == "fp32" else 0.05) * wanted.std()
    assert not decoder.can_drop_rows
    assert "not compiled" not in decoder.ran and "no CUDA graph" not in decoder.ran


def test_without_a_compiler_it_is_the_decoder_of_eager_steps(model, monkeypatch):
    monkeypatch.setenv("PATH", "")
    eager, decoder = Decoder(model), Decoder(model, COMPILED)
    assert decoder.ran == f"{eager.ran}; not compiled: no C++ compiler (install g++)"
    texts, _, cond = rows(3)
    assert said(decoder, texts, cond) == said(eager, texts, cond)
    assert not decoder.warm_up_s


@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8", "int8-weight-only"])
def test_the_model_is_left_as_it_was(weights):
    model = tiny_model().train()
    before = copy.deepcopy(model.state_dict())
    decoded(Decoder(model, DecoderConfig(weights=weights)), *rows())
    assert all(module.training for module in model.modules())
    assert all(p.requires_grad for p in model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("name", ["gpt.h.1.mlp.c_fc.weight", "code_position.weight"])
@pytest.mark.parametrize(("weights", "value"), [("fp32", float("nan")), ("int8", float("inf"))])
def test_damaged_weights_are_reported_at_once(name, weights, value):
    damaged = tiny_model()
    damaged.get_parameter(name).data.flatten()[3] = value
    with pytest.raises(SpeechError, match=rf"{name} is not finite.* earlier checkpoint"):
        Decoder(damaged, DecoderConfig(weights=weights))


def test_an_unknown_format_names_the_nearest():
    with pytest.raises(KitError, match=r"DecoderConfig.weights = 'int5': .*`int8`"):
        DecoderConfig(weights="int5")


def test_rows_are_limited_by_the_free_memory_of_a_gpu(model, monkeypatch):
    decoder = graphed(model, monkeypatch)
    assert decoder.memory.rows_that_fit() is None
    decoded(decoder, *rows(2))
    row_bytes = GPT.layers * 2 * GPT.width * decoder.max_positions * 4
    gpu = {"mem_get_info": (60 * row_bytes, 200 * row_bytes), "memory_reserved": 50 * row_bytes}
    gpu |= {"memory_allocated": 12 * row_bytes, "get_per_process_memory_fraction": 1.0}
    for name, value in gpu.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda _device, value=value: value)
    decoder.memory.device = torch.device("cuda:0")
    assert decoder.memory.idle_bytes() == 2 * row_bytes  # which a larger cache replaces
    assert decoder.memory.rows_that_fit() == int(0.8 * (60 + 38 + 2))
    # Of 200 rows 60 are allowed, 50 of which are reserved.
    monkeypatch.setattr("torch.cuda.get_per_process_memory_fraction", lambda _device: 0.3)
    assert decoder.memory.rows_that_fit() == int(0.8 * (10 + 38 + 2))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _device: (0, 0))
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda _device: 50 * row_bytes)
    assert decoder.memory.rows_that_fit() == 2  # that are there already


@pytest.mark.long
def test_two_threads_may_speak_while_one_compiles(one_layer, compiler):
    decoder, (texts, _, cond) = Decoder(one_layer, COMPILED), rows(3)
    wanted = said(Decoder(one_layer), texts, cond)
    with ThreadPoolExecutor(2) as both:
        for asked in [both.submit(said, decoder, texts, cond) for _ in range(2)]:
            assert asked.result() == wanted


@pytest.mark.parametrize("count", [1, 3])
def test_a_step_attends_to_all_that_is_written_at_the_border_of_a_bucket(model, count, monkeypatch):
    monkeypatch.setattr("kit.inference.decoder_steps.BUCKET", 4)
    decoder = graphed(model, monkeypatch)
    same_logits(decoder, Decoder(model), rows(count, codes=20))
    assert len(decoder.compiled.ready) > 4


def test_where_triton_fails_plain_steps_are_captured(model, monkeypatch):
    errors = pytest.importorskip("triton.runtime.errors")
    settings = []

    def fail(*_args):
        settings.append(torch._inductor.config.coordinate_descent_tuning)
        raise errors.OutOfResources(100_000, 65_536, "shared memory")  # no RuntimeError

    decoder, (texts, _, cond) = graphed(model, monkeypatch), rows(3)
    decoder.compiled.compiles = True
    decoder.compiled.parts = fail, fail
    wanted = said(Decoder(model), texts, cond)
    for _ in range(2):
        assert said(decoder, texts, cond) == wanted
    assert decoder.ran.startswith("fp32; not compiled: out of resource: shared memory")
    assert decoder.compiled is not None and decoder.compiled.ready
    assert settings == [True]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_cuda_graphs_of_every_bucket_share_a_cache_that_grows(weights, monkeypatch):
    monkeypatch.setattr("kit.inference.decoder_steps.BUCKET", 16)
    model = loud().cuda()
    eager = Decoder(model, DecoderConfig(weights=weights))
    decoder = Decoder(model, DecoderConfig(weights=weights, graphs=True))
    for count in (1, 4, 2, 4):
        texts, codes, cond = rows(count, codes=20)
        request = texts, codes.cuda(), cond.cuda()
        wanted = decoded(eager, *request)
        difference = (decoded(decoder, *request) - wanted).abs().mean()
        assert difference < (1e-3 if weights == "fp32" else 0.02) * wanted.std()
    assert decoder.memory.rows == 4 and "no CUDA graph" not in decoder.ran
    assert {case[0] for case in decoder.compiled.ready} == {4, 2}
    assert len(decoder.compiled.ready) > 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_cuda_graphs_sample_what_eager_steps_do(compiled, monkeypatch):
    monkeypatch.setattr("kit.inference.decoder_steps.BUCKET", 16)
    model = loud(text_dropout=0.1).cuda()
    eager = Decoder(model)
    decoder = Decoder(model, DecoderConfig(compile=compiled, graphs=True))
    texts, _, cond = rows(3)
    configs = [GREEDY, GenerateConfig(temperature=0.7, top_k=5, repetition_penalty=1.2, best_of=2)]
    configs += [GenerateConfig(temperature=1.0, top_k=0, guidance_scale=2.0, exact_codes=30)]
    alike = []
    for config in (*configs, *configs):
        for count in (1, 3):
            wanted = said(eager, texts[:count], cond[:count].cuda(), config)
            found = said(decoder, texts[:count], cond[:count].cuda(), config)
            alike += [one == other for one, other in zip(found, wanted)]
    assert sum(alike) >= 0.9 * len(alike)  # rounding may turn a near tie
    assert "not compiled" not in decoder.ran and "no CUDA graph" not in decoder.ran
