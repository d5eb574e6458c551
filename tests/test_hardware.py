"""What a machine is, and what follows from it, each with its reason."""

import dataclasses
import itertools
import os
from collections.abc import Callable
from types import SimpleNamespace

import psutil
import pytest
import torch
from helpers import CPU

from kit.config import CONFIGS
from kit.hardware import (
    attention_backend,
    autocast,
    choose_precision,
    choose_preset,
    compiler_available,
    detect,
    free_cores,
    peak_memory_bytes,
    use_threads,
    versions,
)


def gpu(gib: float, capability=(8, 0)):
    size = int(gib * 2**30)
    return dataclasses.replace(CPU, device="cuda", memory_bytes=size, capability=capability)


def test_this_machine_is_described():
    hw = detect()
    assert hw.device == ("cuda" if torch.cuda.is_available() else "cpu")
    assert 1 <= hw.cores <= os.cpu_count() and hw.name
    assert hw.ram_bytes == psutil.virtual_memory().total
    assert (hw.capability is None) == (hw.device == "cpu")


CAPABILITIES = [((6, 1), "fp32"), ((7, 0), "fp16"), ((7, 5), "fp16"), ((8, 0), "bf16")]
CAPABILITIES += [((8, 9), "bf16"), ((9, 0), "bf16"), ((10, 0), "bf16"), ((12, 0), "bf16")]


@pytest.mark.parametrize(("capability", "wanted"), CAPABILITIES)
def test_precision_follows_the_compute_capability_and_says_so(capability, wanted):
    choice = choose_precision(gpu(16, capability))
    assert choice.value == wanted and "{}.{}".format(*capability) in choice.reason


def test_precision_of_a_cpu_is_measured(monkeypatch):
    for speed, wanted in ((2.0, "bf16"), (0.5, "fp32")):
        times = {torch.float32: speed, torch.bfloat16: 1.0}
        monkeypatch.setattr("kit.hardware.product_seconds", lambda dtype, t=times: t[dtype])
        choice = choose_precision(CPU)
        assert choice.value == wanted and f"{speed:.1f}x" in choice.reason


# What cards of these sizes report; a little is always taken.
TIERS = [(5.8, "8gb"), (7.8, "8gb"), (11.6, "12gb"), (14.6, "t4"), (15.7, "t4"), (22.2, "24gb")]
TIERS += [(23.6, "24gb"), (31.8, "24gb"), (47.4, "24gb"), (79.1, "80gb"), (139.8, "80gb")]


@pytest.mark.parametrize(("gib", "wanted"), TIERS)
def test_the_preset_follows_the_memory(gib, wanted):
    choice = choose_preset(gpu(gib))
    assert choice.value == wanted and (CONFIGS / f"{wanted}.yaml").is_file()
    assert f"{gib:.0f} GiB" in choice.reason


def test_without_a_gpu_the_preset_is_cpu():
    assert choose_preset(CPU).value == "cpu"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fused_attention_is_on_offer_on_a_cpu(precision):
    choice = attention_backend(CPU, precision)
    assert choice.value == "flash" and precision in choice.reason


def test_the_compiler_is_looked_for(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert compiler_available("cpu").value == "no" and "g++" in compiler_available("cpu").reason
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert compiler_available("cpu").value == "yes"
    assert compiler_available("cuda").value == "yes"


def idle(*samples: tuple) -> Callable:
    """Stands in for psutil.cpu_times_percent: (idle, nice) percent, sample by sample."""
    rows = itertools.cycle([SimpleNamespace(idle=i, nice=n) for i, n in samples])
    return lambda *_: next(rows)


SAMPLES = [([(100, 0)], 2), ([(50, 0)], 1), ([(0, 0)], 1), ([(0, 0), (98, 0)], 2), ([(0, 97)], 2)]


@pytest.mark.parametrize(("samples", "wanted"), SAMPLES)
def test_threads_go_to_cores_nobody_keeps_busy(monkeypatch, samples, wanted):
    monkeypatch.setattr("psutil.cpu_times_percent", idle(*samples))
    assert free_cores(CPU).value == str(wanted)
    before = torch.get_num_threads()
    try:
        assert use_threads(CPU).value == str(wanted) and torch.get_num_threads() == wanted
    finally:
        torch.set_num_threads(before)


def test_autocast_reaches_matrix_products():
    x = torch.randn(4, 4)
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        with autocast("cpu", precision):
            assert (x @ x).dtype == dtype


def test_peak_memory_is_at_least_what_is_held_now():
    held = psutil.Process().memory_info().rss
    assert 0.9 * held <= peak_memory_bytes("cpu") < detect().ram_bytes


def test_versions_name_what_figures_depend_on():
    assert versions()["torch"] == torch.__version__
