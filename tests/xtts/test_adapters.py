"""An XTTS-v2 trained further, whole or with adapters: PEFT's numbers, and coqui-tts speaks it."""

import copy
import dataclasses

import pytest
import torch
from coqui import VARIED, coqui_loaded, coqui_xtts, opinionated, write_coqui
from helpers import CPU
from test_parity import require_same_codes, require_same_logits, rows
from torch import Tensor
from xtts_texts import AMHARIC, lines_of

from kit.base.tensor_file import checksum
from kit.extras.xtts_v2.model import load_xtts, save_xtts
from kit.extras.xtts_v2.tokenizer import XTTSTokenizer
from kit.model.gpt import SpeechGPT, weighted_loss
from kit.model.lora import LoRALinear, add_adapters, merged
from kit.model.sequence import EffectiveBatch, pack
from kit.model.weights import warm_start_model
from kit.settings import FinetuneConfig, LoRAConfig, SpeedConfig, TrainConfig
from kit.training.config import Base, Finetuning
from kit.training.loop import train
from kit.training.trainer import Trainer

TRAIN = TrainConfig(max_steps=5, warmup_steps=1, lr=3e-3, eval_steps=100)
WAYS = {
    "full": FinetuneConfig(),
    "lora": FinetuneConfig(method="lora"),
    "lora and all tables": FinetuneConfig(method="lora", tables="all"),
}


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """coqui-tts's own files of a model that says something else at each step."""
    folder = tmp_path_factory.mktemp("release")
    theirs = coqui_xtts(folder, VARIED)
    opinionated(theirs.gpt)
    return write_coqui(folder, theirs)


def batches(config):
    texts, codes, mels = rows(config, 3)
    micro = pack(config, texts, codes, mels)
    while True:
        yield EffectiveBatch(micro=[micro], position={"batch": 0})


@pytest.mark.parametrize("way", WAYS)
def test_grown_trained_and_saved_coqui_says_the_same(release, tmp_path, way):
    """coqui-tts's file, the kit's model, grown, five steps, the kit's file, coqui-tts's model."""
    xtts = load_xtts(release)
    began = XTTSTokenizer(release / "vocab.json", "am")
    grown = began.grow(lines_of(AMHARIC), tmp_path / "grown.json")
    config = dataclasses.replace(xtts.model.config, text_vocab=grown.vocab_size)
    model = warm_start_model(config, xtts.model, began.spellings(grown))
    base = Base(config=xtts.model.config, sha256=checksum(xtts.model.state_dict()))
    finetuning = Finetuning(config=WAYS[way], base=base)
    torch.manual_seed(0)
    state = Trainer(model, TRAIN, SpeedConfig(sdpa=True, ema=True), CPU, finetuning)
    losses = [event.loss for event in train(state, batches(config))]
    assert losses[-1] < losses[0]

    trained = merged(state.model).eval()
    larger = dataclasses.replace(xtts, model=trained, vocabulary=grown)
    theirs = coqui_loaded(save_xtts(larger, tmp_path / "trained"))
    require_same_logits(theirs.gpt, trained)
    codes = require_same_codes(theirs.gpt, trained)
    assert len(set(codes)) > 10
    before = load_xtts(release).model
    matrices = (model.gpt.h[0].mlp.c_fc.weight for model in (trained, before))
    assert not torch.equal(*matrices)
    old_rows = trained.text_embedding.weight[: began.vocab_size]
    assert torch.equal(old_rows, before.text_embedding.weight) == (way == "lora")


def with_peft(model: SpeechGPT, lora: LoRAConfig) -> SpeechGPT:
    """`model`, which has no adapters, with PEFT's in place."""
    from peft import LoraConfig, inject_adapter_in_model

    sizes = {"r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout}
    config = LoraConfig(target_modules=list(lora.targets), bias="none", **sizes)
    return inject_adapter_in_model(config, model)


def adapters(model: SpeechGPT) -> dict[str, Tensor]:
    """The adapters' matrices of the kit's model or of PEFT's, by the kit's names."""
    named = model.named_parameters()
    return {n.removesuffix(".default.weight"): p for n, p in named if "lora_" in n}


def losses_and_gradients(model: SpeechGPT) -> tuple[Tensor, dict[str, Tensor]]:
    texts, codes, mels = rows(model.config)
    batch = pack(model.config, texts, codes, mels)
    model.zero_grad()
    counts = len(batch.text_targets), len(batch.code_targets)
    weighted_loss(model.config, model(batch), *counts).backward()
    with torch.no_grad():
        states = model.hidden(batch)
    return states, {name: p.grad for name, p in adapters(model).items()}


def require_close(actual: Tensor, wanted: Tensor) -> None:
    assert wanted.norm() > 0
    assert float((actual - wanted).norm() / wanted.norm()) < 1e-5


FEWER = {"rank": 8, "targets": ("attn.c_attn", "mlp.c_proj")}


@pytest.mark.parametrize("changes", [{}, {"rank": 4, "alpha": 2.0}, FEWER], ids=str)
def test_adapters_are_those_of_peft(release, changes):
    """States, gradients, and the matrices that they merge into."""
    lora = LoRAConfig(**changes)
    pytest.importorskip("peft", reason="needs peft (make test-xtts installs it)")
    model = load_xtts(release).model.train()
    model.config = dataclasses.replace(model.config, dropout=0.0)
    for module in model.modules():  # dropout is drawn by each in its own order
        for name in ("p", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    theirs = with_peft(copy.deepcopy(model), lora)
    add_adapters(model, lora)
    assert adapters(model).keys() == adapters(theirs).keys()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, matrix in adapters(model).items():
            matrix.copy_(0.05 * torch.randn_like(matrix))
            adapters(theirs)[name].copy_(matrix)

    states, gradients = losses_and_gradients(model)
    their_states, their_gradients = losses_and_gradients(theirs)
    require_close(states, their_states)
    for name, gradient in their_gradients.items():
        require_close(gradients[name], gradient)

    plain = merged(model)
    for name, module in theirs.named_modules():
        if hasattr(module, "get_delta_weight"):
            module.merge()
            require_close(plain.get_submodule(name).weight, module.base_layer.weight)
    assert not any(isinstance(module, LoRALinear) for module in plain.modules())
