"""`python -m kit COMMAND --run NAME`: the notebooks' recipes without a notebook.

Each step of a recipe prints the line that a notebook would show. What commands and options there
are stands in recipes/commands.py.
"""

import argparse
import dataclasses
import signal
import sys
from collections.abc import Iterable

from kit.base.errors import KitError
from kit.recipes.commands import COMMANDS, parser

NOT_PASSED = 3
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Collects SIGINT and SIGTERM, and raises KeyboardInterrupt in the step that is running."""

    def __init__(self):
        self.signals: list[int] = []
        self.ranks = None  # the processes of torchrun, once they are known
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame) -> None:
        if self.ranks is not None and self.ranks.lost:
            return  # torchrun is ending the other processes, and the error is being printed
        self.signals.append(number)
        raise KeyboardInterrupt

    def leave(self) -> int:
        """Print how to resume; returns the exit code: 0 to torchrun, to which others are errors."""
        several = self.ranks is not None and self.ranks.several
        why = "Stopped"
        if several and signal.SIGTERM in self.signals:
            why += f": another of the {self.ranks.world} processes ended, or torchrun was stopped"
        print(f"{why}. Finished work is kept: the same command resumes it.", flush=True)
        if several:
            return 0
        return 128 + (self.signals or [signal.SIGINT])[0]


def main(words: list[str] | None = None) -> int:
    """Run one command; returns the exit code. An error of the kit is printed."""
    options = parser().parse_args(words)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # for terminals without Ethiopic
    interrupts = Interrupts()
    try:
        return run_command(options, interrupts)
    except KeyboardInterrupt:
        return interrupts.leave()
    except ModuleNotFoundError as error:
        fix = "install it, or the kit with all that it needs (pip install without --no-deps)"
        print(f"This command needs the package `{error.name}`: {fix}.", file=sys.stderr)
        return 2
    except (ValueError, RuntimeError, OSError) as error:
        if not type(error).__module__.startswith("kit."):
            raise
        print(error, file=sys.stderr)
        return getattr(error, "exit_code", 2)


def run_command(options: argparse.Namespace, interrupts: Interrupts) -> int:
    """Run the recipe's steps and print each result, until the end or an interrupt.

    Under torchrun the first process does this; the others wait for its orders.
    """
    from kit.recipes.start import set_thread_waiting, start

    set_thread_waiting()
    command = COMMANDS[options.command]
    if command.takes == "name" or "voice" in options:
        return print_results(command.results(options.run, options), options.tables, interrupts)
    from kit.base.hardware import allow_expandable_segments
    from kit.base.run import parse_settings
    from kit.recipes.open_run import open_settings
    from kit.training.ranks import broadcast_order, follow_orders, join_ranks

    allow_expandable_segments()
    chosen = (options.run, options.preset, options.use, parse_settings(options.set))
    if command.takes == "preset":
        run = open_settings(*chosen, gpu=getattr(options, "gpu", ""))
        return print_results(command.results(run, options), options.tables, interrupts)
    ranks = join_ranks()
    interrupts.ranks = ranks
    if not ranks.is_main:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # the main process gets them, and stops all
        follow_orders(ranks)
        return 0
    if ranks.several and options.command != "train":
        raise KitError(
            f"`{options.command}` runs in one process, but torchrun has started {ranks.world}: run "
            "it without torchrun, which is for `train` alone. Several machines prepare a large "
            "corpus by `prepare --shard`."
        )
    run = dataclasses.replace(start(*chosen, create=command.begins), ranks=ranks)
    print(run, flush=True)
    code = print_results(command.results(run, options), options.tables, interrupts)
    if ranks.several:
        broadcast_order(ranks)  # none: the other processes may end
    ranks.leave()
    if interrupts.signals:
        return interrupts.leave()
    print(f"Report: {run.folder / 'report.html'}")
    return code


def print_results(results: Iterable, tables: bool, interrupts: Interrupts) -> int:
    """Print each result's line, and its tables if asked for; returns the exit code."""
    from kit.base.formatting import text_grid, text_table

    code = 0
    for result in results:
        if result.failed:
            code = NOT_PASSED
        print(result, flush=True)
        if tables and result.grid:
            print(text_grid(result.grid), flush=True)
        if tables and result.figures:
            print(text_table(result.figures), flush=True)
        if interrupts.signals:
            break
    return code


if __name__ == "__main__":
    sys.exit(main())
