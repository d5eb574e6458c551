"""Optimizers and learning rates: what others compute, and what a run learns about itself."""

import dataclasses
import importlib.util
import itertools
from importlib.metadata import PackageNotFoundError

import pytest
import torch
from helpers import CPU, GPT, TRAIN, random_batches, tiny_model
from torch import nn

from kit.base.hardware import DTYPES
from kit.settings import DataConfig, SpeedConfig, TrainConfig
from kit.training import checkpoint, optim
from kit.training.loop import train
from kit.training.optim import EMA, Adaptation, Muon
from kit.training.trainer import Trainer
from kit.tuning.memory_plan import Workload, count_parameters, moment_bytes

# What transformers 5.23.0 gives for 5 steps of warm-up and 20 in all: linear, cosine, and cosine
# with a least rate of a tenth.
PEERS = {
    ("constant", 0.1): "0 .2 .4 .6 .8 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1",
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
    assert [optim.lr_factor(config, s) for s in range(20)] == pytest.approx(wanted, abs=1e-6)
    end = 1.0 if schedule == "constant" else final_lr
    assert [optim.lr_factor(config, s) for s in (20, 5000)] == pytest.approx([end, end])


@pytest.mark.parametrize(("optimizer", "own_rate"), [("adamw", 0.0), ("muon", 0.0006)])
def test_every_parameter_is_in_one_group_and_the_conditioner_may_have_its_own(optimizer, own_rate):
    config = dataclasses.replace(TRAIN, optimizer=optimizer, lr=0.006, conditioner_lr=own_rate)
    model = tiny_model()
    made = optim.make_optimizers(model, config, fused=False)
    held = [(p, g["peak_lr"]) for o in made for g in o.param_groups for p in g["params"]]
    rates = dict(held)
    assert len(held) == len(rates) and set(rates) == set(model.parameters())
    assert {rates[p] for p in model.conditioner.parameters()} == {own_rate or 0.006}
    assert 0.0006 not in {rates[p] for p in model.gpt.parameters()}
    model.conditioner.requires_grad_(False)  # a frozen one has no group
    assert len(optim.make_optimizers(model, config, fused=False)[0].param_groups) == 2


def matrices_with_gradients() -> list[nn.Parameter]:
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(shape)) for shape in [(48, 32), (32, 96), (32, 32), (48, 32)]]
    for p in made:
        p.grad = torch.randn_like(p)
    return made


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("iterations", [1, 5])
def test_muon_steps_as_torchs_does(dtype, iterations):
    """torch's is always in bf16: apart from rounding, any of ours makes the same step."""
    settings = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9, "ns_steps": iterations}
    start, mine, theirs = (matrices_with_gradients() for _ in range(3))
    for optimizer in (Muon(mine, dtype, **settings), torch.optim.Muon(theirs, **settings)):
        for _ in range(3):
            optimizer.step()
    for a, b, before in zip(mine, theirs, start):
        assert (a - b).norm() < 0.03 * (b - before).norm()


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
    floored, _ = rates([1.0] * 50, TrainConfig(lr_plateau_patience=3, final_lr=0.2))
    assert floored[-1] == 0.2 and len(set(floored)) == 4, "1, 1/2, 1/4, and the floor"


def limits(norms, **settings) -> tuple[list[float], list[str]]:
    adaptation, config = Adaptation(), TrainConfig(**settings)
    found, notes = [], []
    for norm in norms:
        spike, tight, usual = adaptation.clip_limits(config)
        found.append(tight if norm > spike else usual)
        notes.append(adaptation.record_norm(config, norm))
    return found, [note for note in notes if note]


def test_a_spike_tightens_clipping_once_and_is_forgotten():
    calm = [1.0, 1.2, 0.9] * 10
    found, said = limits([*calm, 30.0, *calm, *calm], spike=4.0, max_grad_norm=2.0)
    assert found[:30] == [2.0] * 30 and found[30] == 1.0
    assert 1.0 < found[31] < found[40] < 2.0 and found[-1] == 2.0
    assert said == ["spike: gradient norm 30, usual 1.01; clipped to 1"]
    assert limits([1.0, 500.0, 1.0]) == ([1.0] * 3, []), "not asked for"


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def snapshot(module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def ema_of(module, decay: float, device: str = "") -> EMA:
    return EMA(dict(module.named_parameters()), decay, device)


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
    ema = ema_of(module, decay)
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
    ema = ema_of(module, 0.9)
    walk(module, ema, 5)
    own, average = snapshot(module), [s.clone() for s in ema.shadow.values()]
    with pytest.raises(error), ema.swapped_in():
        assert all(map(torch.equal, module.parameters(), average))
        next(module.parameters()).data.fill_(float("nan"))
        raise error
    assert all(map(torch.equal, module.parameters(), own))
    assert all(map(torch.equal, ema.shadow.values(), average))


# 8-bit AdamW: the same loss, and what happens without its package.

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason=f"bitsandbytes is not installed ({optim.INSTALL})",
)
WIDE = {"width": 64, "heads": 2}  # its matrices have more than 4,096 entries


def state(config: TrainConfig = TRAIN, **switches) -> Trainer:
    torch.manual_seed(0)
    return Trainer(tiny_model(**WIDE), config, SpeedConfig(**switches), CPU)


def losses(s: Trainer, batches=None) -> list[float]:
    return [event.loss for event in train(s, batches or random_batches(s.model.config))]


def test_without_the_package_the_run_starts_with_a_message(monkeypatch):
    def version(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(optim, "version", version)
    monkeypatch.setattr(optim, "_runs_on", optim._runs_on.__wrapped__)  # nothing cached
    s = state(adamw_8bit=True, fused_adamw=True)
    (note,) = s.applied.notes
    assert note == f"8-bit AdamW is off: bitsandbytes is not installed ({optim.INSTALL})"
    assert s.applied.on("fused_adamw") and isinstance(s.optimizers[0], torch.optim.AdamW)


@needs_package
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_loss_stays_where_it_was_in_the_long_run(optimizer):
    """Six batches again and again, almost memorised: the mean of the curve within 1 %."""
    config = TrainConfig(max_steps=60, warmup_steps=10, schedule="linear", optimizer=optimizer)
    few = list(itertools.islice(random_batches(GPT), 6))
    plain, small = (
        losses(state(config, adamw_8bit=on), itertools.cycle(few)) for on in (False, True)
    )
    apart = [abs(a - b) / b for a, b in zip(small, plain)]
    assert plain[-1] < 0.8 * plain[0]
    assert max(apart) < 0.05 and sum(apart) / 60 < 0.01


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
        found = optim.orthogonalize(turned, iterations, dtype).double()
        found = found if turned is matrices else found.mT
        assert (found - wanted).norm() < near * wanted.norm()


@pytest.mark.parametrize("use", ["swapped in", "saved"])
def test_an_average_away_from_the_model_has_seen_all_steps_when_it_is_used(use):
    module = model()
    ema = ema_of(module, 0.9, "cpu")
    before, *_, own = walk(module, ema, 3)
    if use == "saved":
        found = list(ema.state_dict().values())
    else:
        with ema.swapped_in():
            found = snapshot(module)
    kept = (1 / 10) * (2 / 11) * (3 / 12)
    for a, b, average in zip(before, own, found):
        assert torch.allclose(average, kept * a + (1 - kept) * b, atol=1e-6)
    assert all(map(torch.equal, own, snapshot(module)))


def test_state_bytes_are_counted_by_hand():
    assert optim.eight_bit_bytes(4095) == 8 * 4095  # too small: two moments in fp32
    assert optim.eight_bit_bytes(4096) == 2 * (4096 + 4 * 16)
    assert optim.eight_bit_bytes(4097) == 2 * (4097 + 4 * 17)
    assert optim.eight_bit_bytes(10**8) / 10**8 == pytest.approx(2 * (1 + 4 / 256))


@needs_package
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_state_takes_the_bytes_that_are_planned(optimizer):
    config = dataclasses.replace(TRAIN, max_steps=2, optimizer=optimizer)
    s = state(config, adamw_8bit=True, fused_adamw=True)
    losses(s)
    moments = [m for o in s.optimizers for m in optim.moments_of(o).values()]
    tensors = [(n, t) for m in moments for n, t in m.items() if isinstance(t, torch.Tensor)]
    # The levels (qmap) are shared by all parameters.
    kept_bytes = sum(tensor.nbytes for name, tensor in tensors if not name.startswith("qmap"))
    settings = {"model": s.model.config, "train": config, "data": DataConfig(), "hw": CPU}
    planned = moment_bytes(Workload(speed=SpeedConfig(adamw_8bit=True), **settings))
    assert kept_bytes == planned
    whole = 4 if optimizer == "muon" else 8  # bytes a parameter, at least, without the switch
    assert planned < whole * count_parameters(s.model.config)
    assert s.applied.on("adamw_8bit") and not s.applied.on("fused_adamw")
    assert "takes its place" in s.applied.table()["Fused AdamW"]


@needs_package
def test_a_checkpoint_brings_every_bit_of_the_state_back(tmp_path):
    s = state(adamw_8bit=True)
    list(itertools.islice(train(s, random_batches(GPT)), 5))
    s.save(tmp_path)
    again = state(adamw_8bit=True)
    again.restore(checkpoint.load_newest(tmp_path)[0])
    before, after = (optim.moments_of(x.optimizers[0]) for x in (s, again))
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    values = [value for moments in before.values() for value in moments.values()]
    kinds = {value.dtype for value in values if isinstance(value, torch.Tensor)}
    assert kinds == {torch.uint8, torch.float32} and not again.notes
