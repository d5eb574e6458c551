"""8-bit AdamW: a quarter of the state, the same loss, an exact resume, and what happens without."""

import dataclasses
import importlib.util
import itertools
from importlib.metadata import PackageNotFoundError
from threading import Event

import pytest
import torch
from helpers import (
    CPU,
    GPT,
    TRAIN,
    random_batches,
    start_and_kill,
    tiny_model,
    tiny_session,
    train_in,
)

from kit.training import checkpoint, optim
from kit.training.config import TrainConfig
from kit.training.loop import train
from kit.training.optim import eight_bit_adamw, eight_bit_bytes, moments_of
from kit.training.switches import SpeedConfig
from kit.training.trainer import Trainer
from kit.tuning.memory_plan import Step, count_parameters, plan_bytes

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason=f"bitsandbytes is not installed ({optim.INSTALL})",
)
WIDE = {"width": 64, "heads": 2}  # its matrices have more than 4,096 entries
ON = {"ema": True, "adamw_8bit": True}


@pytest.fixture
def fresh():
    """What was found of this machine is detected again, before and after."""
    optim._runs_on.cache_clear()
    yield
    optim._runs_on.cache_clear()


def state(config: TrainConfig = TRAIN, **switches) -> Trainer:
    torch.manual_seed(0)
    return Trainer(tiny_model(**WIDE), config, SpeedConfig(**switches), CPU)


def losses(s: Trainer, batches=None) -> list[float]:
    return [event.loss for event in train(s, batches or random_batches(s.model.config))]


def test_without_the_package_the_run_starts_with_a_message(monkeypatch, fresh):
    def version(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(optim, "version", version)
    s = state(adamw_8bit=True, fused_adamw=True)
    (note,) = s.applied.notes
    assert note == f"8-bit AdamW is off: bitsandbytes is not installed ({optim.INSTALL})"
    assert s.applied.on("fused_adamw") and isinstance(s.optimizers[0], torch.optim.AdamW)


def broken(groups, **settings):
    raise OSError("libcudart.so.12: cannot open shared object file")


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("0.49.2", "bitsandbytes 0.49.2 is too old (pip install"),
        ("0.50.2", "does not run here: libcudart.so.12"),
    ],
)
def test_a_package_that_does_not_run_here_says_why(monkeypatch, fresh, version, why):
    monkeypatch.setattr(optim, "version", lambda name: version)
    monkeypatch.setattr(optim, "adamw_8bit", broken)
    choice = eight_bit_adamw(CPU)
    assert choice.value == "no" and why in choice.reason


def test_state_bytes_are_counted_by_hand():
    assert eight_bit_bytes(4095) == 8 * 4095  # too small: two moments in fp32
    assert eight_bit_bytes(4096) == 2 * (4096 + 4 * 16)
    assert eight_bit_bytes(4097) == 2 * (4097 + 4 * 17)
    assert eight_bit_bytes(10**8) / 10**8 == pytest.approx(2 * (1 + 4 / 256))


@needs_package
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_loss_stays_where_it_was_in_the_long_run(optimizer):
    """Six batches again and again, almost memorised: the mean of the curve within 1 %."""
    config = TrainConfig(
        max_steps=60, warmup_steps=10, lr=2e-3, schedule="linear", optimizer=optimizer
    )
    few = list(itertools.islice(random_batches(GPT), 6))
    plain, small = (
        losses(state(config, adamw_8bit=on), itertools.cycle(few)) for on in (False, True)
    )
    apart = [abs(a - b) / b for a, b in zip(small, plain)]
    print(f"{optimizer}: at most {max(apart):.2%}, on average {sum(apart) / 60:.2%}")
    assert plain[-1] < 0.8 * plain[0]
    assert max(apart) < 0.05 and sum(apart) / 60 < 0.01


@needs_package
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_state_takes_the_bytes_that_are_planned(optimizer):
    config = dataclasses.replace(TRAIN, max_steps=2, optimizer=optimizer)
    s = state(config, adamw_8bit=True, fused_adamw=True)
    losses(s)
    kept = [t for o in s.optimizers for m in moments_of(o).values() for t in numbers(m)]
    step = Step(
        rows=1, text_ids=1, codes=1, reference_frames=1, eight_bit=True, optimizer=optimizer
    )
    planned = plan_bytes(s.model.config, step).parts["optimizer"]
    assert sum(t.nbytes for t in kept) == planned
    whole = 4 if optimizer == "muon" else 8  # bytes a parameter, at least, without the switch
    assert planned < whole * count_parameters(s.model.config)
    assert s.applied.on("adamw_8bit") and not s.applied.on("fused_adamw")
    assert "takes its place" in s.applied.table()["Fused AdamW"]


def numbers(moments: dict) -> list[torch.Tensor]:
    """A parameter's tensors, but for the levels that all parameters share."""
    tensors = {n: t for n, t in moments.items() if isinstance(t, torch.Tensor)}
    return [t for name, t in tensors.items() if not name.startswith("qmap")]


@needs_package
def test_a_checkpoint_brings_every_bit_of_the_state_back(tmp_path):
    s = state(adamw_8bit=True)
    list(itertools.islice(train(s, random_batches(GPT)), 5))
    s.save(tmp_path)
    again = state(adamw_8bit=True)
    again.restore(checkpoint.load_newest(tmp_path, again.require_complete)[0])
    before, after = (moments_of(x.optimizers[0]) for x in (s, again))
    assert before.keys() == after.keys() and not again.notes
    kinds = set()
    for number, moments in before.items():
        assert moments.keys() == after[number].keys()
        for name, value in moments.items():
            other = after[number][name]
            if isinstance(value, torch.Tensor):
                kinds.add(value.dtype)
                assert value.dtype == other.dtype and torch.equal(value, other)
            else:
                assert value == other == 5
    assert kinds == {torch.uint8, torch.float32}


@needs_package
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_killed_run_resumes_bit_for_bit(processes, tmp_path, optimizer):
    config = dataclasses.replace(TRAIN, max_steps=30, save_steps=1, optimizer=optimizer)
    whole = train_in(tmp_path / "whole", config, ON)
    folder = tmp_path / "killed"
    child = processes.Process(target=train_in, args=(str(folder), config, ON))
    start_and_kill(child, folder / "train.jsonl", 6)
    assert child.exitcode == -9
    rest = train_in(folder, config, ON)
    assert rest and "resumed from step" in rest[0].note
    assert [e.loss for e in rest] == [e.loss for e in whole][-len(rest) :]
    for name in ("model-raw.safetensors", "model-ema.safetensors"):
        assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@needs_package
@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
def test_when_the_switch_is_turned_the_optimizer_starts_again(tmp_path, before, after):
    config = dataclasses.replace(TRAIN, max_steps=12, schedule="constant")
    session = tiny_session(tmp_path, config)
    for event in itertools.islice(session.run(ON | {"adamw_8bit": before}, Event()), 7):
        assert event.step <= 7  # left one step after a checkpoint
    rest = train_in(tmp_path, config, ON | {"adamw_8bit": after})
    assert rest[0].step == 7 and rest[0].lr == 0 < rest[-1].lr
    kept = "fp32" if after else "8 bits"
    assert f"moments in {kept}" in rest[0].note
    assert "the optimizer starts again, with" in rest[0].note


@needs_package
def test_a_step_that_is_not_finite_leaves_the_state_alone():
    s = state(dataclasses.replace(TRAIN, max_steps=3), adamw_8bit=True)
    batches = list(itertools.islice(random_batches(GPT), 3))
    for micro in batches[1].micro:
        micro.cond.fill_(float("nan"))
    events = list(train(s, iter(batches)))
    assert "skipped" in events[1].note
    assert {m["step"] for m in moments_of(s.optimizers[0]).values()} == {2}
    assert all(torch.isfinite(p).all() for p in s.model.parameters())
