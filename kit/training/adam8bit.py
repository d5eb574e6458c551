"""AdamW with its two moments in 8 bits: about 2 bytes of state a parameter instead of 8.

It uses bitsandbytes, if installed: blocks of 256 numbers, each with its own scale (Dettmers et al.
2022). Parameters of fewer than 4,096 entries keep fp32 moments. Chosen over torchao, whose
optimizer compiles its step, takes rates only as tensors, and keeps its state in tensor subclasses,
which safetensors cannot store. The moments are converted to torch's and back, so a run may be
resumed with or without the switch.
"""

import functools
import importlib
import logging
import math
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from kit.base.formatting import shorten
from kit.base.hardware import Choice, Hardware, is_here

PACKAGE = "bitsandbytes"
NEEDED = (0, 50)  # the first whose 8-bit optimizers run on CPUs, too
INSTALL = "pip install 'bitsandbytes>=0.50'"
LEAST_ENTRIES = 4096  # of a parameter whose moments are in 8 bits
BLOCK = 256  # numbers that share a scale
LEVELS = 256  # numbers that 8 bits can mean
# What bitsandbytes calls torch's moments, and the scales and levels beside them.
NAMES = {"exp_avg": "1", "exp_avg_sq": "2"}


def eight_bit_adamw(hw: Hardware) -> Choice:
    """Whether ("yes", "no") 8-bit AdamW runs on `hw`, and why; of a device elsewhere, on the CPU.

    Where the package is installed, one step of a small parameter is taken: that finds a library
    built for another CUDA, too.
    """
    return _runs_on(hw.device if is_here(hw) else "cpu")


@functools.cache
def _runs_on(device: str) -> Choice:
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        return Choice(value="no", reason=f"{PACKAGE} is not installed ({INSTALL})")
    if tuple(int(part) for part in found.split(".")[:2]) < NEEDED:
        return Choice(value="no", reason=f"{PACKAGE} {found} is too old ({INSTALL})")
    try:
        probe(device)
    except Exception as error:  # a library may raise anything; the reason is shown
        return Choice(value="no", reason=f"{PACKAGE} {found} does not run here: {shorten(error)}")
    return Choice(value="yes", reason=f"a quarter of the optimizer's state ({PACKAGE} {found})")


def probe(device: str) -> None:
    """One step of one parameter in 8 bits; raises whatever keeps it from running."""
    parameter = torch.nn.Parameter(torch.zeros(LEAST_ENTRIES, device=device))
    parameter.grad = torch.ones_like(parameter)
    adamw([{"params": [parameter]}], lr=1.0, betas=(0.9, 0.99)).step()
    if not bool((parameter < -0.5).all()):
        raise RuntimeError("its first step returned wrong values")


def adamw(groups: list[dict], lr: float, betas: tuple) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW over parameter `groups`, its moments in 8 bits."""
    return _library().optim.AdamW8bit(
        groups, lr=lr, betas=tuple(betas), min_8bit_size=LEAST_ENTRIES
    )


def _library():
    """bitsandbytes, without what it logs of kernels for 4-bit models as it is imported."""
    log = logging.getLogger(PACKAGE)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        return importlib.import_module(PACKAGE)
    finally:
        log.setLevel(before)


def state_bytes(entries: int) -> int:
    """Bytes of the moments of a parameter with so many `entries`."""
    if entries < LEAST_ENTRIES:
        return 2 * 4 * entries
    return 2 * (entries + 4 * blocks(entries))


def blocks(entries: int) -> int:
    return math.ceil(entries / BLOCK)


def moment_shape(name: str, size: torch.Size) -> torch.Size:
    """The shape of the moment `name`, torch's or bitsandbytes', of a parameter of `size`."""
    if name.startswith("absmax"):
        return torch.Size([blocks(size.numel())])
    return torch.Size([LEVELS]) if name.startswith("qmap") else size


def moments_of(optimizer: torch.optim.Optimizer) -> dict[int, dict]:
    """The moments of every parameter by number: plain names, tensors and counts."""
    found = optimizer.state_dict()["state"]
    plain = {}
    for number, moments in found.items():
        plain[number] = {}
        for name, value in moments.items():
            # bitsandbytes hides its tensors from FSDP in a dictionary of their own.
            plain[number].update(value if isinstance(value, dict) else {name: value})
    return plain


def converted(moments: dict[int, dict], optimizer: torch.optim.Optimizer) -> tuple[dict, str]:
    """Return the moments in the format of `optimizer`, and a note; "" if nothing changed."""
    theirs = type(optimizer).__module__.partition(".")[0] == PACKAGE
    if theirs and any("exp_avg" in m for m in moments.values()):
        rounded = {number: to_eight_bits(m) for number, m in moments.items()}
        return rounded, "AdamW's moments, fp32 before, are in 8 bits from here"
    if not theirs and any("state1" in m for m in moments.values()):
        whole = {number: to_fp32(m) for number, m in moments.items()}
        return whole, "AdamW's moments, in 8 bits before, are fp32 from here"
    return moments, ""


def to_eight_bits(moments: dict) -> dict:
    """torch's moments of a parameter as bitsandbytes keeps them. Needs bitsandbytes."""
    functional = _library().functional
    found = {"step": int(moments["step"])}
    for name, number in NAMES.items():
        moment = moments[name]
        if moment.numel() < LEAST_ENTRIES:
            found[f"state{number}"] = moment
            continue
        levels = functional.create_dynamic_map(signed=name == "exp_avg").to(moment.device)
        rounded, state = functional.quantize_blockwise(moment, code=levels, blocksize=BLOCK)
        found[f"state{number}"] = rounded
        found[f"absmax{number}"] = state.absmax
        found[f"qmap{number}"] = levels
    return found


def to_fp32(moments: dict) -> dict:
    """bitsandbytes' moments of a parameter as torch keeps them. Needs no bitsandbytes."""
    found = {"step": torch.tensor(float(moments["step"]))}
    for name, number in NAMES.items():
        moment = moments[f"state{number}"]
        if moment.dtype == torch.uint8:
            moment = expanded(moment, moments[f"absmax{number}"], moments[f"qmap{number}"])
        found[name] = moment
    return found


def expanded(rounded: Tensor, scales: Tensor, levels: Tensor) -> Tensor:
    """The fp32 numbers that 8 bits mean: a level (256,) times the scale of the block it is in."""
    each = scales.repeat_interleave(BLOCK)[: rounded.numel()]
    return levels[rounded.long()] * each.view(rounded.shape)
