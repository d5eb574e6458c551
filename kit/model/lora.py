"""LoRA (Hu et al. 2021): train small adapters beside a model's frozen matrices.

A linear layer W becomes W + alpha / rank * B A with A (rank, in) and B (out, rank). B starts at 0,
so the model starts bit-equal to its base. The base's tensor names stay; `merged` returns a plain
model. With little data, adapters on all matrices of a layer learn as well as full fine-tuning,
adapters on attention only do not, and an alpha of 32 suits any rank (Schulman et al. 2025, "LoRA
Without Regret").
"""

import dataclasses
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from kit.model.gpt import SpeechGPT
from kit.settings import LoRAConfig

# Embeddings, positions and heads, and the field of GPTConfig with their number of rows.
TABLES = {
    "text_embedding.weight": "text_vocab",
    "code_embedding.weight": "code_vocab",
    "text_position.weight": "max_text",
    "code_position.weight": "max_code",
    "text_head.weight": "text_vocab",
    "text_head.bias": "text_vocab",
    "code_head.weight": "code_vocab",
    "code_head.bias": "code_vocab",
}


class LoRALinear(nn.Linear):
    """`base` with an adapter: x (..., in) -> (..., out). Shares the parameters of `base`."""

    exact: Callable[[], Tensor] | None = None  # returns `weight` in fp32 if it is rounded

    def __init__(self, base: nn.Linear, config: LoRAConfig, generator: torch.Generator):
        super().__init__(base.in_features, base.out_features, device="meta")
        self.weight = base.weight
        self.bias = base.bias
        self.scale = config.alpha / config.rank
        self.drop = nn.Dropout(config.dropout)
        narrow = torch.empty(config.rank, base.in_features, device="cpu")
        nn.init.kaiming_uniform_(narrow, a=math.sqrt(5), generator=generator)
        wide = torch.zeros(base.out_features, config.rank, device="cpu")
        self.lora_A = nn.Parameter(narrow.to(base.weight.device))
        self.lora_B = nn.Parameter(wide.to(base.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(self.drop(x), self.lora_A)  # (..., rank): the cheapest place to scale
        return F.linear(x, self.weight, self.bias) + F.linear(self.scale * low, self.lora_B)


def is_adapter(name: str) -> bool:
    return name.endswith((".lora_A", ".lora_B"))


def add_adapters(model: SpeechGPT, config: LoRAConfig) -> None:
    """Add an adapter to each target of `model`, in place; its output stays the same."""
    # A generator of its own, so that torch's random state, and with it dropout, stays the same.
    generator = torch.Generator(device="cpu").manual_seed(torch.initial_seed())
    for layer in model.gpt.h:
        for target in config.targets:
            block, name = target.split(".")
            holder = getattr(layer, block)
            setattr(holder, name, LoRALinear(getattr(holder, name), config, generator))


def adapted_layers(model: SpeechGPT) -> list[tuple[str, LoRALinear]]:
    return [(n, module) for n, module in model.named_modules() if isinstance(module, LoRALinear)]


@torch.no_grad()
def merged(model: SpeechGPT) -> SpeechGPT:
    """Return a plain model: adapters merged, tables of codes as they are read.

    `model` itself if it is plain. Other tensors are shared with `model`, so it is valid until
    `model` is trained further.
    """
    shared = [(n, m.weight) for n, m in model.named_modules() if is_parametrized(m, "weight")]
    if not adapted_layers(model) and not shared:
        return model
    tensors = model.state_dict().items()
    state = {n: t for n, t in tensors if not is_adapter(n) and ".parametrizations." not in n}
    state |= {f"{name}.weight": weight for name, weight in shared}
    for name, module in adapted_layers(model):
        weight = module.exact().to(module.lora_A.device) if module.exact else module.weight
        # (out, in) in fp32, without dropout
        weight = torch.addmm(weight, module.lora_B, module.lora_A, alpha=module.scale)
        state[f"{name}.weight"] = weight
    with torch.device("meta"):
        plain = SpeechGPT(dataclasses.replace(model.config, code_levels=()))
    plain.load_state_dict(state, assign=True)
    return plain.requires_grad_(False).eval()
