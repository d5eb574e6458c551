"""An XTTS-v2 written as coqui-tts loads it: another folder of the same files it was read from."""

import errno
import json
from pathlib import Path

import torch
from torch import Tensor

from kit.base.errors import KitError
from kit.base.files import atomic_folder, atomic_path, make_folder, require_disk, write_atomic
from kit.base.tensor_file import checksum, is_finite, save_tensors
from kit.releases.xtts_v2.config import updated_settings
from kit.releases.xtts_v2.model import CONFIG_FILE, DVAE_FILE, MEL_STATS_FILE, VOCABULARY_FILE, XTTS
from kit.releases.xtts_v2.names import MEL_STATS, to_released


def save_xtts(xtts: XTTS, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write `xtts` to `folder`, for coqui-tts's `Xtts.load_checkpoint` and for `load_xtts`.

    model.pth with the configuration, the same tensors as plain model.safetensors, config.json,
    vocab.json byte for byte, mel_stats.pth, and dvae.pth where there was one. `dtype` is that of
    the GPT's weights. All of it moves into place together. Raises KitError for a model that
    coqui-tts could not build, and DiskError, with the cure, where there is no room.
    """
    folder = Path(folder)
    require_other_folder(xtts, folder)
    settings = updated_settings(xtts.config, xtts.model.config, xtts.vocabulary)
    tensors = released_tensors(xtts, dtype)
    make_folder(folder)
    sizes = [t.nbytes for t in tensors.values()]
    require_disk(folder, 2 * sum(sizes) + sum(t.nbytes for t in xtts.dvae.values()))
    marks = (MEL_STATS_FILE, DVAE_FILE, "model.safetensors", "model.pth")
    with atomic_folder(folder, marks) as new:
        write_torch(new / "model.pth", {"config": settings, "model": tensors})
        write_safetensors(new / "model.safetensors", tensors)
        write_torch(new / MEL_STATS_FILE, tensors[MEL_STATS])
        if xtts.dvae:
            write_torch(new / DVAE_FILE, xtts.dvae)
        write_atomic(new / CONFIG_FILE, json.dumps(settings, indent=4))
        xtts.vocabulary.save(new / VOCABULARY_FILE)
    return folder


def require_other_folder(xtts: XTTS, folder: Path) -> None:
    """Raise KitError where the files that `xtts` was read from would be overwritten."""
    if folder.exists() and not folder.is_dir():
        raise KitError(f"{folder} is a file: name a folder.")
    if folder.resolve() == Path(xtts.source.path).parent.resolve():
        raise KitError(f"{folder} holds what this model was read from: name another folder.")


def released_tensors(xtts: XTTS, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors of model.pth, each in memory of its own."""
    state = xtts.model.state_dict()
    stored = {name: weight.detach().to("cpu", dtype) for name, weight in state.items()}
    for name, weight in stored.items():
        if not is_finite(name, weight):
            raise KitError(f"{name} is not finite as {dtype}: nothing is written. Save as fp32.")
    tensors = {name: tensor.contiguous() for name, tensor in to_released(stored).items()}
    tensors.update(xtts.sound)
    return tensors


def write_torch(path: Path, value: object) -> None:
    """`torch.save` as a whole, always the same bytes for the same value."""
    with atomic_path(path) as temporary:
        try:
            with open(temporary, "wb") as file:  # a path would put its name into the archive
                torch.save(value, file)
        except RuntimeError as why:  # it tells a full disk in words of its own
            raise OSError(errno.EIO, str(why)) from why


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Tensors under their own names as a whole, with a hash of them."""
    about = {"tensors_sha256": checksum(tensors)}  # one entry: several come in any order
    with atomic_path(path) as temporary:
        save_tensors(tensors, temporary, about)
