"""A run with the machine it works on, and its copy on another disk.

KIT_MIRROR names the folder of the copies, on Google Drive or a share; without it none are made. A
run's folder and the code cache beside it stay on the local disk, so training never waits for a
network.
"""

import atexit
import dataclasses
import os
import tarfile
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from kit.audio.spectrogram import front_end_config
from kit.base.config import build
from kit.base.errors import DatasetError, KitError
from kit.base.files import atomic_path, digest
from kit.base.formatting import flat
from kit.base.hardware import (
    Choice,
    Hardware,
    choose_precision,
    detect,
    set_cuda_defaults,
    use_threads,
)
from kit.base.mirror import WAIT_S, Mirror
from kit.base.run import SETTINGS, Run
from kit.batches.batching import DataConfig
from kit.batches.encoding import cache_key
from kit.dataset.data_report import Utterance
from kit.dataset.manifest import read_manifest, write_manifest
from kit.notebook.result import Result
from kit.training.ranks import ALONE, Ranks

COPY_EVERY_S = 10.0
# Folders of recordings, which 01_data_prep makes again from their source, and export/ as a zip.
NOT_COPIED = ("corpus", "unpacked", "long", "clips", "requests", "download")
CLIPS = "clips.tar"  # the held-out recordings, which later notebooks need
SETTINGS_SHOWN = 6
_COPIES: dict[Path, "RunCopy"] = {}  # by the run's folder: a first cell may be run twice


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActiveRun(Run):
    """A run's folder, preset and record, with the machine and what was chosen for it."""

    hw: Hardware
    threads: Choice  # of torch
    precision: Choice  # "fp32", "fp16" or "bf16"
    kept: "RunCopy | None" = None  # its copy on another disk (KIT_MIRROR)
    ranks: Ranks = ALONE  # the processes that share its work: see `prepare_parts.py`

    def record(self, **figures) -> dict:
        """As `Run.record`; returns only after everything new was copied to the other disk."""
        report = super().record(**figures)
        if self.kept:
            pack_clips(self.folder)
            self.kept.flush()
        return report

    def fetch_checkpoints(self) -> None:
        """Fetch the copies of checkpoints from another machine."""
        if self.kept:
            self.kept.fetch_checkpoints()

    def hold_shared_lock(self, what: str) -> AbstractContextManager:
        """Lock out `what` on other machines that share the copy."""
        return self.kept.run.hold_shared_lock(what) if self.kept else nullcontext()

    def __str__(self) -> str:
        return (
            f"run {self.name} in {self.folder}, preset {self.preset_name}, "
            + (f"use {self.use}, " if self.use else "")
            + (f"set {self.first_settings()}, " if self.settings else "")
            + f"{self.hw.name}, {self.precision.value}, threads: {self.threads.value}"
        )

    def first_settings(self) -> str:
        """The first settings of the run: one that starts from a base model has dozens."""
        values = [f"{name} = {value}" for name, value in flat(self.settings)]
        more = len(values) - SETTINGS_SHOWN
        if more > 1:
            values[SETTINGS_SHOWN:] = [f"and {more} values more ({SETTINGS})"]
        return ", ".join(values)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        choices = {"precision": self.precision, "threads": self.threads}
        reasons = {name: f"{c.value}: {c.reason}" for name, c in choices.items()}
        if self.kept:
            reasons["kept in"] = str(self.kept.run.kept)
        return Result(line=str(self), figures=reasons)._repr_html_()


def active_run(run: Run, kept: "RunCopy | None" = None) -> ActiveRun:
    """Return `run`, its copy `kept`, and what suits this machine; sets torch's threads."""
    if kept:
        kept.fetch_codes(run)
    set_cuda_defaults()
    hw = detect()
    return ActiveRun(
        **vars(run), hw=hw, threads=use_threads(hw), precision=choose_precision(hw), kept=kept
    )


def open_run_copy(folder: Path, say: Callable[[str], None] = print) -> "RunCopy | None":
    """Fetch the run in `folder` from its copy, and start copying; None without KIT_MIRROR.

    Checkpoints and the code cache are fetched later. Raises KitError if KIT_MIRROR is not a usable
    folder, and OSError if it cannot be read: starting the run from scratch would be worse.
    """
    mirror = os.environ.get("KIT_MIRROR")
    if not mirror:
        return None
    if not Path(mirror).is_dir():
        raise KitError(
            f"KIT_MIRROR = {mirror}: there is no such folder. Is the disk mounted? Create the "
            "folder if runs are to be kept there."
        )
    if Path(mirror).resolve() == folder.parent.resolve():
        raise KitError(
            f"KIT_MIRROR = {mirror} is the folder that holds the runs themselves: name one on "
            "another disk, or none."
        )
    if folder not in _COPIES:
        _COPIES[folder] = RunCopy(folder, Path(mirror), say)
    _COPIES[folder].begin()
    return _COPIES[folder]


class RunCopy:
    """Copies a run and its part of the code cache to `mirror` as long as this process lives."""

    def __init__(self, folder: Path, mirror: Path, say: Callable[[str], None]):
        self.run = Mirror(folder, mirror / folder.name, NOT_COPIED, say=say)
        codes = folder.parent / "codes"
        self.codes = Mirror(codes, mirror / "codes", one_run=False, say=say)
        self.over = threading.Event()
        self.thread: threading.Thread | None = None

    def begin(self) -> None:
        """Fetch the run's files, and copy changes in the background from now on."""
        self.run.fetch(lambda name: not name.startswith("checkpoints/"))
        unpack_clips(self.run.folder)
        if self.thread is None:
            self.run.say(f"This run is kept in {self.run.kept}.")
            self.thread = threading.Thread(target=self._copy_changes, name="kept", daemon=True)
            self.thread.start()
            atexit.register(self.stop)

    def fetch_checkpoints(self) -> None:
        self.run.fetch(lambda name: name.startswith("checkpoints/"))

    def fetch_codes(self, run: Run) -> None:
        """Fetch the shards made with this run's codec, and the index that 01_data_prep recorded."""
        codec = run.folder / "codec.safetensors"
        if not codec.is_file():
            return
        front_end = front_end_config(run.section("front_end"))
        key = cache_key(codec, front_end, build(DataConfig, run.section("data")))
        index = Path(run.figure("data", "codes") or "none").name
        self.codes.fetch(lambda name: name.startswith(f"codes-{key}-") or name == index)

    def _copy_changes(self) -> None:
        while not self.over.wait(COPY_EVERY_S):
            self.flush(0.0)

    def flush(self, wait_s: float = WAIT_S) -> bool:
        """Copy what is new, codes before the record that names them; returns whether it worked."""
        codes_copied = self.codes.keep(wait_s)
        return self.run.keep(wait_s) and codes_copied

    def stop(self) -> None:
        """Copy for the last time, and end."""
        self.over.set()
        self.flush()


def pack_clips(folder: Path) -> None:
    """Pack the manifest's held-out recordings into one file, if the manifest has changed since.

    Copying hundreds of small files would take minutes, and fetching them as long.
    """
    manifest = folder / "manifest.jsonl"
    archive_path = folder / CLIPS
    if not manifest.is_file():
        return
    changed_ns = manifest.stat().st_mtime_ns
    if archive_path.is_file() and archive_path.stat().st_mtime_ns >= changed_ns:
        return
    try:
        rows = [row for row in read_manifest(folder) if row.split != "train"]
    except DatasetError:  # damaged, or no rows yet: the code that needs it reports that
        return
    with atomic_path(archive_path) as part, tarfile.open(part, "w") as archive:
        for row in rows:
            if Path(row.audio).is_file():
                archive.add(row.audio, arcname=_clip_name(row))


def unpack_clips(folder: Path) -> None:
    """Unpack held-out recordings that are missing, and write their new paths to the manifest."""
    archive_path = folder / CLIPS
    if not archive_path.is_file() or not (folder / "manifest.jsonl").is_file():
        return
    rows = read_manifest(folder)
    missing = {r.id for r in rows if r.split != "train" and not Path(r.audio).is_file()}
    if not missing:
        return
    with tarfile.open(archive_path) as archive:
        archive.extractall(folder / "clips", filter="data")
    for number, row in enumerate(rows):
        clip = folder / "clips" / _clip_name(row)
        if row.id in missing and clip.is_file():
            rows[number] = dataclasses.replace(row, audio=str(clip))
    write_manifest(rows, folder)
    packed_ns = archive_path.stat().st_mtime_ns
    os.utime(folder / "manifest.jsonl", ns=(packed_ns, packed_ns))  # so it is not packed again


def _clip_name(row: Utterance) -> str:
    return digest(row.id, row.split) + Path(row.audio).suffix
