"""What the benchmarks share: contestants in turns, rows of figures, a table and a JSON file.

A row has "row", "value", "unit", "peer", "peer_value", "ratio" and, of `run_parts`, "where". A
ratio above 1 means that the kit is better; what failed has no figures, but a "note".
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

from kit.base.files import write_atomic
from kit.base.hardware import choose_precision, cpu_name, detect


def result(row: str, value, unit="", peer="", peer_value=None, ratio=None, **more) -> dict:
    keys = ("row", "value", "unit", "peer", "peer_value", "ratio")
    return dict(zip(keys, (row, value, unit, peer, peer_value, ratio))) | more


def native(names: Iterable[str]) -> list[str]:
    """Of formats, or rows that begin with one, those that this CPU has; says what it emulates."""
    precision = choose_precision(dataclasses.replace(detect(), device="cpu"))
    if precision.value == "bf16":
        return list(names)
    print(f"bf16 and fp16 are left out: {precision.reason}", flush=True)
    return [name for name in names if not name.startswith(("bf16", "fp16"))]


def table(rows: list[dict]) -> None:
    number = lambda x: "-" if x is None else f"{x:,.4g}"  # noqa: E731
    print(f"\n{'row':<76} {'kit':>8} {'peer':>8} {'ratio':>6}  unit, peer")
    for r in rows:
        figures = f"{number(r['value']):>8} {number(r['peer_value']):>8} {number(r['ratio']):>6.5}"
        print(f"{r['row']:<76} {figures}  {r.get('note') or r['unit'] + ', ' + r['peer']}")


def record(rows: list[dict], path: Path, part: str = "") -> None:
    """Put `rows` into the file, in the place of earlier ones of the same name, or a failed part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = {(r["row"], r["peer"]) for r in rows}
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    kept = [r for r in known if (r["row"], r["peer"]) not in names and r["row"] != part]
    write_atomic(path, json.dumps(kept + rows, indent=1, ensure_ascii=False))


def take_turns(contestants: dict[str, Callable], rounds: int, warm_up: bool = True) -> dict:
    """Return what each contestant returns, round by round; a round to warm up does not count."""
    values = {name: [] for name in contestants}
    for _ in range(rounds + warm_up):
        for name, call in contestants.items():
            values[name].append(call())
    return {name: of_rounds[warm_up:] for name, of_rounds in values.items()}


def step_seconds(steps: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every round but a first one; each step returns its loss."""

    def timed(name: str) -> float:
        started_s = time.perf_counter()
        loss = steps[name]()
        assert math.isfinite(loss), f"{name}: loss {loss}"
        return time.perf_counter() - started_s

    results = take_turns({name: functools.partial(timed, name) for name in steps}, rounds)
    for name, values in results.items():
        middle, best = 1000 * statistics.median(values), 1000 * min(values)
        print(f"  {name}: median {middle:,.0f} ms, best {best:,.0f} ms", flush=True)
    return results


def against(row: str, kit: list[float], peer: str, other: list[float], unit="ms", **more) -> dict:
    """A row of milliseconds from the seconds of either side's rounds."""
    ratio = statistics.median(b / a for a, b in zip(kit, other))
    ms, peer_ms = (1000 * statistics.median(results) for results in (kit, other))
    return result(row, ms, unit, peer, peer_ms, ratio, **more)


def apart(function: str, *arguments, **environment: str):
    """What "module.function" of this folder or tests/ returns in a Python of its own, by JSON.

    Paths become text on the way there and back.
    """
    module, name = function.split(".")
    here = Path(__file__).resolve().parent
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (here, here.parent, here.parent.parent)))
    call = f"m.{name}(*json.loads(sys.argv[1]))"
    code = f"import json, sys, {module} as m; print(json.dumps({call}, default=str))"
    command = [sys.executable, "-c", code, json.dumps(arguments, default=str)]
    env = os.environ | environment
    run = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def resident_peak_mb() -> float:
    """Of this process so far. getrusage's is of the process that started it, if that was larger."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def where() -> str:
    """The machine and the versions a figure belongs to, and whether others kept it busy.

    Two threads wait for each other at every layer: one busy core makes steps many times slower.
    """
    load = f"{torch.get_num_threads()} threads; {psutil.cpu_percent(1):.0f} % of the cores busy"
    versions = []
    for name in ("torch", "transformers", "coqui-tts"):
        with contextlib.suppress(PackageNotFoundError):
            versions.append(f"{name} {version(name)}")
    return f"{cpu_name()}, {load}; Python {platform.python_version()}, {', '.join(versions)}"


def attempt(part: str, rows: Callable[[], list[dict]], requirements: str) -> list[dict]:
    """The rows of `part`; where it fails, one row that says why."""
    print(f"{part}:", flush=True)
    try:
        return rows()
    except Exception as error:  # a missing peer must not cost the other rows
        first_line = (str(error).splitlines() or [""])[0]
        fix = f" (tests/bench/{requirements})" if isinstance(error, ImportError) else ""
        return [result(part, None, note=f"{type(error).__name__}: {first_line}{fix}")]


def run_parts(parts: dict[str, Callable[[], list[dict]]], path: Path, requirements: str) -> None:
    """Measure each part, record its rows in the file at `path`, and print all of them."""
    done = []
    for part, rows in parts.items():
        place = where()
        results = [row | {"where": place} for row in attempt(part, rows, requirements)]
        record(results, path, part)
        done += results
    table(done)
    print(f"\n{where()}\nwritten: {path}")
