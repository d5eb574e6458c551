"""The averaged weights: closed form, and a swap that leaves no trace."""

import pytest
import torch
from torch import nn

from kit.training.optim import EMA


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
