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
- Machines may share a run: of a file that both wrote the later one stays, figures of report.json
  are merged, and `hold_shared_lock` lets one at a time train. Ids tell two runs of one name apart.
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

from kit.base.config import build, merge, parse_object
from kit.base.errors import DiskError, KitError
from kit.base.files import atomic_path, disk_errors, make_folder, write_atomic
from kit.base.lock import BEAT_S, STALE_S, Lock, held

WAIT_S = 60.0  # for a copy by another process
FETCH_TRIES = 3  # before a file that cannot be fetched is an error
CLOCK_NS = 2_000_000_000  # times closer than this count as equal
LITTER_AGE_S = 900.0  # age of a partial copy from which its machine is gone
LARGE_BYTES = 100_000_000  # from here fetching takes so long that it is announced
MEMORY = ".mirror.json"  # in the local folder: what was copied and when
IDENTITY = ".id"  # file with the id of the run, the same in both folders
RECORD = "report.json"  # the one file that is merged
Stamp = list[int]  # bytes, and the time of the last change in nanoseconds


@dataclasses.dataclass(kw_only=True)
class Memory:
    """The last copy of each file, by its path inside the folder."""

    here: dict[str, Stamp]  # the local file when it was last copied
    there: dict[str, Stamp]  # the kept file then
    record: dict  # RECORD when both were last equal


@dataclasses.dataclass(eq=False)
class Mirror:
    """Keeps `folder` in `kept` as well."""

    folder: Path
    kept: Path
    apart: tuple[str, ...] = ()  # folders inside it that are not copied
    one_run: bool = True  # False: several runs fill it with files named by their content
    say: Callable[[str], None] = print  # once when copying starts to fail, and when it works again
    trouble: str = ""  # why the last copy failed; "" if it did not
    lock: Lock | None = None  # while this machine has the run for itself

    def fetch(self, wanted: Callable[[str], bool] = lambda name: True) -> int:
        """Copy the `wanted` kept files that are not here, or unchanged here; return the bytes."""
        self._require_one_run()
        make_folder(self.folder)
        there = stamps(self.kept)
        with self._locked_memory(WAIT_S) as memory:
            names = [n for n in there if wanted(n) and self._is_newer(n, there[n], memory)]
            total_bytes = sum(there[name][0] for name in names)
            if total_bytes > LARGE_BYTES:
                self.say(f"Fetching {total_bytes / 1e6:,.0f} MB from {self.kept}.")
            for name in sorted(names, key=lambda name: there[name][1]):
                fetch_whole(self.kept / name, self.folder / name, there[name][1])
                self._remember(name, stamp(self.folder / name), there[name], memory)
        for litter in self.kept.rglob(".*.*"):  # copies of a machine that was taken away
            with contextlib.suppress(OSError):
                if time.time() - litter.stat().st_mtime > LITTER_AGE_S:
                    litter.unlink()
        return total_bytes

    def _is_newer(self, name: str, there: Stamp, memory: Memory) -> bool:
        """Whether the kept file should replace the one here."""
        if is_same(memory.there.get(name), there):
            return False  # nothing happened there; what is missing here was removed here
        here = stamp(self.folder / name)
        if name == RECORD and here and not read_record(self.kept / name):
            return False  # damaged
        return here in (None, memory.here.get(name))

    def _require_one_run(self) -> None:
        """Raise KitError if the two folders hold different runs."""
        here = read_line(self.folder / IDENTITY)
        there = read_line(self.kept / IDENTITY)
        if not self.one_run or (here and here == there) or not stamps(self.kept):
            return
        if here or stamps(self.folder):
            raise KitError(
                f"{self.folder} and {self.kept} hold two different runs of one name, and mixing "
                "them would spoil both. Choose another RUN, or move one of the two folders away."
            )
        identity = there or secrets.token_hex(8)
        if not there:  # somebody copied the files of a run, without hidden ones
            write_atomic(self.kept / IDENTITY, identity)
        write_atomic(self.folder / IDENTITY, identity)

    def copy(self, wait_s: float = 0.0) -> bool:
        """Copy what changed here since the last time; return whether all of it is kept.

        False if another process copies for longer than `wait_s`. Raises DiskError, and KitError if
        another machine has taken the run over.
        """
        here = stamps(self.folder, self.apart)
        if not here:
            return True  # deleted, or still empty: keep what is kept
        if here == self._memory().here and read_line(self.kept / IDENTITY):
            return True
        if self.lock is not None:
            self.lock.confirm()
        with contextlib.ExitStack() as stack:
            try:
                memory = stack.enter_context(self._locked_memory(wait_s))
            except KitError:
                return False
            self._join(memory)
            gone = [name for name in memory.here if name not in here]
            # What is replaced by a complete file of its kind makes room for the next one.
            kinds = {kind(name) for name in here if memory.here.get(name) == here[name]}
            self._remove([name for name in gone if kind(name) in kinds], memory)
            for name in sorted(here, key=lambda name: here[name][1]):
                if memory.here.get(name) == here[name]:
                    continue
                if name == RECORD:
                    self._merge_record(memory)
                before = stamp(self.folder / name)  # changes during the copy count the next time
                if before is not None:
                    copy_whole(self.folder / name, self.kept / name, before[1])
                    self._remember(name, before, stamp(self.kept / name), memory)
            self._remove([name for name in gone if name in memory.here], memory)
        return True

    def _join(self, memory: Memory) -> None:
        """Make sure that the kept folder is this run's; create it if needed."""
        self._require_one_run()
        identity = read_line(self.folder / IDENTITY) or secrets.token_hex(8)
        write_atomic(self.folder / IDENTITY, identity)
        if not read_line(self.kept / IDENTITY):  # new, or deleted there
            memory.here.clear()
            memory.there.clear()
            write_atomic(self.kept / IDENTITY, identity)

    def _merge_record(self, memory: Memory) -> None:
        """Merge this machine's new figures into those that another one recorded meanwhile."""
        there = stamp(self.kept / RECORD)
        if there is None or is_same(memory.there.get(RECORD), there):
            return
        with held(self.folder / "report.lock", "recording figures", WAIT_S):
            ours = read_record(self.folder / RECORD)
            theirs = read_record(self.kept / RECORD) or ours  # a damaged file replaces nothing
            merged = merge(theirs, changes(memory.record, ours))
            if merged != ours:
                write_atomic(self.folder / RECORD, json.dumps(merged, indent=1, ensure_ascii=False))

    def _remember(self, name: str, here: Stamp, there: Stamp, memory: Memory) -> None:
        memory.here[name] = here
        memory.there[name] = there
        if name == RECORD:
            memory.record = read_record(self.kept / RECORD)

    def _remove(self, names: list[str], memory: Memory) -> None:
        for name in names:
            with disk_errors(self.kept / name), contextlib.suppress(FileNotFoundError):
                # Drive moves deleted files to its bin, where they count: empty them first.
                os.truncate(self.kept / name, 0)
                (self.kept / name).unlink()
            del memory.here[name], memory.there[name]

    @contextlib.contextmanager
    def _locked_memory(self, wait_s: float) -> Iterator[Memory]:
        """The record of copies, locked for this process and written at the end."""
        with held(self.folder / ".mirror.lock", f"copying to {self.kept}", wait_s):
            memory = self._memory()
            try:
                yield memory
            finally:
                write_atomic(self.folder / MEMORY, json.dumps(dataclasses.asdict(memory)))

    def _memory(self) -> Memory:
        try:
            return build(Memory, json.loads((self.folder / MEMORY).read_bytes()))
        except (OSError, ValueError, TypeError):
            return Memory(here={}, there={}, record={})

    def keep(self, wait_s: float = 0.0) -> bool:
        """`copy`, but report errors instead of raising them; return whether all is kept."""
        trouble = ""
        try:
            if not self.copy(wait_s):
                return False
        except OSError as error:
            trouble = reason(error)
        except KitError as error:
            trouble = str(error)
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
        """Keep other machines from doing `what` in this run during the block, or raise KitError."""
        with contextlib.ExitStack() as stack:
            path = self.kept / f"{what}.lock"
            try:
                self.lock = stack.enter_context(held(path, what, STALE_S + 2 * BEAT_S, self.say))
            except OSError as error:  # the kept folder is not writable: the work continues
                self.say(f"Whether another machine is at {what} cannot be seen: {error}")
            try:
                yield
            finally:
                self.lock = None
                with contextlib.suppress(OSError):  # it is stale in five minutes
                    stack.close()


def stamps(folder: Path, apart: tuple[str, ...] = ()) -> dict[str, Stamp]:
    """Return {path inside `folder`, with slashes: stamp} of the files to keep, not of `apart`."""
    stamps_by_path = {}
    for place, below, names in os.walk(folder, onerror=_raise_unless_missing):
        if Path(place) == folder:
            below[:] = [name for name in below if name not in apart]
        for name in names:
            # Working files of processes are not kept.
            if not (name.startswith(".") or ".lock" in name or name.endswith(".claim")):
                path = Path(place, name)
                stamps_by_path[path.relative_to(folder).as_posix()] = stamp(path)
    # Without those that were removed meanwhile.
    return {name: each for name, each in stamps_by_path.items() if each is not None}


def kind(name: str) -> tuple[Path, str]:
    """Folder and suffix of `name`: a newer file with the same ones replaces it."""
    return Path(name).parent, Path(name).suffix


def is_same(before: Stamp | None, now: Stamp) -> bool:
    """Whether a kept file is unchanged; some disks store times only to the second."""
    return before is not None and before[0] == now[0] and abs(before[1] - now[1]) < CLOCK_NS


def _raise_unless_missing(error: OSError) -> None:
    """Raise the error of a folder that cannot be read: it does not count as empty."""
    if not isinstance(error, FileNotFoundError):
        message = f"{error.filename} cannot be read: {reason(error)} Is its disk still mounted?"
        raise DiskError(error.errno, message) from error


def stamp(path: Path) -> Stamp | None:
    """Return bytes and time of the last change of a file; None if there is none."""
    try:
        about = Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return [about.st_size, about.st_mtime_ns]


def copy_whole(source: Path, target: Path, changed_ns: int) -> None:
    """Copy a file that was last changed at `changed_ns`; `target` is never a partial file."""
    with atomic_path(target) as part:
        shutil.copyfile(source, part)
    with contextlib.suppress(OSError):  # a share that sets its own times
        os.utime(target, ns=(changed_ns, changed_ns))


def fetch_whole(source: Path, target: Path, changed_ns: int) -> None:
    """`copy_whole`, retried if the network fails."""
    for tried in range(1, FETCH_TRIES + 1):
        try:
            return copy_whole(source, target, changed_ns)
        except OSError as error:
            if tried == FETCH_TRIES:
                message = f"could not fetch {source}: {reason(error)}"
                raise DiskError(error.errno, message) from error
            time.sleep(1.0)


def reason(error: OSError) -> str:
    """Return why a copy failed, and a fix."""
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    message = f"{cause.strerror or cause}."
    if cause.errno in (errno.ENOSPC, errno.EDQUOT):
        message += " Make room there, and empty its bin."
    return message


def changes(before: dict, now: dict) -> dict:
    """Return the values of `now` that are new or differ from `before`, section by section."""
    changed = {}
    for key, value in now.items():
        old = before.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            value = changes(old, value)
            if value:
                changed[key] = value
        elif value != old or key not in before:
            changed[key] = value
    return changed


def read_record(path: Path) -> dict:
    """Read the figures of a report.json; {} if it is missing or damaged."""
    try:
        return parse_object(path.read_bytes(), path.name)
    except (OSError, KitError):
        return {}


def read_line(path: Path) -> str:
    """Read the one line of a small file; "" if it is missing."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return ""
