"""INT8 for inference: int8 weights with one scale per output channel, and what that costs.

Weights are stored as int8 (a quarter of the bytes); biases, norms and embeddings stay as they are.
On a CPU the product itself runs in int8 with activations scaled as they come (dynamic
quantisation, torch's packed kernels); elsewhere weights are expanded on the fly (weight-only).
`compare` says what it costs in agreement. Knows the model; nothing of audio.

Dettmers et al. 2022 for per-channel scales. Shapes: O output, I input features, N positions.
"""

import copy
import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.model import EffectiveBatch, SpeechGPT


class Int8Linear(nn.Module):
    """A linear layer with int8 weights (O, I), fp32 scales (O,) and its bias untouched."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None):
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)
        self.packed = None

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> "Int8Linear":
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(dim=1).clamp(min=1e-8) / 127
        rounded = (weight / scale[:, None]).round().to(torch.int8)
        bias = None if linear.bias is None else linear.bias.detach().clone()
        return cls(rounded, scale, bias)

    def dequantized(self) -> Tensor:
        """The weights the int8 ones stand for, fp32 (O, I)."""
        return self.weight.float() * self.scale[:, None]

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or not has_int8_kernel():
            return F.linear(x, self.dequantized().to(x.dtype), self.bias)
        if self.packed is None:
            zeros = torch.zeros(len(self.scale), dtype=torch.long)
            weight = torch._make_per_channel_quantized_tensor(self.weight, self.scale, zeros, 0)
            self.packed = torch.ops.quantized.linear_prepack(weight, self.bias)
        return torch.ops.quantized.linear_dynamic(x.contiguous(), self.packed, reduce_range=False)


def has_int8_kernel() -> bool:
    """Whether this build of torch has packed int8 products for this processor."""
    return torch.backends.quantized.engine in ("x86", "fbgemm", "onednn")


def quantize(model: SpeechGPT) -> SpeechGPT:
    """A copy of `model` whose trunk and code head are INT8; the original is left alone."""
    small = copy.deepcopy(model).eval()
    for module in [small, *small.gpt.modules()]:
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name != "text_head":
                setattr(module, name, Int8Linear.from_linear(child))
    return small


def weight_bytes(model: nn.Module) -> int:
    """Bytes of everything the model stores."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(t.numel() * t.element_size() for t in tensors)


def linear_bytes(model: SpeechGPT) -> int:
    """Bytes of what INT8 changes: the linear layers of the trunk and the code head."""
    parts = [
        m for m in [*model.gpt.modules(), model.code_head] if isinstance(m, (nn.Linear, Int8Linear))
    ]
    return sum(weight_bytes(m) for m in parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """INT8 against fp32 along real rows, the true codes given (teacher forcing)."""

    top1_agreement: float  # share of positions where both rank the same code first
    mean_logit_error: float
    max_logit_error: float
    size_ratio: float  # bytes of the whole model, INT8 / fp32
    linear_size_ratio: float  # bytes of the quantised layers alone


@torch.inference_mode()
def compare(model: SpeechGPT, small: SpeechGPT, batches: list[EffectiveBatch]) -> Cost:
    """What quantising `model` into `small` costs over `batches`."""
    agree = count = 0
    total = largest = 0.0
    for micro in (m for batch in batches for m in batch.micro):
        full, int8 = (
            m.code_head(m.hidden(micro).flatten(0, 1)[micro.code_at]) for m in (model, small)
        )
        error = (full - int8).abs()
        agree += int((full.argmax(-1) == int8.argmax(-1)).sum())
        count += len(full)
        total, largest = total + float(error.mean(-1).sum()), max(largest, float(error.max()))
    return Cost(
        top1_agreement=agree / count,
        mean_logit_error=total / count,
        max_logit_error=largest,
        size_ratio=weight_bytes(small) / weight_bytes(model),
        linear_size_ratio=linear_bytes(small) / linear_bytes(model),
    )
