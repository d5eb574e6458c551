"""A folder of safetensors files that check themselves, make room, and are shared by processes.

`pack_tensors` puts a checksum into a file, `load_tensors` refuses what does not match it.
`make_room` keeps the folder below its cap. `claimed` lets several processes make the same files at
once without locks.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from kit.base.errors import DamagedFileError
from kit.base.formatting import format_gib
from kit.base.tensor_file import arrays_digest

LITTER_AGE_S = 3600  # a temporary file as old as this has lost its process


def pack_tensors(tensors: dict[str, np.ndarray]) -> bytes:
    """`tensors` and their checksum as the bytes of one safetensors file."""
    # A transposed array would be written as it lies in memory, and read back scrambled.
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    return safetensors.numpy.save(tensors, metadata={"sha256": arrays_digest(tensors)})


def load_tensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a sealed file. Raises DamagedFileError when it is missing or any byte
    differs.
    """
    if not Path(path).is_file():
        raise DamagedFileError(missing(path))
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            whole = (file.metadata() or {}).get("sha256") == arrays_digest(tensors)
    except (OSError, ValueError, TypeError, safetensors.SafetensorError) as error:
        raise DamagedFileError(damaged(path, str(error))) from error
    if not whole:
        raise DamagedFileError(damaged(path, "its checksum does not match"))
    return tensors


def missing(path: Path) -> str:
    return f"There is no {path}: run notebook 01_data_prep to make it."


def damaged(path: Path, how: str) -> str:
    return (
        f"{path} is damaged or of another kind ({how}): run notebook 01_data_prep again to mend it."
    )


def as_bytes(value) -> np.ndarray:
    """JSON as a tensor: a safetensors header is no place for a million rows."""
    return np.frombuffer(json.dumps(value, ensure_ascii=False).encode(), dtype=np.uint8)


def from_bytes(tensor: np.ndarray):
    return json.loads(tensor.tobytes())


def split_by(tensor: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    return np.split(tensor, counts.cumsum()[:-1])


def claimed(paths: list[Path], make: Callable[[Path], None]) -> Iterator[Path]:
    """Call `make(path)` for each of `paths` that is not there; yield each once it is.

    Two processes share the work: each first makes what the other has not begun, and then what is
    still missing, begun or not. So the claim of a killed process delays its file and blocks
    nothing; at worst a file is made twice, alike, and the second takes the place of the first.
    """
    others = []
    for path in paths:
        if path.is_file() or _claim(path):
            yield _made(path, make)
        else:
            others.append(path)
    for path in others:
        yield _made(path, make)


def _claim(path: Path) -> bool:
    try:
        _mark(path).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _mark(path: Path) -> Path:
    return path.with_suffix(".claim")


def _made(path: Path, make: Callable[[Path], None]) -> Path:
    try:
        if not path.is_file():  # the other process may have been here meanwhile
            make(path)
    finally:
        _mark(path).unlink(missing_ok=True)
    return path


def touch(paths: set[Path]) -> None:
    """Note that `paths` are in use now."""
    for path in paths:
        with contextlib.suppress(OSError):  # gone, or a read-only folder: nothing to keep alive
            os.utime(path)


def ages(folder: Path, pattern: str) -> dict[Path, tuple[float, int]]:
    """{file: (seconds since it was used, bytes)}; a file that goes meanwhile is left out."""
    found = {}
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):  # another process made room
            stat = path.stat()
            found[path] = (time.time() - stat.st_mtime, stat.st_size)
    return found


def sweep(folder: Path) -> None:
    """Remove what killed processes left behind: old claims and half-written files."""
    for pattern in ("*.claim", ".*.safetensors.*"):
        for path, (age_s, _) in ages(folder, pattern).items():
            if age_s > LITTER_AGE_S:
                path.unlink(missing_ok=True)


def make_room(
    folder: Path, names: tuple[str, ...], cap_gib: float, needed_bytes: int, used: set[Path]
) -> None:
    """Remove the longest unused files, none of `used`, until `needed_bytes` more fit the cap.

    Only files called like one of `names` are counted and removed. Raises DamagedFileError when
    what is in use fills the cap alone.
    """
    files = {}
    cap_bytes = cap_gib * 2**30
    for name in names:
        files.update(ages(folder, name))
    total_bytes = needed_bytes + sum(size for _, size in files.values())
    for path in sorted(files, key=lambda p: files[p][0], reverse=True):
        if total_bytes <= cap_bytes:
            return
        if path not in used:
            with contextlib.suppress(PermissionError):  # Windows: another run has it mapped
                path.unlink(missing_ok=True)
                total_bytes -= files[path][1]
    if total_bytes > cap_bytes:
        raise DamagedFileError(
            f"The code cache in {folder} needs {format_gib(total_bytes)} and more for this "
            f"corpus alone, and may take {cap_gib} GiB: raise `max_cache_gib`, or lower "
            "`reference_frames`."
        )
