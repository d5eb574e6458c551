"""A file that `torch.save` wrote and somebody published, read without running anything in it.

Such a file is a pickle beside tensors, and a pickle can call whatever it names. Here it may name
torch's tensors and plain values, and classes that the caller lists: objects of those become plain
dicts of their contents, so the packages that define them need not be installed.
"""

import pickle
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from kit.base.errors import DamagedFileError
from kit.base.files import placeholder_problem
from kit.base.formatting import shorten

PLAIN = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_CALLS = re.compile(r"GLOBAL (\S+)")  # as in the message of torch's reader


class PickledContents:
    """Replaces an object of a listed class: its contents without its code."""

    contents: object = {}

    def __setstate__(self, state: object):
        self.contents = state


def read_torch_file(path: Path, classes: Iterable[str] = ()) -> object:
    """Read what `torch.save` wrote to `path`: dicts, lists, plain values, and tensors on the CPU.

    Tensors are mapped from the file. `classes` are full names of classes whose objects become dicts
    of their contents. Raises DamagedFileError for a file that is missing, damaged or of another
    kind, and, before any of its code runs, for one that names anything else to be called.
    """
    path = Path(path)
    if not path.is_file():
        raise DamagedFileError(f"There is no file {path}.")
    allowed = [(PickledContents, name) for name in classes]
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
        # torch.save compresses nothing; a file that expands was made to fill the memory.
        size_bytes = path.stat().st_size
        if any(e.compress_type != zipfile.ZIP_STORED or e.file_size > size_bytes for e in entries):
            raise ValueError("it is a compressed archive: unpack it first")
        with torch.serialization.safe_globals(allowed):
            contents = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return _plain(contents)
    except pickle.UnpicklingError as why:
        called = _CALLS.search(str(why))
        what = f"asks for `{called[1]}`" if called else "holds instructions"
        raise DamagedFileError(
            f"{path} is not read: it {what}, which no file of weights needs and which could run "
            "code on this machine. Get the file from where it was first published, or one in "
            "safetensors."
        ) from why
    except Exception as why:  # whatever a damaged or forged file makes the readers raise
        problem = placeholder_problem(path) or shorten(str(why).partition("\n")[0])
        raise DamagedFileError(
            f"{path} is damaged or no PyTorch file ({problem}): copy or download it again, or name "
            "the right file."
        ) from why


def _plain(value: object) -> object:
    """Return `value` with objects of listed classes replaced by dicts, at any depth."""
    if isinstance(value, PickledContents):
        return _plain(value.contents)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return [_plain(item) for item in value]
    return value


def require_backed(name: str, value: object) -> Tensor:
    """Return `value` if it is a plain tensor with all its numbers in the file; else ValueError."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is {type(value).__name__}, not a tensor")
    plain = type(value) in (Tensor, torch.nn.Parameter) and value.dtype in PLAIN
    if not plain or value.layout is not torch.strided or value.device.type != "cpu":
        raise ValueError(
            f"{name} is no plain tensor ({value.dtype}, {value.layout}, {value.device})"
        )
    # A view may repeat a few numbers over any size.
    if value.untyped_storage().nbytes() < value.numel() * value.element_size():
        raise ValueError(f"{name} claims {tuple(value.shape)}, its file holds less")
    return value
