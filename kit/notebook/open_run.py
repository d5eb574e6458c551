"""Which run is meant, and what is in force for it: preset, use, and what a person set.

Notebooks share nothing but `runs/<name>/`, found from the environment: KIT_RUN, KIT_PRESET,
KIT_RUNS.
"""

import dataclasses
import os
from pathlib import Path

from kit.base.config import CONFIGS, ConfigError, load_preset, merge, read_yaml
from kit.base.files import require_folder_name
from kit.base.hardware import choose_preset, detect
from kit.notebook.run_record import SETTINGS, Run, read_mark
from kit.tuning.recommend import overlay

RELEASES_FOLDER = "releases"  # of published voices that runs begin with
OWN_FOLDERS = ("codes", "bench", RELEASES_FOLDER)  # beside the runs: the code cache, benchmarks


def open_run(preset: str = "", use: str = "", name: str = "") -> Run:
    """The run that `find_run` finds, begun where it does not exist yet."""
    run = find_run(preset, use, name)
    run.begin()
    return run


def find_run(preset: str = "", use: str = "", name: str = "") -> Run:
    """The run named by KIT_RUN (default "demo") with `preset`, or KIT_PRESET; nothing is written.

    The name is that of one folder, and none of the kit's own (OWN_FOLDERS), else ConfigError.
    Without either preset, a run goes on with the preset it was begun with, and a new one takes what
    fits the machine. Raises ConfigError when the two disagree: a run has one preset for life.
    `use` names an overlay of configs/use to lay over it, which the run's later notebooks keep. The
    positions that 01_data_prep gave the model for its corpus are laid over it, too, and last what a
    person set for this run (`Run.keep_settings`).
    """
    folder = run_folder(name)
    asked = preset or os.environ.get("KIT_PRESET")
    preset = asked or read_mark(folder / "preset").strip() or choose_preset(detect()).value
    run = Run(name=folder.name, preset_name=preset, preset=load_preset(preset), folder=folder)
    run.require_settled("preset", preset)
    use = use or read_mark(folder / "use")
    laid = merge(run.preset, overlay(use).sections) if use else run.preset
    laid = merge(laid, {"model": run.figure("data", "positions") or {}})
    settings = read_settings(folder / SETTINGS)
    laid = merge(laid, settings)
    return dataclasses.replace(run, preset=laid, use=use, settings=settings)


def read_settings(path: Path) -> dict:
    """The sections in a run's settings file; {} where there is none. ConfigError when damaged."""
    sections = (read_yaml(path) or {}) if path.is_file() else {}
    if isinstance(sections, dict) and all(isinstance(each, dict) for each in sections.values()):
        return sections
    raise ConfigError(f"{path} must hold `section: {{key: value}}` entries. Mend or delete it.")


def run_folder(name: str = "") -> Path:
    """Where the run `name` (empty: KIT_RUN's, or "demo") lies, whether it was begun or not.

    Raises ConfigError for a name that is no plain folder's, or one of the kit's own.
    """
    setting = "RUN" if name else "KIT_RUN"
    name = require_folder_name(name or os.environ.get("KIT_RUN", "demo"), setting, OWN_FOLDERS)
    return Path(os.environ.get("KIT_RUNS") or CONFIGS.parent / "runs") / name
