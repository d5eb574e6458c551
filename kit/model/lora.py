"""Low-rank adapters in place: a model's matrices stay as they are, small ones beside them learn.

A linear layer W becomes W + alpha / rank * B A with A (rank, in) and B (out, rank); B begins at 0,
so the model begins as its base to the last bit. Names of the base's tensors stay, and `merged` is
the plain model that everything but training takes. Knows one model; nothing of optimisers or files.

LoRA: Hu et al. 2021. Where the data are few, adapters on all matrices of a layer learn as well as
all of it would, those on attention alone do not, and an alpha of 32 suits any rank (Schulman et al.
2025, "LoRA Without Regret").
"""

import dataclasses
import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.base.config import require, require_within
from kit.model.gpt import SpeechGPT
from kit.model.sequence import GPTConfig

TARGETS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
# Embeddings, positions and heads: what grows with a vocabulary, and by which field of GPTConfig.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """How large the adapters are, and beside which matrices of each layer they lie."""

    rank: int = 16
    alpha: float = 32.0  # an adapter counts alpha / rank times
    dropout: float = 0.0  # of what goes into the adapters
    targets: tuple = TARGETS  # matrices of each layer of the trunk

    def __post_init__(self):
        require_within(self, 1, 4096, "rank")
        require_within(self, 1e-3, 1e6, "alpha")
        require_within(self, 0, 0.9, "dropout")
        unknown = [name for name in self.targets if name not in TARGETS]
        known = f"choose some of {', '.join(TARGETS)}."
        require(not unknown and len(self.targets) > 0, self, "targets", known)
        require(len({*self.targets}) == len(self.targets), self, "targets", "name each once.")


class LoRALinear(nn.Linear):
    """`base` with an adapter: x (..., in) -> (..., out). Holds the parameters of `base` itself."""

    exact: Callable[[], Tensor] | None = None  # gives `weight` where that is rounded

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
        low = F.linear(self.drop(x), self.lora_A)  # (..., rank): scaled here it is cheapest
        return F.linear(x, self.weight, self.bias) + F.linear(self.scale * low, self.lora_B)

    def round_weight(self, dtype: torch.dtype, exact: Callable[[], Tensor]) -> None:
        """Hold the frozen matrix in `dtype`; `exact()` gives it in fp32 to whoever merges."""
        self.weight = nn.Parameter(self.weight.detach().to(dtype), requires_grad=False)
        self.exact = exact

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """The one matrix (out, in) that does the same without dropout, in fp32."""
        weight = self.exact().to(self.lora_A.device) if self.exact else self.weight
        return torch.addmm(weight, self.lora_B, self.lora_A, alpha=self.scale)


def is_adapter(name: str) -> bool:
    """Whether the parameter `name` is one that `add_adapters` has added."""
    return name.endswith((".lora_A", ".lora_B"))


def add_adapters(model: SpeechGPT, config: LoRAConfig) -> None:
    """Put an adapter beside each target of `model`, in place; what it computes stays the same.

    They are drawn apart from torch's random numbers, so the dropout of a first step stays as well.
    """
    generator = torch.Generator(device="cpu").manual_seed(torch.initial_seed())
    for layer in model.gpt.h:
        for target in config.targets:
            block, name = target.split(".")
            holder = getattr(layer, block)
            setattr(holder, name, LoRALinear(getattr(holder, name), config, generator))


def adapted_layers(model: SpeechGPT) -> Iterator[tuple[str, LoRALinear]]:
    """Each matrix of `model` beside which an adapter lies, by its name."""
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            yield name, module


def merged_state(model: SpeechGPT) -> dict[str, Tensor]:
    """The tensors of `model` under its base's names, adapters merged; the others are not copied."""
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    plain = {name: tensor for name, tensor in state.items() if not is_adapter(name)}
    for name, module in adapted_layers(model):
        plain[f"{name}.weight"] = module.merged_weight()
    return plain


def merged(model: SpeechGPT) -> SpeechGPT:
    """`model` without adapters, doing what it does with them: itself where it has none.

    What had no adapter is shared with `model`, so this costs the memory of the targets alone, and
    holds as long as `model` is not trained on.
    """
    if not any(adapted_layers(model)):
        return model
    with torch.device("meta"):
        plain = SpeechGPT(model.config)
    plain.load_state_dict(merged_state(model), assign=True)
    return plain.requires_grad_(False).eval()


def rows_from_base(config: GPTConfig, base: GPTConfig) -> dict[str, int]:
    """How many rows the tables of a model of `config` have from one of `base`, if not all."""
    found = {}
    for name, field in TABLES.items():
        rows = getattr(base, field)
        if rows < getattr(config, field):
            found[name] = rows
    return found
