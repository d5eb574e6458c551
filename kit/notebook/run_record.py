"""One run, one folder, one record: where files lie, which preset is in force, `report.json`.

`Run.record` merges figures into `report.json` and redraws `report.html`. Knows no figure by name.
"""

import dataclasses
import json
import math
import os
import subprocess
from pathlib import Path

from kit.base.config import CONFIGS, ConfigError, merge
from kit.base.files import make_folder, write_atomic
from kit.base.hardware import detect, versions
from kit.base.lock import held
from kit.base.words import brief
from kit.notebook.demo_clock import demo_times
from kit.notebook.report_page import page

# What each notebook that others ask for is on the command line.
COMMANDS = {
    "01_data_prep": "prepare",
    "02_train": "train",
    "03_evaluate_ema": "evaluate",
    "04_inference": "speak",
}
SETTINGS = "settings.yaml"  # in a run's folder
RECORD_WAIT_S = 400.0  # longer than a record of a lost machine is waited for (lock.py's STALE_S)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    name: str
    preset_name: str
    preset: dict  # sections of plain values, with all that is laid over them
    folder: Path
    use: str = ""  # the overlay of configs/use that is laid over the preset; "": none
    settings: dict = dataclasses.field(default_factory=dict)  # sections a person set beside both

    def path(self, *parts: str) -> Path:
        """A path inside the run's folder, its parent made."""
        path = self.folder.joinpath(*parts)
        make_folder(path.parent)
        return path

    def section(self, name: str) -> dict:
        """The preset's plain values for one concern."""
        return self.preset.get(name, {})

    def begin(self) -> None:
        """Make the run's folder, with what the run keeps to for its life."""
        self.settle("preset", self.preset_name)
        if self.use:
            write_atomic(self.folder / "use", self.use)

    def settle(self, what: str, value: str) -> None:
        """Note `value` of `what` for the life of the run. ConfigError when it began with another.

        What a notebook left (codec, voice) belongs to the data it was made from.
        """
        self.require_settled(what, value)
        write_atomic(self.folder / what, value)

    def require_settled(self, what: str, value: str) -> None:
        """Raise ConfigError when the run began with another value of `what`."""
        begun = read_mark(self.folder / what) or value
        if begun != value:
            raise ConfigError(
                f"The run `{self.name}` was begun with the {what} `{begun}`, now `{value}` is "
                f"asked for. Choose another RUN (--run, or KIT_RUN), or delete {self.places()}."
            )

    def keep_settings(self, sections: dict) -> "Run":
        """The run with `sections` of plain values laid over its preset, now and whenever it opens.

        What was set before stays, unless it is set anew.
        """
        import yaml

        settings = merge(self.settings, sections)
        said = "# Laid over the preset of this run. Delete this file to go back to it.\n"
        plain = yaml.safe_dump(settings, allow_unicode=True, sort_keys=False)
        write_atomic(self.folder / SETTINGS, said + plain)
        return dataclasses.replace(self, preset=merge(self.preset, sections), settings=settings)

    def places(self) -> str:
        """Where this run lies, in words: two places where KIT_MIRROR keeps it as well."""
        kept_runs = os.environ.get("KIT_MIRROR")
        return f"{self.folder} and {Path(kept_runs) / self.name}" if kept_runs else str(self.folder)

    def index(self) -> Path:
        """The code cache's index file, as 01_data_prep recorded it."""
        return self.folder / self.found("data", "codes", "01_data_prep")

    def found(self, section: str, name: str, notebook: str):
        """A figure that `notebook`, a key of COMMANDS, recorded. Raises ConfigError without it."""
        value = self.figure(section, name)
        if value is None:
            raise ConfigError(
                f"The run `{self.name}` has no `{section}.{name}` yet: run {notebook} first, or "
                f"python -m kit {COMMANDS[notebook]} --run {self.name}."
            )
        return value

    def figure(self, section: str, name: str):
        """A figure that was recorded; None where it was not."""
        figures = self.report().get(section)
        return figures.get(name) if isinstance(figures, dict) else None

    def report(self) -> dict:
        """All that was recorded. Raises ConfigError when the file is damaged."""
        path = self.folder / "report.json"
        try:
            report = json.loads(path.read_bytes()) if path.is_file() else {}
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is damaged ({brief(error)}): {self._again(path)}") from error
        if not isinstance(report, dict):
            raise ConfigError(f"{path} holds no figures by name: {self._again(path)}")
        return report

    def _again(self, path: Path) -> str:
        return (
            f"move or delete it and run the notebooks of `{self.name}` again from 00_setup; "
            "finished work is not done again."
        )

    def record(self, **figures) -> dict:
        """Merge `figures` (nested dicts allowed) into report.json and redraw report.html.

        Processes that record at the same time wait for each other, so none loses a section.
        """
        about = {
            "preset": self.preset_name,
            "versions": versions(),
            "device": detect().name,
            "git": git_state(),
        }
        if self.settings:
            about["settings"] = self.settings
        with held(self.folder / "report.lock", "recording figures", RECORD_WAIT_S):
            report = merge(self.report(), finite(figures))
            report.update(about)
            report.update(demo_times(report, self.folder))
            plain = json.dumps(report, indent=1, ensure_ascii=False)
            write_atomic(self.folder / "report.json", plain)
            write_atomic(self.folder / "report.html", page(report, self.folder))
        return report


def read_mark(mark: Path) -> str:
    """The one line of a small file of the kit's own; "" where there is none.

    Raises ConfigError when it is damaged.
    """
    try:
        return mark.read_text(encoding="utf-8") if mark.is_file() else ""
    except (UnicodeDecodeError, OSError) as error:
        raise ConfigError(
            f"{mark} is damaged ({brief(error)}): it holds one line of text, the {mark.name} this "
            "run was begun with. Write that there, or delete the file."
        ) from error


def finite(figures):
    """`figures` with None for every number that is not finite: JSON has no word for those."""
    if isinstance(figures, dict):
        return {key: finite(value) for key, value in figures.items()}
    if isinstance(figures, list | tuple):
        return [finite(value) for value in figures]
    return None if isinstance(figures, float) and not math.isfinite(figures) else figures


def git_state() -> str:
    """The commit this checkout stands at, with "+" when files differ from it; "" outside git."""
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        return f"{commit}+" if _git("status", "--porcelain") else commit
    except FileNotFoundError:
        return ""


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=CONFIGS.parent, capture_output=True)
    return done.stdout.decode("utf-8", errors="replace").strip()
