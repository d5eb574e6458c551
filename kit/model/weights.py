"""A model's weights and configuration in one safetensors file."""

import dataclasses
from pathlib import Path

import torch

from kit.base.config import build
from kit.base.errors import DamagedFileError
from kit.base.tensor_file import load_module, save_module, saved_header
from kit.model.gpt import SpeechGPT
from kit.model.sequence import GPTConfig

# What a run leaves: its last weights, and their average.
WEIGHTS = {"raw": "model-raw.safetensors", "ema": "model-ema.safetensors"}


def save_model(
    model: SpeechGPT,
    path: Path,
    dtype: torch.dtype = torch.float32,
    trained_with: dict[str, str] | None = None,
) -> None:
    """Weights (as `dtype`) and configuration in one file, written atomically.

    `trained_with` is the SHA-256 of each file by which texts and sounds became this model's ids.
    """
    config = dataclasses.asdict(model.config)
    save_module(path, model, dtype, config=config, trained_with=trained_with or {})


def trained_with(path: Path) -> dict[str, str]:
    """What `save_model` noted beside the weights at `path`; earlier versions noted nothing."""
    noted = saved_header(path).get("trained_with")
    return noted if isinstance(noted, dict) else {}


def saved_config(path: Path) -> GPTConfig:
    """The configuration alone of the model that `save_model` wrote to `path`."""
    return build(GPTConfig, saved_header(path)["config"])


def load_model(path: Path) -> SpeechGPT:
    """The model saved at `path`, in fp32 and eval mode. Raises DamagedFileError otherwise."""

    def make(header: dict) -> SpeechGPT:
        return SpeechGPT(build(GPTConfig, header["config"]))

    return load_module(path, make, DamagedFileError, "run notebook 02_train.")
