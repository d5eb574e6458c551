"""Adapters beside a model's matrices: they begin as nothing, merge into plain ones, go alone."""

import copy
import dataclasses

import pytest
import torch
from helpers import GPT, random_rows, tiny_model

from kit.base.errors import DamagedFileError
from kit.base.tensor_file import checksum, contents, file_bytes
from kit.model.gpt import SpeechGPT
from kit.model.lora import LoRALinear, add_adapters, merged
from kit.model.sequence import Batch, pack
from kit.model.weights import load_adapters, save_adapters, warm_start_model
from kit.settings import LoRAConfig

SMALL = LoRAConfig(rank=4, alpha=8.0)
GROWN = dataclasses.replace(
    GPT, text_vocab=26, max_code=48, start_text_id=GPT.start_text, stop_text_id=GPT.stop_text
)


def batch() -> Batch:
    return pack(GPT, *random_rows(GPT, 4))


def adapted(model: SpeechGPT, lora: LoRAConfig = SMALL) -> SpeechGPT:
    """`model` with adapters that have learnt something."""
    add_adapters(model, lora)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, LoRALinear):
                module.lora_B += 0.3 * torch.randn_like(module.lora_B)
    return model


def test_a_new_adapter_changes_no_loss():
    model = tiny_model()
    before = [float(loss.detach()) for loss in model(batch())]
    add_adapters(model, SMALL)
    assert [float(loss.detach()) for loss in model(batch())] == before


@pytest.mark.parametrize("targets", [("attn.c_attn",), SMALL.targets], ids=str)
def test_a_merged_model_has_the_same_losses_and_the_names_of_its_base(targets):
    model = adapted(tiny_model(), dataclasses.replace(SMALL, targets=targets)).eval()
    plain = merged(model)
    assert plain.state_dict().keys() == SpeechGPT(GPT).state_dict().keys()
    with torch.no_grad():
        actual, expected, untrained = (m(batch()) for m in (plain, model, tiny_model()))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)
    assert all(abs(a - b) > 1e-3 * b for a, b in zip(actual, untrained)), "it has learnt nothing"


@pytest.fixture
def travelled(tmp_path):
    """A base, a model that grew from it and was trained, and the file of its adapters."""
    base = tiny_model()
    model = adapted(warm_start_model(GROWN, base, {20: [1, 2]}))
    grown = ("text_embedding.weight", "text_head.weight", "text_head.bias")
    rows = dict.fromkeys(grown, GPT.text_vocab) | {"code_position.weight": GPT.max_code}
    with torch.no_grad():
        for name, first in rows.items():
            model.state_dict()[name][first:] += 0.5
    path = tmp_path / "adapters-raw.safetensors"
    save_adapters(model, path, SMALL, rows, checksum(base.state_dict()))
    return base, model, path


def test_saved_adapters_restore_the_model_from_its_base(travelled):
    base, model, path = travelled
    before = copy.deepcopy(base.state_dict())
    loaded = load_adapters(path, base)
    assert loaded.config == GROWN
    exactly = {"rtol": 0, "atol": 0}
    torch.testing.assert_close(loaded.state_dict(), merged(model).state_dict(), **exactly)
    torch.testing.assert_close(base.state_dict(), before, **exactly)
    learnt = sum(tensor.numel() for tensor in contents(path)[0].values())
    assert path.stat().st_size < 4 * learnt + 8000
    with pytest.raises(DamagedFileError, match=r"trained on another base model .* load the voice"):
        load_adapters(path, tiny_model(seed=1))


B = "gpt.h.0.mlp.c_fc.lora_B"
DAMAGE = {  # what is wrong: how to spoil the tensors `t` and the header `h`
    rf"{B} is not finite": lambda t, h: t[B].fill_(float("nan")),
    rf"{B} \(3, 4\), not \(128, 4\)": lambda t, h: t.update({B: torch.zeros(3, 4)}),
    f"missing: {B}": lambda t, h: t.pop(B),
    "no model has the tables": lambda t, h: h["tables"].update({"gpt.h.0.ln_1.weight": 0}),
    "base_sha256": lambda t, h: h.pop("base_sha256"),
}


def test_a_damaged_or_missing_file_says_what_is_wrong(travelled, tmp_path):
    base, _, path = travelled
    whole = path.read_bytes()
    for facts, spoil in DAMAGE.items():
        path.write_bytes(whole)
        tensors, header = contents(path)
        spoil(tensors, header)
        path.write_bytes(file_bytes(tensors, header))
        with pytest.raises(DamagedFileError, match=rf"is damaged .*{facts}"):
            load_adapters(path, base)
    path.write_bytes(whole[:100])
    with pytest.raises(DamagedFileError, match="is damaged"):
        load_adapters(path, base)
    with pytest.raises(DamagedFileError, match=r"There is no .*finetune\.method=lora"):
        load_adapters(tmp_path / "none.safetensors", base)


def test_merging_changes_no_model_and_returns_a_plain_one_itself():
    model, plain = adapted(tiny_model()), tiny_model()
    before = copy.deepcopy(model.state_dict())
    merged(model)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert merged(plain) is plain
