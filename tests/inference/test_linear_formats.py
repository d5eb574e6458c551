"""Number formats: small, near, and reported if this machine cannot run them."""

import pytest
import torch
from helpers import random_rows, tiny_model
from torch import nn

from kit.base.errors import SpeechError
from kit.inference import linear_formats as layers
from kit.inference.compare_formats import compare_logits, logits_of_each
from kit.inference.decoder import Decoder
from kit.inference.linear_formats import FEW_ROWS, PlainLinear, choose_layer, int8

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
needs_fbgemm = pytest.mark.skipif(not layers.has_fbgemm(), reason="no packed int8 products here")
needs_bf16 = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and layers.has_bf16()),
    reason="this torch was built without oneDNN, or this processor has no bf16 products",
)
# Layer, activations, and how far its result may be off, as a share of the result's size.
LAYERS = [
    *((PlainLinear, *each) for each in ((FP32, 1e-6), (BF16, 0.01), (FP16, 0.002))),
    (layers.SplitByThread, FP32, 1e-6),
    pytest.param(layers.OneDnn, BF16, 0.01, marks=needs_bf16),
    pytest.param(layers.DynamicInt8, FP32, 0.02, marks=needs_fbgemm),
    *((layers.WeightOnlyInt8, *each) for each in ((BF16, 0.015), (FP16, 0.01))),
]


@torch.inference_mode()
def both(kind, dtype, linear: nn.Linear, rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """What `linear` makes of random rows, and what it makes of them in another format."""
    x = torch.randn(rows, linear.in_features, generator=torch.Generator().manual_seed(0))
    return linear(x), kind(linear, dtype)(x.to(dtype)).float()


@pytest.mark.parametrize(("kind", "dtype", "near"), LAYERS)
@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 5])
def test_a_layer_is_near_the_plain_one(kind, dtype, near, rows):
    if (kind, dtype) == (layers.WeightOnlyInt8, FP16) and rows <= FEW_ROWS:
        pytest.skip("fp16 activations are for GPUs; of a few rows no CPU kernel is asked")
    torch.manual_seed(0)
    for bias in (True, False):
        expected, actual = both(kind, dtype, nn.Linear(256, 72, bias=bias), rows)
        assert actual.shape == expected.shape
        assert (actual - expected).norm() / expected.norm() < near


def test_int8_weights_are_within_half_a_step():
    weight = torch.randn(40, 64) * torch.logspace(-6, 3, 40)[:, None]
    rounded, scale = int8(weight)
    assert rounded.dtype == torch.int8 and (rounded.abs().amax(1) == 127).all()
    error = (rounded * scale[:, None] - weight).abs()
    assert (error <= scale[:, None] * (0.5 + 1e-4)).all()
    assert torch.allclose(scale, weight.abs().amax(1) / 127)


ABILITIES = ("has_bf16", "has_fbgemm", "split_is_faster")  # of a processor
# Format, whether it is compiled, what the processor lacks; layer, activations, and a fact.
CHOICES = [
    ("fp32", False, (), layers.SplitByThread, FP32, "fp32, split by thread"),
    ("bf16", False, (), layers.OneDnn, BF16, "bf16, packed for this CPU"),
    ("fp16", False, (), PlainLinear, FP16, "fp16"),
    ("int8", False, (), layers.DynamicInt8, FP32, "int8 weights and activations (dynamic)"),
    ("int8-weight-only", False, (), layers.WeightOnlyInt8, BF16, "int8 weights, bf16 activations"),
    ("int8", True, (), layers.WeightOnlyInt8, BF16, "int8 weights, bf16 activations"),
    ("int8", False, ("has_fbgemm",), layers.WeightOnlyInt8, BF16, "no int8 matmuls"),
    ("bf16", False, ("has_bf16",), layers.SplitByThread, FP32, "no bf16 products"),
    ("bf16", True, ("has_bf16",), PlainLinear, FP32, "no bf16 products"),
    ("bf16", False, ("has_bf16", "split_is_faster"), PlainLinear, FP32, "no bf16 products"),
]


@pytest.mark.parametrize(("weights", "compiled", "lacks", "kind", "dtype", "fact"), CHOICES)
def test_the_layer_for_a_cpu(weights, compiled, lacks, kind, dtype, fact, monkeypatch):
    for name in ABILITIES:
        monkeypatch.setattr(layers, name, lambda *_, able=name not in lacks: able)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    *layer, ran = choose_layer(weights, CPU, compiled)
    assert layer == [kind, dtype] and fact in ran


@pytest.mark.parametrize("bf16", [True, False])
def test_the_layer_for_a_gpu(bf16, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16)
    half = BF16 if bf16 else FP16
    assert choose_layer("fp16", CUDA, compiled=True)[:2] == (PlainLinear, FP16)
    *layer, ran = choose_layer("bf16", CUDA, compiled=True)
    assert layer == [PlainLinear, half] and ("no bf16" in ran) != bf16
    for compiled in (False, True):
        assert choose_layer("int8", CUDA, compiled)[:2] == (layers.WeightOnlyInt8, half)


# Bytes of the linear layers against fp32, and logits' mean error against their spread.
COSTS = [("fp16", 0.51, 0.01), ("int8-weight-only", 0.30, 0.05)]
COSTS += [pytest.param("bf16", 0.51, 0.02, marks=needs_bf16)]
COSTS += [pytest.param("int8", 0.30, 0.05, marks=needs_fbgemm)]


@pytest.mark.parametrize(("weights", "size", "error"), COSTS)
def test_a_whole_decoder_is_smaller_and_near(weights, size, error):
    model = tiny_model(width=64, heads=2).eval()
    small = Decoder(model, weights=weights)
    full = Decoder(model)
    rows = list(zip(*random_rows(model.config, 3)))
    cost = compare_logits(*(logits_of_each(each, rows) for each in (full, small)))
    linear_bytes = [layers.weight_bytes(each.layers) for each in (small, full)]
    assert linear_bytes[0] <= size * linear_bytes[1]
    spread = model.code_head.weight.norm(dim=1).mean().item()
    assert 0 < cost["mean_logit_error"] <= error * spread
    assert weights.split("-")[0] in small.ran


def test_inputs_that_the_kernel_cannot_take_are_refused():
    with pytest.raises(SpeechError, match=r"multiple of 16 .* has 40: use int8"):
        layers.WeightOnlyInt8(nn.Linear(40, 17), BF16)
