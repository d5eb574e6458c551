"""What a machine is, and what follows from it, each with its reason."""

import dataclasses
import itertools
import os
import warnings
from functools import partial
from types import SimpleNamespace

import psutil
import pytest
import torch
from helpers import CPU

from kit.base import hardware
from kit.base.hardware import choose_precision, detect, peak_resident_bytes, use_threads


def test_this_machine_is_described():
    hw = detect()
    assert hw.device == ("cuda" if torch.cuda.is_available() else "cpu")
    assert 1 <= hw.cores <= os.cpu_count() and hw.name
    assert hw.ram_bytes == psutil.virtual_memory().total
    assert (hw.capability is None) == (hw.device == "cpu")


# Seconds of matmuls in fp32 and in bf16, what is chosen, and a fact of the reason.
MATMULS = [([2.0], [1.0], "bf16", "2x"), ([0.5], [1.0], "fp32", "0.5x")]
MATMULS += [([0.01], [0.08], "fp32", "emulated")]
# The first bf16 matmul falls into a busy moment.
MATMULS += [([0.01], [0.2, 0.005, 0.005, 0.005, 0.005], "bf16", "2x")]


@pytest.mark.parametrize(("fp32_s", "bf16_s", "wanted", "fact"), MATMULS)
def test_precision_of_a_cpu_is_measured_once(monkeypatch, request, fp32_s, bf16_s, wanted, fact):
    seconds = {torch.float32: itertools.cycle(fp32_s), torch.bfloat16: itertools.cycle(bf16_s)}
    monkeypatch.setattr(hardware, "matmul_seconds", lambda dtype, *_, **_k: next(seconds[dtype]))
    hardware._cpu_precision.cache_clear()
    request.addfinalizer(hardware._cpu_precision.cache_clear)
    choice = choose_precision(CPU)
    assert choice.value == wanted and fact in choice.reason
    assert choose_precision(CPU) is choice, "what every step of this process runs"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fused_attention_is_on_offer_on_a_cpu(precision):
    choice = hardware.attention_backend(CPU, precision)
    assert "flash" in choice.value and precision in choice.reason
    assert choice.value.startswith("explicit") is (precision == "bf16")


# Compute capability, precision, heads of, and the kernel of the first one in ATTENTION_ORDER that
# takes them: flash wants Ampere and half precision, the memory-efficient one no bf16 before Ampere.
KERNELS = [((7, 5), "fp16", 64, "efficient"), ((7, 5), "bf16", 64, "math")]
KERNELS += [((8, 0), "bf16", 64, "flash"), ((8, 0), "fp32", 64, "efficient")]
KERNELS += [((9, 0), "bf16", 512, "efficient")]


@pytest.mark.parametrize(("capability", "precision", "width", "wanted"), KERNELS)
def test_attention_of_a_gpu_elsewhere_is_expected(capability, precision, width, wanted):
    elsewhere = {"device": "cuda", "name": "a card of another machine", "capability": capability}
    choice = hardware.attention_backend(dataclasses.replace(CPU, **elsewhere), precision, width)
    assert choice.value == wanted
    assert precision in choice.reason and "no such GPU here" in choice.reason


CARDS = [((6, 0), False, ["6.0", "7.5"]), ((7, 5), False, [])]
CARDS += [((11, 0), True, ["11.0", "another build"])]


@pytest.mark.parametrize(("capability", "fails", "facts"), CARDS)
def test_a_card_too_old_or_too_new_is_not_used_and_says_why(monkeypatch, capability, fails, facts):
    def ones(*_, **_k):
        if fails:
            raise torch.AcceleratorError("CUDA error: no kernel image is available for execution")
        return torch.zeros(1)

    major, minor = capability
    card = SimpleNamespace(name="Tesla", major=major, minor=minor, total_memory=16 * 2**30)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: card)
    monkeypatch.setattr("torch.ones", ones)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        hw = detect()
        detect()  # another caller: the note is not repeated
    assert (hw.device, hw.capability) == (("cpu", None) if facts else ("cuda", capability))
    notes = [str(w.message) for w in caught]
    assert len(notes) == (hw.device == "cpu")
    assert all(fact in note for note in notes for fact in ("Tesla", *facts))


# Samples of psutil.cpu_times_percent, (idle, nice) percent; OMP_NUM_THREADS; and the threads.
SAMPLES = [([(100, 0)], None, 2), ([(0, 0)], None, 1), ([(0, 0), (98, 0)], None, 2)]
SAMPLES += [([(0, 97)], None, 2), ([(100, 0)], "3", 3), ([(100, 0)], "2,1", 2)]


@pytest.mark.parametrize(("samples", "asked", "wanted"), SAMPLES)
def test_omp_num_threads_or_the_free_cores_decide(monkeypatch, request, samples, asked, wanted):
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    rows = itertools.cycle([SimpleNamespace(idle=i, nice=n) for i, n in samples])
    monkeypatch.setattr("psutil.cpu_times_percent", lambda _seconds: next(rows))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    choice = use_threads(CPU)
    assert choice.value == str(wanted) and torch.get_num_threads() == wanted
    assert ("OMP_NUM_THREADS" in choice.reason) == (asked == "3")


def test_peak_memory_stays_when_memory_is_given_back():
    before = peak_resident_bytes()
    held = torch.ones(before // 4 + 2**24)  # 4 bytes each: more than all there was
    peak = peak_resident_bytes()
    size_bytes = 4 * len(held)
    del held
    # Linux counts its pages by thread, and adds them up late.
    assert peak >= size_bytes and peak_resident_bytes() >= 0.98 * peak


def test_running_out_of_memory_is_recognised_and_no_other_error():
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        torch.empty(2**62, dtype=torch.uint8)
    errors = [caught.value, torch.OutOfMemoryError("CUDA out of memory"), MemoryError()]
    errors.append(torch.AcceleratorError("CUDA error: out of memory"))
    assert all(map(hardware.is_oom, errors))
    errors = [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("memory")]
    assert not any(map(hardware.is_oom, errors))


def test_timing_matmuls_leaves_the_random_numbers_where_they_were():
    before = torch.get_rng_state()
    assert hardware.matmul_seconds(torch.float32) > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_cudas_memory_may_grow_unless_the_user_has_set_it_or_under_wsl(monkeypatch):
    grows = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    set_by_user = {"PYTORCH_CUDA_ALLOC_CONF": "x:1"}
    cases = [({}, "6.1.0", grows), (set_by_user, "6.1.0", set_by_user)]
    for given, kernel, wanted in [*cases, ({}, "5.15.0-microsoft-standard-WSL2", {})]:
        monkeypatch.setattr(os, "environ", dict(given))
        monkeypatch.setattr("platform.release", lambda kernel=kernel: kernel)
        hardware.allow_expandable_segments()
        assert os.environ == wanted
