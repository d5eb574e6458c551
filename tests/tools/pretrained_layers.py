"""Write configs/pretrained-layers.safetensors: layers and positions of a voice that reads.

`make demo RUN=layers`, then `python tests/tools/pretrained_layers.py runs/layers`.
"""

import sys
from pathlib import Path

from kit.model.weights import PRETRAINED, WEIGHTS, load_model, save_layers

if __name__ == "__main__":
    save_layers(load_model(Path(sys.argv[1]) / WEIGHTS["ema"]), PRETRAINED)
    print(f"{PRETRAINED}: {PRETRAINED.stat().st_size:,} bytes")
