"""What a model forgot of the one it began as: nothing at first, and more the more it moved."""

import copy
from dataclasses import replace

import pytest
import torch
from helpers import tiny_model

from kit.inference.evaluate import BaseSample, code_log_probs, measure_divergence
from kit.inference.generate import generate
from kit.inference.sampling import GenerateConfig


@pytest.fixture(scope="module")
def base():
    model = tiny_model()
    with torch.no_grad():
        model.code_head.weight *= 20  # or every code is as likely as every other
    return model


@pytest.fixture(scope="module")
def readings(base) -> list[BaseSample]:
    torch.manual_seed(0)
    mels = torch.randn(2, base.config.n_mels, 30)
    texts = [[3, 4, 5], [6, 7, 8, 9]]
    config = GenerateConfig(temperature=1.0, top_k=0, top_p=1.0, retries=0)
    said = generate(base, texts, mels, config)
    return [
        BaseSample(base_ids=ids, tuned_ids=ids, spoken=row, mel=mel)
        for ids, row, mel in zip(texts, said, mels)
    ]


def moved(model, by: float):
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += by * torch.randn_like(parameter)
    return other


def test_a_model_compared_with_itself_has_forgotten_nothing(base, readings):
    found = measure_divergence(base, copy.deepcopy(base), readings)
    assert found.forgotten == pytest.approx(0, abs=1e-6)
    assert 0 < found.base < torch.tensor(float(base.config.code_vocab)).log()


def test_the_further_it_moved_the_more_is_forgotten(base, readings):
    little, much = (measure_divergence(base, moved(base, by), readings) for by in (0.002, 0.02))
    assert 0 < little.forgotten < much.forgotten
    assert little.base == much.base


def test_it_is_the_divergence_of_what_they_expect_at_every_code(base, readings):
    other = moved(base, 0.01)
    wanted = []
    for reading in readings:
        ours = code_log_probs(base, reading.base_ids, reading)
        theirs = code_log_probs(other, reading.tuned_ids, reading)
        places = len(reading.spoken.codes) + reading.spoken.stopped
        assert ours.shape == (places, base.config.code_vocab)
        wanted.append(torch.nn.functional.kl_div(theirs, ours, log_target=True, reduction="none"))
    each = torch.cat(wanted).sum(-1)
    assert measure_divergence(base, other, readings).forgotten == pytest.approx(
        float(each.mean()), rel=1e-4
    )


def test_what_is_expected_is_what_the_codes_were_drawn_from(base, readings):
    """Its mean over the codes that were said is what the decoder noted as it said them."""
    for reading in readings:
        expected = code_log_probs(base, reading.base_ids, reading).clone()
        expected[:, base.config.start_code] = -torch.inf  # which is never said
        expected = expected.log_softmax(-1)
        codes = reading.spoken.codes
        said = torch.cat((codes, torch.tensor([base.config.stop_code])))[: len(expected)]
        likely = expected[torch.arange(len(said)), said].mean()
        assert float(likely) == pytest.approx(reading.spoken.log_prob, abs=1e-3)


def test_the_end_counts_where_it_was_found(base, readings):
    spoken = readings[0].spoken
    for stopped in (False, True):
        reading = replace(readings[0], spoken=replace(spoken, stopped=stopped))
        assert len(code_log_probs(base, reading.base_ids, reading)) == len(spoken.codes) + stopped
