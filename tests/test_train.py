"""The loop: every switch leaves the loss where it was, and nothing is skipped in silence."""

import copy
import dataclasses
import itertools
import json
import math
import threading

import pytest
import torch
from helpers import CPU, GPT, TRAIN, effective_batch, random_batches, random_rows, tiny_model
from torch import nn

from kit.config import ConfigError
from kit.hardware import Choice
from kit.speedups import SpeedConfig
from kit.train import (
    TrainConfig,
    TrainError,
    TrainState,
    accumulate,
    checkpointer,
    jsonl_log,
    listen,
    lr_factor,
    make_optimizers,
    train,
    validation_loss,
)


def state(config: TrainConfig = TRAIN, shape: dict | None = None, **switches) -> TrainState:
    torch.manual_seed(0)
    return TrainState(tiny_model(**shape or {}), config, SpeedConfig(**switches), CPU)


def run(state: TrainState, batches=None, **more) -> list:
    return list(train(state, batches or random_batches(state.model.config), **more))


def losses(events) -> list[float]:
    return [e.loss for e in events]


def validator(state: TrainState):
    batches = [effective_batch(GPT, random_rows(GPT, 4, seed=99))]
    return lambda: validation_loss(state.model, batches, "cpu", state.applied.precision)


@pytest.fixture(scope="module")
def baseline() -> list[float]:
    return losses(run(state()))


@pytest.mark.parametrize("switch", ["sdpa", "gradient_checkpointing", "fused_adamw", "ema"])
def test_every_switch_leaves_the_loss_where_it_was(baseline, switch):
    assert losses(run(state(**{switch: True}))) == pytest.approx(baseline, rel=2e-5)


@pytest.mark.parametrize("switch", ["gradient_checkpointing", "ema"])
def test_switches_that_change_no_arithmetic_change_no_bit(baseline, switch):
    assert losses(run(state(**{switch: True}))) == baseline


def force_precision(monkeypatch, value: str) -> None:
    monkeypatch.setattr(
        "kit.speedups.choose_precision", lambda hw: Choice(value=value, reason="test")
    )


def test_mixed_precision_stays_within_two_percent(monkeypatch, baseline):
    force_precision(monkeypatch, "bf16")
    mixed = state(mixed_precision=True)
    assert mixed.applied.precision == "bf16"
    assert losses(run(mixed)) == pytest.approx(baseline, rel=0.02)
    assert all(p.dtype == torch.float32 for p in mixed.model.parameters())


def test_fp16_with_a_scaler_stays_within_two_percent(monkeypatch, baseline):
    force_precision(monkeypatch, "fp16")
    events = run(state(mixed_precision=True))
    skipped = sum(bool(e.note) for e in events)  # the scale is found by overflowing
    assert skipped <= TRAIN.patience
    if not skipped:
        assert losses(events) == pytest.approx(baseline, rel=0.02)


def test_recomputed_layers_give_exact_gradients():
    found, batch = [], next(random_batches(GPT))
    for switch in (False, True):
        s = state(gradient_checkpointing=switch, shape={"dropout": 0.2})
        s.model.train()
        torch.manual_seed(7)
        accumulate(s, batch)
        found.append([p.grad for p in s.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found))


@pytest.mark.parametrize("parts", [2, 8])
def test_accumulated_micro_batches_train_as_the_whole(baseline, parts):
    split = losses(run(state(), random_batches(GPT, parts=parts)))
    assert split == pytest.approx(baseline, rel=2e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_loss_falls(optimizer):
    config = dataclasses.replace(TRAIN, steps=25, optimizer=optimizer, schedule="constant")
    one = next(random_batches(GPT))
    found = losses(run(state(config), itertools.repeat(one)))
    assert found[-1] < 0.75 * found[0]


def test_a_step_is_torchs_adamw_by_hand():
    config = dataclasses.replace(TRAIN, steps=3, warmup_steps=0, schedule="constant", clip_norm=0.5)
    mine, batches = state(config), list(itertools.islice(random_batches(GPT), 3))
    model = copy.deepcopy(mine.model)
    groups = [
        {"params": [p], "weight_decay": config.weight_decay * (n == "decayed")}
        for n, p in kinds(model)
    ]
    adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas)
    for batch in batches:
        (micro,) = batch.micro
        text, code = model(micro)
        (0.01 * text / batch.text_targets + code / batch.code_targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adamw.step()
        adamw.zero_grad()
    run(mine, iter(batches))
    for (name, a), b in zip(mine.model.named_parameters(), model.parameters()):
        assert torch.allclose(a, b, atol=1e-6), name


def kinds(model):
    """Which parameters decay: matrices that are no table of embeddings."""
    for name, parameter in model.named_parameters():
        table = name.split(".")[0].endswith(("_embedding", "_position"))
        yield "decayed" if parameter.ndim >= 2 and not table else "plain", parameter


def test_every_parameter_is_in_exactly_one_optimizer_group():
    for optimizer in ("adamw", "muon"):
        config = dataclasses.replace(TRAIN, optimizer=optimizer)
        model = tiny_model()
        made = make_optimizers(model, config, fused=False)
        held = [p for o in made for g in o.param_groups for p in g["params"]]
        assert len(held) == len(set(held)) == len(list(model.parameters()))


def test_an_ema_follows_only_real_steps():
    s = state(dataclasses.replace(TRAIN, steps=4), ema=True)
    batches = [next(random_batches(GPT)), poisoned(), *itertools.islice(random_batches(GPT), 2)]
    run(s, iter(batches))
    assert s.step == 4 and s.ema.updates == 3


def linear_schedule_with_warmup(step: int, warmup: int, total: int) -> float:
    """transformers.get_linear_schedule_with_warmup, written from its formula."""
    if step < warmup:
        return step / max(1, warmup)
    return max(0.0, (total - step) / max(1, total - warmup))


@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_the_linear_schedule_is_that_of_transformers(warmup):
    config = TrainConfig(steps=100, warmup_steps=warmup, schedule="linear", final_lr=0.0)
    for step in range(100):
        # The kit's first step has a rate above zero: its warm-up is one step ahead.
        theirs = step + 1 if step < warmup else step
        assert lr_factor(config, step) == pytest.approx(
            linear_schedule_with_warmup(theirs, warmup, 100)
        )


def test_the_cosine_schedule_is_torchs():
    config = TrainConfig(steps=50, warmup_steps=0, schedule="cosine", final_lr=0.1)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50, eta_min=0.1)
    for step in range(50):
        assert lr_factor(config, step) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize(("schedule", "end"), [("constant", 1), ("linear", 0.1), ("cosine", 0.1)])
def test_every_schedule_warms_up_and_ends_where_it_should(schedule, end):
    config = TrainConfig(steps=1000, warmup_steps=10, schedule=schedule)
    assert [lr_factor(config, s) for s in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert lr_factor(config, 1000) == pytest.approx(end)
    assert lr_factor(config, 5000) == pytest.approx(end)


def test_events_tell_what_happened():
    s = state(dataclasses.replace(TRAIN, steps=4), ema=True)
    events = run(s, validate=validator(s))
    assert [e.step for e in events] == [1, 2, 3, 4] and {e.steps for e in events} == {4}
    assert [e.tokens for e in events] == [
        b.tokens for b in itertools.islice(random_batches(GPT), 4)
    ]
    assert all(e.step_s > 0 and e.memory_bytes > 2**20 and e.grad_norm > 0 for e in events)
    assert [e.val_loss is None for e in events] == [True, True, True, False]
    assert events[3].ema_val_loss != events[3].val_loss
    rates = [TRAIN.lr * lr_factor(s.config, i) for i in range(4)]
    assert [e.lr for e in events] == pytest.approx(rates)


def test_validation_disturbs_nothing():
    found = []
    for every in (1, 1000):
        s = state(dataclasses.replace(TRAIN, val_every=every), {"dropout": 0.2}, ema=True)
        found.append((losses(run(s, validate=validator(s))), torch.rand(1).item()))
    assert found[0] == found[1]


def test_validation_measures_without_dropout_and_leaves_no_gradient():
    s = state(shape={"dropout": 0.5})
    s.model.eval()
    measure = validator(s)
    assert measure() == measure()
    assert all(p.grad is None for p in s.model.parameters())


def test_validation_loss_is_per_target_whatever_the_batches():
    s, rows = state(), random_rows(GPT, 6)
    s.model.eval()
    whole = validation_loss(s.model, [effective_batch(GPT, rows)], "cpu", "fp32")
    parts = [effective_batch(GPT, tuple(c[i : i + 2] for c in rows)) for i in (0, 2, 4)]
    assert validation_loss(s.model, parts, "cpu", "fp32") == pytest.approx(whole, rel=1e-6)


def poisoned():
    texts, codes, cond = random_rows(GPT, 8)
    return effective_batch(GPT, (texts, codes, cond * float("nan")))


def test_a_step_that_is_not_finite_is_skipped_and_says_so():
    s = state(dataclasses.replace(TRAIN, steps=3))
    first, *_ = batches = list(itertools.islice(random_batches(GPT), 3))
    batches[1] = poisoned()
    events, weights = [], []
    for event in train(s, iter(batches)):
        events.append(event)
        weights.append([p.detach().clone() for p in s.model.parameters()])
    assert [bool(e.note) for e in events] == [False, True, False] and "not finite" in events[1].note
    assert all(torch.equal(a, b) for a, b in zip(weights[0], weights[1]))
    assert all(torch.isfinite(p).all() for p in s.model.parameters()) and first.tokens > 0


def test_it_gives_up_after_patience_and_says_what_to_change():
    s, seen = state(dataclasses.replace(TRAIN, patience=3)), []
    with pytest.raises(TrainError, match=r"not finite for 4 steps in a row.*Lower `lr`"):
        for event in train(s, itertools.repeat(poisoned())):
            seen.append(event)
    assert len(seen) == 3


def test_good_steps_between_bad_ones_keep_it_going():
    s = state(dataclasses.replace(TRAIN, steps=9, patience=2))
    good = next(random_batches(GPT))
    assert len(run(s, itertools.cycle([poisoned(), poisoned(), good]))) == 9


def test_stop_ends_after_the_step_in_hand():
    stop = threading.Event()
    for event in train(state(), random_batches(GPT), stop=stop):
        if event.step == 5:
            stop.set()
    assert event.step == 5


@pytest.mark.parametrize(
    "switches", [{}, {"ema": True}, {"fused_adamw": True, "sdpa": True}], ids=str
)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_state_carried_over_goes_on_bit_for_bit(switches, optimizer):
    config = dataclasses.replace(TRAIN, optimizer=optimizer, val_every=1)
    shape = {"dropout": 0.1}
    one = state(config, shape, **switches)
    whole = run(one, validate=validator(one))
    first = state(config, shape, **switches)
    head = list(itertools.islice(train(first, random_batches(GPT), validator(first)), 5))
    kept = copy.deepcopy(first.tree())
    second = state(config, shape, **switches)
    torch.manual_seed(1234)
    second.restore(kept)
    rest = run(second, random_batches(GPT, second.position), validate=validator(second))
    for a, b in zip([*head, *rest], whole, strict=True):
        assert (a.step, a.loss, a.lr, a.val_loss, a.ema_val_loss) == (
            *(b.step, b.loss, b.lr),
            *(b.val_loss, b.ema_val_loss),
        )


def test_a_checkpoint_of_another_model_names_the_differences():
    with pytest.raises(TrainError, match=r"another model: layers 2 -> 3, dropout 0\.0 -> 0\.2\. "):
        state(shape={"layers": 3, "dropout": 0.2}).restore(state().tree())


def test_a_checkpoint_of_another_optimizer_is_told():
    muon = dataclasses.replace(TRAIN, optimizer="muon")
    with pytest.raises(TrainError, match="optimizer"):
        state(muon).restore(state().tree())


def test_a_run_may_go_on_in_fp16_that_began_in_fp32(monkeypatch):
    tree = state().tree()
    force_precision(monkeypatch, "fp16")
    half = state(mixed_precision=True)
    half.restore(tree)
    assert half.scaler.get_scale() > 1


def test_an_average_switched_on_later_starts_from_the_weights_at_hand():
    trained = state()
    run(trained)
    late = state(ema=True)
    late.restore(trained.tree())
    now = dict(late.model.named_parameters())
    assert all(torch.equal(s, now[k]) for k, s in late.ema.shadow.items())


def test_listeners_hear_every_event_before_the_caller():
    heard = []
    for event in listen(iter("abc"), heard.append, lambda e: heard.append(e.upper())):
        assert heard[-2:] == [event, event.upper()]
    assert heard == list("aAbBcC")


def test_the_log_is_one_json_object_a_line(tmp_path):
    s, path = state(dataclasses.replace(TRAIN, steps=3)), tmp_path / "deep" / "log.jsonl"
    events = list(listen(train(s, random_batches(GPT)), jsonl_log(path)))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["loss"] for r in rows] == losses(events) and math.isfinite(rows[0]["lr"])


def test_checkpoints_are_saved_when_due_at_the_end_and_when_stopped(tmp_path):
    config, stop = dataclasses.replace(TRAIN, steps=7, keep=9), threading.Event()
    s = state(config)

    def stop_at_four():
        for batch in random_batches(GPT):
            if batch.position["batch"] == 4:
                stop.set()
            yield batch

    list(listen(train(s, stop_at_four(), stop=stop), checkpointer(s, tmp_path, stop)))
    assert [int(p.stem[5:]) for p in sorted(tmp_path.glob("*.safetensors"))] == [3, 4]
    list(listen(train(s, random_batches(GPT)), checkpointer(s, tmp_path)))
    assert [int(p.stem[5:]) for p in sorted(tmp_path.glob("*.safetensors"))] == [3, 4, 6, 7]


@pytest.mark.parametrize(
    ("field", "value"), [("schedule", "step"), ("optimizer", "sgd"), ("steps", 0), ("lr", 0.0)]
)
def test_settings_that_cannot_train_are_refused(field, value):
    with pytest.raises(ConfigError, match=f"TrainConfig.{field}"):
        TrainConfig(**{field: value})
