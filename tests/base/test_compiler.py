"""Compiling a step: a message when it is impossible, quiet while it runs."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kit.base.compiler import (
    compiler_available,
    compiler_errors,
    not_compiled_note,
    quiet_inductor,
    will_compile,
)
from kit.base.hardware import Choice


def run_code(code: str) -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_a_compiler_the_reason_is_reported(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _: None)
    compiles, note = will_compile(True, torch.device("cpu"))
    assert not compiles and note == not_compiled_note(compiler_available("cpu").reason)


@pytest.fixture
def header(monkeypatch, tmp_path) -> None:
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr("sysconfig.get_path", lambda _: tmp_path)


@pytest.mark.parametrize("compiler", ["g++", "clang++", "cl"])
def test_the_cpp_compiler_is_the_one_torch_calls_on_this_system(monkeypatch, header, compiler):
    """torch looks for one name alone: another compiler on the path would not help it."""
    system = {"g++": "linux", "clang++": "darwin", "cl": "win32"}[compiler]
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr("shutil.which", lambda name: name if name == compiler else None)
    assert compiler_available("cpu") == Choice(value="yes", reason=f"{compiler} is installed")
    monkeypatch.setattr("shutil.which", lambda name: name if name != compiler else None)
    choice = compiler_available("cpu")
    assert choice.value == "no" and "install" in choice.reason
    monkeypatch.setenv("CXX", "my-own-c++")
    assert compiler_available("cpu").value == "yes"


@pytest.fixture
def all_installed(monkeypatch, header):
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(sys, "platform", "linux")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_pythons_header_nothing_is_compiled(all_installed, monkeypatch, tmp_path, device):
    (tmp_path / "Python.h").unlink()
    choice = compiler_available(device, (8, 0) if device == "cuda" else None)
    assert choice.value == "no" and "Python.h" in choice.reason and "python3-dev" in choice.reason


GPUS = [((6, 0), "no"), ((6, 1), "no"), ((7, 0), "yes"), ((7, 5), "yes"), ((9, 0), "yes")]


@pytest.mark.parametrize(("capability", "value"), GPUS)
def test_triton_serves_gpus_from_volta_on(all_installed, capability, value):
    choice = compiler_available("cuda", capability)
    assert choice.value == value
    assert ("{}.{}".format(*capability) in choice.reason) == (value == "no")


def test_for_a_gpu_without_triton_or_its_compiler_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(sys, "platform", "win32")
    choice = compiler_available("cuda", (8, 6))
    assert choice.value == "no" and "pip install triton-windows" in choice.reason
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert compiler_available("cuda", (8, 6)).value == "yes"  # its wheel brings a compiler along
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    choice = compiler_available("cuda", (8, 6))
    assert choice.value == "no" and "install gcc" in choice.reason


COMPILERS = ["_dynamo.exc", "_inductor.exc", "_inductor.compile_worker.subproc_pool"]
MODULES = [f"torch.{name}" for name in COMPILERS]
MODULES += ["triton.compiler.errors", "triton.runtime.errors"]


@pytest.mark.parametrize("module", MODULES)
def test_every_exception_of_the_compilers_is_caught(module):
    exceptions = [
        value
        for name, value in inspect.getmembers(pytest.importorskip(module), inspect.isclass)
        if issubclass(value, Exception) and value.__module__ == module
        if name != "IncorrectUsage"  # of torch.compiler's own functions
    ]
    assert exceptions and all(issubclass(each, compiler_errors()) for each in exceptions)
    assert issubclass(subprocess.CalledProcessError, compiler_errors())
    assert not issubclass(ValueError, compiler_errors())


def test_settings_hold_inside_and_are_gone_after(capsys):
    before = torch._inductor.config.freezing, torch._dynamo.config.recompile_limit
    with quiet_inductor(freezing=True):
        assert torch._inductor.config.freezing
        print("what its makers read", file=sys.stderr)
    assert (torch._inductor.config.freezing, torch._dynamo.config.recompile_limit) == before
    assert capsys.readouterr().err == ""


INSTRUCTIONS = """
import subprocess
import torch
from kit.base.compiler import detect_vector_isa
from torch._inductor.cpu_vec_isa import VecISA, supported_vec_isa_list, valid_vec_isa_list

theirs = VecISA._avx_py_load
tried, real = [], subprocess.check_call

def check_call(command, **more):
    tried.append(command[-1])
    return real(command, **more)

subprocess.check_call = check_call
detect_vector_isa()
assert not any(code.strip().startswith("import torch") for code in tried), tried
assert VecISA._avx_py_load == theirs != "", "torch's own is back"
found = " ".join(map(str, valid_vec_isa_list())).split()
known = " ".join(map(str, supported_vec_isa_list)).split()  # torch 2.9 asks for fewer
for name, there in (
    ("avx2", torch.cpu._is_avx2_supported()),
    ("avx512", torch.cpu._is_avx512_supported()),
    ("avx512_vnni", torch.cpu._is_avx512_supported() and torch.cpu._is_vnni_supported()),
    ("amx_tile", torch.cpu._is_amx_tile_supported()),
):
    assert (name in found) == (there and name in known), (name, found)
"""


def test_the_compiler_knows_this_cpu_without_importing_torch_again_and_again():
    if compiler_available("cpu").value == "no":
        pytest.skip("no C++ compiler here")
    run_code(INSTRUCTIONS)


TURNS = """
import sys, threading
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from kit.base.compiler import keep_device_guard
keep_device_guard()

def traced():
    with FakeTensorMode():
        torch.ones(3) + 1

for number in range(20):
    thread = threading.Thread(target=traced)
    thread.start()
    thread.join()
    memory = [torch.randn(7 + number) for _ in range(2000)]  # over what the thread has freed
    del memory
    traced()
"""


def test_threads_may_compile_in_turns():
    """Without a GPU, torch 2.11 alone crashes here."""
    run_code(TURNS)
