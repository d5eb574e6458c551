"""What to set on this device, for this purpose, and why.

Plain tables by memory, by architecture and by use; `recommend` puts together what applies. Overlays
(`configs/use/*.yaml`) are settings laid over a preset, each with its reason. Preset and precision
themselves are chosen in hardware.py; which switches really pay on a device, only a measurement
tells. Knows devices and YAML; sets nothing.
"""

import dataclasses

from kit.base.config import CONFIGS, ConfigError, load_preset
from kit.base.hardware import Hardware
from kit.base.words import nearest

OVERLAYS = ("speed", "balanced", "quality", "low_memory")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advice:
    setting: str  # "section.key" of a preset, or "preset"
    value: object
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlay:
    """Settings for a purpose, to be laid over a preset."""

    name: str
    sections: dict  # as of a preset
    advice: tuple[Advice, ...]  # one for each setting


# (below so many GiB of the training device, advice); the first that applies counts. Cards report a
# little less than their name says, so sizes are rounded.
BY_MEMORY = (
    (
        8,
        (
            ("speed.gradient_checkpointing", True, "under 8 GiB activations are the largest part"),
            ("data.micro_batch", 4, "small passes add up to the same effective batch"),
            ("speed.ema_offload", True, "the average is not needed between updates"),
        ),
    ),
    (
        10,
        (
            ("speed.gradient_checkpointing", True, "leaves room for other programs in 8 GiB"),
            ("data.micro_batch", 16, "with recomputed layers a pass of 16 rows stays small"),
        ),
    ),
    (
        16,
        (
            (
                "speed.gradient_checkpointing",
                False,
                "10 to 16 GiB hold the layers of a mid-size model",
            ),
        ),
    ),
    (
        25,
        (("speed.gradient_checkpointing", False, "16 to 24 GiB hold the layers of a large model"),),
    ),
    (
        float("inf"),
        (("speed.gradient_checkpointing", False, "above 24 GiB nothing need be computed twice"),),
    ),
)

# Compute capability of the newest card it is for, exclusive; the first that applies counts.
BY_ARCHITECTURE = (
    (
        (7, 0),  # Pascal, and what came before it
        (
            ("speed.mixed_precision", False, "no tensor cores before Volta: fp16 gains too little"),
            ("speed.compile", False, "Triton needs compute capability 7.0"),
            ("speed.sdpa", True, "memory-efficient kernel; flash needs 8.0"),
        ),
    ),
    (
        (7, 5),  # Volta
        (
            ("speed.mixed_precision", True, "Volta has fp16 units; losses are scaled for them"),
            ("speed.sdpa", True, "memory-efficient kernel; flash needs 8.0"),
        ),
    ),
    (
        (8, 0),  # Turing: T4, RTX 20
        (
            ("speed.mixed_precision", True, "Turing has fp16 units; its bf16 is emulated and slow"),
            ("speed.sdpa", True, "memory-efficient kernel; flash needs 8.0"),
            ("speed.tf32", False, "TF32 came with Ampere"),
        ),
    ),
    (
        (9, 0),  # Ampere and Ada: A100, RTX 30 and 40, L4
        (
            ("speed.mixed_precision", True, "bf16: the range of fp32, so no loss scaling"),
            ("speed.sdpa", True, "flash kernel"),
            ("speed.tf32", True, "what stays in fp32 runs on the tensor cores, too"),
        ),
    ),
    (
        (99, 0),  # Hopper and later: H100, H200
        (
            ("speed.mixed_precision", True, "bf16: the range of fp32, so no loss scaling"),
            ("speed.sdpa", True, "flash kernel"),
            ("speed.tf32", True, "what stays in fp32 runs on the tensor cores, too"),
            ("speed.compile", True, "such a card outruns single kernels: larger ones keep it busy"),
            ("speed.pinned_memory", True, "steps are so short that copies show"),
        ),
    ),
)

ON_A_CPU = (
    ("speed.fused_adamw", True, "the update in one pass over memory"),
    ("speed.tf32", False, "only a GPU has it"),
    ("speed.pinned_memory", False, "nothing is copied to another device"),
)

# An overlay's name, or settings.
BY_USE = {
    "production": "balanced",
    "experiment": "speed",
    "low memory": "low_memory",
    "quality": "quality",
    "debug": (
        ("preset", "tiny", "the whole road in a minute"),
        ("speed.compile", False, "an error then points at the model's own line"),
        ("speed.mixed_precision", False, "fp32 numbers can be compared to the last digits"),
        ("speed.gradient_checkpointing", False, "every operation runs once, in order"),
    ),
}


def recommend(hw: Hardware, use: str = "") -> list[Advice]:
    """What applies to `hw` and to `use` (a key of BY_USE, or ""), one line a setting.

    Where two disagree the later one counts: memory, architecture, use. Raises ConfigError for an
    unknown use.
    """
    rows = [*ON_A_CPU]
    if hw.capability:
        gib = round(hw.memory_bytes / 2**30)
        rows = [*next(rows for below, rows in BY_MEMORY if gib < below)]
        rows += next(rows for newer, rows in BY_ARCHITECTURE if hw.capability < newer)
    found = [Advice(setting=s, value=v, reason=why) for s, v, why in rows]
    return [*{advice.setting: advice for advice in [*found, *_by_use(use)]}.values()]


def _by_use(use: str) -> list[Advice]:
    if not use:
        return []
    if use not in BY_USE:
        raise ConfigError(f"There is no use `{use}`.{nearest(use, BY_USE)}")
    rows = BY_USE[use]
    if isinstance(rows, str):
        return [*overlay(rows).advice]
    return [Advice(setting=s, value=v, reason=why) for s, v, why in rows]


def overlay(name: str) -> Overlay:
    """The overlay `name` of `configs/use`. Raises ConfigError when there is none."""
    sections = load_preset(name, CONFIGS / "use")
    why = sections.pop("why")
    advice = tuple(
        Advice(setting=f"{section}.{key}", value=value, reason=why[f"{section}.{key}"])
        for section, values in sections.items()
        for key, value in values.items()
    )
    return Overlay(name=name, sections=sections, advice=advice)


def advice_table(advice: list[Advice] | tuple[Advice, ...]) -> dict[str, str]:
    """One line a setting, for a notebook."""
    return {a.setting: f"{_word(a.value)}: {a.reason}" for a in advice}


def _word(value) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
