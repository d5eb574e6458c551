"""The notebooks' own cells, in their order, at tiny sizes: for any preset, use and switch.

test_matrix.py runs a row or two; `make test-matrix` runs all there are, as many at a time as there
are cores, prints a line for each and writes runs/bench/matrix.json. A row's preset keeps every
choice of its own (schedule, optimizer, gate, dropout, formats ...); its sizes are tiny.yaml's.
"""

import argparse
import ast
import contextlib
import dataclasses
import io
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partialmethod
from pathlib import Path
from unittest.mock import patch

import nbformat
import torch
import yaml
from IPython.core.inputtransformer2 import TransformerManager
from matplotlib.figure import Figure
from xtts_texts import write_readers_release

from kit.base.config import CONFIGS, load_preset, merge
from kit.base.files import write_atomic
from kit.recipes.start import start
from kit.training.switches import LABELS, set_process

ROOT = Path(__file__).resolve().parent.parent
ALL = tuple(sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb")))
FINE_TUNING = "07_finetune_xtts"
WITH_DATA = ("00_setup", "02_train", "03_evaluate_ema", "04_inference")  # where 01 has run before
PRESETS = tuple(sorted(path.stem for path in CONFIGS.glob("*.yaml")))
OVERLAYS = tuple(sorted(path.stem for path in (CONFIGS / "use").glob("*.yaml")))
ROWS_A_PROCESS = 8  # compiled code stays loaded: after ten rows a process holds 4 GB
# Smaller yet than tiny.yaml: what takes seconds there and shows no more than this does.
SMALLER = {
    "corpus": {"utterances": 60, "held_out": 6, "unseen": 3, "long": 2, "free_order": 2},
    "codec": {"steps": 8, "sharpen_steps": 2},
    "recordings": {"codec": {"steps": 8}},
    "train": {"max_steps": 6, "warmup_steps": 2, "eval_steps": 3, "save_steps": 2},
    "recognizer": {"steps": 8, "utterances": 40},
    "generate": {"best_of": 2, "max_codes_per_text_id": 0.4},
    "evaluate": {"sentences": 3},
    "infer": {"lengths": [6, 12], "batches": [1, 2], "rows": 2, "sentences": 2},
}

VOCODER = {"vocoder_steps": 4, "vocoder_width": 16, "vocoder_blocks": 1}  # where a preset has one

# The process that trains has the shrunk preset, too: Python runs this as it starts.
IN_TRAINING = """
import sys

if "train" in sys.orig_argv:
    from kit.base import run

    load_preset = run.load_preset
    run.load_preset = lambda name, *folder: load_preset(name, *folder) if folder else {preset!r}
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One combination, and the notebooks to run; `switch` is `on` or off whatever the preset says.

    Without 01 among the notebooks the row starts from the data that another run has made.
    """

    preset: str
    use: str = ""
    switch: str = ""
    on: bool = False
    notebooks: tuple = WITH_DATA

    @property
    def name(self) -> str:
        said = f"{self.switch}-{'on' if self.on else 'off'}" if self.switch else ""
        return "-".join(filter(None, (self.preset, self.use, said)))


def every_row() -> list[Row]:
    """Each preset with each use, all notebooks; each preset with each switch alone, off and on."""
    laid = [(preset, use) for preset in PRESETS for use in ("", *OVERLAYS)]
    rows = [Row(preset=preset, use=use, notebooks=ALL) for preset, use in laid]
    flips = [(name, on) for name in LABELS for on in (False, True)]
    alone = [(preset, *flip) for preset in PRESETS for flip in flips]
    return rows + [Row(preset=preset, switch=name, on=on) for preset, name, on in alone]


def shrunk(row: Row) -> dict:
    """The row's preset with its own choices, tiny sizes, and the row's switch."""
    own = load_preset(row.preset)
    sizes = yaml.safe_load((CONFIGS / "tiny.yaml").read_text(encoding="utf-8"))
    del sizes["extends"]
    small = merge(merge(own, sizes), SMALLER)
    small["infer"]["formats"] = own["infer"]["formats"]
    if own["codec"].get("vocoder_steps"):
        small["codec"] |= VOCODER
    small["train"]["gate_every"] = 3 if own["train"].get("gate_every") else 0
    if own["train"].get("num_train_epochs"):  # then steps follow from the data
        small["train"]["min_steps"] = 2
        small["base_model"]["train"] |= {"min_steps": 2, "gate_every": 3, "save_steps": 2}
    passes = own["data"]["effective_batch"] // own["data"]["micro_batch"]
    small["data"]["micro_batch"] = max(1, small["data"]["effective_batch"] // passes)
    if row.switch:
        small["speed"] = small["speed"] | {row.switch: row.on}
    return small


@contextlib.contextmanager
def surroundings(row: Row, runs: Path) -> Iterator[None]:
    """A notebook's: its folder, its environment, its preset; all put back at the end."""
    paths, threads = [*sys.path], torch.get_num_threads()
    preset = shrunk(row)
    site = runs / f"{row.name}-site"
    site.mkdir(parents=True, exist_ok=True)
    write_atomic(site / "sitecustomize.py", IN_TRAINING.format(preset=preset))
    env = {"KIT_RUNS": str(runs), "KIT_RUN": row.name, "KIT_PRESET": row.preset}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))

    def own_preset(name: str, *folder: Path) -> dict:
        return load_preset(name, *folder) if folder else preset

    with (
        patch.dict(os.environ, env),
        patch("kit.base.run.load_preset", own_preset),
        patch.object(Figure, "savefig", partialmethod(Figure.savefig, dpi=40)),  # not looked at
        contextlib.chdir(ROOT / "notebooks"),
    ):
        try:
            yield
        finally:
            sys.path[:] = paths
            torch.set_num_threads(threads)
            set_process(tf32=False, cudnn_benchmark=False)


def run_cells(name: str, **parameters) -> dict:
    """Execute the code cells of notebook `name` with `parameters` changed; the names they left."""
    book = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", nbformat.NO_CONVERT)
    names = {"__name__": "__notebook__", "display": draw, "start": start}
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    for cell in code[1:]:  # the first finds the kit, which is loaded here
        try:
            run_cell(TransformerManager().transform_cell(cell.source), f"{name}[{cell.id}]", names)
        except BaseException as error:
            error.add_note(f"In cell {cell.id} of {name}.")
            raise
        if "parameters" in cell.metadata.get("tags", []):
            names.update(parameters)
    return names


def run_cell(source: str, where: str, names: dict) -> None:
    """Execute `source` with `names`; print and draw the value of an expression at its end."""
    tree = ast.parse(source)
    ends_with_value = tree.body and isinstance(tree.body[-1], ast.Expr)
    last = ast.Expression(tree.body.pop().value) if ends_with_value else None
    exec(compile(tree, where, "exec"), names)
    draw(eval(compile(last, where, "eval"), names) if last else None)


def draw(*values) -> None:
    """Print and draw `values`, as IPython's `display`."""
    for value in values:
        if value is not None:
            print(value)
            getattr(value, "_repr_html_", str)()


def parameters(row: Row, name: str, runs: Path) -> dict:
    """What a row says in the notebook `name`: 07 has a run of its own, from a tiny release."""
    if name == "00_setup":
        return {"USE": row.use}
    if name != FINE_TUNING:
        return {}
    release = runs / "releases" / row.name
    if not release.is_dir():
        write_readers_release(release)
    return {"RUN": f"{row.name}-tuned", "BASE_MODEL": str(release), "ACCEPT_LICENSE": "CPML"}


def data_of(preset: str, runs: Path) -> Path:
    """The folder of a run in which 01 has run with `preset`, made when first asked for."""
    row = Row(preset=preset, switch="data")
    if not (runs / row.name / "report.json").is_file():
        with surroundings(dataclasses.replace(row, switch=""), runs):
            os.environ["KIT_RUN"] = row.name
            run_cells("01_data_prep")
    return runs / row.name


def run_row(row: Row, runs: Path, data: Path | None = None) -> dict[str, float]:
    """Run the row's notebooks in runs/<its name>; the seconds each took.

    `data` is a run's folder to begin with, whatever its preset was; its corpus stays where it is.
    """
    if data:
        ignored = shutil.ignore_patterns("corpus", "preset")
        own = shutil.copytree(data, runs / row.name, ignore=ignored)
        (own / "corpus").symlink_to(data / "corpus", target_is_directory=True)
    seconds = {}
    with surroundings(row, runs):
        for name in row.notebooks:
            began_s = time.perf_counter()
            run_cells(name, **parameters(row, name, runs))
            seconds[name] = round(time.perf_counter() - began_s, 1)
    return seconds


def outcome(row: Row, runs: Path) -> dict:
    """Run a row; a line of the table, whose `error` is "" where the row has ended."""
    said, seconds, why = io.StringIO(), {}, ""
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            data = None if "01_data_prep" in row.notebooks else data_of(row.preset, runs)
            seconds = run_row(row, runs, data)
    except Exception as error:
        first = str(error).strip().split("\n")[0][:300]
        why = f"{type(error).__name__}: {first} {' '.join(getattr(error, '__notes__', []))}"
    for made in (row.name, f"{row.name}-tuned", f"releases/{row.name}"):
        shutil.rmtree(runs / made, ignore_errors=True)
    named = {name: getattr(row, name) for name in ("name", "preset", "use", "switch", "on")}
    return dict(named, ended=not why, seconds=seconds, error=why)


def outcomes(rows: list[Row], runs: Path, jobs: int) -> Iterator[dict]:
    """Each row's `outcome`, as it ends; `jobs` processes with a thread each run them."""
    # Two rows of one preset would both make its data: it is made before the first of them.
    for preset in {row.preset for row in rows if "01_data_prep" not in row.notebooks}:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Exception):
            data_of(preset, runs)  # where it fails, it fails again in each row, which says why
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the processes' libraries as they start
    start = {"mp_context": multiprocessing.get_context("spawn")}
    with ProcessPoolExecutor(jobs, **start, max_tasks_per_child=ROWS_A_PROCESS) as pool:
        for each in as_completed([pool.submit(outcome, row, runs) for row in rows]):
            yield each.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench")
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="rows at a time")
    options = parser.parse_args()
    rows = [row for row in every_row() if options.only in row.name]
    done = []
    with tempfile.TemporaryDirectory(prefix="kit-matrix-") as runs:
        for row in outcomes(rows, Path(runs), options.jobs):
            done.append(row)
            took_s = sum(row["seconds"].values())
            how = row["error"] or "ended"
            print(f"{len(done):4}/{len(rows)}  {row['name']:40} {took_s:6.1f} s  {how}", flush=True)
            write_atomic(options.folder / "matrix.json", json.dumps({"rows": done}, indent=1))
    failed = sum(not row["ended"] for row in done)
    print(f"{len(done) - failed} of {len(done)} rows ended without an exception")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
