"""What a number format costs, counted: the decode path itself against the training path's count."""

import copy

import pytest
import torch
from helpers import GPT, random_rows, tiny_model

from kit.inference.agreement import Row, compare, forced, linear_bytes
from kit.inference.decoder import Decoder, DecoderConfig
from kit.inference.linear_formats import has_bf16, weight_bytes
from kit.model.sequence import pack


@pytest.fixture(scope="module")
def model():
    model = tiny_model().eval()
    model.code_head.weight.data *= 20
    return model


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [Row(text=t, codes=c, cond=m) for t, c, m in zip(*random_rows(GPT, 5, seed=2))]


def trained(model, row: Row) -> torch.Tensor:
    """Logits (N + 1, V) of the training path."""
    batch = pack(GPT, [row.text], [row.codes], row.cond[None])
    with torch.inference_mode():
        return model.code_head(model.hidden(batch)[0, batch.code_at[: len(row.codes) + 1]])


def test_the_codes_are_forced_as_in_training(model, rows):
    for row in rows:
        torch.testing.assert_close(
            forced(Decoder(model), row), trained(model, row), rtol=1e-4, atol=1e-4
        )


def test_costs_are_the_count_by_hand(model, rows):
    other = tiny_model().eval()  # the same trunk, another head
    other.code_head.weight.data *= 20
    other.code_head.weight.data += 0.2 * torch.randn_like(other.code_head.weight)
    cost = compare(Decoder(model), Decoder(other), rows)
    agree, errors = [], []
    for row in rows:
        for a, b in zip(trained(model, row).tolist(), trained(other, row).tolist()):
            agree.append(a.index(max(a)) == b.index(max(b)))
            errors += [abs(x - y) for x, y in zip(a, b)]
    assert 0 < cost.top1_agreement < 1
    assert cost.positions == len(agree) == sum(len(row.codes) + 1 for row in rows)
    assert cost.top1_agreement == pytest.approx(sum(agree) / len(agree))
    assert cost.mean_logit_error == pytest.approx(sum(errors) / len(errors), rel=1e-3)
    assert cost.max_logit_error == pytest.approx(max(errors), rel=1e-3)


def test_a_decoder_compared_with_itself_costs_nothing(model, rows):
    cost = compare(Decoder(model), Decoder(model), rows)
    assert (cost.top1_agreement, cost.mean_logit_error, cost.max_logit_error) == (1, 0, 0)
    assert (cost.size_ratio, cost.linear_size_ratio) == (1, 1)


def test_a_code_that_is_never_said_is_no_error(model, rows):
    silent = copy.deepcopy(model)
    silent.code_head.bias.data[3] = float("-inf")
    full, small = Decoder(silent), Decoder(silent, DecoderConfig(weights="int8"))
    cost = compare(full, small, rows)
    assert 0 < cost.mean_logit_error < cost.max_logit_error < 10


@pytest.mark.skipif(not has_bf16(), reason="an exact half takes bf16, which this processor lacks")
def test_sizes_are_of_the_whole_and_of_the_linear_layers(model, rows):
    full, small = Decoder(model), Decoder(model, DecoderConfig(weights="bf16"))
    cost = compare(full, small, rows[:1])
    assert cost.linear_size_ratio == linear_bytes(small) / linear_bytes(full) == 0.5
    assert cost.size_ratio == weight_bytes(small) / weight_bytes(full)
    assert cost.linear_size_ratio < cost.size_ratio < 1  # the reading of texts stays fp32


def test_no_rows_are_no_comparison(model):
    with pytest.raises(ValueError, match="no rows to compare on"):
        compare(Decoder(model), Decoder(model), [])
