"""Adapters alone, in a safetensors file of a few MB: with them and its base a voice is whole again.

The file holds the adapters, rows of embeddings and heads that the base has not got (or whole ones,
where they were trained), and the SHA-256 of the base's tensors: beside another base they would mean
nothing. Knows tensors and one model.
"""

import dataclasses
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from kit.base.config import build
from kit.base.errors import DamagedFileError
from kit.base.files import write_atomic
from kit.base.formatting import join_names, shorten
from kit.base.tensor_file import checksum, contents, describe_mismatch, file_bytes
from kit.model.gpt import SpeechGPT
from kit.model.lora import TABLES, LoRAConfig, add_adapters, is_adapter, merged
from kit.model.sequence import GPTConfig
from kit.model.warm_start import require_compatible, warm_start_model

# What a run leaves beside its weights: adapters of the last step, and their average.
ADAPTERS = {"raw": "adapters-raw.safetensors", "ema": "adapters-ema.safetensors"}

UNREADABLE = (
    safetensors.SafetensorError,
    OSError,
    KeyError,
    TypeError,
    ValueError,
    AttributeError,  # a header that holds no names
    RecursionError,
)


def save_adapters(
    model: SpeechGPT, path: Path, lora: LoRAConfig, tables: dict[str, int], base_sha256: str
) -> None:
    """Write `model`'s adapters, and of each of `tables` the rows from that number on, in fp32.

    `base_sha256` is the `checksum` of the tensors of the model that they were trained beside.
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
    """The adapters of `model`, and of each of `tables` the rows from that number on."""
    found = {}
    for name, tensor in model.state_dict().items():
        if is_adapter(name):
            found[name] = tensor
        elif name in tables:
            found[name] = tensor[tables[name] :]
    return found


def load_adapters(path: Path, base: SpeechGPT) -> SpeechGPT:
    """A plain model, in eval mode: `base` with the adapters at `path` merged; `base` stays.

    Raises DamagedFileError where the file is missing or damaged, or where it belongs to another
    base.
    """
    path = Path(path)
    if not path.is_file():
        raise DamagedFileError(f"There is no {path}: a run with `finetune.method=lora` leaves one.")
    try:
        tensors, header = contents(path)
        config = build(GPTConfig, header["config"])
        lora = build(LoRAConfig, header["lora"])
        tables = {str(name): int(rows) for name, rows in header["tables"].items()}
        wanted_sha256 = str(header["base_sha256"])
    except UNREADABLE as error:
        raise DamagedFileError(damage(path, error)) from error
    found_sha256 = checksum(base.state_dict())
    if found_sha256 != wanted_sha256:
        raise DamagedFileError(
            f"{path} was trained beside another base (its tensors' SHA-256 is "
            f"{shorten(wanted_sha256, 12)}, here {shorten(found_sha256, 12)}): load the voice with "
            "which that run began."
        )
    require_compatible(config, base.config)
    require_adapters(path, tensors, config, lora, tables)
    model = warm_start_model(config, base, {})
    add_adapters(model, lora)
    with torch.no_grad():
        for name, own in adapter_tensors(model, tables).items():
            own.copy_(tensors[name])
    return merged(model)


def require_adapters(
    path: Path,
    tensors: dict[str, Tensor],
    config: GPTConfig,
    lora: LoRAConfig,
    tables: dict[str, int],
) -> None:
    """Raise DamagedFileError unless `tensors` are what a model of these settings has to be
    given.
    """
    unknown = [name for name in tables if name not in TABLES]
    if unknown:
        raise DamagedFileError(damage(path, f"no model has the tables {join_names(unknown)}"))
    with torch.device("meta"):
        model = SpeechGPT(config)
        add_adapters(model, lora)
    faults = describe_mismatch(tensors, adapter_tensors(model, tables))
    if faults:
        raise DamagedFileError(damage(path, faults))


def damage(path: Path, what: object) -> str:
    return (
        f"{path} is damaged or of another kind ({shorten(what, 400)}): bring back a copy, or train "
        "again."
    )
