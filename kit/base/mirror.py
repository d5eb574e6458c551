"""A run kept twice: worked on where the disk is fast, copied whole to where it lasts.

On Colab the machine and its disk are taken away and only Google Drive stays: slow, behind a
network, failing now and then in the middle of a write. So nothing works there. A run's folder lies
on the machine's own disk; a `Mirror` copies what changed in it to the kept folder, and a fresh
machine fetches it all before it begins. A share of a laboratory is used the same way.

- A file is written beside its final name and renamed: what is kept is whole, however the machine
  ends. What changed first is copied first, so a mark never comes before what it marks.
- A failure is told once and tried again; the file here is never touched for it.
- What was removed here is removed there: older checkpoints as soon as a newer one is kept,
  anything else after all was copied.
- Machines may share a run: of a file that both wrote the later one stays, figures of report.json
  are merged, and `hold_shared_lock` lets one machine at a time train. Two runs that share
  nothing but a name are told apart by an id, and never mixed.

What was copied is remembered in the folder itself (`.mirror.json`), so nothing is copied twice.
shutil's and rsync's copies know no disk that fails midway, and no second machine on the same run.
Knows files by their names and times alone.
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

from kit.base.config import merge
from kit.base.errors import DiskError, KitError, LockError
from kit.base.files import atomic_path, disk_errors, make_folder, write_atomic
from kit.base.lock import BEAT_S, STALE_S, Lock, held

WAIT_S = 60.0  # for a copy that is under way
FETCH_TRIES = 3  # times, before a file that cannot be fetched is an error
CLOCK_NS = 2_000_000_000  # times nearer to each other than this are the same
LITTER_AGE_S = 900.0  # a half-written copy as old as this has lost its machine
LARGE_BYTES = 100_000_000  # what takes so long to fetch that it is told
MEMORY = ".mirror.json"  # what was copied when, in the folder here
IDENTITY = ".id"  # the same here and there: it is one run
RECORD = "report.json"  # the one file that is merged
Stamp = tuple[int, int]  # bytes, and the time of the last change in nanoseconds


@dataclasses.dataclass(kw_only=True)
class Memory:
    """What this machine knows of each file, by its path inside the folder."""

    here: dict[str, Stamp] = dataclasses.field(default_factory=dict)  # when it was last copied
    there: dict[str, Stamp] = dataclasses.field(default_factory=dict)  # the same file, kept
    record: dict = dataclasses.field(default_factory=dict)  # RECORD as both last had it


class Busy(LockError):
    """Another process or thread of this machine is copying."""


class Mirror:
    """`folder`, kept in `kept` as well. `apart` names folders inside it that are not copied.

    `one_run` is False for a folder that several runs fill with files named by their content. `say`
    hears of trouble, once, and of its end.
    """

    def __init__(
        self,
        folder: Path,
        kept: Path,
        apart: tuple[str, ...] = (),
        one_run: bool = True,
        say: Callable[[str], None] = print,
    ):
        self.folder = Path(folder)
        self.kept = Path(kept)
        self.apart = apart
        self.one_run = one_run
        self.say = say
        self.trouble = ""  # why the last copy failed; "" where it did not
        self.lock: Lock | None = None  # while this machine holds the run for all

    # Fetching.

    def fetch(self, wanted: Callable[[str], bool] = lambda name: True) -> int:
        """Copy here what is kept, of the names that are `wanted`, and not here yet; bytes copied.

        What changed here since it was last copied stays. Raises DiskError where the kept folder
        cannot be read: to go on without it would begin the run anew. Raises KitError where
        another run of this name lies here.
        """
        self._require_one_run()
        make_folder(self.folder)
        there = stamps(self.kept)
        with self._alone(WAIT_S) as memory:
            names = [n for n in there if wanted(n) and self._is_newer(n, there[n], memory)]
            total_bytes = sum(there[name][0] for name in names)
            if total_bytes > LARGE_BYTES:
                self.say(f"Fetching {total_bytes / 1e6:,.0f} MB from {self.kept}.")
            for name in sorted(names, key=lambda name: there[name][1]):
                fetch_whole(self.kept / name, self.folder / name)
                self._remember(name, stamp(self.folder / name), there[name], memory)
        for litter in self.kept.rglob(".*.*"):  # copies of a machine that was taken away
            with contextlib.suppress(OSError):
                if time.time() - litter.stat().st_mtime > LITTER_AGE_S:
                    litter.unlink()
        return total_bytes

    def _is_newer(self, name: str, there: Stamp, memory: Memory) -> bool:
        """Whether the kept file is to take the place of the one here."""
        here = stamp(self.folder / name)
        if name not in memory.here:
            return here is None
        if is_same(memory.there[name], there):
            return False  # nothing happened there; what is missing here was removed here
        return here is None or here == memory.here[name]

    def _require_one_run(self) -> None:
        """Raise KitError where what lies here and what is kept are not one run's."""
        here = read_line(self.folder / IDENTITY)
        there = read_line(self.kept / IDENTITY)
        if not self.one_run or (here and here == there) or not stamps(self.kept):
            return
        if here or stamps(self.folder):
            raise KitError(
                f"{self.folder} and {self.kept} hold two different runs of one name, and mixing "
                "them would spoil both. Choose another RUN, or move one of the two folders away."
            )
        write_atomic(self.folder / IDENTITY, there or secrets.token_hex(8))

    # Copying.

    def copy(self, wait_s: float = 0.0) -> None:
        """Copy what changed here since the last time. Raises DiskError, and LockError while another
        process of this machine copies for longer than `wait_s`."""
        here = stamps(self.folder, self.apart)
        if not here:
            return  # deleted, or nothing made yet: neither is a reason to touch what is kept
        if here == self._memory().here and read_line(self.kept / IDENTITY):
            return
        if self.lock is not None:
            self.lock.confirm()
        with self._alone(wait_s) as memory:
            self._join(memory)
            gone = [name for name in memory.here if name not in here]
            self._remove([n for n in gone if self._is_replaced(n, here, memory)], memory)
            for name in sorted(here, key=lambda name: here[name][1]):
                if memory.here.get(name) != here[name]:
                    self._copy_one(name, memory)
            self._remove([name for name in gone if name in memory.here], memory)

    def _join(self, memory: Memory) -> None:
        """See that the kept folder is this run's, and make it where there is none."""
        self._require_one_run()
        identity = read_line(self.folder / IDENTITY) or secrets.token_hex(8)
        write_atomic(self.folder / IDENTITY, identity)
        if not read_line(self.kept / IDENTITY):  # new, or deleted there
            memory.here.clear()
            memory.there.clear()
            write_atomic(self.kept / IDENTITY, identity)

    def _is_replaced(self, name: str, here: dict[str, Stamp], memory: Memory) -> bool:
        """Whether another file of the kind of `name` is kept whole."""
        kind = (Path(name).parent, Path(name).suffix)
        return any(
            (Path(other).parent, Path(other).suffix) == kind and memory.here[other] == here[other]
            for other in memory.here.keys() & here.keys()
        )

    def _copy_one(self, name: str, memory: Memory) -> None:
        source = self.folder / name
        target = self.kept / name
        if name == RECORD:
            self._merge_record(memory)
        before = stamp(source)  # what is written meanwhile counts as changed the next time
        if before is None:
            return
        copy_whole(source, target)
        self._remember(name, before, stamp(target), memory)

    def _merge_record(self, memory: Memory) -> None:
        """Lay this machine's new figures over those that another one has recorded meanwhile."""
        there = stamp(self.kept / RECORD)
        if there is None or is_same(memory.there.get(RECORD), there):
            return
        with held(self.folder / "report.lock", "recording figures", WAIT_S):
            theirs = read_record(self.kept / RECORD)
            ours = read_record(self.folder / RECORD)
            merged = merge(theirs, changes(memory.record, ours))
            if merged != ours:
                text = json.dumps(merged, indent=1, ensure_ascii=False)
                write_atomic(self.folder / RECORD, text)

    def _remember(self, name: str, here: Stamp, there: Stamp, memory: Memory) -> None:
        memory.here[name] = here
        memory.there[name] = there
        if name == RECORD:
            memory.record = read_record(self.kept / RECORD)

    def _remove(self, names: list[str], memory: Memory) -> None:
        for name in names:
            with disk_errors(self.kept / name), contextlib.suppress(FileNotFoundError):
                # Drive keeps what is deleted in its bin and counts it: let that be nothing.
                os.truncate(self.kept / name, 0)
                (self.kept / name).unlink()
            del memory.here[name], memory.there[name]

    # What was copied before.

    @contextlib.contextmanager
    def _alone(self, wait_s: float) -> Iterator[Memory]:
        """The memory of what was copied, for this process alone, and written at the end."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(
                    held(self.folder / ".mirror.lock", f"copying to {self.kept}", wait_s)
                )
            except LockError as error:
                raise Busy(str(error)) from error
            memory = self._memory()
            try:
                yield memory
            finally:
                write_atomic(self.folder / MEMORY, json.dumps(dataclasses.asdict(memory)))

    def _memory(self) -> Memory:
        """As it was written last; an empty one where it is missing or damaged."""
        try:
            memory = Memory(**json.loads((self.folder / MEMORY).read_bytes()))
            memory.here = {name: tuple(each) for name, each in memory.here.items()}
            memory.there = {name: tuple(each) for name, each in memory.there.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            memory = Memory()
        return memory

    # In the background, and for all machines.

    def keep(self, wait_s: float = 0.0) -> bool:
        """`copy`, with what goes wrong told instead of raised; whether all is kept."""
        trouble = ""
        try:
            self.copy(wait_s)
        except OSError as error:
            trouble = reason(error)
        except Busy:
            return False
        except (LockError, KitError) as error:
            trouble = str(error)
        if trouble and not self.trouble:
            self.say(
                f"Since {time.strftime('%H:%M')} nothing new is kept in {self.kept}: {trouble} It "
                "lies on this machine alone and is lost with it. It is tried again all the time; "
                "you will hear when it works."
            )
        if self.trouble and not trouble:
            self.say(f"All is kept in {self.kept} again.")
        self.trouble = trouble
        return not trouble

    @contextlib.contextmanager
    def hold_shared_lock(self, what: str) -> Iterator[None]:
        """Let no other machine do `what` in this run for the length of the block.

        Waits for a machine that may have been taken away until its signs of life have stopped.
        Raises LockError where it goes on living. Where the kept folder cannot be written to, no
        other machine can be seen: that is told, and the work goes on.
        """
        with contextlib.ExitStack() as stack:
            path = self.kept / f"{what}.lock"
            try:
                self.lock = stack.enter_context(held(path, what, STALE_S + 2 * BEAT_S, self.say))
            except OSError as error:
                self.say(f"Whether another machine is at {what} cannot be seen: {error}")
            try:
                yield
            finally:
                self.lock = None
                with contextlib.suppress(OSError):  # it is stale in five minutes
                    stack.close()


def stamps(folder: Path, apart: tuple[str, ...] = ()) -> dict[str, Stamp]:
    """{path inside `folder`, with slashes: stamp} of the files that may be kept.

    None of the folders `apart` in it, and nothing that serves processes at work: names that begin
    with a dot, locks and claims.
    """
    found = {}
    folder = Path(folder)
    for place, below, names in os.walk(folder, onerror=_unless_missing):
        if Path(place) == folder:
            below[:] = [name for name in below if name not in apart]
        for name in names:
            path = Path(place, name)
            of_work = name.startswith(".") or ".lock" in name or name.endswith(".claim")
            about = None if of_work else stamp(path)
            if about is not None:
                found[path.relative_to(folder).as_posix()] = about
    return found


def is_same(before: Stamp | None, now: Stamp) -> bool:
    """Whether a kept file is as it was; some disks remember a time only to the second."""
    return before is not None and before[0] == now[0] and abs(before[1] - now[1]) < CLOCK_NS


def _unless_missing(error: OSError) -> None:
    """A folder that cannot be read is not an empty one."""
    if not isinstance(error, FileNotFoundError):
        told = f"{error.filename} cannot be read: {reason(error)} Is its disk still mounted?"
        raise DiskError(error.errno, told) from error


def stamp(path: Path) -> Stamp | None:
    """Bytes and time of the last change of a file; None where there is none."""
    try:
        about = Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return (about.st_size, about.st_mtime_ns)


def copy_whole(source: Path, target: Path) -> None:
    """Copy a file, with the time of its last change; `target` is the old or the new one, whole."""
    with atomic_path(target) as part:
        shutil.copyfile(source, part)
    changed_ns = Path(source).stat().st_mtime_ns
    with contextlib.suppress(OSError):  # a share that keeps times of its own
        os.utime(target, ns=(changed_ns, changed_ns))


def fetch_whole(source: Path, target: Path) -> None:
    """`copy_whole`, tried again where the network fails."""
    for tried in range(1, FETCH_TRIES + 1):
        try:
            return copy_whole(source, target)
        except OSError as error:
            if tried == FETCH_TRIES:
                raise DiskError(
                    error.errno, f"could not fetch {source}: {reason(error)}"
                ) from error
            time.sleep(1.0)


def reason(error: OSError) -> str:
    """Why a copy failed, and what helps."""
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    told = f"{cause.strerror or cause}."
    if cause.errno in (errno.ENOSPC, errno.EDQUOT):
        told += " Make room there, and empty its bin."
    return told


def changes(before: dict, now: dict) -> dict:
    """What of `now` is new or other than in `before`, section by section."""
    found = {}
    for key, value in now.items():
        old = before.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            value = changes(old, value)
            if value:
                found[key] = value
        elif value != old or key not in before:
            found[key] = value
    return found


def read_record(path: Path) -> dict:
    """The figures in a report.json; {} where there are none or they are damaged."""
    try:
        record = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def read_line(path: Path) -> str:
    """The one line of a small file; "" where there is none."""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""
