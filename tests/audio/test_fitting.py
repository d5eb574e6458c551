"""The small networks train safely in fp16, and for as long as a corpus asks."""

import dataclasses
import itertools
import math

import pytest
import torch
from helpers import CODEC, manifest, mels, waves
from torch import nn

from kit.audio.fitting import (
    MAX_OVERFLOWS,
    FitConfig,
    FitSchedule,
    backward_and_step,
    fit_model,
    one_cycle,
)
from kit.audio.mel_codec import MelCodec, MelCodecConfig
from kit.audio.recognizer import (
    Recognizer,
    RecognizerConfig,
    alphabet_of,
    recognizer_schedule,
    train_recognizer,
)
from kit.base.errors import KitError
from kit.base.hardware import autocast

TINY_GRADIENT = 2.0**-26  # below fp16's smallest number, 2^-24


def faint(layer: nn.Linear) -> torch.Tensor:
    """A loss whose gradient is too small for fp16 on its way through the fp16 product."""
    with autocast("cpu", "fp16"):
        return (layer(torch.ones(1, 4)).float() * TINY_GRADIENT).sum()


def gradient_step(precision: str) -> tuple[bool, torch.Tensor]:
    """Whether a step of `faint` was taken, and how far it moved the weights."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 1, bias=False)
    before = layer.weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1 / TINY_GRADIENT)
    taken = backward_and_step(
        faint(layer), optimizer, torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    )
    return taken, before - layer.weight.detach()


def test_a_gradient_too_small_for_fp16_arrives_with_scaling_and_vanishes_without():
    taken, moved = gradient_step("fp16")
    assert taken and torch.allclose(moved, torch.ones(1, 4), rtol=1e-2)
    taken, moved = gradient_step("fp32")  # for which nothing is scaled, though the product is fp16
    assert taken and not moved.any()


def test_an_overflow_skips_the_step_lowers_the_scale_and_says_so():
    layer = nn.Linear(4, 1, bias=False)
    before = layer.weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    assert not backward_and_step(layer(torch.full((1, 4), math.inf)).sum(), optimizer, scaler)
    assert torch.equal(layer.weight, before) and scaler.get_scale() == 128.0
    assert backward_and_step(layer(torch.ones(1, 4)).sum(), optimizer, scaler)
    assert not torch.equal(layer.weight, before) and layer.weight.grad is None


def test_gradients_are_clipped_after_they_are_unscaled():
    layer = nn.Linear(4, 1, bias=False)
    before = layer.weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    backward_and_step(layer(torch.full((1, 4), 50.0)).sum(), optimizer, scaler, clip_norm=1.0)
    assert float((layer.weight.detach() - before).norm()) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("name", ["codec", "recogniser"])
def test_codec_and_recogniser_train_with_scaled_losses_in_fp16(monkeypatch, name):
    texts = [r.text for r in manifest()]
    scales, unscale = [], torch.amp.GradScaler.unscale_

    def unscale_noted(scaler, optimizer):
        scales.append(scaler.get_scale())
        unscale(scaler, optimizer)

    monkeypatch.setattr(torch.amp.GradScaler, "unscale_", unscale_noted)
    if name == "codec":
        codec = MelCodec(dataclasses.replace(CODEC, steps=3))
        steps = codec.fit(waves(), "cpu", "fp16")
    else:
        config = RecognizerConfig(width=32, blocks=1, steps=3, batch=4)
        model = Recognizer(config, alphabet_of(texts))
        steps = train_recognizer(model, mels(), texts, "cpu", "fp16")
    assert all(math.isfinite(loss) for _, loss in steps)
    assert len(scales) == 3 and scales[0] == 65536.0


@pytest.mark.parametrize("name", ["codec", "recogniser"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loss_that_is_not_finite_ends_the_training_with_a_sentence(name, precision):
    broken = torch.full((22050,), math.nan)
    if name == "codec":
        codec = MelCodec(dataclasses.replace(CODEC, steps=3))
        steps = codec.fit([broken], "cpu", precision)
    else:
        model = Recognizer(RecognizerConfig(width=32, blocks=1, steps=3, batch=2), "ab")
        steps = train_recognizer(model, [torch.full((80, 60), math.nan)], ["ab"], "cpu", precision)
    with pytest.raises(KitError, match=r"The loss was nan at step 1\. Lower `lr` \(now 0\.00"):
        list(steps)


def test_a_loss_that_stays_infinite_in_fp16_ends_the_training_too():
    model = Recognizer(RecognizerConfig(width=32, blocks=1, steps=90, batch=2), "ab")
    steps = train_recognizer(model, [torch.full((80, 60), math.nan)], ["ab"], "cpu", "fp16")
    with pytest.raises(KitError, match=rf"at step {MAX_OVERFLOWS + 1}"):
        list(steps)


@pytest.mark.parametrize("steps", [2, 3, 9, 10, 11])
def test_every_number_of_steps_can_be_trained(steps):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = one_cycle(optimizer, 1e-3, steps, warmup_share=0.1)
    for _ in range(steps - 1):
        optimizer.step()
        schedule.step()
    assert schedule.get_last_lr()[0] < 1e-6


# --- how long -------------------------------------------------------------------------------


def fit_schedule(figures: list[float], seconds_a_step: float = 0.1, **settings) -> FitSchedule:
    """A course of cycles of 10 steps over made-up held-out figures, driven to its end."""
    config = FitConfig(**{"steps": 10, "look_every": 1000, "good": 0.1} | settings)
    seconds, shown = itertools.count(0.0, seconds_a_step), iter(figures)
    now = [next(seconds)]
    found = FitSchedule(config, evaluate=lambda: next(shown), clock=lambda: now[0])
    while not found.reason:
        now[0] = next(seconds)
        found.advance(1.0, taken=True)
    return found


@pytest.mark.parametrize(
    ("figures", "steps", "reason"),
    [
        ([0.09], 10, "good enough"),  # a corpus that one cycle is enough for takes no longer
        ([0.5, 0.08], 30, "good enough"),
        ([0.5, 0.3, 0.299], 70, "no further improvement"),
        ([0.5, 0.6], 30, "no further improvement"),
    ],
)
def test_cycles_follow_until_the_held_out_figure_is_good_or_falls_no_more(figures, steps, reason):
    found = fit_schedule(figures)
    assert (found.step, found.steps, found.reason) == (steps, steps, reason)
    assert found.record()["held_out"] == min(figures)


def test_the_weights_that_ended_a_cycle_best_are_kept():
    """The loss draws the one weight from 1 towards 0; a look shows how far it is from 0.5."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    figures = []

    def metric() -> float:
        figures.append(abs(layer.weight.item() - 0.5))
        return figures[-1]

    config = FitConfig(steps=20, look_every=1000, least_gain=0.0)
    found = FitSchedule(config, metric)
    steps = fit_model(
        found,
        layer,
        lambda: layer.weight.abs().sum(),
        "cpu",
        "fp32",
        lr=0.05,
        betas=(0.9, 0.999),
        warmup_share=0.1,
    )
    record = found.follow(steps, lambda *_: None)
    assert record["ended"] == "no further improvement" and figures[-1] > min(figures)
    assert metric() == pytest.approx(min(figures[:-1])) == pytest.approx(record["held_out"])


def test_the_minutes_end_it_before_a_cycle_that_would_not_be_through_in_time():
    found = fit_schedule([0.9, 0.8, 0.7], seconds_a_step=1.0, minutes=0.5)
    assert found.step == 30 and found.record()["cut_short"]
    assert found.reason == "the limit of 0.5 minutes, while still improving"
    never = fit_schedule([0.9], seconds_a_step=1.0, minutes=0.0)
    assert (
        never.step == 10
        and never.reason == "only one cycle was requested"
        and not never.record()["cut_short"]
    )


@pytest.mark.parametrize(
    ("seconds_a_step", "steps"),
    [(1.0, 100), (1.5, 20 + 60), (9.0, 20 + 50)],  # in time as it is; what fits; the least
)
def test_a_first_cycle_too_long_for_the_minutes_starts_again_where_it_may(seconds_a_step, steps):
    slow = {"steps": 100, "least_steps": 50, "minutes": 2.0, "seconds_a_step": seconds_a_step}
    found = fit_schedule([0.9, 0.8], **slow)
    assert found.step == steps and found.record()["cut_short"]
    as_it_is = fit_schedule([0.9, 0.8], **slow | {"least_steps": 0})
    assert as_it_is.step == 100


def test_without_held_out_clips_the_least_number_of_steps_is_taken_and_it_says_so():
    found = MelCodec(dataclasses.replace(CODEC, steps=2)).fit_schedule([])
    assert found.evaluate is None
    while not found.reason:
        found.advance(1.0, taken=True)
    assert found.step == 2 and "no held-out clips" in found.reason


def small(kind: str):
    """A codec or recogniser that cannot be good enough in two cycles, and its course and steps."""
    torch.manual_seed(0)
    length = {"steps": 4, "minutes": 1.0, "least_gain": 0.9, "look_every": 3}
    texts = [r.text for r in manifest()]
    if kind == "codec":
        codec = MelCodec(MelCodecConfig(**{**vars(CODEC), **length}))
        own = codec.fit_schedule(waves()[:4])
        return codec, own, codec.fit(waves()[4:], "cpu", "fp32", own)
    config = RecognizerConfig(width=32, blocks=1, batch=4, **length)
    model = Recognizer(config, alphabet_of(texts))
    own = recognizer_schedule(model, list(zip(mels()[:4], texts[:4])))
    return (
        model,
        own,
        train_recognizer(model, mels()[4:], texts[4:], "cpu", "fp32", own),
    )


@pytest.mark.parametrize("kind", ["codec", "recogniser"])
def test_the_same_corpus_and_seed_give_the_same_end_and_the_same_weights(kind):
    ends = []
    for _ in range(2):
        model, own, steps = small(kind)
        figures = own.follow(steps, lambda *_: None)
        ends.append((figures["steps"], figures["ended"], figures["held_out_by_step"]))
        assert not model.training and figures["steps"] == 12 and len(own.losses) == 12
        assert [step for step, _ in own.metrics] == [3, 4, 6, 9, 12]
        ends.append([p.detach().sum().item() for p in model.parameters()])
    assert ends[:2] == ends[2:]
