"""The memory plan of an IndexTTS2 beside what two real steps take."""

import dataclasses

import pytest
import torch
from helpers import CPU
from published_indextts2 import FULL, SMALL, encoder

from kit.base.config import build, read_yaml
from kit.base.hardware import Choice
from kit.extras.indextts2.model import gpt_config
from kit.model.gpt import SpeechGPT
from kit.settings import DataConfig, FinetuneConfig, GPTConfig, SpeedConfig, TrainConfig
from kit.training.config import FULL as ALL_OF_IT
from kit.training.config import Base, Finetuning
from kit.tuning.cards import CARDS
from kit.tuning.memory_plan import RELEASED_CONDITIONER, RELEASED_CONFORMERS, Workload
from kit.tuning.preflight import trial_peak

MIDDLE = SMALL | {"model_dim": 256, "condition_module": encoder(128, 256, heads=2, blocks=2)}
MIDDLE["emo_condition_module"] = encoder(64, 24, heads=2, blocks=1)


def require_near(monkeypatch, gpt: dict, method: str, precision: str, frames: int, rows=4) -> None:
    """Plan and measure rows of 60 text ids and 300 codes, 6 s; half as long at full size."""
    shorter = 2 if gpt is FULL else 1
    choice = Choice(value=precision, reason="test")
    monkeypatch.setattr("kit.training.switches.choose_precision", lambda hw: choice)
    model = dataclasses.replace(gpt_config({"gpt": gpt}, "config.yaml"), max_code=643)
    base = Base(config=model, sha256="")
    lora = Finetuning(config=FinetuneConfig(method="lora"), base=base)
    switches = {"mixed_precision": precision != "fp32", "gradient_checkpointing": gpt is FULL}
    work = Workload(
        model=model,
        train=TrainConfig(optimizer="adamw"),
        speed=SpeedConfig(sdpa=True, fused_adamw=True, **switches),
        data=DataConfig(effective_batch=rows, micro_batch=rows, reference_frames=frames),
        hw=CPU,
        precision=precision,
        text_ids=60 // shorter,
        codes=300 // shorter,
        finetuning=lora if method == "lora" else ALL_OF_IT,
    )
    measured, planned = trial_peak(work)["measured_bytes"], work.planned_bytes
    print(f"\n{method}, {precision}: measured {measured / 2**30:.2f} GiB", end=", ")
    print(f"planned {planned / 2**30:.2f} GiB, {planned / measured - 1:+.1%}")
    assert planned == pytest.approx(measured, rel=0.2)


def test_without_the_package_the_release_is_planned_with_as_many_numbers():
    model = gpt_config({"gpt": FULL}, "config.yaml")
    with torch.device("meta"):
        conditioner = SpeechGPT(model).conditioner
    assert model.conformers == RELEASED_CONFORMERS
    assert sum(p.numel() for p in conditioner.parameters()) == RELEASED_CONDITIONER
    sizes = build(GPTConfig, read_yaml(CARDS)["indextts2"])
    ids = ("start_text_id", "stop_text_id", "start_code_id", "stop_code_id")
    assert dataclasses.replace(sizes, **{name: getattr(model, name) for name in ids}) == model


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("gpt", [SMALL, MIDDLE], ids=["small", "middle"])
@pytest.mark.parametrize("frames", [150, 300])
def test_the_plan_is_near_a_real_step(monkeypatch, gpt, precision, method, frames):
    require_near(monkeypatch, gpt, method, precision, frames)


@pytest.mark.full_size(gib=7)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_plan_of_adapters_is_near_a_step_at_full_size(monkeypatch, precision):
    require_near(monkeypatch, FULL, "lora", precision, 150, rows=2)


@pytest.mark.full_size(gib=17)
def test_the_plan_is_near_a_step_of_all_of_it_at_full_size(monkeypatch):
    require_near(monkeypatch, FULL, "full", "fp32", 150, rows=2)
