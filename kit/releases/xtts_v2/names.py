"""Names and shapes of the tensors in a released XTTS-v2 checkpoint.

They are those of the state dict that coqui-tts 0.28.0's `Xtts` loads strictly. Its GPT is the kit's
`SpeechGPT` under other names, with linear weights stored as (in, out), as in GPT-2.
"""

import dataclasses
import re

import torch
from torch import Tensor

from kit.model.gpt import SpeechGPT
from kit.model.sequence import GPTConfig
from kit.releases.xtts_v2.speaker import SpeakerEncoder
from kit.releases.xtts_v2.vocoder import HiFiGAN

Shape = tuple[int, ...]

GPT = "gpt."
VOCODER = "hifigan_decoder.waveform_decoder."
SPEAKER = "hifigan_decoder.speaker_encoder."
MEL_STATS = "mel_stats"
DVAE = "dvae."
TRAINER = "xtts."  # precedes every name in a checkpoint of coqui-tts's trainer
BATCHES = "num_batches_tracked"  # of batch norm: the only integer tensors
# Skipped: copies of weights made for inference, the trainer's spectrograms, and the constant
# attention masks of older GPT-2s.
SKIPPED = re.compile(
    r"gpt\.gpt_inference\.|gpt\.gpt\.wte\.|torch_mel_spectrogram_|"
    r"gpt\.gpt\.h\.\d+\.attn\.(masked_)?bias$"
)

# Prefixes of names: the kit's, and the release's.
_PREFIXES = {
    "conditioner.init.": "conditioning_encoder.init.",
    "conditioner.blocks.": "conditioning_encoder.attn.",
    "conditioner.latents": "conditioning_perceiver.latents",
    "conditioner.layers.": "conditioning_perceiver.layers.",
    "conditioner.gamma": "conditioning_perceiver.norm.gamma",
    "text_embedding.": "text_embedding.",
    "code_embedding.": "mel_embedding.",
    "text_position.": "text_pos_embedding.emb.",
    "code_position.": "mel_pos_embedding.emb.",
    "gpt.": "gpt.",
    "final_norm.": "final_norm.",
    "text_head.": "text_head.",
    "code_head.": "mel_head.",
}
_PERCEIVER = {
    "to_q": "0.to_q",
    "to_kv": "0.to_kv",
    "to_out": "0.to_out",
    "ff_in": "1.0",
    "ff_out": "1.2",
}
_LINEAR = re.compile(r"gpt\.h\.\d+\.(attn|mlp)\.c_\w+\.weight")


def released_name(name: str) -> str:
    """The release's name of the kit's tensor `name`."""
    prefix = next(p for p in _PREFIXES if name.startswith(p))
    rest = name.removeprefix(prefix)
    if prefix == "conditioner.layers.":
        number, part, leaf = rest.split(".")
        rest = f"{number}.{_PERCEIVER[part]}.{leaf}"
    return GPT + _PREFIXES[prefix] + rest


def turned(name: str, tensor: Tensor) -> Tensor:
    """Convert the kit's tensor `name` to the release's layout, or back."""
    return tensor.T if _LINEAR.fullmatch(name) else tensor


def to_released(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a `SpeechGPT`'s state dict under the release's names; linear weights are views."""
    return {released_name(name): turned(name, tensor) for name, tensor in weights.items()}


def from_released(tensors: dict[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Return the state dict of a `SpeechGPT` from a release's tensors; linear weights are views.

    Raises KeyError for a missing tensor.
    """
    names = empty_model(config).state_dict()
    return {name: turned(name, tensors[released_name(name)]) for name in names}


def gpt_shapes(config: GPTConfig) -> dict[str, Shape]:
    """Return {the release's name: shape} for every tensor of a GPT."""
    return {n: tuple(t.shape) for n, t in to_released(empty_model(config).state_dict()).items()}


def empty_model(config: GPTConfig) -> SpeechGPT:
    """Return a model on the meta device: a configuration may ask for any amount of memory."""
    with torch.device("meta"):
        return SpeechGPT(config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoundSizes:
    """Sizes of the vocoder and the speaker encoder; the defaults are those of the release."""

    latent_width: int = 1024  # of the GPT's hidden states
    speaker_width: int = 512
    speaker_everywhere: bool = True  # in every upsampling layer
    channels: int = 512  # halved by every upsampling layer
    filters: tuple[int, ...] = (32, 64, 128, 256)


def sound_sizes(shapes: dict[str, Shape], sizes: SoundSizes) -> SoundSizes:
    """Return `sizes` with `channels` and `filters`, which no configuration gives, from `shapes`.

    A missing or impossible tensor keeps the release's size; `sound_shapes` then does not match it.
    """
    channels = _first_size(shapes, f"{VOCODER}conv_pre.weight")
    if channels >= 16:
        sizes = dataclasses.replace(sizes, channels=channels)
    names = [f"{SPEAKER}layer{layer}.0.conv1.weight" for layer in range(1, 5)]
    filters = tuple(_first_size(shapes, name) for name in names)
    if min(filters) >= 8:
        sizes = dataclasses.replace(sizes, filters=filters)
    return sizes


def _first_size(shapes: dict[str, Shape], name: str) -> int:
    shape = shapes.get(name)
    return shape[0] if shape else 0


def sound_shapes(sizes: SoundSizes) -> dict[str, Shape]:
    """Return names and shapes of the vocoder, the speaker encoder and the log-mels' scale."""
    with torch.device("meta"):
        vocoder = HiFiGAN(sizes.latent_width, sizes.speaker_width, sizes.channels)
        speaker = SpeakerEncoder(sizes.filters, speaker_width=sizes.speaker_width)
    shapes = {}
    for name, tensor in vocoder.state_dict().items():
        layer, _, leaf = name.rpartition(".")
        if name.startswith("conds.") and not sizes.speaker_everywhere:
            continue
        if leaf == "weight" and name.startswith(("ups.", "resblocks.")):
            norms = (len(tensor), *[1] * (tensor.ndim - 1))
            shapes[f"{VOCODER}{layer}.parametrizations.weight.original0"] = norms
            shapes[f"{VOCODER}{layer}.parametrizations.weight.original1"] = tuple(tensor.shape)
        else:
            shapes[VOCODER + name] = tuple(tensor.shape)
    for name, tensor in speaker.state_dict().items():
        shapes[SPEAKER + name] = tuple(tensor.shape)
    shapes[MEL_STATS] = (80,)
    return shapes


def current_name(name: str) -> str:
    """Return `name` as torch calls it today: `weight_g` and `weight_v` are older names."""
    for old, new in (("weight_g", "original0"), ("weight_v", "original1")):
        if name.endswith(f".{old}"):
            return f"{name.removesuffix(old)}parametrizations.weight.{new}"
    return name
