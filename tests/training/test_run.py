"""A run that is stopped, killed or damaged resumes as if nothing had happened."""

import dataclasses
import itertools
import json
import random
import time
from pathlib import Path
from threading import Event

import helpers
import pytest
import torch
from helpers import CPU, DATA, TRAIN, code_index, stream_in, tiny_session, train_in

from kit.base.errors import KitError
from kit.model.weights import load_model
from kit.settings import SpeedConfig
from kit.training import checkpoint
from kit.training.logs import read_log, summary
from kit.tuning.estimate import time_steps
from kit.tuning.memory_plan import Workload

ON = {"ema": True}


def figures(event) -> tuple:
    row = event if isinstance(event, dict) else dataclasses.asdict(event)
    return tuple(row[k] for k in ("step", "loss", "lr", "grad_norm", "val_loss", "ema_val_loss"))


def logged(folder: Path) -> list[dict]:
    return read_log(folder / "train.jsonl")


def steps_saved(folder: Path) -> list[int]:
    return [int(p.stem[5:]) for p in checkpoint.checkpoints(folder / "checkpoints")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, train_in(folder)


def start(processes, *given, target=train_in):
    child = processes.Process(target=target, args=given)
    child.start()
    return child


def kill(child) -> None:
    child.kill()  # SIGKILL
    child.join(20)
    assert child.exitcode == -9


def wait_for(child, done) -> None:
    helpers.until(lambda: done() or not child.is_alive(), limit_s=180)


def lines(folder: Path) -> int:
    path = folder / "train.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def weights(folder: Path) -> list[bytes]:
    return [(folder / f"model-{name}.safetensors").read_bytes() for name in ("raw", "ema")]


def test_a_killed_run_resumes_bit_for_bit(processes, tmp_path):
    busy = dataclasses.replace(TRAIN, max_steps=24, save_steps=1)  # mostly writing checkpoints
    events = train_in(tmp_path / "whole", busy)
    folder = tmp_path / "killed"
    child = processes.Process(target=train_in, args=(folder, busy))
    helpers.start_and_kill(child, folder / "train.jsonl", 8)
    rest = train_in(folder, busy)
    assert 0 < len(rest) < 24 and "resumed from step" in rest[0].note
    assert [figures(e) for e in rest] == [figures(e) for e in events][-len(rest) :]
    assert weights(folder) == weights(tmp_path / "whole")


@pytest.mark.long
def test_twenty_kills_of_a_shuffled_stream_with_two_workers(processes, tmp_path):
    """At random moments; each loses at most a step."""
    config = dataclasses.replace(TRAIN, max_steps=150, save_steps=1, eval_steps=50)
    shape = helpers.real_config()
    sizes = ("text_vocab", "code_vocab", "n_mels", "max_text", "max_code")
    given = (config, str(code_index()), {n: getattr(shape, n) for n in sizes}, 2)
    whole = stream_in(tmp_path / "whole", *given)
    folder = tmp_path / "killed"
    rng = random.Random(0)
    step = 0
    for _ in range(20):
        known = lines(folder)
        child = start(processes, str(folder), *given, target=stream_in)
        wait_for(child, lambda known=known: lines(folder) > known)
        time.sleep(rng.uniform(0, 0.1))
        kill(child)
        tree, notes = checkpoint.load_newest(folder / "checkpoints")
        assert not notes, "a killed run must not leave a damaged checkpoint"
        before = step
        step = tree["run"]["step"] if tree else 0
        assert step >= before and step >= logged(folder)[-1]["step"] - 1
    assert [figures(e) for e in stream_in(folder, *given)] == [figures(e) for e in whole][step:]
    assert [figures(r) for r in logged(folder)] == [figures(e) for e in whole]
    assert weights(folder) == weights(tmp_path / "whole")


def test_a_second_trainer_gets_the_name_of_the_holder(processes, tmp_path):
    config = dataclasses.replace(TRAIN, max_steps=2000, save_steps=1)
    child = start(processes, tmp_path, config)
    wait_for(child, lambda: lines(tmp_path) >= 3)
    with pytest.raises(KitError, match=f"in use.*{child.pid}"):
        train_in(tmp_path, config)
    before = lines(tmp_path)
    wait_for(child, lambda: lines(tmp_path) >= before + 3)
    assert child.is_alive()  # nobody took its files away
    kill(child)
    steps = [json.loads(line)["step"] for line in (tmp_path / "train.jsonl").open()]
    assert steps == list(range(1, len(steps) + 1))  # nobody logged beside it
    assert next(tiny_session(tmp_path, config).run(ON, Event())).step > 3


def exploding(session, steps, times: int = 99):
    """Make the loss NaN at each of `steps` until it has happened `times` times."""
    make, left = session.make_batches, [times]

    def batches(position, parts):
        for batch in make(position, parts):
            if batch.position["batch"] in steps and left[0]:
                left[0] -= 1
                for micro in batch.micro:
                    micro.cond.fill_(float("nan"))
            yield batch

    session.make_batches = batches
    return session


GATED = dataclasses.replace(TRAIN, max_steps=40, gate_every=3, gate_patience=2)
PATIENT = dataclasses.replace(TRAIN, max_steps=12, patience=1, rollbacks=2, save_steps=3)


def test_a_divergence_goes_back_with_half_the_rate_and_on(tmp_path):
    session = exploding(tiny_session(tmp_path, PATIENT), {8, 9}, times=2)
    events = list(session.run(ON, Event()))
    assert [e.step for e in events] == [1, 2, 3, 4, 5, 6, 7, 8, 7, 8, 9, 10, 11, 12]
    assert "skipped" in events[7].note
    assert "returned to step 6, learning rates x0.5" in events[8].note
    assert events[8].lr == events[6].lr / 2 and events[-1].lr < TRAIN.lr / 2
    assert [r["step"] for r in logged(tmp_path)] == list(range(1, 13))
    assert session.finished()


def test_a_run_that_keeps_diverging_ends_with_advice(tmp_path):
    session = exploding(tiny_session(tmp_path, PATIENT), {8, 9})
    with pytest.raises(KitError, match=r"not finite.*Lower `lr`.* 2 times"):
        list(session.run(ON, Event()))
    assert steps_saved(tmp_path)[-1] == 6


def gated(folder: Path, *cers: float):
    """A session whose gate measures these character error rates one after the other."""
    session, answers = tiny_session(folder, GATED), iter(cers)
    session.evaluate = lambda model: {"cer": next(answers), "eos_rate": 1.0}
    return session


def same_weights(folder: Path, name: str, tensors: dict) -> bool:
    found = load_model(folder / f"model-{name}.safetensors").named_parameters()
    return all(torch.equal(parameter, tensors[key]) for key, parameter in found)


@pytest.mark.parametrize("ema", [True, False])
def test_the_voice_is_that_of_the_best_evaluation(tmp_path, ema):
    session = gated(tmp_path, 0.9, 0.4, 0.5, 0.6)
    (tmp_path / "model-ema.safetensors").write_bytes(b"of an earlier training with an average")
    events = list(session.run({"ema": ema}, Event()))
    assert events[-1].step == 12 and session.finished() and not session.resumable()
    best = checkpoint.load(checkpoint.of_step(tmp_path / "checkpoints", 6))
    last = checkpoint.load_newest(tmp_path / "checkpoints")[0]
    assert same_weights(tmp_path, "raw", (last if ema else best)["model"])
    if ema:
        assert same_weights(tmp_path, "ema", best["ema"])
    assert len(list(tmp_path.glob("model-*"))) == 1 + ema
    assert [row["gate"] for row in logged(tmp_path) if row["gate"]][1]["cer"] == 0.4


def test_a_gate_remembers_its_best_over_a_kill(tmp_path):
    list(itertools.islice(gated(tmp_path, 0.4, 0.5).run(ON, Event()), 6))
    assert list(gated(tmp_path, 0.6, 0.7).run(ON, Event()))[-1].step == 9


def test_a_finished_run_leaves_both_models_its_figures_and_nothing_to_do(whole):
    folder, events = whole
    session = tiny_session(folder)
    assert len(events) == 12 and session.finished() and not session.resumable()
    assert list(session.run(ON, Event())) == []
    newest = checkpoint.load_newest(folder / "checkpoints")[0]
    assert same_weights(folder, "raw", newest["model"])
    assert same_weights(folder, "ema", newest["ema"])
    rows = logged(folder)
    assert [figures(row) for row in rows] == [figures(e) for e in events]
    assert not list(folder.glob("*.lock*"))
    speed = 12 / sum(row["step_s"] for row in rows)
    wanted = {"steps": 12, "loss": rows[-1]["loss"], "steps_per_s": pytest.approx(speed)}
    wanted |= {name: rows[-1][name] for name in ("val_loss", "ema_val_loss")}
    assert summary(rows).items() >= wanted.items()


def test_more_steps_continue_a_finished_run(tmp_path):
    short = dataclasses.replace(TRAIN, max_steps=6, schedule="constant")
    longer = dataclasses.replace(short, max_steps=9)
    train_in(tmp_path / "a", short)
    rest = train_in(tmp_path / "a", longer)
    assert [e.step for e in rest] == [7, 8, 9]
    assert [e.loss for e in rest] == [e.loss for e in train_in(tmp_path / "b", longer)][6:]


def stopped(folder: Path, at: int, inside: bool) -> None:
    """Run until Stop is pressed at step `at`: while it computes, or after its event was seen."""
    stop, session = Event(), tiny_session(folder, dataclasses.replace(TRAIN, save_steps=100))
    batches = session.make_batches

    def pressed(position, parts):
        for batch in batches(position, parts):
            if inside and batch.position["batch"] == at:
                stop.set()
            yield batch

    session.make_batches = pressed
    for event in session.run(ON, stop):
        if not inside and event.step == at:
            stop.set()
    assert event.step == at and session.resumable()


@pytest.mark.parametrize("inside", [True, False])
def test_stop_in_or_between_steps_saves_a_checkpoint_to_resume_from(whole, tmp_path, inside):
    stopped(tmp_path, 5, inside)
    assert steps_saved(tmp_path) == [4, 5]  # the best, and where it stopped
    # What a SIGKILL in the middle of a write leaves: the next checkpoint removes it.
    (tmp_path / "checkpoints" / ".step-0000003.safetensors.k1lled").write_bytes(b"half")
    assert [figures(e) for e in train_in(tmp_path)] == [figures(e) for e in whole[1]][5:]
    assert not list((tmp_path / "checkpoints").glob(".step-*"))


def test_where_no_checkpoint_is_sound_nothing_is_thrown_away(tmp_path):
    stopped(tmp_path, 4, inside=True)
    log = (tmp_path / "train.jsonl").read_bytes()
    for path in checkpoint.checkpoints(tmp_path / "checkpoints"):
        path.write_bytes(b"junk")
    with pytest.raises(KitError, match=r"checkpoints.*delete"):
        train_in(tmp_path)
    assert (tmp_path / "train.jsonl").read_bytes() == log


def test_switches_may_change_between_two_halves(whole, tmp_path):
    stopped(tmp_path, 5, inside=True)
    names = ("ema", "sdpa", "fused_adamw", "gradient_checkpointing")
    rest = train_in(tmp_path, values=dict.fromkeys(names, True) | {"grad_accum": 1})
    assert [e.loss for e in rest] == pytest.approx([e.loss for e in whole[1][5:]], rel=0.05)


def test_trial_steps_leave_no_trace(whole, tmp_path):
    session = tiny_session(tmp_path)
    usual = list(itertools.islice(session.make_batches(None, 2), 3))
    speed = SpeedConfig(ema=True)
    work = Workload(model=session.model, train=TRAIN, speed=speed, data=DATA, hw=CPU)
    assert time_steps(work, usual, 1, session.validation) > 0
    assert not list(tmp_path.iterdir())
    assert [figures(e) for e in session.run(ON, Event())] == [figures(e) for e in whole[1]]


def test_a_rate_once_lowered_stays_lowered_after_a_kill(tmp_path):
    session = exploding(tiny_session(tmp_path, PATIENT), {8, 9}, times=2)
    for event in session.run(ON, Event()):
        if "returned to step" in event.note:
            break  # killed before the next checkpoint
    rest = train_in(tmp_path, PATIENT)
    assert rest[0].step == 7 and rest[0].lr == event.lr


def test_a_damaged_best_checkpoint_leaves_a_voice_of_the_last_step(tmp_path):
    session = gated(tmp_path, 0.9, 0.4, 0.5, 0.6)
    best = checkpoint.of_step(tmp_path / "checkpoints", 6)
    with pytest.warns(UserWarning, match=r"0000006.*damaged.*last step, 12"):
        for event in session.run(ON, Event()):
            if event.step == 12:
                best.write_bytes(b"junk")
    assert session.finished() and load_model(tmp_path / "model-ema.safetensors")
