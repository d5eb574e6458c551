"""IndexTTS2 as the model that a run starts from, and a tuned voice as an IndexTTS2."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from kit.base.config import merge, read_yaml
from kit.base.errors import KitError
from kit.base.hardware import DTYPES
from kit.extras.indextts2.codec import FeatureConfig, load_indextts2_codec
from kit.extras.indextts2.model import (
    CONFIG_FILE,
    INDEXTTS2_REPOSITORY,
    STATS_FILE,
    WEIGHTS_FILE,
    indextts2_in,
    load_indextts2,
    save_indextts2,
)
from kit.extras.indextts2.speak import EXPORT_FOLDER, README, PackageSpeaker, missing_files
from kit.extras.indextts2.tokenizer import VOCABULARY_FILE
from kit.inference.voice import Voice
from kit.model.weights import extend_positions
from kit.recipes.base_model import COQUI_DEFAULTS, BaseModel, Release, from_release
from kit.recipes.open_run import ActiveRun
from kit.tuning.cards import CARDS

# Nothing is spoken in training: the kit does not make its sound.
NOT_SPOKEN = {
    "train": {"gate_every": 0, "gate_patience": 0},
    "decoder_finetune": {"steps": 0},
    "reader": {"rows": 0},
}


def load_base(folder: Path, fetch: Callable[[str, str], Path]) -> BaseModel:
    """Load the IndexTTS2 in `folder`; `fetch(repository, file)` downloads what it refers to.

    Raises KitError if it is damaged or lacks a file.
    """
    release = load_indextts2(folder / WEIGHTS_FILE)
    codec = load_indextts2_codec(folder, release.settings, fetch)
    config = release.model.config
    if codec.vocab_size + 2 != config.code_vocab:
        raise KitError(
            f"The semantic codec of {folder / CONFIG_FILE} has {codec.vocab_size:,} codes, its GPT "
            f"{config.code_vocab - 2:,}: they are of different releases."
        )
    return from_release(INDEXTTS2, release, codec, release.tokenizer, FeatureConfig())


def export_for_indextts2(run: ActiveRun, voice: Voice, release: Path, weights: str) -> Path:
    """Write `voice` as an IndexTTS2 to the folder returned; the rest of it is from `release`."""
    folder = run.path(EXPORT_FOLDER)
    base = load_indextts2(release)
    spelling = {"language": voice.language, "respell": voice.habits.respell}
    tuned = dataclasses.replace(
        base,
        model=extend_positions(voice.model, base.model),
        settings=base.settings | spelling,
        tokenizer=(run.folder / "tokenizer.model").read_bytes(),
    )
    save_indextts2(tuned, folder, DTYPES[weights], README.format(**spelling))
    return folder


INDEXTTS2 = Release(
    name="IndexTTS2",
    repository=INDEXTTS2_REPOSITORY,
    revision="",
    weights=WEIGHTS_FILE,
    files=(WEIGHTS_FILE, CONFIG_FILE, VOCABULARY_FILE, STATS_FILE),
    optional=("LICENSE.txt", "LICENSE_ZH.txt", "s2mel.pth", "feat1.pt", "feat2.pt"),
    licence="bilibili",
    terms="is an IndexTTS2, or made from one. It is under the bilibili Model Use License "
    "Agreement, whose conditions also bind everyone who is given what is made from it",
    defaults=merge(COQUI_DEFAULTS, NOT_SPOKEN),
    sizes=lambda: read_yaml(CARDS)["indextts2"],
    frame_rate=50.0,
    is_in=indextts2_in,
    load=load_base,
    export=export_for_indextts2,
    export_folder=EXPORT_FOLDER,
    missing_files=missing_files,
    speaker=PackageSpeaker,
)
