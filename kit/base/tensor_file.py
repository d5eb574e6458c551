"""Tensors in one safetensors file, with a checksum and, but for plain arrays, a JSON header."""

import errno
import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from torch import Tensor, nn

from kit.base.config import checked, parse_object
from kit.base.errors import KitError
from kit.base.files import write_atomic
from kit.base.formatting import join_names, shorten

# Of tensors that are read: others cannot be tested for NaN, or lose a part in fp32.
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
)
SHA256 = (str, 64, 64)  # the schema of one


def save_module(
    path: Path, module: nn.Module, dtype: torch.dtype = torch.float32, **header
) -> None:
    """Write `module`'s weights as `dtype`, and `header`, to `path`; KitError if not finite."""
    state = module.state_dict().items()
    weights = {name: w.detach().to("cpu", dtype).contiguous() for name, w in state}
    for name, weight in weights.items():
        if not is_finite(name, weight):
            raise KitError(
                f"{path} is not written: {name} is not finite. Training diverged: train again "
                "with a lower `lr`, or with mixed precision off."
            )
    write_atomic(path, file_bytes(weights, header))


def take_layers(module: nn.Module, path: Path, config) -> None:
    """Replace weights of `module` by those of a trained one at `path`; its other ones stay.

    Of tables with more rows (positions) the first ones. Raises KitError unless the sizes that
    `path` needs are those of `config`, its dataclass.
    """
    layers, sizes = contents(path)
    for name, value in sizes.items():
        if getattr(config, name) != value:
            raise KitError(
                f"`pretrained_layers` of {type(config).__name__} needs {name} {value}, got "
                f"{getattr(config, name)}: set it to false, or {name} to {value}."
            )
    state = module.state_dict()
    for name in state.keys() & layers.keys():
        rows = min(len(state[name]), len(layers[name]))
        state[name][:rows] = layers[name][:rows]


def is_finite(name: str, values: Tensor) -> bool:
    """Whether weights are finite. The code head's bias may be -inf: that code is never sampled."""
    finite = torch.isfinite(values)
    if name == "code_head.bias":
        finite |= values == float("-inf")
    return bool(finite.all())


def file_bytes(tensors: dict[str, Tensor], header: dict) -> bytes:
    """A safetensors file of `tensors` and `header`, with their checksum; always the same bytes."""
    header = dict(header, sha256=checksum(tensors))
    # One entry, because safetensors writes several in any order.
    return safetensors.torch.save(tensors, metadata={"header": json.dumps(header)})


def pack_tensors(arrays: dict[str, np.ndarray]) -> bytes:
    """A safetensors file of `arrays` with their checksum, `arrays_digest`, in its metadata."""
    # safetensors would write a transposed array in memory order, and read it back scrambled.
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    return safetensors.numpy.save(arrays, metadata={"sha256": arrays_digest(arrays)})


def save_tensors(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file without a copy in memory. Raises OSError."""
    try:
        safetensors.torch.save_file(tensors, path, metadata=metadata)
    except safetensors.SafetensorError as error:  # a full disk
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
    sha256 = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        sha256.update(f"{name} {array.dtype} {array.shape} ".encode())
        sha256.update(np.ascontiguousarray(array))  # not copied
    return sha256.hexdigest()


def saved_header(path: Path) -> dict:
    """The header that `file_bytes` wrote to `path`, without its checksum."""
    return _parts(path, tensors=False)[1]


def tensors_sha256(path: Path) -> str:
    """The `checksum` of the tensors that `file_bytes` wrote to `path`."""
    return _parts(path, tensors=False)[2] or checksum(contents(path)[0])


def contents(path: Path) -> tuple[dict[str, Tensor], dict]:
    """Tensors and header that `file_bytes` wrote to `path`. Raises KitError, OSError."""
    tensors, header, sha256 = _parts(path)
    if sha256 and sha256 != checksum(tensors):
        raise KitError("its checksum does not match")
    for name, tensor in tensors.items():
        if not is_finite(name, tensor):
            raise KitError(f"{name} is not finite")
    return tensors, header


def read(path: Path, tensors: bool = True) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors (mapped, if asked for) and metadata of any safetensors file; KitError, OSError."""
    values, metadata = read_any(path, tensors)
    for name, tensor in values.items():
        if tensor.dtype not in DTYPES:
            raise KitError(f"{shorten(repr(name))} is of type {tensor.dtype}")
    return values, metadata


def read_any(path: Path, tensors: bool = True) -> tuple[dict[str, Tensor], dict[str, str]]:
    """As `read`, of any type."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            values = {name: file.get_tensor(name) for name in file.keys()} if tensors else {}
    except (safetensors.SafetensorError, ValueError, RuntimeError) as error:  # too large a shape
        raise KitError(shorten(error)) from error
    return values, metadata


def _parts(path: Path, tensors: bool = True) -> tuple[dict[str, Tensor], dict, str | None]:
    """What `file_bytes` wrote: tensors, header, and the checksum, which earlier versions lack."""
    mapped, metadata = read(path, tensors)
    if "header" not in metadata:
        raise KitError("it is of another kind, or of another version of the kit")
    header = parse_object(metadata["header"], "its header")
    sha256 = header.pop("sha256", None)
    return mapped, header, sha256 and checked(sha256, SHA256, "its sha256")


def saved_tensor(path: Path, name: str) -> Tensor:
    """The tensor `name` of the file at `path`, on the CPU. Raises OSError if the file is gone."""
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"{path} is gone; it holds the model that this run started from. Bring it back and run "
            "again: training resumes from the last checkpoint."
        )
    with safetensors.safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


def describe_mismatch(tensors: dict[str, Tensor], wanted: dict[str, Tensor]) -> str:
    """How `tensors` differ from `wanted`, which may be on the meta device; "" if not at all."""
    shared = [name for name in wanted if name in tensors]
    faults = {
        "missing": [name for name in wanted if name not in tensors],
        "misshapen": [
            f"{name} {tuple(tensors[name].shape)}, not {tuple(wanted[name].shape)}"
            for name in shared
            if tensors[name].shape != wanted[name].shape
        ],
        "unknown": [name for name in tensors if name not in wanted],
        "of another type": [
            f"{name} {tensors[name].dtype}"
            for name in shared
            if tensors[name].is_floating_point() != wanted[name].is_floating_point()
        ],
    }
    return "; ".join(f"{kind}: {join_names(names)}" for kind, names in faults.items() if names)


def load_module(path: Path, make: Callable[[dict], nn.Module], error: type, fix: str) -> nn.Module:
    """Return `make(header)` with the weights at `path`, fp32, in eval mode; `error` with `fix`."""
    if not Path(path).is_file():
        raise error(f"There is no {path}: {fix}")
    try:
        weights, header = contents(path)
        with torch.device("meta"):  # a header may ask for more than any memory holds
            wanted = make(header).state_dict()
        for name in wanted.keys() & weights.keys():  # `save_module` makes integers floats, too
            wanted[name] = wanted[name].to(weights[name].dtype)
        mismatch = describe_mismatch(weights, wanted)
        if mismatch:
            raise KitError(f"its header means other tensors; {mismatch}")
        module = make(header)
        module.load_state_dict(weights)
    except (OSError, KeyError, TypeError, ValueError, RuntimeError) as why:
        raise error(
            f"{path} is damaged or of another kind ({shorten(why)}): move it away, then {fix}"
        ) from why
    return module.eval()


# --- other people's files ----------------------------------------------------------------------


def read_tensors(path: Path, names: Iterable[str] = ()) -> dict[str, Tensor]:
    """Read the tensors `names`, or all. Raises KitError for one that is not finite."""
    with opened(path) as file:
        tensors = {name: file.get_tensor(name) for name in names or file.keys()}
    require_finite(tensors, path)
    return tensors


def opened(path: Path):
    try:
        return safetensors.safe_open(path, framework="pt")
    except (safetensors.SafetensorError, OSError) as why:
        raise KitError(
            f"{path} is damaged or no safetensors file ({shorten(why)}): download it again."
        ) from why


def fill_module(module: nn.Module, tensors: dict[str, Tensor], what: object) -> nn.Module:
    """Return `module` in eval mode, with copies of `tensors` in fp32, which must be finite."""
    require_finite(tensors, what)
    order = torch.contiguous_format
    copies = {}  # the file, which stays mapped, may be overwritten
    for name, tensor in tensors.items():
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        copies[name] = tensor.to(dtype, copy=True, memory_format=order)
    module.load_state_dict(copies, assign=True)
    return module.eval()


def require_finite(tensors: dict[str, Tensor], what: object) -> None:
    for name, tensor in tensors.items():
        if not is_finite(name, tensor):
            raise KitError(f"{what} is damaged: {name} is not finite. Download it again.")
