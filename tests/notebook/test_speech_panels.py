"""The speaking panel: sound into the player, errors as sentences."""

import datetime
from pathlib import Path

import pytest

from kit.notebook.speech_panels import SpeakPanel
from kit.notebook.widgets import uploaded_files

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
    asked = []
    SpeakPanel(lambda text, *_: asked.append(text) or (WAV, "Read again."), "selam", {}).run()
    assert asked == ["selam"] and "Read again." in capsys.readouterr().out
    with pytest.raises(ValueError, match="nothing"):
        SpeakPanel(lambda *_: (_ for _ in ()).throw(ValueError("nothing")), "", {}).run()


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
