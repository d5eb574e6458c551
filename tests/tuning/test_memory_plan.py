"""The memory plan: exact for weights and what the optimizer holds, near a real step as a whole."""

import dataclasses
import importlib.util

import pytest
import torch
from helpers import CPU, GPT, random_rows, tiny_model

from kit.base.hardware import Choice
from kit.model.gpt import SpeechGPT
from kit.model.sequence import pack
from kit.model.weights import save_model
from kit.settings import DataConfig, FinetuneConfig, GPTConfig, LoRAConfig, SpeedConfig, TrainConfig
from kit.training.config import Base, Finetuning
from kit.training.optim import INSTALL
from kit.tuning.memory_plan import Workload, count_parameters, plan_memory
from kit.tuning.preflight import trial_peak

SIZES = {"code_vocab": 402, "max_text": 64, "max_code": 128}
SMALL = GPTConfig(layers=3, width=64, heads=4, **SIZES)
LARGER = GPTConfig(layers=4, width=160, heads=4, cond_blocks=2, **SIZES)
GPU = dataclasses.replace(CPU, device="cuda", capability=(8, 0))
ALL = {"gradient_checkpointing": True}
HALF_OF_THEM = {"gradient_checkpointing": True, "recompute_every": 2}
LORA = FinetuneConfig(method="lora")
FEW = LoRAConfig(rank=8, targets=("attn.c_attn", "mlp.c_fc"))


def workload(model: GPTConfig, precision: str = "fp32", rows: int = 4, hw=CPU, **over) -> Workload:
    """Rows of 40 text ids and 120 codes; `over` are switches, and `train` and `finetuning`."""
    fields = {"train": TrainConfig()}
    fields |= {name: over.pop(name) for name in ("train", "finetuning") if name in over}
    speed = SpeedConfig(**{"mixed_precision": precision != "fp32"} | over)
    data = DataConfig(effective_batch=rows, micro_batch=rows, reference_frames=48)
    longest = {"precision": precision, "text_ids": 40, "codes": 120}
    return Workload(model=model, speed=speed, data=data, hw=hw, **longest, **fields)


def test_weights_gradients_optimizer_and_average_are_exact():
    model = tiny_model()
    batch = pack(GPT, *random_rows(GPT, 2))
    sum(model(batch)).backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    size = lambda tensors: sum(t.numel() * t.element_size() for t in tensors)  # noqa: E731
    moments = [s[k] for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
    parts, peak_bytes = plan_memory(workload(GPT, ema=True))
    assert parts["weights"] == size(model.parameters()) == 4 * count_parameters(GPT)
    assert parts["gradients"] == size(p.grad for p in model.parameters())
    assert parts["optimizer"] == size(moments)
    assert parts["EMA"] == parts["weights"]
    assert plan_memory(workload(GPT))[0]["EMA"] == 0
    assert peak_bytes > parts["activations"] + parts["weights"]


needs_package = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason=f"bitsandbytes is not installed ({INSTALL})",
)
MUON = TrainConfig(optimizer="muon")
DROPPING = dataclasses.replace(SMALL, dropout=0.1)
STEPS = [
    workload(SMALL),
    workload(SMALL, sdpa=True, ema=True, **HALF_OF_THEM),
    workload(SMALL, "bf16", train=MUON),
    workload(LARGER, sdpa=True, fused_adamw=True, **ALL),
    workload(DROPPING, sdpa=True, **ALL),
    pytest.param(workload(LARGER, adamw_8bit=True), marks=needs_package),
    pytest.param(workload(LARGER, train=MUON, adamw_8bit=True), marks=needs_package),
]
LONG_STEPS = [
    workload(LARGER, sdpa=True, train=MUON, **ALL),
    workload(LARGER, "bf16", sdpa=True, ema=True),
    workload(LARGER, "bf16", sdpa=True, **HALF_OF_THEM),
    workload(DROPPING, "bf16"),
    workload(LARGER, "bf16", sdpa=True, **ALL).with_rows(2),  # gradients stay between passes
]
STEPS += [pytest.param(work, marks=pytest.mark.long) for work in LONG_STEPS]


@pytest.mark.parametrize("work", STEPS)
def test_the_plan_is_near_a_real_step(monkeypatch, work):
    require_near(monkeypatch, work)


@pytest.mark.parametrize("switches", [{}, {"sdpa": True} | ALL], ids=str)
@pytest.mark.long
def test_adapters_and_frozen_matrices_in_half_the_bytes_are_planned_as_they_are(
    monkeypatch, tmp_path, switches
):
    full = workload(LARGER, "bf16", **switches)
    path = tmp_path / "start.safetensors"
    save_model(SpeechGPT(LARGER), path)
    for weights, tables in ((None, "new"), (path, "all")):
        base = Base(config=LARGER, sha256="", weights=weights)
        config = dataclasses.replace(LORA, tables=tables)
        finetuning = Finetuning(config=config, lora=FEW, base=base)
        adapters = dataclasses.replace(full, finetuning=finetuning)
        require_near(monkeypatch, adapters)
        assert adapters.planned_bytes < full.planned_bytes


def require_near(monkeypatch, work: Workload) -> None:
    choice = Choice(value=work.precision, reason="test")
    monkeypatch.setattr("kit.training.switches.choose_precision", lambda hw: choice)
    measured, planned = trial_peak(work)["measured_bytes"], work.planned_bytes
    print(f"measured {measured / 2**20:.1f} MiB, planned {planned / measured - 1:+.1%}")
    assert planned == pytest.approx(measured, rel=0.2)


def test_every_saving_saves():
    planned = lambda **over: workload(SMALL, "bf16", hw=GPU, **over).planned_bytes  # noqa: E731
    plain = planned()
    for saving in ({"sdpa": True}, ALL, HALF_OF_THEM):
        assert planned(**saving) < plain
    assert planned(sdpa=True) < planned(sdpa=True, mixed_precision=False)
    assert planned(ema=True) > planned(ema=True, ema_offload=True) == plain
    work = workload(SMALL, "bf16", hw=GPU)
    for data in ({"effective_batch": 8}, {"length_multiple": 400}):
        costly = dataclasses.replace(work, data=dataclasses.replace(work.data, **data))
        assert costly.planned_bytes > plain
    one_row = workload(LARGER, hw=GPU, rows=1, sdpa=True)
    fused = dataclasses.replace(one_row, speed=SpeedConfig(sdpa=True, fused_adamw=True))
    more = one_row.planned_bytes - fused.planned_bytes
    assert 0 < more <= 4 * count_parameters(LARGER), "torch's foreach copies all tensors at once"
