"""Compiling a step: a message when it is impossible, quiet while it runs."""

import subprocess
import sys

import pytest
import torch
from torch._inductor.cpu_vec_isa import VecISA

from kit.base import compiler
from kit.base.compiler import compiler_available, quiet_inductor
from kit.base.config import ROOT


@pytest.fixture
def computer(monkeypatch, tmp_path):
    """Describes a computer with Python's header: its system, programs, and whether packages."""
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr("sysconfig.get_path", lambda _: tmp_path)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)

    def describe(system="linux", has=lambda program: True, packages=True) -> None:
        monkeypatch.setattr(sys, "platform", system)
        monkeypatch.setattr("shutil.which", lambda name: name if has(name) else None)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: name if packages else None)

    describe()
    return describe


def refused(device: str, *facts: str) -> bool:
    """Whether compiling for `device` is refused with these facts."""
    choice = compiler_available(device)
    return choice.value == "no" and all(fact in choice.reason for fact in facts)


@pytest.mark.parametrize("name", ["g++", "clang++"])
def test_the_cpp_compiler_is_the_one_torch_calls_on_this_system(computer, monkeypatch, name):
    """torch looks for one name alone: another compiler on the path would not help it."""
    system = {"g++": "linux", "clang++": "darwin"}[name]
    computer(system, has=lambda program: program == name)
    assert compiler_available("cpu").reason == f"{name} is installed"
    assert compiler.will_compile(True, torch.device("cpu")) == (True, "")
    computer(system, has=lambda program: program != name)
    assert refused("cpu", "install")
    note = compiler.not_compiled_note(compiler_available("cpu").reason)
    assert compiler.will_compile(True, torch.device("cpu")) == (False, note)
    monkeypatch.setenv("CXX", "my-own-c++")
    assert compiler_available("cpu").value == "yes"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_pythons_header_nothing_is_compiled(computer, tmp_path, device):
    (tmp_path / "Python.h").unlink()
    assert refused(device, "Python.h", "python3-dev")


def test_for_a_gpu_without_triton_or_its_compiler_the_message_says_what_to_install(computer):
    assert compiler_available("cuda").value == "yes"
    computer(packages=False)
    assert refused("cuda", "Triton is not installed")
    computer("linux", has=lambda program: False)
    assert refused("cuda", "install gcc")


def test_settings_hold_inside_and_are_gone_after(capsys):
    before = torch._inductor.config.freezing, torch._dynamo.config.recompile_limit
    with quiet_inductor(freezing=True):
        assert torch._inductor.config.freezing
        print("what its makers read", file=sys.stderr)
    assert VecISA._avx_py_load == compiler.ISA_PROBE, "torch still has what is replaced"
    assert (torch._inductor.config.freezing, torch._dynamo.config.recompile_limit) == before
    assert capsys.readouterr().err == ""


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


@pytest.mark.long
def test_threads_may_compile_in_turns():
    """Without a GPU, torch 2.11 alone crashes here."""
    subprocess.run([sys.executable, "-c", TURNS], cwd=ROOT, check=True)
