"""Compiling a step: whether this machine can, and the compiler's settings for it.

Tuning times several kernels for each product and keeps the quickest, once a machine: what it found
lies in the compiler's cache on disk. Knows torch's compiler; nothing of models.
"""

import contextlib
import functools
import importlib.util
import io
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from kit.base.hardware import Choice, format_capability, timings

Made = Tensor | tuple[Tensor, ...]  # what a captured step leaves
# Inductor tries a processor's instructions by loading a library of one function in a process of its
# own, up to six of them, each of which imports torch first: 20 s where there are AVX-512 and AMX.
ISA_PROBE = """
from ctypes import cdll
try:
    cdll.LoadLibrary("__lib_path__")
except OSError:  # it does not find torch's own libraries
    import torch
    cdll.LoadLibrary("__lib_path__")
"""
ISA_OK = {"cpp.vec_isa_ok": True}  # plain AVX-512 and AVX2 need no trial
# Base classes of what the compilers raise, where those are no RuntimeError, by their module.
COMPILER_EXCEPTIONS = {
    "triton.errors": "TritonError",
    "torch._dynamo.exc": "FailOnRecompileLimitHit",
    "torch._inductor.compile_worker.subproc_pool": "SubprocException",
}


def will_compile(asked: bool, device: torch.device) -> tuple[bool, str]:
    """Whether steps can be compiled on `device`, when asked for; if not, the words that say why."""
    if not asked:
        return False, ""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    found = compiler_available(device.type, capability)
    return (True, "") if found.value == "yes" else (False, not_compiled_note(found.reason))


def compiler_available(device: str, capability: tuple | None = None) -> Choice:
    """Whether `torch.compile` can work for `device` ("cuda" or "cpu"): "yes" or "no".

    `capability` is the GPU's. What the compiler writes is C++ for a CPU and Triton for a GPU; both
    also need Python's own header, since what they build is loaded as a module.
    """
    if device not in ("cuda", "cpu"):
        raise ValueError(f'device is {device!r}: name "cuda" or "cpu".')
    missing = _triton_missing(capability) if device == "cuda" else _cpp_missing()
    if missing:
        return Choice(value="no", reason=missing)
    if device == "cuda":
        return Choice(value="yes", reason="Triton compiles for this GPU")
    return Choice(value="yes", reason=f"{cpp_compiler()} is installed")


def cpp_compiler() -> str:
    """The C++ compiler that torch.compile calls on this system: `CXX`, or the system's own."""
    usual = {"win32": "cl", "darwin": "clang++"}
    return os.environ.get("CXX", usual.get(sys.platform, "g++"))


def _cpp_missing() -> str:
    """What `torch.compile` lacks on this CPU, in words; "" when nothing."""
    compiler = cpp_compiler()
    if shutil.which(compiler):
        return _header_missing()
    cures = {
        "cl": "install Visual Studio's C++ build tools and start from the prompt that knows cl",
        "clang++": "install clang++ with xcode-select --install",
    }
    return f"no C++ compiler ({cures.get(compiler, f'install {compiler}')})"


def _triton_missing(capability: tuple | None) -> str:
    """What `torch.compile` lacks for this GPU, in words; "" when nothing."""
    if capability is not None and capability < (7, 0):
        return f"Triton needs compute capability 7.0, this GPU has {format_capability(capability)}"
    if importlib.util.find_spec("triton") is None:
        windows = "; on Windows: pip install triton-windows" if sys.platform == "win32" else ""
        return f"Triton is not installed{windows}"
    if sys.platform == "win32":  # brings a compiler of its own
        return ""
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        return f"Triton needs a C compiler ({' or '.join(compilers)} is not found: install gcc)"
    return _header_missing()


def _header_missing() -> str:
    header = python_header()
    return "" if header.is_file() else f"no {header} (on Debian: apt install python3-dev)"


def python_header() -> Path:
    """What every module that is compiled for this Python includes."""
    return Path(sysconfig.get_path("include")) / "Python.h"


@functools.cache
def keep_device_guard() -> None:
    """Let what torch's compiler sets for the whole process outlive the thread that compiles first.

    Without a GPU torch 2.11 frees that with its thread, and the next thread that compiles, or
    exports, ends the process (pytorch#178950): Stop, and Start again, in a notebook. So a thread
    that never ends sets it first.
    """
    ensure = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)  # 2.9 has no such thing
    if ensure is None:
        return
    kept = threading.Event()

    def keep() -> None:
        ensure()
        kept.set()
        threading.Event().wait()

    threading.Thread(target=keep, name="device guard", daemon=True).start()
    kept.wait()


def compiler_error(error: BaseException) -> str:
    """The first line of what torch's compiler or Triton failed with; "" for any other error.

    What is asked beforehand cannot tell everything: a compiler may be there and not work.
    """
    if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "triton")):
        return ""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return " ".join([type(error).__name__, *lines[:1]])[:300]


def compiler_errors() -> tuple[type[BaseException], ...]:
    """The exceptions to catch where compiled code is called, which may compile or tune kernels.

    Dynamo's and Inductor's are nearly all RuntimeErrors, and so is running out of memory; Triton's
    are not. A compiler that is not imported has raised nothing, so nothing is imported here.
    """
    raised = [
        getattr(sys.modules[module], name)
        for module, name in COMPILER_EXCEPTIONS.items()
        if module in sys.modules
    ]
    # gcc, or ptxas, ended with an error.
    return (RuntimeError, subprocess.CalledProcessError, *raised)


def not_compiled_note(reason: str) -> str:
    return f"; not compiled: {reason}"


@functools.cache
def detect_vector_isa() -> None:
    """Let torch's compiler find out which instructions this CPU has: half a second, once.

    Where the C++ compiler does not work, nothing is found out: whoever compiles is told.
    """
    from torch._inductor.cpu_vec_isa import VecISA, valid_vec_isa_list  # takes a second to import
    from torch._inductor.exc import InvalidCxxCompiler

    given = getattr(VecISA, "_avx_py_load", "")
    try:
        if "__lib_path__" in given:
            VecISA._avx_py_load = ISA_PROBE
        with torch._inductor.config.patch(ISA_OK):
            valid_vec_isa_list()
    except InvalidCxxCompiler:
        pass
    finally:
        if given:
            VecISA._avx_py_load = given


@contextlib.contextmanager
def quiet_inductor(weights: str = "", **settings) -> Iterator[None]:
    """The compiler with `settings`, and without what it tells its makers on stderr.

    `weights` is the checksum of weights that are frozen: the compiler keeps on disk what it made of
    them, and would give it to another model of the same shape.
    """
    detect_vector_isa()
    quick = ISA_OK | {"autotune_num_choices_displayed": 0}
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


def best_seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Seconds of the quickest of a few runs, after one that pays for what happens once."""
    return min(timings(work, repeats))


def gpu_tuning(capability: tuple) -> dict[str, bool]:
    """Inductor's settings for the fastest kernels on a GPU of this compute capability.

    Tuned by coordinates, a row times a matrix is one kernel that expands int8 as it reads; a
    library's matmul would need the matrix expanded first. Autotuning also tries Triton's matmul
    templates, and Triton 3.3 has dropped Turing's `tl.dot` (triton#5066): not below 8.0.
    """
    return {"coordinate_descent_tuning": True, "max_autotune": capability >= (8, 0)}


def capture_graph(work: Callable[[], Made], pool=None) -> tuple[torch.cuda.CUDAGraph, Made]:
    """`work` as a CUDA graph, and the tensors that hold its result after each replay.

    `pool` is the memory of another graph (its `pool()`), to be shared. Such graphs must not run at
    once, and the result of one must be copied before another is replayed.
    """
    stream = warm_up_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiled, tuned and given its workspaces before
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads may go on.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = work()
    return graph, result


@functools.cache
def warm_up_stream(device: int) -> torch.cuda.Stream:
    """One for all graphs: cuBLAS keeps a workspace (8 to 32 MiB) for every stream it is used on."""
    return torch.cuda.Stream(device)
