"""The loop: every switch leaves the loss where it was, and nothing is skipped in silence."""

import copy
import dataclasses
import functools
import itertools
import math

import pytest
import torch
from helpers import CPU, GPT, TRAIN, effective_batch, random_batches, random_rows, tiny_model
from torch import nn
from torch._inductor.exc import CppCompileError

from kit.base.compiler import compiler_available
from kit.base.errors import KitError
from kit.base.hardware import Choice
from kit.model.sequence import EffectiveBatch, pack
from kit.settings import SpeedConfig, TrainConfig
from kit.training.loop import accumulate, gradient_norm, split_batch, train, update
from kit.training.optim import lr_factor
from kit.training.run import checkpointer, validation_loss
from kit.training.trainer import Trainer

settings = functools.partial(dataclasses.replace, TRAIN)


def state(config: TrainConfig = TRAIN, shape: dict | None = None, **switches) -> Trainer:
    torch.manual_seed(0)
    return Trainer(tiny_model(**shape or {}), config, SpeedConfig(**switches), CPU)


def first_batches(count: int) -> list[EffectiveBatch]:
    return list(itertools.islice(random_batches(GPT), count))


def run(state: Trainer, batches=None, **more) -> list:
    return list(train(state, batches or random_batches(state.model.config), **more))


def losses(events) -> list[float]:
    return [e.loss for e in events]


def validator(state: Trainer):
    batches = [effective_batch(GPT, random_rows(GPT, 4, seed=99))]
    return lambda: validation_loss(state.model, batches, "cpu", state.applied.precision)


@pytest.fixture(scope="module")
def baseline() -> list[float]:
    return losses(run(state()))


APART = {"sdpa": 2e-5, "fused_adamw": 2e-5, "gradient_checkpointing": 0, "ema": 0}


@pytest.mark.parametrize(("switch", "apart"), APART.items())
def test_every_switch_leaves_the_loss_where_it_was(baseline, switch, apart):
    assert losses(run(state(**{switch: True}))) == pytest.approx(baseline, rel=apart, abs=0)


def force_precision(monkeypatch, value: str) -> None:
    monkeypatch.setattr(
        "kit.training.switches.choose_precision", lambda hw: Choice(value=value, reason="test")
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_stays_within_two_percent(monkeypatch, baseline, precision):
    force_precision(monkeypatch, precision)
    mixed = state(mixed_precision=True)
    assert mixed.applied.precision == precision
    events = run(mixed)
    skipped = sum(bool(e.note) for e in events)  # the scale of fp16 is found by overflowing
    assert skipped <= (TRAIN.patience if precision == "fp16" else 0)
    if not skipped:
        assert losses(events) == pytest.approx(baseline, rel=0.02)
    assert all(p.dtype == torch.float32 for p in mixed.model.parameters())


def fp16_state(monkeypatch, scale: float, **changes) -> Trainer:
    force_precision(monkeypatch, "fp16")
    s = state(settings(**changes), mixed_precision=True, ema=True)
    s.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return s


def test_while_fp16_looks_for_its_scale_nothing_has_diverged(monkeypatch):
    events = run(fp16_state(monkeypatch, 2.0**30, max_steps=20, patience=3))
    skipped = [bool(event.note) for event in events]
    assert sum(skipped) > 5 and skipped == sorted(skipped, reverse=True), "the scale was found"
    assert events[0].note.endswith(f"the scale of fp16 is now {2.0**29:g}")


def test_accumulated_micro_batches_train_as_the_whole(baseline):
    split = losses(run(state(), random_batches(GPT, parts=4)))
    assert split == pytest.approx(baseline, rel=2e-5)


def test_a_step_is_torchs_adamw_by_hand():
    config = settings(max_steps=3, warmup_steps=0, schedule="constant", max_grad_norm=0.5)
    mine, batches = state(config), first_batches(3)
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


def test_events_tell_what_happened():
    s = state(settings(max_steps=4), ema=True)
    events = run(s, validate=validator(s))
    assert [e.step for e in events] == [1, 2, 3, 4] and {e.steps for e in events} == {4}
    assert [e.tokens for e in events] == [b.tokens for b in first_batches(4)]
    assert all(e.step_s > 0 and e.memory_bytes > 2**20 and e.grad_norm > 0 for e in events)
    assert [e.val_loss is None for e in events] == [True, True, True, False]
    assert events[3].ema_val_loss != events[3].val_loss
    rates = [TRAIN.lr * lr_factor(s.config, i) for i in range(4)]
    assert [e.lr for e in events] == pytest.approx(rates)


def test_validation_disturbs_nothing():
    found = []
    for every in (1, 1000):
        s = state(settings(eval_steps=every), {"dropout": 0.2}, ema=True)
        found.append((losses(run(s, validate=validator(s))), torch.rand(1).item()))
    assert found[0] == found[1]


def test_validation_loss_is_per_target_whatever_the_batches():
    model, rows = tiny_model().eval(), random_rows(GPT, 6)
    whole = validation_loss(model, [effective_batch(GPT, rows)], "cpu", "fp32")
    parts = [effective_batch(GPT, tuple(c[i : i + 2] for c in rows)) for i in (0, 2, 4)]
    assert validation_loss(model, parts, "cpu", "fp32") == pytest.approx(whole, rel=1e-6)


def poisoned():
    texts, codes, cond = random_rows(GPT, 8)
    return effective_batch(GPT, (texts, codes, cond * float("nan")))


@pytest.mark.filterwarnings("ignore:Error detected")  # torch's, with the line of the forward pass
def test_anomaly_detection_leaves_the_losses_and_names_the_operator_of_a_nan(baseline):
    config = settings(detect_anomaly=True)
    first = itertools.islice(train(state(config), random_batches(GPT)), 4)
    assert losses(first) == baseline[:4] and not torch.is_anomaly_enabled()
    with pytest.raises(KitError, match=r"Step 1: .*Backward0' returned nan"):
        run(state(config), iter([poisoned()]))


@pytest.mark.parametrize("fp16", [False, True])
def test_a_step_that_is_not_finite_is_skipped_and_says_so(monkeypatch, fp16):
    few = {"max_steps": 3}
    s = fp16_state(monkeypatch, 256.0, **few) if fp16 else state(settings(**few), ema=True)
    batches = first_batches(3)
    batches[1] = poisoned()
    notes, weights, scales = [], [], []
    for event in train(s, iter(batches)):
        notes.append(event.note)
        weights.append([p.detach().clone() for p in s.model.parameters()])
        scales.append(s.scaler.get_scale())
    assert notes[::2] == ["", ""] and notes[1].startswith("skipped: the loss was not finite")
    assert scales == ([256.0, 128.0, 128.0] if fp16 else [1.0] * 3)
    assert all(map(torch.equal, weights[0], weights[1]))
    assert not torch.equal(weights[1][-1], weights[2][-1])
    assert all(torch.isfinite(p).all() for p in s.model.parameters())
    assert s.step == 3 and s.ema.updates == 2


class TightMemory:
    """From the second pass on, one of more than `most` rows does not fit, so many `times`."""

    def __init__(self, s: Trainer, most: int, times: int = 99):
        self.forward, self.most, self.times, self.calls = s.model.forward, most, times, 0
        s.model.forward = self

    def __call__(self, batch, text_width=0):
        self.calls += 1
        sums = self.forward(batch, text_width)
        if len(batch.tokens) > self.most and self.calls > 1 and self.times:
            self.times -= 1
            sums[1].backward()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return sums


@pytest.mark.parametrize(("most", "parts"), [(4, 2), (1, 8)])
def test_out_of_memory_in_mid_run_is_as_if_planned_that_way(most, parts):
    config, shape = settings(max_steps=6), {"dropout": 0.2}
    planned = state(config, shape)
    first = list(itertools.islice(train(planned, random_batches(GPT)), 1))
    rest = run(planned, random_batches(GPT, {"batch": 1}, parts=parts))
    short = state(config, shape)
    TightMemory(short, most)
    events = run(short)
    assert losses(events) == losses([*first, *rest])
    assert "out of memory" in events[1].note and f"now have {most} rows" in events[1].note
    assert [e.tokens for e in events] == [e.tokens for e in [*first, *rest]]
    assert not any(e.note for e in events[2:]) and short.micro_rows == most
    for a, b in zip(short.model.parameters(), planned.model.parameters()):
        assert torch.equal(a, b)


@pytest.fixture
def on_device(monkeypatch) -> None:
    """AdamW's fused kernel, the CPU's too, clips and skips before any number is read."""
    fused = property(lambda s: len(s.optimizers) == 1 and s.applied.on("fused_adamw"))
    monkeypatch.setattr(Trainer, "updates_on_device", fused)


def shaken(s: Trainer) -> Trainer:
    """`s` with a much larger loss in its fourth step, and NaN in the seventh."""
    forward, factors = s.model.forward, {3: 1000.0, 6: math.nan}
    s.model.forward = lambda *inputs: [x * factors.get(s.step, 1.0) for x in forward(*inputs)]
    return s


def test_an_update_whose_numbers_are_read_later_is_the_same(request):
    config = settings(max_steps=9, spike=3.0, max_grad_norm=0.5, eval_steps=4)
    make = functools.partial(state, config, fused_adamw=True, ema=True)
    plain = shaken(make())
    wanted = run(plain, validate=validator(plain))
    request.getfixturevalue("on_device")
    late = shaken(make())
    found = run(late, validate=validator(late))
    for name in ("step", "tokens", "lr", "note"):
        assert [getattr(e, name) for e in found] == [getattr(e, name) for e in wanted]
    assert "spike" in found[3].note and "skipped" in found[6].note and not found[2].note
    assert 0.5 < plain.adaptation.tight < 0.6, "clipped harder, and less so from step to step"
    for name in ("loss", "grad_norm"):
        pairs = zip((getattr(e, name) for e in found), (getattr(e, name) for e in wanted))
        assert all(a == pytest.approx(b, rel=1e-5, nan_ok=True) for a, b in pairs)
    assert found[3].ema_val_loss == pytest.approx(wanted[3].ema_val_loss, rel=1e-5)
    assert late.ema.updates == plain.ema.updates == 8
    assert late.adaptation == dataclasses.replace(
        plain.adaptation, usual_norm=pytest.approx(plain.adaptation.usual_norm, rel=1e-5)
    )
    for a, b in zip(late.model.parameters(), plain.model.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-4)


def test_one_row_too_large_is_a_verdict_with_a_fix():
    short = state()
    TightMemory(short, 0)
    with pytest.raises(KitError, match=r"single row of \d+ tokens.*checkpointing.*smaller model"):
        run(short)
    assert short.step == 1


def test_a_compiler_that_fails_is_left_and_the_batch_done_again(monkeypatch, baseline):
    if compiler_available("cpu").value == "no":
        pytest.skip("needs a C++ compiler")

    def broken(graph, inputs):
        raise CppCompileError(["false"], "no such instruction")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=broken))
    compiled = state(compile=True)
    assert compiled.applied.on("compile")
    events = run(compiled)
    assert losses(events) == baseline
    (note,) = (event.note for event in events if event.note)
    assert note.startswith("torch.compile is off from here") and len(note) < 400
    assert not compiled.applied.on("compile")


def test_the_gate_chooses_the_best_step_and_ends_the_run():
    often = {"eval_steps": 1, "early_stopping_patience": 1}  # ends nothing beside a gate
    s = state(settings(max_steps=30, gate_every=2, gate_patience=2, **often), ema=True)
    rising = itertools.count(1.0).__next__
    scores = iter([(0.9, 1.0), (0.3, 1.0), (0.2, 0.5), (0.4, 1.0)])
    gate = lambda: dict(zip(("cer", "eos_rate"), next(scores)))  # noqa: E731
    events = run(s, validate=rising, evaluate=gate)
    assert [e.step for e in events if e.gate] == [2, 4, 6, 8] and events[-1].step == 8
    assert s.best.step == 4 and s.settled  # a lower CER with endless sentences is no better
    assert "training ends here; the best is step 4" in events[-1].note


def test_a_validation_loss_that_rises_ends_a_run_without_a_gate():
    s = state(settings(max_steps=30, eval_steps=2, early_stopping_patience=3))
    events = run(s, validate=iter([3.0, 1.0, 2.0, 1.5, 1.2]).__next__)
    assert events[-1].step == 10 and s.settled and (s.best.step, s.best.score) == (4, 1.0)
    assert events[-1].note.startswith("no better validation loss in 3 validations: training ends")


def saved(s: Trainer, folder, *data) -> list[int]:
    """The steps of the checkpoints that a training on `data` leaves in `folder`."""
    save = checkpointer(s, folder)
    for event in train(s, *data):
        save(event)
    return [int(path.stem[5:]) for path in sorted(folder.glob("*.safetensors"))]


def test_the_best_checkpoint_outlives_newer_ones(tmp_path):
    found = iter([3.0, 1.0, *[2.0] * 20])
    s = state(settings(eval_steps=1, save_total_limit=2, save_steps=1))
    assert saved(s, tmp_path, random_batches(GPT), found.__next__) == [2, 11, 12]


STATES = [("adamw", "", False), ("adamw", "fused_adamw sdpa", False), ("muon", "ema", False)]
STATES += [("adamw", "fused_adamw ema", True)]


@pytest.mark.parametrize(("optimizer", "switches", "ahead"), STATES, ids=str)
def test_a_checkpoint_of_any_step_resumes_bit_for_bit(request, optimizer, switches, ahead):
    """`ahead`: while the next passes run already, it is of its own step."""
    if ahead:
        request.getfixturevalue("on_device")
    config = settings(optimizer=optimizer, eval_steps=1)
    on = dict.fromkeys(switches.split(), True)

    def begin() -> Trainer:
        trainer = state(config, {"dropout": 0.1}, **on)
        torch.manual_seed(0)
        return trainer

    def some_steps(s: Trainer, count: int = 99):
        events = train(s, random_batches(GPT, s.position), validator(s))
        for event in itertools.islice(events, count):
            yield event.step, event.loss, event.lr, event.val_loss, event.ema_val_loss

    whole = begin()
    wanted = []
    trees = []
    for figures in some_steps(whole):
        wanted.append(figures)
        trees.append(copy.deepcopy(whole.tree()))
    for at in (0, 4, 10):
        resumed = begin()
        torch.manual_seed(1234)
        resumed.restore(trees[at])
        assert list(some_steps(resumed)) == wanted[at + 1 :]
    stopped = begin()
    head = list(some_steps(stopped, 5))  # the sixth has started
    assert head + list(some_steps(stopped)) == wanted


OTHERS = [
    (TRAIN, {"layers": 3, "dropout": 0.2}, r"layers 2 -> 3, dropout 0\.0 -> 0\.2\. .*KIT_RUN"),
    (TRAIN, {"text_stop_input": False}, "text_stop_input True -> False"),
    (settings(optimizer="muon"), {}, "optimizer adamw -> muon"),
    (settings(conditioner_lr=1e-4), {}, "conditioner_lr the rate of the rest -> a learning rate"),
]


@pytest.mark.parametrize(("config", "shape", "facts"), OTHERS)
def test_a_checkpoint_of_another_model_or_optimizer_names_the_differences(config, shape, facts):
    with pytest.raises(KitError, match=facts):
        state(config, shape).restore(state().tree())
    state(config, shape).restore(state(config, shape).tree())


def test_a_checkpoint_of_an_earlier_version_or_in_8_bits_is_refused_with_the_reason():
    tree = state().tree()
    small = {"0": {"0": {"state1": torch.zeros(1), "step": 1}}}
    for other, facts in (
        ({k: v for k, v in tree.items() if k != "made_with"}, "earlier version of the kit"),
        (tree | {"checkpoint": "weights"}, "earlier version of the kit"),
        (tree | {"optimizer": small}, "adamw_8bit True -> False"),
    ):
        with pytest.raises(KitError, match=facts):
            state().restore(other)


@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize("width", [0, 64])  # of rows padded to a fixed length; 0: to the longest
def test_parts_are_what_packing_fewer_rows_would_have_given(rows, width):
    columns = random_rows(GPT, 8, seed=3)
    parts = [vars(part) for part in split_batch(pack(GPT, *columns, width), rows)]
    cuts = [slice(i, i + rows) for i in range(0, 8, rows)]
    wanted = [vars(pack(GPT, *(column[cut] for column in columns), width)) for cut in cuts]
    torch.testing.assert_close(parts, wanted, rtol=0, atol=0)


def test_in_fp16_too_what_stays_beyond_numbers_has_diverged(monkeypatch):
    s = fp16_state(monkeypatch, 8.0, max_steps=40, patience=3)
    with pytest.raises(KitError, match="not finite for 4 steps in a row"):
        run(s, itertools.repeat(poisoned()))
    assert s.step == 7 and s.scaler.get_scale() < 1


def test_where_one_optimizers_gradients_overflow_the_other_waits(monkeypatch):
    s = fp16_state(monkeypatch, 256.0, optimizer="muon")
    s.set_rates()
    accumulate(s, next(random_batches(GPT)))
    s.model.gpt.h[0].mlp.c_fc.weight.grad[0, 0] = float("inf")  # one of Muon's alone
    before = [p.detach().clone() for p in s.model.parameters()]
    norm = gradient_norm(s).item()
    update(s, norm, finite=math.isfinite(norm))
    assert all(map(torch.equal, before, s.model.parameters()))
    assert s.scaler.get_scale() == 128.0 and not any(o.state for o in s.optimizers)


def test_memory_that_runs_out_once_is_freed_and_the_batch_repeated_at_its_size(baseline):
    s = state()
    memory = TightMemory(s, most=4, times=1)
    events = run(s)
    assert losses(events) == baseline and s.micro_rows == 0 and not memory.times
    assert [event.step for event in events if event.note] == [2]
    assert "out of memory" in events[1].note


def test_a_step_that_was_not_finite_is_no_checkpoint(tmp_path):
    s = state(settings(max_steps=5, save_steps=2, save_total_limit=9, eval_steps=99))
    batches = first_batches(5)
    batches[1] = poisoned()
    assert saved(s, tmp_path, iter(batches)) == [3, 4, 5]


def test_good_steps_between_bad_ones_keep_it_going_until_the_data_end():
    s = state(settings(max_steps=9, patience=2))
    cycle = [poisoned(), poisoned(), next(random_batches(GPT))]
    with pytest.raises(KitError, match="ended at step 6 of 9"):
        run(s, iter(cycle * 2))


def test_a_run_may_resume_in_fp16_and_with_an_average_that_began_without(monkeypatch):
    trained = state()
    run(trained)
    force_precision(monkeypatch, "fp16")
    late = state(mixed_precision=True, ema=True)
    late.restore(trained.tree())
    now = dict(late.model.named_parameters())
    assert late.scaler.get_scale() > 1
    assert all(torch.equal(s, now[k]) for k, s in late.ema.shadow.items())
