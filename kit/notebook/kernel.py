"""Who is watching this notebook, a person or a program, and what they are shown."""

from IPython import get_ipython

from kit.notebook.result import Result


def front_end() -> tuple[str, str]:
    """(mode, reason): "plain" lines for a program, "live" widgets for a person."""
    kernel = getattr(get_ipython(), "kernel", None)
    if kernel is None:
        return "plain", "there is no notebook kernel"
    if not kernel.get_parent("shell").get("content", {}).get("allow_stdin"):
        return "plain", "the cell was sent by a program that takes no input (nbmake, papermill)"
    return "live", "the front end shows what a thread sends after its cell has ended"


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
    if shell is not None and front_end()[0] == "plain":
        shell.events.register("post_run_cell", _print_result)


def _print_result(cell) -> None:
    if isinstance(cell.result, Result):
        print(cell.result, flush=True)
