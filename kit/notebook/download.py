"""A folder as one zip file, and the button that downloads it where a link cannot."""

import zipfile
from pathlib import Path

import ipywidgets as widgets
from IPython.display import display

from kit.base.files import atomic_path, require_disk


def zip_folder(folder: Path, path: Path) -> None:
    """Write the files of `folder` to the zip file `path`, unless it has them already.

    They unpack into one folder with the name of `path`. Weights hardly compress, so nothing is
    compressed. Raises DiskError with a fix if the disk is full, and leaves an older `path` then.
    """
    files = {}
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if file.is_file() and not name.startswith("."):  # being written
            files[f"{path.stem}/{name}"] = file
    sizes = {name: file.stat().st_size for name, file in files.items()}
    newest_ns = max(file.stat().st_mtime_ns for file in files.values())
    if zipfile.is_zipfile(path) and path.stat().st_mtime_ns >= newest_ns:
        with zipfile.ZipFile(path) as archive:
            if {info.filename: info.file_size for info in archive.infolist()} == sizes:
                return
    require_disk(folder, sum(sizes.values()))
    with (
        atomic_path(path) as part,
        zipfile.ZipFile(part, "w", strict_timestamps=False) as archive,
    ):
        for name, file in files.items():
            archive.write(file, name)


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
