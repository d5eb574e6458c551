"""A run that begins with a voice there is already: from its folder or its export to training."""

import shutil
from pathlib import Path

import pytest
from helpers import corpus, dataset, few_words, manifest, unchecked
from hub import serving

from kit.base.config import merge
from kit.base.errors import KitError, SpeechError
from kit.base.files import file_digest
from kit.inference.export import export_voice, load_export, read_card
from kit.inference.voice_files import load_voice
from kit.recipes.active_run import MODEL, START_FROM
from kit.recipes.base_model import CODEC, folder_of, inherited_licence, start_from_base
from kit.recipes.prepare import Preparation
from kit.recipes.start import start
from kit.recipes.train import Training
from kit.training.logs import read_log

# Sizes that are not the tiny preset's: a run that begins with this voice must take them from it.
OWN = {
    "model": {"width": 96, "latents": 6},
    "train": {"max_steps": 25, "gate_every": 0, "eval_steps": 25, "warmup_steps": 2},
    "front_end": {"n_mels": 64},
    "recognizer": {"steps": 2},  # nobody listens to it
}
FEW = {
    "train": {"max_steps": 3, "gate_every": 0, "eval_steps": 3, "warmup_steps": 2},
    "recognizer": {"steps": 2},
}


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


def prepared(name: str, voice: Path | str, data: Path | None = None) -> Preparation:
    run = start(name, settings=FEW)
    preparation = Preparation(run, str(data or corpus()), base_model=str(voice))
    preparation.results = list(preparation.run())
    return preparation


@pytest.fixture(scope="module")
def started(exported, tmp_path_factory) -> Preparation:
    """A run that started from a copy of the voice, which was then removed."""
    copy = shutil.copytree(exported, tmp_path_factory.mktemp("copy") / "copy")
    preparation = prepared("resumed", copy)
    shutil.rmtree(copy)
    Preparation(start("resumed"), base_model=str(copy))  # its notebook, run again
    return preparation


def test_training_continues_from_the_voice(base, exported, started):
    """The same recordings: the first step's loss is near the last of the voice, not of chance."""
    preparation, run = started, start("resumed")
    assert file_digest(run.folder / CODEC) == file_digest(exported / CODEC)
    lines = [str(result) for result in preparation.results]
    assert any("text ids stay, 0 new ones" in line for line in lines)
    assert any("the one of before, with these settings, is used again" in line for line in lines)
    settings = run.section("train")
    assert settings["guided_attention_weight"] == 0, "it has heads that follow the text"
    rates = [settings[name] for name in ("lr", "muon_lr", "conditioner_lr")]
    assert rates == [0.002, 0.00667, 0.0002], "a third of the preset's"
    cold = [row["loss"] for row in read_log(base / "train.jsonl")]
    list(unchecked(Training(run)).run())
    assert read_log(run.path("train.jsonl"))[0]["loss"] < (cold[0] + cold[-1]) / 2


def test_a_rate_that_was_set_stays_and_adapters_keep_the_presets(exported):
    mine = merge(FEW, {"train": {"lr": 0.004}})
    asked = start("as I like", settings=mine)
    Preparation(asked, str(corpus()), base_model=str(exported))
    assert start("as I like").section("train")["lr"] == 0.004
    lora = start("beside it", settings=merge(FEW, {"finetune": {"method": "lora"}}))
    Preparation(lora, str(corpus()), base_model=str(exported))
    assert start("beside it").section("train")["lr"] == 0.006


def test_an_unknown_language_adds_letters_and_keeps_ids(base):
    texts, clips = few_words()
    words = {text: f"word {chr(97 + i)} quiz" for i, text in enumerate(dict.fromkeys(texts))}
    names = [f"c{i}" for i in range(len(texts))]
    table = "".join(f"{name}|{words[text]}\n" for name, text in zip(names, texts, strict=True))
    folder = dataset(Path(base).parent / "latin", table, dict(zip(names, clips, strict=True)))
    run = start("latin letters", settings=FEW)
    preparation = Preparation(
        run, str(folder), "en", max_rejected_percent=100.0, base_model=str(base)
    )
    preparation.check()
    preparation.require_usable()
    reported = preparation.train_tokenizer()
    assert "What it could not spell: " in str(reported)
    assert "held-out letters: Latin 100%" in str(reported)
    assert "with new ones: " in str(reported) and "100% of the texts come back" in str(reported)
    grown = preparation.tokenizer
    voice = load_voice(base)
    for row in manifest():
        assert grown.encode(row.text) == voice.tokenizer.encode(row.text)
    assert not grown.uncovered("word quiz")


def test_the_run_needs_the_voice_no_longer_and_takes_no_other(started, exported, tmp_path):
    again = Preparation(start("resumed"))
    assert again.codec_config == started.codec_config and again.model.width == 96
    training = Training(start("resumed"))
    assert "It starts from the voice in" in str(training.size())
    assert training.model.width == 96 and training.model.n_mels == 64

    other = shutil.copytree(exported, tmp_path / "other")
    (other / "model.safetensors").write_bytes(b"another")
    with pytest.raises(KitError, match=r"started from another voice, .*copy.* Set RUN to"):
        Preparation(start("resumed"), base_model=str(other))


def test_a_run_that_has_a_codec_of_its_own_is_reported(exported):
    name = "has its own"
    run = start(name)
    run.path(CODEC).write_bytes(b"made from scratch")
    with pytest.raises(
        KitError, match=r"was started from scratch, not from .* Set RUN to a new name"
    ):
        Preparation(run, base_model=str(exported))


def test_killed_while_the_voice_was_copied_it_is_copied_again(exported):
    run = start("killed")
    Preparation(run, str(corpus()), base_model=str(exported))
    (run.folder / START_FROM).unlink()
    (run.folder / MODEL).write_bytes(b"half of")
    Preparation(start("killed"), str(corpus()), base_model=str(exported))
    assert (run.folder / START_FROM).exists() and (run.folder / MODEL).stat().st_size > 1000


@pytest.mark.parametrize(("there", "said"), [(None, "no such folder"), ("notes.txt", "notes.txt")])
def test_a_folder_without_a_voice_says_what_is_there(tmp_path, there, said):
    folder = tmp_path / "nothing"
    if there:
        folder.mkdir()
        (folder / there).write_text("", encoding="utf-8")
    with pytest.raises(KitError, match=rf"there is no voice \({said}\)\. Name the folder"):
        Preparation(start("no voice"), base_model=str(folder))


def test_phonemes_that_the_voice_does_not_speak_are_refused(exported):
    run = start("phonemes asked")
    preparation = Preparation(run, str(corpus()), phonemes="am", base_model=str(exported))
    preparation.check()
    preparation.require_usable()
    with pytest.raises(SpeechError, match="leave PHONEMES empty"):
        preparation.train_tokenizer()


def test_a_voice_on_the_hub_is_a_base_model_without_a_licence_to_accept(exported, monkeypatch):
    name = "hf://someone/a-voice@v1"
    with serving(exported, "someone/a-voice", "v1") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        run = start("a voice of the hub", settings=FEW)
        folder, record = folder_of(run, name, "")
        assert record["repository"] == "someone/a-voice"
        assert file_digest(folder / CODEC) == file_digest(exported / CODEC)
        listed = [path for path, _ in hub.asked if path.startswith("/api/models/")]
        assert len(listed) == 1, "one request lists its files"
        asked = len(hub.asked)
        start_from_base(run, name)
        assert len(hub.asked) == asked, "it was downloaded already"
    assert (run.folder / MODEL).is_file()


def test_a_voice_made_from_xtts_asks_for_its_licence_whoever_pushed_it(base, tmp_path, monkeypatch):
    folder = export_voice(load_voice(base), tmp_path, licence="CPML")
    run = start("licensed", settings=FEW)
    with serving(folder, "someone/tuned", "v1") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        for name in ("hf://someone/tuned@v1", str(folder)):
            with pytest.raises(KitError, match="Coqui Public Model License"):
                start_from_base(run, name)
        assert not any("model.safetensors" in path for path, _ in hub.asked), "no weights before"
        start_from_base(run, "hf://someone/tuned@v1", "CPML")
    assert inherited_licence(run) == "CPML", "what is made from this run has it, too"
    passed_on = export_voice(load_voice(base), tmp_path / "next", licence=inherited_licence(run))
    assert read_card(passed_on).licence == "CPML" and load_export(passed_on).speakers
