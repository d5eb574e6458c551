"""One run, one folder, one record: where files lie, which preset is in force, `report.json`.

Notebooks share nothing but `runs/<name>/`. `open_run` finds it from the environment (KIT_RUN,
KIT_PRESET, KIT_RUNS); `Run.record` merges figures into `report.json` and redraws `report.html`.
Knows no figure by name.
"""

import base64
import dataclasses
import html
import json
import math
import os
import subprocess
import time
from pathlib import Path

from kit.base.config import CONFIGS, ConfigError, load_preset, merge, read_yaml
from kit.base.files import make_folder, require_folder_name, write_atomic
from kit.base.hardware import choose_preset, detect, versions
from kit.base.lock import held
from kit.base.words import brief
from kit.notebook.tables import table_html
from kit.tuning.recommend import overlay

OWN_FOLDERS = ("codes", "bench")  # beside the runs: the code cache, benchmarks
# What each notebook that others ask for is on the command line.
COMMANDS = {"01_data_prep": "prepare", "02_train": "train", "03_evaluate_ema": "evaluate"}
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

    def settle(self, what: str, value: str) -> None:
        """Note `value` of `what` for the life of the run. ConfigError when it began with another.

        What a notebook left (codec, voice) belongs to the data it was made from.
        """
        mark = self.folder / what
        begun = read_mark(mark) or value
        if begun != value:
            raise ConfigError(
                f"The run `{self.name}` was begun with the {what} `{begun}`, now `{value}` is "
                f"asked for. Set KIT_RUN to a new name, or delete {self.places()}."
            )
        write_atomic(mark, value)

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
        figures = self.report().get(section)
        value = figures.get(name) if isinstance(figures, dict) else None
        if value is None:
            raise ConfigError(
                f"The run `{self.name}` has no `{section}.{name}` yet: run {notebook} first, or "
                f"python -m kit {COMMANDS[notebook]} --run {self.name}."
            )
        return value

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
        about = {"preset": self.preset_name, "versions": versions(), "device": detect().name}
        about["git"] = git_state()
        if self.settings:
            about["settings"] = self.settings
        with held(self.folder / "report.lock", "recording figures", RECORD_WAIT_S):
            report = merge(self.report(), finite(figures)) | about
            started = os.environ.get("KIT_DEMO_STARTED")
            if started and not (self.folder / "demo-finished").exists():  # a re-run finds work done
                report |= demo_times(report.get("demo_starts_s", {}), started, self.folder)
            plain = json.dumps(report, indent=1, ensure_ascii=False)
            write_atomic(self.folder / "report.json", plain)
            write_atomic(self.folder / "report.html", page(report, self.folder))
        return report


def demo_times(starts_s: dict[str, float], started: str, folder: Path) -> dict:
    """`wall_s` of a demo that may have been interrupted: the sum of what its starts took so far.

    `starts_s` has the seconds of each start, by its unix time; `started` is the one that runs. An
    earlier one went on until the last file in `folder` was written before this one began.
    """
    starts_s = dict(starts_s)
    now_s = float(started)
    if starts_s and started not in starts_s:
        written = (path.stat().st_mtime for path in folder.rglob("*") if path.is_file())
        last, last_s = [*starts_s.items()][-1]
        until_s = max((s for s in written if s < now_s), default=0.0)
        starts_s[last] = max(last_s, round(until_s - float(last), 1))
    starts_s[started] = round(time.time() - now_s, 1)
    times = {"demo_starts_s": starts_s, "wall_s": round(sum(starts_s.values()), 1)}
    return times | {"interruptions": len(starts_s) - 1}


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


def open_run(preset: str = "", use: str = "", name: str = "") -> Run:
    """The run named by KIT_RUN (default "demo") with `preset`, or KIT_PRESET.

    The name is that of one folder, and none of the kit's own (OWN_FOLDERS), else ConfigError.
    Without either preset, a run goes on with the preset it was begun with, and a new one takes what
    fits the machine. Raises ConfigError when the two disagree: a run has one preset for life.
    `use` names an overlay of configs/use to lay over it, which the run's later notebooks keep. The
    positions that 01_data_prep gave the model for its corpus are laid over it, too, and last what a
    person set for this run (`Run.keep_settings`).
    """
    folder = run_folder(name)
    begun = read_mark(folder / "preset").strip()
    asked = preset or os.environ.get("KIT_PRESET")
    preset = asked or begun or choose_preset(detect()).value
    run = Run(name=folder.name, preset_name=preset, preset=load_preset(preset), folder=folder)
    run.settle("preset", preset)
    mark = run.folder / "use"
    if use:
        write_atomic(mark, use)
    kept = read_mark(mark)
    laid = merge(run.preset, overlay(kept).sections) if kept else run.preset
    data = run.report().get("data")
    positions = data.get("positions", {}) if isinstance(data, dict) else {}
    settings = read_settings(run.folder / SETTINGS)
    laid = merge(merge(laid, {"model": positions}), settings)
    return dataclasses.replace(run, preset=laid, use=kept, settings=settings)


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


def git_state() -> str:
    """The commit this checkout stands at, with "+" when files differ from it; "" outside git."""
    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except FileNotFoundError:
        return ""


def git(*words: str) -> str:
    """What git prints of this checkout."""
    called = ["git", *words]
    done = subprocess.run(called, cwd=CONFIGS.parent, capture_output=True)
    return done.stdout.decode("utf-8", errors="replace").strip()


def page(report: dict, folder: Path) -> str:
    """The record as one self-contained page: figures as tables, samples as audio players."""
    parts = [f"<h1>{html.escape(str(folder.name))}</h1>", table_html(report)]
    players = [player(sample, folder) for sample in report.get("samples", [])]
    parts.append("<h2>Samples</h2>" + "".join(players) if any(players) else "")
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem}"
        "td{padding:.15rem .8rem;border-bottom:1px solid #ddd;vertical-align:top}"
        "audio{display:block;width:100%;margin:.2rem 0 1rem}"
    )
    head = f"<!doctype html><meta charset=utf-8><title>Run record</title><style>{style}</style>"
    return head + "".join(parts)


def player(sample: dict, folder: Path) -> str:
    """A sample as sound to play; "" where its file is gone, words where it may not be shown.

    Whoever is sent the page would get the file: none from outside the run's folder goes into it.
    """
    path = (folder / sample["wav"]).resolve()
    if not path.is_relative_to(folder.resolve()):
        told = f"{sample['wav']} is left out: it does not lie in the run's folder."
        return f"<p>{html.escape(told)}</p>"
    if not path.is_file():
        return ""
    data = base64.b64encode(path.read_bytes()).decode()
    text = html.escape(f"{sample['text']} ({sample['split']}, {Path(sample['wav']).stem})")
    return f"<p>{text}<audio controls src='data:audio/wav;base64,{data}'></audio></p>"
