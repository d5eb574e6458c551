"""Everything that only a GPU can show, in one command of ten minutes: `make check-gpu`.

Switches at the preset's and at XTTS-v2's size, numbers in half precision, attention's kernel, the
memory plan, memory that runs out, two processes where there are two GPUs, copies, decoding by CUDA
graphs, the codec, the monitor and going on from a checkpoint. Each part runs in a process of its
own with a limit: one that fails, crashes or takes too long is a row with its reason, and the rest
goes on. After every part the table so far lies in runs/bench/gpu.json: {"row", "value", "unit",
"peer", "peer_value", "ratio", "part", "status", "where"}; a ratio above 1 means better, a status is
ok, off, failed or skipped.

Without a GPU the same lines run at tiny sizes on the CPU, into gpu-pretended.json: that shows that
the check works, and nothing of any GPU.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from gpu_ranks import ranks_rows
from gpu_setting import Setting, told
from gpu_speaking import (
    codec_rows,
    device_words,
    large_decoding_rows,
    monitor_rows,
    recognizer_rows,
    small_decoding_rows,
    test_rows,
)
from gpu_training import (
    attention_rows,
    copy_rows,
    memory_rows,
    parity_rows,
    preset_switch_rows,
    recovery_rows,
    resume_rows,
    xtts_switch_rows,
)
from rows import table

from kit.base.files import write_atomic
from kit.base.hardware import detect

WHOLE_S = 590
# Rows of each part, and seconds it may take; what matters most comes first.
PARTS: dict[str, tuple[Callable[[Setting], Iterator[dict]], int]] = {
    "monitor": (monitor_rows, 30),
    "attention": (attention_rows, 40),
    "parity": (parity_rows, 60),
    "memory": (memory_rows, 60),
    "recovery": (recovery_rows, 40),
    "resume": (resume_rows, 60),
    "ranks": (ranks_rows, 90),
    "codec": (codec_rows, 30),
    "recogniser": (recognizer_rows, 30),
    "copies": (copy_rows, 30),
    "decoding, small": (small_decoding_rows, 80),
    "decoding, XTTS-v2": (large_decoding_rows, 150),
    "switches, XTTS-v2": (xtts_switch_rows, 220),
    "switches, preset": (preset_switch_rows, 150),
    "tests": (test_rows, 100),
}
PRETENDED = {"steps": 6, "codes": 6}


def attempt(part: str, setting: Setting) -> Iterator[dict]:
    """The rows of a part; where it fails, one more that says why."""
    try:
        for row in PARTS[part][0](setting):
            yield row | {"part": part}
    except Exception as error:  # one part must not cost the others
        first = (str(error).strip().splitlines() or [""])[0]
        yield told(part, f"{type(error).__name__}: {first}"[:300], "failed") | {"part": part}


def in_a_process(part: str, limit_s: float, options: list[str]) -> list[dict]:
    """The rows that a process of its own found until it ended, or until its limit."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [sys.executable, __file__, *options, "--part", part, "--rows", str(path)]
        process = subprocess.Popen(command)
        try:
            process.wait(limit_s)
            ended = f"its process ended with code {process.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after its {limit_s:.0f} s"
            end(process)
        rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    if process.returncode:
        rows.append(told(part, ended, "failed") | {"part": part})
    return rows


def end(process: subprocess.Popen) -> None:
    """End a process and those it started."""
    for child in psutil.Process(process.pid).children(recursive=True):
        child.kill()
    process.kill()
    process.wait()


def write(rows: list[dict], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(rows, indent=1, ensure_ascii=False))


def run_part(part: str, setting: Setting, path: Path) -> None:
    """The child's side: every row is on the disk as soon as it is known."""
    rows = []
    for row in attempt(part, setting):
        rows.append(row)
        write(rows, path)
        print(f"  {row['row']}: {row.get('note') or row['value']}", flush=True)


def run_all(parts: list[str], options: list[str], where: str, path: Path) -> list[dict]:
    """All parts one after another, within ten minutes."""
    began_s, rows = time.monotonic(), []
    for part in parts:
        left_s = WHOLE_S - (time.monotonic() - began_s)
        print(f"{part}:", flush=True)
        if left_s < 10:
            found = [told(part, "ten minutes are over: run it alone with --only") | {"part": part}]
        else:
            found = in_a_process(part, min(left_s, PARTS[part][1]), options)
        rows += [row | {"where": where} for row in found]
        write(rows, path)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, nargs="*", default=list(PARTS))
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"))
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    setting = Setting(hw=detect())
    if setting.pretended:
        setting = Setting(hw=setting.hw, **PRETENDED)
    if options.part:
        run_part(options.part, setting, options.rows)
        return
    where = device_words(setting)
    print(where)
    if setting.pretended:
        print("torch sees no GPU here: what follows checks the check, and says nothing of a GPU.")
    path = options.folder / ("gpu-pretended.json" if setting.pretended else "gpu.json")
    rows = run_all(options.only, [], where, path)
    table([row | {"note": noted(row)} for row in rows])
    counts = {status: sum(r.get("status") == status for r in rows) for status in ("off", "failed")}
    print(f"\n{where}\n{len(rows)} rows, {counts['off']} off, {counts['failed']} failed: {path}")


def noted(row: dict) -> str:
    """What the table says behind the figures."""
    if row.get("note"):
        return f"{row.get('status', '')}: {row['note']}"
    words = f"{row['unit']}, {row['peer']}"
    return f"{row['status']}: {words}" if row.get("status") not in (None, "ok") else words


if __name__ == "__main__":
    main()
