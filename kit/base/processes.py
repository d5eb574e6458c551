"""A function in a process of its own, and work that several processes share.

What a job makes depends on the job alone: another number of processes can resume after a kill.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kit.base.errors import KitError

EXIT_S = 10.0  # for a process to leave by itself once it has answered, before it is killed


def run_in_process(function: Callable, *arguments, preload: Sequence[str]):
    """What `function(*arguments)` returns in a fresh process; raises what it raises there.

    The process is forked from a clean server that has imported the `preload` modules of the first
    call. Raises KitError where it dies.
    """
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    processes = multiprocessing.get_context(method)
    if method == "forkserver":
        # A server that has asked CUDA for its devices could not be forked from; NVML may be asked.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        processes.set_forkserver_preload(list(preload))
    receiver, sender = processes.Pipe(duplex=False)
    # To bytes: shared memory is too small for tensors in many containers.
    packed = pickle.dumps((function, arguments))
    process = processes.Process(target=_answer, args=(sender, packed))
    try:
        process.start()
        sender.close()
        returned, value = pickle.loads(receiver.recv())
        process.join(EXIT_S)
    except EOFError:
        process.join()
        how = f"ended with code {process.exitcode}"
        if process.exitcode < 0:
            how = f"was ended by {signal.Signals(-process.exitcode).name}"
        hint = ": most likely memory ran out" if how.endswith("SIGKILL") else ""
        raise KitError(f"its process {how}{hint}") from None
    finally:
        if process.pid is not None:
            process.kill()
            process.join()
    if returned:
        return value
    raise value


def _answer(sender, packed: bytes) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches it, too: the parent ends it
    score = Path("/proc/self/oom_score_adj")
    if score.exists():  # when memory runs out, Linux kills this process and not the notebook
        score.write_text("1000", encoding="utf-8")
    try:
        function, arguments = pickle.loads(packed)
        answer = (True, function(*arguments))
    except Exception as error:
        answer = (False, error)
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
        sender.send(pickle.dumps(answer))


# One process's part of some work, `job(tools, advance)`; `advance(n)` reports n more units done. It
# may be sent to that process, so it is a `partial` of a module's function with plain values.
Job = Callable[[Any, Callable[[float], None]], Any]


class WorkGroup:
    """The processes that share work, seen from the one that distributes it: here just this one."""

    size = 1  # processes
    local_size = 1  # of them on this machine, whose cores they share

    def split_by_key(self, items: Sequence, key: Callable[[Any], str]) -> list[list]:
        """Return the items of each process, by a hash of `key(item)` whatever others there are."""
        shares = [[] for _ in range(self.size)]
        for item in items:
            shares[zlib.crc32(key(item).encode()) % self.size].append(item)
        return shares

    def split_evenly(self, items: Sequence) -> list[Sequence]:
        """Return the items of each process, in turn: the counts differ by one at most."""
        return [items[first :: self.size] for first in range(self.size)]

    def do(self, jobs: Sequence[Job], tools, progress: Callable[[float], None]):
        """Run `jobs[i](tools, advance)` in process i; return this one's result once all are done.

        `progress(done)` gets the total of all. Raises KitError with the message of one that failed.
        """
        (job,) = jobs
        done = 0.0

        def advance(more: float) -> None:
            nonlocal done
            done += more
            progress(done)

        return job(tools, advance)


SINGLE_PROCESS = WorkGroup()
