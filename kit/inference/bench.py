"""How long speaking takes here: for so many codes, to the first sound, per second of speech.

Medians of a few runs after a warm-up, side by side in one process. Knows a `Voice`; no file.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable

import torch

from kit.base.hardware import timings
from kit.inference.generate import generate
from kit.inference.sampling import GenerateConfig
from kit.inference.voice import Voice


def speak_seconds(
    voice: Voice,
    codes: int,
    config: GenerateConfig,
    batch: int = 1,
    repeats: int = 3,
    warm: bool = True,
) -> float:
    """Median seconds to generate `codes` codes for `batch` rows, one reading each, no codec.

    `warm` does it once before, untimed: the first time pays for what only happens once.
    """
    reference, decoder = voice.reference(voice.speakers[0]), voice.ready()
    cond = reference.expand(batch, *reference.shape).to(decoder.device)
    exact = dataclasses.replace(config, exact_codes=codes, candidates=1)
    texts = [list(range(3, 23))] * batch
    return median_seconds(lambda: generate(decoder, texts, cond, exact), repeats, warm)


def first_sound_seconds(voice: Voice, text: str, config: GenerateConfig, repeats: int = 3) -> float:
    """Median seconds from `text` to the first piece of sound of `Voice.stream`, all included."""
    return median_seconds(lambda: next(voice.stream(text, voice.speakers[0], config)), repeats)


def median_seconds(work: Callable[[], object], repeats: int, warm: bool = True) -> float:
    """Median time of `work()`, once more before that, untimed, when `warm`."""
    return statistics.median(timings(work, repeats, warm))


def real_time_factor(voice: Voice, texts: list[str], config: GenerateConfig) -> float:
    """Seconds of work per second of speech on one core, one sentence at a time, vocoder included.

    NaN when the voice said nothing at all.
    """
    # Parts of a text in one batch would be another graph, compiled while the clock runs.
    say = lambda text: voice.speak([text], voice.speakers[0], config, batch=1)[0]  # noqa: E731
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        say(texts[0])
        started = time.perf_counter()
        waves = [say(text).wave for text in texts]
        took_s = time.perf_counter() - started
    finally:
        torch.set_num_threads(threads)
    seconds = sum(map(len, waves)) / voice.codec.sample_rate
    return took_s / seconds if seconds else math.nan
