"""One voice in several number formats, measured side by side: size, speed, agreement, CER.

Speed is taken in rounds, every variant in each, so that a slow moment of the machine hits all of
them. `choose` takes the fastest that still says the same. Knows voices; nothing of plots.
"""

import dataclasses
import statistics
from collections.abc import Callable

import torch

from kit.batches.code_cache import CodeCache
from kit.inference.agreement import Cost, Row, compare, forced
from kit.inference.bench import speak_seconds
from kit.inference.linear_formats import weight_bytes
from kit.inference.sampling import GenerateConfig
from kit.inference.voice import Voice


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    name: str
    ran: str  # what the format turned into on this machine
    codes_per_s: float  # one sentence at a time
    speedup: float  # against the first variant, median of the rounds' ratios
    weight_bytes: int  # of everything the decoder holds
    cost: Cost  # beside the first variant
    cer: float  # character error rate, 0.04 is 4 %
    warm_up_s: float  # compiling, before the first sound; 0 for uncompiled ones


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a variant may cost."""

    least_agreement: float = 0.98  # share of codes both rank first
    most_cer: float = 0.01  # above the first variant's: 0.01 is one point


def ready_voices(voice: Voice, formats: list[str], compiled: list[str]) -> dict[str, Voice]:
    """`voice` in every format, under the format's name; the first is what others are held against.

    A format this machine cannot run is left out, with a line that says why.
    """
    wanted = {name: (name, False) for name in formats}
    wanted |= {f"{name}, compiled": (name, True) for name in compiled}
    found = {}
    for name, (weights, compile) in wanted.items():
        try:
            found[name] = voice.using(weights, compile)
        except ValueError as reason:
            print(f"{name}: {reason}")
    return found


def measure(
    voices: dict[str, Voice],
    codes: int,
    config: GenerateConfig,
    rows: list[Row],
    error_rate: Callable[[Voice], float],
    rounds: int = 3,
) -> list[Variant]:
    """Every voice's figures; speed from `rounds` readings of `codes` codes by each in turn."""
    for voice in voices.values():  # compiles, and pays for what else only happens once
        speak_seconds(voice, codes, config, repeats=1)
    times = {name: [] for name in voices}
    for _ in range(rounds):
        for name, voice in voices.items():
            times[name].append(speak_seconds(voice, codes, config, repeats=1, warm=False))
    first = next(iter(voices))
    wanted = [forced(voices[first].decoder, row) for row in rows]
    return [
        Variant(
            name=name,
            ran=voice.decoder.ran,
            codes_per_s=codes / statistics.median(times[name]),
            speedup=statistics.median(a / b for a, b in zip(times[first], times[name])),
            weight_bytes=weight_bytes(voice.decoder),
            cost=compare(voices[first].decoder, voice.decoder, rows, wanted),
            cer=error_rate(voice),
            warm_up_s=sum(voice.decoder.warm_up_s.values()),
        )
        for name, voice in voices.items()
    ]


def choose(variants: list[Variant], limits: Limits = Limits()) -> tuple[Variant, str]:
    """The fastest variant within `limits`, and why the faster ones are not taken."""
    first, ordered = variants[0], sorted(variants, key=lambda v: -v.codes_per_s)
    against = []
    for variant in ordered:
        reasons = []
        if variant.cost.top1_agreement < limits.least_agreement:
            reasons.append(f"agrees on {variant.cost.top1_agreement:.1%} of the codes only")
        if variant.cer > first.cer + limits.most_cer:
            reasons.append(f"CER {variant.cer:.1%} against {first.cer:.1%}")
        if not reasons:
            return variant, "; ".join(against)
        against.append(f"{variant.name} is faster, but {' and '.join(reasons)}")
    return first, "; ".join(against)


def table(variants: list[Variant]) -> list[tuple[str, ...]]:
    """Rows for people: a header, then one a variant."""
    header = ("", "codes/s", "speed", "MB", "same code", "logit error", "CER", "warm-up", "ran as")
    rows = [
        (
            v.name,
            f"{v.codes_per_s:,.0f}",
            f"{v.speedup:.2f}x",
            f"{v.weight_bytes / 1e6:.1f}",
            f"{v.cost.top1_agreement:.2%}",
            f"{v.cost.mean_logit_error:.3f} (worst {v.cost.max_logit_error:.2f})",
            f"{v.cer:.1%}",
            f"{v.warm_up_s:.0f} s" if v.warm_up_s else "none",
            v.ran,
        )
        for v in variants
    ]
    return [header, *rows]


def held_out_rows(cache: CodeCache, count: int, split: str = "held_out") -> list[Row]:
    """The first `count` recorded rows of `split`: text, codes and a reference of the same clip."""
    return [
        Row(
            text=cache.texts[i].tolist(),
            codes=cache.codes[i].tolist(),
            cond=torch.from_numpy(cache.references[i]),
        )
        for i in cache.of_split(split)[:count]
    ]
