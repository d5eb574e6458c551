"""A finished run's voice in onnxruntime beside torch, on one core: size, speed, codes, sound, CER.

`taskset -c 0 python tests/bench/onnx_voice.py runs/demo`, after `pip install onnx onnxscript
onnxruntime`. Writes nothing to the run. Each candidate is the first, without retries.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime
import torch

from kit.audio.recognizer import cer, load_recognizer
from kit.dataset.manifest import read_manifest
from kit.extras.onnx import speak_onnx
from kit.extras.onnx.export import export_onnx
from kit.inference import evaluate, voice_files
from kit.inference.generate import Noise, candidate_seed
from kit.settings import GenerateConfig


class KitNoise:
    """The kit's random numbers, as speak_onnx.py draws its own."""

    def __init__(self, config: GenerateConfig, ids: list[int]):
        noise = Noise([candidate_seed(config, ids, 0)], config.top_k)
        self.steps = (step for _ in itertools.count() for step in noise.draw())

    def exponential(self, size: int) -> np.ndarray:
        return next(self.steps)[0].numpy()


def speak(voice: speak_onnx.Voice, config: GenerateConfig, row):
    """Return codes and the waveform (L,) of `row`'s text."""
    ids = voice.ids(row.text)
    np.random.default_rng = lambda seed: KitNoise(config, ids)
    codes, states = voice.codes(ids, row.speaker, dataclasses.asdict(config))
    inputs = {"codes": [codes]}
    if voice.card["uses_states"]:
        inputs["states"] = np.stack(states, 1)
    return codes, torch.from_numpy(voice.sound.run(None, inputs)[0][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--sentences", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    one_thread = onnxruntime.SessionOptions()
    one_thread.intra_op_num_threads = 1
    session = functools.partial(onnxruntime.InferenceSession, sess_options=one_thread)
    onnxruntime.InferenceSession = session
    report = json.loads((options.run / "report.json").read_text(encoding="utf-8"))
    weights = f"model-{report['eval']['weights']}.safetensors"
    voice = voice_files.load_voice(options.run, weights, report["data"]["language"])
    recognizer = load_recognizer(options.run / "recognizer.safetensors")
    rows = [row for row in read_manifest(options.run) if row.split == "held_out"]
    rows = [row for row in rows if len(voice.parts(row.text)) == 1][: options.sentences]
    texts = [row.text for row in rows]
    config = GenerateConfig(temperature=0.3, top_k=20, top_p=0.95, best_of=1, retries=0)
    rate = voice.codec.sample_rate

    def measure(name: str, say) -> list:
        say(rows[0])
        started = time.perf_counter()
        spoken = [say(row) for row in rows]
        work_s = time.perf_counter() - started
        waves = [wave for _, wave in spoken]
        errors = cer(evaluate.transcribe(recognizer, waves, rate), texts)
        seconds = sum(map(len, waves)) / rate
        print(f"{name}: real-time factor {work_s / seconds:.4f}, CER {errors:.2%}", flush=True)
        return spoken

    def say(format, row):
        speech = format.speak([row.text], row.speaker, config, 1)[0]
        return speech.codes.tolist(), speech.wave

    print(f"torch {torch.__version__}, onnxruntime {onnxruntime.__version__}")
    print(f"{len(rows)} held-out sentences, the same random numbers")
    kit = {}
    for name in ("fp32", "int8"):
        kit[name] = measure(f"torch, {name}", functools.partial(say, voice.in_format(name)))
    with tempfile.TemporaryDirectory() as folder:
        export_onnx(voice, Path(folder))
        for path in sorted(Path(folder).iterdir()):
            print(f"  {path.name}: {path.stat().st_size / 1e6:.2f} MB")
        exported = speak_onnx.Voice(Path(folder))
        spoken = measure("onnxruntime", functools.partial(speak, exported, config))
    for other, expected in kit.items():
        same = [(a[1], b[1]) for a, b in zip(spoken, expected) if a[0] == b[0]]
        differ = max((float((a - b).abs().max()) for a, b in same), default=0)
        count = f"{len(same)} of {len(spoken)} sentences"
        waves = f"there the waves differ by at most {differ:.1e}"
        print(f"  the same codes as torch's {other}: {count}; {waves}")


if __name__ == "__main__":
    main()
