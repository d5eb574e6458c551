"""Optimizers and learning rates: what others compute, and what a run learns about itself."""

import dataclasses
import math

import pytest
import torch
from helpers import TRAIN, tiny_model
from torch import nn

from kit.optim import Adaptation, lr_factor, make_optimizers
from kit.steps import TrainConfig

# What transformers 5.23.0 gives for 5 steps of warm-up and 20 in all: linear, cosine, and cosine
# with a least rate of a tenth.
PEERS = {
    ("linear", 0.0): """0 .2 .4 .6 .8 1 .933333 .866667 .8 .733333 .666667 .6 .533333 .466667 .4
        .333333 .266667 .2 .133333 .066667""",
    ("cosine", 0.0): """0 .2 .4 .6 .8 1 .989074 .956773 .904508 .834565 .75 .654508 .552264
        .447736 .345492 .25 .165435 .095492 .043227 .010926""",
    ("cosine", 0.1): """0 .2 .4 .6 .8 1 .990166 .961095 .914058 .851109 .775 .689058 .597038
        .502962 .410942 .325 .248891 .185942 .138905 .109834""",
}


@pytest.mark.parametrize(("schedule", "final_lr"), PEERS, ids=str)
def test_schedules_are_transformers_own_as_recorded(schedule, final_lr):
    config = TrainConfig(steps=20, warmup_steps=5, schedule=schedule, final_lr=final_lr)
    wanted = [float(x) for x in PEERS[schedule, final_lr].split()]
    assert [lr_factor(config, s) for s in range(20)] == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("warmup", [0, 1, 10])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_schedules_are_transformers_own_at_every_step(schedule, warmup):
    peers = pytest.importorskip("transformers", reason="transformers is not installed")
    make = getattr(peers, f"get_{schedule}_schedule_with_warmup")
    config = TrainConfig(steps=100, warmup_steps=warmup, schedule=schedule, final_lr=0.0)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = make(optimizer, warmup, 100)
    for step in range(100):
        assert lr_factor(config, step) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def test_the_cosine_schedule_is_torchs():
    config = TrainConfig(steps=50, warmup_steps=0, schedule="cosine", final_lr=0.1)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50, eta_min=0.1)
    for step in range(50):
        assert lr_factor(config, step) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize(("schedule", "end"), [("constant", 1), ("linear", 0.1), ("cosine", 0.1)])
def test_every_schedule_warms_up_and_ends_where_it_should(schedule, end):
    config = TrainConfig(steps=1000, warmup_steps=10, schedule=schedule)
    assert [lr_factor(config, s) for s in (0, 5, 10)] == pytest.approx([0, 0.5, 1.0])
    assert lr_factor(config, 1000) == pytest.approx(end)
    assert lr_factor(config, 5000) == pytest.approx(end)


def test_every_parameter_is_in_exactly_one_optimizer_group():
    for optimizer in ("adamw", "muon"):
        config = dataclasses.replace(TRAIN, optimizer=optimizer)
        model = tiny_model()
        made = make_optimizers(model, config, fused=False)
        held = [p for o in made for g in o.param_groups for p in g["params"]]
        assert len(held) == len(set(held)) == len(list(model.parameters()))


def rates(losses, config=None) -> tuple[list[float], list[str]]:
    """The factor on the rates after each validation, and what was said."""
    adaptation, config = Adaptation(), config or TrainConfig(plateau=3)
    said, factors = [], []
    for loss in losses:
        said.append(adaptation.see_validation(config, loss))
        factors.append(adaptation.rate)
    return factors, [note for note in said if note]


def test_a_plateau_halves_the_rates_once():
    factors, said = rates([3.0, 2.0, 2.01, 2.0, 1.9999, 1.0])
    assert factors == [1, 1, 1, 1, 0.5, 0.5]  # a ten-thousandth is no progress
    assert said == ["plateau: no better validation in 3; learning rates x0.5"]


def test_a_falling_loss_halves_nothing():
    assert rates([3.0, 2.5, 2.6, 2.4, 2.45, 2.3]) == ([1] * 6, [])


def test_without_being_asked_for_a_plateau_is_left_alone():
    assert rates([1.0] * 50, TrainConfig())[0] == [1] * 50


def limits(norms, **settings) -> tuple[list[float], list[str]]:
    adaptation, config = Adaptation(), TrainConfig(**settings)
    found = [adaptation.clip_norm(config, norm) for norm in norms]
    return [limit for limit, _ in found], [note for _, note in found if note]


def test_a_spike_tightens_clipping_once_and_is_forgotten():
    calm = [1.0, 1.2, 0.9] * 10
    found, said = limits([*calm, 30.0, *calm, *calm], spike=4.0, clip_norm=2.0)
    assert found[:30] == [2.0] * 30 and found[30] == 1.0
    assert 1.0 < found[31] < found[40] < 2.0 and found[-1] == 2.0
    assert said == ["spike: gradient norm 30, usual 1.01; clipped to 1"]


def test_a_spike_hardly_moves_the_average_it_sprang_from():
    adaptation, config = Adaptation(), TrainConfig(spike=4.0)
    for norm in [1.0] * 30 + [1e9]:
        adaptation.clip_norm(config, norm)
    assert adaptation.usual_norm < 1.1


def test_spikes_without_end_leave_a_sixteenth_to_move_with():
    assert min(limits([1.0] + [1000.0] * 40, spike=3.0)[0]) >= 1 / 16


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_what_is_not_finite_teaches_nothing(norm):
    adaptation = Adaptation(usual_norm=1.0)
    adaptation.clip_norm(TrainConfig(spike=4.0), norm)
    assert adaptation == Adaptation(usual_norm=1.0)


def test_without_being_asked_for_spikes_are_clipped_as_ever():
    assert limits([1.0, 500.0, 1.0]) == ([1.0] * 3, [])
