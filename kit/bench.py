"""How long speaking takes here: seconds for a given number of codes, and the real-time factor.

Medians of a few runs after a warm-up, side by side in one process. Knows a `Voice`; no file.
"""

import dataclasses
import math
import statistics
import time

import torch

from kit.generate import GenerateConfig, generate
from kit.voice import Voice


def speak_seconds(
    voice: Voice, codes: int, config: GenerateConfig, batch: int = 1, repeats: int = 3
) -> float:
    """Median seconds to generate `codes` codes for `batch` rows, one reading each, no codec."""
    reference = voice.references[voice.speakers[0]].float()
    cond = reference.expand(batch, *reference.shape)
    exact = dataclasses.replace(config, exact_codes=codes, candidates=1)
    texts, times = [list(range(3, 23))] * batch, []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        generate(voice.model, texts, cond, exact)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def real_time_factor(voice: Voice, texts: list[str], config: GenerateConfig) -> float:
    """Seconds of work per second of speech on one core, one text at a time, vocoder included.

    NaN when the voice said nothing at all.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        voice.speak(texts[:1], voice.speakers[0], config)
        started = time.perf_counter()
        waves = [voice.speak([t], voice.speakers[0], config)[0].wave for t in texts]
        took_s = time.perf_counter() - started
    finally:
        torch.set_num_threads(threads)
    seconds = sum(map(len, waves)) / voice.codec.sample_rate
    return took_s / seconds if seconds else math.nan
