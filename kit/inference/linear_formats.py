"""Linear layers for inference in every number format: fp32, bf16, fp16, int8.

One new code a step is a row times every weight: the time goes into reading the weights, so fewer
bytes are more speed. int8 has one scale per output channel (Dettmers et al. 2022); biases are kept
as they are. On a CPU most weights are packed once, the way FBGEMM's, oneDNN's and torch's own
kernels read them. `choose_layer` picks what can run here and says so. Knows `nn.Linear` alone.

Shapes: R rows, I input features, O output features.
"""

import functools
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.base.compiler import best_seconds
from kit.base.hardware import DTYPES, gpu_precision

FORMATS = ("fp32", "bf16", "fp16", "int8", "int8-weight-only")
FEW_ROWS = 16  # beyond these a product is no longer bound by reading its weights
SEVERAL_ROWS = 5  # from here on a product is a matrix product, and does well in int8
AT_ONCE = 256  # rows of a long prompt: what lies between its products stays in the caches


class PlainLinear(nn.Module):
    """The layer itself, in `dtype`; fp32 shares the model's own weights."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype = torch.float32):
        super().__init__()
        weight, bias = parts(linear)
        self.weight = nn.Buffer(weight.detach().to(dtype))
        self.bias = nn.Buffer(bias.detach().to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class SplitByThread(PlainLinear):
    """A few rows by one matrix-vector product a thread, each of its share of the outputs; CPU only.

    On some processors a row's weights are read three times as fast as by MKL's own threads, on
    others half as fast: `split_is_faster` finds out.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype = torch.float32):
        super().__init__(linear, dtype)
        threads = range(1, torch.get_num_threads() + 1)
        shares = max(n for n in threads if len(self.bias) % n == 0)
        self.shares = self.weight.unflatten(0, (shares, -1)), self.bias.view(shares, -1, 1)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > FEW_ROWS:
            return super().forward(x)
        weight, bias = self.shares
        y = torch.baddbmm(bias, weight, x.t().expand(len(bias), -1, -1))  # (threads, share, R)
        return y.view(-1, len(x)).t().contiguous()


class OneDnn(nn.Module):
    """bf16 weights laid out as oneDNN reads them; CPU only."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        weight, bias = parts(linear)
        weight = weight.detach().to(dtype)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        self.packed_bytes = weight.numel() * weight.element_size()
        self.bias = nn.Buffer(bias.detach().to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")


class Fbgemm16(nn.Module):
    """fp16 weights packed by FBGEMM, products and activations in fp32; CPU only.

    The half precision of processors without bf16; at XTTS-v2's size quicker than bf16 where both
    are (docs/measurements-archive.md).
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype = torch.float32):
        super().__init__()
        weight, bias = parts(linear)
        self.packed = torch.ops.quantized.linear_prepack_fp16(
            weight.detach().float(), bias.detach().float()
        )
        self.packed_bytes = 2 * weight.numel() + 4 * bias.numel()

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic_fp16.default(x, self.packed)


class DynamicInt8(nn.Module):
    """int8 times int8: activations are scaled as they come, one scale for all rows; CPU only."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype = torch.float32):
        super().__init__()
        weight, bias = parts(linear)
        rounded, scale = int8(weight)
        zeros = torch.zeros(len(scale), dtype=torch.long)
        with warnings.catch_warnings(category=UserWarning, action="ignore"):  # torch will drop it
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
        if weight.device.type == "cpu" and weight.shape[1] % 16:
            raise ValueError(
                f"int8-weight-only takes inputs in groups of 16 on a CPU; this layer has "
                f"{weight.shape[1]}. Take int8, or a width that divides."
            )
        rounded, scale = int8(weight)
        self.weight = nn.Buffer(rounded)
        self.scale = nn.Buffer(scale.to(dtype))
        self.bias = nn.Buffer(bias.detach().to(dtype))
        # Of many rows: where a CPU emulates bf16, fp32 is ten times as fast.
        emulated = weight.device.type == "cpu" and not has_bf16()
        self.product_dtype = torch.float32 if emulated else dtype

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and len(x) <= FEW_ROWS:
            return torch._weight_int8pack_mm(x, self.weight, self.scale) + self.bias
        # Whole numbers are up to 127 times too large: fp16 would overflow.
        y = F.linear((x / 128).to(self.product_dtype), self.weight.to(self.product_dtype))
        return torch.addcmul(self.bias, y.to(x.dtype), self.scale * 128)


class CompiledInt8(nn.Module):
    """int8 weights of a compiled step: prompts and several rows are multiplied in int8, too.

    Activations then have a scale for each row, so rows do not touch each other; CPU only. Where a
    processor's int8 products overflow, the weights are expanded to fp32 for them.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        weight, bias = parts(linear)
        rounded, scale = int8(weight)
        self.weight = nn.Buffer(rounded.t().contiguous())  # (I, O): twice as fast with many inputs
        self.scale = nn.Buffer(scale.float())
        self.bias = nn.Buffer(bias.detach().float())
        self.exact = int8_matmul_is_exact()

    def forward(self, x: Tensor) -> Tensor:
        if len(x) < SEVERAL_ROWS and torch.compiler.is_compiling():
            scale = self.scale.to(x.dtype)
            bias = self.bias.to(x.dtype)
            return torch._weight_int8pack_mm(x, self.weight.t().contiguous(), scale) + bias
        return torch.cat([self.products(rows) for rows in x.split(AT_ONCE)])

    def products(self, x: Tensor) -> Tensor:
        if not self.exact:
            return torch.addcmul(self.bias, x.float() @ self.weight.float(), self.scale).to(x.dtype)
        scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-8) / 127
        y = torch._int_mm((x / scale).round().to(torch.int8), self.weight)
        # Not two products: the compiler takes those for a pattern, whose kernel is slow.
        y = torch.addcmul(self.bias, y * scale, self.scale).to(x.dtype)
        # Kept in memory of its own, or attention works its query out anew for every key.
        return y.as_strided(y.shape, y.stride())


def choose_layer(
    weights: str, device: torch.device, compiled: bool
) -> tuple[type[nn.Module], torch.dtype, str]:
    """The layer and the dtype of activations for a format of `FORMATS`, and what runs, in words."""
    cpu = device.type == "cpu"
    half = "bf16" if cpu or torch.cuda.is_bf16_supported(False) else "fp16"
    low = DTYPES[half]
    eager_cpu = cpu and not compiled
    if weights == "int8" and eager_cpu and has_fbgemm():
        return DynamicInt8, torch.float32, "int8 weights and products (dynamic)"
    if weights == "int8" and cpu and compiled:
        products = (
            "int8" if int8_matmul_is_exact() else "fp32 (int8 ones overflow on this processor)"
        )
        ran = (
            f"int8 weights; {SEVERAL_ROWS} rows or more: {products} products; "
            "fewer: bf16 activations"
        )
        return CompiledInt8, low, ran
    if weights.startswith("int8"):
        why = " (int8 products: none on this device)" if weights == "int8" else ""
        return WeightOnlyInt8, low, f"int8 weights, {half} activations{why}"
    if weights == "bf16" and half == "fp16":
        return PlainLinear, low, "fp16: this GPU has no bf16"
    if weights == "bf16" and cpu and not has_bf16():
        instead = "fp16" if eager_cpu and has_fbgemm() else "fp32"
        kind, dtype, ran = choose_layer(instead, device, compiled)
        return kind, dtype, f"{ran}; this processor has no bf16 products"
    if weights == "fp32" and eager_cpu and split_is_faster(torch.get_num_threads()):
        return SplitByThread, torch.float32, "fp32, shared out among threads"
    if weights == "bf16" and eager_cpu and torch.backends.mkldnn.is_available():
        return OneDnn, torch.bfloat16, "bf16, packed for this CPU"
    if weights == "fp16" and eager_cpu and has_fbgemm():
        return Fbgemm16, torch.float32, "fp16 weights, packed for this CPU, fp32 activations"
    return PlainLinear, DTYPES[weights], weights


def default_format(device: torch.device) -> str:
    """The format to speak in on `device`: a GPU's own half precision; fp32 where it has none."""
    if device.type != "cuda":
        return "fp32"
    return gpu_precision(torch.cuda.get_device_capability(device)).value


def has_fbgemm() -> bool:
    """Whether this build of torch has packed int8 and fp16 products for this processor."""
    there = hasattr(torch, "_make_per_channel_quantized_tensor")  # until torch drops it
    return there and torch.backends.quantized.engine in ("x86", "fbgemm", "onednn")


@functools.cache  # every layer asks, and no processor changes
def split_is_faster(threads: int) -> bool:
    """Whether a row times a matrix is quicker as a product for each of `threads`: timed, 10 ms."""
    if threads == 1 or not torch.backends.mkl.is_available():
        return False
    linear = nn.utils.skip_init(nn.Linear, 1024, 1024)  # draws nothing: seeds mean what they mean
    row = torch.ones(1, 1024)
    with torch.inference_mode():
        for tensor in (linear.weight, linear.bias):
            tensor.fill_(1.0)
        shares = SplitByThread(linear)
        return best_seconds(lambda: shares(row)) < best_seconds(lambda: linear(row))


@functools.cache  # every layer asks, and no processor changes
def int8_matmul_is_exact() -> bool:
    """Whether sums of int8 products are right on this CPU, found by making the largest there are.

    Without VNNI instructions oneDNN adds pairs of them in 16 bits, where they overflow: a product
    of random matrices was wrong by a fifth, and by all where every number is 127.
    """
    largest = torch.full((64, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(largest, largest) == 64 * 127**2).all())


def has_bf16() -> bool:
    """Whether oneDNN multiplies in bf16 on this processor, asked of it by packing a small weight.

    True where torch has no oneDNN to ask.
    """
    if not torch.backends.mkldnn.is_available():
        return True
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=torch.bfloat16), 1)
    except RuntimeError:  # "bf16 path needs the cpu support avx_ne_convert or avx512bw, ..."
        return False
    return True


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
