"""A folder as one zip file, and the button that downloads it where a link cannot."""

import zipfile
from pathlib import Path

import ipywidgets as widgets
from IPython.display import display

from kit.base.files import atomic_path, require_disk


def zip_folder(folder: Path, path: Path) -> None:
    """Write the files of `folder` to the zip file `path`; they unpack into a folder of its name.

    Weights hardly compress, so nothing is compressed. Raises DiskError with a fix if the disk is
    full, and leaves an older `path` then.
    """
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.name[0] != "."]
    require_disk(folder, sum(file.stat().st_size for file in files))
    with atomic_path(path) as part, zipfile.ZipFile(part, "w", strict_timestamps=False) as archive:
        for file in files:
            archive.write(file, Path(path.stem, file.relative_to(folder)))


def show_download_button(path: Path) -> None:
    """Show a button that sends `path` to the browser. For Colab, which serves no files by link."""
    size_mb = path.stat().st_size / 1e6
    button = widgets.Button(
        description=f"Download {path.name} ({size_mb:.1f} MB)",
        icon="download",
        button_style="success",
        layout={"width": "auto"},
    )

    def send(_):
        from google.colab import files

        files.download(str(path))

    button.on_click(send)
    display(button)
