"""One voice in several number formats, side by side: speed, size, agreement, CER.

How much a format changes is counted with teacher forcing: the recorded codes are given to two
decoders one by one, as in speaking, and their logits compared. Speed is taken in rounds, every
format in each, so that a slow moment of the machine hits all of them. Knows voices and rows of ids;
nothing of plots.

Shapes: B rows spoken together, N codes of a row, V code vocabulary, M mels, T mel frames.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from kit.base.hardware import timings
from kit.batches.code_cache import CodeCache
from kit.inference.decoder import Decoder
from kit.inference.generate import generate
from kit.inference.linear_formats import weight_bytes
from kit.inference.sampling import GenerateConfig
from kit.inference.voice import Voice


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedExample:
    """One recording as ids: what teacher forcing gives to a decoder."""

    text: list[int]  # ids without START and STOP
    codes: list[int]  # what was recorded, without START and STOP
    cond: Tensor  # (M, T) log-mel of a reference


@dataclasses.dataclass(frozen=True, kw_only=True)
class FormatDifference:
    """What a decoder changes beside another, along recorded rows (teacher forcing)."""

    top1_agreement: float  # share of positions where both rank the same code first
    mean_logit_error: float
    max_logit_error: float
    size_ratio: float  # bytes of the whole decoder against the other's
    linear_size_ratio: float  # bytes of the trunk's and the code head's layers alone
    positions: int  # compared


@dataclasses.dataclass(frozen=True, kw_only=True)
class FormatResult:
    name: str
    ran: str  # what the format turned into on this machine
    codes_per_s: float  # one sentence at a time
    speedup: float  # against the first format, median of the rounds' ratios
    weight_bytes: int  # of everything the decoder holds
    cost: FormatDifference  # beside the first format
    cer: float  # character error rate, 0.04 is 4 %
    warm_up_s: float  # compiling, before the first sound; 0 for uncompiled ones


@dataclasses.dataclass(frozen=True, kw_only=True)
class FormatLimits:
    """What a format may cost."""

    min_agreement: float = 0.98  # share of codes both rank first
    max_added_cer: float = 0.01  # above the first format's: 0.01 is one point


# --- how much a format changes ----------------------------------------------------------------


def recorded_examples(
    cache: CodeCache, count: int, split: str = "held_out"
) -> list[RecordedExample]:
    """The first `count` recorded rows of `split`: text, codes and a reference of the same clip."""
    rows = []
    for i in cache.rows_in_split(split)[:count].tolist():
        reference = torch.from_numpy(cache.references[i])
        text = cache.texts[i].tolist()
        codes = cache.codes[i].tolist()
        rows.append(RecordedExample(text=text, codes=codes, cond=reference))
    return rows


@torch.inference_mode()
def teacher_forced_logits(decoder: Decoder, row: RecordedExample) -> Tensor:
    """Logits (N + 1, V) of every code of `row` and of its STOP, the codes before it given."""
    cond = row.cond[None].float().to(decoder.device)
    x, padding = decoder.prompt([row.text], cond)
    logits, cache = decoder.prefill(x, padding, len(row.codes) + 1)
    found = [logits.clone()]
    codes = torch.tensor(row.codes, device=decoder.device)
    for position, code in enumerate(codes, start=1):
        logits = decoder.decode_one(code[None], position, cache)
        found.append(logits.clone())  # a captured step writes into the same memory again
    decoder.release(cache)
    return torch.cat(found)


def compare_decoders(
    full: Decoder,
    small: Decoder,
    rows: list[RecordedExample],
    full_logits: list[Tensor] | None = None,
) -> FormatDifference:
    """What `small` changes beside `full` over `rows`.

    `full_logits` are `teacher_forced_logits` of `full` for these rows, where they were found
    already. Raises ValueError where there are no rows.
    """
    if not rows:
        raise ValueError("There are no rows to compare on: hold some recordings out.")
    if full_logits is None:
        full_logits = [teacher_forced_logits(full, row) for row in rows]
    wanted = torch.cat(full_logits)
    found = wanted
    if small is not full:
        found = torch.cat([teacher_forced_logits(small, row) for row in rows])
    # A code that is never said is -inf in both: no error.
    error = torch.where(wanted == found, 0.0, (wanted - found).abs())
    same = wanted.argmax(-1) == found.argmax(-1)
    return FormatDifference(
        top1_agreement=float(same.float().mean()),
        mean_logit_error=float(error.mean()),
        max_logit_error=float(error.max()),
        size_ratio=weight_bytes(small) / weight_bytes(full),
        linear_size_ratio=linear_bytes(small) / linear_bytes(full),
        positions=len(wanted),
    )


def linear_bytes(decoder: Decoder) -> int:
    """Bytes of what a number format changes: the linear layers of trunk and code head."""
    return weight_bytes(decoder.layers) + weight_bytes(decoder.code_head)


# --- how long speaking takes ------------------------------------------------------------------


def median_seconds(work: Callable[[], object], repeats: int, warm: bool = True) -> float:
    """Median time of `work()`; once more before that, untimed, when `warm`."""
    return statistics.median(timings(work, repeats, warm))


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
    decoder = voice.ready()
    reference = voice.reference(voice.speakers[0])
    cond = reference.expand(batch, *reference.shape).to(decoder.device)  # (B, M, T)
    exact = dataclasses.replace(config, exact_codes=codes, candidates=1)
    texts = [list(range(3, 23))] * batch
    return median_seconds(lambda: generate(decoder, texts, cond, exact), repeats, warm)


def time_to_first_audio_s(
    voice: Voice, text: str, config: GenerateConfig, repeats: int = 3
) -> float:
    """Median seconds from `text` to the first piece of sound of `Voice.stream`, all included."""
    return median_seconds(lambda: next(voice.stream(text, voice.speakers[0], config)), repeats)


def real_time_factor(voice: Voice, texts: list[str], config: GenerateConfig) -> float:
    """Seconds of work per second of speech on one core, one sentence at a time, vocoder included.

    NaN when the voice said nothing at all.
    """

    def say(text: str) -> Tensor:
        # Parts of a text in one batch would be another graph, compiled while the clock runs.
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


# --- formats beside each other ----------------------------------------------------------------


def voices_by_format(voice: Voice, formats: list[str], compiled: list[str]) -> dict[str, Voice]:
    """`voice` in every format, under the format's name; the first is what others are held against.

    A format this machine cannot run is left out, with a line that says why.
    """
    wanted = [(name, name, False) for name in formats]
    wanted += [(f"{name}, compiled", name, True) for name in compiled]
    found = {}
    for name, weights, compile in wanted:
        try:
            found[name] = voice.in_format(weights, compile)
        except ValueError as reason:
            print(f"{name}: {reason}")
    return found


def measure_formats(
    voices: dict[str, Voice],
    codes: int,
    config: GenerateConfig,
    rows: list[RecordedExample],
    error_rate: Callable[[Voice], float],
    rounds: int = 3,
) -> list[FormatResult]:
    """Every voice's figures; speed from `rounds` readings of `codes` codes by each in turn."""
    for voice in voices.values():  # compiles, and pays for what else only happens once
        speak_seconds(voice, codes, config, repeats=1)
    seconds = {name: [] for name in voices}
    for _ in range(rounds):
        for name, voice in voices.items():
            seconds[name].append(speak_seconds(voice, codes, config, repeats=1, warm=False))
    first = next(iter(voices))
    full = voices[first].decoder
    full_logits = [teacher_forced_logits(full, row) for row in rows]
    found = []
    for name, voice in voices.items():
        ratios = [a / b for a, b in zip(seconds[first], seconds[name])]
        measured = FormatResult(
            name=name,
            ran=voice.decoder.ran,
            codes_per_s=codes / statistics.median(seconds[name]),
            speedup=statistics.median(ratios),
            weight_bytes=weight_bytes(voice.decoder),
            cost=compare_decoders(full, voice.decoder, rows, full_logits),
            cer=error_rate(voice),
            warm_up_s=sum(voice.decoder.warm_up_s.values()),
        )
        found.append(measured)
    return found


def choose_format(
    formats: list[FormatResult], limits: FormatLimits = FormatLimits()
) -> tuple[FormatResult, str]:
    """The fastest format within `limits`, and why the faster ones are not taken."""
    first = formats[0]
    against = []
    for found in sorted(formats, key=lambda f: -f.codes_per_s):
        reasons = []
        if found.cost.top1_agreement < limits.min_agreement:
            reasons.append(f"agrees on {found.cost.top1_agreement:.1%} of the codes only")
        if found.cer > first.cer + limits.max_added_cer:
            reasons.append(f"CER {found.cer:.1%} against {first.cer:.1%}")
        if not reasons:
            return found, "; ".join(against)
        against.append(f"{found.name} is faster, but {' and '.join(reasons)}")
    return first, "; ".join(against)


def formats_table(formats: list[FormatResult]) -> list[tuple[str, ...]]:
    """Rows for people: a header, then one a format."""
    header = ("", "codes/s", "speed", "MB", "same code", "logit error", "CER", "warm-up", "ran as")
    rows = [
        (
            f.name,
            f"{f.codes_per_s:,.0f}",
            f"{f.speedup:.2f}x",
            f"{f.weight_bytes / 1e6:.1f}",
            f"{f.cost.top1_agreement:.2%}",
            f"{f.cost.mean_logit_error:.3f} (worst {f.cost.max_logit_error:.2f})",
            f"{f.cer:.1%}",
            f"{f.warm_up_s:.0f} s" if f.warm_up_s else "none",
            f.ran,
        )
        for f in formats
    ]
    return [header, *rows]
