"""The commands of `python -m kit`: what each takes, and the recipe whose steps it runs.

What is not given is left to the recipe, which has the defaults. Imports no recipe before its
command runs, so that --help need not wait for torch.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from kit.base.errors import KitError
from kit.base.files import write_atomic

KEPT = "kept with the run: later commands need not repeat it"


@dataclasses.dataclass(frozen=True)
class Command:
    """`steps(run, **given options)` gives the recipe's results; its docstring says what they leave.

    An option is the recipe's own argument: its name, the type of its value, how that is called, and
    what it does.
    """

    name: str
    steps: Callable[..., Iterable]
    purpose: str
    example: str  # options that most will want
    options: tuple[tuple[str, Callable, str, str], ...]
    shared: bool = False  # whether several processes, which torchrun starts, share its work
    own_card: bool = True  # whether each must have a GPU of its own

    def add_to(self, commands) -> None:
        """Make it a subcommand, with the options that all commands have."""
        own = commands.add_parser(
            self.name,
            description=f"{self.purpose[0].upper()}{self.purpose[1:]}. {self.steps.__doc__}",
            epilog="In brackets: what holds where an option is not given.",
            argument_default=argparse.SUPPRESS,
        )
        own.set_defaults(command=self)
        add_shared(own)
        for name, kind, metavar, help in self.options:
            flag = "--" + name.replace("_", "-")
            own.add_argument(flag, type=kind, metavar=metavar, help=help)

    def results(self, run, options: argparse.Namespace) -> Iterable:
        """The steps, with those of the recipe's own options that were given."""
        own = {name for name, *_ in self.options}
        return self.steps(run, **{k: value for k, value in vars(options).items() if k in own})


def add_shared(own: argparse.ArgumentParser) -> None:
    """The options of every command."""
    own.set_defaults(run="", preset="", use="", set=[], tables=False)
    own.add_argument("--run", metavar="NAME", help="the run's folder (KIT_RUN, or demo)")
    own.add_argument(
        "--preset", help="a file of configs/, for a new run (KIT_PRESET, or what suits here)"
    )
    uses = "a file of configs/use/ to lay over it: balanced, speed, quality, low_memory"
    own.add_argument("--use", help=f"{uses}; {KEPT}")
    own.add_argument(
        "--set",
        action="extend",
        nargs="+",
        metavar="SECTION.KEY=VALUE",
        help=f"a value of the preset, for instance train.lr=1e-4; {KEPT}",
    )
    own.add_argument("--tables", action="store_true", help="print the steps' tables, too")


def plain_object(text: str) -> dict:
    """`text` as the JSON object it is. Raises KitError for anything else."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise KitError(f"--plan is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise KitError(f'--plan takes an object, such as {{"switches": {{}}}}, got {text}.')
    return value


def setup_steps(run) -> Iterable:
    """Leaves the choices for this machine in the record."""
    from kit.recipes.setup import Setup

    return Setup(run).run()


def prepare_steps(run, **options) -> Iterable:
    """Leaves the ledger of what was refused and why, tokenizer, codec, recogniser and codes."""
    from kit.recipes.prepare import Preparation

    return Preparation(run, **options).run()


def benchmark_steps(run, **options) -> Iterable:
    """Leaves speed.yaml, the switches that pay, for `train`; what was measured is not again."""
    from kit.recipes.benchmark import Benchmark

    return Benchmark(run, **options).run()


def train_steps(run, **options) -> Iterable:
    """Leaves weights, checkpoints and the log; goes on from the newest sound checkpoint."""
    from kit.recipes.train import Training

    return Training(run, **options).run()


def finetune_steps(run, **options) -> Iterable:
    """Leaves what prepare and train do, what was forgotten, export/ and coqui/ for coqui-tts."""
    from kit.recipes.finetune import FineTune

    return FineTune(run, **options).run()


def evaluate_steps(run, **options) -> Iterable:
    """Leaves error rates beside their floor, samples, and whether the voice passes."""
    from kit.recipes.evaluate import Evaluation

    return Evaluation(run, **options).run()


def speak_steps(run, text: str | None = None, out: Path | None = None, **how) -> Iterable:
    """Leaves the WAV file; without --text figures, samples and export/, the voice in one folder."""
    from kit.recipes.speak import Speaking

    if text is None and (out or how):
        raise KitError(
            "--reference, --speaker, --weights and --out say how to say a --text: give one."
        )
    speaking = Speaking(run)
    if text is None:
        return speaking.run()
    said = speaking.say(text, **how)
    path = out or run.path("spoken.wav")
    write_atomic(path, said.sounds[0].wav_bytes())
    return [dataclasses.replace(said, line=f"{said.line}\nWritten: {path}")]


def checklist_steps(run) -> Iterable:
    """Reads the run's record alone."""
    from kit.recipes.checklist import Checklist

    return [Checklist(run).result()]


RECORDINGS = (
    ("data", str, "PATH", "a folder, table, archive or hf:// name (espeak-ng's speech)"),
    ("language", str, "CODE", "of the texts, such as am, en, tr (am)"),
)
HOW_LONG = (
    ("steps", int, "N", "in all; more train a finished run further (the preset's)"),
    ("session_hours", float, "H", "until this machine is taken away (12)"),
    ("quota_gb", float, "GB", "how much the run may lay down (the disk)"),
)

COMMANDS = (  # in the order in which they are used
    Command("setup", setup_steps, "what suits this machine, and will it fit", "", ()),
    Command(
        "prepare",
        prepare_steps,
        "check, tokenizer, codec, codes on disk",
        "--data recordings/",
        (
            *RECORDINGS,
            ("refuse_percent", float, "P", "of the hours that may be refused; 100: all (5)"),
            ("longest_s", float, "S", "leave longer clips out (what the model has positions for)"),
            ("text", str, "FILE", "of any size, to learn pieces from (the recordings' texts)"),
            ("phonemes", str, "CODE", "learn pieces of phonemes: espeak-ng's en-us (letters)"),
            ("start_from", str, "PATH", "a voice to begin with: an export, another run (nothing)"),
            ("licence", str, "CPML", "accept that of a released XTTS-v2 to begin with (not yet)"),
        ),
        shared=True,
        own_card=False,
    ),
    Command(
        "benchmark",
        benchmark_steps,
        "which switches pay here (may be left out)",
        "",
        (
            ("steps", int, "N", "optimiser steps timed in a round (the preset's)"),
            ("rounds", int, "N", "interleaved; the median one counts (the preset's)"),
            ("model", str, "xtts", "the released XTTS-v2's size (the preset's)"),
            ("goal", str, "GOAL", "speed, or memory (speed)"),
        ),
    ),
    Command(
        "train",
        train_steps,
        "the model; goes on where it stopped",
        "",
        (
            *HOW_LONG,
            ("plan", plain_object, "JSON", "what a panel has checked (checked here)"),
        ),
        shared=True,
    ),
    Command(
        "finetune",
        finetune_steps,
        "prepare and train, from a released XTTS-v2",
        "--licence CPML",
        (
            *RECORDINGS,
            ("start_from", str, "PATH", "its folder, or hf://OWNER/NAME (hf://coqui/XTTS-v2)"),
            ("licence", str, "CPML", "accept that of XTTS-v2: nothing commercial (not yet)"),
            *HOW_LONG,
        ),
    ),
    Command(
        "evaluate",
        evaluate_steps,
        "is it intelligible?",
        "",
        (("sentences", int, "N", "held-out sentences to speak (the preset's)"),),
    ),
    Command(
        "speak",
        speak_steps,
        "a sentence as a WAV file; what speech costs",
        '--text "..."',
        (
            ("text", str, "TEXT", "say this alone (every way to speak, and a folder to take away)"),
            ("speaker", str, "NAME", "whose voice, with --text (the first)"),
            ("reference", str, "FILE", "with --text: a recording of who is to speak instead"),
            ("weights", str, "FORMAT", "with --text: fp32, bf16, int8 (fp32)"),
            ("out", Path, "FILE", "with --text (spoken.wav in the run's folder)"),
        ),
    ),
    Command("checklist", checklist_steps, "what was checked, and what is to do", "", ()),
)
