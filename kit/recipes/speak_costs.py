"""What each way of running a voice costs: streaming, cache, batches, number formats.

Each step draws what it found and records its figures under `infer`.
"""

import dataclasses
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from kit.audio.recognizer import load_recognizer
from kit.base.files import digest, file_digest
from kit.base.result_cache import read_result, save_result
from kit.batches.code_cache import CodeCache
from kit.inference.compare_formats import (
    FormatResult,
    choose_format,
    formats_table,
    measure_formats,
    median_seconds,
    real_time_factor,
    recorded_examples,
    speak_seconds,
    time_to_first_audio_s,
)
from kit.inference.evaluate import score
from kit.inference.voice import Voice
from kit.notebook.plots import bars, curves
from kit.notebook.result import Result
from kit.recipes.run_voice import RunVoice

STEPS = ("first_sound", "kv_cache", "batches", "compare_formats", "real_time_factor")


class SpeakingCosts:
    """Measurements of `own`, the voice of a run; the first of its formats is fp32."""

    def __init__(self, own: RunVoice):
        self.own = own
        self.lengths = own.config.lengths  # codes

    def run(self) -> Iterator[Result]:
        """Every measurement; what was measured of this voice, here, is not measured again."""
        run = self.own.active_run
        for step in STEPS:
            figures = read_result(self.kept_path(step), self.fingerprint)
            if figures is None:
                yield getattr(self, step)()
            else:
                run.record(infer=figures)
                line = f"{step}: measured before, of this voice on this machine"
                yield Result(line=line, figures=figures, shown=False)

    @property
    def fp32_voice(self) -> Voice:
        """The voice as others are held against; by default a GPU speaks in half precision."""
        return next(iter(self.own.voices.values()))

    def kept_path(self, step: str) -> Path:
        """The file that keeps the figures of `step`."""
        return self.own.active_run.path("measured", f"{step}.json")

    @cached_property
    def fingerprint(self) -> str:
        """Of all that a measurement depends on: weights, settings, machine."""
        own = self.own
        weights = file_digest(own.weights_file)
        return digest(weights, own.config, own.sampling, own.story, own.active_run.hw.name)

    def recorded(
        self, step: str, line: str, pictures: list, figures: dict, grid: list = ()
    ) -> Result:
        """What `step` found, its figures now in the run's record under `infer`."""
        save_result(self.kept_path(step), self.fingerprint, figures)
        self.own.active_run.record(infer=figures)
        return Result(line=line, pictures=pictures, figures=figures, shown=False, grid=grid)

    def first_sound(self) -> Result:
        """From the story to its first piece of sound, in every format, beside all of it."""
        own = self.own
        wait_ms = {
            name: 1000 * time_to_first_audio_s(voice, own.story, own.sampling)
            for name, voice in own.voices.items()
        }
        first_ms = next(iter(wait_ms.values()))
        whole_s = median_seconds(
            lambda: self.fp32_voice.speak([own.story], own.speaker, own.read_once), 1, warm=False
        )
        wait_ms["fp32, all of it"] = 1000 * whole_s
        title = "From the text to the first sound"
        return self.recorded(
            "first_sound",
            f"The first sound comes after {first_ms:.0f} ms, all of it after {whole_s:.1f} s",
            [bars(list(wait_ms), wait_ms.values(), "ms", title)],
            {"first_sound_ms": first_ms},
        )

    def kv_cache(self) -> Result:
        """How long so many codes take, without a key-value cache and with it."""
        without = dataclasses.replace(self.own.sampling, kv_cache=False)
        off_s = [speak_seconds(self.own.voice, n, without) for n in self.lengths]
        on_s = [speak_seconds(self.own.voice, n, self.own.sampling) for n in self.lengths]
        speedup = off_s[-1] / on_s[-1]
        lines = {"cache off": (self.lengths, off_s), "cache on": (self.lengths, on_s)}
        return self.recorded(
            "kv_cache",
            f"{speedup:.1f} times as fast with the cache at {self.lengths[-1]} codes",
            [curves(lines, "codes spoken", "seconds")],
            {"kv_speedup": speedup},
        )

    def batches(self) -> Result:
        """Codes a second, all rows of a batch together."""
        length = self.lengths[0]
        codes_per_s = {}
        for rows in self.own.config.batches:
            seconds = speak_seconds(self.own.voice, length, self.own.sampling, batch=rows)
            codes_per_s[f"batch {rows}"] = rows * length / seconds
        best = max(codes_per_s, key=codes_per_s.get)
        title = "Codes a second, all together"
        return self.recorded(
            "batches",
            f"{best}: {codes_per_s[best]:,.0f} codes/s, all together",
            [bars(list(codes_per_s), codes_per_s.values(), "codes/s", title)],
            {"batch_codes_per_s": codes_per_s},
        )

    def compare_formats(self) -> Result:
        """Every format beside fp32 (speed, size, agreement, CER), and which of them to take."""
        own = self.own
        run = own.active_run
        recognizer = load_recognizer(run.path("recognizer.safetensors")).to(run.hw.device)
        rows = recorded_examples(CodeCache(own.active_run.index()), own.config.rows)
        sentences = own.held_out[: own.config.sentences]

        def error_rate(voice: Voice) -> float:
            # Compiling for another batch size takes long.
            batch = 1 if voice.decoder.compiles else 64
            return score(voice, sentences, recognizer, own.read_once, batch)[0].cer

        formats = measure_formats(own.voices, self.lengths[-1], own.read_once, rows, error_rate)
        chosen, against = choose_format(formats)
        names = [f.name for f in formats]
        speeds = [f.codes_per_s for f in formats]
        sizes_mb = [f.weight_bytes / 1e6 for f in formats]
        errors_percent = [100 * f.cer for f in formats]
        error_title = f"Character error rate, {len(sentences)} held-out sentences"
        pictures = [
            bars(names, speeds, "codes/s", "One sentence at a time"),
            bars(names, sizes_mb, "MB", "Weights in memory"),
            bars(names, errors_percent, "%", error_title),
        ]
        line = f"{chosen.name} ({chosen.ran}): {chosen.speedup:.2f} times fp32"
        line = f"{line}. {against}" if against else line
        figures = format_figures(formats, chosen)
        return self.recorded("compare_formats", line, pictures, figures, formats_table(formats))

    def real_time_factor(self) -> Result:
        """Seconds of work a second of speech on one core, text to waveform."""
        own = self.own
        chosen = own.active_run.require_figure("infer", "chosen", "04_inference")
        texts = [row.text for row in own.held_out[:10]]
        as_preset = real_time_factor(self.fp32_voice, texts, own.sampling)
        once = real_time_factor(self.fp32_voice, texts, own.read_once)
        factors = {"fp32, as the preset says": as_preset, "fp32, read once": once}
        best = once
        if chosen != "fp32":
            best = real_time_factor(own.voices[chosen], texts, own.read_once)
            factors[f"{chosen}, read once"] = best
        return self.recorded(
            "real_time_factor",
            f"{as_preset:.3f} s of work a second of speech; {once:.3f} s when read once",
            [bars(list(factors), factors.values(), "seconds of work a second of speech")],
            {
                "real_time_factor": as_preset,
                "real_time_factor_once": once,
                "real_time_factor_chosen": best,
            },
        )


def format_figures(formats: list[FormatResult], chosen: FormatResult) -> dict:
    """What the record keeps of a comparison of number formats."""
    figures = {"cer_fp32": formats[0].cer, "chosen": chosen.name, "variants": {}}
    for one in formats:
        figures["variants"][one.name] = {"codes_per_s": one.codes_per_s, "cer": one.cer}
        if one.name == "int8":
            figures["int8_speedup"] = one.speedup
            figures["cer_int8"] = one.cer
            for name, value in dataclasses.asdict(one.cost).items():
                figures[f"int8_{name}"] = value
    return figures
