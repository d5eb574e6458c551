"""Long work that several processes may share: each does a job of its own and leaves it in files.

A process alone is a group of one and does all of it. What a job makes depends on the job alone:
never on who does it, on what was done there before, or on how many share the work. So the files
come out the same to the byte with any number of processes, and another number may go on with what
was left by a kill. Whoever has work to share is given its `WorkGroup`. Knows nothing of the work,
nor of how processes find each other.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

Item = TypeVar("Item")


class WorkError(RuntimeError):
    """What a process of a group could not do, or that one has ended; the message says which."""


class Job(Protocol):
    """One process's part of some work; it may travel to that process, so it holds plain values."""

    def run(self, tools, tell: Callable[[float], None]):
        """Do it with `tools`; `tell(n)` says that `n` more of what is counted are done.

        What it returns only the process that did it gets to see.
        """


class WorkGroup:
    """The processes that share work, seen from the one that gives it out: here it is alone."""

    size = 1  # processes
    here = 1  # of them on this machine, whose cores they share

    def by_content(self, items: Sequence[Item], key: Callable[[Item], str]) -> list[list[Item]]:
        """The items of each process, which follow from what `key` says of each item alone.

        Whatever stands before or behind it, an item goes to the same of so many processes.
        """
        shares: list[list[Item]] = [[] for _ in range(self.size)]
        for item in items:
            shares[zlib.crc32(key(item).encode()) % self.size].append(item)
        return shares

    def in_turn(self, items: Sequence[Item]) -> list[Sequence[Item]]:
        """The items of each process, dealt out like cards: alike in number, however few."""
        return [items[first :: self.size] for first in range(self.size)]

    def do(self, jobs: Sequence[Job], tools, progress: Callable[[float], None]):
        """Have `jobs[i]` done by process i; return what this one's job returned, once all are done.

        `tools` are what this process works with. `progress(done)` hears what all of them have done.
        Raises WorkError with the words of another process that failed.
        """
        (job,) = jobs
        done = 0.0

        def tell(more: float) -> None:
            nonlocal done
            done += more
            progress(done)

        return job.run(tools, tell)


LONE = WorkGroup()
