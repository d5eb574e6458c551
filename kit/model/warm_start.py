"""A model that begins with the weights of another one, and with a larger vocabulary.

Every tensor is the other model's. Rows that it does not have begin where they mean something: a new
text piece as the mean of the pieces that would have spelt it before. Knows ids and tensors alone.
"""

import dataclasses

import torch
from torch import Tensor

from kit.base.errors import DamagedFileError
from kit.model.gpt import SpeechGPT
from kit.model.sequence import GPTConfig

# What may differ: how a model is trained, how many rows its tables have, and where in them START
# and STOP of the text are written down.
FREE = {"dropout", "text_dropout", "text_weight", "text_stop_input", "stop_targets"}
TABLES = {"text_vocab", "max_text", "max_code", "start_text_id", "stop_text_id"}
POSITIONS = {"max_text": "text_position.weight", "max_code": "code_position.weight"}
TEXT_ROWS = ("text_embedding.weight", "text_head.weight", "text_head.bias")


def model_settings(base: GPTConfig) -> dict:
    """What a run's `model` section must say for a model that begins with one of `base`.

    The number of positions follows from the run's corpus.
    """
    values = dataclasses.asdict(base)
    values["start_text_id"] = base.start_text
    values["stop_text_id"] = base.stop_text
    own = FREE | {"max_text", "max_code"}
    return {name: value for name, value in values.items() if name not in own}


def warm_start_model(
    config: GPTConfig, base: SpeechGPT, spellings: dict[int, list[int]]
) -> SpeechGPT:
    """A model of `config` with the weights of `base`, and rows for what `base` has not got.

    `spellings` has the ids of `base` that spell each text id beyond its vocabulary. Positions that
    `base` lacks keep their random beginning. Raises DamagedFileError where the two are not alike.
    """
    require_compatible(config, base.config)
    model = SpeechGPT(config)
    state = base.state_dict()
    with torch.no_grad():
        for name, own in model.state_dict().items():
            rows = min(len(own), len(state[name]))
            own[:rows] = state[name][:rows]
        for name in TEXT_ROWS:
            table = model.state_dict()[name]
            for number, ids in spellings.items():
                table[number] = _mean_row(state[name], ids)
    return model


def _mean_row(table: Tensor, ids: list[int]) -> Tensor:
    return table[ids].mean(0)


def extend_positions(model: SpeechGPT, base: SpeechGPT) -> SpeechGPT:
    """`model`, with the positions of `base` beyond its own: texts as long as before can be said.

    A run gives its model as many as its corpus needs. Where it has them all it is `model` itself.
    """
    sizes = {name: max(getattr(m.config, name) for m in (model, base)) for name in POSITIONS}
    config = dataclasses.replace(model.config, **sizes)
    if config == model.config:
        return model
    longer = warm_start_model(config, model, {}).to(model.final_norm.weight.device).eval()
    with torch.no_grad():
        for name in POSITIONS.values():
            table = longer.state_dict()[name]
            before = base.state_dict()[name]
            own = len(model.state_dict()[name])
            table[own : len(before)] = before[own:]
    return longer


def require_compatible(config: GPTConfig, base: GPTConfig) -> None:
    """Raise DamagedFileError unless a model of `config` can hold the weights of one of `base`."""
    wanted = dataclasses.asdict(base)
    for name, value in dataclasses.asdict(config).items():
        if name not in FREE | TABLES and value != wanted[name]:
            raise DamagedFileError(
                f"The run's model has {name} {value}, the one it starts from {wanted[name]}: leave "
                "`model` in the run's settings as it was, or begin a new run."
            )
    ids = (config.start_text, config.stop_text)
    if ids != (base.start_text, base.stop_text) or config.text_vocab < base.text_vocab:
        raise DamagedFileError(
            f"The run's text has START and STOP at {ids} of {config.text_vocab} ids, the model it "
            f"starts from at {(base.start_text, base.stop_text)} of {base.text_vocab}: its "
            "tokenizer did not grow from that model's. Begin a new run with START_FROM."
        )
