"""The memory plan: exact where it claims to be, near where it estimates."""

import dataclasses

import pytest
import torch
from helpers import GPT, random_rows, tiny_model

from kit.memory import activation_bytes, parameter_count, plan_bytes
from kit.model import pack

ON = {"ema": True, "half": False, "sdpa": True, "checkpointing": False}
MIDDLE = {"layers": 4, "width": 128, "heads": 4, "max_text": 100, "max_code": 300, "n_mels": 80}


def test_weights_gradients_optimizer_and_average_are_exact():
    model = tiny_model()
    batch = pack(GPT, *random_rows(GPT, 2))
    sum(model(batch)).backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    size = lambda tensors: sum(t.numel() * t.element_size() for t in tensors)  # noqa: E731
    moments = [s[k] for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
    plan = plan_bytes(GPT, 2, 30, **ON)
    assert plan["weights"] == size(model.parameters()) == 4 * parameter_count(GPT)
    assert plan["gradients"] == size(p.grad for p in model.parameters())
    assert plan["optimizer"] == size(moments)
    assert (
        plan["EMA"] == plan["weights"] and plan_bytes(GPT, 2, 30, **ON | {"ema": False})["EMA"] == 0
    )


def kept_bytes(config, rows: int, sdpa: bool, recompute: bool) -> int:
    """Bytes a forward pass really keeps for its backward pass, parameters left out."""
    model = tiny_model(**MIDDLE)
    model.gpt.recompute = frozenset(range(config.layers)) if recompute else frozenset()
    for layer in model.gpt.h:
        layer.attn.fused = sdpa
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = tensor  # held, or its address would be used again
        return tensor

    texts, codes = [[1] * 50] * rows, [[1] * 200] * rows
    batch = pack(config, texts, codes, torch.randn(rows, 80, 20))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        sum(model(batch))
    return sum(t.untyped_storage().nbytes() for t in kept.values())


@pytest.mark.parametrize(
    ("sdpa", "recompute"), [(True, False), (False, False), (True, True)], ids=str
)
def test_activations_are_within_a_third_of_what_is_kept(sdpa, recompute):
    config = dataclasses.replace(GPT, **MIDDLE)
    kept = kept_bytes(config, 4, sdpa, recompute)
    if recompute:  # the layer being recomputed lives only in the backward pass
        whole = kept_bytes(config, 4, sdpa, False)
        kept += (whole - kept) // config.layers
    planned = activation_bytes(config, 4, 256, False, sdpa, recompute)
    assert 0.67 < planned / kept < 1.5


def test_every_saving_saves():
    config = dataclasses.replace(GPT, **MIDDLE)
    plain = activation_bytes(config, 4, 200, False, False, False)
    for switch in ((True, False, False), (False, True, False), (False, False, True)):
        assert activation_bytes(config, 4, 200, *switch) < plain


def test_the_largest_model_is_planned_without_allocating_it():
    huge = dataclasses.replace(GPT, layers=48, width=4096, heads=32)
    assert plan_bytes(huge, 1, 100, **ON)["weights"] > 30 * 2**30
