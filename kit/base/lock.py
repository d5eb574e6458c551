"""Locks on files: one process of a machine at a time, or one machine at a time.

`held` locks out other processes of this machine; the system frees it when its holder ends or is
killed. Machines that share a Google Drive do not see such locks. For them a `SharedLock` is a file
that its holder renews; another machine takes it over if the renewals stop for `STALE_S`.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import platform
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import BinaryIO

import psutil

from kit.base.config import build, parse_object
from kit.base.errors import InUse, KitError
from kit.base.files import disk_errors, make_folder, write_atomic

PAUSE_S = 0.05  # between two tries
SHARED_PAUSE_S = 1.0  # the same for a shared lock
BEAT_S = 20.0  # between two renewals of a shared lock
STALE_S = 300.0  # without a renewal: then its holder counts as gone

# The last lock on each file that this process had, and the thread that had it.
_LOCKS: dict[Path, tuple[BinaryIO, threading.Thread]] = {}


def _leave_locks() -> None:
    """In a forked process: else it would keep the locks of the one before it, were that killed."""
    for file, _ in _LOCKS.values():
        file.close()
    _LOCKS.clear()


os.register_at_fork(after_in_child=_leave_locks)


@cache
def machine() -> str:
    """Return a name of this machine, or container, that no other has by chance."""
    name = f"{platform.node()} {uuid.getnode():012x}"
    with contextlib.suppress(OSError):  # Linux: another container has its own process numbers
        name += f" {os.readlink('/proc/self/ns/pid')}"
    return name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Holder:
    """A process that has a lock, by default this one."""

    what: str  # that is being done
    machine: str = dataclasses.field(default_factory=machine)
    pid: int = dataclasses.field(default_factory=os.getpid)
    since_s: float = dataclasses.field(default_factory=time.time)  # Unix time
    beat_s: float = 0.0  # Unix time of the last renewal, by the clock of its machine
    token: str = ""  # of this one shared lock

    def to_json(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    def is_gone(self, silent_s: float) -> bool:
        """Return whether it has ended, if it was seen not to renew its lock for `silent_s`.

        By a clock that is ahead the last renewal is still to come, which says nothing: watch it.
        """
        is_here = self.machine == machine()
        if is_here and (self.pid == os.getpid() or not psutil.pid_exists(self.pid)):
            return True
        return max(time.time() - self.beat_s, silent_s) > STALE_S


@contextlib.contextmanager
def held(
    path: Path, what: str, wait_s: float = 1.0, say: Callable[[str], None] = lambda _: None
) -> Iterator[None]:
    """Hold the lock file `path`, the only process to do `what`, for the length of the block.

    Waits up to `wait_s` for another one, after calling `say` once; then raises InUse. Raises
    DiskError where nothing can be written.
    """
    path, this_thread = Path(path), threading.current_thread()
    before, thread = _LOCKS.get(path, (None, None))
    if before and (thread is this_thread or not thread.is_alive()):
        before.close()  # an abandoned generator, an interrupted cell
    file = wait_for(lambda: _open_locked(path), path, wait_s, say)
    _LOCKS[path] = (file, this_thread)
    try:
        with disk_errors(path):
            file.truncate(0)
            file.write(Holder(what=what).to_json())
        yield
    finally:
        if not file.closed:
            with contextlib.suppress(OSError):  # its folder was deleted
                path.unlink()
            file.close()


def _open_locked(path: Path) -> BinaryIO | None:
    """Return the lock file, open and locked; None while another process has it."""
    with disk_errors(path), contextlib.ExitStack() as stack:
        make_folder(path.parent)
        file = stack.enter_context(open(path, "a+b", buffering=0))  # what it says stays
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_current = os.path.samestat(os.fstat(file.fileno()), path.stat())
        except (BlockingIOError, FileNotFoundError):
            return None
        if is_current:  # else the last holder has just removed this one
            stack.pop_all()
            return file


def current_holder(path: Path) -> Holder | None:
    """Return the process that has the lock file `path` at this moment; None if none has."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return read_holder(path)
    return None


class SharedLock:
    """A lock between machines, on a file in a folder that they share.

    On each machine only the process that has the run's own lock may acquire it.
    """

    def __init__(self, path: Path, what: str):
        self.path = path
        self.mine = Holder(what=what, token=secrets.token_hex(8))
        self.last: Holder | None = None  # what another one has written last
        self.last_new_s = 0.0  # when that was new, by this machine's clock
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._renew, name=f"lock {path}", daemon=True)

    def acquire(self, wait_s: float, say: Callable[[str], None]) -> None:
        """Take the lock once it is free or its holder is gone, and renew it from then on.

        Waits up to `wait_s`, after calling `say` once; then raises InUse.
        """
        wait_for(self._take, self.path, wait_s, say)
        self.thread.start()

    def _take(self) -> bool:
        holder, now_s = read_holder(self.path), time.monotonic()
        if holder != self.last:
            self.last, self.last_new_s = holder, now_s
        if holder is None or holder.is_gone(silent_s=now_s - self.last_new_s):
            self._write()
        time.sleep(SHARED_PAUSE_S)  # of two that write at the same time, the later one gets it
        holder = read_holder(self.path)
        return holder is not None and holder.token == self.mine.token

    def _other_holder(self) -> Holder | None:
        holder = read_holder(self.path)
        return holder if holder and holder.token != self.mine.token else None

    def _write(self) -> None:
        write_atomic(self.path, dataclasses.replace(self.mine, beat_s=time.time()).to_json())

    def _renew(self) -> None:
        while not self.over.wait(BEAT_S):
            with contextlib.suppress(OSError):  # a network that fails may come back
                if self._other_holder():
                    return
                self._write()

    def confirm(self) -> None:
        """Raise KitError if another machine has taken over."""
        if self._other_holder():
            raise KitError(describe_holder(self.path))

    def release(self) -> None:
        self.over.set()
        if self.thread.is_alive():
            self.thread.join()
        if not self._other_holder():
            self.path.unlink(missing_ok=True)


def wait_for(take: Callable, path: Path, wait_s: float, say: Callable[[str], None]):
    """Return what `take()` returns as soon as that is true; raise InUse after `wait_s`."""
    until_s = time.monotonic() + wait_s
    announced = False
    while not (lock := take()):
        message = describe_holder(path)
        if time.monotonic() >= until_s:
            raise InUse(message)
        if not announced:
            say(f"Waiting: {message}")
            announced = True
        time.sleep(PAUSE_S)
    return lock


def read_holder(path: Path) -> Holder | None:
    """Return what the lock file says; None without one, or if it is damaged."""
    try:
        return build(Holder, parse_object(path.read_bytes(), path.name))
    except (FileNotFoundError, KitError, TypeError):
        return None


def describe_holder(path: Path) -> str:
    holder = read_holder(path)
    if holder is None:
        return f"{path.parent} is in use by another process. Run again when that has ended."
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since_s))
    message = (
        f"{path.parent} is in use: process {holder.pid} on {holder.machine.split(' ')[0]} has been "
        f"at {holder.what} since {began}. Wait until it ends, or stop it there (the Stop button, "
        "or restart that notebook's kernel)."
    )
    if holder.beat_s:
        gone = f"its lock ends {STALE_S / 60:.0f} minutes after its last sign of life"
        message += f" If that machine is gone, {gone}. Or delete {path}."
    return message
