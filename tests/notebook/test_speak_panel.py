"""The speaking panel: sound into the player, errors as sentences."""

import pytest
from IPython.display import Audio

from kit.notebook.panel.speak_panel import SpeakPanel

WAV = b"RIFF$\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0\x22\x56\0\0\x44\xac\0\0\2\0\x10\0data\0\0\0\0"


def test_speaking_fills_the_player_and_errors_are_sentences():
    asked = []

    def speak(text, choices):
        asked.append((text, choices))
        if not text:
            raise ValueError("There is nothing to speak.")
        return WAV

    panel = SpeakPanel(speak, "ሰላም", {"voice": ["one", "two"]})
    panel.button.click()
    assert asked == [("ሰላም", {"voice": "one"})]
    assert bytes(panel.player.value) == WAV and panel.player.layout.display is None
    panel.text.value = ""
    panel.button.click()
    assert "There is nothing to speak." in panel.status.value
    assert not panel.button.disabled


def test_an_ipython_audio_is_taken_too():
    panel = SpeakPanel(lambda text, choices: Audio(data=WAV), "selam")
    panel.button.click()
    assert bytes(panel.player.value) == WAV


def test_a_remark_stands_beside_the_player(capsys):
    panel = SpeakPanel(lambda *_: (WAV, "Read again."), "selam")
    panel.button.click()
    assert bytes(panel.player.value) == WAV and "Read again." in panel.status.value
    panel.run("plain")
    assert "Read again." in capsys.readouterr().out


def test_without_a_front_end_it_speaks_once_and_raises(capsys):
    asked = []
    SpeakPanel(lambda text, _: asked.append(text) or WAV, "selam").run()
    assert asked == ["selam"]
    with pytest.raises(ValueError, match="nothing"):
        SpeakPanel(lambda *_: (_ for _ in ()).throw(ValueError("nothing")), "").run()
