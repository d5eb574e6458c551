"""`python -m kit COMMAND --run NAME`: the notebooks' recipes without a notebook.

Each step of a recipe prints the line that a notebook would show. What commands and options there
are stands in recipes/commands.py.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator

from kit.base.errors import KitError
from kit.recipes.commands import COMMANDS, parser

NOT_PASSED = 3
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Answer:
    """The object of --json: `fields`, and line, figures and table of each result added."""

    def __init__(self, fields: dict):
        self.fields = fields
        self.results = []
        self.figures = {}
        self.failed = False  # whether a result has failed
        self.is_main = True  # of several processes only the main one answers

    def add(self, result) -> None:
        self.failed = self.failed or result.failed
        self.figures |= result.figures
        table = [list(row) for row in result.grid]
        self.results.append({"line": result.line, "figures": result.figures, "table": table})

    @contextlib.contextmanager
    def on_stdout(self) -> Iterator[None]:
        """Send all that is printed to stderr, by other processes too; the object to stdout."""
        sys.stdout.flush()
        # A name that is not UTF-8 has surrogates: they become JSON's escapes.
        with os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace") as stdout:
            os.dup2(2, 1)
            try:
                yield
            except BaseException as error:
                self.fields |= {"error": f"{type(error).__name__}: {error}", "exit_code": 1}
                raise
            finally:
                if self.is_main:
                    from kit.base.run import replace_non_finite  # torch: --help does not wait

                    answer = self.fields | {"figures": self.figures, "results": self.results}
                    text = json.dumps(replace_non_finite(answer), ensure_ascii=False, default=str)
                    stdout.write(f"{text}\n")
                sys.stdout.flush()
                stdout.flush()
                os.dup2(stdout.fileno(), 1)


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
    """Run one command; returns the exit code."""
    options = parser().parse_args(words)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # for terminals without Ethiopic
    answer = Answer({"command": options.command})
    with answer.on_stdout() if options.json else contextlib.nullcontext():
        answer.fields["exit_code"] = run_safely(options, answer)
    return answer.fields["exit_code"]


def run_safely(options: argparse.Namespace, answer: Answer) -> int:
    """Run the command; returns the exit code. An error of the kit is printed and answered."""
    interrupts = Interrupts()
    try:
        code = run_command(options, interrupts, answer)
        if code == 0 and answer.failed:
            code = NOT_PASSED
    except KeyboardInterrupt:
        code = interrupts.leave()
    except (ValueError, RuntimeError, OSError, ModuleNotFoundError) as error:
        text = str(error)
        if isinstance(error, ModuleNotFoundError):
            fix = "install it, or the kit with all that it needs (pip install without --no-deps)"
            text = f"This command needs the package `{error.name}`: {fix}."
        elif not type(error).__module__.startswith("kit."):
            raise
        print(text, file=sys.stderr)
        answer.fields["error"] = text
        code = getattr(error, "exit_code", 2)
    if interrupts.signals:
        answer.fields["error"] = "Stopped by a signal. The same command resumes."
    return code


def run_command(options: argparse.Namespace, interrupts: Interrupts, answer: Answer) -> int:
    """Run the recipe's steps and print each result, until the end or an interrupt.

    Under torchrun the first process does this; the others wait for its orders.
    """
    from kit.recipes.start import set_thread_waiting, start

    set_thread_waiting()
    command = COMMANDS[options.command]
    if command.takes == "name" or "voice" in options:
        print_results(command.results(options.run, options), options.tables, interrupts, answer)
        return 0
    from kit.base.hardware import allow_expandable_segments
    from kit.base.run import parse_settings
    from kit.recipes.open_run import open_settings
    from kit.training.ranks import broadcast_order, follow_orders, join_ranks

    allow_expandable_segments()
    chosen = (options.run, options.preset, options.use, parse_settings(options.set))
    if command.takes == "preset":
        run = open_settings(*chosen, gpu=getattr(options, "gpu", ""))
        print_results(command.results(run, options), options.tables, interrupts, answer)
        return 0
    ranks = join_ranks()
    interrupts.ranks = ranks
    answer.is_main = ranks.is_main
    if not ranks.is_main:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # the main process gets them, and stops all
        follow_orders(ranks)
        return 0
    if ranks.several and options.command != "train":
        raise KitError(
            f"`{options.command}` runs in one process, but torchrun has started {ranks.world}: run "
            "it without torchrun, which is for `train` alone."
        )
    run = dataclasses.replace(start(*chosen, create=command.begins), ranks=ranks)
    print(run, flush=True)
    answer.fields |= {"run": run.name, "folder": str(run.folder)}
    print_results(command.results(run, options), options.tables, interrupts, answer)
    if ranks.several:
        broadcast_order(ranks)  # none: the other processes may end
    ranks.leave()
    if interrupts.signals:
        return interrupts.leave()
    print(f"Report: {run.folder / 'report.html'}")
    return 0


def print_results(results: Iterable, tables: bool, interrupts: Interrupts, answer: Answer) -> None:
    """Print each result's line, and its tables if asked for; `answer` keeps all of it."""
    from kit.base.formatting import text_grid, text_table

    for result in results:
        answer.add(result)
        print(result, flush=True)
        if tables and result.grid:
            print(text_grid(result.grid), flush=True)
        if tables and result.figures:
            print(text_table(result.figures), flush=True)
        if interrupts.signals:
            break


if __name__ == "__main__":
    sys.exit(main())
