"""A fine-tuning from a small IndexTTS2 with random weights, and what the package makes of it."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from helpers import corpus, manifest
from published_indextts2 import SENTENCES, write_codec, write_vocabulary
from test_files import loaded_by_package
from test_parity import kit_codes, package_codes

from kit.__main__ import main
from kit.base.errors import KitError
from kit.extras.finetune.recipe import FineTune
from kit.extras.indextts2.model import load_indextts2
from kit.recipes.speak import speak
from kit.recipes.start import start

FEW = {
    "train": {"max_steps": 4, "eval_steps": 2, "warmup_steps": 1, "lr": 0.003},
    "generate": {"best_of": 1, "max_codes_per_text_id": 0.4},
    "recognizer": {"steps": 2},  # nobody listens to it
}


@pytest.fixture(scope="module")
def release(small):
    return write_codec(small[0])


@pytest.fixture(scope="module", params=["full", "lora", "own"])
def tuned(request, release, tmp_path_factory) -> tuple[FineTune, dict]:
    """A fine-tuning, and what its steps said; "own" with a tokenizer of one's own, by LoRA."""
    method = "lora" if request.param == "own" else request.param
    settings = FEW | {"finetune": {"method": method}}
    run = start(f"indextts2-{request.param}", "tiny", settings=settings)
    given = {"base_model": str(release), "accept_license": "bilibili"}
    if request.param == "own":
        own = tmp_path_factory.mktemp("own") / "amharic_bpe.model"
        write_vocabulary(own, 220, [row.text for row in manifest()] + SENTENCES)
        given["tokenizer"] = str(own)
    tune = FineTune(run, str(corpus()), **given)
    steps = ("describe_base", "recordings", "spelling", "grow", "to_codes", "before")
    actual = {name: getattr(tune, name)() for name in steps}
    list(tune.training.run())
    actual |= {name: getattr(tune, name)() for name in ("after", "forgetting")}
    actual["export"] = tune.export("fp32")
    actual["evaluate"] = tune.evaluate()
    return tune, actual


def test_every_step_says_what_it_found(tuned):
    tune, actual = tuned
    report = tune.active_run.report()
    assert report["start_from"]["licence"].startswith("bilibili, accepted")
    assert report["train"]["steps"] == 4
    assert report["finetune"]["exported"].keys() == {"indextts2"}
    assert report["finetune"]["forgotten_nats"]["en"] > 0
    assert "64 codes, 50.0 of them a second" in actual["to_codes"].line
    assert "package makes its sound" in actual["before"].line + actual["after"].line
    for name in ("s2mel_checkpoint", "spk_matrix"):
        assert name in actual["export"].line


def test_without_its_sound_it_is_judged_by_its_codes(tuned):
    tune, actual = tuned
    judged = tune.active_run.report()["eval"]
    assert 0 <= judged["eos_rate"] <= 1 and judged["sentences"] >= 5 and "cer" not in judged
    assert "sentences that end" in str(actual["evaluate"].grid)
    assert "The CER was not measured" in actual["evaluate"].line
    with pytest.raises(KitError, match=r"kit speak --voice runs/NAME/indextts2"):
        list(speak(tune.training.active, text="ሰላም"))


def test_the_package_says_the_codes_that_the_kit_says(tuned):
    tune, _ = tuned
    folder = tune.active_run.folder / "indextts2"
    theirs = loaded_by_package(folder)
    voice = tune.voice
    text = voice.ids("ሰላም")
    features = voice.reference(voice.speakers[0])[None]
    codes = kit_codes(voice.model, text, features)
    assert package_codes(theirs, text, features) == codes
    vocabulary = (tune.active_run.folder / "tokenizer.model").read_bytes()
    assert load_indextts2(folder).tokenizer == vocabulary


class Infer:
    """Stands for the package's `IndexTTS2`, whose sound needs files that are not published here."""

    def __init__(self, model_dir: str):
        self.tokenizer = SimpleNamespace(normalizer="theirs")
        self.said = []

    def infer(self, reference: str, text: str, output: None):
        assert self.tokenizer.normalizer is None and reference.endswith("reference.wav")
        assert text.strip() and output is None
        return 22_050, np.full((22_050, 1), 2**14, dtype=np.int16)


def test_its_package_speaks_and_is_transcribed(tuned, release, tmp_path, monkeypatch):
    tune, _ = tuned
    module = ModuleType("indextts.infer_v2")
    module.IndexTTS2 = Infer
    monkeypatch.setitem(sys.modules, "indextts.infer_v2", module)
    names = ["s2mel_checkpoint", "emo_matrix", "spk_matrix", "qwen_emo_path"]
    config = tune.active_run.folder / "indextts2" / "config.yaml"
    before = config.read_text()
    config.write_text(before + "".join(f"\n{name}: bpe.model" for name in names))
    evaluated = tune.evaluate()
    assert "as the package speaks them" in evaluated.line and len(evaluated.sounds) == 3
    assert tune.active_run.report()["eval"]["cer"] >= 0
    out = tmp_path / "said.wav"
    (said,) = speak("", text="ሰላም 3", voice=str(config.parent), out=out)
    assert out.stat().st_size == 2 * 22_050 + 44 and float(said.sounds[0].wave.max()) == 0.5
    config.write_text(before)


def test_the_command_refuses_without_the_licence_and_resumes_with_it(tuned, release, capsys):
    tune, _ = tuned
    command = ["finetune", "--base-model", str(release), "--run"]
    assert main([*command, "nobody-accepted"]) == 2
    assert 'accept_license="bilibili"' in capsys.readouterr().err
    assert main([*command, tune.active_run.name, "--accept-license", "bilibili"]) == 0
    assert "4 steps" in capsys.readouterr().out
