"""What a run begins with where it begins with a released XTTS-v2, and the licence of that.

Its codec is made of the release's own sound, its references are heard as it hears them, and its
vocabulary goes with the run.
"""

import dataclasses
import os
from pathlib import Path

from kit.audio.codec import Codec
from kit.base.errors import KitError
from kit.model.gpt import SpeechGPT
from kit.model.warm_start import model_settings
from kit.releases.xtts_v2.codec import xtts_codec
from kit.releases.xtts_v2.model import (
    CONFIG_FILE,
    DVAE_FILE,
    VOCABULARY_FILE,
    WEIGHTS_FILES,
    load_xtts,
)

LICENCE = "CPML"
# Of a run's model: how a release was trained, which a run is free to change and had better not.
TRAINED_WITH = ("text_stop_input", "stop_targets", "text_weight", "dropout", "text_dropout")
# How its makers fine-tune it: a preset's rates are those of a model that knows nothing yet.
FINE_TUNING = {
    "train": {"optimizer": "adamw", "lr": 5e-6, "weight_decay": 0.01, "betas": [0.9, 0.96]}
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beginning:
    """What a run keeps of the voice that it begins with."""

    model: SpeechGPT
    codec: Codec
    tokenizer: bytes  # its file
    sections: dict  # of settings with which a run makes what this voice understands
    record: dict  # for the run's report: where it came from
    # Of settings that suit it, where a person has set none.
    defaults: dict = dataclasses.field(default_factory=dict)


def release_weights(folder: Path) -> str:
    """The name of the weights of an XTTS in `folder`; "" where there is none."""
    if not (folder / VOCABULARY_FILE).is_file():
        return ""
    return next((name for name in WEIGHTS_FILES if (folder / name).is_file()), "")


def beginning_of_release(folder: Path, weights: str, licence: str) -> Beginning:
    """What the XTTS-v2 in `folder` gives a run; `licence` says that its licence is accepted.

    Raises KitError where it is not, or where the DVAE is missing, without which no recording
    becomes codes; KitError, KitError, DamagedFileError and KitError for damaged files.
    """
    require_licence(folder, licence)
    xtts = load_xtts(folder / weights)
    if not xtts.dvae:
        raise KitError(
            f"{folder} has no {DVAE_FILE}, which makes codes of recordings: copy it there from "
            "where the model was published."
        )
    codec = xtts_codec(xtts.sound, xtts.dvae, xtts.config)
    model = model_settings(xtts.model.config)
    for name in TRAINED_WITH:
        model[name] = getattr(xtts.model.config, name)
    return Beginning(
        model=xtts.model,
        codec=codec,
        tokenizer=xtts.vocabulary.data,
        sections={
            "model": model,
            "codec": dataclasses.asdict(codec.config),
            "front_end": dataclasses.asdict(codec.reference_mel.config),
            "text": {"phonemes": ""},
        },
        record={
            "licence": f"{LICENCE}, accepted: neither the model nor its speech may be sold",
            **dataclasses.asdict(xtts.source),
            "notes": list(xtts.notes),
        },
        defaults=FINE_TUNING,
    )


def require_licence(folder: Path | str, licence: str) -> None:
    """Raise KitError unless `licence`, or KIT_LICENCE, names the one that a release is under."""
    licence = licence or os.environ.get("KIT_LICENCE", "")
    if licence == LICENCE:
        return
    given = f", not {licence!r}" if licence else ""
    raise KitError(
        f"{folder} holds an XTTS-v2 ({CONFIG_FILE}, {VOCABULARY_FILE}). It is under the Coqui "
        "Public Model License: neither the model, nor what is made from it, nor its speech may be "
        "used commercially. Read the licence where the model was published; to accept it, give "
        f'`licence="{LICENCE}"` (--licence {LICENCE}){given}.'
    )
