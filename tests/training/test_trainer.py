"""What trains and what stays: adapters, embeddings and heads first; killed, such runs resume."""

import dataclasses
import functools
import itertools
from threading import Event
from types import SimpleNamespace

import helpers
import pytest
import torch
from helpers import BASE, CPU, GPT, TRAIN, finetune_in, finetune_session, random_batches, tiny_model

from kit.base.errors import KitError
from kit.base.hardware import Choice
from kit.model.lora import TABLES, adapted_layers, is_adapter, merged
from kit.model.sequence import pack
from kit.model.weights import load_adapters, load_model, save_model
from kit.recipes.training_listeners import AttentionLog, load_attention_maps
from kit.settings import FinetuneConfig, LoRAConfig, SpeedConfig
from kit.training import checkpoint
from kit.training.config import Base, Finetuning
from kit.training.loop import train
from kit.training.trainer import Trainer

ON = {"ema": True}
FOUR = LoRAConfig(rank=4, alpha=8.0, dropout=0.1)
LORA = Finetuning(config=FinetuneConfig(method="lora"), lora=FOUR)
ALL_TABLES = dataclasses.replace(LORA, config=FinetuneConfig(method="lora", tables="all"))
WAYS = {"lora": LORA, "all tables": ALL_TABLES}
OFTEN = dataclasses.replace(TRAIN, save_steps=1)


def figures(event) -> tuple:
    row = dataclasses.asdict(event)
    return tuple(row[k] for k in ("step", "loss", "lr", "grad_norm", "val_loss", "ema_val_loss"))


def left(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Of each way the folder and the events of an uninterrupted run."""
    found = {}
    for way, finetuning in WAYS.items():
        folder = tmp_path_factory.mktemp("whole")
        found[way] = (folder, finetune_in(str(folder), OFTEN, finetuning))
    return found


@pytest.mark.long
@pytest.mark.parametrize(("way", "at"), [("lora", 7), ("all tables", 2)])
def test_a_killed_run_resumes_bit_for_bit(whole, processes, tmp_path, way, at):
    folder, events = whole[way]
    child = processes.Process(target=finetune_in, args=(str(tmp_path), OFTEN, WAYS[way]))
    helpers.start_and_kill(child, tmp_path / "train.jsonl", at)
    rest = finetune_in(str(tmp_path), OFTEN, WAYS[way])
    assert [figures(e) for e in rest] == [figures(e) for e in events][len(events) - len(rest) :]
    assert left(tmp_path) == left(folder)


def force_precision(monkeypatch, value: str) -> None:
    choice = Choice(value=value, reason="test")
    monkeypatch.setattr("kit.training.switches.choose_precision", lambda hw: choice)


def matrices(session) -> set[torch.dtype]:
    return {module.weight.dtype for _, module in adapted_layers(session.state.model)}


def test_frozen_matrices_in_half_the_bytes_change_no_bit_of_what_is_learnt(tmp_path, monkeypatch):
    """Autocast multiplies with them rounded anyhow; what is merged and left is not rounded."""
    force_precision(monkeypatch, "bf16")
    both = ON | {"mixed_precision": True}
    plain = finetune_session(tmp_path / "plain", OFTEN, LORA)
    half = finetune_session(tmp_path / "half", OFTEN, LORA)
    exact = tmp_path / "half" / "start.safetensors"
    save_model(tiny_model(**vars(BASE)), exact)
    base = dataclasses.replace(half.finetuning.base, weights=exact)
    half.finetuning = dataclasses.replace(half.finetuning, base=base)
    expected = [figures(event) for event in plain.run(both, Event())]
    events = list(half.run(both, Event()))
    assert [figures(event) for event in events] == expected
    row = pack(half.model, *helpers.random_rows(half.model, 1))
    AttentionLog(SimpleNamespace(trainer=half.state), row, tmp_path / "maps")(events[0])
    assert len(load_attention_maps(tmp_path / "maps")) == 1
    assert (matrices(plain), matrices(half)) == ({torch.float32}, {torch.bfloat16})
    written = left(tmp_path / "half")
    assert written.pop("start.safetensors")
    assert written == left(tmp_path / "plain")


def test_of_a_grown_model_adapters_and_new_rows_learn_and_nothing_else(whole):
    folder, events = whole["lora"]
    assert events[-1].loss < events[0].loss
    base = tiny_model(**vars(BASE)).state_dict()
    trained = load_model(folder / "model-raw.safetensors").state_dict()
    moved = {name for name in base if not torch.equal(base[name], trained[name][: len(base[name])])}
    assert moved == {f"gpt.h.{i}.{name}.weight" for i in range(2) for name in LORA.lora.targets}
    grown = {name for name in base if len(base[name]) < len(trained[name])}
    tables = "text_embedding.weight text_head.weight text_head.bias code_position.weight"
    assert grown == set(tables.split())
    spelt = base["text_embedding.weight"][[1, 2]].mean(0)
    assert not torch.equal(trained["text_embedding.weight"][17], spelt)


@pytest.mark.parametrize("name", ["raw", "ema"])
def test_the_adapters_alone_beside_their_base_are_the_voice(whole, name):
    folder = whole["lora"][0]
    voice = load_model(folder / f"model-{name}.safetensors").state_dict()
    found = load_adapters(folder / f"adapters-{name}.safetensors", tiny_model(**vars(BASE)))
    assert all(torch.equal(tensor, voice[n]) for n, tensor in found.state_dict().items())
    sizes = [(folder / f"{what}-raw.safetensors").stat().st_size for what in ("adapters", "model")]
    assert sizes[0] < sizes[1] / 2


CASES = [("lora", "fp32", "adamw"), ("lora", "fp16", "muon"), ("all tables", "bf16", "adamw")]


@pytest.mark.parametrize(("way", "precision", "optimizer"), CASES)
def test_every_switch_leaves_the_loss_where_it_was(monkeypatch, way, precision, optimizer):
    force_precision(monkeypatch, precision)
    config = dataclasses.replace(TRAIN, max_steps=8, optimizer=optimizer, eval_steps=4)

    def losses(**on) -> list[float]:
        torch.manual_seed(0)
        lora = dataclasses.replace(LORA.lora, dropout=0.0)
        finetuning = dataclasses.replace(WAYS[way], lora=lora)
        state = Trainer(tiny_model(), config, SpeedConfig(**on), CPU, finetuning)
        return [event.loss for event in train(state, random_batches(GPT, parts=2))]

    plain = losses()
    assert plain[-1] < plain[0]
    names = "sdpa mixed_precision fused_adamw gradient_checkpointing ema"
    switched = losses(**dict.fromkeys(names.split(), True))
    assert switched == pytest.approx(plain, rel=2e-5 if precision == "fp32" else 3e-3)


@pytest.mark.long
def test_compiled_it_is_the_same(monkeypatch):
    """torch.compile's own tracing and guards; the slow code generation behind it left out."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    config = dataclasses.replace(TRAIN, max_steps=4)
    found = []
    finetuning = dataclasses.replace(ALL_TABLES, lora=LoRAConfig(rank=4))
    for on in ({}, {"compile": True}):
        state = Trainer(tiny_model(layers=1), config, SpeedConfig(**on), CPU, finetuning)
        assert state.applied.on("compile") == ("compile" in on)
        found.append([event.loss for event in train(state, random_batches(GPT))])
        assert state.applied.on("compile") == ("compile" in on), "it was given up"
    assert found[1] == pytest.approx(found[0], rel=1e-5)


RANK_8 = dataclasses.replace(LORA, lora=LoRAConfig(rank=8))
OTHERS = {"method lora -> full": Finetuning(), "rank 4 -> 8, alpha 8.0 -> 32.0": RANK_8}
OTHERS |= {"tables new -> all": ALL_TABLES}


def test_what_trains_is_settled_for_the_life_of_a_run(tmp_path):
    list(itertools.islice(finetune_session(tmp_path, OFTEN, LORA).run(ON, Event()), 4))
    saved = left(tmp_path / "checkpoints")
    for change, then in OTHERS.items():
        with pytest.raises(KitError, match=change):
            finetune_in(str(tmp_path), OFTEN, then)
        assert left(tmp_path / "checkpoints") == saved
    session = finetune_session(tmp_path, OFTEN, LORA)
    session.finetuning = dataclasses.replace(LORA, base=Base(config=BASE, sha256="another"))
    with pytest.raises(KitError, match=r"base_sha256 .* -> another"):
        list(session.run(ON, Event()))


def test_the_gate_evaluates_plain_weights(tmp_path):
    """Those that the adapters make, averaged, under the names that a decoder knows."""
    session = finetune_session(tmp_path, dataclasses.replace(TRAIN, gate_every=4), LORA)
    evaluated = []

    def gate(model):
        evaluated.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        with session.state.averaged():
            wanted = merged(session.state.model).state_dict()
        assert not any(is_adapter(name) for name in evaluated[-1])
        assert all(torch.equal(tensor, evaluated[-1][name]) for name, tensor in wanted.items())
        return {"cer": 0.5, "eos_rate": 1.0}

    session.evaluate = gate
    list(session.run(ON, Event()))
    name = "gpt.h.0.mlp.c_fc.weight"
    assert len(evaluated) == 3 and not torch.equal(evaluated[0][name], evaluated[2][name])


def test_adapters_from_scratch_are_refused():
    with pytest.raises(KitError, match=r"from scratch.*BASE_MODEL"):
        LORA.require_voice()


def test_a_checkpoint_holds_what_trains_and_no_more(whole):
    tree = checkpoint.load_newest(whole["lora"][0] / "checkpoints")[0]
    names = set(tree["model"])
    adapters = {name for name in names if is_adapter(name)}
    assert len(adapters) == 2 * 2 * 4 and names - adapters <= set(TABLES)
    assert set(tree["ema"]) - {"updates"} == names
