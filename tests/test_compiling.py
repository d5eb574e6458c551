"""Compiling a step: told when it cannot be, quiet while it is."""

import sys

import torch

from kit.compiling import not_compiled, quickest, quiet_inductor, will_compile
from kit.hardware import Choice


def test_nothing_is_compiled_that_was_not_asked_for():
    assert will_compile(False, torch.device("cpu")) == (False, "")


def test_without_a_compiler_the_reason_is_told(monkeypatch):
    asked = []

    def compiler_available(device):
        asked.append(device)
        return Choice(value="no", reason="no C++ compiler (install g++)")

    monkeypatch.setattr("kit.compiling.compiler_available", compiler_available)
    compiles, words = will_compile(True, torch.device("cpu"))
    assert not compiles and words == "; not compiled: no C++ compiler (install g++)"
    assert asked == ["cpu"] and words == not_compiled("no C++ compiler (install g++)")


def test_settings_hold_inside_and_are_gone_after(capsys):
    before = torch._inductor.config.freezing, torch._dynamo.config.recompile_limit
    with quiet_inductor(freezing=True):
        assert torch._inductor.config.freezing
        print("what its makers read", file=sys.stderr)
    assert (torch._inductor.config.freezing, torch._dynamo.config.recompile_limit) == before
    assert capsys.readouterr().err == ""


def test_the_quickest_of_a_few_after_one_more():
    calls = []
    assert quickest(lambda: calls.append(1), repeats=3) >= 0 and len(calls) == 4
