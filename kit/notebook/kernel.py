"""Who is watching this notebook, a person or a program, and what they are shown."""

import asyncio
import inspect

from IPython import get_ipython

from kit.notebook.result import Result

COMM = ("comm_open", "comm_msg", "comm_close")
# What a page that was reloaded asks before it shows a widget.
ASKED = ("kernel_info_request", "comm_info_request")


def is_watched() -> bool:
    """Whether a person sees this cell: programs that run notebooks (nbmake) take no input."""
    kernel = getattr(get_ipython(), "kernel", None)
    return bool(kernel and kernel.get_parent("shell").get("content", {}).get("allow_stdin"))


def plain_errors() -> None:
    """From now on an error that the kit itself raises shows as one sentence, without the frames.

    Its message says what was wrong and what to do; where in the kit it was noticed helps nobody.
    Any other error keeps its traceback, and the cell fails either way.
    """
    shell = get_ipython()
    if shell is not None:
        shell.set_custom_exc((ValueError, RuntimeError, OSError), _show_error)


def _show_error(shell, kind, error, trace, tb_offset=None) -> list[str]:
    if kind.__module__.startswith("kit."):
        lines = [f"{kind.__name__}: {error}"]
    else:
        lines = shell.InteractiveTB.structured_traceback(kind, error, trace, tb_offset=tb_offset)
    shell._showtraceback(kind, error, lines)
    return lines


def print_results() -> None:
    """Where a program runs the notebook, print a cell's Result as well: a log has no values."""
    shell = get_ipython()
    if shell is not None and not is_watched():
        shell.events.register("post_run_cell", _print_result)


def _print_result(cell) -> None:
    if isinstance(cell.result, Result):
        print(cell.result, flush=True)


class Clicks:
    """Within `with Clicks() as clicks`, `clicks.poll()` handles the clicks on widgets so far.

    A kernel runs callbacks only between cells, so a cell that waits for a training has to ask for
    them. A reloaded page is answered, too. Everything else (the next cells of "Run all") waits, in
    its order. `kernel.do_one_iteration`, which jupyter_ui_poll calls, does nothing in ipykernel 7.
    """

    def __init__(self):
        self.kernel = getattr(get_ipython(), "kernel", None)
        self.stream = _shell_stream(self.kernel)
        self.held = []
        self.held_tasks = []

    def __enter__(self) -> "Clicks":
        if self.stream is not None:
            self.callback = self.stream._recv_callback
            self.stream.on_recv(self._receive, copy=False)
        return self

    def __exit__(self, *_error) -> None:
        if self.stream is None:
            return
        self.stream.on_recv(self.callback, copy=False)
        for frames in self.held:
            result = self.callback(frames)
            if inspect.isawaitable(result):  # ipykernel 7; the tasks run once this cell has ended
                self.held_tasks.append(asyncio.ensure_future(result))

    def poll(self) -> None:
        if self.stream is not None:
            self.stream.flush()

    def _receive(self, frames: list) -> None:
        session = self.kernel.session
        ident, parts = session.feed_identities(frames, copy=False)
        kind = session.deserialize(parts, content=False, copy=False)["header"]["msg_type"]
        if kind in (*COMM, *ASKED):
            self._handle(kind, ident, session.deserialize(parts, copy=False))
        else:
            self.held.append(frames)

    def _handle(self, kind: str, ident, message: dict) -> None:
        # A widget sends its next change only after "idle" for the one before.
        kernel = self.kernel
        parent_ident = kernel._parent_ident["shell"]
        parent = kernel.get_parent("shell")
        kernel.set_parent(ident, message, channel="shell")
        kernel._publish_status("busy", "shell", parent=message)
        try:
            answer = kernel.shell_handlers[kind](_reply_stream(kernel), ident, message)
            if inspect.isawaitable(answer):
                _finish(answer)
        finally:
            kernel._publish_status("idle", "shell", parent=message)
            kernel.set_parent(parent_ident, parent, channel="shell")


def _finish(answer) -> None:
    """Run a coroutine that waits for nothing to its end; the kernel's event loop is busy."""
    try:
        answer.send(None)
    except StopIteration:
        return
    raise RuntimeError("The kernel did not answer at once: reload the page.")


def _reply_stream(kernel):
    """Where this kernel's main thread sends its replies."""
    thread = getattr(kernel, "shell_channel_thread", None)
    if thread is None:
        return kernel.shell_stream
    return thread.manager.get_subshell_to_shell_channel_socket(None)


def _shell_stream(kernel):
    """The stream on which this kernel's main thread gets its messages, or None."""
    if kernel is None:
        return None
    thread = getattr(kernel, "shell_channel_thread", None)  # ipykernel 7: a thread reads the socket
    if thread is None:
        return kernel.shell_stream
    return thread.manager._shell_channel_to_main.to_stream
