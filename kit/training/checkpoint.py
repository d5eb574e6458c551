"""Checkpoints that survive a kill: one safetensors file with everything needed to resume.

It is written to a temporary file, flushed and renamed, so a kill leaves the previous one. A
checksum finds damage; `load_newest` then falls back to an older one. Nothing is ever unpickled.
"""

import contextlib
import json
from pathlib import Path

import torch
from torch import Tensor

from kit.base.errors import DamagedFileError
from kit.base.files import atomic_path, file_digest, make_folder, require_disk, write_atomic
from kit.base.tensor_file import read, save_tensors


def flatten(tree: dict, prefix: str = "") -> tuple[dict[str, Tensor], dict]:
    """Nested dict -> (tensors, everything else), by names joined with "|"."""
    tensors = {}
    plain = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            inner_tensors, inner_plain = flatten(value, f"{name}|")
            tensors.update(inner_tensors)
            plain.update(inner_plain)
        elif isinstance(value, Tensor):
            tensors[name] = value.detach().cpu().contiguous()
        else:
            plain[name] = value
    return tensors, plain


def unflatten(flat: dict) -> dict:
    """The inverse of `flatten`, with keys as strings."""
    tree: dict = {}
    for name, value in flat.items():
        *parents, leaf = name.split("|")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def save(tree: dict, folder: Path, step: int, keep: int = 2, best: int = 0) -> Path:
    """Write `tree` as `step-0000300.safetensors` in `folder`; returns its path.

    Then deletes all but the newest `keep` and that of step `best`. Tensors are written one by one,
    without a second copy in memory. Raises DiskError when the disk is full; older checkpoints stay.
    """
    folder = Path(folder)
    make_folder(folder)
    for leftover in folder.glob(".step-*"):  # of a kill
        leftover.unlink()
    tensors, plain = flatten(tree)
    path = of_step(folder, step)
    require_disk(folder, sum(t.nbytes for t in tensors.values()))
    header = {"plain": json.dumps(plain)}
    with atomic_path(path) as temporary:
        save_tensors(own_memory(tensors), temporary, header)
        digest = file_digest(temporary)  # of what can be read back
        # That of a checkpoint of the same step: a kill must not leave it beside the new one.
        with contextlib.suppress(FileNotFoundError):
            path.with_suffix(".sha256").unlink()
    write_atomic(path.with_suffix(".sha256"), digest)
    others = [p for p in checkpoints(folder) if p not in (path, of_step(folder, best))]
    for old in others[: max(0, len(others) - keep + 1)]:
        old.unlink()
        old.with_suffix(".sha256").unlink(missing_ok=True)
    return path


def own_memory(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy those of `tensors` that share memory with others (views, tied weights)."""
    seen = set()
    separate = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        shared = storage.data_ptr() in seen or storage.nbytes() != tensor.nbytes
        seen.add(storage.data_ptr())
        separate[name] = tensor.clone() if shared else tensor
    return separate


def of_step(folder: Path, step: int) -> Path:
    return Path(folder) / f"step-{step:07d}.safetensors"


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first."""
    return sorted(Path(folder).glob("step-*.safetensors"))


def load(path: Path) -> dict:
    """Load the tree saved at `path`. Raises DamagedFileError when it is missing or damaged."""
    checksum = Path(path).with_suffix(".sha256")
    try:
        if checksum.exists() and checksum.read_text(encoding="utf-8") != file_digest(path):
            raise ValueError("its checksum does not match")
        tensors, metadata = read(path)
        return unflatten(tensors | json.loads(metadata["plain"]))
    except OSError as error:
        raise DamagedFileError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFileError(f"{path} is damaged: {error}.") from error


def load_newest(folder: Path) -> tuple[dict | None, list[str]]:
    """Load the newest sound checkpoint in `folder` (or None), with notes on damaged newer ones."""
    notes = []
    for path in reversed(checkpoints(folder)):
        try:
            return load(path), notes
        except DamagedFileError as error:
            notes.append(f"{error} Resuming from the one before.")
    return None, notes


def random_state() -> dict[str, Tensor]:
    """The state of every generator that a training step draws from."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
