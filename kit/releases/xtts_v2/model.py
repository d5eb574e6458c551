"""A released XTTS-v2, read into the kit's own model (Casanova et al. 2024).

A release is a folder: `model.pth`, `config.json`, `vocab.json`, and for training `dvae.pth` and
`mel_stats.pth`. What coqui-tts's trainer leaves is read as well, and what xtts_export.py writes.
Nothing that is read is run; every tensor is accounted for. Knows names, ids and files; nothing of
spelling, of audio or of training.
"""

import dataclasses
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from kit.base.errors import KitError
from kit.base.files import file_digest
from kit.base.formatting import join_names, shorten
from kit.base.tensor_file import checksum, describe_mismatch, is_finite
from kit.base.torch_file import read_torch_file, require_backed
from kit.model.gpt import SpeechGPT
from kit.model.sequence import GPTConfig
from kit.releases.indextts2 import is_indextts2, told_indextts2
from kit.releases.xtts_v2.config import (
    arguments,
    disagreements,
    gpt_config,
    jsonable,
    read_xtts_config,
    told_sizes,
)
from kit.releases.xtts_v2.names import (
    BATCHES,
    DVAE,
    GPT,
    LEFT_OUT,
    MEL_STATS,
    TRAINER,
    Shape,
    empty_model,
    from_released,
    gpt_shapes,
    sound_shapes,
    sound_sizes,
    todays_name,
)
from kit.releases.xtts_v2.vocabulary import Vocabulary, load_vocabulary

WEIGHTS_FILES = ("model.pth", "model.safetensors")
CONFIG_FILE = "config.json"
VOCABULARY_FILE = "vocab.json"
DVAE_FILE = "dvae.pth"
MEL_STATS_FILE = "mel_stats.pth"

# Classes whose objects a release or a trainer's file may hold, by every name they have had.
CLASSES = (
    "TTS.config.shared_configs.BaseDatasetConfig",
    "TTS.tts.configs.xtts_config.XttsArgs",
    "TTS.tts.configs.xtts_config.XttsAudioConfig",
    "TTS.tts.configs.xtts_config.XttsConfig",
    "TTS.tts.models.xtts.XttsArgs",
    "TTS.tts.models.xtts.XttsAudioConfig",
    "TTS.tts.layers.xtts.trainer.gpt_trainer.GPTArgs",
    "TTS.tts.layers.xtts.trainer.gpt_trainer.GPTTrainerConfig",
)

# By the SHA-256 of its model.pth as it was published. coqui-tts writes that file anew when it first
# opens it, and its hash is another then; the tensors' hash stays.
RELEASES = {
    "c7ea20001c6a0a841c77e252d8409f6a74fb423e79b3206a0771ba5989776187": (
        "coqui/XTTS-v2 at revision 6c2b0d75eae4b7047358e3b6bd9325f857d43f77"
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where an XTTS was read from."""

    path: str  # of the weights
    sha256: str  # of that file
    tensors_sha256: str  # of names, types, shapes and values of what was read
    release: str = ""  # which published one it is, where it is one to the byte


@dataclasses.dataclass(frozen=True, kw_only=True)
class XTTS:
    """An XTTS-v2: its GPT as the kit's model, and all else that its files hold, as it was there.

    To put a fine-tuned model or a grown vocabulary in: `dataclasses.replace(xtts, model=...)`.
    """

    model: SpeechGPT  # fp32, eval mode
    config: dict  # config.json; `save_xtts` brings the GPT's sizes in it up to date
    vocabulary: Vocabulary
    sound: dict[str, Tensor]  # vocoder, speaker encoder, mel_stats, by the release's names
    dvae: dict[str, Tensor]  # of dvae.pth or a trainer's file; empty where neither is
    source: Provenance
    notes: tuple[str, ...] = ()  # what was left out, filled in or found odd


def load_xtts(path: Path, config: Path | None = None, vocabulary: Path | None = None) -> XTTS:
    """The XTTS-v2 in the folder `path`, or with the weights in the file `path`.

    `config` and `vocabulary` are the files to take in place of the config.json and vocab.json
    beside the weights: a trainer's run has no vocabulary. Raises KitError (KitError and
    DamagedFileError are others) for what is missing, damaged, another version or does not fit.
    """
    file = weights_file(Path(path))
    vocabulary = Path(vocabulary or file.parent / VOCABULARY_FILE)
    tensors, carried, notes = read_weights(file)
    settings = settings_of(file, config, carried)
    args = arguments(settings, file)
    words = load_vocabulary(vocabulary)
    gpt = gpt_config(args, words, file)
    notes += disagreements(args, words)
    dvae = take_dvae(tensors) or read_dvae(file.parent)
    notes += fill_mel_stats(tensors, file.parent)
    require_one_model(tensors, words, vocabulary, file)
    require_all(tensors, gpt, args, file)
    digest = file_digest(file)
    source = Provenance(
        path=str(file),
        sha256=digest,
        tensors_sha256=checksum(tensors),
        release=RELEASES.get(digest, ""),
    )
    return XTTS(
        model=filled(gpt, tensors, file),
        config=settings,
        vocabulary=words,
        sound={name: t.clone() for name, t in tensors.items() if not name.startswith(GPT)},
        dvae=dvae,
        source=source,
        notes=tuple(notes),
    )


def weights_file(path: Path) -> Path:
    """The file of weights that `path` means: itself, or the one of a release in the folder."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise KitError(f"There is no {path}: name the folder of a release, or its model.pth.")
    for name in WEIGHTS_FILES:
        if (path / name).is_file():
            return path / name
    others = sorted(p.name for p in path.glob("*.pth"))
    hint = f" It has {', '.join(others)}: name the one you mean in full." if others else ""
    raise KitError(f"{path} has no {' and no '.join(WEIGHTS_FILES)}.{hint}")


def read_weights(file: Path) -> tuple[dict[str, Tensor], dict | None, list[str]]:
    """Tensors by the release's names, the configuration that came with them, and notes."""
    if file.suffix == ".safetensors":
        tensors = read_safetensors(file)
        carried = None
    else:
        found = read_torch_file(file, CLASSES)
        tensors, carried = unwrapped(found, file)
    if is_indextts2(map(str, tensors)):
        raise KitError(told_indextts2(file))
    kept = {}
    left_out = 0
    for name, value in tensors.items():
        name = str(name).removeprefix(TRAINER)
        if LEFT_OUT.match(name):
            left_out += 1
            continue
        if name in kept:
            raise KitError(f"{file} holds {name} twice, with and without `{TRAINER}` before it.")
        try:
            kept[name] = require_backed(name, value)
        except ValueError as why:
            raise KitError(f"{file} is damaged: {why}. Download it again.") from why
    notes = [f"{left_out} tensors that only repeat others were left out"] if left_out else []
    return kept, carried, notes


def read_safetensors(file: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file, checked where it carries a hash of them."""
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            told = (opened.metadata() or {}).get("tensors_sha256")
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}
    except (safetensors.SafetensorError, OSError, ValueError) as why:
        raise KitError(f"{file} is damaged ({shorten(why)}): copy it again.") from why
    if told and told != checksum(tensors):
        raise KitError(f"{file} is damaged: its tensors are not those it was written with.")
    return tensors


def unwrapped(found: object, file: Path) -> tuple[dict, dict | None]:
    """The tensors and the configuration in what a .pth file held."""
    if isinstance(found, dict) and isinstance(found.get("model"), dict):
        carried = found.get("config")
        return found["model"], carried if isinstance(carried, dict) else None
    if isinstance(found, dict) and found and all(isinstance(v, Tensor) for v in found.values()):
        return found, None
    held = f"a dict of {shorten(sorted(map(str, found)))}" if isinstance(found, dict) else "no dict"
    raise KitError(
        f"{file} is no XTTS checkpoint: it holds {held}, where `model` and its tensors should be. "
        "Name the model.pth of a release, or a checkpoint of its trainer."
    )


def settings_of(file: Path, config: Path | None, carried: dict | None) -> dict:
    """The configuration at `config`, or beside `file`, or else what `file` itself carries."""
    beside = file.parent / CONFIG_FILE
    if config is not None or beside.is_file():
        return read_xtts_config(config or beside)
    if carried is None:
        raise KitError(
            f"There is no {beside}, and {file} carries no configuration: copy {CONFIG_FILE} there "
            "from where the model was published."
        )
    return jsonable(carried, file)


def take_dvae(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The DVAE that a trainer's file holds beside the rest, out of `tensors`."""
    names = [name for name in tensors if name.startswith(DVAE)]
    return {name.removeprefix(DVAE): tensors.pop(name).clone() for name in names}


def read_dvae(folder: Path) -> dict[str, Tensor]:
    """The tensors of dvae.pth in `folder`; none where there is no such file."""
    file = folder / DVAE_FILE
    if not file.is_file():
        return {}
    found = read_torch_file(file)
    if not isinstance(found, dict):
        raise KitError(f"{file} holds {type(found).__name__}, not tensors by name.")
    return {str(name): read_tensor(str(name), tensor, file) for name, tensor in found.items()}


def fill_mel_stats(tensors: dict[str, Tensor], folder: Path) -> list[str]:
    """Take `mel_stats` from mel_stats.pth where the weights have none; notes on what was found."""
    file = folder / MEL_STATS_FILE
    if not file.is_file():
        return []
    stats = read_tensor(MEL_STATS, read_torch_file(file), file)
    own = tensors.get(MEL_STATS)
    if own is None:
        tensors[MEL_STATS] = stats
        return [f"{MEL_STATS} was taken from {MEL_STATS_FILE}"]
    if own.shape != stats.shape or not torch.allclose(own.float(), stats.float()):
        return [f"{MEL_STATS_FILE} differs from the weights' own {MEL_STATS}: that is kept"]
    return []


def read_tensor(name: str, value: object, file: Path) -> Tensor:
    """`value` in memory of its own. Raises KitError where it is no sound tensor."""
    try:
        tensor = require_backed(name, value).clone()
    except ValueError as why:
        raise KitError(f"{file} is of another kind: {why}. Download it again.") from why
    require_sound({name: tensor}, file)
    return tensor


def require_one_model(
    tensors: dict[str, Tensor], vocabulary: Vocabulary, where: Path, file: Path
) -> None:
    """Raise KitError where vocabulary and embedding are of different models."""
    rows = tensors.get(f"{GPT}text_embedding.weight")
    if rows is not None and rows.ndim == 2 and len(rows) != vocabulary.size:
        raise KitError(
            f"{where} has ids up to {vocabulary.size - 1}, so the text embedding must have "
            f"{vocabulary.size} rows; that of {file} has {len(rows)}. They are of different "
            "models: take both from one folder."
        )


def require_all(tensors: dict[str, Tensor], gpt: GPTConfig, args: dict, file: Path) -> None:
    """Raise KitError, naming them, for tensors that are missing, misshapen or unknown."""
    found = {todays_name(name): tensor for name, tensor in tensors.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    wanted = gpt_shapes(gpt)
    wanted.update(sound_shapes(sound_sizes(shapes, told_sizes(args))))
    faults = describe_mismatch(found, blank(wanted))
    twice = join_names([name for name in tensors if name != todays_name(name) in tensors])
    if twice:
        faults = "; ".join(filter(None, (faults, f"twice, by an older name: {twice}")))
    if faults:
        raise KitError(
            f"{file} does not hold the XTTS-v2 its configuration describes; {faults}. "
            "Take weights, configuration and vocabulary from one place."
        )


def blank(shapes: dict[str, Shape]) -> dict[str, Tensor]:
    """Tensors of `shapes` without any numbers; only batches are counted in whole ones."""
    with torch.device("meta"):
        return {
            name: torch.empty(shape, dtype=torch.long if name.endswith(BATCHES) else torch.float)
            for name, shape in shapes.items()
        }


def filled(gpt: GPTConfig, tensors: dict[str, Tensor], file: Path) -> SpeechGPT:
    """The model of `gpt` with the weights in `tensors`, in fp32 and eval mode.

    Raises KitError where one is not finite; those that are no part of it are looked at as well.
    """
    weights = from_released(tensors, gpt)
    require_sound(weights, file)
    require_sound({n: t for n, t in tensors.items() if not n.startswith(GPT)}, file)
    # Copies: what is still mapped from a file keeps Windows from writing that file again.
    whole = torch.contiguous_format
    own = {n: w.to(torch.float32, copy=True, memory_format=whole) for n, w in weights.items()}
    model = empty_model(gpt)
    model.load_state_dict(own, assign=True)
    return model.eval()


def require_sound(tensors: dict[str, Tensor], file: Path) -> None:
    """Raise KitError where a tensor, by the kit's name if it has one, is not finite."""
    for name, tensor in tensors.items():
        if not is_finite(name, tensor):
            raise KitError(f"{file} is damaged: {name} is not finite. Download it again.")
