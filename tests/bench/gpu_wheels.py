"""Download what a GPU machine without a network lacks, for `gpu_session.sh`: `make gpu-wheels`.

bitsandbytes is cut down to the library of one CUDA version: 4 MB instead of 43.
"""

import argparse
import re
import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGES = (
    "soundfile==0.14.0",
    "cffi==2.1.1",
    "pycparser==3.12",
    "orjson==3.13.0",
    "bitsandbytes==0.50.2",
    # What `python -m kit train` shows its progress with, and what that needs.
    "ipywidgets==8.1.9",
    "comm==0.2.3",
    "ipython==9.18.1",
    "ipython-pygments-lexers==1.1.1",
    "jedi==0.20.1",
    "parso==0.8.7",
    "matplotlib-inline==0.2.2",
    "pexpect==4.9.0",
    "ptyprocess==0.7.0",
    "prompt-toolkit==3.0.53",
    "wcwidth==0.9.4",
    "stack-data==0.6.3",
    "asttokens==3.0.2",
    "executing==2.3.0",
    "pure-eval==0.2.4",
    "traitlets==5.16.1",
)
PLATFORMS = ("2_28", "2_27", "2_24", "2_17")  # manylinux tags these packages use


def download(folder: Path, python: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", "--dest", str(folder)]
    for tag in PLATFORMS:
        command += ["--platform", f"manylinux_{tag}_x86_64"]
    command += ["--platform", "manylinux2014_x86_64", "--platform", "manylinux1_x86_64"]
    subprocess.run([*command, *PACKAGES], check=True)


def keep_one_cuda(wheel: Path, cuda: str) -> None:
    """Leave all GPU libraries but that of `cuda` ("130") out of a bitsandbytes wheel."""
    other = re.compile(rf"libbitsandbytes_(?!cuda{cuda}\.|cpu\.)\w+\.so")
    smaller = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(smaller, "w", 8) as target:
        for item in source.infolist():
            content = source.read(item)
            if other.search(item.filename):
                continue
            if item.filename.endswith(".dist-info/RECORD"):
                lines = content.decode().splitlines(keepends=True)
                content = "".join(line for line in lines if not other.search(line)).encode()
            target.writestr(item, content)
    smaller.replace(wheel)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version of the GPU machine's Python")
    parser.add_argument("--cuda", default="130", help="of its torch, without the dot")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for old in options.folder.glob("*.whl"):
        old.unlink()
    download(options.folder, options.python)
    (bitsandbytes,) = options.folder.glob("bitsandbytes-*.whl")
    keep_one_cuda(bitsandbytes, options.cuda)
    size = sum(wheel.stat().st_size for wheel in options.folder.glob("*.whl"))
    print(f"{options.folder}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
