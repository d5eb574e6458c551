"""How several processes train together follows from the memory of one, with its reason."""

import dataclasses

import pytest
from helpers import CPU, DATA

from kit.base.config import ConfigError
from kit.base.hardware import Hardware
from kit.model.lora import LoRAConfig
from kit.model.sequence import GPTConfig
from kit.training.settings import TrainConfig
from kit.training.sharding import refused_switches, require_shardable
from kit.training.switches import SpeedConfig
from kit.training.trainable import FULL, FinetuneConfig, Finetuning
from kit.tuning.memory_plan import plan_bytes
from kit.tuning.preflight import FitError, Workload
from kit.tuning.sharded_plan import choose_parallel, gradient_bytes, spread_plan, spread_verdict

CARD = Hardware(
    device="cuda",
    name="a card of 16 GiB that is not here",
    cores=8,
    ram_bytes=2**36,
    memory_bytes=2**34,
    capability=(7, 5),
)
SMALL = GPTConfig(layers=4, width=256)
LARGE = GPTConfig(layers=48, width=1600, heads=25)  # 1.5 billion parameters


def work(model: GPTConfig, **speed) -> Workload:
    on = SpeedConfig(sdpa=True, gradient_checkpointing=True, fused_adamw=True, **speed)
    data = dataclasses.replace(DATA, effective_batch=8, micro_batch=8)
    return Workload(model=model, train=TrainConfig(), speed=on, data=data, hw=CARD)


def test_replicas_where_one_fits_and_shares_where_none_does():
    small = choose_parallel(work(SMALL), 2)
    assert small.value == "ddp" and "a whole model fits into each" in small.reason
    large = choose_parallel(work(LARGE), 4)
    assert large.value == "fsdp" and "no process can hold a whole model" in large.reason
    assert "GiB of the 14.40 GiB" in large.reason


def test_what_is_asked_for_is_taken():
    assert choose_parallel(work(SMALL, parallel="fsdp"), 2).value == "fsdp"
    assert choose_parallel(work(LARGE, parallel="ddp"), 2).value == "ddp"
    lora = Finetuning(config=FinetuneConfig(method="lora"), lora=LoRAConfig())
    adapters = dataclasses.replace(work(LARGE), finetuning=lora)
    assert choose_parallel(adapters, 2).value == "ddp"
    with pytest.raises(ConfigError, match="parallel = 'both': choose auto, ddp or fsdp"):
        SpeedConfig(parallel="both")


def test_more_processes_need_less_each():
    step = work(LARGE).with_rows(1).step
    alone = plan_bytes(LARGE, step).peak_bytes
    peaks = [spread_plan(LARGE, step, world).peak_bytes for world in (2, 4, 8)]
    assert alone > peaks[0] > peaks[1] > peaks[2]
    stays = sum(plan_bytes(LARGE, step).parts[n] for n in ("weights", "optimizer"))
    assert peaks[2] > stays / 8
    assert gradient_bytes(LARGE, step).keys() == plan_bytes(LARGE, step).moments.keys()


def test_the_most_rows_that_fit_are_planned_and_nothing_is_tried():
    verdict = spread_verdict(work(LARGE), 4)
    assert verdict.fits and verdict.planned_bytes <= verdict.limit_bytes
    assert "not tried (a real step needs all processes)" in str(verdict)
    with pytest.raises(FitError, match="Start more than 2 processes"):
        spread_verdict(work(dataclasses.replace(LARGE, layers=200)), 2)


def test_what_cannot_be_spread_says_so():
    lora = Finetuning(config=FinetuneConfig(method="lora"), lora=LoRAConfig())
    with pytest.raises(ConfigError, match="optimizer = muon: it needs whole matrices"):
        require_shardable(TrainConfig(optimizer="muon"), FULL)
    with pytest.raises(ConfigError, match="what is frozen cannot be spread"):
        require_shardable(TrainConfig(), lora)
    require_shardable(TrainConfig(), FULL)
    assert refused_switches(CPU).keys() == {"adamw_8bit", "compile", "ema_offload"}
    assert "mixed_precision" in refused_switches(CARD), "fp16 on this card"
