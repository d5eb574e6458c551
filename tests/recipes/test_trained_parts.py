"""Adapters, and embeddings and heads first, as a person asks for them: by settings of a run."""

import math

import pytest
import torch
from helpers import corpus, manifest, unchecked
from released_xtts import write_release

from kit.base.errors import KitError
from kit.inference.export import export_voice, load_export
from kit.inference.sampling import GenerateConfig
from kit.inference.voice_files import load_voice
from kit.model.weights import load_adapters, load_model
from kit.recipes.active_run import MODEL
from kit.recipes.benchmark import Benchmark
from kit.recipes.prepare import Preparation
from kit.recipes.start import start
from kit.recipes.train import Training
from kit.training import checkpoint
from kit.tuning.trials import TrialConfig, run_variant

FEW = {"max_steps": 6, "gate_every": 6, "eval_steps": 3, "save_steps": 2, "warmup_steps": 1}
ALPHA = {"rank": 4, "alpha": 8.0}
DEAF = {"steps": 2}  # an almost untrained recogniser: its output is not used here


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    return write_release(tmp_path_factory.mktemp("release"))


def started(name: str, release, **settings):
    """A run that begins with a tiny release, prepared."""
    run = start(name, settings={"train": FEW, "recognizer": DEAF, **settings})
    list(Preparation(run, str(corpus()), base_model=str(release), accept_license="CPML").run())
    return start(name)


@pytest.fixture(scope="module")
def adapted(release):
    """A run that has trained adapters, and its messages."""
    run = started("adapters", release, finetune={"method": "lora"}, lora=ALPHA)
    training = Training(run)
    return run, [str(training.size()), *map(str, training.run())]


def test_plan_record_and_benchmark_are_of_what_trains(adapted):
    run, reported = adapted
    assert "LoRA: " in reported[0] and "adapters of rank 4 beside attn.c_attn" in reported[0]
    assert "and the new rows of embeddings and heads" in reported[0]
    noted = run.report()["train"]["finetune"]
    assert noted["method"] == "lora" and noted["rank"] == 4 and noted["tables"] == "new"
    assert 0 < noted["trained_parameters"] < noted["parameters"] / 2
    bytes_ = run.report()["train"]["longest_step_bytes"]
    assert bytes_["measured"] == pytest.approx(bytes_["planned"], rel=0.1)
    assert run.report()["train"]["ran"]["EMA of the weights"].startswith("on")
    task = Benchmark(start("adapters")).task
    few = TrialConfig(steps=1, warmup_steps=1)
    assert task.finetuning.adapters
    assert math.isfinite(run_variant(task, few, ("sdpa",))["loss"])


def test_a_run_keeps_to_what_it_trains_and_its_first_phase_ends(adapted):
    run = start("adapters", settings={"finetune": {"tables_first": 6}})
    with pytest.raises(KitError, match="of 6 steps none is left in which everything trains"):
        Training(run)
    start("adapters", settings={"finetune": {"tables_first": 0}})
    run = start("adapters", settings={"finetune": {"method": "full"}, "train": {"max_steps": 8}})
    training = Training(run, max_steps=8)
    with pytest.raises(KitError, match="method lora -> full"):
        list(training.run())
    start("adapters", settings={"finetune": {"method": "lora"}})


def test_it_is_a_voice_like_any_other_and_its_adapters_are_one_beside_its_base(adapted):
    run, _ = adapted
    voice = load_voice(run.folder, language="am")
    rows = load_model(run.folder / MODEL).text_embedding.weight.shape[0]
    assert len(voice.model.text_embedding.weight) > rows
    greedy = GenerateConfig(temperature=0.0, retries=0)
    said = next(row.text for row in manifest() if row.split == "train")
    spoken = voice.speak([said], voice.speakers[0], greedy)[0]
    exported = load_export(export_voice(voice, run.path("export"), "fp32"))
    assert torch.equal(exported.speak([said], voice.speakers[0], greedy)[0].codes, spoken.codes)
    assert len(Training(start("adapters")).samples().sounds) == 3
    assert Training(start("adapters")).trained().state_dict().keys() == (
        voice.model.state_dict().keys()
    )
    run, _ = adapted
    alone = run.folder / "adapters-ema.safetensors"
    found = load_adapters(alone, load_model(run.folder / MODEL)).state_dict()
    voice = load_model(run.folder / "model-ema.safetensors").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in voice.items())
    assert alone.stat().st_size < (run.folder / "model-ema.safetensors").stat().st_size / 2


def test_embeddings_and_heads_first_and_then_all(release):
    run = started("two phases", release, finetune={"tables_first": 3})
    training = Training(run)
    assert "In the first 3 steps only embeddings and heads train." in str(training.size())
    list(unchecked(training).run())
    saved = [
        checkpoint.load(path)["model"] for path in checkpoint.checkpoints(run.path("checkpoints"))
    ]
    assert run.report()["train"]["finetune"]["tables_first"] == 3
    began = load_model(run.folder / MODEL).state_dict()
    name = "gpt.h.0.mlp.c_fc.weight"
    assert not torch.equal(saved[-1][name], began[name])


def test_a_larger_voice_than_the_presets_own_model_is_given_adapters(release):
    run = start("by its size", settings={"train": FEW, "finetune": {"method": "auto"}})
    Preparation(run, str(corpus()), base_model=str(release), accept_license="CPML")
    assert start("by its size").section("finetune")["method"] == "lora"
    assert start("by its size").section("train")["lr"] == pytest.approx(5e-5)
    wide = {"finetune": {"method": "auto"}, "model": {"width": 512}}
    run = start("by its size, too", settings=wide)
    Preparation(run, str(corpus()), base_model=str(release), accept_license="CPML")
    assert start("by its size, too").section("finetune")["method"] == "full"
    assert start("by its size, too").section("train")["lr"] == pytest.approx(5e-6)


def test_a_run_from_scratch_has_nothing_to_keep():
    for asked in ({"method": "lora"}, {"method": "full", "tables_first": 2}):
        run = start("from scratch", settings={"finetune": asked})
        with pytest.raises(KitError, match=r"starts from scratch.*BASE_MODEL in 01_data_prep"):
            Training(run)
