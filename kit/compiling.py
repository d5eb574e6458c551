"""Compiling a step: whether this machine can, and the compiler's settings for it.

Tuning times several kernels for each product and keeps the quickest, once a machine: what it found
lies in the compiler's cache on disk. Knows torch's compiler; nothing of models.
"""

import contextlib
import io
import logging
from collections.abc import Callable, Iterator

import torch

from kit.hardware import compiler_available, timings


def will_compile(asked: bool, device: torch.device) -> tuple[bool, str]:
    """Whether steps can be compiled on `device`, when asked for; if not, the words that say why."""
    if not asked:
        return False, ""
    found = compiler_available(device.type)
    return (True, "") if found.value == "yes" else (False, not_compiled(found.reason))


def not_compiled(reason: str) -> str:
    return f"; not compiled: {reason}"


@contextlib.contextmanager
def quiet_inductor(weights: str = "", **settings) -> Iterator[None]:
    """The compiler with `settings`, and without what it tells its makers on stderr.

    `weights` is the checksum of weights that are frozen: the compiler keeps on disk what it made of
    them, and would give it to another model of the same shape.
    """
    # Whether the compiler knows this processor's instructions is asked in six processes otherwise.
    quick = {"cpp.vec_isa_ok": True, "autotune_num_choices_displayed": 0}
    inductor = torch._inductor.config.patch(quick | settings)
    graphs = torch._dynamo.config.patch(recompile_limit=64)  # one for each batch size
    own = torch.compiler.config.patch(cache_key_tag=weights)
    told = logging.getLogger("torch.utils.cpp_extension")  # of a missing CUDA, on every CPU
    level = told.level
    told.setLevel(logging.ERROR)
    try:
        with inductor, graphs, own, contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        told.setLevel(level)


def quickest(work: Callable[[], object], repeats: int = 5) -> float:
    """Seconds of the quickest of a few runs, after one that pays for what happens once."""
    return min(timings(work, repeats))
