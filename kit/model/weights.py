"""Model files: weights with their configuration, and adapters without their base.

An adapter file of a few MB holds the adapters, the rows of embeddings and heads that the base lacks
(or full tables, if those were trained), and the SHA-256 of the base's tensors.
"""

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from kit.base.errors import DamagedFileError, KitError
from kit.base.files import write_atomic
from kit.base.formatting import join_names, shorten
from kit.base.schema import checked
from kit.base.tensor_file import (
    SHA256,
    checksum,
    contents,
    describe_mismatch,
    file_bytes,
    load_module,
    save_module,
    saved_header,
)
from kit.model.gpt import SpeechGPT
from kit.model.lora import TABLES, LoRAConfig, add_adapters, is_adapter, merged
from kit.model.sequence import GPTConfig
from kit.model.warm_start import require_compatible, warm_start_model

# Written at the end of training: the last weights and their EMA.
WEIGHTS = {"raw": "model-raw.safetensors", "ema": "model-ema.safetensors"}
ADAPTERS = {"raw": "adapters-raw.safetensors", "ema": "adapters-ema.safetensors"}

ADAPTER_HEADER = {
    "config": GPTConfig,
    "lora": LoRAConfig,
    "tables": (dict, 0, 100, (int, 0, 2**20)),  # name -> first row that is stored
    "base_sha256": SHA256,
}


def save_model(
    model: SpeechGPT,
    path: Path,
    dtype: torch.dtype = torch.float32,
    trained_with: dict[str, str] | None = None,
) -> None:
    """Write weights (as `dtype`) and configuration to one file, atomically.

    `trained_with` maps each file that defines the model's ids (tokenizer, codec) to its SHA-256.
    """
    config = dataclasses.asdict(model.config)
    save_module(path, model, dtype, config=config, trained_with=trained_with or {})


def trained_with(path: Path) -> dict[str, str]:
    """Return the `trained_with` that `save_model` stored at `path`; {} for older files."""
    files = saved_header(path).get("trained_with")
    return files if isinstance(files, dict) else {}


def saved_config(path: Path) -> GPTConfig:
    """Return the configuration of the model saved at `path`, without its weights."""
    return config_in(saved_header(path))


def config_in(header: dict) -> GPTConfig:
    """Return the configuration in a model file's `header`. Raises KitError if there is none."""
    return checked(header.get("config"), GPTConfig, "its config")


def load_model(path: Path) -> SpeechGPT:
    """Return the model saved at `path`, in fp32 and eval mode. Raises DamagedFileError."""

    def make(header: dict) -> SpeechGPT:
        return SpeechGPT(config_in(header))

    return load_module(path, make, DamagedFileError, "run notebook 02_train.")


def save_adapters(
    model: SpeechGPT, path: Path, lora: LoRAConfig, tables: dict[str, int], base_sha256: str
) -> None:
    """Write the adapters of `model`, and each of `tables` from the given row on, in fp32.

    `base_sha256` is the `checksum` of the base model's tensors.
    """
    header = {
        "config": dataclasses.asdict(model.config),
        "lora": dataclasses.asdict(lora),
        "tables": tables,
        "base_sha256": base_sha256,
    }
    tensors = adapter_tensors(model, tables)
    write_atomic(path, file_bytes({n: t.cpu().contiguous() for n, t in tensors.items()}, header))


def adapter_tensors(model: SpeechGPT, tables: dict[str, int]) -> dict[str, Tensor]:
    """Return the adapters of `model`, and each of `tables` from the given row on."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        if is_adapter(name):
            tensors[name] = tensor
        elif name in tables:
            tensors[name] = tensor[tables[name] :]
    return tensors


def load_adapters(path: Path, base: SpeechGPT) -> SpeechGPT:
    """Return `base` with the adapters at `path` merged, in eval mode; `base` is not changed.

    Raises DamagedFileError for a missing or damaged file and for another base.
    """
    path = Path(path)
    if not path.is_file():
        raise DamagedFileError(f"There is no {path}: a run with `finetune.method=lora` writes one.")
    try:
        tensors, header = contents(path)
        header = checked(header, ADAPTER_HEADER, "its header")
    except (OSError, KitError) as error:
        raise DamagedFileError(damaged_adapters(path, error)) from error
    config = header["config"]
    tables = header["tables"]
    base_sha256 = checksum(base.state_dict())
    if base_sha256 != header["base_sha256"]:
        raise DamagedFileError(
            f"{path} was trained on another base model (SHA-256 of its tensors "
            f"{shorten(header['base_sha256'], 12)}, of this one {shorten(base_sha256, 12)}): load "
            "the voice that the run started from."
        )
    require_compatible(config, base.config)
    unknown = [name for name in tables if name not in TABLES]
    if unknown:
        reason = f"no model has the tables {join_names(unknown)}"
        raise DamagedFileError(damaged_adapters(path, reason))
    with torch.device("meta"):
        expected = SpeechGPT(config)
        add_adapters(expected, header["lora"])
    mismatch = describe_mismatch(tensors, adapter_tensors(expected, tables))
    if mismatch:
        raise DamagedFileError(damaged_adapters(path, mismatch))
    model = warm_start_model(config, base, {})
    add_adapters(model, header["lora"])
    with torch.no_grad():
        for name, tensor in adapter_tensors(model, tables).items():
            tensor.copy_(tensors[name])
    return merged(model)


def damaged_adapters(path: Path, reason: object) -> str:
    return (
        f"{path} is damaged or not an adapter file ({shorten(reason, 400)}): restore a copy, or "
        "train again."
    )
