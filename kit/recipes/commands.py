"""The commands of `python -m kit`: their recipes, their help and their options.

The options of a command are the parameters of its recipe, and the comments beside them are their
help. These are read from the source: recipes are imported only when their command runs, so that
--help does not wait for torch.
"""

import argparse
import ast
import dataclasses
import functools
import json
import pkgutil
import sys
from collections.abc import Iterable
from pathlib import Path

from kit.base import extras

INTRODUCTION = """\
Recordings in, a voice out. The commands are the notebooks, in the order in which they are used:

{commands}

Give each --run NAME. `python -m kit COMMAND --help` lists what it takes and what it writes."""

AFTERWARDS = """\
A run is a folder: runs/NAME, or KIT_RUNS/NAME. Everything is kept there, and finished work is never
repeated: after an interruption, give the same command again. Ctrl-C stops at the next safe moment,
with a checkpoint; a second Ctrl-C stops at once. Two GPUs train one model:
torchrun --standalone --nproc-per-node=2 -m -- kit train --run NAME

Exit codes: 0 done, 2 something must be changed (the message says what), 3 it does not pass (`train`
has learnt nothing, `evaluate` found the voice not good enough, `verify` that training is not right,
`check` that a step does not fit), 130 stopped by Ctrl-C."""
SAVED = "later commands need not repeat it"


def yes(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError(text)
    return text == "yes"


TYPES = {"str": str, "int": int, "float": float, "bool": yes, "Path": Path, "dict": json.loads}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """What a command runs, and what its help says."""

    recipe: str  # MODULE:NAME in the package kit; it gets the run and the options
    purpose: str
    writes: str
    example: str = ""  # options that most people need
    takes: str = "run"  # or "preset": a run or a preset alone, or "name": a run's name
    begins: bool = False  # whether it may begin a run: a misspelt name is refused by the others

    def results(self, run, options: argparse.Namespace) -> Iterable:
        """Run the recipe with the options given; the others are left to its defaults."""
        recipe = pkgutil.resolve_name(f"kit.{self.recipe}")
        given = vars(options)
        names = [name for name, *_ in options_of(self.recipe)]
        steps = recipe(run, **{name: given[name] for name in names if name in given})
        if hasattr(steps, "line"):  # a single result
            return [steps]
        return steps.run() if hasattr(steps, "run") else steps


# In the order in which they are used; those of extras follow.
OF_THE_CORE = {
    "setup": {
        "recipe": "recipes.setup:Setup",
        "purpose": "what suits this machine, and whether the run fits",
        "writes": "the choices for this machine to the run's report",
        "begins": True,
    },
    "prepare": {
        "recipe": "recipes.prepare:Preparation",
        "purpose": "check, tokenizer, codec, codes on disk",
        "writes": "the data report (rejected clips and why), tokenizer, codec, recogniser and "
        "codes",
        "example": "--data recordings/",
        "begins": True,
    },
    "benchmark": {
        "recipe": "recipes.benchmark:Benchmark",
        "purpose": "which switches and micro-batch pay off here (optional)",
        "writes": "speed.yaml, what pays off, for `train` and as a --preset; finished trials are "
        "reused",
        "begins": True,
    },
    "check": {
        "recipe": "recipes.check:check",
        "purpose": "does a training step fit here, or another GPU? (optional)",
        "writes": "nothing. Exit code 3: it does not fit. Without --run, the preset alone is "
        "checked",
        "takes": "preset",
    },
    "verify": {
        "recipe": "recipes.verify:verify",
        "purpose": "is training right, here? (optional, a minute)",
        "writes": "the proofs to the run's report. Exit code 3: one of them fails",
    },
    "train": {
        "recipe": "recipes.train:Training",
        "purpose": "the model; resumes where it stopped",
        "writes": "weights, checkpoints and the log; resumes from the newest intact checkpoint. "
        "Exit code 3: it has learnt nothing",
    },
    "profile": {
        "recipe": "recipes.train:profile",
        "purpose": "where ten steps of a running training spend their time",
        "writes": "a trace for ui.perfetto.dev and a table of operators to the run's profile/",
        "takes": "name",
    },
    "evaluate": {
        "recipe": "recipes.evaluate:Evaluation",
        "purpose": "is it intelligible?",
        "writes": "error rates, samples, and whether the voice passes. Exit code 3: it does not",
    },
    "speak": {
        "recipe": "recipes.speak:speak",
        "purpose": "a sentence as a WAV file; what speech costs",
        "writes": "the WAV file; those of --file, and index.csv; without both figures, samples "
        "and export/",
        "example": '--text "..."',
    },
    "checklist": {
        "recipe": "recipes.reports:Checklist",
        "purpose": "what was checked, and what is left to do",
        "writes": "nothing: it reads the run's report",
    },
    "compare": {
        "recipe": "recipes.reports:write_comparison",
        "purpose": "two runs side by side",
        "writes": "compare-B.html to the run's folder: curves, figures, and the settings that "
        "differ",
        "example": "--with other",
        "takes": "name",
    },
}
COMMANDS = {
    name: Command(**fields) for name, fields in (OF_THE_CORE | extras.offered("COMMANDS")).items()
}


@functools.cache
def options_of(recipe: str) -> list[tuple[str, str, str]]:
    """Return (name, type, help) of the parameters of MODULE:NAME in kit, without the run."""
    module, _, name = recipe.partition(":")
    path = Path(__file__).parents[1].joinpath(*module.split(".")).with_suffix(".py")
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    function = next(each for each in tree.body if getattr(each, "name", "") == name)
    if isinstance(function, ast.ClassDef):
        methods = {each.name: each for each in function.body if isinstance(each, ast.FunctionDef)}
        if "__init__" not in methods:  # it has that of its base, a class of another recipe
            base = function.bases[0].id
            imports = [each for each in tree.body if isinstance(each, ast.ImportFrom)]
            origin = next(each for each in imports if base in [alias.name for alias in each.names])
            return options_of(f"{origin.module.removeprefix('kit.')}:{base}")
        function = methods["__init__"]
    arguments = [each for each in function.args.args if each.arg != "self"]
    lines = source.splitlines()
    options = []
    for argument in (*arguments[1:], *function.args.kwonlyargs):
        kind = ast.unparse(argument.annotation).partition(" ")[0]
        help = lines[argument.lineno - 1].partition("  # ")[2]
        options.append((argument.arg, kind, help.replace("%", "%%")))
    return options


def parser() -> argparse.ArgumentParser:
    lines = []
    for name, command in COMMANDS.items():
        example = f": {command.example}" if command.example else ""
        lines.append(f"  python -m kit {name:10}  {command.purpose}{example}")
    top = argparse.ArgumentParser(
        prog="voicekit" if Path(sys.argv[0]).stem == "voicekit" else "python -m kit",
        description=INTRODUCTION.format(commands="\n".join(lines)),
        epilog=AFTERWARDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = top.add_subparsers(
        required=True, dest="command", metavar="COMMAND", help="one of those above"
    )
    for name, command in COMMANDS.items():
        own = subparsers.add_parser(
            name,
            description=f"{command.purpose[0].upper()}{command.purpose[1:]}. "
            f"Writes {command.writes}.",
            epilog="Defaults are in brackets.",
            argument_default=argparse.SUPPRESS,
        )
        add_options(own, command)
    return top


def add_options(own: argparse.ArgumentParser, command: Command) -> None:
    own.set_defaults(run="", preset="", use="", set=[], tables=False)
    folder = "the run's folder (KIT_RUN, or the run used last)"
    if command.takes == "preset":
        folder = "a run, for its settings and lengths (the preset alone)"
    own.add_argument("--run", metavar="NAME", help=folder)
    if command.takes != "name":
        preset = "a name of configs/ or a .yaml file (KIT_PRESET, or what fits here)"
        own.add_argument("--preset", help=preset)
        own.add_argument("--use", help=f"balanced, speed, quality, low_memory, debug; {SAVED}")
        value = {"metavar": "SECTION.KEY=VALUE", "help": f"such as train.lr=1e-4; {SAVED}"}
        own.add_argument("--set", action="extend", nargs="+", **value)
    own.add_argument("--tables", action="store_true", help="also print the steps' tables")
    for name, kind, help in options_of(command.recipe):
        option = name.strip("_").replace("_", "-")
        how = {"dest": name, "type": TYPES[kind], "metavar": option.upper(), "help": help}
        own.add_argument(f"--{option}", **how)
