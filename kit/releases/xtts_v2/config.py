"""config.json of an XTTS-v2 and the kit's `GPTConfig`, one out of the other.

Sizes of the GPT are those of `model_args`, text ids those of the vocabulary, and the rest is what
coqui-tts 0.28.0 builds whatever a configuration says. Knows no tensor.
"""

import copy
import json
from pathlib import Path

from kit.base.errors import KitError
from kit.base.formatting import shorten
from kit.model.sequence import GPTConfig
from kit.releases.xtts_v2.names import SoundSizes
from kit.releases.xtts_v2.vocabulary import Vocabulary

# What coqui-tts builds whatever its configuration says.
FIXED = {
    "latents": 32,
    "cond_blocks": 6,
    "perceiver_layers": 2,
    "perceiver_heads": 8,
    "perceiver_head_width": 64,
    "n_mels": 80,
}
DROPOUT = 0.1  # of GPT-2: embedding, attention, residual
# Positions that coqui-tts adds to those of its configuration.
MORE_TEXT = 2
MORE_CODE = 3
# Below, coqui-tts normalises in fewer groups than the kit's 32.
LEAST_WIDTH = 65


def read_xtts_config(path: Path) -> dict:
    """The configuration at `path`."""
    try:
        return json.loads(Path(path).read_bytes().decode("utf-8"))
    except OSError as why:
        raise KitError(f"{path} cannot be read: {why.strerror}.") from why
    except (ValueError, RecursionError) as why:
        raise KitError(f"{path} is no JSON ({shorten(why)}): copy it again.") from why


def jsonable(carried: dict, file: Path) -> dict:
    """`carried` as JSON has it, which is how it will be saved."""
    try:
        return json.loads(json.dumps(carried))
    except (ValueError, TypeError, RecursionError) as why:
        raise KitError(
            f"The configuration in {file} holds no plain values ({shorten(why)}): put the "
            "release's config.json beside it."
        ) from why


def arguments(settings: dict, file: Path) -> dict:
    """`model_args` of a configuration. Raises KitError for that of another kind or version."""
    args = settings.get("model_args") if isinstance(settings, dict) else None
    if not isinstance(args, dict) or settings.get("model") not in ("xtts", None):
        raise KitError(
            f"The configuration of {file} is not XTTS's: it has no `model_args`, or its `model` is "
            "another. Copy config.json from the same place as the weights."
        )
    if not args.get("gpt_use_perceiver_resampler"):
        raise KitError(
            f"{file} is XTTS v1 (`gpt_use_perceiver_resampler` is off): the kit reads v2, whose "
            "conditioning is another. Get XTTS-v2."
        )
    return args


def gpt_config(args: dict, vocabulary: Vocabulary, file: Path) -> GPTConfig:
    """What `model_args` and the vocabulary say of the GPT."""
    fields = {
        "layers": "gpt_layers",
        "width": "gpt_n_model_channels",
        "heads": "gpt_n_heads",
        "code_vocab": "gpt_num_audio_tokens",
        "start_code_id": "gpt_start_audio_token",
        "stop_code_id": "gpt_stop_audio_token",
        "max_text": "gpt_max_text_tokens",
        "max_code": "gpt_max_audio_tokens",
    }
    sizes = {}
    for field, name in fields.items():
        if type(args.get(name)) is not int:
            raise KitError(
                f"The configuration of {file} has `model_args.{name}` = {args.get(name)!r}, which "
                "must be a whole number: copy config.json from the same place as the weights."
            )
        sizes[field] = args[name]
    sizes["max_text"] += MORE_TEXT
    sizes["max_code"] += MORE_CODE
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
    except ValueError as why:
        raise KitError(f"The configuration of {file} describes no model: {why}") from why


def disagreements(args: dict, vocabulary: Vocabulary) -> list[str]:
    """Where the configuration tells other ids than the vocabulary, which is right."""
    told = {
        "gpt_number_text_tokens": vocabulary.size,
        "gpt_start_text_token": vocabulary.start,
        "gpt_stop_text_token": vocabulary.stop,
    }
    return [
        f"the configuration says {name} = {args[name]}, the vocabulary {right}: that is taken"
        for name, right in told.items()
        if args.get(name) not in (None, right)
    ]


def told_sizes(args: dict) -> SoundSizes:
    """What `model_args` say of the vocoder; the release's where they say nothing."""
    names = {
        "latent_width": "decoder_input_dim",
        "speaker_width": "d_vector_dim",
        "speaker_everywhere": "cond_d_vector_in_each_upsampling_layer",
    }
    told = {
        field: args[name] for field, name in names.items() if type(args.get(name)) in (int, bool)
    }
    return SoundSizes(**told)


def updated_settings(settings: dict, gpt: GPTConfig, words: Vocabulary) -> dict:
    """`settings` for a GPT as it is now. Raises KitError where coqui-tts has no such model."""
    for field, value in FIXED.items():
        if getattr(gpt, field) != value:
            raise KitError(
                f"XTTS-v2 has {field} = {value}, this model {getattr(gpt, field)}: coqui-tts could "
                "not load it. Export it as a voice of the kit."
            )
    if gpt.width < LEAST_WIDTH:
        raise KitError(
            f"coqui-tts normalises a width of {gpt.width} in other groups than the kit: at least "
            f"{LEAST_WIDTH} are needed. Export it as a voice of the kit."
        )
    if (gpt.text_vocab, gpt.start_text, gpt.stop_text) != (words.size, words.start, words.stop):
        raise KitError(
            f"The model has {gpt.text_vocab} text ids, START {gpt.start_text} and STOP "
            f"{gpt.stop_text}, the vocabulary {words.size}, {words.start} and {words.stop}: give "
            "the vocabulary that the model was trained with."
        )
    settings = copy.deepcopy(settings)
    settings["model_args"].update(
        gpt_layers=gpt.layers,
        gpt_n_model_channels=gpt.width,
        gpt_n_heads=gpt.heads,
        gpt_num_audio_tokens=gpt.code_vocab,
        gpt_start_audio_token=gpt.start_code,
        gpt_stop_audio_token=gpt.stop_code,
        gpt_max_text_tokens=gpt.max_text - MORE_TEXT,
        gpt_max_audio_tokens=gpt.max_code - MORE_CODE,
        gpt_number_text_tokens=gpt.text_vocab,
        gpt_start_text_token=gpt.start_text,
        gpt_stop_text_token=gpt.stop_text,
        gpt_use_perceiver_resampler=True,
    )
    return settings
