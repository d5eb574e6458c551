"""The kit runs on Linux and macOS.

What macOS lacks is tried: a process in which the kit finds a machine without
`os.sched_getaffinity`, without /proc, that starts processes afresh.
"""

import os
import subprocess
import sys

import pytest
from paths import python_path

MAC = """
import multiprocessing, sys, types
from pathlib import Path
def no_proc(path, *args, _exists=Path.exists, **more):
    return not str(path).startswith("/proc") and _exists(path, *args, **more)
Path.exists = no_proc
def hide(module, name):
    others = {key: value for key, value in vars(module.os).items() if key != name}
    module.os = types.SimpleNamespace(**others)
"""

USES = """
import importlib, multiprocessing, pkgutil, shutil
if __name__ == "__main__":
    folder = Path(sys.argv[1])
    import kit
    for found in pkgutil.walk_packages(kit.__path__, "kit."):
        importlib.import_module(found.name)
    hide(sys.modules["kit.base.hardware"], "sched_getaffinity")
    import torch
    from kit.base import hardware
    from kit.dataset import clip_stats as measures
    from kit.streams import formats
    from kit.training import logs
    from kit.settings import TrialConfig
    from kit.tuning import measure, monitor
    from kit.dataset.archive import ArchiveConfig, unpack
    from kit.streams.stream import StreamConfig
    from helpers import CPU, DATA, GPT, TRAIN, dataset, speech, train_in
    assert hardware.detect().cores >= 1 and hardware.cpu_name()
    assert hardware.peak_resident_bytes() > 2**20
    clips = dataset(folder / "clips", "", {f"c{i}": speech(0.2) for i in range(3)})
    paths = sorted(map(str, clips.glob("wavs/*.wav")))
    found = measures.measure_clips(paths, folder / "cache.jsonl", processes=1)
    assert {type(m).__name__ for m in found.values()} == {"ClipMeasure"}
    packed = shutil.make_archive(str(folder / "packed"), "zip", clips)
    assert (unpack(packed, folder / "out", ArchiveConfig()) / "metadata.csv").is_file()
    text = folder / "lines.txt"
    text.write_bytes(b"".join(b"line %d\\n" % i for i in range(100)) + b"\\xff\\xfe bad\\n")
    multiprocessing.set_start_method("spawn", force=True)  # starting processes has set one
    bad = []
    stream = formats.TextLines(text, StreamConfig(shuffle=True), on_bad_record=bad.append)
    assert sorted(stream) == sorted(f"line {i}" for i in range(100))
    assert len(bad) == 1
    assert len(train_in(str(folder / "run"))) == TRAIN.max_steps
    rows = logs.read_log(folder / "run" / "train.jsonl")
    assert min(row["memory_bytes"] for row in rows) > 2**20
    rows = measure.some_rows((4, 10), (8, 20), 16)
    task = measure.Task(model=GPT, train=TRAIN, data=DATA, rows=rows, hw=CPU, threads=1)
    short = TrialConfig(steps=1, warmup_steps=1)
    figures = measure.measure_variant(task, short, ("sdpa",))
    assert figures.get("steps") == 1, figures
    print("all of it ran")
"""


@pytest.mark.long
def test_a_machine_like_a_mac_uses_every_room(tmp_path):
    """The kit alone does not see them: torch and the standard library keep what they need."""
    script = tmp_path / "mac.py"
    script.write_text(MAC + USES, encoding="utf-8")
    command = [sys.executable, str(script), str(tmp_path)]
    env = dict(os.environ, PYTHONPATH=python_path(__file__))
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=env)
    assert "all of it ran" in done.stdout, done.stderr[-3000:]
