"""Passes as CUDA graphs, pretended on the CPU: the same losses, gradients and weights."""

import copy
import dataclasses
import itertools

import pytest
import torch
from helpers import CPU, GPT, TRAIN, pretended_capture, random_rows, tiny_model

from kit.model.gpt import weighted_loss
from kit.model.sequence import EffectiveBatch, pack
from kit.model.text_attention import max_text_tokens
from kit.settings import SpeedConfig
from kit.training.loop import train
from kit.training.passes import FIRST_RECORDING, PassGraphs, fixed_targets
from kit.training.trainer import Trainer

GUIDED = {"guided_attention_weight": 1.0, "guided_attention_steps": 8}
LENGTHS = (48, 60)


def batches(first: int = 0, lengths: tuple = LENGTHS):
    """Effective batches of two passes of four rows, each padded to one of two lengths."""
    for number in itertools.count(first):
        micro = []
        for part in range(2):
            texts, codes, cond = random_rows(GPT, 4, seed=2 * number + part)
            length = lengths[(number + part) % 3 // 2]
            micro.append(pack(GPT, texts, codes, cond.clone(), length))  # aligned as torch does it
        yield EffectiveBatch(micro=micro, position={"batch": number + 1})


def trainer(graphs: bool, **settings) -> Trainer:
    torch.manual_seed(0)
    config = dataclasses.replace(TRAIN, max_steps=14, **settings)
    model = tiny_model(dropout=0.1, max_text=20)
    made = Trainer(model, config, SpeedConfig(ema=True), CPU)
    if graphs:
        made.graphs = PassGraphs(made)
    return made


def run(made: Trainer, stream=None) -> list:
    return list(train(made, stream or batches()))


@pytest.fixture
def captured(monkeypatch) -> list[str]:
    """The recordings so far."""
    made = []

    def capture(work, undo, pool=None):
        made.append(work)
        return pretended_capture(work, undo, pool)

    monkeypatch.setattr("kit.base.compiler.capture_graph", capture)
    return made


def loss_and_gradients(model, batch, totals, text_width) -> tuple:
    model.zero_grad()
    sums = model(batch, text_width)
    loss = weighted_loss(model.config, sums, *totals) + sums[2] / totals[1]
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


def test_added_targets_change_no_bit_of_loss_and_gradients():
    model = tiny_model()
    batch = pack(GPT, *random_rows(GPT, 4), pad_to=60)
    fixed = fixed_targets(GPT, batch)
    assert len(fixed.text_targets) == 4 * GPT.max_text and len(fixed.code_targets) == 4 * 40
    totals = len(batch.text_targets), len(batch.code_targets)
    width = max_text_tokens(GPT, batch)
    loss, gradients = loss_and_gradients(model, batch, totals, width)
    as_tensors = [torch.tensor(float(total)) for total in totals]
    again, its = loss_and_gradients(model, fixed, as_tensors, width)
    assert torch.equal(again, loss)
    assert all(map(torch.equal, its, gradients))


# Guided attention over a fixed width adds its zeros in another order.
@pytest.mark.parametrize(
    ("settings", "apart"),
    [({}, 0), pytest.param(GUIDED, 1e-6, marks=pytest.mark.long)],
    ids=["plain", "guided"],
)
def test_recorded_passes_train_as_the_others(captured, settings, apart):
    plain = trainer(False, **settings)
    wanted = run(plain)
    recorded = trainer(True, **settings)
    found = run(recorded)
    for name in ("loss", "grad_norm"):
        expected = [getattr(e, name) for e in wanted]
        assert [getattr(e, name) for e in found] == pytest.approx(expected, rel=apart, abs=0)
    for a, b in zip(recorded.model.parameters(), plain.model.parameters()):
        assert apart or torch.equal(a, b)
    shapes = list(recorded.graphs.recorded)
    assert len(captured) == len(shapes) == 2 * (1 + bool(settings)), "once for each"
    assert [shape[1] for shape in shapes[:2]] == [60, 48], "the largest first"
    assert not any(e.note for e in found)


def test_a_run_with_recorded_passes_resumes_bit_for_bit(captured):
    whole = [e.loss for e in run(trainer(True))]
    first = trainer(True)
    head = [e.loss for e in itertools.islice(train(first, batches()), 9)]
    tree = copy.deepcopy(first.tree())
    second = trainer(True)
    second.restore(tree)
    rest = [e.loss for e in run(second, batches(second.position["batch"]))]
    assert head + rest == whole and first.graphs.recorded and not second.graphs.recorded


def test_where_a_pass_cannot_be_recorded_training_continues_without(monkeypatch):
    wanted = [e.loss for e in run(trainer(False))]

    def fails(work, undo, pool=None):
        work()
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr("kit.base.compiler.capture_graph", fails)
    made = trainer(True)
    events = run(made)
    assert [e.loss for e in events] == wanted and made.graphs is None
    (note,) = (e.note for e in events if e.note)
    assert "not permitted when stream is capturing" in note
    assert events[FIRST_RECORDING].note == note


@pytest.mark.long
def test_memory_that_runs_out_frees_the_graphs(captured):
    made = trainer(True)
    forward = made.model.forward

    def short(batch, text_width=0):
        if made.step >= 8 and len(batch.tokens) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return forward(batch, text_width)

    made.model.forward = short
    events = list(itertools.islice(train(made, batches()), 8))
    assert len(made.graphs.recorded) == 2
    events += run(made, batches(8, lengths=(54, 57)))
    assert made.micro_rows == 2 and made.graphs and len(events) == 14
    assert {shape[0] for shape in made.graphs.recorded} == {2}, "those of four rows are gone"
