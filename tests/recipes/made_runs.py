"""Runs as 01_data_prep and 02_train leave them, without their work."""

import dataclasses
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import CPU, code_index, leave_voice_files, manifest, real_voice, world

from kit.base.config import load_preset, merge
from kit.base.hardware import Choice
from kit.dataset.manifest import write_manifest
from kit.model.weights import save_model
from kit.recipes.open_run import ActiveRun
from kit.recipes.start import start

SMALL = {
    "data": {"effective_batch": 8, "micro_batch": 8, "sort_window": 32, "reference_frames": 20},
    "model": {"width": 32},
    "train": {"max_steps": 6, "eval_steps": 3, "gate_every": 0, "save_steps": 2},
}
# Of a training's log.
ROW = {"loss": 3.0, "lr": 1e-3, "grad_norm": 1.0, "tokens": 9, "step_s": 0.1, "unix_s": 0.0}
ROW |= {"wall_s": 0.1, "memory_bytes": 2**20, "val_loss": None, "ema_val_loss": None}
ROW |= {"gate": None, "note": ""}


def active(folder: Path, hw=CPU, precision="fp32", **sections) -> ActiveRun:
    """A run with what 01_data_prep leaves, on a CPU of its own description."""
    run = ActiveRun(
        name=folder.name,
        preset_name="tiny",
        preset=merge(merge(load_preset("tiny"), SMALL), sections),
        folder=folder,
        hw=hw,
        threads=Choice(value="1", reason="one core is free"),
        precision=Choice(value=precision, reason="a test"),
    )
    if not run.path("report.json").exists():
        index = code_index()
        shutil.copy(world() / "codec.safetensors", folder)
        shutil.copy(world() / "tokenizer.model", folder)
        write_manifest(manifest(), folder)
        run.record(data={"codes": os.path.relpath(index, folder), "language": "am"})
    return run


def saved(folder: Path, **sections) -> ActiveRun:
    """A run whose settings a process of its own finds, too."""
    run = active(folder, **sections)
    run.begin()
    return run.save_settings(merge(SMALL, sections))


def leave_log(folder: Path, rows: Iterable[dict]) -> None:
    """Leave a training's log: a row of `rows` has what differs from ROW."""
    lines = "".join(json.dumps(ROW | row) + "\n" for row in rows)
    (folder / "train.jsonl").write_text(lines, encoding="utf-8")


def trained_run(folder: Path, settings: dict, ema: bool = True) -> ActiveRun:
    """A run as 01 and 02 leave it, its models untrained."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KIT_RUNS", str(folder))
        # A busy machine is listened to for six seconds, at every start.
        idle = SimpleNamespace(idle=100.0, nice=0.0)
        patch.setattr("psutil.cpu_times_percent", lambda _seconds: idle)
        run = start("spoken", "tiny")
    torch.set_num_threads(threads)
    voice = real_voice()
    save_model(voice.model, run.path("model-raw.safetensors"))
    if ema:
        voice.model.code_head.bias.data[5] += 0.5
        save_model(voice.model, run.path("model-ema.safetensors"))
    leave_voice_files(run.folder, voice)
    rows = [{"step": step, "steps": 4, "val_loss": 4.0 - step / 4} for step in (2, 4)]
    if ema:
        rows = [row | {"ema_val_loss": 4.1 - row["step"] / 3} for row in rows]
    leave_log(run.folder, rows)
    run.record(data={"language": "am"})
    return dataclasses.replace(run, preset=merge(run.preset, settings))
