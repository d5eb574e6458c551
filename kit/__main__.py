"""`python -m kit COMMAND --run NAME`: the notebooks' recipes without a notebook.

Each step of a recipe prints the line that a notebook would show. The options of a command are the
parameters of its recipe, and the comments beside them are their help. These are read from the
source: recipes are imported only when their command runs, so that --help does not wait for torch.
"""

import argparse
import ast
import contextlib
import dataclasses
import functools
import json
import os
import pkgutil
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from kit.base import extras
from kit.base.errors import KitError

INTRODUCTION = """\
Recordings in, a voice out. The commands are the notebooks, in the order in which they are used:

{commands}

Give each --run NAME. `python -m kit COMMAND --help` lists what it takes and what it writes."""

AFTERWARDS = """\
A run is a folder: runs/NAME, or KIT_RUNS/NAME. Everything is kept there, and finished work is never
repeated: after an interruption, give the same command again. Ctrl-C stops at the next safe moment,
with a checkpoint; a second Ctrl-C stops at once. Two GPUs train one model:
torchrun --standalone --nproc-per-node=2 -m -- kit train --run NAME

With --json, stdout gets one JSON object at the end, with all figures, and nothing else: progress
goes to stderr, and an error is the object's "error".

Exit codes: 0 done, 2 something must be changed (the message says what), 3 it does not pass (`train`
has learnt nothing, `evaluate` found the voice not good enough, `verify` that training is not right,
`check` that a step does not fit), 130 stopped by Ctrl-C."""
NOT_PASSED = 3
SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAVED = "later commands need not repeat it"


def yes(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError(text)
    return text == "yes"


TYPES = {"str": str, "int": int, "float": float, "bool": yes, "Path": Path, "dict": json.loads}


@dataclasses.dataclass(frozen=True)
class Command:
    """A subcommand."""

    name: str
    recipe: str  # MODULE:NAME in the package kit; it gets the run and the options
    purpose: str
    writes: str
    example: str = ""  # options that most people need
    takes: str = "run"  # or "preset": a run or a preset alone, or "name": a run's name
    begins: bool = False  # whether it may begin a run: a misspelt name is refused by the others

    def add_to(self, subparsers) -> None:
        """Add the subcommand, with its options and those of all commands."""
        own = subparsers.add_parser(
            self.name,
            description=f"{self.purpose[0].upper()}{self.purpose[1:]}. Writes {self.writes}.",
            epilog="Defaults are in brackets.",
            argument_default=argparse.SUPPRESS,
        )
        own.set_defaults(command=self, run="", preset="", use="", set=[], tables=False, json=False)
        folder = "the run's folder (KIT_RUN, or the run used last)"
        if self.takes == "preset":
            folder = "a run, for its settings and lengths (the preset alone)"
        own.add_argument("--run", metavar="NAME", help=folder)
        if self.takes != "name":
            preset = "a name of configs/ or a .yaml file (KIT_PRESET, or what fits here)"
            own.add_argument("--preset", help=preset)
            own.add_argument("--use", help=f"balanced, speed, quality, low_memory, debug; {SAVED}")
            value = {"metavar": "SECTION.KEY=VALUE", "help": f"such as train.lr=1e-4; {SAVED}"}
            own.add_argument("--set", action="extend", nargs="+", **value)
        own.add_argument("--tables", action="store_true", help="also print the steps' tables")
        own.add_argument("--json", action="store_true", help="only one JSON object on stdout")
        for name, kind, help in options_of(self.recipe):
            option = name.strip("_").replace("_", "-")
            how = {"dest": name, "type": TYPES[kind], "metavar": option.upper(), "help": help}
            own.add_argument(f"--{option}", **how)

    def results(self, run, options: argparse.Namespace) -> Iterable:
        """Run the recipe with the options given; the others are left to its defaults."""
        given = vars(options)
        recipe = pkgutil.resolve_name(f"kit.{self.recipe}")
        names = [name for name, *_ in options_of(self.recipe)]
        steps = recipe(run, **{name: given[name] for name in names if name in given})
        if hasattr(steps, "line"):  # a single result
            return [steps]
        return steps.run() if hasattr(steps, "run") else steps


@functools.cache
def options_of(recipe: str) -> list[tuple[str, str, str]]:
    """Return (name, type, help) of the parameters of MODULE:NAME in kit, without the run."""
    module, _, name = recipe.partition(":")
    path = Path(__file__).parent.joinpath(*module.split(".")).with_suffix(".py")
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    tree = ast.parse(source)
    node = next(each for each in tree.body if getattr(each, "name", "") == name)
    if isinstance(node, ast.ClassDef):
        function = next(
            (each for each in node.body if getattr(each, "name", "") == "__init__"), None
        )
        if function is None:  # it has that of its base, a class of another recipe
            base = node.bases[0].id
            imports = [each for each in tree.body if isinstance(each, ast.ImportFrom)]
            origin = next(each for each in imports if base in [alias.name for alias in each.names])
            return options_of(f"{origin.module.removeprefix('kit.')}:{base}")
    else:
        function = node
    arguments = [each for each in function.args.args if each.arg != "self"]
    options = []
    for argument in (*arguments[1:], *function.args.kwonlyargs):
        kind = ast.unparse(argument.annotation).partition(" ")[0]
        help = lines[argument.lineno - 1].partition("  # ")[2]
        options.append((argument.arg, kind, help.replace("%", "%%")))
    return options


COMMANDS = [  # in the order in which they are used
    Command(
        "setup",
        "recipes.setup:Setup",
        "what suits this machine, and whether the run fits",
        "the choices for this machine to the run's report",
        begins=True,
    ),
    Command(
        "prepare",
        "recipes.prepare:Preparation",
        "check, tokenizer, codec, codes on disk",
        "the data report (rejected clips and why), tokenizer, codec, recogniser and codes",
        example="--data recordings/",
        begins=True,
    ),
    Command(
        "benchmark",
        "recipes.benchmark:Benchmark",
        "which switches and micro-batch pay off here (optional)",
        "speed.yaml, what pays off, for `train` and as a --preset; finished trials are reused",
        begins=True,
    ),
    Command(
        "check",
        "recipes.check:check",
        "does a training step fit here, or another GPU? (optional)",
        "nothing. Exit code 3: it does not fit. Without --run, the preset alone is checked",
        takes="preset",
    ),
    Command(
        "verify",
        "recipes.verify:verify",
        "is training right, here? (optional, a minute)",
        "the proofs to the run's report. Exit code 3: one of them fails",
    ),
    Command(
        "train",
        "recipes.train:Training",
        "the model; resumes where it stopped",
        "weights, checkpoints and the log; resumes from the newest intact checkpoint. Exit code 3: "
        "it has learnt nothing",
    ),
    Command(
        "profile",
        "recipes.train:profile",
        "where ten steps of a running training spend their time",
        "a trace for ui.perfetto.dev and a table of operators to the run's profile/",
        takes="name",
    ),
    Command(
        "evaluate",
        "recipes.evaluate:Evaluation",
        "is it intelligible?",
        "error rates, samples, and whether the voice passes. Exit code 3: it does not",
    ),
    Command(
        "speak",
        "recipes.speak:speak",
        "a sentence as a WAV file; what speech costs",
        "the WAV file; those of --file, and index.csv; without both figures, samples and export/",
        example='--text "..."',
    ),
    Command(
        "checklist",
        "recipes.reports:Checklist",
        "what was checked, and what is left to do",
        "nothing: it reads the run's report",
    ),
    Command(
        "compare",
        "recipes.reports:write_comparison",
        "two runs side by side",
        "compare-B.html to the run's folder: curves, figures, and the settings that differ",
        example="--with other",
        takes="name",
    ),
    Command(
        "preset",
        "recipes.reports:preset",
        "a run's settings as a preset, for other runs",
        "nothing: the YAML goes to stdout (> mine.yaml), for --preset mine.yaml",
        takes="preset",
    ),
    Command(
        "pack",
        "recipes.run_copy:pack",
        "a run as one file, for another machine",
        "NAME.tar: the run, its codes and held-out recordings",
    ),
    *(Command(name, **words) for name, words in extras.offered("COMMANDS").items()),
]


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
    answer = Answer({"command": options.command.name})
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


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors --json also prints as an object."""

    def error(self, message: str):
        if "--json" in sys.argv:
            print(json.dumps({"error": message, "exit_code": 2}))
        super().error(message)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    lines = []
    for command in COMMANDS:
        example = f": {command.example}" if command.example else ""
        lines.append(f"  python -m kit {command.name:10}  {command.purpose}{example}")
    top = Parser(
        prog="voicekit" if Path(sys.argv[0]).stem == "voicekit" else "python -m kit",
        description=INTRODUCTION.format(commands="\n".join(lines)),
        epilog=AFTERWARDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = top.add_subparsers(required=True, metavar="COMMAND", help="one of those above")
    for command in COMMANDS:
        command.add_to(subparsers)
    return top


def run_command(options: argparse.Namespace, interrupts: Interrupts, answer: Answer) -> int:
    """Run the recipe's steps and print each result, until the end or an interrupt.

    Under torchrun the first process does this; the others wait for its orders.
    """
    from kit.recipes.start import set_thread_waiting, start

    set_thread_waiting()
    command = options.command
    takes = "name" if "voice" in options else command.takes
    if takes == "name":
        print_results(command.results(options.run, options), options.tables, interrupts, answer)
        return 0
    from kit.base.hardware import allow_expandable_segments
    from kit.base.run import parse_settings
    from kit.recipes.open_run import open_settings
    from kit.training.ranks import broadcast_order, follow_orders, join_ranks

    allow_expandable_segments()
    chosen = (options.run, options.preset, options.use, parse_settings(options.set))
    if takes == "preset":
        run = open_settings(*chosen, gpu=getattr(options, "gpu", ""))
        results = command.results(run, options)
        print_results(results, options.tables, interrupts, answer)
        return 0
    ranks = join_ranks()
    interrupts.ranks = ranks
    answer.is_main = ranks.is_main
    if not ranks.is_main:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # the main process gets them, and stops all
        follow_orders(ranks)
        return 0
    if ranks.several and command.name != "train":
        raise KitError(
            f"`{command.name}` runs in one process, but torchrun has started {ranks.world}: run it "
            "without torchrun, which is for `train` alone. Several machines prepare a large corpus "
            "by `prepare --shard`."
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
