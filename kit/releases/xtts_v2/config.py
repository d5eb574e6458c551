"""Converts between config.json of an XTTS-v2 and the kit's `GPTConfig`.

The GPT's sizes are in `model_args`, text ids in the vocabulary; the rest is constant in coqui-tts
0.28.0, whatever a configuration says.
"""

import json
from pathlib import Path

from kit.base.errors import KitError
from kit.base.formatting import shorten
from kit.model.sequence import GPTConfig
from kit.releases.xtts_v2.tokenizer import Vocabulary

# Constants of coqui-tts.
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
MIN_WIDTH = 65  # of smaller models, coqui-tts normalises in fewer groups than the kit's 32


def read_xtts_config(path: Path) -> dict:
    """Return the configuration at `path`."""
    try:
        return json.loads(Path(path).read_bytes().decode("utf-8"))
    except OSError as error:
        raise KitError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise KitError(f"{path} is no JSON ({shorten(error)}): copy it again.") from error


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
    """Return the GPT's configuration from `model_args` and the vocabulary."""
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


def config_disagreements(args: dict, vocabulary: Vocabulary) -> list[str]:
    """Return notes on ids that differ from the vocabulary's, which are used."""
    ids = {
        "gpt_number_text_tokens": vocabulary.size,
        "gpt_start_text_token": vocabulary.start,
        "gpt_stop_text_token": vocabulary.stop,
    }
    return [
        f"the configuration says {name} = {args[name]}, the vocabulary {number}, which is used"
        for name, number in ids.items()
        if args.get(name) not in (None, number)
    ]


def updated_config(gpt: GPTConfig, vocabulary: Vocabulary) -> dict:
    """Return the `model_args` of a GPT. Raises KitError if coqui-tts cannot build it."""
    for field, value in FIXED.items():
        if getattr(gpt, field) != value:
            raise KitError(
                f"XTTS-v2 has {field} = {value}, this model {getattr(gpt, field)}: coqui-tts could "
                "not load it. Export it as a voice of the kit."
            )
    if gpt.width < MIN_WIDTH:
        raise KitError(
            f"coqui-tts normalises a width of {gpt.width} in other groups than the kit: at least "
            f"{MIN_WIDTH} are needed. Export it as a voice of the kit."
        )
    ids = (vocabulary.size, vocabulary.start, vocabulary.stop)
    if (gpt.text_vocab, gpt.start_text, gpt.stop_text) != ids:
        raise KitError(
            f"The model has {gpt.text_vocab} text ids, START {gpt.start_text} and STOP "
            f"{gpt.stop_text}, the vocabulary {ids[0]}, {ids[1]} and {ids[2]}: use the vocabulary "
            "that the model was trained with."
        )
    return {
        "gpt_layers": gpt.layers,
        "gpt_n_model_channels": gpt.width,
        "gpt_n_heads": gpt.heads,
        "gpt_num_audio_tokens": gpt.code_vocab,
        "gpt_start_audio_token": gpt.start_code,
        "gpt_stop_audio_token": gpt.stop_code,
        "gpt_max_text_tokens": gpt.max_text - EXTRA_POSITIONS["max_text"],
        "gpt_max_audio_tokens": gpt.max_code - EXTRA_POSITIONS["max_code"],
        "gpt_number_text_tokens": gpt.text_vocab,
        "gpt_start_text_token": gpt.start_text,
        "gpt_stop_text_token": gpt.stop_text,
        "gpt_use_perceiver_resampler": True,
    }
