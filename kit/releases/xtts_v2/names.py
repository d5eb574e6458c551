"""Names and shapes of the tensors in a released XTTS-v2 checkpoint, and its config.json.

The names are those that coqui-tts 0.28.0's `Xtts` loads strictly. Its GPT is the kit's `SpeechGPT`
under other names, with linear weights stored as (in, out), as in GPT-2.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from kit.base.errors import KitError
from kit.base.tensor_file import is_finite
from kit.model.gpt import SpeechGPT
from kit.model.sequence import GPTConfig
from kit.releases.xtts_v2.tokenizer import Vocabulary
from kit.releases.xtts_v2.vocoder import HiFiGAN, SpeakerEncoder

GPT = "gpt."
VOCODER = "hifigan_decoder.waveform_decoder."
SPEAKER = "hifigan_decoder.speaker_encoder."
MEL_STATS = "mel_stats"
DVAE = "dvae."
TRAINER = "xtts."  # precedes every name in a checkpoint of coqui-tts's trainer
# Skipped: copies of weights made for inference, the trainer's spectrograms, and the constant
# attention masks of older GPT-2s.
SKIPPED = re.compile(
    r"gpt\.gpt_inference\.|gpt\.gpt\.wte\.|torch_mel_spectrogram_|"
    r"gpt\.gpt\.h\.\d+\.attn\.(masked_)?bias$"
)

# Layers of the emotion vector of an IndexTTS2; no other model has both.
INDEXTTS2_MARKS = {"emo_perceiver_encoder.latents", "emovec_layer.weight"}

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


def is_indextts2(names: Iterable[str]) -> bool:
    """Whether tensors of these `names` are the GPT of an IndexTTS2 (or 2.5)."""
    return set(names) >= INDEXTTS2_MARKS


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


def from_released(tensors: dict, config: GPTConfig, rename: Callable = released_name) -> dict:
    """Return the state dict of a `SpeechGPT`, the reverse of `to_released`. Raises KeyError."""
    names = empty_model(config).state_dict()
    return {name: _transposed(name, tensors[rename(name)]) for name in names}


def empty_model(config: GPTConfig) -> SpeechGPT:
    """Return a model on the meta device: a configuration may ask for any amount of memory."""
    with torch.device("meta"):
        return SpeechGPT(config)


def sound_tensors(
    tensors: dict, latent_width=1024, speaker_width=512, channels=512, filters=(32, 64, 128, 256)
) -> dict[str, Tensor]:
    """Return the tensors of the sound of a release, on the meta device.

    The vocoder's `channels` and the speaker encoder's `filters`, which no configuration gives, are
    those of `tensors`. A missing or impossible one keeps its default, and then does not match.
    """
    names = [f"{SPEAKER}layer{layer}.0.conv1.weight" for layer in range(1, 5)]
    kernels = [tensors.get(name) for name in (f"{VOCODER}conv_pre.weight", *names)]
    stored, *widths = (0 if t is None or not t.ndim else len(t) for t in kernels)
    with torch.device("meta"):
        vocoder = HiFiGAN(latent_width, speaker_width, stored if stored >= 16 else channels)
        filters = tuple(widths) if min(widths) >= 8 else filters
        speaker = SpeakerEncoder(filters, speaker_width=speaker_width)
        expected = {MEL_STATS: torch.empty(80)}
    for name, tensor in vocoder.state_dict().items():
        layer, _, leaf = name.rpartition(".")
        if leaf == "weight" and name.startswith(("ups.", "resblocks.")):
            norms = tensor.flatten(1)[:, 0].view(-1, *[1] * (tensor.ndim - 1))
            expected[f"{VOCODER}{layer}.parametrizations.weight.original0"] = norms
            expected[f"{VOCODER}{layer}.parametrizations.weight.original1"] = tensor
        else:
            expected[VOCODER + name] = tensor
    return expected | {SPEAKER + name: tensor for name, tensor in speaker.state_dict().items()}


def current_name(name: str) -> str:
    """Return `name` as torch calls it today: `weight_g` and `weight_v` are older names."""
    for old, new in (("weight_g", "original0"), ("weight_v", "original1")):
        if name.endswith(f".{old}"):
            return f"{name.removesuffix(old)}parametrizations.weight.{new}"
    return name


def fill_module(module: nn.Module, tensors: dict[str, Tensor], what: object) -> nn.Module:
    """Return `module` in eval mode, with copies of `tensors` in fp32, which must be finite."""
    require_finite(tensors, what)
    order = torch.contiguous_format
    copies = {}  # Windows cannot overwrite a file that is still memory-mapped
    for name, tensor in tensors.items():
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        copies[name] = tensor.to(dtype, copy=True, memory_format=order)
    module.load_state_dict(copies, assign=True)
    return module.eval()


def require_finite(tensors: dict[str, Tensor], what: object) -> None:
    for name, tensor in tensors.items():
        if not is_finite(name, tensor):
            raise KitError(f"{what} is damaged: {name} is not finite. Download it again.")


# --- config.json ----------------------------------------------------------------------------------

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


def model_args(settings: dict, file: Path) -> dict:
    """Return `model_args` of a configuration. Raises KitError if it is not of an XTTS-v2."""
    args = settings.get("model_args") if isinstance(settings, dict) else None
    if not isinstance(args, dict) or settings.get("model") not in ("xtts", None):
        raise KitError(
            f"The configuration of {file} is not XTTS's: it has no `model_args`, or its `model` is "
            "another. Copy config.json from the same place as the weights."
        )
    if not args.get("gpt_use_perceiver_resampler"):
        raise KitError(
            f"{file} is XTTS v1 (`gpt_use_perceiver_resampler` is off): the kit reads v2, whose "
            "speaker conditioning is different. Get XTTS-v2."
        )
    return args


def gpt_config(args: dict, vocabulary: Vocabulary, file: Path) -> GPTConfig:
    sizes = {}
    for field, name in SIZES.items():
        if type(args.get(name)) is not int:
            raise KitError(
                f"The configuration of {file} has `model_args.{name}` = {args.get(name)!r}, which "
                "must be a whole number: copy config.json from the same place as the weights."
            )
        sizes[field] = args[name] + EXTRA_POSITIONS.get(field, 0)
    try:
        return GPTConfig(
            text_vocab=vocabulary.size,
            start_text_id=vocabulary.start,
            stop_text_id=vocabulary.stop,
            text_stop_input=False,
            dropout=DROPOUT,
            **sizes,
            **FIXED,
        )
    except ValueError as error:
        raise KitError(f"The configuration of {file} describes no model: {error}") from error


def updated_config(gpt: GPTConfig, vocabulary: Vocabulary) -> dict:
    """Return the `model_args` of a GPT. Raises KitError if coqui-tts cannot build it."""
    for field, value in FIXED.items():
        if getattr(gpt, field) != value:
            raise KitError(
                f"XTTS-v2 has {field} = {value}, this model {getattr(gpt, field)}: coqui-tts could "
                "not load it. Export it as a voice of the kit."
            )
    if gpt.width < 65:
        raise KitError(
            f"coqui-tts normalises a width of {gpt.width} in fewer groups than the kit's 32: at "
            "least 65 are needed. Export it as a voice of the kit."
        )
    size, start, stop = vocabulary.size, vocabulary.start, vocabulary.stop
    if (gpt.text_vocab, gpt.start_text, gpt.stop_text) != (size, start, stop):
        raise KitError(
            f"The model has {gpt.text_vocab} text ids, START {gpt.start_text} and STOP "
            f"{gpt.stop_text}, the vocabulary {size}, {start} and {stop}: use the vocabulary that "
            "the model was trained with."
        )
    args = {"gpt_number_text_tokens": size, "gpt_start_text_token": start}
    args |= {"gpt_stop_text_token": stop, "gpt_use_perceiver_resampler": True}
    for field, name in SIZES.items():
        args[name] = getattr(gpt, field.removesuffix("_id")) - EXTRA_POSITIONS.get(field, 0)
    return args
