"""INT8: small, near, and the original left alone."""

import copy
import dataclasses

import pytest
import torch
from helpers import GPT, effective_batch, random_rows, tiny_model
from torch import nn

from kit.generate import GenerateConfig, generate
from kit.quantize import Int8Linear, compare, linear_bytes, quantize, weight_bytes

SHAPE = {"width": 64, "heads": 2}


@pytest.fixture(scope="module")
def pair():
    model = tiny_model(**SHAPE).eval()
    return model, quantize(model)


def batches():
    config = dataclasses.replace(GPT, **SHAPE)
    return [effective_batch(config, random_rows(config, 6, seed), parts=2) for seed in range(2)]


def linears(model) -> dict:
    return {n: m for n, m in model.named_modules() if isinstance(m, (nn.Linear, Int8Linear))}


def test_the_trunk_and_the_code_head_become_int8(pair):
    small = {n for n, m in pair[1].named_modules() if isinstance(m, Int8Linear)}
    assert small == {n for n in linears(pair[0]) if n.startswith("gpt.") or n == "code_head"}
    assert len(small) == 4 * GPT.layers + 1


def test_biases_are_kept_to_the_bit(pair):
    for name, layer in linears(pair[1]).items():
        wanted = linears(pair[0])[name].bias
        assert wanted is None if layer.bias is None else torch.equal(layer.bias, wanted)
        if isinstance(layer, Int8Linear):
            assert layer.bias.abs().max() > 0  # or the test would say nothing


def test_a_layer_without_bias_stays_without():
    linear = nn.Linear(16, 8, bias=False)
    small, x = Int8Linear.from_linear(linear), torch.randn(3, 16)
    assert small.bias is None and (small(x) - linear(x)).abs().max() < 0.05


def test_every_weight_is_within_half_a_step_of_its_channel(pair):
    for name, layer in linears(pair[1]).items():
        if isinstance(layer, Int8Linear):
            weight = linears(pair[0])[name].weight
            error = (layer.dequantized() - weight).abs()
            assert (error <= layer.scale[:, None] * (0.5 + 1e-4)).all()
            assert torch.allclose(layer.scale, weight.abs().amax(1) / 127)
            assert layer.weight.dtype == torch.int8 and layer.weight.abs().max() <= 127


def test_a_channel_of_zeros_stays_zero():
    linear = nn.Linear(8, 4)
    linear.weight.data[2] = 0
    small = Int8Linear.from_linear(linear)
    assert (small.dequantized()[2] == 0).all() and torch.isfinite(small(torch.randn(2, 8))).all()


def test_the_packed_product_is_near_the_plain_one():
    torch.manual_seed(0)
    linear, x = nn.Linear(256, 64), torch.randn(5, 7, 256)
    error = (Int8Linear.from_linear(linear)(x) - linear(x)).norm() / linear(x).norm()
    assert error < 0.02


def test_linear_layers_shrink_to_a_quarter(pair):
    model, small = pair
    assert linear_bytes(small) / linear_bytes(model) <= 0.30
    held = sum(t.numel() * t.element_size() for t in small.state_dict().values())
    assert weight_bytes(small) == held < weight_bytes(model)


def test_the_original_is_untouched():
    model = tiny_model(**SHAPE).train()
    before = copy.deepcopy(model.state_dict())
    small = quantize(model)
    assert model.training and not any(isinstance(m, Int8Linear) for m in model.modules())
    small.final_norm.weight.data.zero_()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_compare_is_the_count_by_hand(pair):
    (model, small), agree, errors = pair, [], []
    cost = compare(model, small, batches())
    with torch.inference_mode():
        for micro in (m for b in batches() for m in b.micro):
            full, int8 = (m.code_head(m.hidden(micro).flatten(0, 1)[micro.code_at]) for m in pair)
            for a, b in zip(full, int8):
                agree.append(a.tolist().index(a.max()) == b.tolist().index(b.max()))
                errors += (a - b).abs().tolist()
    assert cost.top1_agreement == pytest.approx(sum(agree) / len(agree))
    assert cost.mean_logit_error == pytest.approx(sum(errors) / len(errors), rel=1e-4)
    assert cost.max_logit_error == pytest.approx(max(errors), rel=1e-4)
    assert cost.size_ratio == weight_bytes(small) / weight_bytes(model)
    assert cost.linear_size_ratio <= 0.30


def test_a_model_compared_with_itself_costs_nothing(pair):
    cost = compare(pair[0], pair[0], batches())
    assert (cost.top1_agreement, cost.mean_logit_error, cost.max_logit_error) == (1, 0, 0)


def test_a_quantised_model_speaks(pair):
    texts, _, cond = random_rows(GPT, 3)
    config = GenerateConfig(temperature=0, exact_codes=8)
    spoken = generate(pair[1], texts, cond, config)
    again = generate(pair[1], texts, cond, dataclasses.replace(config, kv_cache=False))
    assert [len(s.codes) for s in spoken] == [8, 8, 8] == [len(s.codes) for s in again]


def test_a_quantised_model_that_has_spoken_can_be_copied(pair):
    small = quantize(pair[0])
    compare(pair[0], small, batches()[:1])
    assert compare(copy.deepcopy(small), small, batches()[:1]).top1_agreement == 1
