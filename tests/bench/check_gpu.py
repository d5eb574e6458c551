"""Everything that only a GPU can show, in a quarter of an hour: `make check-gpu`.

Parts run one after another, each in a process of its own: one that fails, crashes or runs out of
time is a row with its reason, and the rest still runs. A part that ends early leaves its time to
the next ones. What was compiled is kept beside the table, for the next time.

Every row is in runs/bench/gpu.json as soon as it is measured: {"machine": {...}, "rows": [{"row",
"value", "unit", "peer", "peer_value", "ratio", "part", "status", ...}]}. A ratio above 1 means
better; a status is ok, off, failed or skipped. `--only` replaces the rows of the parts it runs and
no others. tests/bench/gpu_page.py writes the table into docs/measurements.md.

Without a GPU the same lines run at tiny sizes on the CPU, into gpu-pretended.json: that shows that
the check works. It says nothing about any GPU.
"""

import argparse
import datetime
import functools
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import psutil
import torch
from gpu_setting import Setting, note_row
from rows import table

from kit.base.files import write_atomic
from kit.base.hardware import allow_expandable_segments, detect, set_cuda_defaults, versions
from kit.base.run import git_state

LOOK_S = 0.5  # between two looks at what the parts have measured


# Each part is a generator of rows, in a module that is imported in the part's own process.
PARTS = {
    "ranks": "gpu_ranks:ranks_rows",
    "machine": "gpu_checks:machine_rows",
    "kernels": "gpu_training:kernel_rows",
    "kernels of decoding": "gpu_speaking:kernel_rows",
    "passes": "gpu_training:pass_rows",
    "compiled layer": "gpu_speaking:layer_rows",
    "t4": "gpu_t4:t4_rows",
    "resume": "gpu_checks:resume_rows",
    "variants": "gpu_checks:variant_rows",
    "switches": "gpu_training:switch_rows",
    "decoding": "gpu_speaking:decoding_rows",
    "a real run": "gpu_training:run_rows",
    "memory": "gpu_checks:memory_rows",
    "attention": "gpu_checks:attention_rows",
    "parity": "gpu_checks:parity_rows",
    "recovery": "gpu_checks:recovery_rows",
    "tests": "gpu_checks:test_rows",
}
# Seconds for each part; more than one GPU needs more for `ranks`. A GPU that is lent for minutes
# runs `decide`, then `confirm`: within 275 s each, everything that is decided by these figures.
# Your own runs all three.
COMMANDS = {
    "decide": {
        "ranks": 5,
        "machine": 15,
        "kernels": 20,
        "kernels of decoding": 15,
        "passes": 70,
        "compiled layer": 60,
        "t4": 35,
        "resume": 25,
        "variants": 25,
    },
    "confirm": {"a real run": 145, "decoding": 95, "memory": 30},
    "rest": {
        "switches": 65,
        "attention": 35,
        "parity": 60,
        "recovery": 30,
        "tests": 90,
    },
}
PRETENDED = {"steps": 6, "codes": 6}


# --- a part, in a process of its own --------------------------------------------------------


def part_rows(part: str, setting: Setting) -> Iterator[dict]:
    """The rows of a part; where it fails, one more that says why."""
    try:
        module, name = PARTS[part].split(":")
        for row in getattr(importlib.import_module(module), name)(setting):
            yield row | {"part": part}
    except Exception as error:  # a failing part is a row, and the others still run
        traceback.print_exc()
        first_line = (str(error).strip().splitlines() or [""])[0]
        reason = f"{type(error).__name__}: {first_line}"[:300]
        yield note_row(part, reason, "failed") | {"part": part}


def run_part(part: str, setting: Setting, path: Path, caches: Path) -> None:
    """Measure a part; every row is on the disk as soon as it is known."""
    set_cuda_defaults()
    cache = caches / f"compiled-{part.replace(' ', '-')}"
    if cache.exists():
        torch.compiler.load_cache_artifacts(cache.read_bytes())
    rows = []
    for row in part_rows(part, setting):
        rows.append(row)
        write_atomic(path, json.dumps(rows, ensure_ascii=False))
        print(f"  {row['row']}: {row.get('note') or row['value']}", flush=True)
    compiled = torch.compiler.save_cache_artifacts()
    if compiled:
        write_atomic(cache, compiled[0])


def start_part(part: str, path: Path, caches: Path) -> subprocess.Popen:
    command = [sys.executable, __file__, "--part", part, "--rows", str(path)]
    return subprocess.Popen([*command, "--folder", str(caches)])


def stop(process: subprocess.Popen) -> None:
    """End a process and those it started."""
    for child in psutil.Process(process.pid).children(recursive=True):
        child.kill()
    process.kill()
    process.wait()


# --- all parts ------------------------------------------------------------------------------


class Table:
    """The file with all rows: those of earlier runs stay until their part runs again."""

    def __init__(self, path: Path, machine: dict):
        self.path = path
        self.machine = machine
        self.rows: dict[str, list[dict]] = {}  # by part
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if known and known["machine"]["name"] != machine["name"]:
            raise SystemExit(
                f"{path} is of another device, {known['machine']['name']}. Move it away, or name "
                "another folder with --folder."
            )
        for row in known.get("rows", []):
            self.rows.setdefault(row["part"], []).append(row)

    def put(self, part: str, rows: list[dict]) -> None:
        stamp = {name: self.machine[name] for name in ("commit", "date")}
        self.rows[part] = [row | stamp for row in rows]
        in_order = [row for part in PARTS for row in self.rows.get(part, [])]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = {"machine": self.machine, "rows": in_order}
        write_atomic(self.path, json.dumps(whole, indent=1, ensure_ascii=False))


def measure(part: str, limit_s: float, measured: Table) -> None:
    """Run a part; what is not done after `limit_s` is stopped."""
    print(f"{part} (up to {limit_s:.0f} s):", flush=True)
    until_s = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        process = start_part(part, path, measured.path.parent)
        reason = ""
        while process.poll() is None and not reason:
            time.sleep(LOOK_S)
            if path.exists():
                measured.put(part, json.loads(path.read_text(encoding="utf-8")))
            if time.monotonic() > until_s and process.poll() is None:
                stop(process)
                reason = f"stopped after {limit_s:.0f} s"
        if process.returncode and not reason:
            reason = f"its process ended with code {process.returncode}"
        rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        if reason:
            rows.append(note_row(part, reason, "failed") | {"part": part})
        measured.put(part, rows)


def measure_all(limits_s: dict[str, float], whole_s: float, measured: Table) -> None:
    """All parts; each may use its own time and what those before it have left."""
    started_s = time.monotonic()
    planned_s = 0.0
    for part, limit_s in limits_s.items():
        planned_s += limit_s
        left_s = min(planned_s, whole_s) - (time.monotonic() - started_s)
        if left_s >= 5:
            measure(part, left_s, measured)
        elif part not in measured.rows:
            reason = "no time was left: run it alone with --only"
            measured.put(part, [note_row(part, reason) | {"part": part}])


# --- the machine ----------------------------------------------------------------------------


def describe_machine(setting: Setting) -> dict:
    """What the figures depend on: card, driver, clocks, versions, commit, command."""
    packages = ("triton", "transformers", "bitsandbytes", "numpy")
    machine = {
        "name": setting.hw.name,
        "gpu": not setting.pretended,
        "commit": os.environ.get("KIT_COMMIT") or git_state(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "cores": setting.hw.cores,
        "memory_bytes": setting.hw.memory_bytes,
        **versions(),
    }
    machine |= {name: version(name) for name in packages if importlib.util.find_spec(name)}
    if setting.pretended:
        return machine
    machine["capability"] = list(setting.hw.capability)
    machine["cuda"] = torch.version.cuda
    machine["cudnn"] = torch.backends.cudnn.version()
    return machine | nvidia_smi()


def nvidia_smi() -> dict:
    """Driver, power limit and highest clocks, as the driver states them; {} where it hides them."""
    names = ("driver_version", "power.limit", "clocks.max.sm", "clocks.max.mem")
    query = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {}
    values = [value.strip() for value in output.splitlines()[0].split(",")]
    return dict(zip(names, values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=[*COMMANDS, "all"], nargs="?", default="all")
    parser.add_argument("--only", choices=PARTS, nargs="*", help="these parts alone")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"))
    parser.add_argument("--limit-s", type=float, default=900, help="seconds for all of it")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    allow_expandable_segments()
    setting = Setting(hw=detect())
    if setting.pretended:
        setting = Setting(hw=setting.hw, **PRETENDED)
    if options.part:
        run_part(options.part, setting, options.rows, options.folder)
        return
    if setting.pretended:
        print("torch sees no GPU here: this checks the check, and says nothing about a GPU.")
    path = options.folder / ("gpu-pretended.json" if setting.pretended else "gpu.json")
    measured = Table(path, describe_machine(setting))
    print(json.dumps(measured.machine), flush=True)
    limits_s = COMMANDS.get(options.command) or functools.reduce(dict.__or__, COMMANDS.values())
    if options.only or setting.pretended:  # the limits above are a GPU's
        parts = options.only or list(limits_s)
        limits_s = dict.fromkeys(parts, options.limit_s / len(parts))
    measure_all(limits_s, options.limit_s, measured)
    rows = [row for part in limits_s for row in measured.rows.get(part, [])]
    for row in rows:
        status = row.get("status") or "ok"
        words = row.get("note") or f"{row['unit']}, {row['peer']}"
        row["note"] = words if status == "ok" else f"{status}: {words}"
    table(rows)
    statuses = [row.get("status") for row in rows]
    print(f"\n{len(rows)} rows, {statuses.count('off')} off, {statuses.count('failed')} failed")
    print(path)


if __name__ == "__main__":
    main()
