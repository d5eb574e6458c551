"""8-bit AdamW: a quarter of the state, the same loss, an exact resume, and what happens without."""

import dataclasses
import importlib.util
import itertools
from importlib.metadata import PackageNotFoundError
from pathlib import Path
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

from kit.base.hardware import Choice
from kit.training import adam8bit, checkpoint
from kit.training.adam8bit import (
    converted,
    eight_bit_adamw,
    expanded,
    moment_shape,
    moments_of,
    state_bytes,
    to_fp32,
)
from kit.training.config import TrainConfig
from kit.training.loop import train
from kit.training.switches import SpeedConfig
from kit.training.trainer import Trainer
from kit.tuning.memory_plan import Step, count_parameters, plan_bytes

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason=f"bitsandbytes is not installed ({adam8bit.INSTALL})",
)
WIDE = {"width": 64, "heads": 2}  # its matrices have more than 4,096 entries
ON = {"ema": True, "adamw_8bit": True}


@pytest.fixture
def fresh():
    """What was found of this machine is detected again, before and after."""
    adam8bit._runs_on.cache_clear()
    yield
    adam8bit._runs_on.cache_clear()


def state(config: TrainConfig = TRAIN, **switches) -> Trainer:
    torch.manual_seed(0)
    return Trainer(tiny_model(**WIDE), config, SpeedConfig(**switches), CPU)


def losses(s: Trainer, batches=None) -> list[float]:
    return [event.loss for event in train(s, batches or random_batches(s.model.config))]


def without_package(monkeypatch):
    def version(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(adam8bit, "version", version)


def test_without_the_package_the_run_resumes_with_a_message(monkeypatch, fresh):
    without_package(monkeypatch)
    s = state(adamw_8bit=True, fused_adamw=True)
    (note,) = s.applied.notes
    assert note == f"8-bit AdamW is off: bitsandbytes is not installed ({adam8bit.INSTALL})"
    assert s.applied.on("fused_adamw") and isinstance(s.optimizers[0], torch.optim.AdamW)
    assert losses(s) == losses(state(fused_adamw=True))


def test_an_old_package_is_named(monkeypatch, fresh):
    monkeypatch.setattr(adam8bit, "version", lambda name: "0.49.2")
    found = eight_bit_adamw(CPU)
    assert found.value == "no" and "bitsandbytes 0.49.2 is too old (pip install" in found.reason


def test_a_package_that_does_not_run_here_says_why(monkeypatch, fresh):
    def broken():
        raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(adam8bit, "version", lambda name: "0.50.2")
    monkeypatch.setattr(adam8bit, "_library", broken)
    found = eight_bit_adamw(CPU)
    assert found.value == "no" and "does not run here: libcudart.so.12" in found.reason


def test_state_bytes_are_counted_by_hand():
    assert state_bytes(4095) == 8 * 4095  # too small: two moments in fp32
    assert state_bytes(4096) == 2 * (4096 + 4 * 16)
    assert state_bytes(4097) == 2 * (4097 + 4 * 17)
    assert state_bytes(10**8) / 10**8 == pytest.approx(2 * (1 + 4 / 256))


def hand_made(step: int = 7) -> dict:
    """Moments of a parameter (40, 110) as bitsandbytes keeps them."""
    rng = torch.Generator().manual_seed(0)
    found = {"step": step}
    for number in "12":
        found[f"state{number}"] = torch.randint(0, 256, (40, 110), generator=rng).byte()
        found[f"absmax{number}"] = torch.rand(18, generator=rng)
        found[f"qmap{number}"] = torch.linspace(-1, 1, 256)
    return found


def test_moments_in_8_bits_are_read_without_the_package():
    """A run resumes where bitsandbytes is missing: 8 bits name a level, times the block's scale."""
    moments = hand_made()
    whole = to_fp32(moments)
    place = 17 * 110 + 3  # of entry [17, 3]
    level = moments["qmap1"][int(moments["state1"][17, 3])]
    assert whole["exp_avg"][17, 3] == level * moments["absmax1"][place // 256]
    assert whole["exp_avg"].shape == whole["exp_avg_sq"].shape == (40, 110)
    assert whole["step"] == 7.0
    size = torch.Size([40, 110])
    assert all(moment_shape(n, size) == t.shape for n, t in moments.items() if n != "step")
    parameter = torch.nn.Parameter(torch.zeros(40, 110))
    found, note = converted({0: moments}, torch.optim.AdamW([parameter]))
    assert "fp32 from here" in note and found[0].keys() == whole.keys()


@needs_package
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_loss_stays_where_it_was_for_100_steps(optimizer):
    """Six batches again and again, almost memorised: the mean of the curve within 1 %."""
    config = TrainConfig(
        max_steps=100, warmup_steps=10, lr=2e-3, schedule="linear", optimizer=optimizer
    )
    few = list(itertools.islice(random_batches(GPT), 6))
    plain, small = (
        losses(state(config, adamw_8bit=on), itertools.cycle(few)) for on in (False, True)
    )
    apart = [abs(a - b) / b for a, b in zip(small, plain)]
    print(f"{optimizer}: at most {max(apart):.2%}, on average {sum(apart) / 100:.2%}")
    assert plain[-1] < 0.8 * plain[0]
    assert max(apart) < 0.05 and sum(apart) / 100 < 0.01


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
def test_a_run_resumes_when_the_switch_is_turned(tmp_path, before, after):
    config = dataclasses.replace(TRAIN, max_steps=12, schedule="constant")
    whole = train_in(tmp_path / "whole", config, ON | {"adamw_8bit": before})
    folder = tmp_path / "turned"
    session = tiny_session(folder, config)
    values = ON | {"adamw_8bit": before}
    for event in itertools.islice(session.run(values, Event()), 7):
        assert event.step <= 7  # left two steps after a checkpoint
    rest = train_in(folder, config, ON | {"adamw_8bit": after})
    assert rest[0].step == 7
    words = "are in 8 bits from here" if after else "are fp32 from here"
    assert words in rest[0].note
    assert [e.loss for e in rest] == pytest.approx([e.loss for e in whole[6:]], rel=0.02)


@needs_package
def test_turning_the_switch_keeps_the_moments_as_well_as_8_bits_can():
    s = state(adamw_8bit=True)
    list(itertools.islice(train(s, random_batches(GPT)), 4))
    eight = moments_of(s.optimizers[0])
    whole, _ = converted(eight, torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]))
    back, _ = converted(whole, s.optimizers[0])
    for number, moments in eight.items():
        assert back[number]["step"] == moments["step"]
        assert back[number].keys() == moments.keys()
        again = to_fp32(back[number])
        for name in ("exp_avg", "exp_avg_sq"):
            apart = (again[name] - whole[number][name]).abs().max()
            assert apart <= 0.01 * whole[number][name].abs().max()


@needs_package
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_it_steps_under_the_scaler_of_fp16_and_clipping(monkeypatch, optimizer):
    monkeypatch.setattr(
        "kit.training.switches.choose_precision", lambda hw: Choice(value="fp16", reason="test")
    )
    config = dataclasses.replace(TRAIN, optimizer=optimizer, max_grad_norm=0.5)
    plain, small = (state(config, mixed_precision=True, adamw_8bit=on) for on in (False, True))
    for s in (plain, small):
        s.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    assert losses(small) == pytest.approx(losses(plain), rel=0.02)


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


@needs_package
def test_the_dequantized_numbers_are_the_packages_own():
    functional = adam8bit._library().functional
    numbers = torch.randn(40, 110, generator=torch.Generator().manual_seed(0))
    levels = functional.create_dynamic_map(signed=True)
    rounded, kept = functional.quantize_blockwise(numbers, code=levels, blocksize=256)
    theirs = functional.dequantize_blockwise(rounded, kept)
    assert torch.equal(expanded(rounded, kept.absmax, levels), theirs)


def test_the_extra_asks_for_what_the_code_asks_for():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert 'adam8 = ["bitsandbytes>=0.50"]' in text and adam8bit.NEEDED == (0, 50)
