"""A run that starts from a base model: a voice of the kit or a tiny release of random weights."""

import json
import math
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from helpers import corpus, dataset, few_words, manifest, unchecked
from hub import COMMIT, serving
from released_xtts import START, STOP, random_model, write_release

from kit.base.config import build, load_preset, merge
from kit.base.errors import KitError
from kit.base.files import file_digest
from kit.base.run import Run, load_use
from kit.extras.xtts_v2.base import XTTS_V2
from kit.inference.export import export_voice, load_export, read_card
from kit.inference.voice import Voice
from kit.inference.voice_files import load_voice
from kit.model.gpt import SpeechGPT
from kit.model.weights import load_adapters, load_model
from kit.recipes.base_model import (
    CODEC,
    COQUI_DEFAULTS,
    RELEASE,
    finetuning_settings,
    inherited_licence,
    start_from_base,
)
from kit.recipes.benchmark import Benchmark
from kit.recipes.prepare import Preparation
from kit.recipes.run_parts import MODEL, START_FROM, TOKENIZER, first_model
from kit.recipes.start import start
from kit.recipes.train import Training
from kit.settings import DataConfig, GenerateConfig, GPTConfig, TrainConfig, TrialConfig
from kit.training.logs import read_log
from kit.tuning.measure import run_variant

# Sizes that are not the tiny preset's: a run that begins with this voice must take them from it.
DEAF = {"recognizer": {"steps": 2}}  # nobody listens to it
OWN = DEAF | {"model": {"width": 96, "latents": 6}, "front_end": {"n_mels": 64}}
OWN["train"] = {"max_steps": 25, "gate_every": 0, "eval_steps": 25, "warmup_steps": 2}
OWN |= {"codec": {"steps": 8, "sharpen_steps": 1, "vocoder_steps": 1}, "data": {"speeds": []}}
FEW = DEAF | {"train": {"max_steps": 3, "gate_every": 0, "eval_steps": 3, "warmup_steps": 2}}


@pytest.fixture(scope="module")
def base() -> Path:
    """The folder of a run that was trained to its end on the tiny world's recordings."""
    run = start("a base", settings=OWN)
    list(Preparation(run, str(corpus())).run())
    list(unchecked(Training(run)).run())
    return run.folder


@pytest.fixture(scope="module")
def exported(base, tmp_path_factory) -> Path:
    return export_voice(load_voice(base), tmp_path_factory.mktemp("voice") / "export")


def prepare(run, base_model, data: str = "", licence: str = "CPML") -> Preparation:
    return Preparation(run, data, base_model=str(base_model), accept_license=licence)


@pytest.mark.long
def test_training_continues_from_the_voice_which_is_needed_no_longer(base, exported, tmp_path):
    """The same recordings: the first step's loss is near the last of the voice, not of chance."""
    copy = shutil.copytree(exported, tmp_path / "copy")
    started = prepare(start("resumed", settings=FEW), copy, str(corpus()))
    lines = "\n".join(map(str, started.run()))
    shutil.rmtree(copy)
    prepare(start("resumed"), copy)  # its notebook, run again
    run = start("resumed")
    assert file_digest(run.folder / CODEC) == file_digest(exported / CODEC)
    assert "text ids stay, 0 new ones" in lines
    settings = run.section("train")
    assert settings["guided_attention_weight"] == 0, "it has heads that follow the text"
    rates = [settings[name] for name in ("lr", "muon_lr", "conditioner_lr")]
    assert rates == [0.002, 0.00667, 0.0002], "a third of the preset's"
    cold = [row["loss"] for row in read_log(base / "train.jsonl")]
    list(unchecked(Training(run)).run())
    assert read_log(run.path("train.jsonl"))[0]["loss"] < (cold[0] + cold[-1]) / 2

    other = shutil.copytree(exported, tmp_path / "other")
    (other / "model.safetensors").write_bytes(b"another")
    with pytest.raises(KitError, match=r"another voice, .*copy.* RUN"):
        prepare(start("resumed"), other)


def test_an_unknown_language_adds_letters_and_keeps_ids(base):
    texts, clips = few_words()
    words = {text: f"word {chr(97 + i)} quiz" for i, text in enumerate(dict.fromkeys(texts))}
    names = [f"c{i}" for i in range(len(texts))]
    table = "".join(f"{name}|{words[text]}\n" for name, text in zip(names, texts, strict=True))
    folder = dataset(Path(base).parent / "latin", table, dict(zip(names, clips, strict=True)))
    run = start_from_base(start("latin letters", settings=FEW), str(base))
    preparation = Preparation(run, str(folder), "en", max_rejected_percent=100.0)
    preparation.check()
    reported = str(preparation.train_tokenizer())
    for fact in ("What it could not spell: ", "held-out letters: Latin 100%", "with new ones: "):
        assert fact in reported
    grown = preparation.tokenizer
    voice = load_voice(base)
    for row in manifest():
        assert grown.encode(row.text) == voice.tokenizer.encode(row.text)
    assert not grown.uncovered("word quiz")


def test_a_codec_of_its_own_is_reported_and_a_half_copied_voice_copied_again(exported):
    run = start("has its own")
    run.path(CODEC).write_bytes(b"made from scratch")
    with pytest.raises(KitError, match=r"from scratch, not from .* RUN"):
        start_from_base(run, str(exported))
    run = start_from_base(start("killed"), str(exported))
    (run.folder / START_FROM).unlink()
    (run.folder / MODEL).write_bytes(b"half of")
    start_from_base(start("killed"), str(exported))
    assert (run.folder / START_FROM).exists() and (run.folder / MODEL).stat().st_size > 1000


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gone", r"there is no voice\. Name the folder"),
        ("hf://XTTS-v2", "is not a repository of the hub: write hf://OWNER/NAME@REVISION"),
        ("hf://some/../one", "is not a repository of the hub"),
        ("hf://some/one", "lacks a revision, and the files of a repository may change"),
        ("hf://some/one@../..", "lacks a revision"),
    ],
)
def test_where_there_is_no_voice_the_message_says_why(tmp_path, monkeypatch, name, why):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KitError, match=why):
        start_from_base(start("no voice"), name, "CPML")


def test_a_voice_asks_for_the_licence_of_its_card_whoever_pushed_it(base, tmp_path, monkeypatch):
    licence = "CC-BY 4.0, with a condition"
    folder = export_voice(load_voice(base), tmp_path, licence=licence)
    run = start("licensed", settings=FEW)
    repository = "someone/tuned"
    with serving(folder, repository, "v1") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        for name in (f"hf://{repository}@v1", str(folder)):
            with pytest.raises(KitError, match=f'accept_license="{licence}"'):
                start_from_base(run, name)
        assert not any("model.safetensors" in path for path, _ in hub.asked), "no weights before"
        start_from_base(run, f"hf://{repository}@v1", licence)
    assert inherited_licence(run) == licence, "what is made from this run has it, too"
    passed_on = export_voice(load_voice(base), tmp_path / "next", licence=inherited_licence(run))
    assert read_card(passed_on).licence == licence and load_export(passed_on).speakers


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    return write_release(tmp_path_factory.mktemp("release"))


def test_its_licence_must_be_accepted_and_it_learns_at_its_makers_rate(release):
    run = start("no licence", settings=FEW)
    for given in ("", "MIT"):
        with pytest.raises(KitError, match=r"Coqui Public Model License: .*_license=\"CPML\""):
            prepare(run, release, licence=given)
    assert not (run.folder / MODEL).exists()
    run = start("its rate", settings={"train": {"weight_decay": 0.5}})
    train = start_from_base(run, str(release), "CPML").section("train")
    theirs = {"optimizer": "adamw", "lr": 5e-6, "betas": [0.9, 0.96]}
    assert train.items() >= (theirs | {"weight_decay": 0.5}).items(), "a person's word comes first"


def test_what_a_release_needs_is_named(tmp_path):
    folder = write_release(tmp_path / "no dvae")
    (folder / "dvae.pth").unlink()
    with pytest.raises(KitError, match=r"has no dvae\.pth"):
        start_from_base(start("no dvae"), str(folder), "CPML")
    (tmp_path / "config.yaml").write_text("gpt: {}")
    torch.save([1], tmp_path / "gpt.pth")
    hub = "hf://IndexTeam/IndexTTS-2@1234"
    for name in (tmp_path, tmp_path / "gpt.pth", hub):
        with pytest.raises(KitError, match=r"is an IndexTTS2.*_license=\"bilibili\".*not 'CPML'"):
            start_from_base(start("theirs"), str(name), "CPML")
    with pytest.raises(KitError, match="is not the GPT of an IndexTTS2"):
        start_from_base(start("theirs"), str(tmp_path), "bilibili")


@pytest.mark.skipif(find_spec("indextts") is not None, reason="its package is installed")
def test_an_indextts2_needs_its_package():
    with pytest.raises(KitError, match="pip install indextts2-inference"):
        SpeechGPT(GPTConfig(conformers=(16, 24, 2, 1, 2) * 2))


@pytest.mark.long
def test_it_stays_with_the_run_learns_the_letters_and_is_trained(release):
    run = start("from a release", settings=FEW)
    preparation = prepare(run, release, str(corpus()))
    assert (run.folder / TOKENIZER).read_bytes() == (release / "vocab.json").read_bytes()
    model = preparation.model
    assert (model.width, model.start_text_id, model.stop_text_id) == (96, START, STOP)
    lines = [str(result) for result in preparation.run()]
    assert any("[am]" in line and "41 ids stay" in line for line in lines)
    assert any("32 codes, 21.5 of them a second" in line for line in lines)
    grown = preparation.tokenizer
    assert (grown.start, grown.stop) == (START, STOP)
    learned = [row.text for row in manifest() if row.split == "train"]
    assert not grown.uncovered("".join(learned))
    ids = json.loads((release / "vocab.json").read_text(encoding="utf-8"))["model"]["vocab"]
    assert {piece: grown.ids[piece] for piece in ids} == ids

    training = Training(start("from a release"))
    model = first_model(run, training.model, tokenizer=grown)
    base = random_model()
    tag = model.text_embedding.weight[grown.ids["[am]"]]
    assert torch.equal(tag, base.text_embedding.weight[ids["[en]"]])
    list(unchecked(training).run())
    assert run.report()["train"]["steps"] == 3

    voice, exported = voice_and_export(run)
    said = learned[0]
    assert voice.ids(said) == exported.ids(said) == grown.encode_checked(said)


def voice_and_export(run) -> tuple[Voice, Voice]:
    """The voice of `run`, and its export, which says the same."""
    voice = load_voice(run.folder, language="am")
    exported = load_export(export_voice(voice, run.path("export"), "fp32"))
    greedy = GenerateConfig(temperature=0.0, retries=0)
    said = next(row.text for row in manifest() if row.split == "train")
    codes = [v.speak([said], v.speakers[0], greedy)[0].codes for v in (voice, exported)]
    assert torch.equal(*codes)
    return voice, exported


def test_it_is_fetched_once_its_licence_is_accepted(release, runs_folder, monkeypatch):
    """The hub has the release at the revision that is pinned, and at another one."""
    pinned = XTTS_V2.revision
    with serving(release, "coqui/XTTS-v2", pinned, "other") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        run = start("from the hub", settings=FEW)
        with pytest.raises(KitError, match="Coqui Public Model License"):
            start_from_base(run, RELEASE)
        assert not hub.asked, "not a byte before that"
        start_from_base(run, RELEASE, "CPML")
        noted = run.report()["start_from"]["download"]
        source = {"repository": "coqui/XTTS-v2", "revision": pinned, "commit": COMMIT}
        assert noted.items() >= source.items()
        assert set(noted["files"]) >= {"model.pth", "config.json", "vocab.json", "dvae.pth"}
        assert noted["files"]["model.pth"]["sha256"] == file_digest(release / "model.pth")
        assert (run.folder / TOKENIZER).read_bytes() == (release / "vocab.json").read_bytes()

        hub.asked.clear()
        again = start("from the hub")
        assert start_from_base(again, RELEASE, "CPML").section("model")["width"] == 96
        start_from_base(start("another run"), RELEASE, "CPML")
        assert not hub.asked, "it is stored once for all runs"
        shutil.rmtree(runs_folder / "releases")
        start_from_base(again, RELEASE)  # the run has its copy
        monkeypatch.setenv("KIT_ACCEPT_LICENSE", "CPML")
        run = start_from_base(start("accepted before", settings=FEW), RELEASE)
        assert run.report()["start_from"]["licence"].startswith("CPML, accepted")


PARTS = {"max_steps": 6, "gate_every": 6, "eval_steps": 3, "save_steps": 2, "warmup_steps": 1}


@pytest.fixture(scope="module")
def adapted(release):
    adapters = {"finetune": {"method": "lora"}, "lora": {"rank": 4, "alpha": 8.0}}
    run = start("adapters", settings={"train": PARTS, **DEAF, **adapters})
    list(prepare(run, release, str(corpus())).run())
    run = start("adapters")
    list(Training(run).run())
    return run


@pytest.mark.long
def test_plan_record_and_benchmark_are_of_what_trains(adapted):
    run, size = adapted, str(Training(adapted).size())
    assert "LoRA: " in size and "adapters of rank 4 beside attn.c_attn" in size
    train = run.report()["train"]
    noted = train["finetune"]
    assert noted.items() >= {"method": "lora", "rank": 4, "tables": "new"}.items()
    assert 0 < noted["trained_parameters"] < noted["parameters"] / 2
    assert train["ran"]["EMA of the weights"].startswith("on")
    task = Benchmark(start("adapters")).task
    assert task.finetuning.adapters
    figures = run_variant(task, TrialConfig(steps=1, warmup_steps=1), ("sdpa",))
    assert math.isfinite(figures["loss"])


@pytest.mark.long
def test_it_is_a_voice_like_any_other_and_its_adapters_are_one_beside_its_base(adapted):
    run = adapted
    voice, _ = voice_and_export(run)
    base = load_model(run.folder / MODEL)
    assert len(voice.model.text_embedding.weight) > len(base.text_embedding.weight)
    alone = run.folder / "adapters-ema.safetensors"
    found = load_adapters(alone, base).state_dict()
    saved = load_model(run.folder / "model-ema.safetensors").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())


XTTS = build(GPTConfig, load_preset("xtts_v2")["model"])


def gpu_run(preset: str, use: str = "", **settings) -> Run:
    """A run that has not started, with that preset, use and settings of a person."""
    sections = merge(merge(load_preset(preset), load_use(use)), settings)
    about = {"name": "new", "preset_name": preset, "folder": Path("nowhere"), "use": use}
    return Run(preset=sections, settings=settings, **about)


def tuned(run: Run) -> tuple[TrainConfig, DataConfig]:
    settings = finetuning_settings(run, XTTS, COQUI_DEFAULTS)
    train = build(TrainConfig, merge(run.section("train"), settings["train"]))
    return train, build(DataConfig, merge(run.section("data"), settings["data"]))


def test_what_a_person_or_a_use_has_set_wins_over_it():
    asked = {"train": {"min_steps": 50, "lr": 1e-4}, "data": {"effective_batch": 32}}
    train, data = tuned(gpu_run("80gb", **asked, finetune={"method": "lora"}))
    assert (train.min_steps, train.lr, data.effective_batch) == (50, 1e-4, 32)
    assert tuned(gpu_run("80gb"))[1].micro_batch == 16
    assert tuned(gpu_run("80gb", "low_memory"))[1].micro_batch == 4
    for preset in ("8gb", "t4", "12gb", "24gb", "80gb"):
        method = finetuning_settings(gpu_run(preset), XTTS, {})["finetune"]["method"]
        assert method == ("full" if preset in ("24gb", "80gb") else "lora")
    with pytest.raises(KitError, match=r"micro_batch = 64: must divide effective_batch \(16\)"):
        tuned(gpu_run("t4", data={"micro_batch": 64}))


def test_a_voice_on_the_hub_is_a_base_model_without_a_licence_to_accept(exported, monkeypatch):
    name = "hf://someone/a-voice@v1"
    with serving(exported, "someone/a-voice", "v1") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        run = start_from_base(start("a voice of the hub", settings=FEW), name)
        assert file_digest(run.folder / CODEC) == file_digest(exported / CODEC)
        listed = [path for path, _ in hub.asked if path.startswith("/api/models/")]
        assert len(listed) == 1, "one request lists its files"
        asked = len(hub.asked)
        start_from_base(start("another of the hub", settings=FEW), name)
        assert len(hub.asked) == asked, "it was downloaded already"
    assert (run.folder / MODEL).is_file()
