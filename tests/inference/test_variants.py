"""One voice in several formats: measured in turn, judged by what they cost."""

import dataclasses

import pytest
from helpers import code_cache, real_voice

from kit.inference.agreement import Cost
from kit.inference.sampling import GenerateConfig
from kit.inference.variants import (
    Limits,
    Variant,
    choose,
    held_out_rows,
    measure,
    ready_voices,
    table,
)
from kit.inference.voice import Voice

COST = Cost(
    top1_agreement=1.0,
    mean_logit_error=0.0,
    max_logit_error=0.0,
    size_ratio=1.0,
    linear_size_ratio=1.0,
    positions=100,
)
FP32 = Variant(
    name="fp32",
    ran="fp32",
    codes_per_s=500.0,
    speedup=1.0,
    weight_bytes=20_000_000,
    cost=COST,
    cer=0.10,
    warm_up_s=0.0,
)


def variant(name: str, speed: float, agreement: float = 0.99, cer: float = 0.10) -> Variant:
    cost = dataclasses.replace(COST, top1_agreement=agreement)
    return dataclasses.replace(FP32, name=name, codes_per_s=speed, cost=cost, cer=cer)


@pytest.fixture(scope="module")
def voice() -> Voice:
    return real_voice(width=64, heads=2)


def test_every_variant_is_measured_beside_the_first(voice):
    voices = ready_voices(voice, ["fp32", "bf16", "int8"], [])
    rows = held_out_rows(code_cache(), 2)
    asked = []
    error_rate = lambda v: asked.append(v.decoder.ran) or 0.25  # noqa: E731
    found = measure(voices, 5, GenerateConfig(temperature=0), rows, error_rate, rounds=2)
    assert [v.name for v in found] == ["fp32", "bf16", "int8"] and len(asked) == 3
    fp32, bf16, int8 = found
    assert fp32.speedup == 1 and fp32.cost.top1_agreement == 1 and fp32.cost.max_logit_error == 0
    assert fp32.weight_bytes > bf16.weight_bytes > int8.weight_bytes
    assert bf16.cost.positions == sum(len(r.codes) + 1 for r in rows)
    assert all(v.cer == 0.25 and v.codes_per_s > 0 and v.warm_up_s == 0 for v in found)


def test_rows_are_recordings_of_the_split():
    rows, cache = held_out_rows(code_cache(), 3), code_cache()
    for row, i in zip(rows, cache.of_split("held_out")):
        assert row.codes == cache.codes[i].tolist() and row.text == cache.texts[i].tolist()
    assert len(rows) == 3


def test_the_fastest_that_says_the_same_is_chosen():
    fast = variant("int8", 900.0)
    assert choose([FP32, fast, variant("bf16", 700.0)]) == (fast, "")


def test_a_fast_one_that_says_something_else_is_told_and_left():
    wild = variant("int4", 1000.0, agreement=0.94, cer=0.2)
    chosen, against = choose([FP32, wild, variant("int8", 900.0)])
    assert chosen.name == "int8"
    assert against == (
        "int4 is faster, but agrees on 94.0% of the codes only and CER 20.0% against 10.0%"
    )
    assert choose([FP32, wild], Limits(least_agreement=0.9, most_cer=0.2))[0].name == "int4"


def test_fp32_stays_where_nothing_is_better():
    assert choose([FP32, variant("bf16", 400.0)]) == (FP32, "")


def test_a_format_that_cannot_run_is_left_out_with_its_reason(voice, monkeypatch, capsys):
    def using(self, weights, compile):
        if weights == "int4":
            raise ValueError("int4 runs on CPUs alone here: take int8.")
        return self

    monkeypatch.setattr(Voice, "using", using)
    assert [*ready_voices(voice, ["fp32", "int4"], ["int8"])] == ["fp32", "int8, compiled"]
    assert capsys.readouterr().out == "int4: int4 runs on CPUs alone here: take int8.\n"


def test_the_table_has_a_line_for_each():
    header, first, second = table([FP32, variant("int8", 900.0)])
    assert len(header) == len(first) == len(second)
    assert first[0] == "fp32" and "20.0" in first and "none" in first and second[1] == "900"
