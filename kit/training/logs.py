"""The log of a run: one JSON line a step, from which every figure and picture comes.

`jsonl_log` writes it, `read_log` reads it as it is after kills and resumes. TensorBoard, W&B and
trackio are optional listeners to the same events, available if their packages are installed: they
get every number of an event, and each sample that the model speaks with its spectrogram.
"""

import dataclasses
import errno
import importlib
import importlib.util
import json
import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kit.base.errors import DiskError, Note
from kit.base.files import disk_errors
from kit.base.formatting import replace_non_finite

Listener = Callable[[object], None]  # gets one StepEvent after the other


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpokenSample:
    step: int  # after which the model said it
    text: str
    wave: np.ndarray  # (L,) in -1 to 1
    sample_rate_hz: int
    spectrogram: np.ndarray  # a picture (height, width, RGB), 0 to 255


NewestSample = Callable[[], SpokenSample | None]


def jsonl_log(path: Path) -> Listener:
    """A listener that appends each event to `path` as one line of strict JSON.

    What is not finite becomes null. `wall_s` is added: the seconds since the event before, with
    validation and checkpoint; null at the first event of each start. A kill costs at most the line
    being written. Raises DiskError when the disk is full or the file was deleted.
    """
    path = Path(path)
    file = None
    last_s = None

    def write(event) -> None:
        nonlocal file, last_s
        row = dataclasses.asdict(event)
        row["wall_s"] = None if last_s is None else event.unix_s - last_s
        line = json.dumps(replace_non_finite(row), allow_nan=False).encode() + b"\n"
        with disk_errors(path):
            log, file = file or _open_log(path), None  # after an error it is opened again
            if not path.exists():  # writing to a deleted file would raise no error
                raise DiskError(
                    errno.ENOENT,
                    f"{path} was deleted or moved while training wrote it, perhaps with the run's "
                    "folder. Training stops here: restore the folder and run again; it resumes "
                    "from the last checkpoint there, or starts from scratch without one",
                )
            if log.write(line) < len(line):  # all that a full disk could still take
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file = log
        last_s = event.unix_s

    return write


def _open_log(path: Path):
    """`path` open for appending, without the part of a line that a kill may have left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab", buffering=0)  # a line is one write: at once, and never written twice
    data = path.read_bytes() if path.is_file() else b""  # a device may never end
    complete_bytes = data.rfind(b"\n") + 1
    if complete_bytes < len(data):
        file.truncate(complete_bytes)
        message = f"{path}: its last line was cut short, perhaps by a kill, and is dropped."
        warnings.warn(message, category=Note, stacklevel=4)
    return file


def read_log(path: Path) -> list[dict]:
    """The events of a run, one dict a step, in order; [] when there is no file yet.

    Where a run was resumed and its steps go back, the later lines win. A line cut short by a kill
    is passed over. What was not finite is None.
    """
    path = Path(path)
    rows = []
    lost = 0
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for line in filter(None, lines):
        row = parse_row(line)
        if row is None:
            lost += line is not lines[-1]
        else:
            add_row(rows, row)
    if lost:
        warnings.warn(f"{path}: {lost} unreadable lines are left out.", category=Note, stacklevel=2)
    return rows


def parse_row(line: bytes) -> dict | None:
    """Read a row that `jsonl_log` wrote; None for anything else."""
    try:
        row = json.loads(line)
    except ValueError:  # UnicodeDecodeError, too
        return None
    return row if isinstance(row, dict) and {"step", "loss"} <= row.keys() else None


def add_row(rows: list[dict], row: dict) -> None:
    """Append `row`; where its step goes back, drop the rows it replaces."""
    while rows and rows[-1]["step"] >= row["step"]:
        rows.pop()
    rows.append(row)


def held_out_losses(rows: list[dict]) -> dict[str, tuple[list, list]]:
    """(steps, losses) of the validations by weights: "raw", and "EMA" where an average was kept."""
    losses = {}
    for name, key in (("raw", "val_loss"), ("EMA", "ema_val_loss")):
        marks = [row for row in rows if row[key] is not None]
        if marks:
            losses[name] = ([row["step"] for row in marks], [row[key] for row in marks])
    return losses


def scalars(row: dict) -> dict[str, float]:
    """The finite numbers of a row by name, `gate/cer` for one inside another; not its place."""
    numbers = {}
    for name, value in row.items():
        if isinstance(value, dict):
            numbers |= {f"{name}/{inner}": number for inner, number in scalars(value).items()}
        elif type(value) in (int, float) and math.isfinite(value):
            numbers[name] = value
    return {k: v for k, v in numbers.items() if k not in ("step", "steps", "unix_s")}


def tensorboard_log(
    folder: Path, newest_sample: NewestSample = lambda: None
) -> tuple[Listener | None, str]:
    """Return a listener that writes numbers, notes and samples for TensorBoard or None, and why."""
    if importlib.util.find_spec("tensorboard") is None:
        return None, "TensorBoard is not installed (pip install tensorboard)"
    writer = None
    last_step = math.inf

    def log(event) -> None:
        nonlocal writer, last_step
        from torch.utils.tensorboard import SummaryWriter

        step = event.step
        if step <= last_step:  # the first, or steps go back: later ones in older files are void
            if writer is not None:
                writer.close()
            writer = SummaryWriter(str(folder), purge_step=step, flush_secs=10)
        last_step = step
        for name, value in scalars(dataclasses.asdict(event)).items():
            writer.add_scalar(name, value, step)
        if event.note:
            writer.add_text("note", event.note, step)
        sample = newest_sample()
        if sample and sample.step == step:
            rate_hz = sample.sample_rate_hz
            writer.add_audio("sample", sample.wave[None], step, sample_rate=rate_hz)
            writer.add_image("sample/mel", sample.spectrogram, step, dataformats="HWC")
            writer.add_text("sample/text", sample.text, step)
        if event.val_loss is not None or step == event.steps:
            writer.flush()

    return log, f"TensorBoard events in {folder} (tensorboard --logdir {folder})"


def tracker_log(
    module: str,
    project: str,
    name: str,
    config: dict,
    folder: Path,
    newest_sample: NewestSample = lambda: None,
) -> tuple[Listener | None, str]:
    """Return a listener that logs numbers and samples to `module` or None, and the reason.

    That is "wandb" or "trackio", whose functions have the same names. `config` are plain values to
    show with the run `name`. Without WANDB_MODE W&B leaves files under `folder`, which `wandb sync`
    uploads.
    """
    if importlib.util.find_spec(module) is None:
        return None, f"{module} is not installed (pip install {module})"
    settings = {"project": project, "group": name, "config": config}
    if module == "wandb":
        mode = os.environ.get("WANDB_MODE", "offline")
        Path(folder).mkdir(parents=True, exist_ok=True)
        settings |= {"dir": str(folder), "mode": mode}
        reason = f"W&B {mode}, project {project}, group {name}, files in {folder}"
    else:
        settings["embed"] = False  # or it shows its server's page in the cell that trains
        reason = f'trackio, project {project}, group {name} (trackio show --project "{project}")'
    run = None
    last_step = math.inf

    def log(event) -> None:
        nonlocal run, last_step
        board = importlib.import_module(module)
        # Neither can take a step back, so each start, and each step back, is a run of its own.
        if event.step <= last_step:
            if run is not None:
                run.finish()
            run = board.init(name=f"{name} from step {event.step}", **settings)
        last_step = event.step
        values = scalars(dataclasses.asdict(event))
        sample = newest_sample()
        if sample and sample.step == event.step:
            rate_hz = sample.sample_rate_hz
            values["sample"] = board.Audio(sample.wave, sample_rate=rate_hz, caption=sample.text)
            values["sample/mel"] = board.Image(sample.spectrogram, caption=sample.text)
        run.log(values, step=event.step)
        if event.step == event.steps:
            run.finish()

    return log, reason


def summary(rows: list[dict]) -> dict:
    """Figures of a log for the report: steps, speed, memory, last validation losses."""
    seconds = sum(row["step_s"] for row in rows)
    validated = next((row for row in reversed(rows) if row["val_loss"] is not None), {})
    return {
        "steps": rows[-1]["step"],
        "epochs": rows[-1].get("epoch"),
        "steps_per_s": len(rows) / seconds,
        "tokens_per_s": sum(row["tokens"] for row in rows) / seconds,
        "seconds": sum(row.get("wall_s") or row["step_s"] for row in rows),  # validation, too
        "peak_memory_bytes": max(row["memory_bytes"] for row in rows),
        "loss": rows[-1]["loss"],
        "val_loss": validated.get("val_loss", math.nan),
        "ema_val_loss": validated.get("ema_val_loss"),
    }
