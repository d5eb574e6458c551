"""The names of an XTTS-v2's tensors: the release's, which coqui-tts 0.28.0 loads strictly.

Its GPT is the kit's own under other names, with linear weights stored as (in, out), as in GPT-2.
"""

import re
from collections.abc import Callable

import torch
from torch import Tensor

from kit.model.gpt import SpeechGPT
from kit.settings import GPTConfig

GPT = "gpt."
VOCODER = "hifigan_decoder.waveform_decoder."
SPEAKER = "hifigan_decoder.speaker_encoder."
MEL_STATS = "mel_stats"
SOUND = ("hifigan_decoder.", MEL_STATS)
DVAE = "dvae."
# Put into names by DistributedDataParallel and by torch.compile.
WRAPPERS = re.compile(r"\b(module|_orig_mod)\.")
TRAINER = "xtts."  # precedes every name in a checkpoint of coqui-tts's trainer
# Skipped: copies of weights made for inference, the trainer's spectrograms, and the constant
# attention masks of older GPT-2s.
SKIPPED = re.compile(
    r"gpt\.gpt_inference\.|gpt\.gpt\.wte\.|torch_mel_spectrogram_|"
    r"gpt\.gpt\.h\.\d+\.attn\.(masked_)?bias$"
)

# Prefixes of names: the kit's, and the release's where it is another.
_PREFIXES = {
    "conditioner.init.": "conditioning_encoder.init.",
    "conditioner.blocks.": "conditioning_encoder.attn.",
    "conditioner.latents": "conditioning_perceiver.latents",
    "conditioner.layers.": "conditioning_perceiver.layers.",
    "conditioner.gamma": "conditioning_perceiver.norm.gamma",
    "code_embedding.": "mel_embedding.",
    "text_position.": "text_pos_embedding.emb.",
    "code_position.": "mel_pos_embedding.emb.",
    "code_head.": "mel_head.",
}
_PERCEIVER = {"to_q": "0.to_q", "to_kv": "0.to_kv", "to_out": "0.to_out"}
_PERCEIVER |= {"ff_in": "1.0", "ff_out": "1.2"}
_LINEAR = re.compile(r"gpt\.h\.\d+\.(attn|mlp)\.c_\w+\.weight")


def released_name(name: str) -> str:
    prefix = next((p for p in _PREFIXES if name.startswith(p)), "")
    rest = name.removeprefix(prefix)
    if prefix == "conditioner.layers.":
        number, part, leaf = rest.split(".")
        rest = f"{number}.{_PERCEIVER[part]}.{leaf}"
    return GPT + _PREFIXES.get(prefix, "") + rest


def _transposed(name: str, tensor: Tensor) -> Tensor:
    return tensor.T if _LINEAR.fullmatch(name) else tensor


def to_released(weights: dict[str, Tensor], rename: Callable = released_name) -> dict[str, Tensor]:
    """Return a `SpeechGPT`'s state dict under the release's names; linear weights are views."""
    return {rename(name): _transposed(name, tensor) for name, tensor in weights.items()}


def from_released(
    tensors: dict[str, Tensor], config: GPTConfig, rename: Callable = released_name
) -> dict[str, Tensor]:
    """Return the state dict of a `SpeechGPT` from a release's tensors; linear weights are views.

    Raises KeyError for a missing tensor.
    """
    names = empty_model(config).state_dict()
    return {name: _transposed(name, tensors[rename(name)]) for name in names}


def empty_model(config: GPTConfig) -> SpeechGPT:
    """Return a model on the meta device: a configuration may ask for any amount of memory."""
    with torch.device("meta"):
        return SpeechGPT(config)
