"""The switches: what is on offer here and why, and what really ran."""

import dataclasses
import os

import pytest
import torch
from helpers import CPU, GPT, random_rows, tiny_model

from kit.config import build
from kit.hardware import Choice
from kit.model import pack
from kit.speedups import LABELS, SpeedConfig, apply, switches

NAMES = [field.name for field in dataclasses.fields(SpeedConfig)]


@pytest.fixture
def bf16(monkeypatch):
    choice = Choice(value="bf16", reason="measured")
    monkeypatch.setattr("kit.speedups.choose_precision", lambda hw: choice)


@pytest.fixture
def bare(monkeypatch):
    """A machine without bf16 units and without a compiler."""
    choice = Choice(value="fp32", reason="bf16 is slower here")
    monkeypatch.setattr("kit.speedups.choose_precision", lambda hw: choice)
    monkeypatch.setattr("shutil.which", lambda name: None)


def test_all_switches_are_off_in_the_baseline_and_have_label_and_reason(bf16):
    offered = switches(SpeedConfig(), CPU)
    assert [s.name for s in offered] == NAMES == list(LABELS)
    assert not any(s.on for s in offered) and all(s.label and s.reason for s in offered)


def test_the_baseline_runs_explicit_softmax_in_fp32(bf16):
    model = tiny_model()
    applied = apply(model, SpeedConfig(), CPU)
    assert (applied.precision, applied.attention) == ("fp32", "explicit softmax")
    assert not applied.notes and not model.gpt.recompute
    assert not any(layer.attn.fused for layer in model.gpt.h)


def test_chosen_switches_are_set_and_named(bf16):
    model = tiny_model()
    on = SpeedConfig(sdpa=True, mixed_precision=True, gradient_checkpointing=True)
    applied = apply(model, on, CPU)
    assert (applied.precision, applied.attention) == ("bf16", "flash")
    assert model.gpt.recompute == {0, 1} and all(layer.attn.fused for layer in model.gpt.h)


def test_applying_again_takes_switches_back(bf16):
    model = tiny_model()
    apply(model, SpeedConfig(sdpa=True, gradient_checkpointing=True), CPU)
    apply(model, SpeedConfig(), CPU)
    assert not model.gpt.recompute and not model.gpt.h[0].attn.fused


def test_what_this_device_lacks_is_off_and_says_why(bare):
    asked = SpeedConfig(mixed_precision=True, compile=True, sdpa=True)
    offered = {s.name: s for s in switches(asked, CPU)}
    assert offered["sdpa"].on and not offered["compile"].on
    assert not offered["mixed_precision"].available
    assert "bf16 is slower here" in offered["mixed_precision"].reason
    notes = apply(tiny_model(), asked, CPU).notes
    assert len(notes) == 2 and "Mixed precision is off: fp32: bf16 is slower here" in notes
    assert any("no C++ compiler (install g++)" in note for note in notes)


def test_what_was_not_asked_for_is_not_missed(bare):
    assert apply(tiny_model(), SpeedConfig(sdpa=True), CPU).notes == ()


def test_panel_values_build_a_configuration():
    assert build(SpeedConfig, dict.fromkeys(NAMES, True)).compile


@pytest.mark.skipif(
    "KIT_SLOW" not in os.environ, reason="torch.compile takes a minute here; KIT_SLOW=1 runs it"
)
def test_a_compiled_trunk_gives_the_same_loss_and_gradients():
    found = []
    for compiled in (False, True):
        model = tiny_model()
        apply(model, SpeedConfig(sdpa=True, compile=compiled), CPU)
        loss = sum(model(pack(GPT, *random_rows(GPT, 4))))
        loss.backward()
        found.append((loss, torch.cat([p.grad.flatten() for p in model.parameters()])))
    (loss, grads), (wanted_loss, wanted_grads) = found
    assert loss.item() == pytest.approx(wanted_loss.item(), rel=1e-5)
    assert (grads - wanted_grads).norm() < 1e-4 * wanted_grads.norm()
