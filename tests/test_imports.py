"""Imports inside kit/ point one way, and importing changes nothing."""

import ast
import graphlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {path.stem: path for path in sorted((ROOT / "kit").glob("*.py")) if path.stem != "__init__"}

# {room: the rooms it may import}. A room may use fewer; one that wants more is either in the wrong
# place or should be given the thing as an argument, as `train` is given its batches.
ALLOWED = {
    # ground floor
    "config": set(),
    "hardware": {"config"},
    "lock": {"config"},
    "numbers": set(),
    "numbers_am": {"numbers"},
    "lang_am": {"numbers", "numbers_am"},
    "lang_en": {"numbers"},
    "text": {"config"},  # finds lang_CODE by name, and knows none of them
    "store": {"config", "shards"},
    "fitting": {"config"},
    # sound and sentences
    "corpus": {"config", "text"},
    "bytefile": set(),
    "place": {"config", "bytefile"},
    "stream": {"bytefile", "place"},
    "lines": {"place", "stream"},
    "tables": {"config", "bytefile", "lines", "place"},
    "jsonarray": {"bytefile", "lines", "place", "stream"},
    "sources": {"bytefile", "jsonarray", "lines", "place", "stream", "tables"},
    "mix": {"bytefile", "place"},
    "loader": {"config", "bytefile", "place"},
    "extract": {"config", "text", "bytefile", "place", "sources"},
    "pieces": {"config", "text", "extract"},
    "tokenizer": {"text"},
    "fitness": {"config", "text", "extract", "pieces", "tokenizer"},
    "g2p": {"config", "corpus"},
    "container": set(),
    "audio": {"bytefile", "container"},
    "measures": {"config", "audio"},
    "ledger": {"config", "audio"},
    "rules": {"text", "audio", "ledger"},
    "layouts": {"config", "text", "audio", "ledger", "bytefile", "place", "sources"},
    "manifest": {"config", "audio", "measures", "ledger", "rules", "layouts"},
    "griffin_lim": set(),
    "mel": set(),
    "codec": {"config", "hardware", "text", "store", "audio", "fitting", "griffin_lim", "mel"},
    "recognizer": {"config", "hardware", "text", "store", "fitting", "codec"},
    "archive": {"config", "lock"},
    "hub": {"config", "audio"},
    "ingest": {"archive", "audio", "hub", "layouts"},
    "align": {"config", "text", "audio", "ledger", "codec", "recognizer"},
    "listen": {"container", "codec", "recognizer", "align"},
    "longform": {"config", "text", "recognizer", "align", "listen"},
    "cut": {"config", "listen", "longform"},
    "recordings": {
        *("config", "store", "container", "codec", "recognizer", "listen", "longform", "cut"),
        "ledger",
    },
    "shards": set(),
    "batches": {"config"},
    "cache": {"config", "audio", "ledger", "tokenizer", "codec", "shards", "batches"},
    "lengths": {"batches", "cache", "ledger", "sequence", "tokenizer"},
    "data": {"config", "hardware", "batches", "cache"},
    # the model, and what makes it fast
    "sequence": {"config"},
    "model": {"sequence"},
    "memory": {"config", "model", "optim", "sequence"},
    "compiling": {"hardware"},
    "speedups": {"config", "hardware", "compiling", "model", "sequence"},
    "ema": {"config"},
    "checkpoint": {"config"},
    "steps": {"config"},
    "optim": {"model", "steps"},
    "recovery": {"sequence"},
    "state": {
        *(
            "config",
            "hardware",
            "model",
            "speedups",
            "ema",
            "checkpoint",
            "fitting",
            "steps",
            "optim",
        ),
    },
    "train": {
        *("hardware", "compiling", "model", "sequence", "checkpoint", "fitting", "steps"),
        *("recovery", "state"),
    },
    # what a run costs and what pays: beside the loop, never in it
    "logs": {"config"},
    "recommend": {"config", "hardware"},
    "fit": {
        *("config", "hardware", "batches", "model", "sequence", "memory", "recovery"),
        *("speedups", "state"),
        *("steps", "train"),
    },
    "choice": {"config"},
    "trials": {
        *("config", "hardware", "batches", "model", "sequence", "speedups", "state"),
        *("steps", "train"),
        "choice",
    },
    "planner": {"config", "progress", "steps"},
    "monitor": {"hardware"},
    "profiling": {"config", "hardware", "frontend"},
    # a run: the loop with its files; what comes of it
    "report": {"config", "hardware", "lock", "recommend"},
    "session": {
        *("config", "hardware", "model", "sequence", "speedups", "checkpoint", "steps"),
        *("recovery", "state"),
        *("train", "voice", "lock", "logs"),
    },
    # leaves: notebooks use them, train does not
    "sentences": {"text"},
    "stream_audio": set(),
    "quantize": set(),
    "decoder": {"config", "store", "compiling", "model", "quantize"},
    "sampling": {"config"},
    "generate": {"decoder", "model", "sequence", "sampling"},
    "agreement": {"decoder", "quantize"},
    "voice": {
        *("config", "text", "tokenizer", "store", "codec", "model", "sequence"),
        *("decoder", "sampling"),
        *("generate", "sentences", "stream_audio"),
    },
    "export": {
        *("config", "store", "text", "tokenizer", "codec", "model", "sequence", "quantize"),
        *("sampling", "voice"),
    },
    "program": {"config", "decoder", "model", "sequence", "voice", "export"},
    "evaluate": {
        *("config", "text", "codec", "recognizer", "ledger", "model", "sampling", "voice"),
    },
    "bench": {"config", "hardware", "sampling", "generate", "voice"},
    "variants": {"cache", "quantize", "sampling", "agreement", "voice", "bench"},
    "xtts": {"config", "text", "codec", "recognizer", "model"},
    # what people look at: plots draws, frontend asks who is watching, ui puts it together
    "plots": {"config"},
    "live": {"plots"},
    "frontend": set(),
    "progress": {"frontend"},
    "ticker": {"frontend", "progress"},
    "view": {"plots"},
    "ui": {"plots", "live", "view", "logs", "frontend", "progress"},
    "speak": {"view", "frontend"},
}


def kit_imports(path: Path) -> set[str]:
    """Rooms of kit/ that the file at `path` imports, anywhere in it, functions included."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:  # from . import x, from .x import y
            names = [f"kit.{node.module or alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "kit":
            names = [f"kit.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
        else:
            continue
        rooms |= {name.split(".")[1] for name in names if name.startswith("kit.")}
    return rooms


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_point_one_way(room):
    assert room in ALLOWED, (
        f"kit/{room}.py is a new room: add it to ALLOWED in tests/test_imports.py, "
        "with the rooms it may import, and to the diagram in README.md"
    )
    back = kit_imports(ROOMS[room]) - ALLOWED[room]
    assert not back, (
        f"kit/{room}.py imports {sorted(back)}, but may import only {sorted(ALLOWED[room])}: "
        "take what is needed as an argument, or let the notebook do the wiring"
    )


def test_the_diagram_itself_has_no_way_back():
    list(graphlib.TopologicalSorter(ALLOWED).static_order())  # raises CycleError
    assert not {room for room, may in ALLOWED.items() if may & {"ui", "evaluate"}}
    assert {room for room, may in ALLOWED.items() if "plots" in may} == {"live", "view", "ui"}
    forbidden = {"data", "evaluate", "quantize", "generate", "decoder", "xtts", "plots"}
    assert not ALLOWED["train"] & forbidden


def test_init_is_empty():
    assert not (ROOT / "kit" / "__init__.py").read_text(encoding="utf-8").strip()


WATCH = """
import importlib, json, os, random, sys, warnings
import numpy, torch, torchaudio

def state():
    return {
        "torch threads": torch.get_num_threads(),
        "torch random state": torch.get_rng_state().tolist(),
        "numpy random state": repr(numpy.random.get_state()),
        "random state": repr(random.getstate()),
        "default dtype": str(torch.get_default_dtype()),
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "CUDA in use": torch.cuda.is_initialized(),
        "environment": dict(os.environ),
        "working folder": os.getcwd(),
        "pyplot": "matplotlib.pyplot" in sys.modules,
    }

found = {}
for room in sys.argv[1:]:
    before = state()
    importlib.import_module("kit." + room)
    after = state()
    found[room] = [name for name in before if before[name] != after[name]]
print(json.dumps({room: changed for room, changed in found.items() if changed}))
"""


def test_importing_changes_nothing():
    done = subprocess.run(
        [sys.executable, "-c", WATCH, *ROOMS], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    *said, changed = done.stdout.splitlines()
    assert not said, f"importing kit/ prints: {said}"
    assert json.loads(changed) == {}, "nothing may happen at import; move it into a function"
