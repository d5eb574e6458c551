"""A function in a process of its own."""

import contextlib
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from kit.base.errors import KitError

EXIT_S = 10.0  # for a process to leave by itself once it has answered, before it is killed


def run_in_process(function: Callable, *arguments, preload: Sequence[str]):
    """What `function(*arguments)` returns in a fresh process; raises what it raises there.

    The process is forked from a clean server that has imported the `preload` modules of the first
    call. Raises KitError where it dies.
    """
    processes = multiprocessing.get_context("forkserver")
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
        code = process.exitcode  # of a signal: its number, negative
        how = f"ended with code {code}"
        if code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        hint = ": most likely memory ran out" if code == -signal.SIGKILL else ""
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
