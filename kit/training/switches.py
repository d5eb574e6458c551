"""The optimisation switches: what each asks for, whether this device has it, what really ran.

Every switch is off in the baseline, applied in one place, and leaves the loss where it was (the
tests hold each to that). `switches` says what is on offer here and why; `apply` turns the chosen
ones on, the others off, and reports what ran. Knows the model and the hardware; nothing of data
or the loop.

SDPA: Dao et al. 2022. Mixed precision: Micikevicius et al. 2018. Checkpointing: Chen et al. 2016.
8-bit AdamW: Dettmers et al. 2022.
"""

import dataclasses
import sys

import torch

from kit.base.compiler import compiler_available, detect_vector_isa, keep_device_guard
from kit.base.config import require, require_within
from kit.base.hardware import (
    Choice,
    Hardware,
    attention_backend,
    choose_precision,
    format_capability,
    set_cuda_defaults,
)
from kit.model.gpt import SpeechGPT, run_layer
from kit.model.sequence import EffectiveBatch, GPTConfig
from kit.training.adam8bit import eight_bit_adamw


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeedConfig:
    """Which switches are on. All off is the baseline every claim is measured against."""

    sdpa: bool = False  # fused attention
    mixed_precision: bool = False  # bf16 or fp16 matrix products, by the device
    fused_adamw: bool = False  # one kernel for the whole optimiser step
    adamw_8bit: bool = False  # AdamW's moments in 8 bits
    tf32: bool = False  # fp32 matrix products with 10-bit mantissas
    cudnn_benchmark: bool = False  # cuDNN tries its convolutions for each new shape
    pinned_memory: bool = False  # batches made ahead in a thread, in page-locked memory
    compile: bool = False  # torch.compile of the trunk's layers
    gradient_checkpointing: bool = False  # recompute layers in the backward pass
    recompute_every: int = 1  # with gradient_checkpointing: every n-th layer
    ema: bool = False  # keep averaged weights beside the trained ones
    ema_offload: bool = False  # ... in the CPU's memory

    def __post_init__(self):
        require(self.recompute_every > 0, self, "recompute_every", "1 is every layer, 2 each 2nd.")
        require_within(self, 1, 1e6, "recompute_every")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Switch:
    """One toggle of the panel: its default, and whether and why it can be used here."""

    name: str
    label: str
    on: bool
    available: bool
    reason: str
    runs: str = "on"  # what it is here when it is on, by name: "bf16", "flash"
    measured: str = ""  # what it did alone where it was measured: "1.08x, -0.20 GiB here"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ran:
    """One switch in a run's record: what was asked for, what really ran, and why."""

    name: str
    label: str
    asked: bool
    on: bool
    ran: str  # "bf16", "flash", "layers 0, 2 of 4", "on", "off"
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Applied:
    """What a run really used: precision and attention kernel by name, and every switch."""

    precision: str
    attention: str
    notes: tuple = ()  # sentences on what was asked for and is off
    switches: tuple = ()  # of Ran

    def on(self, name: str) -> bool:
        """Whether the switch `name` is really on."""
        return any(s.on for s in self.switches if s.name == name)

    def without(self, name: str, reason: str) -> "Applied":
        """The same after the switch `name` had to be given up."""
        rows = [
            dataclasses.replace(s, on=False, ran="off", reason=reason) if s.name == name else s
            for s in self.switches
        ]
        return dataclasses.replace(self, switches=tuple(rows))

    def beside(self, row: Ran) -> "Applied":
        """The same with one more row."""
        return dataclasses.replace(self, switches=(*self.switches, row))

    def table(self) -> dict[str, str]:
        """One line a switch, for a notebook or a report."""
        word = {True: "asked for", False: "not asked for"}
        return {s.label: f"{s.ran} ({word[s.asked]}; {s.reason})" for s in self.switches}


def wants_few_shapes(device: str, precision: str, compiled: bool) -> bool:
    """Whether rows are better padded to a few fixed lengths, though padding is computed, too.

    A compiled model has code made for each shape. So has oneDNN for bf16 products on a CPU, and
    keeps it in memory: with rows of any length, the demo's steps took half as long again.
    """
    return compiled or (device == "cpu" and precision == "bf16")


LABELS = {
    "sdpa": "Fused attention (SDPA)",
    "mixed_precision": "Mixed precision",
    "fused_adamw": "Fused AdamW",
    "adamw_8bit": "8-bit AdamW",
    "tf32": "TF32 products",
    "cudnn_benchmark": "cuDNN benchmark",
    "pinned_memory": "Pinned memory",
    "compile": "torch.compile",
    "gradient_checkpointing": "Gradient checkpointing",
    "ema": "EMA of the weights",
    "ema_offload": "EMA on the CPU",
}
BASELINE = {"sdpa": "explicit softmax", "mixed_precision": "fp32"}  # what runs with these off
OF_LAYERS = ("sdpa", "compile", "gradient_checkpointing")  # set on each layer of the trunk


def switches(config: SpeedConfig, hw: Hardware, model: GPTConfig | None = None) -> list[Switch]:
    """Every switch with its default from `config` and its reason on this device.

    `model` gives the attention's shapes; without it those of a usual head.
    """
    precision = choose_precision(hw)
    compiler = compiler_available(hw.device, hw.capability)
    compiles = compiler.value == "yes"
    eight_bit = eight_bit_adamw(hw)
    product = precision.value if config.mixed_precision else "fp32"
    backend = _attention(hw, product, model or GPTConfig())
    gpu = hw.device == "cuda"
    only = "only a GPU has a use for it"
    facts = {
        "sdpa": (True, f"kernel: {backend.value} ({backend.reason})"),
        "mixed_precision": (precision.value != "fp32", f"{precision.value}: {precision.reason}"),
        "fused_adamw": (True, f"same update, fewer passes over memory than {adamw_baseline(hw)}"),
        "adamw_8bit": (eight_bit.value == "yes", eight_bit.reason),
        "tf32": _tf32(hw),
        "cudnn_benchmark": (gpu, "pays where shapes repeat" if gpu else only),
        "pinned_memory": (
            gpu,
            "batches are made and copied while the GPU computes" if gpu else only,
        ),
        "compile": (compiles, compiler.reason + ("; the first steps are slow" if compiles else "")),
        "gradient_checkpointing": (True, "less memory, one more forward pass per step"),
        "ema": (True, "averaged weights usually speak better than the last ones"),
        "ema_offload": (gpu, "frees the weights' size on the GPU" if gpu else only),
    }
    runs = {"sdpa": backend.value, "mixed_precision": precision.value}
    return [
        Switch(
            name=name,
            label=LABELS[name],
            on=getattr(config, name) and ok,
            available=ok,
            reason=why,
            runs=runs.get(name, "on"),
        )
        for name, (ok, why) in facts.items()
    ]


def adamw_baseline(hw: Hardware) -> str:
    """What torch's AdamW does by default: see `make_optimizers`."""
    if hw.device == "cuda":
        return "torch's default, an operation at a time on all tensors (foreach)"
    return "torch's default, a loop over the tensors"


def _attention(hw: Hardware, precision: str, model: GPTConfig) -> Choice:
    width = model.width // model.heads
    return attention_backend(hw, precision, width, model.heads, model.dropout)


def _tf32(hw: Hardware) -> tuple[bool, str]:
    if hw.capability is None:
        return False, "only a GPU has it"
    has = hw.capability >= (8, 0)
    known = f"compute capability {format_capability(hw.capability)}"
    return has, f"{known} {'has' if has else 'is below 8.0 and lacks'} it"


def apply(model: SpeechGPT, config: SpeedConfig, hw: Hardware) -> Applied:
    """Set `model` and this process up as `config` asks; a switch this device lacks is noted.

    What is off is set back to off: a baseline after another run is a baseline. A model whose trunk
    has no list of layers `h` trains on without the switches that are set on layers.
    """
    offered = switches(config, hw, model.config)
    if not hasattr(model.gpt, "h"):
        offered = [_without_layers(s) if s.name in OF_LAYERS else s for s in offered]
    if any(s.on for s in offered if s.name == "adamw_8bit"):
        offered = [_in_its_place(s) if s.name == "fused_adamw" else s for s in offered]
    on = {s.name: s.on for s in offered}
    runs = {s.name: s.runs for s in offered}
    set_cuda_defaults()
    set_process(on)
    if hasattr(model.gpt, "h"):
        runs["gradient_checkpointing"] = set_layers(model, on, config.recompute_every)
    precision = runs["mixed_precision"] if on["mixed_precision"] else "fp32"
    ran = tuple(_ran(s, getattr(config, s.name), runs[s.name]) for s in offered)
    return Applied(
        precision=precision,
        attention=runs["sdpa"] if on["sdpa"] else BASELINE["sdpa"],
        notes=tuple(f"{r.label} is off: {r.reason}" for r in ran if r.asked and not r.on),
        switches=ran,
    )


def _ran(switch: Switch, asked: bool, runs: str) -> Ran:
    return Ran(
        name=switch.name,
        label=switch.label,
        on=switch.on,
        reason=switch.reason,
        asked=asked,
        ran=runs if switch.on else BASELINE.get(switch.name, "off"),
    )


def _without_layers(switch: Switch) -> Switch:
    why = "this model's trunk has no list of layers `h`; it trains on without"
    return dataclasses.replace(switch, on=False, available=False, reason=why)


def _in_its_place(switch: Switch) -> Switch:
    """Fused AdamW where the moments are in 8 bits."""
    why = f"{LABELS['adamw_8bit']} takes its place, in kernels of its own"
    return dataclasses.replace(switch, on=False, reason=why)


def set_process(on: dict[str, bool]) -> None:
    """Set what the switches ask of the whole process; the rest is `set_cuda_defaults`'."""
    torch.set_float32_matmul_precision("high" if on["tf32"] else "highest")
    torch.backends.cudnn.allow_tf32 = on["tf32"]
    torch.backends.cudnn.benchmark = on["cudnn_benchmark"]


def set_layers(model: SpeechGPT, on: dict[str, bool], every: int) -> str:
    """Attention, checkpointing and compilation of the trunk; says what checkpointing covers."""
    trunk = model.gpt
    layers = range(0, len(model.gpt.h), every)
    for layer in trunk.h:
        layer.attn.fused = on["sdpa"]
    trunk.recompute = frozenset(layers if on["gradient_checkpointing"] else ())
    trunk.run_layer = run_layer
    if on["compile"]:
        compile_layers(model)
    if every == 1:
        return f"all {len(trunk.h)} layers"
    return f"layers {', '.join(map(str, layers))} of {len(trunk.h)}"


def compile_layers(model: SpeechGPT) -> None:
    """Have the trunk's layers compiled as they are from now on, at the next training pass."""
    keep_device_guard()
    detect_vector_isa()
    torch.compiler.reset()  # what was compiled for an earlier model counts against a limit
    # One graph for rows of any number and length, so fixed lengths need no second one.
    model.gpt.run_layer = torch.compile(run_layer, dynamic=True)


def compilations() -> int:
    """Graphs that torch.compile has made in this process so far; after a warm-up it stands still.

    Rows together make one graph, a single row alone another; recomputed layers have their own.
    """
    dynamo = sys.modules.get("torch._dynamo")  # loaded by the first compilation
    return dynamo.utils.counters["stats"]["unique_graphs"] if dynamo else 0


def pin(batch: EffectiveBatch) -> EffectiveBatch:
    """`batch` in page-locked memory, from which copies to a GPU do not wait. Needs CUDA."""
    micro = []
    for part in batch.micro:
        pinned = {name: tensor.pin_memory() for name, tensor in vars(part).items()}
        micro.append(dataclasses.replace(part, **pinned))
    return dataclasses.replace(batch, micro=micro)
