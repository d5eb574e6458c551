"""Reads a released XTTS-v2 (Casanova et al. 2024) into the kit's own model, and writes one.

A release is a folder: `model.pth`, `config.json`, `vocab.json`, and for training `dvae.pth` and
`mel_stats.pth`. Checkpoints of coqui-tts's trainer are read as well. No code in the files is run,
and every tensor must be known.
"""

import copy
import dataclasses
import errno
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kit.base import files
from kit.base.errors import KitError
from kit.base.formatting import shorten
from kit.base.tensor_file import (
    checksum,
    describe_mismatch,
    fill_module,
    is_finite,
    require_finite,
)
from kit.base.torch_file import read_torch_file, require_backed
from kit.extras.xtts_v2.tensor_names import (
    DVAE,
    MEL_STATS,
    SKIPPED,
    SOUND,
    TRAINER,
    WRAPPERS,
    empty_model,
    from_released,
    released_name,
    to_released,
)
from kit.extras.xtts_v2.tokenizer import XTTSTokenizer
from kit.model.gpt import SpeechGPT
from kit.settings import GPTConfig

WEIGHTS_FILE = "model.pth"
CONFIG_FILE = "config.json"
VOCABULARY_FILE = "vocab.json"
DVAE_FILE = "dvae.pth"
MEL_STATS_FILE = "mel_stats.pth"

# Classes that a release or a trainer's checkpoint may contain, under every name they have had.
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

# {SHA-256 of a published model.pth: which release it is}. coqui-tts rewrites the file when it first
# opens it; its hash then differs, that of its tensors does not.
RELEASES = {
    "c7ea20001c6a0a841c77e252d8409f6a74fb423e79b3206a0771ba5989776187": (
        "coqui/XTTS-v2 at revision 6c2b0d75eae4b7047358e3b6bd9325f857d43f77"
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class XTTS:
    """An XTTS-v2: its GPT as the kit's model, and everything else in its files unchanged.

    `dataclasses.replace(xtts, model=...)` puts in a fine-tuned model or a grown vocabulary.
    """

    model: SpeechGPT  # fp32, eval mode
    config: dict  # config.json; `save_xtts` updates the sizes of the GPT in it
    vocabulary: XTTSTokenizer
    sound: dict[str, Tensor]  # vocoder, speaker encoder, mel_stats, by the release's names
    dvae: dict[str, Tensor]  # of dvae.pth or a trainer's file; may be empty
    source: dict  # as `provenance` says


def load_xtts(path: Path) -> XTTS:
    """Read the XTTS-v2 in the folder `path`, or with the weights in the file `path`.

    Raises KitError or DamagedFileError for files that are missing, damaged, of another version or
    do not match. Whether the tensors of `sound` do, `xtts_codec` says.
    """
    file = path if path.is_file() else path / WEIGHTS_FILE
    tensors, stored_config = _read_weights(file)
    settings = _read_settings(file, stored_config)
    vocabulary = XTTSTokenizer(file.parent / VOCABULARY_FILE, "en")  # of any language
    gpt = gpt_config(settings, vocabulary, file)
    inside = [name for name in tensors if name.startswith(DVAE)]
    dvae = {name.removeprefix(DVAE): tensors.pop(name).clone() for name in inside}
    dvae = dvae or _read_extra(file.parent / DVAE_FILE)
    if MEL_STATS not in tensors:
        tensors |= _read_extra(file.parent / MEL_STATS_FILE)
    sound = {name: tensors[name].clone() for name in tensors if name.startswith(SOUND)}
    require_finite(sound, file)
    others = {name: tensor for name, tensor in tensors.items() if name not in sound}
    model = build_model(others, gpt, file, "XTTS-v2")
    return XTTS(
        model=model,
        config=settings,
        vocabulary=vocabulary,
        sound=sound,
        dvae=dvae,
        source=provenance(file, tensors),
    )


def build_model(
    tensors: dict[str, Tensor],
    config: GPTConfig,
    file: Path,
    release: str,
    rename: Callable = released_name,
) -> SpeechGPT:
    """Return the model of `config` with the `tensors` of a release, in eval mode.

    Raises KitError, naming them, for tensors that are missing, misshapen, unknown or not finite.
    """
    empty = empty_model(config)
    problems = describe_mismatch(tensors, to_released(empty.state_dict(), rename))
    if problems:
        raise KitError(
            f"{file} does not hold the {release} that its configuration describes; {problems}. "
            "Take weights, configuration and vocabulary from one place."
        )
    return fill_module(empty, from_released(tensors, config, rename), file)


def provenance(file: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Where an XTTS was read from; `release` is the published one with this very file, or ""."""
    sha256 = files.file_digest(file)
    return {
        "path": str(file),
        "sha256": sha256,
        "tensors_sha256": checksum(tensors),  # of names, types, shapes and values
        "release": RELEASES.get(sha256, ""),
    }


def _read_weights(file: Path) -> tuple[dict[str, Tensor], dict | None]:
    """Return tensors by the release's names, and the configuration in the file if any."""
    content = read_torch_file(file, CLASSES)
    config = None
    stored = content
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        stored = content["model"]
        config = content.get("config")
    if not isinstance(stored, dict) or not all(isinstance(t, Tensor) for t in stored.values()):
        kind = shorten(sorted(map(str, content))) if isinstance(content, dict) else "no dict"
        raise KitError(
            f"{file} is not an XTTS checkpoint: it holds {kind}, where `model` and its tensors "
            "should be. Name the model.pth of a release, or a checkpoint of its trainer."
        )
    tensors = {}
    for name, value in stored.items():
        name = WRAPPERS.sub("", str(name)).removeprefix(TRAINER)
        if not SKIPPED.match(name):
            tensors[name] = backed_tensor(name, value, file)
    return tensors, config if isinstance(config, dict) else None


def backed_tensor(name: str, value: object, file: Path) -> Tensor:
    """Return `value` of the weights in `file` if it is a tensor with all its numbers; KitError."""
    try:
        return require_backed(name, value)
    except ValueError as error:
        raise KitError(f"{file} is damaged: {error}. Download it again.") from error


def _read_settings(file: Path, stored_config: dict | None) -> dict:
    """Return the configuration beside `file`, else the one in `file`."""
    beside = file.parent / CONFIG_FILE
    try:
        if beside.is_file() or stored_config is None:
            return json.loads(beside.read_bytes())
        return json.loads(json.dumps(stored_config))  # as it will be saved
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise KitError(
            f"The configuration of {file} cannot be read ({shorten(error)}): copy the release's "
            f"{CONFIG_FILE} to {beside}."
        ) from error


def _read_extra(file: Path) -> dict[str, Tensor]:
    """Return the tensors of dvae.pth, or the one of mel_stats.pth; {} if there is no such file."""
    if not file.is_file():
        return {}
    content = read_torch_file(file)
    if isinstance(content, Tensor):
        content = {file.stem: content}
    if not isinstance(content, dict):
        raise KitError(f"{file} holds {type(content).__name__}, not tensors: download it again.")
    tensors = {str(name): backed_tensor(str(name), t, file).clone() for name, t in content.items()}
    require_finite(tensors, file)
    return tensors


# --- writing --------------------------------------------------------------------------------


def save_xtts(xtts: XTTS, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write `xtts` to `folder`, for coqui-tts's `Xtts.load_checkpoint` and for `load_xtts`.

    Files: model.pth with the configuration, config.json, vocab.json byte for byte, mel_stats.pth,
    and dvae.pth if there was one; all appear at once. `dtype` is that of the GPT's weights. Raises
    KitError for weights that overflow it, and DiskError if there is no room.
    """
    if folder.resolve() == Path(xtts.source["path"]).parent.resolve():
        raise KitError(f"{folder} holds what this model was read from: name another folder.")
    settings = copy.deepcopy(xtts.config)
    settings["model_args"].update(updated_config(xtts.model.config, xtts.vocabulary))
    weights = to_released(finite_weights(xtts.model, dtype))
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()} | xtts.sound
    files.make_folder(folder)
    files.require_disk(folder, sum(t.nbytes for t in (*tensors.values(), *xtts.dvae.values())))
    replaced = (MEL_STATS_FILE, DVAE_FILE, WEIGHTS_FILE)
    with files.atomic_folder(folder, replaced) as new:
        write_torch(new / WEIGHTS_FILE, {"config": settings, "model": tensors})
        write_torch(new / MEL_STATS_FILE, tensors[MEL_STATS])
        if xtts.dvae:
            write_torch(new / DVAE_FILE, xtts.dvae)
        files.write_atomic(new / CONFIG_FILE, json.dumps(settings, indent=4))
        files.write_atomic(new / VOCABULARY_FILE, xtts.vocabulary.data)
    return folder


def finite_weights(model: SpeechGPT, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights of `model` as `dtype`, on the CPU. Raises KitError if one overflows."""
    weights = {n: w.detach().to("cpu", dtype) for n, w in model.state_dict().items()}
    for name, weight in weights.items():
        if not is_finite(name, weight):
            raise KitError(f"{name} is not finite as {dtype}: nothing is written. Save as fp32.")
    return weights


def write_torch(path: Path, value: object) -> None:
    """Write `value` as torch.save does, atomically. Raises DiskError when there is no room."""
    with files.atomic_path(path) as temporary:
        try:
            with open(temporary, "wb") as file:  # given a path, torch stores its name
                torch.save(value, file)
        except RuntimeError as error:  # how torch reports a full disk
            raise OSError(errno.EIO, str(error)) from error


# --- config.json --------------------------------------------------------------------------------

# The GPT's sizes are in `model_args`, text ids in the vocabulary. These are constant in coqui-tts,
# whatever a configuration says.
FIXED = {
    "latents": 32,
    "cond_blocks": 6,
    "perceiver_layers": 2,
    "perceiver_heads": 8,
    "perceiver_head_width": 64,
    "n_mels": 80,
}
DROPOUT = 0.1  # of GPT-2: embedding, attention, residual
# {field of GPTConfig: name in `model_args`}
SIZES = {
    "layers": "gpt_layers",
    "width": "gpt_n_model_channels",
    "heads": "gpt_n_heads",
    "code_vocab": "gpt_num_audio_tokens",
    "start_code_id": "gpt_start_audio_token",
    "stop_code_id": "gpt_stop_audio_token",
    "max_text": "gpt_max_text_tokens",
    "max_code": "gpt_max_audio_tokens",
}
# Positions that coqui-tts adds to those of its configuration.
EXTRA_POSITIONS = {"max_text": 2, "max_code": 3}


def gpt_config(settings: dict, vocabulary: XTTSTokenizer, file: Path) -> GPTConfig:
    """Return the GPT that a configuration describes. Raises KitError if it is not of an XTTS-v2."""
    try:
        args = settings["model_args"]
        sizes = {field: int(args[name]) for field, name in SIZES.items()}
        for field, more in EXTRA_POSITIONS.items():
            sizes[field] += more
        return GPTConfig(
            text_vocab=vocabulary.vocab_size,
            start_text_id=vocabulary.start,
            stop_text_id=vocabulary.stop,
            text_stop_input=False,
            dropout=DROPOUT,
            **sizes,
            **FIXED,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise KitError(
            f"The configuration of {file} describes no XTTS-v2 ({shorten(error)}): copy "
            "config.json from the same place as the weights."
        ) from error


def updated_config(gpt: GPTConfig, vocabulary: XTTSTokenizer) -> dict:
    """Return the `model_args` of a GPT that was trained with `vocabulary`."""
    size, start, stop = vocabulary.vocab_size, vocabulary.start, vocabulary.stop
    assert (gpt.text_vocab, gpt.start_text, gpt.stop_text) == (size, start, stop)
    args = {
        "gpt_number_text_tokens": size,
        "gpt_start_text_token": start,
        "gpt_stop_text_token": stop,
        "gpt_use_perceiver_resampler": True,
    }
    for field, name in SIZES.items():
        args[name] = getattr(gpt, field.removesuffix("_id")) - EXTRA_POSITIONS.get(field, 0)
    return args
