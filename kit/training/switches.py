"""The optimisation switches: what each asks for, whether this device has it, what really ran.

Every switch is off in the baseline and leaves the loss where it was (tested for each).

SDPA: Dao et al. 2022. Mixed precision: Micikevicius et al. 2018. Checkpointing: Chen et al. 2016.
"""

import dataclasses
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from kit.base import hardware
from kit.base.compiler import compiler_available, detect_vector_isa
from kit.base.config import read_yaml
from kit.base.errors import KitError
from kit.base.hardware import Choice, Hardware, attention_backend, choose_precision
from kit.model.gpt import SpeechGPT, run_layer
from kit.model.sequence import Batch, EffectiveBatch
from kit.settings import GPTConfig, SpeedConfig
from kit.training.optim import eight_bit_adamw


@dataclasses.dataclass(frozen=True, kw_only=True)
class Switch:
    """One switch: asked for or not, on or off on this device, and why."""

    name: str
    label: str
    on: bool  # as the panel's default; in `Applied`: whether it really ran
    available: bool
    reason: str
    asked: bool = False  # whether the settings turn it on
    runs: str = "on"  # what runs when it is on: "bf16", "flash", "2 of 4 layers"
    measured: str = ""  # what it gained alone, where it was measured: "1.08x, -0.20 GiB here"

    @property
    def explanation(self) -> str:
        """What it does here, or why it is not available, for a person."""
        if not self.available:
            return f"not available: {self.reason}"
        return self.reason if self.runs == "on" else f"{self.runs}: {self.reason}"

    @property
    def ran(self) -> str:
        """What runs: "bf16", "fp32", "on", "off"."""
        return self.runs if self.on else BASELINE.get(self.name, "off")

    @property
    def record(self) -> str:
        """ "bf16: the GPU has bf16 units"; "off"; "off, although asked for: only a GPU has it"."""
        if self.on:
            return f"{self.ran}: {self.reason}"
        return f"{self.ran}, although asked for: {self.reason}" if self.asked else self.ran

    def turned_off(self, reason: str) -> "Switch":
        return dataclasses.replace(self, on=False, reason=reason)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Applied:
    """The switches as they really ran."""

    switches: tuple[Switch, ...] = ()

    def ran(self, name: str) -> str:
        return next((s.ran for s in self.switches if s.name == name), "off")

    @property
    def precision(self) -> str:
        return self.ran("mixed_precision")

    @property
    def notes(self) -> list[str]:
        """A sentence for each requested switch that is off."""
        return [f"{s.label} is off: {s.reason}" for s in self.switches if s.asked and not s.on]

    @property
    def names(self) -> list[str]:
        """Of the switches that are really on."""
        return [s.name for s in self.switches if s.on]

    @property
    def line(self) -> str:
        """What runs, in short: "Mixed precision: bf16, EMA of the weights: on"."""
        running = [s for s in self.switches if s.on or s.name == "mixed_precision"]
        return ", ".join(f"{s.label}: {s.ran}" for s in running)

    def on(self, name: str) -> bool:
        """Whether the switch `name` is really on."""
        return name in self.names

    def without(self, name: str, reason: str) -> "Applied":
        """Return these with `name` turned off while training."""
        changed = (s.turned_off(reason) if s.name == name else s for s in self.switches)
        return Applied(switches=tuple(changed))

    def table(self) -> dict[str, str]:
        """One line a switch, for a notebook or a report."""
        return {s.label: s.record for s in self.switches}


def wants_few_shapes(device: str, precision: str, on: Collection[str]) -> bool:
    """Whether rows should be padded to a few fixed lengths, although padding is computed, too.

    `on` names the switches that run. torch.compile makes code for each shape, and a CUDA graph has
    one; so does oneDNN for bf16 matmuls on a CPU.
    """
    fixed = "compile" in on or "cuda_graphs" in on
    return fixed or (device == "cpu" and precision == "bf16")


LABELS = {
    "sdpa": "Fused attention (SDPA)",
    "tf32": "TF32 products",
    "mixed_precision": "Mixed precision",
    "fused_adamw": "Fused AdamW",
    "cudnn_benchmark": "cuDNN benchmark",
    "pinned_memory": "Pinned memory",
    "cuda_graphs": "CUDA graphs",
    "compile": "torch.compile",
    "gradient_checkpointing": "Gradient checkpointing",
    "adamw_8bit": "8-bit AdamW",
    "ema": "EMA of the weights",
    "ema_offload": "EMA on the CPU",
}
BASELINE = {"sdpa": "explicit softmax", "mixed_precision": "fp32"}  # what runs with these off


def switches(config: SpeedConfig, hw: Hardware, model: GPTConfig | None = None) -> list[Switch]:
    """Every switch as `config` asks for it, and whether and why this device has it.

    `model` gives the shapes of the attention; without it those of a usual head.
    """
    model = model or GPTConfig()
    precision = choose_precision(hw)
    compiler = compiler_available(hw.device)
    compiles = compiler.value == "yes"
    eight_bit = eight_bit_adamw(hw, tried=config.adamw_8bit)
    matmuls = precision.value if config.mixed_precision else "fp32"
    head_width = model.width // model.heads
    attention = attention_backend(hw, matmuls, head_width, model.heads, model.dropout)
    if config.attention_kernel:
        attention = Choice(value=config.attention_kernel, reason="as attention_kernel says")
    gpu = hw.device == "cuda"
    only_gpu = "only useful on a GPU"
    fuses = "fewer and larger kernels; the first steps are slow, as kernels are compiled"
    ampere = gpu and hw.capability >= (8, 0)
    tf32 = "matmuls of fp32 in tensor cores" if ampere else "needs a GPU of compute capability 8.0"
    facts = {
        "sdpa": (True, attention.reason),
        "tf32": (ampere, tf32),
        "mixed_precision": (precision.value != "fp32", precision.reason),
        "fused_adamw": (True, "same update, fewer passes over memory than torch's default"),
        "cudnn_benchmark": (gpu, "faster where shapes repeat" if gpu else only_gpu),
        "pinned_memory": (gpu, "batches are copied while the GPU computes" if gpu else only_gpu),
        "cuda_graphs": (gpu, "one call starts a whole pass" if gpu else "only a GPU has them"),
        "compile": (compiles, fuses if compiles else compiler.reason),
        "gradient_checkpointing": (True, "less memory, one more forward pass per step"),
        "adamw_8bit": (eight_bit.value == "yes", eight_bit.reason),
        "ema": (True, "averaged weights usually speak better than the last ones"),
        "ema_offload": (gpu, "frees the weights' size on the GPU" if gpu else only_gpu),
    }
    runs = {"sdpa": attention.value, "mixed_precision": precision.value}
    return [
        Switch(
            name=name,
            label=LABELS[name],
            on=getattr(config, name) and available,
            available=available,
            reason=reason,
            asked=getattr(config, name),
            runs=runs.get(name, "on"),
        )
        for name, (available, reason) in facts.items()
    ]


def load_choice(path: Path) -> dict[str, dict]:
    """The switches (`speed`) and the `data` that 05_benchmark left at `path`; {} if it did not."""
    if not Path(path).is_file():
        return {}
    written = read_yaml(path)
    speed = {name: on for name, on in written["speed"].items() if name in LABELS}
    return {"speed": speed, "data": written.get("data", {})}


def apply(model: SpeechGPT, config: SpeedConfig, hw: Hardware, processes: int = 1) -> Applied:
    """Set up `model` and this process as `config` asks; returns what really runs.

    What is off is set back to off: a baseline after another run is a baseline. A model whose trunk
    has no list of layers `h` trains without the switches that are set on layers. `processes` is how
    many train together.
    """
    rows = {switch.name: switch for switch in switches(config, hw, model.config)}
    has_layers = hasattr(model.gpt, "h")
    if not has_layers:
        for name in ("sdpa", "compile", "gradient_checkpointing"):
            rows[name] = rows[name].turned_off("this model's trunk has no list of layers `h`")
    if rows["adamw_8bit"].on:
        reason = f"{LABELS['adamw_8bit']} takes its place, in kernels of its own"
        rows["fused_adamw"] = rows["fused_adamw"].turned_off(reason)
    if config.attention_kernel and rows["sdpa"].on:
        require_kernel(config.attention_kernel, model.config, rows["mixed_precision"].ran, hw)
    on = {name: switch.on for name, switch in rows.items()}
    hardware.set_cuda_defaults()
    torch.set_float32_matmul_precision("high" if on["tf32"] else "highest")
    torch.backends.cudnn.allow_tf32 = on["tf32"]
    torch.backends.cudnn.benchmark = on["cudnn_benchmark"]
    if has_layers:
        layers = set_layers(model, on, config.recompute_every, config.attention_kernel)
        name = "gradient_checkpointing"
        rows[name] = dataclasses.replace(rows[name], runs=layers)
    if processes > 1:
        rows["parallel"] = Switch(
            name="parallel",
            label="Several processes",
            on=True,
            available=True,
            asked=True,
            runs=f"{processes} processes",
            reason="gradients are summed over the processes after the passes of a step",
        )
    return Applied(switches=tuple(rows.values()))


def require_kernel(name: str, model: GPTConfig, precision: str, hw: Hardware) -> None:
    """Raise KitError if `hw` cannot train `model` with the attention kernel `name`."""
    shape = (model.width // model.heads, model.heads, model.dropout)
    reason = hardware.why_no_kernel(name, hw, precision, *shape)
    if reason:
        raise KitError(
            f"speed.attention_kernel = {name}: the {hw.name} cannot train with it in {precision} "
            f"({reason}). Leave it empty for PyTorch's choice."
        )


def set_layers(model: SpeechGPT, on: dict[str, bool], every: int, kernel: str) -> str:
    """Set attention, checkpointing and compilation of the trunk; returns the layers recomputed."""
    trunk = model.gpt
    layers = range(0, len(trunk.h), every)
    for layer in trunk.h:
        layer.attn.fused = on["sdpa"]
        layer.attn.kernel = hardware.ATTENTION_KERNELS[kernel] if kernel and on["sdpa"] else None
    trunk.recompute = frozenset(layers if on["gradient_checkpointing"] else ())
    trunk.run_layer = run_layer
    if on["compile"]:
        detect_vector_isa()
        torch.compiler.reset()  # graphs of an earlier model count against a limit
        # One graph for all layers, and for any number and length of rows.
        trunk.run_layer = torch.compile(run_layer, dynamic=True)
    return f"{len(layers)} of {len(trunk.h)} layers"


def compilations() -> int:
    """Count the graphs that torch.compile has made in this process.

    Several rows make one graph, a single row another.
    """
    dynamo = sys.modules.get("torch._dynamo")  # loaded by the first compilation
    return dynamo.utils.counters["stats"]["unique_graphs"] if dynamo else 0


def prefetch_if_on(batches: Iterable[EffectiveBatch], applied: Applied) -> Iterable[EffectiveBatch]:
    """Return `batches` prefetched and pinned where the switch `pinned_memory` is on."""
    if applied.on("pinned_memory"):
        return prefetched(map(pin, batches))
    return batches


def pin(batch: EffectiveBatch) -> EffectiveBatch:
    """Return `batch` in page-locked memory, from which copies to a GPU do not wait. Needs CUDA."""
    micro = [
        Batch(**{name: tensor.pin_memory() for name, tensor in vars(part).items()})
        for part in batch.micro
    ]
    return dataclasses.replace(batch, micro=micro)


def prefetched(batches: Iterable) -> Iterator:
    """Yield what `batches` yields, two of them made ahead in a thread.

    An exception is raised where its batch would have come. The thread ends with the iterator.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
    try:
        source = iter(batches)
        ready = deque(thread.submit(next, source, None) for _ in range(2))
        while (batch := ready.popleft().result()) is not None:
            ready.append(thread.submit(next, source, None))
            yield batch
    finally:
        thread.shutdown(wait=False, cancel_futures=True)
