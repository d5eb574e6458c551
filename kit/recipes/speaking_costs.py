"""What speech costs: time to the first sound, key-value cache, batches, number formats."""

import dataclasses
import time
from collections.abc import Iterator

from kit.audio.recognizer import load_recognizer
from kit.batches.code_cache import CodeCache
from kit.inference import compare_formats as measure
from kit.inference.evaluate import score
from kit.inference.voice import Voice
from kit.notebook.plots import bars, curves
from kit.notebook.result import Result

# Of a `FormatResult`, recorded for int8.
DIFFERENCES = ("top1_agreement", "mean_logit_error", "max_logit_error", "size_ratio")


class SpeakingCosts:
    """Measures `speaking`, a `Speaking`, and records the figures under `infer`."""

    def __init__(self, speaking):
        self.speaking = speaking
        self.lengths = speaking.config.lengths  # codes

    def run(self) -> Iterator[Result]:
        yield self.first_sound()
        yield self.kv_cache()
        yield self.batches()
        yield self.compare_formats()
        yield self.real_time_factor()

    @property
    def fp32_voice(self) -> Voice:
        """The baseline of comparisons; by default a GPU speaks in half precision."""
        return next(iter(self.speaking.voices.values()))

    def record(self, line: str, pictures: list, figures: dict, grid: list = ()) -> Result:
        self.speaking.active_run.record(infer=figures)
        return Result(line=line, pictures=pictures, figures=figures, shown=False, grid=grid)

    def first_sound(self) -> Result:
        """Time from the story to its first chunk of sound, in every format, and to all of it."""
        own = self.speaking
        wait_ms = {
            name: 1000 * measure.time_to_first_audio_s(voice, own.story, own.sampling)
            for name, voice in own.voices.items()
        }
        first_ms = next(iter(wait_ms.values()))
        began_s = time.perf_counter()
        self.fp32_voice.speak([own.story], own.speaker, own.read_once)
        complete_s = time.perf_counter() - began_s
        wait_ms["fp32, all of it"] = 1000 * complete_s
        line = f"The first sound comes after {first_ms:.0f} ms, all of it after {complete_s:.1f} s"
        picture = bars(list(wait_ms), wait_ms.values(), "ms", "From the text to the first sound")
        return self.record(line, [picture], {"first_sound_ms": first_ms})

    def kv_cache(self) -> Result:
        """Seconds for some numbers of codes, without a key-value cache and with it."""
        own = self.speaking
        without = dataclasses.replace(own.sampling, kv_cache=False)
        off_s = [measure.speak_seconds(own.voice, n, without) for n in self.lengths]
        on_s = [measure.speak_seconds(own.voice, n, own.sampling) for n in self.lengths]
        speedup = off_s[-1] / on_s[-1]
        line = f"{speedup:.1f} times as fast with the cache at {self.lengths[-1]} codes"
        lines = {"cache off": (self.lengths, off_s), "cache on": (self.lengths, on_s)}
        picture = curves(lines, "codes spoken", "seconds")
        return self.record(line, [picture], {"kv_speedup": speedup})

    def batches(self) -> Result:
        """Codes per second of a whole batch, by its size."""
        own = self.speaking
        length = self.lengths[0]
        codes_per_s = {}
        for rows in own.config.batches:
            seconds = measure.speak_seconds(own.voice, length, own.sampling, batch=rows)
            codes_per_s[f"batch {rows}"] = rows * length / seconds
        best = max(codes_per_s, key=codes_per_s.get)
        line = f"{best}: {codes_per_s[best]:,.0f} codes/s, all together"
        title = "Codes per second, all together"
        picture = bars(list(codes_per_s), codes_per_s.values(), "codes/s", title)
        return self.record(line, [picture], {"batch_codes_per_s": codes_per_s})

    def compare_formats(self) -> Result:
        """Every format beside fp32 (speed, size, agreement, CER), and the one to choose."""
        own = self.speaking
        run = own.active_run
        recognizer = load_recognizer(run.path("recognizer.safetensors")).to(run.hw.device)
        rows = measure.recorded_examples(CodeCache(run.index()), own.config.rows)
        sentences = own.held_out[: own.config.sentences]

        def error_rate(voice: Voice) -> float:
            # Compiling for another batch size takes long.
            batch = 1 if voice.decoder.compiles else 64
            return score(voice, sentences, recognizer, own.read_once, batch)[0].cer

        formats = measure.measure_formats(
            own.voices, self.lengths[-1], own.read_once, rows, error_rate
        )
        chosen, objection = measure.choose_format(formats)
        names = [each.name for each in formats]
        speeds = [each.codes_per_s for each in formats]
        sizes_mb = [each.weight_bytes / 1e6 for each in formats]
        errors_percent = [100 * each.cer for each in formats]
        error_title = f"Character error rate, {len(sentences)} held-out sentences"
        pictures = [
            bars(names, speeds, "codes/s", "One sentence at a time"),
            bars(names, sizes_mb, "MB", "Weights in memory"),
            bars(names, errors_percent, "%", error_title),
        ]
        line = f"{chosen.name} ({chosen.ran}): {chosen.speedup:.2f} times fp32"
        if objection:
            line += f". {objection}"
        figures = {"cer_fp32": formats[0].cer, "chosen": chosen.name, "variants": {}}
        for each in formats:
            figures["variants"][each.name] = {"codes_per_s": each.codes_per_s, "cer": each.cer}
            if each.name == "int8":
                figures |= {"int8_speedup": each.speedup, "cer_int8": each.cer}
                figures |= {f"int8_{name}": getattr(each, name) for name in DIFFERENCES}
        table = measure.formats_table(formats)
        return self.record(line, pictures, figures, table)

    def real_time_factor(self) -> Result:
        """Seconds of work per second of speech on one core, text to waveform."""
        own = self.speaking
        chosen = own.active_run.require_figure("infer", "chosen", "04_inference")
        texts = [row.text for row in own.held_out[:10]]
        as_preset = measure.real_time_factor(self.fp32_voice, texts, own.sampling)
        once = measure.real_time_factor(self.fp32_voice, texts, own.read_once)
        factors = {"fp32, as the preset says": as_preset, "fp32, one candidate": once}
        best = once
        if chosen != "fp32":
            best = measure.real_time_factor(own.voices[chosen], texts, own.read_once)
            factors[f"{chosen}, one candidate"] = best
        line = f"{as_preset:.3f} s of work per second of speech; {once:.3f} s with one candidate"
        picture = bars(list(factors), factors.values(), "seconds of work per second of speech")
        figures = {"real_time_factor": as_preset, "real_time_factor_once": once}
        figures["real_time_factor_chosen"] = best
        return self.record(line, [picture], figures)
