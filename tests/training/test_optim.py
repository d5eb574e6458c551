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
from kit.recipes.open_run import check_settings
from kit.training.config import SCHEDULES, TrainConfig
from kit.training.optim import (
    EMA,
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


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def snapshot(module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def walk(module, ema: EMA, steps: int) -> list[list[torch.Tensor]]:
    """Random weight changes with an update after each; the weights after every step."""
    seen = [snapshot(module)]
    for _ in range(steps):
        for p in module.parameters():
            p.data += torch.randn_like(p)
        ema.update()
        seen.append(snapshot(module))
    return seen


@pytest.mark.parametrize("decay", [0.3, 0.9, 0.999])
def test_the_average_is_the_closed_form(decay):
    module = model()
    ema = EMA(module, decay)
    seen = walk(module, ema, 30)
    for i, shadow in enumerate(ema.shadow.values()):
        wanted = seen[0][i].double()
        for n, weights in enumerate(seen[1:]):
            d = min(decay, (1 + n) / (10 + n))
            wanted = d * wanted + (1 - d) * weights[i].double()
        assert torch.allclose(shadow.double(), wanted, atol=1e-5)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_average_is_swapped_in_and_the_weights_come_back_bit_for_bit(error):
    module = model()
    ema = EMA(module, 0.9)
    walk(module, ema, 5)
    own, average = snapshot(module), [s.clone() for s in ema.shadow.values()]
    with ema.swapped_in():
        assert all(map(torch.equal, module.parameters(), average))
    assert all(map(torch.equal, module.parameters(), own))
    with pytest.raises(error), ema.swapped_in():
        next(module.parameters()).data.fill_(float("nan"))
        raise error
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), own))
    assert all(torch.isfinite(s).all() for s in ema.shadow.values())


def test_half_precision_weights_are_averaged_in_fp32_and_restored_exactly():
    module = model().bfloat16()
    ema = EMA(module, 0.9)
    own = snapshot(module)
    ema.update()
    with ema.swapped_in():
        pass
    assert all(s.dtype == torch.float32 for s in ema.shadow.values())
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), own))


def test_a_restored_average_continues_as_the_first_would_have():
    module = model()
    ema, again = EMA(module, 0.9), EMA(module, 0.9)
    walk(module, ema, 5)
    again.load_state_dict({k: v.clone() for k, v in ema.state_dict().items()})
    walk(module, ema, 0)
    ema.update()
    again.update()
    assert again.updates == 6
    assert all(torch.equal(a, b) for a, b in zip(ema.shadow.values(), again.shadow.values()))


def drift(module, averages: list[EMA], steps: int) -> None:
    """Weights that move on with some noise, as in training, seen by each of `averages`."""
    way = [torch.randn_like(p) for p in module.parameters()]
    for _ in range(steps):
        for p, direction in zip(module.parameters(), way):
            p.data += 0.01 * direction + 0.05 * torch.randn_like(p)
        for ema in averages:
            ema.update()


def away(module, decay: float) -> EMA:
    """An average in the CPU's memory of a model that is elsewhere."""
    return EMA(module, decay, device="cpu")


@pytest.mark.parametrize(("steps", "near"), [(203, 0.25), (1003, 0.05), (3003, 0.02)])
def test_an_average_away_from_the_model_is_nearly_the_exact_one(steps, near):
    """It differs by a share of its distance from the weights, less the more steps it remembers."""
    module = model()
    exact, rare = EMA(module, 0.999), away(module, 0.999)
    drift(module, [exact, rare], steps)
    wanted, found = exact.state_dict(), rare.state_dict()
    assert wanted["updates"] == found["updates"] == steps
    for name, weights in module.named_parameters():
        assert (found[name] - wanted[name]).norm() < near * (weights - wanted[name]).norm()


def test_an_average_away_from_the_model_copies_the_weights_every_eighth_step(monkeypatch):
    module = model()
    ema = away(module, 0.9)
    moves = []
    monkeypatch.setattr(torch, "_foreach_lerp_", lambda *args: moves.append(ema.updates))
    drift(module, [ema], 17)
    assert moves == [8, 16]
    ema.state_dict()
    ema.state_dict()
    assert moves == [8, 16, 17]


@pytest.mark.parametrize("use", ["swapped in", "saved"])
def test_an_average_away_from_the_model_has_seen_all_steps_when_it_is_used(use):
    module = model()
    ema = away(module, 0.9)
    before = snapshot(module)
    drift(module, [ema], 3)
    own = snapshot(module)
    if use == "saved":
        found = list(ema.state_dict().values())
    else:
        with ema.swapped_in():
            found = snapshot(module)
    kept = (1 / 10) * (2 / 11) * (3 / 12)
    for a, b, average in zip(before, own, found):
        assert torch.allclose(average, kept * a + (1 - kept) * b, atol=1e-6)
    assert all(map(torch.equal, own, snapshot(module)))
