"""Safetensors files with checksums, in a folder of limited size that several processes share."""

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

STALE_S = 3600  # a temporary file of this age has lost its process


def pack_tensors(tensors: dict[str, np.ndarray]) -> bytes:
    """Return `tensors` and their checksum as the bytes of one safetensors file."""
    # safetensors would write a transposed array in memory order, and read it back scrambled.
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    return safetensors.numpy.save(tensors, metadata={"sha256": arrays_digest(tensors)})


def load_tensors(path: Path) -> dict[str, np.ndarray]:
    """Read and verify a file of `pack_tensors`. Raises DamagedFileError."""
    if not Path(path).is_file():
        raise DamagedFileError(missing(path))
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            intact = (file.metadata() or {}).get("sha256") == arrays_digest(tensors)
    except (OSError, ValueError, TypeError, safetensors.SafetensorError) as error:
        raise DamagedFileError(damaged(path, str(error))) from error
    if not intact:
        raise DamagedFileError(damaged(path, "its checksum does not match"))
    return tensors


def missing(path: Path) -> str:
    return f"There is no {path}: run notebook 01_data_prep to make it."


def damaged(path: Path, how: str) -> str:
    return (
        f"{path} is damaged or of another kind ({how}): run notebook 01_data_prep again to fix it."
    )


def as_bytes(value) -> np.ndarray:
    """Return JSON as a tensor: a million rows are too many for a safetensors header."""
    return np.frombuffer(json.dumps(value, ensure_ascii=False).encode(), dtype=np.uint8)


def from_bytes(tensor: np.ndarray):
    return json.loads(tensor.tobytes())


def split_by(tensor: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    return np.split(tensor, counts.cumsum()[:-1])


def claimed(paths: list[Path], make: Callable[[Path], None]) -> Iterator[Path]:
    """Call `make(path)` for each missing file of `paths`; yield each path once the file is there.

    Processes share the work: each first makes files that no other has started, then those still
    missing. So a killed process blocks nothing; at worst a file is made twice, with the same
    content.
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
        if not path.is_file():  # another process may have made it meanwhile
            make(path)
    finally:
        _mark(path).unlink(missing_ok=True)
    return path


def touch(paths: set[Path]) -> None:
    """Mark `paths` as used now."""
    for path in paths:
        with contextlib.suppress(OSError):  # gone, or a read-only folder
            os.utime(path)


def ages(folder: Path, pattern: str) -> dict[Path, tuple[float, int]]:
    """Return {file: (seconds since it was used, bytes)}."""
    files = {}
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):  # another process made room
            stat = path.stat()
            files[path] = (time.time() - stat.st_mtime, stat.st_size)
    return files


def sweep(folder: Path) -> None:
    """Remove old claims and half-written files of killed processes."""
    for pattern in ("*.claim", ".*.safetensors.*"):
        for path, (age_s, _) in ages(folder, pattern).items():
            if age_s > STALE_S:
                path.unlink(missing_ok=True)


def make_room(
    folder: Path, names: tuple[str, ...], cap_gib: float, needed_bytes: int, used: set[Path]
) -> None:
    """Remove the least recently used files, none of `used`, until `needed_bytes` more fit the cap.

    Only files that match one of the patterns `names` are counted and removed. Raises
    DamagedFileError when the files in use alone exceed the cap.
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
            with contextlib.suppress(PermissionError):  # Windows: mapped by another run
                path.unlink(missing_ok=True)
                total_bytes -= files[path][1]
    if total_bytes > cap_bytes:
        raise DamagedFileError(
            f"The code cache in {folder} needs {format_gib(total_bytes)} and more for this "
            f"corpus alone, and may take {cap_gib} GiB: raise `max_cache_gib`, or lower "
            "`reference_frames`."
        )
