"""A run with the machine it works on, and what it is made from: recordings, a base model."""

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from kit.base import hardware
from kit.base import run as runs
from kit.base.config import build, merge
from kit.base.formatting import flat
from kit.base.run import Run
from kit.notebook.result import Result
from kit.settings import (
    GenerateConfig,
)
from kit.text.normalize import language_code
from kit.training.ranks import ALONE, Ranks

SETTINGS_SHOWN = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActiveRun(Run):
    """A run's folder, preset and record, with the machine and what was chosen for it."""

    hw: hardware.Hardware
    threads: hardware.Choice  # of torch
    precision: hardware.Choice  # "fp32", "fp16" or "bf16"
    kept: Any = None  # its `RunCopy` on another disk (open_run.py), if there is one
    ranks: Ranks = ALONE  # the processes that share its work

    def record(self, **figures) -> dict:
        """As `Run.record`; returns only after everything new was copied to the other disk."""
        report = super().record(**figures)
        if self.kept:
            self.kept.copy_all()
        return report

    def fetch_checkpoints(self) -> None:
        if self.kept:
            self.kept.run.fetch(lambda name: name.startswith("checkpoints/"))

    def hold_shared_lock(self, what: str) -> AbstractContextManager:
        """Lock out `what` on other machines that share the copy."""
        return self.kept.run.hold_shared_lock(what) if self.kept else nullcontext()

    def __str__(self) -> str:
        values = [f"{name} = {value}" for name, value in flat(self.settings)]
        more = len(values) - SETTINGS_SHOWN
        if more > 1:  # a run that starts from a base model has dozens
            values[SETTINGS_SHOWN:] = [f"and {more} values more ({runs.SETTINGS})"]
        return (
            f"run {self.name} in {self.folder}, preset {self.preset_name}, "
            + (f"use {self.use}, " if self.use else "")
            + (f"set {', '.join(values)}, " if values else "")
            + f"{self.hw.name}, {self.precision.value}, threads: {self.threads.value}"
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        choices = {"precision": self.precision, "threads": self.threads}
        reasons = {name: f"{c.value}: {c.reason}" for name, c in choices.items()}
        if self.kept:
            reasons["kept in"] = str(self.kept.run.kept)
        return Result(line=str(self), figures=reasons)._repr_html_()


def active_run(run: Run, kept: Any = None) -> ActiveRun:
    """Return `run`, its copy `kept`, and what suits this machine; sets torch's threads."""
    if kept:
        kept.fetch_codes(run)
    hardware.set_cuda_defaults()
    hw = hardware.detect()
    threads, precision = hardware.use_threads(hw), hardware.choose_precision(hw)
    return ActiveRun(**vars(run), hw=hw, threads=threads, precision=precision, kept=kept)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSource:
    """The recordings and the text that a run's tokenizer, codec and voice are trained on."""

    data: str = ""  # a folder, a table, an archive or a hf:// name; "": the built-in corpus
    language: str = "am"
    text: str = ""  # a file of more text than the recordings'; "": theirs alone
    phonemes: str = ""  # a language by espeak-ng's name; "": letters
    tokenizer: str = ""  # a SentencePiece model to take as it is; "": one is trained

    def __str__(self) -> str:
        parts = [self.data or "the built-in corpus", f"language {self.language}"]
        more = {"pieces of": self.text, "phonemes of": self.phonemes, "tokenizer": self.tokenizer}
        return ", ".join(parts + [f"{what} {value}" for what, value in more.items() if value])

    def begin(self, run: ActiveRun) -> None:
        run.require_permanent("data", str(self))
        run.record(data={"source": dataclasses.asdict(self)})

    def section(self, run: ActiveRun, name: str) -> dict:
        """The run's section `name`, with the preset's changes for recordings of people.

        The run's own settings override both.
        """
        own = run.settings.get(name, {})
        if not self.data or (name == "codec" and "kind" in own):  # the changes suit the mel codec
            return run.section(name)
        changes = run.section("recordings").get(name, {})
        return merge(merge(run.section(name), changes), own)


def choose_source(run: ActiveRun, asked: RunSource) -> tuple[RunSource, str]:
    """Fill what `asked` leaves empty from the run's record; return it with a line to print."""
    recorded = run.figure("data", "source") or {}
    given = {name: value for name, value in dataclasses.asdict(asked).items() if value}
    if "language" in given:
        given["language"] = language_code(given["language"])
        # However it was spelt when the run started: a run keeps its source, letter by letter.
        if "language" in recorded and language_code(recorded["language"]) == given["language"]:
            given["language"] = recorded["language"]
    source = build(RunSource, recorded, **given)
    added = any(value and name not in given for name, value in recorded.items())
    return source, f"As this run was started: {source}." if added else ""


def section_for_run(run: ActiveRun, name: str) -> dict:
    """The section `name`, adapted to the recordings that `run` was started with."""
    return choose_source(run, RunSource())[0].section(run, name)


def sampling_of(run: ActiveRun, **over: object) -> GenerateConfig:
    """The sampling settings for the voice of `run`, with the fields `over` replaced."""
    return build(GenerateConfig, section_for_run(run, "generate"), **over)
