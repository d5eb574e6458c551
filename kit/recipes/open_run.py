"""Open a run: name it, check its settings, and fetch its copy from another disk (run_copy.py)."""

import dataclasses
import os
import re
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from kit.audio.codec import codec_config
from kit.audio.spectrogram import front_end_config
from kit.base import config, hardware
from kit.base import run as runs
from kit.base.config import build, load_preset, merge, shorten_preset
from kit.base.errors import DiskError, KitError, SettingError, show_plain_notes
from kit.base.files import MAX_NAME_BYTES, remove_litter, shorten_name, write_atomic
from kit.base.formatting import flat, nearest
from kit.base.run import Run, find_run, read_run_file
from kit.recipes import run_copy
from kit.settings import SECTIONS, GenerateConfig
from kit.training.ranks import ALONE, Ranks

SETTINGS_SHOWN = 6
CHECKED = {*SECTIONS, "codec", "front_end"}
# What the weights of a run depend on, by section; (): all of it.
FIXED = {
    **dict.fromkeys(("text", "codec", "front_end", "model", "finetune", "lora"), ()),
    "data": ("effective_batch",),
    "train": ("optimizer",),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActiveRun(Run):
    """A run's folder, preset and record, with the machine and what was chosen for it."""

    hw: hardware.Hardware
    threads: hardware.Choice  # of torch
    precision: hardware.Choice  # "fp32", "fp16" or "bf16"
    copy: run_copy.RunCopy | None = None  # of its folder, on another disk
    ranks: Ranks = ALONE  # the processes that share its work

    def record(self, **figures) -> dict:
        """As `Run.record`; returns only after everything new was copied to the other disk."""
        if self.copy:
            self.copy.fetch_record()
        report = super().record(**figures)
        if self.copy:
            self.copy.copy_all()
        return report

    def fetch_checkpoints(self) -> None:
        if self.copy:
            self.copy.run.fetch(lambda name: name.startswith("checkpoints/"))

    def hold_shared_lock(self, what: str) -> AbstractContextManager:
        """Lock out `what` on other machines that share the copy."""
        return self.copy.run.hold_shared_lock(what) if self.copy else nullcontext()

    def __str__(self) -> str:
        values = [f"{name} = {value}" for name, value in flat(self.settings)]
        more = len(values) - SETTINGS_SHOWN
        if more > 1:  # a run that starts from a base model has dozens
            values[SETTINGS_SHOWN:] = [f"and {more} values more ({runs.SETTINGS})"]
        return (
            f"run {self.name} in {self.folder}, preset {self.preset_name}, "
            + (f"goal {self.use}, " if self.use else "")
            + (f"set {', '.join(values)}, " if values else "")
            + f"{self.hw.name}, {self.precision.value}, threads: {self.threads.value}"
        )

    __repr__ = __str__


def activate(run: Run, copy: run_copy.RunCopy | None = None) -> ActiveRun:
    """Return `run`, its `copy`, and what suits this machine; sets torch's threads."""
    if copy:
        copy.codes.fetch(run_copy.code_files(run))
    hardware.set_cuda_defaults()
    hw = hardware.detect()
    threads, precision = hardware.use_threads(hw), hardware.choose_precision(hw)
    return ActiveRun(**vars(run), hw=hw, threads=threads, precision=precision, copy=copy)


def open_active_run(
    name: str, preset: str, use: str, settings: dict, data: str | None, language: str, create: bool
) -> ActiveRun:
    """Open or create a run, as `start` describes, on a machine that is prepared."""
    hardware.allow_expandable_segments()
    show_plain_notes()
    if data is not None and not name and "KIT_RUN" not in os.environ:
        name = name_for_data(data, language)
        last = runs.run_folder()
        is_new = not any((place / name).exists() for place in runs.places_of_runs())
        if is_new and not (last / "manifest.jsonl").exists():  # chosen in 00_setup, a moment ago
            preset = preset or os.environ.get("KIT_PRESET") or read_run_file(last / "preset")
            use = use or read_run_file(last / "use")
    mirror = run_copy.find_mirror()
    folder = runs.run_folder(name) if create else runs.require_run(name)
    remove_litter(folder)
    copy = run_copy.open_run_copy(folder, mirror) if mirror else None
    run_copy.unpack_clips(folder)
    run = find_run(preset, use, folder.name)
    check_saved_settings(run)
    config.require_sections(settings, Path("SETTINGS"))
    check_settings(settings, run.preset)  # before anything is written
    require_changeable(run, settings)
    run.begin()
    for place in runs.places_of_runs():
        with suppress(DiskError):
            write_atomic(place / runs.LAST_RUN, run.name)
    if settings:
        run = run.save_settings(settings)
    return activate(run, copy)


# Names of folders and tables that say nothing about the data: the folder above them does.
COMMON_NAMES = {"data", "dataset", "corpus", "clips", "wavs", "metadata", "train", "validated"}


def name_for_data(data: str, language: str) -> str:
    """Return the name of a run for `data`, which is as for `Preparation`, "record" or "upload"."""
    from kit.text.normalize import language_code  # rules that only new runs need

    code = language_code(language or "am")
    if data in ("record", "upload"):
        return "my-voice"
    if not data:  # the built-in corpus
        return "demo" if code == "am" else f"demo-{code}"
    name = data.removeprefix("hf://")
    if name == data:
        names = [part.split(".")[0] for part in reversed(Path(data).expanduser().resolve().parts)]
        common = {"", *COMMON_NAMES, *runs.KIT_FOLDERS}
        name = next((n for n in names if n.lower() not in common), "")
    name = re.sub(r"[^\w-]+", "-", name).strip("-_")[:60]
    return shorten_name(name, MAX_NAME_BYTES - 6) or "voice"  # a number may follow


def open_settings(name: str, preset: str, use: str, settings: dict, gpu: str = "") -> ActiveRun:
    """Return the run `name`, or without a name a preset alone, on this machine; writes nothing.

    With `gpu`, as `find_card` reads it, on that one, where nothing can run. The `settings` apply
    over both. The folder of a preset alone is bench/ beside the runs.
    """
    show_plain_notes()
    if gpu:
        from kit.tuning.cards import find_card  # only here: it loads what plans memory

    hw = find_card(gpu) if gpu else hardware.detect()
    if name:
        runs.require_run(name)
        run = find_run(preset, use, name)
        check_saved_settings(run)
    else:
        preset = preset or os.environ.get("KIT_PRESET")
        preset = preset or hardware.choose_preset(hw).value
        run = Run(
            name="",
            preset_name=shorten_preset(preset),
            preset=merge(load_preset(preset), runs.load_use(use)),
            folder=runs.runs_folder() / "bench",
            use=use,
        )
    check_settings(settings, run.preset)
    over = {"preset": merge(run.preset, settings), "settings": merge(run.settings, settings)}
    run = dataclasses.replace(run, **over)
    if not gpu:
        return activate(run)
    threads = hardware.Choice(value="1", reason="nothing runs")
    return ActiveRun(**vars(run), hw=hw, threads=threads, precision=hardware.choose_precision(hw))


def check_settings(sections: dict, preset: dict) -> None:
    """Raise KitError for an unknown setting (with the nearest known one) or a wrong value."""
    for section, values in sections.items():
        if section not in preset:
            raise KitError(f"There is no section `{section}`.{nearest(section, preset)}")
        try:
            if section in CHECKED:
                _checked_section(section, merge(preset[section], values))
            else:
                for key, value in values.items():
                    _check_plain(section, key, value, preset[section])
        except SettingError as error:  # name the section, as the user wrote it, not the class
            raise SettingError(section, error.rest, error.field) from error


def _checked_section(section: str, values: dict):
    """The settings of `section` as its class checks them; two have a `kind` that decides which."""
    kinds = {"codec": codec_config, "front_end": front_end_config}
    return kinds[section](values) if section in kinds else build(SECTIONS[section], values)


def require_changeable(run: Run, settings: dict) -> None:
    """Raise KitError if `settings` change what the weights of a trained run are made of."""
    if not (run.folder / "train.jsonl").exists():
        return
    changes = []
    for section in FIXED.keys() & settings.keys():
        now = section_for_run(run, section)
        before = vars(_checked_section(section, now))
        after = vars(_checked_section(section, merge(now, settings[section])))
        fields = FIXED[section] or before
        changes += [
            f"{section}.{name} is {before.get(name)!r}, not {value!r}"
            for name, value in after.items()
            if name in fields and value != before.get(name)
        ]
    if changes:
        free = next(n for n in runs.numbered(run.name) if not (run.folder.parent / n).exists())
        raise KitError(
            f"The run `{run.name}` was trained and keeps what its weights were made with: "
            f"{'; '.join(sorted(changes))}. Leave the setting out, or begin a new run: RUN = "
            f'"{free}" (--run {free}).'
        )


def check_saved_settings(run: Run) -> None:
    """Raise KitError for a setting of the run's file that this version of the kit does not have."""
    try:
        check_settings(run.settings, run.preset)
    except KitError as error:
        raise KitError(
            f"{run.folder / runs.SETTINGS}: {error} Correct it, or finish a run of an earlier "
            "version of the kit with that version."
        ) from error


def _check_plain(section: str, key: str, value, known: dict) -> None:
    if key not in known:
        raise KitError(f"{section} has no setting `{key}`.{nearest(key, known)}")
    numbers = (int, float)
    kinds = numbers if type(known[key]) in numbers else (type(known[key]),)
    if type(value) not in kinds:
        raise KitError(
            f"{section}.{key} must be like {known[key]!r}, got {value!r} ({type(value).__name__})."
        )


# --- what a run is made from ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSource:
    """The recordings and the text that a run's tokenizer, codec and voice are trained on."""

    data: str = ""  # a folder, a table, an archive or a hf:// name; "": the built-in corpus
    language: str = "am"
    text: str = ""  # a file of more text than the recordings'; "": theirs alone
    phonemes: str = ""  # a language by espeak-ng's name; "": letters
    tokenizer: str = ""  # a SentencePiece model to take as it is; "": one is trained
    eval_data: str = ""  # like `data`, held out as a whole; "": some of the recordings are

    def __str__(self) -> str:
        parts = [self.data or "the built-in corpus", f"language {self.language}"]
        more = {"pieces of": self.text, "phonemes of": self.phonemes, "tokenizer": self.tokenizer}
        more["evaluated on"] = self.eval_data
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
        from kit.text.normalize import language_code

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
