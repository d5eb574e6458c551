"""Linear layers for inference in every number format: fp32, bf16, fp16, int8.

Decoding one code is bound by reading the weights, so fewer bytes are faster. int8 has one scale per
output channel (Dettmers et al. 2022). `choose_layer` picks what this machine can run and says so.

Shapes: R rows, I input features, O output features.
"""

import functools
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.base.compiler import best_seconds
from kit.base.errors import SpeechError
from kit.base.hardware import DTYPES, gpu_precision

FEW_ROWS = 16  # up to here a matmul is bound by reading its weights


class PlainLinear(nn.Module):
    """The layer in `dtype`; fp32 shares the model's weights."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype):
        super().__init__()
        weight, bias = parts(linear)
        self.weight = nn.Buffer(weight.to(dtype))
        self.bias = nn.Buffer(bias.to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cuda" and torch.compiler.is_compiling():
            # Inductor has a kernel for one row of `mm`, not of `addmm`; it adds the bias, too.
            return F.linear(x, self.weight) + self.bias
        return F.linear(x, self.weight, self.bias)


class SplitByThread(PlainLinear):
    """For few rows, one matrix-vector product a thread over its share of the outputs; CPU only.

    Three times as fast as MKL's own threads on some processors, half as fast on others:
    `split_is_faster` measures it.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype):
        super().__init__(linear, dtype)
        threads = range(1, torch.get_num_threads() + 1)
        count = max(n for n in threads if len(self.bias) % n == 0)
        self.shares = self.weight.unflatten(0, (count, -1)), self.bias.view(count, -1, 1)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > FEW_ROWS:
            return super().forward(x)
        weight, bias = self.shares
        y = torch.baddbmm(bias, weight, x.t().expand(len(bias), -1, -1))  # (threads, share, R)
        return y.view(-1, len(x)).t().contiguous()


class OneDnn(nn.Module):
    """bf16 weights packed for oneDNN; CPU only."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype):
        super().__init__()
        weight, bias = parts(linear)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype), 1)
        self.packed_bytes = weight.numel() * dtype.itemsize
        self.bias = nn.Buffer(bias.to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")


class DynamicInt8(nn.Module):
    """int8 weights and activations, quantised dynamically with one scale for all rows; CPU only."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype):
        super().__init__()
        weight, bias = parts(linear)
        rounded, scale = int8(weight)
        zeros = torch.zeros(len(scale), dtype=torch.long)
        with warnings.catch_warnings(category=UserWarning, action="ignore"):  # torch will drop it
            quantized = torch._make_per_channel_quantized_tensor(rounded, scale.double(), zeros, 0)
        self.packed = torch.ops.quantized.linear_prepack(quantized, bias.float())
        self.packed_bytes = rounded.numel() + 4 * (len(scale) + len(bias))
        # Without VNNI, pairs of products are added in 16 bits: 7-bit activations do not overflow.
        self.seven_bits = not torch.cpu._is_vnni_supported()

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic.default(x, self.packed, self.seven_bits)


class WeightOnlyInt8(nn.Module):
    """int8 weights, dequantised for every matmul; activations stay in `dtype`.

    On a GPU these are five kernels that move five bytes a weight. Compiled, for one row, they are
    one kernel that moves one.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype):
        super().__init__()
        weight, bias = parts(linear)
        if weight.device.type == "cpu" and weight.shape[1] % 16:
            raise SpeechError(
                "int8-weight-only needs a multiple of 16 inputs on a CPU, and this layer has "
                f"{weight.shape[1]}: use int8, or another width."
            )
        rounded, scale = int8(weight)
        self.weight = nn.Buffer(rounded)
        self.scale = nn.Buffer(scale.to(dtype))
        self.bias = nn.Buffer(bias.to(dtype))
        # For many rows fp32 is ten times as fast as emulated bf16.
        emulated = weight.device.type == "cpu" and not has_bf16()
        self.matmul_dtype = torch.float32 if emulated else dtype

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and len(x) <= FEW_ROWS:
            return torch._weight_int8pack_mm(x, self.weight, self.scale) + self.bias
        # The unscaled int8 weights are up to 127 times too large: fp16 would overflow.
        y = F.linear((x / 128).to(self.matmul_dtype), self.weight.to(self.matmul_dtype))
        return torch.addcmul(self.bias, y.to(x.dtype), self.scale * 128)


def choose_layer(
    weights: str, device: torch.device, compiled: bool
) -> tuple[type[nn.Module], torch.dtype, str]:
    """Return the layer, the activation dtype and a description of what runs for a format."""
    cpu = device.type == "cpu"
    half = "bf16" if cpu or torch.cuda.is_bf16_supported(False) else "fp16"
    eager_cpu = cpu and not compiled
    if weights == "int8" and eager_cpu and has_fbgemm():
        return DynamicInt8, torch.float32, "int8 weights and activations (dynamic)"
    if weights.startswith("int8"):
        ran = f"int8 weights, {half} activations"
        if weights == "int8" and eager_cpu:
            ran += " (this CPU has no int8 matmuls)"
        return WeightOnlyInt8, DTYPES[half], ran
    if weights == "bf16" and half == "fp16":
        return PlainLinear, torch.float16, "fp16: this GPU has no bf16"
    if weights == "bf16" and cpu and not has_bf16():
        layer, dtype, ran = choose_layer("fp32", device, compiled)
        return layer, dtype, f"{ran}; this processor has no bf16 products"
    if weights == "fp32" and eager_cpu and split_is_faster(torch.get_num_threads()):
        return SplitByThread, torch.float32, "fp32, split by thread"
    if weights == "bf16" and eager_cpu and torch.backends.mkldnn.is_available():
        return OneDnn, torch.bfloat16, "bf16, packed for this CPU"
    return PlainLinear, DTYPES[weights], weights


def default_format(device: torch.device) -> str:
    """Return the default format on `device`: a GPU's half precision, else fp32."""
    if device.type != "cuda":
        return "fp32"
    return gpu_precision(torch.cuda.get_device_capability(device)).value


def has_fbgemm() -> bool:
    """Return whether this build of torch has packed int8 matmuls for this processor."""
    available = hasattr(torch, "_make_per_channel_quantized_tensor")  # until torch drops it
    return available and torch.backends.quantized.engine in ("x86", "fbgemm", "onednn")


@functools.cache
def split_is_faster(threads: int) -> bool:
    """Return whether `SplitByThread` is faster for a row, measured in 10 ms."""
    if threads == 1 or not torch.backends.mkl.is_available():
        return False
    linear = nn.utils.skip_init(nn.Linear, 1024, 1024)  # does not use the random generator
    row = torch.ones(1, 1024)
    with torch.inference_mode():
        for tensor in (linear.weight, linear.bias):
            tensor.fill_(1.0)
        shares = SplitByThread(linear, torch.float32)
        return best_seconds(lambda: shares(row)) < best_seconds(lambda: linear(row))


def has_bf16() -> bool:
    """Return whether oneDNN has bf16 matmuls on this processor; True if torch has no oneDNN."""
    try:
        if torch.backends.mkldnn.is_available():
            torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=torch.bfloat16), 1)
        return True
    except RuntimeError:  # "bf16 path needs the cpu support avx_ne_convert or avx512bw, ..."
        return False


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of everything `model` stores, packed weights included."""
    tensors = [*model.parameters(), *model.buffers()]
    packed = sum(getattr(m, "packed_bytes", 0) for m in model.modules())
    return packed + sum(t.nbytes for t in tensors)


def parts(linear: nn.Linear) -> tuple[Tensor, Tensor]:
    """Return weight (O, I) and bias (O,), zeros if the layer has none, without gradients."""
    weight = linear.weight.detach()
    if linear.bias is None:
        return weight, weight.new_zeros(len(weight))
    return weight, linear.bias.detach()


def int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return finite weights as int8 (O, I) in -127..127, and scales (O,)."""
    weight = weight.detach().float()
    scale = weight.abs().amax(dim=1).clamp(min=1e-8) / 127
    return (weight / scale[:, None]).round().to(torch.int8), scale
