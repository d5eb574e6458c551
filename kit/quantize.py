"""Linear layers for inference in every number format: fp32, bf16, fp16, int8, int4.

One new code a step is a row times every weight: the time goes into reading the weights, so fewer
bytes are more speed. int8 has one scale per output channel (Dettmers et al. 2022), int4 one per
group of 32 inputs (Dettmers & Zettlemoyer 2023); biases are kept as they are. On a CPU weights are
packed once, the way oneDNN's and torch's own kernels read them. `choose` picks what can run here
and says so. Knows `nn.Linear` alone.

Shapes: R rows, I input features, O output features.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FORMATS = ("fp32", "bf16", "fp16", "int8", "int8-weight-only", "int4")
FEW_ROWS = 16  # beyond these a product is no longer bound by reading its weights
GROUP = 32  # inputs that share an int4 scale


class Plain(nn.Module):
    """The layer itself, in `dtype`; fp32 shares the model's own weights."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.weight, self.bias = (nn.Buffer(t.detach().to(dtype)) for t in parts(linear))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Packed(nn.Module):
    """Weights laid out as oneDNN reads them, fp32 or bf16; CPU only."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype = torch.float32):
        super().__init__()
        weight, bias = (t.detach().to(dtype) for t in parts(linear))
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        self.packed_bytes = weight.numel() * weight.element_size()
        self.bias = nn.Buffer(bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")


class DynamicInt8(nn.Module):
    """int8 times int8: activations are scaled as they come, one scale for all rows; CPU only."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype = torch.float32):
        super().__init__()
        weight, bias = parts(linear)
        rounded, scale = int8(weight)
        zeros = torch.zeros(len(scale), dtype=torch.long)
        whole = torch._make_per_channel_quantized_tensor(rounded, scale.double(), zeros, 0)
        self.packed = torch.ops.quantized.linear_prepack(whole, bias.detach().float())
        self.packed_bytes = rounded.numel() + 4 * (len(scale) + len(bias))
        # Processors without VNNI add pairs of products in 16 bits: 7 bits of x keep that in range.
        self.seven_bits = not torch.cpu._is_vnni_supported()

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic.default(x, self.packed, self.seven_bits)


class WeightOnlyInt8(nn.Module):
    """int8 weights, expanded inside the product; activations stay in `dtype`."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        weight, bias = parts(linear)
        rounded, scale = int8(weight)
        self.weight, self.scale = nn.Buffer(rounded), nn.Buffer(scale.to(dtype))
        self.bias = nn.Buffer(bias.detach().to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and len(x) <= FEW_ROWS:
            return torch._weight_int8pack_mm(x, self.weight, self.scale) + self.bias
        # Whole numbers are up to 127 times too large: fp16 would overflow.
        return F.linear(x / 128, self.weight.to(x.dtype)) * (self.scale * 128) + self.bias


class Int4(nn.Module):
    """int4 weights in groups of 32 inputs, each with a scale and an offset; CPU only, bf16."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        weight, bias = parts(linear)
        if weight.shape[1] % GROUP:
            raise ValueError(
                f"int4 takes inputs in groups of {GROUP}; this layer has {weight.shape[1]}. "
                "Take int8, or a width that divides."
            )
        self.outputs = len(weight)
        groups = F.pad(weight.detach().float(), (0, 0, 0, -len(weight) % 16)).unflatten(
            1, (-1, GROUP)
        )
        low, high = groups.amin(-1), groups.amax(-1)
        scale = (high - low).clamp(min=1e-8) / 15
        rounded = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, 15)
        rounded = rounded.flatten(1).to(torch.int32)
        self.weight = nn.Buffer(torch.ops.aten._convert_weight_to_int4pack_for_cpu(rounded, 2))
        # The kernel reads (q - 8) * scale + offset.
        both = torch.stack((scale, low + 8 * scale), dim=-1).transpose(0, 1)
        self.scales = nn.Buffer(both.to(dtype).contiguous())
        self.bias = nn.Buffer(bias.detach().to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.weight, GROUP, self.scales)
        return y[:, : self.outputs] + self.bias


def choose(
    weights: str, device: torch.device, compiled: bool
) -> tuple[type[nn.Module], torch.dtype, str]:
    """The layer and the dtype of activations for a format of `FORMATS`, and what runs, in words.

    Raises ValueError for int4 where torch has no kernel for it.
    """
    half = "bf16" if device.type == "cpu" or torch.cuda.is_bf16_supported(False) else "fp16"
    if weights == "bf16" and half == "fp16":
        return Plain, torch.float16, "fp16: this GPU has no bf16"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(weights, torch.float32)
    low = torch.bfloat16 if half == "bf16" else torch.float16
    if weights == "int4":
        if device.type != "cpu":
            raise ValueError("int4 runs on CPUs alone: take int8.")
        return Int4, torch.bfloat16, "int4 weights, bf16 activations"
    if weights.startswith("int8"):
        dynamic = device.type == "cpu" and not compiled and has_int8_kernel()
        if dynamic and weights == "int8":
            return DynamicInt8, torch.float32, "int8 weights and products (dynamic)"
        why = "int8 products: " + ("never compiled" if compiled else "none on this device")
        ran = f"int8 weights, {half} activations" + (f" ({why})" if weights == "int8" else "")
        return WeightOnlyInt8, low, ran
    packs = device.type == "cpu" and not compiled and torch.backends.mkldnn.is_available()
    if packs and weights != "fp16":
        return Packed, dtype, f"{weights}, packed for this CPU"
    return Plain, dtype, weights


def has_int8_kernel() -> bool:
    """Whether this build of torch has packed int8 products for this processor."""
    return torch.backends.quantized.engine in ("x86", "fbgemm", "onednn")


def weight_bytes(model: nn.Module) -> int:
    """Bytes of everything `model` stores, packed weights included."""
    tensors = [*model.parameters(), *model.buffers()]
    packed = sum(getattr(m, "packed_bytes", 0) for m in model.modules())
    return packed + sum(t.numel() * t.element_size() for t in tensors)


def parts(linear: nn.Linear) -> tuple[Tensor, Tensor]:
    """Weight (O, I) and bias (O,), zeros where the layer has none."""
    bias = linear.bias if linear.bias is not None else linear.weight.new_zeros(len(linear.weight))
    return linear.weight, bias


def int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers (O, I) in -127..127 and the scale (O,) of each row.

    Raises ValueError for weights that are not finite: there is no whole number for them.
    """
    weight = weight.detach().float()
    if not torch.isfinite(weight).all():
        raise ValueError("These weights are damaged: not finite. Load an earlier checkpoint.")
    scale = weight.abs().amax(dim=1).clamp(min=1e-8) / 127
    return (weight / scale[:, None]).round().to(torch.int8), scale
