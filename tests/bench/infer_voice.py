"""What number formats cost a trained voice, and the time to first sound: rows for `bench_infer.py`.

Reads a finished run's folder and writes nothing there: its voice, its held-out rows and its
recogniser. A format is compared with fp32 of the same voice.
"""

import json
from pathlib import Path

from rows import native, result

from kit.audio.recognizer import load_recognizer
from kit.batches.code_cache import CodeCache
from kit.dataset.manifest import read_manifest
from kit.inference import compare_formats as formats
from kit.inference import evaluate, voice_files
from kit.inference.voice import Voice
from kit.settings import GenerateConfig

FORMATS = ("bf16", "int8", "int8-weight-only")
FULL, SOON_MS = "the kit, fp32", 300  # the latest a first sound may come


def voice_rows(folder: Path, sentences: int, compared: int) -> list[dict]:
    """All rows of the voice in `folder`. Raises SpeechError where it is not finished."""
    facts = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    weights = f"model-{facts['eval']['weights']}.safetensors"
    voice = voice_files.load_voice(folder, weights, facts["data"]["language"])
    rows = agreement_rows(voice, CodeCache(folder / facts["data"]["codes"]), compared)
    rows += cer_rows(voice, folder, sentences)
    return rows + first_sound_rows(voice, folder)


def agreement_rows(voice: Voice, cache: CodeCache, compared: int) -> list[dict]:
    """Formats along held-out rows, the recorded codes given to both (teacher forcing)."""
    some = formats.recorded_examples(cache, compared)
    full = voice.ready()
    full_logits = [formats.teacher_forced_logits(full, row) for row in some]
    results = []
    for weights in native(FORMATS):
        cost = formats.compare_decoders(full, voice.in_format(weights).ready(), some, full_logits)
        same, name = 100 * cost.top1_agreement, f"voice, {weights}, {cost.positions} positions"
        results.append(result(f"{name}: top-1 agreement", same, "%", FULL, 100, same / 100))
        errors = {"mean": cost.mean_logit_error, "largest": cost.max_logit_error}
        for which, error in errors.items():
            results.append(result(f"{name}: {which} logit error", error, "logits", FULL))
    return results


def cer_rows(voice: Voice, folder: Path, sentences: int) -> list[dict]:
    """Character error rates of each format by the run's recogniser, one candidate a sentence."""
    recognizer = load_recognizer(folder / "recognizer.safetensors")
    some = [r for r in read_manifest(folder) if r.split == "held_out"][:sentences]
    results, once = [], GenerateConfig(best_of=1)
    voices = {weights: voice.in_format(weights) for weights in native(["fp32", *FORMATS])}
    voices["int8, compiled"] = voice.in_format("int8", True)  # in a batch another product
    percent_wrong = {}
    for name, speaking in voices.items():
        percent_wrong[name] = 100 * evaluate.score(speaking, some, recognizer, once)[0].cer
        print(f"  {name}: CER {percent_wrong[name]:.2f} %", flush=True)
    full = percent_wrong.pop("fp32")
    for name, percent in percent_wrong.items():
        row = f"voice, {name}: CER, {len(some)} sentences read once"
        results.append(result(row, percent, "%", FULL, full, full / percent if percent else None))
    return results


def first_sound_rows(voice: Voice, folder: Path) -> list[dict]:
    """From a sentence of middling length to its first piece of sound, codec included."""
    texts = sorted((r.text for r in read_manifest(folder) if r.split == "held_out"), key=len)
    text, results = texts[len(texts) // 2], []
    for weights, compiled in (("fp32", False), ("int8", False), ("int8", True)):
        ready = voice.in_format(weights, compiled)
        ms = 1000 * formats.time_to_first_audio_s(ready, text, GenerateConfig())
        row = f"voice, {weights}, {'compiled' if compiled else 'eager'}: time to first sound"
        results.append(result(row, ms, "ms", "at most", SOON_MS, SOON_MS / ms))
    return results
