"""Checkpoints that survive a kill: everything needed to go on, written whole or not at all.

A checkpoint is one safetensors file: weights, EMA, optimizer moments, random states, and a JSON
header with step, data position and settings. It is written beside its final name, flushed and
renamed, so a kill leaves the one before. A checksum finds damage; `load_newest` then falls back,
and says so. Nothing is ever unpickled. Knows tensors and JSON; nothing of models or training.
"""

import hashlib
import json
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from kit.config import write_atomic


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or of another model; the message says which."""


def flatten(tree: dict, prefix: str = "") -> tuple[dict[str, Tensor], dict]:
    """Nested dict -> (tensors by dotted name, everything else by dotted name)."""
    tensors, plain = {}, {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            inner = flatten(value, f"{name}|")
            tensors |= inner[0]
            plain |= inner[1]
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


def save(tree: dict, folder: Path, step: int, keep: int = 2) -> Path:
    """Write `tree` as `step-0000300.safetensors` under `folder` and drop all but the newest `keep`.

    Raises DiskError, with the cure, when the disk is full; older checkpoints stay.
    """
    for left_by_a_kill in Path(folder).glob(".step-*"):
        left_by_a_kill.unlink()
    tensors, plain = flatten(tree)
    # Tensors that share memory (tied or swapped weights) must be told apart on disk.
    tensors = {k: v.clone() for k, v in tensors.items()}
    data = safetensors.torch.save(tensors, metadata={"plain": json.dumps(plain)})
    path = Path(folder) / f"step-{step:07d}.safetensors"
    write_atomic(path, data)
    write_atomic(path.with_suffix(".sha256"), hashlib.sha256(data).hexdigest())
    others = [p for p in checkpoints(folder) if p != path]
    for old in others[: len(others) - keep + 1] if len(others) >= keep else ():
        old.unlink()
        old.with_suffix(".sha256").unlink(missing_ok=True)
    return path


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoint files under `folder`, oldest first."""
    return sorted(Path(folder).glob("step-*.safetensors"))


def load(path: Path) -> dict:
    """The tree saved at `path`. Raises CheckpointError when it is missing or damaged."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    mark = Path(path).with_suffix(".sha256")
    if mark.exists() and mark.read_text() != hashlib.sha256(data).hexdigest():
        raise CheckpointError(f"{path} is damaged: its checksum does not match.")
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        plain = json.loads(header["__metadata__"]["plain"])
        return unflatten(safetensors.torch.load(data) | plain)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from error


def load_newest(folder: Path) -> tuple[dict | None, list[str]]:
    """The newest sound checkpoint under `folder` (or None), and notes on what was passed over."""
    notes = []
    for path in reversed(checkpoints(folder)):
        try:
            return load(path), notes
        except CheckpointError as error:
            notes.append(f"{error} Going on from the one before.")
    return None, notes


def random_state() -> dict[str, Tensor]:
    """The state of every generator a training step may draw from."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
