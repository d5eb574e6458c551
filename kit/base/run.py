"""One run, one folder, one record: its files, the preset in force and `report.json`.

Notebooks share only `runs/<name>/`, which they find by KIT_RUN, KIT_PRESET and KIT_RUNS.
"""

import dataclasses
import itertools
import json
import os
import shlex
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import yaml

from kit.base import config
from kit.base.config import load_preset, merge
from kit.base.errors import KitError
from kit.base.files import make_folder, require_folder_name, write_atomic
from kit.base.formatting import nearest, replace_non_finite, shorten
from kit.base.hardware import choose_preset, detect, versions
from kit.base.lock import held
from kit.base.report_page import report_page

# Command-line names of the notebooks whose figures others need.
COMMANDS = {
    "01_data_prep": "prepare",
    "02_train": "train",
    "03_evaluate_ema": "evaluate",
    "04_inference": "speak",
}
SETTINGS = "settings.yaml"  # in a run's folder
RECORD_WAIT_S = 60.0  # for another process that records
RELEASES_FOLDER = "releases"  # of published voices that runs begin with
LAST_RUN = "last-run"  # a file beside the runs: the name of the one that was opened last
# Beside the runs: no run may have their names.
KIT_FOLDERS = ("codes", "bench", RELEASES_FOLDER, LAST_RUN)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    name: str
    preset_name: str
    preset: dict  # sections of plain values, with all that is merged into them
    folder: Path
    use: str = ""  # the overlay of configs/use that is merged into the preset; "": none
    settings: dict = dataclasses.field(default_factory=dict)  # sections the user set

    def path(self, *parts: str) -> Path:
        """Return a path inside the run's folder, whose parent is made."""
        path = self.folder.joinpath(*parts)
        make_folder(path.parent)
        return path

    def section(self, name: str) -> dict:
        return self.preset.get(name, {})

    def begin(self) -> None:
        """Make the run's folder and write down its preset."""
        self.set_permanent("preset", self.preset_name)
        if self.use:
            write_atomic(self.folder / "use", self.use)

    def set_permanent(self, name: str, value: str) -> None:
        """Write `value` of `name` for the life of the run."""
        self.require_permanent(name, value)
        write_atomic(self.folder / name, value)

    def require_permanent(self, name: str, value: str) -> None:
        """Raise KitError if the run was started with another value of `name`."""
        original = read_run_file(self.folder / name) or value
        if original != value:
            free = next(n for n in numbered(self.name) if not (self.folder.parent / n).exists())
            raise KitError(
                f"The run `{self.name}` was started with the {name} `{original}`, but `{value}` "
                f'was requested. Start a new run, RUN = "{free}" (--run {shlex.quote(free)}), or '
                f"delete {self.places()}."
            )

    def save_settings(self, sections: dict) -> "Run":
        """Return the run with `sections` merged into its preset, now and whenever it is opened."""
        settings = merge(self.settings, sections)
        comment = "# Merged into this run's preset. Delete this file to go back to the preset.\n"
        plain = yaml.safe_dump(settings, allow_unicode=True, sort_keys=False)
        write_atomic(self.folder / SETTINGS, comment + plain)
        return dataclasses.replace(self, preset=merge(self.preset, sections), settings=settings)

    def places(self) -> str:
        """Name the run's folder, and its copy where KIT_MIRROR is set."""
        mirror = os.environ.get("KIT_MIRROR")
        return f"{self.folder} and {Path(mirror) / self.name}" if mirror else str(self.folder)

    def index(self) -> Path:
        """Return the code cache's index file, as 01_data_prep recorded it."""
        return self.folder / self.require_figure("data", "codes", "01_data_prep")

    def require_figure(self, section: str, name: str, notebook: str):
        """Return a figure that `notebook` (a key of COMMANDS) recorded; KitError without it."""
        value = self.figure(section, name)
        if value is None:
            raise KitError(
                f"The run `{self.name}` has no `{section}.{name}` yet: run {notebook} first, or "
                f"python -m kit {COMMANDS[notebook]} --run {shlex.quote(self.name)}."
            )
        return value

    def figure(self, section: str, name: str):
        figures = self.report().get(section)
        return figures.get(name) if isinstance(figures, dict) else None

    def report(self) -> dict:
        """Return everything recorded. Raises KitError if the file is damaged."""
        path = self.folder / "report.json"
        try:
            return config.parse_object(path.read_bytes(), str(path)) if path.is_file() else {}
        except KitError as error:
            raise KitError(
                f"{error}: move or delete it and run the notebooks of `{self.name}` again from "
                "00_setup; finished work is not repeated."
            ) from error

    def record(self, **figures) -> dict:
        """Merge `figures` into report.json, one process at a time, and rewrite report.html."""
        about = {"preset": self.preset_name, "versions": versions()}
        about |= {"device": detect().name, "git": git_state()}
        if self.settings:
            about["settings"] = self.settings
        with held(self.folder / "report.lock", "recording figures", RECORD_WAIT_S):
            report = merge(self.report(), replace_non_finite(figures)) | about
            report |= demo_times(report, self.folder)
            plain = json.dumps(report, indent=1, ensure_ascii=False)
            write_atomic(self.folder / "report.json", plain)
            page = report_page(report, self.name, self.folder)
            write_atomic(self.folder / "report.html", page)
        return report


def find_run(preset: str = "", use: str = "", name: str = "") -> Run:
    """Return the run `name` (default: KIT_RUN, else `last_run`); nothing is written.

    Its preset is `preset`, else KIT_PRESET, else that the run was started with, else what fits the
    machine; KitError if the run was started with another. Merged into it are, in this order, the
    overlay `use` of configs/use, the positions that 01_data_prep chose, and the user's settings.
    """
    folder = run_folder(name)
    original = read_run_file(folder / "preset")
    preset = preset or os.environ.get("KIT_PRESET") or original or choose_preset(detect()).value
    preset = config.shorten_preset(preset)
    run = Run(name=folder.name, preset_name=preset, preset=load_preset(preset), folder=folder)
    run.require_permanent("preset", preset)
    use = use or read_run_file(folder / "use")
    overlay = load_use(use)
    path = folder / SETTINGS
    settings = (config.read_yaml(path) or {}) if path.is_file() else {}
    config.require_sections(settings, path)
    unknown = settings.keys() - run.preset.keys()
    if unknown:
        name = min(unknown)
        raise KitError(f"{path} has an unknown section `{name}`.{nearest(name, run.preset)}")
    sections = run.preset
    for layer in (overlay, {"model": run.figure("data", "positions") or {}}, settings):
        sections = merge(sections, layer)
    return dataclasses.replace(run, preset=sections, use=use, settings=settings)


def parse_settings(words: list[str]) -> dict:
    """["train.lr=1e-4"] -> {"train": {"lr": 0.0001}}; values are read as YAML."""
    sections = {}
    for word in words:
        name, equals, text = word.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot and section and key):
            raise KitError(
                f"--set {shorten(word)}: write section.key=value, for instance --set train.lr=1e-4."
            )
        try:
            value = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError) as error:
            raise KitError(f"--set {shorten(word)} has no plain value: {shorten(error)}") from error
        if isinstance(value, str):
            with suppress(ValueError):
                value = float(value)  # 1e-4, which YAML takes for a word
        sections.setdefault(section, {})[key] = value
    return sections


def require_run(name: str = "") -> Path:
    """Return the folder of the run `name`; KitError with the nearest name where there is none."""
    folder = run_folder(name)
    places = places_of_runs()
    if not any((place / folder.name / "preset").is_file() for place in places):
        names = {path.parent.name for place in places for path in place.glob("*/preset")}
        close = nearest(folder.name, sorted(names)) if names else ""
        raise KitError(
            f"There is no run `{folder.name}` in {' or '.join(map(str, places))}.{close} To begin "
            f"it, run 01_data_prep, or python -m kit prepare --run {shlex.quote(folder.name)}."
        )
    return folder


def load_use(name: str) -> dict:
    """Return the sections that the use `name` of configs/use sets; {} for ""."""
    overlay = load_preset(name, config.CONFIGS / "use") if name else {}
    overlay.pop("why", None)  # the reasons: see kit/tuning/recommend.py
    return overlay


def run_folder(name: str = "") -> Path:
    """Return the folder of the run `name` (default: KIT_RUN, else `last_run`); it may not exist."""
    setting = "RUN" if name else "KIT_RUN"
    if not name:
        name = os.environ["KIT_RUN"] if "KIT_RUN" in os.environ else last_run()
    return runs_folder() / require_folder_name(name, setting, KIT_FOLDERS)


def runs_folder() -> Path:
    home = config.ROOT if config.IS_CHECKOUT else Path.cwd()
    return Path(os.environ.get("KIT_RUNS") or home / "runs").expanduser()


def numbered(name: str) -> Iterator[str]:
    """Yield names for another run like `name`: name-2, name-3 ..."""
    return (f"{name}-{number}" for number in itertools.count(2))


def places_of_runs() -> list[Path]:
    """Return the runs' folder and, where KIT_MIRROR is set, that of their copies."""
    mirror = os.environ.get("KIT_MIRROR")
    return [runs_folder(), Path(mirror)] if mirror else [runs_folder()]


def last_run() -> str:
    """Return the name of the run that was opened last, here or with the copies; else "demo"."""
    for place in places_of_runs():
        name = read_run_file(place / LAST_RUN)
        if name and (place / name).is_dir():
            return name
    return "demo"


def read_run_file(path: Path) -> str:
    """Return the one line of a small file in a run's folder; "" without it, KitError if damaged."""
    try:
        return path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    except (UnicodeDecodeError, OSError) as error:
        raise KitError(
            f"{path} is damaged ({shorten(error)}): it must hold one line of text, the run's "
            f"{path.name}. Write that there, or delete the file."
        ) from error


def git_state() -> str:
    """Return this checkout's commit, with "+" if files differ from it; "" outside git."""
    if not config.IS_CHECKOUT:  # installed: the folder may be in a repository of somebody else's
        return ""
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        return f"{commit}+" if _git("status", "--porcelain") else commit
    except FileNotFoundError:
        return ""


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", *arguments], cwd=config.ROOT, capture_output=True)
    return result.stdout.decode("utf-8", errors="replace").strip()


def demo_times(report: dict, folder: Path) -> dict:
    """Return how long `make demo` (KIT_DEMO_STARTED) has taken: `wall_s` sums all its starts."""
    started = os.environ.get("KIT_DEMO_STARTED")
    if not started or (folder / "demo-finished").exists():
        return {}
    starts_s = {**report.get("demo_starts_s", {}), started: round(time.time() - float(started), 1)}
    return {"demo_starts_s": starts_s, "wall_s": round(sum(starts_s.values()), 1)}
