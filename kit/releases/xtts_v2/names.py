"""What the tensors of a released XTTS-v2 checkpoint are called, and their shapes.

The GPT of a release is the kit's `SpeechGPT` under other names; its linear layers hold (in, out)
where torch's hold (out, in), as GPT-2's do. What makes sound of its states (HiFi-GAN, Kong et al.
2020, and a speaker encoder, Heo et al. 2020) is known here by names and shapes alone. Names and
sizes follow the state dict that coqui-tts 0.28.0's `Xtts` loads strictly.

Shapes: D width, C channels of the vocoder, F filters of the speaker encoder.
"""

import dataclasses
import re

import torch
from torch import Tensor

from kit.model.gpt import SpeechGPT
from kit.model.sequence import GPTConfig

Shape = tuple[int, ...]

GPT = "gpt."
VOCODER = "hifigan_decoder.waveform_decoder."
SPEAKER = "hifigan_decoder.speaker_encoder."
MEL_STATS = "mel_stats"
DVAE = "dvae."
TRAINER = "xtts."  # before every name, where coqui-tts's trainer wrote the file
# Left out where they are met: copies that an inference run had made of the same weights, the
# trainer's spectrograms, and constant masks of older GPT-2s.
LEFT_OUT = re.compile(
    r"gpt\.gpt_inference\.|gpt\.gpt\.wte\.|torch_mel_spectrogram_|"
    r"gpt\.gpt\.h\.\d+\.attn\.(masked_)?bias$"
)

# The kit's first words of a name, and the release's.
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
    """The kit's tensor `name` as a release holds it, and the other way round: both are this."""
    return tensor.T if _LINEAR.fullmatch(name) else tensor


def to_released(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A `SpeechGPT`'s state dict under the release's names; linear layers are views."""
    return {released_name(name): turned(name, tensor) for name, tensor in weights.items()}


def from_released(tensors: dict[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """The state dict of a `SpeechGPT` of `config` out of a release's tensors; linears are views.

    Raises KeyError where one is missing.
    """
    names = empty_model(config).state_dict()
    return {name: turned(name, tensors[released_name(name)]) for name in names}


def gpt_shapes(config: GPTConfig) -> dict[str, Shape]:
    """The release's names and shapes of a GPT of `config`."""
    return {n: tuple(t.shape) for n, t in to_released(empty_model(config).state_dict()).items()}


def empty_model(config: GPTConfig) -> SpeechGPT:
    """A model without weights: a configuration may ask for more than any memory holds."""
    with torch.device("meta"):
        return SpeechGPT(config)


# --- sound ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoundSizes:
    """Sizes of the vocoder and the speaker encoder. The defaults are those of the release.

    coqui-tts builds no others but `latent_width`, `speaker_width` and `speaker_everywhere`.
    """

    latent_width: int = 1024  # of the GPT's states, which become sound
    speaker_width: int = 512
    speaker_everywhere: bool = True  # in every upsampling layer
    channels: int = 512  # halved by every upsampling layer
    filters: tuple[int, ...] = (32, 64, 128, 256)
    attention: int = 128  # width of the speaker encoder's pooling
    n_mels: int = 64  # of the speaker encoder, as are the next two
    n_fft: int = 512
    window: int = 400


UPSAMPLE_KERNELS = (16, 16, 4, 4)
BLOCK_KERNELS = (3, 7, 11)
BLOCK_CONVOLUTIONS = 3  # with each of two dilations
BLOCKS = (3, 4, 6, 3)  # of the speaker encoder, by number of filters
SQUEEZE = 8  # of its squeeze-and-excitation
POOLING = 8  # bins of its mels that become one


def sound_shapes(sizes: SoundSizes) -> dict[str, Shape]:
    """Names and shapes of all that makes sound, and of the mean mel it is scaled by."""
    shapes = {VOCODER + name: shape for name, shape in vocoder_shapes(sizes).items()}
    for name, shape in speaker_shapes(sizes).items():
        shapes[SPEAKER + name] = shape
    shapes[MEL_STATS] = (80,)
    return shapes


def vocoder_shapes(sizes: SoundSizes) -> dict[str, Shape]:
    """HiFi-GAN with a speaker added to its input and, in the release, to every layer."""
    c = sizes.channels
    found = _linear("conv_pre", (c, sizes.latent_width, 7))
    found.update(_linear("cond_layer", (c, sizes.speaker_width, 1)))
    for i, kernel in enumerate(UPSAMPLE_KERNELS):
        half = c // 2
        found.update(_normed(f"ups.{i}", (c, half, kernel), half))  # transposed: (in, out, kernel)
        if sizes.speaker_everywhere:
            found.update(_linear(f"conds.{i}", (half, sizes.speaker_width, 1)))
        for j, size in enumerate(BLOCK_KERNELS):
            block = f"resblocks.{i * len(BLOCK_KERNELS) + j}"
            for k in range(BLOCK_CONVOLUTIONS):
                found.update(_normed(f"{block}.convs1.{k}", (half, half, size), half))
                found.update(_normed(f"{block}.convs2.{k}", (half, half, size), half))
        c = half
    found["conv_post.weight"] = (1, c, 7)
    return found


def speaker_shapes(sizes: SoundSizes) -> dict[str, Shape]:
    """A ResNet with squeeze-and-excitation over mels, pooled by attention."""
    before = sizes.filters[0]
    found = {
        "torch_spec.0.filter": (1, 1, 2),
        "torch_spec.1.spectrogram.window": (sizes.window,),
        "torch_spec.1.mel_scale.fb": (sizes.n_fft // 2 + 1, sizes.n_mels),
    }
    found.update(_linear("conv1", (before, 1, 3, 3)))
    found.update(_batch_norm("bn1", before))
    for layer, (width, blocks) in enumerate(zip(sizes.filters, BLOCKS), 1):
        for i in range(blocks):
            name = f"layer{layer}.{i}"
            found[f"{name}.conv1.weight"] = (width, before, 3, 3)
            found[f"{name}.conv2.weight"] = (width, width, 3, 3)
            found.update(_batch_norm(f"{name}.bn1", width))
            found.update(_batch_norm(f"{name}.bn2", width))
            found.update(_linear(f"{name}.se.fc.0", (width // SQUEEZE, width)))
            found.update(_linear(f"{name}.se.fc.2", (width, width // SQUEEZE)))
            if i == 0 and layer > 1:
                found[f"{name}.downsample.0.weight"] = (width, before, 1, 1)
                found.update(_batch_norm(f"{name}.downsample.1", width))
            before = width
    pooled = before * (sizes.n_mels // POOLING)
    found.update(_linear("attention.0", (sizes.attention, pooled, 1)))
    found.update(_batch_norm("attention.2", sizes.attention))
    found.update(_linear("attention.3", (pooled, sizes.attention, 1)))
    found.update(_linear("fc", (sizes.speaker_width, 2 * pooled)))
    return found


def _linear(name: str, weight: Shape) -> dict[str, Shape]:
    """A layer with a bias."""
    return {f"{name}.weight": weight, f"{name}.bias": weight[:1]}


def _normed(name: str, weight: Shape, out: int) -> dict[str, Shape]:
    """A layer with weight normalisation: lengths and directions in place of a weight."""
    lengths = (weight[0], *[1] * (len(weight) - 1))
    return {
        f"{name}.parametrizations.weight.original0": lengths,
        f"{name}.parametrizations.weight.original1": weight,
        f"{name}.bias": (out,),
    }


def _batch_norm(name: str, width: int) -> dict[str, Shape]:
    parts = ("weight", "bias", "running_mean", "running_var")
    found: dict[str, Shape] = {f"{name}.{part}": (width,) for part in parts}
    found[f"{name}.{BATCHES}"] = ()
    return found


BATCHES = "num_batches_tracked"  # the one whole number


def todays_name(name: str) -> str:
    """`name` as torch calls it today: weight normalisation was `weight_g` and `weight_v` before."""
    for old, new in (("weight_g", "original0"), ("weight_v", "original1")):
        if name.endswith(f".{old}"):
            return f"{name.removesuffix(old)}parametrizations.weight.{new}"
    return name


def sound_sizes(shapes: dict[str, Shape], sizes: SoundSizes) -> SoundSizes:
    """`sizes`, with the widths that no configuration tells taken from the tensors' `shapes`.

    What is not there keeps the release's width, and is then found to be missing.
    """
    found = {}
    first = shapes.get(f"{VOCODER}conv_pre.weight")
    if first:
        found["channels"] = first[0]
    layers = range(1, len(BLOCKS) + 1)
    filters = [shapes.get(f"{SPEAKER}layer{layer}.0.conv1.weight") for layer in layers]
    if all(filters):
        found["filters"] = tuple(shape[0] for shape in filters)
    return dataclasses.replace(sizes, **found)
