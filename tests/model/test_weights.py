"""A model that begins with another one's weights says what that one would, and has more rows."""

import dataclasses

import pytest
import torch
from helpers import GPT, random_rows, tiny_model

from kit.base.config import build, load_preset
from kit.base.errors import DamagedFileError, KitError
from kit.base.tensor_file import file_bytes
from kit.model.gpt import SpeechGPT
from kit.model.sequence import pack
from kit.model.weights import (
    extend_positions,
    first_weights,
    load_model,
    model_settings,
    save_model,
    warm_start_model,
)
from kit.settings import GPTConfig

BASE = tiny_model().eval()
NEW = 5


def larger(**over) -> GPTConfig:
    """A run's model that begins with BASE: its settings, more text ids, more positions."""
    text_vocab = BASE.config.text_vocab + NEW
    longer = {"max_text": BASE.config.max_text + 16, "max_code": BASE.config.max_code + 16}
    settings = model_settings(BASE.config) | {"text_vocab": text_vocab} | longer
    return build(GPTConfig, settings | over)


def spelt(ids: list[int]) -> dict[int, list[int]]:
    return {BASE.config.text_vocab + i: ids for i in range(NEW)}


def test_a_larger_model_has_the_losses_of_its_base():
    model = warm_start_model(larger(), BASE, spelt([1, 2])).eval()
    texts, codes, references = random_rows(BASE.config, 4)
    with torch.no_grad():
        before = BASE(pack(BASE.config, texts, codes, references))
        after = model(pack(model.config, texts, codes, references))
    torch.testing.assert_close(after[1], before[1])


def test_a_new_token_starts_as_the_mean_of_those_that_spelt_it():
    model = warm_start_model(larger(), BASE, spelt([3, 7, 7]))
    for name in ("text_embedding.weight", "text_head.weight", "text_head.bias"):
        own, theirs = model.state_dict()[name], BASE.state_dict()[name]
        torch.testing.assert_close(own[-1], (theirs[3] + 2 * theirs[7]) / 3)
        assert torch.equal(own[: len(theirs)], theirs)


def test_positions_that_a_run_left_out_are_added_at_its_end():
    short = warm_start_model(larger(max_text=8, max_code=12, dropout=0.3), BASE, spelt([0])).eval()
    assert short.config.dropout == 0.3, "the run's own"
    assert torch.equal(short.text_position.weight, BASE.text_position.weight[:8])
    torch.nn.init.normal_(short.text_position.weight)
    whole = extend_positions(short, BASE)
    assert torch.equal(whole.text_position.weight[:8], short.text_position.weight)
    assert torch.equal(whole.text_position.weight[8:], BASE.text_position.weight[8:])
    assert whole.config.max_code == BASE.config.max_code and not whole.training
    assert torch.equal(whole.code_head.weight, short.code_head.weight)
    longer = warm_start_model(larger(), BASE, spelt([0]))
    assert extend_positions(longer, BASE) is longer


FEWER = {"text_vocab": BASE.config.text_vocab - 1, "stop_text_id": 2}
WRONG = [({"width": 64}, "has width 64, its base model"), ({"code_vocab": 99}, "has code_vocab 99")]
WRONG += [({"start_text_id": 0}, "not grown from that model's"), (FEWER, "not grown")]


@pytest.mark.parametrize(("over", "facts"), WRONG)
def test_a_configuration_that_cannot_hold_the_weights_is_refused(over, facts):
    with pytest.raises(DamagedFileError, match=facts):
        warm_start_model(larger(**over), BASE, {})


def test_codes_that_share_digits_are_saved_as_plain_tables(tmp_path):
    torch.manual_seed(0)
    config = dataclasses.replace(GPT, code_levels=(4, 2, 2), code_vocab=18)
    model = SpeechGPT(config).eval()
    table = model.code_embedding.parametrizations.weight
    for digits, code in (((3, 0, 0), 3), ((0, 1, 0), 4), ((2, 1, 1), 14)):
        shared = sum(part[digit] for part, digit in zip(table[0].digits, digits))
        assert torch.allclose(model.code_embedding.weight[code], table.original[code] + shared)
    assert torch.equal(model.code_embedding.weight[16:], table.original[16:])
    path = tmp_path / "model.safetensors"
    save_model(model, path)
    plain = load_model(path)
    assert plain.config == dataclasses.replace(config, code_levels=())
    assert plain.state_dict().keys() == SpeechGPT(plain.config).state_dict().keys()
    example = pack(config, *random_rows(config, 4))
    assert all(torch.equal(a, b) for a, b in zip(model(example), plain(example), strict=True))


def test_training_starts_with_pretrained_layers(tmp_path):
    path = tmp_path / "layers.safetensors"
    parts = ("gpt.", "text_position.", "code_position.")
    layers = {name: w.half() for name, w in BASE.state_dict().items() if name.startswith(parts)}
    path.write_bytes(file_bytes(layers, {"width": BASE.config.width}))
    model = first_weights(larger(pretrained_layers=True), path)
    count = BASE.config.max_code
    for name, theirs in BASE.state_dict().items():
        own = model.state_dict()[name][: len(theirs)]
        taken = name.startswith(parts)
        # A bias of zeros, a scale of ones: the same in any model.
        assert torch.equal(own, theirs.half().float()) == taken or theirs.unique().numel() == 1
    assert model.code_position.weight[count:].abs().sum() > 0, "further positions are random"
    with pytest.raises(KitError, match="needs width"):
        first_weights(larger(width=64, pretrained_layers=True), path)


def test_the_pretrained_layers_have_the_size_of_the_preset():
    preset = load_preset("cpu")
    model = build(GPTConfig, preset["model"] | preset["recordings"]["model"])
    assert model.pretrained_layers
    first_weights(model)
