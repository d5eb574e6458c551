"""A module in one safetensors file: weights, and a JSON header that says how to build it again.

Written atomically, read without running anything. A file that is missing, damaged or of another
shape is told in the words of whoever asked. Knows tensors and JSON alone.
"""

import errno
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from kit.base.files import write_atomic
from kit.base.words import brief, listed


def save_module(
    path: Path, module: nn.Module, dtype: torch.dtype = torch.float32, **header
) -> None:
    """Write `module`'s weights, as `dtype`, and `header` (anything JSON can hold) to `path`.

    Raises NotFiniteError, and leaves what was there, where a weight is not finite as `dtype`.
    """
    state = module.state_dict().items()
    weights = {name: w.detach().to("cpu", dtype).contiguous() for name, w in state}
    for name, weight in weights.items():
        if not is_sound(name, weight):
            raise NotFiniteError(
                f"{path} is not written: {name} is not finite. Training went astray; begin it "
                "again with a lower `lr`, or with mixed precision off."
            )
    write_atomic(path, file_bytes(weights, header))


class NotFiniteError(ValueError):
    """Weights that nothing can be computed with; the message says whose, and what to do."""


def is_sound(name: str, values: Tensor) -> bool:
    """Whether weights are finite. The code head's bias may be -inf: such a code is never said."""
    fine = torch.isfinite(values)
    return bool((fine | (values == float("-inf")) if name == "code_head.bias" else fine).all())


def file_bytes(tensors: dict[str, Tensor], header: dict) -> bytes:
    """A safetensors file of `tensors` and `header`, with their checksum; always the same bytes."""
    # One entry: safetensors writes several in any order.
    whole = dict(header, sha256=checksum(tensors))
    return safetensors.torch.save(tensors, metadata={"header": json.dumps(whole)})


def save_tensors(tensors: dict[str, Tensor], path: Path, about: dict[str, str]) -> None:
    """Write a safetensors file straight to the disk, with `about` as its metadata.

    safetensors tells a full disk in words of its own: they are raised as the OSError they are.
    """
    try:
        safetensors.torch.save_file(tensors, path, metadata=about)
    except safetensors.SafetensorError as error:
        raise OSError(errno.EIO, str(error)) from error


def checksum(tensors: dict[str, Tensor]) -> str:
    """Changes with any name, type, shape or byte of `tensors`."""
    raw = {}  # bytes: NumPy has no bf16
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        raw[f"{name} {tensor.dtype} {tuple(tensor.shape)}"] = flat.view(torch.uint8).numpy()
    return arrays_digest(raw)


def arrays_digest(arrays: dict[str, np.ndarray]) -> str:
    """SHA-256 that changes with any name, type, shape or byte of `arrays`, in whatever order."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        found.update(f"{name} {array.dtype} {array.shape} ".encode())
        found.update(array.tobytes())
    return found.hexdigest()


class ForeignError(ValueError):
    """A safetensors file that nothing of this version wrote: it need not be damaged."""


def saved_header(path: Path) -> dict:
    """The header alone that `file_bytes` wrote to `path`, without its checksum."""
    with safetensors.safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["header"])
    header.pop("sha256", None)
    return header


def tensors_sha256(path: Path) -> str:
    """The `checksum` of the tensors that `file_bytes` wrote to `path`."""
    with safetensors.safe_open(path, framework="pt") as file:
        noted = json.loads(file.metadata()["header"]).get("sha256")
    return noted or checksum(contents(path)[0])  # earlier versions noted none


def contents(path: Path) -> tuple[dict[str, Tensor], dict]:
    """Tensors and header that `file_bytes` wrote to `path`.

    Raises ForeignError where another wrote it, ValueError, OSError or SafetensorError for damage.
    """
    with safetensors.safe_open(path, framework="pt") as file:
        told = file.metadata() or {}
        if "header" not in told:
            raise ForeignError("of another kind, or of another version of the kit")
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    header = json.loads(told["header"])
    told = header.pop("sha256", None)  # earlier versions wrote none
    if told and told != checksum(tensors):
        raise ValueError("its checksum is another")
    for name, tensor in tensors.items():
        if not is_sound(name, tensor):
            raise ValueError(f"{name} is not finite")
    return tensors, header


def saved_tensor(path: Path, name: str) -> Tensor:
    """The tensor `name` of the file at `path`, on the CPU. Raises OSError where that has gone."""
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"{path} has gone, in which the voice that this run begins with lay. Bring it back, "
            "and run again: it goes on from the last checkpoint."
        )
    with safetensors.safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


def tensor_faults(tensors: dict[str, Tensor], wanted: dict[str, Tensor]) -> str:
    """What keeps `tensors` from being exactly `wanted`, by names, shapes and kinds of number.

    Of `wanted` the values do not matter, so it may lie on the meta device. "" where nothing does.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    both = [name for name in wanted if name in tensors]
    faults = {
        "missing": [name for name in wanted if name not in tensors],
        "misshapen": [
            f"{name} {shapes[name]}, not {tuple(wanted[name].shape)}"
            for name in both
            if shapes[name] != tuple(wanted[name].shape)
        ],
        "unknown": [name for name in tensors if name not in wanted],
        "of another type": [
            f"{name} {tensors[name].dtype}"
            for name in both
            if tensors[name].is_floating_point() != wanted[name].is_floating_point()
        ],
    }
    return "; ".join(f"{kind}: {listed(names)}" for kind, names in faults.items() if names)


def load_module(path: Path, make: Callable[[dict], nn.Module], error: type, cure: str) -> nn.Module:
    """`make(header)` filled with the weights at `path`, fp32, in eval mode.

    Raises `error` with `cure` when the file is missing, damaged, or does not fit what was made.
    """
    if not Path(path).is_file():
        raise error(f"There is no {path}: {cure}")
    try:
        weights, header = contents(path)
        require_shapes(weights, make, header)
        module = make(header)
        module.load_state_dict(weights)
    except ForeignError as why:
        raise error(f"{path} is {why}: move it away, then {cure}") from why
    except (
        safetensors.SafetensorError,
        OSError,
        KeyError,
        TypeError,
        ValueError,
        RuntimeError,  # RecursionError is one
    ) as why:
        raise error(
            f"{path} is damaged or of another kind ({brief(why)}): delete it, then {cure}"
        ) from why
    return module.eval()


def require_shapes(weights: dict[str, Tensor], make: Callable, header: dict) -> None:
    """Raise ValueError unless `make(header)` would have tensors of the shapes of `weights`.

    Nothing is allocated: a header may ask for more than any memory holds.
    """
    with torch.device("meta"):
        wanted = {name: tuple(t.shape) for name, t in make(header).state_dict().items()}
    found = {name: tuple(t.shape) for name, t in weights.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise ValueError(
                f"{name} is {found.get(name, 'missing')}, its header means "
                f"{wanted.get(name, 'none of that name')}"
            )
