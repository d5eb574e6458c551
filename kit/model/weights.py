"""Model files: weights with their configuration, adapters without their base; starts from a base.

An adapter file of a few MB holds the adapters, the rows of embeddings and heads that the base lacks
(or full tables, if those were trained), and the SHA-256 of the base's tensors.
"""

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from kit.base import tensor_file
from kit.base.config import CONFIGS, checked
from kit.base.errors import DamagedFileError, KitError
from kit.base.files import write_atomic
from kit.base.formatting import join_names, shorten
from kit.model.gpt import SpeechGPT
from kit.model.lora import TABLES, add_adapters, is_adapter, merged
from kit.settings import GPTConfig, LoRAConfig

# Written at the end of training: the last weights and their EMA.
WEIGHTS = {"raw": "model-raw.safetensors", "ema": "model-ema.safetensors"}
ADAPTERS = {"raw": "adapters-raw.safetensors", "ema": "adapters-ema.safetensors"}

ADAPTER_HEADER = {
    "config": GPTConfig,
    "lora": LoRAConfig,
    "tables": (dict, 0, 100, (int, 0, 2**20)),  # name -> first row that is stored
    "base_sha256": tensor_file.SHA256,
}
# Settings that may differ from the base: those of training; sizes of tables, and ids of the text's
# START and STOP.
FREE = {"dropout", "text_dropout", "text_weight", "text_stop_input", "stop_targets"}
FREE |= {"share_digits", "code_levels", "pretrained_layers"}
SIZES = {"text_vocab", "max_text", "max_code", "start_text_id", "stop_text_id"}
POSITIONS = {"max_text": "text_position.weight", "max_code": "code_position.weight"}
# Layers and positions of `make demo`'s voice, in fp16 (tests/tools/pretrained_layers.py).
PRETRAINED = CONFIGS / "pretrained-layers.safetensors"
TEXT_ROWS = ("text_embedding.weight", "text_head.weight", "text_head.bias")


def save_model(model: SpeechGPT, path: Path, trained_with: dict[str, str] | None = None) -> None:
    """Write weights (in fp32, `merged`) and configuration to one file, atomically.

    `trained_with` maps each file that defines the model's ids (tokenizer, codec) to its SHA-256.
    """
    model = merged(model)
    config = dataclasses.asdict(model.config)
    tensor_file.save_module(path, model, config=config, trained_with=trained_with or {})


def trained_with(path: Path) -> dict[str, str]:
    """Return the `trained_with` that `save_model` stored at `path`; {} for older files."""
    files = tensor_file.saved_header(path).get("trained_with")
    return files if isinstance(files, dict) else {}


def saved_config(path: Path) -> GPTConfig:
    """Return the configuration of the model saved at `path`, without its weights."""
    return _config_in(tensor_file.saved_header(path))


def _config_in(header: dict) -> GPTConfig:
    return checked(header.get("config"), GPTConfig, "its config")


def load_model(path: Path) -> SpeechGPT:
    """Return the model saved at `path`, in fp32 and eval mode. Raises DamagedFileError."""
    return tensor_file.load_module(
        path, lambda h: SpeechGPT(_config_in(h)), DamagedFileError, "run notebook 02_train."
    )


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
    tensors = {n: t.cpu().contiguous() for n, t in adapter_tensors(model, tables).items()}
    write_atomic(path, tensor_file.file_bytes(tensors, header))


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
        tensors, header = tensor_file.contents(path)
        header = checked(header, ADAPTER_HEADER, "its header")
    except (OSError, KitError) as error:
        raise DamagedFileError(damaged_adapters(path, error)) from error
    config = header["config"]
    tables = header["tables"]
    base_sha256 = tensor_file.checksum(base.state_dict())
    if base_sha256 != header["base_sha256"]:
        raise DamagedFileError(
            f"{path} was trained on another base model (SHA-256 of its tensors "
            f"{shorten(header['base_sha256'], 12)}, of this one {shorten(base_sha256, 12)}): load "
            "the voice that the run started from."
        )
    require_compatible(config, base.config)
    with torch.device("meta"):
        expected = SpeechGPT(config)
        add_adapters(expected, header["lora"])
    unknown = join_names([name for name in tables if name not in TABLES])
    problem = unknown and f"no model has the tables {unknown}"
    problem = problem or tensor_file.describe_mismatch(tensors, adapter_tensors(expected, tables))
    if problem:
        raise DamagedFileError(damaged_adapters(path, problem))
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


def model_settings(base: GPTConfig) -> dict:
    """Return the settings of a run's `model` section that must equal those of `base`."""
    values = dataclasses.asdict(base)
    values |= {"start_text_id": base.start_text, "stop_text_id": base.stop_text}
    return {name: value for name, value in values.items() if name not in FREE | POSITIONS.keys()}


def first_weights(config: GPTConfig, path: Path = PRETRAINED) -> SpeechGPT:
    """Return a random model; with `pretrained_layers` its layers and positions are those at `path`.

    A model learns to read from speech that is easy to predict, and keeps that in another language
    and voice. Raises KitError for another size.
    """
    model = SpeechGPT(config)
    if config.pretrained_layers:
        tensor_file.take_layers(model, path, config)
    return model


def warm_start_model(
    config: GPTConfig, base: SpeechGPT, spellings: dict[int, list[int]]
) -> SpeechGPT:
    """Return a model of `config` with the weights of `base`, and rows for what `base` lacks.

    `spellings` maps each new text id to the ids of `base` that spell it. New positions keep their
    random initialisation. Raises DamagedFileError if the two are not compatible.
    """
    require_compatible(config, base.config)
    model = SpeechGPT(config)
    state = base.state_dict()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            rows = min(len(tensor), len(state[name]))
            tensor[:rows] = state[name][:rows]
        for name in TEXT_ROWS:
            table = model.state_dict()[name]
            for new_id, ids in spellings.items():
                table[new_id] = state[name][ids].mean(0)
    return model


def extend_positions(model: SpeechGPT, base: SpeechGPT) -> SpeechGPT:
    """Return `model` with the additional positions of `base`, so that texts can be as long.

    Returns `model` itself if it has them all.
    """
    sizes = {name: max(getattr(m.config, name) for m in (model, base)) for name in POSITIONS}
    config = dataclasses.replace(model.config, **sizes)
    if config == model.config:
        return model
    longer = warm_start_model(config, model, {}).to(model.final_norm.weight.device).eval()
    with torch.no_grad():
        for name in POSITIONS.values():
            table = longer.state_dict()[name]
            base_table = base.state_dict()[name]
            count = len(model.state_dict()[name])
            table[count : len(base_table)] = base_table[count:]
    return longer


def require_compatible(config: GPTConfig, base: GPTConfig) -> None:
    """Raise DamagedFileError unless a model of `config` can hold the weights of one of `base`."""
    base_values = dataclasses.asdict(base)
    for name, value in dataclasses.asdict(config).items():
        if name not in FREE | SIZES and value != base_values[name]:
            raise DamagedFileError(
                f"The run's model has {name} {value}, its base model {base_values[name]}: restore "
                "`model` in the run's settings, or start a new run."
            )
    ids = (config.start_text, config.stop_text)
    if ids != (base.start_text, base.stop_text) or config.text_vocab < base.text_vocab:
        raise DamagedFileError(
            f"The run's text has START and STOP at {ids} of {config.text_vocab} ids, its base "
            f"model at {(base.start_text, base.stop_text)} of {base.text_vocab}: its "
            "tokenizer was not grown from that model's. Start a new run with BASE_MODEL."
        )
