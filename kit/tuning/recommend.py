"""What to set on this device, for this purpose, and why.

The advice is a table of plain values: `configs/advice/devices.yaml` by memory and architecture,
`configs/use/*.yaml` by purpose, as overlays over a preset. Preset and precision themselves are
chosen in hardware.py; which switches pay off on a device can only be measured.
"""

import dataclasses
from collections.abc import Sequence

from kit.base.config import CONFIGS, load_preset, read_yaml
from kit.base.hardware import Hardware

DEVICES = CONFIGS / "advice" / "devices.yaml"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advice:
    setting: str  # "section.key" of a preset
    value: object
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlay:
    """Settings for a purpose, to be laid over a preset."""

    sections: dict  # as of a preset
    advice: tuple[Advice, ...]  # one for each setting


def recommend(hw: Hardware) -> list[Advice]:
    """What suits `hw`, one line a setting."""
    table = read_yaml(DEVICES)
    if not hw.capability:
        return _advice(table["cpu"])
    gib = round(hw.memory_bytes / 2**30)
    capability = list(hw.capability)
    memory = next(entry for entry in table["memory"] if gib < entry["below_gib"])
    architecture = next(entry for entry in table["architecture"] if capability < entry["below"])
    of_card = memory["settings"] | architecture["settings"]
    return _advice(table["gpu"] | of_card)


def _advice(settings: dict[str, dict]) -> list[Advice]:
    return [
        Advice(setting=setting, value=found["value"], reason=found["why"])
        for setting, found in settings.items()
    ]


def overlay(name: str) -> Overlay:
    """The overlay `name` of `configs/use`. Raises KitError when there is none."""
    sections = load_preset(name, CONFIGS / "use")
    why = sections.pop("why")
    advice = []
    for section, values in sections.items():
        for key, value in values.items():
            setting = f"{section}.{key}"
            advice.append(Advice(setting=setting, value=value, reason=why[setting]))
    return Overlay(sections=sections, advice=tuple(advice))


def advice_table(advice: Sequence[Advice]) -> dict[str, str]:
    """One line a setting, for a notebook."""
    return {a.setting: f"{format_setting(a.value)}: {a.reason}" for a in advice}


def format_setting(value: object) -> str:
    """A setting's value as a person reads it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
