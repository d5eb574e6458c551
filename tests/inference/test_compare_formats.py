"""One voice in several formats: what each changes, how fast it speaks, which one is chosen."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import nbformat
import pytest
import torch
from helpers import GPT, random_rows, tiny_model, training_states

from kit.inference import compare_formats as formats
from kit.inference.compare_formats import FormatResult, compare_logits, logits_of_each
from kit.inference.decoder import Decoder
from kit.inference.linear_formats import has_bf16
from kit.inference.voice import Voice
from kit.recipes.base_model import SAMPLE
from kit.recipes.speak import load_exported
from kit.settings import GenerateConfig

GREEDY = GenerateConfig(temperature=0)


@pytest.fixture(scope="module")
def voice() -> Voice:
    """The voice that comes with the kit, trained."""
    return load_exported(SAMPLE)[0]


@pytest.fixture(scope="module")
def model():
    model = tiny_model().eval()
    model.code_head.weight.data *= 20
    return model


@pytest.fixture(scope="module")
def rows() -> list[formats.RecordedExample]:
    return list(zip(*random_rows(GPT, 5, seed=2)))


@torch.inference_mode()
def trained(model, row: formats.RecordedExample) -> torch.Tensor:
    """Logits (N + 1, V) of the training path."""
    return model.code_head(training_states(model, *row))


def test_differences_of_logits_are_counted_by_hand():
    ruled_out = -math.inf  # in both: no difference
    expected = torch.tensor([[0.0, 1.0, ruled_out], [2.0, 1.0, ruled_out]])
    actual = torch.tensor([[0.5, 1.0, ruled_out], [1.0, 3.0, ruled_out]])
    errors = {"mean_logit_error": pytest.approx(3.5 / 6), "max_logit_error": 2}
    assert compare_logits(expected, actual) == {"top1_agreement": 0.5} | errors


def test_logits_of_several_rows_are_those_of_training(model, rows):
    expected = torch.cat([trained(model, row) for row in rows])
    torch.testing.assert_close(logits_of_each(Decoder(model), rows), expected, rtol=1e-4, atol=1e-4)


def test_every_format_is_measured_beside_the_first(voice):
    voices = formats.voices_by_format(voice, ["fp32", "bf16", "int8"], [])
    rows = list(zip(*random_rows(voice.model.config, 2)))
    error_rate = Mock(return_value=0.25)
    found = formats.measure_formats(voices, 5, GREEDY, rows, error_rate)
    assert [v.name for v in found] == ["fp32", "bf16", "int8"] and error_rate.call_count == 3
    fp32, bf16, int8 = found
    assert fp32.speedup == 1 and fp32.top1_agreement == 1 and fp32.max_logit_error == 0
    assert (fp32.weight_bytes > bf16.weight_bytes) == has_bf16()
    assert bf16.weight_bytes > int8.weight_bytes
    assert all(v.cer == 0.25 and v.codes_per_s > 0 and v.warm_up_s == 0 for v in found)


def result(name: str, codes_per_s: float, agreement: float = 1, cer: float = 0.1) -> FormatResult:
    unused = dict.fromkeys([field.name for field in dataclasses.fields(FormatResult)], 0)
    figures = {"codes_per_s": codes_per_s, "top1_agreement": agreement, "cer": cer}
    return FormatResult(**unused | figures | {"name": name})


def test_the_fastest_format_that_agrees_is_chosen_and_faster_ones_are_reported():
    fp32, slower, fast = result("fp32", 500), result("bf16", 700), result("int8", 900, 0.99)
    wild = result("int8-weight-only", 1000, 0.94, cer=0.2)
    assert formats.choose_format([fp32, fast, slower]) == (fast, "")
    chosen, against = formats.choose_format([fp32, wild, fast])
    assert chosen == fast
    assert all(fact in against for fact in (wild.name, "94.0%", "CER 20.0%", "10.0%"))


@torch.inference_mode()
def test_the_kv_cache_of_notebook_04_gives_the_logits_of_training(model, rows):
    path = Path(__file__).parents[2] / "notebooks" / "04_inference.ipynb"
    cells = {cell.id: cell.source for cell in nbformat.read(path, nbformat.NO_CONVERT).cells}
    decoder = Decoder(model)
    names = {"voice": SimpleNamespace(model=model, ready=lambda: decoder)}
    exec(cells["kv-by-hand"], names)
    text, codes, mel = rows[0]
    x, _ = decoder.prompt([text], mel[None])
    caches = names["empty_caches"]()
    logits = [names["next_logits"](x, caches)]
    for n, code in enumerate(codes, 1):
        logits.append(names["next_logits"](decoder.embed(torch.tensor([code]), n)[None], caches))
    torch.testing.assert_close(torch.cat(logits), trained(model, rows[0]), rtol=1e-4, atol=1e-4)
