"""Imports between the rooms of kit/ point one way, and importing changes nothing."""

import ast
import graphlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "kit").rglob("*.py"))
OWN = [path for path in FILES if path.name not in ("__init__.py", "__main__.py")]
MODULES = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in OWN]

# {room: the rooms it may import}. A file that wants more is either in the wrong room or should be
# given the thing as an argument, as the training loop is given its batches.
ALLOWED = {
    "base": set(),
    "streams": {"base"},
    "text": {"base", "streams"},
    "audio": {"base", "streams", "text"},
    "dataset": {"base", "streams", "text", "audio"},
    "model": {"base"},
    "batches": {"base", "text", "audio", "dataset", "model"},
    "training": {"base", "model"},
    "tuning": {"base", "model", "batches", "training"},
    "inference": {"base", "text", "audio", "dataset", "batches", "model"},
    "notebook": {"base", "training", "tuning"},
}
ALLOWED["recipes"] = set(ALLOWED)  # the wiring; of the core nothing may import it
ALLOWED["extras"] = set(ALLOWED)  # no room of the core may name one of them
EXTRAS = sorted(path.parent.name for path in (ROOT / "kit" / "extras").glob("*/__init__.py"))
BUILT_ON = {"indextts2": "xtts_v2", "long_recordings": "whisper"}  # an extra that needs another
DRAWING = {"matplotlib", "ipywidgets", "IPython"}  # only the room notebook may import these


def imported(path: Path, top_level: bool = False) -> set[str]:
    """Modules that the file at `path` imports, anywhere in it, functions and `try` included."""
    tree, modules = ast.parse(path.read_text(encoding="utf-8")), set()
    for node in tree.body if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: write imports in full, from kit.room.file"
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / "kit")))
def test_arrows_point_one_way(path):
    room, *parts = path.relative_to(ROOT / "kit").parts
    modules = imported(path)
    if room == "settings.py":
        assert all(name.startswith("kit.base.") for name in modules if name.startswith("kit."))
    if not parts:  # kit/__init__.py and what runs as `python -m kit`
        return
    assert room in ALLOWED, f"kit/{room}/ is a new room: say in ALLOWED what it may import"
    rooms = {name.split(".")[1] for name in modules if name.startswith("kit.")} - {room}
    back = rooms - ALLOWED[room] - ({"settings"} if room != "base" else set())
    fix = "take what is needed as an argument, or let a recipe do the wiring"
    assert not back, f"{path} imports {back}, its room only {ALLOWED[room]}: {fix}"
    drawing = {name.split(".")[0] for name in modules} & DRAWING
    assert not drawing or room == "notebook", f"{path} imports {drawing}: only notebook may"


def test_no_cycles_rooms_are_docstrings_and_torchaudio_is_imported_in_one_place():
    graphlib.TopologicalSorter(ALLOWED).prepare()  # raises CycleError
    names = {str(path.relative_to(ROOT))[:-3].replace("/", "."): path for path in FILES}
    files = {name: set() for name in names}
    for name, path in names.items():
        for module in imported(path):
            known = module if module in names else module.rpartition(".")[0]
            files[name] |= {known} & set(names)
    graphlib.TopologicalSorter(files).prepare()
    for path in (ROOT / "kit").rglob("__init__.py"):
        docstring, *rest = ast.parse(path.read_text(encoding="utf-8")).body
        assert isinstance(docstring, ast.Expr), f"{path}: say what the room does"
        names = [ast.unparse(each.targets[0]) for each in rest if isinstance(each, ast.Assign)]
        allowed = ["__version__"] if path.parent == ROOT / "kit" else []
        if path.parent.parent == ROOT / "kit" / "extras":
            allowed = [name for name in names if name.isupper()]  # what it offers
        assert len(rest) == len(names) and names == allowed, f"{path}: a docstring only"
    roots = {path: {name.split(".")[0] for name in imported(path)} for path in FILES}
    assert [path.name for path, names in roots.items() if "torchaudio" in names] == ["clip.py"]


def test_the_core_names_no_extra():
    for path in FILES:
        names = re.findall(r"kit\.extras\.\w+", path.read_text(encoding="utf-8"))
        is_extra = "extras" in path.parts
        assert is_extra or not names, f"{path} names {names}: ask kit.base.extras for it"


WITHOUT = """
import importlib, sys
from kit.base import extras

class Deleted:
    def find_spec(self, name, path, target=None):
        if name.startswith("kit.extras.") and name.split(".")[2] in gone:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Deleted())
whole_folder = extras.pkgutil.iter_modules
for each in sys.argv[1].split():
    gone = each.split("+")
    extras.pkgutil.iter_modules = lambda path: [e for e in whole_folder(path) if e.name not in gone]
    for name in [name for name in sys.modules if name.startswith("kit.") and "base" not in name]:
        del sys.modules[name]
    for module in sys.argv[2:]:
        if not any(f".extras.{extra}" in module for extra in gone):
            importlib.import_module(module)
    for what in ("CODECS", "FRONT_ENDS", "TOKENIZERS", "BASE_MODELS", "SEGMENTERS"):
        for name in extras.offered(what):
            extras.load(what, name)
"""


@pytest.mark.long
def test_each_extra_can_be_deleted():
    """The others, and the core, are imported, and what they offer is there."""
    gone = [[extra, *(built for built, on in BUILT_ON.items() if on == extra)] for extra in EXTRAS]
    each = " ".join("+".join(names) for names in [*gone, EXTRAS])
    command = [sys.executable, "-c", WITHOUT, each, *MODULES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


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
        "TF32 of convolutions": torch.backends.cudnn.allow_tf32,
        "cuDNN attention": torch.backends.cuda.cudnn_sdp_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "CUDA in use": torch.cuda.is_initialized(),
        "environment": dict(os.environ),
        "working folder": os.getcwd(),
        "pyplot": "matplotlib.pyplot" in sys.modules,
    }

found = {}
for module in sys.argv[1:]:
    before = state()
    importlib.import_module(module)
    after = state()
    found[module] = [name for name in before if before[name] != after[name]]
print(json.dumps({module: changed for module, changed in found.items() if changed}))
"""


@pytest.mark.long
def test_importing_changes_nothing():
    command = [sys.executable, "-c", WATCH, *MODULES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    *said, changed = done.stdout.splitlines()
    assert not said, f"importing kit/ prints: {said}"
    assert json.loads(changed) == {}, "nothing may happen at import; move it into a function"


# What is imported, and what that must not load: a process that speaks the corpus, of which there
# are dozens, would take seconds for torch.
LEAVES_OUT = {
    "kit.training.trainer, kit.tuning.measure": {"soundfile", "torchaudio", *DRAWING},
    "kit.recipes.open_run": {"matplotlib", "ipywidgets", "kit.model", "kit.inference"},
    "kit.recipes.train": {
        "kit.recipes.benchmark",
        "kit.recipes.panel",
        "kit.tuning.choose",
        "kit.tuning.measure",
        "ipywidgets",
        "matplotlib",
    },
    "kit.settings, kit.dataset.synthetic": {"torch"},
}


@pytest.mark.parametrize("modules", LEAVES_OUT)
def test_what_a_process_does_not_need_is_not_loaded(modules):
    code = f"import sys, {modules}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not set(done.stdout.split()) & LEAVES_OUT[modules]
