"""Timings: of the work asked for, and of nothing else."""

import math
import time

import pytest
import torch
from helpers import manifest, real_voice

from kit.inference.bench import (
    first_sound_seconds,
    median_seconds,
    real_time_factor,
    speak_seconds,
)
from kit.inference.decoder import Decoder
from kit.inference.sampling import GenerateConfig
from kit.inference.voice import Speech, Voice

GREEDY = GenerateConfig(temperature=0)


@pytest.fixture(scope="module")
def voice() -> Voice:
    return real_voice()


def test_the_exact_work_is_done_for_every_row(voice, monkeypatch):
    asked = []

    def generate(model, texts, cond, config):
        asked.append((len(texts), len(cond), config.exact_codes))
        time.sleep(0.02 if len(asked) == 1 else 0.001)  # the first call pays for warming up

    monkeypatch.setattr("kit.inference.bench.generate", generate)
    assert speak_seconds(voice, 30, GREEDY, batch=4) >= 0.001
    assert asked == [(4, 4, 30)] * 4


def test_the_first_sound_is_waited_for_and_no_more(voice, monkeypatch):
    pulled = []

    def stream(*_):
        for piece in range(9):
            pulled.append(piece)
            yield torch.zeros(1)

    monkeypatch.setattr(Voice, "stream", stream)
    assert first_sound_seconds(voice, "ሰላም", GREEDY, repeats=2) >= 0
    assert pulled == [0, 0, 0]


def test_what_is_warm_is_not_warmed_up():
    calls = []
    assert median_seconds(lambda: calls.append(1), 2) >= 0 and len(calls) == 3
    assert median_seconds(lambda: calls.append(1), 2, warm=False) >= 0 and len(calls) == 5


def test_a_voice_that_says_nothing_has_no_real_time_factor(voice, monkeypatch):
    silent = Speech(text="", wave=torch.zeros(0), codes=torch.zeros(0), stopped=True)
    monkeypatch.setattr(Voice, "speak", lambda *_, batch: [silent])
    assert math.isnan(real_time_factor(voice, ["ሰላም"], GREEDY))


def test_the_real_time_factor_is_work_over_speech_on_one_thread(voice, monkeypatch):
    torch.set_num_threads(2)
    threads, slept, real = [], 0.05, voice.codec.decode

    def decode(codes):
        threads.append(torch.get_num_threads())
        time.sleep(slept)
        return real(codes)

    monkeypatch.setattr(voice.codec, "decode", decode)
    texts = [r.text for r in manifest() if r.split == "train"][:3]
    config = GenerateConfig(temperature=0, exact_codes=20)
    speech_s = 3 * 20 * 512 / 22050
    found = real_time_factor(voice, texts, config)
    assert found > 3 * slept / speech_s
    assert set(threads) == {1} and torch.get_num_threads() == 2
    torch.set_num_threads(1)


def test_threads_come_back_after_an_error(voice):
    before = torch.get_num_threads()
    with pytest.raises(ValueError):
        real_time_factor(voice, [""], GREEDY)
    assert torch.get_num_threads() == before


def test_the_real_time_factor_reads_one_part_at_a_time(voice, monkeypatch):
    # A batch size more would be a graph more, and the clock would time the compiler.
    rows, real = [], Decoder.prefill
    count = lambda self, x, *args: rows.append(len(x)) or real(self, x, *args)  # noqa: E731
    monkeypatch.setattr(Decoder, "prefill", count)
    text = ". ".join(r.text for r in manifest() if r.split == "train")[:300]
    assert len(voice.parts(text)) > 1
    real_time_factor(voice, [text], GenerateConfig(temperature=0, exact_codes=5))
    assert set(rows) == {1}
