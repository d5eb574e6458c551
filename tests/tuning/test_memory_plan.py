"""The memory plan: exact where it claims to be, and near what a real step takes."""

import dataclasses
import importlib.util

import pytest
import torch
from helpers import CPU, GPT, random_rows, tiny_model

from kit.base.hardware import Choice, Hardware
from kit.model.gpt import SpeechGPT
from kit.model.sequence import pack
from kit.model.weights import save_model
from kit.settings import DataConfig, FinetuneConfig, GPTConfig, LoRAConfig, SpeedConfig, TrainConfig
from kit.training.config import FULL, Base, Finetuning
from kit.training.optim import INSTALL
from kit.tuning.memory_plan import Workload, count_parameters, count_trained, plan_bytes
from kit.tuning.preflight import trial_peak

SIZES = {"code_vocab": 402, "max_text": 64, "max_code": 128}
SMALL = GPTConfig(layers=3, width=64, heads=4, **SIZES)
LARGER = GPTConfig(layers=4, width=160, heads=4, cond_blocks=2, **SIZES)
SHORT, LONG = (2, 20, 60), (4, 40, 120)  # rows, text ids, codes
GPU = dataclasses.replace(CPU, device="cuda", capability=(8, 0))
FOUR = DataConfig(effective_batch=4, micro_batch=4, reference_frames=20)
ALL = {"gradient_checkpointing": True}
HALF_OF_THEM = {"gradient_checkpointing": True, "recompute_every": 2}


def test_weights_gradients_optimizer_and_average_are_exact():
    model = tiny_model()
    batch = pack(GPT, *random_rows(GPT, 2))
    sum(model(batch)).backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    size = lambda tensors: sum(t.numel() * t.element_size() for t in tensors)  # noqa: E731
    moments = [s[k] for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
    parts = plan_bytes(work(GPT, ema=True)).parts
    assert parts["weights"] == size(model.parameters()) == 4 * count_parameters(GPT)
    assert parts["gradients"] == size(p.grad for p in model.parameters())
    assert parts["optimizer"] == size(moments)
    assert parts["EMA"] == parts["weights"] and plan_bytes(work(GPT)).parts["EMA"] == 0


def work(model: GPTConfig, hw: Hardware = GPU, data: DataConfig = FOUR, **over) -> Workload:
    """Rows of 50 text ids and 100 codes with switches, or `codes` and `precision`."""
    fields = {"text_ids": 50, "codes": 100, "precision": "bf16"}
    fields |= {name: over.pop(name) for name in tuple(over) if name in fields}
    return Workload(
        model=model, train=TrainConfig(), speed=SpeedConfig(**over), data=data, hw=hw, **fields
    )


def test_adamw_that_is_not_fused_takes_all_matrices_at_once_on_a_gpu():
    """torch's default there (foreach) has a copy of every second moment; a CPU's of one matrix."""
    size = lambda **over: plan_bytes(work(SMALL, **over)).moments["the optimizer's update"]  # noqa: E731
    fused = size(fused_adamw=True)
    assert size() - fused == 4 * count_parameters(SMALL)
    assert size(hw=CPU) - fused == 8 * count_trained(SMALL, FULL).largest


@pytest.mark.parametrize(
    "what",
    [
        (SMALL, SHORT, "fp32", "adamw", {}),
        (SMALL, LONG, "fp32", "adamw", {}),
        (SMALL, LONG, "fp32", "muon", {"sdpa": True, "fused_adamw": True, "ema": True}),
        (SMALL, LONG, "fp32", "adamw", {"sdpa": True, "ema": True} | HALF_OF_THEM),
        (SMALL, LONG, "fp32", "adamw", ALL),
        (SMALL, LONG, "bf16", "adamw", {}),
        (SMALL, LONG, "bf16", "muon", {"sdpa": True} | ALL),
        (SMALL, SHORT, "bf16", "adamw", {"fused_adamw": True} | HALF_OF_THEM),
        (LARGER, SHORT, "fp32", "adamw", {"sdpa": True, "ema": True}),
        (LARGER, SHORT, "fp32", "muon", {"sdpa": True} | ALL),
        (LARGER, LONG, "fp32", "adamw", {"sdpa": True, "fused_adamw": True} | ALL),
        (LARGER, LONG, "bf16", "muon", {"ema": True}),
        (LARGER, LONG, "bf16", "adamw", {"sdpa": True, "ema": True} | HALF_OF_THEM),
        (LARGER, LONG, "bf16", "adamw", {"sdpa": True, "fused_adamw": True}),
    ],
)
@pytest.mark.long
def test_the_peak_is_within_five_percent_of_a_real_step(monkeypatch, what):
    near(workload(monkeypatch, *what))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("switches", [{}, {"sdpa": True}, {"sdpa": True} | ALL], ids=str)
def test_dropout_and_guided_attention_are_planned_too(monkeypatch, precision, switches):
    model = dataclasses.replace(SMALL, dropout=0.1)
    near(workload(monkeypatch, model, LONG, precision, "adamw", switches))
    work = workload(monkeypatch, SMALL, LONG, precision, "adamw", switches)
    guided = dataclasses.replace(work, train=TrainConfig(guided_attention_weight=0.3))
    assert guided.planned_bytes > work.planned_bytes
    near(guided)


@pytest.mark.parametrize("switches", [{}, {"sdpa": True, "mixed_precision": True} | ALL], ids=str)
@pytest.mark.long
def test_several_passes_keep_gradients_between_them(monkeypatch, switches):
    near(workload(monkeypatch, LARGER, LONG, "bf16", "adamw", switches).with_rows(2))


ADAPTERS = LoRAConfig()
FEW = LoRAConfig(rank=8, targets=("attn.c_attn", "mlp.c_fc"))


@pytest.mark.parametrize(
    ("what", "finetuning"),
    [
        (("fp32", "adamw", {}), {}),
        (("fp32", "adamw", {"sdpa": True} | ALL), {}),
        (("fp32", "muon", {"sdpa": True, "ema": True}), {"text_vocab": 400}),
        (("fp32", "adamw", {"sdpa": True, "ema": True}), {"tables": "all"}),
        (("fp32", "adamw", {"sdpa": True, "fused_adamw": True}), {"lora": FEW}),
        (("bf16", "adamw", {"sdpa": True} | ALL), {"text_vocab": 400}),
        (("bf16", "adamw", {}), {"lora": dataclasses.replace(FEW, dropout=0.1)}),
    ],
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.long
def test_adapters_are_planned_as_they_are(monkeypatch, what, finetuning, dropout):
    model = dataclasses.replace(LARGER, dropout=dropout)
    full = workload(monkeypatch, model, LONG, *what)
    lora = dataclasses.replace(full, finetuning=beside(model, **finetuning))
    near(lora)
    assert lora.planned_bytes < full.planned_bytes


@pytest.mark.parametrize("lora", [ADAPTERS, FEW])
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.long
def test_frozen_matrices_in_half_the_bytes_are_planned_so(monkeypatch, tmp_path, lora, recomputed):
    switches = {"sdpa": True, "gradient_checkpointing": recomputed}
    full = workload(monkeypatch, LARGER, LONG, "bf16", "adamw", switches)
    plain = dataclasses.replace(full, finetuning=beside(LARGER, lora))
    path = tmp_path / "start.safetensors"
    save_model(SpeechGPT(LARGER), path)
    base = dataclasses.replace(plain.finetuning.base, weights=path)
    half = dataclasses.replace(plain, finetuning=dataclasses.replace(plain.finetuning, base=base))
    near(half)
    assert half.planned_bytes < 0.97 * plain.planned_bytes


def beside(model: GPTConfig, lora=ADAPTERS, tables: str = "new", **base) -> Finetuning:
    """Adapters; `base` is what their voice has less than `model`."""
    return Finetuning(
        config=FinetuneConfig(method="lora", tables=tables),
        lora=lora,
        base=Base(config=dataclasses.replace(model, **base), sha256=""),
    )


@pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason=f"bitsandbytes is not installed ({INSTALL})",
)
@pytest.mark.parametrize(
    "what",
    [
        (SMALL, SHORT, "fp32", "adamw", {"sdpa": True}),
        (LARGER, SHORT, "fp32", "adamw", {"ema": True}),
        (LARGER, SHORT, "fp32", "muon", {"sdpa": True} | ALL),
        (LARGER, LONG, "bf16", "adamw", {"sdpa": True} | HALF_OF_THEM),
    ],
)
def test_moments_in_8_bits_are_planned_too(monkeypatch, what):
    whole = workload(monkeypatch, *what)
    small = dataclasses.replace(whole, speed=dataclasses.replace(whole.speed, adamw_8bit=True))
    near(small)
    parts, smaller = (plan_bytes(each).parts for each in (whole, small))
    assert smaller["optimizer"] < (0.3 if "adamw" in what else 0.9) * parts["optimizer"]
    assert smaller | {"optimizer": 0} == parts | {"optimizer": 0}


def workload(monkeypatch, model, lengths, precision, optimizer, switches) -> Workload:
    choice = Choice(value=precision, reason="test")
    monkeypatch.setattr("kit.training.switches.choose_precision", lambda hw: choice)
    rows, text_ids, codes = lengths
    train = TrainConfig(optimizer=optimizer)
    speed = SpeedConfig(**{"mixed_precision": precision != "fp32"} | switches)
    data = DataConfig(effective_batch=rows, micro_batch=rows, reference_frames=48)
    longest = {"precision": precision, "text_ids": text_ids, "codes": codes}
    return Workload(model=model, train=train, speed=speed, data=data, hw=CPU, **longest)


def near(work: Workload, share: float = 0.05) -> None:
    measured, planned = trial_peak(work).allocated_bytes, work.planned_bytes
    print(f"measured {measured / 2**20:.1f} MiB, planned {planned / measured - 1:+.1%}")
    assert planned == pytest.approx(measured, rel=share)


def test_every_saving_saves():
    plain = plan_bytes(work(SMALL))
    assert plain.fullest in plain.moments and plain.peak_bytes > plain.parts["activations"]
    for saving in ({"sdpa": True}, ALL, HALF_OF_THEM):
        assert work(SMALL, **saving).planned_bytes < plain.peak_bytes
    fused = [work(SMALL, sdpa=True, mixed_precision=half).planned_bytes for half in (False, True)]
    assert fused[1] < fused[0]
    accumulated = dataclasses.replace(FOUR, effective_batch=8)
    padded = dataclasses.replace(FOUR, length_multiple=400)
    five = dataclasses.replace(FOUR, effective_batch=5, micro_batch=5)
    for cost in ({"ema": True}, {"data": accumulated}, {"data": padded}, {"data": five}):
        assert work(SMALL, **cost).planned_bytes > plain.peak_bytes
