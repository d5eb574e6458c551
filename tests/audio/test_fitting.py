"""The small networks train safely in fp16, and for as long as a corpus asks."""

import dataclasses
import math

import pytest
import torch
from helpers import CODEC, manifest, mels, waves
from torch import nn

from kit.audio import fitting, recognizer
from kit.audio.fitting import FitSchedule
from kit.audio.mel_codec import MelCodec
from kit.base.errors import KitError
from kit.settings import FitConfig, RecognizerConfig


def test_an_overflow_skips_the_step_and_lowers_the_scale_and_gradients_are_clipped_unscaled():
    torch.manual_seed(0)
    layer = nn.Linear(4, 1, bias=False)
    before = layer.weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for value, taken in ((math.inf, False), (1.0, True)):
        loss = layer(torch.full((1, 4), value)).sum()
        assert fitting.backward_and_step(loss, optimizer, scaler) == taken
        assert torch.equal(layer.weight, before) != taken
        assert scaler.get_scale() == 128.0 and layer.weight.grad is None
    assert (layer.weight - before).norm().item() == pytest.approx(fitting.CLIP_NORM, rel=1e-3)


def fit(name: str, clips: tuple, precision: str = "fp32", held_out: tuple = ([], [], []), **over):
    """A codec or recogniser, its schedule, and the steps that train it on (waves, mels, texts)."""
    torch.manual_seed(0)
    sounds, logs, texts = clips
    if name == "codec":
        model = MelCodec(dataclasses.replace(CODEC, **over))
        schedule = model.fit_schedule(held_out[0])
        return model, schedule, model.fit(sounds, "cpu", precision, schedule)
    config = RecognizerConfig(width=32, blocks=1, batch=4, **over)
    model = recognizer.Recognizer(config, recognizer.alphabet_of(texts))
    schedule = recognizer.recognizer_schedule(model, list(zip(*held_out[1:])))
    steps = recognizer.train_recognizer(model, logs, texts, "cpu", precision, schedule)
    return model, schedule, steps


def corpus() -> tuple:
    return waves(), mels(), [row.text for row in manifest()]


BROKEN = [torch.full((22050,), math.nan)], [torch.full((80, 60), math.nan)], ["ab"]


@pytest.mark.parametrize("name", ["codec", "recogniser"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_loss_that_is_not_finite_ends_the_training_with_a_sentence(name, precision):
    step = fitting.MAX_OVERFLOWS + 1 if precision == "fp16" else 1
    with pytest.raises(KitError, match=rf"was nan at step {step}\. Lower `lr` \(now 0\.00"):
        list(fit(name, BROKEN, precision, steps=90)[2])


def fit_schedule(figures: list[float], seconds_a_step: float = 0.1, **settings) -> FitSchedule:
    """A course of cycles of 10 steps over made-up held-out figures, driven to its end."""
    config = FitConfig(**{"steps": 10, "look_every": 1000, "good": 0.1} | settings)
    shown = iter(figures)
    now_s = 0.0
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kit.audio.fitting.time.monotonic", lambda: now_s)
        schedule = FitSchedule(config, evaluate=lambda: next(shown))
        while not schedule.reason:
            now_s += seconds_a_step
            schedule.advance(1.0, taken=True)
    return schedule


CYCLES = [([0.09], 10, "good enough"), ([0.5, 0.08], 30, "good enough")]
CYCLES += [([0.5, 0.3, 0.299], 70, "no further improvement")]
CYCLES += [([0.5, 0.6], 30, "no further improvement")]


@pytest.mark.parametrize(("figures", "steps", "reason"), CYCLES)
def test_cycles_follow_until_the_held_out_figure_is_good_or_falls_no_more(figures, steps, reason):
    schedule = fit_schedule(figures)
    assert (schedule.step, schedule.steps, schedule.reason) == (steps, steps, reason)
    assert schedule.record()["held_out"] == min(figures)


def test_the_weights_that_ended_a_cycle_best_are_kept():
    """The loss draws the one weight from 1 towards 0; the metric is how far it is from 0.5."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    metric = lambda: abs(layer.weight.item() - 0.5)  # noqa: E731
    loss = lambda: layer.weight.abs().sum()  # noqa: E731
    schedule = FitSchedule(FitConfig(steps=20, look_every=1000, least_gain=0.0), metric)
    adamw = {"lr": 0.05, "betas": (0.9, 0.999), "warmup_share": 0.1}
    steps = fitting.fit_model(schedule, layer, loss, "cpu", "fp32", **adamw)
    record = schedule.follow(steps, lambda *_: None)
    figures = [figure for _, figure in record["held_out_by_step"]]
    assert record["ended"] == "no further improvement" and figures[-1] > min(figures)
    assert metric() == pytest.approx(min(figures)) == pytest.approx(record["held_out"])


def test_the_minutes_end_it_before_a_cycle_that_would_not_be_through_in_time():
    limited = fit_schedule([0.9, 0.8, 0.7], seconds_a_step=1.0, minutes=0.5)
    assert limited.step == 30 and limited.record()["cut_short"]
    assert "0.5 minutes" in limited.reason
    never = fit_schedule([0.9], seconds_a_step=1.0, minutes=0.0)
    assert never.step == 10 and "one cycle" in never.reason and not never.record()["cut_short"]


@pytest.mark.parametrize(
    ("seconds_a_step", "steps"),
    [(1.0, 100), (1.5, 20 + 60), (9.0, 20 + 50)],  # in time as it is; what fits; the least
)
def test_a_first_cycle_too_long_for_the_minutes_starts_again_where_it_may(seconds_a_step, steps):
    slow = {"steps": 100, "least_steps": 50, "minutes": 2.0, "seconds_a_step": seconds_a_step}
    schedule = fit_schedule([0.9, 0.8], **slow)
    assert schedule.step == steps and schedule.record()["cut_short"]
    assert fit_schedule([0.9, 0.8], **slow | {"least_steps": 0}).step == 100


def test_without_held_out_clips_the_least_number_of_steps_is_taken_and_it_says_so():
    schedule = MelCodec(dataclasses.replace(CODEC, steps=2)).fit_schedule([])
    assert not schedule.advance(1.0, taken=True) and not schedule.reason
    assert not schedule.advance(1.0, taken=True) and "no held-out clips" in schedule.reason


@pytest.mark.parametrize("name", ["codec", "recogniser"])
def test_the_same_corpus_and_seed_give_the_same_end_and_the_same_weights(name):
    length = {"steps": 4, "minutes": 1.0, "least_gain": 0.9, "look_every": 3}  # of two cycles
    held_out, clips = zip(*((column[:4], column[4:]) for column in corpus()))
    ends = []
    for _ in range(2):
        model, own, steps = fit(name, clips, held_out=held_out, **length)
        figures = own.follow(steps, lambda *_: None)
        assert not model.training and figures["steps"] == 12 and len(own.losses) == 12
        assert [step for step, _ in own.metrics] == [3, 4, 6, 9, 12]
        sums = [p.detach().sum().item() for p in model.parameters()]
        ends.append((figures["ended"], figures["held_out_by_step"], sums))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("name", ["codec", "recogniser"])
def test_codec_and_recogniser_train_with_scaled_losses_in_fp16(monkeypatch, name):
    scales, unscale = [], torch.amp.GradScaler.unscale_

    def unscale_noted(scaler, optimizer):
        scales.append(scaler.get_scale())
        unscale(scaler, optimizer)

    monkeypatch.setattr(torch.amp.GradScaler, "unscale_", unscale_noted)
    steps = fit(name, corpus(), "fp16", steps=3)[2]
    assert all(math.isfinite(loss) for _, loss in steps)
    assert len(scales) == 3 and scales[0] == 65536.0


@pytest.mark.parametrize("steps", [2, 3, 10, 11])
def test_every_number_of_steps_can_be_trained(steps):
    """PyTorch divides by the number of warm-up steps less one."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = fitting.one_cycle(optimizer, 1e-3, steps, warmup_share=0.1)
    for _ in range(steps - 1):
        optimizer.step()
        schedule.step()
    assert schedule.get_last_lr()[0] < 1e-6
