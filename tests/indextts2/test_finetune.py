"""A whole fine-tuning from a small IndexTTS2 with random weights, and what the package makes of it."""

import pytest
import torch
from helpers import corpus
from published_indextts2 import write_codec
from test_files import loaded_by_package
from test_parity import kit_codes, package_codes

from kit.base.errors import KitError
from kit.recipes.finetune import FineTune
from kit.recipes.start import start
from kit.releases.indextts2.model import load_indextts2

FEW = {
    "train": {"max_steps": 4, "eval_steps": 2, "warmup_steps": 1, "lr": 0.003},
    "generate": {"best_of": 1, "max_codes_per_text_id": 0.4},
    "recognizer": {"steps": 2},  # nobody listens to it
}


@pytest.fixture(scope="module")
def release(small):
    return write_codec(small[0])


@pytest.fixture(scope="module")
def tuned(release) -> tuple[FineTune, dict]:
    """A fine-tuning, and what its steps said."""
    run = start("for-indextts2", "tiny", settings=FEW)
    tune = FineTune(run, str(corpus()), base_model=str(release), accept_license="bilibili")
    steps = ("describe_base", "recordings", "spelling", "grow", "to_codes", "before")
    found = {name: getattr(tune, name)() for name in steps}
    found["train"] = list(tune.training.run())
    found |= {name: getattr(tune, name)() for name in ("after", "forgetting")}
    found["export"] = tune.export("fp32")
    return tune, found


def test_every_step_ends(tuned):
    tune, found = tuned
    for name, result in found.items():
        print("====", name, *(result if isinstance(result, list) else [result]), sep="\n")
    assert tune.active_run.report()["start_from"]["licence"].startswith("bilibili, accepted")


def test_the_package_says_the_codes_that_the_kit_says(tuned):
    tune, _ = tuned
    folder = tune.active_run.folder / "indextts2"
    theirs = loaded_by_package(folder)
    voice = tune.voice
    text = voice.ids("ሰላም")
    features = voice.reference(voice.speakers[0])[None]
    codes = kit_codes(voice.model, text, features)
    assert package_codes(theirs, text, features) == codes
