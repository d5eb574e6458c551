"""Work on a run on the fast local disk, and mirror it to a folder that is kept.

On Colab only Google Drive stays: slow, remote, and now and then failing in the middle of a write.
So a run's folder is on the local disk; a `Mirror` copies its changes to the kept folder, and a new
machine fetches all of it at its start.

- Files are copied in the order of their changes, to a temporary name that is then renamed. So the
  kept ones are complete whenever the machine is lost, and a file that marks others as complete
  never arrives before them.
- A failure is reported once and retried; it never touches the local file.
- What was removed here is removed there: older checkpoints as soon as a newer one is kept, anything
  else after everything was copied.
- Of a file that two machines wrote the later copy stays. `hold_shared_lock` lets one at a time
  train, and ids tell two runs of one name apart.
"""

import contextlib
import dataclasses
import errno
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kit.base.errors import DiskError, InUse, KitError
from kit.base.files import atomic_path, disk_errors, write_atomic
from kit.base.lock import BEAT_S, STALE_S, SharedLock, held
from kit.base.run import read_run_file

WAIT_S = 60.0  # for a copy by another process
SHARED_WAIT_S = STALE_S + 2 * BEAT_S  # for another machine: longer than one that is gone counts
FETCH_TRIES = 3  # before a file that cannot be fetched is an error
CLOCK_NS = 2_000_000_000  # times closer than this count as equal
LARGE_BYTES = 100_000_000  # from here fetching takes so long that it is announced
MEMORY = ".mirrored.json"  # in the local folder: what was copied and when
IDENTITY = ".id"  # file with the id of the run, the same in both folders
Stamp = list[int]  # bytes, and the time of the last change in nanoseconds
Memory = dict[str, list[Stamp]]  # by path: the local and the kept file after the last copy


@dataclasses.dataclass(eq=False)
class Mirror:
    """Keeps `folder` in `kept` as well."""

    folder: Path
    kept: Path
    apart: tuple[str, ...] = ()  # folders inside it that are not copied
    one_run: bool = True  # False: several runs fill it with files named by their content
    say: Callable[[str], None] = print  # once when copying starts to fail, and when it works again
    trouble: str = ""  # why the last copy failed; "" if it did not
    lock: SharedLock | None = None  # while this machine has the run for itself

    def fetch(self, wanted: Callable[[str], bool] = lambda name: True) -> int:
        """Copy the `wanted` kept files that are new, or unchanged here; return the bytes."""
        there = stamps(self.kept)
        if not there:
            return 0
        with self._locked_memory(WAIT_S) as memory:
            self._join(memory)
            names = [n for n in there if wanted(n) and self._is_newer(n, there[n], memory)]
            total_bytes = sum(there[name][0] for name in names)
            if total_bytes > LARGE_BYTES:
                self.say(f"Fetching {total_bytes / 1e6:,.0f} MB from {self.kept}.")
            for name in names:
                self._fetch_file(name, there[name])
                memory[name] = [stamp(self.folder / name), there[name]]
        return total_bytes

    def _is_newer(self, name: str, there: Stamp, memory: Memory) -> bool:
        """Return whether the kept file should replace the one here."""
        here = stamp(self.folder / name)
        if name not in memory:
            return here is None
        here_before, there_before = memory[name]
        # Some disks store times only to the second.
        same_time = abs(there_before[1] - there[1]) < CLOCK_NS
        if there_before[0] == there[0] and same_time:
            return False  # what is missing here was removed here
        return here in (None, here_before)

    def _fetch_file(self, name: str, about: Stamp) -> None:
        """Copy a kept file here; try again if the network fails."""
        for tried in range(1, FETCH_TRIES + 1):
            try:
                return copy_whole(self.kept / name, self.folder / name, about)
            except OSError as error:
                if tried == FETCH_TRIES:
                    message = f"could not fetch {self.kept / name}: {error.strerror or error}"
                    raise DiskError(error.errno, message) from error
                time.sleep(1.0)

    def _join(self, memory: Memory) -> None:
        """Give both folders the same id; raise KitError if they hold different runs."""
        here, there = read_run_file(self.folder / IDENTITY), read_run_file(self.kept / IDENTITY)
        if here and here == there:
            return
        if self.one_run and stamps(self.kept) and (here or stamps(self.folder)):
            raise KitError(
                f"{self.folder} and {self.kept} hold two different runs of one name, and mixing "
                "them would spoil both. Choose another RUN, or move one of the two folders away."
            )
        if not there:  # new, or deleted there
            memory.clear()
        identity = there or here or secrets.token_hex(8)
        write_atomic(self.kept / IDENTITY, identity)
        write_atomic(self.folder / IDENTITY, identity)

    def copy(self, wait_s: float = 0.0) -> None:
        """Copy what changed here since the last time.

        Raises DiskError, InUse if another process copies for longer than `wait_s`, and KitError if
        another machine has taken the run over.
        """
        here = stamps(self.folder, self.apart)
        before = {name: stamp_here for name, (stamp_here, _) in self._memory().items()}
        is_kept = here == before and read_run_file(self.kept / IDENTITY)
        if is_kept or not here:  # deleted, or still empty: keep what is kept
            return
        if self.lock is not None:
            self.lock.confirm()
        with self._locked_memory(wait_s) as memory:
            self._join(memory)
            changed = [name for name in here if name not in memory or memory[name][0] != here[name]]
            gone = [name for name in memory if name not in here]
            # What is replaced by a complete file of its kind makes room for the next one.
            kinds = {kind(name) for name in here.keys() - set(changed)}
            self._remove([name for name in gone if kind(name) in kinds], memory)
            for name in changed:
                now = stamp(self.folder / name)  # changes during the copy count the next time
                if now is not None:
                    copy_whole(self.folder / name, self.kept / name, now)
                    memory[name] = [now, stamp(self.kept / name)]
            self._remove([name for name in gone if name in memory], memory)

    def _remove(self, names: list[str], memory: Memory) -> None:
        for name in names:
            with disk_errors(self.kept / name), contextlib.suppress(FileNotFoundError):
                # Drive moves deleted files to its bin, where they count: empty them first.
                os.truncate(self.kept / name, 0)
                (self.kept / name).unlink()
            del memory[name]

    @contextlib.contextmanager
    def _locked_memory(self, wait_s: float) -> Iterator[Memory]:
        """Yield the record of copies, locked for this process; it is written at the end."""
        with held(self.folder / ".mirror.lock", f"copying to {self.kept}", wait_s):
            memory = self._memory()
            try:
                yield memory
            finally:
                write_atomic(self.folder / MEMORY, json.dumps(memory))

    def _memory(self) -> Memory:
        try:
            return json.loads((self.folder / MEMORY).read_bytes())
        except (FileNotFoundError, ValueError):
            return {}

    def keep(self, wait_s: float = 0.0) -> bool:
        """`copy`, but report errors instead of raising them; return whether all is kept."""
        trouble = ""
        try:
            self.copy(wait_s)
        except InUse:
            return False
        except (OSError, KitError) as error:
            trouble = getattr(error, "strerror", None) or str(error)
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                trouble += " Also empty its bin."
        if trouble and not self.trouble:
            self.say(
                f"Since {time.strftime('%H:%M')} nothing new is kept in {self.kept}: "
                f"{trouble} New files are only on this machine and are lost with it. The kit keeps "
                "trying and prints a line when it works again."
            )
        if self.trouble and not trouble:
            self.say(f"All is kept in {self.kept} again.")
        self.trouble = trouble
        return not trouble

    @contextlib.contextmanager
    def hold_shared_lock(self, what: str) -> Iterator[None]:
        """Keep other machines from doing `what` in this run during the block, or raise InUse."""
        lock = SharedLock(self.kept / f"{what}.lock", what)
        try:
            lock.acquire(SHARED_WAIT_S, self.say)
            self.lock = lock
        except OSError as error:  # the kept folder is not writable: the work continues
            self.say(f"Whether another machine is at {what} cannot be seen: {error}")
        try:
            yield
        finally:
            self.lock = None
            with contextlib.suppress(OSError):  # it ends without renewals
                lock.release()


def stamps(folder: Path, apart: tuple[str, ...] = ()) -> dict[str, Stamp]:
    """Return {path inside `folder`, with slashes: stamp} of the files to keep, not of `apart`.

    In the order of their last changes. Hidden files, temporary ones and locks are not kept.
    """
    stamps_by_path = {}
    for place, below, names in os.walk(folder, onerror=_raise_unless_missing):
        below[:] = [name for name in below if not name.startswith(".")]
        if Path(place) == folder:
            below[:] = [name for name in below if name not in apart]
        for name in names:
            path = Path(place, name)
            stamp_now = None if name.startswith(".") or path.suffix == ".lock" else stamp(path)
            if stamp_now is not None:  # not removed meanwhile
                stamps_by_path[path.relative_to(folder).as_posix()] = stamp_now
    return dict(sorted(stamps_by_path.items(), key=lambda item: item[1][1]))


def kind(name: str) -> tuple[Path, str]:
    """Return folder and suffix of `name`: a newer file with the same ones replaces it."""
    return Path(name).parent, Path(name).suffix


def _raise_unless_missing(error: OSError) -> None:
    """Raise the error of a folder that cannot be read: it does not count as empty."""
    if not isinstance(error, FileNotFoundError):
        message = f"{error.filename} cannot be read: {error.strerror}. Is its disk still mounted?"
        raise DiskError(error.errno, message) from error


def stamp(path: Path) -> Stamp | None:
    """Return bytes and time of the last change of a file; None if there is none."""
    try:
        about = path.stat()
    except FileNotFoundError:
        return None
    return [about.st_size, about.st_mtime_ns]


def copy_whole(source: Path, target: Path, about: Stamp) -> None:
    """Copy a file with the stamp `about`; `target` is never a partial file."""
    with atomic_path(target) as part:
        shutil.copyfile(source, part)
    with contextlib.suppress(OSError):  # a share that sets its own times
        os.utime(target, ns=(about[1], about[1]))
