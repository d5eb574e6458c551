"""`python -m kit prepare|train|evaluate|speak|benchmark`: the notebooks' recipes, headless.

A recipe's steps run in order; each prints the line a notebook would show. Ctrl-C is the panel's
Stop: what was done is kept, and the same command goes on from there.
"""

import argparse
import dataclasses
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

INTRODUCTION = """\
Recordings in, a voice out. The commands are the notebooks 00 to 05, in the order they are used:

  python -m kit setup     --run mine                      what suits this machine
  python -m kit prepare   --run mine --data recordings/   check, tokenizer, codec, codes on disk
  python -m kit benchmark --run mine                      which switches pay here (may be left out)
  python -m kit train     --run mine                      the model; goes on where it stopped
  python -m kit evaluate  --run mine                      is it intelligible?
  python -m kit speak     --run mine --text "..."         a sentence as a WAV file
  python -m kit checklist --run mine                      what was checked, and what is to do

`python -m kit COMMAND --help` tells what a command takes and what it leaves."""

AFTERWARDS = """\
A run is a folder: runs/NAME, or KIT_RUNS/NAME. Everything there is kept, and nothing finished is
done again: give the same command once more after an interruption. Ctrl-C stops at the next safe
moment, with a checkpoint; a second Ctrl-C leaves at once.

Exit codes: 0 done, 2 something is to be changed (one sentence says what), 130 stopped by Ctrl-C."""

KEPT = "kept with the run: later commands need not repeat it"


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


def follow(options: argparse.Namespace, interrupts: "Interrupts") -> int:
    """Take the recipe's steps, a printed line each, until its end or an interrupt."""
    from kit.recipes.start import start, wait_patiently

    wait_patiently()
    from kit.recipes.settings import parse_settings

    run = start(options.run, options.preset, options.use, parse_settings(options.set))
    print(run, flush=True)
    for result in options.steps_of(run, options):
        print_result(result, options.tables)
        if interrupts.signals:
            return interrupts.leave()
    print(f"Report: {run.folder / 'report.html'}")
    return 0


def print_result(result, tables: bool) -> None:
    """The result's line; its table, too, when asked for."""
    from kit.notebook.tables import text_grid, text_table

    print(result, flush=True)
    if tables and result.grid:
        print(text_grid(result.grid), flush=True)
    if tables and result.figures:
        print(text_table(result.figures), flush=True)


class Interrupts:
    """Ctrl-C, or a polite end by the system: heard once by the step at work, which may finish."""

    def __init__(self):
        self.signals: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame) -> None:
        self.signals.append(number)
        raise KeyboardInterrupt

    def leave(self) -> int:
        """Say how to go on; the exit code a shell expects."""
        print("Stopped. What was done is kept: the same command goes on from there.")
        return 128 + (self.signals or [signal.SIGINT])[0]


# The commands: what each takes, and the recipe whose steps it runs. What is not given is left to
# the recipe, which has the defaults.


def parser() -> argparse.ArgumentParser:
    """Every command with its options; quick, so that --help need not wait for torch."""
    whole = argparse.ArgumentParser(
        prog="python -m kit",
        description=INTRODUCTION,
        epilog=AFTERWARDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = whole.add_subparsers(required=True, metavar="COMMAND", help="one of those above")
    command(commands, "setup", setup_steps, "what suits this machine, and will it fit")
    add_prepare(command(commands, "prepare", prepare_steps, "recordings to a checked corpus"))
    add_train(command(commands, "train", train_steps, "the model, with checkpoints and the gate"))
    evaluate = command(commands, "evaluate", evaluate_steps, "is it intelligible?")
    evaluate(
        "--sentences", type=int, metavar="N", help="held-out sentences to speak (the preset's)"
    )
    add_speak(
        command(commands, "speak", speak_steps, "a sentence as a WAV file; what speech costs")
    )
    add_benchmark(command(commands, "benchmark", benchmark_steps, "which switches pay here"))
    command(commands, "checklist", checklist_steps, "what was checked, and what is to do")
    return whole


def command(commands, name: str, steps_of: Callable, purpose: str) -> Callable:
    """A command with the options that all have; returns what adds its own."""
    own = commands.add_parser(
        name,
        description=f"{purpose[0].upper()}{purpose[1:]}. {steps_of.__doc__}",
        epilog="In brackets: what holds where an option is not given.",
        argument_default=argparse.SUPPRESS,
    )
    own.set_defaults(steps_of=steps_of, run="", preset="", use="", set=[], tables=False)
    add = own.add_argument
    add("--run", metavar="NAME", help="the run's folder (KIT_RUN, or demo)")
    add("--preset", help="a file of configs/, for a new run (KIT_PRESET, or what suits here)")
    uses = "a file of configs/use/ to lay over it: balanced, speed, quality, low_memory"
    add("--use", help=f"{uses}; {KEPT}")
    value = f"a value of the preset, for instance train.lr=1e-4; {KEPT}"
    add("--set", action="extend", nargs="+", metavar="SECTION.KEY=VALUE", help=value)
    add("--tables", action="store_true", help="print the steps' tables, too")
    return add


def add_prepare(add: Callable) -> None:
    sources = "a folder, table, archive or hf:// name (a corpus spoken by espeak-ng on the spot)"
    add("--data", metavar="PATH", help=sources)
    add("--language", metavar="CODE", help="of the texts, such as am, en, tr (am)")
    share = "stop when more of the hours than this was refused; 100: never (5)"
    add("--refuse-percent", type=float, metavar="P", help=share)
    longest = "leave longer clips out (those that the model has no positions for)"
    add("--longest-s", type=float, metavar="S", help=longest)
    add("--text", metavar="FILE", help="text of any size to learn pieces from (the recordings')")
    phonemes = "learn pieces of phonemes, in espeak-ng's language en-us, for instance (letters)"
    add("--phonemes", metavar="CODE", help=phonemes)


def add_train(add: Callable) -> None:
    steps = "optimiser steps in all; more than before trains a finished run further (the preset's)"
    add("--steps", type=int, metavar="N", help=steps)
    add("--session-hours", type=float, metavar="H", help="until this machine is taken away (12)")
    add("--quota-gb", type=float, metavar="GB", help="how much the run may lay down (the disk)")


def add_speak(add: Callable) -> None:
    text = "say this and nothing else; without it: every way to speak, and a folder to take away"
    add("--text", help=text)
    add("--speaker", help="whose voice, with --text (the first)")
    add("--weights", help="number format, with --text: fp32, bf16, int8 (fp32)")
    add("--out", type=Path, metavar="FILE", help="with --text (spoken.wav in the run's folder)")


def add_benchmark(add: Callable) -> None:
    add("--steps", type=int, metavar="N", help="optimiser steps timed in a round (the preset's)")
    add("--rounds", type=int, metavar="N", help="interleaved; the median one counts (the preset's)")
    add("--model", metavar="xtts", help="the released XTTS-v2's size (the preset's)")
    add("--goal", help="speed, or memory (speed)")


def given(options: argparse.Namespace, *names: str) -> dict:
    """Those of the recipe's own options that were given."""
    return {name: getattr(options, name) for name in names if hasattr(options, name)}


def setup_steps(run, options) -> Iterable:
    """Leaves the choices for this machine in the record."""
    from kit.recipes.setup import Setup

    return Setup(run).run()


def prepare_steps(run, options) -> Iterable:
    """Leaves the ledger of what was refused and why, tokenizer, codec, recogniser and codes."""
    from kit.recipes.prepare import Preparation

    names = ("data", "language", "refuse_percent", "longest_s", "text", "phonemes")
    return Preparation(run, **given(options, *names)).run()


def train_steps(run, options) -> Iterable:
    """Leaves weights, checkpoints and the log; goes on from the newest sound checkpoint."""
    from kit.recipes.train import Training

    return Training(run, **given(options, "steps", "session_hours", "quota_gb")).run()


def evaluate_steps(run, options) -> Iterable:
    """Leaves error rates beside their floor, samples, and whether the voice passes."""
    from kit.recipes.evaluate import Evaluation

    return Evaluation(run, **given(options, "sentences")).run()


def speak_steps(run, options) -> Iterable:
    """Leaves the WAV file; without --text figures, samples and export/, the voice in one folder."""
    from kit.recipes.speak import Speaking

    speaking = Speaking(run)
    if not hasattr(options, "text"):
        return speaking.run()
    return [
        written(speaking.say(options.text, **given(options, "speaker", "weights")), run, options)
    ]


def written(result, run, options):
    """The result with its sound in the file --out, told in a line more."""
    from kit.base.files import write_atomic

    path = getattr(options, "out", run.path("spoken.wav"))
    write_atomic(path, result.sounds[0].wav_bytes())
    return dataclasses.replace(result, line=f"{result.line}\nWritten: {path}")


def benchmark_steps(run, options) -> Iterable:
    """Leaves speed.yaml, the switches that pay, for `train`; what was measured is not again."""
    from kit.recipes.benchmark import Benchmark

    return Benchmark(run, **given(options, "steps", "rounds", "model", "goal")).run()


def checklist_steps(run, options) -> Iterable:
    """Reads the run's record alone."""
    from kit.recipes.checklist import Checklist

    return [Checklist(run).result()]


if __name__ == "__main__":
    sys.exit(main())
