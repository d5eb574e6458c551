"""The upload panel: files of both versions of ipywidgets, of Colab, and a Drive's folders."""

import shutil
import sys
from types import ModuleType

import pytest
from test_speak_panel import send

from kit.notebook.record_panels import UploadPanel


def panel_of(folder, drive=None, colab=False) -> UploadPanel:
    def receive(file):
        if file.suffix == ".exe":
            raise ValueError(f"{file.name} is no recording")
        shutil.move(file, folder / file.name)

    def describe(place):
        return f"{len(list(place.iterdir()))} files in {place.name}"

    return UploadPanel(folder, receive, describe, drive, colab)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "uploads"
    folder.mkdir()
    return folder


def test_uploads_go_to_the_folder_and_leave_the_memory(folder, capsys):
    panel = panel_of(folder)
    send(panel.upload, "../me.wav", b"sound")
    assert (folder / "me.wav").read_bytes() == b"sound" and not panel.upload.value
    assert "1 files in uploads" in panel.status.value
    send(panel.upload, "me.exe", b"?")
    assert "me.exe is no recording" in panel.status.value
    panel.run()
    assert capsys.readouterr().out == "1 files in uploads\n"


def test_colab_uploads_by_its_own_dialog(folder, monkeypatch, tmp_path):
    def upload():
        (tmp_path / "me.wav").write_bytes(b"sound")
        return {"me.wav": b"sound"}

    monkeypatch.chdir(tmp_path)
    colab = ModuleType("google.colab")
    colab.files = ModuleType("google.colab.files")
    colab.files.upload = upload
    monkeypatch.setitem(sys.modules, "google.colab", colab)
    panel = panel_of(folder, colab=True)
    panel.upload.click()
    assert (folder / "me.wav").is_file() and not (tmp_path / "me.wav").exists()
    assert "1 files" in panel.status.value


def test_a_folder_of_the_drive_is_described(folder, tmp_path):
    (tmp_path / "MyDrive" / "voices" / "mother" / "wavs").mkdir(parents=True)
    (tmp_path / "MyDrive" / ".hidden").mkdir()
    panel = panel_of(folder, tmp_path / "MyDrive")
    names = [name for name, _ in panel.drive.options]
    assert names[1:] == ["voices", "voices/mother"]
    panel.drive.index = 2
    assert "1 files in mother" in panel.status.value
