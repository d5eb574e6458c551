"""Every control of every panel has a name that can be read aloud, and Tab reaches it in order."""

from pathlib import Path

import ipywidgets as widgets
import pytest

from kit.notebook.speech_panels import ProofreadPanel, SpeakPanel, WrittenClip
from kit.notebook.widgets import Field, View
from kit.training.switches import Switch

NO_CONTROLS = (widgets.HTML, widgets.Audio, widgets.Image, widgets.Output)


def controls(widget: widgets.Widget) -> list[widgets.Widget]:
    """The controls in `widget`, in the order in which Tab reaches them."""
    if isinstance(widget, widgets.Box | widgets.Accordion):
        return [each for child in widget.children for each in controls(child)]
    return [] if isinstance(widget, NO_CONTROLS) else [widget]


def name_of(widget: widgets.Widget) -> str:
    """What is read aloud: its label, else its tooltip, which ipywidgets 8 renamed."""
    tooltip = "tooltip" if widget.has_trait("tooltip") else "description_tooltip"
    return widget.description or getattr(widget, tooltip) or ""


def panels(folder: Path) -> dict:
    field = {"value": 1, "preset": 1, "comment": "A number"}
    fields = [Field(name="lr", label="Learning rate", **field)]
    fields.append(Field(name="decay", label="EMA decay", more=True, **field))
    switch = Switch(name="ema", label="EMA", on=True, available=True, reason="on", measured="")
    numbers = {"temperature": (0.0, 1.0, 0.5), "candidates": (1, 8, 2)}
    choices = {"voice": ["one"], "cache": True, **numbers}
    clip = WrittenClip(id="a", wav=folder / "a.wav", text="one", confidence=0.5)
    return {
        "train": View([switch], fields).box,
        "speak": SpeakPanel(lambda *_: (b"", ""), "one", choices).box,
        "proofread": ProofreadPanel([clip], lambda *_: None).box,
    }


@pytest.mark.parametrize("name", ["train", "speak", "proofread"])
def test_every_control_has_a_name_and_none_is_left_out_of_the_tab_order(tmp_path, name):
    found = controls(panels(tmp_path)[name])
    assert len(found) >= 2
    assert all(name_of(widget).strip() for widget in found), found
    assert all(getattr(widget, "tabbable", None) is not False for widget in found)
