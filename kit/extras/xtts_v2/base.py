"""XTTS-v2 as the model that a run starts from, and a tuned voice as an XTTS-v2 for coqui-tts."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

from kit.base.config import load_preset
from kit.base.errors import KitError
from kit.base.files import write_atomic
from kit.base.hardware import DTYPES
from kit.extras.xtts_v2.codec import xtts_codec
from kit.extras.xtts_v2.model import (
    CONFIG_FILE,
    DVAE_FILE,
    MEL_STATS_FILE,
    VOCABULARY_FILE,
    WEIGHTS_FILE,
    load_xtts,
    save_xtts,
)
from kit.extras.xtts_v2.tokenizer import XTTSTokenizer, tag_of
from kit.inference.voice import Voice
from kit.model.weights import extend_positions
from kit.recipes.base_model import COQUI_DEFAULTS, BaseModel, Release, from_release
from kit.recipes.open_run import ActiveRun

EXPORT_FOLDER = "coqui"  # in that of a run
README = """# A fine-tuned XTTS-v2

For coqui-tts (`pip install coqui-tts "transformers<5.24"`: a later one breaks its generation); the
kit speaks from the folder `export` beside this one.

    from TTS.tts.configs.xtts_config import XttsConfig
    from TTS.tts.models.xtts import Xtts
    config = XttsConfig()
    config.load_json("config.json")
    model = Xtts.init_from_config(config)
    model.load_checkpoint(config, checkpoint_dir=".", strict=True)
{teach}    latents, speaker = model.get_conditioning_latents(audio_path=["reference.wav"])
    made = model.inference("...", "{tag}", latents, speaker)["wav"]  # 24 kHz

Neither this model nor its speech may be used commercially: it is made from XTTS-v2, which is under
the Coqui Public Model License (https://coqui.ai/cpml). Whoever is given it, or its speech, must be
given that licence, too.
"""
TEACH = """\
    # coqui-tts does not normalise texts in this language.
    from kit.extras.xtts_v2.tokenizer import teach_language
    teach_language(model.tokenizer, "{language}", {respell})
"""
# Languages in which coqui-tts 0.28 normalises texts itself.
CLEANED = "en es fr de it pt pl tr ru nl cs ar zh-cn ja hu ko hi".split()
LICENCE_FILE = "LICENSE.txt"  # must be passed on with the model and with its speech


def is_xtts(folder: Path) -> bool:
    return all((folder / name).is_file() for name in (WEIGHTS_FILE, VOCABULARY_FILE))


def load_base(folder: Path, fetch: Callable[[str, str], Path]) -> BaseModel:
    """Load the XTTS-v2 in `folder`. Raises KitError if it is damaged or lacks a file."""
    xtts = load_xtts(folder / WEIGHTS_FILE)
    if not xtts.dvae:
        raise KitError(
            f"{folder} has no {DVAE_FILE}, which makes codes of recordings: copy it there from "
            "where the model was published."
        )
    codec = xtts_codec(xtts.sound, xtts.dvae, xtts.config)
    return from_release(XTTS_V2, xtts, codec, xtts.vocabulary.data, codec.reference_mel.config)


def export_for_coqui(run: ActiveRun, voice: Voice, release: Path, weights: str) -> Path:
    """Write `voice` as an XTTS-v2 to the folder returned; the rest of it comes from `release`.

    The licence and a README are beside it. `weights` is fp32 or fp16. Raises KitError for a release
    that is missing or damaged, DiskError if the disk is full.
    """
    folder = run.path(EXPORT_FOLDER)
    xtts = load_xtts(release)
    tag = tag_of(voice.language)
    languages = xtts.config.get("languages", [])
    if tag not in languages:
        languages = [*languages, tag]
    tuned = dataclasses.replace(
        xtts,
        model=extend_positions(voice.model, xtts.model),
        config=xtts.config | {"languages": languages},
        vocabulary=XTTSTokenizer(run.folder / "tokenizer.model", voice.language),
    )
    save_xtts(tuned, folder, DTYPES[weights])
    spelling = {"language": voice.language, "respell": voice.habits.respell}
    teach = "" if tag in CLEANED else TEACH.format(**spelling)
    write_atomic(folder / "README.md", README.format(teach=teach, tag=tag))
    if (release / LICENCE_FILE).is_file():
        shutil.copyfile(release / LICENCE_FILE, folder / LICENCE_FILE)
    return folder


XTTS_V2 = Release(
    name="XTTS-v2",
    repository="coqui/XTTS-v2",
    revision="6c2b0d75eae4b7047358e3b6bd9325f857d43f77",
    weights=WEIGHTS_FILE,
    files=(WEIGHTS_FILE, CONFIG_FILE, VOCABULARY_FILE, DVAE_FILE, MEL_STATS_FILE),
    optional=(LICENCE_FILE,),
    licence="CPML",
    terms="is an XTTS-v2, or made from one. It is under the Coqui Public Model License: neither "
    "the model, nor what is made from it, nor its speech may be used commercially",
    condition="neither the model nor its speech may be sold",
    on_the_hub=("coqui-public-model-license", "https://coqui.ai/cpml"),
    defaults=COQUI_DEFAULTS,
    sizes=lambda: load_preset("xtts_v2")["model"],
    frame_rate=22050 / 1024,
    is_in=is_xtts,
    load=load_base,
    export=export_for_coqui,
    export_folder=EXPORT_FOLDER,
)
