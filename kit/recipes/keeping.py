"""A run on a machine that may be taken away: kept elsewhere as it goes, and brought back.

KIT_MIRROR names the folder where runs are kept, on Google Drive or a share; without it nothing here
happens. The run's folder, and the code cache beside it, stay on the machine's own disk: training
reads local files and never waits for a network.
"""

import atexit
import dataclasses
import os
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

from kit.audio.spectrogram import front_end_config
from kit.base.config import build
from kit.base.errors import DatasetError, KitError
from kit.base.files import atomic_path, digest
from kit.base.mirror import WAIT_S, Mirror
from kit.base.run import Run
from kit.batches.batching import DataConfig
from kit.batches.encoding import cache_key
from kit.dataset.data_report import Utterance
from kit.dataset.manifest import read_manifest, write_manifest

EVERY_S = 10.0  # between two looks at what has changed
# Folders of many recordings, which 01_data_prep makes again from what they came from.
APART = ("corpus", "unpacked", "long", "clips", "requests")
CLIPS = "clips.tar"  # the recordings that are no training data: later notebooks judge by them
_KEPT: dict[Path, "Kept"] = {}  # by the run's folder: a first cell may be run twice


def kept_run(folder: Path, say: Callable[[str], None] = print) -> "Kept | None":
    """What keeps the run in `folder`, once all that is kept of it is here.

    None without KIT_MIRROR. Checkpoints and the code cache come when they are asked for. Raises
    KitError where there is no folder KIT_MIRROR, and OSError where it cannot be read: to begin
    the run anew would be worse.
    """
    kept_runs = os.environ.get("KIT_MIRROR")
    if not kept_runs:
        return None
    if not Path(kept_runs).is_dir():
        raise KitError(
            f"KIT_MIRROR = {kept_runs}: there is no such folder. Is the disk mounted? Make it, if "
            "runs are to be kept there."
        )
    if Path(kept_runs).resolve() == folder.parent.resolve():
        raise KitError(
            f"KIT_MIRROR = {kept_runs} is the folder the runs themselves lie in: name one on "
            "another disk, or none."
        )
    if folder not in _KEPT:
        _KEPT[folder] = Kept(folder, Path(kept_runs), say)
    kept = _KEPT[folder]
    kept.begin()
    return kept


class Kept:
    """A run and its part of the code cache, kept in `kept_runs` as long as this process lives."""

    def __init__(self, folder: Path, kept_runs: Path, say: Callable[[str], None]):
        self.run = Mirror(folder, kept_runs / folder.name, APART, say=say)
        codes = folder.parent / "codes"
        self.codes = Mirror(codes, kept_runs / "codes", one_run=False, say=say)
        self.over = threading.Event()
        self.thread: threading.Thread | None = None

    def begin(self) -> None:
        """Bring the run's files here, and copy from now on in the background."""
        self.run.fetch(lambda name: not name.startswith("checkpoints/"))
        unpack_clips(self.run.folder)
        if self.thread is None:
            self.run.say(f"This run is kept in {self.run.kept}.")
            self.thread = threading.Thread(target=self._keep_on, name="kept", daemon=True)
            self.thread.start()
            atexit.register(self.stop)

    def bring_checkpoints(self) -> None:
        self.run.fetch(lambda name: name.startswith("checkpoints/"))

    def bring_codes(self, run: Run) -> None:
        """The shards made with this run's codec, and the index that 01_data_prep recorded."""
        codec = run.folder / "codec.safetensors"
        if not codec.is_file():
            return
        front_end = front_end_config(run.section("front_end"))
        key = cache_key(codec, front_end, build(DataConfig, run.section("data")))
        index = Path(run.figure("data", "codes") or "none").name
        self.codes.fetch(lambda name: name.startswith(f"codes-{key}-") or name == index)

    def _keep_on(self) -> None:
        while not self.over.wait(EVERY_S):
            self.flush(0.0)

    def flush(self, wait_s: float = WAIT_S) -> bool:
        """Copy what is new, codes before the record that names them; whether all is kept."""
        codes_are_kept = self.codes.keep(wait_s)
        return self.run.keep(wait_s) and codes_are_kept

    def stop(self) -> None:
        """Copy the last time, and end."""
        self.over.set()
        self.flush()


def pack_clips(folder: Path) -> None:
    """Put the held-out recordings of the manifest into one file, where it changed since.

    A few hundred small files would take minutes to keep, and as long to bring back.
    """
    manifest = folder / "manifest.jsonl"
    packed = folder / CLIPS
    if not manifest.is_file():
        return
    changed_ns = manifest.stat().st_mtime_ns
    if packed.is_file() and packed.stat().st_mtime_ns >= changed_ns:
        return
    try:
        apart = [row for row in read_manifest(folder) if row.split != "train"]
    except DatasetError:  # damaged, or no rows yet: whoever needs it says so
        return
    with atomic_path(packed) as part, tarfile.open(part, "w") as archive:
        for row in apart:
            if Path(row.audio).is_file():
                archive.add(row.audio, arcname=_clip_name(row))


def unpack_clips(folder: Path) -> None:
    """Bring back held-out recordings that are not here; the manifest says where they lie now."""
    packed = folder / CLIPS
    if not packed.is_file() or not (folder / "manifest.jsonl").is_file():
        return
    rows = read_manifest(folder)
    lost = {r.id for r in rows if r.split != "train" and not Path(r.audio).is_file()}
    if not lost:
        return
    with tarfile.open(packed) as archive:
        archive.extractall(folder / "clips", filter="data")
    write_manifest([_found(row, folder) if row.id in lost else row for row in rows], folder)
    packed_ns = packed.stat().st_mtime_ns
    os.utime(folder / "manifest.jsonl", ns=(packed_ns, packed_ns))  # nothing is to be packed anew


def _found(row: Utterance, folder: Path) -> Utterance:
    clip = folder / "clips" / _clip_name(row)
    return dataclasses.replace(row, audio=str(clip)) if clip.is_file() else row


def _clip_name(row: Utterance) -> str:
    return digest(row.id, row.split) + Path(row.audio).suffix
