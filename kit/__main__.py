"""`python -m kit COMMAND --run NAME`: the notebooks' recipes without a notebook.

Each step of a recipe prints the line that a notebook would show. Recipes are imported only when
their command runs, so that --help does not wait for torch.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pkgutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from kit.base.errors import KitError

INTRODUCTION = """\
Recordings in, a voice out. The commands are the notebooks, in the order in which they are used:

{commands}

Give each --run NAME. `python -m kit COMMAND --help` lists what it takes and what it writes."""

AFTERWARDS = """\
A run is a folder: runs/NAME, or KIT_RUNS/NAME. Everything is kept there, and finished work is never
repeated: after an interruption, give the same command again. Ctrl-C stops at the next safe moment,
with a checkpoint; a second Ctrl-C stops at once. Several processes can share the work of prepare
and train: torchrun --standalone --nproc-per-node=2 -m -- kit prepare --run NAME

With --json, stdout gets one JSON object at the end, with all figures, and nothing else: progress
goes to stderr, and an error is the object's "error".

Exit codes: 0 done, 2 something must be changed (the message says what), 3 `evaluate` found that the
voice does not pass, or `check` that a step does not fit, 130 stopped by Ctrl-C."""
GATE_FAILED = 3
SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAVED = "later commands need not repeat it"


@dataclasses.dataclass(frozen=True)
class Command:
    """A subcommand. An option is an argument of the recipe: name, type, placeholder and help."""

    name: str
    recipe: str  # MODULE:NAME of kit.recipes; it gets the run and the options
    purpose: str
    writes: str
    options: tuple[tuple[str, Callable, str, str], ...] = ()
    example: str = ""  # options that most people need
    shared: bool = False  # whether torchrun may start it in several processes
    own_gpu: bool = True  # whether each of these needs a GPU of its own
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
        for name, kind, metavar, help in self.options:
            own.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=help)

    def results(self, run, options: argparse.Namespace) -> Iterable:
        """Run the recipe with the options given; the others are left to its defaults."""
        given = vars(options)
        recipe = pkgutil.resolve_name(f"kit.recipes.{self.recipe}")
        steps = recipe(run, **{name: given[name] for name, *_ in self.options if name in given})
        if hasattr(steps, "line"):  # a single result
            return [steps]
        return steps.run() if hasattr(steps, "run") else steps


def yes(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError(text)
    return text == "yes"


RECORDINGS = (
    ("data", str, "PATH", "a folder, table, archive or hf:// name (espeak-ng's speech)"),
    ("language", str, "CODE", "of the texts, such as am, en, tr (am)"),
)
DURATION = (
    ("max_steps", int, "N", "in total; a finished run trains on if it is raised (the preset's)"),
    ("num_train_epochs", float, "E", "the same in passes over the data (the preset's)"),
    ("session_hours", float, "H", "until this machine is taken away (12)"),
    ("quota_gb", float, "GB", "how much disk the run may use (all that is free)"),
)
LICENCES = "CPML: of XTTS-v2; bilibili: of IndexTTS2 (not yet)"
ACCEPT_LICENSE = ("accept_license", str, "NAME", LICENCES)
EXPORTED = ("voice", str, "FOLDER", "an exported voice, or hf://OWNER/NAME (the run's export/)")

COMMANDS = (  # in the order in which they are used
    Command(
        "setup",
        "setup:Setup",
        "what suits this machine, and whether the run fits",
        "the choices for this machine to the run's report",
        begins=True,
    ),
    Command(
        "prepare",
        "prepare:Preparation",
        "check, tokenizer, codec, codes on disk",
        "the data report (rejected clips and why), tokenizer, codec, recogniser and codes",
        (
            *RECORDINGS,
            ("max_rejected_percent", float, "P", "of the hours that may be rejected; 100: all (5)"),
            ("max_clip_seconds", float, "S", "reject longer clips (the model's positions)"),
            ("text", str, "FILE", "of any size, to train the tokenizer on (the recordings' texts)"),
            ("tokenizer", str, "FILE", "a SentencePiece model, taken as it is (one is trained)"),
            ("phonemes", str, "CODE", "train it on phonemes: espeak-ng's en-us (letters)"),
            ("base_model", str, "PATH", "a base model: an export, another run (none)"),
            ACCEPT_LICENSE,
            ("columns", str, "NAMES", "audio|text|speaker, coqui, piper ... (its first line's)"),
            ("speakers", str, "folder", "folders are speakers (a column says it, or there is one)"),
        ),
        example="--data recordings/",
        shared=True,
        own_gpu=False,
        begins=True,
    ),
    Command(
        "benchmark",
        "benchmark:Benchmark",
        "which switches pay off here (optional)",
        "speed.yaml, the switches that pay off, for `train`; finished trials are reused",
        (
            ("steps", int, "N", "optimiser steps timed in a round (the preset's)"),
            ("rounds", int, "N", "interleaved; their median counts (the preset's)"),
            ("model", str, "xtts", "the released XTTS-v2's size (the preset's)"),
            ("goal", str, "GOAL", "speed, or memory (speed)"),
        ),
        begins=True,
    ),
    Command(
        "check",
        "check:check",
        "does a training step fit here, or another GPU? (optional)",
        "nothing. Exit code 3: it does not fit. Without --run, the preset alone is checked",
        (
            ("gpu", str, "GPU", 'plan for this one instead: a T4, or "16 GiB, 7.5" (none)'),
            ("table", Path, "FILE", "write these plans for all known GPUs (none)"),
        ),
        takes="preset",
    ),
    Command(
        "tune",
        "benchmark:Tuning",
        "the fastest settings under a target (optional)",
        "a preset for --preset. Ctrl-C writes the best so far; finished trials are reused",
        (
            ("write", Path, "FILE", "the preset to write"),
            ("target", str, "TARGET", 'such as "memory<5GiB, step<2s" (the fastest)'),
            ("minutes", float, "N", "for all of it (the preset's trials.tune_minutes)"),
        ),
        example="--write configs/mine.yaml",
        takes="preset",
    ),
    Command(
        "devices",
        "benchmark:devices",
        "what `benchmark` and `tune` measured, a table a device",
        "README.md to the folder with the measurements",
        (("folder", Path, "FOLDER", "one JSON file a device (runs/bench/devices)"),),
        takes="name",
    ),
    Command(
        "train",
        "train:Training",
        "the model; resumes where it stopped",
        "weights, checkpoints and the log; resumes from the newest intact checkpoint",
        (*DURATION, ("plan", json.loads, "JSON", "what a panel has checked (checked here)")),
        shared=True,
    ),
    Command(
        "finetune",
        "finetune:FineTune",
        "prepare and train, from a released XTTS-v2 or IndexTTS2",
        "what prepare and train do, what was forgotten, export/, coqui/ or indextts2/",
        (
            *RECORDINGS,
            ("base_model", str, "PATH", "its folder, or hf://OWNER/NAME (hf://coqui/XTTS-v2)"),
            ACCEPT_LICENSE,
            ("tokenizer", str, "FILE", "a SentencePiece model in place of an IndexTTS2's (none)"),
            *DURATION,
        ),
        example="--accept-license CPML",
        begins=True,
    ),
    Command(
        "evaluate",
        "evaluate:Evaluation",
        "is it intelligible?",
        "error rates, samples, and whether the voice passes (if not, the exit code is 3)",
        (("sentences", int, "N", "held-out sentences to speak (the preset's)"),),
    ),
    Command(
        "speak",
        "speak:speak",
        "a sentence as a WAV file; what speech costs",
        "the WAV file; those of --file, and index.csv; without both figures, samples and export/",
        (
            ("text", str, "TEXT", "say only this (measure every way to speak, and export)"),
            ("file", Path, "FILE", "say its lines, a sentence or id|text each; finished ones stay"),
            ("out", Path, "PATH", "of the WAV file (spoken.wav); with --file its folder"),
            ("speaker", str, "NAME", "who says it (the first)"),
            ("reference", str, "FILE", "a recording of another person, to sound like that"),
            ("dtype", str, "FORMAT", "in which the run's voice says it: fp32, bf16, int8 (fp32)"),
            ("voice", str, "FOLDER", "that says it: an exported voice, or hf://OWNER/NAME"),
        ),
        example='--text "..."',
    ),
    Command(
        "serve",
        "serve:serve",
        "the voice in a browser, and OpenAI's speech API",
        "nothing: it serves runs/NAME/export, or the exported voice that --voice names",
        (
            EXPORTED,
            ("host", str, "ADDRESS", "0.0.0.0 lets other machines in (127.0.0.1)"),
            ("port", int, "N", "(7860)"),
            ("api_key", str, "KEY", "that programs and the page must give (none)"),
        ),
        takes="name",
    ),
    Command(
        "transcribe",
        "more_data:transcribe_with_whisper",
        "clips and texts from recordings without text",
        "clips, metadata.csv, transcripts.csv (with confidences) and losses.jsonl to --out",
        (
            ("data", str, "FOLDER", "the recordings, of any length; they are only read"),
            ("out", str, "FOLDER", "an LJSpeech folder, made or continued"),
            ("language", str, "CODE", "that is spoken, such as am, en, tr (am)"),
            ("whisper", str, "MODEL", "a size, tiny to large-v3, or a folder (small)"),
        ),
        example="--data talks/ --out clips/",
        takes="name",
    ),
    Command(
        "onnx",
        "speak:export_for_onnxruntime",
        "the voice for onnxruntime, without torch",
        "onnx/ in the folder of the exported voice: runs/NAME/export, or what --voice names",
        (EXPORTED, ("dtype", str, "FORMAT", "of the GPT's matmuls: fp32, int8 (fp32)")),
        takes="name",
    ),
    Command(
        "push",
        "serve:push",
        "the exported voice to the Hugging Face hub",
        "a repository on the Hugging Face hub: the voice, samples and a model card",
        (
            ("to", str, "OWNER/NAME", "the repository, yours; new ones are private"),
            ("public", yes, "yes", "make a new repository public (no)"),
            ("license", str, "ID", "of the voice, such as cc-by-4.0 (not stated)"),
            ("consent", str, "TEXT", "who spoke, and what they agreed to (not stated)"),
            ("space", yes, "yes", "also upload a Space: a page that speaks (no)"),
            ("install", str, "WHAT", "for the Space: what pip installs, such as git+https://..."),
        ),
        example="--to OWNER/NAME",
    ),
    Command(
        "checklist",
        "reports:Checklist",
        "what was checked, and what is left to do",
        "nothing: it reads the run's report",
    ),
    Command(
        "compare",
        "reports:write_comparison",
        "two runs side by side",
        "compare-B.html to the run's folder: curves, figures, and the settings that differ",
        (("with", str, "NAME", "the other run"),),
        example="--with other",
        takes="name",
    ),
)


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
    from kit.recipes.open_run import open_settings, parse_settings
    from kit.training.ranks import broadcast_order, follow_orders, join_ranks

    allow_expandable_segments()
    chosen = (options.run, options.preset, options.use, parse_settings(options.set))
    if takes == "preset":
        run = open_settings(*chosen, gpu=getattr(options, "gpu", ""))
        results = command.results(run, options)
        print_results(results, options.tables, interrupts, answer)
        return 0
    ranks = join_ranks(command.own_gpu)
    interrupts.ranks = ranks
    answer.is_main = ranks.is_main
    if not ranks.is_main:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # the main process gets them, and stops all
        follow_orders(ranks)
        return 0
    if ranks.several and not command.shared:
        raise KitError(
            f"`{command.name}` runs in one process, but torchrun has started {ranks.world}: run it "
            "without torchrun. Only `prepare` and `train` can be shared, with a base model, too "
            "(`prepare --base-model`)."
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
    return GATE_FAILED if answer.failed else 0


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
