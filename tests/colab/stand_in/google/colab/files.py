"""The browser's side of google.colab.files: a folder for downloads."""

import os
import shutil
from pathlib import Path

DOWNLOADS = Path(os.environ["HOME"], "Downloads")


def download(path: str) -> None:
    DOWNLOADS.mkdir(exist_ok=True)
    shutil.copy(path, DOWNLOADS)
