"""A run's copy on another disk.

KIT_MIRROR names the folder of the copies, on Google Drive or a share, from which a fresh machine
resumes; without it none are made. A run's folder and the code cache beside it stay on the local
disk, so training never waits for a network.
"""

import atexit
import dataclasses
import os
import tarfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kit.audio.spectrogram import front_end_config
from kit.base import run as runs
from kit.base.config import build
from kit.base.errors import DatasetError, KitError
from kit.base.files import atomic_path, digest, disk_errors, remove_litter
from kit.base.run import Run
from kit.dataset.manifest import Utterance, read_manifest, write_manifest
from kit.settings import DataConfig

COPY_EVERY_S = 10.0
COPY_WAIT_S = 60.0  # for a copy by another process
LITTER_AGE_S = 900.0  # age of a partial copy from which its machine is gone
# Folders of recordings, which 01_data_prep makes again from their source, and export/ as a zip.
NOT_COPIED = ("corpus", "unpacked", "unpacked-eval", "long", "clips", "requests", "download")
CLIPS = "clips.tar"  # the held-out recordings, which later notebooks need
_COPIES: dict[Path, "RunCopy"] = {}  # by the run's folder: a first cell may be run twice


def find_mirror() -> Path | None:
    """Return the folder of the copies; None without KIT_MIRROR, KitError if it is not usable."""
    mirror = os.environ.get("KIT_MIRROR")
    if not mirror:
        return None
    if not Path(mirror).is_dir():
        raise KitError(
            f"KIT_MIRROR = {mirror}: there is no such folder. Is the disk mounted? Create the "
            "folder if runs are to be kept there."
        )
    if Path(mirror).resolve() == runs.runs_folder().resolve():
        raise KitError(
            f"KIT_MIRROR = {mirror} is the folder that holds the runs themselves: name one on "
            "another disk, or none."
        )
    return Path(mirror)


def open_run_copy(folder: Path, mirror: Path) -> "RunCopy":
    """Fetch the run in `folder` from its copy in `mirror`, and start copying.

    Checkpoints and the code cache are fetched later. Raises OSError if the copy cannot be read:
    starting the run from scratch would be worse.
    """
    if folder not in _COPIES:
        _COPIES[folder] = RunCopy(folder, mirror)
    _COPIES[folder].begin()
    return _COPIES[folder]


class RunCopy:
    """Copies a run and its part of the code cache to `mirror` as long as this process lives."""

    def __init__(self, folder: Path, mirror: Path):
        from kit.base.mirror import Mirror  # most runs have no copy

        self.run = Mirror(folder, mirror / folder.name, NOT_COPIED)
        self.codes = Mirror(folder.parent / "codes", mirror / "codes", one_run=False)
        self.over = threading.Event()
        self.thread: threading.Thread | None = None

    @property
    def folder(self) -> Path:
        return self.run.kept

    def begin(self) -> None:
        """Fetch the run's files, and copy changes in the background from now on."""
        self.run.fetch(lambda name: not name.startswith("checkpoints/"))
        for mirror in (self.run, self.codes):
            remove_litter(mirror.kept, LITTER_AGE_S)
        if self.thread is None:
            print(f"This run is kept in {self.folder}.")
            self.thread = threading.Thread(target=self._copy_changes, name="kept", daemon=True)
            self.thread.start()
            atexit.register(self.stop)

    def fetch_record(self) -> None:
        """Fetch the figures that another machine has recorded since the last copy."""
        with suppress(OSError, KitError):  # the next copy reports it
            self.run.fetch(lambda name: name == "report.json")

    def _copy_changes(self) -> None:
        while not self.over.wait(COPY_EVERY_S):
            self.flush(0.0)

    def copy_all(self) -> None:
        """Copy what is new, the held-out recordings, too."""
        pack_clips(self.run.folder)
        self.flush()

    def flush(self, wait_s: float = COPY_WAIT_S) -> None:
        """Copy what is new, codes before the record that names them."""
        self.codes.keep(wait_s)
        self.run.keep(wait_s)

    def stop(self) -> None:
        """Copy for the last time, and end."""
        self.over.set()
        with suppress(OSError):  # all else is copied nevertheless
            pack_clips(self.run.folder)
        self.flush()


def code_files(run: Run) -> Callable[[str], bool]:
    """Return whether a file of the code cache, by its name, is one of `run`.

    These are the shards made with its codec, and the indexes that 01_data_prep recorded.
    """
    from kit.batches.encoding import cache_key  # only here: it loads what reads recordings

    codec = run.folder / "codec.safetensors"
    if not codec.is_file():
        return lambda name: False
    front_end = front_end_config(run.section("front_end"))
    key = cache_key(codec, front_end, build(DataConfig, run.section("data")))
    indexes = [run.figure("data", "codes"), *(run.figure("data", "at_speeds") or {}).values()]
    names = {Path(index).name for index in indexes if index}
    return lambda name: name.startswith(f"codes-{key}-") or name in names


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
    try:
        rows = read_manifest(folder)
        missing = {r.id for r in rows if r.split != "train" and not Path(r.audio).is_file()}
        if not missing:
            return
        with disk_errors(folder / "clips"), tarfile.open(archive_path) as archive:
            archive.extractall(folder / "clips", filter="data")
    except (DatasetError, tarfile.TarError) as error:  # 01_data_prep opens the run to fix both
        print(f"Held-out recordings in {archive_path} stay packed: {error}")
        return
    for number, row in enumerate(rows):
        clip = folder / "clips" / _clip_name(row)
        if row.id in missing and clip.is_file():
            rows[number] = dataclasses.replace(row, audio=str(clip))
    write_manifest(rows, folder)
    packed_ns = archive_path.stat().st_mtime_ns
    os.utime(folder / "manifest.jsonl", ns=(packed_ns, packed_ns))  # so it is not packed again


def _clip_name(row: Utterance) -> str:
    return digest(row.id, row.split) + Path(row.audio).suffix
