"""The optimisation switches: what each asks for, whether this device has it, what really ran.

Every switch is off in the baseline, applied in one place, and leaves the loss where it was (the
tests hold each to that). `switches` says what is on offer here and why; `apply` turns the chosen
ones on and reports what ran. Knows the model and the hardware; nothing of data or the loop.

SDPA: Dao et al. 2022. Mixed precision: Micikevicius et al. 2018. Checkpointing: Chen et al. 2016.
"""

import dataclasses

from kit.hardware import Hardware, attention_backend, choose_precision, compiler_available
from kit.model import SpeechGPT


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeedConfig:
    """Which switches are on. All off is the baseline every claim is measured against."""

    sdpa: bool = False  # fused attention
    mixed_precision: bool = False  # bf16 or fp16 matrix products, by the device
    gradient_checkpointing: bool = False  # recompute each layer in the backward pass
    compile: bool = False  # torch.compile of the trunk
    fused_adamw: bool = False  # one kernel for the whole optimiser step
    ema: bool = False  # keep averaged weights beside the trained ones


@dataclasses.dataclass(frozen=True, kw_only=True)
class Switch:
    """One toggle of the panel: its default, and whether and why it can be used here."""

    name: str
    label: str
    on: bool
    available: bool
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Applied:
    """What a run really used: precision and attention kernel by name, for the record."""

    precision: str
    attention: str
    notes: tuple = ()


LABELS = {
    "sdpa": "Fused attention (SDPA)",
    "mixed_precision": "Mixed precision",
    "gradient_checkpointing": "Gradient checkpointing",
    "compile": "torch.compile",
    "fused_adamw": "Fused AdamW",
    "ema": "EMA of the weights",
}


def switches(config: SpeedConfig, hw: Hardware) -> list[Switch]:
    """Every switch with its default from `config` and its reason on this device."""
    precision, compiler = choose_precision(hw), compiler_available(hw)
    backend = attention_backend(hw, precision.value)
    facts = {
        "sdpa": (True, f"kernel: {backend.value} ({backend.reason})"),
        "mixed_precision": (precision.value != "fp32", f"{precision.value}: {precision.reason}"),
        "gradient_checkpointing": (True, "less memory, one more forward pass per step"),
        "compile": (compiler.value == "yes", f"{compiler.reason}; the first steps are slow"),
        "fused_adamw": (True, "same update, fewer passes over memory"),
        "ema": (True, "averaged weights usually speak better than the last ones"),
    }
    return [
        Switch(name=n, label=LABELS[n], on=getattr(config, n) and ok, available=ok, reason=why)
        for n, (ok, why) in facts.items()
    ]


def apply(model: SpeechGPT, config: SpeedConfig, hw: Hardware) -> Applied:
    """Set `model` up as `config` asks, in place; a switch this device lacks is noted."""
    offered = {s.name: s for s in switches(config, hw)}
    on = {name: s.on for name, s in offered.items()}
    for layer in model.gpt.h:
        layer.attn.fused = on["sdpa"]
    layers = range(len(model.gpt.h)) if on["gradient_checkpointing"] else ()
    model.gpt.recompute = frozenset(layers)
    if on["compile"]:
        model.gpt.compile(dynamic=True)
    precision = choose_precision(hw).value if on["mixed_precision"] else "fp32"
    attention = attention_backend(hw, precision).value if on["sdpa"] else "explicit softmax"
    missing = (s for s in offered.values() if getattr(config, s.name) and not s.available)
    notes = tuple(f"{s.label} is off: {s.reason}" for s in missing)
    return Applied(precision=precision, attention=attention, notes=notes)
