"""`python -m kit COMMAND --run NAME`: the notebooks' recipes, headless.

A recipe's steps run in order; each prints the line a notebook would show. Ctrl-C is the panel's
Stop: what was done is kept, and the same command goes on from there.
"""

import argparse
import dataclasses
import signal
import sys

from kit.recipes.commands import COMMANDS

INTRODUCTION = """\
Recordings in, a voice out. The commands are the notebooks, in the order they are used:

{commands}

`python -m kit COMMAND --help` tells what a command takes and what it leaves."""

AFTERWARDS = """\
A run is a folder: runs/NAME, or KIT_RUNS/NAME. Everything there is kept, and nothing finished is
done again: give the same command once more after an interruption. Ctrl-C stops at the next safe
moment, with a checkpoint; a second Ctrl-C leaves at once. Several processes share the work of
prepare and train: torchrun --standalone --nproc-per-node=2 -m -- kit prepare --run NAME

Exit codes: 0 done, 2 something is to be changed (one sentence says what), 130 stopped by Ctrl-C."""


def main(words: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = parser().parse_args(words)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a terminal that knows no Ethiopic
    interrupts = Interrupts()
    try:
        return follow(options, interrupts)
    except KeyboardInterrupt:
        return interrupts.leave()
    except (ValueError, RuntimeError, OSError) as error:
        if not type(error).__module__.startswith("kit."):
            raise
        print(error, file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """Every command with its options."""
    lines = []
    for command in COMMANDS:
        called = f"python -m kit {command.name:9} --run mine {command.example}"
        lines.append(f"  {called:55} {command.purpose}")
    whole = argparse.ArgumentParser(
        prog="python -m kit",
        description=INTRODUCTION.format(commands="\n".join(lines)),
        epilog=AFTERWARDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = whole.add_subparsers(required=True, metavar="COMMAND", help="one of those above")
    for command in COMMANDS:
        command.add_to(commands)
    return whole


def follow(options: argparse.Namespace, interrupts: "Interrupts") -> int:
    """Take the recipe's steps, a printed line each, until its end or an interrupt.

    Of several processes that torchrun has started the first does; the others help as it orders.
    """
    from kit.recipes.start import start, wait_patiently

    wait_patiently()
    from kit.base.errors import KitError
    from kit.base.hardware import allow_expandable_segments
    from kit.recipes.orders import follow_main, next_order
    from kit.recipes.settings import parse_settings
    from kit.training.ranks import join_ranks

    allow_expandable_segments()
    ranks = join_ranks(options.command.own_card)
    interrupts.ranks = ranks
    if not ranks.is_main:
        interrupts.ignore()  # the main one hears them, and stops all
        follow_main(ranks)
        return 0
    if ranks.several and not options.command.shared:
        raise KitError(
            f"`{options.command.name}` runs in one process, and torchrun has started "
            f"{ranks.world}: leave torchrun out. Several share `prepare` and `train`, also of a "
            "voice to begin with (`prepare --start-from`)."
        )
    run = start(options.run, options.preset, options.use, parse_settings(options.set))
    run = dataclasses.replace(run, ranks=ranks)
    print(run, flush=True)
    for result in options.command.results(run, options):
        print_result(result, options.tables)
        if interrupts.signals:
            break
    if ranks.several:
        next_order(ranks)  # none: the others may go
    ranks.leave()
    if interrupts.signals:
        return interrupts.leave()
    print(f"Report: {run.folder / 'report.html'}")
    return 0


def print_result(result, tables: bool) -> None:
    """The result's line; its table, too, when asked for."""
    from kit.base.tables import text_grid, text_table

    print(result, flush=True)
    if tables and result.grid:
        print(text_grid(result.grid), flush=True)
    if tables and result.figures:
        print(text_table(result.figures), flush=True)


class Interrupts:
    """Ctrl-C, or a polite end by the system: heard once by the step at work, which may finish."""

    def __init__(self):
        self.signals: list[int] = []
        self.ranks = None  # the processes that torchrun has started, once they are known
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._hear)

    def ignore(self) -> None:
        """Leave it to another process to hear them."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)

    def _hear(self, number: int, frame) -> None:
        if self.ranks is not None and self.ranks.lost:
            return  # torchrun ends what is left of them, and that is being told already
        self.signals.append(number)
        raise KeyboardInterrupt

    def leave(self) -> int:
        """Say how to go on; the exit code a shell expects. To torchrun, any but 0 is a failure."""
        several = self.ranks is not None and self.ranks.several
        why = "Stopped"
        if several and signal.SIGTERM in self.signals:
            others = f"another of the {self.ranks.world} processes has ended"
            why = f"Stopped: {others}, or torchrun was told to end"
        print(f"{why}. What was done is kept: the same command goes on from there.", flush=True)
        if several:
            return 0
        return 128 + (self.signals or [signal.SIGINT])[0]


if __name__ == "__main__":
    sys.exit(main())
