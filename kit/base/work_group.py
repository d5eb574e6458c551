"""Work that several processes may share: each does a job of its own and leaves it in files.

What a job makes depends on the job alone, so the files are equal to the byte with any number of
processes, and another number of processes can resume after a kill.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

Item = TypeVar("Item")


class Job(Protocol):
    """One process's part of some work; it may be sent to that process, so it holds plain values."""

    def run(self, tools, advance: Callable[[float], None]):
        """Do it with `tools`; `advance(n)` reports that `n` more units are done.

        Only the process that ran the job gets the return value.
        """


class WorkGroup:
    """The processes that share work, seen from the one that distributes it: here just this one."""

    size = 1  # processes
    here = 1  # of them on this machine, whose cores they share

    def split_by_key(self, items: Sequence[Item], key: Callable[[Item], str]) -> list[list[Item]]:
        """Return the items of each process, chosen by a hash of `key(item)` alone.

        So an item goes to the same process whatever other items there are.
        """
        shares: list[list[Item]] = [[] for _ in range(self.size)]
        for item in items:
            shares[zlib.crc32(key(item).encode()) % self.size].append(item)
        return shares

    def split_evenly(self, items: Sequence[Item]) -> list[Sequence[Item]]:
        """Return the items of each process, in turn: the counts differ by one at most."""
        return [items[first :: self.size] for first in range(self.size)]

    def do(self, jobs: Sequence[Job], tools, progress: Callable[[float], None]):
        """Run `jobs[i]` in process i; return this one's result once all are done.

        `tools` are what this process works with; `progress(done)` gets the total of all processes.
        Raises KitError with the message of another process that failed.
        """
        (job,) = jobs
        done = 0.0

        def advance(more: float) -> None:
            nonlocal done
            done += more
            progress(done)

        return job.run(tools, advance)


SINGLE_PROCESS = WorkGroup()
