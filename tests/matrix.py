"""Every notebook with every preset, use and switch, at tiny sizes, as papermill runs it.

test_matrix.py runs a row; `make test-matrix` runs all there are, as many at a time as there are
cores, prints a line for each and writes runs/bench/matrix.json. A row's preset keeps every choice
of its own (schedule, optimizer, gate, dropout, formats ...); its sizes are tiny.yaml's.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml
from xtts_texts import write_readers_release

from kit.base.config import CONFIGS, load_preset, merge
from kit.base.files import write_atomic
from kit.training.switches import LABELS

ROOT = Path(__file__).resolve().parent.parent
ALL = tuple(sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb")))
FINE_TUNING = "07_finetune_xtts"
WITH_DATA = ("00_setup", "02_train", "03_evaluate_ema", "04_inference")  # where 01 has run before
PRESETS = tuple(sorted(path.stem for path in CONFIGS.glob("*.yaml")))
OVERLAYS = tuple(sorted(path.stem for path in (CONFIGS / "use").glob("*.yaml")))
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


def run_notebook(row: Row, name: str, runs: Path) -> None:
    """Run a notebook in the run `row.name`. Raises RuntimeError with the end of what it says."""
    preset = runs / "presets" / f"{row.name}.yaml"
    write_atomic(preset, yaml.safe_dump(shrunk(row)))
    environment = dict(os.environ, KIT_RUNS=str(runs), KIT_RUN=row.name, KIT_PRESET=str(preset))
    parameters = {"USE": row.use} if name == "00_setup" else {}
    if name == FINE_TUNING:  # a run of its own, from a tiny release
        release = runs / "releases" / row.name
        write_readers_release(release)
        parameters = {"RUN": f"{row.name}-tuned", "BASE_MODEL": release, "ACCEPT_LICENSE": "CPML"}
    words = [word for key, value in parameters.items() for word in ("-r", key, str(value))]
    command = [sys.executable, "-m", "papermill", "--kernel", "python3", "--no-progress-bar"]
    book = ROOT / "notebooks" / f"{name}.ipynb"
    command += ["--cwd", str(book.parent), *words, str(book), os.devnull]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr.strip()[-300:]}")


def data_of(preset: str, runs: Path) -> Path:
    """The folder of a run in which 01 has run with `preset`, made when first asked for."""
    row = Row(preset=preset, use="data")
    if not (runs / row.name / "report.json").is_file():
        run_notebook(row, "01_data_prep", runs)
    return runs / row.name


def run_row(row: Row, runs: Path) -> dict:
    """Run the row's notebooks in runs/<its name>; a line of the table with the seconds each took.

    Its `error` is "" where the row has ended.
    """
    seconds = {}
    error = ""
    try:
        if "01_data_prep" not in row.notebooks:  # the corpus stays where it is
            data = data_of(row.preset, runs)
            ignored = shutil.ignore_patterns("corpus", "preset")
            own = shutil.copytree(data, runs / row.name, ignore=ignored)
            (own / "corpus").symlink_to(data / "corpus", target_is_directory=True)
        for name in row.notebooks:
            began_s = time.perf_counter()
            run_notebook(row, name, runs)
            seconds[name] = round(time.perf_counter() - began_s, 1)
    except RuntimeError as failure:
        error = str(failure)
    named = {name: getattr(row, name) for name in ("name", "preset", "use", "switch", "on")}
    return dict(named, ended=not error, seconds=seconds, error=error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    options = parser.parse_args()
    rows = [row for row in every_row() if options.only in row.name]
    os.environ["OMP_NUM_THREADS"] = "1"  # as many rows as cores run at a time
    done = []
    with tempfile.TemporaryDirectory(prefix="kit-matrix-") as folder:
        runs = Path(folder)
        with_data = {row.preset for row in rows if "01_data_prep" not in row.notebooks}
        for preset in with_data:  # or two rows of one would both make its data
            with contextlib.suppress(RuntimeError):  # it fails again in each row, which says why
                data_of(preset, runs)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for row in pool.map(lambda row: run_row(row, runs), rows):
                done.append(row)
                took_s = sum(row["seconds"].values())
                how = row["error"] or "ended"
                print(
                    f"{len(done):4}/{len(rows)}  {row['name']:40} {took_s:6.1f} s  {how}",
                    flush=True,
                )
                table = json.dumps({"rows": done}, indent=1)
                write_atomic(ROOT / "runs" / "bench" / "matrix.json", table)
                for made in (row["name"], f"{row['name']}-tuned", f"releases/{row['name']}"):
                    shutil.rmtree(runs / made, ignore_errors=True)
    failed = sum(not row["ended"] for row in done)
    print(f"{len(done) - failed} of {len(done)} rows ended without an exception")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
