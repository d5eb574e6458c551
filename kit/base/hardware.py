"""Detect the machine and choose what suits it; every choice comes with its reason."""

import contextlib
import dataclasses
import functools
import gc
import itertools
import os
import platform
import re
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from kit.base.errors import Note

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Without cuDNN's kernel, which is planned again for every row length.
ATTENTION_ORDER = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
ATTENTION_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
SHORT_ROW = 256  # tokens: see `prefers_explicit_attention`
OLDEST_GPU = (7, 5)  # compute capability, of Turing: T4, RTX 20
PROC_STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")  # 5 makes the peak what is resident now


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    device: str  # "cuda" or "cpu"
    name: str
    cores: int  # processors this process may use
    ram_bytes: int
    memory_bytes: int  # of the training device: GPU memory, or RAM on the CPU
    capability: tuple | None  # CUDA compute capability, (major, minor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A detected setting and the reason for it."""

    value: str
    reason: str


def detect() -> Hardware:
    """The GPU if this torch has code for it, else the CPU; a Note says why a GPU is not used."""
    import psutil  # here and below: speaking works without it

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ram = psutil.virtual_memory().total
    cpu = Hardware(
        device="cpu", name=cpu_name(), cores=cores, ram_bytes=ram, memory_bytes=ram, capability=None
    )
    if not torch.cuda.is_available():
        return cpu
    card = torch.cuda.get_device_properties(0)
    capability = (card.major, card.minor)
    problem = why_too_old(capability) or why_no_code(capability)
    if problem:
        note = f"The {card.name} cannot be used, so the CPU is: {problem}."
        # Shown once for this line, not for each caller.
        warnings.warn(note, category=Note, stacklevel=1)
        return cpu
    gpu = {"name": card.name, "memory_bytes": card.total_memory, "capability": capability}
    return dataclasses.replace(cpu, device="cuda", **gpu)


def why_too_old(capability: tuple) -> str:
    """Why the kit does not use GPUs of this compute capability; "" if it does."""
    if capability >= OLDEST_GPU:
        return ""
    return (
        f"the kit needs compute capability {format_capability(OLDEST_GPU)} (Turing: T4, RTX 20) or "
        f"later, that GPU has {format_capability(capability)}"
    )


def why_no_code(capability: tuple) -> str:
    """Why every operation on this machine's GPU fails, which torch calls available; "" if none."""
    try:
        torch.ones(1, device="cuda").add(1).item()
    except RuntimeError as error:
        if is_oom(error):  # another process fills it: what needs the memory will say so
            return ""
        if "no kernel image" not in str(error):
            raise
        return (
            f"this torch ({torch.__version__}) was built for others than compute capability "
            f"{format_capability(capability)}: install another build, see "
            "https://pytorch.org/get-started"
        )
    return ""


def is_here(hw: Hardware) -> bool:
    """Whether `hw` is a device of this machine, not only the description of one elsewhere."""
    is_gpu_here = torch.cuda.is_available() and torch.cuda.get_device_name(0) == hw.name
    return hw.device == "cpu" or is_gpu_here


@functools.cache
def set_cuda_defaults() -> None:
    """Turn cuDNN attention off and compute convolutions in fp32; only the first call has effect."""
    # torch prefers cuDNN attention on Hopper and Blackwell. It plans for each new length of K, for
    # 22 ms: longer than a decoding step.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # With TF32, torch's default, more of a codec's codes differ from the CPU's.
    torch.backends.cudnn.allow_tf32 = False


@contextlib.contextmanager
def on_device(device: str | torch.device, *modules: nn.Module | None) -> Iterator[None]:
    """Move `modules` to `device` for the block, then back, to leave the GPU to the model."""
    before = []
    for module in (module for module in modules if module is not None):
        tensor = next(itertools.chain(module.parameters(), module.buffers()), None)
        if tensor is not None:  # Whisper's weights are not torch tensors
            before.append((module, tensor.device))
    try:
        for module, _ in before:
            module.to(device)
        yield
    finally:
        for module, old_device in before:
            module.to(old_device)


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    name = re.search(r"^model name\s*: (.*)", text, re.MULTILINE)
    return name[1] if name else platform.processor() or platform.machine()


def choose_precision(hw: Hardware) -> Choice:
    """bf16, fp16 or fp32 for matmuls, on a CPU measured; weights and losses stay fp32."""
    return gpu_precision(hw.capability) if hw.device == "cuda" else _cpu_precision()


def gpu_precision(capability: tuple) -> Choice:
    name = f"compute capability {format_capability(capability)}"
    if capability >= (8, 0):
        return Choice(value="bf16", reason=f"{name} has bf16 units")
    return Choice(value="fp16", reason=f"{name} has no bf16, but fp16")


@functools.cache
def _cpu_precision() -> Choice:
    """Measured once per process, so that what was planned is what runs."""
    for rows in PRECISION_ROWS:
        fp32_s = []
        bf16_s = []
        for _ in range(PRECISION_ROUNDS):  # alternating, so that a busy moment slows both
            fp32_s.append(matmul_seconds(torch.float32, 1, rows=rows))
            bf16_s.append(matmul_seconds(torch.bfloat16, 1, rows=rows))
        ratio = min(fp32_s) / min(bf16_s)
        if ratio < EMULATED:
            break
    reason = f"a bf16 matmul ran {ratio:.2g}x as fast as an fp32 one on this processor"
    if ratio < EMULATED:
        reason += ": bf16 is emulated here"
    return Choice(value="bf16" if ratio > 1.3 else "fp32", reason=reason)


def format_capability(capability: tuple) -> str:
    return ".".join(map(str, capability))


# Rows, inputs and outputs of a matmul of training-step size; on a GPU a small one is too short to
# be timed.
MATMUL_SHAPES = {"cpu": (1024, 256, 1024), "cuda": (8192, 1024, 4096)}
# Of the matmuls that choose a CPU's precision: where bf16 is emulated, the second takes a second.
PRECISION_ROWS = (64, MATMUL_SHAPES["cpu"][0])
PRECISION_ROUNDS = 5
EMULATED = 0.3  # of fp32's speed: emulation takes eight times as long
LOAD_SAMPLES = 12  # of what other processes compute
LOAD_SAMPLE_S = 0.5


def matmul_seconds(
    dtype: torch.dtype, repeats: int = 3, device: str = "cpu", rows: int = 0
) -> float:
    """Seconds of the fastest of `repeats` matmuls of training-step size, or of `rows` rows."""
    usual_rows, inputs, outputs = MATMUL_SHAPES[device]
    # Its own, so that a run's dropout does not depend on how often matmuls are timed.
    generator = torch.Generator(device).manual_seed(0)
    a = torch.randn(rows or usual_rows, inputs, device=device, generator=generator).to(dtype)
    b = torch.randn(inputs, outputs, device=device, generator=generator).to(dtype)

    def work() -> None:
        a @ b
        if device == "cuda":
            torch.cuda.synchronize()

    times = timings(work, 1, warm=False)
    while len(times) < repeats and sum(times) < 1:
        times += timings(work, 1, warm=False)
    return min(times)


def matmul_ms(hw: Hardware) -> dict[str, float]:
    """Milliseconds of a matmul in each precision that `hw` has, by name; {} for a GPU elsewhere."""
    if not is_here(hw):
        return {}
    names = ["fp32", "fp16" if hw.device == "cuda" else "bf16"]
    if hw.device == "cuda" and hw.capability >= (8, 0):
        names.append("bf16")
    # The fastest of many: other processes may slow a few.
    return {name: 1e3 * matmul_seconds(DTYPES[name], 50, hw.device) for name in names}


def timings(work: Callable[[], object], repeats: int, warm: bool = True) -> list[float]:
    """Seconds of each of `repeats` runs of `work`, after a warm-up run unless `warm` is False."""
    if warm:
        work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return times


def attention_backend(
    hw: Hardware, precision: str, head_width: int = 64, heads: int = 4, dropout: float = 0.0
) -> Choice:
    """The kernel that PyTorch picks for causal attention; that expected of a GPU elsewhere."""
    setting = f"{precision}, heads of {head_width}" + (f", dropout {dropout:g}" if dropout else "")
    if not is_here(hw):
        # Flash attention needs half precision and Ampere; for bf16 the efficient one does, too.
        ampere = hw.capability >= (8, 0)
        kernel = "efficient" if ampere or precision != "bf16" else "math"
        if ampere and precision != "fp32" and head_width <= 256:
            kernel = "flash"
        return Choice(value=kernel, reason=f"expected for {setting}; no such GPU here")
    dtype = DTYPES[precision]
    q = torch.zeros(1, heads, 128, head_width, device=hw.device, dtype=dtype, requires_grad=True)
    with sdpa_kernel(ATTENTION_ORDER):
        choice = torch._fused_sdp_choice(q, q, q, dropout_p=dropout, is_causal=True)
    name = SDPBackend(choice).name.removesuffix("_ATTENTION").lower().replace("_", " ")
    if prefers_explicit_attention(hw.device, dtype, SHORT_ROW, dropout):
        name = "explicit" if dropout else f"explicit up to {SHORT_ROW} tokens, then {name}"
        return Choice(value=name, reason=f"the faster one for {setting} on a CPU")
    return Choice(value=name, reason=f"PyTorch's choice for {setting} on the {hw.name}")


def prefers_explicit_attention(
    device: str, dtype: torch.dtype, tokens: int, dropout: float
) -> bool:
    """Whether explicit attention trains faster than PyTorch's fused attention.

    In bf16 on a CPU: 3.8 times as fast at 64 tokens, 1.7 times at 256, 0.9 times at 512; with
    dropout at any length, because PyTorch then computes in fp32. In fp32 never (figures in
    docs/measurements.md).
    """
    return device == "cpu" and dtype == torch.bfloat16 and (tokens <= SHORT_ROW or dropout > 0)


def why_no_kernel(
    name: str, hw: Hardware, precision: str, head_width: int, heads: int, dropout: float
) -> str:
    """Why this device cannot train with an attention kernel by itself; "" if it can."""
    if not is_here(hw):
        return "no such GPU here"
    dtype = DTYPES[precision]
    q = torch.zeros(1, heads, 128, head_width, device=hw.device, dtype=dtype, requires_grad=True)
    devices = [torch.cuda.current_device()] if hw.device == "cuda" else []
    with warnings.catch_warnings(record=True) as reasons, torch.random.fork_rng(devices):
        warnings.simplefilter("always")
        try:
            with sdpa_kernel(ATTENTION_KERNELS[name]):
                y = nn.functional.scaled_dot_product_attention(q, q, q, None, dropout, True)
            y.sum().backward()
        except RuntimeError as error:
            texts = [str(each.message).partition(" (Triggered")[0] for each in reasons]
            return "; ".join(texts[1:]) or str(error).split(". ")[0]  # the first is a heading
    return ""


def choose_preset(hw: Hardware) -> Choice:
    """The preset for the training device: by its memory, and a T4 by its speed."""
    if hw.device == "cpu":
        return Choice(value="cpu", reason="no GPU: a small model that trains in minutes")
    gib = round(hw.memory_bytes / 2**30)  # GPUs report a little less than their names say
    reason = f"{hw.name} has {gib} GiB"
    if hw.capability < (8, 0) and 14 <= gib < 20:
        return Choice(value="t4", reason=f"{reason}, and no bf16: it is slow before it is full")
    tiers = ((72, "80gb"), (20, "24gb"), (10, "12gb"), (0, "8gb"))
    return Choice(value=next(name for floor, name in tiers if gib >= floor), reason=reason)


def use_threads(hw: Hardware) -> Choice:
    """Give PyTorch as many threads as OMP_NUM_THREADS asks for, else as there are free cores.

    Free are those that no other process keeps busy in the quietest sample. On busy cores several
    threads run at half the speed of one, and 4 to 10 times slower where they spin while they wait.
    """
    import psutil

    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and int(asked) > 0:
        torch.set_num_threads(int(asked))
        return Choice(value=asked, reason=f"OMP_NUM_THREADS asks for {asked}")
    busy = float(hw.cores)
    for _ in range(LOAD_SAMPLES):
        shares = psutil.cpu_times_percent(LOAD_SAMPLE_S)
        idle = min(100.0, shares.idle + getattr(shares, "nice", 0.0)) / 100  # niced work yields
        busy = min(busy, hw.cores * (1 - idle))
        if round(busy) == 0:
            break
    threads = max(1, round(hw.cores - busy))
    torch.set_num_threads(threads)
    reason = f"{hw.cores} cores, {busy:.1f} of them busy with other programs"
    if threads < hw.cores:
        reason += ": close those and run this cell again to use all cores"
    return Choice(value=str(threads), reason=reason)


def silence_profiler() -> None:
    """Hide the profiler's error about a missing GPU, before it is first used."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def allow_expandable_segments() -> None:
    """Let CUDA memory segments grow, before CUDA is first used; a user's setting stays."""
    # Under WSL the first allocation may fail (pytorch#192330).
    is_wsl = "microsoft" in platform.release().lower()
    if not is_wsl and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def versions() -> dict[str, str]:
    python = platform.python_version()
    return {"python": python, "torch": torch.__version__, "system": platform.system()}


def is_oom(error: BaseException) -> bool:
    """Whether `error` means that the device, or the CPU's allocator, has no memory left."""
    words = (
        *("can't allocate memory", "not enough memory", "ALLOC_FAILED"),
        *("CUDA out of memory", "CUDA error: out of memory"),  # the driver's, outside of PyTorch's
    )
    is_named = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return is_named or isinstance(error, torch.OutOfMemoryError | MemoryError)


def release_memory(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def memory_used(device: str, before_bytes: int = 0) -> dict[str, int]:
    """Bytes at their peak (`memory_bytes`) and now; of a GPU also what its allocator holds.

    On a CPU it is the process's resident memory without the `before_bytes` it began with.
    """
    if device == "cuda":
        return {
            "memory_bytes": torch.cuda.max_memory_allocated(),
            "memory_now_bytes": torch.cuda.memory_allocated(),
            "reserved_bytes": torch.cuda.memory_reserved(),
        }
    peak_bytes = peak_resident_bytes() - before_bytes
    now_bytes = resident_bytes() - before_bytes
    return {"memory_bytes": max(0, peak_bytes), "memory_now_bytes": max(0, now_bytes)}


def resident_bytes() -> int:
    import psutil

    return psutil.Process().memory_info().rss


def peak_resident_bytes() -> int:
    if PROC_STATUS.exists():  # Linux, where getrusage may return the parent process's peak
        peak = re.search(r"VmHWM:\s+(\d+) kB", PROC_STATUS.read_text(encoding="utf-8"))
        if peak:
            return int(peak[1]) * 1024
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def reset_peak_memory(device: str) -> int:
    """Start `memory_used` again from now; return its `before_bytes`."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return 0
    with contextlib.suppress(OSError):  # Linux alone; elsewhere the peak is of the whole life
        CLEAR_REFS.write_text("5", encoding="utf-8")
    return resident_bytes()


def autocast(device: str, precision: str):
    """The context of a forward pass: torch's autocast, or nothing for fp32."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device, DTYPES[precision])
