"""Write configs/pretrained-*.safetensors: layers of a voice that reads, and of its recogniser.

`make demo RUN=layers`, then `python tests/tools/pretrained_layers.py runs/layers`.
"""

import sys
from pathlib import Path

from kit.audio import recognizer
from kit.base.files import write_atomic
from kit.base.tensor_file import file_bytes
from kit.model import weights

MODEL = ("gpt.", "text_position.", "code_position.")
MODEL_SIZES = ("layers", "width", "heads", "activation_function")
RECOGNIZER = ("stem.", "blocks.", "norm.")
RECOGNIZER_SIZES = ("width", "blocks")

if __name__ == "__main__":
    run = Path(sys.argv[1])
    voice = weights.load_model(run / weights.WEIGHTS["ema"])
    reader = recognizer.load_recognizer(run / "recognizer.safetensors")
    parts = (weights.PRETRAINED, voice, MODEL, MODEL_SIZES)
    more = (recognizer.PRETRAINED, reader, RECOGNIZER, RECOGNIZER_SIZES)
    for path, module, names, sizes in (parts, more):
        state = module.state_dict().items()
        layers = {name: w.half().contiguous() for name, w in state if name.startswith(names)}
        write_atomic(path, file_bytes(layers, {n: getattr(module.config, n) for n in sizes}))
        print(f"{path}: {path.stat().st_size:,} bytes")
