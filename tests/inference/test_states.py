"""The states that predicted the codes: those of the training path, however the codes were made."""

import dataclasses

import pytest
import torch
from helpers import GPT, graphed, opinionated_model, random_rows
from torch import Tensor

from kit.base.compiler import compiler_available
from kit.inference.decoder import Decoder, DecoderConfig
from kit.inference.generate import GenerateConfig, GeneratedCodes, generate
from kit.model.sequence import pack

GREEDY = GenerateConfig(temperature=0)
SAMPLED = GenerateConfig(temperature=1.0, top_k=0, top_p=1.0, seed=3)
KEPT = DecoderConfig(states=True)


@pytest.fixture(scope="module")
def model():
    """Codes differ, and some rows find STOP before others."""
    model = opinionated_model()
    model.code_head.bias.data[GPT.stop_code] = 0
    return model


def requests(count: int = 6):
    texts, _, cond = random_rows(GPT, count, seed=1)
    return texts, cond


@torch.inference_mode()
def trained(model, text: list[int], codes: Tensor, mel: Tensor) -> Tensor:
    """The states (N, D) of the training path at START and at every code but the last."""
    batch = pack(model.config, [text], [codes.tolist()], mel[None])
    return model.hidden(batch)[0, batch.code_indices[: len(codes)]]


def require_trained_states(model, texts, cond, found: list[GeneratedCodes]) -> None:
    for text, mel, row in zip(texts, cond, found, strict=True):
        assert row.states.shape == (len(row.codes), GPT.width)
        assert row.states.dtype == torch.float32
        wanted = trained(model, text, row.codes, mel)
        torch.testing.assert_close(row.states, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        GREEDY,
        SAMPLED,
        dataclasses.replace(GREEDY, kv_cache=False),
        dataclasses.replace(SAMPLED, best_of=3),
    ],
    ids=["greedy", "sampled", "no cache", "candidates"],
)
def test_each_code_comes_with_the_state_that_predicted_it(model, config):
    texts, cond = requests()
    found = generate(Decoder(model, KEPT), texts, cond, config)
    assert len({len(row.codes) for row in found}) > 1  # rows left the batch at different times
    require_trained_states(model, texts, cond, found)


def test_keeping_them_changes_no_code_and_not_asked_for_there_are_none(model):
    texts, cond = requests()
    plain = generate(Decoder(model), texts, cond, SAMPLED)
    kept = generate(Decoder(model, KEPT), texts, cond, SAMPLED)
    for one, other in zip(plain, kept):
        assert one.states is None and torch.equal(one.codes, other.codes)
        assert one.log_prob == other.log_prob


def test_a_graphs_states_are_not_written_over(model, monkeypatch):
    decoder = graphed(model, monkeypatch, states=True)
    texts, cond = requests(3)
    require_trained_states(model, texts, cond, generate(decoder, texts, cond, GREEDY))


def test_a_compiled_decoder_keeps_them_too(monkeypatch):
    if compiler_available("cpu").value == "no":
        pytest.skip("no C++ compiler here")
    monkeypatch.setattr("kit.inference.decoder_steps.best_seconds", lambda work: work() is None)
    torch._dynamo.reset()
    model = opinionated_model(layers=1)
    texts, cond = requests(2)
    with torch._inductor.config.patch(max_autotune_gemm_backends="ATEN"):
        decoder = Decoder(model, DecoderConfig(compile=True, states=True))
        found = generate(decoder, texts, cond, GREEDY)
    assert decoder.warm_up_s and "not compiled" not in decoder.ran
    require_trained_states(model, texts, cond, found)
