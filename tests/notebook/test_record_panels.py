"""The recorder's Python side, and uploads: what is saved, what is explained, what comes next."""

import base64
import shutil
import sys
from types import SimpleNamespace

import pytest
from test_speech_panels import upload

from kit.notebook.record_panels import SCRIPT, RecorderPanel, Take, UploadPanel

GOOD = Take(seconds=2.0)
NOISY = Take(seconds=2.0, problems=("Noisy: find a quieter room.",))
SILENT = Take(seconds=2.0, problems=("Silent: is it on?",), usable=False)


class Made:
    """Sentences whose recordings are judged by their bytes."""

    folder = "recordings"

    def __init__(self, *sentences: str):
        self.sentences, self.saved, self.skipped = list(sentences), {}, []

    def done(self, sentence):
        return sentence in self.saved or sentence in self.skipped

    def progress(self):
        return f"{len(self.saved)} recorded."

    def check(self, sentence, wav):
        return {b"good": GOOD, b"noisy": NOISY, b"silent": SILENT}[wav]

    def save(self, sentence, wav):
        if sentence == "full disk":
            raise OSError("No space left on device")
        self.saved[sentence] = wav

    def skip(self, sentence):
        self.skipped.append(sentence)


def send(panel: RecorderPanel, wav: bytes) -> str:
    """The status after a recording was sent as the script does it in JupyterLab."""
    panel.sent.value = base64.b64encode(wav).decode()
    assert panel.sent.value == "", "the script waits for this"
    return panel.status.value


def test_a_good_recording_is_saved_and_the_next_sentence_shown():
    made = Made("one", "two <b>")
    panel = RecorderPanel(made)
    assert "one" in panel.prompt.value and panel.buttons["Back"].disabled
    assert "Saved, 2.0 s: one" in send(panel, b"good")
    assert made.saved == {"one": b"good"} and "two &lt;b&gt;" in panel.prompt.value
    assert bytes(panel.player.value) == b"good" and "1 recorded." in panel.place.value
    send(panel, b"good")
    assert "No sentences left" in panel.place.value and panel.control.layout.display == "none"
    send(panel, b"silent")
    assert made.saved["two <b>"] == b"good", "there is nothing left to record"


def test_a_doubtful_recording_waits_for_the_person_and_an_unusable_one_is_refused():
    made = Made("one", "two")
    panel = RecorderPanel(made)
    assert "Silent: is it on?" in send(panel, b"silent") and panel.buttons["Keep"].disabled
    assert "find a quieter room" in send(panel, b"noisy") and not made.saved
    panel.buttons["Keep"].click()
    assert made.saved == {"one": b"noisy"} and panel.buttons["Keep"].disabled
    panel.buttons["Keep"].click()
    assert made.saved == {"one": b"noisy"}, "a double click saves it for one sentence"
    panel.buttons["Back"].click()
    assert "one" in panel.prompt.value
    send(panel, b"good")
    assert made.saved == {"one": b"good"} and "two" in panel.prompt.value


def test_skipped_and_recorded_sentences_are_not_shown_again():
    made = Made("one", "two", "three")
    RecorderPanel(made).buttons["Skip"].click()
    made.saved["two"] = b"good"
    panel = RecorderPanel(made)
    assert made.skipped == ["one"] and "three" in panel.prompt.value
    panel.buttons["Back"].click()
    panel.buttons["Skip"].click()
    assert made.skipped == ["one"], "two was recorded"
    panel = RecorderPanel(Made("one"))
    classes = " ".join((panel.control.value, *panel.sent._dom_classes))
    for name in ("record", "level", "hint", "sent"):
        assert f"kit-{name}-{panel.id}" in classes and f'find("{name}")' in SCRIPT


def test_what_goes_wrong_is_a_sentence(capsys):
    panel = RecorderPanel(Made("full disk"))
    assert "No space left on device" in send(panel, b"good")
    assert "KeyError" in send(panel, b"neither")
    RecorderPanel(Made("full disk")).run()
    assert "1 sentences to read, 0 recorded." in capsys.readouterr().out
    assert "SENTENCES" in RecorderPanel(Made()).place.value


def test_on_colab_a_recording_comes_in_parts(monkeypatch):
    called = {}
    output = SimpleNamespace(register_callback=called.__setitem__)
    monkeypatch.setitem(sys.modules, "google.colab", SimpleNamespace(output=output))
    made = Made("one")
    RecorderPanel(made, colab=True).run()
    (receive,) = called.values()
    text = base64.b64encode(b"good").decode()
    receive(text[:4], True, False)  # the page was reloaded before the rest
    receive(text[:3], True, False)
    assert not made.saved
    receive(text[3:], False, True)
    assert made.saved == {"one": b"good"}


# Uploads.


def upload_panel(folder, drive=None, colab=False) -> UploadPanel:
    def receive(file):
        if file.suffix == ".exe":
            raise ValueError(f"{file.name} is no recording")
        shutil.move(file, folder / file.name)

    folder.mkdir()
    content = lambda place: f"{len(list(place.iterdir()))} files in {place.name}"  # noqa: E731
    return UploadPanel(folder, receive, content, drive, colab)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "uploads"


def test_uploads_go_to_the_folder_and_leave_the_memory(folder, capsys):
    panel = upload_panel(folder)
    upload(panel.upload, "../me.wav", b"sound")
    assert (folder / "me.wav").read_bytes() == b"sound" and not panel.upload.value
    assert "1 files in uploads" in panel.status.value
    upload(panel.upload, "me.exe", b"?")
    assert "me.exe is no recording" in panel.status.value
    upload(panel.upload, "..", b"?")
    assert "IsADirectoryError" in panel.status.value and not panel.upload.value
    panel.run()
    assert capsys.readouterr().out == "1 files in uploads\n"


def test_colab_uploads_by_its_own_dialog(folder, monkeypatch, tmp_path):
    def dialog():
        (tmp_path / "me.wav").write_bytes(b"sound")
        return {"me.wav": b"sound"}

    monkeypatch.chdir(tmp_path)
    files = SimpleNamespace(upload=dialog)
    monkeypatch.setitem(sys.modules, "google.colab", SimpleNamespace(files=files))
    panel = upload_panel(folder, colab=True)
    panel.upload.click()
    assert (folder / "me.wav").is_file() and not (tmp_path / "me.wav").exists()
    assert "1 files" in panel.status.value


def test_a_folder_of_the_drive_is_described(folder, tmp_path):
    (tmp_path / "MyDrive" / "voices" / "mother" / "wavs").mkdir(parents=True)
    (tmp_path / "MyDrive" / ".hidden").mkdir()
    panel = upload_panel(folder, tmp_path / "MyDrive")
    names = [name for name, _ in panel.drive.options]
    assert names[1:] == ["voices", "voices/mother"]
    panel.drive.index = 2
    assert "1 files in mother" in panel.status.value
