"""A lock file for one process at a time, which names its holder and expires when that has died.

It works on network shares and Google Drive, too, where locks on open files do not. The
holder renews it; its death is noticed at once on this machine, elsewhere when the renewals stop.
"""

import contextlib
import dataclasses
import errno
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

import psutil

from kit.base.config import build, parse_object
from kit.base.errors import DiskError, KitError
from kit.base.files import disk_errors, write_atomic

BEAT_S = 20.0  # between two signs of life
STALE_S = 300.0  # without a sign of life: then a holder on another machine counts as gone
TORN_S = 10.0  # the same for an empty file: its process was killed before writing it
PAUSE_S = 0.05  # between two checks of a held lock
# Locks of this process, and the thread that took each.
_OURS: dict[str, threading.Thread] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Holder:
    machine: str = ""  # "": it says nothing yet
    pid: int = 0
    token: str = ""  # of this one lock: process numbers are used again
    what: str = "something"  # that is being done
    since_s: float = 0.0  # Unix time
    beat_s: float = 0.0  # Unix time of the latest sign of life

    @property
    def age_s(self) -> float:
        """Seconds since the latest sign of life; clocks of two machines may differ a little."""
        return max(0.0, time.time() - self.beat_s)


@contextlib.contextmanager
def held(
    path: Path, what: str, wait_s: float = 1.0, say: Callable[[str], None] = lambda _: None
) -> Iterator["Lock"]:
    """Hold the lock file `path`, the only one to do `what`, for the length of the block.

    Waits up to `wait_s` for a living holder, after calling `say` once; then raises KitError. Raises
    DiskError where nothing can be written.
    """
    lock = Lock(Path(path), what)
    lock.acquire(wait_s, say)
    threading.Thread(target=lock.beat, name=f"lock {path}", daemon=True).start()
    try:
        yield lock
    finally:
        lock.release()


class Lock:
    """A lock file of this process; `held` makes, renews and removes it."""

    def __init__(self, path: Path, what: str):
        self.path = path
        self.released = threading.Event()
        self.file_lock = threading.Lock()  # so that no sign of life undoes the release
        now_s = time.time()
        self.mine = Holder(
            machine=machine(),
            pid=os.getpid(),
            token=secrets.token_hex(8),
            what=what,
            since_s=now_s,
            beat_s=now_s,
        )

    def acquire(self, wait_s: float, say: Callable[[str], None]) -> None:
        """Make the file, or take it over from a dead holder. KitError after `wait_s`."""
        until_s = time.monotonic() + wait_s
        announced = False
        while not self._make():
            holder = read_holder(self.path)
            if holder and is_gone(holder) and self._take_over(holder):
                break
            if time.monotonic() >= until_s:
                raise KitError(describe_holder(self.path, holder or Holder()))
            if holder and not announced:
                say(f"Waiting: {describe_holder(self.path, holder)}")
                announced = True
            time.sleep(PAUSE_S)
        _OURS[self.mine.token] = threading.current_thread()

    def _make(self) -> bool:
        """Whether this process has just made the file."""
        with disk_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = new_file(self.path)
            if handle is None:
                return False
            try:
                with open(handle, "w", encoding="utf-8") as file:
                    json.dump(dataclasses.asdict(self.mine), file)
            except OSError:
                self.path.unlink(missing_ok=True)  # the disk is full: an empty lock is nobody's
                raise
        return True

    def _take_over(self, gone: Holder) -> bool:
        """Whether this process, the first to make a file named after it, replaced that holder."""
        claim = self.path.with_name(f"{self.path.name}.{gone.token or 'torn'}")
        with disk_errors(claim):
            handle = new_file(claim)
        if handle is None:
            with contextlib.suppress(OSError):  # it died while it took over
                if time.time() - claim.stat().st_mtime > TORN_S:
                    claim.unlink()
            return False
        os.close(handle)
        try:
            if read_holder(self.path) != gone:  # somebody was quicker, or it lives after all
                return False
            write_atomic(self.path, json.dumps(dataclasses.asdict(self.mine)))
            for left_by_a_kill in self.path.parent.glob(f".{self.path.name}.*"):
                left_by_a_kill.unlink(missing_ok=True)
            return True
        finally:
            claim.unlink(missing_ok=True)

    def beat(self) -> None:
        """Renew the file until it is released, or another's."""
        while not self.released.wait(BEAT_S):
            with contextlib.suppress(OSError), self.file_lock:  # a network that fails may come back
                holder = read_holder(self.path)
                if self.released.is_set() or (holder and holder.token != self.mine.token):
                    return
                if holder:
                    now = dataclasses.asdict(self.mine) | {"beat_s": time.time()}
                    write_atomic(self.path, json.dumps(now))

    def confirm(self) -> None:
        """Raise KitError where another process took over, DiskError where the folder is gone."""
        holder = read_holder(self.path)
        if holder is None and not self.path.parent.is_dir():
            gone = f"{self.path.parent} is gone, it was moved or deleted during {self.mine.what}"
            fix = "put it back and run again, or start a new run"
            raise DiskError(errno.ENOENT, f"{gone}: {fix}")
        if holder is None and self._make():  # somebody removed the file alone
            return
        holder = holder or read_holder(self.path) or Holder()
        if holder.token != self.mine.token:
            raise KitError(describe_holder(self.path, holder))

    def release(self) -> None:
        """Remove the file, if it is still this process's own."""
        if os.getpid() != self.mine.pid:  # a fork that got a copy of this object
            return
        with self.file_lock:
            self.released.set()
            _OURS.pop(self.mine.token, None)
            holder = read_holder(self.path)
            if holder is not None and holder.token == self.mine.token:
                self.path.unlink(missing_ok=True)


def new_file(path: Path) -> int | None:
    """The handle of a file that this process has just made; None where there is one already."""
    try:
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return None


def read_holder(path: Path) -> Holder | None:
    """What the lock file says; None where there is none."""
    try:
        data = path.read_bytes()
        made_s = path.stat().st_mtime
    except FileNotFoundError:
        return None
    try:
        holder = build(Holder, parse_object(data, path.name))
    except KitError:
        holder = Holder()
    return holder if holder.token else Holder(beat_s=made_s)


def is_gone(holder: Holder) -> bool:
    """Whether the holder of a lock will not come back to it."""
    if not holder.machine:
        return holder.age_s > TORN_S
    if holder.machine != machine():
        return holder.age_s > STALE_S
    if holder.pid == os.getpid():
        thread = _OURS.get(holder.token)
        # If this thread took it, it no longer uses it: an abandoned loop, an interrupted cell.
        return thread is None or thread is threading.current_thread() or not thread.is_alive()
    try:
        process = psutil.Process(holder.pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return True
        # Another process with the same number: it started after the lock was taken.
        return process.create_time() > holder.since_s + 60 and holder.age_s > STALE_S
    except psutil.AccessDenied:  # somebody else's
        return False
    except (psutil.NoSuchProcess, ValueError, OverflowError):  # or not a valid process number
        return True


@cache
def machine() -> str:
    """A name of this machine, or container, that no other has by chance."""
    address = uuid.getnode()
    parts = [platform.node()]
    if not address >> 40 & 1:  # a real one; without one, Python returns a random number
        parts.append(f"{address:012x}")
    with contextlib.suppress(OSError):  # Linux: process numbers of another container are different
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def describe_holder(path: Path, holder: Holder) -> str:
    if not holder.machine:
        return f"{path} was just made by another process: run again in {TORN_S:.0f} s."
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since_s))
    is_here = holder.machine == machine()
    who = f"process {holder.pid} on {holder.machine.split(' ')[0]}"
    if is_here and holder.pid == os.getpid():
        who = f"this very notebook (process {holder.pid})"
    line = (
        f"{path.parent} is in use: {who} has been at {holder.what} since {began}, its last sign of "
        f"life was {holder.age_s:.0f} s ago. Wait until it ends, or stop it there"
    )
    if is_here:
        return f"{line} (the Stop button, or restart that notebook's kernel)."
    return (
        f"{line}. If that machine is gone, run again in {max(0, STALE_S - holder.age_s):.0f} s: a "
        f"lock without a sign of life for {STALE_S:.0f} s is taken over. Or delete {path}."
    )
