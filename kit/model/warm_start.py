"""Start a model from the weights of a base model, with a larger vocabulary.

A new text token starts as the mean of the base's tokens that spell it.
"""

import dataclasses

import torch

from kit.base.errors import DamagedFileError
from kit.model.gpt import SpeechGPT
from kit.model.sequence import GPTConfig

# Settings that may differ from the base: those of training; sizes of tables, and ids of the text's
# START and STOP.
FREE = {"dropout", "text_dropout", "text_weight", "text_stop_input", "stop_targets"}
TABLES = {"text_vocab", "max_text", "max_code", "start_text_id", "stop_text_id"}
POSITIONS = {"max_text": "text_position.weight", "max_code": "code_position.weight"}
TEXT_ROWS = ("text_embedding.weight", "text_head.weight", "text_head.bias")


def model_settings(base: GPTConfig) -> dict:
    """Return the settings of a run's `model` section that must equal those of `base`."""
    values = dataclasses.asdict(base)
    values["start_text_id"] = base.start_text
    values["stop_text_id"] = base.stop_text
    free = FREE | {"max_text", "max_code"}
    return {name: value for name, value in values.items() if name not in free}


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
        if name not in FREE | TABLES and value != base_values[name]:
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
