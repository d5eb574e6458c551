"""torch.compile and CUDA graphs: whether this machine has them, and the compiler's settings."""

import contextlib
import functools
import importlib.util
import io
import logging
import os
import shutil
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from kit.base.hardware import Choice, timings

Made = Tensor | tuple[Tensor, ...]  # the result of a captured step
# To test a CPU's instruction sets, Inductor loads small libraries, each in a new process that first
# imports torch: 20 s where there are AVX-512 and AMX. This probe imports torch only if it must.
ISA_PROBE = """
from ctypes import cdll
try:
    cdll.LoadLibrary("__lib_path__")
except OSError:  # torch's libraries were not found
    import torch
    cdll.LoadLibrary("__lib_path__")
"""
ISA_OK = {"cpp.vec_isa_ok": True}  # plain AVX-512 and AVX2 need no test
# On every CPU it warns of a missing CUDA.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def will_compile(asked: bool, device: torch.device) -> tuple[bool, str]:
    """Whether steps will be compiled on `device`, and if asked for but impossible, why not."""
    if not asked:
        return False, ""
    choice = compiler_available(device.type)
    return (True, "") if choice.value == "yes" else (False, not_compiled_note(choice.reason))


def compiler_available(device: str) -> Choice:
    """Whether `torch.compile` can work for `device` ("cuda" or "cpu"): "yes" or "no"."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # torch's
    compilers = [compiler]
    language = "C++"
    works = f"{compiler} is installed"
    if device == "cuda":
        compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
        language = "C"
        works = "Triton compiles for this GPU"
    header = Path(sysconfig.get_path("include")) / "Python.h"  # to load what was compiled
    problems = {
        "Triton is not installed": device == "cuda" and not importlib.util.find_spec("triton"),
        f"no {language} compiler (install {compilers[0]})": not any(map(shutil.which, compilers)),
        f"no {header} (on Debian: apt install python3-dev)": not header.is_file(),
    }
    problem = next((problem for problem, has_it in problems.items() if has_it), "")
    return Choice(value="no" if problem else "yes", reason=problem or works)


@functools.cache
def keep_device_guard() -> None:
    """Let several threads compile or export one after the other (pytorch#178950).

    torch 2.11 without a GPU frees what the first thread that compiles has set for all others when
    that thread ends, and the next one crashes: here a thread that never ends sets it.
    """
    ensure = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)  # torch 2.9 has none
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
    """The first two lines of an error of torch's compiler or Triton; "" for any other error."""
    if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "triton")):
        return ""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return " ".join([type(error).__name__, *lines[:2]])[:300]  # the second says what failed


def not_compiled_note(reason: str) -> str:
    return f"; not compiled: {reason}"


@functools.cache
def detect_vector_isa() -> None:
    """Let torch's compiler detect this CPU's instruction sets: half a second, once."""
    from torch._inductor.cpu_vec_isa import VecISA, valid_vec_isa_list  # takes a second to import
    from torch._inductor.exc import InvalidCxxCompiler

    if "__lib_path__" in getattr(VecISA, "_avx_py_load", ""):
        VecISA._avx_py_load = ISA_PROBE
    # Compiling itself reports that there is no compiler.
    with contextlib.suppress(InvalidCxxCompiler), torch._inductor.config.patch(ISA_OK):
        valid_vec_isa_list()


@contextlib.contextmanager
def quiet_inductor(weights: str = "", **settings) -> Iterator[None]:
    """Set the compiler's `settings` for the block and hide its output on stderr."""
    detect_vector_isa()
    settings = ISA_OK | {"autotune_num_choices_displayed": 0} | settings
    inductor = torch._inductor.config.patch(settings)
    graphs = torch._dynamo.config.patch(recompile_limit=64)  # one for each batch size
    # The checksum of frozen weights: the disk cache must not mix up models of a shape.
    cache = torch.compiler.config.patch(cache_key_tag=weights)
    with inductor, graphs, cache, contextlib.redirect_stderr(io.StringIO()):
        yield


def best_seconds(work: Callable[[], object]) -> float:
    """Seconds of the fastest of five runs of `work`, after a warm-up run."""
    return min(timings(work, 5))


def capture_graph(
    work: Callable[[], Made], undo: Callable[[], None], pool=None
) -> tuple[torch.cuda.CUDAGraph, Made]:
    """Capture `work` as a CUDA graph; returns it and the tensors that hold its result.

    `work` runs three times before, to compile, tune and allocate workspaces; `undo` takes back what
    it wrote. Of graphs that share a memory `pool`, the next overwrites the result of the last.
    """
    stream = warm_up_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            try:
                work()
            finally:
                undo()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.current_stream()
    random = torch.cuda.get_rng_state()
    try:
        # "thread_local": other threads may use CUDA meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = work()
    except BaseException:
        # PyTorch leaves its stream current, and its generator waits for the capture to end.
        torch.cuda.set_stream(before)
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(torch.Generator("cuda").graphsafe_get_state())
        torch.cuda.set_rng_state(random)
        raise
    return graph, result


@functools.cache
def warm_up_stream(device: int) -> torch.cuda.Stream:
    """One stream for all graphs: cuBLAS keeps a workspace (8 to 32 MiB) for every stream."""
    return torch.cuda.Stream(device)
