"""The parts of an XTTS-v2 that hear and speak, filled from a release's tensors.

`load_xtts` (kit/model) reads the files; here every tensor that it found goes to its place: none may
be missing, misshapen or left over. Sizes that no configuration tells are those of the tensors.
Knows no file and no GPT.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kit.base.errors import KitError
from kit.base.formatting import join_names
from kit.base.tensor_file import describe_mismatch
from kit.releases.xtts_v2.dvae import DVAE
from kit.releases.xtts_v2.mel import DVAE_FFT, N_MELS, REFERENCE_FFT, XTTSMel, XTTSMelConfig
from kit.releases.xtts_v2.speaker import SpeakerEncoder
from kit.releases.xtts_v2.vocoder import (
    CODE_RATE,
    CODE_SAMPLES,
    FRAME_SAMPLES,
    VOCODER_RATE,
    HiFiGAN,
)

VOCODER = "hifigan_decoder.waveform_decoder."
SPEAKER = "hifigan_decoder.speaker_encoder."
MEL_STATS = "mel_stats"
# What training the DVAE kept beside it: running sums of its codebook, and of its codes' use.
DVAE_TRAINING = ("codebook.cluster_size", "codebook.embed_avg", "discrete_loss.")
# Lengths and directions of a weight, by their older names and by today's.
WEIGHT_NORM = (
    ("weight_g", "weight_v"),
    ("parametrizations.weight.original0", "parametrizations.weight.original1"),
)
# What a configuration tells, and the kit has no other of.
RATES = {
    "audio": {
        "sample_rate": CODE_RATE,
        "dvae_sample_rate": CODE_RATE,
        "output_sample_rate": VOCODER_RATE,
    },
    "model_args": {
        "input_sample_rate": CODE_RATE,
        "output_sample_rate": VOCODER_RATE,
        "output_hop_length": FRAME_SAMPLES,
        "gpt_code_stride_len": CODE_SAMPLES,
    },
}


def require_rates(settings: dict) -> None:
    """Raise KitError where a release's configuration tells other rates than all releases have."""
    for section, rates in RATES.items():
        told = settings.get(section) or {}
        for name, rate in rates.items():
            if told.get(name) not in (None, rate):
                raise KitError(
                    f"The configuration has `{section}.{name}` = {told[name]!r}; an XTTS-v2 has "
                    f"{rate}. Copy config.json from the same place as the weights."
                )


def require_sound_names(sound: dict[str, Tensor]) -> None:
    """Raise KitError for tensors that are of no part that hears or speaks."""
    places = (VOCODER, SPEAKER)
    unknown = [name for name in sound if name != MEL_STATS and not name.startswith(places)]
    if unknown:
        raise KitError(
            f"An XTTS-v2's sound has no {join_names(unknown)}: take the files of one release."
        )


def mel_stats_of(sound: dict[str, Tensor]) -> tuple[float, ...]:
    """What a release divides its log-mels by."""
    stats = sound.get(MEL_STATS)
    if stats is None:
        fault = "missing"
    elif stats.shape != (N_MELS,) or not stats.is_floating_point():
        fault = f"{tuple(stats.shape)} of {stats.dtype}"
    else:
        fault = "" if bool((stats != 0).all()) else "0 somewhere"
    if fault:
        raise KitError(
            f"{MEL_STATS} must be {N_MELS} numbers, none of them 0; it is {fault}. Put the "
            "release's mel_stats.pth beside its weights."
        )
    require_finite({MEL_STATS: stats}, "The scale of the log-mels")
    return tuple(stats.float().tolist())


def xtts_mels(sound: dict[str, Tensor]) -> tuple[XTTSMel, XTTSMel]:
    """The log-mels that the DVAE hears, and those that a voice is conditioned on."""
    stats = mel_stats_of(sound)
    heard = XTTSMelConfig(n_fft=DVAE_FFT, mel_stats=stats)
    reference = XTTSMelConfig(n_fft=REFERENCE_FFT, mel_stats=stats)
    return XTTSMel(heard), XTTSMel(reference)


def xtts_dvae(tensors: dict[str, Tensor]) -> DVAE:
    """The DVAE of dvae.pth, or of a trainer's checkpoint, in fp32 and eval mode."""
    if not tensors:
        raise KitError(
            "There is no DVAE, which makes codes of recordings: put dvae.pth, from where the model "
            "was published, beside its weights."
        )
    kept = {n: t for n, t in tensors.items() if not n.startswith(DVAE_TRAINING)}
    sizes = {
        "width": size_of(kept, "encoder.0.0.weight", 0),
        "code_width": size_of(kept, "codebook.embed", 0),
        "vocab_size": size_of(kept, "codebook.embed", 1),
    }
    return filled_module(DVAE, sizes, kept, "The DVAE")


def xtts_speaker_encoder(sound: dict[str, Tensor]) -> SpeakerEncoder:
    """The speaker encoder of model.pth, in fp32 and eval mode."""
    tensors = named(SPEAKER, sound)
    filters = [size_of(tensors, f"layer{i}.0.conv1.weight", 0) for i in range(1, 5)]
    sizes = {
        "filters": tuple(filters) if all(filters) else None,
        "attention_width": size_of(tensors, "attention.0.weight", 0),
        "speaker_width": size_of(tensors, "fc.weight", 0),
    }
    return filled_module(SpeakerEncoder, sizes, tensors, "The speaker encoder")


def xtts_vocoder(sound: dict[str, Tensor]) -> HiFiGAN:
    """The vocoder of model.pth, in fp32 and eval mode, its weight normalisation folded in."""
    tensors = folded(named(VOCODER, sound))
    sizes = {
        "latent_width": size_of(tensors, "conv_pre.weight", 1),
        "speaker_width": size_of(tensors, "cond_layer.weight", 1),
        "channels": size_of(tensors, "conv_pre.weight", 0),
    }
    return filled_module(HiFiGAN, sizes, tensors, "The vocoder")


def named(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, without it."""
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def size_of(tensors: dict[str, Tensor], name: str, dim: int) -> int | None:
    """One size of the tensor `name`; None where there is none: it is then found to be missing."""
    tensor = tensors.get(name)
    return tensor.shape[dim] if tensor is not None and tensor.ndim > dim else None


def folded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` with a weight in place of each pair of lengths and directions.

    Salimans and Kingma 2016. What has no other half stays, to be found unknown.
    """
    found = dict(tensors)
    for length, direction in WEIGHT_NORM:
        for name in tensors:
            layer = name.removesuffix(direction)
            if name.endswith(f".{direction}") and layer + length in found:
                if f"{layer}weight" in found:
                    raise KitError(f"{layer}weight is there twice: take a release's model.pth.")
                found[f"{layer}weight"] = product(layer, found.pop(layer + length), found.pop(name))
    return found


def product(layer: str, lengths: Tensor, directions: Tensor) -> Tensor:
    """The weight of `layer`, one of the lengths (out, 1 ...) for each of the directions (out, ...).

    Raises KitError where they are no such pair.
    """
    shape = (*directions.shape[:1], *[1] * (directions.ndim - 1))
    numbers = lengths.is_floating_point() and directions.is_floating_point()
    if not numbers or directions.ndim < 2 or lengths.shape != shape:
        raise KitError(
            f"{layer}weight cannot be made of lengths {tuple(lengths.shape)}, {lengths.dtype}, and "
            f"directions {tuple(directions.shape)}, {directions.dtype}: download model.pth again."
        )
    v = directions.float()
    return v * (lengths.float() / v.flatten(1).norm(dim=1).view(shape))


def filled_module(
    make: Callable[..., nn.Module], sizes: dict, tensors: dict[str, Tensor], what: str
) -> nn.Module:
    """`make` with those of `sizes` that are known, and exactly `tensors` in it.

    Raises KitError, naming them, for tensors that are missing, misshapen, unknown, of another
    type or not finite.
    """
    with torch.device("meta"):
        module = make(**{name: size for name, size in sizes.items() if size})
    faults = describe_mismatch(tensors, module.state_dict())
    if faults:
        raise KitError(
            f"{what} is not that of an XTTS-v2; {faults}. Take the files of one release."
        )
    require_finite(tensors, what)
    # Copies: what was read stays as it was, whatever becomes of the module.
    own = {
        name: tensor.to(torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)
        for name, tensor in tensors.items()
    }
    module.load_state_dict(own, assign=True)
    return module.eval()


def require_finite(tensors: dict[str, Tensor], what: str) -> None:
    """Raise KitError, naming it, for a tensor that is not finite."""
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise KitError(f"{what} is damaged: {name} is not finite. Download it again.")
