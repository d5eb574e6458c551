"""Run a function in a process of its own: what it allocates, sets or breaks ends with it."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from kit.base.errors import KitError

EXIT_S = 10.0  # for a process to leave by itself once it has answered, before it is killed


class ProcessDied(KitError):
    """The process ended without an answer, or took too long."""


def run_in_process(
    function: Callable,
    *arguments,
    preload: Sequence[str] = ("torch",),
    limit_s: float | None = None,
):
    """What `function(*arguments)` returns in a fresh process; raises what it raises there.

    Function, arguments and result are pickled. The process is forked from a clean server that has
    imported the `preload` modules of the first call, never from a notebook's kernel. Raises
    ProcessDied where it is killed, crashes or takes longer than `limit_s`.
    """
    methods = multiprocessing.get_all_start_methods()
    method = "forkserver" if "forkserver" in methods else "spawn"
    processes = multiprocessing.get_context(method)
    if method == "forkserver":
        # A server that has asked CUDA for its devices could not be forked from; NVML may be asked.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        processes.set_forkserver_preload(list(preload))
    receiver, sender = processes.Pipe(duplex=False)
    process = processes.Process(target=_answer, args=(sender, function, arguments))
    try:
        process.start()
        sender.close()
        if not receiver.poll(limit_s):
            raise ProcessDied(f"it took longer than {limit_s:g} s")
        returned, value = receiver.recv()
        process.join(EXIT_S)
    except EOFError:
        process.join()
        raise ProcessDied(_reason(process.exitcode)) from None
    finally:
        if process.pid is not None:
            process.kill()
            process.join()
    if returned:
        return value
    raise value


def _answer(sender, function: Callable, arguments: tuple) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches it, too: the parent ends it
    score = Path("/proc/self/oom_score_adj")
    if score.exists():  # when memory runs out, Linux kills this process and not the notebook
        score.write_text("1000", encoding="utf-8")
    try:
        answer = (True, function(*arguments))
    except Exception as error:
        answer = (False, error)
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
        sender.send(answer)


def _reason(exit_code: int) -> str:
    if exit_code >= 0:
        return f"its process ended with code {exit_code}"
    name = signal.Signals(-exit_code).name
    hint = ": most likely memory ran out" if name == "SIGKILL" else ""
    return f"its process was ended by {name}{hint}"
