"""Guided attention: the loss it adds, what it leaves alone, and the head that it finds."""

import dataclasses
import math
import random

import pytest
import torch
from helpers import CPU, GPT, TRAIN, effective_batch, random_batches, random_rows, tiny_model

from kit.model import text_attention
from kit.model.gpt import SpeechGPT
from kit.model.sequence import EffectiveBatch, pack
from kit.model.text_attention import WIDTH, diagonality, find_alignment_head, max_text_tokens
from kit.recipes.training_listeners import best_map
from kit.settings import SpeedConfig, TrainConfig
from kit.training.loop import train
from kit.training.trainer import Trainer


def written_out(model: SpeechGPT, texts: list, codes: list, cond: torch.Tensor) -> float:
    """The guide's loss from the maps a person can look at, a row and a code at a time."""
    c = model.config
    total = 0.0
    for text, row, mel in zip(texts, codes, cond):
        batch = pack(c, [text], [row], mel[None])
        head = model.attention(batch)[c.layers // 2][0, 0]
        pieces = int((batch.tokens < c.text_vocab).sum())
        tokens = batch.tokens.shape[1]
        for code in range(tokens - pieces):
            seen = head[c.latents + pieces + code, c.latents : c.latents + pieces]
            apart = code / (tokens - pieces) - torch.arange(pieces) / pieces
            total -= math.log(float((seen * torch.exp(-(apart**2) / (2 * WIDTH**2))).sum()))
    return total


@pytest.mark.parametrize("shape", [{}, {"text_stop_input": False}, {"stop_targets": 1}], ids=str)
def test_the_loss_is_the_distance_from_the_diagonal(shape):
    model = tiny_model(**shape)
    rows = random_rows(model.config, 3)
    batch = pack(model.config, *rows, pad_to=60)
    width = max_text_tokens(model.config, batch)
    assert width == max(map(len, rows[0])) + 1 + model.config.text_stop_input
    assert model(batch, width)[2].item() == pytest.approx(written_out(model, *rows), rel=1e-4)


def test_it_changes_no_other_loss():
    model = tiny_model()
    batch = pack(GPT, *random_rows(GPT, 3))
    plain = model(batch)
    guided = model(batch, max_text_tokens(GPT, batch))
    assert len(plain) == 2 and len(guided) == 3
    assert all(torch.equal(a, b) for a, b in zip(plain, guided))


def state(config: TrainConfig, **switches) -> Trainer:
    torch.manual_seed(0)
    return Trainer(tiny_model(), config, SpeedConfig(**switches), CPU)


@pytest.mark.parametrize("switch", ["", "sdpa", "gradient_checkpointing", "ema"])
def test_losses_do_not_depend_on_passes_and_switches(switch):
    switches = {switch: True} if switch else {}
    guided = dataclasses.replace(TRAIN, max_steps=3, guided_attention_weight=1.0)
    rows = random_rows(GPT, 8)
    whole = list(train(state(guided), [effective_batch(GPT, rows)] * 3))
    cut = list(train(state(guided, **switches), [effective_batch(GPT, rows, parts=4)] * 3))
    for a, b in zip(whole, cut):
        assert a.loss == pytest.approx(b.loss, rel=2e-5)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-3)


def test_it_fades_and_the_reported_loss_is_the_models_own():
    guided = {"guided_attention_weight": 0.5, "guided_attention_steps": 4}
    trained = state(dataclasses.replace(TRAIN, max_steps=6, **guided))
    events = [(trained.guide_weight, event.loss) for event in train(trained, random_batches(GPT))]
    assert [weight for weight, _ in events] == [0.375, 0.25, 0.125, 0, 0, 0]
    assert events[0][1] == next(train(state(TRAIN), random_batches(GPT))).loss


def spelt(count: int, seed: int) -> EffectiveBatch:
    """Rows whose codes say each of their text ids three times, in order."""
    rng = random.Random(seed)
    ids = range(GPT.text_vocab - 2)
    texts = [rng.choices(ids, k=rng.randint(4, 10)) for _ in range(count)]
    codes = [[text_id for text_id in text for _ in range(3)] for text in texts]
    batch = pack(GPT, texts, codes, torch.zeros(count, GPT.n_mels, 12))
    return EffectiveBatch(micro=[batch], position={})


def trained_with(guide: float) -> SpeechGPT:
    steps = 100
    guided = {"guided_attention_weight": guide, "guided_attention_steps": 60}
    limits = {"max_steps": steps, "eval_steps": steps, "lr": 3e-3, "warmup_steps": 5}
    trained = state(dataclasses.replace(TRAIN, **limits, **guided))
    for _ in train(trained, (spelt(16, seed) for seed in range(steps))):
        pass
    return trained.model


@pytest.mark.long
def test_guided_attention_makes_a_head_follow_the_text(monkeypatch):
    models = {guide: trained_with(guide) for guide in (1.0, 0.0)}
    unlearnt = [spelt(1, seed).micro[0] for seed in (1000, 1001)]
    scores = {guide: float(diagonality(best_map(m, unlearnt[0]))) for guide, m in models.items()}
    assert scores[1.0] > 0.6 and scores[1.0] > scores[0.0] + 0.2
    monkeypatch.setattr(text_attention, "MIN_DIAGONALITY", 0.6)
    assert find_alignment_head(models[1.0], unlearnt) == (GPT.layers // 2, 0)
    assert find_alignment_head(models[0.0], unlearnt) is None
