"""Compare a voice's number formats: speed, size, agreement, CER.

Logits are compared with teacher forcing on recorded codes. Speed is measured in rounds with every
format in each, so that a slow moment of the machine affects all of them.

Shapes: B batch, N codes, V code vocabulary, M mels, T mel frames.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kit.base.errors import SpeechError
from kit.base.hardware import timings
from kit.batches.code_cache import CodeCache
from kit.inference.decoder import Decoder
from kit.inference.generate import generate
from kit.inference.linear_formats import weight_bytes
from kit.inference.voice import Voice
from kit.settings import GenerateConfig, GPTConfig

# Text ids and codes of a recording, without START and STOP, and a reference's log-mel (M, T).
RecordedExample = tuple[list[int], list[int], Tensor]
# How much a format may change to be chosen.
MIN_AGREEMENT = 0.98  # share of positions with the same most likely code
MAX_ADDED_CER = 0.01  # over the first format's
ROUNDS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class FormatResult:
    """A number format's figures; differences are from the first format, on recorded codes."""

    name: str
    ran: str  # what this machine ran
    codes_per_s: float  # one sentence at a time
    speedup: float  # over the first format, median of the rounds
    weight_bytes: int  # of the decoder
    size_ratio: float  # bytes of the decoder over those of the first
    top1_agreement: float  # share of positions with the same most likely code
    mean_logit_error: float
    max_logit_error: float
    cer: float  # character error rate, 0.04 is 4 %
    warm_up_s: float  # compile time; 0 if not compiled


def recorded_examples(cache: CodeCache, count: int) -> list[RecordedExample]:
    """Return the first `count` held-out recordings, else of all, each its own reference."""
    rows = cache.rows_in_split("held_out").tolist() or range(len(cache.rows))
    return [
        (cache.texts[i].tolist(), cache.codes[i].tolist(), torch.from_numpy(cache.references[i]))
        for i in rows[:count]
    ]


class GivenCodes:
    """Decoded as a `DecodedBatch` is, but the codes (N, B) are given; keeps the logits of each."""

    sampling = "given codes"  # as many for every batch: CUDA graphs have fixed shapes

    def __init__(self, config: GPTConfig, codes: Tensor):
        count, rows = codes.shape
        self.codes = codes.new_full((config.max_code + 1, rows), config.stop_code)
        self.codes[:count] = codes
        shape = (config.max_code + 1, rows, config.code_vocab)
        self.logits = torch.zeros(shape, device=codes.device)
        self.last = self.codes[0].clone()

    def take(self, logits: Tensor, states: Tensor, n: int | Tensor) -> None:
        """Keep the logits (B, V) of the n-th codes, and continue with the given ones."""
        self.logits[n] = logits
        self.last.copy_(self.codes[n].view(-1))


@torch.inference_mode()
def forced_logits(decoder: Decoder, rows: list[RecordedExample]) -> Tensor:
    """Return logits (N + 1, B, V) of the codes of `rows` and of STOP, N the codes of the longest.

    Behind the STOP of a shorter row they mean nothing.
    """
    texts, codes, mels = zip(*rows)
    x, padding = decoder.prompt(list(texts), torch.stack(mels).float().to(decoder.device))
    recorded = [torch.tensor(row_codes, dtype=torch.long) for row_codes in codes]
    recorded = pad_sequence(recorded, padding_value=decoder.config.stop_code).to(decoder.device)
    batch = GivenCodes(decoder.config, recorded)
    output, cache = decoder.prefill(x, padding, len(recorded) + 1)
    batch.take(*output, 0)
    for n in range(1, len(recorded) + 1):
        decoder.advance(batch, n, cache)
    cache.release()
    return batch.logits[: len(recorded) + 1].clone()


def logits_of_each(decoder: Decoder, rows: list[RecordedExample]) -> Tensor:
    """Return `forced_logits` of the rows one by one, as a voice speaks them, all in (codes, V)."""
    return torch.cat([forced_logits(decoder, [row])[:, 0] for row in rows])


def compare_logits(expected: Tensor, actual: Tensor) -> dict[str, float]:
    """Return how `actual` logits (codes, V) differ from those `expected`, as in `FormatResult`."""
    # -inf in both is no error.
    error = torch.where(expected == actual, 0.0, (expected - actual).abs())
    same = expected.argmax(-1) == actual.argmax(-1)
    return {
        "top1_agreement": float(same.float().mean()),
        "mean_logit_error": float(error.mean()),
        "max_logit_error": float(error.max()),
    }


def speak_seconds(
    voice: Voice,
    codes: int,
    config: GenerateConfig,
    batch: int = 1,
    repeats: int = 3,
    warm: bool = True,
) -> float:
    """Return the median seconds to generate `codes` codes for `batch` rows, without the codec."""
    decoder = voice.ready()
    reference = voice.reference(voice.speakers[0])
    cond = reference.expand(batch, *reference.shape).to(decoder.device)  # (B, M, T)
    exact = dataclasses.replace(config, exact_codes=codes, best_of=1)
    texts = [list(range(3, 23))] * batch
    return statistics.median(timings(lambda: generate(decoder, texts, cond, exact), repeats, warm))


def time_to_first_audio_s(voice: Voice, text: str, config: GenerateConfig) -> float:
    """Return the median seconds from `text` to the first audio chunk of `Voice.stream`."""
    speaker = voice.speakers[0]
    return statistics.median(timings(lambda: next(voice.stream(text, speaker, config)), repeats=3))


def real_time_factor(voice: Voice, texts: list[str], config: GenerateConfig) -> float:
    """Return seconds of work per second of speech, on one core, with vocoder; NaN if silent."""

    def say(text: str) -> Tensor:
        # batch=1: another batch size would be compiled while it is timed.
        return voice.speak([text], voice.speakers[0], config, batch=1)[0].wave

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        say(texts[0])
        started = time.perf_counter()
        waves = [say(text) for text in texts]
        took_s = time.perf_counter() - started
    finally:
        torch.set_num_threads(threads)
    speech_s = sum(len(wave) for wave in waves) / voice.codec.sample_rate
    return took_s / speech_s if speech_s else math.nan


def voices_by_format(voice: Voice, formats: list[str], compiled: list[str]) -> dict[str, Voice]:
    """Return `voice` in every format, by name; the first is the reference.

    A format that this machine cannot run is left out, with a printed reason.
    """
    variants = [(name, name, False) for name in formats]
    variants += [(f"{name}, compiled", name, True) for name in compiled]
    voices = {}
    for name, weights, compile in variants:
        try:
            voices[name] = voice.in_format(weights, compile)
        except SpeechError as reason:
            print(f"{name}: {reason}")
    return voices


def measure_formats(
    voices: dict[str, Voice],
    codes: int,
    config: GenerateConfig,
    rows: list[RecordedExample],
    error_rate: Callable[[Voice], float],
) -> list[FormatResult]:
    """Measure every voice; speed from rounds of generating `codes` codes by each in turn."""
    for voice in voices.values():  # warm-up
        speak_seconds(voice, codes, config, repeats=1)
    seconds = {name: [] for name in voices}
    for _ in range(ROUNDS):
        for name, voice in voices.items():
            seconds[name].append(speak_seconds(voice, codes, config, repeats=1, warm=False))
    first = next(iter(voices))
    full = voices[first].decoder
    full_logits = logits_of_each(full, rows)
    results = []
    for name, voice in voices.items():
        ratios = [a / b for a, b in zip(seconds[first], seconds[name])]
        logits = full_logits if name == first else logits_of_each(voice.decoder, rows)
        result = FormatResult(
            name=name,
            ran=voice.decoder.ran,
            codes_per_s=codes / statistics.median(seconds[name]),
            speedup=statistics.median(ratios),
            weight_bytes=weight_bytes(voice.decoder),
            size_ratio=weight_bytes(voice.decoder) / weight_bytes(full),
            **compare_logits(full_logits, logits),
            cer=error_rate(voice),
            warm_up_s=voice.decoder.warm_up_s,
        )
        results.append(result)
    return results


def choose_format(formats: list[FormatResult]) -> tuple[FormatResult, str]:
    """Return the fastest format that changes little, and why faster ones were rejected."""
    first = formats[0]
    rejected = []
    for candidate in sorted(formats, key=lambda f: -f.codes_per_s):
        reasons = []
        if candidate.top1_agreement < MIN_AGREEMENT:
            reasons.append(f"agrees on only {candidate.top1_agreement:.1%} of the codes")
        if candidate.cer > first.cer + MAX_ADDED_CER:
            reasons.append(f"CER {candidate.cer:.1%} against {first.cer:.1%}")
        if not reasons:
            return candidate, "; ".join(rejected)
        rejected.append(f"{candidate.name} is faster, but {' and '.join(reasons)}")
    return first, "; ".join(rejected)


def formats_table(formats: list[FormatResult]) -> list[tuple[str, ...]]:
    """Return table rows: a header, then one for each format."""
    rows = [("", "codes/s", "speed", "MB", "same code", "logit error", "CER", "warm-up", "ran as")]
    for f in formats:
        error = f"{f.mean_logit_error:.3f} (worst {f.max_logit_error:.2f})"
        warm_up = f"{f.warm_up_s:.0f} s" if f.warm_up_s else "none"
        speed = f"{f.codes_per_s:,.0f}", f"{f.speedup:.2f}x", f"{f.weight_bytes / 1e6:.1f}"
        quality = f"{f.top1_agreement:.2%}", error, f"{f.cer:.1%}"
        rows.append((f.name, *speed, *quality, warm_up, f.ran))
    return rows
