"""The upload panel: recordings from the person's own computer, or a folder of their Google Drive.

On Colab google.colab.files uploads, as its widgets lose messages over 1 MB.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import ipywidgets as widgets

from kit.base.formatting import describe_error
from kit.notebook.panel.widgets import PANEL_LAYOUT, Panel, button, message, uploaded_files

FOLDERS = 300  # of a Drive, offered at most: listing them takes its time


class UploadPanel(Panel):
    """`receive(file)` takes each uploaded file; it moves or reads it.

    `content(folder)` says in a line what is in a folder, and what to do with it. With `drive`, a
    Drive's folder, its folders can be chosen. `colab`: the page is Colab's.
    """

    def __init__(
        self,
        folder: Path,
        receive: Callable[[Path], None],
        content: Callable[[Path], str],
        drive: Path | None = None,
        colab: bool = False,
    ):
        self.folder = folder
        self.receive = receive
        self.content = content
        self.status = widgets.HTML(message(content(folder), "info"))
        self.output = widgets.Output()  # where Colab shows its own upload
        if colab:
            self.upload = button("Upload", "upload", "success", "Recordings, tables or a zip")
            self.upload.on_click(lambda _: self._upload_on_colab())
            hint = "Recordings, a table, or a zip of them."
        else:
            self.upload = widgets.FileUpload(multiple=True, button_style="success")
            self.upload.observe(self._uploaded, "value")
            hint = (
                "Recordings, a table, or a zip of them, up to 9 MB at a time. Drag what is larger "
                "into the file list of JupyterLab, and name it instead of this folder."
            )
        hint = widgets.HTML(f'<div style="line-height:1.4;padding:3px 8px">{hint}</div>')
        hint.layout.flex = "1 1 300px"
        rows = [widgets.HBox([self.upload, hint], layout={"flex_flow": "row wrap"}), self.output]
        if drive and drive.is_dir():
            self.drive = widgets.Dropdown(
                options=[("or a folder of your Drive ...", ""), *drive_folders(drive)],
                layout={"width": "420px"},
            )
            self.drive.observe(self._chosen, "value")
            rows.append(self.drive)
        self.box = widgets.VBox([*rows, self.status], layout=PANEL_LAYOUT)

    def describe(self) -> str:
        return self.content(self.folder)

    def _uploaded(self, change: dict) -> None:
        files = uploaded_files(change["new"])
        if not files:
            return
        with tempfile.TemporaryDirectory() as folder:
            paths = []
            for name, content in files:
                paths.append(Path(folder) / Path(name).name)
                paths[-1].write_bytes(content)
            self._take(paths)
        self.upload.set_trait("value", type(self.upload.value)())  # else it stays in memory

    def _upload_on_colab(self) -> None:
        from google.colab import files

        self.output.clear_output()
        with self.output:
            names = list(files.upload())  # written into the current folder
        self._take([Path(name) for name in names])

    def _take(self, paths: list[Path]) -> None:
        try:
            for path in paths:
                self.receive(path)
            self.status.value = message(self.describe(), "good")
        except Exception as error:
            self.status.value = message(describe_error(error), "bad")

    def _chosen(self, change: dict) -> None:
        folder = Path(change["new"] or self.folder)
        try:
            self.status.value = message(self.content(folder), "info")
        except OSError as error:
            self.status.value = message(describe_error(error), "bad")


def drive_folders(drive: Path) -> list[tuple[str, str]]:
    """(name, path) of the folders of `drive` and of those in them, at most FOLDERS."""
    folders = []
    level = [drive]
    for _ in range(2):
        children = [child for parent in level for child in sorted(parent.iterdir())]
        level = [c for c in children if c.is_dir() and not c.name.startswith(".")]
        folders += level
    names = [(folder.relative_to(drive).as_posix(), str(folder)) for folder in folders]
    return sorted(names[:FOLDERS])
