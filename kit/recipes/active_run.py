"""A run and the machine it works on: what every recipe is given."""

import dataclasses
from contextlib import AbstractContextManager, nullcontext

from kit.base.hardware import (
    Choice,
    Hardware,
    choose_precision,
    detect,
    set_cuda_defaults,
    use_threads,
)
from kit.base.run import SETTINGS, Run, find_run
from kit.base.tables import flat
from kit.notebook.result import Result
from kit.recipes.keeping import Kept, pack_clips
from kit.recipes.settings import check_settings
from kit.training.ranks import ALONE, Ranks

SETTINGS_SHOWN = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActiveRun(Run):
    """A run's folder, preset and record, with the machine and what was chosen for it.

    In a notebook it shows itself as a table, with the reason of each choice.
    """

    hw: Hardware
    threads: Choice  # how many threads torch uses
    precision: Choice  # "fp32", "fp16" or "bf16"
    kept: Kept | None = None  # what keeps it elsewhere, too (KIT_MIRROR)
    ranks: Ranks = ALONE  # the processes that work on it together: see `orders.py`

    def record(self, **figures) -> dict:
        """As `Run.record`. What is recorded is kept: it waits until all that is new was copied."""
        report = super().record(**figures)
        if self.kept:
            pack_clips(self.folder)
            self.kept.flush()
        return report

    def bring_checkpoints(self) -> None:
        """Fetch what is kept of them, where this machine has not got them."""
        if self.kept:
            self.kept.bring_checkpoints()

    def hold_shared_lock(self, what: str) -> AbstractContextManager:
        """While it is held, no other machine that keeps this run does `what`."""
        return self.kept.run.hold_shared_lock(what) if self.kept else nullcontext()

    def __str__(self) -> str:
        return (
            f"run {self.name} in {self.folder}, preset {self.preset_name}, "
            + (f"use {self.use}, " if self.use else "")
            + (f"set {self.settings_in_words()}, " if self.settings else "")
            + f"{self.hw.name}, {self.precision.value}, {self.threads.value} threads"
        )

    def settings_in_words(self) -> str:
        """The first few values laid over the preset: a run that begins with a voice has dozens."""
        values = [f"{name} = {value}" for name, value in flat(self.settings)]
        more = len(values) - SETTINGS_SHOWN
        if more > 1:
            values[SETTINGS_SHOWN:] = [f"and {more} values more ({SETTINGS})"]
        return ", ".join(values)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        chosen = {"precision": self.precision, "threads": self.threads}
        reasons = {name: f"{c.value}: {c.reason}" for name, c in chosen.items()}
        if self.kept:
            reasons["kept in"] = str(self.kept.run.kept)
        return Result(line=str(self), figures=reasons)._repr_html_()


def active_run(
    name: str = "",
    preset: str = "",
    use: str = "",
    settings: dict | None = None,
    kept: Kept | None = None,
) -> ActiveRun:
    """The run `name` (empty: KIT_RUN's) with this machine; sets the threads torch uses.

    `settings` are sections of plain values to lay over the preset for the rest of the run's life.
    `kept` is what keeps it elsewhere, too.
    """
    run = find_run(preset, use, name)
    check_settings(settings or {}, run.preset)  # before anything is written
    run.begin()
    if settings:
        run = run.save_settings(settings)
    if kept:
        kept.bring_codes(run)
    set_cuda_defaults()
    hw = detect()
    threads = use_threads(hw)
    return ActiveRun(
        name=run.name,
        preset_name=run.preset_name,
        preset=run.preset,
        folder=run.folder,
        use=run.use,
        settings=run.settings,
        hw=hw,
        threads=threads,
        precision=choose_precision(hw),
        kept=kept,
    )
