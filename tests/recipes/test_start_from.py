"""A run that begins with a voice there is already: from its folder or its export to training."""

import shutil
from pathlib import Path

import pytest
from helpers import corpus, dataset, few_words, manifest

from kit.base.config import merge
from kit.base.errors import KitError, SpeechError
from kit.base.files import file_digest
from kit.inference.export import export_voice
from kit.inference.voice_files import load_voice
from kit.recipes.base_model import BEGUN, CODEC, MODEL
from kit.recipes.prepare import Preparation
from kit.recipes.start import start
from kit.recipes.train import Training
from kit.training.logs import read_log

# Sizes that are not the tiny preset's: a run that begins with this voice must take them from it.
OWN = {
    "model": {"width": 96, "latents": 6},
    "train": {"steps": 25, "gate_every": 0, "val_every": 25, "warmup_steps": 2},
    "front_end": {"n_mels": 64},
    "recognizer": {"steps": 2},  # nobody listens to it
}
FEW = {
    "train": {"steps": 3, "gate_every": 0, "val_every": 3, "warmup_steps": 2},
    "recognizer": {"steps": 2},
}


@pytest.fixture(scope="module")
def base() -> Path:
    """The folder of a run that was trained to its end on the tiny world's recordings."""
    run = start("a base", settings=OWN)
    list(Preparation(run, str(corpus())).run())
    list(Training(run).run())
    return run.folder


@pytest.fixture(scope="module")
def exported(base, tmp_path_factory) -> Path:
    return export_voice(load_voice(base), tmp_path_factory.mktemp("voice") / "export")


def prepared(name: str, voice: Path | str, data: Path | None = None) -> Preparation:
    run = start(name, settings=FEW)
    preparation = Preparation(run, str(data or corpus()), start_from=str(voice))
    preparation.results = list(preparation.run())
    return preparation


@pytest.fixture(scope="module")
def begun(exported, tmp_path_factory) -> Preparation:
    """A run that has begun with a copy of the voice, which is gone since."""
    copy = shutil.copytree(exported, tmp_path_factory.mktemp("copy") / "copy")
    preparation = prepared("goes on", copy)
    shutil.rmtree(copy)
    Preparation(start("goes on"), start_from=str(copy))  # its notebook, run again
    return preparation


def test_training_goes_on_where_the_voice_stood(base, exported, begun):
    """The same recordings: the first step's loss is near the last of the voice, not of chance."""
    preparation, run = begun, start("goes on")
    assert file_digest(run.folder / CODEC) == file_digest(exported / CODEC)
    lines = [str(result) for result in preparation.results]
    assert any("text ids stay, 0 new ones" in line for line in lines)
    assert any("the one of before, with these settings, is used again" in line for line in lines)
    settings = run.section("train")
    assert settings["guide"] == 0, "it has heads that follow the text"
    rates = [settings[name] for name in ("lr", "muon_lr", "conditioner_lr")]
    assert rates == [0.002, 0.00667, 0.0002], "a third of the preset's"
    cold = [row["loss"] for row in read_log(base / "train.jsonl")]
    list(Training(run).run())
    assert read_log(run.path("train.jsonl"))[0]["loss"] < (cold[0] + cold[-1]) / 2


def test_a_rate_that_was_set_stays_and_adapters_keep_the_presets(exported):
    mine = merge(FEW, {"train": {"lr": 0.004}})
    asked = start("as I like", settings=mine)
    Preparation(asked, str(corpus()), start_from=str(exported))
    assert start("as I like").section("train")["lr"] == 0.004
    lora = start("beside it", settings=merge(FEW, {"finetune": {"method": "lora"}}))
    Preparation(lora, str(corpus()), start_from=str(exported))
    assert start("beside it").section("train")["lr"] == 0.006


def test_a_language_it_never_heard_adds_letters_and_keeps_ids(base):
    texts, clips = few_words()
    words = {text: f"word {chr(97 + i)} quiz" for i, text in enumerate(dict.fromkeys(texts))}
    names = [f"c{i}" for i in range(len(texts))]
    table = "".join(f"{name}|{words[text]}\n" for name, text in zip(names, texts, strict=True))
    folder = dataset(Path(base).parent / "latin", table, dict(zip(names, clips, strict=True)))
    run = start("latin letters", settings=FEW)
    preparation = Preparation(run, str(folder), "en", refuse_percent=100.0, start_from=str(base))
    preparation.check()
    preparation.require_usable()
    told = preparation.train_tokenizer()
    assert "What it could not spell: " in str(told) and len(told.pictures) == 1
    assert "held-out letters: Latin 100%" in str(told)
    assert "with new ones: " in str(told) and "100% of the texts come back" in str(told)
    grown = preparation.tokenizer
    voice = load_voice(base)
    for row in manifest():
        assert grown.encode(row.text) == voice.tokenizer.encode(row.text)
    assert not grown.uncovered("word quiz")


def test_the_run_needs_the_voice_no_longer_and_takes_no_other(begun, exported, tmp_path):
    again = Preparation(start("goes on"))
    assert again.codec_config == begun.codec_config and again.model.width == 96
    training = Training(start("goes on"))
    assert "It starts from the voice in" in str(training.size())
    assert training.model.width == 96 and training.model.n_mels == 64

    other = shutil.copytree(exported, tmp_path / "other")
    (other / "model.safetensors").write_bytes(b"another")
    with pytest.raises(KitError, match=r"begun from another voice, .*copy.* Set RUN to"):
        Preparation(start("goes on"), start_from=str(other))


def test_a_run_that_has_a_codec_of_its_own_is_told(exported):
    name = "has its own"
    run = start(name)
    run.path(CODEC).write_bytes(b"made from nothing")
    with pytest.raises(KitError, match=r"was begun from nothing, now .* Set RUN to a new name"):
        Preparation(run, start_from=str(exported))


def test_killed_while_the_voice_was_copied_it_is_copied_again(exported):
    run = start("killed")
    Preparation(run, str(corpus()), start_from=str(exported))
    (run.folder / BEGUN).unlink()
    (run.folder / MODEL).write_bytes(b"half of")
    Preparation(start("killed"), str(corpus()), start_from=str(exported))
    assert (run.folder / BEGUN).exists() and (run.folder / MODEL).stat().st_size > 1000


@pytest.mark.parametrize(("there", "said"), [(None, "no such folder"), ("notes.txt", "notes.txt")])
def test_a_folder_without_a_voice_says_what_is_there(tmp_path, there, said):
    folder = tmp_path / "nothing"
    if there:
        folder.mkdir()
        (folder / there).write_text("", encoding="utf-8")
    with pytest.raises(KitError, match=rf"there is no voice \({said}\)\. Name the folder"):
        Preparation(start("no voice"), start_from=str(folder))


def test_phonemes_that_the_voice_does_not_speak_are_refused(exported):
    run = start("phonemes asked")
    preparation = Preparation(run, str(corpus()), phonemes="am", start_from=str(exported))
    preparation.check()
    preparation.require_usable()
    with pytest.raises(SpeechError, match="leave PHONEMES empty"):
        preparation.train_tokenizer()
