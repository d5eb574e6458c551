"""The switches: what is on offer here and why, what really ran, and that the loss stays."""

import dataclasses
import functools
import itertools
import threading
import time

import pytest
import torch
from helpers import CPU, GPT, TRAIN, random_rows, tiny_model, tiny_session, train_in, until
from torch import nn
from torch.profiler import ProfilerActivity, profile

from kit.base.errors import KitError
from kit.base.hardware import SHORT_ROW, Choice
from kit.model.sequence import pack
from kit.settings import SpeedConfig
from kit.training.switches import LABELS, Applied, apply, compilations, prefetched, switches

NAMES = [f.name for f in dataclasses.fields(SpeedConfig) if f.type is bool or f.type == "bool"]
IN_BF16 = f"explicit up to {SHORT_ROW} tokens, then flash"


@pytest.fixture(autouse=True)
def process_settings():
    cudnn, precision = torch.backends.cudnn, torch.get_float32_matmul_precision()
    before = cudnn.benchmark, cudnn.allow_tf32
    yield
    cudnn.benchmark, cudnn.allow_tf32 = before
    torch.set_float32_matmul_precision(precision)


@pytest.fixture
def bf16(monkeypatch):
    choice = Choice(value="bf16", reason="measured")
    monkeypatch.setattr("kit.training.switches.choose_precision", lambda hw: choice)


def batch(count: int = 4, pad_to: int = 0, seed: int = 0):
    return pack(GPT, *random_rows(GPT, count, seed), pad_to)


def loss_and_gradients(model, rows=None):
    model.zero_grad()
    loss = sum(model(rows or batch()))
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])


def test_all_switches_are_off_in_the_baseline_and_have_label_and_reason(bf16):
    offered = switches(SpeedConfig(), CPU)
    assert [s.name for s in offered] == NAMES == list(LABELS)
    assert not any(s.on for s in offered) and all(s.label and s.reason for s in offered)


def test_the_record_says_what_was_set_what_ran_and_why_and_a_baseline_takes_it_back(bf16):
    asked = {"sdpa": True, "mixed_precision": True, "tf32": True, "gradient_checkpointing": True}
    model = tiny_model()
    applied = apply(model, SpeedConfig(**asked), CPU)
    assert model.gpt.recompute == {0, 1} and all(layer.attn.fused for layer in model.gpt.h)
    assert {r.name for r in applied.switches if r.asked} == set(asked)
    ran = {"sdpa": IN_BF16, "mixed_precision": "bf16", "gradient_checkpointing": "2 of 2 layers"}
    assert {r.name: r.ran for r in applied.switches} == dict.fromkeys(NAMES, "off") | ran
    assert {name for name in NAMES if applied.on(name)} == set(ran)
    table = applied.table()
    assert (table["Mixed precision"], table["EMA of the weights"]) == ("bf16: measured", "off")
    assert "although asked for" in table["TF32 products"]
    explained = {s.name: s.explanation for s in applied.switches}
    assert explained["mixed_precision"] == "bf16: measured"
    assert explained["tf32"].startswith("not available: ")
    assert "Mixed precision: bf16" in applied.line

    plain = model.gpt.run_layer
    apply(model, SpeedConfig(compile=True, **asked), CPU)
    assert model.gpt.run_layer is not plain
    applied = apply(model, SpeedConfig(), CPU)
    assert (applied.precision, applied.ran("sdpa")) == ("fp32", "explicit softmax")
    assert not applied.notes and not model.gpt.recompute and model.gpt.run_layer is plain
    assert not any(layer.attn.fused for layer in model.gpt.h)


def kept_bytes(model) -> int:
    kept, rows = {}, batch(8)
    note = lambda t: kept.setdefault(t.data_ptr(), t.nbytes) and t  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        sum(model(rows))
    return sum(kept.values())


def test_the_more_layers_are_recomputed_the_less_is_kept():
    found = []
    for switched in ({}, {"recompute_every": 2}, {"recompute_every": 1}):
        model = tiny_model(layers=4, dropout=0.2).train()
        on = SpeedConfig(sdpa=True, gradient_checkpointing=bool(switched), **switched)
        ran = apply(model, on, CPU).ran("gradient_checkpointing")
        assert ran == ("off" if not switched else f"{4 // on.recompute_every} of 4 layers")
        kept = kept_bytes(model)
        torch.manual_seed(7)  # the same dropout
        found.append((kept, *loss_and_gradients(model)))
    (none, loss, grads), half, every = found
    assert none > 1.3 * half[0] > 1.3 * 1.3 * every[0] and model.gpt.recompute == {0, 1, 2, 3}
    for _, other_loss, other_grads in (half, every):
        assert other_loss == loss and torch.equal(other_grads, grads)


def test_low_level_switches_set_what_they_name_and_off_sets_it_back(monkeypatch, bf16):
    picked = Choice(value="flash", reason="test")
    monkeypatch.setattr("kit.training.switches.attention_backend", lambda *_: picked)
    ampere = dataclasses.replace(CPU, device="cuda", capability=(8, 0))
    cudnn = torch.backends.cudnn
    for on in (True, False):
        applied = apply(tiny_model(), SpeedConfig(tf32=on, cudnn_benchmark=on), ampere)
        assert (cudnn.benchmark, cudnn.allow_tf32) == (on, on)
        assert torch.get_float32_matmul_precision() == ("high" if on else "highest")
        assert applied.on("tf32") is applied.on("cudnn_benchmark") is on


def test_what_this_device_lacks_is_off_and_says_why(monkeypatch):
    """A machine without bf16 units and without a compiler."""
    choice = Choice(value="fp32", reason="bf16 is slower here")
    monkeypatch.setattr("kit.training.switches.choose_precision", lambda hw: choice)
    monkeypatch.setattr("shutil.which", lambda name: None)
    asked = SpeedConfig(mixed_precision=True, compile=True, sdpa=True)
    offered = {s.name: s for s in switches(asked, CPU)}
    assert offered["sdpa"].on and not offered["compile"].on
    assert not offered["mixed_precision"].available
    assert "bf16 is slower here" in offered["mixed_precision"].reason
    notes = apply(tiny_model(), asked, CPU).notes
    assert len(notes) == 2 and "Mixed precision is off: bf16 is slower here" in notes
    assert any("no C++ compiler (install g++)" in note for note in notes)
    assert apply(tiny_model(), SpeedConfig(sdpa=True), CPU).notes == []


def test_a_trunk_without_layers_trains_on_and_says_what_is_off(bf16):
    model = tiny_model()
    model.gpt = nn.Linear(GPT.width, GPT.width)
    on = SpeedConfig(sdpa=True, gradient_checkpointing=True, fused_adamw=True)
    applied = apply(model, on, CPU)
    assert len(applied.notes) == 2 and all("no list of layers `h`" in n for n in applied.notes)
    assert applied.on("fused_adamw") and applied.ran("sdpa") == "explicit softmax"
    assert loss_and_gradients(model)[1].isfinite().all()


def ran_kernels(model) -> set[str]:
    """The kernels of fused attention that run in `model`."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        model.train()(batch())
    return {e.key for e in seen.key_averages() if "_scaled_dot_product" in e.key}


@pytest.mark.parametrize(("dropout", "attention"), [(0.0, "flash"), (0.2, "math")])
def test_the_reported_kernel_is_the_one_that_runs(dropout, attention):
    model = tiny_model(dropout=dropout, cond_blocks=0, perceiver_layers=0)  # the trunk's alone
    applied = apply(model, SpeedConfig(sdpa=True), CPU)
    (ran,) = ran_kernels(model)
    assert applied.ran("sdpa") == attention and f"_{attention}" in ran
    (record,) = (s for s in applied.switches if s.name == "sdpa")
    assert record.ran == attention and "fp32" in record.reason


def test_an_attention_kernel_runs_alone_with_the_same_loss_and_is_set_back():
    model = tiny_model()
    apply(model, SpeedConfig(sdpa=True), CPU)
    before = loss_and_gradients(model)
    assert apply(model, SpeedConfig(sdpa=True, attention_kernel="math"), CPU).ran("sdpa") == "math"
    for one, other in zip(before, loss_and_gradients(model), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    for name in ("cudnn", "fast"):  # not on a CPU; unknown
        with pytest.raises(KitError, match="attention_kernel"):
            apply(model, SpeedConfig(sdpa=True, attention_kernel=name), CPU)
    alone = tiny_model(cond_blocks=0, perceiver_layers=0)
    for name, kernel in (("math", "_math"), ("", "_flash")):
        apply(alone, SpeedConfig(sdpa=True, attention_kernel=name), CPU)
        (ran,) = ran_kernels(alone)
        assert kernel in ran


SHAPES = {"any length": ((0,) * 6, True), "fixed lengths": ((40, 56, 64) * 2, False)}  # tokens


@pytest.mark.parametrize(("lengths", "recompute"), SHAPES.values(), ids=SHAPES)
@pytest.mark.long
def test_nothing_is_compiled_after_the_first_step(monkeypatch, lengths, recompute):
    """torch.compile's own tracing and guards; the slow code generation behind it left out."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    model, plain = tiny_model(), tiny_model()
    apply(model, SpeedConfig(compile=True, sdpa=True, gradient_checkpointing=recompute), CPU)
    before, made = compilations(), []
    for seed, length in enumerate(lengths):  # also a batch of fewer rows, as an epoch's last one
        rows = batch(8 - seed, length, seed)
        found, wanted = loss_and_gradients(model.train(), rows), loss_and_gradients(plain, rows)
        assert found[0] == pytest.approx(wanted[0], rel=1e-5)
        assert (found[1] - wanted[1]).norm() < 1e-4 * wanted[1].norm()
        with torch.inference_mode():  # validation, as between two steps
            model.eval()(rows)
        made.append(compilations() - before)
    assert made[0] == 1 and made[-1] == 1, made


@pytest.mark.long
def test_compiled_layers_are_recomputed_in_half_precision():
    """Inductor fails on a checkpoint inside a compiled layer."""
    model = tiny_model(dropout=0.1).train()
    apply(model, SpeedConfig(compile=True, sdpa=True, gradient_checkpointing=True), CPU)
    with torch.autocast("cpu", torch.bfloat16):
        sum(model(batch(8, 40, 0))).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


# Batches made ahead.


def until_none() -> None:
    until(lambda: not any(t.name.startswith("batches") for t in threading.enumerate()))


def test_a_run_whose_batches_are_made_ahead_is_the_same_run(tmp_path, monkeypatch):
    """Stopped in the middle, too: what was made ahead is made again."""
    train_in(str(tmp_path / "plain"))
    really_on = Applied.on
    monkeypatch.setattr("kit.training.switches.pin", lambda batch: batch)
    monkeypatch.setattr(
        Applied, "on", lambda self, name: name == "pinned_memory" or really_on(self, name)
    )
    stop, session = threading.Event(), tiny_session(tmp_path / "ahead", TRAIN)
    for event in session.run({"ema": True}, stop):
        if event.step == 5:
            stop.set()
    train_in(str(tmp_path / "ahead"))
    until_none()
    for name in ("model-raw.safetensors", "model-ema.safetensors"):
        plain, ahead = ((tmp_path / way / name).read_bytes() for way in ("plain", "ahead"))
        assert ahead == plain


def test_only_so_many_are_made_while_the_step_waits_and_closing_ends_the_thread():
    made = []
    assert list(prefetched(range(100))) == list(range(100)), "once and in order"
    broken = prefetched(1 // (3 - i) for i in itertools.count())
    with pytest.raises(ZeroDivisionError):  # where its batch would have come
        assert [next(broken) for _ in range(4)]
    stream = prefetched(made.append(i) or i for i in itertools.count())
    assert next(stream) == 0
    until(lambda: 1 in made)  # while the step has the first
    time.sleep(0.3)
    assert len(made) <= 4, "one taken, two waiting, one in the maker's hands"
    stream.close()
    until_none()
