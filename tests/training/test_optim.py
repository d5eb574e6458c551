"""Optimizers and learning rates: what others compute, and what a run learns about itself."""

import dataclasses
import math

import pytest
import torch
from helpers import TRAIN, tiny_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from kit.base.config import load_preset
from kit.base.errors import KitError
from kit.recipes.settings import check_settings
from kit.training.config import SCHEDULES, TrainConfig
from kit.training.optim import (
    Adaptation,
    Muon,
    lr_factor,
    make_optimizers,
    orthogonalize,
)

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
    config = TrainConfig(max_steps=20, warmup_steps=5, schedule=schedule, final_lr=final_lr)
    wanted = [float(x) for x in PEERS[schedule, final_lr].split()]
    assert [lr_factor(config, s) for s in range(20)] == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(("schedule", "end"), [("constant", 1), ("linear", 0.1), ("cosine", 0.1)])
def test_every_schedule_warms_up_and_ends_where_it_should(schedule, end):
    config = TrainConfig(max_steps=1000, warmup_steps=10, schedule=schedule)
    assert [lr_factor(config, s) for s in (0, 5, 10)] == pytest.approx([0, 0.5, 1.0])
    assert lr_factor(config, 1000) == pytest.approx(end)
    assert lr_factor(config, 5000) == pytest.approx(end)


def test_a_new_schedule_is_one_line_of_the_table(monkeypatch):
    with pytest.raises(KitError, match="choose one of constant, linear, cosine"):
        TrainConfig(schedule="square")
    monkeypatch.setitem(SCHEDULES, "square", lambda done: (1 - done) ** 2)
    check_settings({"train": {"schedule": "square"}}, load_preset("tiny"))  # --set, SETTINGS
    config = TrainConfig(max_steps=30, warmup_steps=10, schedule="square", final_lr=0.2)
    rates = [lr_factor(config, step) for step in (5, 10, 20, 30)]
    assert rates == pytest.approx([0.5, 1.0, 0.4, 0.2])


def test_every_parameter_is_in_exactly_one_optimizer_group():
    for optimizer in ("adamw", "muon"):
        config = dataclasses.replace(TRAIN, optimizer=optimizer)
        model = tiny_model()
        made = make_optimizers(model, config, fused=False)
        held = [p for o in made for g in o.param_groups for p in g["params"]]
        assert len(held) == len(set(held)) == len(list(model.parameters()))


def test_adamw_that_is_not_fused_is_torchs_default():
    [adamw] = make_optimizers(tiny_model(), TRAIN, fused=False)
    assert adamw.defaults["foreach"] is None and adamw.defaults["fused"] is None
    [fused] = make_optimizers(tiny_model(), TRAIN, fused=True)
    assert fused.defaults["fused"] and not fused.defaults["foreach"]


def test_what_listens_to_references_has_its_own_rate():
    config = dataclasses.replace(TRAIN, optimizer="muon", lr=0.006, conditioner_lr=0.0006)
    model = tiny_model()
    made = make_optimizers(model, config, fused=False)
    rates = {p: g["peak_lr"] for o in made for g in o.param_groups for p in g["params"]}
    assert set(rates) == set(model.parameters())
    assert {rates[p] for p in model.conditioner.parameters()} == {0.0006}
    assert 0.0006 not in {rates[p] for p in model.gpt.parameters()}
    for p in model.conditioner.parameters():  # a frozen one has no group
        p.requires_grad_(False)
    [adamw, _] = make_optimizers(model, config, fused=False)
    assert len(adamw.param_groups) == 2


class Dtypes(TorchDispatchMode):
    """Notes the number formats of all that is computed inside."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        result = call(*args, **(kwargs or {}))
        self.found |= {result.dtype} if isinstance(result, torch.Tensor) else set()
        return result


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_muon_multiplies_in_the_precision_of_the_run(precision, dtype):
    model = tiny_model()
    config = dataclasses.replace(TRAIN, optimizer="muon")
    _, muon = make_optimizers(model, config, fused=False, precision=precision)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with Dtypes() as used:
        muon.step()
    assert used.found == {torch.float32, dtype}


SHAPES = [(48, 32), (32, 96), (32, 32), (48, 32)]


def matrices_with_gradients() -> list[nn.Parameter]:
    torch.manual_seed(0)
    found = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    for p in found:
        p.grad = torch.randn_like(p)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("iterations", [1, 3, 5])
def test_muon_steps_as_torchs_does(dtype, iterations):
    """torch's is always in bf16: apart from rounding, any of ours makes the same step."""
    settings = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9, "ns_steps": iterations}
    start, mine, theirs = (matrices_with_gradients() for _ in range(3))
    for optimizer in (Muon(mine, dtype, **settings), torch.optim.Muon(theirs, **settings)):
        for _ in range(3):
            optimizer.step()
    for a, b, before in zip(mine, theirs, start):
        assert (a - b).norm() < 0.03 * (b - before).norm()


@pytest.mark.parametrize(
    ("dtype", "near"), [(torch.float32, 1e-4), (torch.float16, 5e-3), (torch.bfloat16, 0.03)]
)
@pytest.mark.parametrize("iterations", [1, 3, 5, 8])
def test_an_orthogonalized_matrix_is_that_of_double_precision(iterations, dtype, near):
    a, b, c = 3.4445, -4.7750, 2.0315
    matrices = torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(0))
    wanted = matrices.double() / matrices.double().norm(dim=(1, 2), keepdim=True)
    for _ in range(iterations):
        u, s, v = torch.linalg.svd(wanted, full_matrices=False)
        wanted = u * (a * s + b * s**3 + c * s**5)[:, None] @ v
    for turned in (matrices, matrices.mT):
        found = orthogonalize(turned, iterations, dtype).double()
        found = found if turned is matrices else found.mT
        assert (found - wanted).norm() < near * wanted.norm()


def test_muon_resumes_from_a_checkpoint_of_torchs():
    mine, theirs = matrices_with_gradients(), matrices_with_gradients()
    settings = {"lr": 0.1, "weight_decay": 0.1}
    before = torch.optim.Muon(theirs, **settings)
    before.step()
    after = Muon(mine, torch.float32, **settings)
    after.load_state_dict(before.state_dict())
    again = after.state_dict()
    assert again["param_groups"] == before.state_dict()["param_groups"]
    for number, kept in before.state_dict()["state"].items():
        (name,) = kept
        assert torch.equal(again["state"][number][name], kept[name])


def rates(losses, config=None) -> tuple[list[float], list[str]]:
    """The factor on the rates after each validation, and what was said."""
    adaptation, config = Adaptation(), config or TrainConfig(lr_plateau_patience=3)
    said, factors = [], []
    for loss in losses:
        said.append(adaptation.record_validation(config, loss))
        factors.append(adaptation.rate)
    return factors, [note for note in said if note]


def test_a_plateau_halves_the_rates_once():
    factors, said = rates([3.0, 2.0, 2.01, 2.0, 1.9999, 1.0])
    assert factors == [1, 1, 1, 1, 0.5, 0.5]  # a ten-thousandth is no progress
    assert said == ["plateau: no better validation in 3; learning rates x0.5"]
    assert rates([3.0, 2.5, 2.6, 2.4, 2.45, 2.3]) == ([1] * 6, [])
    assert rates([1.0] * 50, TrainConfig())[0] == [1] * 50, "not asked for"


def limits(norms, **settings) -> tuple[list[float], list[str]]:
    adaptation, config = Adaptation(), TrainConfig(**settings)
    found = [adaptation.clip_norm(config, norm) for norm in norms]
    return [limit for limit, _ in found], [note for _, note in found if note]


def test_a_spike_tightens_clipping_once_and_is_forgotten():
    calm = [1.0, 1.2, 0.9] * 10
    found, said = limits([*calm, 30.0, *calm, *calm], spike=4.0, max_grad_norm=2.0)
    assert found[:30] == [2.0] * 30 and found[30] == 1.0
    assert 1.0 < found[31] < found[40] < 2.0 and found[-1] == 2.0
    assert said == ["spike: gradient norm 30, usual 1.01; clipped to 1"]
    assert limits([1.0, 500.0, 1.0]) == ([1.0] * 3, []), "not asked for"


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
