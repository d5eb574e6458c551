"""The speaking panel, and for every panel that its controls have names that can be read aloud."""

import datetime
from pathlib import Path

import ipywidgets as widgets
import pytest

from kit.notebook.speech_panels import ProofreadPanel, SpeakPanel, WrittenClip
from kit.notebook.widgets import Field, View, uploaded_files
from kit.training.switches import Switch

WAV = b"RIFF$\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0\x22\x56\0\0\x44\xac\0\0\2\0\x10\0data\0\0\0\0"


def test_speaking_fills_the_player_or_without_a_front_end_raises(capsys):
    asked = []

    def speak(text, choices, reference):
        asked.append((text, choices))
        if not text:
            raise ValueError("There is nothing to speak.")
        return WAV, "Read again."

    kinds = {"voice": ["one", "two"], "temperature": (0.0, 1.0, 0.3), "cache": True}
    panel = SpeakPanel(speak, "ሰላም", kinds)
    panel.choices["temperature"].value = 0.7
    panel.button.click()
    assert asked == [("ሰላም", {"voice": "one", "temperature": 0.7, "cache": True})]
    assert bytes(panel.player.value) == WAV and panel.player.layout.display is None
    assert "Read again." in panel.status.value
    panel.text.value = ""
    panel.button.click()
    assert "There is nothing to speak." in panel.status.value
    assert not panel.button.disabled
    SpeakPanel(speak, "selam", {}).run()
    assert asked[-1] == ("selam", {}) and "Read again." in capsys.readouterr().out
    with pytest.raises(ValueError, match="nothing"):
        SpeakPanel(speak, "", {}).run()


def reported(text, choices, reference):
    """What a panel handed on: choices, the recording's name and its bytes."""
    read = Path(reference).read_bytes() if reference else b""
    return WAV, f"{choices['voice']} {Path(reference).name} {len(read)}"


def upload(widget, name: str, content: bytes) -> None:
    """Upload a file as the browser does, to ipywidgets 7 or 8."""
    about = {"name": name, "type": "audio/wav", "size": len(content)}
    about |= {"last_modified": datetime.datetime.now(), "content": content}
    if isinstance(widget.value, dict):
        widget.set_trait("value", {name: {"metadata": about, "content": content}})
    else:
        widget.value = (about,)


def test_a_recording_is_uploaded_or_named(tmp_path):
    panel = SpeakPanel(reported, "selam", {"voice": ["one"]})

    def status() -> str:
        panel.button.click()
        return panel.status.value

    assert "one  0" in status(), "as long as none is given, a voice speaks"
    recording = panel.recording
    recording.wanted.value = True
    assert "no recording yet: upload one" in status()
    recording.wanted.value = False
    upload(recording.upload, "me.wav", b"sound")
    assert "one me.wav 5" in status()
    (tmp_path / "mother.flac").write_bytes(b"another")
    recording.named.value = f" {tmp_path / 'mother.flac'} "
    assert "one mother.flac 7" in status()
    recording.wanted.value = False
    assert "one  0" in status()


def test_uploads_of_both_versions_of_ipywidgets_are_read():
    assert uploaded_files({}) == uploaded_files(()) == []
    by_name = {"a.wav": {"content": b"ab"}, "b.wav": {"content": memoryview(b"c")}}
    listed = ({"name": "a.wav", "content": b"ab"}, {"name": "b.wav", "content": memoryview(b"c")})
    assert uploaded_files(by_name) == uploaded_files(listed) == [("a.wav", b"ab"), ("b.wav", b"c")]


NO_CONTROLS = (widgets.HTML, widgets.Audio, widgets.Image, widgets.Label, widgets.Output)


def controls(widget: widgets.Widget) -> list[widgets.Widget]:
    """The controls in `widget`, in the order in which Tab reaches them."""
    if isinstance(widget, widgets.Box | widgets.Accordion):
        return [each for child in widget.children for each in controls(child)]
    return [] if isinstance(widget, NO_CONTROLS) else [widget]


def name_of(widget: widgets.Widget) -> str:
    """What is read aloud: its label, else its tooltip, which ipywidgets 8 renamed."""
    tooltip = "tooltip" if widget.has_trait("tooltip") else "description_tooltip"
    return widget.description or getattr(widget, tooltip) or ""


def panels(folder: Path) -> list[widgets.Widget]:
    field = {"value": 1, "comment": "A number"}
    fields = [Field(name="lr", label="Learning rate", **field)]
    fields.append(Field(name="decay", label="EMA decay", more=True, **field))
    switch = Switch(name="ema", label="EMA", on=True, available=True, reason="on", measured="")
    numbers = {"temperature": (0.0, 1.0, 0.5), "candidates": (1, 8, 2)}
    choices = {"voice": ["one"], "cache": True, **numbers}
    clip = WrittenClip(id="a", wav=folder / "a.wav", text="one", confidence=0.5)
    speak = SpeakPanel(lambda *_: (b"", ""), "one", choices)
    return [View([switch], fields).box, speak.box, ProofreadPanel([clip], lambda *_: None).box]


def test_every_control_has_a_name_and_none_is_left_out_of_the_tab_order(tmp_path):
    for panel in panels(tmp_path):
        reached = controls(panel)
        assert len(reached) >= 2
        assert all(name_of(widget).strip() for widget in reached), reached
        assert all(getattr(widget, "tabbable", None) is not False for widget in reached)
