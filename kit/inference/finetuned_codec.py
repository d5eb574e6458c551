"""The codec of a trained voice: its own, or one that has learnt what the model's states mean.

`sound.safetensors` in a run's folder is the run's codec, its decoder trained further on the states
of the run's own weights; of any other weights it knows nothing, so their marks are noted in it.
"""

import dataclasses
import warnings
from pathlib import Path

import safetensors

from kit.audio.codec import Codec, load_codec
from kit.base.errors import KitError
from kit.base.notes import Note
from kit.base.tensor_file import save_module, saved_header, tensors_sha256

SOUND = "sound.safetensors"
CODEC = "codec.safetensors"
STALE = (
    f"sound of codes alone, for {SOUND} was made with other weights than these: `sound()` of "
    "notebook 02_train makes it anew"
)


def save_finetuned_codec(codec: Codec, folder: Path, weights: list[Path]) -> None:
    """Leave `codec`, trained on the states of the models in `weights`, in a run's `folder`."""
    marks = [tensors_sha256(path) for path in weights]
    config = dataclasses.asdict(codec.config)
    save_module(folder / SOUND, codec, config=config, states_of=marks)


def codec_matches_weights(folder: Path, weights: Path) -> bool:
    """Whether `folder` has a sound made with the states of the model in `weights`."""
    try:
        marks = saved_header(folder / SOUND)["states_of"]
    except (OSError, KeyError, ValueError, TypeError, safetensors.SafetensorError):
        return False  # where it is damaged, the codec's own sound serves
    return tensors_sha256(weights) in marks


def load_finetuned_codec(folder: Path, weights: list[Path]) -> Codec | None:
    """The sound that knows the states of all `weights`; None where there is none, or a damaged."""
    if not all(codec_matches_weights(folder, path) for path in weights):
        return None
    try:
        return load_codec(folder / SOUND)
    except KitError:
        warnings.warn(
            f"{folder / SOUND} is damaged: it is made again.", category=Note, stacklevel=2
        )
        return None


def load_voice_codec(folder: Path, weights: Path) -> tuple[Codec, str]:
    """The codec that a voice with the model in `weights` speaks with, and a remark on it, if any.

    Raises KitError where it is missing or damaged.
    """
    if codec_matches_weights(folder, weights):
        return load_codec(folder / SOUND, "delete it, or run `sound()` of 02_train again."), ""
    return load_codec(folder / CODEC), STALE if (folder / SOUND).exists() else ""
