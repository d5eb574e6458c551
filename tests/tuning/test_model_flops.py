"""The model's operations: counted from its sizes, and the same as PyTorch counts in a real step."""

import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from kit.base.config import build, load_preset
from kit.model.gpt import HEAD_ROWS, SpeechGPT
from kit.model.sequence import GPTConfig, pack
from kit.tuning.memory_plan import count_parameters
from kit.tuning.model_flops import training_flops

SMALL = GPTConfig(
    layers=2,
    width=32,
    heads=2,
    text_vocab=20,
    code_vocab=32,
    max_text=20,
    max_code=40,
    latents=3,
    cond_blocks=2,
    perceiver_layers=2,
    perceiver_heads=2,
    perceiver_head_width=16,
    n_mels=8,
)
OTHER = dataclasses.replace(SMALL, layers=3, width=64, latents=5, cond_blocks=1, perceiver_layers=1)


def counted_by_torch(config: GPTConfig, text_ids: int, codes: int, frames: int) -> float:
    """Of a row, among as many as need no filling up in the heads."""
    texts = [[1] * text_ids] * HEAD_ROWS
    batch = pack(config, texts, [[2] * codes] * HEAD_ROWS, torch.randn(HEAD_ROWS, 8, frames))
    model = SpeechGPT(config)
    for layer in model.gpt.h:
        layer.attn.fused = False
    # Fused attention on a CPU is not counted; written out it is two products forward, as many more
    # again each way back.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        sum(model(batch)).backward()
    return counter.get_total_flops() / HEAD_ROWS


@pytest.mark.parametrize("config", [SMALL, OTHER], ids=["small", "other"])
@pytest.mark.parametrize("lengths", [(5, 9, 12), (8, 30, 7)], ids=str)
def test_torch_counts_the_same(config, lengths):
    assert training_flops(config, *lengths) == counted_by_torch(config, *lengths)


def test_padding_costs_what_tokens_do():
    config = SMALL
    cells = config.latents + 5 + 2 + 9 + config.stop_targets
    one_more = training_flops(config, 5, 9, 12, length=cells - config.latents + 1)
    matrices = 6 * 12 * config.width**2
    attention = 12 * ((cells + 1) ** 2 - cells**2) * config.width
    assert one_more - training_flops(config, 5, 9, 12) == config.layers * (matrices + attention)
    assert training_flops(config, 5, 9, 12, length=3) == training_flops(config, 5, 9, 12)


def test_a_large_model_takes_near_six_operations_a_parameter_and_token():
    config = build(GPTConfig, load_preset("xtts_v2")["model"])
    tables = config.width * (
        config.text_vocab + config.code_vocab + config.max_text + config.max_code
    )
    tokens = config.latents + 60 + 2 + 200 + config.stop_targets
    usual = 6 * (count_parameters(config) - tables) * tokens
    assert 0.9 < training_flops(config, 60, 200, reference_frames=86) / usual < 1.1
