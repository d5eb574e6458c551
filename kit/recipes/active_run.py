"""A run with the machine it works on."""

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from kit.base.formatting import flat
from kit.base.hardware import (
    Choice,
    Hardware,
    choose_precision,
    detect,
    set_cuda_defaults,
    use_threads,
)
from kit.base.run import SETTINGS, Run
from kit.notebook.result import Result
from kit.training.ranks import ALONE, Ranks

SETTINGS_SHOWN = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActiveRun(Run):
    """A run's folder, preset and record, with the machine and what was chosen for it."""

    hw: Hardware
    threads: Choice  # of torch
    precision: Choice  # "fp32", "fp16" or "bf16"
    kept: Any = None  # its `RunCopy` on another disk (run_copy.py), if there is one
    ranks: Ranks = ALONE  # the processes that share its work

    def record(self, **figures) -> dict:
        """As `Run.record`; returns only after everything new was copied to the other disk."""
        report = super().record(**figures)
        if self.kept:
            self.kept.copy_all()
        return report

    def fetch_checkpoints(self) -> None:
        """Fetch the copies of checkpoints from another machine."""
        if self.kept:
            self.kept.fetch_checkpoints()

    def hold_shared_lock(self, what: str) -> AbstractContextManager:
        """Lock out `what` on other machines that share the copy."""
        return self.kept.run.hold_shared_lock(what) if self.kept else nullcontext()

    def __str__(self) -> str:
        return (
            f"run {self.name} in {self.folder}, preset {self.preset_name}, "
            + (f"use {self.use}, " if self.use else "")
            + (f"set {self.first_settings()}, " if self.settings else "")
            + f"{self.hw.name}, {self.precision.value}, threads: {self.threads.value}"
        )

    def first_settings(self) -> str:
        """The first settings of the run: one that starts from a base model has dozens."""
        values = [f"{name} = {value}" for name, value in flat(self.settings)]
        more = len(values) - SETTINGS_SHOWN
        if more > 1:
            values[SETTINGS_SHOWN:] = [f"and {more} values more ({SETTINGS})"]
        return ", ".join(values)

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
    set_cuda_defaults()
    hw = detect()
    return ActiveRun(
        **vars(run), hw=hw, threads=use_threads(hw), precision=choose_precision(hw), kept=kept
    )
