"""What to set on a device: advice from tables, nothing is measured.

By memory and architecture it is in `configs/advice/devices.yaml`, by purpose in `configs/use`.
"""

from kit.base.config import CONFIGS, load_preset, read_yaml
from kit.base.hardware import Hardware

DEVICES = CONFIGS / "advice" / "devices.yaml"


def recommend(hw: Hardware) -> dict[str, dict]:
    """The settings recommended for `hw`, each with its `value` and `why`: {"speed.tf32": {...}}."""
    table = read_yaml(DEVICES)
    if not hw.capability:
        return table["cpu"]
    gib = round(hw.memory_bytes / 2**30)
    small = [entry["settings"] for entry in table["memory"] if gib < entry["below_gib"]]
    architecture = next(
        entry for entry in table["architecture"] if list(hw.capability) < entry["below"]
    )
    return table["gpu"] | (small[0] if small else {}) | architecture["settings"]


def use_advice(name: str) -> dict[str, dict]:
    """What the use `name` of `configs/use` sets, as `recommend` returns it. Raises KitError."""
    sections = load_preset(name, CONFIGS / "use")
    why = sections.pop("why")
    values = {f"{s}.{key}": v for s, section in sections.items() for key, v in section.items()}
    return {setting: {"value": value, "why": why[setting]} for setting, value in values.items()}


def advice_table(advice: dict[str, dict]) -> dict[str, str]:
    """One line a setting, for a notebook."""
    words = {True: "on", False: "off"}
    lines = {}
    for name, each in advice.items():
        value = each["value"]
        lines[name] = f"{words[value] if isinstance(value, bool) else value}: {each['why']}"
    return lines
