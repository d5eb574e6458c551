"""Names and sizes of IndexTTS2's files: tensors of gpt.pth, and section `gpt` of config.yaml.

The trunk, embeddings, positions and heads are an XTTS-v2's under the same names without the first
`gpt.`; those of the conditioning keep the release's names.
"""

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from kit.base.errors import KitError
from kit.model.sequence import GPTConfig
from kit.releases.xtts_v2.names import DROPOUT, GPT, empty_model, released_name, turned

WEIGHTS_FILE = "gpt.pth"
CONFIG_FILE = "config.yaml"
INDEXTTS2_REPOSITORY = "IndexTeam/IndexTTS-2"  # on the hub; that of version 2.5 has .5 behind it
# Layers of its emotion vector; no other model has both.
MARKS = {"emo_perceiver_encoder.latents", "emovec_layer.weight"}
# The first layer of the speaker encoder that version 2.5 replaced, and that version's text rows.
SPEAKER_MARK = "conditioning_encoder.embed.conv.0.weight"
TEXT_ROWS_2_5 = 60_510
CONDITIONER = "conditioner."
LATENTS = 34  # 32 of the speaker, 2 of the length
STOP_TARGETS = 2  # as its forward pass makes rows

# {field of GPTConfig: name in section `gpt`}, and what its classes add.
SIZES = {
    "layers": "layers",
    "width": "model_dim",
    "heads": "heads",
    "text_vocab": "number_text_tokens",
    "code_vocab": "number_mel_codes",
    "max_text": "max_text_tokens",
    "max_code": "max_mel_tokens",
    "start_text_id": "start_text_token",
    "stop_text_id": "stop_text_token",
    "start_code_id": "start_mel_token",
    "stop_code_id": "stop_mel_token",
}
EXTRA = {"text_vocab": 1, "max_text": 2, "max_code": 3}
ENCODERS = ("condition_module", "emo_condition_module")
ENCODER_SIZES = ("output_size", "linear_units", "attention_heads", "num_blocks", "perceiver_mult")
# What the kit's sequence and conditioning are made for.
FIXED = {"condition_type": "conformer_perceiver"}
IF_THERE = {
    "condition_num_latent": LATENTS - 2,
    "max_conditioning_inputs": 1,
    "use_mel_codes_as_input": True,
    "train_solo_embeddings": False,
    "types": 1,
}


def is_indextts2(names: Iterable[str]) -> bool:
    """Whether tensors of these `names` are the GPT of an IndexTTS2 (or 2.5)."""
    return set(names) >= MARKS


def describe_indextts2(where: Path | str) -> str:
    """Return why no XTTS-v2 can be read from `where`."""
    return (
        f"{where} is the GPT of IndexTTS2, not an XTTS-v2: give its folder, with {WEIGHTS_FILE}, "
        f"{CONFIG_FILE} and its bpe.model, as BASE_MODEL."
    )


def describe_version_2_5(where: Path | str) -> str:
    return (
        f"{where} is IndexTTS2 of version 2.5 ({TEXT_ROWS_2_5:,} text rows, one latent of CAMPPlus "
        "in place of the speaker encoder), and the kit trains version 2: take IndexTeam/IndexTTS-2."
    )


def indextts2_in(folder: Path) -> bool:
    """Whether `folder` has the files of an IndexTTS2, by their names."""
    return all((folder / name).is_file() for name in (WEIGHTS_FILE, CONFIG_FILE))


def file_name(name: str) -> str:
    """Return the release's name of the kit's tensor `name`."""
    if name.startswith(CONDITIONER):
        return name.removeprefix(CONDITIONER)
    return released_name(name).removeprefix(GPT)


def to_file(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a `SpeechGPT`'s state dict under the release's names; linear weights are views."""
    return {file_name(name): turned(name, tensor) for name, tensor in weights.items()}


def from_file(tensors: dict[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Return the state dict of a `SpeechGPT` from a release's tensors; linear weights are views."""
    names = empty_model(config).state_dict()
    return {name: turned(name, tensors[file_name(name)]) for name in names}


def gpt_config(settings: dict, file: Path) -> GPTConfig:
    """Return the GPT that the configuration in `file` describes.

    Raises KitError for what the kit's rows or conditioning are not made for.
    """
    gpt = settings.get("gpt")
    if not isinstance(gpt, dict):
        raise KitError(f"{file} has no section `gpt`: copy it from where the model was published.")
    if str(settings.get("version", 2)).startswith("2.5"):
        raise KitError(describe_version_2_5(file))
    for name, value in FIXED.items():
        _require(gpt.get(name) == value, file, name, gpt, f"{value!r}, as version 2 has it")
    for name, value in IF_THERE.items():
        _require(gpt.get(name, value) == value, file, name, gpt, f"{value!r}, as version 2 has it")
    sizes = {}
    for field, name in SIZES.items():
        _require(type(gpt.get(name)) is int, file, name, gpt, "a whole number")
        sizes[field] = gpt[name] + EXTRA.get(field, 0)
    conformers = []
    for name in ENCODERS:
        encoder = gpt.get(name)
        _require(isinstance(encoder, dict), file, name, gpt, "the sizes of an encoder")
        layer = encoder.get("input_layer") == "conv2d2"
        _require(layer, file, "input_layer", encoder, "'conv2d2', as version 2 has it")
        for size in ENCODER_SIZES:
            _require(type(encoder.get(size)) is int, file, size, encoder, "a whole number")
            conformers.append(encoder[size])
    try:
        return GPTConfig(
            latents=LATENTS,
            n_mels=1024,
            dropout=DROPOUT,
            stop_targets=STOP_TARGETS,
            conformers=tuple(conformers),
            **sizes,
        )
    except ValueError as error:
        raise KitError(f"{file} describes no model: {error}") from error


def _require(ok: bool, file: Path, name: str, section: dict, wanted: str) -> None:
    if not ok:
        raise KitError(
            f"{file} has `{name}` = {section.get(name)!r}; it must be {wanted}. Copy it from the "
            "same place as the weights."
        )


def updated_config(settings: dict, config: GPTConfig) -> dict:
    """Return `settings` with the sizes of `config` in section `gpt`."""
    sizes = {name: getattr(config, field) - EXTRA.get(field, 0) for field, name in SIZES.items()}
    return settings | {"gpt": settings["gpt"] | sizes}
